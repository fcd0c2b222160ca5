"""Real processes: all peers of a stage die, or the one that collects checkpoints; the result is a single process's, and
it is exported."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from .fleet_run import checkpoint_weights
from .reference import train_plainly
from .test_equivalence import EXACT, facts_of, relative_difference
from .test_survival import command, events_in, of_kind

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("plan", "survivors"),
    [("kill stage1@step8; kill stage1@step9", 2), ("kill peer-0@step8", 3)],
    ids=["stage", "coordinator"],
)
def test_whoever_dies_the_run_ends_with_the_numbers_of_one_process(plan: str, survivors: int, tmp_path: Path) -> None:
    settings = [*EXACT, f"data.cache={tmp_path / 'cache'}", "checkpoint.every=3", "fleet.adopt_after=5"]
    fleet = subprocess.Popen(
        command("run", "--chaos", plan, settings=settings),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    facts, cache = facts_of(tmp_path)
    expected, _ = train_plainly(facts, facts.source(cache))
    out, _ = fleet.communicate(timeout=800)
    assert fleet.returncode == 0, out
    (run,) = (tmp_path / "runs").iterdir()
    assert relative_difference(checkpoint_weights(run), expected) <= 1e-5
    events = events_in(run)
    assert len(of_kind(events, "run_finished")) == survivors
    backs = of_kind(events, "stepped_back")
    assert len(backs) == (survivors if "stage1" in plan else 0)
    for back in backs:
        assert back["lost"] == [1]
        assert 3 <= back["to"] <= back["step"]
        assert back["to"] % 3 == 0
    assert out.count("stage 1 lost all peers: the run steps back ") == ("stage1" in plan), "people are told once"
    assert not list((run / "checkpoints").glob(".step*")), "no part is left over"
    exported = subprocess.run(
        command("export", str(run), "--hf", "model", settings=[]), cwd=tmp_path, capture_output=True, text=True
    )
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "model" / "model.safetensors").is_file()
