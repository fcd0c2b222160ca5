"""How a client takes the weights of its stage."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from muletrain.clock import LoopClock
from muletrain.compute.threads import InlineExecutor
from muletrain.config.schema import Codec
from muletrain.network.memory import MemoryHub
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.pool.client import Client
from muletrain.runtime.pool.messages import Answer, Chunk, GetWeights, Next
from muletrain.runtime.pool.weights import STALLED_S, WeightsDownload, WeightsUpload
from muletrain.sim.fleet.hollow import PARAMS, HollowCompute, hollow_plan
from muletrain.sim.loop import run_virtually
from muletrain.strategies import strategy_of
from muletrain.wire.codec import encode

from .test_fidelities import HUB, staged

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.wire.frame import Frame


def test_weights_come_while_the_server_enlists_a_client(tmp_path: Path) -> None:
    """A client asks for the weights before the server has enlisted it, which takes a second here. Then it is ready at once."""
    _, config, scene = staged(tmp_path, HUB, "hub.clients=0")
    plan, came_s = hollow_plan(scene, config, strategy_of(config), trace=False), dict[str, float]()

    async def scenario() -> None:
        hub, clock, tasks = MemoryHub(), LoopClock(), Tasks(InlineExecutor())
        net, server = hub.join("client"), hub.join("server")
        compute = HollowCompute(0, plan.stages, clock, 0.0, delayed=False)
        upload = WeightsUpload(compute, plan.chunk, server, tasks)
        digest = await compute.digest()
        upload.begin(digest)
        state = Answer(weights=digest, version=1, servers=("server",), clients=0, speed=0.0, own=0.0).pack()

        async def answered(sender: str, payload: bytes) -> bytes:
            ask = Next.unpack(payload)
            if ask.session and not ask.version:
                await clock.sleep(1.0)
            elif ask.weights is not None:
                came_s.setdefault("ready", clock.now())
                await clock.sleep(1.0)
            return state

        async def heard(sender: str, frame: Frame) -> None:
            came_s[frame.kind] = clock.now()
            if frame.kind == GetWeights.KIND:
                upload.on_asked(sender, GetWeights.parse(frame))

        server.serve(Next.KIND, answered)
        server.receive(heard, (GetWeights.KIND,))
        client = Client(net, clock, tasks, compute, plan, bytes(32), "client", ("server",))
        working = asyncio.create_task(client.run())
        await clock.sleep(2.0)
        working.cancel()
        await tasks.close()

    problems: list[str] = []
    run_virtually(scenario(), 1000.0, problems)
    assert problems == []
    assert came_s == {GetWeights.KIND: 0.0, "ready": 1.0}


def test_a_server_that_serves_another_stage_now_is_asked_for_nothing_more(tmp_path: Path) -> None:
    """Of the two servers that a client knows one does not answer. The other one says that it serves alone, and gives the
    rest at once."""
    _, config, scene = staged(tmp_path, HUB, "hub.clients=0")
    plan, took_s = hollow_plan(scene, config, strategy_of(config), trace=False), list[float]()

    async def scenario() -> None:
        hub, clock, tasks = MemoryHub(), LoopClock(), Tasks(InlineExecutor())
        net, there, elsewhere = (hub.join(name) for name in ("client", "there", "elsewhere"))
        compute = HollowCompute(0, plan.stages, clock, 0.0, delayed=False)
        upload = WeightsUpload(compute, plan.chunk, there, tasks)
        digest = await compute.digest()
        upload.begin(digest)

        async def answered(sender: str, frame: Frame) -> None:
            upload.on_asked(sender, GetWeights.parse(frame))

        async def ignored(sender: str, frame: Frame) -> None:
            pass

        there.receive(answered, (GetWeights.KIND,))
        elsewhere.receive(ignored, (GetWeights.KIND,))
        client = Client(net, clock, tasks, compute, plan, bytes(32), "client", ("there", "elsewhere"))
        fetching = asyncio.create_task(client._weights.fetch(digest, lambda: client._servers.known, lambda: True))
        await clock.sleep(1.0)
        assert not fetching.done()
        client._hear(Answer(weights=digest, version=1, servers=("there",), clients=1, speed=0.0, own=0.0))
        assert await fetching is not None
        took_s.append(clock.now())
        await tasks.close()

    problems: list[str] = []
    run_virtually(scenario(), 1000.0, problems)
    assert problems == []
    assert took_s[0] < STALLED_S / 10


@pytest.mark.parametrize(("came", "took_s"), [(4, 2.0), (1, 8.0), (0, 2.0)])
def test_weights_that_do_not_come_in_time_tell_how_slow_the_link_is(came: int, took_s: float, tmp_path: Path) -> None:
    """Of four chunks so many come within the two seconds of a step; of none it is known that it takes longer."""
    _, config, scene = staged(tmp_path, HUB, "hub.clients=0")
    plan = replace(hollow_plan(scene, config, strategy_of(config), trace=False), chunk=PARAMS // 4)

    async def scenario() -> None:
        hub, clock, tasks = MemoryHub(), LoopClock(), Tasks(InlineExecutor())
        compute = HollowCompute(0, plan.stages, clock, 0.0, delayed=False)
        values, digest = await compute.copied_weights(), await compute.digest()
        download, late = WeightsDownload(hub.join("client"), compute, plan, tasks), asyncio.Event()
        fetching = asyncio.create_task(download.fetch(digest, lambda: (), lambda: not late.is_set()))
        await clock.sleep(2.0)
        for chunk in range(came):
            part = values[chunk * plan.chunk : (chunk + 1) * plan.chunk]
            await download.on_chunk("server", Chunk(weights=digest, chunk=chunk), encode(part, Codec.FP32))
        late.set()
        download.news.set()
        await fetching
        assert download.took_s == took_s
        await tasks.close()

    problems: list[str] = []
    run_virtually(scenario(), 1000.0, problems)
    assert problems == []
