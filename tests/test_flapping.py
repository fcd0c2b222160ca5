"""Links between replicas of one stage fail for seconds, one after the other, and nobody dies."""

from __future__ import annotations

import pytest

from proofs.draws import draw
from proofs.play import play
from proofs.scenario import Fault, Scenario


@pytest.mark.parametrize(
    "scenario",
    [  # the only trainer applies a step that its replicas did not hear of, and no other one repeats their part
        Scenario(
            289, (3, 2), 1, 6, 6, 0.1,
            (Fault(5.4, "one way", ("peer-0a", "peer-0c"), 4.0), Fault(6.3, "one way", ("peer-0a", "peer-0b"), 1.5)),
        ),
        Scenario(
            379, (3, 3), 1, 12, 4, 0.05,
            (
                Fault(0.29, "one way", ("peer-0c", "peer-0a"), 8.0),
                Fault(2.18, "one way", ("peer-0a", "peer-0b"), 8.0),
                Fault(5.02, "cut", ("peer-0a", "peer-0b"), 1.2),
                Fault(7.41, "one way", ("peer-0a", "peer-0c"), 8.0),
            ),
        ),
    ],
    ids=lambda s: str(s.seed),
)  # fmt: skip
def test_a_stage_whose_links_flap_goes_on(scenario: Scenario) -> None:
    """A replica that has applied the step is believed once the others have waited for as long as a step takes."""
    outcome = play(scenario)
    assert outcome.violations == []
    assert outcome.left_behind == []
    assert outcome.stood_s <= scenario.bound_s


@pytest.mark.parametrize("seed", [3032, 3061])
def test_a_replica_that_answers_from_the_next_step_is_counted_on_again(seed: int) -> None:
    """The only trainer applied a step alone while cut off, and its replicas marked it down. They heard its record once the
    links were back, and did not count the record of a peer that was down (``detector.probe``)."""
    outcome = play(draw(seed, "flapping links"))
    assert outcome.violations == []
    assert outcome.stood_s <= outcome.scenario.bound_s


@pytest.mark.parametrize("seed", [43, 45])
def test_half_of_a_stage_speaks_for_the_rest_before_a_minute_is_over(seed: int) -> None:
    """A replica that two others cannot hear holds the round, and asks them in vain. Found by 'python -m proofs fuzz'."""
    outcome = play(draw(seed, "flapping links"))
    assert outcome.violations == []
    assert outcome.stood_s <= outcome.scenario.bound_s


@pytest.mark.parametrize("seed", [7654, 7680, 7663])
def test_two_replicas_that_lost_each_other_do_not_wait_for_the_third_for_ever(seed: int) -> None:
    """7654, 7680: each held a round of its own, and the third asked in vain for microbatches that they had: the run was
    lost after six minutes. 7663: each applied a record of its own; the third had taken the state of one, and the next
    stage did not see that this decides (104 s)."""
    outcome = play(draw(seed, "flapping links"))
    assert outcome.violations == []
    assert outcome.stood_s <= outcome.scenario.bound_s


@pytest.mark.parametrize("seed", [72, 207])
def test_two_faults_cost_no_minute(seed: int) -> None:
    """72: two replicas that are cut from each other each made a record (92 s without ``exchange.make_sure``). 207: a block of a
    gradient was lost with a link, and its only donor was asked again a minute later (57 s)."""
    outcome = play(draw(seed, "two faults"))
    assert outcome.violations == []
    assert outcome.stood_s <= outcome.scenario.bound_s
