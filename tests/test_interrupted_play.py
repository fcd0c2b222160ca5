"""``simulate fleet``, ended early or by peers that give up, and its progress shown."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muletrain.cli.actions.simulate_fleet import shown, what_if
from muletrain.errors import Expelled, MuletrainError
from muletrain.runs import asked
from muletrain.runtime.peer.service import Service
from muletrain.sim import loop
from muletrain.sim.fleet import protocol
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.simulation import Fidelity, simulate_fleet
from tests.tiny_fleets import PACED, TINY, run_of


@pytest.mark.parametrize("fidelity", ["flow", "protocol"])
def test_a_play_that_is_ended_early_counts_what_was_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fidelity: Fidelity
) -> None:
    monkeypatch.setattr(loop, "LOOK_UP_S", 0.0)
    scene, config = run_of(tmp_path, PACED, "fleet.stages=2", "train.batch=8", "fleet.rebalance_period=20")
    seen: list[tuple[float, float]] = []

    def goes_on(now_s: float, steps: float) -> bool:
        seen.append((now_s, steps))
        return now_s < 100

    result = simulate_fleet(scene, config, Weather(), hours=1.0, fidelity=fidelity, goes_on=goes_on)
    assert result.partial
    assert 100 <= 3600 * result.hours < 121
    assert result.throughput == pytest.approx(8 * result.steps / (3600 * result.hours))
    assert result.throughput == pytest.approx(8 / 16.5, rel=0.1)
    assert result.share_of_optimum + sum(result.idle.values()) == pytest.approx(1.0)
    assert result.curve[-1].time_s <= 3600 * result.hours
    assert seen == sorted(seen)
    assert len(seen) > 5
    whole = simulate_fleet(scene, config, Weather(), hours=0.03, fidelity=fidelity)
    assert (whole.partial, whole.hours) == (False, pytest.approx(0.03))


def test_looking_up_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOOK_UP_S", 0.0)
    scene, config = run_of(tmp_path, PACED, "fleet.stages=2", "train.batch=8")
    outcomes = []
    for goes_on in (lambda now_s, steps: True, None):
        more = {} if goes_on is None else {"goes_on": goes_on}
        outcomes.append(simulate_fleet(scene, config, Weather(), hours=0.02, fidelity="protocol", **more))
    assert outcomes[0] == outcomes[1]


def test_without_a_whole_step_none_is_counted(tmp_path: Path) -> None:
    scene, config = run_of(tmp_path, PACED, "fleet.stages=2", "train.batch=800")
    result = simulate_fleet(scene, config, Weather(), hours=0.02, fidelity="protocol")
    assert (result.steps, result.throughput) == (0.0, 0.0)


class Failing(Service):
    """The second peer ends with ``error`` after 20 s."""

    made = itertools.count()
    error: MuletrainError = MuletrainError("gave up waiting for the others")

    async def run(self) -> bool:
        if next(self.made) != 1:
            return await super().run()
        await asyncio.sleep(20)
        raise self.error


@pytest.mark.parametrize("error", [Failing.error, Expelled("this peer leaves")])
def test_who_gives_up_is_told_from_who_is_expelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: MuletrainError
) -> None:
    monkeypatch.setattr(Failing, "made", itertools.count())
    monkeypatch.setattr(Failing, "error", error)
    monkeypatch.setattr(protocol, "Service", Failing)
    scene, config = run_of(tmp_path, PACED, "fleet.stages=2", "train.batch=8")
    result = simulate_fleet(scene, config, Weather(), hours=0.02, fidelity="protocol")
    if isinstance(error, Expelled):
        assert (result.events, result.gave_up, result.failure) == ({"expelled": 1}, (), None)
    else:
        assert result.events == {"gave up": 1}
        assert [(round(g.time_s, 6), g.peer, g.why) for g in result.gave_up] == [(20.0, "a-1", str(error))]
        assert result.failure == "a-1 gave up after 20.0 s: gave up waiting for the others"


@pytest.mark.parametrize("as_json", [False, True])
def test_peers_that_give_up_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    monkeypatch.setattr(Failing, "made", itertools.count())
    monkeypatch.setattr(protocol, "Service", Failing)
    file = tmp_path / "fleet.toml"
    file.write_text(PACED)
    options = [*TINY, "train.batch=8", "fleet.stages=2"]
    code = what_if(file, None, None, options, hours=0.02, seed=0, plot=(), json=as_json, fidelity="protocol")
    out, err = capsys.readouterr()
    assert code == 1
    assert "error: a-1 gave up after 20.0 s" in err
    if as_json:
        said = json.loads(out)
        assert (said["gave_up"][0]["peer"], said["partial"], said["advice"]) == ("a-1", False, [])
    else:
        assert "1 gave up" in out
        assert "of these changes" not in out


PLAYED = re.compile(r".*: (\d+:\d+|[\d.]+ m?s) of 10:00:00")


def long_play(tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    """Ten hours of a fleet, every message: minutes."""
    file = tmp_path / "fleet.toml"
    file.write_text(PACED)
    options = [word for option in (*TINY, "train.batch=8", "fleet.stages=2") for word in ("--set", option)]
    command = (sys.executable, "-m", "muletrain.cli.main", "simulate", "fleet", str(file), *options)
    return subprocess.Popen(
        (*command, "--hours", "10", "--fidelity", "protocol", *more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def cpu_s(process: int) -> float:
    """CPU time of ``process`` until now [s]."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_shows_what_it_has(tmp_path: Path, number: signal.Signals) -> None:
    process = long_play(tmp_path)
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "preparing to play the fleet ...\n"
        assert PLAYED.match(process.stderr.readline()), "the first line comes while it plays"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    assert re.search(r"interrupted after (\d+:\d+|[\d.]+ m?s|\d+:\d+:\d+) of 10:00:00", out)
    assert "tokens/s" in out
    assert "share of the optimum" in out


@pytest.mark.skipif(sys.platform != "linux", reason="CPU time of another process is read from /proc")
def test_interrupted_json_says_that_it_is_partial_and_shows_no_progress(tmp_path: Path) -> None:
    process = long_play(tmp_path, "--json")
    try:
        while cpu_s(process.pid) < 12:  # nothing says how far it is; the first six or so load the program
            time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "preparing to play the fleet ...\n")
    said = json.loads(out)
    assert (said["partial"], said["hours_asked"]) == (True, 10)
    assert 0 < said["hours"] < 10


def test_interrupted_twice_it_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "AGAIN_S", 0.0)
    before = signal.getsignal(signal.SIGINT)
    with shown("playing", 60.0, asked.Asked(), quiet=True) as playing:
        assert playing(1.0, 0.0)
        signal.raise_signal(signal.SIGINT)
        assert not playing(2.0, 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_on_a_terminal_a_bar_moves_from_the_first_second(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "80")
        with shown("playing", 60.0, asked.Asked(), quiet=False) as playing:
            for second in range(10):
                playing(second, second / 4)
                time.sleep(0.15)
        terminal.flush()
        seen = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "0 ms of 1:00, 0 steps" in seen
    assert "5.0 s of 1:00, 1 step " in seen
    assert "8.0 s of 1:00, 2 steps" in seen


def test_where_there_is_no_terminal_a_line_says_now_and_then_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with shown("playing", 60.0, asked.Asked(), quiet=False) as playing:
        for second in range(12):
            playing(second, second / 4)
            time.sleep(0.1)
    assert re.fullmatch(r"playing: 1?\d.0 s of 1:00, 2 steps 1\d% \.\.\.\n", capsys.readouterr().err)
