"""What the peers of a run tell each other of one step: what arrives, what is asked for when a notice may be lost, and
what is answered."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from muletrain.errors import NetworkError, ProtocolError
from muletrain.policy.deadline import Deadline
from muletrain.policy.recent import Recent
from muletrain.runtime.core.waiting import MAX_SILENCE
from muletrain.runtime.microbatch.position import Behind
from muletrain.runtime.step.messages import Abstain, AskEntries, AskGradient, AskSeal, Entries, Seal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from muletrain.network.base import PeerId
    from muletrain.runtime.core.waiting import Waits
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.membership import Membership
    from muletrain.runtime.members.messages import Progress
    from muletrain.runtime.microbatch.position import Position
    from muletrain.runtime.step.gradient_log import GradientLog
    from muletrain.runtime.step.messages import RoundEntry
    from muletrain.runtime.step.record import Attested
    from muletrain.runtime.step.state import StepState

GRACE_S = 0.25
"""Seconds between the first sign that others are beyond what we wait for, and the question whether we missed it."""
ASKED = 64
"""Living peers that are asked at once what they know; so many more that all were asked before a wait is given up."""
MAX_ASKED = 8
"""Peers that are asked whether they are beyond this step, too; and for its record, after the first that knew it."""
LATE_S = 3.0
"""Seconds, at least, that a peer may be at an earlier step from when we first ask it, before it is left out."""


class Rivals(Protocol):
    """Who deals with peers of other lineages (``recovery.forks``)."""

    def met(self, peer: PeerId, step: int) -> None:
        """``peer`` is of another lineage, and at ``step``."""
        ...


@dataclass
class Observed:
    """What the steps of a run have taught so far of the others."""

    late: Deadline = field(default_factory=lambda: Deadline(floor_s=LATE_S))
    """For those at an earlier step: they apply it as long as we do, or as the latest of those that came on."""
    moved: Recent[tuple[int, bytes]] = field(default_factory=Recent)
    """Bytes that others said they had moved, and the round that they averaged last."""
    asked_round: int = 0
    """Questions to everyone, so far."""


class Exchange:
    """Of one step, and made anew for each."""

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
        """Replicas that were asked for the seal of what they attest to, and the attempt of the last one that we
        knew."""
        self._late: dict[PeerId, float] = {}
        """When we first heard that a peer was at an earlier step still."""

    # What arrives -----------------------------------------------------------------------------------------------------

    def on_seal(self, sender: PeerId, seal: Seal) -> None:
        """Raises ProtocolError."""
        news = self._state.hear_seal(sender, seal)
        self._log.arrived(sender)
        if not news:
            return
        self._question(sender)
        self._ctx.news.touched()
        if not self._work.all_completed:
            self._overtaken_by(sender, applied=False)
        if self._state.attested is not None:  # no other attempt is needed: what we hold is for everyone
            self._ctx.spawn(self._ctx.tell((sender,), self._state.attested), "entry again")

    def on_entry(self, sender: PeerId, entry: RoundEntry) -> None:
        """Raises ProtocolError."""
        if self._state.hear_entry(sender, entry):
            self._question(sender)
        self._ctx.news.touched()
        for member in entry.without:  # whether it counts may depend on whether they live
            self._ctx.detector.look_after(member, self._state.lineage, self._state.step)

    def on_abstain(self, sender: PeerId, attempt: int = 0) -> None:
        self._state.hear_abstention(sender, attempt)
        self._ctx.news.touched()

    def on_later(self, sender: PeerId, *, applied: bool) -> None:
        """A frame came from ``sender`` that is sent after all microbatches of this step are through, or after it was
        ``applied``."""
        self._overtaken_by(sender, applied=applied)

    def abstain(self) -> None:
        """Others of our stage go on without us: tell everyone that what they hold counts without our word."""
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
        """``sender`` has what we still wait for. Usually we have it soon, too; if not, a notice was lost."""
        if not (self._overtaken or self._position.away or self._reached(applied=applied)):
            self._overtaken = True
            self._ctx.spawn(self._find_out_later(sender, applied=applied), "overtaken")

    async def _find_out_later(self, sender: PeerId, *, applied: bool) -> None:
        await self._ctx.clock.sleep(GRACE_S)
        self._overtaken = False
        if self._state.current and not self._reached(applied=applied):
            await self.find_out(sender)

    def _question(self, holder: PeerId) -> None:
        """Find out whether ``holder`` sealed what it attests to, unless we know."""
        seal = self._state.seals.get(holder)
        asked = holder, seal.attempt if seal is not None else -1
        if asked in self._questioned:
            return
        for round_ in self._state.doubtful(holder):
            self._questioned.add(asked)
            self._ctx.spawn(self._ask_why(holder, round_), "ask for a seal")

    async def _ask_why(self, holder: PeerId, round_: Attested) -> None:
        """Its seal may have been lost on its way to us. It answers with what it announced last, and whoever holds a
        round announces no more; only one that took the round from another may have tried one since."""
        state = self._state
        if await self.learn_seal(holder) and state.current and holder in state.seals:
            if state.unsealed(round_) and round_.holders.keys() == {holder}:
                self._ctx.refused(holder, "round entry: its members are not what its holder sealed")
            self._ctx.news.touched()

    # What we ask ------------------------------------------------------------------------------------------------------

    async def find_out(self, sender: PeerId) -> None:
        """What we still wait for, ``sender`` may know."""
        if self._position.away:
            return
        try:
            await self.ask(sender)
        except Behind as e:
            if self._state.current:
                self._position.interrupt(e)
        self._ctx.news.touched()

    async def ask(self, peer: PeerId) -> Progress | None:
        """Learn what ``peer`` knows of this step (and return it); leave it out when it stays at an earlier one. Raises
        Behind if it is at a later one."""
        ctx, state = self._ctx, self._state
        progress = await ctx.detector.probe(peer, state.lineage, state.step)
        if progress is None:
            return None
        moved, round_ = self._observed.moved.get(peer, (0, b""))
        # a stage with slow links may average for long, or try again; and a peer whose device is late soon leaves the
        # step to the others
        if progress.moved > moved or progress.round != round_ or progress.late:
            self._waits.came_on()
        self._observed.moved[peer] = progress.moved, progress.round
        if progress.rival:
            self._rivals.met(peer, progress.step)
            ctx.detector.mark_down(peer, "it trains in another lineage", declines=True)
            return progress
        if progress.step > state.step:
            self._position.others_at = max(self._position.others_at, progress.step)
            went_on = await self.went_on(peer)
            if not went_on or (state.gradient is not None and self._recorded()):
                return progress  # all that we lacked was word of the others
            raise Behind(f"step {state.step}: {ctx.roster.name(peer)} is at step {progress.step}")
        if progress.current and self._work.complete(progress.completed, progress.losses):
            ctx.news.touched()
        if not progress.current or (progress.step < state.step and self._work.all_completed):
            self._leave_out(peer, progress)  # it is of no use until it is at this step, too
        elif progress.step == state.step and peer in self._late:
            self._observed.late.measured(ctx.clock.now() - self._late.pop(peer))
        return progress

    def _leave_out(self, peer: PeerId, progress: Progress) -> None:
        """Once it has been at an earlier step for long."""
        now = self._ctx.clock.now()
        if now - self._late.setdefault(peer, now) >= self._observed.late.seconds():
            self._late[peer] = now  # else each answer would make it count again, and be marked down again
            self._ctx.detector.mark_down(peer, f"it is still at step {progress.step}")

    async def ask_everyone(self) -> None:
        """In a large fleet some, and others the next time: all ask. Those that are down, too, for a link that healed
        says nothing by itself; but nobody waits for them."""
        roster, observed = self._ctx.roster, self._observed
        observed.asked_round += 1
        for peer in self._ctx.detector.worth_a_try(p for p in roster.everyone() if not roster.is_alive(p)):
            self._ctx.spawn(self._try_again(peer), "ask after the dead")
        count = max(ASKED, math.ceil(len(roster.others()) / (MAX_SILENCE - 1)))
        await asyncio.gather(*(self.ask(peer) for peer in roster.spread(count, observed.asked_round)))

    async def _try_again(self, peer: PeerId) -> None:
        """A peer that was marked down may be back."""
        await self.find_out(peer)
        if self._ctx.roster.is_alive(peer):
            await self.entries_from(peer)

    async def ask_replicas(self) -> None:
        """A lost announcement must not stop the stage: whoever made it can say it again."""
        await asyncio.gather(*map(self._ask_seal, self._ctx.roster.replicas()))

    async def _ask_seal(self, peer: PeerId) -> None:
        await self.ask(peer)
        if self._ctx.roster.is_alive(peer) and await self.learn_seal(peer):
            await self.entries_from(peer)

    async def learn_seal(self, peer: PeerId) -> bool:
        """False where ``peer`` does not answer."""
        ask = AskSeal(lineage=self._state.lineage, step=self._state.step).pack()
        try:
            answer = await self._ctx.net.call(peer, AskSeal.KIND, ask, timeout_s=self._ctx.detector.deadline.seconds(1))
            if answer:
                self.on_seal(peer, Seal.unpack(answer))
        except NetworkError as e:
            self._ctx.detector.mark_down(peer, str(e))
            return False
        return True

    async def ask_holders(self) -> list[Progress]:
        """A notice that a replica holds this step's gradient, or is beyond it, may have been lost. What those that
        answer hold."""

        async def ask(peer: PeerId) -> Progress | None:
            progress = await self.ask(peer)
            await self.entries_from(peer)
            return progress

        asked = [ask(p) for p in self._ctx.roster.replicas() if self._ctx.roster.is_alive(p)]
        return [progress for progress in await asyncio.gather(*asked) if progress is not None]

    async def ask_entries(self) -> None:
        """A lost notice must not stop the run: who sent it can say it again."""
        roster = self._ctx.roster
        await asyncio.gather(*map(self.entries_from, filter(roster.is_alive, roster.everyone())))
        if self._recorded():
            return
        # those of our stage that hold no round may try one without us
        others = [p for p in roster.replicas() if roster.is_alive(p) and not self._state.is_committed(p)]
        await asyncio.gather(self.ask_everyone(), *map(self.learn_seal, others))

    async def entries_from(self, peer: PeerId) -> Entries | None:
        """Learn what ``peer`` attests to of this step, or which record it applied. None where it does not answer."""
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
            if answer.applied and state.builder.claim(peer, answer.applied, answer.record):
                for entry in (e for e in answer.applied if e.stage == ctx.roster.member(peer).stage):
                    self.on_entry(peer, entry.model_copy(update={"holder": peer, "without": ()}))
                    state.hear_applied(peer, entry)
        except ProtocolError as e:
            ctx.refused(peer, str(e))
        except NetworkError as e:
            ctx.detector.mark_down(peer, str(e))
        else:
            return answer
        return None

    async def went_on(self, first: PeerId) -> bool:
        """``first`` says that it is beyond this step. True if others say so, too, and more than say that they are here,
        or if the record of this step is known now: one member alone cannot lure us away."""
        here = gone = 0
        for peer in dict.fromkeys((first, *self._ctx.roster.spread(MAX_ASKED))):
            answer = await self.entries_from(peer)
            if self._recorded():
                return True
            if answer is not None:
                here, gone = here + (answer.step == self._state.step), gone + (answer.step > self._state.step)
            if gone - here > 1:
                break
        return gone > here

    async def learn_record(self, peers: Iterable[PeerId]) -> None:
        """Ask ``peers`` that may have applied this step for its record, until enough of them say the same."""
        asked, here, builder = 0, False, self._state.builder
        for peer in peers:
            if self._recorded() or asked > MAX_ASKED:
                break
            answer = await self.entries_from(peer)
            here |= answer is not None and answer.step == self._state.step
            asked += builder.claimed > 0
        builder.trusting = not here


class Current(Protocol):
    """Who knows the current step (``runner``)."""

    @property
    def state(self) -> StepState: ...


class Answers:
    """Serves the calls of those that missed something, of the current step and of earlier ones."""

    def __init__(self, ctx: Context, current: Current, log: GradientLog, membership: Membership) -> None:
        self._ctx, self._current, self._log, self._membership = ctx, current, log, membership
        ctx.net.serve(AskEntries.KIND, self._entries)
        ctx.net.serve(AskGradient.KIND, self._gradient)
        ctx.net.serve(AskSeal.KIND, self._seal)

    async def _entries(self, sender: PeerId, payload: bytes) -> bytes:
        """Of this step or an earlier one that is kept; none for any other."""
        ask, state = AskEntries.unpack(payload), self._current.state
        if (ask.step, ask.lineage) == (state.step, state.lineage):
            abstains = self._ctx.net.peer_id in state.builder.abstaining(self._ctx.roster.own.stage)
            return Entries(step=state.step, own=state.attested, abstains=abstains).pack()
        applied = self._log.entries(sender, ask.step, ask.lineage)
        return Entries(step=state.step, applied=applied, record=self._log.record(ask.step) if applied else b"").pack()

    async def _gradient(self, sender: PeerId, payload: bytes) -> bytes:
        """Raises ProtocolError for a peer of another stage."""
        if not await self._membership.serves(sender, self._ctx.roster.own.stage):
            raise ProtocolError("a gradient is for replicas of its stage")
        return await self._log.manifest(sender, AskGradient.unpack(payload).round, self._current.state.gradient)

    async def _seal(self, sender: PeerId, payload: bytes) -> bytes:
        ask, seal = AskSeal.unpack(payload), self._current.state.announced
        return seal.pack() if seal is not None and (seal.step, seal.lineage) == (ask.step, ask.lineage) else b""
