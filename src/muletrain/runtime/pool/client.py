"""The life of a client, which computes parts of microbatches for one server of its stage at a time, at one stage after
the other."""

from __future__ import annotations

import asyncio
import contextlib
import random
from functools import partial
from typing import TYPE_CHECKING

from muletrain.errors import NetworkError, PeerUnreachable, ProtocolError, Refused
from muletrain.policy.deadline import Rests
from muletrain.policy.rebalance import stage_to_help, stage_to_move_to
from muletrain.runtime.core.blocks import Blocks
from muletrain.runtime.core.times import AGAIN_S, GONE_S, pause_s
from muletrain.runtime.pool.messages import (
    FROM_SERVER,
    MAX_ROOM,
    MAX_SERVERS,
    Answer,
    Ended,
    Give,
    Next,
    Result,
    Wanted,
)
from muletrain.runtime.pool.servers import IDLE, Costs, Helpers, NoServer, StageServers, helpers_of
from muletrain.runtime.pool.weights import WeightsDownload
from muletrain.runtime.pool.work import PartWork

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from muletrain.clock import Clock
    from muletrain.compute.base import Compute
    from muletrain.network.base import Network, PeerId
    from muletrain.runtime.core.blocks import StateImage
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.core.tasks import Tasks
    from muletrain.wire.codec import Encoded
    from muletrain.wire.frame import Frame

CUT_OFF_S = 10.0
"""Seconds without an answer from any server, after which our server has surely given us up."""
PATIENCE_S = 120.0
"""Seconds without a server, after which a client ends."""
LOOK_EVERY_S = 60.0
"""Seconds between two checks whether another stage needs a client more."""


class Client:
    """Works for one stage. ``compute``: the stage, without moments."""

    def __init__(
        self,
        net: Network,
        clock: Clock,
        tasks: Tasks,
        compute: Compute,
        plan: Plan,
        config: bytes,
        name: str,
        servers: tuple[PeerId, ...],
        others: Collection[PeerId] = (),
        blocks: Blocks | None = None,
        *,
        over: bool = False,
    ) -> None:
        """``servers``: known servers of the stage; ``others``: servers of other stages, which may report that the run is
        over; ``blocks``: of this process, if any; ``over``: of this machine's former client."""
        self._net, self._clock, self._tasks, self._compute, self._plan = net, clock, tasks, compute, plan
        self._asks = Next(name=name, config=config, stage=compute.stage)
        self._servers = StageServers(net, clock, servers)
        self._others = frozenset(others)
        self.over = over
        """A server has said that the run is over, and none has answered since."""
        self._home: PeerId | None = None
        self._session = self._heard = self._handed = self._sessions = 0
        """Number of our time at the server; of its last answer; of the last hand-over; and of such times."""
        self._ended = self._worked = self._moves = False
        self.moved = False
        """The client left because of ``move``."""
        self._wanted: bytes | None = None
        """Digest of the server's newest weights."""
        self._steps: tuple[int, ...] = ()
        """The steps that compute with the newest weights; (): all steps."""
        self.version = 0
        """Version of the server's weights."""
        self._answered_at = self._heard_s = self.step_s = 0.0
        """When a server last answered; when that version came; and seconds of the last step; 0: unmeasured."""
        self._sits_out = 0
        """Version of the weights that is sat out."""
        self._rests, self._given = Rests(random.Random(net.peer_id)), True
        self._news = asyncio.Event()
        self._calling: asyncio.Future[Answer] | None = None
        blocks = blocks or Blocks(net, clock, tasks)
        self._weights = WeightsDownload(blocks, clock, compute, tasks, self._news)
        self._work = PartWork(compute, plan)
        self._copy: tuple[Wanted, asyncio.Task[StateImage], float] | None = None
        """The accumulator that our server is taking, and when that began."""
        self._handed_over_s = 0.0
        self._out: dict[int, asyncio.Task[None]] = {}
        """Parts that we compute, by number."""
        net.receive(self._on_frame, tuple(FROM_SERVER), self)
        blocks.offers("accumulator", self._given_copy)

    @property
    def transfers_s(self) -> float:
        """Seconds that the last weights and the last accumulator took; 0: unmeasured."""
        return self._weights.took_s + self._handed_over_s

    def stop(self) -> None:
        """Leave in order."""
        self._ended = True
        self._news.set()

    def move(self) -> None:
        """Leave in order when the next step begins, so that no computed part is lost."""
        self._moves = True

    async def run(self) -> None:
        """Work until the run ends, or ``stop``. Raises NoServer, and the error of any task that failed."""
        main = self._tasks.spawn(self._run(), "client")
        await asyncio.wait({main, self._tasks.failure}, return_when=asyncio.FIRST_COMPLETED)
        if self._tasks.failure.done():
            self._tasks.failure.result()
        await main

    async def _run(self) -> None:
        tries, self._answered_at = 0, self._clock.now()
        while not self._ended:
            try:
                await self._enlist()
                while not self._ended and await self._serve():
                    pass
                break
            except NetworkError:
                tries = 0 if self._worked else tries + 1
                self._home = None
                await self._drop()
            if self._clock.now() - self._answered_at > PATIENCE_S:
                raise NoServer(f"no server of stage {self._compute.stage} answers for {PATIENCE_S:.0f} s")
            await self._clock.sleep(pause_s(tries, AGAIN_S))
        await self._part_from(self._home, self._session)
        self._home = None
        await self._drop()

    # A server ---------------------------------------------------------------------------------------------------------

    async def _enlist(self) -> None:
        """Find the server of our stage with the greatest need. The weights come while it answers. If none takes us, the
        run has ended if one has said so; raises PeerUnreachable otherwise."""
        for server, state in await self._servers.by_need(but=self._weights.wrong):
            if not self._work.has(state.weights, state.steps):
                self._weights.begin(state.weights, partial(self._first, server))
            with contextlib.suppress(NetworkError):
                return await self._enlist_with(server)
        if not self.over:
            raise PeerUnreachable("no server answers")
        self._ended = True

    async def _enlist_with(self, server: PeerId) -> None:
        """Raises NetworkError if the server does not take us; nothing has changed then."""
        self._sessions += 1
        session = random.Random(f"{self._net.peer_id}/{self._clock.now()}/{self._sessions}").randrange(1, 1 << 47)
        state = await self._servers.call(server, self._asks.model_copy(update={"session": session}))
        self._home, self._session = server, session
        self._heard = self._handed = self.version = self._sits_out = 0
        self._worked = False
        self._hear(state)

    @property
    def _current(self) -> bool:
        """Do we compute with our server's newest weights?"""
        return self._wanted is not None and self._work.has(self._wanted, self._steps)

    def _state(self) -> Next:
        """Returns what our server should know."""
        return self._asks.model_copy(
            update={
                "session": self._session,
                "heard": self._heard,
                "weights": self._wanted if self._current else None,
                "version": self.version,
                "parts": tuple(sorted(self._out)),
                "uncounted": self._work.uncounted(),
                "forwards": self._work.forwards(),
                "handed": self._handed,
            }
        )

    def _hear(self, answer: Answer) -> None:
        """Make what is into what should be, as our server says."""
        self._heard, self._answered_at, self.over = max(self._heard, answer.number), self._clock.now(), False
        known = dict.fromkeys((*self._servers.known, *answer.servers))
        self._servers.known = tuple(known)[:MAX_SERVERS]  # a server that names nobody else keeps no client
        if answer.version > self.version:
            now = self._clock.now()
            if self.version:
                self.step_s = (now - self._heard_s) / (answer.version - self.version)
            self._heard_s = now
            self.version, self._wanted, self._steps = answer.version, answer.weights, answer.steps
            self._news.set()
        self._settle(answer)
        if not answer.wanted:
            self._copy = None
        for wanted in answer.wanted:
            if wanted.transfer > self._handed:
                self._handed = wanted.transfer
                making = self._tasks.spawn(self._hand_over(wanted), "accumulator")
                self._copy = wanted, making, self._clock.now()

    def _settle(self, said: Answer | Give) -> None:
        """Add what counts to our accumulator, and drop what is of no use."""
        for number in said.gone:
            if (task := self._out.get(number)) is not None:
                task.cancel()
            self._work.forget_forward(number)
        if said.counts or said.gone:
            self._worked = True
            self._tasks.spawn(self._work.settle(said.counts, said.gone), "counted")

    def _first(self, server: PeerId | None) -> tuple[PeerId, ...]:
        """Returns the servers of our stage, ``server`` in front."""
        return tuple(sorted(self._servers.known, key=lambda other: other != server))

    async def _part_from(self, server: PeerId | None, session: int) -> None:
        """Tell ``server`` that we go, if it can be reached."""
        with contextlib.suppress(NetworkError):
            if server is not None:
                await self._servers.call(server, self._asks.model_copy(update={"session": session, "leaves": True}))

    async def _drop(self) -> None:
        """Drop all work, which is of no further use."""
        self._copy = None
        for task in self._out.values():
            task.cancel()
        await self._work.leave()

    async def _serve(self) -> bool:
        """Work for our server. Returns True if we go on at another. Raises PeerUnreachable when our server is gone."""
        home, calls = self._home, self._tasks.spawn(self._call(self._session), "calls")
        assert home is not None  # that we serve
        try:
            while not self._ended:
                self._news.clear()
                if self._home is None:
                    raise PeerUnreachable("the server does without us")
                if self._wanted is not None and not self._current and self.version > self._sits_out:
                    self.moved = self._moves
                    if self._moves:
                        break
                    may_go = self._work.empty or not self._compute.delayed
                    self._servers.worked(home, worked=self._given)
                    to = await self._servers.that_needs_us_more(home, self.version) if may_go else None
                    if to and await self._go_to(to, home):
                        return True
                    await self._take_weights(self._wanted, self._steps)
                else:
                    to = await self._servers.news_or_help(self._news, home, self._idle)
                    if to and await self._go_to(to, home):
                        return True
            return False
        finally:
            calls.cancel()

    def _idle(self) -> bool:
        """Is there nothing to do, and would nothing be lost if we went?"""
        return self._current and not self._out and self._copy is None and self._work.empty

    async def _go_to(self, server: PeerId, home: PeerId) -> bool:
        """Returns False if ``server`` does not take us; if the run has ended, ``home`` tells us."""
        session = self._session
        try:
            await self._enlist_with(server)
        except NetworkError:
            return False
        self._tasks.spawn(self._part_from(home, session), "leaves")
        await self._drop()
        return True

    async def _call(self, session: int) -> None:
        """Call our server again and again. A server that misses two calls is gone if another server answers; otherwise
        we are cut off, and our work stays of use for some seconds (``clients.GONE_S``)."""
        failed = 0
        while (home := self._home) is not None and self._session == session:
            self._calling = asyncio.ensure_future(self._servers.call(home, self._state()))
            (answer,) = await asyncio.gather(self._calling, return_exceptions=True)
            if isinstance(answer, asyncio.CancelledError):  # we have other weights, which the server hears at once
                continue
            if self._session != session or self._home != home:
                return
            if isinstance(answer, Answer):
                failed = 0
                self._hear(answer)
                continue
            if not isinstance(answer, NetworkError):
                raise answer
            failed += 1
            cut_off = self._clock.now() - self._answered_at > CUT_OFF_S
            gone = isinstance(answer, Refused | ProtocolError)
            if gone or (failed > 1 and (cut_off or await self._servers.states(but=home))):
                return self._give_up(session)
            await self._clock.sleep(pause_s(failed, AGAIN_S))

    def _give_up(self, session: int) -> None:
        """Our server is gone, or does not hear us."""
        if session == self._session:
            self._home = None
            self._news.set()

    async def _take_weights(self, digest: bytes, steps: tuple[int, ...]) -> None:
        """Return with our server's weights, or early if other weights are wanted, or if we sit the step out. Raises
        PeerUnreachable."""
        self._work.forget_forwards(steps)
        if not self._rests.takes_part(worked=self._given):
            self._sits_out = self.version
            return
        self._given, version = False, self.version

        def wanted() -> bool:
            return self.version == version and self._home is not None and not self._ended

        values = await self._weights.fetch(digest, lambda: self._first(self._home), wanted)
        if not wanted():
            return
        if values is None:
            raise PeerUnreachable("the weights did not come whole")
        await self._work.load(values, digest, steps)
        if self._calling is not None:
            self._calling.cancel()

    # What comes -------------------------------------------------------------------------------------------------------

    def header(self, kind: str) -> int:
        """See ``network.base.Bounds``."""
        message = FROM_SERVER[kind]
        return 128 + 128 * (message.TENSORS + message.MORE) + message.most()

    async def expect(self, sender: PeerId, frame: Frame) -> None:
        """See ``network.base.Bounds``."""
        frame.message = message = FROM_SERVER[frame.kind].parse(frame)
        if isinstance(message, Give):
            self._work.check(message, frame.tensors)

    async def _on_frame(self, sender: PeerId, frame: Frame) -> None:
        message = FROM_SERVER[frame.kind].parse(frame)
        match message:
            case Ended() if sender in {self._home, *self._servers.known, *self._others}:
                self.over = True
                self._servers.over.add(sender)
                if sender == self._home:
                    self._give_up(self._session)
            case Give() if sender == self._home:
                self._settle(message)
                self._begin(message, frame.tensors)

    # Parts ------------------------------------------------------------------------------------------------------------

    def _begin(self, message: Give, tensors: list[Encoded]) -> None:
        """Compute a part. Raises ProtocolError for more than we take."""
        if len(self._out) >= MAX_ROOM or message.number in self._out:
            raise ProtocolError(f"{message.KIND}: more than {MAX_ROOM} parts, or one twice")
        task = self._tasks.spawn(self._do(message, tensors, self._session), f"part {message.part}")
        self._out[message.number], self._given = task, True
        task.add_done_callback(lambda _: self._out.pop(message.number, None))

    async def _do(self, message: Give, tensors: list[Encoded], session: int) -> None:
        """Compute a part, and send the result."""
        try:
            await self._work.begin_anew(message.step, message.generation)
            answer, sent = await self._work.compute(message, tensors)
        except asyncio.CancelledError:
            if session == self._session and self._home is not None and not self._tasks.closed:
                self._tasks.spawn(self._report(self._work.unable(message, "withdrawn"), [], session), "withdrawn")
            raise
        await self._report(answer, sent, session)

    async def _report(self, answer: Result, tensors: list[Encoded], session: int) -> None:
        """Send an answer to our server, unless the session has changed; also if we are cancelled meanwhile."""
        if session == self._session:
            await asyncio.shield(self._tasks.spawn(self._try_to_send(answer, tensors), answer.KIND))

    async def _try_to_send(self, message: Result, tensors: list[Encoded]) -> None:
        """Send to our server. A server whose stream is lost asks what we have."""
        if self._home is not None:
            with contextlib.suppress(NetworkError):
                frame = message.frame(tensors)
                await self._net.send(self._home, frame, channel=message.CHANNEL, timeout_s=GONE_S)

    async def _hand_over(self, wanted: Wanted) -> StateImage:
        """Returns a copy of the accumulator, which begins anew."""
        return await self._work.hand_over(wanted)

    async def _given_copy(self, taker: PeerId, name: bytes) -> StateImage | None:
        """See ``core.blocks.Reader``: our server takes the accumulator that it wants."""
        if self._copy is None or taker != self._home:
            return None
        wanted, making, begun_at = self._copy
        copy = await asyncio.shield(making)
        self._handed_over_s = self._clock.now() - begun_at
        return copy if name in (wanted.copy_name, copy.digest) else None


class Roaming:
    """Works at one stage after the other. ``servers``: returns the servers of each stage, or raises NoServer; ``make``:
    makes the client of a stage in place of the previous client, or raises MuletrainError. ``fits``: stages whose
    weights this machine can hold; ``stage``: the first stage, or None for a choice; ``byte_s``: seconds for a byte on
    the client's link, until measured; ``stays``: the first stage is the only stage."""

    def __init__(
        self,
        servers: Callable[[], Awaitable[Mapping[int, Sequence[PeerId]]]],
        make: Callable[[int, Mapping[int, Sequence[PeerId]]], Awaitable[Client]],
        net: Network,
        clock: Clock,
        costs: Costs,
        fits: Collection[int],
        stage: int | None,
        draw: random.Random,
        *,
        byte_s: float = 0.0,
        stays: bool = False,
    ) -> None:
        self._servers, self._make, self._net, self._clock = servers, make, net, clock
        self._costs, self._fits, self._first, self._stays, self._draw = costs, fits, stage, stays, draw
        self._byte_s = byte_s

    async def run(self) -> None:
        """Work until the run ends, or the client is stopped. Raises MuletrainError."""
        stage = self._first
        while True:
            servers = await self._servers()
            if stage is None:
                helpers = await self._helpers(servers)
                left = self._costs.left(self._byte_s, self._costs.step_s(helpers))
                stage = stage_to_help(self._costs.work, self._speeds(helpers), self._fits, left)
                assert stage is not None  # a machine without memory for any stage is no client
            client = await self._make(stage, servers)
            looking = asyncio.create_task(self._look_elsewhere(stage, client))
            try:
                await client.run()
            finally:
                looking.cancel()
            if not client.moved:
                return
            stage = looking.result()

    async def _look_elsewhere(self, stage: int, client: Client) -> int | None:
        """Returns the stage that needs ``client`` more, once there is one, and lets the client move; None: there is
        none."""
        unmeasured, version, drawn = set[int](), -1, 0.0
        with contextlib.suppress(NoServer):  # then the client itself has no server
            while not self._stays:
                await self._clock.sleep(LOOK_EVERY_S)
                if client.version < 2:  # in the first step a stage of long parts looks slow until some have come back
                    continue
                helpers, before = await self._helpers(await self._servers()), unmeasured
                unmeasured = {s for s, h in enumerate(helpers) if h.clients and h.speed < IDLE}
                if unmeasured - before:  # such clients may still fetch the weights
                    continue
                if client.version != version:  # clients that decide to move in a step all do so at its end, at once
                    version, drawn = client.version, self._draw.random()
                if client.transfers_s:
                    self._byte_s = client.transfers_s / self._costs.moved[stage]
                work, ours, step_s = self._costs.work, helpers[stage], client.step_s
                left = self._costs.left(self._byte_s, step_s) if step_s else ()
                to = stage_to_move_to(
                    work, self._speeds(helpers), stage, ours.clients, ours.speed * work[stage], self._fits, drawn, left
                )
                if to is not None:
                    client.move()
                    return to
        return None

    async def _helpers(self, servers: Mapping[int, Sequence[PeerId]]) -> list[Helpers]:
        """Returns the clients of each stage."""
        return [await helpers_of(self._net, servers.get(s, ())) for s in range(len(self._costs.work))]

    def _speeds(self, helpers: Sequence[Helpers]) -> list[float]:
        """Returns the work per second of the servers and clients of each stage."""
        return [(h.speed + h.own) * work for h, work in zip(helpers, self._costs.work, strict=True)]
