"""The step record: the unit of agreement of the whole run, and how it is built from attestations (CONTRIBUTING, "How a step
goes", 4).

``R_t`` holds each stage's round entry, and hash(R_{t-1}). A peer applies step t only with the whole record. The clip
scale, and whether a non-finite step is skipped, are pure functions of the record, so every peer decides the same
without asking.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgpack

from muletrain.errors import ProtocolError
from muletrain.runtime.core.branches import branch_of, hashed
from muletrain.runtime.core.times import AGAIN_S
from muletrain.runtime.members.row import RoundEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from muletrain.clock import Clock
    from muletrain.runtime.members.roster import Roster
    from muletrain.runtime.members.row import StageEntry, TiedEntry


def round_id(
    lineage: bytes,
    stage: int,
    step: int,
    attempt: int,
    sealed: dict[str, frozenset[int]],
    chosen: tuple[str, ...],
    stop: bool,
    leaves: tuple[str, ...] = (),
    expelled: tuple[str, ...] = (),
) -> bytes:
    """Identity of one attempt at reducing one stage. Members that disagree on anything get different identities."""
    sets = [(m, sorted(sealed[m])) for m in sorted(sealed)]
    return hashlib.sha256(
        msgpack.packb(["round", lineage, stage, step, attempt, sets, list(chosen), stop, list(leaves), list(expelled)])
    ).digest()


@dataclass(frozen=True)
class StepRecord:
    """The record ``R_t``; ``stages`` are in pipeline order."""

    step: int
    lineage: bytes
    """hash(R_{t-1})"""
    stages: tuple[StageEntry, ...]
    product: float = 0.0
    """Inner product of two stages' gradients for the parameters that the stages share (``optim.tied``)."""

    @property
    def hash(self) -> bytes:
        """The lineage of step t + 1."""
        content = [
            [e.round, [e.size, e.content, e.square_norm, e.finite], e.stop, list(e.leaves), list(e.expelled), e.tied]
            for e in self.stages
        ]
        return hashed(
            branch_of(self.lineage), msgpack.packb(["record", self.step, self.lineage, content, self.product])
        )

    @property
    def gradient_norm(self) -> float:
        """Euclidean norm of the whole model's mean gradient, as a single process would compute it; NaN if not
        finite."""
        if not all(e.finite for e in self.stages):
            return math.nan
        return math.sqrt(max(0.0, math.fsum([*(e.square_norm for e in self.stages), 2 * self.product])))

    @property
    def skip(self) -> bool:
        """Must the update be skipped, because the gradient is not finite?"""
        return not math.isfinite(self.gradient_norm)

    @property
    def stop(self) -> bool:
        """Did a member ask for an orderly end? Every peer stops after applying such a record."""
        return any(e.stop for e in self.stages)

    def leavers(self, trains: Callable[[str], bool]) -> tuple[str, ...]:
        """The peers that leave after this step, by the same rule for all peers: at most one of a stage, if another
        stays, and at most one trainer (``trains``). The rest stays, and asks again."""
        chosen: list[str] = []
        for entry in self.stages:
            free = [p for p in entry.leaves if not (trains(p) and any(map(trains, chosen)))]
            chosen += free[:1] if entry.size > 1 else []
        return tuple(chosen)

    def clip_scale(self, clip: float | None) -> float:
        """min(1, clip / norm), as in ``torch.nn.utils.clip_grad_norm_``."""
        return 1.0 if clip is None else min(1.0, clip / (self.gradient_norm + 1e-6))


T = TypeVar("T")
_FACTS = tuple(name for name in RoundEntry.model_fields if name not in ("holder", "without", "shards"))
"""The fields of an entry, beside the shards, that all holders of a round share."""


@dataclass
class Attested:
    """A round with its attestations: the facts that all holders share, those for the record, and each holder's
    entry."""

    facts: RoundEntry
    entry: StageEntry
    holders: dict[str, RoundEntry] = field(default_factory=dict)

    def add(self, entry: RoundEntry) -> None:
        """Take in a holder's entry. Members that the holder has given up stay so."""
        before = self.holders.setdefault(entry.holder, entry)
        if not set(entry.without) <= set(before.without):
            without = tuple(sorted({*entry.without, *before.without}))
            self.holders[entry.holder] = entry.model_copy(update={"without": without})

    def complete(self, live: Collection[str], attesting: Collection[str]) -> bool:
        """Does every member hold the gradient, except members that are given up by a holder, down, or attest to another
        round?"""
        given_up = {member for entry in self.holders.values() for member in entry.without}
        lacking = set(self.facts.members) - self.holders.keys() - given_up
        return not any(m in live and m not in attesting for m in lacking)


_PRODUCT, _RECORD = -1, -2
"""Stand among stages for the product of tied parameters, and for the record."""
SLACK = 1 + 1e-3
"""Factor by which rounding may make a product larger than the norms allow."""


class Certificate(NamedTuple):
    """A peer's word that a round of its stage counts. ``product``: that counts with the round, if the stage is one of
    two that share parameters."""

    entry: StageEntry
    product: float = 0.0


@dataclass
class RecordBuilder:
    """Collects the attestations of one step, until a round of each stage counts.

    Nothing is signed, so a peer is believed about itself alone: the sender of an entry is its holder. A round counts if
    it is complete and more than half of its stage's replicas attest to it; live replicas that do not abstain and all
    holders vote. If all voters, or most while the rest stays silent, have attested for a while and no round has a
    majority, the round with most holders counts (ties: the lowest holder's), since replicas that lost sight of each
    other may hold different rounds. A round that only dead peers hold counts only if there is no other: perhaps no peer
    has its gradient any more. Peers with the same view of live peers choose the same round. With different views,
    lineages may part and meet again (``runtime.recovery.forks``).

    Where two stages share parameters, a product also has to count: more than half of both stages' voting replicas state
    the product for the two rounds that count.

    A late peer cannot hear all peers, and believes most of the peers that applied the step, if there are two or
    more. In a large run, replicas attest to their own stage alone; which round of another stage counts is what most of
    that stage's speakers certify, if two or more do (``policy.speakers``)."""

    step: int
    lineage: bytes
    """The lineage that the step's frames carry."""
    stages: int
    previous: bytes
    """hash(R_{t-1})"""
    live: Roster
    clock: Clock
    patience: Callable[[], float]
    """Returns how long the replicas that hold no round may take [s]."""
    tied: tuple[int, ...] = ()
    """The two stages that share parameters, if any."""
    _rounds: dict[tuple[int, bytes], list[Attested]] = field(default_factory=dict)
    """Rounds by stage and id; an id has several rounds if the holders contradict each other."""
    abstaining: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Replicas that accept the agreement of their stage's other replicas, by stage."""
    _claims: dict[str, StepRecord] = field(default_factory=dict)
    """The record that each peer claims to have applied."""
    _claimed_s: dict[str, float] = field(default_factory=dict)
    """When we first heard of each of ``_claims``."""
    _followed: dict[str, bytes] = field(default_factory=dict)
    """Hash of the record that made each next step's peer's weights, with or without one of ``_claims``."""
    _certificates: dict[int, dict[str, Certificate]] = field(default_factory=lambda: defaultdict(dict))
    """By stage and peer of that stage."""
    _answers: dict[int, Any] = field(default_factory=dict)
    """See ``_kept``."""
    _version: int = 0
    """Version of the live peers at the time of ``_answers``."""
    _undecided: dict[int, float] = field(default_factory=dict)
    """Stages whose voters have all attested without a majority, with the time since then."""
    _products: dict[str, TiedEntry] = field(default_factory=dict)
    """Last statement of each replica of the ``tied`` stages."""
    _settled: StepRecord | None = None
    _trusting: bool = False

    MAX_ROUNDS = 4
    """Most rounds of one step that one holder may attest to. A holder tries another round only after losing its
    state."""

    def add(self, entry: RoundEntry) -> None:
        """Take in a statement by ``entry.holder``. Raises ProtocolError if the entry contradicts the step or itself, or
        if the holder attests to more than ``MAX_ROUNDS`` rounds."""
        self._check(entry)
        rounds = self._rounds.get((entry.stage, entry.round), [])
        known = next((k for k in rounds if same_facts(entry, k.facts)), None)
        new = known is None or entry.holder not in known.holders
        if new and sum(entry.holder in k.holders for k in self.rounds(entry.stage)) >= self.MAX_ROUNDS:
            raise ProtocolError(f"stage {entry.stage}: more than {self.MAX_ROUNDS} rounds of one holder in one step")
        if known is None:
            self._check_facts(entry)
            known = Attested(entry.model_copy(update={"holder": "", "without": ()}), entry.for_record())
            self._rounds.setdefault((entry.stage, entry.round), []).append(known)
        known.add(entry)
        self._answers.clear()

    def abstain(self, stage: int, peer: str) -> None:
        """``peer`` accepts the agreement of its stage's other replicas."""
        self.abstaining[stage].add(peer)
        self._answers.clear()

    def add_tied(self, peer: str, entry: TiedEntry) -> None:
        """Take in a product stated by ``peer``, of a ``tied`` stage."""
        self._products[peer] = entry
        self._answers.clear()

    def certify(self, peer: str, stage: int, certificate: Certificate) -> None:
        """``peer`` of ``stage`` says that a round of its stage counts. Raises ProtocolError for another stage's round."""
        if certificate.entry.stage != stage:
            raise ProtocolError(f"a certificate of stage {certificate.entry.stage} from a peer of stage {stage}")
        self._certificates[stage][peer] = certificate
        self._answers.clear()

    def claim(self, peer: str, entries: tuple[StageEntry, ...], hash_: bytes, product: float = 0.0) -> bool:
        """``peer`` says that it applies the record of ``entries`` and ``product``. False if ``hash_`` shows another
        history. Raises ProtocolError for entries that make no record of this step."""
        if [e.stage for e in entries] != list(range(self.stages)):
            raise ProtocolError(f"a record of {len(entries)} stages instead of {self.stages}, or out of order")
        record = StepRecord(self.step, self.previous, entries, product)
        if record.hash != hash_:
            return False
        if self._claims.get(peer) != record:
            self._claims[peer], self._claimed_s[peer] = record, self.clock.now()
        self._answers.clear()
        return True

    def follow(self, peer: str, hash_: bytes) -> None:
        """``peer`` is at the next step by the record with ``hash_``, which it may not have made, nor keep."""
        if self._followed.get(peer) != hash_:
            self._followed[peer] = hash_
            self._answers.clear()

    def trust(self, trusting: bool) -> None:
        """Let a single peer that applied the step be enough, if no asked peer is still at the step."""
        self._trusting = trusting
        self._answers.clear()

    def _kept(self, question: int, answer: Callable[[], T]) -> T:
        """``answer()`` for a stage, or one of the names beside stages. Computed again only after news, or while the
        question is undecided, which time decides: waits ask whenever anything arrives."""
        if self._version != self.live.version:
            self._version = self.live.version
            self._answers.clear()
        open_ = question in self._undecided or (question < 0 and self._undecided)
        if open_ or question not in self._answers:
            self._answers[question] = answer()
        found: T = self._answers[question]
        return found

    def _check(self, entry: RoundEntry) -> None:
        if (entry.step, entry.lineage) != (self.step, self.lineage):
            raise ProtocolError(f"entry of step {entry.step} for the record of step {self.step}, or of another lineage")
        if entry.without and not set(entry.without) <= {*entry.members} - {entry.holder}:
            raise ProtocolError(f"entry of stage {entry.stage}: its holder gives itself up, or one that is no member")

    def _check_facts(self, entry: RoundEntry) -> None:
        """Check the facts that holders share. Raises ProtocolError."""
        if entry.stage >= self.stages or len(entry.shards) != len(entry.members):
            raise ProtocolError(f"entry of stage {entry.stage}/{self.stages} with {len(entry.shards)} shards")
        if list(entry.members) != sorted(set(entry.members)):
            raise ProtocolError(f"entry of stage {entry.stage}: members out of order")
        if not set(entry.leaves) <= set(entry.members):
            raise ProtocolError(f"entry of stage {entry.stage}: others than its members leave")
        if set(entry.expelled) & set(entry.members):
            raise ProtocolError(f"entry of stage {entry.stage}: a member is expelled")
        if entry.expelled and len(entry.members) < 2:
            raise ProtocolError(f"entry of stage {entry.stage}: one member alone cannot expel another")

    @property
    def claimed(self) -> int:
        """Number of peers that claim to have applied this step."""
        return len(self._claims)

    def applied(self, stage: int, before_s: float) -> list[StageEntry]:
        """The rounds of ``stage`` that its live replicas applied, as we heard before ``before_s``. Such a replica makes no
        other round. (A round's id alone would let another peer give it other facts.)"""
        live, claims = self.live.stage(stage), self._claims.items()
        return [r.stages[stage] for peer, r in claims if peer in live and self._claimed_s[peer] <= before_s]

    def rounds(self, stage: int) -> list[Attested]:
        """The rounds of ``stage``, most holders first."""
        found = [
            k for (s, _), each in sorted(self._rounds.items(), key=lambda item: item[0]) if s == stage for k in each
        ]
        return sorted(found, key=lambda k: -len(k.holders))

    def _known(self, entry: StageEntry) -> Attested | None:
        known = self._rounds.get((entry.stage, entry.round), [])
        return next((k for k in known if k.entry == entry), None)

    def holders(self, entry: StageEntry) -> frozenset[str]:
        """The peers that attest to the round ``entry``."""
        known = self._known(entry)
        return frozenset() if known is None else frozenset(known.holders)

    def told(self, entry: StageEntry) -> RoundEntry | None:
        """The round ``entry`` in the words of a holder; None: no holder told us."""
        known = self._known(entry)
        return None if known is None else known.holders[min(known.holders)]

    def record(self) -> StepRecord | None:
        """``R_t``, once a round of every stage counts, or enough peers applied the record; else None."""
        return self._settled or self._kept(_RECORD, self._made)

    def _made(self) -> StepRecord | None:
        agreed, product = self._attested() or self._claimed()
        return StepRecord(self.step, self.previous, agreed, product) if agreed else None

    def round_of(self, stage: int) -> StageEntry | None:
        """The round of ``stage`` that is in the record, or counts so far."""
        record = self.record()
        return self._counts(stage) if record is None else record.stages[stage]

    def certificate(self, stage: int) -> Certificate | None:
        """Our own word about ``stage``; None: no round counts yet, or no product with the round."""
        chosen = self._choice(stage)
        if chosen is None or stage not in self.tied:
            return None if chosen is None else Certificate(chosen.entry)
        both = [entry for s in self.tied if (entry := self._counts(s)) is not None]
        product = self._counting_product(both) if len(both) == len(self.tied) else None
        return None if product is None else Certificate(chosen.entry, product)

    def owing(self) -> tuple[str, ...]:
        """The voters that have not attested, of stages without a round that counts."""
        undecided = [stage for stage in range(self.stages) if self._counts(stage) is None]
        attesting = {
            m for (stage, _), each in self._rounds.items() if stage in undecided for k in each for m in k.holders
        }
        voters = [p for stage in undecided for p in self.live.voters(stage) if p not in self.abstaining[stage]]
        return tuple(p for p in voters if p not in attesting)

    def settle(self) -> None:
        """Fix the record, which is being applied."""
        self._settled = self.record()

    def sentenced(self, stage: int) -> bool:
        """Do at least two peers attest to the members that ``stage`` expels? A single peer could lie."""
        chosen, record = self._choice(stage), self.record()
        attesting = len(chosen.holders) if chosen is not None else 0
        return attesting > 1 or sum(claim == record for claim in self._claims.values()) > 1

    def _choice(self, stage: int) -> Attested | None:
        """The round of ``stage`` that counts, if any."""
        return self._kept(stage, lambda: self._counting(stage, {*self.live.voters(stage)} - self.abstaining[stage]))

    def _counting(self, stage: int, voters: set[str]) -> Attested | None:
        rounds, live = self.rounds(stage), self.live.stage(stage)
        attesting = {m for k in rounds for m in k.holders}
        whole = [k for k in rounds if k.complete(live, attesting)]
        whole = [k for k in whole if not k.holders.keys().isdisjoint(live)] or whole  # else the gradient may be lost
        most = held_by_most(whole, voters)
        if voters <= attesting:
            possible, patience_s = whole, AGAIN_S
        else:  # a long silent voter may never attest; but fewer than half do not speak for the rest
            parted = 2 * len(voters & attesting) > len(voters)
            possible = held_by_most(whole, voters, tie=1) or (whole if parted else [])
            patience_s = max(AGAIN_S, self.patience())
        if most or not possible:
            self._undecided.pop(stage, None)
        elif self.clock.now() - self._undecided.setdefault(stage, self.clock.now()) >= patience_s:
            most = possible
        return min(most, key=lambda k: (-len(k.holders), min(k.holders), k.facts.round), default=None)

    def _counts(self, stage: int) -> StageEntry | None:
        """The round of ``stage`` that counts, by attestations or by certificates."""
        chosen = self._choice(stage)
        if chosen is not None:
            return chosen.entry
        entry, count = said_by_most([c.entry for c in self._certificates[stage].values()])
        return entry if self._enough(stage, count) else None

    def _enough(self, stage: int, alike: int) -> bool:
        """Are ``alike`` certificates of ``stage`` enough? Two are; the only replica of a stage is believed."""
        return alike >= min(2, max(1, len(self.live.stage(stage))))

    def _attested(self) -> tuple[tuple[StageEntry, ...], float] | None:
        """The rounds that count and their product, if the rounds make a record."""
        chosen = [entry for stage in range(self.stages) if (entry := self._counts(stage)) is not None]
        if len(chosen) < self.stages:
            return None
        product = self._product_of([chosen[stage] for stage in self.tied]) if self.tied else 0.0
        return None if product is None else (tuple(chosen), product)

    def _product_of(self, chosen: list[StageEntry]) -> float | None:
        """The product of the two ``chosen`` rounds, by statements of their stages or by certificates."""
        product = self._counting_product(chosen)
        for entry in chosen if product is None else ():
            said = [c.product for c in self._certificates[entry.stage].values() if c.entry == entry]
            found, count = said_by_most(said)
            if product is None and self._enough(entry.stage, count):
                product = found
        return product

    def _counting_product(self, chosen: list[StageEntry]) -> float | None:
        """The product that counts for two ``chosen`` rounds, if any. Honest peers all state the same product, but peers
        that attest to another round of their stage state none for ``chosen``."""
        return self._kept(_PRODUCT, lambda: self._vote(chosen, {p for e in chosen for p in self.live.stage(e.stage)}))

    def _vote(self, chosen: list[StageEntry], live: set[str]) -> float | None:
        rounds, norms = tuple(e.round for e in chosen), [math.sqrt(e.square_norm) for e in chosen]
        finite = all(e.finite for e in chosen)
        most = SLACK * math.prod(norms) if finite else math.inf  # Cauchy-Schwarz: no honest product is larger
        stated = {peer: entry.product for peer, entry in self._products.items() if entry.rounds == rounds}
        votes = {peer: product for peer, product in stated.items() if abs(product) <= most}
        elsewhere = {m for e in chosen for k in self.rounds(e.stage) if k.entry != e for m in k.holders}
        elsewhere -= {m for e in chosen for m in self.holders(e)}
        voters = live - elsewhere - {m for e in chosen for m in self.abstaining[e.stage]}
        product, count = min(Counter(votes.values()).items(), key=lambda item: (-item[1], item[0]), default=(0.0, 0))
        product += 0.0  # -0.0 is equal to 0.0, but hashes differ
        if 2 * count > len(voters | votes.keys()):
            return product
        if not votes or not voters <= stated.keys():
            self._undecided.pop(_PRODUCT, None)
        elif self.clock.now() - self._undecided.setdefault(_PRODUCT, self.clock.now()) >= AGAIN_S:
            return product
        return None

    def _claimed(self) -> tuple[tuple[StageEntry, ...], float]:
        """The record that most claiming peers applied, if two peers did, or all that can be asked; else empty. Where
        two records are claimed, peers that follow one of them count, too."""
        claims = {peer: claim.hash for peer, claim in self._claims.items()}
        disputed = len({*claims.values()}) > 1
        most, count = said_by_most([*({**self._followed, **claims} if disputed else claims).values()])
        others = sum(len(self.live.stage(stage)) for stage in range(self.stages)) - 1
        unknown = [stage for stage in range(self.stages) if self._counts(stage) is None] or self.tied
        alone = self._trusting or not any(map(self.live.stage, unknown))  # no other peer could tell us
        if count < (1 if alone else min(2, others)):
            return (), 0.0
        return next(((c.stages, c.product) for c in self._claims.values() if c.hash == most), ((), 0.0))


def said_by_most(said: Sequence[T]) -> tuple[T | None, int]:
    """What more than half of the words say, if any, and how many those are."""
    most, count = max(Counter(said).items(), key=lambda item: item[1], default=(None, 0))
    return (most, count) if 2 * count > len(said) else (None, 0)


def held_by_most(rounds: list[Attested], voters: Collection[str], tie: int = 0) -> list[Attested]:
    """The rounds with attestations of more than half of ``voters`` and the round's own holders; ``tie`` = 1: or of half."""
    return [k for k in rounds if 2 * len(k.holders) + tie > len({*voters, *k.holders})]


def same_facts(a: RoundEntry, b: RoundEntry) -> bool:
    """Do both entries state the same facts of the same round?"""
    facts = all(getattr(a, name) == getattr(b, name) for name in _FACTS)
    # ten times as fast as the models' own ==
    return facts and [vars(s) for s in a.shards] == [vars(s) for s in b.shards]
