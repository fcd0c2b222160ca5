"""When a stage lost all its peers (``rollback``: step back to a checkpoint, who adopts it), and when two histories meet
(``forks``: which one stays, and how its peers' state is taken).
"""
