"""What a peer knows of the current step (the one it agrees on next, see ``microbatch.inflight``): what arrives of it, what it answers, and
whom it asks for what it missed."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError, NetworkError, ProtocolError
from muletrain.policy.deadline import Deadline
from muletrain.policy.lineages import Chain
from muletrain.policy.recent import Recent
from muletrain.runtime.core.branches import branch_of
from muletrain.runtime.core.messages import (
    Abstain,
    AskEntries,
    AskSeal,
    AskViews,
    Entries,
    Finding,
    GivenUp,
    Held,
    MemberView,
    RoundEntry,
    Seal,
    ShardFacts,
    TrainerDone,
    Views,
)
from muletrain.runtime.core.waiting import MAX_SILENCE, Waits
from muletrain.runtime.members.leaving import Departure
from muletrain.runtime.microbatch.inflight import InFlightStep
from muletrain.runtime.step.record import RecordBuilder
from muletrain.runtime.step.trail import Trail

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from muletrain.network.base import PeerId
    from muletrain.policy.views import View
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.microbatch.ledger import Ledger
    from muletrain.runtime.step.holding import Holding
    from muletrain.runtime.step.record import Attested

MAX_ATTEMPTS = 20
"""Rounds tried for one step before the peer gives up with an error instead of trying for ever."""
MAX_NUMBER = 50 * MAX_ATTEMPTS
"""Of attempts beyond what we know of: those that come and go try some each, and begin after what was tried."""
GRACE_S = 0.25
"""Between the first sign that others are beyond what we wait for, and the question whether we missed it."""
ASKED = 64
"""Living peers that are asked at once what they know; so many more that all were asked before a wait is given up."""
MAX_VIEWS = 4 * MAX_ATTEMPTS
"""Of each replica that are remembered in a step."""
MAX_ASKED = 8
"""Peers that are asked whether they are beyond this step, too; and for its record, after the first that knew it."""
LATE_S = 3.0
"""From when we first ask it, a peer may be at an earlier step for this time at least, before it is left out."""


class Behind(MuletrainError):
    """The others have gone on without us. ``weights_hold``: ours are still those before this step, so that applying what the others
    agreed on is enough; else the state must come from a replica."""

    def __init__(self, message: str, *, weights_hold: bool = True) -> None:
        super().__init__(message)
        self.weights_hold = weights_hold


class Knowledge:
    """Of the current step; ``_look_around`` says what it means for those that wait."""

    def __init__(
        self,
        ctx: Context,
        step: int,
        lineage: bytes,
        running: Callable[[int], list[int]],
        answering: Callable[[int], list[int]],
        orphaned: Callable[[InFlightStep, bool], None],
    ) -> None:
        """``running``, ``answering``: microbatches of a step that this peer works on, and whose answer it sends. ``orphaned`` is told
        when they are not through: after a death, or (True) although nothing came for as long as a step takes."""
        self._ctx = ctx
        self._running, self._answering = running, answering
        self._orphaned = orphaned
        self._waits = Waits(ctx.clock, self._look_around, ctx.who_is_there, lambda: ctx.patience_s)
        self.touched = self._waits.touched
        self._step_deadline = Deadline()
        self._seal_deadline = Deadline(floor_s=0.5, deviations=1.0)
        self._record_deadline = Deadline(unmeasured_s=10.0, floor_s=0.5)
        self._late_deadline = Deadline(floor_s=LATE_S)
        """For those at an earlier step: they apply it as long as we do, or as the latest of those that came on."""
        self.stop_requested = False
        self.departure = Departure(ctx)
        self.settled = True
        """The weights are those before ``step``: false while an update is being applied."""
        self.over = False
        """The run has ended before ``step``."""
        self._weights: bytes = b"\0" * 32
        self._differed: int | None = None
        """The last step at which our weights were not the others'."""
        self._refuted: int | None = None
        """The last step at which another computed otherwise what we had."""
        self.trail = Trail(ctx, ctx.trail_bytes)
        ctx.changed = self._waits.hurry
        ctx.own_held = self.held
        self.met: Callable[[PeerId, int], None] = lambda peer, step: None
        """Told of a peer of another lineage, and of its step (see ``Lineages``)."""
        self.others_at = step
        """The furthest step, of our lineage, that we heard of another peer."""
        self.ahead: InFlightStep | None = None
        """The next step, if it is computed already."""
        self._asked_round = 0
        self._moved: Recent[tuple[int, bytes]] = Recent()
        """Bytes that others said they had moved, and the round that they averaged last."""
        self._apart: Recent[tuple[int, int]] = Recent()
        """Replicas that we average nothing with, since nothing comes from them: until which step, and for how many."""
        self.work = InFlightStep(step, lineage, ctx.plan.microbatches)
        self._enter(Chain(step, (lineage,)))

    @property
    def step(self) -> int:
        return self.work.step

    @property
    def lineage(self) -> bytes:
        return self.work.lineage

    @property
    def ledger(self) -> Ledger:
        return self.work.ledger

    @property
    def applied(self) -> bytes:
        """hash(R_{step-1}), or the genesis': what made our weights."""
        return self._chain.lineages[-1]

    def under_way(self) -> tuple[InFlightStep, ...]:
        return (self.work,) if self.ahead is None else (self.work, self.ahead)

    def computing(self, step: int) -> InFlightStep | None:
        """None for a step of which microbatches are not (any more) computed here."""
        if self.work.step == step:
            return self.work
        return self.ahead if self.ahead is not None and self.ahead.step == step else None

    def _enter(self, chain: Chain) -> None:
        step, lineage = chain.step, chain.lineages[-2 if self._ctx.plan.delayed and len(chain.lineages) > 1 else -1]
        self._chain, self.begun = replace(chain, over=False) if chain.over else chain, self._ctx.clock.now()
        ahead, self.ahead = self.ahead, None
        self.work.over = True
        if ahead is not None and (ahead.step, ahead.lineage) == (step, lineage):
            self.work = ahead
            ahead.ledger.reopen(keep=True)
        else:
            assert ahead is None  # let go of before
            self.work = InFlightStep(step, lineage, self._ctx.plan.microbatches)
        self._seals: dict[PeerId, Seal] = {}
        self.announced: Seal | None = None
        self.away = False
        """The others go on without us: what we do for this step is of no use to them."""
        self._holding: Holding | None = None
        self._gathering = self._gave_way = False
        self._reducing: Seal | None = None
        self._hearsay: dict[PeerId, View] = {}
        self._meeting: dict[PeerId, MemberView] = {}
        self._behind: Behind | None = None
        self._overtaken = False
        self._attested: RoundEntry | None = None
        self._rivals: set[bytes] = set()
        """Other rounds of our stage that we knew of when we said so."""
        self._differing: set[PeerId] = set()
        self._fresh = False
        """We came to this step with a state that was loaded: what we did in it before, we may not know."""
        self._announced_by: defaultdict[PeerId, set[frozenset[PeerId]]] = defaultdict(set)
        """The members that each replica sealed with, in all attempts that we heard of."""
        self._aside: dict[PeerId, int] = {}
        """Who abstains, and the first attempt after that."""
        self._questioned: set[tuple[PeerId, int]] = set()
        """Replicas that were asked for the seal of what they attest to, and the attempt of the last one that we knew."""
        self._late: dict[PeerId, float] = {}
        """When we first heard that a peer was at an earlier step still."""
        self._lost: Counter[PeerId] = Counter()
        self._claims: dict[PeerId, frozenset[int]] = {}
        """Missing microbatches that replicas said they hold, by which the last gaps counted as filled."""
        self._untrue: Counter[PeerId] = Counter()
        """Times that replicas then sealed without these, or sealed a round and were at another step."""
        self._silent: Counter[PeerId] = Counter()
        """What replicas did not send us of rounds that failed (``Averager.silent``)."""
        self._mourned = self._dead_replicas()
        self._gave_up: GivenUp | None = None
        self._reconsidered = False
        """We gave up once already what others had made not finite."""
        self._overflowed = False
        """Finite gradients came to a mean that is not."""
        self._findings: tuple[Finding, ...] = ()
        stages, clock = self._ctx.plan.stages, self._ctx.clock
        self._builder = RecordBuilder(step, lineage, stages, self.applied, self._ctx.roster.stage, clock.now)
        self._holders: list[RoundEntry] = []
        self._committed: frozenset[PeerId] = frozenset()
        """Replicas that attest to a round that was sealed so: they take part in no other."""
        self._seals_heard = 0
        self._holders_of: tuple[int, int, int] | None = None
        """What was known when these were the ones."""
        self._attested_of: tuple[bytes, int, int] | None = None
        """The round that we attested to, and what was known then."""

    @property
    def chain(self) -> Chain:
        """How we came to this step."""
        return replace(self._chain, over=True) if self.over else self._chain

    def interrupt(self, reason: Behind) -> None:
        """End this step with ``reason``, at the next look around."""
        self._behind = reason
        self.touched()

    def _look_around(self) -> None:
        """During every wait; what it raises ends the wait."""
        raise NotImplementedError

    def _dead_replicas(self) -> set[PeerId]:
        return {p for p in self._ctx.roster.replicas() if not self._ctx.roster.is_alive(p)}

    def _all_through(self) -> bool:
        return self.work.all_through

    def _held_by_replicas(self) -> list[RoundEntry]:
        """What live replicas attest that they hold of this step, as far as we believe them."""
        self._look_at_rounds()
        return self._holders

    def _look_at_rounds(self) -> None:
        """Of our stage: whom to believe, and who takes part in no other."""
        roster = self._ctx.roster
        known = self._builder.known[roster.own.stage], roster.version, self._seals_heard
        if self._holders_of == known:  # waits ask whenever anything arrives
            return
        rounds = self._builder.rounds(roster.own.stage)
        held = [e for r in rounds if self._believed(r) for _, e in sorted(r.holders.items())]
        self._holders = [e for e in held if roster.is_alive(e.holder)]
        self._committed = frozenset(m for r in rounds if not self._unsealed(r) for m in r.holders)
        self._holders_of = known

    def _believed(self, round_: Attested) -> bool:
        """A round of ours is known by the shards that came out of it. Of one without us it counts how many of the other replicas attest to
        it; if there is but one, its word is enough, and nobody knows which of us is wrong."""
        if self._takes_part(round_.facts):
            return self._contradiction(round_.facts) is None
        stage, me, holders = self._ctx.roster.own.stage, self._ctx.net.peer_id, round_.holders.keys()
        others = (set(self._ctx.roster.stage(stage)) | holders) - self._builder.abstaining(stage) - {me}
        return 2 * len(holders) > len(others | holders) and not self._unsealed(round_)

    def _takes_part(self, entry: RoundEntry) -> bool:
        return self._ctx.net.peer_id in entry.members and not self._fresh

    def _contradiction(self, entry: RoundEntry) -> str | None:
        """Why a round that names us cannot be what its holder says. Nobody holds it before we reduced our shard, and it has our shard as we
        reduced it, and its holder's as that was sent to us; of those of others we do not know who is wrong."""
        known = self._shards(entry.round)
        if self._ctx.net.peer_id not in known:
            return "its members are not what this peer sealed, or it cannot be whole: this peer reduced no shard of it"
        told = dict(zip(entry.members, entry.shards, strict=False))  # counted later
        wrong = any(known[m] != told.get(m) for m in (self._ctx.net.peer_id, entry.holder) if m in known)
        return "its shards are not what its members reduced" if wrong else None

    def _unsealed(self, round_: Attested) -> bool:
        """Did none of the members that attest to it announce them, as far as we heard?"""
        members = [m for m in round_.facts.members if m in round_.holders]
        view = frozenset({*round_.facts.members, *round_.facts.expelled})
        return bool(members) and not any(view in self._announced_by[m] for m in members)

    def _question(self, holder: PeerId) -> None:
        """Find out whether ``holder`` sealed what it attests to, unless we know."""
        seal = self._seals.get(holder)
        asked = holder, seal.attempt if seal is not None else -1
        if asked in self._questioned or len(self._announced_by[holder]) > MAX_VIEWS:
            return
        for round_ in self._builder.rounds(self._ctx.roster.own.stage):
            if holder in round_.holders and not self._takes_part(round_.facts) and self._unsealed(round_):
                self._questioned.add(asked)
                self._ctx.spawn(self._ask_why(holder, round_), "ask for a seal")

    async def _ask_why(self, holder: PeerId, round_: Attested) -> None:
        """Its seal may have been lost on its way to us. It answers with what it announced last, and whoever holds a round announces no
        more; only one that took the round from another may have tried one since."""
        step = self.step
        if await self._learn_seal(holder) and self.step == step and holder in self._seals:
            if self._unsealed(round_) and round_.holders.keys() == {holder}:
                self._ctx.refused(holder, "round entry: its members are not what its holder sealed")
            self.touched()

    def _shards(self, round_: bytes) -> Mapping[PeerId, ShardFacts]:
        """Those of a round of this step that we know, by who reduced them."""
        return {}

    def _latest_attempt(self, members: Collection[PeerId] | None = None) -> int:
        """The highest that a live replica (of ``members``) announced in this step."""
        alive = self._ctx.roster.is_alive
        known = (s.attempt for m, s in self._seals.items() if alive(m) and (members is None or m in members))
        return max(known, default=0)

    # What arrives -----------------------------------------------------------------------------------------------------

    def on_trainer_done(self, message: TrainerDone) -> None:
        work = self.computing(message.step)
        if work is not None and not work.through(message.indices, message.losses):
            raise ProtocolError("trainer_done: indices outside the step, or not one loss for each")
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
            or (message.gave_up and any(i >= self._ctx.plan.microbatches for i in message.gave_up.indices))
            or message.attempt >= self._latest_attempt() + MAX_NUMBER
        ):
            raise ProtocolError("seal with indices outside the step, or of an attempt that nobody makes")
        self.trail.arrived(sender)
        known = self._seals.get(sender)
        if known is None or known.attempt < message.attempt:
            self._seals[sender] = message
            if len(self._announced_by[sender]) <= MAX_VIEWS:
                self._announced_by[sender].add(frozenset(message.members))
            self._seals_heard += 1
            self._question(sender)
            self.touched()
            if not self._all_through():
                self.overtaken(sender, self._all_through)
            if self._attested is not None:  # no other attempt is needed: what we hold is for everyone
                self._ctx.spawn(self._ctx.tell((sender,), self._attested), "entry again")

    def on_entry(self, sender: PeerId, entry: RoundEntry) -> None:
        if sender != entry.holder or self._ctx.roster.member(sender).stage != entry.stage:
            raise ProtocolError("round entry in another's name, or for a stage that its sender does not serve")
        ours = entry.stage == self._ctx.roster.own.stage
        if ours and self._takes_part(entry) and (reason := self._contradiction(entry)) is not None:
            raise ProtocolError(f"round entry: {reason}")
        self._builder.add(entry)
        if ours:
            self._question(sender)
        self.touched()
        for member in entry.without:  # whether it counts may depend on whether they live
            self._ctx.detector.look_after(member, self.lineage, self.step)

    def on_abstain(self, sender: PeerId, attempt: int = 0) -> None:
        self._builder.abstain(self._ctx.roster.member(sender).stage, sender)
        self._aside[sender] = max(attempt, self._aside.get(sender, 0))
        self.touched()

    def _abstain(self) -> None:
        """Others of our stage go on without us: what they hold counts without our word."""
        me, attempt = self._ctx.net.peer_id, 0 if self.announced is None else self.announced.attempt + 1
        if attempt > self._aside.get(me, -1):
            self.on_abstain(me, attempt)
            message = Abstain(lineage=self.lineage, step=self.step, attempt=attempt)
            self._ctx.spawn(self._ctx.tell(self._ctx.roster.everyone(), message), "abstain")

    def _stands_aside(self, peer: PeerId) -> bool:
        """Has it announced nothing since it abstained?"""
        seal = self._seals.get(peer)
        return peer in self._aside and (seal is None or seal.attempt < self._aside[peer])

    def on_view(self, sender: PeerId, ask: AskViews) -> Views:
        """Members of another stage that do not reach each other learn of each other here: views of those that we reach. Raises
        ProtocolError."""
        if (ask.step, ask.lineage) != (self.step, self.lineage) or ask.view.member != sender:
            raise ProtocolError("view of another step or lineage, or of another peer")
        self._meeting[sender] = ask.view
        stage, roster = self._ctx.roster.member(sender).stage, self._ctx.roster
        return Views(
            views=tuple(v for m, v in self._meeting.items() if roster.is_alive(m) and roster.member(m).stage == stage)
        )

    def on_later(self, sender: PeerId, *, applied: bool) -> None:
        """A frame came from ``sender`` that is sent after all microbatches of this step are through, or after it was ``applied``."""
        self.overtaken(sender, (lambda: self._builder.record() is not None) if applied else self._all_through)

    def overtaken(self, sender: PeerId, done: Callable[[], bool]) -> None:
        """``sender`` is done with what we still wait for. Usually we soon are, too; if not, a notice was lost, or we were."""
        if not (self._overtaken or self.away or done()):
            self._overtaken = True
            self._ctx.spawn(self._find_out(sender, self.step, done), "overtaken")

    async def _find_out(self, sender: PeerId, step: int, done: Callable[[], bool]) -> None:
        await self._ctx.clock.sleep(GRACE_S)
        if self.step == step:
            self._overtaken = False
            if not done():
                await self.find_out(sender)

    async def find_out(self, sender: PeerId) -> None:
        """What we still wait for, ``sender`` may know."""
        step = self.step
        if self.away:
            return
        try:
            await self._ask(sender)
        except Behind as e:
            if self.step == step:
                self._behind = e
        self.touched()

    def entries(self, sender: PeerId, step: int, lineage: bytes) -> Entries:
        """Of this step or an earlier one that is kept; none for any other."""
        if (step, lineage) == (self.step, self.lineage):
            abstains = self._ctx.net.peer_id in self._builder.abstaining(self._ctx.roster.own.stage)
            return Entries(step=step, own=self._attested, abstains=abstains)
        applied = self.trail.entries(sender, step, lineage)
        return Entries(step=self.step, applied=applied, record=self.trail.record(step) if applied else b"")

    def sentenced(self, stage: int) -> bool:
        """Enough attest to whom the record of this step expels from ``stage``."""
        return self._builder.sentenced(stage)

    def gradient_piece(self, sender: PeerId, round_: bytes, offset: int) -> bytes:
        """Of a round that we hold. Raises ProtocolError for any other."""
        if self._holding is not None and self._holding.entry.round == round_:
            return self._holding.piece(offset, self._ctx.plan.gradients)
        return self.trail.piece(sender, round_, offset)

    def covered(self, work: InFlightStep) -> frozenset[int]:
        """Microbatches that are not to be accumulated again: ours; all of them once we hold the stage's mean gradient, unless a larger
        company of replicas goes on without us, and what we hold will not count."""
        whole = work is self.work and self._holding is not None
        if whole and self._gave_way:
            return frozenset()
        return frozenset(range(self._ctx.plan.microbatches)) if whole else work.ledger.held

    def held(self, step: int, lineage: bytes, *, brief: bool = False) -> Held:
        stage, work = self._ctx.roster.own.stage, self.computing(step)
        if work is None or work.lineage != lineage or (work is self.work and self.away):
            applied, branch = b"" if self.away else self.applied, branch_of(self.lineage)
            return Held(current=False, stage=stage, step=self.step, lineage=applied, branch=branch)
        if brief:
            return Held(
                current=True, stage=stage, step=self.step, lineage=self.applied, branch=branch_of(self.lineage),
                round=self._round(), moved=self._ctx.net.moved(),
            )  # fmt: skip
        held, losses = sorted(self.covered(work)), {**work.losses, **work.ledger.losses}
        return Held(
            current=True,
            stage=stage,
            step=self.step,
            lineage=self.applied,
            branch=branch_of(self.lineage),
            held=tuple(held),
            held_losses=tuple(losses.get(i, math.nan) for i in held),
            running=tuple(self._running(step)),
            answering=tuple(sorted(self._answering(step))),
            through=tuple(work.losses),
            losses=tuple(work.losses.values()),
            round=self._round(),
            moved=self._ctx.net.moved(),
        )

    def _round(self) -> bytes:
        """What is averaged now, or was last; empty: nothing was."""
        return b""

    def _give_way(self) -> None:
        """If we hold a round, and more of our replicas try another without us: have them run again what we accumulated."""
        raise NotImplementedError

    # What we ask ------------------------------------------------------------------------------------------------------

    async def _nothing_running(self, work: InFlightStep) -> None:
        await self._waits.until(lambda: not work.ledger.running, self._seal_deadline, "running microbatches")

    async def _ask_progress(self) -> None:
        """Nothing moved for long, or somebody died: find out who is there, and what is through. A dead trainer's microbatches fall to the
        others; when it is late, those of one that gives out nothing, too."""
        await self._ask_everyone()
        now, due_s = self._ctx.clock.now(), self._step_deadline.seconds()
        late = now - self.begun >= due_s and self._ctx.pulse.goes_on_s(now, due_s / 2) <= 0
        self._orphaned(self.work, late)

    async def _ask_replicas(self) -> None:
        """A lost announcement must not stop the stage: whoever made it can say it again."""
        await asyncio.gather(*(self._ask_seal(peer) for peer in self._ctx.roster.replicas()))

    async def _ask_seal(self, peer: PeerId) -> None:
        await self._ask(peer)
        if self._ctx.roster.is_alive(peer) and await self._learn_seal(peer):
            await self._entries_from(peer)

    async def _learn_seal(self, peer: PeerId) -> bool:
        """False where ``peer`` does not answer."""
        ask = AskSeal(lineage=self.lineage, step=self.step).pack()
        try:
            answer = await self._ctx.net.call(peer, AskSeal.KIND, ask, timeout_s=self._ctx.detector.deadline.seconds(1))
            if answer:
                self.on_seal(peer, Seal.unpack(answer))
        except NetworkError as e:
            self._ctx.detector.mark_down(peer, str(e))
            return False
        return True

    async def _ask_holders(self) -> list[Held]:
        """A notice that a replica holds this step's gradient, or is beyond it, may have been lost. What those that answer hold."""

        async def ask(peer: PeerId) -> Held | None:
            held = await self._ask(peer)
            await self._entries_from(peer)
            return held

        asked = [ask(p) for p in self._ctx.roster.replicas() if self._ctx.roster.is_alive(p)]
        return [held for held in await asyncio.gather(*asked) if held is not None]

    async def _ask_everyone(self) -> None:
        """In a large fleet some, and others the next time: all ask. Those believed dead, too, for a link that healed says nothing by
        itself; but nobody waits for them."""
        roster, self._asked_round = self._ctx.roster, self._asked_round + 1
        for peer in self._ctx.detector.worth_a_try(p for p in roster.everyone() if not roster.is_alive(p)):
            self._ctx.spawn(self._try_again(peer), "ask after the dead")
        count = max(ASKED, math.ceil(len(roster.others()) / (MAX_SILENCE - 1)))
        await asyncio.gather(*(self._ask(peer) for peer in roster.spread(count, self._asked_round)))

    async def _try_again(self, peer: PeerId) -> None:
        """A peer that was believed dead may be back."""
        await self.find_out(peer)
        if self._ctx.roster.is_alive(peer):
            await self._entries_from(peer)

    async def _ask(self, peer: PeerId) -> Held | None:
        """Learn what ``peer`` knows of this step (and return it); leave it out when it stays at an earlier one. Raises Behind if it is at a
        later one."""
        held = await self._ctx.detector.probe(peer, self.lineage, self.step)
        if held is None:
            return None
        moved, round_ = self._moved.get(peer, (0, b""))
        # a stage with slow links may average for long, or try again; and a peer whose device is late soon leaves the step to the others
        if held.moved > moved or held.round != round_ or held.late:
            self._waits.came_on()
        self._moved[peer] = held.moved, held.round
        if held.rival:
            self.met(peer, held.step)
            self._ctx.detector.mark_down(peer, "it trains in another lineage", declines=True)
            return held
        if held.step > self.step:
            self.others_at = max(self.others_at, held.step)
            went_on = await self._went_on(peer)
            if not went_on or (self._holding is not None and self._builder.record() is not None):
                return held  # all that we lacked was word of the others
            raise Behind(f"step {self.step}: {self._ctx.roster.name(peer)} is at step {held.step}")
        if held.current and self.work.through(held.through, held.losses):
            self.touched()
        if not held.current or (
            held.step < self.step and self._all_through()
        ):  # of no use until it is at this step, too
            now = self._ctx.clock.now()
            if now - self._late.setdefault(peer, now) >= self._late_deadline.seconds():
                self._late[peer] = now  # else each answer would make it count again, and be believed dead again
                self._ctx.detector.mark_down(peer, f"it is still at step {held.step}")
        elif held.step == self.step and peer in self._late:
            self._late_deadline.measured(self._ctx.clock.now() - self._late.pop(peer))
        return held

    async def _ask_entries(self) -> None:
        """A lost notice must not stop the run: who sent it can say it again."""
        await asyncio.gather(*map(self._entries_from, filter(self._ctx.roster.is_alive, self._ctx.roster.everyone())))
        if self._builder.record() is not None:
            return
        self._look_at_rounds()
        # those of our stage that hold no round may try one without us
        others = [p for p in self._ctx.roster.replicas() if self._ctx.roster.is_alive(p) and p not in self._committed]
        await asyncio.gather(self._ask_everyone(), *map(self._learn_seal, others))
        self._give_way()

    async def _entries_from(self, peer: PeerId) -> Entries | None:
        """Learn what ``peer`` attests to of this step, or which record it applied. None where it does not answer."""
        ask, builder = AskEntries(lineage=self.lineage, step=self.step).pack(), self._builder
        try:
            packed = await self._ctx.net.call(
                peer, AskEntries.KIND, ask, timeout_s=self._ctx.detector.deadline.seconds(1)
            )
            answer = Entries.unpack(packed)
            if builder is not self._builder:  # that step is over
                return None
            if answer.abstains:
                self.on_abstain(peer)
            if answer.own is not None:
                self.on_entry(peer, answer.own)
            if answer.applied and builder.claim(peer, answer.applied, answer.record):
                own = (e for e in answer.applied if e.stage == self._ctx.roster.member(peer).stage)
                for entry in own:
                    self.on_entry(peer, entry.model_copy(update={"holder": peer, "without": ()}))
                    # it is beyond the step, and does not know any more what it sealed
                    self._announced_by[peer].add(frozenset({*entry.members, *entry.expelled}))
                    self._seals_heard += 1
        except ProtocolError as e:
            self._ctx.refused(peer, str(e))
        except NetworkError as e:
            self._ctx.detector.mark_down(peer, str(e))
        else:
            return answer
        return None

    async def _went_on(self, first: PeerId) -> bool:
        """``first`` says that it is beyond this step. True if others say so, too, and more than say that they are here, or if the record
        of this step is known now: one member alone cannot lure us away."""
        here = gone = 0
        for peer in dict.fromkeys((first, *self._ctx.roster.spread(MAX_ASKED))):
            answer = await self._entries_from(peer)
            if self._builder.record() is not None:
                return True
            if answer is not None:
                here, gone = here + (answer.step == self.step), gone + (answer.step > self.step)
            if gone - here > 1:
                break
        return gone > here

    async def _learn_record(self, peers: Iterable[PeerId]) -> None:
        """Ask ``peers`` that may have applied this step for its record, until enough of them say the same."""
        asked, here = 0, False
        for peer in peers:
            if self._builder.record() is not None or asked > MAX_ASKED:
                break
            answer = await self._entries_from(peer)
            here |= answer is not None and answer.step == self.step
            asked += self._builder.claimed > 0
        self._builder.trusting = not here
