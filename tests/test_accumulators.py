"""How a server takes the accumulators of its clients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.config.schema import Codec
from muletrain.errors import ProtocolError
from muletrain.network.memory import MemoryHub
from muletrain.policy.shards import BLOCK
from muletrain.runtime.core.blocks import Blocks, Manifest
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.pool.accumulators import (
    Accumulators,
    Transfer,
    packed_gradient,
    packed_size,
    unpacked_gradient,
)
from muletrain.runtime.pool.messages import MAX_PARTS, Wanted
from tests.virtual import virtually

NUMBERS = 2 * BLOCK + 5


class Device:
    n_trained = NUMBERS

    async def room(self, numbers: int) -> torch.Tensor:
        return torch.full((numbers,), torch.nan)

    async def offload(self, fn: Any, *args: Any) -> Any:
        return fn(*args)


def plan(codec: Codec) -> Any:
    return SimpleNamespace(gradients=codec, chunk=BLOCK)


@pytest.mark.parametrize(("codec", "error"), [(Codec.FP32, 0.0), (Codec.FP16, 1e-3), (Codec.INT8, 2e-2)])
def test_an_accumulator_arrives_as_its_codec_has_it(codec: Codec, error: float) -> None:
    device: Any = Device()
    gradient = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(1))

    async def scenario() -> None:
        whole = await packed_gradient(gradient, device, plan(codec))
        assert len(whole) == packed_size(NUMBERS, plan(codec))
        found = await unpacked_gradient(whole, device, plan(codec))
        assert (found - gradient).abs().max() <= error * gradient.abs().max()

    virtually(scenario())


def test_a_manifest_of_anything_but_an_accumulator_is_refused() -> None:
    size = packed_size(NUMBERS, plan(Codec.INT8))
    right = ("givings", "int64", (3,)), ("gradient", "uint8", (size,))

    async def scenario() -> None:
        tasks = Tasks()
        blocks = Blocks(MemoryHub().join("server"), LoopClock(), tasks)
        clients: Any = SimpleNamespace(desk=SimpleNamespace(plan=plan(Codec.INT8)))
        device: Any = Device()
        nothing: Any = None
        own = Accumulators(clients, device, nothing, nothing, nothing, nothing, blocks, tasks)
        transfer = Transfer(Wanted(generation=0, step=0, transfer=1, givings=()))

        async def begin(tensors: Any, **other: Any) -> None:
            nbytes = sum(shape[0] * (8 if kind == "int64" else 1) for _, kind, shape in tensors)
            manifest = Manifest(**{"tensors": tensors, "block": nbytes, "digests": bytes(32)} | other)
            assert (await own._coming(manifest.pack(), transfer)).missing == {0}

        await begin(right)
        for wrong in (
            right[:1],
            right[::-1],
            (right[0], ("gradient", "uint8", (size + 1,))),
            (("givings", "int64", (MAX_PARTS + 1,)), right[1]),
            (("givings", "int64", (3, 1)), right[1]),
            (("givings", "float64", (3,)), right[1]),
        ):
            with pytest.raises(ProtocolError):
                await begin(wrong)
        with pytest.raises(ProtocolError, match="blocks of"):  # a block lies in memory, and others may send as much
            await begin(right, block=1 << 28)
        await tasks.close()

    virtually(scenario())
