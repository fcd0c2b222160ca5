"""Runs with strategy ``hub``: clients that come, go, stand still, and answer late."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from proofs.draws.common import Kind, span, with_faults
from proofs.hub_lies import CLIENT_LIES, SERVER_LIES
from proofs.scenario import FOR_EVER_S, Fault, Scenario

if TYPE_CHECKING:
    import random

ALONE = ("pipeline.seats", "compute.precision")
"""Settings of worlds that have no clients."""
FALSE = "false", "hurry"
"""Lies about gradients."""


def _hub(s: Scenario, rng: random.Random) -> Scenario | None:
    if s.share or s.swapped or any(o.startswith(ALONE) for o in s.overrides):
        return None
    stages = range(len(s.stages))
    clients = tuple(f"client-{stage}{chr(97 + k)}" for stage in stages for k in range(rng.randint(0, 4)))
    clients = clients or ("client-0a",)
    s = replace(s, clients=clients, sequences=rng.choice([1, 2, 3, 5]))
    return with_faults(s, [_fault(s, rng) for _ in range(rng.randint(0, 5))])


def _fault(s: Scenario, rng: random.Random) -> Fault:
    """Of one client; or another one comes."""
    at_s, for_s, who = rng.uniform(0.0, span(s)), rng.choice([0.3, 2.0, 15.0, 60.0]), rng.choice(s.clients)
    kind = rng.choice(["kill", "kill", "freeze", "cut", "slow", "damage", "hang", "join", "exactly"])
    if kind == "join":
        return Fault(at_s, "join", (f"client-{rng.randrange(len(s.stages))}j{rng.randrange(1000)}",))
    if kind == "exactly":
        frame = rng.choice(["hub.result", "block"])
        return Fault(at_s, rng.choice(["kill", "damage"]), (who,), on=frame, nth=rng.randint(1, 3))
    return Fault(at_s, kind, (who,), 0.0 if kind == "kill" else for_s)


def _hub_lie(s: Scenario, rng: random.Random) -> Scenario | None:
    """Some clients lie to their servers, or a server lies to its clients. Everything is checked where a client could
    announce false gradients (docs/hub.md)."""
    if (hub := _hub(replace(s, faults=()), rng)) is None:
        return None
    server = rng.random() < 0.3
    who = (
        [rng.choice([p for p, _ in s.members])] if server else rng.sample(hub.clients, rng.randint(1, len(hub.clients)))
    )
    lies = [(w, rng.choice(SERVER_LIES if server else (*CLIENT_LIES, "false"))) for w in who]
    false = [lie for lie in lies if lie[1] in FALSE][1:]  # two that lie alike are not found
    lies = [(w, "twice") if (w, how) in false else (w, how) for w, how in lies]
    faults = [
        Fault(0.0, "corrupt", (w,), FOR_EVER_S, how="reversed")
        if how == "false"
        else Fault(rng.uniform(0.0, span(s)), "lie", (w,), FOR_EVER_S, how=how)
        for w, how in lies
    ]
    checked = any(how in FALSE for _, how in lies)
    others = tuple(o for o in s.overrides if not o.startswith("hub.verify"))
    return with_faults(replace(hub, faults=(), overrides=(*others, *(["hub.verify=1.0"] if checked else []))), faults)


KINDS: dict[str, Kind] = {"hub": _hub, "hub lie": _hub_lie}
