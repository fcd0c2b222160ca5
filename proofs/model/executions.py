"""Executions that agreement must survive: a script of faults leads to the hard moment, and every way to go on is explored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from proofs.model.space import Bounds, Space

if TYPE_CHECKING:
    from proofs.model.space import State

QUIET = "quiet"
"""In a script: all news arrives, and everyone notices who is gone."""
SETTLING = {"hears", "hears all", "misses", "hears again", "synced"}


class Execution(NamedTuple):
    """``script``: first words of what happens (``Space.words``), or QUIET."""

    title: str
    accumulated: tuple[int, ...]
    script: tuple[str, ...]
    witnesses: int = 1


JOIN = ("A reduce", "B reduce", "C reduce")
EXECUTIONS = {
    1: Execution(
        "A holds first, its links to B and C fail, other stages apply, A dies",
        (1, 2, 0),
        (*JOIN, "A finishes", "A cut B", "A cut C", QUIET, "B fails", "C fails", QUIET, "X hears", "A dies"),
    ),
    2: Execution(
        "A hears nobody in its stage, all else works",
        (1, 2, 0),
        (*JOIN, "A cut B", "A cut C", "A fails", "B fails", "C fails", QUIET),
    ),
}


def play(space: Space, script: tuple[str, ...]) -> State:
    """Follow ``script``; no fault is left then. Raises Broken, and LookupError if something cannot happen."""
    state = space.initial
    for words in script:
        if words == QUIET:
            state = settled(space, state)
            continue
        ways = [(label, after) for label, after in space.successors(state)]
        found = next((after for label, after in ways if space.words(label).startswith(words)), None)
        if found is None:
            raise LookupError(f"{words} cannot happen now; possible: {', '.join(space.words(label) for label, _ in ways)}")
        state = found
    return state._replace(budget=(0,) * len(state.budget))


def settled(space: Space, state: State) -> State:
    """``state`` after all news."""
    while True:
        after = next((after for label, after in space.successors(state) if label[0] in SETTLING), None)
        if after is None:
            return state
        state = after


def space_of(execution: Execution, off: frozenset[str] = frozenset()) -> Space:
    """The states in which ``execution`` happens."""
    microbatches = max(s.bit_length() for s in execution.accumulated)
    faults = {"death": 2, "cut": 3, "one way": 1, "sleep": 2, "restart": 1}
    return Space(Bounds(execution.accumulated, microbatches, witnesses=execution.witnesses, faults=faults, max_ballot=5, off=off))
