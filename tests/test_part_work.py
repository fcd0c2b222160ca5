"""What a client of a hub has under way when other weights come."""

from __future__ import annotations

import asyncio
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.config.schema import Codec
from muletrain.policy.passes import Part, Pass
from muletrain.runtime.pool.checks import Checks
from muletrain.runtime.pool.messages import Give, Result
from muletrain.runtime.pool.work import PartWork
from muletrain.sim.loop import run_virtually
from muletrain.wire.codec import encode, encode_samples
from proofs import reference
from proofs.scenario import Scenario

DELAYED = Scenario(1, (1, 1), 1, 4, 4, 0.0, (), overrides=("optimizer.delayed=true",), clients=("client-0a",))


@pytest.mark.parametrize("turns", range(8))
def test_a_part_never_goes_on_with_other_weights_than_it_began_with(turns: int) -> None:
    """Of step 0, when the weights of step 2 come to the same place: its gradient would be of neither."""
    facts = reference.facts_of(DELAYED)
    compute = reference.client_compute(facts, 0)
    work = PartWork(compute, facts.plan)
    weights = torch.randn(compute.n_params) * 0.02
    length = facts.plan.sequence_length(0)
    inputs = encode_samples(torch.zeros(1, length, dtype=torch.int64))
    gradient = encode(torch.ones(1, length, facts.plan.width), Codec.FP32)

    async def both_at_once() -> list[object]:
        await work.load(weights, b"0" * 32, ())
        for step in (0, 1):
            await work.begin_anew(step, 0)
        parts = [
            asyncio.create_task(
                work.compute(
                    Give(number=step, generation=0, what=Pass.AGAIN, step=step, index=0, first=0, rows=1, whole=1,
                             accumulate=True),
                    [inputs, gradient],
                )
            )
            for step in (0, 1)
        ]  # fmt: skip
        for _ in range(turns):
            await asyncio.sleep(0)
        await work.load(2 * weights, b"2" * 32, (2,))
        return await asyncio.gather(*parts, return_exceptions=True)

    of_step_0, of_step_1 = run_virtually(both_at_once(), 100.0, [])
    answer = of_step_0[0] if isinstance(of_step_0, tuple) else of_step_0
    assert isinstance(answer, asyncio.CancelledError | Result), answer
    assert isinstance(of_step_1, tuple)
    assert isinstance(of_step_1[0], Result)
    assert not of_step_1[0].problem, "its weights stay"


def test_a_forward_whose_backward_another_worker_computed_is_forgotten() -> None:
    facts = reference.facts_of(DELAYED)
    compute = reference.client_compute(facts, 0)
    work = PartWork(compute, facts.plan)
    length = facts.plan.sequence_length(0)
    inputs = encode_samples(torch.zeros(1, length, dtype=torch.int64))
    gradient = encode(torch.ones(1, length, facts.plan.width), Codec.FP32)

    async def backwards() -> list[Result]:
        await work.begin_anew(0, 0)
        about: dict[str, Any] = {"generation": 0, "step": 0, "first": 0, "rows": 1, "whole": 1}
        for number in (0, 1):
            give = Give(number=number, index=number, what=Pass.FORWARD, accumulate=False, **about)
            await work.compute(give, [inputs])
        work.forget_forward(0)
        about["has_forward"] = True
        gives = (Give(number=2 + k, index=k, what=Pass.BACKWARD, accumulate=True, **about) for k in (0, 1))
        return [(await work.compute(give, [gradient]))[0] for give in gives]

    forgotten, kept = run_virtually(backwards(), 100.0, [])
    assert forgotten.problem
    assert not kept.problem


def test_a_forward_that_is_withdrawn_while_its_output_is_copied_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = reference.facts_of(DELAYED)
    compute = reference.client_compute(facts, 0)
    work, inner = PartWork(compute, facts.plan), compute
    while not hasattr(inner, "_stash"):
        inner = inner.inner
    inputs = encode_samples(torch.zeros(1, facts.plan.sequence_length(0), dtype=torch.int64))

    async def copied(values: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(1.0)
        return values

    async def withdrawn() -> None:
        await work.begin_anew(0, 0)
        about: dict[str, Any] = {"generation": 0, "step": 0, "first": 0, "rows": 1, "whole": 1}
        give = Give(number=0, index=0, what=Pass.FORWARD, accumulate=False, **about)
        task = asyncio.create_task(work.compute(give, [inputs]))
        await asyncio.sleep(0.5)
        assert inner._stash._kept
        task.cancel()
        work.forget_forward(0)
        await asyncio.gather(task, return_exceptions=True)

    monkeypatch.setattr(inner, "_to_host", copied)
    run_virtually(withdrawn(), 100.0, [])
    assert not work.forwards()
    assert not inner._stash._kept


def test_a_withdrawn_forward_takes_no_gradient_of_its_part_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same client had computed the part's backward meanwhile, and ended as the server counted it."""
    facts = reference.facts_of(DELAYED)
    compute = reference.client_compute(facts, 0)
    work = PartWork(compute, facts.plan)
    length = facts.plan.sequence_length(0)
    inputs = encode_samples(torch.zeros(1, length, dtype=torch.int64))
    gradient = encode(torch.ones(1, length, facts.plan.width), Codec.FP32)
    right, held = type(compute).forward, asyncio.Event()

    async def forward(self: Any, mb: Any, first: Any, turn: Any, *rest: Any, **more: Any) -> Any:
        if turn.priority:  # a forward that waits for its turn
            await held.wait()
        return await right(self, mb, first, turn, *rest, **more)

    async def counted() -> Result:
        await work.begin_anew(0, 0)
        about: dict[str, Any] = {"index": 0, "generation": 0, "step": 0, "first": 0, "rows": 1, "whole": 1}
        give = Give(number=0, what=Pass.FORWARD, accumulate=False, **about)
        task = asyncio.create_task(work.compute(give, [inputs]))
        await asyncio.sleep(0.5)
        result, _ = await work.compute(Give(number=1, what=Pass.BACKWARD, accumulate=True, **about), [inputs, gradient])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await work.settle([1], [])
        return result

    monkeypatch.setattr(type(compute), "forward", forward)
    assert not run_virtually(counted(), 100.0, []).problem
    assert not work.uncounted()


def test_activations_of_a_server_that_are_not_finite_end_no_client() -> None:
    """A client of the last stage could not say that its loss was not a number, and ended: so did all of the stage."""
    facts = reference.facts_of(DELAYED)
    compute = reference.client_compute(facts, 1)
    work = PartWork(compute, facts.plan)
    length = facts.plan.sequence_length(0)
    inputs = encode(torch.full((1, length, facts.plan.width), torch.nan), Codec.FP32)
    targets = encode_samples(torch.zeros(1, length, dtype=torch.int64))

    async def computed() -> Result:
        await work.begin_anew(0, 0)
        part = Give(number=0, generation=0, what=Pass.LOSS, step=0, index=0, first=0, rows=1, whole=1, accumulate=True)
        return (await work.compute(part, [inputs, targets]))[0]

    result = run_virtually(computed(), 100.0, [])
    assert math.isnan(Result.unpack(result.pack()).loss)
    checks = Checks(SimpleNamespace(), LoopClock(), 0.0, random.Random(0))  # type: ignore[arg-type]
    assert not checks.believes(Part(Pass.LOSS, 0, 0, 0, 1), result.loss, 1.0)
