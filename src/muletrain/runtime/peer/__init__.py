"""Runs one peer: ``Service`` makes a ``Peer`` for one stage after the other; ``Peer.__init__`` lists what a peer
consists of.

- ``peer``: the loop over steps. ``arrival``: how a peer comes to where the run is: as a newcomer, from a checkpoint,
  after it fell behind, or from another history. ``ending``: the end of the run.
- ``dispatch``: gives each frame to its actor; frames that come too early wait in ``early_frames``.
- ``parts``: when this peer writes its part of a checkpoint. ``reporting``: what it tells of the steps it applied.
- ``peer_host``: what a peer asks of its process, and tells it.

When a peer dies while its stage averages: ``members/silence.py`` or a lost stream (``dispatch``) leads to a probe,
``members/detector.py`` marks it down and wakes the waits; ``step/reduction.py`` seals again without it, or takes the
gradient from a replica that holds it (``step/rounds.py``, ``step/exchange.py``); ``step/reruns.py`` has trainers run
what only the dead peer had. If it was the stage's last peer, ``recovery/rollback.py`` follows.

Processes and worlds above may use ``Service``, ``Peer`` and ``PeerHost``. Only this room changes a ``Lifecycle``.
"""
