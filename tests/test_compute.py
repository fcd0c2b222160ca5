"""``TorchCompute`` against a plain loop: training, recomputation, the pace."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.compute.arithmetic import StageArithmetic, StageSetup
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.estimate import client_memory, stash_bytes
from muletrain.compute.paced import PacedCompute
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import OptimizerConfig, Precision
from muletrain.model.make import make_model, make_stage
from muletrain.model.traced.chain import TracedModel
from tests.small_stages import (
    MB,
    MICROBATCHES,
    OPTIMIZER,
    SEQUENCES,
    SPEC,
    STEPS,
    Fleet,
    data,
    fleet,
    reference,
    run,
    through,
    train,
    weights,
)
from tests.traced_models import CONTEXT, config_of

if TYPE_CHECKING:
    from muletrain.compute.base import Compute

__all__ = ["fleet"]


# Training -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("state_device", ["device", "cpu"])
def test_stages_train_like_a_plain_loop(fleet: Fleet, stages: int, state_device: str) -> None:
    parts = fleet(stages, optimizer=OPTIMIZER.model_copy(update={"state_device": state_device}))
    expected_losses, expected = reference()
    assert run(train(parts)) == pytest.approx(expected_losses, abs=1e-4)
    found = run(weights(parts))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=3e-5)


def test_shared_layers_train_like_a_plain_loop(fleet: Fleet) -> None:
    spec = replace(SPEC, share_layers=True)
    parts = fleet(2, spec)
    expected_losses, expected = reference(spec, 2)
    assert run(train(parts)) == pytest.approx(expected_losses, abs=1e-4)
    for name, value in run(weights(parts)).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=3e-5)


def test_inline_computes_the_same_bits(fleet: Fleet) -> None:
    threaded, inline = fleet(2), fleet(2, inline=True)
    assert run(train(threaded)) == run(train(inline))
    assert [run(c.digest()) for c in threaded] == [run(c.digest()) for c in inline]


def test_bf16_follows_fp32(fleet: Fleet) -> None:
    """The working copy is 16 bits, the masters are not: they hold updates that bf16 could not represent."""
    parts = fleet(2, precision=Precision.BF16)
    expected, _ = reference()
    assert run(train(parts)) == pytest.approx(expected, rel=0.02)
    name, value = next(iter(run(weights(parts)).items()))
    assert value.dtype == torch.float32, name
    assert not torch.equal(value, value.bfloat16().float())


def test_fp16_scales_the_loss_inside_only(fleet: Fleet) -> None:
    """Gradients leave unscaled."""
    half, full = fleet(2, precision=Precision.FP16), fleet(2)
    run(through(half, MB))
    run(through(full, MB))
    for scaled, plain in zip(half, full, strict=True):
        a, b = run(scaled.gradient(0)), run(plain.gradient(0))
        assert float((a - b).norm() / b.norm()) < 0.02


def test_a_skipped_step_changes_nothing_but_the_accumulator(fleet: Fleet) -> None:
    (part,) = fleet(1)
    before = run(part.digest())
    run(through([part], MB))
    assert run(part.gradient(0)).norm() > 0
    run(part.apply(run(part.gradient(0)) / MICROBATCHES, Update(0, 1.0, skip=True)))
    assert run(part.digest()) == before
    assert run(part.gradient(0)).norm() == 0
    run(through([part], MB))
    part.clear(0)
    assert run(part.gradient(0)).norm() == 0


def test_apply_leaves_the_gradient_it_was_given(fleet: Fleet) -> None:
    """The reduced gradient is served to others afterwards."""
    (part,) = fleet(1)
    gradient = torch.randn(part.n_params)
    copy = gradient.clone()
    run(part.apply(gradient, Update(0, 0.1, skip=False)))
    assert torch.equal(gradient, copy)


# Recomputation ------------------------------------------------------------------------------------------------------


def test_checkpointing_and_stashing_agree_to_the_last_bit(fleet: Fleet) -> None:
    recomputing, stashing = fleet(3, checkpointing="always"), fleet(3, checkpointing="never")
    assert run(train(recomputing)) == run(train(stashing))
    assert [run(c.digest()) for c in recomputing] == [run(c.digest()) for c in stashing]
    assert [c.counters.recomputed for c in recomputing] == [STEPS * MICROBATCHES] * 2 + [0]
    assert [c.counters.recomputed for c in stashing] == [0, 0, 0]
    assert recomputing[0].counters.recompute_s > 0
    assert min(recomputing[0].counters.forward_s, recomputing[0].counters.backward_s) > 0
    assert recomputing[0].counters.apply_s > 0


def test_by_block_computes_the_same_bits_and_again_in_every_stage(fleet: Fleet) -> None:
    by_block, stashing = fleet(2, checkpointing="block"), fleet(2, checkpointing="never")
    assert run(train(by_block)) == run(train(stashing))
    assert [run(c.digest()) for c in by_block] == [run(c.digest()) for c in stashing]
    assert [c.counters.recomputed for c in by_block] == [STEPS * MICROBATCHES] * 2
    assert [c.counters.recompute_s for c in by_block] == [0.0, 0.0], "the inputs of blocks are kept"
    no_room = fleet(2, checkpointing="block", stash_budget=0)
    assert run(train(no_room)) == run(train(fleet(2, checkpointing="never")))
    assert no_room[0].counters.recompute_s > 0, "from the input of the stage"


def test_auto_stashes_what_the_budget_allows_and_gets_it_back(fleet: Fleet) -> None:
    one = stash_bytes(SPEC, SPEC.cut(2), 0, SEQUENCES * SPEC.context, Precision.FP32)
    first, last = fleet(2, stash_budget=2 * one)

    async def three() -> None:
        microbatches = [Microbatch(0, index) for index in range(3)]
        outputs = [await (await first.forward(mb, data(mb)[0])) for mb in microbatches]
        for mb, output in zip(microbatches, outputs, strict=True):
            _, grad = await last.loss_backward(mb, output, data(mb)[1], accumulate=True)
            assert grad is not None
            await first.backward(mb, await grad, accumulate=True)

    run(three())
    assert first.counters.recomputed == 1
    run(three())
    assert first.counters.recomputed == 2

    async def forgotten() -> None:
        for index in range(5):
            await first.forward(Microbatch(1, index), data(MB)[0])
            first.discard(Microbatch(1, index))

    run(forgotten())
    run(three())
    assert first.counters.recomputed == 3


# Pace ---------------------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_paced_calls_take_the_declared_time_one_after_the_other(fleet: Fleet) -> None:
    first, last = fleet(2)

    async def timed() -> tuple[float, float]:
        clock = LoopClock()
        slow: list[Compute] = [PacedCompute(first, clock, 0.04, 0.06), PacedCompute(last, clock, 0.02, 0.03)]
        await through(slow, MB)
        begin = clock.now()
        await asyncio.gather(*(through(slow, Microbatch(0, index)) for index in range(1, 4)))
        took = clock.now() - begin
        begin = clock.now()
        await slow[0].apply(await slow[0].gradient(0), Update(0, 1.0, skip=True))
        return took, clock.now() - begin

    took, apply_took = run(timed())
    assert 3 * 0.1 <= took + 0.01 < 0.6  # the first stage is the bottleneck, and overlaps the other
    assert apply_took < 0.02


def test_a_cancelled_paced_call_leaves_nothing(fleet: Fleet) -> None:
    (part,) = fleet(1)

    async def cancelled() -> None:
        paced = PacedCompute(part, LoopClock(), 0.05, 0.05)
        x, targets = data(MB)
        task = asyncio.create_task(paced.loss_backward(MB, x, targets, accumulate=True))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(cancelled())
    assert run(part.gradient(0)).norm() == 0


@pytest.mark.parametrize("kind", ["native", "traced"])
def test_a_client_in_16_bits_holds_no_masters_and_computes_the_same_bits(kind: str) -> None:
    """HYBRID, sec. 4.4: a client's weights are those that a server computes with, and its accumulator is as exact."""
    if kind == "native":
        model = make_model(ModelConfig(layers=2, width=32, heads=2, vocab=64, context=16, dropout=0.1))
    else:
        architecture = json.dumps(config_of("gpt2", n_layer=2), sort_keys=True)
        model = TracedModel(architecture, CONTEXT)
    cut, mb = model.cut(1), Microbatch(0, 0)
    setup = StageSetup(OptimizerConfig(), 10, seed=1, sequences=2, precision=Precision.BF16, inline=True)
    module = make_stage(model, 0, cut)
    server = StageArithmetic(0, [make_stage(model, 0, cut)], setup, None)
    client = StageArithmetic(
        0, [module], replace(setup, updates=False), lambda name: torch.zeros(module.shapes()[name])
    )
    assert client.masters.dtype == torch.bfloat16
    client.load_weights(server.copied_weights(), ())
    inputs, targets = torch.randint(0, 64, (2, 2, 16))
    found = [a.loss_backward(mb, inputs, targets, accumulate=True)[:2] for a in (server, client)]
    for (loss, gradients), arithmetic in zip(found, (server, client), strict=True):
        assert loss == found[0][0]
        arithmetic.accumulate(gradients, 0)
    assert server.accumulator(0).norm() > 0
    assert torch.equal(server.accumulator(0), client.accumulator(0))
    held = sum(t.numel() * t.element_size() for t in {id(t): t for t in (client.masters, *client._working)}.values())
    assert held == client_memory(model, cut, 0, tokens=32, precision=Precision.BF16).weights
