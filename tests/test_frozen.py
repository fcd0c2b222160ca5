"""Frozen parameters have no gradient and no moments: neither takes memory, and nothing is computed for them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from muletrain.compute.base import Microbatch, Update
from muletrain.compute.estimate import Offer, client_memory, stage_memory
from muletrain.compute.swap.fit import swap_memory
from muletrain.compute.swap.swapped import Swap, SwappedCompute
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.schema import OptimizerConfig, Precision
from muletrain.model.traced.factory import first_weights

from .small_stages import run
from .swapped_stages import ADAMW, LAMB, SETUP, Made, stages_in
from .test_factory import of
from .test_swap import worst

made = pytest.fixture(stages_in)
MICROBATCHES, SAMPLES = 2, 4


async def train(stage: Any, steps: int) -> None:
    draws = torch.Generator().manual_seed(1)
    for step in range(steps):
        for index in range(MICROBATCHES):
            images, targets = torch.rand(SAMPLES, 3, 8, 8, generator=draws), torch.rand(SAMPLES, 2, generator=draws)
            await stage.loss_backward(Microbatch(step, index), images, targets, accumulate=True)
        gradient = await stage.gradient(step)
        await stage.apply(gradient.clone(), Update(step, 1.0, skip=False))


@pytest.mark.parametrize("alone", [False, True], ids=["with replicas", "alone"])
@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("optimizer", [ADAMW, LAMB], ids=["adamw", "lamb"])
def test_a_swapped_stage_with_frozen_parameters(
    made: Made, optimizer: OptimizerConfig, disk: bool, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a resident one, also after its weights or its state were replaced. The
    backward pass ends at the first block that is trained."""
    facts = of("frozen")
    spec, cut = facts.spec, facts.spec.cut(1)
    source = first_weights(json.loads(facts.config.model.architecture or ""), 0).__getitem__
    setup = replace(SETUP, optimizer=optimizer, sequences=SAMPLES)
    memory = swap_memory(
        spec, cut, 0, SAMPLES * spec.context, Precision.FP32, microbatches=2, lamb=True, disk=disk, alone=alone
    )
    swap = Swap(Offer(memory.least, None if disk else 1 << 31), made.folder if disk else None, 2, alone=alone)
    resident, swapped = TorchCompute(spec, cut, 0, setup, source), SwappedCompute(spec, cut, 0, setup, swap, source)
    made.opened += [resident, swapped]
    ends = swapped.arithmetic._trained_from
    assert 0 < ends < len(swapped.arithmetic.models) - 1
    backward = list[int]()
    differentiate = swapped.arithmetic._differentiate
    monkeypatch.setattr(
        swapped.arithmetic, "_differentiate", lambda p, k, *rest: backward.append(k) or differentiate(p, k, *rest)
    )
    for stage in (resident, swapped):
        run(train(stage, 3))
        state = run(stage.state())
        run(stage.load_weights(run(stage.copied_weights())))
        run(train(stage, 1))
        run(stage.load_state({name: values.clone() for name, values in state.items()}))
        run(train(stage, 2))
    assert worst(run(swapped.state()), run(resident.state())) <= 1e-5
    assert min(backward) == ends


def test_an_estimate_counts_four_bytes_of_a_frozen_parameter_and_no_gradient() -> None:
    facts, all_trained = of("frozen"), of("regression")
    cut, tokens = facts.spec.cut(1), 4
    frozen = facts.spec.frozen_params(cut, 0)
    assert frozen
    for memory, copies in ((stage_memory, 1), (client_memory, 0)):
        some, full = (memory(f.spec, cut, 0, tokens=tokens, precision=Precision.FP32) for f in (facts, all_trained))
        assert full.weights == some.weights
        assert full.moments - some.moments == 8 * frozen * copies
        assert full.gradient - some.gradient == 16 * frozen
    some, full = (
        swap_memory(f.spec, cut, 0, tokens, Precision.FP32, microbatches=2, lamb=False, disk=True)
        for f in (facts, all_trained)
    )
    assert (full.state - some.state, full.gradients - some.gradients) == (8 * frozen, 20 * frozen)


def test_a_stage_that_is_frozen_as_a_whole_keeps_its_parts() -> None:
    """Of a hub: the server counts a part that has no gradient."""
    facts = of("frozen")
    spec, cut = facts.spec, facts.spec.cut(4)
    source = first_weights(json.loads(facts.config.model.architecture or ""), 0).__getitem__
    stage = TorchCompute(spec, cut, 0, replace(SETUP, sequences=SAMPLES), source)
    assert stage.arithmetic.layout.learned == 0

    async def one_part() -> None:
        mb = Microbatch(0, 0, whole=SAMPLES)
        output = await (await stage.forward(mb, torch.rand(2, 3, 8, 8)))
        assert await stage.backward(mb, torch.ones_like(output), accumulate=True) is None
        await stage.part_sketch(mb, bytes(32))
        stage.count(mb)
        gradient = await stage.gradient(0)
        assert gradient.tolist() == [0.0]
        await stage.apply(gradient, Update(0, 1.0, skip=False))

    before = run(stage.copied_weights())
    run(asyncio.wait_for(one_part(), 20))
    assert torch.equal(run(stage.copied_weights()), before)
    stage.close()
