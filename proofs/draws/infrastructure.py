"""What peers stand on: links that are broken in other ways than by a cut, disks and stores, and the directory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from proofs.draws.common import Kind, calm, replicas, span, with_faults
from proofs.scenario import FOR_EVER_S, SIDES, Fault, Scenario, stage_of

if TYPE_CHECKING:
    import random


def _one_way(s: Scenario, rng: random.Random) -> Scenario | None:
    """One of two does not reach the other, for a while or, where another of their stages does, for ever."""
    s = replace(calm(s), relays=False)
    pair = tuple(rng.sample([p for p, _ in s.members], 2))
    if stage_of(pair[0]) == stage_of(pair[1]) and s.stages[stage_of(pair[0])] < 3:
        return None  # one of the two would be left out
    lasting = rng.choice([rng.uniform(1.0, 60.0), FOR_EVER_S])
    if lasting == FOR_EVER_S and all(s.stages[stage_of(p)] == 1 for p in pair):
        return None
    return with_faults(s, [Fault(rng.uniform(0.0, span(s)), "one way", pair, lasting)])


def _small_frames(s: Scenario, rng: random.Random) -> Scenario | None:
    """Between two replicas of three no chunks pass."""
    stages = [stage for stage, n in enumerate(s.stages) if n > 2]
    if not stages:
        return None
    s = calm(s)
    pair = tuple(rng.sample(replicas(s, rng.choice(stages)), 2))
    lasting = rng.choice([rng.uniform(5.0, 120.0), FOR_EVER_S])
    return with_faults(s, [Fault(rng.uniform(0.0, span(s)), "small", pair, lasting, limit=rng.choice([2000, 6000]))])


def _long_cut(s: Scenario, rng: random.Random) -> Scenario | None:
    """Somebody is away for longer than a stage waits for it; most often the only one of its stage."""
    s = calm(s)
    alone = [replicas(s, stage)[0] for stage, n in enumerate(s.stages) if n == min(s.stages)]
    who = rng.choice(alone)
    kind = rng.choice(["cut", "freeze", "blackhole"])
    return with_faults(s, [Fault(rng.uniform(0.0, span(s)), kind, (who,), rng.uniform(20.0, 150.0))])


def _slow_links(s: Scenario, rng: random.Random) -> Scenario | None:
    """Some of the first members have links as at home."""
    if s.narrow:
        return None
    slow = [p for p, _ in s.members if rng.random() < 0.4]
    return replace(s, narrow=tuple((p, 10 ** rng.uniform(5.0, 6.5)) for p in slow)) if slow else None


def _three_sides(s: Scenario, rng: random.Random) -> Scenario | None:
    """At the same time; and some die meanwhile that have a replica beside them."""
    if any(f.kind in SIDES for f in s.faults) or len(s.members) < 4:
        return None
    s = calm(s)
    side = {p: rng.randrange(3) for p in s.names}
    at_s, lasting = rng.uniform(0.0, 0.7 * span(s)), rng.uniform(1.0, 40.0)
    sides = [tuple(p for p in s.names if side[p] == k) for k in range(3)]
    if not all(sides):
        return None
    faults = [Fault(at_s, "partition", who, lasting) for who in sides[:2]]
    for stage in range(len(s.stages)):
        here = [[p for p in replicas(s, stage) if side[p] == k] for k in range(3)]
        mortal = [peers[-1] for peers in here if len(peers) > 1 and peers[-1] not in ("peer-0a", "peer-0b")]
        if mortal and rng.random() < 0.7:
            faults.append(Fault(at_s + rng.uniform(0.0, lasting), "kill", (rng.choice(mortal),)))
    return with_faults(s, faults)


def _flapping(s: Scenario, rng: random.Random) -> Scenario | None:
    """Links between three or more replicas of a stage fail for seconds, one after the other, and nobody dies."""
    s, stage = calm(s), rng.randrange(len(s.stages))
    if s.stages[stage] < 3:
        if any(o.startswith("pipeline.") for o in s.overrides):
            return None
        s = replace(s, stages=(*s.stages[:stage], 3, *s.stages[stage + 1 :]))
    here = replicas(s, stage)
    at_s, faults = rng.uniform(0.0, span(s)), []
    for _ in range(rng.randint(2, 5)):
        kind = rng.choice(["cut", "one way"])
        faults.append(Fault(at_s, kind, tuple(rng.sample(here, 2)), rng.choice([0.5, 1.2, 3.0, 8.0])))
        at_s += rng.uniform(0.0, 4.0)
    return with_faults(s, faults)


def _disk(how: str, shortest_s: float, longest_s: float) -> Kind:
    def kind(s: Scenario, rng: random.Random) -> Scenario | None:
        if any(f.kind == "disk" for f in s.faults):
            return None
        s = replace(s, disk_s=s.disk_s or 0.01, checkpoint_every=s.checkpoint_every or 1)
        lasting = rng.choice([rng.uniform(shortest_s, longest_s), FOR_EVER_S])
        who = rng.choice([p for p, _ in s.members])
        return with_faults(s, [Fault(rng.uniform(0.0, span(s)), "disk", (who,), lasting, how=how)])

    return kind


def _disk_time(s: Scenario, rng: random.Random) -> Scenario | None:
    """Each call takes some."""
    return replace(s, disk_s=10 ** rng.uniform(-2.0, 0.5), checkpoint_every=s.checkpoint_every or 1)


def _directory(s: Scenario, rng: random.Random) -> Scenario | None:
    lasting = rng.choice([rng.uniform(1.0, 60.0), FOR_EVER_S])
    return with_faults(s, [Fault(rng.uniform(0.0, span(s)), "directory", (), lasting)])


KINDS: dict[str, Kind] = {
    "one way": _one_way,
    "small frames": _small_frames,
    "long cut": _long_cut,
    "flapping": _flapping,
    "slow links": _slow_links,
    "three sides": _three_sides,
    "disk time": _disk_time,
    "slow store": _disk("slow", 5.0, 60.0),
    "hung store": _disk("hangs", 5.0, 200.0),
    "full store": _disk("full", 1.0, 20.0),
    "directory": _directory,
}
