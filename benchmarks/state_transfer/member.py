"""A donor or the taker of a stage's state, as a process: ``python member.py RANK DONORS FOLDER``; rank 0 takes, and
prints the seconds.

The network, the frames, ``Snapshots`` and ``Receiver`` are the production code; the stage is random tensors, for a
transfer needs no model.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from muletrain.config.schema import Codec
from muletrain.policy.fork_choice import Chain
from muletrain.runtime.core import blocks
from muletrain.runtime.core.lifecycle import Lifecycle
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.membership import Membership
from muletrain.runtime.step.gradient_log import GradientLog
from muletrain.runtime.transfer.donor import Receiver, Snapshots

sys.path.insert(0, str(Path(__file__).parents[1] / "averaging"))
from group import context, meet

PARAMS = 25_000_000
TENSORS = 50
ROUNDS, WARM_UP = 5, 1
blocks.TIMES = ROUNDS + WARM_UP  # the same copy goes to the same peer each time


class State:
    """What a transfer asks of a ``Compute``: weights and two moments, in ``TENSORS`` tensors each."""

    n_params = n_trained = PARAMS

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._flat = torch.randn(3, TENSORS, PARAMS // TENSORS, generator=torch.Generator().manual_seed(1))

    async def state(self) -> dict[str, torch.Tensor]:
        copy = await self.offload(self._flat.clone)
        return {
            f"{kind}/{k}": copy[i, k] for i, kind in enumerate(("model", "moment1", "moment2")) for k in range(TENSORS)
        }

    async def load_state(self, state: dict[str, torch.Tensor]) -> None:
        for i, kind in enumerate(("model", "moment1", "moment2")):
            for k in range(TENSORS):
                self._flat[i, k].copy_(state[f"{kind}/{k}"])

    def damage(self) -> None:
        self._flat.zero_()

    def check(self) -> float:
        return float(self._flat.double().sum())

    async def offload(self, fn: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, fn, *args)


async def main(rank: int, donors: int, folder: Path) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mule-") as sockets:
        network, ids = await meet(folder, rank, donors + 1, sockets)
        compute: Any = State()
        ctx = context(network, ids, compute, Codec.FP32)
        now: Any = SimpleNamespace(
            step=0,
            applied=bytes(32),
            settled=True,
            away=False,
            life=Lifecycle(),
            chain=Chain(0, (bytes(32),)),
        )
        Snapshots(ctx, now, GradientLog(ctx, 0), Membership(ctx))
        receiver = Receiver(ctx)

        async def on_frame(sender: str, frame: Any) -> None:
            raise AssertionError

        network.receive(on_frame)
        if rank:
            while not (folder / "done").exists():
                await asyncio.sleep(0.1)
        else:
            await take(ctx, receiver, compute, folder)
        await ctx.tasks.close()
        await network.close()


async def take(ctx: Context, receiver: Receiver, compute: State, folder: Path) -> None:
    expected, seconds = compute.check(), []
    for _ in range(ROUNDS + WARM_UP):
        compute.damage()
        begin = time.perf_counter()
        await receiver.fetch(lambda offer: True)
        seconds.append(time.perf_counter() - begin)
        assert compute.check() == expected
    (folder / "done").touch()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    report = {
        "seconds": seconds[WARM_UP:],
        "first": seconds[0],
        "bytes": 12 * PARAMS,
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    r, d, f = sys.argv[1:]
    asyncio.run(main(int(r), int(d), Path(f)))
