"""Checkpoints of one step record: who writes which part and when it is complete (``checkpoints``), and where to (``store``).

Nothing in ``store`` waits for anyone but the disk.
"""
