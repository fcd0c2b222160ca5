"""A ``Compute`` that computes nothing: in a virtual fleet all tensors are tiny, equal and ready at once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from blake3 import blake3

from muletrain.compute.jobs import Jobs
from muletrain.compute.results import Result
from muletrain.compute.slot import AT_ONCE, Turn
from muletrain.optim.sketch import SIZE
from muletrain.policy.shards import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch import Tensor

    from muletrain.clock import Clock
    from muletrain.compute.base import Microbatch, Update
    from muletrain.optim.sketch import Sketch

WIDTH, TOKENS, VOCAB = 2, 1, 256
BLOCKS, CHUNK = 512, 8
"""Blocks of the hollow gradient, and of a chunk: shards are nearly equal and have several chunks, as in a large
stage."""
PARAMS = BLOCKS * BLOCK


class HollowCompute:
    """Computes nothing, and never waits for its slot; see ``Compute``. Every microbatch has the same gradient.
    ``ending_s``: see ``StageCost``."""

    def __init__(self, stage: int, stages: int, clock: Clock, ending_s: float, *, delayed: bool) -> None:
        self.stage, self.stages, self.n_params, self.delayed = stage, stages, PARAMS, delayed
        self.jobs = Jobs(clock.now)
        self._clock, self._ending_s = clock, ending_s
        self._sums: Counter[int] = Counter()

    async def forward(self, mb: Microbatch, inputs: Tensor, turn: Turn = AT_ONCE) -> Result:
        turn.begins()
        return Result(ACTIVATIONS)

    async def backward(self, mb: Microbatch, grad: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool) -> Result | None:
        turn.begins()
        self._sums[mb.step] += accumulate
        return Result(ACTIVATIONS) if self.stage else None

    async def loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool
    ) -> tuple[float, Result | None]:
        return 1.0, await self.backward(mb, inputs, turn, accumulate=accumulate)

    def discard(self, mb: Microbatch) -> None:
        pass

    def count(self, mb: Microbatch) -> None:
        pass

    async def part_sketch(self, mb: Microbatch, seed: bytes) -> Sketch:
        return np.zeros(SIZE)

    def add(self, step: int, gradient: Tensor) -> None:
        pass

    async def gather(self, step: int) -> None:
        pass

    async def copied_weights(self) -> Tensor:
        return torch.zeros(PARAMS)

    async def load_weights(self, weights: Tensor) -> None:
        pass

    async def gradient(self, step: int) -> Tensor:
        return torch.full((PARAMS,), float(self._sums[step]))

    async def apply(self, gradient: Tensor, update: Update, turn: Turn = AT_ONCE) -> None:
        turn.begins()
        await self._clock.sleep(self._ending_s)
        self.clear(update.step)

    def clear(self, step: int) -> None:
        self._sums.pop(step, None)

    async def digest(self) -> bytes:
        return blake3(b"hollow").digest()

    async def state(self) -> dict[str, Tensor]:
        return {f"{kind}/w": torch.zeros(PARAMS) for kind in ("model", "moment1", "moment2")}

    async def load_state(self, state: dict[str, Tensor]) -> None:
        pass

    async def offload(self, fn: Callable[..., Any], *args: object) -> Any:
        """Reuse the result of ``fn``: all activations are the same."""
        if id(args[0]) not in _SAME:
            return fn(*args)
        if (key := (fn, *map(id, args))) not in _RESULTS:
            result = fn(*args)
            _SAME[id(result)] = result
            _RESULTS[key] = args, result
        return _RESULTS[key][1]

    async def end(self, *, over: bool) -> None:
        """Nobody needs to hear of it."""

    def close(self) -> None:
        pass


ACTIVATIONS = torch.ones(1, TOKENS, WIDTH)
"""The activations of every microbatch, and their gradients."""
_SAME: dict[int, object] = {id(ACTIVATIONS): ACTIVATIONS}
"""The same tensor, encoded and decoded, by identity."""
_RESULTS: dict[tuple[object, ...], tuple[object, Any]] = {}
"""Results by function and identity of its arguments, which are kept so that no other object gets the same identity."""


class HollowTokens:
    def microbatch(self, step: int, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return np.zeros((1, TOKENS), np.int64), np.zeros((1, TOKENS), np.int64)
