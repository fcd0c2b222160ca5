"""Checkpoints of one step record, written while training goes on (DESIGN "Checkpoints").

One replica of each stage, its writer, copies the state and tells everyone what its part is (``own_part``). A peer that
shares the run's place writes its part there itself; the coordinator fetches the others' parts, and makes the checkpoint
complete (``coordinator``). Where not everyone shares the place, two peers of other stages keep each part, too, on their
own disks (``part_replicas``): the newest, and the one in progress. ``roles`` says who coordinates, writes and keeps;
``part_exchange`` gives and takes parts over the network; ``progress`` knows which checkpoints are open and how others
ended; ``store`` is the place itself; ``actors`` builds all of them for one peer.

Trouble (a full disk, one that hangs, a lost part) ends that checkpoint, never the training, and every checkpoint ends
in the end. Hashing and the disk may take seconds: each has a thread of its own (``Tasks.aside``,
``CheckpointStore.disk``).
"""
