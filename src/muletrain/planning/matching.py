"""The matching of two stages' devices with the fastest slowest link (DT-FM eq. 3), compiled by numba like the moves
on top (``regrouping``)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]
    Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile to machine code at the first call, cached on disk if possible. The compiled code releases the interpreter
    lock."""
    try:
        return cast("Function", njit(nogil=True, cache=True)(function))
    except RuntimeError:  # no cache folder
        return cast("Function", njit(nogil=True)(function))


def part(function: Function) -> Function:
    """Compile inline: passing tables between functions would take a third of the time."""
    return cast("Function", njit(inline="always")(function))


class Scratch(NamedTuple):
    """Working arrays of a matching, by column, (P,)."""

    owner: Ints
    nearest: Floats
    before: Ints
    seen: NDArray[np.bool_]


def scratch(width: int) -> Scratch:
    """Make working arrays for ``width`` rows and columns."""
    return Scratch(np.zeros(width, np.int64), np.zeros(width), np.zeros(width, np.int64), np.zeros(width, np.bool_))


@part
def _bound(link: Floats, here: Ints, there: Ints, nearest: Floats) -> tuple[float, float]:
    """Return a lower bound of the slowest link, and the sum of squares of all rows' and columns' cheapest entries;
    ``nearest`` becomes the columns' cheapest entries."""
    width, slowest, squares = len(here), 0.0, 0.0
    for j in range(width):
        nearest[j] = np.inf
    for i in range(width):
        row, cheapest = link[here[i]], np.inf
        for j in range(width):
            time_s = row[there[j]]
            cheapest = min(cheapest, time_s)
            nearest[j] = min(nearest[j], time_s)
        slowest = max(slowest, cheapest)
        squares += cheapest * cheapest
    for j in range(width):
        slowest = max(slowest, nearest[j])
        squares += nearest[j] * nearest[j]
    return slowest, squares


@part
def _add(
    link: Floats, here: Ints, there: Ints, i: int, slowest: float, at_most: float, match: Ints, scratch: Scratch
) -> float:
    """Give row ``i`` a column, over an augmenting path on which each row passes its column on; return the resulting
    slowest link. Stops once that exceeds ``at_most``."""
    owner, nearest, before, seen = scratch
    width, row = len(here), link[here[i]]
    for j in range(width):
        nearest[j], before[j], seen[j] = max(row[there[j]], slowest), i, False
    column = 0
    while True:
        column = -1
        for j in range(width):
            if not seen[j] and (
                column < 0
                or nearest[j] < nearest[column]
                or (nearest[j] == nearest[column] and owner[j] < 0 <= owner[column])
            ):
                column = j
        slowest = nearest[column]
        if slowest > at_most:
            return slowest
        if owner[column] < 0:
            break
        seen[column] = True
        row = link[here[owner[column]]]
        for j in range(width):
            time_s = max(slowest, row[there[j]])
            if not seen[j] and time_s < nearest[j]:
                nearest[j], before[j] = time_s, owner[column]
    while column >= 0:  # each row of the path passes its column on
        taker = before[column]
        match[taker], owner[column], column = column, taker, match[taker]
        if taker == i:
            break
    return slowest


@compiled
def bottleneck(
    link: Floats, here: Ints, there: Ints, weight: float, at_most: float, match: Ints, scratch: Scratch
) -> tuple[float, float]:
    """Return the slowest link of the best matching of devices ``here`` with devices ``there``, (P,) each, and the
    guide: the root mean square of each device's nearest link to the other side. The result is inf if the link plus
    ``weight`` times the guide exceeds ``at_most``.

    ``match`` becomes each row's column; an existing pair stays if fast enough. No matching is below the dearest of all
    rows' and columns' cheapest entries, which mostly is the answer. Rows without a column at that price are added one
    by one, each over the path with the fastest slowest link."""
    slowest, squares = _bound(link, here, there, scratch.nearest)
    guide, width, owner = 0.0, len(here), scratch.owner
    if weight > 0:
        guide = math.sqrt(squares / (2 * width))
        at_most -= weight * guide
    if slowest > at_most:
        return np.inf, guide
    for j in range(width):
        owner[j] = -1
    for i in range(width):
        if match[i] >= 0 and owner[match[i]] < 0 and link[here[i], there[match[i]]] <= slowest:
            owner[match[i]] = i
        else:
            match[i] = -1
    for i in range(width):
        if match[i] >= 0:
            continue
        row = link[here[i]]
        for j in range(width):
            if owner[j] < 0 and row[there[j]] <= slowest:
                owner[j], match[i] = i, j
                break
        if match[i] < 0:
            slowest = _add(link, here, there, i, slowest, at_most, match, scratch)
            if slowest > at_most:
                return np.inf, guide
    return slowest, guide


@compiled
def bottlenecks(link: Floats, groups: Ints, scratch: Scratch) -> tuple[Floats, Ints]:
    """For every two groups of devices, (K, P): the slowest link of the best matching, (K, K), 0 on the diagonal; and
    each row's column, (K, K, P)."""
    stages, width = groups.shape
    slowest, match = np.zeros((stages, stages)), np.zeros((stages, stages, width), np.int64)
    for i in range(stages):
        for j in range(i + 1, stages):
            slowest[i, j], _ = bottleneck(link, groups[i], groups[j], 0.0, np.inf, match[i, j], scratch)
            slowest[j, i] = slowest[i, j]
            for row in range(width):
                match[j, i, match[i, j, row]] = row
    return slowest, match
