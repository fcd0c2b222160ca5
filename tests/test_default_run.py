"""What a person sees first: ``muletrain run`` without an option, whole, learns what word counting cannot tell."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def muletrain(*arguments: str, folder: Path) -> str:
    command = [sys.executable, "-m", "muletrain.cli.main", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_run_beats_word_counting(tmp_path: Path) -> None:
    """Validation loss at least 1.5 nats below the unigram's, and below the interpolated bigram's."""
    events = [json.loads(line) for line in muletrain("run", "--json", folder=tmp_path).splitlines()]
    losses = [e["loss"] for e in events if e["kind"] == "step_done"]
    (evaluated,) = [e for e in events if e["kind"] == "evaluated"]
    (run,) = (tmp_path / "runs").iterdir()
    quality = json.loads(muletrain("eval", str(run), "--json", folder=tmp_path))
    seconds = max(e["seconds"] for e in events if e["kind"] == "run_finished")
    print(f"{len(losses)} steps in {seconds:.0f} s (meaningless beside other work); {quality}")
    assert evaluated["step"] == len(losses) == 300
    assert evaluated["loss"] == pytest.approx(quality["loss"], abs=1e-5)
    assert quality["loss"] <= quality["unigram"] - 1.5
    assert quality["loss"] < quality["bigram"]
