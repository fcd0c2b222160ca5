"""Explores every state within bounds, breadth first: the first broken promise has the shortest trace."""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proofs.model.space import Broken, Space

if TYPE_CHECKING:
    from collections.abc import Callable

    from proofs.model.space import Bounds, Label, State


@dataclass
class Found:
    """``trace``: what happened until a promise broke, if one did. ``ends``: states in which only faults can happen;
    ``bounded``: those of them that the highest ballot may have caused."""

    states: int = 0
    steps: int = 0
    ends: int = 0
    bounded: int = 0
    forks: int = 0
    seconds: float = 0.0
    broken: str = ""
    trace: list[str] = field(default_factory=list)
    complete: bool = True


def explore(bounds: Bounds, *, limit: int | None = None, tell: Callable[[int], None] = lambda _: None, seconds: float = 1e9) -> Found:
    """Explore all states. ``limit``: most states."""
    space, found, begin = Space(bounds), Found(), time.monotonic()
    before: dict[State, tuple[State, Label] | None] = {space.initial: None}
    todo = deque([space.initial])
    gc.disable()  # no circles here, and millions of objects
    while todo:
        state = todo.popleft()
        found.states += 1
        if found.states % 2048 == 0:
            tell(found.states)
            if time.monotonic() - begin > seconds or (limit is not None and found.states >= limit):
                found.complete = False
                break
        ended = True
        try:
            for label, after in space.successors(state):
                found.steps += 1
                ended = ended and after[1:5] != state[1:5]
                if after not in before:
                    before[after] = state, label
                    todo.append(after)
        except Broken as e:
            found.broken = str(e)
        if ended and not found.broken:
            found.ends += 1
            stuck = space.stuck(state)
            if stuck and space.bounded(state):
                found.bounded += 1
            elif stuck:
                found.broken = stuck
        if found.broken:
            found.trace = [space.words(label) for label in _trace(before, state)]
            break
    gc.enable()
    found.seconds = time.monotonic() - begin
    return found


def _trace(before: dict[State, tuple[State, Label] | None], state: State) -> list[Label]:
    words = []
    while (step := before[state]) is not None:
        state, label = step
        words.append(label)
    return words[::-1]
