"""Sending a microbatch onwards: choose a peer of a stage, push the tensors, and see the answer through.

Used by trainers (towards stage 0) and by peers (towards the next stage) alike: activations travel peer to peer, and each
sender chooses by its own measurements (SWARM sec. 3.2, app. C).
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.errors import DeadlineExceeded, MuletrainError, PeerUnreachable, ProtocolError
from muletrain.events import MicrobatchRerouted
from muletrain.policy.deadline import Deadline
from muletrain.policy.wiring import Wiring
from muletrain.swarm.messages import Backward, Busy, Done, Forward, Lost, Request

if TYPE_CHECKING:
    from muletrain.network.base import PeerId
    from muletrain.swarm.context import Context
    from muletrain.wire.codec import Encoded

BUSY_PAUSE_S = 0.005
"""First pause when every peer of a stage is full; doubles up to the limit below."""
BUSY_PAUSE_MAX_S = 0.5


SILENCE_FLOOR_S = 0.3
"""Silences are asked about from here on. A question costs little: only one that is not answered, either, has consequences."""


class _Gone(MuletrainError):
    """The peer lives, but nothing will come of the request."""


class _Over(MuletrainError):
    """The step of the request has ended without it."""


class StageLost(MuletrainError):
    """No peer of the stage could take the microbatch now."""


@dataclass
class Answer:
    """What came back for a request: the loss [nats/token] and, from a peer, d loss / d output as sent."""

    loss: float
    gradient: Encoded | None


@dataclass
class _Pending:
    peer: PeerId
    shape: tuple[int, ...]
    """Of what was sent, and so of its gradient."""
    request: Request
    reply: asyncio.Future[tuple[Backward | Done | Busy | Lost, list[Encoded]]]


class Router:
    """Requests towards one stage."""

    def __init__(self, ctx: Context, stage: int) -> None:
        self._ctx = ctx
        self._stage = stage
        self._wiring = Wiring(random.Random(f"{ctx.net.peer_id}/{stage}"))
        self._deadline = Deadline()
        self._pending: dict[tuple[int, int, int, str], _Pending] = {}
        self._silence = Deadline(unmeasured_s=10.0, floor_s=SILENCE_FLOOR_S, deviations=1.0)
        """Between two answers of a peer that owes us some; to ask once too often is better than to wait."""
        self._heard: dict[PeerId, float] = {}
        self._listening: set[PeerId] = set()
        self._current: tuple[int, bytes] | None = None

    def begin(self, step: int, lineage: bytes) -> None:
        """Requests of another step are given up from now on: nobody answers them any more, and nobody is to be banned for that."""
        self._current = step, lineage
        self.refresh()
        for pending in self._pending.values():
            if not self._is_current(pending.request) and not pending.reply.done():
                pending.reply.set_exception(_Over(f"step {pending.request.step} has ended"))

    def _is_current(self, request: Request) -> bool:
        return self._current in (None, (request.step, request.lineage))

    def refresh(self) -> None:
        """Take the roster's view of who serves the stage."""
        alive = set(self._ctx.roster.stage(self._stage))
        for peer in set(self._wiring.peers()) - alive:
            self._wiring.remove(peer)
        for peer in alive:
            self._wiring.add(peer)

    def on_reply(self, sender: PeerId, reply: Backward | Done | Busy | Lost, tensors: list[Encoded]) -> None:
        """Match an answer with its request; late answers to requests that were given up, or sent elsewhere since, are dropped.
        Raises ProtocolError for a gradient of another shape or codec than was sent."""
        pending = self._pending.get(reply.key)
        if pending is None or pending.peer != sender or pending.reply.done():
            return
        if any((t.shape, t.codec) != (pending.shape, self._ctx.plan.activations) for t in tensors):
            raise ProtocolError(f"a gradient that is not {self._ctx.plan.activations} {pending.shape}")
        now = self._ctx.clock.now()
        self._silence.measured(now - self._heard[sender])
        self._heard[sender] = now
        pending.reply.set_result((reply, tensors))

    async def request(self, request: Request, accumulate: tuple[int, ...], tensors: list[Encoded]) -> Answer:
        """Get one microbatch through the stage and all behind it. Raises StageLost when every live peer failed it, or its step is over."""
        failed: set[PeerId] = set()
        full: set[PeerId] = set()
        for tries in itertools.count():
            if not self._is_current(request):
                raise StageLost(f"stage {self._stage}: step {request.step} has ended")
            dead = {p for p in self._wiring.peers() if not self._ctx.roster.is_alive(p)}
            peer = self._wiring.choose(failed | full | dead, Counter(p.peer for p in self._pending.values()))
            if peer is None and full:
                await self._ctx.clock.sleep(min(BUSY_PAUSE_S * 2.0 ** min(tries, 10), BUSY_PAUSE_MAX_S))
                full.clear()
                continue
            if peer is None:
                await self._recount(request)
                raise StageLost(
                    f"stage {self._stage}: no live peer could take microbatch {request.step}/{request.index}"
                )
            try:
                reply, answer = await self._try(peer, request, accumulate, tensors)
            except (PeerUnreachable, DeadlineExceeded) as e:
                self._give_up(peer, request, str(e))
                self._ctx.suspect(peer, str(e))
                failed.add(peer)
                accumulate = await self._missing(request, accumulate)
                continue
            except _Over:
                continue
            except _Gone as e:  # alive, but it does not have the request (any more)
                self._give_up(peer, request, str(e))
                failed.add(peer)
                accumulate = await self._missing(request, accumulate)
                continue
            if isinstance(reply, Busy):
                full.add(peer)
            elif isinstance(reply, Lost):
                self._give_up(peer, request, reply.reason)
                failed.add(peer)
                accumulate = await self._missing(request, accumulate)
            else:
                return Answer(reply.loss, answer[0] if answer else None)
        raise AssertionError  # itertools.count does not end

    async def _missing(self, request: Request, accumulate: tuple[int, ...]) -> tuple[int, ...]:
        """What failed here may have gone through there: stages from ours on that hold it already do not accumulate it again."""
        ours = tuple(s for s in accumulate if s >= self._stage)
        still = await self._ctx.still_missing(request.lineage, request.step, request.index, ours)
        return tuple(s for s in accumulate if s < self._stage or s in still)

    async def _recount(self, request: Request) -> None:
        """Nobody is left to try: who of the stage answers, believed dead or banned before, counts again from the next request on."""
        ctx = self._ctx
        members = [p for p in ctx.roster.everyone() if ctx.roster.member(p).stage == self._stage]
        await asyncio.gather(*(ctx.probe(p, request.lineage, request.step) for p in members))
        self.refresh()

    async def _try(
        self, peer: PeerId, request: Request, accumulate: tuple[int, ...], tensors: list[Encoded]
    ) -> tuple[Backward | Done | Busy | Lost, list[Encoded]]:
        """One receiver: send, then wait while it is seen to be working on it."""
        clock = self._ctx.clock
        if request.key in self._pending:
            raise ProtocolError(
                f"microbatch {request.step}/{request.index} attempt {request.attempt} is already under way"
            )
        pending = _Pending(peer, tuple(tensors[0].shape), request, asyncio.get_running_loop().create_future())
        self._listen_to(peer)
        self._pending[request.key] = pending
        message = Forward(
            **request.identity(), stage=self._stage, accumulate=accumulate, deadline_s=self._deadline.seconds(),
        )  # fmt: skip
        begin = clock.now()
        try:
            with self._ctx.awaiting(peer, pending.reply):
                # a frozen receiver takes only what its buffers hold
                await self._ctx.unless_done(pending.reply, self._ctx.send(peer, message, list(tensors)))
                reply, answer = await self._await(peer, request, pending)
        finally:
            del self._pending[request.key]
        if isinstance(reply, Backward | Done):
            took = clock.now() - begin
            self._deadline.measured(took)
            self._wiring.measured(peer, max(took - reply.away_s, 1e-6))
        return reply, answer

    def _listen_to(self, peer: PeerId) -> None:
        if not any(p.peer == peer for p in self._pending.values()):
            self._heard[peer] = self._ctx.clock.now()
        if peer not in self._listening:
            self._listening.add(peer)
            self._ctx.spawn(self._listen(peer), f"listen to {peer[-6:]}")

    async def _listen(self, peer: PeerId) -> None:
        """A peer that owes us answers gives one every so often. When it is silent for longer, and somebody else could do its work, ask
        whether it is there: the deadline of a request, which may wait in a queue, would find out much later that it froze."""
        ctx, attempt, asked = self._ctx, 0, 0.0
        try:
            while (owed := next((p for p in self._pending.values() if p.peer == peer), None)) is not None:
                heard = self._heard[peer]
                attempt = attempt if asked > heard else 0
                wait = max(asked, heard) + self._silence.seconds(attempt) - ctx.clock.now()
                if wait > 0:
                    await ctx.clock.sleep(min(wait, SILENCE_FLOOR_S))  # what is measured meanwhile counts
                    continue
                attempt, asked = attempt + 1, ctx.clock.now()
                if ctx.roster.stage(self._stage) == (peer,):
                    continue  # a stage's last peer is not given up for being slow
                if await ctx.probe(peer, owed.request.lineage, owed.request.step) is None:
                    ctx.give_up(peer, "it is silent, and answers no probe")
        finally:
            self._listening.discard(peer)

    async def _await(
        self, peer: PeerId, request: Request, pending: _Pending
    ) -> tuple[Backward | Done | Busy | Lost, list[Encoded]]:
        for attempt in itertools.count():
            what = f"microbatch {request.step}/{request.index} at stage {self._stage}"
            try:
                return await self._ctx.clock.deadline(
                    asyncio.shield(pending.reply), self._deadline.seconds(attempt), what
                )
            except DeadlineExceeded:
                probe = self._ctx.probe(peer, request.lineage, request.step, attempt)
                held = await self._ctx.unless_done(pending.reply, probe)
                if pending.reply.done():
                    return pending.reply.result()
                if held is None:
                    raise
                if request.index not in held.running:
                    raise _Gone(f"{what}: it is not working on it") from None
        raise AssertionError

    def _give_up(self, peer: PeerId, request: Request, reason: str) -> None:
        self._wiring.ban(peer)
        self._ctx.emit(
            MicrobatchRerouted(
                step=request.step, index=request.index, stage=self._stage, reason=f"{peer[-6:]}: {reason}"
            )
        )
