"""Relays: pipes through a member between two peers that cannot dial each other.

A machine behind a router, or one behind a firewall, opens connections and takes none. Members lend connections: the
daemons of the two ends speak through a pipe (``pipes``) that the relay only carries. TLS, the peers' ids, the gate and
all streams belong to the ends, so the relay can neither read nor change anything.

A pipe is for admitted members only. Of several members asked at once the first answer wins (``ways``). Before taking a
pipe, the far end tries the direct way: a peer that is only slow is left alone, and one that can dial, but cannot be
dialled, does so.

The daemon's own circuit relay is off: that relay is open to strangers, counts nothing, and needs a relay with a public
address.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from muletrain.clock import loop_time_s
from muletrain.errors import Malformed, ProtocolError
from muletrain.network.jobs import Jobs
from muletrain.network.pipes import ACCEPTED, ASK_S, PING, RELAY, WAIT, WORKS, Pipe, Pipes, ping, request
from muletrain.network.ways import Ways
from muletrain.policy.recent import Debts
from muletrain.wire.frame import read_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.network.delivery import Delivery
    from muletrain.network.gated import GatedP2P
    from muletrain.network.pipes import Ends
    from muletrain.wire.frame import Frame

DIAL_S = 1.5
"""Longest direct dial before a pipe is taken [s]."""
SURE_S = 5.0
"""Longest answer on a direct connection before a pipe replaces the connection [s]."""
MAX_PIPES = 64
"""Most pipes carried for other peers, and as many to and from this peer."""
PIPES_EACH = MAX_PIPES // 2
"""Most streams of one member, who may reach many peers through us."""
DIALS, DIALS_PER_S = 32.0, 1.0
"""Peers that one relay may have us dial at given addresses: at once, and per second after that."""
MAX_ADDRESSES = 16
MAX_ADDRESS = 256
"""Characters."""
MAX_REQUEST = 256 + MAX_ADDRESSES * (MAX_ADDRESS + 3)
"""Bytes of the header of a request."""


class Relay:
    """Lends pipes, takes pipes, and has this peer's ``ways``."""

    def __init__(
        self,
        p2p: GatedP2P,
        daemon: tuple[str, int],
        addresses: list[str],
        delivery: Delivery,
        *,
        private: bool,
        carries: bool,
        told: Callable[[str, str], None],
    ) -> None:
        """``daemon``: our daemon's local address; ``addresses``: for dialling peers. ``private``: unreachable from
        remote machines. ``carries``: we lend pipes. ``told`` is told (peer, relay) of each way found, ``delivery`` of
        wrong requests."""
        self.carries = carries
        self.pipes, self.lent = Pipes(), Pipes()
        """Pipes of this peer, and pipes between two other peers."""
        addresses = addresses[:MAX_ADDRESSES]
        self.ways = Ways(p2p, self.pipes, addresses, None if private else daemon[1], told)
        self._p2p, self._daemon, self._delivery = p2p, daemon, delivery
        self._streams: Counter[str] = Counter()
        """Requests that each member has open with us."""
        self._dialled = Debts(DIALS_PER_S)
        self._jobs = Jobs()

    async def open(self) -> None:
        """Answer requests from now on."""

        async def pong(payload: bytes, remote: PeerID) -> bytes:
            return b""

        await self._p2p.answer_calls(PING, pong)
        await self._p2p.add_binary_stream_handler(RELAY, self._on_stream)

    def cut(self, peer: str) -> None:
        """Close the pipes to, from and for ``peer``."""
        self.pipes.cut(peer)
        self.lent.cut(peer)

    async def close(self) -> None:
        await asyncio.gather(self.ways.close(), self._jobs.end())

    async def _on_stream(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sender = info.peer_id.to_base58()
        self._streams[sender] += 1
        try:
            with self._jobs.serving():
                async with asyncio.timeout(ASK_S):
                    asked = await read_frame(reader, 0, max_header=MAX_REQUEST)
                await self._serve(sender, asked, (reader, writer))
        except ProtocolError as e:
            self._delivery.refuse(sender, Malformed(str(e)))
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            return  # one of the ends has gone
        finally:
            self._streams[sender] -= 1
            self._streams += Counter()  # drops zeros

    async def _serve(self, sender: str, asked: Frame, ends: Ends) -> None:
        match asked.kind, asked.header:
            case "relay", {"to": str() as target, "addresses": list() as addresses} if _few(addresses):
                await self._lend(sender, target, addresses, ends)
            case "relay", {"for": str() as origin, "addresses": list() as addresses} if _few(addresses):
                await self._accept(sender, origin, addresses, ends)
            case _:
                raise ProtocolError("a stream for relays must begin with the peer that it is for")

    async def _lend(self, sender: str, target: str, addresses: list[str], ends: Ends) -> None:
        """Carry between two members. Each must have, or get, a connection with us."""
        if not self.carries or len(self.lent.open) >= MAX_PIPES or self._streams[sender] > PIPES_EACH:
            return
        if self.pipes.to(target) or self.pipes.to(sender) or not self._p2p.gate.admitted(target):
            return
        try:
            answered = await request(self._p2p, target, {"for": sender, "addresses": addresses})
        except Exception:  # the peer cannot be reached from here, either
            return
        if answered is None:
            return
        others, answer = answered
        pipe = Pipe((sender, target), (ends[1], others[1]))
        try:
            ends[1].write(answer)
            await ends[1].drain()
            if answer == ACCEPTED:
                await self.lent.carry(pipe, ends, others)
        finally:
            pipe.close()

    async def _accept(self, relay: str, origin: str, addresses: list[str], ends: Ends) -> None:
        """Take a pipe that ``relay`` carries for ``origin``, if nothing better works."""
        if len(self.pipes.open) >= MAX_PIPES or self._streams[relay] > MAX_PIPES:
            return
        if self.ways.searches(origin) and self._p2p.peer_id.to_base58() < origin:
            ends[1].write(WAIT)
            return await ends[1].drain()
        with self.ways.expecting(origin):
            if await self._reaches(origin, relay, addresses):
                ends[1].write(WORKS)
                return await ends[1].drain()
            await self._p2p.hang_up(origin)
            reader, writer = await asyncio.open_connection(*self._daemon)
            ends[1].write(ACCEPTED)
            pipe = Pipe((origin,), (ends[1], writer))
            carried = self._jobs.spawn(self.ways.keep_up(relay, pipe, ends, (reader, writer)))
            await self.ways.comes(origin, lambda: not carried.done())
        await carried
        return None

    async def _reaches(self, origin: str, relay: str, addresses: list[str]) -> bool:
        """Do we reach ``origin`` without a new pipe? ``relay`` named the ``addresses``."""
        try:
            if origin not in await self._p2p.connected():
                if not (dialled := [Multiaddr(a.rsplit("/p2p/", 1)[0]) for a in addresses]):
                    return False
                if self._dialled.add(relay, 1.0, loop_time_s()) > DIALS:
                    return False
                async with asyncio.timeout(DIAL_S):
                    await self._p2p.dial(PeerID.from_base58(origin), dialled)
        except Exception:  # the daemon's errors have no common base, nor have the parser's
            return False
        return await ping(self._p2p, origin, SURE_S)


def _few(addresses: list[Any]) -> bool:
    return len(addresses) <= MAX_ADDRESSES and all(isinstance(a, str) and len(a) <= MAX_ADDRESS for a in addresses)
