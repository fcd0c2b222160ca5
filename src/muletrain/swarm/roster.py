"""Who is in the run, which stage each serves, and who is believed to be alive.

The roster is agreed once, before step 0: its digest is the genesis lineage, so that peers that began with different rosters
refuse each other's frames. Liveness is each peer's own view and changes routing and rounds, never numbers.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgpack
from pydantic import Field, model_validator

from muletrain.errors import ProtocolError
from muletrain.swarm.messages import Digest, Id, Message, Natural, Text


class Member(Message):
    """One peer of the run."""

    id: Id
    name: Id
    stage: Natural
    trainer: bool
    addresses: Annotated[tuple[Text, ...], Field(max_length=64)]


class Genesis(Message):
    """Everything peers agree on before step 0. ``collector`` is the peer that gathers checkpoints (``start``'s)."""

    run_id: Id
    config: Digest
    data: Digest
    stages: Natural
    members: Annotated[tuple[Member, ...], Field(min_length=1, max_length=4096)]
    collector: Id
    first_step: Natural

    @model_validator(mode="after")
    def _complete(self) -> Genesis:
        ids = [m.id for m in self.members]
        if len(set(ids)) != len(ids) or self.collector not in ids:
            raise ValueError("members: ids must be distinct and include the collector")
        if {m.stage for m in self.members} != set(range(self.stages)):
            raise ValueError("members: every stage needs a peer")
        if not any(m.trainer for m in self.members):
            raise ValueError("members: the run needs a trainer")
        return self

    @property
    def lineage(self) -> bytes:
        """hash(R_{-1}): the lineage of the first step."""
        return hashlib.sha256(msgpack.packb(["genesis", self.model_dump()])).digest()


class Roster:
    """The members, and this peer's belief about who is alive."""

    def __init__(self, genesis: Genesis, own_id: str) -> None:
        self.genesis = genesis
        self._members = {m.id: m for m in genesis.members}
        self._dead: set[str] = set()
        self._left: set[str] = set()
        if own_id not in self._members:
            raise ProtocolError("this peer is not in the run's roster")
        self.own = self._members[own_id]

    def member(self, peer: str) -> Member:
        """Raises ProtocolError for someone who is not in the run."""
        if peer not in self._members:
            raise ProtocolError(f"{peer} is not a member of this run")
        return self._members[peer]

    def is_alive(self, peer: str) -> bool:
        return peer in self._members and peer not in self._dead | self._left

    def dead(self, peer: str) -> bool:
        """Believe ``peer`` dead; True when that is news."""
        if peer == self.own.id or peer in self._dead or peer not in self._members:
            return False
        self._dead.add(peer)
        return True

    def alive(self, peer: str) -> None:
        """``peer`` was heard of (one that left, too: it was needed after all)."""
        self._dead.discard(peer)
        self._left.discard(peer)

    def left(self, peer: str) -> None:
        """``peer`` has gone in order: nobody asks it any more."""
        self._left.add(peer)

    def needs_us(self) -> str | None:
        """Why this peer cannot leave, as far as it knows; None if it can."""
        if self.own.id == self.genesis.collector:
            return "it collects the checkpoints"
        if self.stage(self.own.stage) == (self.own.id,):
            return f"no other peer serves stage {self.own.stage}"
        return "no other peer has the data" if self.trainers() == (self.own.id,) else None

    def stage(self, stage: int) -> tuple[str, ...]:
        """Live peers of ``stage``, sorted."""
        return tuple(sorted(m.id for m in self._members.values() if m.stage == stage and self.is_alive(m.id)))

    def others(self) -> tuple[str, ...]:
        """Live peers but ourselves."""
        return tuple(sorted(p for p in self._members if self.is_alive(p) and p != self.own.id))

    def everyone(self) -> tuple[str, ...]:
        """All members but ourselves and those that left, believed dead or not."""
        return tuple(sorted(p for p in self._members if p != self.own.id and p not in self._left))

    def replicas(self) -> tuple[str, ...]:
        """The other members of our stage, believed dead or not."""
        return tuple(p for p in self.everyone() if self._members[p].stage == self.own.stage)

    def trainers(self) -> tuple[str, ...]:
        return tuple(sorted(m.id for m in self._members.values() if m.trainer and self.is_alive(m.id)))
