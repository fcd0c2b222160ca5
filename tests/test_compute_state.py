"""``TorchCompute``: a state goes to a newcomer, also while updates are delayed."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest
import torch

from muletrain.compute.base import Microbatch, Update
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.schema import Precision
from muletrain.errors import CheckpointError
from muletrain.model.stage import Stage, initial_weight
from muletrain.wire.statefile import StateBuffers
from tests.small_stages import (
    IDS,
    MB,
    MICROBATCHES,
    OPTIMIZER,
    SETUP,
    SPEC,
    STEPS,
    Fleet,
    X,
    data,
    fleet,
    run,
    through,
    train,
    weights,
)

__all__ = ["fleet"]

NAME = next(iter(Stage(SPEC, None, SPEC.cut(1)).shapes()))


# Failures leave nothing behind --------------------------------------------------------------------------------------


def other_weights(name: str) -> torch.Tensor:
    """Not those of the seed."""
    return initial_weight(SPEC, name, Stage(SPEC, None, SPEC.cut(1)).shapes()[name], 123)


# State --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_lent_state_is_the_same_file_without_a_copy(fleet: Fleet, precision: Precision, delayed: bool) -> None:
    optimizer = OPTIMIZER.model_copy(update={"delayed": delayed})
    (copying,), (lending,) = (
        fleet(1, precision=precision, optimizer=optimizer, lends=lends) for lends in (False, True)
    )

    async def compared() -> None:
        for compute in (copying, lending):
            await through([compute], MB)
            await compute.apply(await compute.gradient(0), Update(0, 1.0, skip=False))
        copy, lent = await copying.state(), await lending.state()
        assert lent["model/" + NAME].untyped_storage().data_ptr() == lending.arithmetic.masters.data_ptr()
        assert b"".join(StateBuffers(copy)) == b"".join(StateBuffers(lent))

    run(compared())


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
