"""A ``Compute`` around another one: every method not overridden is delegated."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from muletrain.compute.slot import AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor

    from muletrain.compute.base import Compute, Microbatch, Update
    from muletrain.compute.slot import Turn
    from muletrain.optim.sketch import Sketch

R = TypeVar("R")


class WrappedCompute:
    """See ``Compute``; derived classes handle microbatches."""

    def __init__(self, inner: Compute) -> None:
        self.stage, self.stages = inner.stage, inner.stages
        self.n_params, self.n_trained = inner.n_params, inner.n_trained
        self.delayed, self.lends = inner.delayed, inner.lends
        self.jobs, self.parts, self.layout = inner.jobs, inner.parts, inner.layout
        self.inner = inner

    @property
    def skipped(self) -> int:
        return self.inner.skipped

    def busy_s(self, mb: Microbatch, took_s: float) -> float:
        return self.inner.busy_s(mb, took_s)

    def discard(self, mb: Microbatch) -> None:
        self.inner.discard(mb)

    def count(self, mb: Microbatch) -> None:
        self.inner.count(mb)

    async def part_sketch(self, mb: Microbatch, seed: bytes) -> Sketch:
        return await self.inner.part_sketch(mb, seed)

    def add(self, step: int, gradient: Tensor) -> None:
        self.inner.add(step, gradient)

    async def gather(self, step: int) -> None:
        await self.inner.gather(step)

    async def gradient(self, step: int) -> Tensor:
        return await self.inner.gradient(step)

    async def room(self, numbers: int) -> Tensor:
        return await self.inner.room(numbers)

    async def apply(self, gradient: Tensor, update: Update, turn: Turn = AT_ONCE) -> None:
        await self.inner.apply(gradient, update, turn)

    def clear(self, step: int) -> None:
        self.inner.clear(step)

    async def digest(self) -> bytes:
        return await self.inner.digest()

    async def copied_weights(self) -> Tensor:
        return await self.inner.copied_weights()

    def newest_for(self) -> tuple[int, ...]:
        return self.inner.newest_for()

    async def load_weights(self, weights: Tensor, steps: Collection[int] = ()) -> None:
        await self.inner.load_weights(weights, steps)

    async def state(self) -> dict[str, Tensor]:
        return await self.inner.state()

    async def load_state(self, state: dict[str, Tensor]) -> None:
        await self.inner.load_state(state)

    async def offload(self, fn: Callable[..., R], *args: object) -> R:
        return await self.inner.offload(fn, *args)

    async def end(self, *, over: bool) -> None:
        await self.inner.end(over=over)

    def close(self) -> None:
        self.inner.close()
