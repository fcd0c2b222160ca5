"""TorchCompute against plain torch: training, recomputation, cancellation, refusals; the pace, the probe, the memory
estimate.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

from muletrain.clock import LoopClock
from muletrain.compute.arithmetic import StageSetup
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.checks import is_finite
from muletrain.compute.estimate import stash_bytes
from muletrain.compute.paced import PacedCompute
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import OptimizerConfig, Precision
from muletrain.errors import CheckpointError, ProtocolError
from muletrain.model.dropout import Masks
from muletrain.model.spec import ModelSpec
from muletrain.model.stage import Stage, initial_weight
from muletrain.optim.schedule import learning_rate
from tests.whole_model import build_full

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from muletrain.compute.base import Compute

SPEC = ModelSpec.from_config(
    ModelConfig(layers=4, width=32, heads=4, kv_heads=2, ffn=48, vocab=61, context=16, dropout=0.2)
)
OPTIMIZER = OptimizerConfig(lr=0.01, warmup=2, clip=None)
STEPS, MICROBATCHES, SEQUENCES = 6, 3, 2
SETUP = StageSetup(OPTIMIZER, STEPS, seed=9, sequences=SEQUENCES)
MB = Microbatch(0, 0)


class Fleet:
    """The stages of a model in one process, closed at the end of the test."""

    def __init__(self) -> None:
        self.opened: list[TorchCompute] = []

    def __call__(
        self, stages: int = 2, spec: ModelSpec = SPEC, source: Any = None, **changes: Any
    ) -> list[TorchCompute]:
        setup = replace(SETUP, **changes)
        built = [TorchCompute(spec, spec.cut(stages), index, setup, source) for index in range(stages)]
        self.opened += built
        return built


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    opened = Fleet()
    yield opened
    for compute in opened.opened:
        compute.close()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def data(mb: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(1000 * mb.step + mb.index)
    ids = torch.randint(0, SPEC.vocab, (SEQUENCES, SPEC.context + 1), generator=draws)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


async def through(stages: list[Any], mb: Microbatch, *, accumulate: bool = True) -> float:
    """One microbatch forward and backward through all stages."""
    x, targets = data(mb)
    for stage in stages[:-1]:
        x = await (await stage.forward(mb, x))
    loss, grad = await stages[-1].loss_backward(mb, x, targets, accumulate=accumulate)
    for stage in reversed(stages[:-1]):
        assert grad is not None
        grad = await stage.backward(mb, await grad, accumulate=accumulate)
    assert grad is None
    return float(loss)


async def train(stages: list[Any], steps: int = STEPS) -> list[float]:
    losses = []
    for step in range(steps):
        losses += [await through(stages, Microbatch(step, index)) for index in range(MICROBATCHES)]
        for stage in stages:
            await stage.apply(await stage.gradient(step) / MICROBATCHES, Update(step, 0.5, skip=False))
    return losses


async def weights(stages: list[Any]) -> dict[str, torch.Tensor]:
    states = [await stage.state() for stage in stages]
    return {n.removeprefix("model/"): t for state in states for n, t in state.items() if n.startswith("model/")}


def reference(spec: ModelSpec = SPEC, stages: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training as a plain torch loop; all gradients are halved, as the updates above ask for."""
    model = build_full(spec, 9, spec.cut(stages))
    norms = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(OPTIMIZER, step, STEPS)
        optimizer.zero_grad()
        for index in range(MICROBATCHES):
            ids, targets = data(Microbatch(step, index))
            loss = F.cross_entropy(model(ids, Masks(9, step, index)).flatten(0, 1), targets.flatten())
            losses.append(float(loss.detach()))
            torch.autograd.backward(loss * 0.5 / MICROBATCHES)
        optimizer.step()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


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


# Failures leave nothing behind --------------------------------------------------------------------------------------


def test_without_accumulating_only_the_gradient_passes_on(fleet: Fleet) -> None:
    parts = fleet(3)
    x, targets = data(MB)

    async def gradients(accumulate: bool) -> list[torch.Tensor]:
        h = await (await parts[0].forward(MB, x))
        k = await (await parts[1].forward(MB, h))
        _, last = await parts[2].loss_backward(MB, k, targets, accumulate=accumulate)
        assert last is not None
        g2 = await last
        middle = await parts[1].backward(MB, g2, accumulate=accumulate)
        assert middle is not None
        g1 = await middle
        assert await parts[0].backward(MB, g1, accumulate=accumulate) is None
        return [g2, g1]

    dry = run(gradients(False))
    assert [float(run(c.gradient(0)).norm()) for c in parts] == [0, 0, 0]
    wet = run(gradients(True))
    assert all(float(run(c.gradient(0)).norm()) > 0 for c in parts)
    for a, b in zip(dry, wet, strict=True):
        assert torch.equal(a, b)


def test_cancelled_calls_never_reach_the_accumulator(fleet: Fleet) -> None:
    """Cancelled while it waits for the thread, while it runs, and after it is through but before its caller resumed."""
    first, last = fleet(2)
    undisturbed = fleet(2)
    run(through(undisturbed, MB))

    async def disturbed() -> None:
        x, targets = data(MB)
        h = await (await first.forward(MB, x))
        blocked = threading.Event()
        first.threads.compute.submit(blocked.wait)
        last.threads.compute.submit(blocked.wait)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(last.loss_backward(MB, h, targets, accumulate=True))]
        tasks += [asyncio.create_task(first.backward(MB, torch.ones_like(h), accumulate=True))]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        blocked.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        for delay_s in (0.0, 0.001, 0.003, 0.01):
            task = asyncio.create_task(last.loss_backward(MB, h, targets, accumulate=True))
            await asyncio.sleep(0)
            time.sleep(delay_s)  # noqa: ASYNC251 - the result arrives meanwhile, and cannot be delivered
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await through([first, last], MB)

    run(disturbed())
    assert torch.equal(run(first.gradient(0)), run(undisturbed[0].gradient(0)))
    assert torch.equal(run(last.gradient(0)), run(undisturbed[1].gradient(0)))


def test_a_cancelled_forward_gives_its_budget_back(fleet: Fleet) -> None:
    first, _ = fleet(2, stash_budget=stash_bytes(SPEC, SPEC.cut(2), 0, SEQUENCES * SPEC.context, Precision.FP32))

    async def cancelled() -> None:
        for _ in range(3):
            task = asyncio.create_task(first.forward(MB, data(MB)[0]))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        h = await (await first.forward(MB, data(MB)[0]))
        await first.backward(MB, h, accumulate=True)

    run(cancelled())
    assert first.counters.recomputed == 0


def test_what_is_not_held_is_named(fleet: Fleet) -> None:
    first, _ = fleet(2)
    first.discard(MB)
    with pytest.raises(KeyError, match="index=0"):
        run(first.backward(MB, torch.zeros(SEQUENCES, SPEC.context, SPEC.width), accumulate=True))


IDS = torch.zeros(SEQUENCES, SPEC.context, dtype=torch.int64)
X = torch.zeros(SEQUENCES, SPEC.context, SPEC.width)


@pytest.mark.parametrize(
    ("stage", "inputs", "complaint"),
    [
        (0, IDS.int(), "int32"),
        (0, IDS[0], "expected int64 of"),
        (0, IDS.repeat(2, 1), "at most"),
        (0, IDS.repeat(1, 2), "at most"),
        (0, IDS[:0], "at most"),
        (0, IDS + SPEC.vocab, "61..61"),
        (0, IDS - 1, "-1..-1"),
        (1, X.double(), "float64"),
        (1, X[..., 1:], "expected float32"),
        (1, X.repeat(1, 2, 1), "at most"),
    ],
)
def test_inputs_no_correct_peer_sends_are_refused(
    fleet: Fleet, stage: int, inputs: torch.Tensor, complaint: str
) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        run(fleet(3)[stage].forward(MB, inputs))


def test_what_is_finite() -> None:
    assert is_finite(X + 3e38), "however large its sum"
    assert not is_finite(X.index_fill(2, torch.tensor([1]), float("nan")))
    assert not is_finite(torch.cat([X[:1] + float("inf"), X[:1] - float("inf")]))


def test_targets_and_gradients_are_checked(fleet: Fleet) -> None:
    first, last = fleet(2)
    for targets, complaint in [(IDS[:1], "targets"), (IDS - 100, "-100"), (IDS.float(), "float32")]:
        with pytest.raises(ProtocolError, match=complaint):
            run(last.loss_backward(MB, X, targets, accumulate=True))

    async def wrong_then_right() -> None:
        await first.forward(MB, IDS)
        with pytest.raises(ProtocolError, match="gradient"):
            await first.backward(MB, X[:1], accumulate=True)
        await first.backward(MB, X, accumulate=True)

    run(wrong_then_right())
    with pytest.raises(ProtocolError, match="gradient"):
        run(first.apply(torch.zeros(3), Update(0, 1.0, skip=False)))


def test_a_diverging_stage_makes_its_gradient_non_finite(fleet: Fleet) -> None:
    """So that the step record skips the step, instead of a microbatch being retried for ever."""
    first, _ = fleet(2)

    async def poisoned() -> None:
        await first.forward(MB, IDS)
        await first.backward(MB, X + float("nan"), accumulate=True)

    run(poisoned())
    assert not run(first.gradient(0)).isfinite().all()


def other_weights(name: str) -> torch.Tensor:
    """Not those of the seed."""
    return initial_weight(SPEC, name, Stage(SPEC, None, SPEC.cut(1)).shapes()[name], 123)


# State --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_newcomer_goes_on_with_the_state(fleet: Fleet, precision: Precision) -> None:
    old, new = (fleet(2, precision=precision, source=source) for source in (None, other_weights))

    async def handover() -> None:
        await train(old, 2)
        for a, b in zip(old, new, strict=True):
            assert await a.digest() != await b.digest()
            await b.load_state(await a.state())
            assert await a.digest() == await b.digest()
            gradient = torch.randn(a.n_params)
            await a.apply(gradient, Update(2, 1.0, skip=False))
            await b.apply(gradient, Update(2, 1.0, skip=False))
            assert await a.digest() == await b.digest()
            x = X if a.stage else IDS
            if a.stage == 0:
                assert torch.equal(await (await a.forward(MB, x)), await (await b.forward(MB, x)))

    run(handover())


def test_digest_and_state_come_after_an_apply_that_still_waits(fleet: Fleet) -> None:
    (part,) = fleet(1)

    async def racing() -> None:
        before = await part.digest()
        busy = threading.Event()
        part.threads.compute.submit(busy.wait)
        applied = asyncio.create_task(part.apply(torch.ones(part.n_params), Update(0, 1.0, skip=False)))
        await asyncio.sleep(0)
        digest, state = asyncio.create_task(part.digest()), asyncio.create_task(part.state())
        await asyncio.sleep(0.05)  # long enough for the offload thread to have answered too early
        busy.set()
        await applied
        assert await digest == await part.digest() != before
        assert all(bool(t.any()) for name, t in (await state).items() if name.startswith("moment1/"))

    run(racing())


# Delayed updates ----------------------------------------------------------------------------------------------------

DELAYED = OPTIMIZER.model_copy(update={"delayed": True})
ON_CPU = {"state_device": "cpu"}


def delays(fleet: Fleet, **changes: Any) -> list[list[TorchCompute]]:
    """Two stages twice: with delayed updates, and plain ones that are to be made late."""
    optimizer = changes.pop("optimizer", {})
    return [fleet(2, optimizer=o.model_copy(update=optimizer), **changes) for o in (DELAYED, OPTIMIZER)]


async def means(stages: list[TorchCompute], step: int) -> list[torch.Tensor]:
    return [await stage.gradient(step) / MICROBATCHES for stage in stages]


async def update(stages: list[TorchCompute], gradients: list[torch.Tensor], step: int) -> None:
    for stage, gradient in zip(stages, gradients, strict=True):
        await stage.apply(gradient, Update(step, 0.5, skip=step == 2))


@pytest.mark.parametrize("checkpointing", ["always", "never"])
@pytest.mark.parametrize(
    ("optimizer", "precision"), [({}, Precision.FP32), ({}, Precision.BF16), (ON_CPU, Precision.FP32)], ids=str
)
def test_delayed_updates_equal_plain_ones_made_a_step_late(
    fleet: Fleet, optimizer: dict[str, str], precision: Precision, checkpointing: Any
) -> None:
    """Bit for bit, one of them skipped, each made while a microbatch of the step after is on its way through the
    stages; and what is run again of a step sees what it saw at first."""
    ahead, plain = delays(fleet, optimizer=optimizer, precision=precision, checkpointing=checkpointing)

    async def both() -> None:
        late: list[torch.Tensor] = []
        for step in range(STEPS):
            for index in range(MICROBATCHES):
                seen = await through(plain, Microbatch(step, index))
                assert await through(ahead, Microbatch(step, index)) == seen
            expected = await means(plain, step)
            for stage in plain:
                stage.clear(step)
            if late:
                await update(plain, late, step - 1)
            late = expected
            assert all(map(torch.equal, await means(ahead, step), expected))
            first, begun = Microbatch(step + 1, 0), Microbatch(step + 1, 9)
            for stage in (ahead[0], plain[0]):
                hidden = await (await stage.forward(begun, data(begun)[0]))
            loss = await through(plain, first, accumulate=False)
            assert await through(ahead, first, accumulate=False) == loss
            assert await through(ahead, Microbatch(step, MICROBATCHES - 1), accumulate=False) == seen
            await update(ahead, await means(ahead, step), step)
            for stage in (ahead[0], plain[0]):
                await stage.backward(begun, torch.ones_like(hidden), accumulate=False)
            assert await through(ahead, first, accumulate=False) == loss, "as before the update"
            assert [float((await stage.gradient(step)).norm()) for stage in ahead] == [0, 0]
        await update(plain, late, STEPS - 1)
        a, b = await weights(ahead), await weights(plain)
        assert all(torch.equal(a[name], b[name]) for name in b)

    run(both())


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_newcomer_gets_both_weights_of_delayed_updates(fleet: Fleet, steps: int, precision: Precision) -> None:
    kinds = (None, other_weights)
    old, new = (fleet(2, optimizer=DELAYED, precision=precision, source=source) for source in kinds)

    async def handover() -> None:
        await train(old, steps)
        for a, b in zip(old, new, strict=True):
            await b.load_state(await a.state())
        for step in (steps, steps + 1):
            for index in range(MICROBATCHES):
                assert await through(old, Microbatch(step, index)) == await through(new, Microbatch(step, index))
            for stages in (old, new):
                await update(stages, await means(stages, step), step)
        assert [await c.digest() for c in old] == [await c.digest() for c in new]
        state = await old[0].state()
        with pytest.raises(CheckpointError, match="not a stage's state"):
            await new[0].load_state({**state, "step": torch.tensor([math.nan])})

    run(handover())


def test_an_update_that_takes_long_does_not_hold_up_the_next_step(fleet: Fleet) -> None:
    (part,) = fleet(1, optimizer=DELAYED)

    async def overlapping() -> None:
        busy = threading.Event()
        part.threads.updates.submit(busy.wait)
        applied = asyncio.create_task(part.apply(torch.ones(part.n_params), Update(0, 1.0, skip=False)))
        await through([part], Microbatch(1, 0))
        assert not applied.done()
        busy.set()
        await applied

    run(overlapping())


def test_a_state_that_does_not_fit_changes_nothing(fleet: Fleet) -> None:
    first, last = fleet(2)
    state = run(first.state())
    before = run(first.digest())
    with pytest.raises(CheckpointError, match="is missing"):
        run(first.load_state(run(last.state())))
    key = "moment2/model.layers.0.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=r"up_proj.weight has shape \(1,\)"):
        run(first.load_state({n: t + 1 for n, t in state.items()} | {key: torch.zeros(1)}))
    assert run(first.digest()) == before
    run(first.load_state({n: t for n, t in state.items() if n.startswith("model/")}))
    assert run(first.digest()) == before


def test_weights_come_from_a_source(fleet: Fleet) -> None:
    asked = []

    def source(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.full(Stage(SPEC, 1, SPEC.cut(2)).shapes()[name], 0.5)

    part = TorchCompute(SPEC, SPEC.cut(2), 1, SETUP, source)
    fleet.opened.append(part)
    assert all(float(t.min()) == 0.5 for n, t in run(part.state()).items() if n.startswith("model/"))
    assert "model.embed_tokens.weight" not in asked
    with pytest.raises(CheckpointError, match="shape"):
        TorchCompute(SPEC, SPEC.cut(2), 1, SETUP, lambda _: torch.zeros(2))


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
