"""Placements on the networks of the DT-FM paper: they cost and end as published."""

from __future__ import annotations

import pytest

from muletrain.config.matrices import load_matrices, shipped
from muletrain.planning.place import place
from muletrain.planning.placement import evaluate, lower_bound_s
from reproduction import dtfm_networks
from reproduction import dtfm_searches as paper

# --- published networks ------------------------------------------------------------------------------------------------


def test_all_networks_that_ship_are_whole() -> None:
    assert len(shipped()) == 8
    for name in shipped():
        m = load_matrices(name)
        assert m.name == name
        assert len(m.delay_ms) == len(m.bandwidth_gbps) == len(m.regions) == 64
    assert load_matrices("dtfm-case1-text").bandwidth_gbps[0][63] == 25
    assert load_matrices("dtfm-case3-text").delay_ms[0][63] == 10


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
@pytest.mark.parametrize("case", range(1, 6))
def test_the_proven_optimum_is_found(case: int, seed: int) -> None:
    found = place(paper.task_of(f"dtfm-case{case}"), seed=seed, time_limit_s=30 if seed else 5)
    assert found.cost.cost_s == pytest.approx(paper.CASES[case - 1].optimum, abs=6e-4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_published_searches_end_where_they_did() -> None:
    found = dtfm_networks.reproduce()
    assert [str(b) for b in found.bars if not b.met] + [s.stated for s in found.statements if not s.holds] == []


# --- the command -------------------------------------------------------------------------------------------------------


def test_a_bound_is_one() -> None:
    for case, published in enumerate(paper.CASES, 1):
        assert 0 < lower_bound_s(paper.task_of(f"dtfm-case{case}")) <= published.optimum + 1e-3


def test_published_optima_cost_what_was_published() -> None:
    """Case 1: each stage takes one GPU of each machine, each pipeline stays in its machine."""
    task = paper.task_of("dtfm-case1")
    stages = tuple(tuple(8 * p + s for p in range(8)) for s in range(8))
    assert evaluate(task, stages).cost_s == pytest.approx(paper.CASES[0].optimum, abs=6e-4)
