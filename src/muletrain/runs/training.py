"""A peer's training, from the assignment of stage and members to the end of the run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.compute.base import WrappedCompute
from muletrain.compute.probe import chip, used_memory
from muletrain.compute.swap.swapped import SwappedCompute
from muletrain.data.samples import HeldoutSamples, SampleSource
from muletrain.events import ClientEnlisted, PeerDown, PeerJoined, PoolWorked, RunStarted, SampleReplaced, SlotWorked
from muletrain.runs.assemble import versions
from muletrain.runs.join.admission import Admission, LiveMembers
from muletrain.runs.worker_files import LEFT
from muletrain.runtime.checkpoint.checkpointing import Book
from muletrain.runtime.core.lifecycle import State
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.members.context import Context
from muletrain.runtime.peer.peer import Peer
from muletrain.runtime.peer.reporting import PeerHost
from muletrain.runtime.peer.service import Service

if TYPE_CHECKING:
    from muletrain.compute.base import Compute
    from muletrain.compute.jobs import Job
    from muletrain.data.samples import Data
    from muletrain.events import Event, EventLog
    from muletrain.network.base import Network
    from muletrain.runs.assemble import RunFacts
    from muletrain.runs.chaos import Points
    from muletrain.runs.host import Host
    from muletrain.runs.join.admission import RunInfo
    from muletrain.runs.measure.machine import Machine
    from muletrain.runtime.checkpoint.store import CheckpointStore
    from muletrain.runtime.members.messages import Member
    from muletrain.runtime.members.roster import Roster
    from muletrain.runtime.recovery.messages import StepBack
    from muletrain.runtime.step.record import StepRecord
    from muletrain.runtime.transfer.tokens import Sharing


@dataclass(frozen=True)
class Seat:
    """The parts of a peer that is ready to train. ``compute``: the stage's; ``cache``: the corpus, if this peer has the
    data; ``joining``: the run has already begun."""

    facts: RunFacts
    roster: Roster
    network: Network
    compute: Compute
    machine: Machine
    cache: Data | None
    info: RunInfo
    place: CheckpointStore
    sharing: Sharing | None
    joining: bool = False


class Training:
    """Trains one peer after another: a new peer for each change of stage, and after each new beginning."""

    def __init__(self, host: Host, points: Points) -> None:
        """``points``: where faults are injected into this peer."""
        self._host, self._points = host, points
        self.peer: Peer | None = None
        self.steps, self._total = 0, -1
        self.reason = "stopped by the user"
        self.skipped, self._taken, self._in_a_row = 0, 0, 0
        self._stopped = False
        self._left_out = set[str]()
        """Reasons for unusable samples that were already reported."""
        self._stops = True
        """Does an unusable sample end the run?"""
        self._begin = 0.0

    @property
    def complete(self) -> bool:
        """Have all steps been done?"""
        return self.steps == self._total

    @property
    def unlearned(self) -> int:
        """Updates at the end of the run that were all skipped, if that is no chance: several, or all there were."""
        return self._in_a_row if self._in_a_row > 1 or self._in_a_row == self._taken else 0

    @property
    def log(self) -> EventLog:
        return self._host.log

    def stop(self) -> None:
        """End in order, after the current step. A joiner on a machine without the founder only leaves: the run belongs
        to another owner."""
        self._stopped = True
        if self.peer is not None and self._host.spec.keeps_ticket:
            self.peer.leave()
        elif self.peer is not None:
            self.peer.stop()

    async def run(self, seat: Seat) -> bool:
        """Train to the end of the run. Returns False if the last checkpoint could not be written."""
        host, facts, roster = self._host, seat.facts, seat.roster
        members = LiveMembers(roster)
        Admission(seat.network, host.log.emit, seat.info, facts.seating(), members).open()
        host.roster = roster
        self._stops = facts.config.data.on_error == "stop"
        self.steps, self._total = roster.genesis.first_step, facts.config.train.steps
        self._begin = host.clock.now()
        if host.spec.role == "found" or host.spec.keeps_ticket:
            host.log.emit(_started(facts, roster))
        links, ready = host.links(facts, seat.network), [seat.compute]
        about = {**facts.manifest(roster.genesis.run_id), "data": seat.info.data.hex()}
        about["precision"] = seat.machine.precision.value
        book = Book(seat.place, about, {"tokenizer.json": seat.info.tokenizer})

        async def make(joins: bool, back: StepBack | None) -> Peer:
            """Make our peer for the stage in the roster. The first peer's compute is ready."""
            if ready:
                host.compute = ready.pop()
            else:
                host.close_compute()
                host.compute = await host.build(facts.drawn(), roster.own.stage, seat.machine, None)
            return self._make(seat, links, host.compute, book, joins, back)

        try:
            return await Service(make, joining=seat.joining).run()
        finally:
            host.close_compute()
            if self.peer is not None and self.peer.left:
                self.reason = LEFT

    def _make(
        self, seat: Seat, links: Network, compute: Compute, book: Book, joins: bool, back: StepBack | None
    ) -> Peer:
        host, facts, roster, cache, sharing = self._host, seat.facts, seat.roster, seat.cache, seat.sharing
        plan, emit, draw = facts.plan(), self._emit, random.SystemRandom()
        ctx = Context.at_stage(
            links, host.clock, compute, roster, plan, emit, Tasks(), draw, self._of_pool, host.blocks
        )
        ctx.reached = self._points.reached
        source = facts.source(cache) if cache is not None else None if sharing is None else sharing.source
        heldout = None if cache is None else facts.heldout(cache)
        for samples in (source, heldout):
            if isinstance(samples, SampleSource | HeldoutSamples):
                samples.found = self._unusable
        self.peer = peer = Peer(
            ctx,
            host=_Process(self, self._host, seat),
            source=source,
            heldout=heldout,
            sharing=sharing,
            book=book,
            reports=host.spec.keeps_ticket,
            joining=joins,
            back=back,
            log_bytes=facts.needs()[roster.own.stage].spare(seat.machine.offer),
        )
        if plan.trace and (swapped := _swapped(host.compute)) is not None:
            swapped.jobs.ended = self._ended
        need = facts.needs()[roster.own.stage].of_device(seat.machine.offer)
        peer.reporting.tell(_joined(roster.own, compute, seat.machine, host.spec.threads, need))
        if self._stopped:
            self.stop()
        return peer

    def _emit(self, event: Event) -> None:
        """Report an event. That others go at the end of the run is no news."""
        ended = self.peer is not None and self.peer.position.life.state is State.FINISHED
        if not (ended and isinstance(event, PeerDown)):
            self._host.log.emit(event)

    def _unusable(self, sample: int, other: int, reason: str) -> None:
        """Report an unusable sample, once; ``data.on_error`` says whether the run ends after the step."""
        if self.peer is None or reason in self._left_out:
            return
        self._left_out.add(reason)
        self.peer.reporting.tell(SampleReplaced(sample=sample, other=other, reason=reason, stops=self._stops))
        if self._stops:
            self.reason = "a sample cannot be used (data.on_error)"
            self.peer.stop()

    def _of_pool(self, event: Event) -> None:
        """Report the clients' work, also on the coordinator's machine."""
        if isinstance(event, ClientEnlisted):
            self._host.known[event.peer_id] = event.name
        if isinstance(event, PoolWorked) and self.peer is not None:
            self.peer.reporting.tell(event)
        else:
            self._host.log.emit(event)

    def _ended(self, job: Job, seconds: float) -> None:
        """Report, for the trace, the work of a swapped stage on a sub-model. Callable from any thread."""
        if job.part is not None:
            slot = job.what if job.what in ("load", "drain") else "sub-model"
            what = f"{job.what} part {job.part}"
            self._host.log.emit(SlotWorked(slot=slot, what=what, step=self.steps, seconds=seconds))

    def applied(self, record: StepRecord, limit_s: float | None) -> bool:
        """Count a step. Returns True once the time limit of the run is over."""
        if (swapped := _swapped(self._host.compute)) is not None and self.peer is not None:
            self.peer.reporting.tell(swapped.worked(record.step + 1))
        self.steps, self._taken, self.skipped = record.step + 1, self._taken + 1, self.skipped + record.skip
        if self._host.compute is not None:
            self._in_a_row = self._host.compute.skipped
        if limit_s is None or self._host.clock.now() - self._begin <= limit_s:
            return False
        self.reason = f"the time limit of {limit_s:.0f} s (train.time_limit) is over"
        return True


class _Process(PeerHost):
    """The process of a peer that trains at ``seat``."""

    def __init__(self, training: Training, host: Host, seat: Seat) -> None:
        self._training, self._host = training, host
        self._facts, self._offer, self._device = seat.facts, seat.machine.offer, seat.machine.device

    def fits(self, stage: int) -> bool:
        return self._facts.needs()[stage].fits(self._offer)

    def prepares_s(self, stage: int) -> float:
        return self._host.base_s(self._facts, stage)

    async def prepare(self, stage: int) -> None:
        await self._host.base(self._facts, stage)

    def memory(self) -> int:
        return used_memory(self._device)

    def applied(self, record: StepRecord) -> bool:
        return self._training.applied(record, self._facts.config.train.time_limit)

    def reported(self, event: Event, name: str) -> None:
        self._training.log.emit(event, name)


def _swapped(compute: Compute | None) -> SwappedCompute | None:
    while isinstance(compute, WrappedCompute):
        compute = compute.inner
    return compute if isinstance(compute, SwappedCompute) else None


def _started(facts: RunFacts, roster: Roster) -> RunStarted:
    config = facts.config
    return RunStarted(
        run_id=roster.genesis.run_id,
        config_digest=facts.config_digest.hex(),
        versions=versions(),
        steps=config.train.steps,
        stages=config.fleet.stages,
        peers=len(roster.genesis.members),
        microbatches=config.microbatches,
        tokens_per_step=config.train.batch * facts.spec.context,
        first_step=roster.genesis.first_step,
        params=facts.spec.cut_params(facts.cut),
        members={m.id: m.name for m in roster.genesis.members},
    )


def _joined(member: Member, compute: Compute, machine: Machine, threads: int, memory: int) -> PeerJoined:
    return PeerJoined(
        peer_id=member.id,
        name=member.name,
        stage=member.stage,
        device=str(machine.device),
        precision=machine.precision.value,
        trainer=member.trainer,
        params=compute.n_params,
        threads=threads,
        chip=chip(machine.device),
        swapped=0 if compute.parts == 1 else compute.parts,
        by_block=compute.by_block,
        memory=memory if compute.parts == 1 else 0,
    )
