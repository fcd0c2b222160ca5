"""This room writes checkpoints of one step record while training goes on.

One replica of each stage, its writer, copies the state and announces its part. A peer that shares the run's place
writes its part there. The coordinator fetches the other parts and publishes the checkpoint. If not everyone shares the
place, two peers also keep each part on their own disks (``PartReplicas``): the newest, and the one in progress.
``checkpointing`` is all of this; ``store`` is the place.

Rooms above hold ``Checkpointing``. Trouble (a full disk, a hanging disk, a lost part) ends one checkpoint, never the
training. Hashing and disk work may take seconds and run in threads of their own (``Tasks.aside``,
``CheckpointStore.disk``).
"""
