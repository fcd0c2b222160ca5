"""A real fleet of paced peers: what the protocol makes of unequal machines."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from muletrain.config.load import load_config
from muletrain.events import StepApplied
from muletrain.policy.wiring import Wiring

from .fleet_run import run_fleet

if TYPE_CHECKING:
    from pathlib import Path

FORWARD_MS, BACKWARD_MS = 20.0, 40.0
MICROBATCHES, STEPS, SKIP = 48, 4, 1
PROFILE = f"""
machines = [{{ name = "front", speed = 4.0 }}, {{ name = "quick" }}, {{ name = "third", speed = {1 / 3} }}]
pacing = {{ forward_ms = {FORWARD_MS}, backward_ms = {BACKWARD_MS} }}
"""
SMALL = [
    "model.width=32",
    "model.heads=2",
    "model.layers=2",
    "model.context=16",
    "model.vocab=512",
    "train.microbatch=1",
    "compute.precision=fp32",
    f"train.batch={MICROBATCHES}",
    f"train.steps={STEPS}",
    "fleet.peers=3",
    "fleet.trainers=1",
]


@pytest.mark.alone
def test_peer_at_a_third_of_the_speed_gets_a_quarter_of_the_work(tmp_path: Path) -> None:
    """With room for a busy machine; benchmarks/unequal_peers measures the share, and the throughput."""
    profile = tmp_path / "fleet.toml"
    profile.write_text(PROFILE)
    config = load_config(None, [*SMALL, f"fleet.profile={profile}", f"data.cache={tmp_path / 'cache'}"])
    events = run_fleet(config, tmp_path / "run", stages=(0, 1, 1), timeout_s=200)
    counts: Counter[str] = Counter()
    for e in events:
        if isinstance(e, StepApplied) and e.stage == 1 and e.step > SKIP:
            counts[e.peer] += e.microbatches
    assert counts.total() == MICROBATCHES * (STEPS - SKIP)
    assert 0.17 <= counts["peer-2"] / counts.total() <= 0.34


def wired() -> Wiring:
    """A sender that has measured 65 ms of a peer of 60 ms, and 185 ms of one of 180 ms."""
    wiring = Wiring(random.Random(0))
    for peer, seconds in (("fast", 0.065), ("slow", 0.185)):
        wiring.add(peer)
        wiring.measured(peer, seconds)
    return wiring


def test_wiring_queues_nothing_behind_a_peer_that_another_would_have_finished_by_then() -> None:
    """Whatever the running totals say."""
    for totals in range(10):
        wiring = wired()
        for _ in range(totals):
            wiring.choose()
        assert wiring.choose(under_way={"slow": 1}) == "fast"
        assert wiring.choose(under_way={"fast": 4}) == "slow"


def test_wiring_owes_nothing_to_a_peer_that_was_passed_over() -> None:
    wiring = wired()
    for _ in range(60):
        wiring.choose(under_way={"slow": 1})
    counts = Counter(wiring.choose() for _ in range(60))
    assert 14 <= counts["slow"] <= 18
