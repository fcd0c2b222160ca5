"""Replicas of a stage seal and announce accumulators to agree on a round, until all members count on the same members
and the sets cover the step (CONTRIBUTING, "How a step goes", 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.events import LeftBehind
from muletrain.policy.deadline import Deadline
from muletrain.runtime.averaging.rounds import Round
from muletrain.runtime.core.times import AGAIN_S, ENDLESS, GONE_S
from muletrain.runtime.members.row import Seal
from muletrain.runtime.step import audit
from muletrain.runtime.step.record import round_id

if TYPE_CHECKING:
    from muletrain.network.base import PeerId
    from muletrain.runtime.step.audit import Audit
    from muletrain.runtime.step.company import Company
    from muletrain.runtime.step.exchange import Exchange
    from muletrain.runtime.step.reruns import Reruns
    from muletrain.runtime.step.state import Lasting, StepState

OF_PATIENCE = 0.5
"""Share of our patience after which a replica that reports no progress is overdue, and after which we look on no longer:
the time of two of our questions (``waiting.LOOKS``), so that one answer was heard meanwhile. After the whole patience we
would give up."""


class RoundAgreement:
    """The agreement of one step; each step has a new one."""

    def __init__(
        self, lasting: Lasting, state: StepState, company: Company, exchange: Exchange, reruns: Reruns, audit: Audit
    ) -> None:
        self._ctx, self._position, self._departure = lasting.ctx, lasting.position, lasting.departure
        self._waits, self._lessons = lasting.waits, lasting.lessons
        self._state, self._company, self._exchange, self._reruns = state, company, exchange, reruns
        self._audit, self._ledger = audit, state.work.ledger

    def next_attempt(self) -> int:
        """Number of our next attempt: after our last, and not below the members' attempts. The number begins at 1 if we
        leave out a replica, which must know that from our first seal on."""
        roster, announced = self._ctx.roster, self._state.announced
        first = int(any(map(self._company.is_apart, roster.stage(roster.own.stage))))
        latest = self._state.latest_attempt(self._company.members())
        return max(first if announced is None else announced.attempt + 1, latest)

    async def agree(self, attempt: int, weights: bytes) -> Round | None:
        """Announce our accumulator (computed with ``weights``) and hear the other replicas' seals. None if another
        attempt must follow: gaps were run again, or members do not count on the same members yet. Raises LeftOut,
        Behind, and MuletrainError if this peer must leave."""
        seals = await self._announce(attempt, weights)
        if seals is None:
            self._ledger.reopen(keep=True)
            return None
        self._reruns.believe_less(seals)
        sealed, cover = self._audit.cover(seals)
        if cover.gaps or cover.dropped:
            left_out = tuple(m for m in sealed if seals[m].indices and not sealed[m])
            await self._reruns.refill(cover, attempt, left_out)
            return None
        expelled = self._audit.expelled(seals)
        await self._audit.leave_if_faulty(expelled)
        sealed = {m: s for m, s in sealed.items() if m not in expelled}
        state, stage, plan = self._state, self._ctx.roster.own.stage, self._ctx.plan
        stop, leaves = any(s.stop for s in seals.values()), tuple(sorted(m for m in sealed if seals[m].leaves))
        members = tuple(sorted(sealed))
        return Round(
            id=round_id(state.lineage, stage, state.step, attempt, sealed, cover.chosen, stop, leaves, expelled),
            lineage=state.lineage,
            step=state.step,
            stage=stage,
            members=members,
            owners=plan.strategy.shard_owners(members),
            contributors=tuple(m for m in cover.chosen if sealed.get(m)),
            microbatches=plan.microbatches,
            n_trained=self._ctx.compute.n_trained,
            stop=stop,
            leaves=leaves,
            expelled=expelled,
            finite=audit.finite(seals),
            chunk=plan.chunk,
        )

    async def _announce(self, attempt: int, weights: bytes) -> dict[PeerId, Seal] | None:
        """Seal, and collect the seals of the members that we count on. None unless all members count on the same
        members. Ends after ``step/reruns.drained`` of these members, or within a usual step (``_overdue``)."""
        ctx, state, me = self._ctx, self._state, self._ctx.net.peer_id
        seal = await self._seal(attempt, weights)
        others = [m for m in seal.members if m != me]
        aside = {m for m in others if state.stands_aside(m)}  # our seal calls such members back

        def missing() -> list[PeerId]:
            return [m for m in others if m not in state.seals or state.seals[m].attempt < attempt]

        def lost() -> bool:
            aside_now = any(state.stands_aside(m) for m in others if m not in aside)
            dead = not all(map(ctx.roster.is_alive, seal.members))
            return dead or aside_now or not state.committed().isdisjoint(others)

        def outdated() -> bool:
            return state.latest_attempt(seal.members) > attempt

        def passed_over() -> bool:
            """Other replicas made another attempt and still go on without us. The missing members may have yielded."""
            return self._company.yields(seal.members, after=attempt)

        begin = ctx.clock.now()
        await self._waits.until(
            lambda: lost() or outdated() or passed_over() or not missing() or self._overdue(begin),
            self._lessons.seal,
            "the stage's replicas to seal",
            self._exchange.ask_replicas,
            whom=missing,
            then=lambda: f"goes on without them {self._given_s():.0f} s after their last progress",
        )
        self._company.check()
        if len(down := [m for m in others if not ctx.roster.is_alive(m)]) < max(
            2, len(others)
        ):  # else our links failed
            self._company.note(down)
        if lost() or outdated():  # sets of different attempts do not fit together
            self._company.note_outran(seal)
            return None
        if late := missing():
            self._company.note_overdue(late)
            return None
        seals = {m: seal if m == me else state.seals[m] for m in seal.members}
        self._company.compare(seals)
        agreed = all(s.members == seal.members and not self._company.differs(m) for m, s in seals.items())
        return seals if agreed else None

    async def _seal(self, attempt: int, weights: bytes) -> Seal:
        """Close the accumulator, and announce its microbatches to all replicas."""
        ctx, state = self._ctx, self._state
        await self._reruns.drained()
        await self._gather()
        await self._audit.reconsider()
        if self._ledger.in_flight:  # a microbatch arrived meanwhile
            await self._reruns.drained()
        accumulated = self._ledger.seal()
        await self._gather()  # nothing more is accumulated from here on
        replicas = tuple(m for m in ctx.roster.stage(ctx.roster.own.stage) if m != ctx.net.peer_id)
        view = self._company.members()
        state.announced = seal = Seal(
            attempt=attempt,
            indices=tuple(sorted(accumulated)),
            members=view,
            weights=weights,
            stop=self._departure.stop_requested,
            leaves=self._leaves(),
            sketch=await self._audit.sketch(),
            gave_up=state.gave_up,
            excused=state.excused,
            accused=self._audit.accused(),
        )
        ctx.reached("sealing", state.step)
        self._exchange.state(replicas, seal=seal)  # also to replicas that we do not count on
        return seal

    async def _gather(self) -> None:
        """Get the whole accumulator here. Clients may be at its microbatches for minutes, and so is this peer."""
        gathered = self._ledger.accumulated
        self._state.work.serving |= gathered
        try:
            await self._waits.watched(self._ctx.compute.gather(self._state.step))
        finally:
            self._state.work.serving -= gathered

    def _leaves(self) -> bool:
        """May this peer leave after this step? Not during the computation of the next step, because that work would be
        lost."""
        ahead = self._position.ahead
        return self._departure.announced() and (ahead is None or ahead.ledger.sealed)

    def _given_s(self) -> float:
        """The time that replicas have for some progress [s]."""
        return OF_PATIENCE * self._ctx.news.patience_s

    def _overdue(self, since: float) -> bool:
        """Have the awaited replicas had their time since ``since``? Yes, if no replica has made progress for as long as
        steps take; and after the time of a full queue, since reports may be lies."""
        most_s = max(GONE_S, self._lessons.step.seconds(), self._ctx.queue_s())
        return self._waits.quiet_s(since) >= self._given_s() or self._ctx.clock.now() - since >= most_s

    async def look_on(self) -> None:
        """Abstain while other replicas run our part again. Ends within ``_overdue`` after their last progress; earlier if
        these replicas are lost or count on us again. Waiting raises when another replica holds a round."""
        self._ctx.emit(LeftBehind(step=self._state.step + 1))
        self._exchange.abstain()
        await self._reruns.drained()
        self._reruns.drop()
        self._ledger.seal()  # accept nothing until the next announcement

        clock, since, most = self._ctx.clock, self._ctx.clock.now(), (0, 0)
        last_s = since + OF_PATIENCE * ENDLESS * self._ctx.news.patience_s  # reports may be lies

        async def ask() -> None:
            nonlocal since, most
            await self._exchange.ask_everyone()  # peers that are down here may be back
            rows = await self._exchange.ask_replicas()
            now = sum(len(row.accumulated) for row in rows), sum(row.moved for row in rows if row.round)  # chunks
            if any(new > old for new, old in zip(now, most, strict=True)):
                since, most = clock.now(), (max(now[0], most[0]), max(now[1], most[1]))

        def stalled() -> bool:
            return self._overdue(since) or clock.now() >= last_s

        await self._waits.until(
            lambda: not self._company.yields(self._company.members()) or stalled(),
            Deadline(AGAIN_S, AGAIN_S),
            "replicas that go on without this peer",
            ask,
            whom=self._company.views,
            then=lambda: f"goes on without them {self._given_s():.0f} s after their last progress",
        )
        if self._company.yields(self._company.members()):
            self._company.note_stalled()
        self._ledger.reopen(keep=False)
