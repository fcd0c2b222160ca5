"""Actions do the work of commands."""
