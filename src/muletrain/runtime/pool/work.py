"""A client's computation, and its gradients."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import torch

from muletrain.compute.base import Microbatch
from muletrain.errors import Malformed, MuletrainError
from muletrain.network.base import Channel
from muletrain.optim.sketch import packed
from muletrain.policy.passes import Pass
from muletrain.runtime.core.blocks import StateImage
from muletrain.runtime.pool.accumulators import packed_gradient
from muletrain.runtime.pool.checks import checked_message
from muletrain.runtime.pool.messages import MAX_KEPT, Give, Result
from muletrain.runtime.pool.parts import computed_part
from muletrain.wire.codec import IDS, Encoded, decode, encode, sample_codecs

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from muletrain.compute.base import Compute
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.pool.messages import Wanted

UNCOUNTED = 3
"""Most gradients of parts that a client holds or computes beside its accumulator."""
WAIT_S = 30.0
"""Seconds for which a part waits for the server's word on earlier parts."""


class PartWork:
    """Computes parts on one client's device, and keeps their gradients: those that count, summed by step, and those that
    await the server's word. The gradients of a step begin anew with each generation of the server, and when a later step
    needs the place (``Compute`` has as many places as there are steps in flight)."""

    def __init__(self, compute: Compute, plan: Plan) -> None:
        self._compute, self._plan = compute, plan
        self._places = 2 if compute.delayed else 1
        self._generations: dict[int, int] = {}
        """Generations, by place."""
        self._counted: dict[int, set[int]] = {}
        """Numbers of the givings in the sum of each step."""
        self._uncounted: dict[int, Microbatch] = {}
        self._computing: set[Microbatch] = set()
        """Parts whose gradient is being computed, or not counted yet."""
        self._verdicts: dict[int, bool] = {}
        """The server's word on uncounted gradients that are about to be settled."""
        self._lock = asyncio.Lock()
        """Held while the sums are read or changed."""
        self._room = asyncio.Event()
        self._forwards: dict[Microbatch, int] = {}
        """Parts whose forward is kept, with the number of the giving."""
        self._under_way: dict[asyncio.Task[Any], Microbatch] = {}
        self._loading: set[int] = set()
        """Places whose weights are being replaced."""
        self.seeds: dict[int, bytes] = {}
        """Digests of the weights, from which sketches are drawn, by place."""

    # Gradients --------------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """The server is a different one: all gradients and forwards are of no use."""
        async with self._lock:
            for place in range(self._places):
                self._clear(place)
            self._generations.clear()
        self.forget_forwards()

    async def begin_anew(self, step: int, generation: int) -> None:
        """Drop an earlier generation in the place of ``step``."""
        if generation > self._generation(step):
            async with self._lock:
                self._begin_anew(step, generation)

    def _generation(self, step: int) -> int:
        return self._generations.get(step % self._places, -1)

    def _begin_anew(self, step: int, generation: int) -> None:
        if generation > self._generation(step):
            self._generations[step % self._places] = generation
            self._clear(step % self._places)

    def _clear(self, place: int) -> None:
        def there(step: int) -> bool:
            return step % self._places == place

        for step in filter(there, list(self._counted)):
            self._compute.clear(step)
            del self._counted[step]
        for number, mb in list(self._uncounted.items()):
            if there(mb.step):
                self._compute.discard(mb)
                del self._uncounted[number]
        self._computing = {mb for mb in self._computing if not there(mb.step)}
        self._room.set()

    async def _reserve(self, mb: Microbatch, generation: int) -> None:
        """Wait for room for the gradient of ``mb``. Raises MuletrainError if there is none."""
        try:
            async with asyncio.timeout(WAIT_S):
                while len(self._computing) >= UNCOUNTED:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            raise MuletrainError("the server does not say which results count") from None
        if mb in self._computing:
            raise MuletrainError("the same part is not settled yet")
        self._check_generation(mb.step, generation)
        self._computing.add(mb)

    def _check_generation(self, step: int, generation: int) -> None:
        """Raises MuletrainError if ``generation`` of ``step`` is over."""
        if generation != self._generation(step):
            raise MuletrainError("the server's accumulators began anew")

    @property
    def empty(self) -> bool:
        """Would nothing be lost if the client went to another server?"""
        return not (self._counted or self._uncounted or self._computing)

    def uncounted(self) -> tuple[int, ...]:
        """Returns the numbers of the givings without the server's word."""
        return tuple(sorted(self._uncounted.keys() - self._verdicts.keys()))

    async def settle(self, counts: Collection[int], gone: Collection[int]) -> None:
        """Add the gradients of givings to the sums of their steps, or drop them."""
        self._verdicts |= dict.fromkeys(counts, True) | dict.fromkeys(gone, False)
        async with self._lock:
            for number, verdict in self._verdicts.items():
                self._settle(number, counts=verdict)
            self._verdicts.clear()

    def _settle(self, number: int, *, counts: bool) -> None:
        if (mb := self._uncounted.pop(number, None)) is None:
            return
        self._computing.discard(mb)
        if counts:
            self._compute.count(mb)
            self._counted.setdefault(mb.step, set()).add(number)
        else:
            self._compute.discard(mb)
        self._room.set()

    async def hand_over(self, wanted: Wanted) -> StateImage:
        """Returns a copy for the server: the sum of a step, with all present givings that count, and their numbers. Then
        begins anew."""
        step, counts = wanted.step, {*wanted.givings}
        async with self._lock:
            self._begin_anew(step, wanted.generation)
            for number in [n for n, mb in self._uncounted.items() if n in counts and mb.step == step]:
                self._settle(number, counts=True)
            gradient = await packed_gradient(await self._compute.gradient(step), self._compute, self._plan)
            self._compute.clear(step)
            givings = torch.tensor(sorted(self._counted.pop(step, ())), dtype=torch.int64)
        copy = StateImage({"givings": givings, "gradient": gradient}, Channel.AVERAGE)
        await copy.name(self._compute.offload)
        return copy

    # Parts ------------------------------------------------------------------------------------------------------------

    def forget_forwards(self, steps: Collection[int] = ()) -> None:
        """Drop all forwards with the weights in the places of ``steps``, (): in all places, because no backward will
        follow."""
        gone = {step % self._places for step in steps or range(self._places)}
        for mb in [mb for mb in self._forwards if mb.step % self._places in gone]:
            self._compute.discard(mb)
            del self._forwards[mb]

    def forwards(self) -> tuple[int, ...]:
        """Returns the numbers of the givings whose forward is kept."""
        return tuple(self._forwards.values())

    def forget_forward(self, number: int) -> None:
        """Another worker computed the backward of the giving ``number``."""
        for mb in [mb for mb, given in self._forwards.items() if given == number]:
            self._compute.discard(mb)
            del self._forwards[mb]

    async def load(self, weights: Tensor, digest: bytes, steps: Collection[int]) -> None:
        """Compute with ``weights``, flat fp32 [P], of this ``digest``, in the places of ``steps``, (): in all places.
        Parts in progress there end, because they would go on with different weights."""
        self._loading = {step % self._places for step in steps or range(self._places)}
        try:
            ended = {task: mb for task, mb in self._under_way.items() if mb.step % self._places in self._loading}
            for task in ended:
                task.cancel()
            await asyncio.gather(*ended, return_exceptions=True)
            for mb in {*ended.values()}:
                if mb not in self._computing:
                    self._compute.discard(mb)
            self.forget_forwards(steps)
            async with self._lock:
                await self._compute.load_weights(weights, steps)
            self.seeds |= dict.fromkeys(self._loading, digest)
        finally:
            self._loading = set()

    def has(self, digest: bytes | None, steps: Collection[int]) -> bool:
        """Do ``steps``, (): all, compute with the weights with this ``digest``?"""
        return all(self.seeds.get(step % self._places) == digest for step in steps or range(self._places))

    def check(self, message: Give, tensors: list[Encoded]) -> None:
        """Raises Malformed for a part that this stage does not have."""
        plan, length = self._plan, self._plan.sequence_length(message.step)
        between = (message.rows, length, plan.width), (plan.activations,)
        first, last = self._compute.stage == 0, self._compute.stage == self._compute.stages - 1
        inputs, other = (
            (declared.batch(message.rows, length), sample_codecs(declared.dtype)) if here else between
            for declared, here in ((plan.inputs, first), (plan.targets, last))
        )
        places = [((message.rows, length), IDS)] if plan.targets.apart and not last else []
        expected = [other] if message.has_forward else [inputs, other, *places]
        if message.what is Pass.FORWARD:
            expected = [inputs, *places]
        if len(tensors) != len(expected):
            raise Malformed(f"{message.KIND}: {len(tensors)} tensors instead of {len(expected)}")
        if message.whole != plan.sequences or message.first + message.rows > plan.sequences:
            raise Malformed(f"{message.KIND}: sequences {message.first} + {message.rows} of {message.whole}")
        # the last stage computes forward and backward together
        if (last and message.what is Pass.FORWARD) or (
            message.has_forward and (last or message.what is not Pass.BACKWARD)
        ):
            raise Malformed(f"{message.KIND}: not at stage {self._compute.stage}")
        for tensor, (shape, codecs) in zip(tensors, expected, strict=True):
            if tensor.shape != shape or tensor.codec not in codecs:
                raise Malformed(f"{message.KIND}: {tensor.codec} {tensor.shape} instead of {shape}")

    @staticmethod
    def unable(message: Give, reason: str) -> Result:
        return Result(number=message.number, problem=reason[:1000])

    async def compute(self, message: Give, tensors: list[Encoded]) -> tuple[Result, list[Encoded]]:
        """Returns the answer to ``message``, with its tensors."""
        mb = Microbatch(message.step, message.index, message.first, message.whole)
        if mb.step % self._places in self._loading:
            return self.unable(message, "its weights are gone"), []
        task = asyncio.current_task()
        assert task is not None  # the caller is a task
        self._under_way[task] = mb
        try:
            return await self._answer(message, mb, tensors)
        finally:
            del self._under_way[task]

    async def _answer(self, message: Give, mb: Microbatch, tensors: list[Encoded]) -> tuple[Result, list[Encoded]]:
        try:
            if mb in self._computing:
                return self.unable(message, "the same part is not settled yet"), []
            if not message.accumulate and message.what is not Pass.CHECK:
                return await self._computed(message, mb, tensors)
            await self._reserve(mb, message.generation)
            try:
                return await self._computed(message, mb, tensors)
            finally:
                if message.number not in self._uncounted:
                    self._computing.discard(mb)
                    self._room.set()
                    self._compute.discard(mb)
        except KeyError:
            return self.unable(message, "its forward is not here"), []
        except MuletrainError as e:
            return self.unable(message, str(e)), []

    async def _computed(self, message: Give, mb: Microbatch, tensors: list[Encoded]) -> tuple[Result, list[Encoded]]:
        """Raises MuletrainError, and KeyError if the forward is not here (any more)."""
        compute, what, seed = self._compute, message.what, self.seeds.get(mb.step % self._places, b"")
        inputs = [await compute.offload(decode, tensor) for tensor in tensors]
        self._forwards.pop(mb, None)
        try:
            loss, result, found = await computed_part(
                compute, mb, what, inputs, seed, accumulate=message.accumulate, here=message.has_forward
            )
        except BaseException:
            if mb not in self._forwards and mb not in self._computing:  # withdrawn before the end
                compute.discard(mb)
            raise
        if found:
            return checked_message(message.number, found), []
        if what is Pass.FORWARD:
            self._forwards[mb] = message.number
            while len(self._forwards) > MAX_KEPT:  # the server would fill our memory
                self.forget_forward(next(iter(self._forwards.values())))
        sent = []
        if result is not None:
            sent = [await compute.offload(encode, result, self._plan.activations)]
        claim = None
        if message.accumulate:
            if self._plan.verify:
                claim = packed(await compute.part_sketch(mb, seed))
            self._check_generation(mb.step, message.generation)
            self._uncounted[message.number] = mb
        return Result(number=message.number, loss=loss, sketch=claim), sent
