"""Reports that peers send to the machine that coordinates the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from muletrain.errors import ProtocolError
from muletrain.events import StepApplied
from muletrain.runtime.peer.messages import Report
from muletrain.runtime.peer.reporting import Reporting


def reporting(taken: list[Any], *, apart: bool) -> Reporting:
    """Of a peer that knows one member, of stage 0."""
    member = SimpleNamespace(name="two", stage=0, trainer=False)
    ctx: Any = SimpleNamespace(roster=SimpleNamespace(member=lambda sender: member))
    host: Any = SimpleNamespace(reported=lambda event, name: taken.append((event.stage, name)))
    return Reporting(ctx, host, apart=apart)


def report_of(stage: int) -> Report:
    """A step that a peer of this stage applied."""
    shares: dict[str, Any] = dict.fromkeys(("forward_s", "backward_s", "averaging_s", "apply_s", "wait_s"), 1.0)
    return Report(
        event=StepApplied(
            step=1, stage=stage, microbatches=2, recomputed=0, sent={}, lineage="", skipped=False, **shares
        ).to_json()
    )


@pytest.mark.parametrize("apart", [False, True])
def test_a_peer_that_coordinates_in_place_of_the_first_machine_drops_reports_and_blames_nobody(apart: bool) -> None:
    """Honest peers cannot tell it from the first machine; only the first machine's log is the run's."""
    taken = list[Any]()
    reporting(taken, apart=apart).told("sender", report_of(stage=0))
    assert taken == ([] if apart else [(0, "two")])


def test_a_report_about_another_peer_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"^a step_applied event that is not about its sender"):
        reporting([], apart=False).told("sender", report_of(stage=1))
