"""A stage's server gives parts of microbatches to clients (strategy ``hub``; HYBRID sec. 3.2).

- ``server``: ``PooledCompute`` is the ``Compute`` of a server. Its ``desk`` cuts passes, gives out parts, and takes back
  results.
- ``parts``: from what each part is computed, and where its gradient is. ``accumulators``: brings these to the server.
- ``clients``: who the clients of a server are, what they may send, and the weights that they get.
- ``servers``: the servers of a stage, as one client knows them.
- ``client``: a client's life: it enlists, takes weights and parts, and hands over what it accumulated.
- ``work``: what a client computes, and its accumulator. ``weights``: how it takes weights from all servers.
- ``tally``: what a server's clients did, for people.
- ``messages``: the frames and calls between them.

Clients are in no roster, seal or record. Rooms above see a ``Compute`` alone. ``policy.pool`` decides who computes what.
"""
