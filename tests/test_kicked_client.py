"""``muletrain kick`` of a client, on real daemons: its server does without it, and other clients stay."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.compute.base import Microbatch
from muletrain.errors import NetworkError
from muletrain.events import ClientEnlisted, ClientLost
from muletrain.runs.join.admission import serve_admitter
from muletrain.runs.join.removal import remove, serve_members
from muletrain.runtime.core.blocks import Blocks
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.pool.client import Client
from muletrain.runtime.pool.desk import PartsDesk
from muletrain.runtime.pool.server import PooledCompute
from muletrain.runtime.pool.servers import STATE
from proofs import reference
from proofs.scenario import Scenario
from tests.daemons import OWNER, world
from tests.polling import poll

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.events import Event
    from muletrain.network.base import Network

FACTS = reference.facts_of(Scenario(1, (1,), 1, 1, 3, 0.0, (), clients=("client-0a",), sequences=4))


def test_a_kicked_client_is_given_nothing_more_and_its_parts_are_computed_again() -> None:
    tokens = reference.Tokens(FACTS)
    alone = reference.stage_compute(FACTS, 0)

    async def expected(indices: Sequence[int]) -> torch.Tensor:
        for index in indices:
            inputs, targets = map(torch.from_numpy, tokens.microbatch(0, index))
            await alone.loss_backward(Microbatch(0, index), inputs, targets, accumulate=True)
        return await alone.gradient(0)

    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            kicked, stays = await w.open(a), await w.open(a)
            events, tasks, names = list["Event"](), Tasks(), {kicked.peer_id: "kicked", stays.peer_id: "stays"}
            serve_members(a, lambda: {a.peer_id: "a"}, lambda: {a.peer_id: 0}, lambda: names)
            serve_admitter(a, a.peer_id)
            desk = PartsDesk(
                reference.stage_compute(FACTS, 0),
                Blocks(a, LoopClock(), tasks),
                tasks,
                FACTS.plan,
                lambda stage: (a.peer_id,),
                bytes(32),
                events.append,
                random.Random(1),
            )
            server = PooledCompute(desk)
            await server.digest()

            def client(net: Network, name: str) -> asyncio.Task[None]:
                compute = reference.client_compute(FACTS, 0)
                work = Client(net, LoopClock(), tasks, compute, FACTS.plan, bytes(32), name, (a.peer_id,))
                return asyncio.create_task(work.run())

            async def compute(index: int) -> None:
                inputs, targets = map(torch.from_numpy, tokens.microbatch(0, index))
                await server.loss_backward(Microbatch(0, index), inputs, targets, accumulate=True)

            working = [client(kicked, "kicked"), client(stays, "stays")]
            await poll(
                lambda: all(worker.ready for worker in desk.pool._workers.values()) and len(desk.pool.workers()) == 2
            )
            before = 0
            while kicked.peer_id not in desk.parts.holders():
                await compute(before)
                before += 1
            owner = await w.open(a, owner=OWNER, visitor=True)
            done = await remove(owner, tuple(a.addresses()), "kicked")
            assert (done.id, done.kept, done.told, done.unproven) == (kicked.peer_id, 1, 1, ())
            await poll(lambda: desk.pool.workers() == (stays.peer_id,))
            for index in (before, before + 1):
                await compute(index)
            await server.gather(0)
            difference = await server.gradient(0) - await expected(range(before + 2))
            assert difference.norm() < 1e-5 * (await alone.gradient(0)).norm()
            (lost,) = [e for e in events if isinstance(e, ClientLost)]
            assert (lost.name, lost.parts > 0) == ("kicked", True)
            assert [e.name for e in events if isinstance(e, ClientEnlisted)].count("stays") == 1
            assert stays.trust.belongs
            with pytest.raises(NetworkError):
                await kicked.call(a.peer_id, STATE.KIND, STATE.pack(), timeout_s=5)
            assert not kicked.trust.belongs, "it knows now, and its process ends"
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            await tasks.close()

    asyncio.run(scenario())
