"""Everything that people read: the live console, tables, pictures, the final report."""
