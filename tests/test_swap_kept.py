"""Sub-models that stay on a device which has room for them: they are loaded once in a step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from muletrain.compute.estimate import Offer
from muletrain.compute.swap.fit import blocks_of, fitted, swap_memory
from muletrain.compute.swap.loading import Loader
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import Precision
from muletrain.model.spec import ModelSpec
from muletrain.planning.swapping import Layer, crossing_bytes, cut_into, places_bytes, staying

from .small_stages import run
from .swapped_stages import MICROBATCHES, SEQUENCES, Made, stages_in, train
from .test_swap import states, worst

if TYPE_CHECKING:
    from muletrain.compute.swap.chain import SubModel

made = pytest.fixture(stages_in)
SPEC = ModelSpec.from_config(ModelConfig(layers=7, width=64, heads=2, vocab=64, context=16, dropout=0.1))
STEPS = 3


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("room", ["least", "some", "all"])
def test_what_stays_is_loaded_once_in_a_step_and_changes_no_number(
    made: Made, monkeypatch: pytest.MonkeyPatch, room: str, most: int
) -> None:
    """A round has one microbatch, or several. Nothing that computes is overwritten by what comes."""
    loads, load = Counter[int](), Loader._load

    def counted(loader: Loader, model: SubModel, target: torch.Tensor) -> torch.Tensor:
        loads[model.number] += 1
        return load(loader, model, target)

    monkeypatch.setattr(Loader, "_load", counted)
    (resident,), swapped = made.resident(1, SPEC), _with(made, room, most)
    losses, _ = run(train([resident], STEPS))
    found, _ = run(train([swapped], STEPS))
    assert found == pytest.approx(losses, rel=1e-4)
    assert worst(run(states([swapped])), run(states([resident]))) <= 1e-5
    kept, count = swapped.plan.kept, len(swapped.plan.runs)
    assert all(loads[k] <= STEPS + 1 for k in kept), "what comes ahead of the last update is loaded for nothing"
    streamed = [k for k in range(count) if k not in kept]
    if most == 1 and len(streamed) > 2:
        assert max(loads[k] for k in streamed) > STEPS * MICROBATCHES


def _with(made: Made, room: str, most: int) -> Any:
    """A stage that has room for no sub-model, some or all of them beside those that take turns."""
    tokens = SEQUENCES * SPEC.context
    need = swap_memory(SPEC, SPEC.cut(1), 0, tokens, Precision.FP32, microbatches=most, lamb=False, disk=False)
    budget = float(need.least)
    while True:
        (found,) = made.swapped(1, SPEC, budget=int(budget), disk=False, most=most)
        kept, count = len(found.plan.kept), len(found.plan.runs)
        if {"least": True, "some": 0 < kept < count - 2, "all": kept == count > 1}[room]:
            return found
        assert count > 1, "a larger device holds the whole stage"
        budget *= 1.07


def test_what_the_bus_carries_has_a_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 7 GiB: to stream the layers would allow a larger last sub-model, which computes nothing again. But twice as
    much goes over the bus."""
    spec = ModelSpec.from_config(ModelConfig(layers=24, width=2048, heads=16, vocab=50257, context=2048))
    need = swap_memory(spec, spec.cut(1), 0, 4096, Precision.BF16, microbatches=4, lamb=False, disk=False)
    blocks = blocks_of(spec, spec.cut(1), 0, 4096, Precision.BF16, 4.2e14)
    priced = fitted(blocks, need, Offer(7 << 30, 1 << 50), 2.75e10, 4)
    monkeypatch.setattr("muletrain.compute.swap.fit.HIDDEN_COST", 0.0)
    free = fitted(blocks, need, Offer(7 << 30, 1 << 50), 2.75e10, 4)
    assert free.each_s < priced.each_s
    assert free.runs[-1][0] < priced.runs[-1][0]
    assert crossing_bytes(blocks, free, 4) > 1.5 * crossing_bytes(blocks, priced, 4)


def test_places_of_those_that_stay_are_counted_and_they_are_evenly_spread() -> None:
    layers = [Layer(1.0, 3.0, load_bytes=10.0, work_bytes=5.0, sum_bytes=2.0, cut_bytes=1.0)] * 8
    runs = tuple((k, k + 1) for k in range(8))
    assert places_bytes(layers, runs) == 20 + 2 + 3
    assert places_bytes(layers, runs, (2, 5)) == 20 + 20 + 2 + 3
    assert places_bytes(layers, runs, range(8)) == 80 + 2 + 3
    assert staying(layers, runs, 24.0) == ()
    assert staying(layers, runs, 45.0) == (2, 6)
    assert staying(layers, runs, 1000.0) == tuple(range(8))
    alone, some = (cut_into(layers, runs, 2.0, 1, kept) for kept in ((), (2, 6)))
    assert crossing_bytes(layers, alone, 4) - crossing_bytes(layers, some, 4) == 2 * 20
    # forward each load of 5 s waits 4 s; in backward 2 s, where it comes beside one sub-model, and none beside two
    assert alone.waits_s == 7 * 4 + 7 * 2
    assert some.waits_s == 7 * 4 + 3 * 2
