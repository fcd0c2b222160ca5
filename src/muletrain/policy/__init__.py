"""A running peer decides with pure functions and small state machines: no torch, no sockets, no clock.

- Routing: ``wiring`` (which allowed peer gets the next microbatch, and which trainer builds the next one), ``trips``
  (response times of a stage's peers), ``overdue`` (peers that come last), ``congestion`` (bytes under way to one
  receiver).
- Agreeing on a step: ``cover`` (which accumulators count), ``views`` (which replicas reduce together), ``shards``,
  ``outliers``.
- Membership: ``assignment`` (which peer serves which stage), ``rebalance`` (which peers move).
- Recovery: ``checkpoints`` (target of a rollback, keepers of copies of parts), ``fork_choice`` (which history stays).
- Hub: ``pool`` (which worker computes which ``passes`` of which sequences).
- Time: ``deadline``, ``recent`` (tables by peer that stay small; recent costs of each peer).
- ``chaos``: the language of injected faults.
"""
