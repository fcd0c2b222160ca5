"""The loop of virtual worlds calls what asyncio's own would call, in the same order, and forgets what was cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import selectors
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from muletrain.clock import LoopClock
from muletrain.errors import DeadlineExceeded
from muletrain.sim.loop import FEW_TIMERS, VirtualLoop, context_of, run_virtually

DELAYS_S = (0.0, 1e-3, 2e-3, 3e-3, 0.5)
"""Few, so that many timers are due at the same time."""


class _Jumping(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is ready, and no timer is set"
        self.now += max(0.0, timeout)
        return []


class AsyncioLoop(asyncio.SelectorEventLoop):
    """asyncio's, where waiting takes no time."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


async def program(parts: list[tuple[int, float, float]], told: list[tuple[int, str, float]]) -> None:
    """Each part does one of the things that peers do, and says when."""
    clock, event = LoopClock(), asyncio.Event()

    def tell(who: int, what: str) -> None:
        told.append((who, what, clock.now()))

    async def part(who: int, kind: int, first_s: float, second_s: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            if kind == 0:
                await clock.sleep(first_s)
                tell(who, "slept")
                await clock.sleep(second_s)
            elif kind == 1:
                await clock.deadline(event.wait(), first_s, "an event")
            elif kind == 2:
                await clock.sleep(first_s)
                event.set()
                event.clear()
            elif kind == 3:
                asyncio.create_task(part(who, 0, first_s, second_s)).cancel(f"{who}")
                done, _ = await asyncio.wait({asyncio.create_task(part(who, 0, second_s, 0.0))}, timeout=first_s)
                tell(who, f"{len(done)} done")
            else:
                timers = [loop.call_later(s, tell, who, f"called after {s}") for s in (first_s, second_s, *DELAYS_S)]
                await clock.sleep(second_s)
                for timer in timers[::2]:
                    timer.cancel()
            tell(who, "end")
        except DeadlineExceeded:
            tell(who, "too late")

    await asyncio.gather(*(part(who, *what) for who, what in enumerate(parts)))
    await clock.sleep(2.0)


delays = st.sampled_from(DELAYS_S)


@given(st.lists(st.tuples(st.integers(0, 4), delays, delays), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_all_is_called_in_the_order_in_which_asyncio_calls_it(parts: list[tuple[int, float, float]]) -> None:
    ours: list[tuple[int, str, float]] = []
    theirs: list[tuple[int, str, float]] = []
    problems: list[str] = []
    run_virtually(program(parts, ours), 10.0, problems)
    with asyncio.Runner(loop_factory=AsyncioLoop) as runner:
        runner.run(program(parts, theirs))
    assert ours == theirs
    assert not problems


def test_a_frozen_machine_does_nothing_and_then_all_that_was_due_meanwhile() -> None:
    """As one that is stopped by SIGSTOP."""
    told: list[tuple[str, float]] = []

    async def lives(name: str) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(2.0, lambda: told.append((f"timer of {name}", loop.time())))
        for _ in range(3):
            await asyncio.create_task(asyncio.sleep(1.0))
            told.append((name, loop.time()))

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        lives_on = [asyncio.create_task(lives(name), context=context_of(name)) for name in "ab"]
        await asyncio.sleep(1.5)
        loop.freeze("a")
        await asyncio.sleep(10.0)
        loop.thaw("a")
        await asyncio.gather(*lives_on)

    run_virtually(scenario(), 20.0, [])
    assert told[:5] == [("a", 1.0), ("b", 1.0), ("timer of b", 2.0), ("b", 2.0), ("b", 3.0)]
    assert told[5:] == [("timer of a", 11.5), ("a", 11.5), ("a", 12.5)]


def test_the_tasks_of_a_group_are_cancelled_in_the_same_order_wherever_they_are_in_memory() -> None:
    def order(scattered: list[object]) -> list[int]:
        cancelled: list[int] = []

        async def waits(who: int) -> None:
            try:
                await asyncio.sleep(1.0)
            except asyncio.CancelledError:
                cancelled.append(who)
                raise

        async def scenario() -> None:
            async with asyncio.TaskGroup() as group:
                for who in range(20):
                    scattered.append(group.create_task(waits(who)))
                await asyncio.sleep(0.1)
                raise ValueError

        with contextlib.suppress(ExceptionGroup):
            run_virtually(scenario(), 2.0, [])
        return cancelled

    kept: list[object] = []
    first = order(kept)
    random.Random(0).shuffle(kept)
    del kept[10:]  # the holes that these leave are taken by the next ones
    assert sorted(first) == list(range(20))
    assert order(kept) == first


def test_a_wait_of_less_than_the_clock_resolves_ends() -> None:
    """Time stood still for a sender that had 1e-14 s left (fuzz seed 3607)."""

    async def waits() -> int:
        loop, passes = asyncio.get_running_loop(), 0
        await asyncio.sleep(1000.1)
        due = math.nextafter(loop.time(), math.inf)
        while (left_s := due - loop.time()) > 0.0:
            await asyncio.sleep(left_s / 2)
            passes += 1
            assert passes < 100
        return passes

    assert run_virtually(waits(), 2000.0, []) == 1


def test_timers_that_were_cancelled_are_forgotten() -> None:
    """Nearly every deadline is met: kept until they are due, millions of them would fill the memory."""

    async def scenario() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        kept = loop.call_later(50.0, lambda: None)
        for _ in range(10 * FEW_TIMERS):
            loop.call_later(100.0, lambda: None).cancel()
        await asyncio.sleep(1e-3)
        assert kept in loop.timers
        return len(loop.timers)

    assert run_virtually(scenario(), 200.0, []) <= FEW_TIMERS


def test_what_goes_wrong_in_a_callback_is_reported_and_the_rest_goes_on() -> None:
    called, problems = [], list[str]()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: 1 / 0)
        loop.call_soon(called.append, "next")
        await asyncio.sleep(0.1)

    run_virtually(scenario(), 1.0, problems)
    assert called == ["next"]
    assert len(problems) == 1
    assert "ZeroDivisionError" in problems[0]
