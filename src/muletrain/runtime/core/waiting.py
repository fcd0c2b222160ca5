"""Waiting for what others do: with deadlines, questions to those we wait for, and an eye on what happens meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from muletrain.errors import DeadlineExceeded, MuletrainError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from muletrain.clock import Clock
    from muletrain.policy.deadline import Deadline, Pulse

T = TypeVar("T")
MAX_SILENCE = 6
"""Deadlines, each twice as long as the one before, that are missed before a wait is hopeless."""
PATIENCE_S = 300.0
"""Seconds that must have passed since the others last came on, before a wait is hopeless."""
LOOKS = 4
"""Times that we ask again within the patience, however long the doubled deadlines are: else nobody could say that it
comes on."""
ENDLESS = 12
"""Times the patience, after which a wait is hopeless whatever they say of themselves."""


async def _nothing() -> None:
    pass


class News:
    """What wakes the waits of one peer."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.hurried = False
        self.patience_s = PATIENCE_S
        """Seconds that a wait goes on without any news."""

    def touched(self) -> None:
        """Something that a wait may depend on changed (a message, a microbatch finished)."""
        self.changed.set()

    def hurry(self) -> None:
        """A peer died: what is waited for may have been its to send, so ask now, not at the deadline."""
        self.hurried = True
        self.changed.set()


class Waiter(Protocol):
    """The actor that waits."""

    def look_around(self) -> None:
        """Called whenever something changed. An error that it raises ends the wait."""
        ...

    def who_is_there(self) -> str:
        """Which peers can be reached, in words, for the error of a wait that is given up."""
        ...


class Waits:
    """The waits of one actor."""

    def __init__(self, clock: Clock, news: News, waiter: Waiter) -> None:
        self._clock, self._signals, self._waiter = clock, news, waiter
        self._came_on_s = -math.inf

    def came_on(self) -> None:
        """Those we wait for are busy with what we wait for, as slow as that may be."""
        self._came_on_s = self._clock.now()

    async def until(
        self,
        condition: Callable[[], bool],
        deadline: Deadline,
        what: str,
        ask: Callable[[], Coroutine[Any, Any, None]] = _nothing,
        pulse: Pulse | None = None,
    ) -> None:
        """Wait for ``condition``; on each missed deadline, and when somebody dies, ask those we wait for, and wait on
        meanwhile. A deadline is not missed while what we wait for is seen to go on (``Pulse.goes_on_s``, with pauses of
        at most half the deadline). Raises MuletrainError after MAX_SILENCE, and what ``ask`` raises."""
        begin = self._clock.now()
        attempt, due = 0, begin + deadline.seconds()
        self._signals.hurried = False
        asking: asyncio.Task[None] | None = None
        try:
            while True:
                self._signals.changed.clear()
                if asking is not None and asking.done():
                    asking.result()
                    asking = None
                self._waiter.look_around()
                if condition():
                    break
                if self._signals.hurried and asking is None:
                    self._signals.hurried = False
                    asking = asyncio.create_task(ask())
                    asking.add_done_callback(lambda _: self._signals.touched())
                news = self._news(condition, asking)
                try:  # what else happens does not put the question off
                    await self._clock.deadline(news, max(0.0, due - self._clock.now()), what)
                except DeadlineExceeded:
                    longest_s = deadline.seconds() / 2
                    if pulse is not None and (more_s := pulse.goes_on_s(self._clock.now(), longest_s)) > 0:
                        self.came_on()
                        due = self._clock.now() + more_s
                        continue
                    attempt += 1
                    due = self._clock.now() + min(deadline.seconds(attempt), self._signals.patience_s / LOOKS)
                    if attempt >= MAX_SILENCE and self._hopeless(begin):
                        raise MuletrainError(f"gave up waiting for {what}; {self._waiter.who_is_there()}") from None
                    self._signals.hurried = True
        finally:
            if asking is not None:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        # a wait that was ended by our questions says nothing of how long such waits are (Karn's algorithm)
        if attempt == 0 or not deadline.known:
            deadline.measured(self._clock.now() - begin)

    def _hopeless(self, begin: float) -> bool:
        now, patience_s = self._clock.now(), self._signals.patience_s
        return now - max(begin, self._came_on_s) > patience_s or now - begin > ENDLESS * patience_s

    async def _news(self, condition: Callable[[], bool], asking: asyncio.Task[None] | None) -> None:
        """Until there is more to do than to look around and wait on: with every frame something changes."""
        while True:
            await self._signals.changed.wait()
            if self._signals.hurried if asking is None else asking.done():
                return
            self._signals.changed.clear()
            self._waiter.look_around()
            if condition():
                return

    async def watched(self, work: Coroutine[Any, Any, T]) -> T:
        """``work``, cancelled when something happens meanwhile that makes it pointless."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._signals.touched())
        try:
            while not task.done():
                self._signals.changed.clear()
                self._waiter.look_around()
                await self._signals.changed.wait()
        finally:
            task.cancel()
            await asyncio.wait({task})
            _ = task.cancelled() or task.exception()  # retrieved, even where something else is raised
        return task.result()


async def unless_done(answer: asyncio.Future[Any], work: Coroutine[Any, Any, T]) -> T | None:
    """``work``, or None: it is cancelled when ``answer`` comes, or is given up, before it ends."""
    if answer.done():
        work.close()
        return None
    limit = asyncio.timeout(None)  # a deadline that comes with the answer: no task for what hardly ever waits

    def over(_: asyncio.Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the work has just ended
            limit.reschedule(-math.inf)

    answer.add_done_callback(over)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():  # it is the work's own
            raise
        return None
    finally:
        answer.remove_done_callback(over)
