"""Ways to peers that cannot be dialled: which member is asked for a pipe, and when."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from muletrain.clock import loop_time_s
from muletrain.network.jobs import Jobs
from muletrain.network.pipes import ASK_S, WAIT, WORKS, Pipe, Pipes, ping, request
from muletrain.policy.deadline import backoff_s
from muletrain.policy.recent import Recent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator

    from muletrain.network.gated import GatedP2P
    from muletrain.network.pipes import Ends

AGAIN_S, AGAIN_MAX_S, OFTEN = 5.0, 300.0, 3
"""Time between two questions to a member for a way to the same peer [s]. After OFTEN failures the time doubles, up to
the maximum: most unreachable peers have gone for good, and each question makes all members dial."""
PAUSE_S = 0.5
"""Time for the far end to renew a connection with the relay, which only that end can [s]."""
RACE = 3
"""Members asked at once."""


@dataclass
class Failures:
    """A member's failures to reach one peer. ``again_s``: when we ask this member next, by the loop's clock."""

    times: int = 0
    again_s: float = 0.0

    def count(self) -> None:
        self.times += 1
        self.again_s = loop_time_s() + backoff_s(max(0, self.times - OFTEN), AGAIN_S, AGAIN_MAX_S)


class Ways:
    """Finds ways to peers (``gated.Finder``)."""

    def __init__(
        self, p2p: GatedP2P, pipes: Pipes, addresses: list[str], port: int | None, told: Callable[[str, str], None]
    ) -> None:
        """``addresses``: where peers may dial us. ``port``: for incoming connections; None: no remote machine can dial.
        ``told`` is told (peer, relay) of each way found."""
        self._p2p, self._pipes, self._addresses, self._port, self._told = p2p, pipes, addresses, port, told
        self._searches: dict[str, asyncio.Task[bool]] = {}
        self._expected: Counter[str] = Counter()
        """Peers whose pipes we are taking: asking them for one, too, would make a second way."""
        self._failures: dict[str, dict[str, Failures]] = {}
        """By peer and member."""
        self._answer_s: Recent[float] = Recent()
        """How long each member took to answer."""
        self._relayed: set[str] = set()
        """Peers that we reached through a relay and have not looked for in vain since."""
        self._jobs = Jobs()

    def relayed(self, peer: str) -> bool:
        return peer in self._relayed

    def searches(self, peer: str) -> bool:
        """Are we looking for a way to ``peer`` now?"""
        return peer in self._searches

    def expects(self, peer: str) -> bool:
        """Are we taking a pipe of ``peer`` now?"""
        return peer in self._expected

    @contextmanager
    def expecting(self, peer: str) -> Iterator[None]:
        """While we take a pipe of ``peer``, our own search waits for that one."""
        self._expected[peer] += 1
        try:
            yield
        finally:
            self._expected[peer] -= 1
            self._expected += Counter()  # drops zeros

    def advice(self) -> str:
        port = (
            "a TCP port here (join --port 4000, without --private)"
            if self._port is None
            else f"TCP port {self._port} here"
        )
        return (
            f"no member leads there, either, so it is probably gone. Only if it still trains, by the terminal there: neither of the two "
            f"can be reached from outside, so open {port}, or one there"
        )

    def doubt(self, peer: str) -> None:
        self._begin(peer, self._look)

    async def find(self, peer: str) -> bool:
        return await asyncio.shield(self._begin(peer, self._find))

    async def close(self) -> None:
        await self._jobs.end()

    async def keep_up(self, relay: str, pipe: Pipe, one: Ends, other: Ends) -> None:
        """Carry our end's part of a pipe. A pipe may break with our connection to the relay; perhaps only we can renew
        that connection."""
        await self._pipes.carry(pipe, one, other)
        await ping(self._p2p, relay)

    def _begin(self, peer: str, search: Callable[[str], Awaitable[bool]]) -> asyncio.Task[bool]:
        """One search for each peer at a time."""

        async def bounded() -> bool:
            with suppress(Exception):  # the daemon's errors have no common base
                async with asyncio.timeout(2 * ASK_S):
                    return await search(peer)
            return False

        if peer not in self._searches:
            task = self._searches[peer] = self._jobs.spawn(bounded())
            task.add_done_callback(lambda _: self._searches.pop(peer))
        return self._searches[peer]

    async def _look(self, peer: str) -> bool:
        connected = peer in await self._p2p.connected()
        return (connected and await ping(self._p2p, peer)) or await self._find(peer)

    async def _find(self, peer: str) -> bool:
        if await self._search(peer):
            return True
        if peer not in self._relayed or not self._failures.pop(peer, None):
            return False
        self._relayed.discard(peer)  # if not found now, the peer is like any unreachable one
        await asyncio.sleep(PAUSE_S)
        return await self._search(peer)

    async def _search(self, peer: str) -> bool:
        if self.expects(peer) and await self.comes(peer, lambda: self.expects(peer)):
            return True
        members = await self._candidates(peer)
        for k in range(0, len(members), RACE):
            async with self._race(members[k : k + RACE], peer) as found:
                if found is not None:
                    return await self._goes(peer, *found)
        return False

    async def _goes(self, peer: str, relay: str, ends: Ends, answer: bytes) -> bool:
        """Whether the way is there that the first answer promised. ``relay`` may have lied: if not, we ask the others
        next."""
        there = False
        try:
            if answer in (WORKS, WAIT):
                ends[1].close()
                there = await self.comes(peer, lambda: answer == WAIT)
            else:
                await self._connect(peer, relay, ends)
                there = True
        finally:
            if not there:
                self._failed(peer, relay)
        return there

    def _failed(self, peer: str, member: str) -> None:
        self._failures.setdefault(peer, {}).setdefault(member, Failures()).count()

    async def _candidates(self, peer: str) -> list[str]:
        """Members with which we have a connection of our own, the fastest first."""
        connected = set(await self._p2p.connected())
        self._failures = {
            p: lately for p, found in self._failures.items() if p not in connected and (lately := _lately(found))
        }
        waiting = {member for member, of in self._failures.get(peer, {}).items() if loop_time_s() < of.again_s}
        able = [m for m in connected & set(self._p2p.gate.known()) - {peer} - waiting if not self._pipes.to(m)]
        return sorted(able, key=lambda m: (self._answer_s.get(m, 0.0), random.random()))

    @asynccontextmanager
    async def _race(self, members: Iterable[str], peer: str) -> AsyncIterator[tuple[str, Ends, bytes] | None]:
        """Ask all ``members``: the first answer, or None."""
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
        begin_s = loop_time_s()
        try:
            answered = await request(self._p2p, member, {"to": peer, "addresses": self._addresses})
        except Exception:  # the daemon's errors have no common base
            answered = None
        if answered is None:
            self._failed(peer, member)
            return None
        self._answer_s[member] = loop_time_s() - begin_s
        return member, *answered

    async def _connect(self, peer: str, relay: str, ends: Ends) -> None:
        """Have our daemon dial through the pipe, offered behind a socket that takes one caller."""
        target = PeerID.from_base58(peer)
        came: asyncio.Future[Ends] = asyncio.get_running_loop().create_future()

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if came.done():
                writer.close()
                return
            came.set_result((reader, writer))
            pipe = Pipe((peer,), (ends[1], writer))
            self._jobs.spawn(self.keep_up(relay, pipe, ends, (reader, writer)))

        await self._p2p.hang_up(peer)  # or the daemon would keep the broken connection
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

    async def comes(self, peer: str, hoped: Callable[[], bool] = lambda: True) -> bool:
        """Whether ``peer``, which is about to connect to us, has within ASK_S, while that is ``hoped`` for."""
        for _ in range(int(ASK_S / 0.1)):
            last = not hoped()
            if peer in await self._p2p.connected():
                return True
            if last:
                return False
            await asyncio.sleep(0.1)
        return False


def _lately(failures: dict[str, Failures]) -> dict[str, Failures]:
    return {member: of for member, of in failures.items() if loop_time_s() < of.again_s + AGAIN_MAX_S}
