"""A stage's server gives parts of microbatches to clients (strategy ``hub``; HYBRID sec. 3.2).

- ``server``: ``PooledCompute`` is the ``Compute`` of a server. The ``desk`` cuts passes, gives out parts, and takes
  back results.
- ``parts``: the inputs of each part, and the place of its gradient. ``accumulators``: brings gradients to the server.
- ``clients``: the clients of a server: membership, permitted messages, what they have, and weights.
- ``servers``: the servers of a stage, as known to one client.
- ``client``: a client's life: the client enlists, takes weights and parts, and hands over its accumulator; and moves to
  the stage that needs it most.
- ``work``: a client's computation, and its accumulator. ``weights``: the copy that servers give, and that a client takes from all.
- ``messages``: the frames and calls between servers and clients.

Clients are in no roster, seal or record. Rooms above see a ``Compute`` alone. ``policy.pool`` distributes the work.
"""
