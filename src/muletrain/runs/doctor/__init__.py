"""``muletrain doctor``: checks whether a machine can train."""
