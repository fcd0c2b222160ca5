"""What a client of a hub can make its server do, and believe."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.compute.base import Microbatch
from muletrain.compute.estimate import Offer
from muletrain.config.schema import Precision
from muletrain.errors import Refused
from muletrain.events import ClientEnlisted, Event
from muletrain.network.memory import MemoryHub
from muletrain.policy.passes import Part, Pass
from muletrain.runs.client import Help, Helping
from muletrain.runs.measure.machine import Machine
from muletrain.runs.spec import WorkerSpec
from muletrain.runtime.core.blocks import Blocks
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.pool.checks import LEAST, Checks
from muletrain.runtime.pool.client import PATIENCE_S, Client
from muletrain.runtime.pool.clients import ENLISTS, ENLISTS_PER_S, Clients
from muletrain.runtime.pool.desk import PartsDesk
from muletrain.runtime.pool.messages import Next
from muletrain.runtime.pool.server import PooledCompute
from proofs import reference
from proofs.scenario import Scenario
from tests.runners import TICKET, host_of
from tests.virtual import virtually

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = bytes(32)


async def room(numbers: int) -> torch.Tensor:
    """Of a compute's stand-in."""
    return torch.empty(numbers)


def server_in(hub: MemoryHub, emit: Any, tasks: Tasks) -> Clients:
    """Stage 0's only server."""
    net = hub.join("server")
    inner: Any = SimpleNamespace(stage=0)
    plan: Any = SimpleNamespace(chunk=1)
    blocks = Blocks(net, LoopClock(), tasks)
    clients = Clients(inner, plan, blocks, tasks, lambda stage: ("server",), CONFIG, emit, print, AsyncMock())
    clients._digest, clients._version = bytes(32), 1
    return clients


def test_one_identity_that_enlists_again_and_again_writes_few_events() -> None:
    """In an hour of a question each tenth of a second."""

    async def scenario() -> int:
        hub, said, tasks = MemoryHub(), list[Event](), Tasks()
        server_in(hub, said.append, tasks)
        net, refused = hub.join("client"), 0
        for n in range(36_000):
            try:
                await net.call(
                    "server",
                    Next.KIND,
                    Next(name="c", config=CONFIG, stage=0, session=n + 1).pack(),
                    timeout_s=1,
                )
            except Refused as e:
                refused += "enlisted too often" in e.why
            await asyncio.sleep(0.1)
        await tasks.close()
        assert refused > 30_000
        return len([e for e in said if isinstance(e, ClientEnlisted)])

    assert ENLISTS <= virtually(scenario()) <= ENLISTS + 3600 * ENLISTS_PER_S + 1


def test_a_client_between_two_servers_hears_at_once_that_the_run_has_ended() -> None:
    async def scenario() -> float:
        hub, tasks, clock = MemoryHub(), Tasks(), LoopClock()
        server = server_in(hub, lambda event: None, tasks)
        compute: Any = SimpleNamespace(
            stage=0, n_params=1, n_trained=1, delayed=False, discard=lambda mb: None, room=room, offload=None
        )
        plan: Any = SimpleNamespace(chunk=1, microbatches=1, verify=0.0, capacity=1)
        client = Client(hub.join("client"), clock, Tasks(), compute, plan, CONFIG, "c", ("server",))
        running = asyncio.create_task(client.run())
        await asyncio.sleep(1.0)
        assert client._home == "server"
        server.lose("client", "it was late")
        server._digest = None  # it ends, and takes nobody
        await asyncio.sleep(2.0)
        assert client._home is None
        begin = clock.now()
        await server.end(over=True)
        await running
        await tasks.close()
        return clock.now() - begin

    assert virtually(scenario()) < PATIENCE_S / 10


def test_a_client_between_two_stages_hears_at_once_that_the_run_has_ended() -> None:
    async def scenario() -> float:
        hub, tasks, clock = MemoryHub(), Tasks(), LoopClock()
        server, net = server_in(hub, lambda event: None, tasks), hub.join("client")
        first = Next(name="c", config=CONFIG, stage=0, session=1).pack()
        await net.call("server", Next.KIND, first, timeout_s=1)
        server.lose("client", "it leaves for another stage")
        compute: Any = SimpleNamespace(
            stage=1, n_params=1, n_trained=1, delayed=False, discard=lambda mb: None, room=room, offload=None
        )
        plan: Any = SimpleNamespace(chunk=1, microbatches=1, verify=0.0, capacity=1)
        client = Client(net, clock, Tasks(), compute, plan, CONFIG, "c", ("gone",), others=("server",))
        running = asyncio.create_task(client.run())
        await asyncio.sleep(1.0)
        begin = clock.now()
        await server.end(over=True)
        await running
        await tasks.close()
        return clock.now() - begin

    assert virtually(scenario()) < PATIENCE_S / 10


@pytest.mark.parametrize("ends", ["the server", "the client"])
def test_an_orderly_end_is_no_refusal(ends: str) -> None:
    """Both say that they go, and the other side's word comes when it is over here."""

    async def scenario() -> list[str]:
        hub, tasks, refused = MemoryHub(), Tasks(), list[str]()
        server, net = server_in(hub, lambda event: None, tasks), hub.join("client")
        for each in (server._net, net):
            each.on_refusal(lambda who, why: refused.append(why))
        compute: Any = SimpleNamespace(
            stage=0, n_params=1, n_trained=1, delayed=False, discard=lambda mb: None, room=room, offload=None
        )
        plan: Any = SimpleNamespace(chunk=1, microbatches=1, verify=0.0, capacity=1)
        client = Client(net, LoopClock(), tasks, compute, plan, CONFIG, "c", ("server",))
        running = asyncio.create_task(client.run())
        await asyncio.sleep(1.0)
        assert len(server) == 1
        if ends == "the client":
            client.stop()
        await server.end(over=True)
        await running
        await asyncio.sleep(1.0)
        await tasks.close()
        return refused

    assert virtually(scenario()) == []


@pytest.mark.parametrize("stopped", [False, True])
def test_who_changes_its_stage_hears_that_the_run_ends_meanwhile(stopped: bool, tmp_path: Path) -> None:
    """A compute is made for seconds, in which the client of the former stage is told, or its user stops it. He is no
    server that takes leave."""
    spec = WorkerSpec(role="join", name="c", folder=str(tmp_path), ticket=TICKET, client=True)
    plan = SimpleNamespace(chunk=1, microbatches=1, verify=0.0, capacity=1)
    config = SimpleNamespace(fleet=SimpleNamespace(profile=None))
    facts: Any = SimpleNamespace(plan=lambda: plan, config=config, config_digest=CONFIG)

    async def scenario() -> None:
        hub, tasks, host = MemoryHub(), Tasks(), host_of(spec)
        server, net, helping = server_in(hub, lambda event: None, tasks), hub.join("client"), Helping(host)
        first = Next(name="c", config=CONFIG, stage=0, session=1).pack()
        await net.call("server", Next.KIND, first, timeout_s=1)

        async def made(facts: object, stage: int, machine: object) -> object:
            if stage == 1 and stopped:
                helping.stop()
            elif stage == 1:
                await server.end(over=True)
                await asyncio.sleep(1.0)
            return SimpleNamespace(
                stage=stage, parts=1, n_params=1, n_trained=1, delayed=False, close=lambda: None, offload=None
            )

        host.build_client = made  # type: ignore[assignment, method-assign]
        help = Help(facts, net, Machine(torch.device("cpu"), Precision.FP32, Offer(1)), "server", None)
        servers = {0: ("server",), 1: ("another",)}
        former = await helping.client(help, tasks, 0, servers)
        assert not former.over
        client = await helping.client(help, tasks, 1, servers)
        if stopped:
            assert not client.over, "it leaves in order"
        else:
            assert client.over
        await client.run()
        assert host.clock.now() < PATIENCE_S / 10
        await tasks.close()

    virtually(scenario())


def test_a_loss_that_is_not_believed_is_computed_again_and_counts_for_nothing() -> None:
    """A client whose device is right brings back another loss than it computed."""
    facts = reference.facts_of(Scenario(1, (1,), 1, 1, 4, 0.0, (), clients=("client-0a",), sequences=4))
    tokens, alone = reference.Tokens(facts), reference.stage_compute(facts, 0)

    async def losses(compute: Any) -> list[float]:
        found = []
        for index in range(facts.plan.microbatches):
            inputs, targets = map(torch.from_numpy, tokens.microbatch(0, index))
            found.append((await compute.loss_backward(Microbatch(0, index), inputs, targets, accumulate=True))[0])
        return found

    async def scenario() -> None:
        hub, clock, tasks, claimed = MemoryHub(), LoopClock(), Tasks(), list[float]()
        own, net, rng = reference.stage_compute(facts, 0), hub.join("server"), random.Random(1)
        blocks = Blocks(net, clock, tasks)
        desk = PartsDesk(own, blocks, tasks, facts.plan, lambda stage: ("server",), CONFIG, lambda event: None, rng)
        server, compute = PooledCompute(desk), reference.client_compute(facts, 0)
        await server.digest()
        right = compute.loss_backward

        async def wrong(*arguments: Any, **named: Any) -> Any:
            loss, result = await right(*arguments, **named)
            claimed.append(loss)
            return 1e30, result

        compute.loss_backward = wrong  # type: ignore[method-assign]
        client = Client(hub.join("client"), clock, tasks, compute, facts.plan, CONFIG, "c", ("server",))
        running = asyncio.create_task(client.run())
        await asyncio.sleep(5.0)
        found = await losses(server)
        assert claimed, "it has computed something"
        assert found == pytest.approx(await losses(alone), rel=1e-5)
        client.stop()
        await running
        await tasks.close()

    virtually(scenario())


@pytest.mark.parametrize("usual", [2.5, 1e8])
def test_a_clients_loss_is_believed_only_where_it_is_like_those_that_counted(usual: float) -> None:
    part = Part(Pass.LOSS, 0, 0, 0, 2)
    checks = Checks(SimpleNamespace(), LoopClock(), 0.0, random.Random(0))  # type: ignore[arg-type]
    assert checks.believes(part, usual, part.rows)
    assert not checks.believes(part, 1e308, part.rows)
    for _ in range(LEAST):
        checks.counted(part, usual, part.rows)
    assert checks.believes(part, 3 * usual, part.rows)
    assert not checks.believes(part, 100 * usual, part.rows)
    assert not checks.believes(part._replace(what=Pass.BACKWARD), usual, part.rows), "only the last stage has a loss"
    for _ in range(2 * LEAST * 4):  # our own device finds that it has grown
        checks.counted(part, 100 * usual, part.rows)
    assert checks.believes(part, 100 * usual, part.rows)


def test_a_loss_is_as_large_as_what_its_part_is_worth() -> None:
    """Of conversations: one long answer counts for more than many short ones."""
    part = Part(Pass.LOSS, 0, 0, 0, 1)
    checks = Checks(SimpleNamespace(), LoopClock(), 0.0, random.Random(0))  # type: ignore[arg-type]
    for _ in range(LEAST):
        checks.counted(part, 10 * 0.5, 0.5)
    assert checks.believes(part, 10 * 12.0, 12.0)
    assert not checks.believes(part, 49.0, 1 / 64)


def test_a_call_that_left_before_a_doubt_does_not_tell_what_came_since() -> None:
    """The part that crossed the call was taken from the client, as if it had been lost on the way, and counted against it."""

    async def scenario() -> tuple[bool, int]:
        tasks = Tasks()
        server = server_in(MemoryHub(), lambda event: None, tasks)
        ask = Next(name="c", config=CONFIG, stage=0, session=7)
        first = await server._on_next("client", ask)
        server.pool.ready("client", 4)
        server.pool.put(Pass.FORWARD, 0, 0, 1, 0.0)
        crossing = ask.model_copy(update={"version": 1, "heard": first.number})
        given = server.pool.take("client", 0.0)
        assert given is not None
        server.pool.sent(given.number, 0.0)
        server.doubt("client")
        second = await server._on_next("client", crossing)
        await server._on_next("client", crossing.model_copy(update={"heard": second.number, "parts": (given.number,)}))
        kept = server.pool.part("client", given.number) is not None
        await tasks.close()
        return kept, server.standings["client"].lapses

    assert virtually(scenario()) == (True, 0)
