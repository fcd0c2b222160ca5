"""Stages of unequal size: groups of machines, layers, and pipelines through them; by all messages of the production
code, too."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.model.spec import ModelSpec
from muletrain.model.traced.chain import TracedModel
from muletrain.planning.groups import Search, Work, beginnings, counts_of_pipelines, pipelines
from muletrain.planning.splits import Station, pipeline_shares
from muletrain.sim.plan import pipeline as plan_pipeline
from muletrain.sim.plan import planner
from muletrain.sim.plan import swarm as plan_swarm
from muletrain.sim.plan.question import Question
from muletrain.sim.plan.swarm import played_step_s
from muletrain.sim.setting import takes_s
from tests.traced_models import CONTEXT, config_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from muletrain.planning.groups import Serving

# --- groups -------------------------------------------------------------------------------------------------------------

LAYERS = 6


def work(stages: int, kinds: list[tuple[int, float, int]]) -> Work:
    """Of (machines, seconds a layer, room [layers])."""
    takes = np.full((stages, len(kinds), LAYERS + 1), np.inf)
    for k, (_, each_s, room) in enumerate(kinds):
        takes[:, k, 1 : room + 1] = each_s * np.arange(1, room + 1)
    return Work(takes, tuple(n for n, *_ in kinds))


KINDS = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([0.5, 1.0, 1.5, 4.0]), st.integers(1, LAYERS)), min_size=1, max_size=3
)


def every(of: Work) -> Iterator[Serving]:
    """All ways to give machines to stages, or leave them out."""
    stages = len(of.takes_s)
    rows = [
        [row for row in itertools.product(range(n + 1), repeat=stages) if sum(row) <= n] for n in of.counts
    ]  # by kind: machines by stage
    for chosen in itertools.product(*rows):
        serving = tuple(zip(*chosen, strict=True))
        if all(map(any, serving)):
            yield serving


@settings(deadline=None, max_examples=40)
@given(stages=st.integers(2, 3), kinds=KINDS)
def test_layers_are_cut_so_that_the_slowest_stage_is_fastest(stages: int, kinds: list[tuple[int, float, int]]) -> None:
    of = work(stages, kinds)
    for serving in itertools.islice(every(of), 0, None, 7):

        def slowest_s(ends: tuple[int, ...], serving: Serving = serving) -> float:
            times = []
            for row, first, end in zip(serving, (0, *ends), (*ends, LAYERS), strict=True):
                here = [(n, each_s, room) for n, (_, each_s, room) in zip(row, kinds, strict=True) if n]
                fits = all(room >= end - first for *_, room in here)
                times.append((end - first) / sum(n / each_s for n, each_s, _ in here) if fits else np.inf)
            return max(times)

        best = min(map(slowest_s, itertools.combinations(range(1, LAYERS), stages - 1)))
        found = of.cut(serving)
        assert (found is None) == np.isinf(best)
        if found is not None:
            assert found[0] == pytest.approx(best)
            assert slowest_s(tuple(end for _, end in found[1][:-1])) == pytest.approx(best)


def searched(of: Work) -> tuple[float, bool]:
    """The least time of the slowest stage, and whether the search ended by itself."""
    search = Search(of, lambda serving, cut, slowest_s: slowest_s, 1, seed=0, deadline=time.monotonic() + 60)
    ends = [search.descended(begun, of.counts).cost_s for begun in search.begun()]
    return min(ends, default=np.inf), not search.over


@settings(deadline=None, max_examples=40)
@given(stages=st.integers(2, 3), kinds=KINDS)
def test_where_there_is_room_some_beginning_has_it_and_the_search_ends_near_the_best(
    stages: int, kinds: list[tuple[int, float, int]]
) -> None:
    of = work(stages, kinds)
    best = min((cut[0] for serving in every(of) if (cut := of.cut(serving))), default=np.inf)
    for serving in beginnings(of):
        assert all(sum(row[k] for row in serving) <= n for k, n in enumerate(of.counts))
    found_s, complete = searched(of)
    assert complete
    assert np.isfinite(found_s) == np.isfinite(best)
    assert np.isinf(found_s) or best * (1 - 1e-9) <= found_s <= 2 * best


def test_the_search_finds_the_best_of_most_small_fleets() -> None:
    draw, best_found = np.random.default_rng(3), 0
    for _ in range(50):
        kinds = [
            (int(draw.integers(1, 4)), float(draw.uniform(0.3, 2)), int(draw.integers(2, LAYERS + 1))) for _ in range(3)
        ]
        of = work(2, kinds)
        best = min((cut[0] for serving in every(of) if (cut := of.cut(serving))), default=np.inf)
        best_found += searched(of)[0] <= best * (1 + 1e-9)
    assert best_found >= 45


def test_beginnings_of_many_stages_do_not_outlast_the_time_limit() -> None:
    """Eighty stages on machines of four sizes have 180,000 beginnings."""
    layers, rooms = 100, (10, 8, 6, 4)
    takes_s = np.full((80, 4, layers + 1), np.inf)
    for k, room in enumerate(rooms):
        takes_s[:, k, 1 : room + 1] = np.arange(1, room + 1)
    of, begun_s = Work(takes_s, (50, 50, 50, 50)), time.process_time()
    search = Search(of, lambda serving, cut, slowest_s: slowest_s, 1, seed=0, deadline=time.monotonic() + 1)
    assert search.begun()
    assert time.process_time() - begun_s < 20


@settings(deadline=None, max_examples=60)
@given(
    times_s=st.lists(st.lists(st.sampled_from([1.0, 1.5, 3.0]), min_size=1, max_size=4), min_size=2, max_size=3),
    more=st.integers(0, 4),
)
def test_machines_serve_as_many_pipelines_as_they_are_fast(times_s: list[list[float]], more: int) -> None:
    names = iter(range(99))
    groups = [[next(names) for _ in stage] for stage in times_s]
    of = {
        (s, d): t
        for s, (row, stage) in enumerate(zip(groups, times_s, strict=True))
        for d, t in zip(row, stage, strict=True)
    }
    count = max(map(len, groups)) + more
    rows = pipelines(groups, lambda s, d: of[s, d], lambda a, b: (0.0, 0.0), count)
    assert [len(row) for row in rows] == [count] * len(groups)
    assert all(set(row) <= set(group) for row, group in zip(rows, groups, strict=True))
    begin = max(range(len(groups)), key=lambda s: len(groups[s]))
    served = Counter(rows[begin])
    assert set(served) == set(groups[begin])
    for a, b in itertools.permutations(served, 2):  # nobody would do better with one pipeline of another
        assert served[a] <= 1 or (served[b] + 1) * of[begin, b] >= served[a] * of[begin, a] * (1 - 1e-9) - of[begin, a]


def test_a_pipeline_goes_on_to_the_nearest_of_those_that_have_as_much_to_do() -> None:
    near = {(0, 3), (1, 2)}
    rows = pipelines([[0, 1], [2, 3]], lambda s, d: 1.0, lambda a, b: (0.0, 0.01 if (a, b) in near else 0.2), 2)
    assert rows == ((0, 1), (3, 2))


def test_as_many_pipelines_as_all_sizes_divide() -> None:
    assert counts_of_pipelines([2, 3], 48) == [3, 6]
    assert counts_of_pipelines([1, 4], 48) == [4, 8]
    assert counts_of_pipelines([4, 5, 7], 48) == [7, 14]
    assert counts_of_pipelines([2, 3], 4) == [3]


@settings(deadline=None, max_examples=60)
@given(times_s=st.lists(st.sampled_from([0.5, 1.0, 1.2, 4.0]), min_size=1, max_size=4), microbatches=st.integers(1, 9))
def test_the_slowest_pipeline_is_as_fast_as_can_be(times_s: list[float], microbatches: int) -> None:
    def longest_s(shares: tuple[int, ...]) -> float:
        return max(n * t for n, t in zip(shares, times_s, strict=True))

    shares = pipeline_shares([(Station(t, 0.0),) for t in times_s], microbatches)
    assert sum(shares) == microbatches
    ways = itertools.product(range(microbatches + 1), repeat=len(times_s))
    assert longest_s(shares) == pytest.approx(min(longest_s(way) for way in ways if sum(way) == microbatches))


def test_who_serves_two_pipelines_has_the_load_of_both() -> None:
    """A machine of 1 s a microbatch serves two pipelines, another of 1 s the third: half of all microbatches each."""
    stations = [(Station(1.0, 0.0), Station(0.5, 0.0))] * 3
    assert pipeline_shares(stations, 12, [[0, 0, 1], [2, 3, 4]]) == (3, 3, 6)


# --- a fleet ------------------------------------------------------------------------------------------------------------

TINY = (
    "model.width=256",
    "model.heads=4",
    "model.layers=8",
    "model.context=512",
    "model.vocab=512",
    "checkpoint.every=0",
    "train.microbatch=1",
    "train.batch=32",
    "fleet.rebalance_period=20",
    "fleet.trainers=2",
)
DEFAULTS = "[defaults]\nrtt_ms = 60\nbandwidth_mbps = 100\n"


def machines(name: str, count: int, tflops: float, memory_gib: float, region: str = "x") -> str:
    return f'[[machines]]\nname = "{name}"\ncount = {count}\nregion = "{region}"\ntflops = {tflops}\nmemory_gib = {memory_gib}\n'


def asked(tmp_path: Path, text: str, stages: int | None, *settings: str) -> Question:
    (tmp_path / "fleet.toml").write_text(text + DEFAULTS)
    run = load_config(None, [*TINY, *settings])
    return Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model), stages, 1)


@pytest.mark.parametrize(("checkpointing", "tied"), [("auto", False), ("never", False), ("auto", True)])
def test_what_stages_of_any_length_take_is_what_the_simulator_has(
    tmp_path: Path, checkpointing: str, tied: bool
) -> None:
    text = machines("big", 2, 0.03, 1.0) + machines("small", 2, 0.02, 0.075)
    question = asked(tmp_path, text, 3, f"compute.checkpointing={checkpointing}", "train.batch=4")
    if tied:  # the first and the last stage have the embedding
        config = config_of("qwen2", tie_word_embeddings=True, num_hidden_layers=question.spec.layers)
        question = dataclasses.replace(question, spec=TracedModel(json.dumps(config), CONTEXT))
    table = takes_s(question.fleet, question.run, question.spec, 3)
    for cut in (((0, 1), (1, 3), (3, 8)), ((0, 4), (4, 7), (7, 8))):
        setting = question.scene(3, 1, cut).setting
        for s, (first, end) in enumerate(cut):
            for n, name in enumerate(("big", "small")):
                kind = next((k for k in setting.kinds if k.name == name), None)
                expected = kind.service_s(s) if kind is not None and s in kind.fits - kind.swaps else np.inf
                assert table[s, n, end - first] == pytest.approx(expected)


BIG_AND_SMALL = machines("big", 2, 0.03, 1.0) + machines("small", 4, 0.02, 0.075)
ONE_BIG = machines("big", 1, 0.06, 1.0) + machines("small", 4, 0.02, 0.065)


@pytest.mark.parametrize(
    ("text", "stages", "uses"),
    [
        (BIG_AND_SMALL, 3, {"big-0", "big-1", "small-0", "small-1", "small-2", "small-3"}),
        (ONE_BIG, 2, {"big", "small-0", "small-1", "small-2", "small-3"}),
        (machines("a", 3, 0.02, 0.12) + machines("b", 2, 0.03, 0.12, "y"), 2, {"a-0", "a-1", "a-2", "b-0", "b-1"}),
    ],
)
def test_unequal_stages_do_what_was_predicted(tmp_path: Path, text: str, stages: int, uses: set[str]) -> None:
    """By all messages of the production code: small machines serve the few layers that they hold, and all machines are
    used, for one may serve several pipelines."""
    question = asked(tmp_path, text, stages)
    for found in plan_pipeline.predict(question, 0, 2.0):
        assert not found.problem
        cut = tuple(stage.layers for stage in found.stages)
        assert {name for stage in found.stages for name in stage.machines} == uses
        assert found.schedule
        scene = plan_pipeline.scheduled(
            question, question.scene(stages, 1, cut), found.schedule, len(found.microbatches)
        )
        for stage, layers in zip(found.stages, cut, strict=True):
            if any(name.startswith("small") for name in stage.machines):
                assert layers[1] - layers[0] <= 3
        played_s = played_step_s(scene, found.step_s, 6, plan_pipeline.membership(question, scene, found))
        assert found.step_s == pytest.approx(played_s, rel=0.1)


def test_cuts_of_pipelines_that_are_too_slow_are_tried_by_other_strategies(tmp_path: Path) -> None:
    predictions, cuts = plan_pipeline.searched(asked(tmp_path, BIG_AND_SMALL, 3), 0, 2.0, least=1e12)
    assert all(p.problem for p in predictions)
    assert any(all(end - first <= 3 for first, end in cut[:2]) for cut in cuts), "small machines hold three layers"


def test_swarm_has_unequal_stages_too_where_machines_hold_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small machines hold one layer: with even cuts the large one trains alone."""
    text = machines("big", 1, 0.02, 1.0) + machines("small", 4, 0.02, 0.035)
    question = asked(tmp_path, text, None, "swap.backing=off")
    cut = ((0, 5), (5, 6), (6, 7), (7, 8))
    even, uneven = plan_swarm.predict(question), plan_swarm.predict(question, cuts=[cut])
    assert [stage.machines for stage in even.stages] == [("big",)]
    assert tuple(stage.layers for stage in uneven.stages) == cut
    assert uneven.step_s < 0.9 * even.step_s
    assert plan_pipeline.uneven(question, [even, uneven]) == [cut, ((0, 1), (1, 2), (2, 3), (3, 8))]
    monkeypatch.setattr(plan_pipeline, "searched", lambda *_: ([uneven], [cut]))
    monkeypatch.setattr(plan_pipeline, "tried_on", lambda question, swarm, pipelines: pipelines)
    for other in (planner.plan_swap, planner.plan_hub):
        monkeypatch.setattr(other, "predict", lambda *_: even)
    (planned,) = planner.predict(question)["swarm"]
    assert planned.stages == uneven.stages, "a plan tries the cuts that suit its pipelines"
