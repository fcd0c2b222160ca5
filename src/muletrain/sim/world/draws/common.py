"""What the kinds share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from muletrain.sim.world.scenario import Fault, Scenario

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = Callable[[Scenario, random.Random], Scenario | None]
"""A scenario with one kind of thing more; None where it has no place for it."""
HARMLESS = {"join", "slow", "damage"}
"""Faults beside which any other may happen: nobody is lost by them, nor comes to be behind."""


def span(s: Scenario) -> float:
    """About the time of a run without faults [s]."""
    return s.steps * s.step_s


def calm(s: Scenario) -> Scenario:
    """Without what may leave too few for another fault."""
    return replace(s, faults=tuple(f for f in s.faults if f.kind in HARMLESS))


def with_faults(s: Scenario, faults: Iterable[Fault]) -> Scenario:
    return replace(s, faults=tuple(sorted((*s.faults, *faults), key=lambda f: f.at_s)))


def replicas(s: Scenario, stage: int) -> list[str]:
    """First members of it."""
    return [p for p, k in s.members if k == stage]


def spare(s: Scenario, *, trainers: bool = True) -> list[str]:
    """First members without which their stage still has one, and the run a trainer: of each stage all but the first."""
    spared = [p for stage in range(len(s.stages)) for p in replicas(s, stage)[1:]]
    training = {p for p, _ in s.members[: s.trainers]}
    return [p for p in spared if trainers or p not in training]
