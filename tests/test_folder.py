"""Folders of runs: temporary ones go with whoever made them, however that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest

from muletrain.runs.fleet import LocalFleet
from muletrain.runs.folder import LOCK, YOUNG_S

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = """
import sys, time
from pathlib import Path
from muletrain.runs.fleet import LocalFleet
with LocalFleet(Path(sys.argv[1]), 1) as fleet:
    fleet.spawn(["a"])
    print(fleet.pid("a"), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def grown_old(folder: Path) -> None:
    for lock in folder.glob(f"mule-*/{LOCK}"):
        os.utime(lock, (lock.stat().st_mtime - 2 * YOUNG_S,) * 2)


def test_what_a_killed_command_and_its_killed_peers_left_goes_at_the_next_start(
    tmp_path: Path, temporary: Path
) -> None:
    """SIGKILL of both: nobody is left to tidy up. Another command that still runs keeps its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert process.stdout is not None
    os.killpg(int(process.stdout.readline()), signal.SIGKILL)
    process.kill()
    process.communicate(timeout=60)
    (left,) = temporary.iterdir()
    grown_old(temporary)
    with LocalFleet(tmp_path, 1):
        assert not left.exists()
        (going_on,) = temporary.iterdir()
        grown_old(temporary)
        with LocalFleet(tmp_path, 1):
            assert going_on.exists()
    assert list(temporary.iterdir()) == []


def test_only_folders_of_commands_that_are_over_are_removed(tmp_path: Path, temporary: Path) -> None:
    begun, others = temporary / "mule-begun", temporary / "mule-others"
    for folder in (begun, others):
        folder.mkdir()
    (begun / LOCK).touch()  # not locked yet
    (others / "file").touch()  # not a command's
    away = tmp_path / "away"
    away.mkdir()
    (away / LOCK).touch()
    os.utime(away / LOCK, (0, 0))
    (temporary / "mule-link").symlink_to(away)
    with LocalFleet(tmp_path, 1):
        assert begun.exists()
        assert (others / "file").exists()
        assert (away / LOCK).exists()
