"""A stage on hardware that computes wrongly, or not at all, for a while."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import torch

from muletrain.compute.results import Result
from muletrain.compute.slot import AT_ONCE, Turn

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.compute.base import Microbatch, Update
    from muletrain.compute.jobs import Job
    from muletrain.compute.swap.swapped import SwappedCompute
    from muletrain.compute.torch_compute import TorchCompute

GRADIENTS = {"nan": math.nan, "hundredfold": 100.0, "huge": 1e4, "zero": 0.0}
"""What becomes of a gradient, that of the parameters and that of the inputs."""
REVERSED = "reversed"
"""The gradients of a client's parts have the other sign, and nothing else is wrong."""
DOUBLED = "doubled"
"""A client hands over twice what it accumulated."""
ACTIVATIONS = "activations"
"""They are not finite; the rest is right."""


class FaultyCompute:
    """``inner``, where ``how`` says what comes out wrong; empty: nothing. From ``hang`` to ``recover`` no operation
    ends."""

    def __init__(self, inner: TorchCompute | SwappedCompute) -> None:
        self._inner = inner
        self.how = ""
        self._works = asyncio.Event()
        self._works.set()
        self._stuck: Job | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def hang(self) -> None:
        self._works.clear()

    def recover(self) -> None:
        self._works.set()
        if self._stuck is not None:
            self._inner.jobs.end(self._stuck)
        self._stuck = None

    async def _passes(self, what: str) -> None:
        """The first operation that hangs keeps the thread, even if its caller gives up; the others wait behind it."""
        if not self._works.is_set() and self._stuck is None:
            self._stuck = self._inner.jobs.begin(what)
        await self._works.wait()

    async def apply(self, gradient: Tensor, update: Update, turn: Turn = AT_ONCE) -> None:
        await self._passes("apply")
        await self._inner.apply(gradient, update, turn)

    async def digest(self) -> bytes:
        await self._passes("passed")  # as what is read waits for its turn on the device
        return await self._inner.digest()

    async def state(self) -> dict[str, Tensor]:
        await self._passes("passed")
        return await self._inner.state()

    async def load_state(self, state: dict[str, Tensor]) -> None:
        await self._passes("load_state")
        await self._inner.load_state(state)

    async def forward(
        self, mb: Microbatch, inputs: Tensor, turn: Turn = AT_ONCE, positions: Tensor | None = None
    ) -> Result:
        await self._passes("forward")
        outputs = await self._inner.forward(mb, inputs, turn, positions)
        return Result(await outputs * math.nan) if self.how == ACTIVATIONS else outputs

    async def backward(self, mb: Microbatch, grad: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool) -> Result | None:
        await self._passes("backward")
        before = (await self._inner.gradient(mb.step)).clone()
        return await self._spoiled(mb, before, await self._inner.backward(mb, grad, turn, accumulate=accumulate))

    async def loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool
    ) -> tuple[float, Result | None]:
        await self._passes("loss_backward")
        before = (await self._inner.gradient(mb.step)).clone()
        loss, gradient = await self._inner.loss_backward(mb, inputs, targets, turn, accumulate=accumulate)
        return loss, await self._spoiled(mb, before, gradient)

    async def gradient(self, step: int) -> Tensor:
        gradient = await self._inner.gradient(step)
        return 2 * gradient if self.how == DOUBLED else gradient

    async def _spoiled(self, mb: Microbatch, before: Tensor, gradient: Result | None) -> Result | None:
        """``gradient``, and what was added to the accumulator since ``before``."""
        kept = getattr(self._inner, "_uncounted", {})
        for value in kept.get(mb, ()) if isinstance(kept, dict) else ():  # a swapped stage keeps no values there
            value *= -1.0 if self.how == REVERSED else GRADIENTS.get(self.how, 1.0)
        if self.how not in GRADIENTS:
            return gradient
        factor, accumulator = GRADIENTS[self.how], await self._inner.gradient(mb.step)
        if not torch.equal(before, accumulator):
            accumulator.copy_(before + factor * (accumulator - before))
        return None if gradient is None else Result(await gradient * factor)
