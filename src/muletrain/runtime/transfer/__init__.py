"""This room moves large copies between peers: states, parts of checkpoints, past gradients and the run's tokens.

There is one way for all of them (``blocks``): a manifest names a copy's blocks by their hashes, ``Downloader`` asks
several donors at once and verifies every block, and arrived blocks are kept between attempts (``Download``).
``donor.Snapshots`` serves all copies and decides who gets which; ``donor.Receiver`` finds the copy of a state that most
donors offer. ``tokens`` shares the run's tokens with peers that lack the data.

Rooms above hold ``Snapshots``, ``Receiver``, ``Downloader`` and ``Sharing``. A copy that is offered never changes.
"""
