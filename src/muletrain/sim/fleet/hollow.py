"""A ``Compute`` without computation: in a virtual fleet all tensors are tiny, equal and ready at once. Weights are the
number of updates, so that weights of different steps differ."""

from __future__ import annotations

from collections import defaultdict
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from blake3 import blake3

from muletrain.compute.jobs import Jobs
from muletrain.compute.results import Result
from muletrain.compute.slot import AT_ONCE, Turn
from muletrain.config.schema import Codec
from muletrain.optim.flat import FlatLayout
from muletrain.optim.sketch import sketch
from muletrain.policy.shards import BLOCK
from muletrain.runtime.core.plan import Plan
from muletrain.wire.codec import Encoded, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy.typing as npt
    from torch import Tensor

    from muletrain.clock import Clock
    from muletrain.compute.base import Microbatch, Update
    from muletrain.config.schema import RunConfig
    from muletrain.optim.sketch import Sketch
    from muletrain.sim.setting import Setting
    from muletrain.strategies.base import Strategy

STEPS = 1 << 20
"""Steps of a run, more than a play reaches."""
WIDTH, TOKENS, VOCAB = 2, 1, 256
BLOCKS, CHUNK = 256, 4
"""Blocks of the hollow gradient, and of a chunk: shards are nearly equal and have several chunks, as in a large
stage."""
PARAMS = BLOCKS * BLOCK


class HollowCompute:
    """Computes nothing, and never waits for its slot; see ``Compute``. Every microbatch has the same gradient, so without
    clients (``pooled``) all peers may share one mean gradient. ``ending_s``: see ``StageCost``."""

    parts, skipped, layout = 1, 0, FlatLayout.of({})

    def __init__(
        self, stage: int, stages: int, clock: Clock, ending_s: float, *, delayed: bool, pooled: bool = True
    ) -> None:
        self.stage, self.stages, self.delayed, self._pooled = stage, stages, delayed, pooled
        self.n_params = self.n_trained = PARAMS
        self.lends = self.by_block = False
        self.jobs = Jobs(clock.now)
        self._clock, self._ending_s = clock, ending_s
        self._sums: defaultdict[int, float] = defaultdict(float)
        """Microbatches in the accumulator of each step."""
        self._uncounted: dict[Microbatch, float] = {}
        """Shares of parts of microbatches that are not counted yet."""
        self._updates = 0

    async def forward(
        self, mb: Microbatch, inputs: Tensor, turn: Turn = AT_ONCE, positions: Tensor | None = None
    ) -> Result:
        turn.begins()
        return Result(activations(len(inputs)))

    async def backward(self, mb: Microbatch, grad: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool) -> Result | None:
        turn.begins()
        if accumulate and mb.whole:
            self._uncounted[mb] = mb.share(len(grad))
        else:
            self._sums[mb.step] += accumulate
        return Result(activations(len(grad))) if self.stage else None

    async def loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool
    ) -> tuple[float, Result | None]:
        if mb.heldout:
            turn.begins()
            return 1.0, None
        return mb.share(len(inputs)), await self.backward(mb, inputs, turn, accumulate=accumulate)

    def busy_s(self, mb: Microbatch, took_s: float) -> float:
        return took_s

    def discard(self, mb: Microbatch) -> None:
        self._uncounted.pop(mb, None)

    def count(self, mb: Microbatch) -> None:
        self._sums[mb.step] += self._uncounted.pop(mb)

    async def part_sketch(self, mb: Microbatch, seed: bytes) -> Sketch:
        return self._uncounted[mb] * _sketch_of_ones(seed)

    def add(self, step: int, gradient: Tensor) -> None:
        self._sums[step] += float(gradient[0])

    async def gather(self, step: int) -> None:
        pass

    async def copied_weights(self, begin: int = 0, end: int | None = None) -> Tensor:
        return torch.full((len(range(PARAMS)[begin:end]),), float(self._updates))

    def newest_for(self) -> tuple[int, ...]:
        if not self.delayed:
            return ()
        return (self._updates + 1,) if self._updates else (0, 1)

    async def load_weights(self, weights: Tensor, steps: Collection[int] = ()) -> None:
        self._updates = int(weights[0])

    async def gradient(self, step: int) -> Tensor:
        return torch.full((1,), self._sums[step]).expand(PARAMS)  # nobody writes into it

    async def room(self, numbers: int) -> Tensor:
        return torch.empty(numbers) if self._pooled or numbers != PARAMS else _mean_gradient()

    async def apply(self, gradient: Tensor, update: Update, turn: Turn = AT_ONCE) -> None:
        turn.begins()
        await self._clock.sleep(self._ending_s)
        self._updates = update.step + 1
        self.clear(update.step)

    def clear(self, step: int) -> None:
        self._sums.pop(step, None)

    async def digest(self) -> bytes:
        return _digest(self._updates)

    async def state(self) -> dict[str, Tensor]:
        moments = {f"{kind}/w": torch.zeros(PARAMS) for kind in ("moment1", "moment2")}
        return {"model/w": await self.copied_weights(), **moments}

    async def load_state(self, state: dict[str, Tensor]) -> None:
        await self.load_weights(state["model/w"])

    async def offload(self, fn: Callable[..., Any], *args: object) -> Any:
        """Reuse the result of ``fn``: all activations are the same, and so are gradients of the same sum and size."""
        if fn is encode and isinstance(args[0], torch.Tensor) and args[0].stride() == (0,):
            return _encoded(float(args[0][0]), *args[0].shape, *args[1:])
        if not args or id(args[0]) not in _SAME:
            return fn(*args)
        if (key := (fn, *map(id, args))) not in _RESULTS:
            result = fn(*args)
            _SAME[id(result)] = result
            _RESULTS[key] = args, result
        return _RESULTS[key][1]

    async def end(self, *, over: bool) -> None:
        """Do nothing: no other machine is told."""

    def close(self) -> None:
        pass


_SAME: dict[int, object] = {}
"""Activations, encoded and decoded, by identity."""
_RESULTS: dict[tuple[object, ...], tuple[object, Any]] = {}
"""Results by function and argument identities; arguments are kept so that no new object gets the same identity."""


@cache
def activations(sequences: int) -> Tensor:
    """Returns the activations of ``sequences`` sequences, or the gradients: always the same tensor, fp32 [B, T, D]."""
    values = torch.ones(sequences, TOKENS, WIDTH)
    _SAME[id(values)] = values
    return values


@lru_cache(64)
def _encoded(value: float, numbers: int, codec: Codec) -> Encoded:
    return encode(torch.full((numbers,), value), codec)


@cache
def _mean_gradient() -> Tensor:
    """Room for the mean gradients of all peers: 1,000 of them would be gigabytes."""
    return torch.empty(PARAMS)


@lru_cache(64)
def _digest(updates: int) -> bytes:
    return blake3(torch.full((PARAMS,), float(updates)).numpy().data.cast("B")).digest()


@lru_cache(64)
def _sketch_of_ones(seed: bytes) -> Sketch:
    return sketch(torch.ones(PARAMS), seed)


class HollowTokens:
    """Tokens of microbatches of so many ``sequences``."""

    def __init__(self, sequences: int) -> None:
        self._zeros = np.zeros((sequences, TOKENS), np.int64)

    def microbatch(self, step: int, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return self._zeros, self._zeros


def hollow_plan(setting: Setting, config: RunConfig, strategy: Strategy, *, trace: bool) -> Plan:
    """Returns the facts of a run of hollow stages, which does not end by itself."""
    cost = setting.cost
    return Plan(
        stages=len(cost.stages),
        steps=STEPS,
        microbatches=cost.microbatches,
        sequences=cost.sequences if strategy.pooled else 1,
        width=WIDTH,
        vocab=VOCAB,
        sequence_length=lambda step: TOKENS,
        activations=Codec.FP32,
        gradients=Codec.FP32,
        clip=None,
        lr=lambda step: 0.0,
        checkpoint_every=config.checkpoint.every,
        capacity=strategy.capacity(len(cost.stages)),
        strategy=strategy,
        adopt_after_s=config.fleet.adopt_after,
        from_seed=True,
        rebalance=config.fleet.rebalance,
        rebalance_s=config.fleet.rebalance_period,
        work=tuple(s.forward_flops for s in cost.stages),
        state_bytes=tuple(s.state_bytes for s in cost.stages),
        delayed=config.optimizer.delayed,
        trace=trace,
        chunk=CHUNK * BLOCK,
        verify=config.hub.verify if strategy.pooled else 0.0,
    )
