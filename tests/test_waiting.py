"""Work that an answer makes pointless."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from muletrain.clock import Clock, LoopClock
from muletrain.events import StepWaits
from muletrain.policy.deadline import Deadline, Pulse
from muletrain.runtime.core.waiting import MAX_SILENCE, News, Waits, unless_done
from proofs.play import play
from proofs.scenario import FOR_EVER_S, Fault, Scenario
from tests.virtual import virtually


def waits_of(clock: Clock, news: News) -> Waits:
    """Of an actor that sees nothing that would end a wait."""
    return Waits(clock, news, lambda: None, lambda awaited: "")


async def no_question() -> None:
    """Asks nobody."""


def answer() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("turns", range(5))
def test_who_is_cancelled_at_the_moment_at_which_the_answer_comes_does_not_go_on(turns: int) -> None:
    async def scenario() -> None:
        known = answer()
        waiting = asyncio.create_task(unless_done(known, asyncio.sleep(10)))
        await asyncio.sleep(0)
        known.set_result(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        in_time = waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled() == in_time

    virtually(scenario())


@pytest.mark.parametrize(
    ("inner", "outer", "result"),
    [(False, False, ("inner", "done")), (True, False, ("inner", None)), (False, True, None), (True, True, None)],
)
def test_one_in_another_ends_with_its_own_answer_and_no_cancellation_is_left(
    inner: bool, outer: bool, result: object
) -> None:
    async def scenario() -> None:
        answers = answer(), answer()

        async def within() -> tuple[str, Any]:
            return "inner", await unless_done(answers[0], asyncio.sleep(0.05, "done"))

        task = asyncio.current_task()
        assert task is not None
        for known, comes in zip(answers, (inner, outer), strict=True):
            if comes:
                asyncio.get_running_loop().call_later(0.01, known.set_result, None)
        assert await unless_done(answers[1], within()) == result
        assert not task.cancelling()
        await asyncio.sleep(0.05)

    virtually(scenario())


def test_work_that_ends_with_the_answer_keeps_its_result_or_error() -> None:
    async def scenario() -> None:
        for error in (None, TimeoutError("its own"), ValueError("its own")):
            known = answer()

            async def work(known: asyncio.Future[None] = known, error: Exception | None = error) -> str:
                known.set_result(None)
                if error is not None:
                    raise error
                return "done"

            if error is None:
                assert await unless_done(known, work()) == "done"
            else:
                with pytest.raises(type(error), match="its own"):
                    await unless_done(known, work())
            await asyncio.sleep(0)
            assert await unless_done(known, work()) is None, "it does not even begin"

    virtually(scenario())


def test_a_task_group_that_fails_with_the_answer_fails() -> None:
    async def scenario() -> None:
        known = answer()

        async def fails() -> None:
            await known
            raise ValueError

        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
            asyncio.get_running_loop().call_later(0.01, known.set_result, None)
            await unless_done(known, asyncio.sleep(10))
            await asyncio.sleep(10)

    with pytest.raises(ExceptionGroup):
        virtually(scenario())


def test_a_wait_is_not_in_vain_while_what_is_waited_for_goes_on() -> None:
    """Who is there and what is through, everyone would ask everyone else in each long step. When it stops, they do, and
    soon."""
    pulse, asked = Pulse(16.0), list[float]()

    async def scenario() -> None:
        clock = LoopClock()

        async def work() -> None:
            for _ in range(500):
                await clock.sleep(0.1)
                pulse.beat(clock.now())

        async def ask() -> None:
            asked.append(clock.now())

        done = asyncio.Event()
        news = News()
        waits = waits_of(clock, news)
        working = asyncio.create_task(work())
        asyncio.get_running_loop().call_later(60.0, lambda: (done.set(), news.touched()))
        await waits.until(done.is_set, Deadline(unmeasured_s=5.0, floor_s=5.0), "it", ask, pulse)
        await working

    virtually(scenario())
    assert asked
    assert min(asked) == pytest.approx(50.0 + 16 * 0.1)


def test_a_wait_that_went_on_without_questions_is_not_given_up_before_the_next_one() -> None:
    """Microbatches behind slow links: nobody had asked for 350 s, since the peer's own work went on (fleet 138 of
    benchmarks/sim_grid)."""
    pulse = Pulse(16.0)

    async def scenario() -> None:
        clock, done, asked = LoopClock(), asyncio.Event(), 0
        news = News()
        waits = waits_of(clock, news)

        async def ask() -> None:
            nonlocal asked
            asked += 1
            if clock.now() > 400.0:
                done.set()
                news.touched()
            else:
                waits.came_on()

        async def work() -> None:
            await clock.sleep(250.0)  # from then on one more missed deadline may end the wait
            assert asked >= MAX_SILENCE
            for _ in range(350):
                await clock.sleep(1.0)
                pulse.beat(clock.now())

        working = asyncio.create_task(work())
        await waits.until(done.is_set, Deadline(unmeasured_s=5.0, floor_s=5.0), "it", ask, pulse)
        await working

    virtually(scenario(), 1000.0)


def test_a_deadline_that_was_missed_does_not_lengthen_the_next() -> None:
    """What is waited for comes only when it is asked for: waits took 7, 12, 21, 37, 64 and 111 s."""
    took: list[float] = []

    async def scenario() -> None:
        clock, done = LoopClock(), asyncio.Event()
        news = News()
        waits, deadline = waits_of(clock, news), Deadline(floor_s=0.5)

        async def ask() -> None:
            done.set()

        for usual_s in (1.0, 1.0, 1.0, None, None, None, None, None, None):
            done.clear()
            begin = clock.now()
            if usual_s is not None:
                asyncio.get_running_loop().call_later(usual_s, lambda: (done.set(), news.touched()))
            await waits.until(done.is_set, deadline, "it", ask)
            took.append(clock.now() - begin)

    virtually(scenario())
    assert took[-1] == pytest.approx(took[3])
    assert took[-1] < 4.0


def test_a_wait_says_for_whom_and_what_comes_next() -> None:
    """Once it takes long; and again each time it has become twice as long."""
    lie = Fault(0.0, "lie", ("peer-1b",), for_s=FOR_EVER_S, how="seals")
    outcome = play(Scenario(3, (2, 2), 2, 6, 8, 0.05, (lie,)))
    waits = outcome.of(StepWaits, "peer-1a", what="the stage's replicas to seal")
    assert {(w.step, *w.names) for w in waits} == {(1, "peer-1b")}
    assert [round(w.seconds) for w in waits] == [9, 19, 39]
    assert "goes on without them" in waits[0].sentence()
    assert not outcome.of(StepWaits, step=6), "it is left out"


@pytest.mark.parametrize(
    ("comes_s", "deadline_s"), [((1.0, 2.0, 100.0), 30.0), ((1.0, 31.0, 100.0), 93.0), ((95.0, 100.0), 75.0)]
)
def test_what_came_before_the_second_question_says_how_long_a_first_wait_takes(
    comes_s: tuple[float, ...], deadline_s: float
) -> None:
    """One keeps its part to itself until the others do without: all later waits would last as long."""
    deadline = Deadline()

    async def scenario() -> None:
        clock, news, came = LoopClock(), News(), list[float]()
        waits = waits_of(clock, news)
        for at_s in comes_s:
            asyncio.get_running_loop().call_later(at_s, lambda at_s=at_s: (came.append(at_s), news.touched()))
        await waits.until(lambda: len(came) == len(comes_s), deadline, "it", no_question, so_far=lambda: len(came))

    virtually(scenario())
    assert deadline.seconds() == pytest.approx(deadline_s)


def test_a_long_wait_is_not_given_up_while_those_we_ask_say_that_they_come_on() -> None:
    """Deadlines doubled to more than the patience: nobody was asked meanwhile, and stages without replicas gave up
    while others averaged 2 GB on 37 Mb/s (fleet 109 of the grid)."""
    asked: list[float] = []

    async def scenario() -> None:
        clock, done = LoopClock(), asyncio.Event()
        news = News()
        news.patience_s = 5.0
        waits = waits_of(clock, news)

        async def ask() -> None:
            asked.append(clock.now())
            waits.came_on()

        asyncio.get_running_loop().call_later(60.0, lambda: (done.set(), news.touched()))
        await waits.until(done.is_set, Deadline(unmeasured_s=0.5, floor_s=0.5), "it", ask)

    virtually(scenario())
    assert len(asked) < 60, "a question now and then is no load"


def test_who_stood_still_itself_asks_before_it_gives_up() -> None:
    """A laptop that slept for ten minutes."""

    async def scenario() -> None:
        clock, done = _Jumping(), asyncio.Event()
        news = News()
        waits = waits_of(clock, news)

        async def ask() -> None:
            if clock.slept_s:
                done.set()
                news.touched()
            waits.came_on()

        asyncio.get_running_loop().call_later(300.0, clock.sleeps, 600.0)
        await waits.until(done.is_set, Deadline(unmeasured_s=5.0, floor_s=5.0), "it", ask)

    virtually(scenario(), 1000.0)


class _Jumping(LoopClock):
    slept_s = 0.0

    def now(self) -> float:
        return super().now() + self.slept_s

    def sleeps(self, seconds: float) -> None:
        self.slept_s += seconds


def test_who_is_asked_for_because_somebody_died_is_asked_at_once() -> None:
    pulse, asked = Pulse(16.0), list[float]()

    async def scenario() -> None:
        clock, done = LoopClock(), asyncio.Event()
        news = News()
        waits = waits_of(clock, news)

        async def ask() -> None:
            asked.append(clock.now())
            done.set()

        for _ in range(3):
            pulse.beat(clock.now())
            await clock.sleep(1.0)
        asyncio.get_running_loop().call_later(0.5, news.hurry)
        await waits.until(done.is_set, Deadline(unmeasured_s=5.0, floor_s=5.0), "it", ask, pulse)

    virtually(scenario())
    assert asked == [3.5]


def test_a_pulse_that_is_slower_than_the_deadline_puts_nothing_off_for_long() -> None:
    pulse = Pulse(16.0)
    assert pulse.goes_on_s(0.0, 15.0) <= 0
    for now in (0.0, 10.0, 20.0):
        pulse.beat(now)
    assert pulse.goes_on_s(20.0, 15.0) == 15.0
    assert pulse.goes_on_s(36.0, 15.0) < 0


def test_what_was_waited_for_holds_when_the_wait_ends() -> None:
    """A question that is under way then has to be cancelled first, and meanwhile it may cease to hold."""

    async def scenario() -> None:
        held, news = [False], News()

        async def ask() -> None:
            try:
                await asyncio.sleep(100.0)
            finally:  # what we waited for is lost, and comes again later
                held[0] = False
                asyncio.get_running_loop().call_later(5.0, come)

        def come() -> None:
            held[0] = True
            news.touched()

        asyncio.get_running_loop().call_later(10.0, come)
        waits = waits_of(LoopClock(), news)
        await waits.until(lambda: held[0], Deadline(unmeasured_s=5.0, floor_s=5.0), "it", ask)
        assert held[0]

    virtually(scenario())
