"""How a client takes the weights of its stage."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from muletrain.clock import LoopClock
from muletrain.compute.threads import InlineExecutor
from muletrain.errors import MuletrainError
from muletrain.network.memory import MemoryHub
from muletrain.runtime.core.blocks import AskBlocks, Block, Blocks, Manifest
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.core.times import GONE_S
from muletrain.runtime.pool.client import Client
from muletrain.runtime.pool.messages import Answer, Next
from muletrain.runtime.pool.weights import WeightsCopy, WeightsDownload
from muletrain.sim.fleet.hollow import HollowCompute, hollow_plan
from muletrain.sim.loop import run_virtually
from muletrain.strategies import strategy_of

from .test_fidelities import HUB, staged

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from muletrain.network.memory import MemoryNetwork
    from muletrain.runtime.core.plan import Plan


class Stage:
    """A hub of hollow stages. ``plan``: of the run."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.hub, self.clock, self.tasks = plan, MemoryHub(), LoopClock(), Tasks(InlineExecutor())
        self.compute = HollowCompute(0, plan.stages, self.clock, 0.0, delayed=False)
        self.copy = WeightsCopy(self.compute, None)

    async def server(self, name: str, takers: int = 32) -> MemoryNetwork:
        """A server that gives weights to so many ``takers`` at once."""
        net = self.hub.join(name)
        if not self.copy.digest:
            await self.copy.name(self.compute.offload)

        async def given(taker: str, digest: bytes) -> WeightsCopy | None:
            return self.copy if digest == self.copy.digest else None

        Blocks(net, self.clock, self.tasks).offers("weights", given, takers)
        return net

    def client(self, *servers: str) -> Client:
        net = self.hub.join("client")
        return Client(net, self.clock, self.tasks, self.compute, self.plan, bytes(32), "client", servers)

    def state(self, *servers: str) -> Answer:
        return Answer(weights=self.copy.digest, version=1, servers=servers, clients=0, speed=0.0, own=0.0)


def played(tmp_path: Path, scenario: Callable[[Stage], Awaitable[None]]) -> None:
    _, config, scene = staged(tmp_path, HUB, "hub.clients=0")
    plan, problems = hollow_plan(scene, config, strategy_of(config), trace=False), list[str]()

    async def run() -> None:
        stage = Stage(plan)
        await scenario(stage)
        await stage.tasks.close()

    run_virtually(run(), 1000.0, problems)
    assert problems == []


def test_weights_come_while_the_server_enlists_a_client(tmp_path: Path) -> None:
    """A client asks for the weights before the server has enlisted it, which takes a second here. Then it is ready at once."""
    came_s: dict[str, float] = {}

    async def scenario(stage: Stage) -> None:
        server = await stage.server("server")

        async def answered(sender: str, payload: bytes) -> bytes:
            ask = Next.unpack(payload)
            if ask.session and not ask.version:
                came_s.setdefault("enlists", stage.clock.now())
                await stage.clock.sleep(1.0)
            elif ask.weights is not None:
                came_s.setdefault("ready", stage.clock.now())
                await stage.clock.sleep(1.0)
            return stage.state("server").pack()

        server.serve(Next.KIND, answered)
        working = asyncio.create_task(stage.client("server").run())
        await stage.clock.sleep(2.0)
        working.cancel()

    played(tmp_path, scenario)
    assert came_s == {"enlists": 0.0, "ready": 1.0}


def test_a_server_that_does_not_answer_does_not_hold_up_the_weights(tmp_path: Path) -> None:
    """Of the two servers that a client knows one does not answer. The other one gives the rest."""
    took_s: list[float] = []

    async def scenario(stage: Stage) -> None:
        await stage.server("there")

        async def silent(sender: str, payload: bytes) -> bytes:
            await asyncio.sleep(2 * GONE_S)
            return b""

        stage.hub.join("elsewhere").serve(AskBlocks.KIND, silent)
        client = stage.client("there", "elsewhere")
        servers = ("there", "elsewhere")
        assert await client._weights.fetch(stage.copy.digest, lambda: servers, lambda: True) is not None
        took_s.append(stage.clock.now())

    played(tmp_path, scenario)
    assert took_s[0] < GONE_S / 3


@pytest.mark.parametrize(("came", "took_s"), [(4, 0.0), (1, 8.0), (0, 2.0)])
def test_weights_that_do_not_come_in_time_tell_how_slow_the_link_is(came: int, took_s: float, tmp_path: Path) -> None:
    """Of four blocks so many come within the two seconds of a step; of none it is known that it takes longer."""

    async def scenario(stage: Stage) -> None:
        stage.copy.block = stage.copy.size // 4
        await stage.copy.name(stage.compute.offload)
        server, late = stage.hub.join("server"), asyncio.Event()
        blocks = Blocks(server, stage.clock, stage.tasks)

        async def some(sender: str, payload: bytes) -> bytes:
            asked = AskBlocks.unpack(payload).blocks
            for block in asked:
                if block < came:
                    await stage.copy.send(blocks, sender, block)
            return b"" if asked else stage.copy.manifest

        server.serve(AskBlocks.KIND, some)
        taker = Blocks(stage.hub.join("client"), stage.clock, stage.tasks)
        news = asyncio.Event()
        download = WeightsDownload(taker, stage.clock, stage.compute, stage.tasks, news)
        found = download.fetch(stage.copy.digest, lambda: ("server",), lambda: not late.is_set())
        fetching = asyncio.create_task(found)
        await stage.clock.sleep(2.0)
        late.set()
        news.set()
        assert (await fetching is not None) == (came == 4)
        assert download.took_s == took_s

    played(tmp_path, scenario)


def test_weights_that_change_while_they_are_read_are_not_sent(tmp_path: Path) -> None:
    """Else a client would take the server for a liar."""
    frames: list[str] = []

    async def scenario(stage: Stage) -> None:
        await stage.server("server")
        right = stage.compute.copied_weights

        async def read(begin: int = 0, end: int | None = None) -> object:
            values = await right(begin, end)
            stage.copy.closed = True
            return values + 1

        stage.compute.copied_weights = read  # type: ignore[assignment]
        client = stage.hub.join("client")

        async def heard(sender: str, frame: object) -> None:
            frames.append(sender)

        client.receive(heard, (Block.KIND,))
        ask = AskBlocks(digest=stage.copy.digest)
        manifest = Manifest.unpack(await client.call("server", ask.KIND, ask.pack(), timeout_s=1.0))
        assert manifest.blocks > 1
        ask = AskBlocks(digest=stage.copy.digest, blocks=(0,))
        await client.call("server", ask.KIND, ask.pack(), timeout_s=1.0)
        await stage.clock.sleep(1.0)
        with pytest.raises(MuletrainError, match="replaced"):
            await stage.copy.name(stage.compute.offload)

    played(tmp_path, scenario)
    assert frames == []


def test_who_finds_a_servers_places_taken_has_the_weights_soon_after(tmp_path: Path) -> None:
    """A place was kept for a minute after the last block."""
    took_s: list[float] = []

    async def scenario(stage: Stage) -> None:
        await stage.server("server", takers=1)
        downloads = [
            WeightsDownload(
                Blocks(stage.hub.join(name), stage.clock, stage.tasks),
                stage.clock,
                stage.compute,
                stage.tasks,
                asyncio.Event(),
            )
            for name in "abc"
        ]
        fetches = (d.fetch(stage.copy.digest, lambda: ("server",), lambda: True) for d in downloads)
        assert all(values is not None for values in await asyncio.gather(*fetches))
        took_s.append(stage.clock.now())

    played(tmp_path, scenario)
    assert 1.0 < took_s[0] < GONE_S / 2
