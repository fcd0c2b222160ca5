"""Time and links of a play without messages (``steps``): what happens next, and when what is sent has come."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from muletrain.config.fleet import Link

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muletrain.sim.machines import Setting

FREE = Link(0.0, math.inf)


class Wires:
    """Between machines, each of one of the ``setting``'s kinds. Uplinks, downlinks and paths are shared as ``network.shaped`` shares
    them: a slow path leaves the uplink to others; a downlink takes no time for what comes alone."""

    def __init__(self, setting: Setting, kinds: Sequence[int]) -> None:
        self.now_s = 0.0
        self._setting, self._kinds = setting, kinds
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._up_free_s, self._down_free_s = [0.0] * len(kinds), [0.0] * len(kinds)
        self._path_free_s = defaultdict[tuple[int, int], float](float)

    def run(self, done: Callable[[], bool]) -> None:
        """One event after the other, until ``done``."""
        while self._events and not done():
            self.now_s, _, then = heapq.heappop(self._events)
            then()

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), then))

    def tell(self, a: int, b: int, then: Callable[[], None]) -> None:
        """What is so small that only the way takes time."""
        self.after(0.0 if a == b else self._link(a, b).delay_s, then)

    def send(self, a: int, b: int, nbytes: float, then: Callable[[], None]) -> None:
        if a == b:
            self.after(0.0, then)
            return
        now_s, link = self.now_s, self._link(a, b)
        up_s = max(now_s, self._up_free_s[a]) + nbytes / self._setting.kinds[self._kinds[a]].up_bytes_per_s
        path_s = max(now_s, self._path_free_s[a, b]) + nbytes / link.bandwidth_bytes_per_s
        self._up_free_s[a], self._path_free_s[a, b] = up_s, path_s
        self.after(max(up_s, path_s) + link.delay_s - now_s, lambda: self._take(b, nbytes, then))

    def _take(self, b: int, nbytes: float, then: Callable[[], None]) -> None:
        duration_s = nbytes / self._setting.kinds[self._kinds[b]].down_bytes_per_s
        free_s = self._down_free_s[b] = max(self._down_free_s[b], self.now_s - duration_s) + duration_s
        if free_s > self.now_s:
            self.after(free_s - self.now_s, then)
        else:
            then()

    def alone_s(self, a: int, b: int, there: float, back: float) -> float:
        """So many bytes there and so many back, if nothing else is sent."""
        if a == b:
            return 0.0
        links, kinds = self._setting.links, self._setting.kinds
        way_s = 0.0
        for c, d, nbytes in ((self._kinds[a], self._kinds[b], there), (self._kinds[b], self._kinds[a], back)):
            rate = min(kinds[c].up_bytes_per_s, kinds[d].down_bytes_per_s, links[c][d].bandwidth_bytes_per_s)
            way_s += links[c][d].delay_s + nbytes / rate
        return way_s

    def _link(self, a: int, b: int) -> Link:
        return self._setting.links[self._kinds[a]][self._kinds[b]]


def without_links(setting: Setting) -> Setting:
    """The same machines, connected by what takes no time."""
    wide = tuple(replace(k, up_bytes_per_s=math.inf, down_bytes_per_s=math.inf) for k in setting.kinds)
    return replace(setting, kinds=wide, links=tuple((FREE,) * len(wide) for _ in wide))
