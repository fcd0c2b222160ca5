"""The trainer role builds microbatches and sees them through the stages. A trainer holds no weights, so losing a
trainer loses nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from muletrain.errors import MuletrainError
from muletrain.events import OrphansTaken
from muletrain.runtime.core.times import pause_s
from muletrain.runtime.microbatch.dispatcher import StageLost
from muletrain.runtime.microbatch.messages import MAX_WITHOUT, Attempt, Gap, TrainerDone
from muletrain.runtime.microbatch.validator import claimant_of
from muletrain.wire.codec import encode_samples

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    import numpy.typing as npt

    from muletrain.network.base import PeerId
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.microbatch.dispatcher import Dispatcher
    from muletrain.runtime.microbatch.inflight import InFlightStep
    from muletrain.runtime.microbatch.position import Survey
    from muletrain.runtime.microbatch.validator import Validator

MAX_TRIES = 60
"""Tries of one microbatch, while every stage has a peer, before the trainer gives up with an error: 9 minutes of pauses.
The wait for the step bounds how long a stage may be empty."""
MOST_AGAIN = 3
"""Checks of a microbatch in one repair: repeated requests may be lies, and our report that all microbatches are through
waits for repairs."""

MOST_ASKED = 4
"""Most peers of a stage to probe for their absence: a partition may take hundreds at once."""

R = TypeVar("R")


class Source(Protocol):
    """Makes microbatches: a pure function of (step, index)."""

    def microbatch(self, step: int, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Returns inputs and targets, as declared by the plan: tokens are int64 [B, T]."""
        ...


class Trainer:
    """Gives out the claimed microbatches of one step, within a window."""

    def __init__(
        self, ctx: Context, source: Source, dispatcher: Dispatcher, survey: Survey, window: int, work: InFlightStep
    ) -> None:
        """``dispatcher``: towards stage 0. ``window``: microbatches of each lane (``Strategy.lane``) under way at
        once."""
        self._ctx = ctx
        self._source = source
        self._dispatcher, self._survey = dispatcher, survey
        self._windows = defaultdict[int, asyncio.Semaphore](lambda: asyncio.Semaphore(window))
        """The window of each lane."""
        self._validation: asyncio.Task[None] | None = None
        """Measures the held-out loss."""
        self._attempts: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)
        self._work, self._step, self._lineage = work, work.step, work.lineage
        self._claimed: set[int] = set()
        self._turn = 0
        """Number of times that we moved on to the next trainer in line (``claimant_of``), because microbatches were
        missing and no peer was at work."""
        self._held_back: tuple[int, float] | None = None
        """How many microbatches were missing, and since when, while we did not move on because peers were at work [s]."""
        self._passed = False
        """Microbatches that we have not given out yet may have passed to other trainers likewise."""
        self._absences = ctx.meter.absences
        """Times that other peers may have believed us dead, before this step."""
        self._down_before = self._down()
        """Peers down before this step, which hold no microbatches of the step."""
        self._silent: set[int] = set()
        """Stages with a peer that was silent, but may come back, when we took microbatches over."""
        self._lacking: defaultdict[int, set[int]] = defaultdict(set)
        """By microbatch: the stages that lack it since its rerun began, or that may have lost it in flight. One rerun is
        for all of them. A stage of the present rerun may ask again: a replica may have dropped the microbatch since our
        question."""
        self._refilling: set[int] = set()
        """Microbatches whose rerun is in progress."""
        self._begun: dict[int, bool] = {}
        """Microbatches that were given out, and whether each is through."""
        self._repairs: set[asyncio.Task[None]] = set()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._gaps: defaultdict[int, dict[PeerId, Gap]] = defaultdict(dict)
        """By stage: each replica's last message, which says what replicas it does not count on."""

    def spawn(self, work: Coroutine[Any, Any, R], name: str) -> asyncio.Task[R]:
        """Run ``work`` until its end, or until the end of the step."""
        task = self._ctx.spawn(work, f"{name} {self._step}")
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def validate(self, validator: Validator) -> None:
        """Measure the held-out loss. Our microbatch 0, and so the step, waits for the measurement."""
        self._validation = self.spawn(validator.run(), "validation")

    def end(self) -> None:
        """Cancel the running tasks."""
        for task in self._tasks:
            task.cancel()

    async def run_step(self, *, retry: bool = False) -> None:
        """See all our microbatches through, then tell all peers. ``retry``: we were away, so other peers may have begun
        some."""
        await self._run(range(self._ctx.plan.microbatches), retry=retry)

    async def take_over_orphans(self, *, late: bool = False) -> None:
        """See through the microbatches that fell to us when their trainer died. ``late``: all should be through by now;
        if no peer is at work, microbatches of live trainers pass on, too."""
        if self._claims(self._work.missing(), 0):
            self._silent = await self._silent_stages()
        await self._run(self._work.missing(), retry=True)
        if not late or not all(self._begun.values()):  # if our own are late, the stages are slow, not the trainers
            return
        if self._claimed - self._begun.keys():
            self._passed = True
            return
        turn = self._turn + 1
        theirs = self._claims(self._work.missing(), turn)
        current = await self._survey.everyone(self._lineage, self._step) if theirs else {}
        at_work = any(progress.in_flight or progress.answering for progress in current.values())
        now, left = self._ctx.clock.now(), len(self._work.missing())
        if not at_work or self._held_back is None or left < self._held_back[0]:
            self._held_back = (left, now) if at_work else None
        if self._held_back is not None and now - self._held_back[1] < self._dispatcher.trips.long_s():
            return
        self._turn = turn
        if theirs := self._claims(self._work.missing(), turn):
            owners = sorted({self._ctx.roster.name(claimant_of(self._ctx, self._step, i, turn - 1)) for i in theirs})
            self._ctx.emit(OrphansTaken(step=self._step + 1, owners=", ".join(owners), microbatches=len(theirs)))
            await self._run(theirs, retry=True, turn=turn)

    def on_gap(self, sender: PeerId, gap: Gap) -> None:
        """A stage lacks microbatches: run our share again, for all stages that lack the same one. A microbatch still in
        flight follows as soon as it is through."""
        if self._ctx.roster.member(sender).stage == gap.stage:
            self._gaps[gap.stage][sender] = gap
        for index in gap.indices:
            if not self._is_mine(index, gap.turn) or (gap.early and index not in self._begun):
                continue
            self._lacking[index].add(gap.stage)
            if index not in self._refilling and (self._begun.get(index) or not gap.early):
                self._refilling.add(index)
                repair = self.spawn(self.refill(index), "refill")
                self._repairs.add(repair)
                repair.add_done_callback(self._repairs.discard)

    async def refill(self, index: int) -> None:
        """Run a microbatch again for the stages that lack it (``_lacking``), then for stages that asked meanwhile. All
        stages of a deep fleet may lack the microbatch, and one rerun for each would take as many times as long."""
        times = Counter[int]()
        try:
            while stages := tuple(s for s in sorted(self._lacking[index]) if times[s] < MOST_AGAIN):
                times.update(stages)
                self._lacking[index].clear()
                missing, _loss = await self._still_missing(index, stages)
                if missing:
                    await self.see_through(index, missing, asked=True)
                    self._begun[index] = True
        finally:
            self._lacking.pop(index, None)
            self._refilling.discard(index)

    async def _run(self, indices: Iterable[int], *, retry: bool, turn: int = 0) -> None:
        """Claim and see through our share of ``indices``, and tell all peers. Ends after
        ``microbatch/dispatcher._from`` and ``microbatch/position.still_missing`` of each microbatch, and
        ``microbatch/trainer._whole`` of the first."""
        mine, stages = self._claims(indices, turn), tuple(range(self._ctx.plan.stages))
        self._claimed.update(mine)
        tasks = [asyncio.create_task(self._whole(i, stages, retry=retry)) for i in mine]
        try:
            losses = await asyncio.gather(*tasks)
            if self._repairs:
                await asyncio.wait(set(self._repairs))  # not for later repairs: a liar could begin repairs for ever
        finally:
            for task in tasks:  # one failure ends all tasks
                task.cancel()
        if mine:
            ctx = self._ctx
            done = TrainerDone(lineage=self._lineage, step=self._step, indices=tuple(mine), losses=tuple(losses))
            await ctx.tell((*ctx.roster.others(), ctx.net.peer_id), done)

    def _may_have_passed(self, index: int) -> bool:
        """May another trainer have given out our ``index``? A trainer came meanwhile, or other peers believed us
        dead."""
        return self._passed or self._absences != self._ctx.meter.absences or not self._is_mine(index)

    def _claims(self, indices: Iterable[int], turn: int) -> list[int]:
        return [i for i in indices if i not in self._claimed and self._is_mine(i, turn)]

    def _is_mine(self, index: int, turn: int = 0) -> bool:
        return claimant_of(self._ctx, self._step, index, turn) == self._ctx.net.peer_id

    async def _whole(self, index: int, stages: tuple[int, ...], *, retry: bool) -> float:
        """See one microbatch through; after the last one that was in flight at a loss, see the lost parts through once more.
        Returns the loss [nats/token]. Ends after ``microbatch/validator._measured``."""
        if index == 0 and self._validation is not None:
            await asyncio.wait({self._validation})
        loss = await self.see_through(index, stages, retry=retry)
        self._begun[index] = True
        lost = self._lacking.keys() - self._refilling
        if all(self._begun[i] for i in lost):  # together: one survey tells of all that were in flight at a death
            self._refilling |= lost
            await asyncio.gather(*map(self.refill, sorted(lost)))
        return loss

    async def see_through(
        self,
        index: int,
        accumulate: tuple[int, ...],
        *,
        retry: bool = False,
        asked: bool = False,
    ) -> float:
        """Try one microbatch until success. Returns the loss [nats/token]. ``retry``: some peer may already have the
        microbatch; ``asked``: no peer has the microbatch. Ends after ``microbatch/dispatcher._from`` and
        ``microbatch/position.still_missing``; while a stage is empty, only when cancelled with the step."""
        loss: float | None = None
        async with self._windows[self._ctx.plan.strategy.lane(index)]:
            self._begun.setdefault(index, False)
            if retry or (self._may_have_passed(index) and not asked):
                self._work.asking.add(index)
                try:
                    accumulate, loss = await self._still_missing(index, accumulate, passed_on=True)
                finally:
                    self._work.asking.discard(index)
            tensors = [encode_samples(torch.from_numpy(a)) for a in self._source.microbatch(self._step, index)]
            tries = in_vain = 0
            while in_vain < MAX_TRIES:
                if not accumulate and loss is not None:
                    return loss
                request = Attempt(
                    lineage=self._lineage,
                    step=self._step,
                    index=index,
                    attempt=next(self._attempts[index]),
                    trainer=self._ctx.net.peer_id,
                    without=self._left_out(accumulate),
                )
                self._work.given.add(index)
                try:
                    return (await self._dispatcher.request(request, accumulate, tensors, gradient=False)).loss
                except StageLost:  # the stage's peers may be at the previous step, or dead without our knowledge
                    pass
                finally:
                    self._work.given.discard(index)
                await self._ctx.clock.sleep(pause_s(tries))
                tries += 1
                in_vain += all(map(self._ctx.roster.stage, range(self._ctx.plan.stages)))
                accumulate, loss = await self._still_missing(index, accumulate)
                self._dispatcher.refresh()
        raise MuletrainError(
            f"step {self._step + 1}: microbatch {index} could not be finished in {MAX_TRIES} tries; {self._ctx.who_is_there()}"
        )

    async def _still_missing(
        self, index: int, stages: tuple[int, ...], *, passed_on: bool = False
    ) -> tuple[tuple[int, ...], float | None]:
        """See ``Survey.still_missing``. ``passed_on``: another trainer may have given the microbatch out, and may see
        it through."""
        trips, silent = self._dispatcher.trips, self._silent if passed_on else ()
        patience_s = trips.long_s if passed_on else trips.usual_s
        return await self._survey.still_missing(
            self._lineage, self._step, index, stages, patience_s, self._ignored, silent=silent, given=passed_on
        )

    def _down(self) -> set[PeerId]:
        return {p for p in self._ctx.roster.everyone() if not self._ctx.roster.is_alive(p)}

    async def _silent_stages(self) -> set[int]:
        """The stages with a peer that went down in this step, and may come back."""
        roster, detector, down = self._ctx.roster, self._ctx.detector, defaultdict[int, list[str]](list)
        for peer in sorted(self._down() - self._down_before):
            down[roster.member(peer).stage].append(peer)
        stages = {p: stage for stage, peers in down.items() for p in peers[:MOST_ASKED]}
        gone = await asyncio.gather(*(detector.is_gone(p, self._lineage, self._step) for p in stages))
        return {stage for stage, never in zip(stages.values(), gone, strict=True) if not never}

    def _left_out(self, stages: tuple[int, ...]) -> tuple[PeerId, ...]:
        """Returns peers of ``stages`` that should compute a microbatch only if no other peer can."""
        said = {p for s in stages for gap in self._gaps[s].values() for p in gap.without}
        return tuple(sorted(filter(self._ignored, said))[:MAX_WITHOUT])

    def _ignored(self, peer: PeerId) -> bool:
        """Is the accumulator of ``peer`` of no use, because most of the stage's other replicas go on without ``peer``? If
        that holds for each replica, the first one's company counts, as among replicas (``policy.views``), and at the
        next turn the next one's: else the gaps of one come to the accumulators of another, and stay gaps."""
        roster = self._ctx.roster
        if not roster.knows(peer):
            return True
        if not self._outvoted(peer):
            return False
        live, said = roster.stage(stage := roster.member(peer).stage), self._gaps[stage]
        if not live or not all(map(self._outvoted, live)):
            return True
        first = live[max(gap.turn for gap in said.values()) % len(live)]
        return first in said and peer in said[first].without

    def _outvoted(self, peer: PeerId) -> bool:
        """Do most of the stage's other live replicas go on without ``peer``?"""
        stage = self._ctx.roster.member(peer).stage
        live, said = self._ctx.roster.stage(stage), self._gaps[stage]
        votes = sum(p != peer and p in said and peer in said[p].without for p in live)
        return 2 * votes > len(live) - (peer in live)
