"""Which peers of a stage have no room for another microbatch, as one sender sees it.

A microbatch that is refused has crossed the network in vain. So a full peer gets one for each that it answers, as
acknowledgements clock what TCP sends, or one after a pause, which doubles with each refusal until an answer comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.policy.deadline import backoff_s

if TYPE_CHECKING:
    from collections.abc import Collection

FIRST, LONGEST = 0.5, 2.0
"""The pause, in times that the peer takes for a microbatch. With longer ones work goes to slower peers meanwhile."""
UNMEASURED_S = 0.5, 30.0
"""The first pause and the longest, before that is known [s]."""
FULL_STEPS = 4
"""Steps in which a peer that was full for long is asked last, the first time; doubles until it takes something."""


@dataclass
class _Full:
    open_s: float
    """When it is sent another one."""
    pause_s: float
    refused: int = 0
    """Times, since its last answer."""


class Rooms:
    """Learns from each refusal and answer."""

    def __init__(self) -> None:
        self._full: dict[str, _Full] = {}
        self._never: dict[str, tuple[int, int]] = {}
        """Who said for long that it is full, while others were there: from which step on it is asked last, and in how many."""

    def forget(self) -> None:
        """The senders and their work have changed: all peers may have room."""
        self._full = {}

    def refused(self, peer: str, now_s: float, each_s: float | None) -> None:
        """``peer`` said that it is full. ``each_s``: what it takes for a microbatch, if that is known."""
        full = self._full.setdefault(peer, _Full(now_s, 0.0))
        first_s, longest_s = UNMEASURED_S if each_s is None else (FIRST * each_s, LONGEST * each_s)
        full.pause_s = backoff_s(full.refused, first_s, longest_s)
        full.open_s = now_s + full.pause_s
        full.refused += 1

    def sent(self, peer: str, now_s: float) -> None:
        """``peer`` is sent a microbatch: if it was full, the next one waits."""
        if (full := self._full.get(peer)) is not None:
            full.open_s = now_s + full.pause_s

    def answered(self, peer: str, now_s: float, *, took: bool = True) -> None:
        """``peer`` is done with a microbatch of ours; it ``took`` that, or it failed."""
        if (full := self._full.get(peer)) is not None:
            full.open_s, full.refused = now_s, 0
        if took:
            self._never.pop(peer, None)

    def full(self, now_s: float) -> set[str]:
        """Returns the peers to which nothing is sent now."""
        return {peer for peer, full in self._full.items() if full.open_s > now_s}

    def wait_s(self, peers: Collection[str], now_s: float) -> float:
        """Returns the seconds until one of these full ``peers`` is sent a microbatch, unless it answers before."""
        return min(self._full[peer].open_s for peer in peers) - now_s

    def asked_last(self, step: int) -> set[str]:
        """Returns the peers that are asked last in ``step``."""
        return {peer for peer, (since, steps) in self._never.items() if since <= step < since + steps}

    def ask_last(self, peers: Collection[str], step: int) -> None:
        """These ``peers`` were full for long. Ask them last, each time for twice as many steps: to find out again costs
        minutes where nothing was measured yet."""
        for peer in {*peers} - self.asked_last(step):
            self._never[peer] = step, 2 * self._never.get(peer, (step, FULL_STEPS // 2))[1]
