"""Time and links of a play without messages (``steps``): what happens next, and when what is sent has come."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from muletrain.config.fleet_file import Link
from muletrain.planning.cost import ALIKE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muletrain.sim.machines import Kind, Setting

FREE = Link(0.0, math.inf)
BULK_SHARE = 0.35
"""Share of a link full of activations that averaging gets beside them. Fitted to fleets 0 to 39 of benchmarks/sim_grid:
with 0.2 averaging starved (fleet 23 was predicted 42 % too slow), with nothing the two took turns, and steps of one
fleet took 331 to 1,266 s."""
MOMENT_S = 1e-9
"""Rounding."""


class Wires:
    """Between machines, each of one of the ``setting``'s kinds. Uplinks, downlinks and paths are shared as production
    shares them: a slow path leaves the uplink to others; a downlink takes no time for what comes alone; bulk data
    (gradients that are averaged) gets a small share of each end beside activations and their gradients."""

    def __init__(self, setting: Setting, kinds: Sequence[int], *, coupled: bool = False) -> None:
        """``coupled``: where uplinks and downlinks are alike, nothing is sent that the receiver's downlink does not
        take at once, for queues are short."""
        self.now_s = 0.0
        self._setting, self.kinds, self._coupled = setting, kinds, coupled
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._up, self._down = [_Lane() for _ in kinds], [_Lane() for _ in kinds]
        self._paths = defaultdict[tuple[int, int], _Lane](_Lane)
        self._waiting: list[list[tuple[int, float, Callable[[], None]]]] = [[] for _ in kinds]
        """What each has to send: to whom, for how long, and what then."""
        self._looks_s = [-math.inf] * len(kinds)
        """When it looks whether it can send some of that."""

    def run(self, done: Callable[[], bool]) -> None:
        """One event after the other, until ``done``."""
        while self._events and not done():
            self.now_s, _, then = heapq.heappop(self._events)
            then()

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), then))

    def ends(self, a: int) -> Kind:
        """The machine, and so its up- and downlink."""
        return self._setting.kinds[self.kinds[a]]

    def tell(self, a: int, b: int, then: Callable[[], None]) -> None:
        """What is so small that only the way takes time."""
        self.after(0.0 if a == b else self._link(a, b).delay_s, then)

    def send(self, a: int, b: int, nbytes: float, then: Callable[[], None], *, bulk: bool = False) -> None:
        if a == b:
            self.after(0.0, then)
            return
        link, up_bytes_per_s = self._link(a, b), self._setting.kinds[self.kinds[a]].up_bytes_per_s
        if not bulk and self._coupled and self._alike(a, b):
            self._waiting[a].append((b, nbytes / up_bytes_per_s, partial(self.after, link.delay_s, then)))
            self._begin(a)
            return
        lanes = (self._up[a], nbytes / up_bytes_per_s), (self._paths[a, b], nbytes / link.bandwidth_bytes_per_s)
        arrive = partial(self.after, link.delay_s, partial(self._take, b, nbytes, then, bulk=bulk))
        self._through(lanes, self.now_s, arrive, bulk=bulk)

    def _alike(self, a: int, b: int) -> bool:
        """Is the downlink of ``b`` about as narrow as the uplink of ``a``, and the path wider than both?"""
        up, down = self.ends(a).up_bytes_per_s, self.ends(b).down_bytes_per_s
        return 1 / ALIKE < up / down < ALIKE and self._link(a, b).bandwidth_bytes_per_s >= min(up, down)

    def _begin(self, a: int) -> None:
        """The first of what waits whose receiver takes nothing else."""
        waiting, now_s = self._waiting[a], self.now_s
        for k, (b, seconds, then) in enumerate(waiting):
            if max(self._up[a].free_s, self._down[b].free_s) <= now_s + MOMENT_S:
                del waiting[k]
                for lane in self._up[a], self._down[b]:
                    lane.carry(now_s, seconds)
                self.after(seconds, then)
                break
        if waiting:
            looks_s = min(max(self._up[a].free_s, self._down[b].free_s) for b, _, _ in waiting)
            if not now_s < self._looks_s[a] <= looks_s:
                self._looks_s[a] = looks_s
                self.after(looks_s - now_s, partial(self._look, a))

    def _look(self, a: int) -> None:
        """Rounding may have made it a little early."""
        self._looks_s[a] = -math.inf
        self._begin(a)

    def _take(self, b: int, nbytes: float, then: Callable[[], None], *, bulk: bool) -> None:
        """What has come has used the downlink while it came."""
        duration_s = nbytes / self._setting.kinds[self.kinds[b]].down_bytes_per_s
        self._through(((self._down[b], duration_s),), self.now_s - duration_s, then, bulk=bulk)

    def _through(
        self, lanes: Sequence[tuple[_Lane, float]], begin_s: float, then: Callable[[], None], *, bulk: bool
    ) -> None:
        """``then``, once all ``lanes`` have carried it, each for so long."""
        if bulk:
            self._once_carried([(lane, lane.carry_bulk(begin_s, seconds)) for lane, seconds in lanes], then)
        elif (left_s := max([lane.carry(begin_s, seconds) for lane, seconds in lanes]) - self.now_s) > 0:
            self.after(left_s, then)
        else:
            then()

    def _once_carried(self, marks: Sequence[tuple[_Lane, float]], then: Callable[[], None]) -> None:
        left_s = max([lane.left_s(self.now_s, mark_s) for lane, mark_s in marks])
        if left_s > MOMENT_S:
            self.after(left_s, partial(self._once_carried, marks, then))  # what is urgent may come meanwhile
        else:
            then()

    def alone_s(self, a: int, b: int, there: float, back: float) -> float:
        """So many bytes there and so many back, if nothing else is sent."""
        if a == b:
            return 0.0
        links, kinds = self._setting.links, self._setting.kinds
        way_s = 0.0
        for c, d, nbytes in ((self.kinds[a], self.kinds[b], there), (self.kinds[b], self.kinds[a], back)):
            rate = min(kinds[c].up_bytes_per_s, kinds[d].down_bytes_per_s, links[c][d].bandwidth_bytes_per_s)
            way_s += links[c][d].delay_s + nbytes / rate
        return way_s

    def _link(self, a: int, b: int) -> Link:
        return self._setting.links[self.kinds[a]][self.kinds[b]]


class _Lane:
    """One thing after another. Bulk data has a clock of its own, which is slow while anything else is carried
    (``BULK_SHARE``)."""

    def __init__(self) -> None:
        self.free_s = self._bulk_free_s = -math.inf
        """When all that it was given is through."""
        self._urgent_s = 0.0
        """Of all that goes first."""

    def carry(self, now_s: float, seconds: float) -> float:
        """When it is through."""
        shared = self._bulk_free_s > self._bulk_clock_s(now_s)
        self.free_s = max(now_s, self.free_s) + seconds / (1.0 - BULK_SHARE if shared else 1.0)
        self._urgent_s += seconds
        return self.free_s

    def carry_bulk(self, now_s: float, seconds: float) -> float:
        """When it is through, by the clock of bulk data."""
        self._bulk_free_s = max(self._bulk_clock_s(now_s), self._bulk_free_s) + seconds
        return self._bulk_free_s

    def left_s(self, now_s: float, mark_s: float) -> float:
        """Until that clock shows ``mark_s``, if nothing more comes."""
        return mark_s - self._bulk_clock_s(now_s) + max(0.0, self.free_s - now_s)

    def _bulk_clock_s(self, now_s: float) -> float:
        return max(now_s, self.free_s) - self._urgent_s


def without_links(setting: Setting) -> Setting:
    """The same machines, connected by what takes no time."""
    wide = tuple(replace(k, up_bytes_per_s=math.inf, down_bytes_per_s=math.inf) for k in setting.kinds)
    return replace(setting, kinds=wide, links=tuple((FREE,) * len(wide) for _ in wide))
