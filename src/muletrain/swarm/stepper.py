"""One step's agreement: seal, reduce, record, apply (DESIGN "How a step goes", points 5-8).

The stepper owns what is true of the current step: its ledger, the hints about what is through, the announced sets, and the
record being assembled.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import TYPE_CHECKING

from muletrain.compute.base import Update
from muletrain.errors import DeadlineExceeded, MuletrainError, NetworkError, ProtocolError
from muletrain.events import Note
from muletrain.policy.cover import Cover, resolve
from muletrain.policy.deadline import Deadline
from muletrain.swarm.averaging import Averager, Round, RoundFailed
from muletrain.swarm.leaving import Departure
from muletrain.swarm.ledger import Ledger
from muletrain.swarm.messages import AskEntries, AskSeal, Entries, Gap, Held, Seal, ShardEntry, TrainerDone
from muletrain.swarm.record import RecordBuilder, StepRecord, round_id

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.swarm.context import Context

MAX_ATTEMPTS = 20
"""Rounds tried for one step before the peer gives up with an error instead of trying for ever."""
MAX_SILENCE = 6
"""Doubling deadlines without any news before a wait is declared hopeless,"""
PATIENCE_S = 300.0
"""but not before this time."""


class Behind(MuletrainError):
    """The others have gone on without us: what this step needs is gone, so the state must come from a replica."""


class Differs(Behind):
    """This replica's weights are not the others': the state must come from one of them, although it is of the same step."""


class Stepper:
    """Takes the run from one lineage to the next."""

    def __init__(
        self,
        ctx: Context,
        step: int,
        lineage: bytes,
        running: Callable[[], list[int]],
        orphaned: Callable[[frozenset[int]], None],
    ) -> None:
        """``running``: microbatches this peer works on. ``orphaned`` is told what is not through after a missed deadline."""
        self._ctx = ctx
        self._running = running
        self._orphaned = orphaned
        self.averager = Averager(ctx, self._publish)
        self._step_deadline = Deadline()
        self._seal_deadline = Deadline(floor_s=0.5, deviations=1.0)
        self._record_deadline = Deadline(unmeasured_s=10.0, floor_s=0.5)
        self.stop_requested = False
        self.departure = Departure(ctx)
        self.settled = True
        """The weights are those before ``step``: false while an update is being applied."""
        self.over = False
        """The run has ended before ``step``."""
        self._weights: bytes = b"\0" * 32
        self._differed: int | None = None
        """The last step at which our weights were not the others'."""
        self._hurried = False
        ctx.changed = self.hurry
        self._enter(step, lineage)

        self._previous = self._builder

    def _enter(self, step: int, lineage: bytes) -> None:
        self.step, self.lineage = step, lineage
        self._drop_ledger()
        self.losses: dict[int, float] = {}
        self._seals: dict[PeerId, Seal] = {}
        self._builder = RecordBuilder(step, lineage, self._ctx.plan.stages)
        self._changed = asyncio.Event()

    def _drop_ledger(self) -> None:
        """Nothing is in our accumulator."""
        self.ledger = Ledger(self.lineage, self.step, self._ctx.plan.microbatches)
        self.announced: Seal | None = None
        self._reduced = False

    # What arrives ---------------------------------------------------------------------------------------------------

    def on_trainer_done(self, message: TrainerDone) -> None:
        if len(message.indices) != len(message.losses) or any(
            i >= self._ctx.plan.microbatches for i in message.indices
        ):
            raise ProtocolError("trainer_done: indices outside the step, or not one loss for each")
        self.losses.update(zip(message.indices, message.losses, strict=True))
        self._changed.set()

    def on_seal(self, sender: PeerId, message: Seal) -> None:
        stage = self._ctx.roster.own.stage
        if (message.step, message.lineage) != (self.step, self.lineage):
            raise ProtocolError("seal of another step or lineage")
        if message.stage != stage or self._ctx.roster.member(sender).stage != stage:
            raise ProtocolError("seal from a peer of another stage")
        if any(i >= self._ctx.plan.microbatches for i in message.indices) or message.attempt >= MAX_ATTEMPTS:
            raise ProtocolError("seal with indices outside the step, or of an attempt that nobody makes")
        known = self._seals.get(sender)
        if known is None or known.attempt < message.attempt:
            self._seals[sender] = message
            self._changed.set()

    def on_entry(self, sender: PeerId, entry: ShardEntry) -> None:
        if self._ctx.roster.member(sender).stage != entry.stage:
            raise ProtocolError("shard entry for a stage that its sender does not serve")
        if entry.leaves not in (None, sender):
            raise ProtocolError("shard entry that says of another member that it leaves")
        self._builder.add(entry)
        self._changed.set()

    def entries(self) -> Entries:
        return Entries(entries=self._builder.entries())

    def previous_entries(self, step: int, lineage: bytes) -> tuple[ShardEntry, ...]:
        """Of the step before, for a member that missed a notice; empty for any other."""
        known = self._previous
        return known.entries() if (known.step, known.lineage) == (step, lineage) else ()

    def held(self) -> Held:
        return Held(
            current=True,
            stage=self._ctx.roster.own.stage,
            step=self.step,
            held=tuple(sorted(self.ledger.held)),
            running=tuple(self._running()),
            through=tuple(self.losses),
            losses=tuple(self.losses.values()),
        )

    # The step -------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Replicas must begin with the same weights, too."""
        self._weights = await self._ctx.compute.digest()

    async def run(self) -> StepRecord:
        """From the first microbatch to the applied update. Raises MuletrainError when the step cannot be completed."""
        ctx = self._ctx
        await self._until(self._all_through, self._step_deadline, "microbatches to go through", self._ask_progress)
        begin = ctx.clock.now()
        gradient, contents, round_ = await self._reduce()
        self._reduced = True
        await self._until(
            lambda: self._builder.record() is not None, self._record_deadline, "the step record", self._ask_entries
        )
        record = self._builder.record()
        assert record is not None  # _until returned
        ctx.stats.averaging_s += ctx.clock.now() - begin
        self._verify(record, round_, contents)
        await self._apply(record, gradient)
        return record

    def _all_through(self) -> bool:
        return len(self.losses) == self._ctx.plan.microbatches

    async def _reduce(self) -> tuple[Tensor, tuple[bytes, ...], Round]:
        attempt = -1
        while (attempt := max(attempt + 1, self._latest_attempt())) < MAX_ATTEMPTS:
            round_ = await self._agree(attempt)
            if round_ is None:
                continue
            try:
                gradient, contents = await self.averager.reduce(round_, self._ctx.compute.gradient())
            except RoundFailed as e:
                self._ctx.emit(Note(level="warning", message=f"averaging step {self.step}, attempt {attempt}: {e}"))
                self.ledger.reopen(keep=True)
                continue
            return gradient, contents, round_
        raise MuletrainError(
            f"step {self.step}: {MAX_ATTEMPTS} attempts to average the stage failed; see the events for why"
        )

    async def _agree(self, attempt: int) -> Round | None:
        """Announce what we hold and hear what the others hold. None when gaps had to be run again first."""
        stage = self._ctx.roster.own.stage
        sealed = await self._announce(attempt)
        if self._latest_attempt() > attempt:  # sets of different attempts say nothing together: join the others'
            self.ledger.reopen(keep=True)
            return None
        cover = resolve(sealed, self._ctx.plan.microbatches)
        if cover.gaps or cover.dropped:
            await self._refill(cover, attempt)
            return None
        ident = round_id(self.lineage, stage, self.step, attempt, sealed, cover.chosen)
        return Round(
            id=ident, lineage=self.lineage, step=self.step, stage=stage, members=tuple(sorted(sealed)),
            contributors=tuple(m for m in cover.chosen if sealed[m]), microbatches=self._ctx.plan.microbatches,
            n_params=self._ctx.compute.n_params, stop=self.stop_requested, leaves=self.departure.announced(),
        )  # fmt: skip

    def _latest_attempt(self) -> int:
        """The highest that a live replica announced in this step."""
        return max((s.attempt for m, s in self._seals.items() if self._ctx.roster.is_alive(m)), default=0)

    async def _announce(self, attempt: int) -> dict[PeerId, frozenset[int]]:
        """Seal, and collect every live replica's seal of this attempt."""
        ctx, me = self._ctx, self._ctx.net.peer_id
        await self._until(
            lambda: not self.ledger.running, self._seal_deadline, "running microbatches", self._no_question
        )
        held = self.ledger.seal()
        replicas = tuple(m for m in ctx.roster.stage(ctx.roster.own.stage) if m != me)
        seal = Seal(
            lineage=self.lineage, step=self.step, stage=ctx.roster.own.stage, attempt=attempt, indices=tuple(sorted(held)),
            members=(*replicas, me), weights=self._weights,
        )  # fmt: skip
        self.announced = seal
        ctx.spawn(ctx.tell(replicas, seal), "seal")

        def complete() -> bool:
            alive = [m for m in ctx.roster.stage(ctx.roster.own.stage) if m != me]
            return all(m in self._seals and self._seals[m].attempt >= attempt for m in alive)

        await self._until(complete, self._seal_deadline, "the stage's replicas to seal", self._ask_replicas)
        seals = {m: s for m, s in self._seals.items() if s.attempt == attempt and ctx.roster.is_alive(m)}
        return {me: held, **{m: frozenset(s.indices) for m, s in seals.items() if self._agrees(m, seals)}}

    def _agrees(self, member: PeerId, seals: dict[PeerId, Seal]) -> bool:
        """Has ``member`` our weights? Kernels of other devices may differ in the last bit (DESIGN "Replicas"). The weights that most
        replicas have go on, of as many the lowest id's; who has others copies them: what it computed counts for nothing.

        Raises Differs when that is us, and MuletrainError when it was us at the step before, too."""
        if seals[member].weights == self._weights:
            return True
        ctx = self._ctx
        weights = {ctx.net.peer_id: self._weights} | {m: s.weights for m, s in seals.items()}
        votes = Counter(weights.values())
        if weights[min(weights, key=lambda m: (-votes[weights[m]], m))] == self._weights:
            del self._seals[member]
            ctx.suspect(member, "its weights are not those of the other replicas")
            return False
        if self._differed == self.step - 1:
            raise MuletrainError(
                f"step {self.step}: this peer's weights differ from its replicas' step after step, so it leaves. Replicas must agree "
                f"to the last bit: use devices of one kind in a stage, or optimizer.state_device = 'cpu' for the run"
            )
        self._differed = self.step
        raise Differs(f"step {self.step}: the weights here are not those of the other replicas")

    async def _refill(self, cover: Cover, attempt: int) -> None:
        """Microbatches are in no accumulator, or twice: keep the chosen sets, run the gaps again for this stage alone."""
        ctx = self._ctx
        keep = ctx.net.peer_id in cover.chosen
        if not keep:  # what this peer did counts as done twice
            ctx.compute.clear()
            ctx.stats.microbatches -= len(self.ledger.held)
            ctx.stats.recomputed += len(self.ledger.held)
        self.ledger.reopen(keep=keep)
        gaps = frozenset(cover.gaps)
        message = f"step {self.step}: stage {ctx.roster.own.stage} runs {len(gaps)} microbatches again"
        ctx.emit(Note(level="warning", message=message))

        async def refilled() -> None:
            """Gaps are filled when no replica misses them; its own ledger is each one's truth."""
            for pause in itertools.count():
                union = set(self.ledger.held)
                for peer, held in (await ctx.ask_held(ctx.roster.replicas(), self.lineage, self.step)).items():
                    if held.step > self.step:
                        raise Behind(f"step {self.step}: {ctx.roster.member(peer).name} is at step {held.step}")
                    union |= set(held.held) if held.current else set()
                if gaps <= union:
                    return
                await ctx.clock.sleep(min(2.0, 0.05 * 2**pause))

        limit = self._step_deadline
        for patience in range(MAX_SILENCE):
            gap = Gap(
                lineage=self.lineage, step=self.step, stage=ctx.roster.own.stage, attempt=attempt,
                indices=tuple(sorted(gaps - self.ledger.held)),
            )  # fmt: skip
            await ctx.tell(ctx.roster.trainers(), gap)
            try:
                await ctx.clock.deadline(refilled(), limit.seconds(patience), "missing microbatches")
            except DeadlineExceeded:
                await self._ask_everyone()
            else:
                return
        raise MuletrainError(
            f"step {self.step}: {len(gaps)} missing microbatches were not run again; {self._ctx.who_is_there()}"
        )

    async def _publish(self, entry: ShardEntry) -> None:
        self._builder.add(entry)
        self._changed.set()
        self._ctx.spawn(
            self._ctx.tell(self._ctx.roster.everyone(), entry), "entry"
        )  # a frozen peer must not hold us up

    def _verify(self, record: StepRecord, round_: Round, contents: tuple[bytes, ...]) -> None:
        """The bytes we hold must be those the record speaks of."""
        entry = record.stages[round_.stage]
        if entry.round != round_.id or tuple(s.content for s in entry.shards) != contents:
            raise Behind(
                f"step {self.step}: the run agreed on another gradient of stage {round_.stage} than this peer holds"
            )

    async def _apply(self, record: StepRecord, gradient: Tensor) -> None:
        ctx = self._ctx
        begin = ctx.clock.now()
        self.settled = False
        async with ctx.device(0):
            await ctx.compute.apply(gradient, Update(self.step, record.clip_scale(ctx.plan.clip), record.skip))
        self._weights = await ctx.compute.digest()
        ctx.stats.apply_s += ctx.clock.now() - begin

    def advance(self, record: StepRecord) -> None:
        """Begin the next step: the record's hash is its lineage."""
        self.averager.forget()
        self._previous = self._builder
        self._enter(self.step + 1, record.hash)
        self.settled = True

    async def let_go(self) -> None:
        """Nothing that still runs may end in an accumulator of another step, and no donor may take what comes for this step's state."""
        await self._until(
            lambda: not self.ledger.running, self._seal_deadline, "running microbatches", self._no_question
        )
        self._drop_ledger()
        self.ledger.seal()
        self.settled = False

    async def rejoin(self, step: int, lineage: bytes) -> None:
        """Go on at ``step``, whose state was loaded; what we did for another step is forgotten."""
        self.averager.forget()
        self._ctx.compute.clear()
        if (step, lineage) == (self.step, self.lineage):  # what the others said of it still holds
            self._drop_ledger()
        else:
            self._enter(step, lineage)
        self.settled = True
        await self.open()

    # Waiting --------------------------------------------------------------------------------------------------------

    async def _until(
        self, condition: Callable[[], bool], deadline: Deadline, what: str, ask: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Wait for ``condition``; on each missed deadline, and when somebody dies, ask those we wait for, and wait on meanwhile. Raises
        MuletrainError after MAX_SILENCE, and what ``ask`` raises."""
        clock = self._ctx.clock
        begin = clock.now()
        attempt, due = 0, begin + deadline.seconds()
        self._hurried = False
        asking: asyncio.Task[None] | None = None
        try:
            while not condition():
                self._changed.clear()
                if asking is not None and asking.done():
                    asking.result()
                    asking = None
                try:  # what else happens does not put the question off
                    await clock.deadline(self._changed.wait(), max(0.0, due - clock.now()), what)
                except DeadlineExceeded:
                    attempt += 1
                    due = clock.now() + deadline.seconds(attempt)
                    if attempt >= MAX_SILENCE and clock.now() - begin > PATIENCE_S:
                        why = self._ctx.who_is_there()
                        raise MuletrainError(f"step {self.step}: gave up waiting for {what}; {why}") from None
                else:
                    if not self._hurried:
                        continue
                if asking is None:
                    self._hurried = False
                    asking = asyncio.create_task(ask())
                    asking.add_done_callback(lambda _: self._changed.set())
        finally:
            if asking is not None and not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        deadline.measured(clock.now() - begin)

    def touched(self) -> None:
        """Something a wait may depend on changed (a microbatch finished)."""
        self._changed.set()

    def hurry(self) -> None:
        """Somebody died: what we wait for may have been theirs, so ask now, not at the deadline."""
        self._hurried = True
        self._changed.set()

    async def _no_question(self) -> None:
        return None

    async def _ask_progress(self) -> None:
        """Nothing moved for long: find out who is there, and what is through. A dead trainer's microbatches fall to the others."""
        await self._ask_everyone()
        self._orphaned(frozenset(range(self._ctx.plan.microbatches)) - self.losses.keys())

    async def _ask_replicas(self) -> None:
        """A lost announcement must not stop the stage: whoever made it can say it again."""
        ask = AskSeal(lineage=self.lineage, step=self.step).pack()
        await asyncio.gather(*(self._ask_seal(peer, ask) for peer in self._ctx.roster.replicas()))

    async def _ask_seal(self, peer: PeerId, ask: bytes) -> None:
        await self._ask(peer)
        if not self._ctx.roster.is_alive(peer):
            return
        try:
            answer = await self._ctx.net.call(peer, AskSeal.KIND, ask, timeout_s=self._ctx.probe_deadline.seconds(1))
            if answer:
                self.on_seal(peer, Seal.unpack(answer))
        except NetworkError as e:
            self._ctx.suspect(peer, str(e))

    async def _ask_everyone(self) -> None:
        """Those believed dead, too: a link that healed says nothing by itself."""
        await asyncio.gather(*(self._ask(peer) for peer in self._ctx.roster.everyone()))

    async def _ask(self, peer: PeerId) -> None:
        """Learn what ``peer`` knows of this step; leave it out while it is at an earlier one. Raises Behind if it is at a later one."""
        held = await self._ctx.probe(
            peer, self.lineage, self.step, attempt=1
        )  # patiently: it would be left out of the round
        if held is None:
            return
        if held.step > self.step:
            if self._reduced and await self._entries_from(peer):  # all that we lacked was word of the others
                return
            raise Behind(f"step {self.step}: {self._ctx.roster.member(peer).name} is at step {held.step}")
        if not held.current:
            self._ctx.suspect(peer, f"it is still at step {held.step}")
        elif len(held.through) == len(held.losses) and all(i < self._ctx.plan.microbatches for i in held.through):
            self.losses.update(zip(held.through, held.losses, strict=True))
            self._changed.set()

    async def _ask_entries(self) -> None:
        """A lost notice must not stop the run: any peer may know the entries we miss."""
        if not any(await asyncio.gather(*(self._entries_from(peer) for peer in self._ctx.roster.everyone()))):
            await self._ask_everyone()

    async def _entries_from(self, peer: PeerId) -> bool:
        """Learn the entries that ``peer`` knows of this step. True if the record is whole now."""
        ask = AskEntries(lineage=self.lineage, step=self.step).pack()
        try:
            answer = await self._ctx.net.call(peer, AskEntries.KIND, ask, timeout_s=self._ctx.probe_deadline.seconds(1))
            for entry in Entries.unpack(answer).entries:
                self._builder.add(entry)
        except NetworkError as e:
            self._ctx.suspect(peer, str(e))
        except ProtocolError as e:
            self._ctx.refused(peer, str(e))
        return self._builder.record() is not None
