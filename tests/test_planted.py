"""Planted bugs in the protocol are caught by scenarios in which they show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from proofs.play import play
from proofs.scenario import Fault, Scenario
from tests import planted
from tests.test_fuzz import AGREEMENT, FALSE_GRADIENTS, SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Callable


def broken(scenario: Scenario) -> list[str]:
    """The promises that are broken. A bug that was planted into other code than today's only ends peers."""
    violations = play(scenario).violations
    assert not [v for v in violations if "TypeError" in v or "AttributeError" in v]
    return violations


@pytest.mark.parametrize(
    "plant",
    [
        planted.retry_accumulates_again,
        planted.part_of_the_record,
        planted.stale_weights,
        planted.lost_trainer,
        planted.reused_round,
        planted.accumulator_kept,
        planted.gaps_ignored,
    ],
)
def test_a_planted_bug_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(map(broken, SCENARIOS))


@pytest.mark.parametrize(
    "plant",
    [
        planted.one_holder_is_enough,
        planted.attests_before_it_holds,
    ],
)
def test_a_planted_bug_in_the_agreement_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(map(broken, AGREEMENT))


@pytest.mark.parametrize(
    ("plant", "scenario", "text"),
    [
        (
            planted.accumulator_kept_over_a_migration,
            Scenario(10, (2, 2), 2, 4, 8, 0.01, (Fault(0.3, "move", ("peer-1b",)),)),
            "other weights",
        ),
        (
            planted.sides_stay_apart,
            Scenario(11, (2, 2), 2, 30, 4, 0.01, (Fault(1.5, "partition", ("peer-0a", "peer-1a"), 3.0),)),
            "two lineages",
        ),
    ],
)
def test_a_planted_bug_is_caught_where_it_shows(
    plant: Callable[[pytest.MonkeyPatch], None], scenario: Scenario, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(text in violation for violation in broken(scenario))


@pytest.mark.parametrize(
    "plant", [planted.nothing_stands_out, planted.what_is_left_out_is_kept, planted.no_second_opinion]
)
def test_a_planted_bug_lets_false_gradients_in(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(map(broken, FALSE_GRADIENTS))
