"""Strategy 'hub' with real processes: servers and clients compute what one process computes, whatever clients do."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from muletrain.cli.actions.planned import follows
from muletrain.clock import LoopClock
from muletrain.config.load import load_config
from muletrain.errors import ConfigError
from muletrain.events import ClientBegan, ClientFinished, ClientLost, FaultInjected, PoolWorked, StepDone, read_events
from muletrain.network.memory import MemoryHub
from muletrain.policy.chaos import Bounds, parse, readable
from muletrain.policy.rebalance import stage_to_help, stage_to_move_to
from muletrain.runtime.pool import client
from muletrain.runtime.pool.client import Roaming
from muletrain.runtime.pool.messages import Answer, Next
from muletrain.runtime.pool.servers import Costs, Helpers, helpers_of
from muletrain.sim.loop import run_virtually

from .fleet_run import checkpoint_weights, run_fleet
from .reference import train_plainly
from .test_equivalence import EXACT, check_every_microbatch_once, facts_of, relative_difference
from .test_machines import output, ticket_in, wait_for
from .test_survival import command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)
HUB = ["hub.clients=4", "train.microbatch=4", "train.steps=8", "compute.threads=1"]


def paced(folder: Path) -> str:
    """A setting: eight machines so slow that clients have the weights before a step is over."""
    profile = folder / "fleet.toml"
    profile.write_text('[[machines]]\nname = "home"\ncount = 8\n[pacing]\nforward_ms = 40.0\nbackward_ms = 80.0\n')
    return f"fleet.profile={profile}"


@pytest.mark.slow
def test_with_delayed_updates_they_equal_a_single_process_that_has_them(tmp_path: Path) -> None:
    facts, cache = facts_of(tmp_path, *HUB, paced(tmp_path), "optimizer.delayed=true")
    torch.set_num_threads(1)
    expected, losses = train_plainly(facts, facts.source(cache))
    events = run_fleet(facts.config, tmp_path / "run")
    assert relative_difference(checkpoint_weights(tmp_path / "run"), expected) <= 1e-5
    assert [e.loss for e in events if isinstance(e, StepDone)] == pytest.approx(losses, abs=1e-4)
    check_every_microbatch_once(events, facts)


def test_servers_and_clients_equal_a_single_process(tmp_path: Path) -> None:
    """fp32, no compression, 2 stages x 2 servers, 4 clients, dropout and clipping on: every tensor within 1e-5."""
    facts, cache = facts_of(tmp_path, *HUB, paced(tmp_path))
    torch.set_num_threads(1)
    expected, losses = train_plainly(facts, facts.source(cache))
    events = run_fleet(facts.config, tmp_path / "run")
    assert relative_difference(checkpoint_weights(tmp_path / "run"), expected) <= 1e-5
    assert [e.loss for e in events if isinstance(e, StepDone)] == pytest.approx(losses, abs=1e-4)
    check_every_microbatch_once(events, facts)
    assert {e.stage for e in events if isinstance(e, ClientBegan)} == {0, 1}, "both stages have clients"
    assert {e.reason for e in events if isinstance(e, ClientFinished)} == {"the run has ended"}
    worked = [e for e in events if isinstance(e, PoolWorked)]
    assert sorted({(e.step, e.peer) for e in worked}) == [(s, f"peer-{k}") for s in range(1, 9) for k in range(4)]
    assert sum(c.get("parts", 0) for e in worked for c in e.clients.values()) >= 8, "two clients may be at one server"


@pytest.mark.slow
def test_clients_that_are_killed_and_frozen_cost_no_number(tmp_path: Path) -> None:
    """As 'muletrain run --strategy hub --chaos' does it; two of four are killed, one is frozen."""
    settings = [*EXACT, *HUB[1:], "train.steps=14", f"data.cache={tmp_path / 'cache'}", paced(tmp_path)]
    faults = "kill client-0@step3; kill client@step5; freeze client-3@step4 for 3s"
    ran = subprocess.run(
        command("run", "--verbose", "--strategy", "hub", "--chaos", faults, settings=settings),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    facts, cache = facts_of(tmp_path, *settings[len(EXACT) :])
    torch.set_num_threads(1)
    expected, _ = train_plainly(facts, facts.source(cache))
    (run,) = (tmp_path / "runs").iterdir()
    assert relative_difference(checkpoint_weights(run), expected) <= 1e-5
    events = [e for path in run.glob("*.jsonl") for e in read_events(path)]
    assert len([e for e in events if isinstance(e, FaultInjected)]) == 3
    killed = {e.who[0] for e in events if isinstance(e, FaultInjected) and e.what == "kill"}
    assert len(killed) == 2
    assert killed & {e.name for e in events if isinstance(e, ClientLost)}
    assert "Clients" in ran.stdout
    assert {line.split()[1] for line in ran.stdout.splitlines() if " gone " in line or " ended " in line} >= killed


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs a muletrain command in a folder of ``tmp_path``."""
    running: list[subprocess.Popen[str]] = []

    def run(folder: str, *arguments: str) -> subprocess.Popen[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "muletrain.cli.main", *arguments],
            cwd=tmp_path / folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_who_joins_becomes_a_client_and_with_reliable_a_server(
    started: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    own = ("--listen", "127.0.0.1")
    words = [word for s in (*EXACT, "train.steps=100000", "compute.threads=1") for word in ("--set", s)]
    founder = started("a", "start", "--verbose", "--strategy", "hub", *own, *words)
    ticket = ticket_in(tmp_path / "a")
    early = started("b", "join", ticket, *own, "--threads", "1", "--name", "early")
    wait_for(lambda: "servers and clients" in "".join(p.read_text() for p in tmp_path.glob("b/runs/*/early.jsonl")))
    server = started("c", "join", ticket, "--reliable", *own, "--threads", "1", "--name", "server")
    wait_for(lambda: '"early"' in _worked(tmp_path))
    late = started("d", "join", ticket, *own, "--threads", "1", "--name", "late")
    wait_for(lambda: '"late"' in _worked(tmp_path))
    status = {"peers": [{"clients": 0}]}
    while sum(p["clients"] for p in status["peers"]) < 2:  # announced now and then
        status = json.loads(output(started("e", "status", ticket, "--json")).splitlines()[-1])
    # of which stage depends on how fast servers and clients are, which share cores here
    late.send_signal(signal.SIGINT)
    assert "left in order" in output(late, code=130)
    output(started("a", "stop"))
    out = output(founder, code=3)
    assert "validation loss" in out
    assert {"early", "late"} <= set(out[out.index("Clients") :].split()), "also what other machines' servers counted"
    assert "becomes a client" in (told := output(early))
    assert "the run has ended" in told
    assert "serves stage 1" in output(server)


def _worked(folder: Path) -> str:
    lines = (line for path in folder.glob("*/runs/*/*.jsonl") for line in path.open())
    return "".join(line for line in lines if '"pool_worked"' in line)


@pytest.mark.parametrize(
    ("work", "speeds", "fits", "stage"),
    [
        ([1.0, 1.0], [0.0, 0.0], [0, 1], 0),
        ([1.0, 2.0], [0.0, 0.0], [0, 1], 1),
        ([1.0, 2.0], [0.0, 3.0], [0, 1], 0),
        ([1.0, 2.0], [1.0, 1.0], [0, 1], 1),
        ([1.0, 2.0], [1.0, 1.0], [0], 0),
        ([1.0, 1.0, 1.0], [5.0, 2.0, 2.0], [0, 1, 2], 1),
        ([1.0, 1.0], [1.0, 1.0], [], None),
    ],
)
def test_a_client_goes_where_it_is_needed_most(
    work: list[float], speeds: list[float], fits: list[int], stage: int | None
) -> None:
    assert stage_to_help(work, speeds, fits) == stage


@pytest.mark.parametrize(
    ("speeds", "left", "stage"),
    [
        ([1.0, 2.0], [1.0, 1.0], 0),
        ([1.0, 2.0], [0.1, 1.0], 0),
        ([1.0, 2.0], [0.0, 0.1], 1),
        ([0.0, 2.0], [0.0, 0.1], 1),
        ([1.0, 2.0], [-0.5, -3.0], 0),
        ([1.0, 2.0], [-3.0, -0.5], 1),
    ],
)
def test_a_client_counts_the_time_that_its_transfers_take(speeds: list[float], left: list[float], stage: int) -> None:
    """Where it has no time it goes last."""
    assert stage_to_help([1.0, 1.0], speeds, [0, 1], left) == stage


@pytest.mark.parametrize(
    ("speeds", "left", "drawn", "to"),
    [
        ([8.0, 2.0], [1.0, 1.0], 0.0, 1),
        ([8.0, 2.0], [1.0, 0.2], 0.0, 1),
        ([8.0, 6.5], [1.0, 1.0], 0.0, None),
        ([8.0, 6.5], [0.2, 0.5], 0.0, 1),
        ([8.0, 4.0], [0.5, 1.0], 0.49, 1),
        ([8.0, 4.0], [0.5, 1.0], 0.51, None),
        ([4.0, 4.0], [0.2, 1.0], 0.0, None),
        ([8.0, 2.0], [1.0, 0.0], 0.0, None),
        ([1.0, 8.0], [0.0, 0.5], 0.99, 1),
        ([1.0, 8.0], [-1.0, -0.5], 0.0, None),
    ],
)
def test_a_client_moves_to_where_its_transfers_leave_it_time(
    speeds: list[float], left: list[float], drawn: float, to: int | None
) -> None:
    """Of four with a quarter of ``together`` each. One that has no time at its stage takes nothing away from it."""
    assert stage_to_move_to([1.0, 1.0], speeds, 0, 4, 8 / 1.5, [0, 1], drawn, left) == to


def test_a_step_lasts_as_long_as_its_slowest_stage_computes() -> None:
    costs = Costs([1.0, 1.0], [100.0, 40.0], passes=12.0)
    assert costs.step_s([Helpers(1, 1.0, 0.5), Helpers(1, 3.0, 0.0)]) == pytest.approx(8.0)
    assert costs.left(0.05, 8.0) == pytest.approx([1 - 5 / 8, 1 - 2 / 8])


@pytest.mark.parametrize(
    ("work", "speeds", "together", "fits", "drawn", "to"),
    [
        ([1.0, 1.0], [8.0, 2.0], 8.0, [0, 1], 0.0, 1),
        ([1.0, 1.0], [8.0, 2.0], 8.0, [0, 1], 0.37, 1),
        ([1.0, 1.0], [8.0, 2.0], 8.0, [0, 1], 0.38, None),
        ([1.0, 1.0], [8.0, 2.0], 4.0, [0, 1], 0.74, 1),
        ([1.0, 1.0], [8.0, 2.0], 4.0, [0, 1], 0.76, None),
        ([1.0, 1.0], [8.0, 5.0], 8.0, [0, 1], 0.0, None),
        ([1.0, 1.0], [8.0, 5.0], 4.0, [0, 1], 0.0, 1),
        ([1.0, 3.0], [8.0, 12.0], 8.0, [0, 1], 0.0, 1),
        ([1.0, 4.0], [2.0, 8.0], 2.0, [0, 1], 0.0, None),
        ([1.0, 1.0], [8.0, 7.0], 8.0, [0, 1], 0.0, None),
        ([1.0, 1.0], [8.0, 2.0], 8.0, [0], 0.0, None),
        ([1.0, 1.0, 2.0], [8.0, 0.0, 0.0], 8.0, [0, 1, 2], 0.0, 2),
    ],
)
def test_of_four_clients_of_stage_0_so_many_move_as_make_it_as_fast_as_the_slowest_one(
    work: list[float], speeds: list[float], together: float, fits: list[int], drawn: float, to: int | None
) -> None:
    """``together``: speed of the four; servers do the rest."""
    assert stage_to_move_to(work, speeds, 0, 4, together, fits, drawn) == to


def test_of_servers_with_unequal_clients_all_are_counted() -> None:
    """Four were asked for all six, which seemed to have 15 clients."""

    async def counted() -> Helpers:
        network = MemoryHub()
        for server, clients in enumerate((3, 2, 3, 2, 1, 1)):
            state = Answer(
                weights=bytes(32), version=1, servers=(f"s{server}",), clients=clients, speed=2.0 * clients, own=1.0
            )
            network.join(f"s{server}").serve(Next.KIND, partial(_answer, state.pack()))
        return await helpers_of(network.join("client"), [f"s{server}" for server in range(6)])

    assert run_virtually(counted(), 100.0, []) == pytest.approx((12, 24.0, 6.0))


async def _answer(state: bytes, sender: str, payload: bytes) -> bytes:
    return state


def test_a_client_draws_once_in_a_step_whether_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks many times in a long step, and all who would move do so at its end."""

    class Stays:
        moved, version, looks, transfers_s, step_s = False, 7, 0, 0.0, 0.0

        def move(self) -> None:
            raise AssertionError

        async def run(self) -> None:
            await asyncio.sleep(0.1)  # many looks
            self.version = 8
            await asyncio.sleep(0.05)

    async def there() -> dict[int, tuple[str, ...]]:
        return {0: ("a",)}

    async def make(stage: int, servers: object) -> Stays:
        return Stays()

    async def helpers(net: object, asked: tuple[str, ...]) -> Helpers:
        looks.append(asked)
        return Helpers(4, 8.0, 1.0)

    looks, drawn, rng = list[object](), list[float](), random.Random(1)
    monkeypatch.setattr(rng, "random", lambda: drawn.append(0.9) or 0.9)
    monkeypatch.setattr(client, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(client, "helpers_of", helpers)
    net: Any = None
    asyncio.run(Roaming(there, make, net, LoopClock(), Costs([1.0], [1.0], 1.0), [0], 0, rng).run())
    assert len(looks) > 4
    assert len(drawn) == 2, "one for each version of the weights"


def test_clients_that_still_fetch_their_weights_are_not_taken_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 1 has done nothing at the first look, and is as fast as ours later; or it never does anything. In the run's first
    step nobody moves: a stage whose parts take minutes looks slow until some have come back."""

    class Mover:
        moved, version, transfers_s, step_s = False, 0, 0.0, 0.0

        def move(self) -> None:
            self.moved = True

        async def run(self) -> None:
            await asyncio.sleep(0.1)  # three looks

    async def there() -> dict[int, tuple[str, ...]]:
        return {0: ("a",), 1: ("b",)}

    async def make(stage: int, servers: object) -> Mover:
        made.append(Mover())
        return made[-1] if stage == 0 else Mover()

    made, rng = list[Mover](), random.Random(1)
    monkeypatch.setattr(rng, "random", lambda: 0.0)
    monkeypatch.setattr(client, "LOOK_EVERY_S", 0.03)
    for version, later, moves in ((2, 8.0, False), (2, 1e-9, True), (1, 1e-9, False)):
        Mover.version, of_b = version, iter([1e-9, *[later] * 9])

        async def helpers(net: object, asked: tuple[str, ...], of_b: Iterator[float] = of_b) -> Helpers:
            return Helpers(4, 8.0 if asked == ("a",) else next(of_b), 0.0)

        monkeypatch.setattr(client, "helpers_of", helpers)
        made.clear()
        net: Any = None
        costs = Costs([1.0, 1.0], [8.0, 2.0], passes=16.0)
        asyncio.run(Roaming(there, make, net, LoopClock(), costs, [0, 1], 0, rng).run())
        assert made[0].moved == moves


@pytest.mark.parametrize(("byte_s", "measured_s", "stages"), [(0.0, 0.0, [0]), (0.5, 0.0, [1]), (0.0, 4.0, [0, 1])])
def test_a_client_behind_a_slow_link_leaves_the_stage_of_many_parameters(
    byte_s: float, measured_s: float, stages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 2 s, and stage 0 has 8 bytes to move: 4 s if the owner limits the link to 2 bytes a second, or as
    the client has measured. Stage 1 has 2 bytes."""

    class Measures:
        moved, version, transfers_s, step_s = False, 2, measured_s, 2.0

        def move(self) -> None:
            self.moved = True

        async def run(self) -> None:
            await asyncio.sleep(0.05)

    async def there() -> dict[int, tuple[str, ...]]:
        return {0: ("a",), 1: ("b",)}

    async def make(stage: int, servers: object) -> Measures:
        went.append(stage)
        made = Measures()
        made.transfers_s = measured_s if stage == 0 else measured_s / 4
        return made

    async def helpers(net: object, asked: tuple[str, ...]) -> Helpers:
        return Helpers(4, 8.0 if asked == ("a",) else 9.0, 0.0)

    went, net = list[int](), cast("Any", None)
    monkeypatch.setattr(client, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(client, "helpers_of", helpers)
    costs = Costs([1.0, 1.0], [8.0, 2.0], passes=16.0)
    asyncio.run(Roaming(there, make, net, LoopClock(), costs, [0, 1], None, random.Random(1), byte_s=byte_s).run())
    assert went == stages


def test_a_configuration_says_why_it_cannot_be_a_hub() -> None:
    for settings, problem in ((['pipeline.seats=[["a"],["b"]]'], "leave one of them out"),):
        with pytest.raises(ConfigError, match="hub\\.clients: 2") as told:
            load_config(None, ["hub.clients=2", *settings])
        assert problem in str(told.value)
    plain = load_config(None, [])
    assert follows(plain, "hub", local=True).hub.clients == 4
    assert follows(plain, "hub", local=False).hub.clients == 0
    assert follows(load_config(None, ["hub.clients=3"]), "hub", local=True).hub.clients == 3
    assert follows(plain, "swarm", local=True) == plain
    for config, strategy, problem in (
        (plain, "1f1b", "add --plan"),
        (load_config(None, ["hub.clients=3"]), "swarm", "leave out hub.clients"),
    ):
        with pytest.raises(ConfigError, match=problem):
            follows(config, strategy, local=True)


def test_chaos_hits_servers_and_clients() -> None:
    bounds = Bounds(("peer-0", "peer-1"), 2, 10, ("client-0",))
    text = "kill client@step2; freeze client-0@step3 for 2s; kill server@step4:averaging"
    assert readable(parse(text, bounds)) == text
    for wrong, problem in (
        ("kill client@step2:averaging", "no point of a step"),
        ("move client-0 to stage1@step2", "no stage to move from"),
    ):
        with pytest.raises(ConfigError, match=problem):
            parse(wrong, bounds)
    with pytest.raises(ConfigError, match="unknown target"):
        parse("kill client@step2", Bounds(("peer-0", "peer-1"), 2, 10))
