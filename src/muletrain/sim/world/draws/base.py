"""The fleet, its work and its faults, as seeds have always drawn them; ``draws`` adds what is rarer."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from muletrain.config.fleet_sections import QUEUE_S
from muletrain.sim.world.scenario import BACKWARD_S, FOR_EVER_S, FORWARD_S, SIDES, Fault, Scenario, planned, stage_of

POINTS = ("forward", "backward", "seal", "shard", "reduced", "round_entry")
"""Frames at which a peer may be killed exactly: between any two of them the protocol must be able to lose it."""

PARTITIONED = 0.2
"""Share of the scenarios that are about a partition."""
LASTING, LONGER_S, TOGETHER_S = 0.3, (2.0, 6.0), 15.0
"""Of those the share in which sides train on for so much longer; and the run goes on when they have met."""
DELAYED = 0.3
"""Share of the scenarios with delayed updates."""
PLANNED = 0.2
"""Share of the scenarios with planned membership."""
SHARED = 0.5
"""Of those the share in which peers of smaller stages serve several pipelines."""
LARGE = 0.25
"""Share of the scenarios with large tensors: links are narrow for them, and averaging takes ``AVERAGING_S``, if all
links are alike."""
AVERAGING_S = (2.0, 40.0)
GRADIENT = 54_000
"""Bytes of the largest stage's."""

HANGING, ALONE = 0.3, 0.4
"""Share of worlds with a device that hangs, if that can be survived; and of those the share in which nothing else
happens."""
LOSES_A_STAGE = 0.4
"""Share of worlds in which, if that can be survived, a stage loses all its peers."""


@dataclass(frozen=True)
class Size:
    """Of a world that is not small. Fields that are None are drawn as ever."""

    stages: tuple[int, ...] | None = None
    steps: int | None = None
    microbatches: int | None = None


def draw(seed: int, size: Size | None = None) -> Scenario:
    """Worlds of another ``size`` have no partitions, and tensors are small there."""
    return _with_large_tensors(_draw(seed, Size())) if size is None else _draw(seed, size)


def _draw(seed: int, size: Size) -> Scenario:
    """Two or three stages of one to three replicas; up to four faults, of which none kills a stage off, nor leaves it
    to a replica that may be behind; and in some worlds a stage that loses all its peers at once."""
    overrides = ("optimizer.delayed=true",) if random.Random(f"delayed/{seed}").random() < DELAYED else ()
    plans = random.Random(f"planned/{seed}")
    schedule = plans.choice(["gpipe", "1f1b"]) if plans.random() < PLANNED else None
    shared = plans.random() < SHARED
    apart = random.Random(f"apart/{seed}")
    skew = apart.choice([0.0, 0.0, 0.1, 0.5])
    stalls = random.Random(f"stalls/{seed}").choice([0.0, 0.0, 0.0, 0.01, 0.1])
    if apart.random() < PARTITIONED and size == Size():
        drawn = _partitioned(seed, apart)
        return replace(
            drawn, skew=skew, stalls=stalls, overrides=(*overrides, *planned(drawn.stages, schedule, shared=shared))
        )
    rng, places = random.Random(f"scenario/{seed}"), random.Random(f"places/{seed}")
    few = tuple(rng.randint(1, 3) for _ in range(rng.randint(2, 3)))
    stages, steps, microbatches = size.stages or few, rng.randint(3, 5), rng.randint(4, 9)
    base = Scenario(
        seed,
        stages,
        min(2, stages[0]),
        size.steps or steps,
        size.microbatches or microbatches,
        rng.choice([0.0, 0.01, 0.1]),
        (),
        checkpoint_every=places.randint(0, 2),
        apart=places.random() < 0.5,
        adopt_after_s=places.choice([5.0, 30.0]),
    )
    span = base.steps * base.microbatches * (FORWARD_S + BACKWARD_S) / min(stages)
    mortal = {s: [p for p, stage in base.members if stage == s][: n - 1] for s, n in enumerate(stages)}
    away: set[int] = (
        set()
    )  # stages in which somebody may be behind: killing the others there would lose the newest state
    faults: list[Fault] = []
    killed: set[int] = set()
    joined: list[str] = []
    for _ in range(rng.randint(0, 4)):
        at_s, lasting = rng.uniform(0.0, span), rng.uniform(0.2, 20.0)
        kind = rng.choice(["kill", "kill", "freeze", "cut", "slow", "damage", "leave", "move", "join", "join"])
        if kind == "join":
            joined.append(f"peer-{rng.randrange(len(stages))}j{sum(f.kind == 'join' for f in faults)}")
            faults.append(Fault(at_s, kind, (joined[-1],)))
            continue
        if kind in ("kill", "leave", "move"):
            mortals = [p for s, peers in mortal.items() for p in peers] + joined
            # who leaves makes sure that another has its state
            victims = [p for p in mortals if stage_of(p) not in away or kind != "kill"]
            if victims:
                victim = rng.choice(victims)
                (joined if victim in joined else mortal[stage_of(victim)]).remove(victim)
                killed |= {stage_of(victim)} if kind == "kill" else set()
                on = rng.choice(["", *POINTS]) if kind == "kill" else ""
                faults.append(Fault(at_s, kind, (victim,), on=on, nth=rng.randint(1, 6)))
            continue
        peers = [*(p for p, _ in base.members), *joined]
        who, other = rng.choice(peers), rng.choice(peers)
        pair = kind == "cut" and other != who and rng.random() < 0.5
        cut_off = {stage_of(who), stage_of(other)} if pair else {stage_of(who)}
        if kind == "slow" or not cut_off & killed:
            faults.append(Fault(at_s, kind, (who, other) if pair else (who,), lasting))
            away |= cut_off if kind != "slow" else set()
    faults += _moving_along(random.Random(f"moves/{seed}"), faults, mortal)
    thin = random.Random(f"narrow/{seed}")
    newcomers = [p for f in faults if f.kind == "join" for p in f.who]
    narrow = tuple((p, 10 ** thin.uniform(4.5, 7.0)) for p in newcomers if thin.random() < 0.3)
    chance = random.Random(f"relays/{seed}")
    relays = chance.random() < 0.5
    apart_for_ever = relays and chance.random() < 0.5
    lost = _lost_stage(base, faults, places, span) if places.random() < LOSES_A_STAGE else ()
    if apart_for_ever:
        never = tuple(chance.sample([p for p, _ in base.members], 2))
        gone = {f.who[0] for f in (*faults, *lost) if f.kind in ("kill", "leave")}
        if {p for p, _ in base.members} - gone - {*never}:  # who relays
            faults.append(Fault(0.0, "cut", never, FOR_EVER_S))
    if not lost:  # else all that stay are needed
        victims = [p for s, peers in mortal.items() if s not in away for p in peers]
        compared = schedule is None or (max if shared else min)(stages) > 1  # spares compute nothing
        alone = compared and {f.kind for f in faults} <= {"slow"}
        faults += _miscomputation(random.Random(f"corrupt/{seed}"), span, victims, alone=alone)
        hangs = random.Random(f"hangs/{seed}")
        liars = {stage_of(f.who[0]) for f in faults if f.kind == "corrupt"}
        if (sound := [p for p in victims if stage_of(p) not in liars]) and hangs.random() < HANGING:
            lasting = hangs.choice([hangs.uniform(0.5, 30.0), FOR_EVER_S])
            hang = Fault(hangs.uniform(0.0, span), "hang", (hangs.choice(sound),), lasting)
            faults, narrow = ([hang], ()) if hangs.random() < ALONE else ([*faults, hang], narrow)
    trainers = len(base.members) if lost else base.trainers
    every = _one_trains(base.members[:trainers], _in_order([*faults, *lost]))
    drawn = replace(base, faults=every, trainers=trainers, narrow=narrow, relays=relays, skew=skew)
    return replace(drawn, stalls=stalls, overrides=(*overrides, *planned(stages, schedule, shared=shared)))


def _with_large_tensors(drawn: Scenario) -> Scenario:
    """Or as it is. Everything takes as much longer: faults come later."""
    rng = random.Random(f"large/{drawn.seed}")
    if rng.random() > LARGE:
        return drawn
    averaging_s = math.exp(rng.uniform(*map(math.log, AVERAGING_S)))
    rate = 10 ** rng.uniform(5.7, 8.0)
    narrow = {p: rate * rng.choice([1.0, 1.0, 2.0, 5.0]) for p in drawn.names} | {
        p: rate * (0.5 if own < 1e6 else 2.0) for p, own in drawn.narrow
    }
    steps = min(drawn.steps, 2 if averaging_s > 10.0 else 3)
    longer = 1.0 + averaging_s / (drawn.microbatches * (FORWARD_S + BACKWARD_S))
    faults = tuple(
        f if not f.at_s else replace(f, at_s=f.at_s * longer, for_s=f.for_s * longer if f.kind in SIDES else f.for_s)
        for f in drawn.faults
    )
    return replace(
        drawn,
        steps=steps,
        faults=faults,
        longer=longer,
        narrow=tuple(sorted(narrow.items())),
        weight=averaging_s * rate / (2 * GRADIENT),
        queue_s=rng.choice([0.0, 0.05, QUEUE_S, 1.0, 2.0]),
    )


def _moving_along(rng: random.Random, faults: list[Fault], mortal: dict[int, list[str]]) -> list[Fault]:
    """Of every other peer that moves, one of another stage that moves to the same stage at the same moment."""
    also: list[Fault] = []
    for fault in [f for f in faults if f.kind == "move"]:
        stage = stage_of(fault.who[0])
        to = (stage + 1) % len(mortal)
        others = [p for s, peers in mortal.items() if s not in (stage, to) for p in peers]
        if others and rng.random() < 0.5:
            mover = rng.choice(others)
            mortal[stage_of(mover)].remove(mover)
            also.append(replace(fault, who=(mover,), to=to))
    return also


def _lost_stage(base: Scenario, faults: list[Fault], rng: random.Random, span: float) -> tuple[Fault, ...]:
    """All members of a stage die within a moment, if enough others stay."""
    gone = {f.who[0] for f in faults if f.kind in ("kill", "leave")}
    stage, at_s = rng.randrange(len(base.stages)), rng.uniform(0.2, 1.0) * span
    if sum(s != stage and p not in gone for p, s in base.members) < len(base.stages):
        return ()
    return tuple(Fault(at_s + rng.random(), "kill", (p,)) for p, s in base.members if s == stage and p not in gone)


def _miscomputation(rng: random.Random, span: float, victims: list[str], *, alone: bool) -> list[Fault]:
    """In every third world somebody computes wrongly for a while, and may be expelled for it. What is finite stands out
    only where a replica has a gradient of the same step, which no other fault must prevent (``alone``)."""
    if not victims or rng.random() > 1 / 3:
        return []
    how = rng.choice(["nan", "activations", "huge"] if alone else ["nan", "activations"])
    return [Fault(rng.uniform(0.0, span), "corrupt", (rng.choice(victims),), rng.uniform(0.1, 2.0), how=how)]


def _partitioned(seed: int, rng: random.Random) -> Scenario:
    """A fleet of which both sides of a partition can go on, in most cases, and up to three other faults. Nobody dies:
    the newest state of a stage may be on one side only."""
    stages = tuple(rng.randint(2, 3) for _ in range(rng.randint(2, 3)))
    base = Scenario(seed, stages, 2, rng.randint(4, 9), rng.randint(4, 7), rng.choice([0.0, 0.01, 0.1]), ())
    span = base.steps * base.microbatches * (FORWARD_S + BACKWARD_S) / 2
    faults: list[Fault] = []
    for k in range(rng.randint(0, 3)):
        kind, at_s = rng.choice(["join", "join", "freeze", "slow", "damage", "leave", "move"]), rng.uniform(0.0, span)
        names = [p for p, _ in base.members if kind not in ("leave", "move") or p not in ("peer-0a", "peer-0b")]
        who = f"peer-{rng.randrange(len(stages))}j{k}" if kind == "join" else rng.choice(names)
        lasting = rng.uniform(0.2, 20.0) if kind in ("freeze", "slow", "damage") else 0.0
        faults.append(Fault(at_s, kind, (who,), lasting))
    names = replace(base, faults=tuple(faults)).names
    both = rng.random() < 0.75
    side = {p for p in names if rng.random() < 0.5}
    for s in range(len(stages)) if both else ():
        side = (side - {f"peer-{s}b"}) | {f"peer-{s}a"}  # the first two of stage 0 train
    if 0 < len(side) < len(names):
        kind = rng.choice(["partition", "partition", "blackhole"])
        faults.append(Fault(rng.uniform(0.0, 0.7 * span), kind, tuple(sorted(side)), rng.uniform(0.5, 0.7 * span)))
    impatient = random.Random(f"impatient/{seed}")
    if (
        not both and faults and impatient.random() < 0.5
    ):  # a side that lacks a stage may step back, and meet the others' later
        faults[-1] = replace(faults[-1], for_s=span)
        apart = impatient.random() < 0.5
        base = replace(base, steps=3 * base.steps, adopt_after_s=0.1 * span, checkpoint_every=1, apart=apart)
    elif faults and faults[-1].kind in SIDES and (after := random.Random(f"lasting/{seed}")).random() < LASTING:
        longer_s = after.uniform(*LONGER_S)
        faults[-1] = replace(faults[-1], for_s=faults[-1].for_s + longer_s)
        base = replace(base, steps=base.steps + math.ceil((longer_s + TOGETHER_S) / base.step_s))
    return replace(base, faults=_in_order(faults))


def _one_trains(trainers: list[tuple[str, int]], faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Without trainers no run goes on: the last to be killed of them, or to hang, is spared, if the others are gone."""
    gone = [f for f in faults if f.kind in ("kill", "leave", "hang") and f.who[0] in {p for p, _ in trainers}]
    kills = [f for f in gone if f.kind != "leave"]
    if not kills or {f.who[0] for f in gone} != {p for p, _ in trainers}:
        return faults
    return tuple(f for f in faults if f is not kills[-1])


def _in_order(faults: list[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda f: f.at_s))
