"""Peers move to where they are needed, while the run goes on: in the virtual world, and as a real fleet of paced
peers."""

from __future__ import annotations

import os
import signal
import statistics
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from muletrain.config.load import load_config
from muletrain.events import Event, MemberAdmitted, PeerDown, PeerMoved, StepDone
from muletrain.runtime.members.leaving import Departure
from proofs.play import play
from proofs.scenario import Fault, Scenario
from proofs.verdict import LEFT, readable

from .fleet_run import run_fleet

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.runs.fleet import LocalFleet

PERIOD_S = 5.0


def moves(scenario: Scenario) -> list[PeerMoved]:
    """Each move, in a world that keeps its promises."""
    outcome = play(scenario)
    assert outcome.violations == [], "\n".join(readable(outcome))
    return outcome.of(PeerMoved)


def test_one_and_three_become_two_and_two_within_three_periods_and_stay_so() -> None:
    found = moves(Scenario(4, (1, 3), 1, 16, 12, 0.01, (), "throughput", PERIOD_S))
    assert [(move.stage, move.target) for move in found] == [(1, 0)]
    assert found[0].t < 3 * PERIOD_S


def test_who_thinks_better_of_it_when_it_is_agreed_moves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the mover waits for the other replicas to have its last step, the next decision is that it should stay."""
    right = Departure.taken_over

    async def late(self: Departure, lineage: bytes, step: int) -> bool:
        await self._ctx.clock.sleep(3 * PERIOD_S)
        return await right(self, lineage, step)

    monkeypatch.setattr(Departure, "taken_over", late)
    outcome = play(Scenario(4, (1, 3), 1, 16, 12, 0.01, (), "throughput", PERIOD_S))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert LEFT not in outcome.ends.values()


def test_a_balanced_fleet_stays_as_it_is() -> None:
    assert moves(Scenario(4, (2, 2), 1, 12, 12, 0.01, (), "throughput", 3.0)) == []


def test_a_peer_killed_in_the_poorer_stage_draws_another() -> None:
    kill = Fault(6.0, "kill", ("peer-0b",))
    found = moves(Scenario(4, (2, 3), 2, 16, 12, 0.01, (kill,), "throughput", PERIOD_S))
    assert [(move.stage, move.target) for move in found] == [(1, 0)]
    assert 6.0 < found[0].t < 6.0 + 3 * PERIOD_S


def test_a_peer_that_is_slow_for_a_moment_draws_nobody() -> None:
    """As on a machine that does something else, too, for a few seconds: three of stage 1 do more than two of stage 0,
    one of them slow."""
    slow = Fault(3.0, "slow", ("peer-0b",), 3.0)
    assert moves(Scenario(4, (2, 3), 1, 14, 12, 0.01, (slow,), "throughput", PERIOD_S)) == []


def test_the_papers_rule_moves_peers_too() -> None:
    first, *_ = moves(Scenario(4, (1, 3), 1, 10, 12, 0.01, (), "paper", PERIOD_S))
    assert (first.stage, first.target) == (1, 0)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_real_fleet_of_one_and_four_does_more_after_moving(tmp_path: Path) -> None:
    """1 + 4 paced peers become 2 + 3, the throughput with them; one of the two dies, and another comes."""
    profile = tmp_path / "fleet.toml"
    profile.write_text('machines = [{ name = "one", count = 5 }]\npacing = { forward_ms = 20.0, backward_ms = 40.0 }\n')
    overrides = [
        "model.width=32",
        "model.heads=2",
        "model.layers=2",
        "model.context=16",
        "model.vocab=512",
        "train.microbatch=1",
        "compute.precision=fp32",
        "train.batch=24",
        "train.steps=60",
        "fleet.peers=5",
        "fleet.trainers=1",
        f"fleet.profile={profile}",
        f"fleet.rebalance_period={PERIOD_S}",
        f"data.cache={tmp_path / 'cache'}",
    ]
    moved: list[Event] = []
    done: list[float] = []
    killed: list[float] = []

    def watch(fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, MemberAdmitted) and event.peer == "peer-0":
            moved.append(event)
        if isinstance(event, StepDone):
            done.append(event.t)
        if len(moved) == 1 and not killed and event.t > moved[0].t + 12:
            newcomer = moved[0].name  # type: ignore[attr-defined]
            os.killpg(fleet.pid(newcomer), signal.SIGKILL)
            killed.append(event.t)

    events = run_fleet(
        load_config(None, overrides),
        tmp_path / "run",
        stages=(0, 1, 1, 1, 1),
        watch=watch,
        lost=frozenset(f"peer-{k}" for k in range(1, 5)),
    )
    assert len(moved) == 2
    assert any(isinstance(e, PeerDown) for e in events)
    began = done[0]
    assert moved[0].t - began < 3 * PERIOD_S
    assert moved[1].t - killed[0] < 3 * PERIOD_S + 5

    def per_step(a: float, b: float) -> float:
        return statistics.median(y - x for x, y in pairwise(done) if a < x and y < b)

    before, after, again = (
        per_step(0, moved[0].t),
        per_step(moved[0].t + 2, killed[0]),
        per_step(moved[1].t + 2, done[-1]),
    )
    print(f"seconds a step: 1 + 4 peers {before:.2f}, 2 + 3 {after:.2f}, after a death and another move {again:.2f}")
    assert after < 0.65 * before
    assert again < 0.65 * before
