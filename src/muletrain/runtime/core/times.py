"""Times that waits of several rooms share [s]. Waits for other peers' work follow from measured times instead
(``policy.deadline``)."""

PAUSE_S, PAUSE_MAX_S = 0.2, 10.0
"""Seconds between two tries, at first and at most; doubles."""
AGAIN_S = 5.0
"""Seconds before the same peer is told or asked the same again."""
CALL_S = 60.0
"""Seconds for an answer that takes work, such as hashing or encoding: a bound for a dead peer, not for a large state."""
STALLED_S = 60.0
"""Seconds without progress, after which a live peer, or one side of a partition, is no longer waited for."""
KEPT_S = 60.0
"""Seconds for which data is kept for a peer after the peer's last sign."""
LONGEST_S = 600.0
"""Seconds without any part of a transfer, a checkpoint or a measurement, after which it has failed."""
