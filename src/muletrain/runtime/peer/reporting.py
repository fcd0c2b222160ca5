"""A peer reports its applied steps: to its own log, to the coordinator on another machine, and to the run's status."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias

from muletrain.errors import Malformed, NetworkError, ProtocolError
from muletrain.events import (
    Event,
    EventError,
    PeerJoined,
    PoolWorked,
    SampleReplaced,
    SeatEmpty,
    SeatFilled,
    StepApplied,
    StepDone,
    StepSkipped,
    StepWaits,
    SwapWorked,
)
from muletrain.events.facts import SMOOTHING
from muletrain.runtime.core.times import AGAIN_S
from muletrain.runtime.members.context import NAMED
from muletrain.runtime.members.rebalancing import Machine
from muletrain.runtime.peer.messages import LOADING, SHOWN_DOWN, Report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from muletrain.events import TrafficClass
    from muletrain.network.base import PeerId
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.microbatch.inflight import InFlightStep
    from muletrain.runtime.step.record import StepRecord
    from muletrain.strategies.base import StandIn

Reported: TypeAlias = StepApplied | PeerJoined | PoolWorked | SampleReplaced | SwapWorked
MOST_NAMED = 256
"""Receivers of bytes that a report names: all of a run of 850 peers would not fit."""
REPORTS, REPORTS_A_STEP = 256, 4
"""Reports of one peer that are accepted at first, and for each step that we applied: the reporter may be ahead of us,
and steps after a rollback are done again."""


class PeerHost(Machine):
    """The process of one peer. This base class ignores reports."""

    def applied(self, record: StepRecord) -> bool:
        """The peer applied a step. Returns True to end the run after that step."""
        return False

    def reported(self, event: Event, name: str) -> None:
        """The peer ``name``, on another machine, counted ``event``; only the coordinator's host gets this call."""


class Shown:
    """Loss and speed of the run in the status, smoothed as consoles smooth the loss."""

    def __init__(self) -> None:
        self.loss = self.weight = self.tokens = self.seconds = 0.0

    def fold(self, event: StepDone, *, whole: bool) -> None:
        """``whole``: this peer was there from the step's beginning, and had loaded its code."""
        if math.isfinite(event.loss):
            self.loss = SMOOTHING * self.loss + (1 - SMOOTHING) * event.loss
            self.weight = SMOOTHING * self.weight + (1 - SMOOTHING)
        if whole:
            self.tokens = SMOOTHING * self.tokens + event.tokens
            self.seconds = SMOOTHING * self.seconds + event.duration_s


class Reporting:
    """Reports for one peer. ``apart``: the peer's log is not beside the coordinator's log, so reports go to the
    coordinator's host."""

    def __init__(self, ctx: Context, host: PeerHost, *, apart: bool) -> None:
        self._ctx, self._host, self._apart = ctx, host, apart
        self._shown = Shown()
        self._applied = 0
        self._said: tuple[float, float] = (math.inf, 0.0)
        """Begin of the wait that was told last, and how long the wait takes until it is told again [s]."""
        self._reports: Counter[PeerId] = Counter()
        """Reports received from peers of other machines, which go onto our disk."""
        self._stand_ins: Mapping[StandIn, tuple[str, ...]] = {}

    def speaks(self) -> bool:
        """Does this peer report the events that all peers see alike?"""
        coordinator = self._ctx.roster.coordinator()
        first = self._ctx.roster.genesis.coordinator if coordinator is None else coordinator.id
        return first == self._ctx.net.peer_id

    def applied(self, record: StepRecord, work: InFlightStep, not_finite: str) -> None:
        """Report a step with all counts since the previous step, and begin new counts. ``not_finite``: see
        ``StepApplied``."""
        ctx, self._applied = self._ctx, self._applied + 1
        stats, now = ctx.meter.stats, ctx.clock.now()
        for receiver, nbytes in ctx.net.carried().items():
            stats.sent[receiver]["relayed"] += nbytes
        counted = work.counted.get(record.stages[ctx.roster.own.stage].round, 0)
        took = now - stats.started
        busy = stats.forward_s + stats.backward_s
        busy += 0 if ctx.plan.delayed else stats.averaging_s + stats.apply_s
        self.tell(
            StepApplied(
                step=record.step + 1,
                stage=ctx.roster.own.stage,
                lineage=record.hash.hex(),
                skipped=record.skip,
                not_finite=not_finite,
                microbatches=counted,
                recomputed=work.computed - counted,
                forward_s=stats.forward_s,
                backward_s=stats.backward_s,
                averaging_s=stats.averaging_s,
                apply_s=stats.apply_s,
                wait_s=max(0.0, took - busy),
                sent={p: dict(c) for p, c in stats.sent.items()},
                memory=self._host.memory(),
            )
        )
        losses = work.losses.values()
        done = StepDone(
            step=record.step + 1,
            loss=sum(losses) / len(losses) if losses else math.nan,
            grad_norm=record.gradient_norm,
            lr=ctx.plan.lr(record.step),
            tokens=ctx.plan.microbatches * ctx.plan.sequences * ctx.plan.sequence_length(record.step),
            duration_s=took,
            lineage=record.hash.hex(),
        )
        self._shown.fold(done, whole=self._applied > 1)
        if self.speaks() or self._apart:  # once on each machine
            ctx.emit(done)
            if record.skip:
                ctx.emit(StepSkipped(step=record.step + 1))
        ctx.meter.begin(now)
        self._look_for_stand_ins()

    def tell(self, event: Reported) -> None:
        """Write ``event`` to our log, and send ``event`` to a coordinator on another machine."""
        self._ctx.emit(event)
        if self._apart:
            self._ctx.spawn(self._pass_on(Report(event=_short(event).to_json())), "report")

    async def _pass_on(self, report: Report) -> None:
        coordinator = self._ctx.roster.coordinator()
        if coordinator is None or coordinator.id == self._ctx.net.peer_id:
            return
        try:
            await self._ctx.send(coordinator.id, report)
        except NetworkError as e:
            self._ctx.detector.mark_down(coordinator.id, e.why)

    def told(self, sender: PeerId, message: Report) -> None:
        """Take a report of a peer of another machine, unless our log is not the run's: the first machine is gone, and we
        coordinate in its place. Raises ProtocolError unless the report is about its sender."""
        if self._apart:
            return
        try:
            event = Event.from_json(message.event)
        except EventError as e:
            raise ProtocolError(str(e)) from None
        member = self._ctx.roster.member(sender)
        self._reports[sender] += 1
        if self._reports[sender] > REPORTS + REPORTS_A_STEP * self._applied:
            raise Malformed("more reports than there were steps")
        match event:
            case PeerJoined():
                own = (event.peer_id, event.name, event.stage) == (sender, member.name, member.stage)
            case StepApplied() | PoolWorked() | SwapWorked():
                own = event.stage == member.stage
            case SampleReplaced():
                own = member.trainer
            case _:
                own = False
        if not own:
            raise ProtocolError(f"a {event.kind} event that is not about its sender")
        self._host.reported(event, member.name)

    def wait(self, step: int) -> StepWaits | None:
        """The wait of the step with this number that takes as long as a peer may take to answer, and longer."""
        awaited, ctx = self._ctx.news.awaited, self._ctx
        if awaited is None or (seconds := ctx.clock.now() - awaited.since_s) < AGAIN_S:
            return None
        names = [ctx.roster.name(p) for p in awaited.whom()]
        return StepWaits(
            step=step + 1,
            what=awaited.what,
            names=names[:NAMED],
            more=max(0, len(names) - NAMED),
            seconds=seconds,
            then=awaited.then(),
        )

    def tell_wait(self, step: int) -> None:
        """Report a long wait, and again each time that it has become twice as long."""
        if (wait := self.wait(step)) is None or (awaited := self._ctx.news.awaited) is None:
            return
        since_s, after_s = self._said
        if awaited.since_s != since_s or wait.seconds >= after_s:
            self._said = awaited.since_s, 2 * wait.seconds
            self._ctx.emit(wait)

    def status(self, step: int, *, left: bool, loading: bool = False) -> dict[str, Any]:
        """Returns the status shown by 'muletrain status' of a peer that is at ``step``, has ``left`` in order, or is
        ``loading`` its stage."""
        ctx = self._ctx
        own, plan = ctx.roster.own, ctx.plan
        status = {"name": own.name, "stage": own.stage, "stages": plan.stages, "trainer": own.trainer}
        if ctx.helpers is not None:
            status["clients"] = ctx.helpers()
        if ctx.compute.parts > 1:
            status["parts"] = ctx.compute.parts
        status |= {"step": step, "steps": plan.steps, "left": left, "collects": self.speaks()}
        status |= {"state": LOADING} if loading else {}
        if (wait := self.wait(step)) is not None:
            status["waits"] = wait.reason()
        status["down"] = [{"id": m.id, "name": m.name, "stage": m.stage} for m in self._ctx.roster.down()[-SHOWN_DOWN:]]
        if self._shown.weight:
            status["loss"] = self._shown.loss / self._shown.weight
        if self._shown.seconds:
            status["tokens_per_s"] = self._shown.tokens / self._shown.seconds
        if (measured := ctx.meter.validated) is not None and math.isfinite(measured.loss):
            status |= {"heldout_loss": measured.loss, "heldout_step": measured.step}
        return status

    def _look_for_stand_ins(self) -> None:
        """Report the stand-ins for planned peers that are gone, or not any more, since the last look."""
        plan, roster = self._ctx.plan, self._ctx.roster
        before, now = self._stand_ins, plan.strategy.stand_ins([roster.seated(s).keys() for s in range(plan.stages)])
        self._stand_ins = now
        for seat in sorted(before.keys() | now.keys()) if self.speaks() else ():
            stage, pipeline, name = seat
            if seat not in now:
                self._ctx.emit(SeatFilled(pipeline=pipeline, stage=stage, seat=name))
            elif before.get(seat) != now[seat]:
                spares = " and ".join(now[seat])
                self._ctx.emit(SeatEmpty(pipeline=pipeline, stage=stage, seat=name, spares=spares))


def _short(event: Reported) -> Reported:
    """Returns ``event`` with the receivers that got most named, and the others as one."""
    if not isinstance(event, StepApplied) or len(event.sent) <= MOST_NAMED:
        return event
    most = sorted(event.sent, key=lambda p: (-sum(event.sent[p].values()), p))
    rest: Counter[TrafficClass] = Counter()
    for peer in most[MOST_NAMED - 1 :]:
        rest.update(event.sent[peer])
    sent = {p: event.sent[p] for p in most[: MOST_NAMED - 1]}
    return dataclasses.replace(event, sent=sent | {"others": dict(rest)})
