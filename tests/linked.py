"""Networks in memory on virtual links, and when frames arrive on them."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from functools import partial
from typing import Any

from muletrain.network.base import Channel
from muletrain.network.memory import Conditions, MemoryHub
from muletrain.network.roads import Road
from muletrain.wire.frame import Frame

MBPS = 1e6 / 8
WIDE = Road()
CONTROL, PIPE, AVERAGE, BULK = Channel


class Links(Conditions):
    """One delay, paths with the bandwidth that their sender has, and frames that weigh what their headers say."""

    def __init__(self, delay_s: float, paths: dict[str, float]) -> None:
        self._delay_s, self._paths = delay_s, paths

    def delay_s(self, sender: str, receiver: str) -> float:
        return self._delay_s

    def path_bytes_per_s(self, sender: str, receiver: str) -> float:
        return self._paths.get(sender, math.inf)

    def weight(self, sender: str, frame: Frame) -> int:
        return int(frame.header["n"])


class World:
    """Peers on ``roads``. Frames count for the bytes that their headers say. ``got``: (when, sender, receiver, channel,
    bytes, number)."""

    def __init__(
        self,
        roads: dict[str, Road],
        delay_s: float = 0.001,
        paths: dict[str, float] | None = None,
        *,
        relays: bool = False,
    ) -> None:
        self.hub = MemoryHub(Links(delay_s, paths or {}), relays=relays, hands_over=True)
        self.got: list[tuple[float, str, str, str, int, int]] = []
        self._tasks: list[asyncio.Task[None]] = []
        for peer, road in roads.items():
            self.hub.roads.lay(peer, road)
            self.hub.join(peer).receive(partial(self._receive, peer))
            self.hub.peers[peer].serve("echo", _echo)

    async def _receive(self, receiver: str, sender: str, frame: Frame) -> None:
        self.got.append((now(), sender, receiver, frame.kind, frame.header["n"], frame.header["k"]))

    async def send(
        self, a: str, b: str, n: float, channel: Channel = AVERAGE, k: int = 0, timeout_s: float = 60.0
    ) -> None:
        frame = Frame(channel.value, {"n": int(n), "k": k})
        await self.hub.peers[a].send(b, frame, channel=channel, timeout_s=timeout_s)

    async def call(self, a: str, b: str, nbytes: int = 100, timeout_s: float = 60.0) -> float:
        """The time it takes."""
        begin_s = now()
        await self.hub.peers[a].call(b, "echo", bytes(nbytes), timeout_s=timeout_s)
        return now() - begin_s

    def flood(self, a: str, b: str, channel: Channel, after_s: float = 0.0) -> None:
        async def forever() -> None:
            await asyncio.sleep(after_s)
            while True:
                await self.send(a, b, 500e3, channel)

        self._tasks.append(asyncio.create_task(forever()))

    async def queued(self, peer: str, seconds: float) -> list[float]:
        """In front of the narrower direction of the peer's link, looked at every 5 ms."""
        end_s, found = now() + seconds, list[float]()
        while now() < end_s:
            found.append(max(self.hub.roads.queued_s(peer)))
            await asyncio.sleep(0.005)
        return found

    def rates(self, by: int, begin_s: float, end_s: float) -> dict[Any, float]:
        """Bytes/s that arrived, by the entry of ``got``."""
        found = defaultdict[Any, float](float)
        for entry in self.got:
            if begin_s <= entry[0] < end_s:
                found[entry[by]] += entry[4] / (end_s - begin_s)
        return found


async def _echo(sender: str, payload: bytes) -> bytes:
    return payload[:100]


def now() -> float:
    return asyncio.get_running_loop().time()
