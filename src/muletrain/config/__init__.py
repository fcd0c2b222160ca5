"""Configuration files: sections, checks, and errors that name file and line."""
