"""Earlier states of a page, for the event line: a bounded number, spread over the whole run."""

from __future__ import annotations

import time
import zlib
from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 400
"""Most frames."""
FIRST_S = 1.0
"""Seconds between two frames at the beginning of a run; doubles when there are ``MOST``."""
THRIFT = 400
"""A frame that took a second is followed by none for so many seconds, so frames take a quarter of a percent."""


class Frames:
    """Compressed states by time."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """When each frame was taken [s, event time]."""
        self.interval_s = FIRST_S
        self._frames: list[bytes] = []
        self._free_s = 0.0
        """Monotonic time from which a frame may cost time again."""

    def due(self, t: float) -> bool:
        """Is it time for a frame at ``t``?"""
        return not self.times or t - self.times[-1] >= self.interval_s

    def expect(self, seconds: float) -> None:
        """A history of so many seconds follows at once."""
        self.interval_s = max(FIRST_S, 1.5 * seconds / MOST)

    def take(self, t: float, state: Callable[[], bytes], *, hurry: bool = False) -> None:
        """Keep the state at ``t``, if one is due. ``hurry``: a history is being read, so that frames may cost more."""
        begun = time.monotonic()
        if not self.due(t) or begun < self._free_s:
            return
        self._frames.append(zlib.compress(state(), 1))
        self.times.append(t)
        if len(self.times) > MOST:
            self.times, self._frames, self.interval_s = self.times[::2], self._frames[::2], 2 * self.interval_s
        now = time.monotonic()
        self._free_s = now + (now - begun) * (2 if hurry else THRIFT)

    def at(self, t: float, *, after: bool = False) -> tuple[float, bytes] | None:
        """The newest frame at or before ``t``, else the first one, with its time. ``after``: the first one after ``t``.
        None: there is none."""
        k = bisect_right(self.times, t) if after else max(0, bisect_right(self.times, t) - 1)
        return (self.times[k], zlib.decompress(self._frames[k])) if k < len(self.times) else None
