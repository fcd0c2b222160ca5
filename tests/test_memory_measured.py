"""The peak memory of a peer, measured in a fresh process, is within 10 % of what ``plan`` says, and never above."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory.run import CASES, measured
from benchmarks.memory.tables import each
from muletrain.compute.estimate import Offer
from muletrain.config.load import load_config
from muletrain.runs.assemble import RunFacts

QUICK = "alone", "a client of a hub", "a server of a hub"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.alone if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_a_stage_takes_the_memory_that_was_planned(name: str) -> None:
    found = measured(name)
    assert 0.9 < found["measured"] / found["estimate"] <= 1, found


def test_a_server_of_a_hub_holds_four_accumulators_of_clients_before_it_holds_the_mean() -> None:
    assert [each(), each(pooled=True)] == [(52, 20, 36), (64, 20, 48)]
    assert each(pooled=True, state_on_cpu=True)[2] - each(state_on_cpu=True)[2] == 8


def test_a_lone_machine_holds_twenty_bytes_a_parameter() -> None:
    assert [each(alone=True), each(alone=True, delayed=True)] == [(20, 20, 4), (28, 28, 4)]


def test_a_lone_machine_of_128_gib_trains_6_7_billion_parameters_in_memory() -> None:
    fields = ["model.preset=llama-7b", "fleet.stages=1", "compute.precision=fp32", "train.microbatch=1"]
    (need,) = RunFacts.of(load_config(None, fields), alone=True).needs()
    offer = Offer(128 << 30)
    assert need.resident(offer)
    assert not need.on(offer).copies
    (need,) = RunFacts.of(load_config(None, fields)).needs()
    assert not need.resident(offer)
