"""The promise, with everything at once: kills, freezes, joins, moves and a trainer's death at exact points of steps
change no number."""

from __future__ import annotations

import random
import subprocess
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import pytest

from muletrain.events import (
    Event,
    FaultInjected,
    PeerDown,
    PeerJoined,
    PeerMoved,
    RunFinished,
    StepApplied,
    read_events,
)
from muletrain.policy.chaos import PHASES, Fault, readable

from .fleet_run import checkpoint_weights
from .reference import train_plainly
from .test_equivalence import EXACT, facts_of, relative_difference
from .test_survival import command

if TYPE_CHECKING:
    from pathlib import Path

STAGES, PEERS, STEPS = 3, 8, 30
SETTINGS = [
    *EXACT,
    f"train.steps={STEPS}",
    "model.layers=3",
    f"fleet.stages={STAGES}",
    f"fleet.peers={PEERS}",
    "fleet.trainers=3",
    "fleet.rebalance=off",
    "compute.threads=1",
]
PACING = "[pacing]\nforward_ms = 80.0\nbackward_ms = 160.0\n"
"""So that 30 steps take as long as newcomers need to get ready, on a machine whose cores they do not wait for."""


def plan(seed: int) -> list[Fault]:
    """6 kills (one of them a trainer's), 3 freezes, 4 joins, 2 moves."""
    rng = random.Random(f"survival/{seed}")
    kills = [
        Fault("kill", step=step, target="trainer" if k == 0 else "any", phase=phase)
        for k, (step, phase) in enumerate(
            zip(rng.sample(range(4, 27), 6), rng.sample([*PHASES, rng.choice(PHASES)], 6), strict=True)
        )
    ]
    freezes = [
        Fault("freeze", step=step, target="any", phase=rng.choice(PHASES), for_s=rng.choice([1.0, 4.0, 10.0]))
        for step in rng.sample(range(3, 24), 3)
    ]
    joins = [Fault("join", step=step) for step in rng.sample(range(1, 14), 4)]
    moves = [
        Fault("move", step=step, target="any", stage=rng.randrange(STAGES)) for step in rng.sample(range(2, 22), 2)
    ]
    return sorted([*kills, *freezes, *joins, *moves], key=lambda f: f.step or 0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_at_whatever_point_the_numbers_are_those_of_one_process(tmp_path: Path, seed: int) -> None:
    profile = tmp_path / "fleet.toml"
    profile.write_text(f'[[machines]]\nname = "home"\ncount = {PEERS}\n{PACING}')
    faults = readable(plan(seed))
    settings = [*SETTINGS, f"data.cache={tmp_path / 'cache'}", f"fleet.profile={profile}"]
    fleet = subprocess.Popen(
        command("run", "--chaos", faults, "--seed", str(seed), settings=settings),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    facts, cache = facts_of(tmp_path, *settings[len(EXACT) :])
    expected, _ = train_plainly(facts, facts.source(cache))
    out, _ = fleet.communicate(timeout=540)
    assert fleet.returncode == 0, out
    (run,) = (tmp_path / "runs").iterdir()
    assert relative_difference(checkpoint_weights(run), expected) <= 1e-5
    events = sorted((e for path in run.glob("*.jsonl") for e in read_events(path)), key=lambda e: e.t)
    check_counts(events, plan(seed), out)


def check_counts(events: list[Event], planned: list[Fault], out: str) -> None:
    """What was injected is what was planned, and what became of it is what was counted."""
    injected = [e for e in events if isinstance(e, FaultInjected)]
    assert Counter(e.planned for e in injected) == Counter(map(str, planned))
    for e, fault in ((e, f) for e in injected for f in planned if str(f) == e.planned and f.phase is not None):
        assert fault.step is not None
        assert fault.step <= e.step + 1 <= fault.step + 6, "in the middle of the step after the one that was done"
    who = defaultdict(list)
    for e in injected:
        who[e.what] += e.who
    joined = [e for e in events if isinstance(e, PeerJoined)]
    ids = {e.peer_id for e in joined if e.name in who["kill"]}
    assert ids <= {e.peer_id for e in events if isinstance(e, PeerDown)}, "all deaths were noticed"
    names = {e.name for e in joined}
    assert names == {f"peer-{k}" for k in range(PEERS + 4)}
    moved = [e for e in events if isinstance(e, PeerMoved)]
    assert sorted(m.name for m in moved) == sorted(who["move"]), moved
    assert {e.peer for e in events if isinstance(e, RunFinished)} == names - set(who["kill"])
    lineages = defaultdict(set)
    for e in events:
        if isinstance(e, StepApplied):
            lineages[e.step].add(e.lineage)
    assert sorted(lineages) == list(range(1, STEPS + 1))
    assert all(len(found) == 1 for found in lineages.values())
    last = {e.peer for e in events if isinstance(e, StepApplied) and e.step == STEPS}
    assert set(who["freeze"]) - set(who["kill"]) <= last, "the frozen came back"
    assert f"Injected faults: {len(planned)}" in out
