"""Run folders: one for each run, under the current directory."""

from __future__ import annotations

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
from muletrain.locks import Lock, lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path("runs")
TEMPORARY = "mule-"
"""Prefix of temporary folders, short since paths of sockets must be."""
LOCK = f"lock-{platform.node()}"
"""Lock file in a command's temporary folder. The name includes the machine: several machines may share the folder, but
not the locks."""
GIVEN = "MULETRAIN_FOLDER"
"""Environment variable: the new run folder, in which a script has put its objects already (``muletrain.api``)."""
YOUNG_S = 60.0
"""Seconds after creation in which a folder may still lack the lock."""
WATCH_S = 1.0
"""Seconds between two looks at the disk."""
SHOWN = 5
"""Runs that a message names."""
LEAST_ROOM = 1 << 16
"""Free bytes below which a disk counts as full."""


def new_run_folder(name: str) -> Path:
    """Create ``runs/DATE-NAME`` (with a number appended if that exists). Raises MuletrainError for a folder that cannot
    be written."""
    if given := os.environ.pop(GIVEN, None):
        return Path(given)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = ROOT / f"{stamp}-{name}"
    try:
        ROOT.mkdir(exist_ok=True)
        for number in itertools.count(2):
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                folder = ROOT / f"{stamp}-{name}-{number}"
    except FileExistsError:
        why = f"a link to {os.readlink(ROOT)}, which is missing" if ROOT.is_symlink() else "a file"
        raise MuletrainError(f"cannot create the run folder {folder}: {ROOT} is {why}; mend or remove it") from None
    except OSError as e:
        raise MuletrainError(
            f"cannot create the run folder {folder}: {e.strerror}; run from a folder you can write to"
        ) from e
    raise AssertionError  # itertools.count does not end


@contextmanager
def held(
    folder: Path, name: str = "lock", otherwise: str = "", say: Callable[[str], None] = lambda text: None
) -> Iterator[Lock]:
    """Hold the lock ``name`` of a folder; the default is for writing into a run folder. The lock ends with the process,
    even after a crash. On a file system without locks, ``say`` gets a message, and nothing is held. Raises
    MuletrainError with the words ``otherwise`` if another process holds the lock, and for a folder that cannot be
    written."""
    try:
        file = os.open(folder / name, os.O_RDONLY | os.O_CREAT, 0o600)
    except OSError as e:
        raise MuletrainError(f"{folder}: cannot be written to: {e.strerror}") from e
    try:
        found = lock(file)
        if found is Lock.TAKEN:
            raise MuletrainError(f"{folder}: {otherwise or 'this run is going on in another process; stop it first'}")
        if found is Lock.NONE:
            say(f"{folder}: its file system has no locks, so make sure yourself that no other process trains there")
        yield found
    finally:
        os.close(file)


def lock_of(folder: Path) -> Lock:
    """The run folder's lock as a process without it finds it: TAKEN: a command serves the run; HELD: it was free; NONE:
    unknown."""
    try:
        file = os.open(folder / "lock", os.O_RDONLY)
    except OSError:
        return Lock.NONE
    try:
        return lock(file, shared=True)
    finally:
        os.close(file)


def is_held(folder: Path) -> bool:
    """Does a process hold the run folder's lock?"""
    return lock_of(folder) is Lock.TAKEN


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder for a command's sockets and keys, and for the temporary files of its processes. A killed command
    leaves the folder behind; the next command on this machine removes each folder without a held lock."""
    try:
        made = tempfile.TemporaryDirectory(prefix=TEMPORARY)
    except OSError as e:
        raise MuletrainError(
            f"no folder for temporary files can be written ({e.strerror}); set TMPDIR to one, with a short path"
        ) from e
    _sweep()
    with made as name, held(Path(name), LOCK):
        yield Path(name)


def _sweep() -> None:
    for file in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*/{LOCK}"):
        with suppress(OSError, MuletrainError):  # removed meanwhile, or in use
            folder = file.parent.lstat()
            ours = stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.geteuid()
            if ours and time.time() - file.stat().st_mtime > YOUNG_S:
                with held(file.parent, LOCK) as found:
                    if found is Lock.HELD:
                        shutil.rmtree(file.parent, ignore_errors=True)


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


def run_folder(path: Path, say: Callable[[str], None] = lambda text: None) -> Path:
    """The run folder that ``path`` names: ``path`` itself, or the subfolder with the run that was begun or resumed last
    and has done a step, or else the newest. ``say`` gets a message for each newer folder that is passed over. Raises
    MuletrainError if no folder is found."""
    if _last_used(path) is not None:
        return path
    found = sorted(((t, f) for f in path.glob("*/") if (t := _last_used(f)) is not None), reverse=True)
    for _, folder in found:
        if _has_steps(folder):
            return folder
        say(f"{folder}: no step was done there; passed over")
    if found:
        return found[0][1]  # the newest run begins again
    raise MuletrainError(
        f"{path}: no run folder (with a config.toml or checkpoints/), nor does it contain one; give a run's folder, or call '--resume' "
        f"alone where 'muletrain run' or 'start' was called: it takes the newest run of {ROOT}/{_beside(path)}"
    )


def _beside(path: Path) -> str:
    """The newest runs in the folder that should hold ``path``, in words."""
    found = sorted(((t, f) for f in path.parent.glob("*/") if (t := _last_used(f)) is not None), reverse=True)
    return f"; there are: {', '.join(str(folder) for _, folder in found[:SHOWN])}" if found else ""


def _last_used(folder: Path) -> float | None:
    """The time at which the run in ``folder`` was begun or resumed, or, on a joined machine, of the newest checkpoint
    [s]; None: no run folder."""
    for files in ([folder / "config.toml"], (folder / "checkpoints").glob("step-*/manifest.json")):
        if times := [file.stat().st_mtime for file in files if file.is_file()]:
            return max(times)
    return None


def _has_steps(folder: Path) -> bool:
    """Is there a checkpoint in the run folder, or was at least one step done without a checkpoint?"""
    from muletrain.events import StepDone, events_in

    return any((folder / "checkpoints").glob("step-*/manifest.json")) or bool(events_in(folder, StepDone))


def _manifests(path: Path) -> list[Path]:
    """The checkpoints that ``path`` may name, oldest first: ``path`` itself, or the checkpoints in a run folder."""
    if (path / "manifest.json").is_file():
        return [path / "manifest.json"]
    return sorted((path / "checkpoints").glob("step-*/manifest.json")) or sorted(path.glob("step-*/manifest.json"))


def has_checkpoint(path: Path) -> bool:
    """Is ``path`` a checkpoint folder, or a run folder with a checkpoint?"""
    return bool(_manifests(path))


def latest_checkpoint(path: Path) -> Path:
    """The checkpoint folder that ``path`` names: ``path`` itself, or the newest checkpoint of a run folder. Raises
    MuletrainError if no checkpoint is found."""
    if not path.exists():
        raise MuletrainError(f"{path}: no such folder; give that of a run or of a checkpoint{_beside(path)}")
    if not (found := _manifests(path)):
        raise MuletrainError(
            f"{path}: no checkpoint here (manifest.json), nor a model of Hugging Face (config.json); give a run folder"
        )
    return found[-1].parent
