"""Two sides of a partition meet again, and end in one lineage.

A side that covers every stage and has a trainer goes on alone, so a partition may leave two histories of the run. A
peer that hears of another lineage tells the sender its history, and both peers judge by the same rule
(``policy.fork_choice``). Peers of the losing side drop their accumulators and take the state of the winning side's
replicas, one by one, like newcomers.

In a run of one stage, a single peer could make up any history. So there a history held by one peer gives way to a
history held by several peers, regardless of length.

No stage may be lost on the way, even if the rule's answer changes in between: a peer goes over only while every stage
of the other side has a peer that promises to stay for the moment. If neither side covers every stage, both stand still
at the parting step. Then the state of each stage is right in either history, and the peers of the losing side take only
the name of the winning lineage.

A side that lacks a stage for long may roll back (``rollback``). Then, too, the longer history stays, not the later
branch.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError, NetworkError, ProtocolError
from muletrain.events import ForkKept, LineageLeft
from muletrain.policy.fork_choice import forked_at, gives_way
from muletrain.policy.recent import Seldom
from muletrain.runtime.core.branches import branch_of
from muletrain.runtime.core.times import AGAIN_S, LOOK_S
from muletrain.runtime.microbatch.position import Behind
from muletrain.runtime.recovery.messages import AskStay, History, Stay

if TYPE_CHECKING:
    from muletrain.network.base import PeerId
    from muletrain.policy.fork_choice import Chain
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.microbatch.position import Position
    from muletrain.runtime.transfer.donor import Receiver
    from muletrain.runtime.transfer.messages import Snapshot

ASK, STAY = 2, 3
"""Multiples of ``AGAIN_S`` for a peer to tell its history or promise to stay, and for which that promise holds: longer than
the caller waits for all answers."""
ROUNDS = 5
"""Number of times that replicas of the winning side are asked for states."""


class Forks:
    """Judges other lineages of the run for one peer."""

    def __init__(self, ctx: Context, position: Position, receiver: Receiver) -> None:
        self._ctx, self._position, self._receiver = ctx, position, receiver
        self._all, self._one_stage = set(range(ctx.plan.stages)), ctx.plan.stages == 1
        self._asks, self._judges, self._promises = Seldom(AGAIN_S), Seldom(2 * LOOK_S), Seldom(2 * STAY * AGAIN_S)
        self._promised = float("-inf")
        self._going = self._judging = False
        ctx.net.serve(History.KIND, self._on_history)
        AskStay.serve(ctx.net, self._on_ask)

    def heard(self, peer: PeerId, step: int, lineage: bytes) -> bool:
        """``peer`` says that ``step`` has ``lineage``. Returns True if that is not our history: then both sides
        exchange histories."""
        known = self._position.chain.at(step - self._ctx.plan.delayed)  # frames are sent before the record is known
        if known is None or known == lineage:
            return False
        self.met(peer)
        return True

    def met(self, peer: PeerId) -> None:
        """``peer`` is of another lineage: exchange histories."""
        if self._asks.due(peer, self._ctx.clock.now()):
            self._ctx.spawn(self._exchange(peer), "rival")

    async def _exchange(self, peer: PeerId) -> None:
        ask = History.of(self._position.chain).pack()
        try:
            answer = History.unpack(await self._ctx.net.call(peer, History.KIND, ask, timeout_s=ASK * AGAIN_S))
        except NetworkError as e:
            self._ctx.detector.mark_down(peer, e.why)
        else:
            await self._judge(peer, answer.chain)

    async def _on_history(self, sender: PeerId, payload: bytes) -> bytes:
        chain = History.unpack(payload).chain
        if self._judges.due(sender, self._ctx.clock.now()):  # each time all peers are asked
            self._ctx.spawn(self._judge(sender, chain), "rival")
        return History.of(self._position.chain).pack()

    async def _judge(self, peer: PeerId, other: Chain) -> None:
        """End this step (Behind) if the other history stays and is complete; or if neither side has all stages, and
        the other side lacks our stage."""
        position, own = self._position, self._position.chain
        fork = forked_at(own, other)
        if fork is None or position.away:
            return
        self._ctx.detector.mark_down(peer, f"its history differs from this peer's since step {fork}")
        if self._judging or self._ctx.clock.now() < self._promised:
            return  # everyone is asked each time; later, if both still meet
        stalled, self._judging = self._stalled(), True
        try:
            theirs = await self._stay(own, other, stalled=stalled, promise=False)
        finally:
            self._judging = False
        if theirs is None or position.chain.at(own.step) != own.lineages[-1]:
            return
        message = f"the others have another history since step {fork}, and theirs stays"
        if self._whole(theirs):  # we may be a step further by now, and ask again before we go over
            position.interrupt(Behind(message, rival=True))
            return
        lacks_us = self._ctx.roster.own.stage not in {p.stage for p in theirs.values()}
        parted_here = position.chain == own and own.step == other.step
        # of two stalled sides, one takes the name of the other
        if stalled and lacks_us and parted_here and gives_way(own, other, stalled=False):
            position.interrupt(Behind(message, rival=True, renamed=other))

    def _stalled(self) -> bool:
        roster, position = self._ctx.roster, self._position
        covered = all(map(roster.stage, self._all)) and roster.trainers()
        return not covered and self._ctx.clock.now() - position.begun > 2 * AGAIN_S

    async def goes_on(self, peer: PeerId) -> bool:
        """``peer`` is on a later branch, since its side rolled back. Returns True if every stage of our side has a
        peer: then both sides exchange histories, and the longer history stays."""
        own, every = self._position.chain, self._all
        if not all(map(self._ctx.roster.stage, every)):
            return False
        # some peers may not be at this step yet
        before = own.step - 1 if own.at(own.step - 1) is not None else own.step
        side = await self._side(before, own, promise=False)
        if not self._whole(side, self._ctx.roster.own.stage):
            return False
        self.met(peer)
        return True

    async def offered(self, replicas: list[PeerId], branch: bytes) -> bool:
        """Does one of ``replicas`` offer its state, on a later branch than ``branch``?"""
        return await self._receiver.has_donor(lambda offer: branch_of(offer.lineage) > branch, replicas)

    async def _stay(self, own: Chain, other: Chain, *, stalled: bool, promise: bool) -> dict[PeerId, Stay] | None:
        """Returns the peers of ``other`` if the history ``other`` stays, not ``own``."""
        fork, stays = forked_at(own, other), gives_way(own, other, stalled=stalled)
        if fork is None or own.over or not (stays or self._one_stage):
            return None
        theirs = await self._side(fork, other, promise=promise)
        if self._one_stage:
            before = fork - 1 if own.at(fork - 1) is not None else fork  # some of us may not be at the fork yet
            ours = (await self._side(before, own, promise=False)).keys() - theirs.keys()
            stays = stays if (not ours) == (len(theirs) <= 1) else not ours
        return theirs if stays else None

    def _whole(self, side: dict[PeerId, Stay], *own: int) -> bool:
        """Has ``side``, perhaps with us at our ``own`` stage, every stage and a trainer?"""
        trainer = self._ctx.roster.own.trainer or any(p.trainer for p in side.values())
        return {*own, *(p.stage for p in side.values())} >= self._all and trainer

    async def _side(self, step: int, chain: Chain, *, promise: bool) -> dict[PeerId, Stay]:
        """Returns the peers that stay in ``chain``, as of ``step``. Promises bind, so promises are requested last."""
        ctx, lineage = self._ctx, chain.at(step)
        assert lineage is not None  # checked by the callers
        ask = AskStay(step=step, lineage=lineage, promise=promise)

        async def stays(peer: PeerId) -> Stay | None:
            try:
                answer = await ask.ask(ctx.net, peer, timeout_s=ASK * AGAIN_S)
            except ProtocolError as e:
                ctx.refused(peer, str(e))
            except NetworkError:
                pass  # other peers may stay
            else:
                return answer if answer.stays else None
            return None

        peers = ctx.roster.everyone()
        answers = zip(peers, await asyncio.gather(*map(stays, peers)), strict=True)
        return {peer: answer for peer, answer in answers if answer is not None}

    async def _on_ask(self, sender: PeerId, ask: AskStay) -> Stay:
        """Raises ProtocolError for a promise to a peer that is not in the run."""
        own, position, now = self._ctx.roster.own, self._position, self._ctx.clock.now()
        stays = (
            not (self._going or position.away or self._ctx.tasks.closed) and position.chain.at(ask.step) == ask.lineage
        )
        if stays and ask.promise:
            self._ctx.roster.member(sender)
            if stays := self._promises.due(sender, now):  # in between we may go over ourselves
                self._promised = now + STAY * AGAIN_S
        return Stay(stays=stays, stage=own.stage, trainer=own.trainer)

    async def go_over(self) -> Snapshot | None:
        """Load the state of a replica of the winning lineage. Returns None, with our own state unchanged, if the state
        is unavailable, or the decision has changed by now. Call this when nothing runs."""
        ctx, own = self._ctx, self._position.chain
        stalled = self._stalled()

        def acceptable(offer: Snapshot) -> bool:
            return gives_way(own, offer.chain, stalled=stalled or self._one_stage)

        async def confirm(offer: Snapshot) -> None:
            """Look a last time before our own state is given up."""
            if ctx.clock.now() < self._promised:
                raise MuletrainError("another peer counts on this one")
            self._going = True  # no more promises
            theirs = await self._stay(own, offer.chain, stalled=stalled, promise=True)
            if theirs is None or not self._whole(theirs):
                raise MuletrainError("the others' history does not stay, or not every stage of it can be reached")

        try:
            snapshot = await self._receiver.fetch(acceptable, after=own.step, rounds=ROUNDS, confirm=confirm)
        except MuletrainError as e:
            ctx.emit(ForkKept(reason=str(e)))
            return None
        finally:
            self._going = False
        self.left(own, snapshot.chain)
        return snapshot

    def left(self, own: Chain, to: Chain) -> None:
        """Report that this peer has gone from ``own`` to ``to``."""
        fork = forked_at(own, to)
        assert fork is not None  # the two chains are rivals
        before, after = own.lineages[-1].hex(), to.lineages[-1].hex()
        event = LineageLeft(forked_at=fork, step=own.step, lineage=before, to_step=to.step, to_lineage=after)
        self._ctx.emit(event)
