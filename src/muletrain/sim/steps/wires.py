"""Time and links of a play without messages (``steps``): the next event, and arrivals of sent data."""

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

    from muletrain.sim.setting import Kind, Setting

FREE = Link(0.0, math.inf)
BULK_SHARE = 0.35
"""Share of a busy link for averaging beside activations. Fitted to fleets 0 to 39 of benchmarks/sim_grid: with 0.2
averaging starved (fleet 23 was predicted 42 % too slow); without a bound averaging and activations took turns, and
steps of one fleet took 331 to 1,266 s."""
MOMENT_S = 1e-9
"""Tolerance for rounding [s]."""


class Wires:
    """Links between machines of the ``setting``'s kinds, shared as in production: a slow path leaves the uplink to
    other paths, a downlink adds no time to a single transfer, and bulk data (averaged gradients) get a small share
    beside activations."""

    def __init__(self, setting: Setting, kinds: Sequence[int], *, coupled: bool = False) -> None:
        """``coupled``: between equal links, data wait at the sender until the receiver's downlink is free, because
        queues are short."""
        self.now_s = 0.0
        self._setting, self.kinds, self._coupled = setting, kinds, coupled
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._up, self._down = [_Lane() for _ in kinds], [_Lane() for _ in kinds]
        self._paths = defaultdict[tuple[int, int], _Lane](_Lane)
        self._waiting: list[list[tuple[int, float, Callable[[], None]]]] = [[] for _ in kinds]
        """Data to send, by machine: receiver, duration [s], and continuation."""
        self._looks_s = [-math.inf] * len(kinds)
        """Times at which each machine checks its waiting data again [s]."""

    def run(self, done: Callable[[], bool]) -> None:
        """Run events in order until ``done``."""
        while self._events and not done():
            self.now_s, _, then = heapq.heappop(self._events)
            then()

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), then))

    def ends(self, a: int) -> Kind:
        """The machine's kind, with both links' rates."""
        return self._setting.kinds[self.kinds[a]]

    def tell(self, a: int, b: int, then: Callable[[], None]) -> None:
        """Send a small message, for which only the delay counts."""
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
        """Whether the downlink of ``b`` is about as narrow as the uplink of ``a``, and the path wider."""
        up, down = self.ends(a).up_bytes_per_s, self.ends(b).down_bytes_per_s
        return 1 / ALIKE < up / down < ALIKE and self._link(a, b).bandwidth_bytes_per_s >= min(up, down)

    def _begin(self, a: int) -> None:
        """Send the first waiting data with a free receiver."""
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
        """Check again; rounding may have been early."""
        self._looks_s[a] = -math.inf
        self._begin(a)

    def _take(self, b: int, nbytes: float, then: Callable[[], None], *, bulk: bool) -> None:
        """Arriving data have used the downlink during the transfer."""
        duration_s = nbytes / self._setting.kinds[self.kinds[b]].down_bytes_per_s
        self._through(((self._down[b], duration_s),), self.now_s - duration_s, then, bulk=bulk)

    def _through(
        self, lanes: Sequence[tuple[_Lane, float]], begin_s: float, then: Callable[[], None], *, bulk: bool
    ) -> None:
        """Call ``then`` once all ``lanes`` have carried the data, each for its own duration."""
        if bulk:
            self._once_carried([(lane, lane.carry_bulk(begin_s, seconds)) for lane, seconds in lanes], then)
        elif (left_s := max([lane.carry(begin_s, seconds) for lane, seconds in lanes]) - self.now_s) > 0:
            self.after(left_s, then)
        else:
            then()

    def _once_carried(self, marks: Sequence[tuple[_Lane, float]], then: Callable[[], None]) -> None:
        left_s = max([lane.left_s(self.now_s, mark_s) for lane, mark_s in marks])
        if left_s > MOMENT_S:
            self.after(left_s, partial(self._once_carried, marks, then))  # urgent data may come meanwhile
        else:
            then()

    def alone_s(self, a: int, b: int, there: float, back: float) -> float:
        """Seconds for ``there`` bytes and ``back`` bytes if nothing else is sent."""
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

    def ending_s(self, p: int, stage: int) -> float:
        """See ``Setting.ending_s``."""
        return self._setting.ending_s(stage, (self.kinds[p],))


class _Lane:
    """A link that carries data in order. Bulk data have a separate clock, which is slow beside other data
    (``BULK_SHARE``)."""

    def __init__(self) -> None:
        self.free_s = self._bulk_free_s = -math.inf
        """Times at which all data are carried [s]."""
        self._urgent_s = 0.0
        """Seconds of urgent data so far."""

    def carry(self, now_s: float, seconds: float) -> float:
        """Carry data; return the time of completion."""
        shared = self._bulk_free_s > self._bulk_clock_s(now_s)
        self.free_s = max(now_s, self.free_s) + seconds / (1.0 - BULK_SHARE if shared else 1.0)
        self._urgent_s += seconds
        return self.free_s

    def carry_bulk(self, now_s: float, seconds: float) -> float:
        """Carry bulk data; return the time of completion, on the bulk clock."""
        self._bulk_free_s = max(self._bulk_clock_s(now_s), self._bulk_free_s) + seconds
        return self._bulk_free_s

    def left_s(self, now_s: float, mark_s: float) -> float:
        """Seconds until the bulk clock shows ``mark_s``, if nothing else comes."""
        return mark_s - self._bulk_clock_s(now_s) + max(0.0, self.free_s - now_s)

    def _bulk_clock_s(self, now_s: float) -> float:
        return max(now_s, self.free_s) - self._urgent_s


def without_links(setting: Setting) -> Setting:
    """The same machines with instant links."""
    wide = tuple(replace(k, up_bytes_per_s=math.inf, down_bytes_per_s=math.inf) for k in setting.kinds)
    return replace(setting, kinds=wide, links=tuple((FREE,) * len(wide) for _ in wide))
