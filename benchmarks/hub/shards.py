"""Is a client's accumulator faster at its own server, or in shards at all servers of the stage? See README.md.
``python benchmarks/hub/shards.py`` writes shards.json.

Frames of the sizes that production sends go over links in virtual time, paced by the production pacer. All clients have
finished computing at time 0, which is the worst case: usually some hand over while others compute.

- *whole*, as the hub does: a client hands over to its own server, at most ``TRANSFERS`` at once at each. Once every
  server has its accumulators, the servers average: shard k goes to server k, and each mean chunk to all others.
- *shards*: a client sends shard k to server k, at most ``TRANSFERS`` clients for each server at once, and the servers
  send the shards of their own gradients meanwhile. An accumulator counts wholly or not at all, so the servers agree who
  counts once everything has arrived, and then send the means.
- *at best*: the same without that agreement. The mean of a chunk is sent as soon as all have sent the chunk.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from muletrain.clock import loop_time_s
from muletrain.compute.estimate import TRANSFERS
from muletrain.network.base import Channel
from muletrain.network.memory import Conditions, MemoryHub
from muletrain.network.roads import Road
from muletrain.policy.shards import CHUNK, chunk_ranges, shard_ranges
from muletrain.sim.loop import run_virtually
from muletrain.wire.frame import Frame

NUMBERS, BYTES = 25_000_000, 2
DELAY_S = 0.01
MBPS = 1e6 / 8
CASES = [
    *((servers, clients, 100, 100) for servers in (2, 4) for clients in (1, 2, 4, 5, 8)),
    *((servers, 8, 100, 20) for servers in (2, 4)),
    *((servers, 8, 1000, 100) for servers in (2, 4)),
]
"""Servers, clients, and Mb/s of each server and of each client, up and down."""
KINDS = "whole", "shards", "at best"


class Links(Conditions):
    """One delay. Frames weigh as much as their headers say."""

    def delay_s(self, sender: str, receiver: str) -> float:
        return DELAY_S

    def weight(self, sender: str, frame: Frame) -> int:
        return int(frame.header["n"])


class Step:
    """The end of a step of one stage."""

    def __init__(self, servers: int, clients: int, server_mbps: float, client_mbps: float) -> None:
        self._hub = MemoryHub(Links(), hands_over=True)
        self.servers, self.clients = range(servers), range(clients)
        self._shards = [chunk_ranges(*shard) for shard in shard_ranges(NUMBERS, servers)]
        self._gathered = [asyncio.Event() for _ in self.servers]
        self._summands: Counter[tuple[int, int]] = Counter()
        """How many have sent each chunk of each shard, the owner included."""
        self._means = [sum(map(len, self._shards[:k] + self._shards[k + 1 :])) for k in self.servers]
        """Chunks of means that each server lacks."""
        self._whole: dict[tuple[str, str], asyncio.Event] = {}
        """Set with the last chunk of a transfer."""
        self._averaged = asyncio.Event()
        self._tasks: list[asyncio.Task[int]] = []
        self._senders, self._streams = servers, False
        """How many send each chunk; whether its mean goes out as soon as all have."""
        for name, count, mbps in (("s", servers, server_mbps), ("c", clients, client_mbps)):
            for k in range(count):
                self._hub.roads.lay(f"{name}{k}", Road(mbps * MBPS, mbps * MBPS, 2.0))
                self._hub.join(f"{name}{k}").receive(partial(self._on_frame, f"{name}{k}"))

    async def whole(self) -> float:
        """Returns the seconds until all clients have handed over; then servers average."""
        turns = [asyncio.Semaphore(TRANSFERS) for _ in self.servers]

        async def hand_over(client: int) -> None:
            home = client % len(self.servers)
            async with turns[home]:
                await self._notice(f"s{home}", f"c{client}")  # the server asks
                await self._send(f"c{client}", home, chunk_ranges(0, NUMBERS, CHUNK))

        await asyncio.gather(*map(hand_over, self.clients))
        gathered_s = loop_time_s()
        await asyncio.sleep(DELAY_S)  # servers tell each other
        self._streams = True
        await self._average()
        return gathered_s

    async def shards(self, *, agree: bool) -> None:
        turns = asyncio.Semaphore(TRANSFERS * len(self.servers))
        self._senders, self._streams = len(self.servers) + len(self.clients), not agree

        async def hand_over(client: int) -> None:
            async with turns:
                await self._notice("s0", f"c{client}")
                await asyncio.gather(*(self._send(f"c{client}", k, self._shards[k], owner=k) for k in self.servers))

        async def hand_over_and_agree() -> None:
            await asyncio.gather(*map(hand_over, self.clients), scattered.wait())
            if agree:
                await asyncio.sleep(2 * DELAY_S)  # all tell one server what they have, and it tells all what counts
                for k, chunk in self._every():
                    self._give_mean(k, chunk)

        scattered = asyncio.Event()
        await asyncio.gather(hand_over_and_agree(), self._average(scattered))

    async def _average(self, scattered: asyncio.Event | None = None) -> None:
        """Send the shards of the servers' own gradients, and wait until all have all means. ``scattered``: to be set once
        the shards have arrived."""
        for k, chunk in self._every():
            self._summand(k, chunk)
        ways = itertools.permutations(self.servers, 2)
        await asyncio.gather(*(self._send(f"s{a}", b, self._shards[b], owner=b) for a, b in ways))
        if scattered is not None:
            scattered.set()
        await self._averaged.wait()

    def _every(self) -> list[tuple[int, int]]:
        """Every owner and chunk."""
        return [(k, chunk) for k in self.servers for chunk in range(len(self._shards[k]))]

    async def _send(self, sender: str, server: int, ranges: list[tuple[int, int]], owner: int | None = None) -> None:
        """Send chunks one by one, and wait until the last has arrived."""
        arrived = self._whole[sender, f"s{server}"] = asyncio.Event()
        for chunk, (begin, end) in enumerate(ranges):
            header = {"n": BYTES * (end - begin), "owner": owner, "chunk": chunk, "last": chunk == len(ranges) - 1}
            await self._hub.peers[sender].send(f"s{server}", Frame("sum", header), channel=Channel.AVERAGE)
        await arrived.wait()

    async def _notice(self, sender: str, receiver: str) -> None:
        await self._hub.peers[sender].send(receiver, Frame("ask", {"n": 200}), channel=Channel.CONTROL)
        await asyncio.sleep(DELAY_S)

    async def _on_frame(self, receiver: str, sender: str, frame: Frame) -> None:
        found = frame.header
        if frame.kind == "sum":
            if found["owner"] is not None:
                self._summand(found["owner"], found["chunk"])
            if found["last"]:
                self._whole[sender, receiver].set()
        elif frame.kind == "mean":
            self._means[found["to"]] -= 1
            if not any(self._means):
                self._averaged.set()

    def _summand(self, owner: int, chunk: int) -> None:
        self._summands[owner, chunk] += 1
        if self._streams and self._summands[owner, chunk] == self._senders:
            self._give_mean(owner, chunk)

    def _give_mean(self, owner: int, chunk: int) -> None:
        begin, end = self._shards[owner][chunk]
        for k in self.servers:
            if k != owner:
                frame = Frame("mean", {"n": BYTES * (end - begin), "to": k})
                sending = self._hub.peers[f"s{owner}"].send(f"s{k}", frame, channel=Channel.AVERAGE)
                self._tasks.append(asyncio.create_task(sending))


async def seconds(kind: str, case: tuple[int, int, int, int]) -> dict[str, float]:
    """Seconds until all servers have the mean, and until clients have handed their accumulators over whole."""
    step, found = Step(*case), dict[str, float]()
    if kind == "whole":
        found["gathered"] = round(await step.whole(), 2)
    else:
        await step.shards(agree=kind == "shards")
    return found | {kind: round(loop_time_s(), 2)}


def main() -> None:
    rows = []
    for case in CASES:
        problems: list[str] = []
        row: dict[str, Any] = dict(zip(("servers", "clients", "server_mbps", "client_mbps"), case, strict=True))
        for kind in KINDS:
            row |= run_virtually(seconds(kind, case), 3600.0, problems)
        assert not problems, problems
        print(json.dumps(row), flush=True)
        rows.append(row)
    found = {"numbers": NUMBERS, "bytes": BYTES, "rows": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
