"""This room averages: the replicas of a stage reduce their accumulators to one mean gradient, in a round.

``rounds`` defines a round and watches its members. ``averager`` reduces a round, shard by shard. ``mean_gradient`` is
the result: prepared for sending, or taken from a holder by a peer that was not a member.

Rooms above create an ``Averager`` for each step, pass arriving chunks to ``on_chunk``, and call ``reduce``. A
``MeanGradient`` never changes.
"""
