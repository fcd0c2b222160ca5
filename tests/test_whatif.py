"""``simulate fleet``: figures by hand, nothing lost in the books under churn."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import pytest

from muletrain.cli.actions.simulate_fleet import what_if
from muletrain.errors import ConfigError
from muletrain.planning.cost import all_reduce_s, steady_shares
from muletrain.policy.wiring import Wiring
from muletrain.sim.fleet import pace
from muletrain.sim.fleet.pace import Pace
from muletrain.sim.fleet.rates import TRAINERS, Rates
from muletrain.sim.steps import steps
from tests.tiny_fleets import PACED, TINY, played, scene_of

# --- what things cost --------------------------------------------------------------------------------------------------


def test_all_reduce_by_hand() -> None:
    assert all_reduce_s(100.0, 1, 10.0, 10.0) == 0.0
    assert all_reduce_s(100.0, 4, 10.0, math.inf) == pytest.approx(15.0)  # 2 * 3/4 * 100 / 10
    assert all_reduce_s(100.0, 4, 10.0, 2.0) == pytest.approx(25.0)  # 2 shards of 25 on each path


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


def test_links_by_hand(tmp_path: Path) -> None:
    """32 tokens of width 64 are 8192 bytes and 64 of targets: 1 kB/s carries one in 8.3 s, which is more than 3 s of
    computing."""
    slow = PACED.replace("count = 4", "count = 2") + "[defaults]\nlocal_bandwidth_mbps = 0.008\n"
    scene = scene_of(tmp_path, slow, "fleet.stages=2", "train.batch=400")
    rate = Rates(scene).of([(1,), (1,)])
    assert rate.slowest == pytest.approx(1 / 3)
    assert rate.linked == pytest.approx(1000 / (8192 + 64))
    wide = Rates(scene_of(tmp_path, PACED + "[defaults]\nlocal_rtt_ms = 2000\n", "fleet.stages=2", "train.batch=8"))
    # one microbatch at both stages, and the way on, there and back; 4 of 8 have a trainer elsewhere; the other seven
    # follow; five messages of 1 s agree on the step
    assert 8 / wide.of([(2,), (2,)]).throughput == pytest.approx(3 + 3 + 2 + 2 * 4 / 8 + 7 * 1.5 + 5)


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
        what_if(tmp_path / "fleet.toml", None, None, given, hours=1.0, seed=0, plot=(), json=True)
    assert "plays strategies swarm, swap, hub only" in str(refused.value)
    assert "'muletrain plan'" in str(refused.value)


def test_machines_that_swap_the_whole_model_are_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fleet.toml").write_text(
        '[[machines]]\nname = "m"\ncount = 4\ndevice = "T4"\nmemory_gib = 1.5\nhost_gib = 16\n'
    )
    given = ["model.preset=gpt3-125m", "model.context=512", "train.batch=64"]
    for strategy, stages in (("swarm", "stage"), ("swap", "in 1 stage,")):
        code = what_if(
            tmp_path / "fleet.toml", None, None, given, hours=0.5, seed=0, plot=(), json=False, choice=strategy
        )
        assert code == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"strategy {strategy}" in shown
        assert stages in shown


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in (3, 3, 4):
        what_if(None, None, None, [], hours=1.0, seed=seed, plot=(), json=True)
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
