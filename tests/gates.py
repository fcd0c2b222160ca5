"""Peers with their gates: the wire is a method call."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from muletrain.errors import AdmissionError
from muletrain.network.gate import (
    Gate,
)
from muletrain.network.identity import Key
from muletrain.network.trust import (
    Chain,
    Trust,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


SECRET, NEXT = b"s" * 32, b"n" * 32
OWNER = Key.of_seed(b"o" * 32)


class Shown(Trust):
    """Shows others the chain ``shown``, if there is one, whatever it is worth."""

    shown: Chain | None = None

    @property
    def chain(self) -> Chain:
        return super().chain if self.shown is None else self.shown


class Someone:
    """A peer with its gate; the wire is a method call. ``clock`` is shared by all."""

    clock = 1000.0

    def __init__(self, owner: Any = OWNER.public, secret: bytes = SECRET, *, visitor: bool = False) -> None:
        self.key = Key.new()
        self.id = self.key.peer_id
        self.refusals: list[str] = []
        self.gone: list[frozenset[str]] = []
        self.trust = Shown("run", owner, secret, self.key, now=lambda: Someone.clock)
        self.gate = Gate(
            self.id,
            "run",
            "1",
            self.trust,
            lambda who, why: self.refusals.append(why),
            self.gone.append,
            visitor=visitor,
        )

    def enter(self, other: Someone) -> None:
        asyncio.run(self.gate.enter(other.id, self.wire(other)))

    def wire(self, other: Someone) -> Any:
        async def call(payload: bytes) -> bytes:
            return other.gate.answer(self.id, payload)

        return call

    def sync(self, other: Someone) -> None:
        asyncio.run(self.gate.sync(self.wire(other)))

    def tells(self, other: Someone) -> None:
        asyncio.run(self.gate.pass_on(other.id, self.wire(other)))

    def forget(self, other: Someone) -> None:
        """As if one of the two had been restarted."""
        self.gate.forget_entry(other.id)

    def speaks_to(self, other: Someone) -> bool:
        return other.gate.check(self.id, "call")


@pytest.fixture(autouse=True)
def _clock() -> None:
    Someone.clock = 1000.0


@pytest.fixture
def founder() -> Someone:
    return Someone(OWNER)


def guest(of: Someone, *others: Someone, **options: Any) -> Someone:
    newcomer = Someone(**options)
    for host in (of, *others):
        newcomer.enter(host)
    return newcomer


@contextlib.contextmanager
def refused(*reasons: str) -> Iterator[None]:
    """Somebody is, for one of the reasons."""
    with pytest.raises(AdmissionError) as caught:
        yield
    assert str(caught.value) in reasons


# Coming in ----------------------------------------------------------------------------------------------------------------


async def answered(by: Someone, to: str, payload: bytes) -> Any:
    return msgpack.unpackb(by.gate.answer(to, payload))


# Renewals -----------------------------------------------------------------------------------------------------------------


def kick(founder: Someone, *stay: Someone) -> None:
    founder.gate.adopt(founder.trust.renew([founder.id, *(s.id for s in stay)], NEXT), NEXT)
