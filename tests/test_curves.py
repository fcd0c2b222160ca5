"""The figures of every step in TensorBoard, wandb and trackio: each step once, also after a step back and a resume."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muletrain import events as ev
from muletrain.cli.actions.opening import Wanted
from muletrain.cli.actions.train import run_local
from muletrain.config.load import load_config
from muletrain.errors import ConfigError
from muletrain.events import Event
from muletrain.runs.figures import PEERS, Again, Figures, Row
from muletrain.runs.fleet import LocalFleet
from muletrain.runs.session import Session
from muletrain.runs.tensorboard import TensorBoardSink
from muletrain.runs.trackers import TOLD, TrackerSink, check_packages
from tests.test_cli import SMALL, TWO, muletrain
from tests.test_metrics import applied, done, started

pytestmark = pytest.mark.filterwarnings("default")


def back(to: int, lineage: str = "x", **more: Any) -> ev.SteppedBack:
    return ev.SteppedBack(step=9, to=to, lost=[1], moves=[], lineage=lineage, **more)


def rows(*events: Event, earlier: Any = ()) -> list[Row | Again]:
    figures = Figures(earlier)
    return [row for event in events for row in figures.fold(event)] + list(figures.rest())


def test_stages_and_peers_follow_when_the_step_is_over() -> None:
    sent: Any = {"id": {"activation": 6}}
    found = rows(
        started(),
        applied("a", 1, 0, sent, wait_s=1.0),
        done(1),
        applied("b", 1, 0, wait_s=3.0),
        applied("c", 1, 1),
        applied("a", 2, 0),
        done(2),
    )
    assert [(row.step, row.tokens) for row in found] == [(0, 0), (1, 100), (1, 100), (2, 200), (2, 200)]
    late = found[2]
    assert isinstance(late, Row)
    of_stage = {"compute_s": 3.0, "averaging_s": 0.5, "update_s": 0.25, "idle_s": 2.0, "microbatches": 6}
    assert {tag: late.values[f"stage/{tag}/0"] for tag in of_stage} == of_stage
    assert (late.values["stage/peers/0"], late.values["stage/sent_bytes/0"]) == (2, 6)
    assert (late.values["peer/idle_s/a"], late.values["peer/idle_s/b"]) == (1.0, 3.0)


def test_a_thousand_peers_are_few_curves() -> None:
    *_, row = rows(*(applied(f"p{n}", 1, n % 8) for n in range(1000)), done(1))
    assert isinstance(row, Row)
    assert len({tag.split("/")[2] for tag in row.values if tag.startswith("peer/")}) == PEERS
    assert row.values["stage/peers/7"] == 125


def test_strangers_cannot_make_curves() -> None:
    wrong = (applied("x", 1, 2), applied("x", 1, -1), applied("x", 9, 0), applied("a", 1, 1))
    *_, row = rows(started(stages=2), *wrong, done(1))
    assert isinstance(row, Row)
    assert {tag.rpartition("/")[2] for tag in row.values} == {"1", "a"}


def test_two_reports_of_a_step_and_of_a_step_back_count_once() -> None:
    found = rows(started(), done(1), done(1), done(2), done(2, "fork"), back(1), back(1, peer="b"), done(2), done(3))
    assert [type(row).__name__ + str(row.step) for row in found] == ["Again0", "Row1", "Row2", "Again2", "Row2", "Row3"]
    assert [row.tokens for row in found] == [0, 100, 200, 100, 200, 300]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [(s.step, s.value) for s in EventAccumulator(str(folder)).Reload().Scalars(tag)]


def played(folder: Path, *events: Event, earlier: Any = ()) -> None:
    sink = TensorBoardSink(folder, earlier)
    for event in events:
        sink(event)
    sink.close()


def test_tensorboard_has_each_step_once_after_a_step_back(tmp_path: Path) -> None:
    first = (started(), ev.Validated(0, 6.0, 1.0, 9), done(1, loss=5.0), done(2, loss=4.0), done(3, loss=3.0))
    again = (back(1), done(2, "2b", loss=4.5), applied("a", 2, 0), done(3, "3b", loss=3.5))
    played(tmp_path, *first, *again)
    assert scalars(tmp_path, "train/loss") == [(1, 5.0), (2, 4.5), (3, 3.5)]
    assert scalars(tmp_path / "tokens", "train/loss") == [(100, 5.0), (200, 4.5), (300, 3.5)]
    assert scalars(tmp_path, "validation/loss") == [(0, 6.0)]
    assert scalars(tmp_path, "stage/idle_s/0") == [(2, 4.0)]


def test_a_step_back_to_the_beginning_keeps_the_loss_of_the_first_weights(tmp_path: Path) -> None:
    played(tmp_path, started(), ev.Validated(0, 6.0, 1.0, 9), done(1, loss=5.0), back(0), done(1, "b", loss=5.5))
    assert scalars(tmp_path, "train/loss") == [(1, 5.5)]
    assert scalars(tmp_path, "validation/loss") == [(0, 6.0)]


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = [started(), done(1, loss=5.0), done(2, loss=4.0), ev.Validated(2, 4.4, 1.0, 9), done(3, loss=3.0)]
    played(tmp_path, *earlier)
    monkeypatch.setattr("time.time", lambda: 2e9)  # the name of a later process' file
    played(tmp_path, started(first_step=2), ev.Validated(2, 4.4, 1.0, 9), done(3, loss=3.5), earlier=earlier)
    assert scalars(tmp_path, "train/loss") == [(1, 5.0), (2, 4.0), (3, 3.5)]
    assert scalars(tmp_path / "tokens", "train/loss") == [(100, 5.0), (200, 4.0), (300, 3.5)]
    assert scalars(tmp_path, "validation/loss") == [(2, pytest.approx(4.4))]
    monkeypatch.setattr("time.time", lambda: 3e9)
    played(tmp_path, started(), done(1, loss=9.0))  # the run starts over
    assert scalars(tmp_path, "train/loss") == [(1, 9.0)]


class FakePackage(SimpleNamespace):
    """Stands for wandb or trackio: notes calls."""

    def __init__(self) -> None:
        super().__init__(calls=[], Settings=lambda **kw: kw)

    def init(self, **kw: Any) -> FakePackage:
        self.calls.append(("init", kw))
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append((step, values))

    def finish(self) -> None:
        self.calls.append(("finish", {}))


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_tracker_gets_each_step_once_and_in_order(
    package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakePackage()
    monkeypatch.setitem(sys.modules, package, fake)
    config = load_config(None, ["logging.project=mine", f'logging.to=["{package}"]', "checkpoint.place=/secret"])
    earlier = [started(), done(1), done(2), done(3)]
    sink = TrackerSink(package, tmp_path / "run-1", config, earlier)
    for event in (started(first_step=2), done(3), applied("a", 3, 0), done(4), ev.Validated(4, 1.5, 2.0, 9)):
        sink(event)
    for event in (applied("a", 4, 0), done(5), back(3), done(4, "b"), done(5, "b"), done(6, "b"), applied("a", 6, 0)):
        sink(event)
    sink.close()
    sink.close()
    (_, init), *logged, (end, _) = fake.calls
    assert (init["project"], init["name"], init["resume"], end) == ("mine", "run-1", "allow", "finish")
    assert "secret" not in json.dumps(init["config"])
    assert set(init["config"]) == set(TOLD)
    assert [step for step, _ in logged] == [4, 5, 6]
    values = dict(logged)
    assert values[4]["validation/loss"] == 1.5
    assert values[4]["train/tokens"] == 400
    assert values[4]["peer/idle_s/a"] == values[6]["stage/idle_s/0"] == 4.0
    if package == "wandb":
        assert init["settings"] == {"console": "off", "x_disable_meta": True}, "the terminal shows tickets"


def test_a_missing_package_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muletrain.runs.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"logging.to: 'trackio' .* pip install 'muletrain\[trackio\]', or leave it"):
        check_packages(load_config(None, ['logging.to=["trackio"]']))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'wandb' needs the package of that name: pip install 'muletrain\[wandb\]'"):
        run_local(Wanted(None, ['logging.to=["wandb"]']), json=True)
    assert not (tmp_path / "runs").exists()


def test_a_package_that_refuses_the_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("no API key")

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=refuse))
    with pytest.raises(ConfigError, match=r"logging\.to: trackio does not take the run: no API key"):
        TrackerSink("trackio", tmp_path, load_config(None, []))


def test_what_fails_later_is_reported_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakePackage()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    config = load_config(None, ['logging.to=["trackio"]'])
    session = Session("run", tmp_path, LocalFleet(tmp_path, 1), config=config)
    fake.log = lambda *_, **__: 1 / 0
    for event in (started(), done(1), done(2), done(3)):
        session.show(event)
    session.close()
    assert [text for text in session.view.warnings if "ZeroDivisionError" in text] == [
        "TrackerSink failed on a step_done event and gets no more events: ZeroDivisionError('division by zero')"
    ]
    assert session.view.step == 3
    assert not (tmp_path / "tensorboard").exists(), "logging.to does not name it"


def test_a_machine_that_joins_logs_only_to_files_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muletrain.runs.trackers.TrackerSink", None)
    session = Session("join", tmp_path, LocalFleet(tmp_path, 1))
    for event in (started(), done(1)):
        session.show(event)
    session.close()
    assert scalars(tmp_path / "tensorboard", "train/loss") == [(1, 4.0)]


def tried(package: str, folder: Path, *more: str) -> Path:
    """A run that logs to a package, and a resume that goes on."""
    config = ["--set", f'logging.to=["{package}"]', "--set", "logging.project=mine", *more]
    muletrain("run", *SMALL, *TWO, *config, "--json", "--set", "train.steps=4", cwd=folder)
    (run,) = (folder / "runs").iterdir()
    out = muletrain("run", "--resume", str(run), "--json", "--set", "train.steps=7", cwd=folder)
    assert all(line.startswith("{") for line in out.splitlines()), "standard output has events alone"
    assert not (run / "tensorboard").exists()
    return run


def test_trackio_has_the_run_and_its_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run = tried("trackio", tmp_path)
    with closing(sqlite3.connect(tmp_path / "trackio" / "mine.db")) as base:
        found = base.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert {name for name, _, _ in found} == {run.name}
    values = {step: json.loads(metrics) for _, step, metrics in found}
    assert [step for _, step, _ in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [values[step]["train/tokens"] for step in values] == [512 * step for step in values]
    assert {"train/loss", "stage/idle_s/1", "peer/idle_s/peer-0"} <= values[3].keys()
    assert "validation/loss" in values[7]


def test_each_step_is_there_once_though_a_stage_lost_all_its_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    options = ["fleet.peers=3", "fleet.adopt_after=3", "checkpoint.every=5", "train.steps=20"]
    more = [part for option in (*options, 'logging.to=["tensorboard", "trackio"]') for part in ("--set", option)]
    muletrain("run", *SMALL, *more, "--chaos", "kill stage0@step8", cwd=tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    assert ev.events_in(run, ev.SteppedBack), "else the test tests nothing"
    steps = list(range(1, 21))
    assert [step for step, _ in scalars(run / "tensorboard", "train/loss")] == steps
    assert [step for step, _ in scalars(run / "tensorboard" / "tokens", "train/loss")] == [512 * step for step in steps]
    with closing(sqlite3.connect(tmp_path / "trackio" / "muletrain.db")) as base:
        assert [step for (step,) in base.execute("SELECT step FROM metrics ORDER BY id")] == steps


def test_wandb_has_the_run_and_its_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tried("wandb", tmp_path, "--set", f"checkpoint.place={tmp_path}/secret-place")
    steps = list[int]()
    for file in sorted((run / "wandb").glob("offline-run-*/run-*.wandb")):
        assert file.stem == f"run-{run.name}", "one run of wandb"
        steps += logged_by_wandb(file)
        assert b"secret-place" not in file.read_bytes()
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    assert not list((run / "wandb").rglob("output.log")), "the terminal shows tickets"


def logged_by_wandb(file: Path) -> list[int]:
    """Steps of the records in an offline file. Its format is that of LevelDB's log: blocks of 32 KiB with chunks, each
    with a checksum, a length and a type (1: whole, 2: first, 3: middle, 4: last)."""
    from wandb.proto import wandb_internal_pb2

    data, at, steps, whole = file.read_bytes(), 7, list[int](), b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                steps.append(record.history.step.num)
    return steps
