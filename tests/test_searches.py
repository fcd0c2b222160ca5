"""Searches for placements: against enumeration, what holds on the way, seeds and time limits."""

from __future__ import annotations

import math
import time
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest

from muletrain.planning import annealing, regrouping
from muletrain.planning.place import Placement, place
from muletrain.planning.placement import Task, evaluate, slots
from reproduction import dtfm_searches as paper
from reproduction.evolutionary import FastLinks, Groups, KernighanLin, evolve, random_placements
from tests.placements import exhaustive, least, link_s, task_of, valid

# --- searches ----------------------------------------------------------------------------------------------------------


SHAPES = [
    pytest.param(task_of(1, (3, 3, 3)), marks=pytest.mark.slow),
    task_of(4, (2, 2), 2),
    task_of(5, (1, 1, 1, 1)),
    task_of(6, (4,), 1),
    task_of(7, (3, 1, 2)),
    task_of(8, (3, 2), 1),
    task_of(9, (2, 2, 2), 1, unequal=True),
    task_of(10, (1,)),
]


@pytest.mark.parametrize("task", SHAPES, ids=lambda task: f"{task.replicas} of {len(task.delay_ms)}")
def test_ours_finds_what_enumeration_finds(task: Task) -> None:
    best = exhaustive(task)
    found = place(task, seed=0, time_limit_s=20)
    assert found.cost.cost_s == pytest.approx(best)
    assert found.lower_bound_s <= best * (1 + 1e-9)
    for search in (evolve, partial(evolve, kernighan_lin=True)):
        assert place(task, search=search, time_limit_s=0.1).cost.cost_s >= best * (1 - 1e-9)


@pytest.mark.slow
def test_small_instances_are_solved_each_time() -> None:
    for seed in range(100):
        task = task_of(seed, Random(seed).choice([(3, 3, 3), (2, 2, 2), (3, 3), (2, 2)]))
        assert place(task, seed=seed).cost.cost_s == pytest.approx(exhaustive(task)), seed


MOVES = [
    task_of(1, (4,) * 6),
    task_of(2, (3, 1, 2, 4), 2, unequal=True),
    task_of(3, (1,) * 5),
    task_of(4, (9, 9), 1, unequal=True),
]


class State:
    """A placement that moves are tried on, and what it costs by what others say."""

    def __init__(self, task: Task, seed: int) -> None:
        self.problem, self.rng = annealing.problem_of(task), np.random.default_rng(seed)
        self.groups = annealing.Walker(task, self.problem, self.rng).groups
        self.kept, self.new, self.scratch = regrouping.working(*self.groups.at.shape, len(self.problem.link))

    def settle(self, weight: float) -> None:
        regrouping.settle(self.problem, self.groups, self.kept, self.scratch, weight)

    def move(self, kind: Any, weight: float, room: float) -> bool:
        return bool(kind(self.problem, self.groups, self.kept, self.new, self.scratch, weight, room, self.rng))

    def costs(self) -> tuple[float, float]:
        """And the guide [s]."""
        link, rows = self.problem.link, self.groups.at
        members = [sorted(set(row)) for row in rows.tolist()]
        exchange = [self.problem.exchange[size] for size in self.groups.size.tolist()]
        slowest = [float(table[np.ix_(m, m)].sum(1).max()) for table, m in zip(exchange, members, strict=True)]
        computing = sum(float(self.problem.compute[m].max()) for m in members)
        between = [link[np.ix_(a, b)] for a, b in pairwise(rows)]
        hops = sum(map(least, between))
        near = sum(math.sqrt(np.mean([t.min(0) ** 2, t.min(1) ** 2])) for t in between)
        return max(slowest) + computing + 2 * hops, sum(slowest) / len(rows) + 2 * near

    def kept_costs(self) -> tuple[float, float]:
        guide = self.kept.slowest.mean() + 2 * self.kept.guides.sum()
        return regrouping.cost(self.kept), float(guide)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 0.4])
@pytest.mark.parametrize("task", MOVES, ids=lambda task: str(task.replicas))
def test_sums_kept_from_move_to_move_are_those_of_the_placement(task: Task, weight: float) -> None:
    state, taken = State(task, 0), {regrouping.swap_devices: 0, regrouping.reverse_stages: 0}
    state.settle(weight)
    for n in range(200):
        kind = (regrouping.swap_devices, regrouping.reverse_stages)[n % 4 == 3]
        before, (cost_s, guide_s) = [part.copy() for part in state.groups], state.costs()
        room = float(state.rng.exponential(2.0))
        moved = state.move(kind, weight, room if kind is regrouping.swap_devices else room / 2)
        taken[kind] += moved
        after_s, after_guide_s = state.costs()
        assert after_s + weight * after_guide_s <= cost_s + weight * guide_s + room + 1e-9
        assert moved or all(np.array_equal(a, b) for a, b in zip(before, state.groups, strict=True))
        assert state.kept_costs()[0] == pytest.approx(after_s)
        assert not weight or state.kept_costs()[1] == pytest.approx(after_guide_s)
        devices = [d for row in state.groups.at.tolist() for d in set(row)]
        assert sorted([*devices, *state.groups.spares.tolist()]) == list(range(len(task.delay_ms)))
        for k, row in enumerate(state.groups.at.tolist()):
            m = int(state.problem.sizes[state.groups.size[k]])
            assert row == list(slots(row[:m], task.pipelines))
    assert taken[regrouping.swap_devices] > 15
    assert taken[regrouping.reverse_stages] > 3 or len(task.replicas) == 2, (
        "two stages are the same the other way round"
    )


@pytest.mark.parametrize("task", MOVES, ids=lambda task: str(task.replicas))
def test_what_was_best_on_the_way_is_kept(task: Task) -> None:
    """Its cost is the sum of many changes: a wrong one would be lower than the truth, or never be found."""
    problem, rng = annealing.problem_of(task), np.random.default_rng(0)
    member = annealing.Walker(task, problem, rng)
    (first_s, _), lowest_s = member.cool(0, 1.0, 0.0), math.inf
    for temperature, weight in ((1.0, 0.4), (0.3, 0.2), (0.1, 0.0)):
        best_s, last = member.cool(3000, temperature, weight)
        state = State(task, 0)
        for part, now in zip(state.groups, member.groups, strict=True):
            part[:] = now
        cost_s, guide_s = state.costs()
        assert last == pytest.approx(cost_s + weight * guide_s)
        assert best_s <= min(cost_s, first_s) * (1 + 1e-9)
        state.groups.at[:] = member.best
        state.groups.size[:] = [problem.sizes.tolist().index(len(set(row))) for row in member.best.tolist()]
        assert state.costs()[0] == pytest.approx(best_s)
        lowest_s = min(lowest_s, best_s)
    assert lowest_s < first_s


def test_members_that_do_well_are_continued_by_several() -> None:
    """As often as their weight says at the colder temperature."""
    task = task_of(1, (4, 4, 4))
    population = annealing.Population(task, annealing.problem_of(task), 8, 0.3, np.random.default_rng(0))
    costs = [cost_s for cost_s, _ in population.ends]

    def resampled(colder: float) -> list[float]:
        population.resample(colder, np.random.default_rng(0))
        return [member.cool(0, 1.0, 0.0)[0] for member in population.walkers]

    assert resampled(0.0) == pytest.approx(costs), "no colder, no choice"
    assert resampled(1e6) == pytest.approx([min(costs)] * len(costs))
    a, b = population.walkers[:2]
    assert not np.shares_memory(a.groups.at, b.groups.at), "each goes on by itself"


def test_the_same_is_found_on_any_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annealing, "move_s", lambda task: 1e-3)  # time for few moves only
    task, found = task_of(1, (4,) * 6), []
    for cores in (1, 3):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        found.append(place(task, seed=3, time_limit_s=100))
    assert found[0].complete
    assert found[0] == found[1]


def test_what_is_at_the_bound_is_not_improved() -> None:
    """Equal machines: any placement is as good."""
    task = Task(np.full((16, 16), 5.0), np.full((16, 16), 1.0), (4,) * 4, 1e8, 1e8)
    found = place(task)
    assert found.gap == pytest.approx(0)
    assert found.tried == annealing.FIRST_ROUND * 16 * annealing.LARGEST


@pytest.mark.parametrize("local", [FastLinks, KernighanLin])
def test_local_searches_keep_the_sizes_of_groups(local: type[FastLinks] | type[KernighanLin]) -> None:
    task = task_of(3, (3, 3, 2), 2)
    groups = Groups(task, np.random.default_rng(3))
    search, moved = local(groups), 0
    for _ in range(20):
        labels = groups.draw()
        better = search.improve(labels)
        assert np.array_equal(np.bincount(better), groups.sizes)
        assert np.array_equal(better == 3, labels == 3), "those left out stay out"
        moved += not np.array_equal(labels, better)
        assert groups.cost(better) == pytest.approx(evaluate(task, groups.assignment(better)).cost_s)
    assert moved > 5


@pytest.mark.parametrize("seed", range(5))
def test_what_moves_gain_by_hand(seed: int) -> None:
    """Kernighan-Lin's, any device: what its links inside groups weigh afterwards, activations less gradients. The
    paper's own, the device with the fastest link in its group: the mean link to the target less that one."""
    task = task_of(seed, (3, 4, 2), 1)
    groups, n = Groups(task, np.random.default_rng(seed)), len(task.devices)
    labels = groups.draw()
    locked = np.random.default_rng(seed).random(n) < 0.2

    def link(a: int, b: int, nbytes: float) -> float:
        return link_s(task, a, b, nbytes)

    def weight(a: int, group: int) -> float:
        others = [b for b in range(n) if labels[b] == group and b != a]
        return sum(link(a, b, task.activation_bytes) - link(a, b, task.gradient_bytes) for b in others)

    def mean(a: int, group: int) -> float:
        return float(np.mean([link(a, b, task.activation_bytes) for b in range(n) if labels[b] == group]))

    def fastest(a: int) -> float:
        return min(link(a, b, task.activation_bytes) for b in range(n) if labels[b] == labels[a] and b != a)

    kernighan_lin = KernighanLin(groups).moves(labels, locked)
    own = FastLinks(groups).moves(labels, locked)
    for group in range(groups.k):
        movable = [d for d in range(n) if labels[d] == group and not locked[d]]
        assert kernighan_lin.free[group] == own.free[group] == bool(movable)
        if not movable:
            continue
        mover = min(movable, key=fastest)
        assert own.device[group] == mover
        targets = [t for t in range(groups.k) if t != group]
        for t in targets:
            assert kernighan_lin.gain[group, t] == pytest.approx(max(weight(d, t) - weight(d, group) for d in movable))
            assert own.gain[group, t] == pytest.approx(mean(mover, t) - fastest(mover))
        d, t = int(kernighan_lin.device[group]), int(kernighan_lin.target[group])
        assert weight(d, t) - weight(d, group) == pytest.approx(kernighan_lin.gain[group, targets].max())
        assert mean(mover, int(own.target[group])) == pytest.approx(max(mean(mover, t) for t in targets))


def test_kernighan_lin_gives_each_machine_of_a_data_centre_a_stage() -> None:
    """Where it ends with most seeds: links in a machine are fast, so that it wants no others inside a stage (DT-FM,
    case 1)."""
    task = paper.task_of("dtfm-case1")
    found = evolve(
        task,
        seed=1,
        time_limit_s=math.inf,
        watch=lambda share, best_s: None,
        kernighan_lin=True,
        trials=60,
        population=40,
    )
    assert sorted(sorted(stage) for stage in found.assignment) == [list(range(m, m + 8)) for m in range(0, 64, 8)]
    assert evaluate(task, found.assignment).cost_s == pytest.approx(paper.CASES[0].kernighan_lin[0], abs=1e-3)


def test_a_seed_is_honoured() -> None:
    task = task_of(0, (2, 2))

    def run(seed: int) -> Placement:
        return place(task, seed=seed, time_limit_s=100)

    first = run(1)
    assert first.complete
    assert first == run(1)


@pytest.mark.parametrize("search", [evolve, annealing.search])
def test_the_time_limit_is_kept_and_told(search: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours by a machine that is a hundred times slower than the slowest it reckons with: it cools down all the same."""
    monkeypatch.setattr(annealing, "move_s", lambda task: 2e-8)
    task, started = paper.task_of("dtfm-case5"), time.monotonic()
    found = place(task, search=search, time_limit_s=1.0)
    assert time.monotonic() - started < 5
    assert not found.complete
    assert found.cost.cost_s < min(random_placements(task, seed=0, draws=20))


# --- published networks ------------------------------------------------------------------------------------------------


def test_512_devices_are_planned_in_the_time_that_there_is() -> None:
    task = task_of(0, (32,) * 16)
    found = place(task, time_limit_s=4)
    assert valid(task, found.assignment)
    assert found.cost.cost_s < min(random_placements(task, seed=0, draws=3))
