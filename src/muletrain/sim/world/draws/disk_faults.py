"""Disks and stores, and the directory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from muletrain.sim.world.draws.common import Kind, span, with_faults
from muletrain.sim.world.scenario import FOR_EVER_S, Fault, Scenario

if TYPE_CHECKING:
    import random


def _disk(how: str, shortest_s: float, longest_s: float) -> Kind:
    def kind(s: Scenario, rng: random.Random) -> Scenario | None:
        if any(f.kind == "disk" for f in s.faults):
            return None
        s = replace(s, disk_s=s.disk_s or 0.01, checkpoint_every=s.checkpoint_every or 1)
        lasting = rng.choice([rng.uniform(shortest_s, longest_s), FOR_EVER_S])
        who = rng.choice([p for p, _ in s.members])
        return with_faults(s, [Fault(rng.uniform(0.0, span(s)), "disk", (who,), lasting, how=how)])

    return kind


def _time(s: Scenario, rng: random.Random) -> Scenario | None:
    """Each call takes some."""
    return replace(s, disk_s=10 ** rng.uniform(-2.0, 0.5), checkpoint_every=s.checkpoint_every or 1)


def _directory(s: Scenario, rng: random.Random) -> Scenario | None:
    lasting = rng.choice([rng.uniform(1.0, 60.0), FOR_EVER_S])
    return with_faults(s, [Fault(rng.uniform(0.0, span(s)), "directory", (), lasting)])


KINDS: dict[str, Kind] = {
    "disk time": _time,
    "slow store": _disk("slow", 5.0, 60.0),
    "hung store": _disk("hangs", 5.0, 200.0),
    "full store": _disk("full", 1.0, 20.0),
    "directory": _directory,
}
