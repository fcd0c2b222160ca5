"""Draw whole worlds of few peers and few faults, to search for long waits: ``fuzz --kind 'two faults'``."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from proofs.draws.common import replicas, spare, with_faults
from proofs.scenario import Fault, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable

STAGES = ((2, 2), (3, 2), (3, 3), (4, 2), (3, 1), (2, 2, 2), (3, 2, 1))
LASTING_S = (0.5, 1.2, 3.0, 8.0)


def _two_faults(seed: int) -> Scenario:
    """Two faults within seconds: a death, a frozen peer, a cut, a link that carries one way only."""
    rng = random.Random(f"two faults/{seed}")
    s = Scenario(seed, rng.choice(STAGES), 2, 6, 8, 0.02, ())
    at_s, faults, spared = rng.uniform(0.0, 3 * s.step_s), list[Fault](), spare(s)
    for _ in range(2):
        kind = rng.choice(["kill", "freeze", "cut", "one way"] if spared else ["freeze", "cut", "one way"])
        if kind == "kill":
            who = (spared.pop(rng.randrange(len(spared))),)
        else:
            who = tuple(rng.sample([p for p, _ in s.members], 1 if kind == "freeze" else 2))
        faults.append(Fault(at_s, kind, who, 0.0 if kind == "kill" else rng.choice(LASTING_S)))
        at_s += rng.uniform(0.0, 3.0)
    return with_faults(s, faults)


def _flapping_links(seed: int) -> Scenario:
    """Links between three or more replicas of the first stage fail for seconds, and nobody dies."""
    rng = random.Random(f"flapping links/{seed}")
    s = Scenario(seed, rng.choice([n for n in STAGES if n[0] > 2]), rng.choice([1, 2]), 20, 6, 0.02, ())
    here, faults = replicas(s, 0), list[Fault]()
    for _ in range(rng.randint(2, 6)):
        kind = rng.choice(["cut", "one way"])
        faults.append(Fault(rng.uniform(0.0, 8.0), kind, tuple(rng.sample(here, 2)), rng.choice(LASTING_S)))
    return with_faults(s, faults)


WORLDS: dict[str, Callable[[int], Scenario]] = {"two faults": _two_faults, "flapping links": _flapping_links}
"""Worlds by name: whole ones, not kinds of events that others may also have."""
