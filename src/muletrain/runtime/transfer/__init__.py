"""This room moves large copies between peers: states, parts of checkpoints, past gradients and the run's tokens.

All copies take the same way (``blocks``): a manifest names a copy's blocks by hash, ``Downloader`` asks several donors
at once and verifies every block, and arrived blocks are kept between attempts (``Download``). ``donor.Snapshots``
serves all copies and decides who gets each copy; ``donor.Receiver`` finds the copy of a state that most donors offer.
``tokens`` shares the run's tokens with peers that lack the data.

Rooms above hold ``Snapshots``, ``Receiver``, ``Downloader`` and ``Sharing``. An offered copy never changes.
"""
