"""A fleet measured before training: blocks, the file and the tables of it, and the commands that ask for it."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from muletrain.cli.actions import examine as cli_peers
from muletrain.cli.main import app
from muletrain.cli.show.measured_fleet import fleet_tables
from muletrain.compute import profile
from muletrain.compute.estimate import Offer
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import Precision
from muletrain.config.surveyed import LEAST_MBPS, Found, fleet_of, written
from muletrain.config.surveyed import Path as Link
from muletrain.errors import CapacityError, MuletrainError
from muletrain.events import Event, EventLog, FleetMeasured, ProbeFailed
from muletrain.model.spec import ModelSpec
from muletrain.planning.tournament import rounds
from muletrain.runs.fleet import LocalFleet
from muletrain.runs.measure import fleet_survey as survey
from muletrain.runs.measure.probing import (
    seconds_per_byte,
)
from muletrain.runs.session import Session
from muletrain.runs.worker_files import OWNER_FILE, PROBE_FILE
from tests.fleet_run import run_fleet
from tests.test_link_probes import PROFILE

SPEC = ModelSpec.from_config(ModelConfig(layers=2, width=32, heads=2, vocab=512, context=16))


@given(st.integers(0, 40))
def test_a_tournament_has_every_pair_once_and_nobody_twice_at_a_time(players: int) -> None:
    found = rounds(players)
    assert sorted(pair for pairs in found for pair in pairs) == [
        (a, b) for a in range(players) for b in range(a + 1, players)
    ]
    for pairs in found:
        busy = [player for pair in pairs for player in pair]
        assert len(set(busy)) == len(busy)
    if players > 1:
        assert len(found) == players - 1 + players % 2


# Blocks -----------------------------------------------------------------------------------------------------------------


def test_a_block_is_computed_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "QUICK_S", 60.0)  # the machine may be busy
    begin = time.perf_counter()
    found = profile.block_times(SPEC, 3, torch.device("cpu"), Precision.FP32)
    assert 0 < found.forward_s + found.backward_s < time.perf_counter() - begin
    assert (found.sequences, found.tokens) == (3, 16)
    monkeypatch.setattr(profile, "QUICK_S", 0.0)
    assert profile.block_times(SPEC, 3, torch.device("cpu"), Precision.FP32).sequences == 1, (
        "fewer, where they take too long"
    )


def test_a_block_that_finds_no_room_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("CUDA out of memory.\nTried to allocate 3 GiB")

    monkeypatch.setattr(profile.Block, "once", full)
    with pytest.raises(CapacityError, match=r"could not be computed on cpu: CUDA out of memory\. Tried"):
        profile.block_times(SPEC, 1, torch.device("cpu"), Precision.FP32)


@given(st.lists(st.integers(0, 8), max_size=6), st.floats(1e-9, 1e-3))
def test_what_is_seen_late_does_not_change_a_rate(stalls: list[int], per_byte: float) -> None:
    """A stall before piece k shows it, and all that wait by then, when the piece after it is due."""
    due = [1 + k * 1000 * per_byte for k in range(9)]
    seen = [due[min(8, k + 1)] if k in stalls else due[k] for k in range(9)]
    assert 0.6 * per_byte < seconds_per_byte([(at, 1000) for at in seen]) < 1.4 * per_byte
    assert seconds_per_byte([(at, 1000) for at in due]) == pytest.approx(per_byte)


def test_pieces_that_come_in_bunches_give_the_link_s_rate() -> None:
    due = [0.01 * k for k in range(9)]
    bunched = [due[2]] * 3 + [due[5]] * 3 + [due[8]] * 3
    assert seconds_per_byte([(at, 1000) for at in bunched]) == pytest.approx(1e-5)


# The file ---------------------------------------------------------------------------------------------------------------


def found(name: str, place: int, **changes: Any) -> Found:
    fine: dict[str, Any] = dict(
        device="cpu",
        forward_s=0.001,
        backward_s=0.002,
        flops=3.3333e10,
        memory_bytes=3 * 2**30,
        host_bytes=None,
        disk_bytes=10**10,
    )
    return Found(name=name, place=place, **{**fine, **changes})


def test_the_file_loads_as_what_was_measured_and_a_plan_reads_it(tmp_path: Path) -> None:
    peers = [
        found("desk", 0),
        found("lab-0", 1, device="NVIDIA T4", host_bytes=2**34),
        found("lab-1", 1),
        found("gone", 2),
    ]
    paths = {(0, 1): Link(0.02, 1e6), (1, 0): Link(0.02, 5e6), (1, 1): Link(0.0001, 1e9)}
    fleet = fleet_of(peers, paths)
    (tmp_path / "fleet.toml").write_text(written(fleet, peers, ["measured"]))
    assert load_fleet(tmp_path / "fleet.toml") == fleet
    desk, lab, _, _ = fleet.peers()
    assert [p.name for p in fleet.peers()] == ["desk", "lab-0", "lab-1", "gone"]
    assert desk.flops == 3.333e10
    assert (lab.memory_bytes, lab.host_bytes) == (3 * 2**30, 2**34)
    assert (fleet.link(0, 1).delay_s, fleet.link(0, 1).bandwidth_bytes_per_s) == (0.01, 1e6)
    assert fleet.link(2, 0).bandwidth_bytes_per_s == 5e6
    assert fleet.link(1, 2).bandwidth_bytes_per_s == 1e9
    assert desk.up_bytes_per_s == 1e6
    assert fleet.link(0, 3).bandwidth_bytes_per_s == pytest.approx(LEAST_MBPS / 8 * 1e6)
    planned = CliRunner().invoke(
        app,
        [
            "plan",
            str(tmp_path / "fleet.toml"),
            "--batch",
            "8",
            "--time-limit",
            "1",
            "--json",
            "--set",
            "model.width=64",
            "--set",
            "model.heads=2",
            "--set",
            "model.context=32",
        ],
    )
    assert planned.exit_code == 0, planned.output
    used = {
        name for s in json.loads(planned.stdout)["strategies"] for stage in s["stages"] for name in stage["machines"]
    }
    assert used <= {"desk", "lab-0", "lab-1", "gone"}
    assert used


def test_tables_show_machines_and_links(tmp_path: Path) -> None:
    peers = [found("desk", 0), found("lab", 1)]
    fleet = fleet_of(peers, {(0, 1): Link(0.02, 1e6), (1, 0): Link(0.02, 5e6)})
    (tmp_path / "fleet.toml").write_text(written(fleet, peers, []))
    console = Console(file=io.StringIO(), width=100)
    measured = FleetMeasured(path=str(tmp_path / "fleet.toml"), peers=["desk", "lab"], lacking=["nothing more"])
    console.print(fleet_tables(measured))
    lines = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["desk", "cpu", "0.0333", "3", "GiB", "20", "ms", "8", "Mb/s", "40", "Mb/s"] in lines
    assert ["lab", "20", "ms,", "40", "Mb/s"] in lines
    assert ["nothing", "more"] in lines


# The commands -----------------------------------------------------------------------------------------------------------


@contextmanager
def start_that_says(folder: Path, event: Event) -> Iterator[None]:
    """Of 'muletrain start' only what takes the request."""
    over = threading.Event()

    def work() -> None:
        with LocalFleet(folder, 1) as fleet:
            told: list[tuple[str, str]] = []
            fleet.tell = lambda name, line: told.append((name, line))  # type: ignore[method-assign]
            session = Session("start", folder, fleet)
            session.founder = "first"
            while not told and not over.is_set():
                session.poll()
                time.sleep(0.02)
            session.close()
            if told == [("first", "probe")]:
                with EventLog(folder / "first.jsonl", "first") as log:
                    log.emit(event)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_doctor_peers_asks_the_start_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_peers, "TAKEN_S", 0.2)
    with pytest.raises(MuletrainError, match="no waiting run"):
        cli_peers.probe_peers(None, json=True)
    folder = tmp_path / "runs" / "one"
    with pytest.raises(MuletrainError, match="--run"):
        cli_peers.probe_peers(folder, json=True)
    folder.mkdir(parents=True)
    (folder / OWNER_FILE).write_bytes(b"key")
    with pytest.raises(MuletrainError, match="no answer"):
        cli_peers.probe_peers(None, json=True)
    assert not (folder / PROBE_FILE).exists()
    monkeypatch.setattr(cli_peers, "TAKEN_S", 20)
    measured = FleetMeasured(path="x/fleet.toml", peers=["a"], lacking=[])
    with start_that_says(folder, measured):
        told = CliRunner().invoke(app, ["doctor", "--peers", "--run", str(folder), "--json"])
    assert json.loads(told.stdout)["path"] == "x/fleet.toml"
    (folder / OWNER_FILE).write_bytes(b"key")  # the other session has taken its own along
    with (
        start_that_says(folder, ProbeFailed(reason="the run has begun")),
        pytest.raises(MuletrainError, match="has begun"),
    ):
        cli_peers.probe_peers(folder, json=True)


def test_who_asked_for_a_measurement_before_training_gets_it_of_all(tmp_path: Path) -> None:
    """Whatever 'doctor --peers' measured meanwhile, of those that were there."""
    here = {"one": ("one", Offer(2**30))}
    measured: list[int] = []

    class Counted(survey.Survey):
        async def _measure(self) -> None:
            measured.append(len(self.people()))

    async def scenario() -> None:
        nothing: Any = None
        own = Counted(nothing, nothing, nothing, 1, tmp_path, lambda: {**here}, nothing)
        own.before_training()
        await own.measure()  # asked from outside
        here["two"] = ("two", Offer(2**30))
        assert await own.settled(), "others may have come and gone meanwhile"
        assert not await own.settled()

    asyncio.run(scenario())
    assert measured == [1, 2]


@pytest.mark.alone
def test_a_real_fleet_is_measured_and_then_trains(tmp_path: Path) -> None:
    """Processes, sockets, encryption; links that the profile shapes."""
    (tmp_path / "links.toml").write_text(PROFILE)
    config = load_config(
        None,
        [
            "model.width=32",
            "model.heads=2",
            "model.layers=2",
            "model.context=16",
            "model.vocab=512",
            "train.batch=4",
            "train.microbatch=2",
            "train.steps=1",
            "fleet.peers=3",
            "fleet.trainers=1",
            "compute.precision=fp32",
            f"fleet.profile={tmp_path / 'links.toml'}",
            f"data.cache={tmp_path / 'cache'}",
        ],
    )
    events = run_fleet(config, tmp_path / "run", timeout_s=200, each=lambda name: {"probe": name == "peer-0"})
    (measured,) = [e for e in events if isinstance(e, FleetMeasured)]
    assert measured.lacking == []
    was, is_ = load_fleet(tmp_path / "links.toml"), load_fleet(Path(measured.path))
    for a in range(3):
        assert is_.peers()[a].name == f"peer-{a}"
        assert 1e6 < (is_.peers()[a].flops or 0) < 1e13
        for b in range(3):
            if a != b:
                assert is_.link(a, b).bandwidth_bytes_per_s == pytest.approx(
                    was.link(a, b).bandwidth_bytes_per_s, rel=0.2
                )
                assert is_.link(a, b).delay_s == pytest.approx(was.link(a, b).delay_s, rel=0.2, abs=0.003)
    assert [e for e in events if e.kind == "step_applied"], "and then it trained"
