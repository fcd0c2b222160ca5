"""The strategies: each is in the one list, answers every question, and answers the same question the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest

from muletrain.config import plan_file
from muletrain.config.load import load_config
from muletrain.policy.assignment import NOWHERE, Load, View
from muletrain.strategies import CHOICES, STRATEGIES, find, strategy_of

if TYPE_CHECKING:
    from muletrain.strategies import Listed
    from muletrain.strategies.base import Strategy

SEATS = 'pipeline.seats=[["a","b"],["c","d"]]'
CONFIG = load_config(None, ["train.batch=32", "train.microbatch=4", "fleet.stages=2"])
PLANNED = load_config(None, ["train.batch=32", "train.microbatch=4", "fleet.stages=2", SEATS])
HUB = load_config(None, ["train.batch=32", "train.microbatch=4", "fleet.stages=2", "hub.clients=2"])
SWAP = load_config(None, ["train.batch=32", "train.microbatch=4", "fleet.stages=1", "swap.whole=true"])
WORK = (1.0, 1.0)
THERE = {"a": Load(0, name="a"), "b": Load(0, name="b"), "c": Load(1, name="c"), "d": Load(1, name="d")}
RUNNING = pytest.mark.parametrize("listed", [s for s in STRATEGIES if s.runs], ids=lambda s: s.name)


def made(listed: Listed) -> Strategy:
    """The strategy of the first configuration here that it does not decline."""
    assert listed.of is not None
    found = listed.of(CONFIG) or listed.of(PLANNED) or listed.of(HUB) or listed.of(SWAP)
    assert found is not None
    return found


@RUNNING
def test_a_newcomer_is_assigned_to_a_stage_that_it_can_serve(listed: Listed) -> None:
    for stage in (0, 1):
        new = Load(NOWHERE, name="new", targets=frozenset({stage}), quarters=(1, 1))
        moves = made(listed).assign(View({**THERE, "new": new}, WORK))
        assert [(m.peer, m.source, m.target) for m in moves] == [("new", NOWHERE, stage)]


@RUNNING
def test_a_newcomer_swaps_a_stage_only_if_it_can_hold_no_other_one_without_peers(listed: Listed) -> None:
    for quarters, stage in (((3, 6), 0), ((1, 3), 1), ((6, 5), 1)):
        new = Load(NOWHERE, name="new", targets=frozenset({0, 1}), quarters=quarters)
        assert [m.target for m in made(listed).assign(View({"new": new}, WORK))] == [stage]


@RUNNING
def test_who_can_serve_no_stage_is_left_out(listed: Listed) -> None:
    new = Load(NOWHERE, name="new", targets=frozenset())
    assert made(listed).assign(View({**THERE, "new": new}, WORK)) == ()


@RUNNING
def test_a_stage_without_peers_is_filled_when_the_run_rolls_back_and_not_before(listed: Listed) -> None:
    left = {"a": Load(0, name="a"), "b": Load(0, name="b")}
    moves = made(listed).assign(View(left, WORK, stopped=True))
    assert [(m.source, m.target) for m in moves] == [(0, 1)]
    assert made(listed).assign(View(left, WORK, (1.0, 1.0), horizon_s=600.0)) == ()


@RUNNING
@pytest.mark.parametrize("rule", ["paper", "throughput"])
def test_where_everyone_is_in_place_nobody_moves(listed: Listed, rule: str) -> None:
    loads = {p: Load(own.stage, 1.0, {own.stage: 2.0}, name=p) for p, own in THERE.items()}
    view = View(loads, WORK, (1.0, 1.0), rule=rule, horizon_s=600.0)  # type: ignore[arg-type]
    assert made(listed).assign(view) == ()


def test_servers_of_a_hub_stay_where_peers_of_a_swarm_move() -> None:
    loads = {p: Load(own.stage, 1.0, {0: 9.0, 1: 9.0}, name=p) for p, own in THERE.items()}
    loads |= {f"{n}": Load(0, 1.0, {0: 9.0, 1: 9.0}, name=f"{n}") for n in range(4)}
    view = View(loads, WORK, (1.0, 1.0), horizon_s=600.0)
    assert made(find("swarm")).assign(view)
    assert made(find("hub")).assign(view) == ()


@RUNNING
def test_a_microbatch_goes_to_peers_that_are_there_in_one_lane(listed: Listed) -> None:
    strategy = made(listed)
    for index in range(CONFIG.microbatches):
        for there in ({"a", "b"}, {"b", "spare"}, {"b"}):
            assert set(strategy.choose(0, index, there)) <= there
        assert strategy.lane(index) >= 0
        assert not strategy.fixed or len(strategy.choose(1, index, {"c", "d"})) == 1


@RUNNING
def test_a_trainer_has_some_under_way_and_a_peer_admits_more(listed: Listed) -> None:
    strategy = made(listed)
    for trainers in (1, 4):
        assert 2 <= strategy.window(strategy.capacity(2), (2, 2), trainers) <= strategy.capacity(2) * 2
    assert strategy.capacity(100) >= 100
    order = strategy.order(0, "a")
    assert order.most_between is None or order.most_between >= 1
    assert strategy.order(1, "c").most_between is None, "the last stage does both at once"


@pytest.mark.parametrize("name", ["swarm", "hub"])
def test_a_stage_of_few_peers_does_not_leave_the_others_idle(name: str) -> None:
    strategy = made(find(name))
    capacity = strategy.capacity(3)
    assert strategy.window(capacity, (4, 4, 4), 2) == 4 * capacity // 4
    assert strategy.window(capacity, (2, 4, 6), 2) == 4 * capacity // 4, "as if all stages had the average"
    assert strategy.window(capacity, (1, 1, 10), 2) == capacity // 2, "and never more than the smallest one admits"


@RUNNING
def test_shards_have_owners_among_the_members(listed: Listed) -> None:
    owners = made(listed).shard_owners(("a", "b", "c"))
    assert owners
    assert set(owners) <= {"a", "b", "c"}
    assert made(listed).shard_owners(("a",)) == ("a",)


@RUNNING
def test_nobody_is_missed_where_everyone_is(listed: Listed) -> None:
    strategy = made(listed)
    assert strategy.stand_ins([{"a", "b"}, {"c", "d"}]) == {}
    for missing, instead in strategy.stand_ins([{"a", "spare"}, {"c", "d"}]).items():
        assert (missing.stage, missing.name, instead) == (0, "b", ("spare",))
    assert not strategy.has_place("spare")


def test_the_list_is_what_plans_and_options_know() -> None:
    assert [s.name for s in STRATEGIES] == list(get_args(plan_file.StrategyName))
    schedules = get_args(plan_file.Prediction.model_fields["schedule"].annotation)
    assert set(CHOICES) <= {*get_args(plan_file.StrategyName), *schedules}, "plans have them"
    assert len(set(CHOICES)) == len(CHOICES)
    assert [s.name for s in STRATEGIES if s.choices] == [s.name for s in STRATEGIES if s.runs]


def test_a_configuration_has_the_strategy_that_it_plans() -> None:
    assert strategy_of(CONFIG) == made(find("swarm"))
    assert strategy_of(PLANNED) == made(find("pipeline"))
    assert strategy_of(HUB) == made(find("hub"))
    assert strategy_of(SWAP) == made(find("swap"))
