"""A peer's knowledge of one step: seals of replicas, rounds of committed replicas, and attestations of all stages."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muletrain.errors import ProtocolError
from muletrain.policy import speakers as speaking
from muletrain.policy.deadline import Deadline, Usual
from muletrain.policy.overdue import Overdue
from muletrain.policy.recent import Recent
from muletrain.runtime.averaging.averager import Averager
from muletrain.runtime.averaging.rounds import usual_round
from muletrain.runtime.core.times import AGAIN_S
from muletrain.runtime.step.record import Certificate, RecordBuilder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from muletrain.network.base import PeerId
    from muletrain.runtime.averaging.mean_gradient import MeanGradient, TiedPart
    from muletrain.runtime.core.blocks import Downloader
    from muletrain.runtime.core.waiting import Waits
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.leaving import Departure
    from muletrain.runtime.members.row import RoundEntry, Seal, StageEntry, Statements, TiedEntry
    from muletrain.runtime.microbatch.inflight import InFlightStep
    from muletrain.runtime.microbatch.microbatches import Microbatches
    from muletrain.runtime.microbatch.position import Position
    from muletrain.runtime.step.gradient_log import GradientLog
    from muletrain.runtime.step.record import Attested

MAX_ATTEMPTS = 40
"""Rounds tried for one step before the peer gives up with an error."""
MAX_NUMBER = 25 * MAX_ATTEMPTS
"""Most attempts that a seal may be ahead of the latest known attempt."""
MAX_VIEWS = 2 * MAX_ATTEMPTS
"""Sets of members remembered for each replica in a step."""
APART = 16
"""Steps for which a replica is left out if its chunks do not arrive, at first; doubles (``policy.overdue``)."""
STALLED = 4
"""The same for a replica that went on without us and got nowhere, perhaps slow for once."""


@dataclass
class Lessons:
    """What earlier steps taught: how long the parts of a step take, and how the other peers, or this one, did."""

    step: Deadline = field(default_factory=Deadline)
    """From the step's begin until all microbatches are through."""
    seal: Deadline = field(default_factory=lambda: Deadline(floor_s=0.5, deviations=1.0))
    """Until all replicas have sealed."""
    averaging: Usual = field(default_factory=usual_round)
    """A round of averaging."""
    record: Deadline = field(default_factory=lambda: Deadline(unmeasured_s=10.0, floor_s=0.5))
    """Until all stages have reduced."""
    late: Deadline = field(default_factory=lambda: Deadline(floor_s=AGAIN_S))
    """How long a peer may stay at an earlier step: as long as we take to apply a step, or as late peers took."""
    left_out: Recent[None] = field(default_factory=Recent)
    """Peers that stayed at an earlier step for so long, and have not been in time since."""
    moved: Recent[tuple[int, bytes]] = field(default_factory=Recent)
    """Each peer's last report: bytes moved, and the round being averaged."""
    asked_round: int = 0
    """Questions to all peers so far."""
    apart: Overdue = field(default_factory=lambda: Overdue(APART))
    """Replicas that are left out because their chunks do not arrive."""
    stalled: Overdue = field(default_factory=lambda: Overdue(STALLED))
    """Replicas that went on without this peer and got nowhere, for which this peer does not wait."""
    silent: Recent[tuple[int, int]] = field(default_factory=Recent)
    """Amount of each replica's missing chunks (``Averager.silent``), and the last step with missing chunks."""
    differed: int | None = None
    """The last step at which our weights differed from the replicas' weights."""
    offences: Recent[tuple[int, ...]] = field(default_factory=Recent)
    """The last steps in which another peer's results differed from a member's, or from ours (``audit``)."""


@dataclass
class Lasting:
    """The parts of a peer that all steps share, and that outlive each."""

    ctx: Context
    position: Position
    departure: Departure
    log: GradientLog
    microbatches: Microbatches
    begin_ahead: Callable[[InFlightStep], Awaitable[None]]
    """Begins to compute a step beside the present step."""
    met_rival: Callable[[PeerId], None]
    """Hears of a peer of another lineage, and its step (``recovery.forks``)."""
    downloader: Downloader
    """Takes gradients that this peer missed."""
    waits: Waits
    lessons: Lessons = field(default_factory=Lessons)


class StepState:
    """Owns the knowledge of one step; each step has a new state. Nothing here waits or sends."""

    def __init__(self, lasting: Lasting) -> None:
        ctx, position = lasting.ctx, lasting.position
        self._ctx, self._position, self._lessons = ctx, position, lasting.lessons
        self.work = position.work
        self.step, self.lineage = position.step, position.lineage
        tied = () if ctx.plan.tied is None else ctx.plan.tied.stages
        self.builder = RecordBuilder(
            self.step, self.lineage, ctx.plan.stages, position.applied, ctx.roster, ctx.clock, self._silence_s, tied
        )
        self.averager = Averager(ctx, self.holders, lasting.lessons.averaging)
        self.gradient: MeanGradient | None = None
        """The stage's whole mean gradient, once this peer has the gradient."""
        self.attested: RoundEntry | None = None
        """The round that we announced to hold."""
        self.version = 0
        """Version of our statements (``Row.version``); 0: there are none."""
        self.other: TiedPart | None = None
        """The part of another stage's gradient for the shared parameters, once this peer has the part."""
        self.tied: TiedEntry | None = None
        """The product that we announced."""
        self.seals: dict[PeerId, Seal] = {}
        """Each replica's last seal."""
        self.filled: dict[PeerId, frozenset[int]] = {}
        """Missing microbatches that each replica has accumulated since its last seal, as it told."""
        self.announced: Seal | None = None
        """Our own last seal."""
        self.gave_up: tuple[int, ...] = ()
        """Microbatches that our next seal leaves to other replicas, since the gradient stood out (``audit``)."""
        self.excused = False
        """Does our next seal say that such a gradient was computed from suspicious input?"""
        self._loaded = False
        """Our weights were loaded in this step, so we may have forgotten earlier actions."""
        self._views: defaultdict[PeerId, set[frozenset[PeerId]]] = defaultdict(set)
        """The sets of members that each replica sealed, in all attempts that we heard of."""
        self._aside: dict[PeerId, int] = {}
        """Replicas that abstain, and the first attempt after that."""
        self._done = 0, ctx.clock.now()
        """Microbatches that came on here, and since when it is so many."""

    def load(self, before: StepState | None) -> None:
        """Begin the step with loaded weights. ``before``: our knowledge of the same step until then, which stays valid:
        we must not attest to a second mean for the same round, nor send other sums under the same attempt number."""
        self._loaded = True
        if before is None:
            return
        self.seals, self.announced, self.version = dict(before.seals), before.announced, before.version
        self.changed()
        for member, seal in self.seals.items():
            self._views[member].add(frozenset(seal.members))
        if before.gradient is not None and not self._ctx.plan.alone:  # alone, the gradient was the accumulator
            self.hold(before.gradient)
            self.work.computed, self.work.counted = before.work.computed, before.work.counted

    def hold(self, gradient: MeanGradient) -> None:
        """Note that this peer has the stage's whole ``gradient``."""
        self.gradient, self.work.reduced = gradient, True

    def changed(self) -> None:
        """Our statements have changed. Versions grow with time, so those of a peer that begins anew are higher."""
        self.version = max(self.version + 1, int(1e6 * self._ctx.clock.now()))

    @property
    def current(self) -> bool:
        """Is this still the peer's step? False once the peer has gone on, or begun the step again."""
        return self._position.work is self.work

    # What arrives -----------------------------------------------------------------------------------------------------

    def take_in(self, sender: PeerId, said: Statements) -> bool:
        """Take in the statements of ``sender``. Returns whether its seal is news. Raises ProtocolError."""
        stage = self._ctx.roster.member(sender).stage
        if (said.step, said.lineage, said.stage) != (self.step, self.lineage, stage):
            raise ProtocolError("statements about another step or lineage, or from another stage")
        if said.abstains is not None:
            self._abstains(sender, said.abstains)
        sealed = said.seal is not None and self._take_seal(sender, said.seal)
        of_ours = not said.record or self.builder.claim(sender, said.entries, said.record, said.product)
        if said.entries and not said.record:
            self.builder.certify(sender, stage, Certificate(said.entries[0], said.product))
        if said.entry is not None and of_ours:
            self._take_entry(sender, said.entry, applied=bool(said.record))
        if said.filled:
            self.filled[sender] = frozenset(said.filled)
        if said.tied is not None:
            if stage not in self.builder.tied:
                raise ProtocolError("a product of gradients from a stage that shares no parameters")
            self.builder.add_tied(sender, said.tied)
        return sealed

    def _take_seal(self, sender: PeerId, seal: Seal) -> bool:
        roster, microbatches = self._ctx.roster, self._ctx.plan.microbatches
        if roster.member(sender).stage != roster.own.stage:
            raise ProtocolError("seal from a peer of another stage")
        if (
            sender not in seal.members
            or any(i >= microbatches for i in seal.indices)
            or any(i >= microbatches for i in seal.gave_up)
            or seal.attempt >= self.latest_attempt() + MAX_NUMBER
        ):
            raise ProtocolError("seal with indices outside the step, or of an attempt that nobody makes")
        known = self.seals.get(sender)
        if known is not None and known.attempt >= seal.attempt:
            return False
        self.seals[sender] = seal
        self.filled.pop(sender, None)
        if len(self._views[sender]) <= MAX_VIEWS:
            self._views[sender].add(frozenset(seal.members))
        return True

    def _take_entry(self, sender: PeerId, entry: RoundEntry, *, applied: bool) -> None:
        """``applied``: ``sender`` has applied a record with ``entry``, and has forgotten earlier seals."""
        if sender != entry.holder or self._ctx.roster.member(sender).stage != entry.stage:
            raise ProtocolError("round entry in another's name, or for a stage that its sender does not serve")
        ours = entry.stage == self._ctx.roster.own.stage
        if ours and self.takes_part(entry) and (reason := self._contradiction(entry)) is not None:
            raise ProtocolError(f"round entry: {reason}")
        self.builder.add(entry)
        if applied:
            self._views[sender].add(frozenset({*entry.members, *entry.expelled}))

    def _abstains(self, peer: PeerId, attempt: int) -> None:
        """``peer`` abstains before ``attempt``, and accepts the agreement of the other replicas."""
        self.builder.abstain(self._ctx.roster.member(peer).stage, peer)
        self._aside[peer] = max(attempt, self._aside.get(peer, 0))
        self.filled.pop(peer, None)

    def abstain(self) -> int | None:
        """Abstain, since our replicas go on without us. Returns the first attempt after that; None: no news."""
        me, attempt = self._ctx.net.peer_id, 0 if self.announced is None else self.announced.attempt + 1
        if attempt <= self._aside.get(me, -1):
            return None
        self._abstains(me, attempt)
        return attempt

    @property
    def abstained(self) -> int | None:
        """The first attempt after our last abstention; None: we did not abstain."""
        return self._aside.get(self._ctx.net.peer_id)

    # Who hears it -----------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of live peers of the run."""
        return len(self._ctx.roster.others()) + 1

    def audience(self) -> tuple[PeerId, ...]:
        """The peers that hear our statements: in a large run our replicas and, if our stage shares parameters, those of
        the other stage."""
        roster, tied = self._ctx.roster, self.builder.tied
        if self.size <= speaking.DIRECT:
            return roster.everyone()
        stages = {roster.own.stage, *(tied if roster.own.stage in tied else ())}
        return tuple(p for p in roster.everyone() if roster.member(p).stage in stages)

    def speakers(self, stage: int, *also: PeerId) -> tuple[PeerId, ...]:
        """The peers that speak for ``stage`` in this step, if ``also`` others than those that we count on serve it."""
        return speaking.speakers(self.lineage, {*self._ctx.roster.stage(stage), *also})

    # What follows from it ---------------------------------------------------------------------------------------------

    def latest_attempt(self, members: Collection[PeerId] | None = None) -> int:
        """The highest attempt that a live replica (of ``members``) announced."""
        alive = self._ctx.roster.is_alive
        known = (s.attempt for m, s in self.seals.items() if alive(m) and (members is None or m in members))
        return max(known, default=0)

    def stands_aside(self, peer: PeerId) -> bool:
        """Has ``peer`` abstained, and announced nothing since?"""
        seal = self.seals.get(peer)
        return peer in self._aside and (seal is None or seal.attempt < self._aside[peer])

    def holders(self) -> list[RoundEntry]:
        """The believed attestations of live replicas to rounds of this step."""
        roster = self._ctx.roster
        applied, rounds = self.builder.applied(roster.own.stage, self._long_ago_s()), self._rounds()
        attesting = [e for r in rounds if self._believed(r, applied) for _, e in sorted(r.holders.items())]
        return [e for e in attesting if roster.is_alive(e.holder)]

    def committed(self) -> set[PeerId]:
        """The replicas that attest to a round that its members sealed. They take part in no other round: if the round is
        believed we take its gradient, else we go on without these replicas."""
        return {m for r in self._rounds() if not self.unsealed(r) for m in r.holders}

    def _rounds(self) -> list[Attested]:
        return self.builder.rounds(self._ctx.roster.own.stage)

    def takes_part(self, entry: RoundEntry) -> bool:
        """Did we take part in this round, with the weights that we still have?"""
        return self._ctx.net.peer_id in entry.members and not self._loaded

    def unsealed(self, round_: Attested) -> bool:
        """Did none of the attesting members seal the members of ``round_``, as far as we heard?"""
        members = [m for m in round_.facts.members if m in round_.holders]
        view = frozenset({*round_.facts.members, *round_.facts.expelled})
        return bool(members) and not any(view in self._views[m] for m in members)

    def doubtful(self, holder: PeerId) -> list[Attested]:
        """Rounds that ``holder`` attests to, but is not known to have sealed."""
        return [r for r in self._rounds() if holder in r.holders and not self.takes_part(r.facts) and self.unsealed(r)]

    def _silence_s(self) -> float:
        """The time after which replicas that hold no round stay silent for good: as long as a step's microbatches take,
        or twice as long as a round, since 1 GB of gradients takes minutes on a slow link [s]."""
        usual = self._lessons.averaging
        return max(self._lessons.step.seconds(), 2 * usual.median_s if usual.known else 0.0)

    def _long_ago_s(self) -> float:
        """The time as long ago as a step takes, if no microbatch came on here since; else -inf: work that goes on needs
        no other's word."""
        now, done = self._ctx.clock.now(), len(self.work.losses) + len(self.work.ledger.accumulated)
        if done != self._done[0]:
            self._done = done, now
        long_ago_s = now - self._lessons.step.seconds()
        return long_ago_s if self._done[1] <= long_ago_s else -math.inf

    def _believed(self, round_: Attested, applied: Collection[StageEntry]) -> bool:
        """We know a round of ours by its shards. A round without us counts if most of the other replicas attest to it;
        a single other replica is enough. So does a round in ``applied`` (``RecordBuilder.applied``): if
        each of the others waited for the next one's word, none would be most."""
        if self.takes_part(round_.facts):
            return self._contradiction(round_.facts) is None
        stage, me, holders = self._ctx.roster.own.stage, self._ctx.net.peer_id, round_.holders.keys()
        others = (set(self._ctx.roster.stage(stage)) | holders) - self.builder.abstaining[stage] - {me}
        most = 2 * len(holders) > len(others | holders)
        return (most or round_.entry in applied) and not self.unsealed(round_)

    def _contradiction(self, entry: RoundEntry) -> str | None:
        """Why a round that names us cannot be as its holder says; None: no contradiction. Until we have reduced our
        shard no peer can hold the whole gradient, so such an entry is false. Then our shard and the holder's shard must
        match our knowledge. Other members' shards may differ; we cannot tell which member is at fault."""
        known, me = self.averager.shards.get(entry.round, {}), self._ctx.net.peer_id
        if me not in known:
            return "its members are not what this peer sealed, or it cannot be whole: this peer reduced no shard of it"
        told = dict(zip(entry.members, entry.shards, strict=False))  # counted later
        wrong = any(known[m] != told.get(m) for m in (me, entry.holder) if m in known)
        return "its shards are not what its members reduced" if wrong else None
