"""Runs one peer: ``Service`` makes a ``Peer`` for one stage after the other; ``Peer.__init__`` lists what a peer
consists of.

- ``peer``: the loop over steps. ``arrival``: how a peer comes to where the run is: as a newcomer, from a checkpoint,
  after it fell behind, or from another history. ``ending``: the end of the run.
- ``incoming``: gives each frame that this peer takes to its actor; frames that come too early wait.
- ``parts``: when this peer writes its part of a checkpoint. ``reporting``: what it tells of the steps it
  applied, and who stands in for a planned peer that is gone.
- ``peer_host``: what a peer asks of its process, and tells it.

CONTRIBUTING ("How a step goes") tells which files run when a peer dies while its stage averages.

Processes and worlds above may use ``Service``, ``Peer`` and ``PeerHost``. Only this room changes a ``Lifecycle``.
"""
