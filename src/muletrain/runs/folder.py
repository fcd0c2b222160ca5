"""Run folders: one for each run, under the current directory."""

from __future__ import annotations

import fcntl
import itertools
import os
import platform
import shutil
import stat
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path("runs")
TEMPORARY = "mule-"
"""Prefix of temporary folders. It is short, because paths of sockets must be."""
LOCK = f"lock-{platform.node()}"
"""Lock file in a command's temporary folder. It names the machine: others may share the folder, but not its locks."""
YOUNG_S = 60.0
"""Seconds after its creation in which a folder may still be without its lock."""
WATCH_S = 1.0
"""Seconds between two looks at the disk."""
LEAST_ROOM = 1 << 16
"""Free bytes below which a disk counts as full."""


def new_run_folder(name: str) -> Path:
    """Create ``runs/DATE-NAME`` (with a number behind it if that exists). Raises MuletrainError if it cannot be
    written."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = ROOT / (f"{stamp}-{name}" if number == 1 else f"{stamp}-{name}-{number}")
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
    """Hold the lock ``name`` of a folder; the default one is for writing into a run folder. The lock ends with the
    process, however it ends. Raises MuletrainError with the words ``otherwise`` if another process holds it."""
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


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder for a command's sockets and keys, and for the temporary files of its processes. A killed command
    leaves it behind; the next command on this machine removes each folder whose lock nobody holds."""
    _sweep()
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name, held(Path(name), LOCK):
        yield Path(name)


def _sweep() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*/{LOCK}"):
        with suppress(OSError, MuletrainError):  # removed meanwhile, or in use
            folder = lock.parent.lstat()
            ours = stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.geteuid()
            if ours and time.time() - lock.stat().st_mtime > YOUNG_S:
                with held(lock.parent, LOCK):
                    shutil.rmtree(lock.parent, ignore_errors=True)


class DiskWatch:
    """Notices when the disk of a run folder is full, so that events of the run's processes get lost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._full = False
        self._next = 0.0

    def news(self) -> str | None:
        """A message for people at each change, else None. Looks every ``WATCH_S`` seconds."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + WATCH_S
        try:
            disk = os.statvfs(self._folder)
        except OSError:  # the folder was removed, which fails elsewhere
            return None
        free = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail  # the system reserves some for root
        before, self._full = self._full, free * disk.f_frsize < LEAST_ROOM
        if self._full == before:
            return None
        if not self._full:
            return f"{self._folder}: there is room on the disk again"
        return (
            f"{self._folder}: the disk is full. Training goes on, but checkpoints and messages cannot be written: free "
            f"some space"
        )


def run_folder(path: Path) -> Path:
    """The run folder that ``path`` names: itself, or the one in it whose run was begun or resumed last. Raises
    MuletrainError if there is none."""
    found = [path / "config.toml"] if (path / "config.toml").is_file() else list(path.glob("*/config.toml"))
    if not found:
        raise MuletrainError(
            f"{path}: no run folder (which has a config.toml), and none lies in it; give a folder from {ROOT}/, or call "
            f"'--resume' alone where 'muletrain run' or 'start' was called: it takes the newest run"
        )
    return max(found, key=lambda config: config.stat().st_mtime).parent


def _manifests(path: Path) -> list[Path]:
    """The checkpoints that ``path`` may name, oldest first: itself, or those of a run folder."""
    if (path / "manifest.json").is_file():
        return [path / "manifest.json"]
    return sorted((path / "checkpoints").glob("step-*/manifest.json")) or sorted(path.glob("step-*/manifest.json"))


def has_checkpoint(path: Path) -> bool:
    """Is ``path`` a checkpoint folder, or a run folder with a checkpoint?"""
    return bool(_manifests(path))


def latest_checkpoint(path: Path) -> Path:
    """The checkpoint folder that ``path`` names: itself, or the newest one of a run folder. Raises MuletrainError if
    there is none."""
    if not path.exists():
        raise MuletrainError(f"{path}: no such folder; give that of a run ({ROOT}/...) or of a checkpoint")
    if not (found := _manifests(path)):
        raise MuletrainError(f"{path}: no checkpoint here; give a run folder or a folder with a manifest.json")
    return found[-1].parent
