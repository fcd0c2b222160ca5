"""``TorchCompute``: cancelled calls and what no correct peer sends leave nothing behind."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

from muletrain.compute.base import Update
from muletrain.compute.checks import is_finite
from muletrain.compute.estimate import stash_bytes
from muletrain.config.schema import Precision
from muletrain.errors import ProtocolError
from tests.small_stages import IDS, MB, SEQUENCES, SPEC, Fleet, X, data, fleet, run, through

__all__ = ["fleet"]


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
