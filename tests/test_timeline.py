"""The trace of a run shows what was done, once, and nothing over anything else."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from muletrain.errors import ConfigError
from muletrain.events import PeerDown, SlotWorked
from muletrain.timeline import check_trace, chrome_trace
from proofs.play import play
from proofs.scenario import BACKWARD_S, FORWARD_S, Fault, Scenario

if TYPE_CHECKING:
    from pathlib import Path


def by_thread(rows: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    threads = defaultdict(list)
    for row in rows:
        if row["ph"] == "X":
            threads[row["pid"], row["tid"]].append(row)
    return threads


def test_a_virtual_run_s_compute_slots_are_busy_for_the_service_times_and_one_thing_at_a_time() -> None:
    outcome = play(Scenario(1, (1, 2), 1, 2, 6, 0.01, (Fault(0.5, "kill", ("peer-1b",)),), trace=True))
    rows = chrome_trace(outcome.events)["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    for (pid, tid), works in by_thread(rows).items():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 2 for a, b in pairwise(works)), (names[pid], tid)
    computed = [row for row in rows if row.get("cat") == "compute" and names[row["pid"]] == "peer-0a"]
    forwards = [row["dur"] for row in computed if row["name"].startswith("forward ")]
    backwards = [row["dur"] for row in computed if row["name"].startswith("backward ")]
    assert forwards[:12] == pytest.approx([1e6 * FORWARD_S] * 12, abs=2)
    assert backwards[:12] == pytest.approx([1e6 * BACKWARD_S] * 12, abs=2)
    assert [row["name"] for row in computed if row["name"] == "apply"] == ["apply"] * 2
    assert any(row["ph"] == "i" and row["name"] == "peer_down" for row in rows)


def test_what_goes_on_at_the_same_time_is_drawn_below_each_other() -> None:
    def work(begin: float, end: float, index: int) -> SlotWorked:
        return SlotWorked(slot="send", what="forward", step=0, index=index, seconds=end - begin, t=end, peer="a")

    events = [work(1.0, 3.0, 0), work(2.0, 4.0, 1), work(3.0, 5.0, 2), PeerDown("b", "gone", t=2.5, peer="a")]
    rows = chrome_trace(events)["traceEvents"]
    drawn = {row["name"]: (row["tid"], row["ts"], row["dur"]) for row in rows if row["ph"] == "X"}
    first, second = drawn["forward 0/0"][0], drawn["forward 0/1"][0]
    assert drawn == {
        "forward 0/0": (first, 0, 2_000_000),
        "forward 0/1": (second, 1_000_000, 2_000_000),
        "forward 0/2": (first, 2_000_000, 2_000_000),
    }
    assert first != second
    assert chrome_trace([]) == {"traceEvents": [], "displayTimeUnit": "ms"}


@pytest.mark.parametrize("name", ["", "nowhere/out.json"])
def test_where_no_trace_can_be_written_nothing_is_begun(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--trace"):
        check_trace(tmp_path / name)
    check_trace(tmp_path / "out.json")
