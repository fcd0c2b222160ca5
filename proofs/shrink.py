"""Shrink a scenario that breaks a promise to the smallest one that still breaks it."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from proofs.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from proofs.scenario import Fault

PLAYS = 120
"""Scenarios that are tried at most."""
NEEDED = ("seed", "stages", "trainers", "steps", "microbatches", "delay_s", "faults")
"""Fields of a scenario without a default."""


def sorts(violations: Iterable[str]) -> set[str]:
    """The kind of a violation, without peers and amounts."""
    return {re.sub(r"peer-\w+|[\d.]+(e-?\d+)?", "*", v) for v in violations}


def shrunk(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """``scenario`` ``fails``; so does what is returned, and nothing that is a step smaller does, if ``PLAYS`` were
    enough."""
    known = {scenario}
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(scenario):
            if candidate in known:
                continue
            if len(known) > PLAYS:
                return scenario
            known.add(candidate)
            if _can_be(candidate) and fails(candidate):
                scenario, smaller = candidate, True
                break
    return scenario


def as_code(scenario: Scenario) -> str:
    """Source text that makes the scenario again, without default fields."""
    given = ", ".join(repr(getattr(scenario, name)) for name in NEEDED[:-1])
    faults = "".join(f"{_fault(f)}, " for f in scenario.faults)
    unusual = [
        f"{f.name}={getattr(scenario, f.name)!r}"
        for f in fields(Scenario)
        if f.name not in (*NEEDED, "kinds") and getattr(scenario, f.name) != f.default
    ]
    return ", ".join([f"Scenario({given}, ({faults.rstrip(' ')})", *unusual]) + ")"


def _fault(fault: Fault) -> str:
    given = [repr(fault.at_s), repr(fault.kind), repr(fault.who)]
    given += [
        f"{f.name}={getattr(fault, f.name)!r}"
        for f in fields(fault)
        if f.name not in ("at_s", "kind", "who") and getattr(fault, f.name) != f.default
    ]
    return f"Fault({', '.join(given)})"


def _smaller(s: Scenario) -> Iterator[Scenario]:
    """Scenarios that are one step smaller."""
    for k in range(len(s.faults)):
        yield replace(s, faults=s.faults[:k] + s.faults[k + 1 :])
    for f in fields(Scenario):
        if f.name not in (
            *NEEDED,
            "kinds",
            "tolerance",
            "longer",
            "weight",
            "queue_s",
            "overrides",
            "narrow",
            "disk_s",
        ):
            yield replace(s, **{f.name: f.default})  # type: ignore[arg-type]  # of that very field
    for k in range(len(s.overrides)):
        yield replace(s, overrides=s.overrides[:k] + s.overrides[k + 1 :])
    yield replace(s, narrow=(), longer=1.0, slower=1.0, weight=1.0)
    for k in range(len(s.narrow)):
        yield replace(s, narrow=s.narrow[:k] + s.narrow[k + 1 :])
    for steps in {1, s.steps // 2, s.steps - 1}:
        if steps:
            yield replace(s, steps=steps)
    for microbatches in {1, s.microbatches // 2, s.microbatches - 1}:
        if microbatches:
            yield replace(s, microbatches=microbatches)
    yield from _fewer_peers(s)
    yield replace(s, delay_s=0.0)
    for k, fault in enumerate(s.faults):
        for simpler in _simpler(fault):
            yield replace(s, faults=(*s.faults[:k], simpler, *s.faults[k + 1 :]))


def _can_be(s: Scenario) -> bool:
    """Whether all named peers exist."""
    return {p for f in s.faults for p in f.who} | {p for p, _ in s.narrow} <= {*s.names}


def _fewer_peers(s: Scenario) -> Iterator[Scenario]:
    """Remove the last replica of each stage, unless a fault, a link or a plan names it."""
    named = {p for f in s.faults for p in f.who} | {p for p, _ in s.narrow}
    planned = any(o.startswith("pipeline.") for o in s.overrides)
    for stage, replicas in enumerate(s.stages):
        last = [p for p, k in s.members if k == stage][-1]
        if replicas > 1 and last not in named and not planned:
            stages = (*s.stages[:stage], replicas - 1, *s.stages[stage + 1 :])
            yield replace(s, stages=stages, trainers=min(s.trainers, sum(stages)))


def _simpler(fault: Fault) -> Iterator[Fault]:
    """Move a fault to a round time, and shorten it."""
    if fault.for_s > 1.0:
        yield replace(fault, for_s=round(fault.for_s / 2, 1))
    if fault.at_s != round(fault.at_s, 1):
        yield replace(fault, at_s=round(fault.at_s, 1))
    if fault.nth > 1:
        yield replace(fault, nth=fault.nth - 1)
