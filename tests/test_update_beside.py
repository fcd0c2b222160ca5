"""A peer alone updates its state beside the next forward pass."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from muletrain.compute.base import Microbatch, Update
from muletrain.compute.swap.state import State

from .small_stages import SPEC, run, through
from .swapped_stages import ADAMW, LAMB, MICROBATCHES, Made, stages_in
from .test_swap import worst

if TYPE_CHECKING:
    from muletrain.config.schema import OptimizerConfig

made = pytest.fixture(stages_in)


on_disk = pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])


@on_disk
def test_alone_the_next_step_begins_while_the_update_runs(
    made: Made, monkeypatch: pytest.MonkeyPatch, disk: bool
) -> None:
    """Each sub-model waits for its own weights, and the update reads the accumulator itself. Numbers are those of a resident
    stage."""
    (resident,), (swapped,) = made.resident(1), made.swapped(1, disk=disk, alone=True)
    ended, update = list[int](), State.update

    def slowly(state: State, rule: Any, gradient: torch.Tensor, change: Update) -> None:
        time.sleep(0.2)  # the next step is there before anything has changed
        update(state, rule, gradient, change)
        ended.append(change.step)

    monkeypatch.setattr(State, "update", slowly)

    async def steps(stage: Any) -> None:
        for step in range(3):
            await asyncio.gather(*(through([stage], Microbatch(step, i)) for i in range(MICROBATCHES)))
            mean = (await stage.gradient(step)).div_(MICROBATCHES)
            await stage.apply(mean, Update(step, 1.0, skip=False))
            assert stage is resident or len(ended) == step, "the update is still to come"

    run(steps(resident))
    run(steps(swapped))
    assert worst(run(swapped.state()), run(resident.state())) <= 1e-5
    assert ended == [0, 1, 2]


@on_disk
@pytest.mark.parametrize("optimizer", [ADAMW, LAMB], ids=["adamw", "lamb"])
def test_an_update_changes_first_what_is_needed_first(
    made: Made, monkeypatch: pytest.MonkeyPatch, optimizer: OptimizerConfig, disk: bool
) -> None:
    """The embedding lies behind all layers, and is needed with the first of them."""
    monkeypatch.setattr("muletrain.compute.swap.state.IN_PLACE", 1)  # small windows
    spec = replace(SPEC, vocab=8192)
    (swapped,) = made.swapped(1, spec, disk=disk, alone=True, optimizer=optimizer)
    state, rule = swapped.state_, swapped.arithmetic._rule
    first = swapped.arithmetic.models[0].segments
    state.begin_update(rule)
    needed = list[bool]()

    class Watched:
        by_tensor = rule.by_tensor

        def update(self, *args: Any, **kwargs: Any) -> None:
            begin, end = next(iter(state._left.items()))
            needed.append(any(begin < part.end and part.begin < end for part in first))
            rule.update(*args, **kwargs)

    state.update(Watched(), torch.zeros(swapped.n_params), Update(0, 1.0, skip=False))
    assert needed == sorted(needed, reverse=True)
    assert 0 < sum(needed) < len(needed) - 2
    state.finish()


@on_disk
def test_an_update_that_fails_is_an_error_of_whoever_needs_it(
    made: Made, monkeypatch: pytest.MonkeyPatch, disk: bool
) -> None:
    (swapped,) = made.swapped(1, disk=disk, alone=True)

    def fails(*args: Any) -> None:
        raise MemoryError("no room for the update")

    async def two_steps() -> None:
        await through([swapped], Microbatch(0, 0))
        await swapped.apply(await swapped.gradient(0), Update(0, 1.0, skip=False))
        await through([swapped], Microbatch(1, 0))

    monkeypatch.setattr(State, "update", fails)
    with pytest.raises(MemoryError, match="no room for the update"):
        run(asyncio.wait_for(two_steps(), 20))
    with pytest.raises(MemoryError):
        run(swapped.state())
