"""``simulate fleet``: figures by hand, nothing lost in the books, and errors that say where and what to do."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muletrain.cli.actions.whatif import what_if
from muletrain.cli.show.playing import Playing
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.config.schema import RunConfig
from muletrain.errors import ConfigError, Expelled, MuletrainError
from muletrain.model.spec import ModelSpec
from muletrain.planning.cost import all_reduce_s, circulating, makespan_s, steady_shares
from muletrain.planning.devices import DEVICES, find_device
from muletrain.policy.wiring import Wiring
from muletrain.runtime.peer.service import Service
from muletrain.sim import loop
from muletrain.sim.fleet import advice, pace, protocol
from muletrain.sim.fleet.accounts import Outcome
from muletrain.sim.fleet.advice import MOST, WORTH, Change, Suggestion, suggestions
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.pace import Pace
from muletrain.sim.fleet.rates import TRAINERS, Rates
from muletrain.sim.fleet.simulation import EXAMPLE, Fidelity, by_rates, simulate_fleet, weather
from muletrain.sim.setting import Setting, setting
from muletrain.sim.steps import steps

TINY = (
    "model.width=64",
    "model.heads=2",
    "model.layers=4",
    "model.context=32",
    "model.vocab=512",
    "train.microbatch=1",
    "wire.activations=fp32",
    "wire.gradients=fp32",
    "checkpoint.every=0",
)
PACED = '[[machines]]\nname = "a"\ncount = 4\n[pacing]\nforward_ms = 1000\nbackward_ms = 2000\n'


def played(tmp_path: Path, text: str, *overrides: str, hours: float = 1.0, seed: int = 0) -> Outcome:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    fleet, config = load_fleet(file), load_config(None, [*TINY, *overrides])
    scene = setting(fleet, config, ModelSpec.from_config(config.model))
    return simulate_fleet(scene, config, weather(fleet.churn, tmp_path), hours=hours, seed=seed)


def scene_of(tmp_path: Path, text: str, *overrides: str) -> Setting:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    config = load_config(None, [*TINY, *overrides])
    return setting(load_fleet(file), config, ModelSpec.from_config(config.model))


# --- what things cost --------------------------------------------------------------------------------------------------


def test_makespan_has_half_of_the_slowest_s_last_piece() -> None:
    assert makespan_s(8, [(1, 3.0)]) == pytest.approx(24.0)
    assert makespan_s(8, [(2, 3.0), (0, 9.0)]) == pytest.approx(13.5)
    assert makespan_s(6, [(1, 1.0), (1, 2.0)]) == pytest.approx(5.0)


def test_all_reduce_by_hand() -> None:
    assert all_reduce_s(100.0, 1, 10.0, 10.0) == 0.0
    assert all_reduce_s(100.0, 4, 10.0, math.inf) == pytest.approx(15.0)  # 2 * 3/4 * 100 / 10
    assert all_reduce_s(100.0, 4, 10.0, 2.0) == pytest.approx(25.0)  # 2 shards of 25 on each path


def test_what_circulates_by_hand() -> None:
    """One alone is held up by nobody; two meet, and wait for half of what is served; many are as fast as the
    slowest."""
    assert circulating(1, [1.0, 2.0], 3.0) == pytest.approx(1 / 6)
    assert circulating(2, [1.0, 2.0], 3.0) == pytest.approx(2 / (6 + 0.5 / 6 + 1.0 * 2 / 6))
    assert circulating(99, [1.0, 2.0], 3.0) == pytest.approx(1 / 2, rel=1e-3)


def test_steady_shares_are_what_wiring_comes_to() -> None:
    times_s = {"near": 1.0, "far": 1.5, "slow": 4.0}
    wiring, found = Wiring(random.Random(0)), dict.fromkeys(times_s, 0)
    for peer in times_s:
        wiring.add(peer)
    for _ in range(4000):
        peer = wiring.choose()
        assert peer is not None
        found[peer] += 1
        wiring.measured(peer, times_s[peer])
    shares = steady_shares(list(times_s.values()), [1, 1, 1])
    assert [n / 4000 for n in found.values()] == pytest.approx(shares, abs=0.01)


def test_every_device_has_a_source_and_is_found_by_the_names_people_write() -> None:
    assert all(d.source and d.flops > 0 and d.memory_bytes > 0 for d in DEVICES)
    assert {d.name for d in DEVICES} >= {
        "T4",
        "V100",
        "A100",
        "H100",
        "H200",
        "RTX 2080",
        "RTX 3080",
        "RTX 4090",
        "GTX 1080",
        "CPU",
    }
    for written, name in (
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3080", "RTX 3080"),
        ("gtx1080ti", "GTX 1080 Ti"),
        ("A100-SXM4", "A100"),
    ):
        device = find_device(written)
        assert device is not None
        assert device.name == name
    large = find_device("NVIDIA A100 80GB PCIe")
    assert large is not None
    assert large.memory_bytes == 80 * 2**30
    assert find_device("RTX 9999") is None


# --- a step by hand ----------------------------------------------------------------------------------------------------


def test_a_step_by_hand(tmp_path: Path) -> None:
    """2 + 2 machines of 3 s, 8 microbatches: the second stage begins after 1 s and its last gradient takes 2 s more;
    between are 12 s of work, and 1.5 s in which one of two has none left."""
    rate = Rates(scene_of(tmp_path, PACED, "fleet.stages=2", "train.batch=8")).of([(2,), (2,)])
    assert rate.throughput == pytest.approx(8 / 16.5)
    assert rate.even == rate.windowed == pytest.approx(8 / 12)


def test_a_step_of_a_fleet_is_what_is_played(tmp_path: Path) -> None:
    """Which is a little longer than by rates."""
    step = ("fleet.stages=2", "train.batch=8", "fleet.rebalance=off")
    result, scene = played(tmp_path, PACED, *step), scene_of(tmp_path, PACED, *step)
    took = steps.play(scene, steps.cast(scene, [(2,), (2,)], TRAINERS))
    assert result.throughput == pytest.approx(8 / took.step_s)
    assert result.share_of_optimum == pytest.approx(12 / took.step_s)
    assert result.idle["few microbatches under way"] == pytest.approx(1 - 12 / took.step_s)
    assert result.steps == pytest.approx(3600 / took.step_s)
    assert 16.5 < took.step_s < 17.5


def test_a_fleet_too_large_to_be_played_goes_by_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "PLAYABLE_S", 0.0)
    result = played(tmp_path, PACED, "fleet.stages=2", "train.batch=8")
    assert result.throughput == pytest.approx(8 / 16.5)


def test_only_so_much_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest membership that was played says how much slower than its rates another one is."""
    times: list[object] = []
    monkeypatch.setattr(pace, "play", lambda *a, **k: times.append(a[1]) or steps.play(*a, **k))
    scene = scene_of(tmp_path, PACED.replace("count = 4", "count = 64"), "fleet.stages=2", "train.batch=256")
    found = Pace(scene, trainers=2, delayed=False)
    first = found.of([(32,), (32,)])
    near, rates = found.of([(31,), (30,)]), Rates(scene)
    assert len(times) == 1
    left = first.throughput / rates.of([(32,), (32,)]).throughput
    assert left < 1
    assert near.throughput == pytest.approx(left * rates.of([(31,), (30,)]).throughput)
    assert found.of([(20,), (24,)]).throughput == pytest.approx(256 / found.step([(20,), (24,)]).step_s)
    monkeypatch.setattr(found, "budget_s", 0.0)
    known, guessed = len(times), found.of([(9,), (8,)]).throughput
    assert guessed > 0
    assert len(times) == known
    assert found.lasts([(9,), (8,)]).throughput == pytest.approx(256 / found.step([(9,), (8,)]).step_s)


def test_links_by_hand(tmp_path: Path) -> None:
    """32 tokens of width 64 are 8192 bytes and 64 of targets: 1 kB/s carries one in 8.3 s, which is more than 3 s of
    computing."""
    slow = PACED.replace("count = 4", "count = 2") + "[defaults]\nlocal_bandwidth_mbps = 0.008\n"
    scene = scene_of(tmp_path, slow, "fleet.stages=2", "train.batch=400")
    rate = Rates(scene).of([(1,), (1,)])
    assert rate.slowest == pytest.approx(1 / 3)
    assert rate.linked == pytest.approx(1000 / (8192 + 64))
    wide = Rates(scene_of(tmp_path, PACED + "[defaults]\nlocal_rtt_ms = 2000\n", "fleet.stages=2", "train.batch=8"))
    # stage 0 and the way on, there and back; 4 of 8 gradients go back to a trainer elsewhere; five messages of 1 s
    # agree on the step
    assert 8 / wide.of([(2,), (2,)]).throughput == pytest.approx(3 + 2 + 13.5 + 4 / 8 + 5)


def test_bytes_are_those_of_the_frames(tmp_path: Path) -> None:
    two = (
        '[[machines]]\nname = "a"\nregion = "x"\n[[machines]]\nname = "b"\nregion = "y"\n[pacing]\nforward_ms = 1000\n'
    )
    result = played(tmp_path, two, "fleet.stages=2", "train.batch=8")
    done = result.throughput * 3600
    assert result.bytes["x", "y"]["activations"] == pytest.approx(done * (4 * 32 * 64 + 2 * 32), rel=0.03)
    assert result.bytes["y", "x"]["gradients"] == pytest.approx(done * 4 * 32 * 64, rel=0.03)


# --- churn -------------------------------------------------------------------------------------------------------------


def test_a_machine_that_leaves_takes_its_part_of_the_step_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("time_s,change\n1800,-1\n")
    result = played(
        tmp_path, PACED + '[churn]\ntrace = "t.csv"\n', "fleet.stages=2", "train.batch=80", "fleet.rebalance=off"
    )
    whole, half = 80 / (3 + 121.5), 80 / (3 + 240)
    assert result.events == {"left": 1}
    assert 0 < result.repeated_microbatches <= 40 + 8
    assert result.throughput == pytest.approx((whole + half) / 2, rel=0.03)
    assert result.not_recovered


def test_a_stage_without_peers_is_adopted_and_the_run_steps_back(tmp_path: Path) -> None:
    """Three machines on two stages; seeds differ in who leaves. If the only one of a stage does, one of the others
    serves it 30 s later."""
    (tmp_path / "t.csv").write_text("time_s,change\n1800,-1\n")
    text = PACED.replace("count = 4", "count = 3") + '[churn]\ntrace = "t.csv"\n'
    results = [
        played(tmp_path, text, "fleet.stages=2", "train.batch=8", "checkpoint.every=10", seed=s) for s in range(8)
    ]
    lost = [r for r in results if "stage lost" in r.events]
    assert lost, "no seed takes the only machine of a stage"
    for r in lost:
        assert r.events["adopted"] == r.events["stepped back"] == 1
        assert 0 < r.lost_microbatches < 10 * 8
        assert r.idle["a stage without peers"] > 0
        assert 30 <= r.recoveries_s[0] <= 60 if r.recoveries_s else r.not_recovered


def test_machines_move_to_where_they_are_needed(tmp_path: Path) -> None:
    """A slow and a fast kind are seated by numbers; the production rule evens out what they do."""
    text = '[[machines]]\nname = "fast"\ncount = 3\nforward_ms = 100\n[[machines]]\nname = "slow"\ncount = 6\nforward_ms = 400\n'
    still = played(tmp_path, text, "fleet.stages=3", "train.batch=96", "fleet.rebalance=off")
    (tmp_path / "t.csv").write_text("time_s,change\n60,-1\n120,-1\n180,-1\n")
    text += '[churn]\ntrace = "t.csv"\n'
    left, ours = (
        played(tmp_path, text, "fleet.stages=3", "train.batch=96", f"fleet.rebalance={r}")
        for r in ("off", "throughput")
    )
    assert still.share_of_optimum > 0.7
    assert ours.events["moved"] >= 1
    assert ours.share_of_optimum > 1.1 * left.share_of_optimum


@pytest.mark.parametrize("seed", range(6))
def test_the_books_balance_under_any_churn(tmp_path: Path, seed: int) -> None:
    """What was trained, and what was not by cause, is all that could have been."""
    draw = random.Random(seed)
    kinds = "".join(
        f'[[machines]]\nname = "k{k}"\ncount = {draw.randint(1, 6)}\nregion = "r{k % 2}"\nforward_ms = {draw.randint(50, 900)}\n'
        f"reliable = {draw.choice(['true', 'false'])}\nup_mbps = {draw.choice([1, 10, 1000])}\n"
        for k in range(draw.randint(1, 4))
    )
    churn = f"[churn]\nleave_per_hour = {draw.choice([0.5, 3])}\nbursts_per_hour = 2\nburst_share = 0.5\naway_min = 5\n"
    links = "[defaults]\nrtt_ms = 100\nbandwidth_mbps = 20\n"
    stages = draw.randint(1, min(4, kinds.count("count")))
    options = (
        f"fleet.stages={stages}",
        f"train.batch={draw.randint(4, 64)}",
        f"checkpoint.every={draw.choice([0, 5])}",
    )
    options = (
        *options,
        f"optimizer.delayed={draw.choice(['true', 'false'])}",
        f"fleet.rebalance={draw.choice(['paper', 'throughput'])}",
    )
    result = played(tmp_path, kinds + churn + links, *options, hours=6.0, seed=seed)
    assert result.share_of_optimum + sum(result.idle.values()) == pytest.approx(1.0, abs=1e-9)
    assert min(result.idle.values()) >= -1e-9
    assert sum(p.throughput for p in result.curve) / len(result.curve) * 6 * 3600 == pytest.approx(
        result.throughput * 6 * 3600 + result.lost_microbatches, rel=1e-6
    )
    assert [sum(p.peers) >= 0 and min(p.peers) >= 0 for p in result.curve] == [True] * 400


def test_a_run_with_planned_pipelines_is_not_simulated_as_another_strategy(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text('[[machines]]\nname = "m"\ncount = 4\ndevice = "T4"\n')
    given = [*TINY, "fleet.stages=2", 'pipeline.seats=[["m-0", "m-1"], ["m-2", "m-3"]]']
    with pytest.raises(ConfigError) as refused:
        what_if(tmp_path / "fleet.toml", None, None, given, hours=1.0, seed=0, plot=None, json=True)
    assert "plays strategies swarm and hub only" in str(refused.value)
    assert "'muletrain plan'" in str(refused.value)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in (3, 3, 4):
        what_if(None, None, None, [], hours=1.0, seed=seed, plot=None, json=True)
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.slow
@pytest.mark.alone
def test_ten_thousand_peers_on_a_hundred_stages_for_32_hours(tmp_path: Path) -> None:
    text = "".join(
        f'[[machines]]\nname = "k{k}"\ncount = 2000\nregion = "r{k % 2}"\ndevice = "{d}"\nup_mbps = 10000\n'
        "down_mbps = 10000\nreliable = false\n"
        for k, d in enumerate(("T4", "V100", "A100", "RTX 3080", "RTX 4090"))
    )
    text += "[defaults]\nrtt_ms = 1\n[churn]\nleave_per_hour = 0.1\nbursts_per_hour = 0.5\nburst_share = 0.02\n"
    sizes = (
        "model.width=4096",
        "model.heads=32",
        "model.layers=100",
        "model.context=512",
        "fleet.stages=100",
        "train.batch=8192",
    )
    begin = time.monotonic()
    result = played(tmp_path, text, *sizes, hours=32.0)
    assert time.monotonic() - begin < 60
    assert result.events["left"] > 20_000


# --- interrupted, and peers that give up -------------------------------------------------------------------------------


def run_of(tmp_path: Path, text: str, *overrides: str) -> tuple[Setting, RunConfig]:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    config = load_config(None, [*TINY, *overrides])
    return setting(load_fleet(file), config, ModelSpec.from_config(config.model)), config


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
        assert [(g.time_s, g.peer, g.why) for g in result.gave_up] == [(20.0, "a-1", str(error))]
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
    code = what_if(file, None, None, options, hours=0.02, seed=0, plot=None, json=as_json, fidelity="protocol")
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_shows_what_it_has(tmp_path: Path, number: signal.Signals) -> None:
    process = long_play(tmp_path)
    try:
        assert process.stderr is not None
        assert PLAYED.match(process.stderr.readline()), "the first line comes while it plays"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    assert re.search(r"interrupted after (\d+:\d+|[\d.]+ m?s|\d+:\d+:\d+) of 10:00:00", out)
    assert "tokens/s" in out
    assert "share of the optimum" in out


def test_interrupted_json_says_that_it_is_partial_and_shows_no_progress(tmp_path: Path) -> None:
    process = long_play(tmp_path, "--json")
    try:
        time.sleep(8)  # nothing says how far it is
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "")
    said = json.loads(out)
    assert (said["partial"], said["hours_asked"]) == (True, 10)
    assert 0 < said["hours"] < 10


def test_interrupted_twice_it_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Playing("playing", 60.0, quiet=True) as playing:
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
        with Playing("playing", 60.0, quiet=False) as playing:
            for second in range(10):
                playing(second, second / 4)
                time.sleep(0.15)
        terminal.flush()
        shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "0 ms of 1:00, 0 steps" in shown
    assert "5.0 s of 1:00, 1 step " in shown
    assert "8.0 s of 1:00, 2 steps" in shown


def test_where_there_is_no_terminal_a_line_says_now_and_then_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with Playing("playing", 60.0, quiet=False) as playing:
        for second in range(12):
            playing(second, second / 4)
            time.sleep(0.1)
    assert re.fullmatch(r"playing: 1?\d.0 s of 1:00, 2 steps in 1.\d s\n", capsys.readouterr().err)


# --- what would help ---------------------------------------------------------------------------------------------------


def advised(tmp_path: Path, text: str, *overrides: str) -> list[Suggestion]:
    """As nobody comes or goes."""
    return suggestions(lambda change: run_of(tmp_path, text, *overrides, *([change.text] if change else [])), Weather())


def test_what_would_help_by_hand(tmp_path: Path) -> None:
    """The step by hand above, 16.5 s for 8 microbatches, takes 28.5 s for 16; gradients cost nothing on these links."""
    found = advised(tmp_path, PACED, "fleet.stages=2", "train.batch=8", "fleet.rebalance=off", "wire.gradients=fp32")
    by_field = {s.change.field: s for s in found}
    assert by_field["train.batch"].change == Change("train.batch", "16", "each step has 16 sequences instead of 8")
    assert by_field["train.batch"].gain == pytest.approx((16 / 28.5) / (8 / 16.5) - 1)
    assert "wire.gradients" not in by_field


def test_averaging_on_narrow_links_is_helped_by_what_makes_it_smaller_or_later(tmp_path: Path) -> None:
    text = PACED + "[defaults]\nlocal_bandwidth_mbps = 1\n"
    options = ("fleet.stages=2", "train.batch=8", "wire.gradients=fp32", "wire.activations=int8")
    found = advised(tmp_path, text, *options)
    assert {s.change.text for s in found} >= {"optimizer.delayed=true", "wire.gradients=int8"}
    assert not {"fleet.stages", "train.microbatch"} & {s.change.field for s in found}, (
        "paced machines say nothing of them"
    )
    assert [s.gain for s in found] == sorted((s.gain for s in found), reverse=True)
    assert len(found) <= MOST
    for s in found:  # each is what rates say of the run with that change
        before, after = (
            by_rates(*run_of(tmp_path, text, *options, *more), Weather(), hours=12.0) for more in ([], [s.change.text])
        )
        assert s.gain == pytest.approx(after.throughput / before.throughput - 1, rel=0.02)
        assert s.gain >= WORTH


def test_a_fleet_that_loses_nothing_is_told_nothing(tmp_path: Path) -> None:
    one = PACED.replace("count = 4", "count = 1")
    assert advised(tmp_path, one, "fleet.stages=1", "train.batch=512", "wire.gradients=int8") == []


def test_stages_that_lose_their_last_peer_every_now_and_then_are_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """22 stages of two machines do more than 11 of four, but only as nobody leaves."""
    monkeypatch.setattr(advice, "changes", lambda run, *, paced: [Change("fleet.stages", "22")])
    fleet = load_fleet(EXAMPLE)

    def changed(change: Change | None) -> tuple[Setting, RunConfig]:
        stages = "fleet.stages=11" if change is None else change.text
        config = load_config(None, ["model.preset=llama-7b", "train.batch=512", "train.microbatch=1", stages])
        return setting(fleet, config, ModelSpec.from_config(config.model)), config

    assert [s.change.value for s in suggestions(changed, Weather())] == ["22"]
    assert suggestions(changed, weather(fleet.churn, EXAMPLE.parent)) == []


def test_changes_that_do_not_fit_are_not_named(tmp_path: Path) -> None:
    def changed(change: Change | None) -> tuple[Setting, RunConfig]:
        if change is not None and change.field == "train.batch":
            raise MuletrainError("no room")
        return run_of(tmp_path, PACED, "fleet.stages=2", "train.batch=8", *([change.text] if change else []))

    assert "train.batch" not in {s.change.field for s in suggestions(changed, Weather())}


# --- as a user sees it -------------------------------------------------------------------------------------------------


def test_without_a_file_the_example_is_played_and_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    what_if(None, None, None, [], hours=0.5, seed=0, plot=tmp_path / "out.png", json=False)
    text = capsys.readouterr().out
    assert str(EXAMPLE) in text.replace("\n", "")
    for word in (
        "tokens/s",
        "share of the optimum",
        "ends of steps",
        "virginia",
        "time to recover",
        "computed again",
        "of these changes",
        "--set optimizer.delayed=true",
        "one update old",
    ):
        assert word in text
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    what_if(EXAMPLE, None, "llama-7b", ["train.batch=512"], hours=0.2, seed=0, plot=None, json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["stages"], said["machines"], said["left_out"]) == (11, 44, [])
    assert said["tokens_per_s"] > 0
    assert len(said["curve"]) == 400
    assert said["bytes"]["virginia to oregon"]["averaging"] > 0
    assert not said["partial"]
    best = said["advice"][0]
    assert best["tokens_per_s"] == pytest.approx((1 + best["gain"]) * said["tokens_per_s"])


def test_moves_are_no_losses_to_recover_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(HOMES)
    options = (tmp_path / "fleet.toml", None, "gpt3-350m", ["train.batch=512"])
    what_if(*options, hours=2.0, seed=0, plot=None, json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["events"]["moved"] > 7
    assert (said["recoveries_s"], said["not_recovered"]) == ([], False)
    what_if(*options, hours=2.0, seed=0, plot=None, json=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "machines │ none came or went" in text
    assert f"moves between stages │ {said['events']['moved']}" in text
    assert "not needed: no machine went away" in text
    assert "'muletrain plan' finds the fastest number" in text


def test_machines_without_room_are_left_out_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    what_if(EXAMPLE, None, "llama-7b", ["fleet.stages=4"], hours=0.2, seed=0, plot=None, json=False)
    said = capsys.readouterr().out
    assert "left out: 'spot-east'" in said
    assert "left out: 'lab'" not in said


HOMES = """
machines = [
    { name = "desk", count = 3, device = "RTX 4090", up_mbps = 100, down_mbps = 500 },
    { name = "laptop", count = 2, tflops = 2.5, memory_gib = 4, up_mbps = 40, down_mbps = 250 },
    { name = "old", count = 2, device = "CPU", up_mbps = 40, down_mbps = 250 },
]
"""
ONE = '[[machines]]\nname = "desk"\ncount = 4\ndevice = "RTX 3080"\n'


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        (
            ONE,
            ["model.preset=gpt3-175b"],
            "fleet.toml:3: machines[0].count: a model of 175 B parameters needs",
        ),
        (ONE, ["model.preset=gpt3-175b"], "machines like 'desk', or take a smaller model"),
        (
            ONE.replace("count = 4", "count = 400"),
            ["model.preset=llama-65b", "fleet.stages=40"],
            "stage 0 of 40 needs 3",
        ),
        (
            ONE.replace("count = 4", "count = 400"),
            ["model.preset=llama-65b", "fleet.stages=40"],
            "the largest machine 'desk' has 10 GiB; take more stages (--set fleet.stages=N)",
        ),
        (
            ONE,
            ["fleet.stages=8"],
            "fleet.toml:3: machines[0].count: 4 machines in all have room for a stage, for fleet.stages = 8",
        ),
        (
            ONE.replace("RTX 3080", "RTX 3080 Max"),
            [],
            "fleet.toml:4: machines[0].device: the speed of 'RTX 3080 Max' is not known; give tflops beside it, "
            "or a device of known speed: T4, V100, ",
        ),
        (
            ONE.replace('device = "RTX 3080"\n', ""),
            [],
            "fleet.toml:1: machines[0].tflops: missing, and no device is named",
        ),
        (ONE + "up_mbps = -5\n", [], "fleet.toml:5: machines[0].up_mbps: must be greater than 0, got -5"),
        (ONE + '[churn]\ntrace = "none.csv"\n', [], "none.csv: cannot be read as a churn trace"),
    ],
)
def test_a_fleet_that_cannot_work(tmp_path: Path, text: str, overrides: list[str], said: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(MuletrainError) as caught:
        what_if(file, None, None, overrides, hours=0.1, seed=0, plot=None, json=True)
    assert said in str(caught.value)
