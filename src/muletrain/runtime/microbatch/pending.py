"""A request in flight, and its answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from muletrain.errors import DeadlineExceeded, MuletrainError, PeerUnreachable
from muletrain.runtime.core.waiting import unless_done

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.network.base import PeerId
    from muletrain.policy.trips import Trips
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.microbatch.messages import Attempt, Backward, Busy, Done, Lost
    from muletrain.wire.codec import Encoded


PROBED = 5
"""Most doublings of a probe's deadline: a peer may be probed for hours before its answer is ready."""


class Why(Enum):
    """Why no answer comes from a peer."""

    DOWN = "the peer is not to be reached, or misses every deadline"
    GONE = "the peer lives, but does not have the request any more"
    UNFINITE = "the peer found that the microbatch does not stay finite"
    FULL = "the peer has no room now"
    AT_IT = "the peer is already at the microbatch"
    OVER = "the step of the request has ended"


class Declined(NamedTuple):
    """No answer comes from the peer that was asked."""

    why: Why
    reason: str = ""


@dataclass
class Answer:
    """The answer to a request: the loss [nats/token] and, on request, d loss / d output as sent. ``unfinite``: another
    peer had found that the microbatch does not stay finite."""

    peer: PeerId
    loss: float
    gradient: Encoded | None
    unfinite: bool
    took_s: float


Reply = tuple["Backward | Done | Busy | Lost", "list[Encoded]"] | Answer | Declined


@dataclass
class Pending:
    """One peer owes the answer to one request."""

    peer: PeerId
    request: Attempt
    tensors: list[Encoded]
    tried: frozenset[PeerId]
    """Peers that compute no copy: ``peer`` has the request, and the rest have failed."""
    gradient: bool
    unfinite: bool
    reply: asyncio.Future[Reply] = field(default_factory=asyncio.Future)
    """The peer's own answer, or the answer of another peer that computed a copy meanwhile."""
    broke: asyncio.Future[None] = field(default_factory=asyncio.Future)
    """Done once a stream with the peer has ended, which may have carried the request or the answer."""
    copy: asyncio.Task[Answer] | None = None
    """The copy's answer, once the peer is suspected (``Silence``), or overdue."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the gradient to come, equal to the shape of the sent tensor; None: no gradient comes."""
        return tuple(self.tensors[0].shape) if self.gradient else None

    def copied_by(self, copy: asyncio.Task[Answer]) -> None:
        """Take the answer of ``copy``, if ``copy`` is first."""
        self.copy = copy
        copy.add_done_callback(self._copied)

    def _copied(self, copy: asyncio.Task[Answer]) -> None:
        if not (copy.cancelled() or copy.exception() or self.reply.done()):
            self.reply.set_result(copy.result())


async def answer_of(
    pending: Pending, ctx: Context, trips: Trips, is_overdue: Callable[[Pending, float], bool], what: str
) -> Reply:
    """Wait while the peer works on the request, or its answer is on the way. Ask the peer when a deadline is missed;
    when a stream with the peer breaks, at once, and again when everything sent since should have come.
    ``is_overdue`` decides, by the seconds so far, whether to give up. Raises PeerUnreachable and
    DeadlineExceeded. Ends after ``microbatch/stage_server._compute_forward`` and
    ``microbatch/stage_server._encode_gradient`` at this stage and later ones, or earlier with ``is_overdue``."""
    peer, request, begin_s, attempt, again = pending.peer, pending.request, ctx.clock.now(), 0, False
    pending.broke = asyncio.Future()
    while True:
        wait_s = ctx.detector.deadline.seconds() + ctx.net.queued_s(peer) if again else trips.deadline_s(attempt)
        why: MuletrainError = PeerUnreachable("a stream broke, and it does not answer", what)
        try:
            either: set[asyncio.Future[Any]] = {pending.reply, pending.broke}
            waiting = asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            await ctx.clock.deadline(waiting, wait_s, what)
        except DeadlineExceeded as e:
            why = e
        if pending.reply.done():
            return pending.reply.result()
        if broke := pending.broke.done():
            pending.broke = asyncio.Future()
        probe = ctx.detector.probe(peer, request.lineage, request.step, min(attempt, PROBED))
        progress = await unless_done(pending.reply, probe)
        if pending.reply.done():
            return pending.reply.result()
        if progress is None:
            raise why
        at_it = request.index in progress.in_flight or request.index in progress.answering
        # a probe overtakes a long request, and a long answer
        late = not progress.current if again else attempt == 0 and request.index in progress.accumulated
        if not (at_it or broke or late):
            return Declined(Why.GONE, f"{what}: it is not working on it")
        if is_overdue(pending, ctx.clock.now() - begin_s):
            return Declined(Why.GONE, f"{what}: it is overdue")
        attempt += not (broke or again)
        again = broke and not at_it
