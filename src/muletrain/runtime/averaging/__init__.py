"""This room averages: the replicas of a stage reduce their accumulators to one mean gradient, in a round.

``rounds`` says what a round is, and watches its members. ``averager`` reduces it, shard by shard. ``mean_gradient`` is
what comes out: it is made ready for sending, and taken from a holder by a peer that was no member.

Rooms above hold an ``Averager`` for each step, give it arriving chunks, and call ``reduce``. A ``MeanGradient`` never
changes.
"""
