"""Machines whose owners use them now and then: peers of planned pipelines stand still again and again, for longer than a
microbatch takes."""

from __future__ import annotations

import random

import pytest
import torch

from muletrain.events import LeftBehind, StepApplied
from proofs.play import play
from proofs.scenario import Fault, Scenario, planned

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(300)

Nap = tuple[str, float, float]
"""Who stands still, from when on, and for how long [s]."""
IGNORED: tuple[Nap, ...] = (
    ("peer-0b", 0.4, 10.7),
    ("peer-1b", 4.7, 21.8),
    ("peer-0c", 8.0, 49.2),
    ("peer-1c", 15.6, 26.2),
    ("peer-0c", 58.8, 14.6),
    ("peer-1c", 86.3, 11.5),
    ("peer-0c", 95.1, 20.1),
    ("peer-1c", 134.9, 45.7),
    ("peer-1b", 144.3, 7.1),
)
"""``peer-1c`` wakes up with microbatches that its replicas have had run again without it; one of these has a seat at
``peer-1c`` alone."""

BEHIND: tuple[Nap, ...] = (
    ("peer-0b", 2.928, 17.972),
    ("peer-0b", 22.044, 59.077),
    ("peer-1c", 23.073, 3.627),
    ("peer-1c", 71.472, 5.641),
    ("peer-1c", 83.78, 3.886),
    ("peer-0b", 92.599, 18.47),
    ("peer-1b", 93.398, 72.456),
    ("peer-1c", 100.921, 18.827),
    ("peer-0b", 115.177, 12.019),
    ("peer-0c", 157.292, 35.895),
)
"""``peer-1b`` wakes up two steps behind, and has been sent microbatches."""

ALONE: tuple[Nap, ...] = (
    ("peer-0c", 2.6239, 30.625),
    ("peer-1b", 4.4344, 13.9426),
    ("peer-1c", 13.4354, 6.1651),
    ("peer-0b", 52.6048, 1.5746),
    ("peer-1c", 58.7221, 1.3206),
    ("peer-1b", 66.5795, 12.3113),
    ("peer-0b", 84.6555, 10.698),
    ("peer-0c", 88.9671, 5.9375),
    ("peer-1c", 89.2054, 67.1493),
    ("peer-0b", 105.3163, 2.6428),
    ("peer-0b", 116.7242, 9.0342),
    ("peer-1b", 121.4446, 11.3977),
    ("peer-0b", 137.516, 26.1951),
)
"""``peer-1a`` goes on alone, since its replicas are silent, and lacks what they hold; one comes back and waits for it."""
STEP_S = 32 * 3 * 3 / (6 + 10 / 1.55)
MANY = ("2g", "1f", "0c", "1e", "1d", "1c", "0b", "2f", "2e", "2d")
"""Who comes and goes, and seconds of a step, as with 'benchmarks/hub/processes.py --machines 16'."""
WORLDS = {
    "one with a seat is ignored": IGNORED,
    "one is two steps behind": BEHIND,
    "one is waited for that goes on alone": ALONE,
}


@pytest.mark.parametrize("naps", WORLDS.values(), ids=WORLDS.keys())
def test_a_planned_pipeline_goes_on_soon_after_its_peers_wake_up(naps: tuple[Nap, ...]) -> None:
    faults = tuple(Fault(at_s, "freeze", (who,), for_s) for who, at_s, for_s in naps)
    stages = (3, 3)
    world = Scenario(1, stages, 1, 4, 16, 0.0, faults, overrides=planned(stages, "1f1b"), longer=20.0, slower=20.0)
    outcome = play(world)
    assert outcome.violations == []
    done_s = outcome.of(StepApplied)[-1].t  # who sleeps on is left behind
    assert done_s < max(at_s + for_s for _, at_s, for_s in naps) + 5 * world.step_s


def test_many_replicas_that_come_and_go_agree() -> None:
    """Stages of six and seven, of which two and three stay; the others leave 0.9 times in 23 s, for half of that on average.
    When replicas left out those that stood aside at that moment, no two named the same members, and each stood aside again.
    A peer gave up after 40 attempts, and a run of 16 processes stood still."""
    faults = []
    for number, who in enumerate(MANY):
        rng, at_s = random.Random(f"absences/{number}"), 0.0
        while (at_s := at_s + rng.expovariate(0.9 / STEP_S)) < 190.0:
            away_s = 1 + rng.expovariate(2 / STEP_S)
            faults.append(Fault(round(at_s, 1), "freeze", (f"peer-{who}",), round(away_s, 1)))
            at_s += away_s
    faults.sort(key=lambda fault: fault.at_s)
    world = Scenario(
        2,
        (3, 6, 7),
        1,
        1,
        32,
        0.005,
        tuple(faults),
        longer=20.0,
        slower=20.0,
        checkpoint_every=1,
        apart=True,
        disk_s=0.01,
    )
    outcome = play(world)
    assert outcome.violations == []
    assert len(outcome.of(LeftBehind)) < 30, "it was 95"


def test_two_replicas_that_do_not_count_on_each_other_do_not_wait_for_each_others_microbatches() -> None:
    """After a partition one of them finds that the other's gradient stands out. The third one looks on, so most of the stage
    counts on both. Found by 'python -m proofs fuzz'."""
    faults = (
        Fault(0.16941198001876995, "partition", ("peer-0a", "peer-0j1", "peer-1a"), 8.0575872265701),
        Fault(1.5709356193467683, "damage", ("peer-1a",), 19.73013221874661),
        Fault(2.7894152115646147, "leave", ("peer-1a",), 0.0),
        Fault(3.969325005750412, "join", ("peer-0j1",), 0.0),
        Fault(11.759819339067231, "stop", ("peer-1b",), 0.0),
    )
    half = ("optimizer.delayed=true", "compute.precision=fp16", "optimizer.eps=0.1")
    world = Scenario(83512, (2, 2), 2, 6, 7, 0.01, faults, overrides=half, tolerance=2e-4, stalls=0.1)
    outcome = play(world)
    assert outcome.violations == []
    # (peer-1a ends on a branch of its own: the others stop at step 2, and it looks for them for ten minutes)
    assert outcome.of(StepApplied)[-1].t < 300.0
