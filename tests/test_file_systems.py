"""Disks and users as they are: file systems without locks, folders that cannot be written, no home, no passwd entry."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from muletrain.cli.actions.opening import Wanted, opened
from muletrain.config.cache import cache_folder
from muletrain.config.model_sections import DataConfig
from muletrain.errors import DataError, MuletrainError, of_the_disk
from muletrain.locks import Lock, lock
from muletrain.runs.folder import held, new_run_folder, temporary_folder
from muletrain.runtime.transfer.messages import Shared
from muletrain.runtime.transfer.tokens import Store


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int, how: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", fail)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_run_goes_on_and_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(Wanted(None, []), "run") as (folder, _), opened(Wanted(None, [], folder), "run"):
        (folder / "peer-0.jsonl").touch()
    assert "has no locks, so make sure yourself" in capsys.readouterr().err.replace("\n", " ")
    with temporary_folder() as first, temporary_folder() as second:
        os.utime(next(first.iterdir()), (0, 0))
        with temporary_folder():
            assert first.is_dir(), "without locks, nobody knows who uses a folder, so nobody removes it"
        assert second.is_dir()
    file = Store(here, 1 << 20).open(Shared(digest=bytes(32), size=10, width=2, heldout=bytes(32)))
    assert file is not None, "tokens can be taken; nobody deletes them"
    os.close(file)


def test_a_lock_that_another_has_is_told_apart_from_none(here: Path) -> None:
    (here / "a").touch()
    with (here / "a").open() as one, (here / "a").open() as other:
        assert lock(one.fileno()) is Lock.HELD
        assert lock(other.fileno()) is lock(other.fileno(), shared=True) is Lock.TAKEN
    with held(here), pytest.raises(MuletrainError, match="going on in another process"), held(here):
        pass


@pytest.mark.parametrize("kind", ["dangling", "file", "loop"])
def test_runs_that_is_no_folder_is_an_error_at_once(here: Path, kind: str) -> None:
    runs = here / "runs"
    if kind == "file":
        runs.touch()
    else:
        runs.symlink_to("runs" if kind == "loop" else "/nowhere/at/all")
    with pytest.raises(MuletrainError, match=r"cannot create the run folder runs/.*-run: runs is a"):
        new_run_folder("run")
    if kind == "dangling":
        with pytest.raises(MuletrainError, match="a link to /nowhere/at/all, which is missing"):
            new_run_folder("run")


def test_a_link_to_a_folder_is_followed_and_names_are_unique(here: Path) -> None:
    (here / "disk").mkdir()
    (here / "runs").symlink_to("disk")
    assert len({new_run_folder("run") for _ in range(3)}) == len(list((here / "disk").iterdir())) == 3


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: object = None) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(DataError, match=r"no home folder.*set data.cache, XDG_CACHE_HOME or HOME"):
        cache_folder(DataConfig())
    assert cache_folder(DataConfig(cache="/data/c")) == Path("/data/c")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_folder(DataConfig()) == Path("/c/muletrain")


def test_no_folder_for_temporary_files_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    with pytest.raises(MuletrainError, match="set TMPDIR"), temporary_folder():
        pass


def test_errors_of_a_disk_are_messages_and_others_are_not() -> None:
    for number, part in (
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "can be written"),
        (errno.EACCES, "this user"),
    ):
        message = of_the_disk(OSError(number, os.strerror(number), "/data/x"))
        assert message is not None
        assert message.startswith("/data/x: ")
        assert part in message
    assert of_the_disk(FileNotFoundError(errno.ENOENT, "gone", "x")) is of_the_disk(ValueError("x")) is None


NOBODY = """
import pwd
def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = getpwuid
"""


def test_a_user_without_name_trains_where_it_may_write_and_is_told_where_not(tmp_path: Path) -> None:
    """As ``docker run --user 54321``: there is no passwd entry, and at first no HOME and no folder to write to."""
    (tmp_path / "sitecustomize.py").write_text(NOBODY)
    (tmp_path / "text.txt").write_text("".join(f"mule {n} carries {n * n} loads\n\n" for n in range(300)))
    small = [
        "model.width=32",
        "model.heads=2",
        "model.layers=2",
        "model.context=16",
        "model.vocab=300",
        "train.steps=2",
    ]
    small += [f"data.path={tmp_path}/text.txt", "fleet.stages=1", "fleet.peers=1", "compute.precision=fp32"]
    words = [w for setting in small for w in ("--set", setting)]

    def said(folder: Path, code: int, **env: str) -> str:
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "muletrain.cli.main", "run", *words],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": path, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        assert done.returncode == code, done.stdout
        assert "Traceback" not in done.stdout
        return done.stdout

    assert "cannot create the run folder" in said(Path("/proc"), 2)
    assert "no home folder" in said(tmp_path, 2)
    assert "2 of 2 steps" in said(tmp_path, 0, HOME=str(tmp_path))
