"""The timing constants stand in the order that docs/timing.md gives reasons for, its tables are those of the code, and no
wait ends only after itself."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from muletrain.policy.deadline import Deadline
from muletrain.runtime.core import times
from muletrain.runtime.core.plan import Plan
from muletrain.runtime.members import rebalancing, watchdog
from muletrain.runtime.members.detector import FailureDetector
from muletrain.runtime.peer import peer
from muletrain.runtime.recovery import forks, rollback

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def timings() -> Any:
    spec = importlib.util.spec_from_file_location("timings", ROOT / "scripts" / "timings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_code(timings: Any) -> None:
    text = (ROOT / "docs" / "timing.md").read_text(encoding="utf-8")
    assert text == timings.page(text), "run scripts/timings.py"
    rows = [line for line in timings.table_of_constants().splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    assert not [row for row in rows if row.endswith("|  |")], "each says what it bounds"


def test_no_wait_ends_only_after_itself(timings: Any) -> None:
    found = timings.all_waits()
    assert len(found) > 40
    assert [w.where for w in found if not w.after and not re.search("within|cancelled", w.says)] == []
    known = {w.where for w in found}
    assert [(w.where, name) for w in found for name in w.after if name not in known] == []
    assert timings.cycle(found) == []


A_WAIT = """
async def {}(self):
    \"""Waits. {}.\"""
    await self.done.wait()
"""


@pytest.mark.parametrize(
    ("ends", "circle"),
    [
        ("Ends after ``room/b.second``", ["room/a.first", "room/b.second"]),
        ("Ends after ``room/b.second``, or within a minute", []),
        ("Ends after ``room/b.third``", []),
    ],
)
def test_a_wait_that_ends_only_after_itself_is_found(timings: Any, ends: str, circle: list[str]) -> None:
    second = A_WAIT.format("second", "Ends after ``room/a.first``") + A_WAIT.format("third", "Ends when cancelled")
    found = [
        *timings.waits("room/a", ast.parse(A_WAIT.format("first", ends))),
        *timings.waits("room/b", ast.parse(second)),
    ]
    assert len(found) == 3
    assert timings.cycle(found) == circle


def test_each_level_waits_until_the_one_below_it_has_had_its_time() -> None:
    nothing: Any = None
    answer = FailureDetector(nothing).deadline
    for _ in range(100):
        answer.measured(0.0)
    levels_s = [
        times.LAG_S,
        answer.seconds(),
        times.AGAIN_S,
        Plan.adopt_after_s,
        times.GONE_S,
        times.PATIENCE_S,
        rollback.JOIN_S,
    ]
    assert levels_s == sorted(levels_s)
    assert answer.seconds() < Deadline().seconds() < times.PATIENCE_S
    assert watchdog.hung_s(0.0) < 2 * times.PATIENCE_S, "missing microbatches outlast a hung device (step.reruns)"


def test_promises_outlast_the_questions_that_rely_on_them() -> None:
    assert forks.STAY > forks.ASK
    assert peer.HOLDS_S > 2 * peer.ANNOUNCE_S
    assert rebalancing.KEPT_MAX_S < 120.0, "what the directory keeps at most"
