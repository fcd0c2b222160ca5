"""Delayed parameter updates in the virtual world: a step is agreed on while the next one is computed, and no number
changes for it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from muletrain.compute import scaling
from muletrain.events import FaultInjected, MicrobatchesRerun, PeerMoved, StepApplied
from proofs.play import play
from proofs.scenario import Fault, Scenario
from proofs.verdict import Outcome, readable
from tests import planted

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(400)
# fmt: off
SCENARIOS = [
    Scenario(31, (2, 2), 2, 4, 8, 0.1, (Fault(0.0, "kill", ("peer-1b",), on="shard"),)),  # what it had runs again, beside the next step
    Scenario(32, (2, 1), 2, 4, 10, 0.02, (Fault(2.4, "join", ("peer-1j0",)),)),
]
# fmt: on


def delayed(scenario: Scenario) -> Scenario:
    return dataclasses.replace(scenario, overrides=(*scenario.overrides, "optimizer.delayed=true"))


def played(scenario: Scenario) -> Outcome:
    outcome = play(scenario)
    assert outcome.violations == [], "\n".join(readable(outcome))
    return outcome


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_the_scenarios_are_survived(scenario: Scenario) -> None:
    outcome = played(delayed(scenario))
    assert outcome.of(FaultInjected)


def test_averaging_overlaps_with_the_next_step() -> None:
    """Where a message takes as long as a forward and a backward together."""
    at_once = Scenario(33, (2, 1), 2, 5, 4, 0.15, ())
    assert played(delayed(at_once)).virtual_s < 0.85 * played(at_once).virtual_s


def test_fp16_that_overflows_skips_steps_that_were_computed_with_the_scale_of_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third step began before the first one's overflow was known, and so did the second."""
    monkeypatch.setattr(scaling, "FIRST", 2.0**17)
    half = ("compute.precision=fp16", "optimizer.eps=0.1")
    outcome = played(delayed(Scenario(9, (2, 1), 2, 5, 4, 0.01, (), overrides=half, tolerance=1e-4)))
    skipped = {e.step for e in outcome.of(StepApplied, skipped=True)}
    assert {1, 2} <= skipped < {1, 2, 3, 4, 5}


def test_who_leaves_or_moves_does_so_between_two_steps() -> None:
    going = (Fault(0.4, "leave", ("peer-0b",)), Fault(1.2, "move", ("peer-1c",)))
    outcome = played(delayed(Scenario(34, (2, 3), 2, 5, 8, 0.02, going)))
    assert outcome.ends["peer-0b"] == "left in order"
    assert outcome.of(PeerMoved, name="peer-1c", stage=1, target=0)
    assert not outcome.of(MicrobatchesRerun), "who wants to go takes nothing of the next step"


@pytest.mark.parametrize(
    "plant",
    [
        planted.both_steps_see_the_same_weights,
        planted.newcomers_get_the_newest_weights_only,
        planted.the_step_ahead_is_cleared_with_the_one_that_is_over,
    ],
)
def test_a_planted_bug_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(play(delayed(scenario)).violations for scenario in SCENARIOS)
