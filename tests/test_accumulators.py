"""How a server takes the accumulators of its clients."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.config.schema import Codec
from muletrain.errors import ProtocolError
from muletrain.network.memory import MemoryHub
from muletrain.policy.shards import BLOCK
from muletrain.runtime.core.blocks import AskBlocks, Blocks, Manifest
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.pool.accumulators import (
    Accumulators,
    packed_gradient,
    packed_size,
    unpacked_gradient,
)
from muletrain.runtime.pool.messages import MAX_PARTS
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
        clients: Any = SimpleNamespace(inner=Device(), plan=plan(Codec.INT8), parts=None)
        nothing: Any = None
        own = Accumulators(clients, nothing, nothing, blocks, tasks)

        async def begin(tensors: Any, **other: Any) -> None:
            nbytes = sum(math.prod(shape) * (8 if kind == "int64" else 1) for _, kind, shape in tensors)
            manifest = Manifest(**{"tensors": tensors, "block": nbytes, "digests": bytes(32)} | other)
            assert (await own._coming(manifest.pack())).missing == {0}

        await begin(right)
        for wrong in (
            right[:1],
            right[::-1],
            (right[0], ("gradient", "uint8", (size + 1,))),
            (("givings", "int64", (MAX_PARTS + 1,)), right[1]),
            (("givings", "int64", (3, 1)), right[1]),
            (("givings", "int64", ()), right[1]),
            (("givings", "float64", (3,)), right[1]),
        ):
            with pytest.raises(ProtocolError):
                await begin(wrong)
        with pytest.raises(ProtocolError, match="blocks of"):  # a block lies in memory, and others may send as much
            await begin(right, block=1 << 28)
        await tasks.close()

    virtually(scenario())


@pytest.mark.parametrize("answer", [b"\xff", Manifest(tensors=(), block=1, digests=b"").pack()])
def test_a_client_whose_copy_is_wrong_is_lost_and_ends_no_server(answer: bytes) -> None:
    """The task that took the copy failed, and with it the server."""

    async def scenario() -> None:
        hub, tasks, lost = MemoryHub(), Tasks(), list[str]()
        net = hub.join("server")

        async def answers(sender: str, payload: bytes) -> bytes:
            return answer

        hub.join("client").serve(AskBlocks.KIND, answers)
        clients: Any = SimpleNamespace(
            inner=Device(),
            plan=plan(Codec.INT8),
            parts=SimpleNamespace(holders=lambda step: {"client": {1}}),
            lose=lambda client, why, **how: lost.append(why),
            transfers={},
            wake=lambda client: [transfer.begun.set() for transfer in clients.transfers.values()],
            news=asyncio.Event(),
        )
        checks: Any = SimpleNamespace(concerned=lambda step: set())
        nothing: Any = None
        own = Accumulators(clients, checks, nothing, Blocks(net, LoopClock(), tasks), tasks)
        await own._take_over("client", 0)
        assert len(lost) == 1
        assert "its accumulator is wrong" in lost[0]
        assert not tasks.failure.done()
        await tasks.close()

    virtually(scenario())
