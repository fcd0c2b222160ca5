"""A network whose calls are timed, for real peers and virtual ones."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from muletrain.clock import Clock
from muletrain.errors import MuletrainError

ECHO = "benchmark/echo"
EVERY_S, TIMEOUT_S = 0.1, 20.0
"""Between two small calls of a peer, to the others in turn; and when one is given up."""
PAYLOAD = bytes(100)


@dataclass(frozen=True)
class Call:
    begin: float
    """As ``now`` says, which the network was given."""
    seconds: float
    """For one that failed, until it did."""
    peer: str
    """Who was called, by id."""
    method: str
    failed: str
    """Why; '': it was answered."""


class TimedNetwork:
    """``inner``, which tells ``record`` of every call to another peer."""

    def __init__(self, inner: Any, now: Callable[[], float], record: Callable[[Call], None]) -> None:
        self._inner, self._now, self._record = inner, now, record
        self.peer_id: str = inner.peer_id
        inner.serve(ECHO, _echo)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def call(self, peer: str, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        begin, failed = self._now(), "cancelled"
        try:
            answer: bytes = await self._inner.call(peer, method, payload, timeout_s=timeout_s)
            failed = ""
        except MuletrainError as e:
            failed = f"{type(e).__name__}: {e}"
            raise
        finally:
            if peer != self.peer_id and failed != "cancelled":
                self._record(Call(begin, self._now() - begin, peer, method, failed))
        return answer


async def _echo(sender: str, payload: bytes) -> bytes:
    return payload


async def call_in_turn(network: TimedNetwork, clock: Clock, peers: Callable[[], Sequence[str]]) -> None:
    """A small call every ``EVERY_S``, whether the one before was answered or not, until it is cancelled."""
    async with asyncio.TaskGroup() as calls:
        for k in itertools.count():
            await clock.sleep(EVERY_S)
            if others := peers():
                calls.create_task(_call(network, others[k % len(others)]))


async def _call(network: TimedNetwork, peer: str) -> None:
    with suppress(MuletrainError):  # it is recorded
        await network.call(peer, ECHO, PAYLOAD, timeout_s=TIMEOUT_S)
