"""Pipes between two daemons through a member: request and transport.

A pipe is one stream to the relay and one from the relay to the far end. A pipe begins with a frame ``relay``: ``to``
the wanted end, or, from the relay to that end, ``for`` the asking end. The answer is one byte.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hivemind.p2p import PeerID

from muletrain.wire.frame import Frame, pack

if TYPE_CHECKING:
    from muletrain.network.gated import GatedP2P

    Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]

RELAY, PING = "muletrain/relay", "muletrain/ping"
ACCEPTED, WORKS, WAIT = b"\1", b"\2", b"\3"
"""Answers: the pipe is taken; the direct way works; the far end is about to open a pipe."""
ASK_S = 8.0
"""Longest time of one request for a pipe, with the far end's trials of the direct way [s]."""
PING_S = 3.0
"""Longest answer on a connection that works, also of a starved machine [s]."""
CHUNK = 1 << 18
"""Most bytes that a pipe reads at once."""


@dataclass(frozen=True)
class Pipe:
    """An open pipe. ``peers``: both ends, or, at an end, the far one."""

    peers: tuple[str, ...]
    writers: tuple[asyncio.StreamWriter, ...]

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


class Pipes:
    """Open pipes of one kind: ending here, or carried for other peers."""

    def __init__(self) -> None:
        self.open: list[Pipe] = []
        self._carried: Counter[str] = Counter()

    def to(self, peer: str) -> int:
        """The number of open pipes that lead to ``peer``."""
        return sum(peer in pipe.peers for pipe in self.open)

    def cut(self, peer: str) -> None:
        """Close the pipes that lead to ``peer``."""
        for pipe in self.open:
            if peer in pipe.peers:
                pipe.close()

    def take_carried(self) -> Counter[str]:
        """Bytes carried between two other peers since the last query, by receiver."""
        carried, self._carried = self._carried, Counter()
        return carried

    async def carry(self, pipe: Pipe, one: Ends, other: Ends) -> None:
        """Carry until one end closes, then close both. An end that does not read blocks the sender: the only buffers
        are the sockets'."""
        self.open.append(pipe)
        to = pipe.peers if len(pipe.peers) == 2 else ("", "")
        pumps = [
            asyncio.create_task(self._pump(other[0], one[1], to[0])),
            asyncio.create_task(self._pump(one[0], other[1], to[1])),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.open.remove(pipe)
            pipe.close()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receiver: str) -> None:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
            if receiver:
                self._carried[receiver] += len(data)


async def request(p2p: GatedP2P, peer: str, header: dict[str, Any]) -> tuple[Ends, bytes] | None:
    """Ask ``peer`` for a pipe: the stream, and the answer. None: ``peer`` closed the stream. Raises the daemon's
    errors, and TimeoutError."""
    async with asyncio.timeout(ASK_S):
        _, reader, writer = await p2p.open_stream(PeerID.from_base58(peer), RELAY)
        try:
            for buffer in pack(Frame("relay", header)):
                writer.write(buffer)
            await writer.drain()
            answer = await reader.read(1)
        except BaseException:
            writer.close()
            raise
    if not answer:
        writer.close()
        return None
    return (reader, writer), answer


async def ping(p2p: GatedP2P, peer: str, timeout_s: float = PING_S) -> bool:
    """Does the connection to ``peer``, or one that the daemon gets at once, work?"""
    with suppress(Exception):  # the daemon's errors have no common base
        async with asyncio.timeout(timeout_s):
            await p2p.exchange_directly(PeerID.from_base58(peer), PING, b"")
            return True
    return False
