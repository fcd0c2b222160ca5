"""Processes that find each other in a folder, and are the only members of a stage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from muletrain.clock import LoopClock
from muletrain.config.schema import Codec
from muletrain.network.identity import Key
from muletrain.network.libp2p import Libp2pNetwork
from muletrain.runtime.core.plan import Plan
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Genesis, Roster
from muletrain.strategies.swarm import SWARM


async def meet(folder: Path, rank: int, members: int, sockets: str) -> tuple[Libp2pNetwork, tuple[str, ...]]:
    """The network of the process ``rank``, connected with the others, and the ids of all."""
    network = await Libp2pNetwork.create(
        run_id="bench", secret=b"b" * 32, owner=Key.of_seed(b"b" * 32), protocol="bench", folder=Path(sockets)
    )
    (folder / f"{rank}.tmp").write_text(network.addresses()[0])
    (folder / f"{rank}.tmp").rename(folder / f"{rank}.address")
    while len(found := sorted(folder.glob("*.address"))) < members:
        await asyncio.sleep(0.05)
    addresses = [f.read_text() for f in found]
    for address in addresses:
        if not address.endswith(network.peer_id):
            await network.connect([address], timeout_s=20)
    return network, tuple(sorted(a.rsplit("/p2p/", 1)[1] for a in addresses))


def context(network: Any, ids: tuple[str, ...], compute: Any, gradients: Codec) -> Context:
    members = tuple(Member(id=p, name=p, stage=0, trainer=True) for p in ids)
    genesis = Genesis(
        run_id="bench",
        config=bytes(32),
        data=bytes(32),
        stages=1,
        coordinator=ids[0],
        first_step=0,
        members=members,
    )
    plan = Plan(1, 1, 1, 1, 1, 2, lambda s: 1, Codec.INT8, gradients, None, lambda s: 0.0, 0, 8, SWARM)
    return Context(network, LoopClock(), compute, Roster(genesis, network.peer_id), plan, emit=lambda event: None)
