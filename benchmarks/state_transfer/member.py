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

from muletrain.clock import LoopClock
from muletrain.config.schema import Codec
from muletrain.network.identity import Key
from muletrain.network.libp2p import Libp2pNetwork
from muletrain.policy.fork_choice import Chain
from muletrain.runtime.core.lifecycle import Lifecycle
from muletrain.runtime.core.plan import Plan
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.membership import Membership
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Genesis, Roster
from muletrain.runtime.step.gradient_log import GradientLog
from muletrain.runtime.transfer import donor
from muletrain.runtime.transfer.donor import Receiver, Snapshots
from muletrain.runtime.transfer.messages import Block
from muletrain.strategies.swarm import SWARM

PARAMS = 25_000_000
TENSORS = 50
ROUNDS, WARM_UP = 5, 1
donor.TIMES = ROUNDS + WARM_UP  # the same copy goes to the same peer each time


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


async def gather_addresses(folder: Path, rank: int, members: int, own: list[str]) -> list[str]:
    (folder / f"{rank}.tmp").write_text(own[0])
    (folder / f"{rank}.tmp").rename(folder / f"{rank}.address")
    while len(found := sorted(folder.glob("*.address"))) < members:
        await asyncio.sleep(0.05)
    return [f.read_text() for f in found]


async def main(rank: int, donors: int, folder: Path) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mule-") as sockets:
        secret, owner = b"b" * 32, Key.of_seed(b"b" * 32)
        network = await Libp2pNetwork.create(
            run_id="bench", secret=secret, owner=owner, protocol="bench", folder=Path(sockets)
        )
        addresses = await gather_addresses(folder, rank, donors + 1, network.addresses())
        for address in addresses:
            if not address.endswith(network.peer_id):
                await network.connect([address], timeout_s=20)
        ids = sorted(a.rsplit("/p2p/", 1)[1] for a in addresses)
        members = tuple(Member(id=p, name=p, stage=0, trainer=True, addresses=()) for p in ids)
        genesis = Genesis(
            run_id="bench",
            config=bytes(32),
            data=bytes(32),
            stages=1,
            coordinator=ids[0],
            first_step=0,
            members=members,
        )
        plan = Plan(1, 1, 1, 1, 1, 2, lambda s: 1, Codec.INT8, Codec.FP32, None, lambda s: 0.0, 0, 8, SWARM)
        compute: Any = State()
        ctx = Context(network, LoopClock(), compute, Roster(genesis, network.peer_id), plan, emit=lambda event: None)
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
            receiver.taker.on_block(sender, Block.parse(frame), frame.tensors[0])

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
