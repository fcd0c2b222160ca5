"""One step's agreement: seal, reduce, record, apply (DESIGN "How a step goes", points 5-8).

The stepper owns what is true of the current step: its ledger, the hints about what is through, the announced sets, and the
record being assembled.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any, TypeVar

from muletrain.compute.base import Update
from muletrain.errors import DeadlineExceeded, MuletrainError, NetworkError, PeerUnreachable, ProtocolError
from muletrain.events import Note
from muletrain.policy.cover import Cover, resolve
from muletrain.policy.deadline import Deadline
from muletrain.policy.views import View, company, yields
from muletrain.swarm.averaging import Averager, Round, RoundFailed
from muletrain.swarm.holding import Holding, fetch_gradient
from muletrain.swarm.leaving import Departure
from muletrain.swarm.ledger import Ledger
from muletrain.swarm.messages import (
    AskEntries,
    AskSeal,
    AskViews,
    Entries,
    Gap,
    Held,
    MemberView,
    RoundEntry,
    Seal,
    TrainerDone,
    Views,
)
from muletrain.swarm.record import RecordBuilder, StepRecord, round_id
from muletrain.swarm.waiting import MAX_SILENCE, Waits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine

    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.swarm.context import Context

T = TypeVar("T")
MAX_ATTEMPTS = 20
"""Rounds tried for one step before the peer gives up with an error instead of trying for ever."""
GRACE_S = 0.25
"""Between the first sign that others are beyond what we wait for, and the question whether we missed it."""
MEETING_POINTS = 2
"""Peers of other stages that are asked about replicas we do not reach; the first ones, so that those replicas ask the same."""
PAUSE_S, PAUSE_MAX_S = 0.05, 2.0
"""Before the next question; doubles."""


class Behind(MuletrainError):
    """The others have gone on without us. ``weights_hold``: ours are still those before this step, so that applying what the others
    agreed on is enough; else the state must come from a replica."""

    def __init__(self, message: str, *, weights_hold: bool = True) -> None:
        super().__init__(message)
        self.weights_hold = weights_hold


class _HeldElsewhere(Exception):
    """A replica holds a round of this step."""


class _LeftOut(Exception):
    """Replicas that do not count on us go on, and we do not (``policy.views``)."""


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
        self._waits = Waits(ctx.clock, self._look_around, self._view)
        self.touched = self._waits.touched
        self.averager = Averager(ctx, lambda: bool(self._held_by_replicas()))
        self._step_deadline = Deadline()
        self._seal_deadline = Deadline(floor_s=5.0)
        self._record_deadline = Deadline(unmeasured_s=10.0, floor_s=5.0)
        self.stop_requested = False
        self.departure = Departure(ctx)
        self.settled = True
        """The weights are those before ``step``: false while an update is being applied."""
        self.over = False
        """The run has ended before ``step``."""
        self._weights: bytes = b"\0" * 32
        self._previous: tuple[RecordBuilder, Holding] | None = None
        ctx.changed = self.touched
        self._enter(step, lineage)

    def _enter(self, step: int, lineage: bytes) -> None:
        self.step, self.lineage = step, lineage
        self.ledger = Ledger(lineage, step, self._ctx.plan.microbatches)
        self.losses: dict[int, float] = {}
        self._seals: dict[PeerId, Seal] = {}
        self.announced: Seal | None = None
        self.away = False
        """The others go on without us: what we do for this step is of no use to them."""
        self._holding: Holding | None = None
        self._gathering = False
        self._reducing: Seal | None = None
        self._hearsay: dict[PeerId, View] = {}
        self._meeting: dict[PeerId, MemberView] = {}
        self._behind: Behind | None = None
        self._overtaken = False
        self._attested: RoundEntry | None = None
        self._differing: set[PeerId] = set()
        self._builder = RecordBuilder(step, lineage, self._ctx.plan.stages)

    # What arrives ---------------------------------------------------------------------------------------------------

    def on_trainer_done(self, message: TrainerDone) -> None:
        if len(message.indices) != len(message.losses) or any(
            i >= self._ctx.plan.microbatches for i in message.indices
        ):
            raise ProtocolError("trainer_done: indices outside the step, or not one loss for each")
        self.losses.update(zip(message.indices, message.losses, strict=True))
        self.touched()

    def on_seal(self, sender: PeerId, message: Seal) -> None:
        stage = self._ctx.roster.own.stage
        if (message.step, message.lineage) != (self.step, self.lineage):
            raise ProtocolError("seal of another step or lineage")
        if message.stage != stage or self._ctx.roster.member(sender).stage != stage:
            raise ProtocolError("seal from a peer of another stage")
        if (
            sender not in message.members
            or any(i >= self._ctx.plan.microbatches for i in message.indices)
            or message.attempt >= MAX_ATTEMPTS
        ):
            raise ProtocolError("seal with indices outside the step, or of an attempt that nobody makes")
        known = self._seals.get(sender)
        if known is None or known.attempt < message.attempt:
            self._seals[sender] = message
            self.touched()
            if not self._all_through():
                self.overtaken(sender)
            if self._attested is not None:  # no other attempt is needed: what we hold is for everyone
                self._ctx.spawn(self._ctx.tell((sender,), self._attested), "entry again")

    def on_entry(self, sender: PeerId, entry: RoundEntry) -> None:
        if sender != entry.holder or self._ctx.roster.member(sender).stage != entry.stage:
            raise ProtocolError("round entry in another's name, or for a stage that its sender does not serve")
        if not set(entry.leaves) <= set(entry.members):
            raise ProtocolError("round entry that says of others than its members that they leave")
        self._builder.add(entry)
        self.touched()
        if entry.stage == self._ctx.roster.own.stage:
            for member in filter(self._ctx.roster.is_alive, entry.without):
                self._ctx.spawn(self._ctx.probe(member, self.lineage, self.step), "doubt")

    def on_view(self, sender: PeerId, ask: AskViews) -> Views:
        """Members of another stage that do not reach each other learn of each other here: views of those that we reach. Raises
        ProtocolError."""
        if (ask.step, ask.lineage) != (self.step, self.lineage) or ask.view.member != sender:
            raise ProtocolError("view of another step or lineage, or of another peer")
        self._meeting[sender] = ask.view
        stage, roster = self._ctx.roster.member(sender).stage, self._ctx.roster
        return Views(
            views=tuple(v for m, v in self._meeting.items() if roster.member(m).stage == stage and roster.is_alive(m))
        )

    def overtaken(self, sender: PeerId) -> None:
        """``sender`` is done with what we still wait for. Usually we are about to be; if not, a notice was lost, or we were."""
        if not self._overtaken and not self.away:
            self._overtaken = True
            self._ctx.spawn(self._find_out(sender, self.step), "overtaken")

    async def _find_out(self, sender: PeerId, step: int) -> None:
        await self._ctx.clock.sleep(GRACE_S)
        if self.step == step:
            self._overtaken = False
            await self.find_out(sender)

    async def find_out(self, sender: PeerId) -> None:
        """What we still wait for, ``sender`` may know."""
        step = self.step
        if self.away:
            return
        try:
            await self._ask(sender)
        except Behind as e:
            self._behind = e if self.step == step else None
        self.touched()

    def entries(self, step: int, lineage: bytes) -> Entries:
        """Of this step or the one before; none for any other."""
        builders = [self._builder] if self._previous is None else [self._builder, self._previous[0]]
        known = [b.entries() for b in builders if (b.step, b.lineage) == (step, lineage)]
        return Entries(entries=known[0] if known else ())

    def gradient_piece(self, round_: bytes, offset: int) -> bytes:
        """Of a round that we hold. Raises ProtocolError for any other."""
        for holding in (self._holding, self._previous[1] if self._previous is not None else None):
            if holding is not None and holding.entry.round == round_:
                return holding.piece(offset)
        raise ProtocolError("the gradient of this round is not held here (not yet, or not any more)")

    def covered(self) -> frozenset[int]:
        """Microbatches that are not to be accumulated again: ours; all of them once we hold the stage's mean gradient."""
        return self.ledger.held if self._holding is None else frozenset(range(self._ctx.plan.microbatches))

    def held(self) -> Held:
        return Held(
            current=True,
            stage=self._ctx.roster.own.stage,
            step=self.step,
            held=tuple(sorted(self.covered())),
            running=tuple(self._running()),
            through=tuple(self.losses),
            losses=tuple(self.losses.values()),
        )

    # The step -------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Replicas must begin with the same weights, too."""
        self._weights = await self._ctx.compute.digest()

    async def run(self, *, returned: bool = False) -> StepRecord:
        """From the first microbatch to the applied update. ``returned``: we were away, and may be behind still. Raises Behind, and
        MuletrainError when the step cannot be completed."""
        if returned:
            await self._ask_holders()
        holding = self._holding = await self._hold()
        begin = self._ctx.clock.now()
        await self._waits.until(
            lambda: self._builder.record() is not None, self._record_deadline, f"the record of step {self.step}", self._ask_entries
        )  # fmt: skip
        record = self._builder.record()
        assert record is not None  # until returned
        self._ctx.stats.averaging_s += self._ctx.clock.now() - begin
        await self._apply(record, holding.gradient)
        return record

    async def replay(self) -> StepRecord | None:
        """The others finished this step without us, but keep what it takes until they apply the next: apply it. None where nobody has it
        (any more)."""
        await self._quiesce()
        roster = self._ctx.roster
        for peer in sorted(roster.everyone(), key=lambda p: not roster.is_alive(p)):
            if self._builder.record() is not None or await self._entries_from(peer):
                break
        record = self._builder.record()
        if record is None:
            return None
        round_ = record.stages[roster.own.stage].round
        if self._holding is None or self._holding.entry.round != round_:
            self._holding = await self._taken(round_)
        if self._holding is None:
            return None
        await self._apply(record, self._holding.gradient)
        return record

    def _all_through(self) -> bool:
        return len(self.losses) == self._ctx.plan.microbatches

    # Holding the stage's gradient -----------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """During every wait. Whoever holds a round never tries another: it says so, and whom it goes on without. Whoever holds none takes
        it from one that does. Raises _HeldElsewhere; RoundFailed when a member of the round being reduced tries another; Behind when
        the run agreed on what we do not hold."""
        if self.away:
            return
        if self._behind is not None:
            raise self._behind
        if self._reducing is not None and self._latest_attempt(self._reducing.members) > self._reducing.attempt:
            raise RoundFailed(f"averaging step {self.step}: another attempt has begun")
        record, own = self._builder.record(), self._ctx.roster.own.stage
        if self._holding is not None:
            self._attest(self._holding.entry)
            record = self._builder.record()
        if record is not None and (self._holding is None or self._holding.entry.round != record.stages[own].round):
            raise Behind(f"step {self.step}: the run agreed on a gradient of stage {own} that this peer does not hold")
        if self._holding is None and self._held_by_replicas():
            lost = self._reducing is not None and not all(map(self._ctx.roster.is_alive, self._reducing.members))
            if lost or not self._gathering:
                raise _HeldElsewhere

    def _held_by_replicas(self) -> list[RoundEntry]:
        """What live replicas attest that they hold of this step."""
        alive = self._ctx.roster.is_alive
        return [e for e in self._builder.held(self._ctx.roster.own.stage) if alive(e.holder)]

    def _attest(self, entry: RoundEntry) -> None:
        """Tell everyone that we hold the round; again when another of its members is believed dead. A member that is alive all the same
        applies what we hold, as soon as it hears of the record."""
        me, alive = self._ctx.net.peer_id, self._ctx.roster.is_alive
        known = self._builder.holders(entry.stage, entry.round)
        without = {m for m in entry.members if m != me and m not in known and not alive(m)}
        if self._attested is not None:
            if without <= set(self._attested.without):
                return
            without |= set(self._attested.without)
        self._attested = entry.model_copy(update={"holder": me, "without": tuple(sorted(without))})
        self._builder.add(self._attested)
        everyone = self._ctx.roster.everyone()
        self._ctx.spawn(self._ctx.tell(everyone, self._attested), "entry")  # a frozen peer must not hold us up

    async def _hold(self) -> Holding:
        """This stage's mean gradient: reduced with the other replicas, or taken from one that holds it."""
        for tries in itertools.count():
            try:
                await self._waits.until(
                    self._all_through, self._step_deadline, "microbatches to go through", self._ask_progress
                )
                return await self._reduce()
            except _HeldElsewhere:
                holding = await self._gathered(self._taken(None))
                if holding is not None:
                    return holding
                await self._ctx.clock.sleep(min(PAUSE_MAX_S, PAUSE_S * 2.0**tries))
        raise AssertionError  # itertools.count does not end

    async def _taken(self, round_: bytes | None) -> Holding | None:
        """The gradient of ``round_`` (None: of any that a live replica holds), from whoever has it."""
        ctx = self._ctx
        alive, stage = ctx.roster.is_alive, ctx.roster.own.stage
        if round_ is None:
            known = [(e.holder, e) for e in self._held_by_replicas()]
        else:
            entry = next(e for e in self._builder.held(stage) if e.round == round_)
            holders = self._builder.holders(stage, round_)
            peers = sorted(ctx.roster.replicas(), key=lambda p: (not alive(p), p not in holders))
            known = [(p, entry) for p in peers]
        for peer, entry in known:
            try:
                holding = await fetch_gradient(ctx, peer, entry)
            except NetworkError as e:
                ctx.suspect(peer, f"gave no gradient of step {self.step}: {e}")
                continue
            if ctx.net.peer_id not in entry.members:  # what we accumulated is not in it
                ctx.stats.microbatches -= len(self.ledger.held)
                ctx.stats.recomputed += len(self.ledger.held)
            return holding
        return None

    async def _reduce(self) -> Holding:
        """Attempts, until one succeeds or somebody else's did (_HeldElsewhere)."""
        while (attempt := self._next_attempt()) < MAX_ATTEMPTS:
            try:
                round_ = await self._agree(attempt)
                if round_ is None:
                    continue
                return await self._averaged(round_)
            except RoundFailed as e:
                self._ctx.emit(Note(level="warning", message=f"averaging step {self.step}, attempt {attempt}: {e}"))
                self.ledger.reopen(keep=True)
                await self._ask_holders()
            except _LeftOut:
                await self._look_on()
        raise MuletrainError(
            f"step {self.step}: {MAX_ATTEMPTS} attempts to average the stage failed; see the events for why"
        )

    async def _averaged(self, round_: Round) -> Holding:
        """Raises RoundFailed."""
        begin = self._ctx.clock.now()
        self._reducing = self.announced
        try:
            gradient, shards = await self._gathered(self.averager.reduce(round_, self._ctx.compute.gradient()))
        finally:
            self._reducing = None
        self._ctx.stats.averaging_s += self._ctx.clock.now() - begin
        entry = RoundEntry(
            lineage=self.lineage, step=self.step, stage=round_.stage, round=round_.id, members=round_.members, shards=shards,
            stop=round_.stop, leaves=round_.leaves, holder=self._ctx.net.peer_id,
        )  # fmt: skip
        return Holding(entry, gradient)

    async def _gathered(self, work: Coroutine[Any, Any, T]) -> T:
        """While a gradient is on its way to us, that others have it already is no reason to stop."""
        self._gathering = True
        try:
            return await self._waits.watched(work)
        finally:
            self._gathering = False

    def _next_attempt(self) -> int:
        """After ours, but not before what others try already."""
        return max(0 if self.announced is None else self.announced.attempt + 1, self._latest_attempt())

    async def _agree(self, attempt: int) -> Round | None:
        """Announce what we hold and hear what the others hold. None when another attempt must follow: gaps had to be run again first, or
        members do not count on the same ones yet. Raises _LeftOut."""
        stage = self._ctx.roster.own.stage
        seals = await self._announce(attempt)
        if seals is None:
            self.ledger.reopen(keep=True)
            return None
        sealed = {m: frozenset(s.indices) for m, s in seals.items()}
        cover = resolve(sealed, self._ctx.plan.microbatches)
        if cover.gaps or cover.dropped:
            await self._refill(cover, attempt)
            return None
        stop, leaves = any(s.stop for s in seals.values()), tuple(sorted(m for m, s in seals.items() if s.leaves))
        ident = round_id(self.lineage, stage, self.step, attempt, sealed, cover.chosen, stop, leaves)
        return Round(
            id=ident, lineage=self.lineage, step=self.step, stage=stage, members=tuple(sorted(sealed)),
            contributors=tuple(m for m in cover.chosen if sealed[m]), microbatches=self._ctx.plan.microbatches,
            n_params=self._ctx.compute.n_params, stop=stop, leaves=leaves,
        )  # fmt: skip

    def _latest_attempt(self, members: Collection[PeerId] | None = None) -> int:
        """The highest that a live replica (of ``members``) announced in this step."""
        alive = self._ctx.roster.is_alive
        known = (s.attempt for m, s in self._seals.items() if alive(m) and (members is None or m in members))
        return max(known, default=0)

    async def _announce(self, attempt: int) -> dict[PeerId, Seal] | None:
        """Seal, and collect the seals of those we count on; None unless all of them count on the same ones."""
        ctx, me, stage = self._ctx, self._ctx.net.peer_id, self._ctx.roster.own.stage
        await self._nothing_running()
        held = self.ledger.seal()
        replicas = [m for m in ctx.roster.stage(stage) if m != me and m not in self._differing]
        view = company(me, replicas, self._views())
        self.announced = seal = Seal(
            lineage=self.lineage, step=self.step, stage=stage, attempt=attempt, indices=tuple(sorted(held)), members=view,
            weights=self._weights, stop=self.stop_requested, leaves=self.departure.announced(),
        )  # fmt: skip
        ctx.spawn(ctx.tell(tuple(replicas), seal), "seal")  # those we do not count on hear of it, too

        def missing() -> bool:
            return any(m not in self._seals or self._seals[m].attempt < attempt for m in view if m != me)

        def lost() -> bool:
            return not all(map(ctx.roster.is_alive, view))

        await self._waits.until(
            lambda: lost() or not missing(), self._seal_deadline, "the stage's replicas to seal", self._ask_replicas
        )
        if yields(me, view, self._views()):
            raise _LeftOut
        if lost() or self._latest_attempt(view) > attempt:  # sets of different attempts say nothing together
            return None
        seals = {m: seal if m == me else self._seals[m] for m in view}
        self._compare(seals)
        return seals if all(s.members == view and m not in self._differing for m, s in seals.items()) else None

    def _views(self) -> dict[PeerId, View]:
        """Whom replicas count on: those we reach say it themselves, of others we hear."""
        alive = self._ctx.roster.is_alive
        known = {m: View(s.attempt, s.members) for m, s in self._seals.items() if alive(m)}
        told = {m: v for m, v in self._hearsay.items() if not alive(m)}
        return {m: v for m, v in {**told, **known}.items() if m not in self._differing}

    async def _meet(self) -> None:
        """Replicas that we do not reach may be alive: peers of other stages tell us what they told them. Raises _LeftOut."""
        ctx, roster, me = self._ctx, self._ctx.roster, self._ctx.net.peer_id
        if self.announced is None or all(roster.is_alive(p) for p in roster.replicas()):
            return
        view = MemberView(member=me, attempt=self.announced.attempt, members=self.announced.members)
        ask = AskViews(lineage=self.lineage, step=self.step, view=view).pack()
        heard: dict[PeerId, View] = {}
        for peer in [p for p in roster.others() if roster.member(p).stage != roster.own.stage][:MEETING_POINTS]:
            try:
                answer = await ctx.net.call(peer, AskViews.KIND, ask, timeout_s=ctx.probe_deadline.seconds(1))
                heard |= {v.member: View(v.attempt, v.members) for v in Views.unpack(answer).views if v.member != me}
            except (PeerUnreachable, DeadlineExceeded) as e:
                ctx.suspect(peer, str(e))
            except NetworkError:  # it is at another step: others will say so
                continue
        self._hearsay = heard
        if yields(me, self.announced.members, self._views()):
            raise _LeftOut

    async def _look_on(self) -> None:
        """Others run our part again, and we take what they reduce (_HeldElsewhere, Behind), unless they are lost, too."""
        ctx, me = self._ctx, self._ctx.net.peer_id
        message = f"step {self.step}: replicas that do not reach this peer go on without it"
        ctx.emit(Note(level="warning", message=message))
        await self._nothing_running()
        self._drop()
        self.ledger.seal()  # nothing comes in before it is announced
        assert self.announced is not None  # what left us out
        own = self.announced.members

        async def ask() -> None:
            await self._ask_everyone()
            await self._ask_replicas()
            with contextlib.suppress(_LeftOut):
                await self._meet()

        await self._waits.until(
            lambda: not yields(me, own, self._views()), self._seal_deadline, "those that go on without this peer", ask
        )
        self.ledger.reopen(keep=False)

    def _drop(self) -> None:
        """What we accumulated counts as done twice."""
        self._ctx.compute.clear()
        self._ctx.stats.microbatches -= len(self.ledger.held)
        self._ctx.stats.recomputed += len(self.ledger.held)
        self.ledger.reopen(keep=False)

    def _compare(self, seals: dict[PeerId, Seal]) -> None:
        """Replicas begin a step with the same weights; devices that differ in the last bit, or a donor that lied, break that. Then those of
        the lowest id count, and what the others accumulated does not. Raises Behind on those."""
        lowest = min(seals)
        differing = {m for m, s in seals.items() if s.weights != seals[lowest].weights}
        for member in sorted(differing):
            name, right = (self._ctx.roster.member(m).name for m in (member, lowest))
            message = f"step {self.step}: {name} has other weights than {right}, and takes its state"
            self._ctx.emit(Note(level="warning", message=message))
        if self._ctx.net.peer_id in differing:
            raise Behind(f"step {self.step}: other weights than the first replica's", weights_hold=False)
        self._differing |= differing

    async def _refill(self, cover: Cover, attempt: int) -> None:
        """Microbatches are in no accumulator, or twice: keep the chosen sets, run the gaps again for this stage alone."""
        ctx = self._ctx
        if ctx.net.peer_id in cover.chosen:
            self.ledger.reopen(keep=True)
        else:
            self._drop()
        gaps = frozenset(cover.gaps)
        message = f"step {self.step}: stage {ctx.roster.own.stage} runs {len(gaps)} microbatches again"
        ctx.emit(Note(level="warning", message=message))

        async def refilled() -> None:
            """Gaps are filled when no replica misses them; its own ledger is each one's truth."""
            for pause in itertools.count():
                union = set(self.ledger.held)
                for peer in ctx.roster.replicas():
                    held = await ctx.probe(peer, self.lineage, self.step)
                    if held is not None and held.step > self.step:
                        raise Behind(f"step {self.step}: {ctx.roster.member(peer).name} is at step {held.step}")
                    counts = held is not None and held.current and peer not in self._differing
                    union |= set(held.held) if held is not None and counts else set()
                if gaps <= union:
                    return
                await self._meet()
                await ctx.clock.sleep(min(PAUSE_MAX_S, PAUSE_S * 2.0**pause))

        limit = self._step_deadline
        for patience in range(MAX_SILENCE):
            gap = Gap(
                lineage=self.lineage, step=self.step, stage=ctx.roster.own.stage, attempt=attempt,
                indices=tuple(sorted(gaps - self.ledger.held)),
            )  # fmt: skip
            await ctx.tell(ctx.roster.trainers(), gap)
            try:
                await ctx.clock.deadline(
                    self._waits.watched(refilled()), limit.seconds(patience), "missing microbatches"
                )
            except DeadlineExceeded:
                await self._ask_everyone()
            else:
                return
        raise MuletrainError(f"step {self.step}: {len(gaps)} missing microbatches were not run again; {self._view()}")

    async def _apply(self, record: StepRecord, gradient: Tensor) -> None:
        ctx = self._ctx
        await self._nothing_running()
        self.ledger.seal()
        begin = ctx.clock.now()
        self.settled = False
        async with ctx.device(0):
            await ctx.compute.apply(gradient, Update(self.step, record.clip_scale(ctx.plan.clip), record.skip))
        self._weights = await ctx.compute.digest()
        ctx.stats.apply_s += ctx.clock.now() - begin

    def advance(self, record: StepRecord) -> None:
        """Begin the next step: the record's hash is its lineage."""
        self.averager.forget()
        assert self._holding is not None  # it was applied
        self._previous = self._builder, self._holding
        self._enter(self.step + 1, record.hash)
        self.settled = True

    async def let_go(self) -> None:
        """No donor may take what comes now for this step's state."""
        await self._quiesce()
        self.settled = False

    async def _quiesce(self) -> None:
        """What we accumulated is of no use any more, and nothing that still runs may end in an accumulator of another step."""
        self.away = True
        await self._nothing_running()
        self._ctx.compute.clear()
        self.ledger.reopen(keep=False)
        self.ledger.seal()

    async def rejoin(self, step: int, lineage: bytes) -> None:
        """Go on at ``step``, whose state was loaded; what we did for another step is forgotten."""
        self.averager.forget()
        self._ctx.compute.clear()
        self._enter(step, lineage)
        self.settled = True
        await self.open()

    # Waiting --------------------------------------------------------------------------------------------------------

    async def _nothing_running(self) -> None:
        await self._waits.until(lambda: not self.ledger.running, self._seal_deadline, "running microbatches")

    def _view(self) -> str:
        """Who is there, in words."""
        roster = self._ctx.roster
        lost = [s for s in range(self._ctx.plan.stages) if not roster.stage(s)]
        gone = f"no peer of stages {lost} can be reached" if lost else "every stage can be reached"
        return gone if roster.trainers() else f"{gone}, no trainer can"

    async def _ask_progress(self) -> None:
        """Nothing moved for long: find out who is there, and what is through. A dead trainer's microbatches fall to the others."""
        await self._ask_everyone()
        self._orphaned(frozenset(range(self._ctx.plan.microbatches)) - self.losses.keys())

    async def _ask_replicas(self) -> None:
        """A lost announcement must not stop the stage: whoever made it can say it again."""
        ask = AskSeal(lineage=self.lineage, step=self.step).pack()
        for peer in self._ctx.roster.replicas():
            await self._ask(peer)
            if not self._ctx.roster.is_alive(peer):
                continue
            try:
                answer = await self._ctx.net.call(
                    peer, AskSeal.KIND, ask, timeout_s=self._ctx.probe_deadline.seconds(1)
                )
                if answer:
                    self.on_seal(peer, Seal.unpack(answer))
            except NetworkError as e:
                self._ctx.suspect(peer, str(e))
            else:
                await self._entries_from(peer)

    async def _ask_holders(self) -> None:
        """A notice that a replica holds this step's gradient, or is beyond it, may have been lost."""

        async def ask(peer: PeerId) -> None:
            await self._ask(peer)
            await self._entries_from(peer)

        await asyncio.gather(*(ask(p) for p in self._ctx.roster.replicas() if self._ctx.roster.is_alive(p)))

    async def _ask_everyone(self) -> None:
        """Those believed dead, too: a link that healed says nothing by itself."""
        await asyncio.gather(*(self._ask(peer) for peer in self._ctx.roster.everyone()))

    async def _ask(self, peer: PeerId) -> None:
        """Learn what ``peer`` knows of this step; leave it out while it is at an earlier one. Raises Behind if it is at a later one."""
        held = await self._ctx.probe(peer, self.lineage, self.step)
        if held is None:
            return
        if held.step > self.step:
            if (
                await self._entries_from(peer) and self._holding is not None
            ):  # all that we lacked was word of the others
                return
            raise Behind(f"step {self.step}: {self._ctx.roster.member(peer).name} is at step {held.step}")
        if not held.current:
            self._ctx.suspect(peer, f"it is still at step {held.step}")
        elif len(held.through) == len(held.losses) and all(i < self._ctx.plan.microbatches for i in held.through):
            self.losses.update(zip(held.through, held.losses, strict=True))
            self.touched()

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
