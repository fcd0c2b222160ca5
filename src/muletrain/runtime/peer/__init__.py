"""Runs one peer: ``Service`` makes a ``Peer`` for one stage after the other; ``Peer.__init__`` lists a peer's parts.

- ``peer``: the loop over steps. ``arrival``: a peer's way to the run's step: as a newcomer, from a checkpoint, after
  falling behind, or from another history. ``ending``: the end of the run.
- ``incoming``: passes each accepted frame to its actor; early frames wait.
- ``reporting``: reports applied steps to the peer's process (``PeerHost``) and to the coordinator, and stand-ins for
  absent planned peers.

CONTRIBUTING ("How a step goes") names the files that run when a peer dies while its stage averages.

Processes and worlds above may use ``Service``, ``Peer`` and ``PeerHost``. Only this room changes a ``Lifecycle``.
"""
