"""An actor waits for other peers with a deadline, asks after a missed deadline, and looks around at all news."""

from __future__ import annotations

import asyncio
import contextlib
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from muletrain.errors import DeadlineExceeded, MuletrainError
from muletrain.runtime.core.times import ENDLESS, PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator

    from muletrain.clock import Clock
    from muletrain.policy.deadline import Deadline, Pulse

T = TypeVar("T")
MAX_SILENCE = 6
"""Number of missed deadlines, each twice as long as the previous, after which a wait is hopeless."""
LOOKS = 4
"""Least number of questions within the patience, however long the doubled deadlines: no peer could report progress
otherwise."""


class Awaited(NamedTuple):
    """What one peer waits for, and since when [s, clock]. ``whom``: returns the awaited peers. ``then``: returns what the
    peer does if nothing comes."""

    what: str
    since_s: float
    whom: Callable[[], Iterable[str]]
    then: Callable[[], str]


class News:
    """Wakes the waits of one peer, and says what the peer waits for."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.hurried = False
        self.patience_s = PATIENCE_S
        """Seconds for which a wait continues without any news."""
        self.queue_s: Callable[[], float] = lambda: 0.0
        """Returns the duration of a full queue [s] (``Context.queue_s``). No wait is given up sooner."""
        self.stuck = False
        """Has a stage, or the run, been without peers or trainers for long? Then our own work leads nowhere."""
        self.arriving_s = -math.inf
        """When a peer was last seen to get nearer to the state that it takes, or to come where the run lacked one."""
        self.awaited: Awaited | None = None
        """The present wait, if any."""

    def touched(self) -> None:
        """Note a change on which a wait may depend, such as an arrived message or a finished microbatch."""
        self.changed.set()

    @contextmanager
    def waits(self, awaited: Awaited) -> Iterator[None]:
        """Say what the peer waits for meanwhile."""
        before, self.awaited = self.awaited, awaited
        try:
            yield
        finally:
            self.awaited = before

    def hurry(self) -> None:
        """A peer died that may have owed an awaited result: ask now, not at the deadline."""
        self.hurried = True
        self.changed.set()


class Waits:
    """The waits of one actor."""

    def __init__(
        self, clock: Clock, news: News, look_around: Callable[[], None], who_is_there: Callable[[Iterable[str]], str]
    ) -> None:
        """``look_around``: called after every change; an error raised there ends the wait. ``who_is_there``: describes the
        awaited and the reachable peers, for the error of a wait that is given up."""
        self._clock, self._signals, self._look_around, self._who_is_there = clock, news, look_around, who_is_there
        self._came_on_s = self._grew_s = -math.inf

    def came_on(self) -> None:
        """The awaited peers make progress, however slowly. Such progress does not count while a stage has no peers."""
        if not self._signals.stuck:
            self._came_on_s = self._clock.now()

    def grew(self) -> None:
        """A part of the awaited result came."""
        self._grew_s = self._clock.now()

    def quiet_s(self, since: float) -> float:
        """Returns the seconds since a result came, or since an awaited peer made progress; at most the seconds after
        ``since``."""
        return self._clock.now() - max(since, self._came_on_s, self._grew_s)

    def missed(self, due: float) -> None:
        """A deadline at ``due`` is over. If now is much later, this machine stood still without hearing any peer, so
        the silence until now does not count."""
        if self._clock.now() - due > self._signals.patience_s / LOOKS:
            self.grew()

    async def until(
        self,
        condition: Callable[[], bool],
        deadline: Deadline,
        what: str,
        ask: Callable[[], Coroutine[Any, Any, object]],
        pulse: Pulse | None = None,
        so_far: Callable[[], int] = lambda: 0,
        whom: Callable[[], Iterable[str]] = tuple,
        then: Callable[[], str] | None = None,
    ) -> None:
        """Wait for ``condition``, which holds on return. Call ``ask`` at each missed deadline, and when a peer dies,
        and wait on meanwhile. No deadline is missed while ``pulse`` goes on, with pauses of at most half the deadline.
        ``so_far`` measures how much of the awaited result has come. ``whom``: returns the awaited peers. ``then``: returns
        what happens if they never come; None: the wait is given up (``Awaited``).

        Raises MuletrainError when the wait is hopeless, and errors of ``ask`` and ``look_around``.
        """
        begin = self._clock.now()
        attempt, due, count, came_s = 0, begin + deadline.seconds(), so_far(), math.inf

        def met() -> bool:
            nonlocal count, came_s
            if (now_count := so_far()) != count:
                count = now_count
                came_s = self._clock.now() if attempt < 2 else came_s
                self.grew()
            return condition()

        def next_() -> str:
            give_up = then() if then is not None else f"ends after {self._signals.patience_s:.0f} s without progress"
            return f"asks again in {max(0.0, due - self._clock.now()):.0f} s, {give_up}"

        self._signals.hurried = False
        asking: asyncio.Task[object] | None = None
        before, self._signals.awaited = self._signals.awaited, Awaited(what, begin, whom, next_)
        try:
            while True:
                self._signals.changed.clear()
                if asking is not None and asking.done():
                    asking.result()
                    asking = None
                self._look_around()
                if met():
                    if asking is None:
                        break
                    await _cancelled(asking)  # meanwhile the condition may cease to hold
                    asking = None
                    continue
                if self._signals.hurried and asking is None:
                    self._signals.hurried = False
                    asking = asyncio.create_task(ask())
                    asking.add_done_callback(lambda _: self._signals.touched())
                news = self._news(met, asking)
                try:  # other news does not delay the question
                    await self._clock.deadline(news, max(0.0, due - self._clock.now()), what)
                except DeadlineExceeded:
                    longest_s = deadline.seconds() / 2
                    more_s = (
                        0.0 if pulse is None or self._signals.stuck else pulse.goes_on_s(self._clock.now(), longest_s)
                    )
                    if more_s > 0:
                        self.came_on()
                        due = self._clock.now() + more_s
                        continue
                    self.missed(due)
                    attempt += 1
                    due = self._clock.now() + min(deadline.seconds(attempt), self._signals.patience_s / LOOKS)
                    if attempt >= MAX_SILENCE and self.hopeless(begin):
                        raise MuletrainError(f"gave up waiting for {what}; {self._who_is_there(whom())}") from None
                    self._signals.hurried = True
        finally:
            self._signals.awaited = before
            if asking is not None:
                await _cancelled(asking)
        if attempt == 0:
            deadline.measured(self._clock.now() - begin)
        elif not deadline.known:
            deadline.measured(self._first_idea_s(deadline, came_s - begin, self._clock.now() - begin))

    @staticmethod
    def _first_idea_s(deadline: Deadline, came_s: float, took_s: float) -> float:
        """Estimates the usual duration after a first wait that missed its ``deadline``. A wait that our question ended
        does not measure the duration (Karn's algorithm), and later waits are no longer measured then. Arrivals before
        the second question (``came_s``; inf: there were none) tell more than the whole wait (``took_s``), which a liar or a
        hung device may have held up. The deadline was too short, so the next deadline, three times a first measurement,
        is no shorter; without arrivals it is twice as long (RFC 6298, 5.5), and at least the pause between two
        questions."""
        missed_s = deadline.seconds()
        return min(
            took_s, max(came_s, missed_s / 3) if came_s < math.inf else max(2 * missed_s, PATIENCE_S / LOOKS) / 3
        )

    def hopeless(self, begin: float, times: int = 1) -> bool:
        """Has a wait since ``begin`` seen no progress for ``times`` times the patience, or lasted endlessly?"""
        now, grew_s = self._clock.now(), max(begin, self._grew_s)
        patience_s = self._signals.patience_s
        if not self._signals.stuck:
            patience_s = max(patience_s, self._signals.queue_s())
        came_on_s = max(grew_s, self._came_on_s, self._signals.arriving_s)
        return now - came_on_s > times * patience_s or now - grew_s > ENDLESS * patience_s

    async def _news(self, condition: Callable[[], bool], asking: asyncio.Task[object] | None) -> None:
        """Return when a question is to be asked, or when ``asking`` has ended. Until then only look around: every frame
        changes something."""
        while True:
            await self._signals.changed.wait()
            if self._signals.hurried if asking is None else asking.done():
                return
            self._signals.changed.clear()
            self._look_around()
            if condition():
                return

    async def watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of ``work``, which is cancelled when ``look_around`` raises."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._signals.touched())
        try:
            while not task.done():
                self._signals.changed.clear()
                self._look_around()
                await self._signals.changed.wait()
        finally:
            task.cancel()
            await asyncio.wait({task})
            _ = task.cancelled() or task.exception()  # retrieved, even if another error is raised
        return task.result()


async def _cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def unless_done(answer: asyncio.Future[Any], work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of ``work``; None: ``answer`` was done first, and ``work`` was cancelled."""
    if answer.done():
        work.close()
        return None
    limit = asyncio.timeout(None)  # a timeout that the answer triggers: no task for work that hardly ever waits

    def over(_: asyncio.Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the work has just ended
            limit.reschedule(-math.inf)

    answer.add_done_callback(over)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():  # the timeout is the work's own
            raise
        return None
    finally:
        answer.remove_done_callback(over)
