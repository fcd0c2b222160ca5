"""``PartsDesk`` gives parts of microbatches to clients, and takes back the results."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from muletrain.compute.base import Microbatch
from muletrain.compute.checks import is_finite, weighed
from muletrain.errors import MuletrainError, NetworkError
from muletrain.optim.sketch import unpacked
from muletrain.policy.passes import LAST, Given, Part, Pass
from muletrain.policy.pool import OWN
from muletrain.runtime.core.times import GONE_S
from muletrain.runtime.pool.accumulators import Accumulators
from muletrain.runtime.pool.checks import Checks, checked_sketches
from muletrain.runtime.pool.clients import Clients
from muletrain.runtime.pool.messages import Give
from muletrain.runtime.pool.parts import KeptPart, computed_part
from muletrain.wire.codec import Encoded, decode, encode, encode_samples

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from torch import Tensor

    from muletrain.compute.base import Compute
    from muletrain.compute.slot import Turn
    from muletrain.config.schema import Codec
    from muletrain.events import Event
    from muletrain.network.base import PeerId
    from muletrain.optim.sketch import Sketch
    from muletrain.runtime.core.blocks import Blocks
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.core.tasks import Tasks
    from muletrain.runtime.pool.messages import Result

LOOK_S = 1.0
"""Most seconds between two checks for late or silent clients."""


@dataclass
class Call:
    """A pass of a microbatch of ``sequences`` sequences that the stage server waits for. ``own``: parts
    computed here, which count once the whole microbatch does."""

    mb: Microbatch
    what: Pass
    turn: Turn
    accumulate: bool
    sequences: int
    inputs: Tensor | None = None
    targets: Tensor | None = None
    positions: Tensor | None = None
    begun: bool = False
    loss: float = 0.0
    output: Tensor | None = None
    own: list[Microbatch] = field(default_factory=list)
    done: asyncio.Future[None] = field(default_factory=asyncio.Future)

    @property
    def key(self) -> tuple[Pass, int, int]:
        return self.what, self.mb.step, self.mb.index

    def __post_init__(self) -> None:
        self._left = self.sequences

    async def cut(self, part: Part, compute: Compute, codec: Codec) -> KeptPart:
        """Returns the inputs of ``part``."""
        assert self.inputs is not None  # a backward is cut as the forward was
        rows = slice(part.first, part.first + part.rows)
        inputs = self.inputs[rows]
        targets, positions = (None if x is None else encode_samples(x[rows]) for x in (self.targets, self.positions))
        sent = encode_samples(inputs) if compute.stage == 0 else await compute.offload(encode, inputs, codec)
        return KeptPart(part.rows, sent, targets, positions)

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def fill(self, part: Part, loss: float, values: Tensor | None) -> None:
        """Take the result of ``part``: the share of the loss, and the output [rows, T, D], if any."""
        if self.done.done():
            return
        if values is not None:
            if self.output is None:
                self.output = torch.empty(self.sequences, *values.shape[1:])
            self.output[part.first : part.first + part.rows] = values
        self.loss += loss
        self._left -= part.rows
        if self._left == 0:
            self.done.set_result(None)


class PartsDesk:
    """Has the passes of one stage computed. ``inner`` computes the server's own share.

    A microbatch's gradient counts as accumulated when each of its parts is in some client's accumulator.
    ``accumulators`` brings the gradients here. Gradients lost with a client are computed again, unnoticed by other
    machines.
    """

    def __init__(
        self,
        inner: Compute,
        blocks: Blocks,
        tasks: Tasks,
        plan: Plan,
        servers: Callable[[int], tuple[PeerId, ...]],
        config: bytes,
        emit: Callable[[Event], None],
        rng: random.Random,
    ) -> None:
        """``blocks``: of this process; ``servers``: see ``Clients``; ``config``: digest of the run's configuration;
        ``rng``: draws the results to check."""
        self.plan, self.inner = plan, inner
        self._net, self._clock, self._tasks = blocks.net, blocks.clock, tasks
        self._calls: dict[tuple[Pass, int, int], Call] = {}
        """The calls under way."""
        self._steps = set[int]()
        self._own: dict[asyncio.Task[None], Given] = {}
        """Parts that the server's own device computes now."""
        self.clients = clients = Clients(inner, plan, blocks, tasks, servers, config, emit, self.feed, self._on_result)
        self.pool, self.parts = clients.pool, clients.parts
        self._checks = Checks(clients, blocks.clock, plan.verify, rng)
        self.accumulators = Accumulators(clients, self._checks, self._unsettled, blocks, tasks)
        tasks.spawn(self._watch(), "pool")

    # Passes ---------------------------------------------------------------------------------------------------------

    def kept_sequences(self, mb: Microbatch) -> int:
        """Returns the number of sequences of a microbatch whose forward is known."""
        return sum(kept.rows for kept in self.parts.of(mb).values())

    async def computed(self, call: Call, grad: Tensor | None = None) -> Tensor:
        """Give out ``call``, and wait until all parts are back. ``grad``: of the outputs, for a backward."""
        self._calls[call.key] = call
        self._steps.add(call.mb.step)
        try:
            if grad is None:
                self.parts.begin(call.mb)
                self.pool.put(*call.key, call.sequences, self._clock.now())
            else:
                await self._put_backward(call, grad)
            self.feed()
            await call.done
        except BaseException:
            self.pool.drop(call.mb.step, call.mb.index, again=call.accumulate)
            self._take_back(call)
            raise
        finally:
            del self._calls[call.key]
            self.clients.withdraw()
            self.clients.news.set()
        for mb in call.own:
            self.inner.count(mb)
        return torch.empty(0) if call.output is None else call.output

    async def _put_backward(self, call: Call, grad: Tensor) -> None:
        """Put the parts of a backward into the pool, cut as in the forward."""
        kept, mb = self.parts.of(call.mb), call.mb
        encoded = [
            await self.inner.offload(encode, grad[f : f + k.rows], self.plan.activations) for f, k in kept.items()
        ]
        if call.done.done() or any(self.parts.of(mb).get(f) is not k for f, k in kept.items()):
            raise MuletrainError("the microbatch was given up")
        for (first, part), gradient in zip(kept.items(), encoded, strict=True):
            part.gradient = gradient
            what = Part(Pass.BACKWARD, mb.step, mb.index, first, part.rows)
            self.pool.put_part(what, self._clock.now(), part.forward_at)

    def _take_back(self, call: Call) -> None:
        """The microbatch does not count, though gradients of its parts were accumulated: the accumulators are of no
        use."""
        taken = self.parts.take_back(call.mb) if call.accumulate else set()
        for worker in sorted(taken):
            self.clients.lose(worker, "a microbatch was given up after a part of it was accumulated", lapse=False)
        for mb in call.own:
            self.inner.discard(mb)

    def discard(self, mb: Microbatch) -> None:
        """See ``Compute``."""
        self.pool.drop(mb.step, mb.index)
        self._checks.forget_microbatch(mb.step, mb.index)
        self.clients.withdraw()
        self.parts.through(Microbatch(mb.step, mb.index, 0, self.plan.sequences), self.inner)

    def forget_gradients(self, step: int) -> None:
        """Passes in progress go on, but gradients are accumulated anew."""
        self.accumulators.begin_anew(step)
        self.pool.drop_again(step)
        self._checks.forget(step)
        for call in [c for c in self._calls_of(step) if c.accumulate]:
            call.fail(MuletrainError(f"the accumulator of step {step} was emptied"))
        self.parts.forget_gradients(step)
        self.clients.withdraw()

    def end_step(self, step: int) -> None:
        """Nothing of ``step`` is computed any more."""
        self.accumulators.begin_anew(step)
        self.pool.drop(step)
        for task in [task for task, given in self._own.items() if given.part.step == step]:
            task.cancel()  # a backward must have the weights of its forward
        self._checks.forget(step)
        self.clients.withdraw()
        for call in self._calls_of(step):
            call.fail(MuletrainError(f"step {step} is over"))
        self.parts.end(step, self.inner, self.plan.sequences)
        self._steps.discard(step)

    def close(self, *, rest: bool = True) -> None:
        """The weights change. ``rest``: for all steps, and clients compute nothing until they have the new weights
        (``digest``)."""
        if rest:
            for step in list(self._steps):
                self.end_step(step)
            self.pool.rest(self._clock.now())
        self.clients.close()

    def _call_of(self, part: Part) -> Call | None:
        """Returns the call that waits for ``part``; None: no call does."""
        return self._calls.get((part.what, part.step, part.index))

    def _calls_of(self, step: int) -> list[Call]:
        return [call for call in self._calls.values() if call.mb.step == step]

    def _unsettled(self, step: int) -> set[PeerId]:
        """Returns the clients with gradients of microbatches that may still be given up."""
        accumulating = (call.mb for call in self._calls_of(step) if call.accumulate)
        return {client for mb in accumulating for client in self.parts.holders_of(mb)}

    # Giving out -----------------------------------------------------------------------------------------------------

    def feed(self) -> None:
        """Give parts to all workers that have room."""
        for worker in (*self.pool.workers(), OWN):
            while (given := self.pool.take(worker, self._clock.now())) is not None:
                self._give(worker, given)

    def _give(self, worker: PeerId, given: Given) -> None:
        part = given.part
        call = self._call_of(part)
        if call is not None and not call.begun:
            call.begun = True
            try:
                call.turn.begins()
            except MuletrainError as e:
                self.pool.failed(worker, given.number, self._clock.now())
                self.pool.drop(part.step, part.index)
                return call.fail(e)
        accumulate = part.what is Pass.AGAIN or (call is not None and call.accumulate)
        if worker != OWN:
            self._tasks.spawn(self._send(worker, given, accumulate, self.clients.tell(worker)), f"part {part}")
            return
        task = self._tasks.spawn(self._compute(given, accumulate), f"part {part}")
        self._own[task] = given
        task.add_done_callback(self._own_ended)

    async def _prepared(self, part: Part) -> KeptPart | None:
        """Returns the inputs of ``part``; None: the part is no longer wanted."""
        kept = self._checks.find(part) if part.what is Pass.CHECK else self.parts.find(part)
        call = self._call_of(part)
        if kept is not None or call is None or call.inputs is None or call.done.done():
            return kept
        cut = await call.cut(part, self.inner, self.plan.activations)
        if call.done.done():
            return None
        kept = self.parts.find(part) or cut
        self.parts.keep(part, kept)
        return kept

    async def _send(
        self, worker: PeerId, given: Given, accumulate: bool, verdicts: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> None:
        """Give a part to a client, with the ``verdicts`` on its earlier ones."""
        part, kept = given.part, await self._prepared(given.part)
        if kept is None:
            self.pool.failed(worker, given.number, self._clock.now())
            return
        here = part.what is Pass.BACKWARD and kept.forward_at == worker
        message = Give(
            **part._asdict(),
            number=given.number,
            generation=self.accumulators.generation(part.step),
            whole=self.plan.sequences,
            accumulate=accumulate and part.what is not Pass.FORWARD,
            has_forward=here,
            counts=verdicts[0],
            gone=verdicts[1],
        )
        tensors = kept.tensors(part.what, has_forward=here)
        try:
            await self._net.send(worker, message.frame(tensors), channel=message.CHANNEL, timeout_s=GONE_S)
            self.pool.sent(given.number, self._clock.now())
        except NetworkError:
            self.clients.doubt(worker)

    async def _compute(self, given: Given, accumulate: bool) -> None:
        """Compute a part here."""
        part, kept, mb = given.part, await self._prepared(given.part), self._identity(given.part)
        try:
            if kept is None:
                raise MuletrainError("it is no longer wanted")
            if part.what in LAST:
                self.parts.forward_lost(OWN, part)
            seed = self.clients.digest(part.step)
            here = part.what is Pass.BACKWARD and kept.forward_at == OWN
            tensors = [await self.inner.offload(decode, x) for x in kept.tensors(part.what, has_forward=here)]
            loss, values, found = await computed_part(
                self.inner, mb, part.what, tensors, seed, accumulate=accumulate, here=here
            )
        except (MuletrainError, KeyError) as e:  # KeyError: the microbatch was given up, and its forward dropped
            if self.pool.failed(OWN, given.number, self._clock.now()):
                raise  # nobody else may be left to compute it, so this server ends
            if part.what is Pass.CHECK:
                self.pool.drop_parts([part])
            if (call := self._call_of(part)) is not None:
                call.fail(MuletrainError(str(e)))
            return self.feed()
        if found:
            self._checked(OWN, given.number, part, found)
        else:
            self._came_back(OWN, given.number, part, accumulate, loss, values)
        self.feed()

    def _identity(self, part: Part) -> Microbatch:
        return Microbatch(part.step, part.index, part.first, self.plan.sequences)

    def _own_ended(self, task: asyncio.Task[None]) -> None:
        given = self._own.pop(task)
        if not task.cancelled():
            return
        self.inner.discard(self._identity(given.part))
        self.pool.failed(OWN, given.number, self._clock.now())
        if not self._tasks.closed:
            self.feed()

    # Coming back ----------------------------------------------------------------------------------------------------

    def _came_back(
        self,
        worker: PeerId,
        number: int,
        part: Part,
        accumulate: bool,
        loss: float,
        values: Tensor | None,
        claim: Sketch | None = None,
    ) -> KeptPart | None:
        """Take the result of a giving. Returns the part's inputs if the result counts: then a gradient is in the
        accumulator of ``worker``, which announced ``claim``."""
        kept = self.parts.find(part)
        counts = self.pool.done(worker, number, self._clock.now()) and kept is not None
        self.clients.withdraw()
        call, mb = self._call_of(part), self._identity(part)
        if not counts or kept is None or (call is None and part.what is not Pass.AGAIN):
            if worker == OWN and (accumulate or kept is None or kept.forward_at != OWN):
                self.inner.discard(mb)
            return None
        self.clients.did_part(worker)
        if part.what is Pass.FORWARD:
            kept.forward_at, kept.forward_number = worker, number
        elif accumulate:
            self._accumulated(worker, number, part, kept, claim)
        if part.what is Pass.BACKWARD and kept.forward_at not in (None, OWN, worker):
            kept.forward_at = None  # the client hears it when it calls
        if call is not None:
            call.fill(part, loss, values)
            self._checks.counted(part, loss, self._worth(part, kept))
        return kept

    def _worth(self, part: Part, kept: KeptPart | None = None) -> float:
        """Sequences of ``part``: those that its targets that count are worth, if not all do."""
        kept = kept or self.parts.find(part)
        if part.what is not Pass.LOSS or kept is None or kept.targets is None:
            return part.rows
        plan = self.plan
        length, targets = plan.sequence_length(part.step), decode(kept.targets)
        _, weight = weighed(targets, plan.targets, length, plan.vocab, plan.microbatches)
        return part.rows if weight is None else weight * plan.sequences

    def _accumulated(self, worker: PeerId, number: int, part: Part, kept: KeptPart, claim: Sketch | None) -> None:
        """Note the place of the gradient of ``part``."""
        mb, parts = self._identity(part), self.parts
        holder = parts.holder_at(part.place) if part.what is Pass.AGAIN else None
        if worker != OWN:
            parts.accumulated(part, kept, worker, number, claim)
        else:
            parts.computed_here(part)
            same = (c for c in self._calls_of(part.step) if c.accumulate and c.mb.index == part.index)
            if (open_call := next(same, None)) is not None:
                open_call.own.append(mb)  # the part counts once the whole microbatch does
            else:
                self.inner.count(mb)
        self.clients.news.set()
        if holder is not None:
            self.clients.lapsed(holder)
            self.clients.lose(holder, "it took too long, and others have done its work", lapse=False)

    async def _on_result(self, worker: PeerId, message: Result, tensor: Encoded | None) -> None:
        """A client brings back a part. The answer to the client's call says whether a gradient counts."""
        if (part := self.pool.part(worker, message.number)) is not None and part.what is Pass.CHECK:
            self._checked(worker, message.number, part, checked_sketches(message))
            return self.feed()
        values = None if tensor is None else await self.inner.offload(decode, tensor)
        claim = None if message.sketch is None else unpacked(message.sketch)
        fine = claim is None or bool(np.isfinite(claim).all())
        fine &= values is None or await self.inner.offload(is_finite, values)
        drawn: tuple[bool, Sketch | None] = False, None
        part = self.pool.part(worker, message.number)
        if part is not None and (fine := fine and self._checks.believes(part, message.loss, self._worth(part))):
            drawn = await self._checks.drawn(
                worker, part.what, part.rows, values, claim, self.clients.digest(part.step)
            )
        if (part := self.pool.part(worker, message.number)) is None:  # the part was taken back meanwhile
            return
        self.clients.check_result(worker, message, [] if tensor is None else [tensor])  # perhaps sent ahead of the part
        call = self._call_of(part)
        accumulate = part.what is Pass.AGAIN or (call is not None and call.accumulate)
        if not fine or (accumulate and self.plan.verify and claim is None):
            self.clients.on_unable(worker, message.number)
        elif kept := self._came_back(worker, message.number, part, accumulate, message.loss, values, claim):
            self._checks.came(worker, part, kept, drawn, claim if accumulate else None)
        else:
            self.clients.wake(worker)
        self.feed()

    def _checked(self, worker: PeerId, number: int, part: Part, found: dict[str, Sketch]) -> None:
        """``worker`` has computed a part again for comparison."""
        if self.pool.done(worker, number, self._clock.now()):
            self._checks.checked(worker, part, found)
        self.clients.news.set()

    async def _watch(self) -> None:
        """Let other workers compute overdue parts."""
        while True:
            due = min(self.pool.next_due(), self.clients.next_look())
            await self._clock.sleep(min(LOOK_S, max(0.01, due - self._clock.now())))
            late = self.pool.expire(self._clock.now())
            self.clients.late(late)
            for worker in (*late, *self.clients.silent()):
                self.clients.doubt(worker)
            self.clients.news.set()  # a late client is no longer busy
            self.feed()
