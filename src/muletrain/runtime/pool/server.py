"""``PooledCompute``: a stage whose work clients do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from muletrain.compute.base import Microbatch
from muletrain.compute.results import Result
from muletrain.compute.slot import AT_ONCE, Turn
from muletrain.errors import MuletrainError, NetworkError
from muletrain.policy.pool import OWN, Part, Pass, Pool
from muletrain.runtime.pool.clients import Clients
from muletrain.runtime.pool.handover import HandedOver, Lost
from muletrain.runtime.pool.kept import KeptPart, KeptParts
from muletrain.runtime.pool.messages import Counted, Finished, GiveBoth, GiveGradient, GiveInputs, Output, Withdraw
from muletrain.wire.codec import Encoded, decode, encode, encode_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from muletrain.clock import Clock
    from muletrain.compute.base import Compute, Update
    from muletrain.events import Event
    from muletrain.network.base import Network, PeerId
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.core.tasks import Tasks
    from muletrain.runtime.pool.clients import Servers

R = TypeVar("R")
SEND_S = 60.0
"""Seconds within which a client takes what is sent to it."""
LOOK_S = 1.0
"""Seconds between two looks for clients that are late or silent, at most."""


@dataclass
class _Call:
    """A pass of a microbatch that the stage server waits for. ``left``: sequences that are not back."""

    mb: Microbatch
    what: Pass
    turn: Turn
    accumulate: bool
    left: int
    inputs: Tensor | None = None
    targets: Tensor | None = None
    begun: bool = False
    loss: float = 0.0
    output: Tensor | None = None
    own: list[Microbatch] = field(default_factory=list)
    """Parts that were computed here. They count once the whole microbatch does."""
    done: asyncio.Future[None] = field(default_factory=asyncio.Future)

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class PooledCompute:
    """See ``Compute``. ``inner`` holds the stage and updates it; it computes only when no client does.

    A microbatch's gradient counts as accumulated when each of its parts is in some client's accumulator. ``gather``
    brings these here, and has computed again what was lost with a client, so no other machine hears of that.
    """

    def __init__(
        self,
        inner: Compute,
        net: Network,
        clock: Clock,
        tasks: Tasks,
        plan: Plan,
        servers: Servers,
        config: bytes,
        emit: Callable[[Event], None],
    ) -> None:
        """``config``: digest of the run's configuration."""
        self.stage, self.stages, self.n_params = inner.stage, inner.stages, inner.n_params
        self.delayed, self.jobs = inner.delayed, inner.jobs
        self.inner, self.plan = inner, plan
        self._net, self._clock, self._tasks = net, clock, tasks
        self.pool = Pool()
        self.pool.enlist(OWN, 0.0, 1)
        self._calls: dict[tuple[Pass, int, int], _Call] = {}
        self._kept: dict[int, KeptParts] = {}
        self.generation = 0
        self._changed = asyncio.Event()
        """Set when a part of ``Pass.AGAIN`` is done, or a client is lost."""
        self.clients = Clients(self, net, clock, tasks, servers, config, emit)
        self.handed_over = HandedOver(self, net, clock)
        self.clients.open(self.handed_over)
        tasks.spawn(self._watch(), "pool")

    # Forward and backward -------------------------------------------------------------------------------------------

    async def forward(self, mb: Microbatch, inputs: Tensor, turn: Turn = AT_ONCE) -> Result:
        call = _Call(mb, Pass.FORWARD, turn, accumulate=False, left=len(inputs), inputs=inputs)
        self._of(mb.step).begin(mb.index)
        self.pool.put(Pass.FORWARD, mb.step, mb.index, len(inputs))
        return Result(await self._computed(call))

    async def backward(self, mb: Microbatch, grad: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool) -> Result | None:
        cut = self._of(mb.step).cut(mb.index)
        if not cut:
            raise KeyError(f"no forward of microbatch {mb.step}/{mb.index} is kept")
        for first, kept in cut.items():
            kept.gradient = await self.offload(encode, grad[first : first + kept.rows], self.plan.activations)
        call = _Call(mb, Pass.BACKWARD, turn, accumulate, left=len(grad))
        for first, kept in cut.items():
            self.pool.put_part(Part(Pass.BACKWARD, mb.step, mb.index, first, kept.rows), kept.forward_at)
        output = await self._computed(call)
        return None if self.stage == 0 else Result(output)

    async def loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool
    ) -> tuple[float, Result | None]:
        call = _Call(mb, Pass.LOSS, turn, accumulate, left=len(inputs), inputs=inputs, targets=targets)
        self._of(mb.step).begin(mb.index)
        self.pool.put(Pass.LOSS, mb.step, mb.index, len(inputs))
        output = await self._computed(call)
        return call.loss, None if self.stage == 0 else Result(output)

    async def _computed(self, call: _Call) -> Tensor:
        """Give out ``call``, whose parts are in the pool, and wait until all are back."""
        key = call.what, call.mb.step, call.mb.index
        self._calls[key] = call
        try:
            self.feed()
            await call.done
        except BaseException:
            self._withdraw(self.pool.drop(call.mb.step, call.mb.index))
            self._revoke(call)
            raise
        finally:
            del self._calls[key]
        for mb in call.own:
            self.inner.count(mb)
            self._of(mb.step).arrived([(mb.index, mb.first)])
        return torch.empty(0) if call.output is None else call.output

    def _revoke(self, call: _Call) -> None:
        """The microbatch does not count, though gradients of its parts may be in accumulators: these are of no use."""
        if (kept := self._kept.get(call.mb.step)) is not None:
            for worker in kept.take_back(call.mb.index) - {OWN}:
                self.lose(worker, "a microbatch was given up after it had accumulated a part of it")
        for mb in call.own:
            self.inner.discard(mb)

    def discard(self, mb: Microbatch) -> None:
        self._withdraw(self.pool.drop(mb.step, mb.index))
        if mb.step in self._kept:
            for first in self._kept[mb.step].cut(mb.index):
                self.inner.discard(Microbatch(mb.step, mb.index, first, self.plan.sequences))
            self._kept[mb.step].through(mb.index)

    def _of(self, step: int) -> KeptParts:
        return self._kept.setdefault(step, KeptParts())

    # Giving out -----------------------------------------------------------------------------------------------------

    def feed(self) -> None:
        """Give parts to all workers that have room."""
        now = self._clock.now()
        for worker in self.pool.workers():
            while (part := self.pool.take(worker, now)) is not None:
                self._give(worker, part)

    def _give(self, worker: PeerId, part: Part) -> None:
        call = self._calls.get((part.what, part.step, part.index))
        if call is not None and not call.begun:
            call.begun = True
            try:
                call.turn.begins()
            except MuletrainError as e:
                call.fail(e)
                self.pool.failed(worker, part)
                self._withdraw(self.pool.drop(part.step, part.index))
                return
        work = self._compute(part, call) if worker == OWN else self._send(worker, part, call)
        self._tasks.spawn(work, f"part {part}")

    async def _prepare(self, part: Part, call: _Call | None) -> KeptPart | None:
        """Returns what ``part`` is computed from; None: it is no longer wanted."""
        kept = self._of(part.step)
        if (found := kept.find(part)) is None and call is not None and call.inputs is not None:
            rows = slice(part.first, part.first + part.rows)
            inputs, targets = call.inputs[rows], None if call.targets is None else encode_ids(call.targets[rows])
            ids = self.stage == 0
            sent = encode_ids(inputs) if ids else await self.offload(encode, inputs, self.plan.activations)
            if call.done.done():
                return None
            kept.keep(part, sent, targets)
            found = kept.find(part)
        return found

    async def _send(self, worker: PeerId, part: Part, call: _Call | None) -> None:
        """Give ``part`` to a client."""
        generation = self.generation
        kept = await self._prepare(part, call)
        if kept is None:
            self.pool.failed(worker, part)
            return
        about = {**part._asdict(), "generation": generation, "whole": self.plan.sequences}
        accumulate = call is None or call.accumulate
        message: GiveInputs | GiveGradient | GiveBoth
        if part.what is Pass.FORWARD:
            message, tensors = GiveInputs(**about), [kept.inputs]
        elif part.what is Pass.BACKWARD and kept.forward_at == worker:
            assert kept.gradient is not None  # put in with it
            message, tensors = GiveGradient(**about, accumulate=accumulate), [kept.gradient]
        else:
            other = kept.gradient if kept.targets is None else kept.targets
            assert other is not None
            message, tensors = GiveBoth(**about, accumulate=accumulate), [kept.inputs, other]
        try:
            await self._net.send(worker, message.frame(tensors), channel=message.CHANNEL, timeout_s=SEND_S)
        except NetworkError as e:
            self.lose(worker, str(e))

    async def _compute(self, part: Part, call: _Call | None) -> None:
        """Compute ``part`` here."""
        mb = Microbatch(part.step, part.index, part.first, self.plan.sequences)
        accumulate = part.what is not Pass.FORWARD and (call is None or call.accumulate)
        kept = await self._prepare(part, call)
        try:
            if kept is None:
                raise MuletrainError("it is no longer wanted")
            loss, values = await self._result(mb, part, kept, accumulate=accumulate)
        except MuletrainError as e:
            self.pool.failed(OWN, part)
            if call is not None:
                call.fail(e)
            return
        if not self._count(OWN, part, call):
            self.inner.discard(mb)
        elif accumulate and call is not None:
            call.own.append(mb)
        elif accumulate:
            self.inner.count(mb)
            self._of(part.step).arrived([(part.index, part.first)])
        self._fill(part, call, loss, values)
        self.feed()

    async def _result(
        self, mb: Microbatch, part: Part, kept: KeptPart, *, accumulate: bool
    ) -> tuple[float, Tensor | None]:
        """Returns the loss and the output of ``part``, computed here. Raises MuletrainError."""
        inner, loss, output = self.inner, 0.0, None
        inputs = await self.offload(decode, kept.inputs)
        if part.what is Pass.FORWARD:
            output = await inner.forward(mb, inputs)
        elif kept.targets is not None:
            loss, output = await inner.loss_backward(mb, inputs, decode(kept.targets), accumulate=accumulate)
        else:
            assert kept.gradient is not None  # put in with it
            if part.what is Pass.AGAIN or kept.forward_at != OWN:
                inner.discard(mb)
                await inner.forward(mb, inputs)
            output = await inner.backward(mb, await self.offload(decode, kept.gradient), accumulate=accumulate)
        return loss, None if output is None or part.what is Pass.AGAIN else await output

    # Coming back ----------------------------------------------------------------------------------------------------

    def _count(self, worker: PeerId, part: Part, call: _Call | None) -> bool:
        """Returns whether the result of ``part`` by ``worker`` counts, and notes where its gradient is then."""
        counts = self.pool.done(worker, part, self._clock.now())
        kept = self._of(part.step).find(part)
        if not counts or kept is None:
            return False
        if part.what is Pass.FORWARD:
            kept.forward_at = worker
        elif call is None or call.accumulate:
            self._of(part.step).accumulated(part, worker)
        if part.what is Pass.AGAIN:
            self._changed.set()
        return True

    def _fill(self, part: Part, call: _Call | None, loss: float, values: Tensor | None) -> None:
        """Take the result of ``part``, which counts."""
        if call is None or call.done.done():
            return
        if values is not None:
            if call.output is None:
                call.output = torch.empty(self.plan.sequences, *values.shape[1:])
            call.output[part.first : part.first + part.rows] = values
        call.loss += loss
        call.left -= part.rows
        if call.left == 0:
            call.done.set_result(None)

    async def on_result(self, worker: PeerId, message: Output | Finished, tensor: Encoded | None) -> None:
        """A client brings back a part. The client is told whether it counts, if there is a gradient to add."""
        part = message.part
        call = self._calls.get((part.what, part.step, part.index))
        accumulates = part.what is not Pass.FORWARD and (call is None or call.accumulate)
        values = None if tensor is None else await self.offload(decode, tensor)
        counts = message.generation == self.generation and self._count(worker, part, call)
        if accumulates:
            about = {**part._asdict(), "generation": message.generation}
            self.clients.tell(worker, Counted(**about, counts=counts))
        if counts:
            self._fill(part, call, message.loss, values)
        self.feed()

    def on_unable(self, worker: PeerId, part: Part) -> None:
        self.pool.failed(worker, part)
        self.feed()

    def lose(self, worker: PeerId, why: str) -> None:
        """``worker`` is gone, with everything that it had."""
        self.pool.lost(worker)
        parts = 0
        for step, kept in self._kept.items():
            for index, first, rows in kept.lost(worker):
                parts += 1
                self.pool.put_part(Part(Pass.AGAIN, step, index, first, rows))
        self.handed_over.lose(worker)
        self.clients.gone(worker, why, parts)
        self._changed.set()
        self.feed()

    def _withdraw(self, given: list[tuple[PeerId, Part]]) -> None:
        for worker, part in given:
            if worker != OWN:
                self.clients.tell(worker, Withdraw(**part._asdict(), generation=self.generation))

    async def _watch(self) -> None:
        """Let others do what clients do not bring back."""
        while True:
            now = self._clock.now()
            await self._clock.sleep(min(LOOK_S, max(0.01, self.pool.next_due() - now)))
            self.clients.late(self.pool.expire(self._clock.now()))
            for worker in self.clients.silent():
                self.lose(worker, "it is silent")
            self.feed()

    # The accumulator and the step -----------------------------------------------------------------------------------

    async def gather(self, step: int) -> None:
        kept = self._of(step)
        while not kept.complete:
            self._changed.clear()
            holders = kept.holders()
            await asyncio.gather(*(self._take_over(worker, step, holders[worker]) for worker in sorted(holders)))
            if not holders:
                await self._changed.wait()
        await self.inner.gather(step)

    async def _take_over(self, worker: PeerId, step: int, places: set[tuple[int, int]]) -> None:
        """Add a client's accumulator to ours; if it does not come, its parts are computed again."""
        try:
            values, came = await self.handed_over.ask(worker, self.generation, step, places)
        except Lost as e:
            self.lose(worker, str(e))
            return
        kept = self._of(step)
        if missing := places - came:
            self.lose(worker, f"{len(missing)} parts are missing in its accumulator")
            return
        self.inner.add(step, values)
        kept.arrived(came)

    async def gradient(self, step: int) -> Tensor:
        return await self.inner.gradient(step)

    async def apply(self, gradient: Tensor, update: Update, turn: Turn = AT_ONCE) -> None:
        turn.begins()
        self._drop(update.step)
        await self.inner.apply(gradient, update)

    def clear(self, step: int) -> None:
        self._drop(step)
        self.inner.clear(step)

    def _drop(self, step: int) -> None:
        """Nothing that was given out for ``step`` counts any more."""
        self.generation += 1
        self._withdraw(self.pool.drop(step))
        self._kept.pop(step, None)
        for call in [c for c in self._calls.values() if c.mb.step == step]:
            call.fail(MuletrainError(f"step {step} is over, or begins again"))

    def count(self, mb: Microbatch) -> None:
        self.inner.count(mb)

    def add(self, step: int, gradient: Tensor) -> None:
        self.inner.add(step, gradient)

    # The state ------------------------------------------------------------------------------------------------------

    async def digest(self) -> bytes:
        digest = await self.inner.digest()
        await self.clients.begin(digest)
        return digest

    async def copied_weights(self) -> Tensor:
        return await self.inner.copied_weights()

    async def load_weights(self, weights: Tensor) -> None:
        await self.inner.load_weights(weights)

    async def state(self) -> dict[str, Tensor]:
        return await self.inner.state()

    async def load_state(self, state: dict[str, Tensor]) -> None:
        self.generation += 1
        await self.inner.load_state(state)

    async def offload(self, fn: Callable[..., R], *args: Any) -> R:
        return await self.inner.offload(fn, *args)

    async def end(self, *, over: bool) -> None:
        await self.clients.end(over=over)

    def close(self) -> None:
        self.inner.close()
