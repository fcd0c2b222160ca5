"""Modules and datasets of the user's script, which the run's processes on this machine read from files.

Nobody can import a class of a script or of a notebook's cell. So ``muletrain.api`` pickles the object (``cloudpickle``
writes such classes by value) into RUN/script, where only this user can read, and names it by its content:
``muletrain.script:Net_0123456789abcdef``, with the name of its class. That name is a factory as any other
(``config.trusted``): a process reads the file only if the user of this machine named it, and only if the content has
this digest. A secret key of the user enters the digest, so a run folder that comes from elsewhere brings nothing that
runs. Nothing of it goes to another machine.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PREFIX = f"{__name__}:"
FOLDER = "script"
"""In the run folder, for all that comes from the script."""
KEY = "script.key"
"""File of the user's key, in ~/.local/share/muletrain."""
_NO_WORD = re.compile(r"\W")
_NAME = re.compile(r"\w+_[0-9a-f]{16}")
_folders: list[Path] = []


class Part:
    """Some samples of a dataset."""

    def __init__(self, data: Any, which: Sequence[int]) -> None:
        self._data, self._which = data, which

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, k: int) -> Any:
        return self._data[self._which[k]]


class _Paths:
    """Where the script's process finds modules. Reading this back makes this process look there too, last."""

    def __reduce__(self) -> tuple[Callable[[list[str]], None], tuple[list[str]]]:
        return _look_for_modules, ([os.path.abspath(path) for path in sys.path],)


def _look_for_modules(paths: list[str]) -> None:
    sys.path += [path for path in paths if path not in sys.path]


def script_folder(run: Path) -> Path:
    """The folder for the script's objects in the folder of a run, which this user alone can enter."""
    folder = run / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder.absolute()


def look_in(run: Path) -> None:
    """Find the objects of the run in this folder, or of the run with this checkpoint."""
    look_at(*(str(folder / FOLDER) for folder in (run, run.parent.parent)))


def look_at(*places: str) -> None:
    """Find objects in these folders, as far as they exist."""
    for folder in (Path(place).absolute() for place in places):
        if folder not in _folders and folder.is_dir():
            _folders.append(folder)


def places() -> tuple[str, ...]:
    """The folders in which this process finds objects, for a process of its own."""
    return tuple(map(str, _folders))


def keep(run: Path, kind: str, thing: object) -> str:
    """Write ``thing`` for the processes of the run in this folder. Returns the name of the factory, which begins with
    ``kind``. Raises ConfigError."""
    import pickle

    import torch  # slow to import, and few runs have objects of a script

    try:
        import cloudpickle
    except ImportError:
        raise ConfigError("a module or a dataset of a script travels by cloudpickle; pip install cloudpickle") from None
    folder = script_folder(run)
    partial = folder / ".partial"
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            torch.save((_Paths(), thing), file, pickle_module=cloudpickle, pickle_protocol=pickle.DEFAULT_PROTOCOL)
    except OSError as e:
        raise ConfigError(f"{folder} cannot be written: {e.strerror or e}") from e
    except Exception as e:  # of the user's objects: locks, open files, generators, sockets
        raise ConfigError(
            f"it cannot be copied to the run's processes ({type(e).__name__}: {e}); let it hold no open files, locks, "
            f"threads or generators, or give it by a package: 'mypackage.models:build'"
        ) from e
    name = f"{_NO_WORD.sub('_', kind)}_{_digest(partial)}"  # classes that ``type`` made may have any name
    partial.replace(folder / f"{name}.pt")
    look_in(run)
    return PREFIX + name


def __getattr__(name: str) -> Callable[[], Any]:
    """The factory of this name."""
    if _NAME.fullmatch(name):
        return functools.partial(_read, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _read(name: str) -> Any:
    """The object of this name. Raises ConfigError if no folder has it as it was written."""
    import torch

    path = next((path for folder in _folders if (path := folder / f"{name}.pt").is_file()), None)
    if path is None:
        raise ConfigError(
            f"'{PREFIX}{name}' was built in a script, and its file is in none of the run folders here; call it with the run "
            f"folder that the script made, or begin anew from the script"
        )
    about = path.stat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise ConfigError(
            f"{path}: it runs code when it is read, and others than you can write or read it; if you trust it, make it yours "
            f"(chmod 600)"
        )
    if _digest(path) != name.rpartition("_")[2]:
        raise ConfigError(
            f"{path}: no script of yours wrote this content on this machine; begin a run here from the script, or use a package"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True)[1]
    except (Exception, SystemExit) as e:  # of the user's code
        raise ConfigError(
            f"what the script gave cannot be read in another process ({type(e).__name__}: {e}); the modules that it imports "
            f"must be importable there, too"
        ) from e


def _digest(path: Path) -> str:
    key = _key()
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(key=key, digest_size=8)).hexdigest()


def _key() -> bytes:
    """The user's key; made if there is none. Raises ConfigError."""
    folder = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "muletrain"
    path, partial = folder / KEY, folder / f".{KEY}.{secrets.token_hex(4)}"
    try:
        if not path.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
            with suppress(FileExistsError):  # another process was first
                os.link(partial, path)
            partial.unlink()
        return path.read_bytes()
    except OSError as e:
        raise ConfigError(
            f"{path}: cannot be written ({e.strerror}); set XDG_DATA_HOME to a folder that you can write to"
        ) from e
