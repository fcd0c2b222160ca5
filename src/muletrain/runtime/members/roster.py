"""The roster contains the members of the run, their stages, and this peer's belief about live members.

The members that begin together agree on the genesis, whose digest is the first lineage, so peers with different
beginnings refuse each other's frames. Later members introduce themselves to all peers. The known members, and the
members believed alive, are each peer's own view, which changes routing and rounds, never numbers.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar

import msgpack
from pydantic import Field, model_validator

from muletrain.errors import ProtocolError
from muletrain.runtime.core.branches import BRANCH, hashed
from muletrain.runtime.core.messages import Digest, Id, Message, Natural
from muletrain.runtime.members.messages import Member

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

P = ParamSpec("P")
T = TypeVar("T")


class Genesis(Message):
    """The agreement of all peers before step 0. ``coordinator``: the first peer to collect checkpoints (the
    founder's)."""

    run_id: Id
    config: Digest
    data: Digest
    stages: Natural
    members: Annotated[tuple[Member, ...], Field(min_length=1, max_length=4096)]
    coordinator: Id
    first_step: Natural

    @model_validator(mode="after")
    def _complete(self) -> Genesis:
        ids = [m.id for m in self.members]
        if len(set(ids)) != len(ids) or self.coordinator not in ids:
            raise ValueError("members: ids must be distinct and include the coordinator")
        if {m.stage for m in self.members} != set(range(self.stages)):
            raise ValueError("members: every stage needs a peer")
        if not any(m.trainer for m in self.members):
            raise ValueError("members: the run needs a trainer")
        return self

    @property
    def begin(self) -> tuple[int, bytes]:
        """The first step, and its lineage."""
        return self.first_step, self.lineage

    @property
    def lineage(self) -> bytes:
        """hash(R_{-1}): the lineage of the first step."""
        return hashed(bytes(BRANCH), msgpack.packb(["genesis", self.model_dump()]))


MAX_MEMBERS = 4096
MAX_SINCE = 1 << 32
"""Largest ``Member.since`` of ours to believe from other peers: a lie must not use up the numbers that we still
need."""
CONTACTS = 32
"""Members that a newcomer is told of; they know the others."""
MAX_GONE = 64
"""Number of known members that are down or left; or four times the live members, if that is more. Such members may be
alive beyond a partition, and are asked now and then; but in a long run machines come and go without end."""


def _kept(answer: Callable[Concatenate[Roster, P], T]) -> Callable[Concatenate[Roster, P], T]:
    """Keep the answer to a question until something changes: questions come with every frame, news seldom."""

    @wraps(answer)
    def kept(roster: Roster, /, *args: P.args, **kwargs: P.kwargs) -> T:
        question = answer, *args
        if question not in roster._answers:
            roster._answers[question] = answer(roster, *args, **kwargs)
        found: T = roster._answers[question]
        return found

    return kept


class Roster:
    """The members, and this peer's belief about live members."""

    def __init__(self, genesis: Genesis, own: str | Member, contacts: Iterable[Member] = ()) -> None:
        """``own``: the id of a founding member, or a newcomer, which has heard of ``contacts``. Raises ProtocolError for an
        id that is not in the genesis, and as ``admit`` does."""
        self.genesis = genesis
        self._members = {m.id: m for m in genesis.members}
        self._dead: dict[str, bool] = {}
        """Peers that are down, earliest first, with a flag for peers that themselves declined to be counted on."""
        self._doubted: set[str] = set()
        """Replicas that are down, but that other peers may hear."""
        self._left: dict[str, None] = {}
        """Peers that left in order, earliest first."""
        self._hearsay: set[str] = set()
        """Members whose stage is known only from other peers."""
        self._expelled: set[str] = set()
        self._own_id = ""
        self._answers: dict[Any, Any] = {}
        """See ``_kept``."""
        self.version = 0
        """Counts changes of the members and of the live members."""
        if isinstance(own, Member):
            self.admit(own)
            self._dead.clear()
        self._own_id = own.id if isinstance(own, Member) else own
        self.member(self._own_id)
        for member in contacts:
            self.hear_of(member)
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._answers.clear()

    @property
    def own(self) -> Member:
        return self._members[self._own_id]

    def hear_of(self, member: Member) -> None:
        """Other peers report ``member``, whose own word will tell the stage. Ignore entries of other peers about us; if
        one is wrong, raise our ``since`` so that our next announcement wins. A member noted as left counts as back if
        other peers heard from it later: when the member and we move at the same step, neither introduces itself to the
        other. Raises ProtocolError as ``admit`` does."""
        own, known = self.own, self._members.get(member.id)
        if member.id == own.id:
            if own.since <= member.since < MAX_SINCE and member.stage != own.stage:
                self._members[own.id] = own.model_copy(update={"since": member.since + 1})
                self._changed()
        elif known is None:
            self.admit(member.model_copy(update={"since": 0}))
            self._hearsay.add(member.id)
        elif member.id in self._left and member.since > known.since:
            self.admit(member)
            self._members[member.id] = member.model_copy(update={"since": known.since})
            self._hearsay.add(member.id)
            self._changed()

    def admit(self, member: Member) -> bool:
        """Take ``member`` by its own word: a newcomer or a member of another stage, which is down until further news,
        or a member that trains from now on. Returns True if that is news. Raises ProtocolError for a stage that the run
        does not have, when the run is full, and for an expelled member."""
        if member.id in self._expelled:
            raise ProtocolError(f"{member.name} was expelled: it computed false gradients")
        known = self._members.get(member.id)
        if known is not None and (member.id == self._own_id or known == member):
            return False
        if known is not None and known.since >= member.since and member.id not in self._hearsay:
            return False
        if member.stage >= self.genesis.stages or (known is None and len(self._members) >= MAX_MEMBERS):
            raise ProtocolError(f"{member.name}: the run has no room for it, or no stage {member.stage}")
        self._members[member.id] = member
        self._hearsay.discard(member.id)
        if known is None or known.stage != member.stage or member.id in self._left:
            self._left.pop(member.id, None)
            self._dead[member.id] = False
        self._forget()
        self._changed()
        return True

    def _forget(self) -> None:
        """Forget the members that are gone for longest. A forgotten member that is alive introduces itself again."""
        for gone in (self._dead, self._left):
            limit = max(MAX_GONE, 4 * (len(self._members) - len(self._dead) - len(self._left)))
            for peer in [p for p in gone if p != self.genesis.coordinator][: max(0, len(gone) - limit)]:
                del gone[peer], self._members[peer]
                self._doubted.discard(peer)
                self._hearsay.discard(peer)

    def train(self) -> None:
        """This peer builds microbatches from now on."""
        self._members[self._own_id] = self.own.model_copy(update={"trainer": True, "since": self.own.since + 1})
        self._changed()

    def moved(self, peer: str, stage: int) -> None:
        """``peer``, perhaps ourselves, serves ``stage`` from now on, and has announced this, or is about to."""
        known = self._members.get(peer)
        if known is not None and known.stage != stage:
            self._members[peer] = known.model_copy(update={"stage": stage, "since": known.since + 1})
            self._changed()

    @_kept
    def coordinator(self) -> Member | None:
        """Returns the member that collects checkpoints and reports, into its own place; None: no member has a place.
        The coordinator of the genesis comes first, then live members with the same place, then other live members with
        a place, by id."""
        first = self._members[self.genesis.coordinator]
        able = [m for m in self._members.values() if m.place and (m.id == self._own_id or self.is_alive(m.id))]
        return min(able, key=lambda m: (m.id != first.id, m.place != first.place, m.id), default=None)

    @_kept
    def members(self) -> tuple[Member, ...]:
        """Returns all members that have not left, ourselves included, by id."""
        return tuple(m for p, m in sorted(self._members.items()) if p not in self._left)

    def knows(self, peer: str) -> bool:
        return peer in self._members

    def member(self, peer: str) -> Member:
        """Raises ProtocolError for a peer that is not in the run."""
        if peer not in self._members:
            raise ProtocolError(f"{peer} is not a member of this run")
        return self._members[peer]

    def name(self, peer: str) -> str:
        """Returns the name of ``peer`` for people; for an unknown peer, the end of the id."""
        return self._members[peer].name if peer in self._members else peer[-6:]

    def is_alive(self, peer: str) -> bool:
        return peer in self._members and peer not in self._dead and peer not in self._left

    def mark_dead(self, peer: str, *, declines: bool = False, doubtful: bool = False) -> bool:
        """Believe ``peer`` dead; only ``FailureDetector`` calls this. Returns True if that is news. ``declines``:
        ``peer`` answers, but declines to be counted on. ``doubtful``: other peers may hear ``peer``, which has a vote
        until ``sure``."""
        if peer in self._dead:
            self._dead[peer] |= declines
        if peer == self._own_id or peer in self._dead or peer not in self._members:
            return False
        self._dead[peer] = declines
        if doubtful:
            self._doubted.add(peer)
        self._forget()
        self._changed()
        return True

    def declines(self, peer: str) -> bool:
        """``peer`` declined to be counted on, and there was no news of ``peer`` since."""
        return self._dead.get(peer, False)

    def doubted(self) -> tuple[str, ...]:
        """Returns the replicas that are down here, and perhaps nowhere else."""
        replicas = self.replicas() if self._doubted else ()
        return tuple(p for p in replicas if p in self._doubted and not self.is_alive(p))

    def sure(self, peers: Iterable[str]) -> None:
        """No other peer hears ``peers`` either, or a step went on without them."""
        if not self._doubted.isdisjoint(peers := {*peers}):
            self._doubted -= peers
            self._changed()

    def voters(self, stage: int) -> tuple[str, ...]:
        """Returns the peers of ``stage`` whose word counts: live peers, and doubted ones of our stage."""
        return (*self.stage(stage), *self.doubted()) if stage == self.own.stage else self.stage(stage)

    def down(self) -> list[Member]:
        """Returns the members that do not answer, the latest last."""
        return [self._members[p] for p, declines in self._dead.items() if not declines]

    def mark_alive(self, peer: str) -> bool:
        """There is news of ``peer``, perhaps after a departure, because the peer was needed after all; only
        ``FailureDetector`` calls this. Returns True if ``peer`` was not counted on before."""
        if peer in self._expelled:
            return False
        news = peer in self._dead or peer in self._left
        if news:
            self._doubted.discard(peer)
            self._dead.pop(peer, None)
            self._left.pop(peer, None)
            self._changed()
        return news

    def expel(self, peer: str) -> None:
        """``peer`` computed false gradients: nothing from this identity counts any more."""
        self.left(peer)
        self._expelled.add(peer)

    def left(self, peer: str) -> None:
        """``peer`` has left in order, and is not asked any more."""
        if peer in self._members:
            self._doubted.discard(peer)
            self._dead.pop(peer, None)
            self._left[peer] = None
            self._forget()
            self._changed()

    def expelled(self, peer: str) -> bool:
        return peer in self._expelled

    def needs_us(self) -> str | None:
        """Returns the known reason why this peer cannot leave; None: there is none."""
        if self._own_id == self.genesis.coordinator:
            return "it coordinates the checkpoints"
        if self.stage(self.own.stage) == (self._own_id,):
            return f"no other peer serves stage {self.own.stage}"
        return "no other peer has the data" if self.trainers() == (self._own_id,) else None

    def stage(self, stage: int) -> tuple[str, ...]:
        """Returns the live peers of ``stage``, sorted."""
        return self._by_stage().get(stage, ())

    @_kept
    def seated(self, stage: int) -> dict[str, str]:
        """Returns the live peers of ``stage``, by name."""
        return {self._members[p].name: p for p in self.stage(stage)}

    @_kept
    def _by_stage(self) -> dict[int, tuple[str, ...]]:
        found: defaultdict[int, list[str]] = defaultdict(list)
        for peer, member in sorted(self._members.items()):
            if self.is_alive(peer):
                found[member.stage].append(peer)
        return {stage: tuple(peers) for stage, peers in found.items()}

    @_kept
    def others(self) -> tuple[str, ...]:
        """Returns all live peers but ourselves."""
        return tuple(p for p in self.everyone() if self.is_alive(p))

    @_kept
    def everyone(self) -> tuple[str, ...]:
        """Returns all members but ourselves and departed members, members that are down included."""
        return tuple(m.id for m in self.members() if m.id != self._own_id)

    def spread(self, count: int, turn: int = 0, among: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Returns ``count`` live peers (``among``: sorted), evenly spread, from the peer after us on: so every peer is in
        equally many such choices. Each ``turn`` gives different peers, until all had a turn."""
        others = self.others() if among is None else among
        after = bisect.bisect(others, self._own_id)
        chosen = min(count, len(others))
        return tuple(others[(after + turn + k * len(others) // chosen) % len(others)] for k in range(chosen))

    def one_of_each(self, turn: int) -> tuple[str, ...]:
        """Returns a live peer of each other stage; each ``turn`` another one. Peers that come after each other by id choose
        different ones."""
        at = bisect.bisect(self.everyone(), self._own_id) + turn
        stages = (self.stage(s) for s in range(self.genesis.stages) if s != self.own.stage)
        return tuple(peers[at % len(peers)] for peers in stages if peers)

    def contacts(self) -> tuple[Member, ...]:
        """Returns ourselves and other live members, for a newcomer."""
        return tuple(self._members[p] for p in (self._own_id, *self.spread(CONTACTS - 1)))

    def receivers(self) -> tuple[str, ...]:
        """Returns the live peers that get microbatches from here: of the next stage and, from a trainer, of the first
        stage."""
        first = self.stage(0) if self.own.trainer else ()
        return tuple(p for p in (*first, *self.stage(self.own.stage + 1)) if p != self._own_id)

    @_kept
    def replicas(self) -> tuple[str, ...]:
        """Returns the other members of our stage, members that are down included."""
        own = self.own.stage
        return tuple(p for p in self.everyone() if self._members[p].stage == own)

    @_kept
    def trainers(self) -> tuple[str, ...]:
        return tuple(m.id for m in self.members() if m.trainer and self.is_alive(m.id))
