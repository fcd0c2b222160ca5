"""A stage's server gives parts of microbatches to clients (strategy ``hub``; HYBRID sec. 3.2).

- ``server``: ``PooledCompute`` is the ``Compute`` of a server. It cuts, gives out and assembles.
- ``kept``: what a server keeps to compute any part again, and in whose accumulator each part's gradient is.
- ``handover``: a client's accumulator comes to its server, and new weights to the client.
- ``client``: a client's life: it enlists, takes weights and parts, and hands over what it accumulated.
- ``messages``: the frames and calls between them.

Clients are in no roster, seal or record. Rooms above see a ``Compute`` alone. ``policy.pool`` decides who computes what.
"""
