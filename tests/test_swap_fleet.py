"""Strategy 'swap' with real processes: peers that hold a fraction of the model compute what one process computes,
whoever comes and goes. In a pipeline, a peer that is too small for its stage swaps it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from muletrain.cli.actions.planned import follows
from muletrain.compute.estimate import Offer
from muletrain.config.load import load_config
from muletrain.errors import CapacityError, ConfigError
from muletrain.events import (
    Event,
    FaultInjected,
    PeerJoined,
    StepApplied,
    StepDone,
    SwapWorked,
    WeightsDiffer,
    read_events,
)
from muletrain.runs.join.limits import check_stage
from muletrain.strategies import strategy_of
from muletrain.strategies.swap import Swap

from .fleet_run import checkpoint_weights, run_fleet
from .reference import train_plainly
from .test_equivalence import EXACT, check_every_microbatch_once, facts_of, relative_difference
from .test_survival import command

if TYPE_CHECKING:
    from muletrain.runs.fleet import LocalFleet

pytestmark = pytest.mark.timeout(300)
GIB = 0.003
"""What a peer may use: a fifth of what the model of these tests needs."""
SWAP = ["swap.whole=true", "fleet.stages=1", "fleet.peers=2", "compute.threads=1"]


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("lamb", marks=pytest.mark.slow)])
def test_peers_that_swap_equal_a_single_process_though_one_is_killed(tmp_path: Path, optimizer: str) -> None:
    """fp32, no compression, two peers, of which one dies, dropout and clipping on: every tensor within 1e-5."""
    facts, cache = facts_of(tmp_path, *SWAP, f"optimizer.name={optimizer}", "train.steps=12")
    need = facts.needs()[0]
    torch.set_num_threads(1)
    expected, losses = train_plainly(facts, facts.source(cache))
    killed: list[Event] = []

    def watch(fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 5 and not killed:
            os.killpg(fleet.pid("peer-1"), signal.SIGKILL)
            killed.append(event)

    events = run_fleet(
        facts.config, tmp_path / "run", watch=watch, lost=frozenset({"peer-1"}), each=lambda name: {"memory_gib": GIB}
    )
    assert killed
    assert relative_difference(checkpoint_weights(tmp_path / "run"), expected) <= 1e-5
    done = [e for e in events if isinstance(e, StepDone)]
    assert [e.loss for e in done] == pytest.approx(losses, abs=1e-4)
    assert max(e.grad_norm for e in done) > 0.5, "clipping acted"
    joined = [e for e in events if isinstance(e, PeerJoined)]
    assert [e.swapped > 1 for e in joined] == [True, True]
    worked = [e for e in events if isinstance(e, SwapWorked)]
    assert {e.step for e in worked} == set(range(1, 13))
    assert sum(e.microbatches for e in worked) > sum(e.rounds for e in worked), "several pass a load together"
    # each round passes its sub-models forward, and back unless it only computes what another peer accumulates; the two of the
    # last turn may be there still. Of all reports: one may be made when the next step's first round is over
    assert sum(e.loads for e in worked) >= (joined[0].swapped - 2) * sum(e.rounds for e in worked)
    assert not list((tmp_path / "run").glob("swap-peer-0*")), "its files end with it"
    assert not need.resident(Offer(int(2 * GIB * 2**30)))


@pytest.mark.slow
def test_the_command_swaps_with_no_further_option_and_its_report_tells(tmp_path: Path) -> None:
    """A peer is killed, the run is resumed, and the numbers are those of one process."""
    settings = [
        *EXACT,
        "train.steps=8",
        "compute.threads=1",
        f"compute.memory={GIB}",
        "fleet.peers=2",
        f"data.cache={tmp_path / 'cache'}",
    ]

    def ran(*arguments: str, settings: list[str]) -> str:
        done = subprocess.run(
            command("run", *arguments, settings=settings), cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    out = ran("--strategy", "swap", "--verbose", "--chaos", "kill peer-1@step3", settings=settings)
    assert "parts that take turns" in out
    table = out[out.index("Swapped stages") :].splitlines()
    assert [line.split()[:2] for line in table if "peer-" in line][:2] == [["0", "peer-0"], ["0", "peer-1"]]
    (run,) = (tmp_path / "runs").iterdir()
    facts, cache = facts_of(tmp_path, *SWAP, "train.steps=8")
    torch.set_num_threads(1)
    expected, _ = train_plainly(facts, facts.source(cache))
    assert relative_difference(checkpoint_weights(run), expected) <= 1e-5
    events = [e for path in run.glob("*.jsonl") for e in read_events(path)]
    assert [e.who for e in events if isinstance(e, FaultInjected)] == [["peer-1"]]
    ran("--resume", str(run), settings=["train.steps=11"])
    facts, cache = facts_of(tmp_path, *SWAP, "train.steps=11")
    events = [e for path in run.glob("*.jsonl") for e in read_events(path)]
    assert {e.step for e in events if isinstance(e, SwapWorked)} == set(range(1, 12))
    assert json.loads((run / "checkpoints" / "step-00000011" / "manifest.json").read_text())["step"] == 11


@pytest.mark.slow
def test_one_dies_in_the_middle_of_a_step_and_another_joins(tmp_path: Path) -> None:
    """Three peers swap; one is killed while gradients are averaged, and a newcomer takes the state, swaps it and computes:
    every tensor is within 1e-5 of one process."""
    steps, plan = 32, "kill peer-1@step4:averaging; join@step5"
    work = [
        "train.batch=64",
        f"train.steps={steps}",
    ]  # long steps, so that rounding stays small until a newcomer is there
    settings = [*EXACT, *work, "compute.threads=1", f"compute.memory={GIB}", "fleet.peers=3"]
    line = command(
        "run", "--strategy", "swap", "--chaos", plan, settings=[*settings, f"data.cache={tmp_path / 'cache'}"]
    )
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    facts, cache = facts_of(tmp_path, *SWAP, *work)
    torch.set_num_threads(1)
    expected, _ = train_plainly(facts, facts.source(cache))
    assert relative_difference(checkpoint_weights(run), expected) <= 1e-5
    events = [e for path in run.glob("*.jsonl") for e in read_events(path)]
    assert {e.planned for e in events if isinstance(e, FaultInjected)} == set(plan.split("; "))
    joined = {e.name: e.swapped for e in events if isinstance(e, PeerJoined)}
    (newcomer,) = joined.keys() - {"peer-0", "peer-1", "peer-2"}
    assert min(joined.values()) > 1, "all of them swap"
    applied = [e for e in events if isinstance(e, StepApplied)]
    assert max(e.step for e in applied if e.peer == "peer-1") < 5
    assert sum(e.microbatches for e in applied if e.peer == newcomer) > 0
    assert not [e for e in events if isinstance(e, WeightsDiffer)]


def test_alone_it_is_one_process(tmp_path: Path) -> None:
    """One peer, which nobody can join: no process beside the command's. After Ctrl-C in the middle it is
    resumed, and ends with the numbers of one process."""
    slow = "optimizer.lr=1e-3"  # with three times as much, rounding alone reaches 3e-5 on some machines
    settings = [*EXACT, "train.steps=30", slow, "compute.threads=1", f"compute.memory={GIB}"]
    settings += ["checkpoint.every=4", f"data.cache={tmp_path / 'cache'}"]
    line = command("run", "--strategy", "swap", "--json", "--trace", "trace.json", settings=settings)
    fleet = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    children = set[str]()
    assert fleet.stdout is not None
    for row in fleet.stdout:
        for thread in Path(f"/proc/{fleet.pid}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                children.add(thread.read_text())
        event = json.loads(row)
        if (event["kind"], event.get("step")) == ("step_done", 6):
            fleet.send_signal(signal.SIGINT)
    assert fleet.wait(60) == 130
    assert children <= {""}, "no daemon, no other process"
    (run,) = (tmp_path / "runs").iterdir()
    check_trace_of_swap(json.loads((tmp_path / "trace.json").read_text())["traceEvents"], run)
    assert not (run / "ticket").exists()
    assert not list(run.glob("swap-*"))
    assert not (run / "checkpoints" / "step-00000030").exists(), "stopped before the end"
    done = subprocess.run(
        command("run", "--resume", str(run), settings=[]), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "muletrain generate" in done.stdout
    facts, cache = facts_of(tmp_path, *SWAP, "train.steps=30", slow)
    torch.set_num_threads(1)
    expected, _ = train_plainly(facts, facts.source(cache))
    assert relative_difference(checkpoint_weights(run), expected) <= 1e-5
    events = [e for path in run.glob("*.jsonl") for e in read_events(path)]
    assert {e.step for e in events if isinstance(e, SwapWorked)} == set(range(1, 31))


def check_trace_of_swap(rows: list[dict[str, Any]], run: Path) -> None:
    """Every load and every drained gradient is drawn, and each pass of a microbatch through a sub-model, one at a time."""
    events = list(read_events(run / "peer-0.jsonl"))
    (parts,) = [e.swapped for e in events if isinstance(e, PeerJoined)]
    worked = [e for e in events if isinstance(e, SwapWorked)]
    drawn = {slot: [r for r in rows if r.get("cat") == slot] for slot in ("load", "sub-model", "drain")}
    names = {r["args"]["name"] for r in rows if r["name"] == "thread_name"}
    assert names >= drawn.keys()
    assert not names & {f"{slot} 2" for slot in drawn}, "no row beside the first"
    assert len(drawn["load"]) in range(sum(e.loads for e in worked), sum(e.loads for e in worked) + parts)
    assert len(drawn["drain"]) == parts * sum(e.rounds for e in worked)
    assert len(drawn["sub-model"]) == (2 * parts - 1) * sum(e.microbatches for e in worked)
    assert {r["name"] for r in drawn["load"]} == {f"load part {k}" for k in range(parts)}


def test_a_configuration_says_why_it_cannot_swap() -> None:
    for settings, problem in (
        (["fleet.stages=2"], "use one stage"),
        (["fleet.stages=1", "hub.clients=1"], "leave one out"),
        (["fleet.stages=1", "optimizer.delayed=true"], "use optimizer.delayed = false"),
        (["fleet.stages=1", "swap.backing=off"], "use another backing"),
    ):
        with pytest.raises(ConfigError, match="swap\\.whole") as told:
            load_config(None, ["swap.whole=true", *settings])
        assert problem in str(told.value)
    plain = load_config(None, ["swap.together=20"])
    asked = follows(plain, "swap", local=True)
    assert (asked.fleet.stages, asked.local().fleet.peers) == (1, 1)
    assert strategy_of(asked) == Swap(20)
    assert strategy_of(asked).capacity(1) == 40
    with pytest.raises(ConfigError, match="optimizer\\.delayed"):
        follows(load_config(None, ["optimizer.delayed=true"]), "swap", local=True)
    with pytest.raises(ConfigError, match="swap\\.whole"):
        follows(asked, "swarm", local=True)


def test_a_peer_that_is_too_small_for_its_stage_swaps_it_and_serves(tmp_path: Path) -> None:
    """Two stages, four peers, of which one in each may use a quarter of what its stage needs: the numbers are those of one
    process, it takes part, and replicas agree bit by bit after each step, whether they swap or not."""
    facts, cache = facts_of(tmp_path, "fleet.peers=4", "train.steps=8")
    stages, small = (0, 1, 0, 1), {"peer-3": {"memory_gib": 0.002}, "peer-2": {"memory_gib": 0.002}}
    assert all(not need.resident(Offer(int(0.002 * 2**30))) for need in facts.needs())
    torch.set_num_threads(1)
    expected, losses = train_plainly(facts, facts.source(cache))
    events = run_fleet(facts.config, tmp_path / "run", stages=stages, each=lambda name: small.get(name, {}))
    assert relative_difference(checkpoint_weights(tmp_path / "run"), expected) <= 1e-5
    assert [e.loss for e in events if isinstance(e, StepDone)] == pytest.approx(losses, abs=1e-4)
    check_every_microbatch_once(events, facts)
    assert {e.name for e in events if isinstance(e, PeerJoined) and e.swapped} == set(small)
    assert not [e for e in events if isinstance(e, WeightsDiffer)]
    served = {
        name: sum(e.microbatches for e in events if isinstance(e, StepApplied) and e.peer == name) for name in small
    }
    assert min(served.values()) >= 4, served


def test_where_swapping_is_off_it_is_turned_away(tmp_path: Path) -> None:
    for backing, told in (("off", "does not serve it. Give"), ("ram", "machine's memory beside a GPU, and none is")):
        facts, _ = facts_of(tmp_path, f"swap.backing={backing}")
        with pytest.raises(CapacityError, match=told):
            check_stage(facts, 0, Offer(int(0.002 * 2**30)))
    check_stage(facts_of(tmp_path)[0], 0, Offer(int(0.002 * 2**30)))
    with pytest.raises(CapacityError, match="even swapped it needs"):
        check_stage(facts_of(tmp_path)[0], 0, Offer(1 << 18))
