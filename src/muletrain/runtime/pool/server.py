"""``PooledCompute``: a stage whose work clients do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import torch

from muletrain.compute.base import Microbatch
from muletrain.compute.checks import is_finite
from muletrain.compute.results import Result
from muletrain.compute.slot import AT_ONCE, Turn
from muletrain.compute.wrapped import WrappedCompute
from muletrain.errors import MuletrainError, NetworkError
from muletrain.policy.pool import OWN, Given, Part, Pass, Pool
from muletrain.runtime.pool.accumulators import Accumulators, Lost
from muletrain.runtime.pool.calls import Call
from muletrain.runtime.pool.clients import Clients
from muletrain.runtime.pool.messages import Counted, Finished, Output, Withdraw
from muletrain.runtime.pool.parts import KeptPart, PartsBySteps, computed_part, given_message
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
    from muletrain.runtime.pool.parts import StepParts

R = TypeVar("R")
SEND_S = 60.0
"""Seconds within which a client takes what is sent to it."""
LOOK_S = 1.0
"""Seconds between two looks for clients that are late or silent, at most."""


class PooledCompute(WrappedCompute):
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
        super().__init__(inner)
        self.plan = plan
        self._net, self._clock, self._tasks = net, clock, tasks
        self.pool = Pool()
        self.pool.enlist(OWN)
        self.pool.ready(OWN, 1)
        self._calls: dict[tuple[Pass, int, int], Call] = {}
        self._parts = PartsBySteps()
        self._generation = 0
        """Number of times that accumulators began anew."""
        self._news = asyncio.Event()
        """Set when a gradient that ``gather`` waits for may have come."""
        self.accumulators = Accumulators(self, net, clock)
        self.clients = Clients(self, net, clock, tasks, servers, config, emit)
        tasks.spawn(self._watch(), "pool")

    # Forward and backward -------------------------------------------------------------------------------------------

    async def forward(self, mb: Microbatch, inputs: Tensor, turn: Turn = AT_ONCE) -> Result:
        call = Call(mb, Pass.FORWARD, turn, accumulate=False, sequences=len(inputs), inputs=inputs)
        self._parts.of(mb.step).begin(mb.index)
        self.pool.put(Pass.FORWARD, mb.step, mb.index, len(inputs), self._clock.now())
        return Result(await self._computed(call))

    async def backward(self, mb: Microbatch, grad: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool) -> Result | None:
        parts = self._parts.of(mb.step).of(mb.index)
        if sum(kept.rows for kept in parts.values()) != len(grad):
            raise MuletrainError(f"no forward of microbatch {mb.step}/{mb.index} is kept")
        call = Call(mb, Pass.BACKWARD, turn, accumulate, sequences=len(grad))
        encoded = [await self.offload(encode, grad[f : f + k.rows], self.plan.activations) for f, k in parts.items()]
        for (first, kept), gradient in zip(parts.items(), encoded, strict=True):
            kept.gradient = gradient
            part = Part(Pass.BACKWARD, mb.step, mb.index, first, kept.rows)
            self.pool.put_part(part, self._clock.now(), kept.forward_at)
        output = await self._computed(call)
        return None if self.stage == 0 else Result(output)

    async def loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool
    ) -> tuple[float, Result | None]:
        call = Call(mb, Pass.LOSS, turn, accumulate, sequences=len(inputs), inputs=inputs, targets=targets)
        self._parts.of(mb.step).begin(mb.index)
        self.pool.put(Pass.LOSS, mb.step, mb.index, len(inputs), self._clock.now())
        output = await self._computed(call)
        return call.loss, None if self.stage == 0 else Result(output)

    async def _computed(self, call: Call) -> Tensor:
        """Give out ``call``, whose parts are in the pool, and wait until all are back."""
        key = call.what, call.mb.step, call.mb.index
        self._calls[key] = call
        try:
            self.feed()
            await call.done
        except BaseException:
            self.pool.drop(call.mb.step, call.mb.index, again=call.accumulate)
            self._take_back(call)
            raise
        finally:
            del self._calls[key]
            self.withdraw()
        for mb in call.own:
            self.inner.count(mb)
        return torch.empty(0) if call.output is None else call.output

    def _take_back(self, call: Call) -> None:
        """The microbatch does not count, though gradients of its parts were accumulated: what contains them is of no
        use."""
        parts = self._parts.steps.get(call.mb.step)
        for worker in sorted(parts.take_back(call.places)) if parts is not None else ():
            self.lose(worker, "a microbatch was given up after a part of it was accumulated")
        for mb in call.own:
            self.inner.discard(mb)

    def discard(self, mb: Microbatch) -> None:
        self.pool.drop(mb.step, mb.index)
        self.withdraw()
        if mb.step in self._parts.steps:
            self._through(self._parts.steps[mb.step], mb.step, mb.index)

    def _through(self, parts: StepParts, step: int, index: int) -> None:
        """A microbatch passes through no more."""
        for first, kept in parts.of(index).items():
            if kept.forward_at == OWN:
                self.inner.discard(Microbatch(step, index, first, self.plan.sequences))
        parts.through(index)

    # Giving out -----------------------------------------------------------------------------------------------------

    def feed(self) -> None:
        """Give parts to all workers that have room."""
        for worker in (*self.pool.workers(), OWN):
            while (given := self.pool.take(worker, self._clock.now())) is not None:
                self._give(worker, given)

    def _give(self, worker: PeerId, given: Given) -> None:
        part = given.part
        call = self._calls.get((part.what, part.step, part.index))
        if call is not None and not call.begun:
            call.begun = True
            try:
                call.turn.begins()
            except MuletrainError as e:
                self.pool.failed(worker, given.number, self._clock.now())
                self.pool.drop(part.step, part.index, again=False)
                call.fail(e)
                return
        accumulate = part.what is Pass.AGAIN or (call is not None and call.accumulate)
        work = self._compute(given, accumulate) if worker == OWN else self._send(worker, given, accumulate)
        self._tasks.spawn(work, f"part {part}")

    async def _prepared(self, part: Part) -> KeptPart | None:
        """Returns from what ``part`` is computed; None: it is no longer wanted."""
        call = self._calls.get((part.what, part.step, part.index))
        if (kept := self._parts.find(part)) is not None or call is None or call.inputs is None or call.done.done():
            return kept
        rows = slice(part.first, part.first + part.rows)
        inputs, targets = call.inputs[rows], None if call.targets is None else encode_ids(call.targets[rows])
        sent = encode_ids(inputs) if self.stage == 0 else await self.offload(encode, inputs, self.plan.activations)
        if call.done.done():
            return None
        kept = self._parts.find(part) or KeptPart(part.rows, sent, targets)
        self._parts.of(part.step).keep(part, kept)
        return kept

    async def _send(self, worker: PeerId, given: Given, accumulate: bool) -> None:
        """Give a part to a client."""
        kept, generation = await self._prepared(given.part), self._generation
        if kept is None:
            self.pool.failed(worker, given.number, self._clock.now())
            return
        message, tensors = given_message(
            given, kept, kept.forward_at == worker, generation, self.plan.sequences, accumulate=accumulate
        )
        try:
            await self._net.send(worker, message.frame(tensors), channel=message.CHANNEL, timeout_s=SEND_S)
        except NetworkError as e:
            self.lose(worker, str(e))

    async def _compute(self, given: Given, accumulate: bool) -> None:
        """Compute a part here."""
        part, kept = given.part, await self._prepared(given.part)
        mb = Microbatch(part.step, part.index, part.first, self.plan.sequences)
        try:
            if kept is None:
                raise MuletrainError("it is no longer wanted")
            if part.what is Pass.AGAIN:
                self._parts.of(part.step).forward_lost(OWN, part)
            loss, values = await computed_part(self.inner, mb, part, kept, accumulate=accumulate)
        except (
            MuletrainError,
            KeyError,
        ) as e:  # KeyError: the microbatch was given up meanwhile, and its forward dropped
            self.pool.failed(OWN, given.number, self._clock.now())
            if (call := self._calls.get((part.what, part.step, part.index))) is not None:
                call.fail(MuletrainError(str(e)))
            self.feed()
            return
        self._came_back(OWN, given.number, part, accumulate, loss, values)
        self.feed()

    # Coming back ----------------------------------------------------------------------------------------------------

    def _came_back(
        self, worker: PeerId, number: int, part: Part, accumulate: bool, loss: float, values: Tensor | None
    ) -> bool:
        """Take the result of a giving. Returns whether its gradient counts: then it is in the accumulator of
        ``worker``."""
        kept = self._parts.find(part)
        counts = self.pool.done(worker, number, self._clock.now()) and kept is not None
        self.withdraw()
        call = self._calls.get((part.what, part.step, part.index))
        mb = Microbatch(part.step, part.index, part.first, self.plan.sequences)
        if not counts or kept is None or (call is None and part.what is not Pass.AGAIN):
            if worker == OWN and accumulate:
                self.inner.discard(mb)
            return False
        self.clients.did_part(worker)
        if part.what is Pass.FORWARD:
            kept.forward_at = worker
        elif accumulate:
            self._accumulated(worker, number, part, kept, call)
        if call is not None:
            call.fill(part, loss, values)
        return accumulate

    def _accumulated(self, worker: PeerId, number: int, part: Part, kept: KeptPart, call: Call | None) -> None:
        """Note where the gradient of ``part`` is."""
        mb = Microbatch(part.step, part.index, part.first, self.plan.sequences)
        if worker != OWN:
            self._parts.of(part.step).accumulated(part, kept, worker, number)
            if call is not None:
                call.places.append((part.index, part.first))
        elif call is not None:
            call.own.append(mb)
        else:
            self.inner.count(mb)
            self._parts.of(part.step).computed_here(part)
        self._news.set()

    async def on_result(self, worker: PeerId, message: Output | Finished, tensor: Encoded | None) -> None:
        """A client brings back a part. If there is a gradient to add, it is told whether it counts."""
        values = None if tensor is None else await self.offload(decode, tensor)
        fine = values is None or await self.offload(is_finite, values)
        if (part := self.pool.part(worker, message.number)) is None:
            return  # it was taken back meanwhile
        call = self._calls.get((part.what, part.step, part.index))
        accumulate = part.what is Pass.AGAIN or (call is not None and call.accumulate)
        counts = False
        if fine:
            counts = self._came_back(worker, message.number, part, accumulate, message.loss, values)
        else:
            self.on_unable(worker, message.number)
        if part.what is not Pass.FORWARD:
            self.clients.tell(worker, Counted(number=message.number, counts=counts))
        self.feed()

    def on_unable(self, worker: PeerId, number: int) -> None:
        """A client did not compute a part: others may, and not from its forward."""
        part = self.pool.part(worker, number)
        self.pool.failed(worker, number, self._clock.now())
        if part is not None and part.step in self._parts.steps:
            self._parts.steps[part.step].forward_lost(worker, part)
        self.feed()

    def withdraw(self) -> None:
        """Tell clients what they need not compute any more."""
        for worker, number in self.pool.unwanted():
            if worker != OWN:
                self.clients.tell(worker, Withdraw(number=number))

    def lose(self, worker: PeerId, why: str, *, again_at: PeerId | None = None) -> None:
        """``worker`` is gone, with everything that it had. ``again_at``: who computes again what it had accumulated."""
        self.pool.lost(worker, self._clock.now())
        lost = self._parts.lost(worker)
        for part in lost:
            self.pool.put_part(part, self._clock.now(), again_at)
        self.accumulators.lose(worker)
        self.clients.gone(worker, why, len(lost))
        self._news.set()
        self.feed()

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
        parts = self._parts.of(step)
        while not parts.complete:
            self._news.clear()
            holders = sorted(parts.holders())
            await asyncio.gather(*(self._take_over(worker, step) for worker in holders))
            if not holders:
                await self._news.wait()  # what was lost is computed again
        await self.inner.gather(step)

    def holds(self, client: PeerId, step: int) -> set[int]:
        """See ``accumulators.Receiver``."""
        return self._parts.steps[step].holders().get(client, set()) if step in self._parts.steps else set()

    async def _take_over(self, worker: PeerId, step: int) -> None:
        """Add a client's accumulator to ours; if it does not come, its parts are computed again."""
        generation = self._generation
        try:
            values, numbers = await self.accumulators.fetch(worker, generation, step)
        except Lost as e:
            self.lose(worker, str(e), again_at=OWN if e.here else None)
            return
        if generation == self._generation and numbers == self.holds(worker, step):
            self.inner.add(step, values)
            self._parts.of(step).arrived(worker, numbers)
        else:
            self.lose(worker, "its accumulator changed while it came")

    async def apply(self, gradient: Tensor, update: Update, turn: Turn = AT_ONCE) -> None:
        turn.begins()
        self._end_step(update.step)
        self._close()
        await self.inner.apply(gradient, update)
        self.clients.report(update.step + 1)

    def clear(self, step: int) -> None:
        """What passes through goes on; its gradients are accumulated anew."""
        self._generation += 1
        self.pool.drop_again(step)
        for call in [c for c in self._calls.values() if c.mb.step == step and c.accumulate]:
            call.fail(MuletrainError(f"the accumulator of step {step} was emptied"))
        if step in self._parts.steps:
            self._parts.steps[step].forget_gradients()
        self.withdraw()
        self.inner.clear(step)

    def _end_step(self, step: int) -> None:
        """Nothing of ``step`` is computed any more."""
        self._generation += 1
        self.pool.drop(step)
        self.withdraw()
        for call in [c for c in self._calls.values() if c.mb.step == step]:
            call.fail(MuletrainError(f"step {step} is over"))
        if (parts := self._parts.steps.pop(step, None)) is not None:
            for index in parts.indices():
                self._through(parts, step, index)

    def _close(self) -> None:
        """The weights change: clients compute nothing until they have the new ones (``digest``)."""
        self.pool.rest(self._clock.now())
        self.clients.close()

    # The state ------------------------------------------------------------------------------------------------------

    async def digest(self) -> bytes:
        digest = await self.inner.digest()
        self.clients.begin(digest)
        return digest

    async def load_weights(self, weights: Tensor) -> None:
        self._close()
        await self.inner.load_weights(weights)

    async def load_state(self, state: dict[str, Tensor]) -> None:
        self._close()
        for step in list(self._parts.steps):
            self._end_step(step)
        await self.inner.load_state(state)

    async def end(self, *, over: bool) -> None:
        await self.clients.end(over=over)
