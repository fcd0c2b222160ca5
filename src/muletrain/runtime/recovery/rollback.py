"""When a stage has lost all its peers, other peers adopt the stage, and the run goes on from a checkpoint.

The first live peer, by id, asks all peers for their step and state, and orders a rollback: to the newest checkpoint
with a readable part for each stage, on a new branch, with peers moved to the empty stages. All peers obey, or hear of
the order later from a peer of the new branch. A side of a partition that still has all stages does not obey: there the
longer history stays (``forks``). You lose some time; the final weights are unchanged.

A run that lost all its trainers waits for a trainer, too, loses nothing but time, and still writes a checkpoint of its
weights.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import TYPE_CHECKING

from muletrain.errors import NetworkError, ProtocolError
from muletrain.events import LastTrainer, NoTrainer, StageEmpty
from muletrain.policy.assignment import View
from muletrain.policy.checkpoints import newest_complete
from muletrain.policy.recent import Seldom
from muletrain.runtime.checkpoint.store import Key
from muletrain.runtime.core.branches import branch_of, count_of
from muletrain.runtime.core.lifecycle import State
from muletrain.runtime.core.times import AGAIN_S, LOOK_S, PATIENCE_S
from muletrain.runtime.recovery.messages import MAX_PARTS, AskStanding, StandsAt, StepBack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from muletrain.network.base import PeerId
    from muletrain.runtime.checkpoint.checkpointing import Checkpointing
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.rebalancing import Machine
    from muletrain.runtime.microbatch.position import Position
    from muletrain.runtime.recovery.forks import Forks

JOIN_S = 900.0
"""Seconds for which a run waits for a machine to join a stage that no peer can adopt."""


class Rollback:
    """Watches for lost stages, and for rollbacks by other peers, for one peer. ``ordered`` is done when the peer must
    begin anew: on the branch of a StepBack or, with None, with the state of a replica."""

    def __init__(
        self,
        ctx: Context,
        position: Position,
        machine: Machine,
        back: StepBack | None,
        forks: Forks,
        checkpointing: Checkpointing,
    ) -> None:
        """``back``: the rollback that began our branch, if this peer took part."""
        self._ctx, self._position, self._machine, self._back = ctx, position, machine, back
        self._forks, self._checkpointing, self._book = forks, checkpointing, checkpointing.book
        self.ordered: asyncio.Future[StepBack | None] = asyncio.get_running_loop().create_future()
        self._learning = False
        self._tells, self._hears = Seldom(AGAIN_S), Seldom(AGAIN_S)
        self._said: tuple[int, ...] = ()
        self._nobody_trains = False
        """Has this been reported?"""
        ctx.detector.met = self.met
        ctx.net.serve(StepBack.KIND, self._on_order)
        AskStanding.serve(ctx.net, self._on_standing)

    def _where(self) -> Key:
        return Key(self._position.step, self._position.applied)

    async def watch(self) -> None:
        """Have a stage adopted that is without peers for long, and wait for a trainer. Ends when cancelled."""
        ctx, since, since_trainer, trainers = self._ctx, dict[int, float](), math.inf, 0
        while True:
            await ctx.clock.sleep(LOOK_S)
            self._book.reached = max(self._book.reached, self._position.step)
            now, before, trainers = ctx.clock.now(), trainers, len(ctx.roster.trainers())
            since = {s: since.get(s, now) for s in self.without_peers()}
            since_trainer = math.inf if trainers else min(since_trainer, now)
            stuck = now - min(since_trainer, *since.values(), math.inf) >= ctx.plan.adopt_after_s
            if ctx.news.stuck and not stuck:
                ctx.news.arriving_s = now  # the peer that came needs time for its work
            ctx.news.stuck = stuck
            if stuck:
                ctx.news.patience_s = JOIN_S
                if since and self._leads():
                    await self._adopt({s: now - since_s for s, since_s in since.items()})
            if trainers == 1 < before and self._leads():
                ctx.emit(LastTrainer(name=ctx.roster.name(ctx.roster.trainers()[0])))
            if now - since_trainer >= ctx.plan.adopt_after_s and self._position.life.has_state:
                if not self._nobody_trains and self._leads():
                    ctx.emit(NoTrainer(minutes=round(JOIN_S / 60)))
                self._nobody_trains = True
                await self._checkpointing.write_what_there_is(self._position)

    def without_peers(self) -> tuple[int, ...]:
        """Returns the stages that no peer serves."""
        own = () if self._position.life.has_state else (self._ctx.net.peer_id,)
        return tuple(s for s in range(self._ctx.plan.stages) if not {*self._ctx.roster.stage(s)} - {*own})

    def _leads(self) -> bool:
        me = self._ctx.net.peer_id
        return min((*self._ctx.roster.others(), me)) == me

    async def _adopt(self, lacking_s: Mapping[int, float]) -> None:
        """Ask all peers for their step and state, including peers that are down, which may have the state of the lost
        stage. ``lacking_s``: seconds without a peer, by stage."""
        ctx, me, at = self._ctx, self._ctx.net.peer_id, self._where()
        peers = ctx.roster.everyone()  # a leaver whose stage is lost is back by now (``Departure.taken_over``)
        said = dict(zip(peers, await asyncio.gather(*map(self._ask, peers)), strict=True))
        own = branch_of(at.lineage)
        here = {p: s for p, s in said.items() if s is not None and (s.branch == own or s.state is State.JOINING)}
        here[me] = await self._stands_at()
        for peer, stands in said.items():
            if stands is not None and stands.state is not State.JOINING:
                self.met(peer, stands.branch)
        for peer, stands in here.items():
            if stands.has_state:
                ctx.detector.mark_back(peer)
        coming = {s.stage for s in here.values() if (s.has_state or s.state is State.ROLLED_BACK)}
        coming |= {s for s, for_s in lacking_s.items() if for_s < PATIENCE_S and self._fed(s, here)}
        lost = tuple(s for s in range(ctx.plan.stages) if s not in coming)
        if not lost or self.ordered.done() or self._learning:
            return
        work = ctx.plan.work or (1.0,) * ctx.plan.stages
        view = View({p: s.load() for p, s in here.items()}, work, stopped=True)
        moves = {m.peer: m.target for m in ctx.plan.strategy.assign(view)}
        served = {*(s.stage for s in here.values()), *moves.values()}
        missing = tuple(s for s in range(ctx.plan.stages) if s not in served)
        readable = {p: s.readable() for p, s in here.items()}
        missed = {digest for s in here.values() for digest in s.missed}
        steps = sorted(s.step for s in here.values())
        # one alone may be a step ahead, or lie; and a false rollback may have led all to an early step
        limit = max(self._book.reached, at.step, min(steps[-1], steps[-2:][0] + 1))
        found = newest_complete(readable, ctx.plan.stages, limit, missed)
        hidden = any(s.parts and not s.reads for s in here.values())  # by a store that hangs
        if found is None and ctx.plan.from_seed and not hidden:
            found = (0, bytes(32)), ()
        in_vain_s = ctx.clock.now() - self._book.back_s
        if found is not None and missed & {*found[1]} and in_vain_s > ctx.plan.adopt_after_s + JOIN_S:
            found = None
        if missing or found is None:
            self._say_what_lacks(missing or lost, found is None)
            return
        (step, base), parts = found
        count, listed = count_of(at.lineage) + 1, tuple(sorted(moves.items()))
        order = StepBack(count=count, step=step, base=base, parts=parts, moves=listed, lost=lost)
        await asyncio.gather(*(self._tell(p, order) for p in peers))
        if not self.ordered.done():
            self.ordered.set_result(order)

    def _fed(self, stage: int, here: Mapping[PeerId, StandsAt]) -> bool:
        """Does a peer of the stage before, or for stage 0 a trainer, reach a peer of ``stage``? A trainer that serves
        stage 0 itself counts if any peer reaches that stage."""
        reach = {p: s.stage for p, s in here.items() if stage in s.reaches}
        if stage:
            return stage - 1 in reach.values()
        return any(reach if m.stage == 0 else m.id in reach for m in self._ctx.roster.members() if m.trainer)

    def _say_what_lacks(self, stages: tuple[int, ...], no_checkpoint: bool) -> None:
        if self._said == stages:
            return
        self._said = stages
        which = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        lacks = (
            "and no complete checkpoint to roll back to can be read: only its own peers, if they come back, have its state"
            if no_checkpoint
            else "and no other stage can spare a peer with enough memory: let a machine join ('muletrain join')"
        )
        self._ctx.emit(StageEmpty(stages=which, lacks=lacks, minutes=round(JOIN_S / 60)))

    async def _ask(self, peer: PeerId) -> StandsAt | None:
        timeout_s = self._ctx.detector.deadline.seconds(1)
        try:
            stands = await AskStanding().ask(self._ctx.net, peer, timeout_s=timeout_s)
            stands.check(self._ctx.plan.stages, self._ctx.plan.steps)
            return stands
        except ProtocolError as e:
            self._ctx.refused(peer, str(e))
        except NetworkError:
            pass  # others may answer
        return None

    async def _stands_at(self) -> StandsAt:
        """Returns our place in the run's history: on the way to another branch, the place on that branch."""
        ctx, at, state, stage = self._ctx, self._where(), self._position.life.state, self._ctx.roster.own.stage
        began, missed = self._began_with(), self._book.missed
        if self.ordered.done() and (back := self.ordered.result()) is not None:
            at, state, began = Key(back.step, back.lineage), State.ROLLED_BACK, back
            stage = dict(back.moves).get(ctx.net.peer_id, stage)
        elif state is State.ROLLED_BACK and began is not None and began.parts and began.parts[stage] in missed:
            state = State.RECOVERING  # only a replica, or another checkpoint, can help
        every, unserved = range(ctx.plan.stages), self.without_peers()
        parts = [
            (*key, s, facts.digest)
            for key, parts in sorted((await self._checkpointing.parts.readable_soon()).items(), reverse=True)
            for s, facts in parts.items()
            if max(parts) in every  # else the model was cut otherwise
        ]
        return StandsAt(
            branch=branch_of(at.lineage),
            step=at.step,
            stage=stage,
            state=state,
            targets=tuple(s for s in every if s != stage and self._machine.fits(s)),
            reaches=tuple(s for s in every if s not in unserved),
            parts=tuple(parts[:MAX_PARTS]),
            reads=self._checkpointing.parts.reads(),
            missed=tuple(sorted(missed)[:MAX_PARTS]),
            began=began,
        )

    # Branches ---------------------------------------------------------------------------------------------------------

    def met(self, peer: PeerId, branch: bytes) -> None:
        """``peer`` is on ``branch``: of the two peers, the peer on the lower branch is told how the higher branch
        began."""
        ctx, own = self._ctx, branch_of(self._where().lineage)
        if branch > own and not self._position.life.joining:
            self._consider(peer, None)
        back = None if branch >= own or ctx.tasks.closed else self._began_with()
        if back is not None and self._tells.due(peer, ctx.clock.now()):
            ctx.spawn(self._tell(peer, back), "tell of a step back")

    def _began_with(self) -> StepBack | None:
        """Returns the rollback that began our branch, if known."""
        back = self._back
        return back if back is not None and branch_of(back.lineage) == branch_of(self._where().lineage) else None

    def _consider(self, peer: PeerId, order: StepBack | None) -> None:
        """``peer`` is on a later branch, which began with ``order``, if known."""
        ctx = self._ctx
        busy = self._learning or self.ordered.done() or ctx.tasks.closed or not ctx.roster.knows(peer)
        if not busy and self._hears.due(peer, ctx.clock.now()):  # each time all peers are asked
            self._learning = True
            ctx.spawn(self._learn(peer, order), "learn of a step back")

    async def _learn(self, peer: PeerId, order: StepBack | None) -> None:
        """Learn from ``peer``, or from any informed peer, how the branch began. If no peer knows, a replica's state on
        the branch serves as well; without one, a damaged or forged frame must not make us give up our work."""
        ctx = self._ctx
        try:
            if self._position.life.has_state and await self._forks.goes_on(peer):
                return
            if order is not None:
                self._obey(order)
                return
            others = (peer, *(p for p in ctx.roster.others() if p != peer))
            said = zip(others, await asyncio.gather(*map(self._ask, others)), strict=True)
            there = {p: s for p, s in said if s is not None}
            for known, stands in there.items():
                try:
                    if stands.began is not None:
                        self._obey(stands.began)
                except ProtocolError as e:
                    ctx.refused(known, str(e))
            own = branch_of(self._where().lineage)
            serve = [p for p, s in there.items() if s.branch > own and p in ctx.roster.replicas()]
            if serve and await self._forks.offered(serve, own) and not self.ordered.done():
                self.ordered.set_result(None)
        finally:
            self._learning = False

    def _obey(self, order: StepBack) -> None:
        """Begin anew by a later ``order`` that concerns us. Raises ProtocolError for an invalid order."""
        self._check(order)
        # replicas give a newcomer their state on any branch
        concerns = not self._position.life.joining or self._ctx.roster.own.stage in order.lost
        if concerns and self._is_later(order) and not self.ordered.done():
            self.ordered.set_result(order)

    def _check(self, order: StepBack) -> None:
        """Raises ProtocolError for an order that no correct peer gives: peers announce the stages that they have room
        for."""
        plan, own = self._ctx.plan, self._ctx.roster.own
        order.check(plan.stages, plan.steps, count_of(self._where().lineage), from_seed=plan.from_seed)
        stage = dict(order.moves).get(own.id, own.stage)
        if stage != own.stage and not self._machine.fits(stage):
            raise ProtocolError(
                f"a rollback that moves {own.name} to stage {stage}, which needs more memory than it may use (--memory): move a peer "
                f"that names the stage among its targets"
            )

    def _is_later(self, order: StepBack) -> bool:
        return branch_of(order.lineage) > branch_of(self._where().lineage)

    async def _tell(self, peer: PeerId, order: StepBack) -> None:
        timeout_s = self._ctx.detector.deadline.seconds(1)
        with suppress(NetworkError):  # the peer hears of the order when it meets one of us
            await self._ctx.net.call(peer, StepBack.KIND, order.pack(), timeout_s=timeout_s)

    async def _on_order(self, sender: PeerId, payload: bytes) -> bytes:
        order = StepBack.unpack(payload)
        self._check(order)
        if self._is_later(order):
            self._consider(sender, order)
        return b""

    async def _on_standing(self, sender: PeerId, ask: AskStanding) -> StandsAt:
        return await self._stands_at()
