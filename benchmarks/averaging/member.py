"""One member of an averaging group, as a process: ``python member.py RANK MEMBERS FOLDER CODEC SHAPED``. Prints seconds
per round.

The network, the frames and ``Averager`` are the production code; the stage is a flat random vector, for averaging needs
no model.
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
from typing import Any

import torch
from group import context, meet

from muletrain.clock import LoopClock
from muletrain.compute.jobs import Jobs
from muletrain.config.fleet_file import FleetPeer, Link
from muletrain.config.schema import Codec
from muletrain.network.shaped import ShapedNetwork
from muletrain.runtime.averaging.averager import Averager
from muletrain.runtime.averaging.messages import Reduced, Shard
from muletrain.runtime.averaging.rounds import Round, usual_round
from muletrain.runtime.members.row import RoundEntry, Statements

SIZE = 25_000_000
ROUNDS, WARM_UP = 5, 1
RTT_S, RATE = 0.1, 25e6  # 100 ms, 200 Mb/s


class Vector:
    """What the averager asks of a ``Compute``."""

    n_params = n_trained = SIZE

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self.jobs = Jobs(LoopClock().now)

    async def room(self, numbers: int) -> torch.Tensor:
        return torch.empty(numbers)

    async def offload(self, fn: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, fn, *args)


async def main(rank: int, members: int, folder: Path, codec: Codec, shaped: bool) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mule-") as sockets:
        inner, ids = await meet(folder, rank, members, sockets)
        network: Any = inner
        if shaped:
            own = FleetPeer(rank, str(rank), "", None, 1.0, None, None, True, RATE, RATE, None, None, None)
            network = ShapedNetwork(inner, lambda peer: Link(RTT_S / 2, RATE), own)
        ctx = context(network, ids, Vector(), codec)
        entries: dict[int, set[str]] = {}
        changed = asyncio.Event()

        averager = Averager(ctx, tuple, usual_round())

        async def on_frame(sender: str, frame: Any) -> None:
            if frame.kind == Statements.KIND:
                entries.setdefault(Statements.parse(frame).step, set()).add(sender)
                changed.set()
            else:
                kind = Shard if frame.kind == Shard.KIND else Reduced
                averager.on_chunk(sender, kind.parse(frame), frame.tensors[0])

        network.receive(on_frame)
        vector = torch.randn(SIZE, generator=torch.Generator().manual_seed(rank))
        seconds, checks = [], []
        for step in range(ROUNDS + WARM_UP):
            round_ = Round(step.to_bytes(32), bytes(32), step, 0, ids, ids, ids, members, SIZE, stop=False)
            begin = time.perf_counter()
            result, shards = await averager.reduce(round_, vector)
            entry = RoundEntry(
                lineage=bytes(32),
                step=step,
                stage=0,
                round=round_.id,
                members=round_.members,
                shards=shards,
                stop=False,
                holder=network.peer_id,
            )
            entries.setdefault(step, set()).add(network.peer_id)
            await ctx.tell(ctx.roster.others(), Statements(lineage=bytes(32), step=step, stage=0, entry=entry))
            while len(entries.get(step, ())) < members:  # all have finished: nobody's next round overlaps this one
                changed.clear()
                await asyncio.wait_for(changed.wait(), 120)
            seconds.append(time.perf_counter() - begin)
            checks.append(float(result[::1000].double().sum()))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        await asyncio.sleep(0.5)
        await network.close()
        cpu = usage.ru_utime + usage.ru_stime
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            json.dumps(
                {
                    "seconds": seconds[WARM_UP:],
                    "check": checks[-1],
                    "cpu_s": cpu,
                    "daemon_cpu_s": children.ru_utime + children.ru_stime,
                }
            )
        )


if __name__ == "__main__":
    r, m, f, c, s = sys.argv[1:]
    asyncio.run(main(int(r), int(m), Path(f), Codec(c), s == "shaped"))
