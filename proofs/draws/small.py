"""Draw whole worlds of few peers and few or no faults, to search for long waits, and for work done in vain: ``fuzz --kind
'two faults'``."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from proofs.draws import settings
from proofs.draws.common import replicas, spare, with_faults
from proofs.lying import SPEAKS
from proofs.scenario import CALM, Fault, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable

STAGES = ((2, 1), (2, 2), (3, 2), (3, 3), (4, 2), (3, 1), (2, 2, 2), (3, 2, 1))
LASTING_S = (0.5, 1.2, 3.0, 8.0)
MOMENTS = ("seal", "shard", "reduced", "entry")
"""Frames of the agreement on a step."""


def _two_faults(seed: int) -> Scenario:
    """Two faults within seconds, each at a time or at a moment of a step. No stage loses its first peer."""
    rng = random.Random(f"two faults/{seed}")
    s = Scenario(seed, rng.choice(STAGES), rng.choice([1, 2]), 16, 6, 0.05, ())
    at_s, faults, spared, everyone = rng.uniform(0.0, 3 * s.step_s), list[Fault](), spare(s), [p for p, _ in s.members]
    for k in range(2):
        kind = rng.choice(["freeze", "cut", "one way", "damage", "join", *(["kill", "leave"] if spared else [])])
        on, nth, for_s = rng.choice(["", *MOMENTS]), rng.randint(1, 3), rng.choice(LASTING_S)
        match kind:
            case "join":
                who, on, for_s = [f"peer-{rng.randrange(len(s.stages))}j{k}"], "", 0.0
            case "kill" | "leave":
                who, for_s = [spared.pop(rng.randrange(len(spared)))], 0.0
            case "cut" | "one way":
                who = rng.sample(everyone, 1 if kind == "cut" and rng.random() < 0.3 else 2)
            case _:
                who = [rng.choice(everyone)]
        faults.append(Fault(at_s, kind, tuple(who), for_s, on=on, nth=nth if on else 1))
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


def _speakers(seed: int) -> Scenario:
    """Few peers speak for a stage of more: deaths, frozen peers, cuts and one-way links among all, or one that lies."""
    rng = random.Random(f"speakers/{seed}")
    stages = rng.choice([(5, 4), (6, 4), (4, 5, 1), (5, 2, 4)])
    delayed = ("optimizer.delayed=true",) if rng.random() < 0.2 else ()
    s = Scenario(seed, stages, 2, 5, 10, 0.1, (), overrides=delayed, relays=rng.random() < 0.2, speakers=True)
    spared, faults, everyone = spare(s), list[Fault](), [p for p, _ in s.members]
    for _ in range(rng.randint(1, 5)):
        kind, at_s = rng.choice(["kill", "kill", "freeze", "cut", "one way", "lie"]), rng.uniform(0.0, 5 * s.step_s)
        if kind == "kill" and spared:
            faults.append(Fault(at_s, kind, (spared.pop(rng.randrange(len(spared))),)))
        elif kind == "lie":
            if not any(f.kind == kind for f in faults):
                faults.append(Fault(at_s, kind, (rng.choice(everyone),), how=SPEAKS))
        else:
            kind = "freeze" if kind == "kill" else kind
            who = tuple(rng.sample(everyone, 1 if kind == "freeze" else 2))
            faults.append(Fault(at_s, kind, who, rng.choice(LASTING_S)))
    s = with_faults(s, faults)
    return (settings.KINDS["traced"](s, rng) if rng.random() < 0.25 else None) or s  # perhaps with tied weights


def _calm(seed: int) -> Scenario:
    """Nothing fails: devices of any speed, clocks that run at different rates, and perhaps clients that are checked."""
    rng = random.Random(f"calm/{seed}")
    stages, slower = rng.choice([(1, 1), (1, 2), (1, 3), *STAGES]), rng.choice([1.0, 30.0, 300.0, 1500.0])
    overrides = ("optimizer.delayed=true",) if rng.random() < 0.3 else ()
    clients = tuple(f"client-{rng.randrange(len(stages))}{name}" for name in "abc"[: rng.randint(0, 3)])
    s = Scenario(
        seed,
        stages,
        rng.randint(1, sum(stages)),
        2,
        rng.choice([4, 6, 16, 36, 96]),
        rng.choice([0.0, 0.1]),
        (),
        capacity=rng.choice([8, 24]),
        overrides=overrides,
        longer=slower,
        slower=slower,
        skew=rng.choice([0.0, 0.5]),
        stalls=rng.choice([0.0, 0.1]),
        kinds=(CALM,),
    )
    if rng.random() < 0.6 or not clients:
        return s
    return replace(s, clients=clients, overrides=(*overrides, f"hub.verify={rng.choice([0.0, 1.0])}"))


WORLDS: dict[str, Callable[[int], Scenario]] = {
    "two faults": _two_faults,
    "flapping links": _flapping_links,
    "speakers": _speakers,
    CALM: _calm,
}
"""Worlds by name: whole ones, not kinds of events that others may also have."""
