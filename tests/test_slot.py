"""Which call computes next, which computes nothing after all, and how results leave a device while it goes on."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from muletrain.compute import checks, results, torch_compute
from muletrain.compute.arithmetic import StageArithmetic
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.results import Result, Staging
from muletrain.compute.slot import Slot, Turn
from muletrain.runtime.microbatch.inflight import InFlightStep, TooLate

from .small_stages import MB, OPTIMIZER, SPEC, Fleet, data, fleet, run, through, train, weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from muletrain.config.schema import OptimizerConfig

__all__ = ["fleet"]
DELAYED = OPTIMIZER.model_copy(update={"delayed": True})
HIDDEN = torch.ones(*data(MB)[0].shape, SPEC.width)


class Queue:
    """Work that waits for one slot, each under a name."""

    def __init__(self) -> None:
        self.slot, self.began, self.free = Slot(), list[str](), asyncio.Event()
        self.left: Callable[[], object] = lambda: None
        """Called when the slot has just passed on."""

    def add(self, name: str, priority: int = 0) -> asyncio.Task[None]:
        return asyncio.create_task(self._work(name, priority))

    async def _work(self, name: str, priority: int) -> None:
        async with self.slot(Turn(priority, lambda: self.began.append(name))):
            await self.free.wait()
        self.left()


async def passes(times: int = 3) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


# The slot -------------------------------------------------------------------------------------------------------------


def test_lower_numbers_go_first_and_equal_ones_in_the_order_they_came() -> None:
    async def scenario() -> None:
        queue = Queue()
        tasks = [queue.add(name, int(name[0])) for name in ("1a", "1b", "0a", "2a", "0b", "1c")]
        await passes()
        assert queue.began == ["1a"], "one at a time"
        queue.free.set()
        await asyncio.gather(*tasks)
        assert queue.began == ["1a", "0a", "0b", "1b", "1c", "2a"]

    run(scenario())


@pytest.mark.parametrize("handed", [False, True])
def test_a_waiter_that_is_cancelled_leaves_its_place(handed: bool) -> None:
    """Also if the slot was just handed to it and it has not run since."""

    async def scenario() -> None:
        queue = Queue()
        first, second, third = (queue.add(name) for name in "abc")
        await passes()
        if handed:
            queue.left = second.cancel
        else:
            second.cancel()
        queue.free.set()
        await asyncio.wait_for(asyncio.gather(first, second, third, return_exceptions=True), 5)
        assert queue.began == ["a", "c"]

    run(scenario())


def test_a_holder_that_is_cancelled_or_fails_frees_the_slot() -> None:
    async def scenario() -> None:
        queue = Queue()
        first, second = queue.add("a"), queue.add("b")
        await passes()
        first.cancel()
        await passes()
        assert queue.began == ["a", "b"]
        queue.free.set()
        await second

        def refuses() -> None:
            raise TooLate("over")

        with pytest.raises(TooLate):
            async with queue.slot(Turn(begins=refuses)):
                raise AssertionError("not reached")
        await asyncio.wait_for(queue.add("c"), 5)

    run(scenario())


def test_a_brief_holder_waits_for_its_turn_and_for_no_more() -> None:
    async def scenario() -> None:
        queue = Queue()
        first = queue.add("a")
        await passes()
        begun, goes_on = asyncio.Event(), asyncio.Event()

        async def brief() -> None:
            async with queue.slot(Turn(begins=begun.set), brief=True):
                await goes_on.wait()

        task = asyncio.create_task(brief())
        await passes()
        assert not begun.is_set()
        queue.free.set()
        await first
        await asyncio.wait_for(queue.add("b"), 5)
        assert begun.is_set()
        goes_on.set()
        await task
        queue.free.clear()
        third, fourth = queue.add("c"), queue.add("d")
        await passes()
        assert queue.began == ["a", "b", "c"], "it did not free what others hold"
        queue.free.set()
        await asyncio.gather(third, fourth)

    run(scenario())


# A stage's slot -------------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is clear, compute threads wait where they check tokens: at the start of the first stage and of the last
    one."""
    event, right = threading.Event(), checks.check_sample_values
    event.set()

    def check(*arguments: Any) -> None:
        event.wait(20)
        right(*arguments)

    monkeypatch.setattr(checks, "check_sample_values", check)
    yield event
    event.set()


def test_nothing_is_computed_for_a_step_that_is_over(fleet: Fleet, gate: threading.Event) -> None:
    """A call that waited while the step was applied raises when its turn comes, and leaves nothing."""
    (part,) = fleet(1)
    x, targets = data(MB)

    async def scenario() -> None:
        step = InFlightStep(0, bytes(32), 3)

        def begin(index: int) -> asyncio.Task[Any]:
            mb, turn = Microbatch(0, index), Turn(0, step.check)
            return asyncio.create_task(part.loss_backward(mb, x, targets, turn, accumulate=True))

        gate.clear()
        computing = begin(0)
        await passes()
        update = Update(0, 1.0, skip=False)
        applied = asyncio.create_task(part.apply(torch.ones(part.n_params), update, Turn(begins=step.end)))
        await passes()
        late = begin(1)
        await passes()
        gate.set()
        await computing
        await applied
        with pytest.raises(TooLate):
            await late
        assert (await part.gradient(0)).norm() == 0
        with pytest.raises(TooLate):
            await begin(2)

    run(scenario())


def test_backward_goes_before_forward_where_the_caller_says_so(fleet: Fleet, gate: threading.Event) -> None:
    first, _ = fleet(2)
    began = list[str]()

    async def scenario() -> None:
        await first.forward(MB, data(MB)[0])

        def turn(priority: int, name: str) -> Turn:
            return Turn(priority, lambda: began.append(name))

        gate.clear()
        mbs = [Microbatch(0, index) for index in (1, 2)]
        waiting = [asyncio.create_task(first.forward(mb, data(mb)[0], turn(1, f"forward {mb.index}"))) for mb in mbs]
        await passes()
        back = asyncio.create_task(first.backward(MB, HIDDEN, turn(0, "backward"), accumulate=True))
        await passes()
        gate.set()
        await asyncio.gather(*waiting, back)

    run(scenario())
    assert began == ["forward 1", "backward", "forward 2"]


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Optimizer steps wait until it is set."""
    event, right = threading.Event(), StageArithmetic.apply

    def apply(self: StageArithmetic, *arguments: Any, **more: Any) -> None:
        event.wait(20)
        right(self, *arguments, **more)

    monkeypatch.setattr(StageArithmetic, "apply", apply)
    yield event
    event.set()


@pytest.mark.parametrize("optimizer", [OPTIMIZER, DELAYED], ids=["at once", "delayed"])
def test_an_update_keeps_the_slot_unless_it_is_delayed(
    fleet: Fleet, updates: threading.Event, optimizer: OptimizerConfig
) -> None:
    (part,) = fleet(1, optimizer=optimizer)
    x, targets = data(MB)

    async def scenario() -> None:
        began = asyncio.Event()
        applied = asyncio.create_task(part.apply(torch.ones(part.n_params), Update(0, 1.0, skip=False)))
        await passes()
        computed = asyncio.create_task(
            part.loss_backward(Microbatch(1, 0), x, targets, Turn(begins=began.set), accumulate=True)
        )
        await asyncio.sleep(0.05)
        assert began.is_set() == optimizer.delayed
        updates.set()
        await applied
        await computed

    run(scenario())


def test_a_delayed_update_begins_when_nothing_computes_and_lets_the_next_step_compute(
    fleet: Fleet, gate: threading.Event, updates: threading.Event
) -> None:
    (part,) = fleet(1, optimizer=DELAYED)
    x, targets = data(MB)

    async def scenario() -> None:
        gate.clear()
        step = InFlightStep(0, bytes(32), 2)
        computing = asyncio.create_task(part.loss_backward(MB, x, targets, Turn(0, step.check), accumulate=False))
        await passes()
        gradient = torch.ones(part.n_params)
        applied = asyncio.create_task(part.apply(gradient, Update(0, 1.0, skip=False), Turn(begins=step.end)))
        await passes()
        assert not step.over, "a microbatch of the step computes"
        gate.set()
        await computing
        await through([part], Microbatch(1, 0))
        assert step.over
        assert not applied.done()
        updates.set()
        await applied

    run(scenario())


# The accumulator ------------------------------------------------------------------------------------------------------


def test_the_event_loop_is_free_while_a_gradient_waits_for_the_device(fleet: Fleet, gate: threading.Event) -> None:
    """A caller that is cancelled meanwhile does not cancel what is on its way into the accumulator."""
    (part,) = fleet(1)
    x, targets = data(MB)

    async def scenario() -> None:
        await through([part], MB)
        gate.clear()
        computing = asyncio.create_task(part.loss_backward(Microbatch(0, 1), x, targets, accumulate=False))
        await passes()
        part.clear(0)
        asked = [asyncio.create_task(part.gradient(0)) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in asked)
        asked[0].cancel()
        await passes()
        gate.set()
        assert (await asked[1]).norm() == 0
        await computing

    run(scenario())


# Results leave the device ---------------------------------------------------------------------------------------------


class Observed(Staging):
    """Staging without a device. It copies while ``open`` is set."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.sizes, self.open = list[int](), threading.Event()
        self.open.set()

    def copy(self, values: torch.Tensor, out: torch.Tensor) -> None:
        self.open.wait(20)
        self.sizes.append(values.numel())
        super().copy(values, out)


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Observed]:
    """Stages made from now on use it, as if they computed on a device."""
    observed = Observed()
    monkeypatch.setattr(torch_compute, "staging_for", lambda device: observed)
    yield observed
    observed.open.set()


async def arrived(result: Result) -> torch.Tensor:
    return await result


def test_training_through_staging_gives_the_same_bits(fleet: Fleet, request: pytest.FixtureRequest) -> None:
    direct = fleet(2)
    staging = request.getfixturevalue("staging")
    copied = fleet(2)
    assert run(train(copied)) == run(train(direct))
    assert staging.sizes
    expected = run(weights(direct))
    assert all(torch.equal(value, expected[name]) for name, value in run(weights(copied)).items())


def test_the_next_microbatch_computes_while_a_result_leaves(fleet: Fleet, staging: Observed) -> None:
    """A caller that stops waiting for a result loses the result only: the call had returned, so its gradient counts."""
    _, last = fleet(2)

    async def computed(index: int) -> Result:
        _, result = await last.loss_backward(Microbatch(0, index), HIDDEN, data(MB)[1], accumulate=True)
        assert result is not None
        return result

    async def scenario() -> None:
        staging.open.clear()
        leaving = asyncio.create_task(arrived(await computed(0)))
        await passes()
        second = await computed(1)
        assert not leaving.done()
        leaving.cancel()
        staging.open.set()
        assert (await second).shape == HIDDEN.shape
        both = await last.gradient(0)
        last.clear(0)
        await computed(1)
        assert (both - await last.gradient(0)).norm() > 0.1 * both.norm(), "the first one's is in it"

    run(scenario())


def test_a_large_gradient_comes_in_pieces_between_which_results_pass(
    fleet: Fleet, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece, direct = 1000, fleet(2)[0]
    for module in (results, torch_compute):
        monkeypatch.setattr(module, "PIECE", piece)
    staging = request.getfixturevalue("staging")
    first, _ = fleet(2)

    async def scenario() -> None:
        for part in (first, direct):
            outputs = await part.forward(MB, data(MB)[0])
            await part.backward(MB, HIDDEN, accumulate=True)
            expected = await part.gradient(0)
        staging.open.clear()
        gradient = asyncio.create_task(first.gradient(0))
        outputs = await first.forward(MB, data(MB)[0])
        result = asyncio.create_task(arrived(outputs))
        await asyncio.sleep(0.05)
        assert not gradient.done(), "the event loop runs meanwhile"
        staging.open.set()
        await result
        assert not gradient.done(), "the result did not wait for the end of it"
        assert torch.equal(await gradient, expected)

    run(scenario())
    assert max(staging.sizes) == piece, "pinned memory has a bound"
    assert sum(staging.sizes) > 2 * first.n_params
