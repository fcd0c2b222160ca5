"""Explores every state within bounds, breadth first: the first broken promise has the shortest trace."""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from proofs.model.space import Broken

if TYPE_CHECKING:
    from collections.abc import Callable

    from proofs.model.space import Label, Space, State


@dataclass
class Found:
    """``trace``: what happened until a promise broke, if one did. ``ends``: states in which only faults can happen.
    ``seconds``: of the processor."""

    states: int = 0
    steps: int = 0
    ends: int = 0
    seconds: float = 0.0
    broken: str = ""
    trace: list[str] = field(default_factory=list)
    complete: bool = True


def explore(
    space: Space, start: State | None = None, *, seconds: float = inf, tell: Callable[[int], None] = lambda _: None
) -> Found:
    """Explore all states after ``start`` (default: the beginning). ``seconds``: at most, of the
    processor. ``tell``: called with the
    number of states."""
    found, begin, start = Found(), time.process_time(), start or space.initial
    before: dict[State, tuple[State, Label] | None] = {start: None}
    todo = deque([start])
    gc.disable()  # no circles here, and millions of objects
    while todo:
        state = todo.popleft()
        found.states += 1
        if found.states % 2048 == 0:
            tell(found.states)
            if time.process_time() - begin > seconds:
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
            if (stuck := space.stuck(state)) is not None:
                found.broken = stuck
        if found.broken:
            found.trace = [space.words(label) for label in _trace(before, state)]
            break
    gc.enable()
    found.seconds = time.process_time() - begin
    return found


def _trace(before: dict[State, tuple[State, Label] | None], state: State) -> list[Label]:
    words = []
    while (step := before[state]) is not None:
        state, label = step
        words.append(label)
    return words[::-1]
