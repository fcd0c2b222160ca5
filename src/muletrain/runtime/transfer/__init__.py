"""This room decides which large copies go from peer to peer, over the transport of ``core.blocks``.

``donor.Snapshots`` makes copies of states and decides who gets each copy; ``donor.Receiver`` finds the copy of a state
that most donors offer. ``tokens`` shares the run's tokens with peers that lack the data, and ``base`` the weights
beside an adapter, in files.

Rooms above hold ``Snapshots``, ``Receiver`` and ``Sharing``. An offered copy never changes.
"""
