"""A running peer decides with pure functions and small state machines: no torch, no sockets, no clock.

- Routing: ``wiring`` (which of the peers that the strategy allows gets the next microbatch, and which
  trainer builds it), ``trips`` (how long its peers take to answer), ``congestion`` (how much is on its way to one receiver).
- Agreeing on a step: ``cover`` (which accumulators count), ``views`` (which replicas reduce together), ``shards``,
  ``outliers``.
- Membership: ``assignment`` (who serves which stage), ``rebalance`` (who moves).
- Recovery: ``checkpoints`` (where a rollback goes, who keeps copies of parts), ``fork_choice`` (which history stays).
- Hub: ``pool`` (which worker computes which ``passes`` of which sequences).
- Time: ``deadline``, ``recent`` (tables by peer that stay small; what each peer cost lately).
- ``chaos``: the language of injected faults.
"""
