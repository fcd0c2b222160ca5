"""What is lost with a stream is asked for at once, not once deadlines have been missed."""

from __future__ import annotations

from proofs.play import play
from proofs.scenario import Fault, Scenario

STEP_S = 16 * 0.15 * 5.8
"""Of a step in which nothing is lost."""


def took_s(*faults: Fault) -> float:
    """Virtual time of four steps, in which messages take half a second."""
    scenario = Scenario(
        seed=5, stages=(1, 1), trainers=1, steps=4, microbatches=16, delay_s=0.5, faults=faults, slower=5.8
    )
    outcome = play(scenario)
    assert outcome.violations == []
    return outcome.virtual_s


def test_what_a_cut_of_a_moment_loses_at_the_end_of_a_step_costs_no_missed_deadline() -> None:
    """The step's last notices are on their way. Their deadline is longer than a step."""
    plain_s = took_s()
    lost_s = took_s(Fault(47.55, "cut", ("peer-0a", "peer-1a"), for_s=1.5))
    assert plain_s > 4 * STEP_S
    assert lost_s - plain_s < STEP_S / 2
