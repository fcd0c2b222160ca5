"""The processes of a test."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def working_in(folder: Path) -> list[int]:
    """All processes but this one that were started in ``folder``: commands, peers, daemons. (They have sessions of their
    own, and no parent once that is killed.)"""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):  # it ended, or is someone else's
            if process.name.isdecimal() and os.readlink(process / "cwd") == str(folder.resolve()):
                found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


def wait_for_none_in(folder: Path, most_s: float) -> None:
    """Wait until no process works in ``folder``."""
    until = time.monotonic() + most_s
    while left := working_in(folder):
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.1)
