"""Blocks through ``torch.compile``: the same numbers, the same dropout masks, and no error that reaches a run."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from muletrain.compute.base import Microbatch
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.load import load_config
from muletrain.config.schema import Precision
from muletrain.events import BlocksCompiled
from muletrain.model.dropout import Masks
from muletrain.model.loss import positions_in
from muletrain.model.stage import Block, rope_table
from muletrain.runs.assemble import RunFacts, build_compute
from muletrain.runs.measure.machine import Machine

from .small_stages import IDS, MB, SEQUENCES, SPEC, Fleet, data, fleet, run, through, train, weights

__all__ = ["fleet"]
COMPILE = torch.compile


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.compile`` without a code generator, which takes g++ a minute."""

    def compile_(fn: Callable[..., Any], **given: Any) -> Callable[..., Any]:
        return COMPILE(fn, backend="aot_eager", dynamic=given["dynamic"], fullgraph=given["fullgraph"])

    monkeypatch.setattr(torch, "compile", compile_)
    torch._dynamo.reset()


def compiled(fleet: Fleet, count: int = 2, **changes: Any) -> list[TorchCompute]:
    """Stages whose blocks are compiled."""
    stages = fleet(count, compiled=True, **changes)
    for stage in stages:
        assert stage.compiling is not None
        assert stage.compiling.error == ""
        assert stage.compiling.seconds > 0
        assert stage.arithmetic.module(0).fast is not None
    return stages


def assert_equal(fleet: Fleet, stages: list[TorchCompute], count: int = 2, **changes: Any) -> None:
    """The losses and weights of a few steps are those of stages that are not compiled."""
    plain = fleet(count, **changes)
    assert run(train(stages, 2)) == pytest.approx(run(train(plain, 2)), rel=1e-5)
    ours, others = run(weights(stages)), run(weights(plain))
    for name in others:
        assert float((ours[name] - others[name]).norm() / others[name].norm()) < 1e-5, name


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("checkpointing", ["never", "always", "block"])
def test_compiled_blocks_train_the_same(fleet: Fleet, checkpointing: str) -> None:
    assert_equal(fleet, compiled(fleet, checkpointing=checkpointing), checkpointing=checkpointing)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("checkpointing", ["never", "always", "block"])
def test_compiled_blocks_keep_conversations_of_a_row_apart(fleet: Fleet, checkpointing: str) -> None:
    spec = replace(SPEC, apart=True)
    ids, targets = data(MB)
    targets[0, 4] = targets[1, 9] = spec.vocab + 1
    places, _ = positions_in(targets, spec.vocab)
    targets = torch.nn.functional.pad(targets, (0, 1), value=targets.numel() - 2)  # how many count

    async def step(stages: list[TorchCompute]) -> list[torch.Tensor]:
        first, last = stages
        passed = await (await first.forward(MB, ids, positions=places))
        loss, result = await last.loss_backward(MB, passed, targets, accumulate=True)
        assert result is not None
        await first.backward(MB, await result, accumulate=True)
        return [torch.tensor(loss), await first.gradient(0), await last.gradient(0)]

    changed = {"spec": spec, "checkpointing": checkpointing}
    found, expected = run(step(compiled(fleet, **changed))), run(step(fleet(2, **changed)))
    for ours, others in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, others, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")
def test_the_code_that_torch_writes_trains_the_same(fleet: Fleet) -> None:
    """In full: inductor's C++, which takes a minute."""
    torch._dynamo.reset()
    assert_equal(fleet, compiled(fleet, 1), 1)


@pytest.mark.parametrize("masks", [None, Masks(9, 3, 4), Masks(9, 3, 4, first=1)])
def test_masks_from_outside_are_those_of_the_block(fleet: Fleet, masks: Masks | None) -> None:
    """To the last bit, forward and backward."""
    (stage,) = fleet(1)
    block = stage.arithmetic.module(0).model.layers["2"]
    assert isinstance(block, Block)
    x = torch.randn(SEQUENCES, SPEC.context, SPEC.width, generator=torch.Generator().manual_seed(1)).requires_grad_()
    rope = rope_table(SPEC.context, SPEC.head_width, SPEC.rope_theta, x.device, x.dtype)
    found = []
    for output in (block(x, 2, rope, masks, None), block.masked(x, rope, block.keeps(x, 2, masks))):
        found.append([output, *torch.autograd.grad(output.square().sum(), [x, *block.parameters()])])
    for ours, others in zip(*found, strict=True):
        assert torch.equal(ours, others)


@pytest.mark.usefixtures("traced")
def test_one_callable_serves_all_blocks_and_other_shapes_stay_as_they_are(fleet: Fleet) -> None:
    first, last = compiled(fleet)
    module = first.arithmetic.module(0)
    fast, shapes = module.fast, []
    assert fast is not None

    def counted(block: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return fast.compute(block, x, *given)

    module.fast = fast._replace(compute=counted)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    run(through([first, last], MB))
    run(through([first, last], Microbatch(3, 1)))
    assert shapes == [(SEQUENCES, SPEC.context, SPEC.width)] * 4, "two blocks, two microbatches"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before, "the trial compiled all there is"
    run(first.forward(Microbatch(4, 0), IDS[:1]))
    run(first.forward(Microbatch(4, 1), IDS[:, :-1]))
    run(first.forward(Microbatch(4, 2, heldout=True), IDS))
    assert len(shapes) == 4


def broken(fn: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    raise RuntimeError("no compiler\nwith a long story")


def wrong(fn: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    return lambda block, x, *rest: 1.01 * fn(block, x, *rest)


def wrong_backward(fn: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    def compute(block: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        output: torch.Tensor = fn(block, x, *rest)
        if output.requires_grad:
            output.register_hook(lambda grad: 2 * grad)
        return output

    return compute


@pytest.mark.parametrize(
    ("compile_", "why"), [(broken, "no compiler"), (wrong, "differs by"), (wrong_backward, "differs by")]
)
def test_an_error_leaves_the_blocks_as_they_are(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, compile_: Callable[..., Any], why: str
) -> None:
    monkeypatch.setattr(torch, "compile", compile_)
    stages = fleet(2, compiled=True)
    for stage in stages:
        assert stage.compiling is not None
        assert why in stage.compiling.error
        assert "\n" not in stage.compiling.error
        assert stage.arithmetic.module(0).fast is None
    assert run(train(stages, 2)) == run(train(fleet(2), 2))


@pytest.mark.parametrize(
    ("device", "asked", "is_compiled"), [("cpu", "auto", False), ("cpu", "off", False), ("cpu", "on", True)]
)
def test_the_configuration_says_whether_blocks_are_compiled(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: str, is_compiled: bool
) -> None:
    monkeypatch.setattr(torch, "compile", lambda fn, **given: functools.partial(fn))
    sizes = ("layers=2", "width=16", "heads=2", "context=16", "vocab=300")
    config = load_config(None, [f"compute.compile={asked}", *(f"model.{size}" for size in sizes)])
    compute = build_compute(RunFacts.of(config), 0, Machine.probe(device, Precision.FP32, 1.0), None)
    assert isinstance(compute, TorchCompute)
    assert (compute.compiling is not None) == is_compiled
    compute.close()


def test_the_line_about_it() -> None:
    assert BlocksCompiled(stage=1, seconds=12.34).sentence() == "blocks of stage 1 compiled in 12.3 s"
    failed = BlocksCompiled(stage=1, seconds=1.0, error="no compiler")
    assert failed.sentence() == "blocks of stage 1 are not compiled (compute.compile): no compiler"
    assert failed.is_warning()
    assert not BlocksCompiled(stage=1, seconds=1.0).is_warning()
