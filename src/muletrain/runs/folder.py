"""Run folders: one per run, under the current directory, never another run's."""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path("runs")


def new_run_folder(name: str, root: Path = ROOT) -> Path:
    """Create ``runs/DATE-NAME`` (with a number behind it if that exists). Raises MuletrainError where nothing can be written."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = root / (f"{stamp}-{name}" if number == 1 else f"{stamp}-{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as e:
            raise MuletrainError(
                f"cannot create the run folder {folder}: {e.strerror}; run from a folder you can write to"
            ) from e
        return folder
    raise AssertionError  # itertools.count does not end


@contextmanager
def held(folder: Path, name: str = "lock", otherwise: str = "") -> Iterator[None]:
    """Nobody else writes into this run folder (or does what the file ``name`` stands for) meanwhile; the lock goes with the
    process, however it ends. Raises MuletrainError, saying ``otherwise``."""
    file = os.open(folder / name, os.O_RDONLY | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            problem = otherwise or "this run is going on in another process; stop it first"
            raise MuletrainError(f"{folder}: {problem}") from None
        yield
    finally:
        os.close(file)


def latest_checkpoint(path: Path) -> Path:
    """The checkpoint folder ``path`` means: itself, or the newest of a run folder. Raises MuletrainError if there is none."""
    if (path / "manifest.json").is_file():
        return path
    found = sorted((path / "checkpoints").glob("step-*/manifest.json")) or sorted(path.glob("step-*/manifest.json"))
    if not found:
        raise MuletrainError(f"{path}: no checkpoint here; give a run folder or a folder with a manifest.json")
    return found[-1].parent
