"""Helpers of all kinds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from proofs.scenario import Fault, Scenario

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = Callable[[Scenario, random.Random], Scenario | None]
"""Adds one kind of event to a scenario; None: it has no place for it."""
HARMLESS = {"join", "slow", "damage"}
"""Faults that go with any other: no peer is lost or falls behind."""


def span(s: Scenario) -> float:
    """Approximate duration of a run without faults [s]."""
    return s.steps * s.step_s


def calm(s: Scenario) -> Scenario:
    """Remove faults that could leave too few peers for another one."""
    return replace(s, faults=tuple(f for f in s.faults if f.kind in HARMLESS))


def with_faults(s: Scenario, faults: Iterable[Fault]) -> Scenario:
    return replace(s, faults=tuple(sorted((*s.faults, *faults), key=lambda f: f.at_s)))


def replicas(s: Scenario, stage: int) -> list[str]:
    """The first members of a stage."""
    return [p for p, k in s.members if k == stage]


def spare(s: Scenario, *, trainers: bool = True) -> list[str]:
    """First members whose loss leaves their stage a peer and the run a trainer: all but the first of each stage."""
    spared = [p for stage in range(len(s.stages)) for p in replicas(s, stage)[1:]]
    training = {p for p, _ in s.members[: s.trainers]}
    return [p for p in spared if trainers or p not in training]
