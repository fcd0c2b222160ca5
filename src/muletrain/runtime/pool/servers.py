"""The servers of the stages, as known to one client, which goes to the stages with the greatest need."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from muletrain.errors import DeadlineExceeded, MuletrainError
from muletrain.policy.deadline import Deadline, backoff_s
from muletrain.policy.passes import Pass
from muletrain.policy.worker import Standings, server_to_move_to
from muletrain.runtime.pool.messages import Answer, Next

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from muletrain.clock import Clock
    from muletrain.network.base import Network, PeerId
    from muletrain.runtime.core.plan import Plan

CALL_S, CALL_FLOOR_S = 10.0, 3.0
"""Seconds for a call, before any was answered, and at least: a server may hold it for a second."""
OTHERS_S = 0.5
"""Seconds for the answers of other servers after the first answer."""
ASKED, COUNTED = 4, 16
"""Most servers of a stage to ask for their need of help, and for the speed of their clients."""
UNMEASURED = 1e-9
"""Least speed of a machine, so that unmeasured machines count."""
IDLE = 1e5 * UNMEASURED
"""Clients with a lower speed together have done no work yet."""
IDLE_S, IDLE_MAX_S = 2.0, 30.0
"""Seconds without work, after which a client checks whether another server needs help, at first and at most;
doubles."""
COMPARE_S = 10.0
"""Least seconds between two checks whether another server of the stage needs a client more."""


class NoServer(MuletrainError):
    """No server of the stage can be reached any more."""


class Helpers(NamedTuple):
    """The clients of one stage together. ``speed``: forward passes of a sequence per second; ``own``: of the servers'
    own devices."""

    clients: int
    speed: float
    own: float


STATE = Next(name="-", config=bytes(32), stage=0)
"""Asks a server for its state."""


async def states_of(net: Network, servers: Sequence[PeerId], timeout_s: float = CALL_S) -> dict[PeerId, Answer]:
    """Returns the states of the ``servers`` that answer about as soon as the first. Ends within ``timeout_s``."""
    found: dict[PeerId, Answer] = {}

    async def ask(server: PeerId) -> None:
        with contextlib.suppress(MuletrainError):
            found[server] = await STATE.ask(net, server, timeout_s=timeout_s)

    waiting = {asyncio.create_task(ask(server)) for server in servers}
    try:
        while waiting:
            left_s = OTHERS_S if found else None
            done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
    finally:
        for task in waiting:
            task.cancel()
    return found


async def helpers_of(net: Network, servers: Sequence[PeerId]) -> Helpers:
    """Returns the number and the speed of all clients of a stage's ``servers``. In a large fleet a sample is asked, and
    scaled up."""
    found = (await states_of(net, servers[:COUNTED])).values()
    times = len(servers) / max(1, len(found))
    clients = sum(state.clients for state in found)
    speed, own = sum(state.speed for state in found), sum(state.own for state in found)
    return Helpers(
        round(times * clients), times * (speed + UNMEASURED * clients), times * own + UNMEASURED * len(servers)
    )


class StageServers:
    """Asks the servers of a stage. ``known``: the known servers."""

    def __init__(self, net: Network, clock: Clock, known: tuple[PeerId, ...]) -> None:
        self._net, self._clock, self.known = net, clock, known
        self.over: set[PeerId] = set()
        """Servers that have said that the run is over, and are asked no more."""
        self._answers = Deadline(unmeasured_s=CALL_S, floor_s=CALL_FLOOR_S)
        self._compared_at = clock.now()
        self._draw = random.Random(net.peer_id)
        self._standings, self._steps = Standings(), 0
        """Servers that give no work step after step are left out. A server that says that its clients do nothing, and
        gives nothing, would keep all clients of the stage."""

    async def states(self, *, but: PeerId | None = None, most: int | None = None) -> dict[PeerId, Answer]:
        """Returns the states of the servers that answer about as soon as the first (without ``but``; ``most``: size of
        a random sample)."""
        others = [s for s in self.known if s != but and s not in self.over]
        if most is not None:
            others = self._draw.sample(others, min(most, len(others)))
        return await states_of(self._net, others, self._answers.seconds())

    async def by_need(self, *, but: Collection[PeerId] = ()) -> list[tuple[PeerId, Answer]]:
        """Returns the answering servers and their states, servers with the slowest clients together first, and ``but``
        last."""

        def need(found: tuple[PeerId, Answer]) -> tuple[bool, float, int, bytes]:
            server, state = found  # the hash spreads clients that come at the same time
            return server in but, state.speed, state.clients, blake3(f"{self._net.peer_id}/{server}".encode()).digest()

        return sorted((await self.states()).items(), key=need)

    def worked(self, home: PeerId, *, worked: bool) -> None:
        """A step is over, in which ``home`` gave us work, or did not."""
        self._steps += 1
        if worked:
            self._standings[home].kept()
        else:
            self._standings[home].lapsed(self._steps)

    def _left_out(self, server: PeerId) -> bool:
        return self._standings[server].left_out(self._steps)

    async def that_needs_us_more(self, home: PeerId, version: int) -> PeerId | None:
        """Returns a server whose clients are slower together than the clients of ``home``, if we should move there for
        a ``version`` of the weights (``server_to_move_to``); or, if ``home`` is left out though it says that
        its clients are the slowest, another one."""
        if self._clock.now() - self._compared_at < COMPARE_S or len(self.known) < 2:
            return None
        self._compared_at = self._clock.now()
        found = await self.states()
        if home not in found or len(found) < 2:
            return None
        if self._left_out(home) and found[home].speed <= min(state.speed for state in found.values()):
            return next((server for server, _ in await self.by_need() if not self._left_out(server)), None)
        unknown = not any(state.speed for state in found.values())
        speeds = {server: state.clients if unknown else state.speed for server, state in found.items()}
        draw = random.Random(f"{self._net.peer_id}/{version}")
        return server_to_move_to(speeds, home, found[home].clients, draw)

    async def news_or_help(self, news: asyncio.Event, home: PeerId, idle: Callable[[], bool]) -> PeerId | None:
        """Returns None once there is ``news`` for a client of ``home``, or a server that cannot end its step soon
        without us, if we are ``idle`` meanwhile."""
        looked = 0
        while not news.is_set():
            with contextlib.suppress(DeadlineExceeded):
                await self._clock.deadline(news.wait(), backoff_s(looked, IDLE_S, IDLE_MAX_S), "news")
                break
            looked = looked + 1 if idle() else 0
            if idle() and (behind := await self._behind(home)) is not None and idle():
                return behind
        return None

    async def _behind(self, home: PeerId) -> PeerId | None:
        """Returns a server that would like help; None: no asked server would, or enough other clients help. (All idle
        clients draw.)"""
        found = await self.states(but=home, most=ASKED)
        if not found:
            return None
        clients = len(self.known) * sum(state.clients for state in found.values()) / len(found)
        behind = max(found, key=lambda s: found[s].helpers)
        return behind if self._draw.random() * max(1.0, clients) < found[behind].helpers else None

    async def call(self, server: PeerId, ask: Next) -> Answer:
        """Returns the answer of ``server``, within a measured deadline. Raises NetworkError."""
        begin = self._clock.now()
        answer = await ask.ask(self._net, server, timeout_s=self._answers.seconds())
        self._answers.measured(self._clock.now() - begin)
        return answer


@dataclass(frozen=True)
class Costs:
    """Costs of a step at each stage. ``work``: of a sequence, in any unit; ``moved``: of the weights that come to a client
    and the accumulator that leaves it [bytes]; ``passes``: of all sequences [forward passes of a sequence]."""

    work: Sequence[float]
    moved: Sequence[float]
    passes: float

    @classmethod
    def of(cls, plan: Plan, moved: Sequence[float]) -> Costs:
        """Returns the costs of a step of ``plan``."""
        return cls(plan.work, moved, Pass.LOSS.cost * plan.microbatches * plan.sequences)

    def step_s(self, helpers: Sequence[Helpers]) -> float:
        """Returns the least seconds of a step: the slowest stage computes without a break."""
        return self.passes / min(h.speed + h.own for h in helpers)

    def left(self, byte_s: float, step_s: float) -> list[float]:
        """Returns the share of a step of ``step_s`` that each stage's transfers leave to a client that moves a byte in
        ``byte_s`` seconds."""
        return [1 - byte_s * nbytes / step_s for nbytes in self.moved]
