"""The life of a client, which computes parts of microbatches for one server of its stage at a time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from typing import TYPE_CHECKING

from muletrain.errors import (
    AdmissionError,
    DeadlineExceeded,
    MuletrainError,
    NetworkError,
    PeerUnreachable,
    ProtocolError,
)
from muletrain.policy.deadline import Rests, backoff_s
from muletrain.runtime.pool.messages import (
    FROM_SERVER,
    MAX_ROOM,
    AccumulatorChunk,
    AreYouThere,
    AskAccumulator,
    Begun,
    Contents,
    Counted,
    Ended,
    Enlist,
    Enlisted,
    Give,
    GiveBoth,
    GiveGradient,
    GiveInputs,
    Gone,
    Ready,
    StillThere,
    There,
    WeightsChunk,
    Withdraw,
)
from muletrain.runtime.pool.servers import NoServer, StageServers
from muletrain.runtime.pool.weights import WeightsDownload
from muletrain.runtime.pool.work import Accumulator, PartWork
from muletrain.wire.codec import Encoded, encode

if TYPE_CHECKING:
    from collections.abc import Collection

    from muletrain.clock import Clock
    from muletrain.compute.base import Compute
    from muletrain.network.base import Network, PeerId
    from muletrain.runtime.core.messages import Message
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.core.tasks import Tasks
    from muletrain.wire.frame import Frame

ROOM = 2
"""Parts that a client takes at once: one to compute, one in transfer."""
ALIVE_S = 1.0
"""Seconds between two calls that show the server a live client, and tell the client whether the server counts on it."""
CUT_OFF_S = 10.0
"""Seconds without an answer from any server, after which our server has surely given us up."""
SEND_S = 60.0
"""Seconds for a server to take a message."""
PAUSE_S, PAUSE_MAX_S = 0.2, 5.0
"""Seconds between two tries to find a server, the first time and at most; doubles until the client works for a
server."""
PATIENCE_S = 120.0
"""Seconds without a server, after which a client ends."""


class _Left(MuletrainError):
    """The server is gone, or does without us."""


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
        speed: float = 0.0,
        others: Collection[PeerId] = (),
    ) -> None:
        """``servers``: known servers of the stage; ``speed``: forward passes of a sequence per second; 0: unknown.
        ``others``: servers of other stages, which may report that the run is over."""
        self._net, self._clock, self._tasks, self._compute, self._plan = net, clock, tasks, compute, plan
        self._config, self._name, self._speed = config, name, speed
        self._servers = StageServers(net, clock, tasks, servers)
        self._others = frozenset(others)
        self._home: PeerId | None = None
        self._enlistment, self._enlistments = 0, itertools.count(1)
        self._dismissed = self._ended = self._worked = self._moves = False
        self.moved = False
        """The client left because of ``move``."""
        self._missed = False
        """A message to our server, or from our server, may be lost."""
        self._wanted: bytes | None = None
        """Digest of the server's newest weights."""
        self._steps: tuple[int, ...] = ()
        """The steps that compute with the newest weights; (): all steps."""
        self.version = -1
        """See ``servers.Worker``."""
        self._heard_s, self.step_s = 0.0, 0.0
        """When that version came, and see ``servers.Worker``."""
        self._told = self._sits_out = -1
        """Versions of the weights: reported to our server, and sat out."""
        self._rests, self._given = Rests(random.Random(net.peer_id)), True
        self._news = asyncio.Event()
        self._weights = WeightsDownload(net, compute, plan, tasks)
        self._accumulator = Accumulator(compute)
        self._work = PartWork(compute, plan, self._accumulator)
        self._handing_over, self._handed_over_s = 0, 0.0
        self._out: dict[int, asyncio.Task[None]] = {}
        """Parts that we compute, by number."""
        net.receive(self._on_frame, tuple(FROM_SERVER), self)
        net.serve(AreYouThere.KIND, self._on_question)

    @property
    def over(self) -> bool:
        """Has the run ended, or was this client stopped?"""
        return self._ended

    @property
    def transfers_s(self) -> float:
        """See ``servers.Worker``."""
        return self._weights.took_s + self._handed_over_s

    def stop(self) -> None:
        """Leave in order."""
        self._ended = True
        self._changed()

    def move(self) -> None:
        """Leave in order when the next step begins, so that no computed part is lost."""
        self._moves = True

    def _changed(self) -> None:
        self._news.set()
        self._weights.news.set()

    async def run(self) -> None:
        """Work until the run ends, or ``stop``. Raises NoServer, and the error of any task that failed."""
        main = self._tasks.spawn(self._run(), "client")
        await asyncio.wait({main, self._tasks.failure}, return_when=asyncio.FIRST_COMPLETED)
        if self._tasks.failure.done():
            self._tasks.failure.result()
        await main

    async def _run(self) -> None:
        lost_at, tries = self._clock.now(), 0
        while not self._ended:
            try:
                await self._enlist()
                while await self._serve():
                    pass
                break
            except (_Left, NetworkError):
                tries = 0 if self._worked else tries + 1
                lost_at = lost_at if self._home is None else self._clock.now()
                await self._leave()
            if self._clock.now() - lost_at > PATIENCE_S:
                raise NoServer(f"no server of stage {self._compute.stage} answers for {PATIENCE_S:.0f} s")
            await self._clock.sleep(backoff_s(tries, PAUSE_S, PAUSE_MAX_S))
        if self._home is not None:
            await self._servers.tell(self._home, Gone())
        await self._leave()

    # A server ---------------------------------------------------------------------------------------------------------

    async def _enlist(self) -> None:
        """Find the server of our stage with the greatest need. The weights come while it answers. Raises _Left if none
        answers."""
        for server, state in await self._servers.by_need():
            if not self._work.has(state.weights, state.steps):
                self._weights.begin(state.weights, self._servers.known)
            with contextlib.suppress(NetworkError):
                return await self._enlist_with(server)
        raise _Left("no server answers")

    async def _enlist_with(self, server: PeerId) -> None:
        """Raises NetworkError if the server does not take us; nothing has changed then."""
        number, stage = next(self._enlistments), self._compute.stage
        ask = Enlist(name=self._name, config=self._config, stage=stage, enlistment=number)
        state = Enlisted.unpack(await self._servers.call(server, ask))
        self._home, self._enlistment, self.version, self._told, self._sits_out = server, number, -1, -1, -1
        self._dismissed = self._worked = self._missed = False
        self._heard(state)

    def _heard(self, state: Enlisted | Begun) -> None:
        """Take in our server's report of its weights, unless older than the known report."""
        if isinstance(state, Enlisted) and state.servers and state.servers != self._servers.known:
            self._servers.known = state.servers
            self._weights.ask_again()  # a server that has moved to another stage does not answer
        if state.version > self.version:
            now = self._clock.now()
            if self.version >= 0:
                self.step_s = (now - self._heard_s) / (state.version - self.version)
            self._heard_s = now
            self.version, self._wanted, self._steps = state.version, state.weights, state.steps
            self._changed()

    async def _leave(self) -> None:
        self._home = None
        await self._drop()

    async def _drop(self) -> None:
        """Drop all work, which is of no further use."""
        for task in self._out.values():
            task.cancel()
        await self._accumulator.leave()
        self._work.forget_forwards()

    async def _serve(self) -> bool:
        """Work for our server. Returns True if we go on at another. Raises _Left when our server is gone."""
        home, alive = self._home, self._tasks.spawn(self._show_life(self._enlistment), "alive")
        assert home is not None  # that we serve
        try:
            while not self._ended:
                self._news.clear()
                if self._dismissed:
                    raise _Left("the server does without us")
                current = self._wanted is not None and self._work.has(self._wanted, self._steps)
                if self._wanted is not None and not current and self.version > self._sits_out:
                    self.moved = self._moves
                    if self._moves:
                        break
                    may_go = self._accumulator.empty or not self._compute.delayed
                    to = await self._servers.that_needs_us_more(home, self.version) if may_go else None
                    if to and await self._go_to(to, home):
                        return True
                    await self._take_weights(self._wanted, self._steps)
                elif current and self._wanted is not None and self._told < self.version:
                    self._told = self.version
                    await self._try_to_send(Ready(weights=self._wanted, speed=self._speed, room=ROOM))
                else:
                    to = await self._servers.news_or_help(self._news, home, self._idle)
                    if to and await self._go_to(to, home):
                        return True
            return False
        finally:
            alive.cancel()

    def _idle(self) -> bool:
        """Is there nothing to do, and would nothing be lost if we went?"""
        return self._told == self.version and not self._out and not self._handing_over and self._accumulator.empty

    async def _go_to(self, server: PeerId, home: PeerId) -> bool:
        """Returns False if ``server`` does not take us; if the run has ended, ``home`` tells us."""
        try:
            await self._enlist_with(server)
        except NetworkError:
            return False
        self._tasks.spawn(self._servers.tell(home, Gone()), Gone.KIND)
        await self._drop()
        return True

    async def _show_life(self, enlistment: int) -> None:
        """Call our server every second. A server that misses two answers is gone if another server answers; otherwise
        we are cut off, and our work stays of use for some seconds (``clients.GONE_S``)."""
        failed, answered = 0, self._clock.now()
        while (home := self._home) is not None and self._enlistment == enlistment:
            await self._clock.sleep(ALIVE_S)
            missed = self._missed
            try:
                answer = await self._servers.call(home, StillThere(enlistment=enlistment, missed=missed))
            except (PeerUnreachable, DeadlineExceeded):
                failed, self._missed = failed + 1, True
                cut_off = self._clock.now() - answered > CUT_OFF_S
                if failed < 2 or not (cut_off or await self._servers.states(but=home)):
                    continue
                return self._give_up(enlistment)
            except NetworkError:
                return self._give_up(enlistment)
            failed, answered = 0, self._clock.now()
            if self._enlistment == enlistment:
                self._heard(Enlisted.unpack(answer))
                if missed:
                    self._missed, self._told = False, -1
                    self._weights.ask_again()
                    self._changed()

    def _give_up(self, enlistment: int) -> None:
        """Our server is gone, or does not hear us."""
        if enlistment == self._enlistment:
            self._dismissed = True
            self._changed()

    async def _take_weights(self, digest: bytes, steps: tuple[int, ...]) -> None:
        """Return with our server's weights, or early if other weights are wanted, or if we sit the step out. Raises
        _Left."""
        self._work.forget_forwards(steps)
        if not self._rests.takes_part(worked=self._given):
            self._sits_out = self.version
            return
        self._given = False

        def wanted() -> bool:
            return (self._wanted, self._steps) == (digest, steps) and not (self._dismissed or self._ended)

        values = await self._weights.fetch(digest, lambda: self._servers.known, wanted)
        if not wanted():
            return
        if values is None:
            raise _Left("the weights did not come whole")
        await self._work.load(values, digest, steps)

    async def _send(self, message: Message, tensors: list[Encoded] | None = None) -> None:
        """Send to our server. Raises _Left and NetworkError."""
        if self._home is None:
            raise _Left("there is no server")
        await self._net.send(self._home, message.frame(tensors), channel=message.CHANNEL, timeout_s=SEND_S)

    # What comes -------------------------------------------------------------------------------------------------------

    def header(self, kind: str) -> int:
        """See ``network.base.Bounds``."""
        message = FROM_SERVER[kind]
        return 128 + 128 * (message.TENSORS + message.MORE) + message.most()

    async def expect(self, sender: PeerId, frame: Frame) -> None:
        """See ``network.base.Bounds``."""
        frame.message = message = FROM_SERVER[frame.kind].parse(frame)
        if isinstance(message, WeightsChunk):
            if sender not in self._servers.known:
                raise ProtocolError("weights from a peer that is no server of our stage")
            self._weights.expects(message, frame.tensors[0])
        elif isinstance(message, Give):
            self._work.check(message, frame.tensors)

    async def _on_frame(self, sender: PeerId, frame: Frame) -> None:
        message = FROM_SERVER[frame.kind].parse(frame)
        if isinstance(message, WeightsChunk):
            await self._weights.on_chunk(message, frame.tensors[0])
            return
        if sender != self._home:  # a server that we have left
            knows = sender in self._servers.known or sender in self._others
            ends = isinstance(message, Ended) and message.over and knows
            self._ended |= ends and self._home is None
            return
        match message:
            case Begun():
                self._heard(message)
            case Ended(enlistment=self._enlistment):
                self._ended |= message.over
                self._give_up(message.enlistment)
            case GiveInputs() | GiveGradient() | GiveBoth():
                self._begin(message, frame.tensors)
            case Counted():
                self._worked = True
                await self._accumulator.settle(message.number, counts=message.counts)
            case Withdraw():
                if (task := self._out.get(message.number)) is not None:
                    task.cancel()
                self._work.forget_forward(message.number)
                await self._accumulator.settle(message.number, counts=False)
            case AskAccumulator():
                self._tasks.spawn(self._hand_over(message, self._enlistment), "accumulator")

    async def _on_question(self, sender: PeerId, payload: bytes) -> bytes:
        ask = AreYouThere.unpack(payload)
        if (sender, ask.enlistment) != (self._home, self._enlistment) or self._dismissed:
            raise AdmissionError("this client does not work for this server (any more)")
        return There(parts=tuple(sorted(self._out)), uncounted=self._accumulator.uncounted()).pack()

    # Parts ------------------------------------------------------------------------------------------------------------

    def _begin(self, message: Give, tensors: list[Encoded]) -> None:
        """Compute a part. Raises ProtocolError for more than we take."""
        if len(self._out) >= MAX_ROOM or message.number in self._out:
            raise ProtocolError(f"{message.KIND}: more than {MAX_ROOM} parts, or one twice")
        task = self._tasks.spawn(self._do(message, tensors, self._enlistment), f"part {message.part}")
        self._out[message.number], self._given = task, True
        task.add_done_callback(lambda _: self._out.pop(message.number, None))

    async def _do(self, message: Give, tensors: list[Encoded], enlistment: int) -> None:
        """Compute a part, and send the result."""
        try:
            await self._accumulator.begin_anew(message.step, message.generation)
            answer, sent = await self._work.compute(message, tensors)
        except asyncio.CancelledError:
            if enlistment == self._enlistment and self._home is not None and not self._tasks.closed:
                self._tasks.spawn(self._report(self._work.unable(message, "withdrawn"), [], enlistment), "withdrawn")
            raise
        await self._report(answer, sent, enlistment)

    async def _report(self, answer: Message, tensors: list[Encoded], enlistment: int) -> None:
        """Send an answer to our server, unless the enlistment has changed; also if we are cancelled meanwhile."""
        if enlistment == self._enlistment:
            await asyncio.shield(self._tasks.spawn(self._try_to_send(answer, tensors), answer.KIND))

    async def _try_to_send(self, message: Message, tensors: list[Encoded] | None = None) -> None:
        """Send to our server; after a failure, the server hears that something is missing."""
        try:
            await self._send(message, tensors)
        except NetworkError:
            self._missed = True
        except _Left:  # the message is of no use to another server
            return

    async def _hand_over(self, ask: AskAccumulator, enlistment: int) -> None:
        """Send the accumulator, with all givings that count, and begin anew."""
        self._handing_over += 1
        try:
            gradient, givings = await self._accumulator.hand_over(ask.generation, ask.step, {*ask.givings})
            size, begin = self._plan.chunk, self._clock.now()
            await self._send(Contents(transfer=ask.transfer, givings=tuple(sorted(givings))))
            for chunk in range(-(-len(gradient) // size)):
                part = gradient[chunk * size : (chunk + 1) * size]
                tensor = await self._compute.offload(encode, part, self._plan.gradients)
                if enlistment != self._enlistment:
                    return
                await self._send(AccumulatorChunk(transfer=ask.transfer, chunk=chunk), [tensor])
            self._handed_over_s = self._clock.now() - begin
        except (NetworkError, _Left):
            self._give_up(enlistment)
        finally:
            self._handing_over -= 1
