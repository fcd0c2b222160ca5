"""Notices about one step: a peer takes in arriving notices, asks for notices that may be lost, and answers such
questions."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from muletrain.errors import NetworkError, ProtocolError
from muletrain.policy.deadline import Deadline
from muletrain.policy.recent import Recent
from muletrain.runtime.averaging.messages import AskGradient
from muletrain.runtime.core.waiting import MAX_SILENCE
from muletrain.runtime.microbatch.position import Behind
from muletrain.runtime.step.messages import Abstain, AskEntries, AskSeal, Entries, Seal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from muletrain.network.base import PeerId
    from muletrain.runtime.averaging.messages import RoundEntry
    from muletrain.runtime.core.waiting import Waits
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.membership import Membership
    from muletrain.runtime.members.messages import Progress
    from muletrain.runtime.microbatch.position import Position
    from muletrain.runtime.step.gradient_log import GradientLog
    from muletrain.runtime.step.messages import TiedEntry
    from muletrain.runtime.step.record_builder import Attested
    from muletrain.runtime.step.state import StepState

GRACE_S = 0.25
"""Seconds between the first sign that another peer has an awaited result, and our question whether we missed a
notice."""
ASKED = 64
"""Live peers asked at once; in a larger fleet more, so that all were asked before a wait is given up."""
ANEW = 4
"""Times that a peer may begin to accumulate a step's microbatches, before that is no progress for our waits: the peer
may lie."""
MAX_ASKED = 8
"""Peers asked to confirm that the run is beyond this step, and asked for the record after the first that knew it."""
LATE_S = 3.0
"""Shortest time that a peer may stay at an earlier step, after our first question, before being left out [s]."""


class Rivals(Protocol):
    """Deals with peers of other lineages (``recovery.forks``)."""

    def met(self, peer: PeerId, step: int) -> None:
        """``peer`` trains in another lineage, at ``step``."""
        ...


@dataclass
class Observed:
    """Observations of the other peers in past steps."""

    late: Deadline = field(default_factory=lambda: Deadline(floor_s=LATE_S))
    """How long a peer may stay at an earlier step: as long as we take to apply a step, or as late peers took."""
    left_out: Recent[None] = field(default_factory=Recent)
    """Peers that stayed at an earlier step for so long, and have not been in time since."""
    moved: Recent[tuple[int, bytes]] = field(default_factory=Recent)
    """Each peer's last report: bytes moved, and the round being averaged."""
    asked_round: int = 0
    """Questions to all peers so far."""


class Exchange:
    """The exchange of one step, with its open questions; each step has a new exchange."""

    def __init__(
        self,
        ctx: Context,
        position: Position,
        state: StepState,
        log: GradientLog,
        waits: Waits,
        rivals: Rivals,
        observed: Observed,
    ) -> None:
        self._ctx, self._position, self._state, self._log = ctx, position, state, log
        self._waits, self._rivals, self._observed = waits, rivals, observed
        self._work = state.work
        self._overtaken = False
        self._questioned: set[tuple[PeerId, int]] = set()
        """Replicas asked for the seal of a round that they attest to, with the attempt of the last seal that we
        knew."""
        self._late: dict[PeerId, float] = {}
        """When we first heard that a peer was still at an earlier step."""
        self._most: dict[PeerId, list[int]] = {}
        """Most microbatches that a peer reported as accumulated in this step, for each time that the peer began
        anew."""

    # What arrives -----------------------------------------------------------------------------------------------------

    def on_seal(self, sender: PeerId, seal: Seal) -> None:
        """Take in a seal. Raises ProtocolError."""
        news = self._state.hear_seal(sender, seal)
        self._log.arrived(sender)
        if not news:
            return
        self._question(sender)
        self._ctx.news.touched()
        if not self._work.all_completed:
            self._overtaken_by(sender, applied=False)
        if self._state.attested is not None:  # no further attempt is needed: every replica can take our gradient
            self._ctx.spawn(self._ctx.tell((sender,), self._state.attested), "entry again")

    def on_entry(self, sender: PeerId, entry: RoundEntry) -> None:
        """Take in a round entry. Raises ProtocolError."""
        if self._state.hear_entry(sender, entry):
            self._question(sender)
        self._ctx.news.touched()
        if not self._work.all_completed:
            self._overtaken_by(sender, applied=False)
        for member in entry.without:  # the round counts only if such members are down
            self._ctx.detector.look_after(member, self._state.lineage, self._state.step)

    def on_tied(self, sender: PeerId, entry: TiedEntry) -> None:
        """Take in a product for tied parameters. Raises ProtocolError."""
        self._state.hear_tied(sender, entry)
        self._ctx.news.touched()

    def on_abstain(self, sender: PeerId, attempt: int = 0) -> None:
        """Take in that ``sender`` abstains before ``attempt``."""
        self._state.hear_abstention(sender, attempt)
        self._ctx.news.touched()

    def on_later(self, sender: PeerId, *, applied: bool) -> None:
        """A frame of ``sender`` shows that it has all microbatches of this step through, or has ``applied`` the
        step."""
        self._overtaken_by(sender, applied=applied)

    def abstain(self) -> None:
        """Our replicas go on without us: tell all peers that the round counts without our word."""
        if (attempt := self._state.abstain()) is not None:
            self._ctx.news.touched()
            message = Abstain(lineage=self._state.lineage, step=self._state.step, attempt=attempt)
            self._ctx.spawn(self._ctx.tell(self._ctx.roster.everyone(), message), "abstain")

    def _recorded(self) -> bool:
        return self._state.builder.record() is not None

    def _reached(self, *, applied: bool) -> bool:
        """Do we have the step's record, or (unless ``applied``) all its microbatches?"""
        return self._recorded() if applied else self._work.all_completed

    def _overtaken_by(self, sender: PeerId, *, applied: bool) -> None:
        """``sender`` has a result that we wait for. Usually the result comes soon here, too; if not, a notice was
        lost."""
        if not (self._overtaken or self._position.away or self._reached(applied=applied)):
            self._overtaken = True
            self._ctx.spawn(self._find_out_later(sender, applied=applied), "overtaken")

    async def _find_out_later(self, sender: PeerId, *, applied: bool) -> None:
        await self._ctx.clock.sleep(GRACE_S)
        self._overtaken = False
        if self._state.current and not self._reached(applied=applied):
            await self.find_out(sender)

    def _question(self, holder: PeerId) -> None:
        """Find out whether ``holder`` sealed the attested round, unless we know."""
        seal = self._state.seals.get(holder)
        asked = holder, seal.attempt if seal is not None else -1
        if asked in self._questioned:
            return
        for round_ in self._state.doubtful(holder):
            self._questioned.add(asked)
            self._ctx.spawn(self._ask_why(holder, round_), "ask for a seal")

    async def _ask_why(self, holder: PeerId, round_: Attested) -> None:
        """Ask ``holder`` for its seal, which may have been lost. A holder announces nothing more, except a holder that
        took the round from another peer."""
        state = self._state
        if await self.learn_seal(holder) and state.current and holder in state.seals:
            if state.unsealed(round_) and round_.holders.keys() == {holder}:
                self._ctx.refused(holder, "round entry: its members are not what its holder sealed")
            self._ctx.news.touched()

    # What we ask ------------------------------------------------------------------------------------------------------

    async def find_out(self, sender: PeerId) -> None:
        """Ask ``sender`` for all awaited results."""
        if self._position.away:
            return
        try:
            await self.ask(sender)
        except Behind as e:
            if self._state.current:
                self._position.interrupt(e)
        self._ctx.news.touched()

    async def ask(self, peer: PeerId) -> Progress | None:
        """Ask ``peer`` about this step; None: no answer. A peer that stays at an earlier step is left out. Raises
        Behind if ``peer`` is at a later step."""
        ctx, state = self._ctx, self._state
        progress = await ctx.detector.probe(peer, state.lineage, state.step)
        if progress is None:
            return None
        moved, round_ = self._observed.moved.get(peer, (0, b""))
        # averaging over slow links takes long, and so does a microbatch on a slow device; a peer whose device is late soon
        # leaves the step to the others
        if progress.moved > moved or progress.round != round_ or progress.late or progress.in_flight:
            self._waits.came_on()
        accumulated = len({*progress.accumulated} & {*range(ctx.plan.microbatches)})  # the report may be false
        if progress.current and (most := self._most.setdefault(peer, [0])[-1]) != accumulated:
            if accumulated > most:
                self._most[peer][-1] = accumulated
                self._waits.grew()
            elif len(self._most[peer]) < ANEW:  # the peer computes dropped microbatches again
                self._most[peer].append(accumulated)
        self._observed.moved[peer] = progress.moved, progress.round
        if progress.rival:
            self._rivals.met(peer, progress.step)
            ctx.detector.mark_down(peer, "it trains in another lineage", declines=True)
            return progress
        if progress.step > state.step:
            self._position.others_at = max(self._position.others_at, progress.step)
            went_on = await self.went_on(peer)
            if not went_on or (state.gradient is not None and self._recorded()):
                return progress  # only notices of other peers were missing
            raise Behind(f"step {state.step + 1}: {ctx.roster.name(peer)} is at step {progress.step + 1}")
        if progress.current and self._work.complete(progress.completed, progress.losses):
            ctx.news.touched()
        if not progress.current or (progress.step < state.step and self._work.all_completed):
            self._leave_out(peer, progress)  # the peer is of no use before it reaches this step
        elif progress.step == state.step and peer in self._late:
            self._observed.late.measured(ctx.clock.now() - self._late.pop(peer))
            self._observed.left_out.pop(peer, None)
        return progress

    def _leave_out(self, peer: PeerId, progress: Progress) -> None:
        """Mark ``peer`` down after a long time at an earlier step. Its device may be at a microbatch that another peer
        has done since, and applies the step after that."""
        now, observed = self._ctx.clock.now(), self._observed
        busy_s = 0.0 if peer in observed.left_out else self._ctx.compute.jobs.longest_s()
        if now - self._late.setdefault(peer, now) >= max(observed.late.seconds(), busy_s):
            self._late[peer] = now  # else every answer would mark the peer down again
            observed.left_out[peer] = None
            self._ctx.detector.mark_down(peer, f"it is still at step {progress.step}", reached=True)

    async def ask_everyone(self) -> list[Progress]:
        """Ask all peers; in a large fleet some peers, and other peers the next time. Peers that are down are asked,
        too, since a healed link does not announce itself, but are not waited for. Returns the answers of live peers."""
        roster, observed = self._ctx.roster, self._observed
        observed.asked_round += 1
        for peer in self._ctx.detector.worth_a_try(p for p in roster.everyone() if not roster.is_alive(p)):
            self._ctx.spawn(self._try_again(peer), "ask after the dead")
        count = max(ASKED, math.ceil(len(roster.others()) / (MAX_SILENCE - 1)))
        answers = await asyncio.gather(*(self.ask(peer) for peer in roster.spread(count, observed.asked_round)))
        return [progress for progress in answers if progress is not None]

    async def _try_again(self, peer: PeerId) -> None:
        """Ask a peer that was marked down, and may be back."""
        await self.find_out(peer)
        if self._ctx.roster.is_alive(peer):
            await self.entries_from(peer)

    async def ask_replicas(self) -> list[Progress]:
        """Ask all replicas for seals and entries, since a notice may be lost. Returns their progress."""
        answers = await asyncio.gather(*map(self._ask_seal, self._ctx.roster.replicas()))
        return [progress for progress in answers if progress is not None]

    async def _ask_seal(self, peer: PeerId) -> Progress | None:
        progress = await self.ask(peer)
        if self._ctx.roster.is_alive(peer) and await self.learn_seal(peer):
            await self.entries_from(peer)
        return progress

    async def learn_seal(self, peer: PeerId) -> bool:
        """Ask ``peer`` for its last seal. False: no answer."""
        ask = AskSeal(lineage=self._state.lineage, step=self._state.step).pack()
        try:
            answer = await self._ctx.net.call(peer, AskSeal.KIND, ask, timeout_s=self._ctx.detector.deadline.seconds(1))
            if answer:
                self.on_seal(peer, Seal.unpack(answer))
        except NetworkError as e:
            self._ctx.detector.mark_down(peer, e.why)
            return False
        return True

    async def ask_holders(self) -> list[Progress]:
        """Ask live replicas whether they hold this step's gradient or are beyond this step, since a notice may be lost.
        Returns the answers."""

        async def ask(peer: PeerId) -> Progress | None:
            progress = await self.ask(peer)
            await self.entries_from(peer)
            return progress

        asked = [ask(p) for p in self._ctx.roster.replicas() if self._ctx.roster.is_alive(p)]
        return [progress for progress in await asyncio.gather(*asked) if progress is not None]

    async def ask_entries(self) -> None:
        """Ask all peers for round entries, since a notice may be lost."""
        roster = self._ctx.roster
        await asyncio.gather(*map(self.entries_from, filter(roster.is_alive, roster.everyone())))
        if self._recorded():
            return
        # replicas that hold no round may try one without us
        others = [p for p in roster.replicas() if roster.is_alive(p) and not self._state.is_committed(p)]
        await asyncio.gather(self.ask_everyone(), *map(self.learn_seal, others))

    async def entries_from(self, peer: PeerId) -> Entries | None:
        """Learn the round of this step that ``peer`` attests to, or the applied record. None: no answer."""
        ctx, state = self._ctx, self._state
        ask = AskEntries(lineage=state.lineage, step=state.step).pack()
        try:
            packed = await ctx.net.call(peer, AskEntries.KIND, ask, timeout_s=ctx.detector.deadline.seconds(1))
            answer = Entries.unpack(packed)
            if not state.current:
                return None
            if answer.abstains:
                self.on_abstain(peer)
            if answer.own is not None:
                self.on_entry(peer, answer.own)
            if answer.tied is not None:
                self.on_tied(peer, answer.tied)
            if answer.applied and state.builder.claim(peer, answer.applied, answer.record, answer.product):
                for entry in (e for e in answer.applied if e.stage == ctx.roster.member(peer).stage):
                    state.hear_applied(peer, entry)
                    self.on_entry(peer, entry.model_copy(update={"holder": peer, "without": ()}))
        except ProtocolError as e:
            ctx.refused(peer, str(e))
        except NetworkError as e:
            ctx.detector.mark_down(peer, e.why)
        else:
            return answer
        return None

    async def went_on(self, first: PeerId) -> bool:
        """Has the run gone beyond this step, as ``first`` says? A single member cannot lure us away: more peers must be
        beyond the step, by one record, than at the step, or its record must be known now."""
        here, gone = 0, Counter[bytes]()
        for peer in dict.fromkeys((first, *self._ctx.roster.spread(MAX_ASKED))):
            answer = await self.entries_from(peer)
            if self._recorded():
                return True
            if answer is not None:
                here += answer.step == self._state.step
                gone[answer.record] += answer.step > self._state.step  # replicas that lost each other have two records
            if max(gone.values(), default=0) - here > 1:
                break
        return max(gone.values(), default=0) > here

    async def learn_record(self, peers: Iterable[PeerId]) -> None:
        """Ask ``peers`` for this step's record, until enough answers agree."""
        asked, here, builder = 0, False, self._state.builder
        for peer in peers:
            if self._recorded() or asked > MAX_ASKED:
                break
            answer = await self.entries_from(peer)
            here |= answer is not None and answer.step == self._state.step
            asked += builder.claimed > 0
        builder.trusting = not here


class Current(Protocol):
    """Knows the current step (``runner``)."""

    @property
    def state(self) -> StepState:
        """The peer's knowledge of the current step."""
        ...


class Answers:
    """Answers the calls of peers that missed notices of the current step, or of earlier steps."""

    def __init__(self, ctx: Context, current: Current, log: GradientLog, membership: Membership) -> None:
        self._ctx, self._current, self._log, self._membership = ctx, current, log, membership
        ctx.net.serve(AskEntries.KIND, self._entries)
        ctx.net.serve(AskGradient.KIND, self._gradient)
        ctx.net.serve(AskSeal.KIND, self._seal)

    async def _entries(self, sender: PeerId, payload: bytes) -> bytes:
        """Answer with the entries of this step or of a kept earlier step; none for any other step."""
        ask, state = AskEntries.unpack(payload), self._current.state
        if (ask.step, ask.lineage) == (state.step, state.lineage):
            abstains = self._ctx.net.peer_id in state.builder.abstaining(self._ctx.roster.own.stage)
            return Entries(step=state.step, own=state.attested, tied=state.tied, abstains=abstains).pack()
        applied, record = self._log.applied(sender, ask.step, ask.lineage)
        if record is None:
            return Entries(step=state.step).pack()
        return Entries(step=state.step, applied=applied, product=record.product, record=record.hash).pack()

    async def _gradient(self, sender: PeerId, payload: bytes) -> bytes:
        """Answer with a gradient's manifest. Raises ProtocolError for a peer of another stage, unless for the part tied
        to the peer's own stage."""
        ask, state = AskGradient.unpack(payload), self._current.state
        own, sharing = self._ctx.roster.own.stage, state.builder.tied
        if ask.tied and own not in sharing:
            raise ProtocolError("this stage shares no parameters")
        if not any([await self._membership.serves(sender, stage) for stage in (sharing if ask.tied else (own,))]):
            raise ProtocolError("a gradient is for replicas of its stage")
        if ask.tied:
            return await self._log.tied_manifest(sender, ask.round, state.gradient, state.other)
        return await self._log.manifest(sender, ask.round, state.gradient)

    async def _seal(self, sender: PeerId, payload: bytes) -> bytes:
        ask, seal = AskSeal.unpack(payload), self._current.state.announced
        return seal.pack() if seal is not None and (seal.step, seal.lineage) == (ask.step, ask.lineage) else b""
