"""Writes checkpoints of one step record while training goes on.

One replica of each stage, the writer, copies the state and announces the stage's part. A writer that shares the run's
place writes the part there. The coordinator fetches the remaining parts and publishes the checkpoint. If not all peers
share the place, two peers also keep each part on local disks (``Parts``): of the newest checkpoint, and of the
checkpoint in progress. ``checkpointing`` is all of this; ``store`` is the place.

Rooms above hold ``Checkpointing``. Trouble (a full disk, a hanging disk, a lost part) ends one checkpoint, never the
training. Hashing and disk work may take seconds and run in separate threads (``Tasks.aside``,
``CheckpointStore.disk``).
"""
