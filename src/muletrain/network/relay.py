"""A way to peers that cannot be dialled: through a member that both sides reach.

A machine behind a router, or one that a firewall keeps from another, opens connections and takes none. Members lend
their own: the daemons of the two ends then speak through a pipe that the relay only carries. TLS, the peers' ids, the
gate and every stream above them are the ends' own, so that the relay can neither read nor change anything, and nothing
above the daemon knows of it.

One stream for each pipe, admitted members only. It begins with a frame ``relay``: ``to``, of the end that asks, then
``for``, of the relay to the other end; the answer is one byte. Asked by many at once, whoever answers first is the
fastest way now. Before the other end takes the pipe it tries the direct way, and says so if that works: a peer that is
only slow is left alone, and one that can dial, but cannot be dialled, does so.

The daemon's own circuit relay is off: it is open to strangers, uncounted, and takes a relay only if that has a public
address.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from muletrain.errors import ProtocolError
from muletrain.network.base import Frame
from muletrain.policy.deadline import backoff_s
from muletrain.policy.debts import Debts
from muletrain.policy.recent import Recent
from muletrain.wire.frame import pack, read_frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from muletrain.network.gated import GatedP2P

    Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]

RELAY, PING = "muletrain/relay", "muletrain/ping"
ACCEPTED, WORKS, WAIT = b"\1", b"\2", b"\3"
"""Answers: the pipe is taken; the direct way works; we are about to open one to you ourselves."""
PING_S, DIAL_S, ASK_S = 3.0, 1.5, 8.0
"""An answer on a connection that works, on a starved machine, too; a direct dial; a way by one member, the other end's
trials included."""
SURE_S = 5.0
"""A ping before a connection is given up for a pipe."""
AGAIN_S, AGAIN_MAX_S, OFTEN = 5.0, 300.0, 3
"""Between two questions to a member for a way to the same peer. After so many in vain it doubles, up to the longest:
most of those that nobody reaches have gone for good, and each question has all members dial them."""
PAUSE_S = 0.5
"""For the other end, whose connection with the relay may have broken, to get another: only it can."""
RACE = 3
"""Members asked at once."""
MAX_PIPES = 64
"""Carried for others, and as many to and from this peer."""
PIPES_EACH = MAX_PIPES // 2
"""Streams of one member: two that lie behind routers may each have many beyond another."""
DIALS, DIALS_PER_S = 32.0, 1.0
"""Peers that one relay has us dial, at the addresses that it names: at once, and per second after that."""
MAX_ADDRESSES = 16
MAX_ADDRESS = 256
"""Characters."""
MAX_REQUEST = 256 + MAX_ADDRESSES * (MAX_ADDRESS + 3)
"""Bytes of the header of a request."""
CHUNK = 1 << 18


@dataclass
class _Pipe:
    """``peers``: the ends, or, at an end, the other one."""

    peers: tuple[str, ...]
    writers: tuple[asyncio.StreamWriter, ...]

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


@dataclass
class _Asked:
    """A member that had no way to a peer. ``again``: when it is asked next."""

    times: int = 0
    again: float = 0.0

    def in_vain(self) -> None:
        self.times += 1
        self.again = _now() + backoff_s(max(0, self.times - OFTEN), AGAIN_S, AGAIN_MAX_S)


class Relay:
    """Of one peer: finds ways to others, takes theirs, and carries for others."""

    def __init__(
        self,
        p2p: GatedP2P,
        daemon: tuple[str, int],
        addresses: list[str],
        *,
        private: bool,
        carries: bool,
        told: Callable[[str, str], None],
        offended: Callable[[str, str], None],
    ) -> None:
        """``daemon``: where our own listens, for us; ``addresses``: where others may dial it. ``private``: no other
        machine can. ``carries``: for others, too. ``told`` is told whom we reach by way of whom, ``offended`` who asks
        for what no correct peer asks for, and why."""
        self._p2p, self._daemon, self._told, self._offended = p2p, daemon, told, offended
        self._addresses = addresses[:MAX_ADDRESSES]
        self._open, self._carries = not private, carries
        self.carried: Counter[str] = Counter()
        """Bytes carried for others, by receiver."""
        self._asked_by: Counter[str] = Counter()
        """Streams that members have with us."""
        self._dialled = Debts(DIALS_PER_S)
        self._pipes: list[_Pipe] = []
        self._carrying: list[_Pipe] = []
        self._finding: dict[str, asyncio.Task[bool]] = {}
        self._in_vain: dict[str, dict[str, _Asked]] = {}
        """By peer, who was asked for a way to it and had none."""
        self._times: Recent[float] = Recent()
        self._relayed: set[str] = set()
        """Whom we have reached by way of others, and not looked for in vain since."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def open(self) -> None:
        """Answer others."""

        async def ping(payload: bytes, remote: PeerID) -> bytes:
            return b""

        await self._p2p._client.add_unary_handler(PING, ping)
        await self._p2p.add_binary_stream_handler(RELAY, self._on_stream)
        self._p2p.finder = self

    def indirect(self, peer: str) -> bool:
        """Do we reach ``peer`` by way of another?"""
        return any(peer in pipe.peers for pipe in self._pipes)

    def relayed(self, peer: str) -> bool:
        """Did we reach it by way of another, the last time?"""
        return peer in self._relayed

    def advice(self) -> str:
        """Where there is no way between two peers."""
        port = (
            f"TCP port {self._daemon[1]} here"
            if self._open
            else "a TCP port here (join --port 4000, without --private)"
        )
        return f"no member leads there, either. One of the two machines must be open to the other: open {port}, or one there"

    def cut(self, peer: str) -> None:
        """Close the pipes to, from and for ``peer``."""
        for pipe in [*self._pipes, *self._carrying]:
            if peer in pipe.peers:
                pipe.close()

    async def close(self) -> None:
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # The end that looks for a way -----------------------------------------------------------------------------------

    def doubt(self, peer: str) -> None:
        """``peer`` is silent: see, in the background, whether another way reaches it."""
        self._begin(peer, self._look)

    async def find(self, peer: str) -> bool:
        """There is no connection to ``peer``: get one. False if no member reaches it, either."""
        return await asyncio.shield(self._begin(peer, self._find))

    def _begin(self, peer: str, search: Callable[[str], Awaitable[bool]]) -> asyncio.Task[bool]:
        """One search for each peer at a time."""

        async def bounded() -> bool:
            with suppress(Exception):  # the daemon's errors have no common base
                async with asyncio.timeout(2 * ASK_S):
                    return await search(peer)
            return False

        if peer not in self._finding:
            task = self._finding[peer] = self._spawn(bounded())
            task.add_done_callback(lambda _: self._finding.pop(peer))
        return self._finding[peer]

    async def _look(self, peer: str) -> bool:
        if not await self._connected(peer):
            return await self._find(peer)
        return await self._ping(peer) or await self._find(peer)

    async def _find(self, peer: str) -> bool:
        if await self._search(peer):
            return True
        if peer not in self._relayed or not self._in_vain.pop(peer, None):
            return False
        self._relayed.discard(peer)  # if this is in vain, too, it is like any other that nobody reaches
        await asyncio.sleep(PAUSE_S)
        return await self._search(peer)

    async def _search(self, peer: str) -> bool:
        members = await self._candidates(peer)
        for k in range(0, len(members), RACE):
            async with self._race(members[k : k + RACE], peer) as found:
                match found:
                    case (_, ends, answer) if answer in (WORKS, WAIT):
                        ends[1].close()
                        return answer == WORKS or await self._comes(peer)
                    case (relay, ends, _):
                        return await self._connect(peer, relay, ends)
        return False

    async def _candidates(self, peer: str) -> list[str]:
        """Members with which we have a connection of our own, the fastest first."""
        connected = {p.peer_id.to_base58() for p in await self._p2p._client.list_peers()}
        self._in_vain = {
            p: lately for p, asked in self._in_vain.items() if p not in connected and (lately := _lately(asked))
        }
        tired = {member for member, asked in self._in_vain.get(peer, {}).items() if _now() < asked.again}
        able = connected & set(self._p2p.gate.known()) - {peer} - tired
        return sorted(
            (m for m in able if not self.indirect(m)), key=lambda m: (self._times.get(m, 0.0), random.random())
        )

    @asynccontextmanager
    async def _race(self, members: Iterable[str], peer: str) -> AsyncIterator[tuple[str, Ends, bytes] | None]:
        """Ask them all; the first that has an answer, None if nobody has."""
        asked = {asyncio.create_task(self._ask(m, peer)) for m in members}
        pending, found = asked, None
        try:
            while pending and found is None:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                found = next((t.result() for t in done if t.result() is not None), None)
            yield found
        finally:
            for task in asked:
                task.cancel()
            for late in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(late, tuple) and late is not found:
                    late[1][1].close()

    async def _ask(self, member: str, peer: str) -> tuple[str, Ends, bytes] | None:
        begin = _now()
        try:
            answered = await self._request(member, {"to": peer, "addresses": self._addresses})
        except Exception:  # the daemon's errors have no common base
            answered = None
        if answered is None:
            self._in_vain.setdefault(peer, {}).setdefault(member, _Asked()).in_vain()
            return None
        self._times[member] = _now() - begin
        return member, *answered

    async def _request(self, peer: str, header: dict[str, Any]) -> tuple[Ends, bytes] | None:
        """Begin a stream; the answer. None if it was closed instead. Raises what the daemon raises, and
        TimeoutError."""
        async with asyncio.timeout(ASK_S):
            _, reader, writer = await self._p2p.open_stream(PeerID.from_base58(peer), RELAY)
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

    async def _connect(self, peer: str, relay: str, ends: Ends) -> bool:
        """Have our daemon dial through the pipe: it gets it from a socket that takes one caller."""
        target = PeerID.from_base58(peer)
        came: asyncio.Future[Ends] = asyncio.get_running_loop().create_future()

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if came.done():
                writer.close()
                return
            came.set_result((reader, writer))
            pipe = _Pipe((peer,), (ends[1], writer))
            self._spawn(self._keep_up(relay, pipe, ends, (reader, writer)))

        await self._disconnect(peer)  # or the daemon would keep what does not work
        server = await asyncio.start_server(take, "127.0.0.1", 0)
        try:
            port = server.sockets[0].getsockname()[1]
            await self._p2p.dial(target, [Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")])
        finally:
            server.close()
            if not came.done():
                came.cancel()
                ends[1].close()
        self._relayed.add(peer)
        self._told(peer, relay)
        return True

    async def _comes(self, peer: str) -> bool:
        """Until ``peer``, which is about to, has connected to us."""
        for _ in range(int(ASK_S / 0.1)):
            if await self._connected(peer):
                return True
            await asyncio.sleep(0.1)
        return False

    # The relay, and the other end -----------------------------------------------------------------------------------

    async def _on_stream(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, sender = asyncio.current_task(), info.peer_id.to_base58()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._asked_by[sender] += 1
        try:
            async with asyncio.timeout(ASK_S):
                request = await read_frame(reader, 0, max_header=MAX_REQUEST)
            await self._serve(sender, request, (reader, writer))
        except ProtocolError as e:
            self._offended(sender, str(e))
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            return  # one of the ends has gone
        except asyncio.CancelledError:
            if not self._closed:
                raise
            # asyncio's stream server complains about a cancelled callback
        finally:
            self._asked_by[sender] -= 1
            self._asked_by += Counter()  # only those that have some stay

    async def _serve(self, sender: str, request: Frame, ends: Ends) -> None:
        match request.kind, request.header:
            case "relay", {"to": str() as target, "addresses": list() as addresses} if _few(addresses):
                await self._lend(sender, target, addresses, ends)
            case "relay", {"for": str() as origin, "addresses": list() as addresses} if _few(addresses):
                await self._accept(sender, origin, addresses, ends)
            case _:
                raise ProtocolError("a stream for relays must begin with whom it is for")

    async def _lend(self, sender: str, target: str, addresses: list[str], ends: Ends) -> None:
        """Carry between two members, each of which has, or gets, a connection with us."""
        if not self._carries or len(self._carrying) >= MAX_PIPES or self._asked_by[sender] > PIPES_EACH:
            return
        if self.indirect(target) or self.indirect(sender):
            return
        if not self._p2p.gate.admitted(target):
            return
        try:
            answered = await self._request(target, {"for": sender, "addresses": addresses})
        except Exception:  # it cannot be reached from here, either
            return
        if answered is None:
            return
        others, answer = answered
        pipe = _Pipe((sender, target), (ends[1], others[1]))
        try:
            ends[1].write(answer)
            await ends[1].drain()
            if answer == ACCEPTED:
                await self._carry(self._carrying, pipe, ends, others)
        finally:
            pipe.close()

    async def _accept(self, relay: str, origin: str, addresses: list[str], ends: Ends) -> None:
        if len(self._pipes) >= MAX_PIPES:
            return
        if origin in self._finding and self._p2p.peer_id.to_base58() < origin:
            ends[1].write(WAIT)
            return await ends[1].drain()
        if await self._reaches(origin, relay, addresses):
            ends[1].write(WORKS)
            return await ends[1].drain()
        await self._disconnect(origin)
        reader, writer = await asyncio.open_connection(*self._daemon)
        ends[1].write(ACCEPTED)
        await self._keep_up(relay, _Pipe((origin,), (ends[1], writer)), ends, (reader, writer))
        return None

    async def _reaches(self, origin: str, relay: str, addresses: list[str]) -> bool:
        """Without a new pipe. ``relay`` named the ``addresses``."""
        try:
            if not await self._connected(origin):
                if not (dialled := [Multiaddr(a.rsplit("/p2p/", 1)[0]) for a in addresses]):
                    return False
                if self._dialled.add(relay, 1.0, _now()) > DIALS:
                    return False
                async with asyncio.timeout(DIAL_S):
                    await self._p2p.dial(PeerID.from_base58(origin), dialled)
        except Exception:  # the daemon's errors have no common base, nor have the parser's
            return False
        return await self._ping(origin, SURE_S)

    async def _keep_up(self, relay: str, pipe: _Pipe, one: Ends, other: Ends) -> None:
        """An end's part of a pipe. When it broke because our connection with the relay did, only we may be able to
        connect again."""
        await self._carry(self._pipes, pipe, one, other)
        await self._ping(relay)

    # Common ---------------------------------------------------------------------------------------------------------

    async def _carry(self, pipes: list[_Pipe], pipe: _Pipe, one: Ends, other: Ends) -> None:
        """Until one end closes; then both are closed. Buffers are those of the sockets: whoever does not read holds the
        other up."""
        pipes.append(pipe)
        to = pipe.peers if pipes is self._carrying else ("", "")
        ways = [self._pump(other[0], one[1], to[0]), self._pump(one[0], other[1], to[-1])]
        pumps = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pipes.remove(pipe)
            pipe.close()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receiver: str) -> None:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
            if receiver:
                self.carried[receiver] += len(data)

    async def _connected(self, peer: str) -> bool:
        return any(p.peer_id.to_base58() == peer for p in await self._p2p._client.list_peers())

    async def _ping(self, peer: str, timeout_s: float = PING_S) -> bool:
        """Does the connection, or one that the daemon gets at once, work?"""
        with suppress(Exception):  # whatever it is: no
            async with asyncio.timeout(timeout_s):
                await self._p2p.exchange_directly(PeerID.from_base58(peer), PING, b"")
                return True
        return False

    async def _disconnect(self, peer: str) -> None:
        if await self._connected(peer):
            with suppress(Exception):  # it has gone meanwhile
                await self._p2p._client.disconnect(PeerID.from_base58(peer))

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _now() -> float:
    return asyncio.get_running_loop().time()


def _lately(asked: dict[str, _Asked]) -> dict[str, _Asked]:
    return {member: of for member, of in asked.items() if _now() < of.again + AGAIN_MAX_S}


def _few(addresses: list[Any]) -> bool:
    return len(addresses) <= MAX_ADDRESSES and all(isinstance(a, str) and len(a) <= MAX_ADDRESS for a in addresses)
