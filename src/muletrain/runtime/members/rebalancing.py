"""Peers move to the stage with the greatest need (SWARM sec. 3.2 "Adaptive swarm rebalancing", app. D). Every period
each peer announces its load, computes the moves that follow from all loads (``Strategy.assign``), and carries out its
own.

Announcements are hints. A peer that misses an announcement makes a move too many or too few, but no number changes:
leaving and joining keep their own promises.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from muletrain.errors import DeadlineExceeded, MuletrainError, NetworkError
from muletrain.events import DirectoryFailed, MoveDecided, MoveRefused
from muletrain.policy.assignment import Load, View
from muletrain.policy.rebalance import Confirmed

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.network.base import PeerId
    from muletrain.runtime.core.meter import StepStats
    from muletrain.runtime.members.context import Context

SAMPLES = 20
"""Samples of the queue in a period."""
KEPT_PERIODS, KEPT_MAX_S = 5.0, 110.0
"""Periods, and most seconds, for which an announcement holds: a peer is silent while preparing for a new stage. The
directory keeps nothing for more than two minutes and, of two announcements, the longer-lived; so all announcements hold
equally long."""
MEASURED_PERIODS, MAX_SERVICES = 2.0, 4096
HORIZON_PERIODS = 10
"""Periods within which a move must pay for itself: later the fleet will have changed."""

Positive = Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]


class Announcement(BaseModel):
    """The load of a peer, as JSON in the directory. ``coming``: the peer is on its way to ``stage``. ``targets``,
    ``prepares_s``: see ``Load``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    stage: Annotated[int, Field(ge=0, lt=4096)]
    queue: Positive
    speed: Positive | None
    coming: bool
    targets: Annotated[frozenset[int], Field(max_length=4096)] | None
    prepares_s: Annotated[tuple[Positive, ...], Field(max_length=4096)] = ()


class Machine:
    """The machine of one peer. This base class has memory for every stage."""

    def fits(self, stage: int) -> bool:
        """Does the memory of this machine have room for ``stage``?"""
        return True

    def prepares_s(self, stage: int) -> float:
        """About how many seconds ``prepare`` takes; 0: nothing lacks."""
        return 0.0

    async def prepare(self, stage: int) -> None:
        """Fetch what ``stage`` needs beside its state. Raises MuletrainError."""

    def memory(self) -> int:
        """Memory that the process has now, of its device [bytes]; 0: unknown."""
        return 0


class Rebalancer:
    """Decides for one peer."""

    def __init__(
        self, ctx: Context, machine: Machine, load: Callable[[], int], move: Callable[[int | None], None]
    ) -> None:
        """``load``: returns the number of requests that the peer holds; ``move``: has the peer go to a stage after the
        current step, or stay (None)."""
        self._ctx, self._machine, self._load, self._move = ctx, machine, load, move
        self._services: deque[tuple[float, float]] = deque(maxlen=MAX_SERVICES)
        self._confirmed = Confirmed()
        self._key = f"{ctx.roster.genesis.run_id}/loads"
        self.settled = True
        """False until this peer serves its stage, and when people have it move."""

    def count(self, stats: StepStats) -> None:
        """Count the microbatches of a step."""
        self._services.extend((self._ctx.clock.now(), seconds) for seconds in stats.services)

    @property
    def _speed(self) -> float | None:
        """Returns microbatches/s by the median of the last periods, because a single microbatch on a busy machine
        predicts little."""
        since = self._ctx.clock.now() - MEASURED_PERIODS * self._ctx.plan.rebalance_s
        known = [seconds for at, seconds in self._services if at >= since] or [s for _, s in self._services]
        return 1 / max(1e-9, median(known)) if known else None

    async def run(self) -> None:
        """Announce and decide. Ends when cancelled. The first decision comes a whole period after the beginning, on measured
        speeds."""
        ctx, period = self._ctx, self._ctx.plan.rebalance_s
        await self._announce(0.0, ctx.roster.own.stage)
        while True:
            queued = 0
            for k in range(SAMPLES):
                await ctx.clock.sleep(period / SAMPLES)
                queued += self._load()
                if k == SAMPLES // 2:
                    await self._announce(queued / (k + 1), ctx.roster.own.stage)
            if not self.settled:
                continue
            target = await self._decide(queued / SAMPLES)
            if target is not None and self._machine.prepares_s(target):
                target = await self._prepared(target)
            self._move(target)
            if target is not None:
                await self._announce(0.0, target)

    async def _prepared(self, target: int) -> int | None:
        """Returns ``target`` once this peer has what it needs there, while it goes on serving; None: that is not to be
        had. Ends after ``transfer/base._fetch``."""
        ctx = self._ctx
        preparing = ctx.spawn(self._machine.prepare(target), "preparing to move")
        try:
            while not preparing.done():
                await self._announce(0.0, target)
                with suppress(DeadlineExceeded):
                    waiting = asyncio.wait({preparing})
                    await ctx.clock.deadline(waiting, ctx.plan.rebalance_s, "weights of another stage")
            preparing.result()
        except MuletrainError as e:
            ctx.emit(MoveRefused(stage=target, reason=f"lacks weights beside its state ({e})"))
            return None
        finally:
            preparing.cancel()
        return target

    async def _announce(self, queue: float, stage: int) -> None:
        ctx = self._ctx
        own = self._own(queue)
        value = Announcement(
            stage=stage,
            queue=queue,
            speed=self._speed,
            coming=not self.settled or stage != ctx.roster.own.stage,
            targets=own.targets,
            prepares_s=tuple(own.prepares_s),
        )
        kept_s = min(KEPT_MAX_S, KEPT_PERIODS * ctx.plan.rebalance_s)
        try:
            await ctx.net.announce(self._key, value.model_dump_json().encode(), kept_s)
        except NetworkError as e:
            ctx.emit(DirectoryFailed(what="the directory did not take this peer's load", reason=str(e)))

    def _own(self, queue: float) -> Load:
        roster, plan = self._ctx.roster, self._ctx.plan
        fixed = roster.own.id == roster.genesis.coordinator
        targets = frozenset(s for s in range(plan.stages) if self._machine.fits(s)) if not fixed else frozenset()
        speeds = {roster.own.stage: self._speed or math.nan}
        prepares = [self._machine.prepares_s(s) for s in range(plan.stages)]
        return Load(
            roster.own.stage,
            queue,
            speeds,
            targets=targets,
            name=roster.own.name,
            prepares_s=prepares if any(prepares) else (),
        )

    async def _decide(self, queue: float) -> int | None:
        """Returns the stage to move to; None: stay."""
        ctx, plan = self._ctx, self._ctx.plan
        try:
            found = await ctx.net.lookup(self._key)
        except NetworkError as e:
            ctx.emit(DirectoryFailed(what="the load of the others could not be read", reason=str(e)))
            return None
        others = {
            m.id: Load(m.stage, targets=frozenset(), name=m.name)
            for m in ctx.roster.members()
            if ctx.roster.is_alive(m.id)
        }
        said = {p: load for p, value in found.items() if (load := self._read(p, value)) is not None}
        # a serving peer counts, even without an announcement
        loads = {**others, **said, ctx.net.peer_id: self._own(queue)}
        horizon_s = HORIZON_PERIODS * plan.rebalance_s
        view = View(loads, plan.work, plan.state_bytes, rule=plan.rebalance, horizon_s=horizon_s)
        moves = self._confirmed.of(plan.strategy.assign(view))
        move = next((m for m in moves if m.peer == ctx.net.peer_id), None)
        if move is None:
            return None
        why = move.why or f"needs this peer more: {self._seen(view)}"
        ctx.emit(MoveDecided(target=move.target, reason=why))
        return move.target

    def _seen(self, view: View) -> str:
        """Describes the basis of a decision."""
        stages = []
        for stage, peers in enumerate(view.served()):
            speeds = [view.loads[p].speeds.get(stage, math.nan) for p in peers]
            each = ", ".join("?" if math.isnan(v) else f"{v:.1f}" for v in speeds)
            queued = sum(view.loads[p].queue for p in peers)
            stages.append(f"stage {stage} does {each} microbatches/s, and {queued:.1f} wait there")
        return "; ".join(stages)

    def _read(self, peer: PeerId, value: bytes) -> Load | None:
        """Returns the load of a serving or coming member; None: no such member, or an invalid announcement."""
        roster = self._ctx.roster
        try:
            said = Announcement.model_validate(json.loads(value))
        except (ValueError, TypeError, RecursionError):
            return None
        if not roster.knows(peer) or not (roster.is_alive(peer) or said.coming):
            return None
        speeds = {said.stage: said.speed or math.nan}
        return Load(
            said.stage, said.queue, speeds, targets=said.targets, name=roster.name(peer), prepares_s=said.prepares_s
        )
