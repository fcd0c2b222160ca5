"""The two fidelities of ``simulate fleet`` on the same small fleets: rates, and every message of the production
code."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest

from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.events import ClientLost
from muletrain.model.spec import ModelSpec
from muletrain.runtime.pool.weights import WeightsDownload
from muletrain.runtime.pool.work import PartWork
from muletrain.sim.fleet.planned import as_hub
from muletrain.sim.fleet.rates import TRAINERS
from muletrain.sim.fleet.simulation import Fidelity, simulate_fleet, weather
from muletrain.sim.setting import seated, setting
from muletrain.sim.steps import steps
from muletrain.sim.steps.steps import cast
from muletrain.strategies import strategy_of
from muletrain.timeline import chrome_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from muletrain.config.fleet_file import Fleet
    from muletrain.config.schema import RunConfig
    from muletrain.events import Event
    from muletrain.runtime.pool.messages import Give
    from muletrain.sim.fleet.accounts import Outcome
    from muletrain.sim.setting import Setting

AGREE = 0.05
SETTINGS = (
    "model.width=256",
    "model.heads=4",
    "model.context=512",
    "model.vocab=512",
    "train.microbatch=1",
    "train.batch=64",
    "fleet.stages=2",
    "fleet.rebalance=off",
    "checkpoint.every=0",
)
KIND = '[[machines]]\nname = "{}"\ncount = {}\nforward_ms = 200\nbackward_ms = 400\n'
EQUAL = KIND.format("a", 5)
UNEQUAL = KIND.format("a", 4).replace("200", "250").replace("400", "500") + KIND.format("b", 2).replace(
    "200", "100"
).replace("400", "200")
FAR = EQUAL + "[defaults]\nlocal_rtt_ms = 100\n"
NARROW = KIND.format("a", 4) + "up_mbps = 10\ndown_mbps = 10\n"
REGIONS = (
    KIND.format("a", 4)
    + 'region = "x"\n'
    + KIND.format("b", 4)
    + 'region = "y"\n[defaults]\nrtt_ms = 200\nbandwidth_mbps = 20\n'
)
NEXT_DOOR = KIND.format("a", 2) + 'region = "x"\n' + KIND.format("b", 2) + 'region = "y"\n[defaults]\nrtt_ms = 300\n'
"""Of each stage one peer is next to a sender, and another, which computes as fast, is far."""
STAYS = KIND.format("lab", 2) + KIND.format("spot", 4) + 'reliable = false\n[churn]\ntrace = "t.csv"\n'


def staged(tmp_path: Path, text: str, *overrides: str) -> tuple[Fleet, RunConfig, Setting]:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    fleet, config = load_fleet(file), load_config(None, [*SETTINGS, "model.layers=4", *overrides])
    return fleet, config, setting(fleet, config, ModelSpec.from_config(config.model))


def played(
    tmp_path: Path,
    text: str,
    seconds: float,
    fidelity: Fidelity,
    *overrides: str,
    seed: int = 0,
    watch: Callable[[Event], None] | None = None,
) -> Outcome:
    fleet, config, scene = staged(tmp_path, text, *overrides)
    churn = weather(fleet.churn, tmp_path)
    return simulate_fleet(scene, config, churn, hours=seconds / 3600, seed=seed, fidelity=fidelity, watch=watch)


def warm(outcome: Outcome) -> float:
    """Microbatches/s after the first step, in which nobody has measured anything yet."""
    first, last = outcome.curve[0], outcome.curve[-1]
    return 64 * (len(outcome.curve) - 1) / (last.time_s - first.time_s)


@pytest.mark.parametrize(
    ("text", "seconds", "overrides"),
    [
        pytest.param(EQUAL, 85.0, (), id="equal"),
        pytest.param(UNEQUAL, 60.0, (), id="unequal"),
        pytest.param(FAR, 90.0, (), id="far"),
        pytest.param(NARROW, 130.0, ("train.batch=32",), id="narrow", marks=pytest.mark.slow),
        pytest.param(REGIONS, 125.0, (), id="regions"),  # in fewer steps what wiring draws is 2 %
        pytest.param(NEXT_DOOR, 80.0, ("train.batch=32",), id="next door"),  # who is far is not late
        pytest.param(
            NEXT_DOOR.replace("200", "60").replace("400", "120").replace("300", "160"),
            30.0,
            ("train.batch=32", "fleet.trainers=1"),
            id="next door, short work",
        ),  # who is far does as much
        pytest.param(
            KIND.format("a", 4) + "up_mbps = 200\ndown_mbps = 200\n", 95.0, ("optimizer.delayed=true",), id="delayed"
        ),
    ],
)
def test_both_fidelities_agree(tmp_path: Path, text: str, seconds: float, overrides: tuple[str, ...]) -> None:
    flow, protocol = (played(tmp_path, text, seconds, f, *overrides) for f in ("flow", "protocol"))
    scale = 0.5 if "train.batch=32" in overrides else 1.0
    assert flow.throughput == pytest.approx(scale * warm(protocol), rel=AGREE)
    _, config, scene = staged(tmp_path, text, *overrides)
    who = cast(scene, seated(scene), config.fleet.trainers or TRAINERS)
    took = steps.play(scene, who, delayed=config.optimizer.delayed)
    assert scene.cost.microbatches / took.step_s == pytest.approx(scale * warm(protocol), rel=AGREE)


def test_a_deep_pipeline_begins_as_fast_as_it_goes_on(tmp_path: Path) -> None:
    """First answers are compared with each other: to compute one twice at each stage in turn took four steps' time with
    8 stages."""
    deep = ("fleet.stages=8", "model.layers=8", "train.batch=16")
    outcome = played(tmp_path, KIND.format("a", 16), 50.0, "protocol", *deep)
    first_s, second_s = (point.time_s for point in outcome.curve[:2])
    assert first_s < 1.5 * (second_s - first_s)
    assert not outcome.repeated_microbatches


def test_a_deep_pipeline_is_full(tmp_path: Path) -> None:
    """As many microbatches are under way for each peer of a stage as there are stages, and half as many again: those
    that wait for each other cost a quarter. With eight it would be more than half."""
    deep = ("fleet.stages=16", "model.layers=16", "train.batch=128", "compute.checkpointing=never")
    assert played(tmp_path, KIND.format("a", 16), 3600.0, "flow", *deep).idle["few microbatches under way"] < 0.3


def test_both_fidelities_agree_when_a_machine_dies(tmp_path: Path) -> None:
    """In the middle of a step; what it held runs again beside the rest, each microbatch once."""
    (tmp_path / "t.csv").write_text("time_s,change\n50,-1\n")
    flow, protocol = (played(tmp_path, STAYS, 110.0, f) for f in ("flow", "protocol"))
    assert flow.events == protocol.events == {"left": 1}
    assert flow.throughput == pytest.approx(protocol.throughput, rel=AGREE)
    assert 0 < protocol.repeated_microbatches < 40


def test_both_fidelities_agree_on_how_long_it_takes_to_recover(tmp_path: Path) -> None:
    """Another machine comes 10 s after one died, and takes its state."""
    (tmp_path / "t.csv").write_text("time_s,change\n50,-1\n60,1\n")
    seen: list[Event] = []
    flow = played(tmp_path, STAYS, 100.0, "flow")
    protocol = played(tmp_path, STAYS, 100.0, "protocol", watch=seen.append)
    assert not flow.not_recovered
    assert not protocol.not_recovered
    (expected_s,) = flow.recoveries_s
    step_s = max(b.time_s - a.time_s for a, b in itertools.pairwise(protocol.curve))
    assert protocol.recoveries_s == (pytest.approx(expected_s, abs=step_s),)
    rows = chrome_trace(seen)["traceEvents"]
    peers = {r["pid"]: r["args"]["name"] for r in rows if r["name"] == "process_name"}
    worked = Counter(peers[r["pid"]] for r in rows if r.get("cat") == "compute")
    assert len(peers) == 7
    assert worked.keys() == set(peers.values())
    assert all(0 <= r["ts"] <= 100e6 for r in rows if r["ph"] != "M"), "virtual microseconds"


@pytest.mark.slow
def test_both_fidelities_agree_under_churn(tmp_path: Path) -> None:
    """Machines go and come at the same times, but not the same machines: the mean of several draws. The production
    peers survive it all."""
    text = STAYS.replace('"lab"\ncount = 2', '"lab"\ncount = 4').replace('"spot"\ncount = 4', '"spot"\ncount = 8')
    settings = ("fleet.rebalance=throughput", "fleet.rebalance_period=10", "checkpoint.every=2")
    shares: dict[Fidelity, list[float]] = {"flow": [], "protocol": []}
    for seed in range(6):
        draw, time_s, rows = random.Random(seed), 0.0, list[tuple[float, int]]()
        while (time_s := time_s + draw.expovariate(1 / 25)) < 290:
            rows += [(time_s, -1), (time_s + draw.expovariate(1 / 60), 1)]
        (tmp_path / "t.csv").write_text("time_s,change\n" + "".join(f"{t:.1f},{n}\n" for t, n in rows))
        for fidelity, found in shares.items():
            outcome = played(tmp_path, text, 300.0, fidelity, *settings, seed=seed)
            assert outcome.events["left"] > 5
            assert outcome.events["joined"] > 3
            found.append(outcome.share_of_optimum)
    assert fmean(shares["flow"]) == pytest.approx(fmean(shares["protocol"]), rel=0.08)


def test_bytes_agree(tmp_path: Path) -> None:
    flow, protocol = (played(tmp_path, REGIONS, 125.0, f) for f in ("flow", "protocol"))
    for link in (("x", "x"), ("x", "y"), ("y", "x"), ("y", "y")):
        each = [
            sum(sent for what, sent in o.bytes[link].items() if what != "control") / o.steps for o in (flow, protocol)
        ]
        assert each[0] == pytest.approx(each[1], rel=0.35)  # what is under way when it ends has not been reported
    total = [sum(sum(sent.values()) for sent in o.bytes.values()) / o.steps for o in (flow, protocol)]
    assert total[0] == pytest.approx(total[1], rel=0.2)


def test_the_same_seed_gives_the_same_messages(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("time_s,change\n12,-1\n")
    outcomes = [played(tmp_path, STAYS, 25.0, "protocol", "train.batch=16", seed=s) for s in (1, 1)]
    assert outcomes[0] == outcomes[1]


HUB_CLIENT = KIND.replace("{}", "spot", 1) + "reliable = false\n"
HUB = KIND.format("lab", 2) + HUB_CLIENT.format(4)


def hub_played(tmp_path: Path, text: str, seconds: float, *run: str, crowded: bool = False, **told: Any) -> Outcome:
    """``crowded``: all clients begin at stage 0."""
    fleet, config, scene = staged(tmp_path, text, "train.microbatch=4", "hub.clients=0", *run)
    planned = as_hub(scene, strategy_of(config))
    if crowded:
        planned = replace(planned, clients=dict.fromkeys(planned.clients, 0))
    return simulate_fleet(
        scene,
        config,
        weather(fleet.churn, tmp_path),
        hours=seconds / 3600,
        fidelity="protocol",
        planned=planned,
        **told,
    )


@pytest.mark.slow
def test_clients_of_a_crowded_stage_move_to_the_other_between_two_steps(tmp_path: Path) -> None:
    """It takes one or two looks, a minute each."""
    outcome = hub_played(tmp_path, HUB, 240.0, crowded=True)
    assert outcome.failure is None
    assert outcome.repeated_microbatches == 0
    assert 1 <= outcome.events["moved"] <= 4
    took = [(b.time_s, b.time_s - a.time_s) for a, b in itertools.pairwise(outcome.curve)]
    assert fmean(s for _, s in took[-10:]) < 0.8 * fmean(s for at_s, s in took if at_s < 60.0)


def test_clients_of_a_played_hub_do_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All six machines are equal, and 16 microbatches of 0.6 s at each of two stages are a step: 3.2 s if all are busy."""
    sequences, compute = (Counter[PartWork](), Counter[PartWork]()), PartWork.compute

    async def counted(work: PartWork, message: Give, *rest: Any) -> Any:
        sequences[work._compute.stage][work] += message.rows
        return await compute(work, message, *rest)

    monkeypatch.setattr(PartWork, "compute", counted)
    outcome = hub_played(tmp_path, HUB, 60.0)
    assert outcome.failure is None
    assert outcome.steps > 60.0 / (1.6 * 3.2)
    for of_stage in sequences:
        assert len(of_stage) == 2
        assert max(of_stage.values()) < 1.3 * min(of_stage.values())


def test_parts_of_clients_in_a_played_hub_are_checked(tmp_path: Path) -> None:
    """Where all are, each sequence is computed twice, and all results are found to be right."""
    seen: list[Event] = []
    plain = hub_played(tmp_path, HUB, 20.0, "hub.verify=0")
    checked = hub_played(tmp_path, HUB, 20.0, "hub.verify=1.0", watch=seen.append)
    assert checked.failure is None
    lost = [event for event in seen if isinstance(event, ClientLost)]
    assert all(event.t > 19.9 for event in lost), "only as the play ends"
    assert 0.4 * plain.steps < checked.steps < 0.75 * plain.steps


def test_a_server_with_clients_gets_more_than_one_without(tmp_path: Path) -> None:
    """Three equal machines at one stage, one of them the client of one server: half of the microbatches for each server
    would take half a step longer."""
    alone = hub_played(tmp_path, KIND.format("lab", 3), 120.0, "fleet.stages=1")
    helped = hub_played(tmp_path, KIND.format("lab", 2) + HUB_CLIENT.format(1), 120.0, "fleet.stages=1")
    assert alone.failure is helped.failure is None
    assert helped.steps > 0.9 * alone.steps


def test_clients_begin_where_servers_are_few(tmp_path: Path) -> None:
    """Three servers of two stages, and three clients: equal stages have three machines each."""
    _, config, scene = staged(tmp_path, KIND.format("lab", 3) + HUB_CLIENT.format(3), "hub.clients=0")
    planned = as_hub(scene, strategy_of(config))
    assert sorted(planned.stages.values()) == [0, 1, 1]
    assert sorted(planned.clients.values()) == [0, 0, 1]


def test_clients_whose_weights_always_come_too_late_take_them_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lateness must not cause load: each took the weights of each step, and no part."""
    fetched: list[bytes] = []
    fetch = WeightsDownload.fetch

    async def counted(self: WeightsDownload, digest: bytes, *rest: Any) -> Tensor | None:
        fetched.append(digest)
        return await fetch(self, digest, *rest)

    monkeypatch.setattr(WeightsDownload, "fetch", counted)
    outcome = hub_played(tmp_path, HUB + "down_mbps = 1\n", 300.0)
    assert outcome.failure is None
    assert 3 * 4 <= len(fetched) < 4 * outcome.steps / 2


def test_clients_of_a_played_hub_leave_and_come(tmp_path: Path) -> None:
    churn = "[churn]\nleave_per_hour = 120\naway_min = 0.1\n"
    outcome = hub_played(tmp_path, HUB + churn, 120.0)
    assert outcome.failure is None
    assert outcome.events["left"] > 3
    assert outcome.events["joined"] > 3
    assert outcome.lost_microbatches == 0
    assert outcome.steps > 8
