"""What is explored, and where each rule is seen to be needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proofs.model.executions import EXECUTIONS, play, space_of
from proofs.model.search import Found, explore
from proofs.model.space import Bounds, Broken, Space

if TYPE_CHECKING:
    from collections.abc import Callable

TWO, THREE = (1, 0), (1, 2, 0)
"""Sets of microbatches, as bitmaps, that two and three replicas have sealed. One peer of another stage is beside them."""
BOUNDS = {
    "two replicas, a freeze": Bounds(TWO, faults={"sleep": 1}),
    "two replicas, a cut": Bounds(TWO, faults={"cut": 1}),
    "two replicas, a one-way link": Bounds(TWO, faults={"one way": 1}),
    "two replicas, a death and a freeze": Bounds(TWO, faults={"death": 1, "sleep": 1}),
    "two replicas, a death and a cut": Bounds(TWO, faults={"death": 1, "cut": 1}),
    "two replicas, a death and a restart": Bounds(TWO, faults={"death": 1, "restart": 1}),
    "two replicas, rows one by one, a freeze": Bounds(TWO, faults={"sleep": 1}, piecemeal=True),
    "two replicas, any detector, a freeze": Bounds(TWO, faults={"sleep": 1}, late_detection=False),
    "two replicas, any detector, a cut": Bounds(TWO, faults={"cut": 1}, late_detection=False),
    "two replicas and two peers of another stage, a cut": Bounds(TWO, witnesses=2, faults={"cut": 1}),
    "three replicas, a death": Bounds(THREE, faults={"death": 1}),
    "three replicas, two deaths": Bounds(THREE, faults={"death": 2}),
    "three replicas that overlap, a death": Bounds((3, 2, 0), faults={"death": 1}),
    "three replicas before their seals, a death": Bounds((1, 0, 0), microbatches=2, sealed=False, faults={"death": 1}),
    "three replicas, rows one by one, a death": Bounds(THREE, faults={"death": 1}, piecemeal=True),
    "three replicas, any detector, a death": Bounds(THREE, faults={"death": 1}, late_detection=False),
    "three replicas, a one-way link": Bounds(THREE, faults={"one way": 1}),
    "three replicas, a cut": Bounds(THREE, faults={"cut": 1}),
    "three replicas, a freeze": Bounds(THREE, faults={"sleep": 1}),
}
LARGE = {
    "two replicas, a cut and a freeze": Bounds(TWO, faults={"cut": 1, "sleep": 1}),
    "two replicas, two cuts": Bounds(TWO, faults={"cut": 2}),
    "three replicas, a death and a cut": Bounds(THREE, faults={"death": 1, "cut": 1}),
    "three replicas, a death and a freeze": Bounds(THREE, faults={"death": 1, "sleep": 1}),
}
"""Bounds that take many minutes each."""
NEEDED: dict[str, str | int] = {
    "reach": "three replicas, two deaths",
    "all stages": "two replicas, a cut",
    "majority": "two replicas, a freeze",
    "patience": "two replicas, a freeze",
    "all voted": "two replicas, a freeze",
    "preferred": "two replicas, a freeze",
    "applied first": "two replicas, a death and a freeze",
    "one vote": "two replicas, a freeze",
    "mutual": "two replicas, a one-way link",
    "lost gradient": "three replicas, two deaths",
    "adopt": 23,
    "look first": 25,
    "named seals": 26,
    "seal closes": 26,
}
"""Bounds in which, or the number of an execution that, breaks a promise without each rule."""


def without(rule: str) -> Found:
    """What ``NEEDED`` finds without ``rule``."""
    where = NEEDED[rule]
    if isinstance(where, str):
        return explore(Space((BOUNDS | LARGE)[where]._replace(off=frozenset({rule}))))
    return execute(where, frozenset({rule}))


def execute(number: int, off: frozenset[str] = frozenset(), tell: Callable[[int], None] = lambda _: None) -> Found:
    """Play the execution, and explore all ways to go on from it."""
    space = space_of(EXECUTIONS[number], off)
    try:
        found = explore(space, play(space, EXECUTIONS[number].script), tell=tell)
    except Broken as e:
        found = Found(broken=str(e))
    if found.broken:
        found.trace = [*EXECUTIONS[number].script, *found.trace]
    return found
