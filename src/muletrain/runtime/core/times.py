"""Times that all rooms share [s]: the limits of what cannot be measured, and how often peers look and try again. Waits
for other peers' work follow from measured times instead (``policy.deadline``)."""

from muletrain.policy.deadline import backoff_s

LAG_S = 0.25
"""Seconds by which a healthy machine or link may lag: a busy event loop, garbage collection, a message on its way."""
PAUSE_S, PAUSE_MAX_S = 0.1, 10.0
"""Seconds between two tries, at first and at most; doubles."""
LOOK_S = 0.5
"""Seconds between two looks at this peer's own state, which cost no message."""
AGAIN_S = 5.0
"""Seconds before the same peer is told or asked the same again, and for a peer that answers to take part."""
GONE_S = 60.0
"""Seconds without a sign, an answer or progress of a peer, after which the peer is no longer waited for, and nothing is
kept for the peer."""
PATIENCE_S = 300.0
"""Seconds without progress of anything awaited, after which a wait is hopeless, a store or a device hangs, and another
peer's excuse counts no longer."""
ENDLESS = 12
"""Multiple of the patience without any awaited result, after which a wait is hopeless even if other peers report
progress."""


def pause_s(tries: int, longest_s: float = PAUSE_MAX_S) -> float:
    """Returns the pause after ``tries`` earlier tries."""
    return backoff_s(tries, PAUSE_S, longest_s)
