"""Executions that agreement must survive: a script of faults leads to the hard moment, and every way to go on is explored."""

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
    sealed: bool = True


JOIN = ("A reduce", "B reduce", "C reduce")
ONE, SPLIT = (1, 0), (1, 2, 0)
"""Two replicas, of which A has the step's only microbatch; three, of which two have one each."""
EXECUTIONS = {
    1: Execution(
        "A holds first, its links to B and C fail, the other stage hears of it, A dies",
        SPLIT,
        (*JOIN, "A finishes", "A cut B", "A cut C", "X hears A", "A dies", QUIET, "B fails", "C fails", QUIET),
    ),
    2: Execution(
        "A hears nobody in its stage, all else works",
        SPLIT,
        (*JOIN, "A cut B", "A cut C", "A fails", "B fails", "C fails", QUIET),
    ),
    3: Execution(
        "C is cut from the holders A and B, and X has applied the record",
        SPLIT,
        (*JOIN, "A finishes", "B finishes", "A cut C", "B cut C", "C fails", "X hears all", QUIET),
    ),
    4: Execution("replicas seal while microbatches are computed", (1, 0, 0), ("A accumulate 1", QUIET), sealed=False),
    6: Execution(
        "A restarts before it is missed, after it gave its set and signed",
        SPLIT,
        (*JOIN, "A finishes", "A dies", "A restarts", QUIET, "B fails", "C fails", QUIET),
    ),
    8: Execution(
        "X counts A's round, and Y hears both of two rounds",
        ONE,
        (
            "A reduce",
            "B reduce",
            "B finishes",
            "B freezes",
            "A fails",
            "A misses B",
            "X hears A",
            "Y hears A",
            "A patience",
            "A finishes",
            "B wakes",
            "Y hears B",
        ),
        witnesses=2,
    ),
    9: Execution(
        "A freezes with the whole step, B does it again, A wakes",
        ONE,
        ("A freezes", "B reduce", "B fails", QUIET, "B patience", "B finishes", QUIET, "A wakes"),
    ),
    14: Execution(
        "the link from A, the natural proposer, carries nothing to B and C",
        SPLIT,
        (*JOIN, "A one way B", "A one way C", "A fails", "B fails", "C fails"),
    ),
    15: Execution(
        "A, the first in the order, is joining",
        SPLIT,
        (*JOIN, "A dies", "B fails", "C fails", "A restarts", QUIET),
    ),
    16: Execution(
        "A and B do not hear each other, and both hear C", SPLIT, (*JOIN, "A cut B", "A fails", "B fails", "C fails")
    ),
    23: Execution(
        "all links between A, B and C fail for a while, and A and B finish alone",
        SPLIT,
        (*JOIN, "A finishes", "A cut B", "A cut C", "B cut C", "B fails", "C fails", QUIET, "B heals C", "A heals B"),
    ),
    24: Execution(
        "A and B hold and die, and X has applied the record",
        SPLIT,
        (*JOIN, "A finishes", "B finishes", "X hears all", "A dies", "B dies"),
    ),
    25: Execution(
        "A and X are cut from B and Y, A freezes as it reduces alone, the others go on and meet X, A wakes",
        ONE,
        (
            "A reduce",
            "B reduce",
            "A cut B",
            "A cut Y",
            "B cut X",
            "X cut Y",
            "A fails",
            "B fails",
            QUIET,
            "A patience",
            "A freezes",
            QUIET,
            "B patience",
            "B finishes",
            QUIET,
            "A heals B",
            "A heals Y",
            "B heals X",
            "X heals Y",
            QUIET,
            "A wakes",
        ),
        witnesses=2,
    ),
    26: Execution(
        "A freezes with a ballot of its own, C adds what only A had, A wakes",
        (2, 1, 0),
        (
            *JOIN,
            "A cut B",
            "A fails",
            "B fails",
            "C fails",
            "A heals B",
            QUIET,
            "A patience",
            "A freezes",
            QUIET,
            "B patience",
            "C hears B",
            "A wakes",
            "C hears A",
        ),
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
            raise LookupError(
                f"{words} cannot happen now; possible: {', '.join(space.words(label) for label, _ in ways)}"
            )
        state = found
    space.faults = False
    return state


def settled(space: Space, state: State) -> State:
    """``state`` after all news."""
    while True:
        after = next((after for label, after in space.successors(state) if label[0] in SETTLING), None)
        if after is None:
            return state
        state = after


def space_of(execution: Execution, off: frozenset[str] = frozenset()) -> Space:
    """The states in which ``execution`` happens."""
    faults = {"death": 2, "cut": 4, "one way": 2, "sleep": 2, "restart": 1}
    microbatches = 0 if execution.sealed else 2
    return Space(
        Bounds(
            execution.accumulated, microbatches, execution.sealed, execution.witnesses, faults, max_ballot=5, off=off
        )
    )
