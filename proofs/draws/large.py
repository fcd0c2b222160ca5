"""Fleets and runs that are not small."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from proofs.draws.basic import Size

if TYPE_CHECKING:
    from collections.abc import Callable

    from proofs.scenario import Scenario

SHARE = 0.035


def _deep(rng: random.Random) -> Size:
    """Four to eight stages, most of one replica."""
    stages = tuple(rng.choice([1, 1, 2]) for _ in range(rng.randint(4, 8)))
    return Size(stages, rng.randint(2, 3), rng.randint(3, 5))


def _wide(rng: random.Random) -> Size:
    """A stage of four to six replicas."""
    stages = [rng.randint(1, 2) for _ in range(2)]
    stages[rng.randrange(2)] = rng.randint(4, 6)
    return Size(tuple(stages), rng.randint(2, 4), rng.randint(4, 9))


def _long(rng: random.Random) -> Size:
    """Thirty to sixty steps, in which limits of memory are reached."""
    return Size((rng.randint(1, 2), rng.randint(1, 3)), rng.randint(30, 60), rng.randint(2, 4))


KINDS: dict[str, Callable[[random.Random], Size]] = {"deep": _deep, "wide": _wide, "long": _long}


def draw(seed: int) -> tuple[str, Size] | None:
    """A kind, and what it draws; None for most seeds."""
    for name, kind in KINDS.items():
        rng = random.Random(f"{name}/{seed}")
        if rng.random() < SHARE:
            return name, kind(rng)
    return None


def finished(s: Scenario) -> Scenario:
    """In a long run peers remember little; faults come late enough for that, and last for many steps. The first
    newcomer's links are so narrow that it follows for more steps than are kept."""
    if "long" not in s.kinds:
        return s
    every = random.Random(f"often/{s.seed}").choice([3, 10])
    slow = {p: 2e4 for p in s.joining[:1]}
    return replace(
        s,
        short=True,
        log_bytes=100_000,
        checkpoint_every=every,
        narrow=tuple(sorted((dict(s.narrow) | slow).items())),
    )
