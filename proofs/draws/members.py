"""Who comes, goes, and trains; and when the run ends."""

from __future__ import annotations

import random
from dataclasses import replace

from proofs.draws.common import Kind, calm, replicas, span, spare, with_faults
from proofs.lying import LIES
from proofs.scenario import FOR_EVER_S, SIDES, SUSPENDED, Fault, Scenario, planned, stage_of

MANY = 0.3
"""Share of the worlds with naps in which a stage has five to seven replicas."""


def _last_trainer(s: Scenario, rng: random.Random) -> Scenario | None:
    """The only one dies; one that has the data comes later."""
    if s.stages[0] < 2:
        return None
    s = replace(calm(s), trainers=1)
    dies = rng.uniform(0.0, 0.8 * span(s))
    comes = Fault(dies + rng.choice([0.5, 5.0, 100.0]), "join", (f"peer-{rng.randrange(len(s.stages))}t",))
    return with_faults(s, [Fault(dies, "kill", ("peer-0a",)), comes])


def _without_data(s: Scenario, rng: random.Random) -> Scenario | None:
    """Newcomers do not train."""
    if not s.joining:
        s = with_faults(s, [Fault(rng.uniform(0.0, span(s)), "join", (f"peer-{rng.randrange(len(s.stages))}n",))])
    return replace(s, without_data=tuple(p for p in s.joining if not p.endswith("t")))


def _shared_data(s: Scenario, rng: random.Random) -> Scenario | None:
    """The first trainers give their tokens to others."""
    return replace(s, share=True) if len(s.members) > s.trainers and not s.without_data else None


def _stop(s: Scenario, rng: random.Random) -> Scenario | None:
    who = rng.choice([p for p, _ in s.members])
    return with_faults(s, [Fault(rng.uniform(0.0, span(s)), "stop", (who,))])


def _time_limit(s: Scenario, rng: random.Random) -> Scenario | None:
    """By each one's own clock."""
    return replace(s, time_limit_s=rng.uniform(0.1, 1.0) * span(s))


def _kick(s: Scenario, rng: random.Random) -> Scenario | None:
    s = calm(s)
    victims = spare(s)
    return with_faults(s, [Fault(rng.uniform(0.0, span(s)), "kick", (rng.choice(victims),))]) if victims else None


def _restart(s: Scenario, rng: random.Random) -> Scenario | None:
    """Who dies, or was kicked, comes again under its name, at any stage."""
    gone = [f for f in s.faults if f.kind in ("kill", "kick", "leave")]
    if not gone:
        victims = spare(s)
        if not victims:
            return None
        s = calm(s)
        gone = [Fault(rng.uniform(0.0, span(s)), "kill", (rng.choice(victims),))]
        s = with_faults(s, gone)
    again = rng.choice(gone)
    name = f"peer-{rng.choice([stage_of(again.who[0]), rng.randrange(len(s.stages))])}r"
    return with_faults(s, [Fault(again.at_s + rng.choice([0.0, 1.0, 10.0]), "join", (name,), how=again.who[0])])


def _resume(s: Scenario, rng: random.Random) -> Scenario | None:
    """All machines lose power, and the run goes on from the folder."""
    if s.apart:
        return None
    return replace(
        calm(s), checkpoint_every=rng.randint(1, 2), resume_s=rng.uniform(0.2, 1.0) * span(s), keep=rng.randint(1, 2)
    )


def _lie(s: Scenario, rng: random.Random) -> Scenario | None:
    """One of three replicas: one of two may decide alone, and peers that share a folder trust each other
    (docs/trust.md)."""
    stages = [stage for stage, count in enumerate(s.stages) if count > 2]
    if not stages:
        return None
    stage, how = rng.choice(stages), rng.choice(LIES)
    liar, other = rng.sample(replicas(s, stage), 2)
    if how == "forged" and (s.share or liar in {p for p, _ in s.members[: s.trainers]}):
        return None  # peers without data believe a trainer
    if how in ("work", "idle", "fast"):  # deadlines that other faults have stretched hold it up for longer
        s = replace(s, faults=())
    lies = [Fault(rng.uniform(0.0, span(s)), "lie", (liar,), FOR_EVER_S, how=how)]
    later_s = rng.uniform(0.2, 0.8) * span(s)
    if how in ("copies", "others", "history"):
        lies.append(Fault(later_s, "join", (f"peer-{stage}l",)))
    if how in ("claims", "alone"):  # what is lost, it claims to hold; the smaller part of a stage would yield
        lies.append(Fault(later_s, "slow" if s.trainers == 1 and other == s.members[0][0] else "kill", (other,), 1.0))
    return with_faults(replace(calm(s), checkpoint_every=1, apart=s.apart or how == "parts"), lies)


def _naps(s: Scenario, rng: random.Random) -> Scenario | None:
    """All but one of each stage stand still again and again, while microbatches take seconds: machines whose owners use
    them. In most such worlds the pipelines are planned; in some a stage has so many replicas that one or the other is
    always away."""
    if s.clients or len(s.stages) > 3 or any(f.kind in SIDES for f in s.faults):
        return None
    slower, stages = rng.uniform(5.0, 30.0), tuple(max(n, rng.choice([2, 3, 3])) for n in s.stages)
    if (many := random.Random(f"many/{s.seed}")).random() < MANY:
        crowded = many.randrange(len(stages))
        stages = tuple(many.randint(5, 7) if stage == crowded else n for stage, n in enumerate(stages))
    schedule = rng.choice([None, "gpipe", "1f1b", "1f1b", "1f1b"])
    others = [o for o in s.overrides if not o.startswith("pipeline")]
    s = replace(
        calm(s),
        stages=stages,
        trainers=rng.choice([1, s.trainers]),
        longer=max(slower, s.longer),
        slower=slower,
        microbatches=rng.randint(8, 16),
        overrides=(*others, *planned(stages, schedule, shared=rng.random() < 0.5)),
    )
    faults, how = [], _stands_still(s)
    for who in spare(s):
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(1 / s.step_s)) < 0.8 * span(s):
            faults.append(Fault(at_s, "freeze", (who,), 1.0 + rng.expovariate(2 / s.step_s), how=how))
            at_s += faults[-1].for_s
    return with_faults(s, faults)


def _stands_still(s: Scenario) -> str:
    """How machines of this world freeze: stopped, or suspended."""
    return random.Random(f"stands still/{s.seed}").choice(["", SUSPENDED])


def _minutes(s: Scenario, rng: random.Random) -> Scenario | None:
    """Machines that need minutes for a microbatch; one of them stands still for some minutes, or dies, and what it had done
    may take more than an hour to be run again."""
    if (slow := _slow(s, rng)) is None:
        return None
    at_s = rng.uniform(0.0, 0.8 * span(slow))
    kind, who = rng.choice(["freeze", "kill"]), rng.choice(spare(slow))
    return with_faults(slow, [Fault(at_s, kind, (who,), 250.0 * rng.random())])


def _sleep(s: Scenario, rng: random.Random) -> Scenario | None:
    """Machines that are suspended for up to an hour, as laptops are. The run may end meanwhile."""
    changed = _slow(s, rng)
    if changed is None or rng.random() < 0.2:
        changed = None if s.clients or not spare(s) else calm(s)
    if changed is None:
        return None
    sleep = rng.sample(spare(changed), rng.randint(1, len(spare(changed))))
    times = {who: (rng.uniform(0.0, 0.8 * span(changed)), rng.uniform(400.0, 4000.0)) for who in sleep}
    how = _stands_still(changed)
    return with_faults(changed, [Fault(at_s, "freeze", (who,), for_s, how=how) for who, (at_s, for_s) in times.items()])


def _suspended(s: Scenario, rng: random.Random) -> Scenario | None:
    """Who freezes is suspended, as a laptop is while its lid is closed: its clock stands still, too."""
    if not any(f.kind == "freeze" for f in s.faults):
        if not (spared := spare(s)):
            return None
        closed = rng.sample(spared, rng.randint(1, len(spared)))
        times = {who: (rng.uniform(0.0, 0.8 * span(s)), rng.uniform(0.2, 60.0)) for who in closed}
        s = with_faults(calm(s), [Fault(at_s, "freeze", (who,), for_s) for who, (at_s, for_s) in times.items()])
    return replace(s, faults=tuple(replace(f, how=SUSPENDED) if f.kind == "freeze" else f for f in s.faults))


def _slow(s: Scenario, rng: random.Random) -> Scenario | None:
    """Machines that need minutes for a microbatch, two in each stage at least."""
    if s.clients or s.swapped or len(s.stages) > 3 or any(f.kind in SIDES for f in s.faults):
        return None
    slower = rng.uniform(200.0, 1600.0)
    others = [o for o in s.overrides if not o.startswith("pipeline")]
    stages = tuple(max(n, 2) for n in s.stages)
    return replace(
        calm(s),
        stages=stages,
        longer=max(slower, s.longer),
        slower=slower,
        microbatches=s.microbatches * rng.choice([1, 1, 4]),
        steps=2,
        overrides=(*others, *planned(stages, rng.choice([None, "gpipe", "1f1b"]), shared=rng.random() < 0.5)),
    )


def _keep(s: Scenario, rng: random.Random) -> Scenario | None:
    return replace(s, keep=rng.randint(2, 3), checkpoint_every=1)


KINDS: dict[str, Kind] = {
    "last trainer": _last_trainer,
    "without data": _without_data,
    "stop": _stop,
    "time limit": _time_limit,
    "kick": _kick,
    "restart": _restart,
    "resume": _resume,
    "keep": _keep,
    "naps": _naps,
    "sleep": _sleep,
    "minutes": _minutes,
    "suspended": _suspended,
    "lie": _lie,
    "shared data": _shared_data,
}
