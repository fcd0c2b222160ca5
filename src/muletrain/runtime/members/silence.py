"""Watches peers that owe answers: a silent peer is first asked, then suspected, and marked down only much later.

The three deadlines come from measured times. A peer that owes answers gives an answer every so often. A peer that is
silent for longer gets a question, which costs nothing. If that answer takes longer than usual, the peer is *suspected*:
another peer also computes the owed microbatches, and the suspect gets no new work. Suspicion changes routing alone, and
may be wrong. The peer is marked down after missing the question's own, patient deadline (``FailureDetector.probe``):
from then on its accumulated microbatches are run again.

A peer whose event loop answers may have a device that hangs. The peer reports this in its answers
(``members.watchdog``), is then suspected, too, and marked down on refusing to answer. A long queue or a slow link is no
reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from muletrain.policy.deadline import Usual

if TYPE_CHECKING:
    from muletrain.network.base import PeerId
    from muletrain.runtime.core.messages import Request
    from muletrain.runtime.members.context import Context

FLOOR_S = 0.3
"""Seconds of silence, at least, before a peer that owes answers is asked. Of ``LAG_S`` seconds, three times as many
microbatches were computed twice (``tests/test_trainers.py``)."""
LOOK_S, TICK_S = 1.0, 1e-3
"""Longest pause between two checks (so that new measurements count), and shortest pause (clocks are not exact) [s]."""


@dataclass(slots=True)
class _Debtor:
    """A peer that owes answers. ``attempt``: questions to the peer since it was last ``heard``."""

    heard: float
    asked: float = -math.inf
    attempt: int = 0
    asking: bool = False


class Creditor(Protocol):
    """Sends requests, and waits for the answers."""

    def owed(self, peer: PeerId) -> Request | None:
        """The oldest request that ``peer`` has not answered, if any."""
        ...


class Silence:
    """Listens to the peers of one stage that owe us answers. One task serves all peers, because answers are many, and
    silences rare."""

    def __init__(self, ctx: Context, stage: int, creditor: Creditor) -> None:
        self._ctx, self._stage, self._creditor = ctx, stage, creditor
        self._usual = Usual(unmeasured_s=10.0, floor_s=FLOOR_S, times=2.0)
        """Seconds between two answers of a peer that owes us some. To ask once too often is better than to wait."""
        self._debtors: dict[PeerId, _Debtor] = {}
        self._listening = False

    def expect(self, peer: PeerId) -> None:
        """``peer`` is about to owe us an answer."""
        if self._creditor.owed(peer) is None:
            self._debtors[peer] = _Debtor(self._ctx.clock.now())
        if not self._listening:
            self._listening = True
            self._ctx.spawn(self._listen(), f"listen to stage {self._stage}")

    def heard(self, peer: PeerId) -> None:
        """``peer`` answered."""
        now, debtor = self._ctx.clock.now(), self._debtors[peer]
        self._usual.measured(now - debtor.heard)
        debtor.heard, debtor.attempt = now, 0
        self._ctx.detector.clear(peer)

    async def _listen(self) -> None:
        """Check while any peer owes us answers. The deadline of a request, which may wait in a queue, would reveal a
        frozen peer much later. Ends after ``microbatch/pending.answer_of`` of every request."""
        try:
            while self._debtors:
                await self._ctx.clock.sleep(self._ask_the_late())
        finally:
            self._listening = False

    def _ask_the_late(self) -> float:
        """Ask the peers that are due. Returns the seconds until the next peer is due; a peer that begins to owe an
        answer later is not due before that."""
        now, wait_s = self._ctx.clock.now(), min(LOOK_S, self._usual.seconds())
        for peer, debtor in list(self._debtors.items()):
            request = self._creditor.owed(peer)
            if request is None:
                del self._debtors[peer]
            elif not debtor.asking:
                due = max(debtor.asked, debtor.heard) + self._usual.seconds(debtor.attempt)
                if due > now:
                    wait_s = min(wait_s, due - now)
                    continue
                debtor.asked, debtor.attempt = now, debtor.attempt + 1
                # a stage's last peer is not given up for being slow
                if self._ctx.roster.stage(self._stage) != (peer,):
                    debtor.asking = True
                    self._ctx.spawn(self._ask(peer, debtor, request), f"listen to {peer[-6:]}")
        return max(wait_s, TICK_S)

    async def _ask(self, peer: PeerId, debtor: _Debtor, request: Request) -> None:
        if await self._ctx.detector.probe(peer, request.lineage, request.step, brief=True) is None:
            self._ctx.detector.give_up(peer, "it is silent, and answers no probe")
        debtor.asking = False
