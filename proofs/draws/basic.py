"""Draw a small fleet, its work and its faults; ``draws`` adds rarer events."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from muletrain.config.fleet_sections import QUEUE_S
from proofs.scenario import BACKWARD_S, FOR_EVER_S, FORWARD_S, SIDES, Fault, Scenario, planned, stage_of

POINTS = ("forward", "backward", "seal", "shard", "reduced", "entry")
"""Frames at which a peer may be killed exactly: between any two of them the protocol must be able to lose it."""

PARTITIONED = 0.2
"""Share of the scenarios that are about a partition."""
LASTING, LONGER_S, TOGETHER_S = 0.3, (2.0, 6.0), 15.0
"""Share of partitions after which sides train on for some seconds more, and how long the run continues after they
meet [s]."""
DELAYED = 0.3
"""Share of the scenarios with delayed updates."""
PLANNED = 0.2
"""Share of the scenarios with planned membership."""
SHARED = 0.5
"""Share of planned scenarios in which peers of smaller stages serve several pipelines."""
LARGE = 0.25
"""Share of the scenarios with large tensors: links are narrow for them, and averaging takes ``AVERAGING_S``, if all
links are alike."""
AVERAGING_S = (2.0, 40.0)
GRADIENT = 54_000
"""Bytes of the largest stage's gradient."""

HANGING, ALONE = 0.3, 0.4
"""Share of worlds with a hanging device, if that can be survived; and the share of these without other faults."""
LOSES_A_STAGE = 0.4
"""Share of worlds in which, if that can be survived, a stage loses all its peers."""


@dataclass(frozen=True)
class Size:
    """The size of a world that is not small; fields that are None are drawn."""

    stages: tuple[int, ...] | None = None
    steps: int | None = None
    microbatches: int | None = None


def draw(seed: int, size: Size | None = None) -> Scenario:
    """Draw a scenario. Worlds with a ``size`` have no partitions and only small tensors."""
    return _with_large_tensors(_draw(seed, Size())) if size is None else _draw(seed, size)


def _draw(seed: int, size: Size) -> Scenario:
    """Draw a world whose tensors are small: in some a partition, in the others single faults."""
    overrides = ("optimizer.delayed=true",) if random.Random(f"delayed/{seed}").random() < DELAYED else ()
    plans = random.Random(f"planned/{seed}")
    schedule = plans.choice(["gpipe", "1f1b"]) if plans.random() < PLANNED else None
    shared = plans.random() < SHARED
    apart = random.Random(f"apart/{seed}")
    skew = apart.choice([0.0, 0.0, 0.1, 0.5])
    stalls = random.Random(f"stalls/{seed}").choice([0.0, 0.0, 0.0, 0.01, 0.1])
    parted = apart.random() < PARTITIONED and size == Size()
    drawn = _partitioned(seed, apart) if parted else _with_single_faults(seed, size, schedule, shared=shared)
    overrides = (*overrides, *planned(drawn.stages, schedule, shared=shared))
    return replace(drawn, skew=skew, stalls=stalls, overrides=overrides)


def _with_single_faults(seed: int, size: Size, schedule: str | None, *, shared: bool) -> Scenario:
    """Draw two or three stages of one to three replicas and up to four faults, none of which kills a whole stage or
    leaves it to a replica that may be behind. In some worlds a stage also loses all its peers at once."""
    rng, places = random.Random(f"scenario/{seed}"), random.Random(f"places/{seed}")
    base = _base(seed, size, rng, places)
    span = base.steps * base.microbatches * (FORWARD_S + BACKWARD_S) / min(base.stages)
    drawn = _SingleFaults(base)
    for _ in range(rng.randint(0, 4)):
        drawn.draw(rng, span)
    faults = drawn.faults + _moving_along(random.Random(f"moves/{seed}"), drawn.faults, drawn.mortal)
    thin = random.Random(f"narrow/{seed}")
    newcomers = [p for f in faults if f.kind == "join" for p in f.who]
    narrow = tuple((p, 10 ** thin.uniform(4.5, 7.0)) for p in newcomers if thin.random() < 0.3)
    chance = random.Random(f"relays/{seed}")
    relays = chance.random() < 0.5
    apart_for_ever = relays and chance.random() < 0.5
    lost = _lost_stage(base, faults, places, span) if places.random() < LOSES_A_STAGE else ()
    if apart_for_ever:
        faults += _never_connected(chance, base, (*faults, *lost))
    if not lost:  # else all peers that stay are needed
        victims = [p for s, peers in drawn.mortal.items() if s not in drawn.behind for p in peers]
        compared = schedule is None or (max if shared else min)(base.stages) > 1  # spares compute nothing
        alone = compared and {f.kind for f in faults} <= {"slow"}
        faults += _miscomputation(random.Random(f"corrupt/{seed}"), span, victims, alone=alone)
        liars = {stage_of(f.who[0]) for f in faults if f.kind == "corrupt"}
        hangs = random.Random(f"hangs/{seed}")
        if hang := _hanging(hangs, span, [p for p in victims if stage_of(p) not in liars]):
            faults, narrow = (hang, ()) if hangs.random() < ALONE else (faults + hang, narrow)
    trainers = len(base.members) if lost else base.trainers
    every = _one_trains(base.members[:trainers], _in_order([*faults, *lost]))
    return replace(base, faults=every, trainers=trainers, narrow=narrow, relays=relays)


def _base(seed: int, size: Size, rng: random.Random, places: random.Random) -> Scenario:
    """Draw a fleet and its work, without faults."""
    few = tuple(rng.randint(1, 3) for _ in range(rng.randint(2, 3)))
    stages, steps, microbatches = size.stages or few, rng.randint(3, 5), rng.randint(4, 9)
    return Scenario(
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


class _SingleFaults:
    """Faults drawn one by one, and the peers that others may still hit."""

    def __init__(self, base: Scenario) -> None:
        self.faults: list[Fault] = []
        self.mortal = {s: [p for p, stage in base.members if stage == s][: n - 1] for s, n in enumerate(base.stages)}
        self.behind: set[int] = set()
        """Stages in which a replica may be behind: killing the others there would lose the newest state."""
        self._base = base
        self._killed: set[int] = set()
        self._joined: list[str] = []

    def draw(self, rng: random.Random, span: float) -> None:
        at_s, lasting = rng.uniform(0.0, span), rng.uniform(0.2, 20.0)
        kind = rng.choice(["kill", "kill", "freeze", "cut", "slow", "damage", "leave", "move", "join", "join"])
        if kind == "join":
            name = f"peer-{rng.randrange(len(self._base.stages))}j{sum(f.kind == 'join' for f in self.faults)}"
            self._joined.append(name)
            self.faults.append(Fault(at_s, kind, (name,)))
        elif kind in ("kill", "leave", "move"):
            self._lose(rng, at_s, kind)
        else:
            self._disturb(rng, at_s, kind, lasting)

    def _lose(self, rng: random.Random, at_s: float, kind: str) -> None:
        """A stage loses a peer. A peer that leaves makes sure that another one has its state."""
        mortals = [p for peers in self.mortal.values() for p in peers] + self._joined
        victims = [p for p in mortals if stage_of(p) not in self.behind or kind != "kill"]
        if not victims:
            return
        victim = rng.choice(victims)
        (self._joined if victim in self._joined else self.mortal[stage_of(victim)]).remove(victim)
        self._killed |= {stage_of(victim)} if kind == "kill" else set()
        on = rng.choice(["", *POINTS]) if kind == "kill" else ""
        self.faults.append(Fault(at_s, kind, (victim,), on=on, nth=rng.randint(1, 6)))

    def _disturb(self, rng: random.Random, at_s: float, kind: str, lasting: float) -> None:
        peers = [*(p for p, _ in self._base.members), *self._joined]
        who, other = rng.choice(peers), rng.choice(peers)
        pair = kind == "cut" and other != who and rng.random() < 0.5
        cut_off = {stage_of(who), stage_of(other)} if pair else {stage_of(who)}
        if kind == "slow" or not cut_off & self._killed:
            self.faults.append(Fault(at_s, kind, (who, other) if pair else (who,), lasting))
            self.behind |= cut_off if kind != "slow" else set()


def _never_connected(rng: random.Random, base: Scenario, faults: tuple[Fault, ...]) -> list[Fault]:
    """Two members never connect, if one that stays can relay between them."""
    members = [p for p, _ in base.members]
    never = tuple(rng.sample(members, 2))
    gone = {f.who[0] for f in faults if f.kind in ("kill", "leave")}
    return [Fault(0.0, "cut", never, FOR_EVER_S)] if set(members) - gone - {*never} else []


def _hanging(rng: random.Random, span: float, sound: list[str]) -> list[Fault]:
    """In some worlds the device of one ``sound`` peer hangs, for a while or for ever."""
    if not sound or rng.random() >= HANGING:
        return []
    lasting = rng.choice([rng.uniform(0.5, 30.0), FOR_EVER_S])
    return [Fault(rng.uniform(0.0, span), "hang", (rng.choice(sound),), lasting)]


def _with_large_tensors(drawn: Scenario) -> Scenario:
    """Enlarge the tensors in some worlds: everything takes longer, and faults come later."""
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
    """For every other peer that moves, a peer of another stage moves to the same stage at the same moment."""
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
    """In every third world a peer computes wrongly for a while, and may be expelled. Finite errors stand out only if
    a replica has a gradient of the same step, which no other fault may prevent (``alone``)."""
    if not victims or rng.random() > 1 / 3:
        return []
    how = rng.choice(["nan", "activations", "huge"] if alone else ["nan", "activations"])
    return [Fault(rng.uniform(0.0, span), "corrupt", (rng.choice(victims),), rng.uniform(0.1, 2.0), how=how)]


def _partitioned(seed: int, rng: random.Random) -> Scenario:
    """Draw a partition, of which in most cases both sides can go on, and up to three other faults. Nobody dies,
    because one side may have a stage's newest state."""
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
    """Spare the last trainer that would be killed or hang if the others are gone: no run goes on without trainers."""
    gone = [f for f in faults if f.kind in ("kill", "leave", "hang") and f.who[0] in {p for p, _ in trainers}]
    kills = [f for f in gone if f.kind != "leave"]
    if not kills or {f.who[0] for f in gone} != {p for p, _ in trainers}:
        return faults
    return tuple(f for f in faults if f is not kills[-1])


def _in_order(faults: list[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda f: f.at_s))
