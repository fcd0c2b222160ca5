"""Configuration files: their sections, checks, and errors that name file and line."""
