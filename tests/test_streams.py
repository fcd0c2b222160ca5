"""Paced streams whose receiver ends them: nothing stays counted, and no half frame stays on a stream."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, cast

import pytest
from hivemind.p2p import PeerID

from muletrain.errors import PeerUnreachable
from muletrain.network.base import Channel
from muletrain.network.pacing import LANES, Pacer
from muletrain.network.streams import ACCEPTED, Outgoing
from muletrain.wire.codec import encode_raw
from muletrain.wire.frame import Frame, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

PEER, *SLOW = (PeerID(b"\x12\x20" + bytes(31) + bytes([k])).to_base58() for k in range(LANES + 1))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 15))


class Daemon:
    """Opens streams to a peer that reads nothing, and ``accepts`` them or not. ``ends``: the peer's."""

    def __init__(self, *, accepts: bool = True) -> None:
        self._accepts = accepts
        self.ends: list[asyncio.StreamWriter] = []

    def check_daemon(self) -> None:
        pass

    async def call_binary_stream_handler(
        self, peer: PeerID, name: str
    ) -> tuple[None, asyncio.StreamReader, asyncio.StreamWriter]:
        here, there = socket.socketpair()
        _, end = await asyncio.open_connection(sock=there)
        if self._accepts:
            end.write(ACCEPTED)
        self.ends.append(end)
        return None, *await asyncio.open_connection(sock=here)


class Sender:
    """Of frames to one peer."""

    def __init__(self, peer: str = PEER, pacer: Pacer | None = None, *, accepts: bool = True) -> None:
        self.daemon, self.pacer = Daemon(accepts=accepts), pacer or Pacer()
        self._window = self.pacer.window(peer)
        self.outgoing = Outgoing(
            cast("Any", self.daemon), peer, Channel.AVERAGE, self.pacer, lambda peer: None, lambda peer: None
        )

    async def send(self, nbytes: int) -> None:
        await self.outgoing.send(pack(Frame("f", {}, [encode_raw(bytes(nbytes))])), 5.0)

    async def waits(self, streams: int) -> None:
        """Until a frame waits for room, on the last of so many streams."""
        await until(lambda: len(self.daemon.ends) == streams and self._is_full())

    def _is_full(self) -> bool:
        return self.pacer.under_way(PEER) + self._window.piece > self._window.size


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - of what has no event
            await asyncio.sleep(0.005)


def test_what_is_granted_when_the_stream_has_ended_is_not_under_way_for_ever() -> None:
    async def scenario() -> None:
        sender = Sender()
        sending = asyncio.create_task(sender.send(200_000))
        await sender.waits(streams=1)
        sender.daemon.ends[0].close()
        with pytest.raises(PeerUnreachable):
            await sending
        assert sender.pacer.under_way(PEER) == 0

    run(scenario())


def test_half_a_frame_does_not_stay_on_a_stream_that_was_opened_anew() -> None:
    async def scenario() -> None:
        sender = Sender()
        await sender.send(10)
        sending = asyncio.create_task(sender.send(200_000))
        await sender.waits(streams=1)
        sender.daemon.ends[0].close()
        await sender.waits(streams=2)
        sender.pacer.give_up(PEER)
        with pytest.raises(PeerUnreachable):
            await sending
        await sender.send(10)
        assert len(sender.daemon.ends) == 3, "on a stream of its own"

    run(scenario())


def test_peers_that_do_not_accept_streams_hold_up_nobody_else() -> None:
    async def scenario() -> None:
        sender = Sender()
        senders = [Sender(peer, sender.pacer, accepts=False) for peer in SLOW]
        sending = [asyncio.create_task(s.send(10)) for s in senders]
        await until(lambda: all(s.daemon.ends for s in senders))
        await asyncio.wait_for(sender.send(10), 2.0)
        for s in senders:
            s.outgoing.stop()
        assert all(isinstance(e, PeerUnreachable) for e in await asyncio.gather(*sending, return_exceptions=True))

    run(scenario())
