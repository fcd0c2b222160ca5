"""Real processes under injected faults: the numbers are those of one process, and what was injected is what is
counted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from muletrain.cli.actions.opening import Wanted
from muletrain.cli.actions.train import run_local
from muletrain.errors import ConfigError

from .fleet_run import checkpoint_weights
from .reference import train_plainly
from .test_equivalence import EXACT, facts_of, relative_difference

pytestmark = pytest.mark.timeout(600)


def command(*arguments: str, settings: list[str]) -> list[str]:
    sets = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-m", "muletrain.cli.main", *arguments, *sets]


def events_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.glob("*.jsonl") for line in path.open()]


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [e for e in events if e["kind"] == kind]


def test_chaos_costs_no_number(tmp_path: Path) -> None:
    """SIGKILL, SIGSTOP and damaged frames at exact steps: every tensor within 1e-5, every fault counted once."""
    settings = [*EXACT, f"data.cache={tmp_path / 'cache'}"]
    plan = "kill stage1@step3; freeze stage0@step6 for 3s; corrupt stage0@step9; corrupt stage1@step12"
    fleet = subprocess.Popen(
        command("run", "--chaos", plan, settings=settings),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    facts, cache = facts_of(tmp_path)
    expected, losses = train_plainly(facts, facts.source(cache))
    out, _ = fleet.communicate(timeout=500)
    assert fleet.returncode == 0, out
    (run,) = (tmp_path / "runs").iterdir()
    assert relative_difference(checkpoint_weights(run), expected) <= 1e-5
    events = events_in(run)
    told = {e["step"]: e["loss"] for e in of_kind(events, "step_done")}
    assert told == pytest.approx(dict(enumerate(losses, 1)), abs=1e-4)
    injected = of_kind(events, "fault_injected")
    assert "; ".join(e["planned"] for e in injected) == plan
    late = [e["step"] - planned for e, planned in zip(injected, (3, 6, 9, 12), strict=True)]
    assert all(0 <= steps <= 5 for steps in late), f"{late}: where others use the machine, too, signals come late"
    ids = {e["name"]: e["peer_id"] for e in of_kind(events, "peer_joined")}
    killed, _, *damaged = (ids[e["who"][0]] for e in injected)
    assert killed in {e["peer_id"] for e in of_kind(events, "peer_down")}
    refused = [e["remote"] for e in of_kind(events, "frame_refused") if "not a frame" in e["reason"]]
    again = {e["name"] for e in of_kind(events, "gradient_stands_out")}
    assert again >= {e["who"][0] for e in injected[2:]}, "each spoilt gradient was computed again"
    assert not any(e["skipped"] for e in of_kind(events, "step_applied"))
    assert set(refused) == set(damaged), "each damaged frame was refused and reported, and nothing else was"
    assert len(refused) <= 2 * len(damaged), (
        "once; twice where it was refused while it was still on its way: then it goes again as it is"
    )
    assert {e["peer"] for e in of_kind(events, "run_finished")} == set(ids) - set(injected[0]["who"])
    assert "Injected faults: 4" in out
    assert " ".join(out.split()).count(" by peer-") >= 3, "the report says who noticed"  # perhaps across lines


def test_a_plan_that_makes_no_sense_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="unknown target 'stage7'"):
        run_local(Wanted(None, []), json=True, chaos="kill stage7@step3")
    with pytest.raises(ConfigError, match="--seed draws the faults of --chaos"):
        run_local(Wanted(None, []), json=True, seed=3)
    assert not list(tmp_path.iterdir())


class Command:
    """A muletrain command with ``--json``; what it says is read as it comes."""

    def __init__(self, folder: Path, *arguments: str, settings: list[str] | None = None) -> None:
        folder.mkdir()
        self.process = subprocess.Popen(
            command(*arguments, "--json", settings=settings or []),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.said.extend(json.loads(line) for line in self.process.stdout)

    def wait_for(self, kind: str, timeout_s: float = 300.0, **fields: Any) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for event in list(self.said):
                if event["kind"] == kind and all(event.get(k) == v for k, v in fields.items()):
                    return event
            assert self.process.poll() is None, self.errors()
            time.sleep(0.1)
        raise AssertionError(f"no {kind} {fields} within {timeout_s} s")

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def end(self, code: int = 0) -> str:
        """Check the exit code, and return standard error."""
        errors = self.errors()
        assert self.process.wait(60) == code, errors
        self._reader.join()
        return errors


@pytest.mark.slow
def test_owners_get_their_machines_back(tmp_path: Path) -> None:
    """Two replicas of a stage: one leaves in order when its pause file appears; the other, asked by Ctrl-C, stays, for
    it is the last, until the first is back because its file is gone. Nobody takes anybody for dead."""
    pause = tmp_path / "mine"
    settings = [*EXACT, "train.steps=100000", "fleet.peers=3", "checkpoint.every=0", f"data.cache={tmp_path / 'cache'}"]
    started = [first := Command(tmp_path / "a", "start", "--listen", "127.0.0.1", settings=settings)]
    try:
        ticket = first.wait_for("ticket")["ticket"]
        joins = ["join", ticket, "--listen", "127.0.0.1", "--stage", "1", "--threads", "1"]
        started.append(second := Command(tmp_path / "b", *joins, "--name", "second", "--pause-file", str(pause)))
        started.append(third := Command(tmp_path / "c", *joins, "--name", "third", "--bandwidth", "1000"))
        first.wait_for("step_done", step=3)
        pause.touch()
        left = first.wait_for("peer_left", name="second")
        assert second.wait_for("run_finished")["reason"] == "left in order"
        third.process.send_signal(signal.SIGINT)
        third.wait_for("leave_put_off", name="third", reason="no other peer serves stage 1")
        first.wait_for("step_done", step=left["step"] + 5)
        pause.unlink()
        first.wait_for("member_admitted", name="second")
        gone = first.wait_for("peer_left", name="third")
        third.end(code=130)
        first.wait_for("step_done", step=gone["step"] + 5)
        first.process.send_signal(signal.SIGINT)
        first.end(code=130)
        assert "paused: joins when" in second.end()
    finally:
        for each in started:
            each.process.kill()
            each.process.wait()
    applied = [e for e in first.said if e["kind"] == "step_applied" and e["step"] <= gone["step"]]
    seconds = {e["step"] for e in applied if e["peer"] == "second"}
    assert set(range(1, left["step"] + 1)) <= seconds, "it took part up to the step it announced"
    assert left["step"] + 1 not in seconds
    suspected = {
        e["peer_id"] for c in (first, third) for e in c.said if e["kind"] == "peer_down" and e["t"] < gone["t"]
    }
    assert not suspected & {left["peer_id"], gone["peer_id"]}, "by those that were there when it left"
    assert list((tmp_path / "a").glob("runs/*/checkpoints/step-*"))
