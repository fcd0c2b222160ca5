"""A place for checkpoints is a folder, or any store that fsspec can write to (s3://, gcs://, sftp://, memory:// ...).

Parts are written first, and the manifest with the parts' digests last: a checkpoint with a manifest is complete. A
folder's checkpoint gets the final name only then, after all bytes are on the disk. Object stores show only whole files.
Peers that name the same place share all files there.

Calls may wait for the disk or the store, so call through ``CheckpointStore.disk``. All calls raise OSError.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from muletrain.errors import CheckpointError, ConfigError
from muletrain.runtime.core.disk import Disk
from muletrain.wire.statefile import cut

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import IO

    from fsspec import AbstractFileSystem

Sha256 = Field(pattern="^[0-9a-f]{64}$")


class Listed(BaseModel):
    """A file of a checkpoint. ``size``: in bytes; 0: unknown."""

    file: str
    sha256: str = Sha256
    size: int = Field(default=0, ge=0)


class Parts(BaseModel):
    """The identity of a checkpoint, and the parts by stage. More fields are allowed."""

    model_config = ConfigDict(extra="allow")
    step: int = Field(ge=0)
    lineage: str = Field(default="", pattern="^([0-9a-f]{2})*$")
    parts: list[Listed]


class Versioned(BaseModel):
    """The format of a manifest, which determines the other fields."""

    format: int


class Manifest(Parts, Versioned):
    """The fields that every reader of a checkpoint needs."""

    files: list[Listed]
    spec: dict[str, Any]
    config: dict[str, Any]


def read_manifest(text: bytes, expected: int) -> dict[str, Any]:
    """Returns the fields of a manifest. Raises ValueError for a text that is no manifest, even if deeply nested, and
    for a format other than ``expected``."""
    try:
        if (written := Versioned.model_validate_json(text).format) != expected:
            raise ValueError(f"it is written in format {written}, this version reads {expected}")
        Manifest.model_validate_json(text)
    except ValidationError as e:
        first = e.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}") from None
    found: dict[str, Any] = json.loads(text)
    return found


FIRST = bytes(32)
"""Lineage of a checkpoint that was written before the run began, whose manifest names none."""
MANIFEST = "manifest.json"
MARKER = ".place"
"""Name of a file with random text: peers that read the same text share the folder. Host names and paths may be equal on
two machines."""
PIECE = 64 << 20
"""Bytes written or read between two signs that the disk works."""
_NAME = re.compile(r"\.?step-(\d{8,15})(?:-([0-9a-f]{12}))?(\.partial)?$")


class Key(NamedTuple):
    """Names a checkpoint by the number of steps done, and the lineage of the next step, hash(R_{step-1})."""

    step: int
    lineage: bytes

    @property
    def tail(self) -> str:
        """The lineage's last bytes, for file names."""
        return self.lineage[-6:].hex()


class PartFacts(NamedTuple):
    """Size [bytes] and SHA-256 of one stage's part, a safetensors file."""

    size: int
    digest: bytes

    @classmethod
    def of(cls, buffers: Iterable[memoryview]) -> PartFacts:
        """The facts of the file with the content ``buffers``."""
        size, digest = 0, hashlib.sha256()
        for buffer in buffers:
            size += len(buffer)
            digest.update(buffer)
        return cls(size, digest.digest())


class CheckpointStore:
    """A place for checkpoints, in any file system of fsspec. Nothing is renamed there: a folder with a manifest is complete.
    ``keep``: number of newest complete checkpoints to keep. ``disk``: runs the calls."""

    def __init__(self, fs: AbstractFileSystem, root: str, keep: int, url: str = "") -> None:
        self.keep, self.disk = keep, Disk()
        self._fs, self._root, self._url = fs, root, url.rstrip("/")

    @cached_property
    def name(self) -> str:
        """The place's name, the same for all peers that share the place."""
        return hashlib.sha256(self._identity().encode()).hexdigest()[:16]

    def _identity(self) -> str:
        """A text that all peers that share the place see."""
        return self._url

    def write_part(self, key: Key, stage: int, buffers: Iterable[memoryview]) -> None:
        """Write a part of a checkpoint that is not complete yet."""
        self._write(f"{self._open(key)}/{_file(stage)}", buffers)

    def read_part(self, key: Key, stage: int) -> bytes:
        """A part's content, unchecked, also of an incomplete checkpoint."""
        try:
            return self._read(f"{self._open(key)}/{_file(stage)}")
        except FileNotFoundError:
            return self._read(f"{self._complete(key)}/{_file(stage)}")

    def publish(
        self, key: Key, about: Mapping[str, Any], parts: Mapping[int, PartFacts], files: Mapping[str, bytes]
    ) -> set[int]:
        """Complete the checkpoint, with all ``parts`` here, and ``prune``. Returns the stages whose parts are gone, because
        another peer cleaned up; then the checkpoint is not complete. Two peers may publish at once."""
        if key not in self.complete():
            folder = self._open(key)
            gone = {s for s, f in parts.items() if self._size(f"{folder}/{_file(s)}") != f.size}
            if gone:
                return gone
            for name, content in files.items():
                self._write(f"{folder}/{name}", [memoryview(content)])
            listed = [{"file": _file(s), "sha256": f.digest.hex(), "size": f.size} for s, f in sorted(parts.items())]
            named = [{"file": n, "sha256": hashlib.sha256(c).hexdigest()} for n, c in files.items()]
            manifest = {**about, "step": key.step, "lineage": key.lineage.hex(), "parts": listed, "files": named}
            self._write(f"{folder}/{MANIFEST}", [memoryview(json.dumps(manifest, indent=1).encode())])
            self._finish(key)
        self.prune(key)
        return set()

    def complete(self) -> dict[Key, dict[int, PartFacts]]:
        """The complete checkpoints of all writers; unreadable manifests are skipped."""
        found = {}
        for name in self._names():
            match = _NAME.match(name)
            if match is None or match[3]:
                continue
            try:
                manifest = Parts.model_validate_json(self._read(f"{name}/{MANIFEST}"))
                key = Key(manifest.step, bytes.fromhex(manifest.lineage) or FIRST)
                if len(key.lineage) != len(FIRST):
                    continue
                parts = {s: PartFacts(part.size, bytes.fromhex(part.sha256)) for s, part in enumerate(manifest.parts)}
            except (OSError, ValueError):
                continue
            found[key] = parts
        return found

    def drop(self, before: int) -> None:
        """Remove incomplete checkpoints of fewer than ``before`` steps."""
        for name in self._names():
            match = _NAME.match(name)
            if match is not None and int(match[1]) < before and not self._is_complete(name):
                self._remove(name)

    def abandon(self, key: Key) -> None:
        """Remove the checkpoint, unless complete."""
        if not self._is_complete(self._open(key)):
            self._remove(self._open(key))

    def prune(self, newest: Key) -> None:
        """Keep the ``keep`` newest complete checkpoints up to ``newest``; remove older and, before ``newest``,
        incomplete checkpoints."""
        self.drop(newest.step)
        # a resumed run passed over later checkpoints: those must not push out ``newest``
        known = [(int(m[1]), m[0]) for n in self._names() if (m := _NAME.match(n)) and self._is_complete(n)]
        stay = sorted({step for step, _ in known if step <= newest.step})[-self.keep :]
        for step, name in known:
            if step < stay[0]:  # two checkpoints of one step belong to two histories, and both stay
                self._remove(name)

    def _pieces(self, buffers: Iterable[memoryview], file: IO[bytes]) -> Iterator[None]:
        """Write ``buffers``, and yield after each piece."""
        for run in cut(buffers, PIECE):
            for buffer in run:
                file.write(buffer)
            yield
            self.disk.moved()

    def where(self, key: Key) -> str:
        """Path or URL of the complete checkpoint, for people."""
        return f"{self._url}/{self._complete(key)}"

    def _open(self, key: Key) -> str:
        """The folder of an incomplete checkpoint."""
        return f"step-{key.step:08d}-{key.tail}"

    def _complete(self, key: Key) -> str:
        return self._open(key)

    def _is_complete(self, name: str) -> bool:
        return bool(self._fs.exists(f"{self._root}/{name}/{MANIFEST}"))

    def _finish(self, key: Key) -> None:
        """Complete a checkpoint with a written manifest."""

    def _names(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return [path.rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []

    def _write(self, path: str, buffers: Iterable[memoryview]) -> None:
        full = f"{self._root}/{path}"
        self._fs.makedirs(full.rsplit("/", 1)[0], exist_ok=True)
        with self._fs.open(full, "wb") as file:
            for _ in self._pieces(buffers, file):
                pass

    def _read(self, path: str) -> bytes:
        pieces = []
        with self._fs.open(f"{self._root}/{path}", "rb") as file:
            while piece := file.read(PIECE):
                pieces.append(piece)
                self.disk.moved()
        return b"".join(pieces)

    def _size(self, path: str) -> int | None:
        """Size of a file [bytes]; None: missing."""
        self._fs.invalidate_cache()
        try:
            return int(self._fs.size(f"{self._root}/{path}"))
        except FileNotFoundError:
            return None

    def _remove(self, path: str) -> None:
        """Remove a folder, if present."""
        full = f"{self._root}/{path}"
        if self._fs.exists(f"{full}/{MANIFEST}"):  # first: half a folder must not look complete
            self._fs.rm_file(f"{full}/{MANIFEST}")
        if self._fs.exists(full):
            self._fs.rm(full, recursive=True)


class Folder(CheckpointStore):
    """A folder on a local or shared disk. Checkpoints survive power cuts: the final name comes last."""

    def __init__(self, root: Path, keep: int, name: str | None = None) -> None:
        """``name``: identity of the place; default: its marker."""
        super().__init__(LocalFileSystem(), str(root.absolute()), keep)
        self._folder, self._given = root, name

    def _identity(self) -> str:
        """The marker's text; a read-only folder is never shared."""
        if self._given is not None:
            return self._given
        marker, own = self._folder / MARKER, secrets.token_hex(16)
        draft = marker.with_name(f"{MARKER}.{own}")
        try:
            if not marker.exists():
                self._folder.mkdir(parents=True, exist_ok=True)
                draft.write_text(own)
                with suppress(FileExistsError):
                    _link(draft, marker)
            with marker.open("rb") as file:
                found = file.read(2 * len(own))
        except OSError:
            return own
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        if not re.fullmatch(rb"[0-9a-f]{32}|", found):
            raise CheckpointError(f"{marker} is not what muletrain wrote: remove it if no run uses that folder now")
        return found.decode() or own

    def where(self, key: Key) -> str:
        return str(self._folder / self._complete(key))

    def _open(self, key: Key) -> str:
        return f".step-{key.step:08d}-{key.tail}.partial"

    def _complete(self, key: Key) -> str:
        """The second name if that folder exists: then another history, or a damaged folder, has the first name."""
        first, second = self._finals(key)
        return second if (self._folder / second).is_dir() else first

    def _finals(self, key: Key) -> tuple[str, str]:
        return f"step-{key.step:08d}", f"step-{key.step:08d}-{key.tail}"

    def _is_complete(self, name: str) -> bool:
        return not name.endswith(".partial")

    def _finish(self, key: Key) -> None:
        for final in self._finals(key):
            if key in self.complete():  # another coordinator was as fast
                return self._remove(self._open(key))
            try:
                os.replace(self._folder / self._open(key), self._folder / final)
                break
            except OSError:  # the name is taken, or another coordinator has just renamed the folder
                if final == self._finals(key)[-1] and key not in self.complete():
                    raise
        _sync_folder(self._folder)

    def _write(self, path: str, buffers: Iterable[memoryview]) -> None:
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        with partial.open("wb") as file:
            for _ in self._pieces(buffers, file):
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, target)
        _sync_folder(target.parent)

    def _remove(self, path: str) -> None:
        shutil.rmtree(self._folder / path, ignore_errors=True)


PROTOCOLS = ("file", "local", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "sftp", "ssh", "memory")
"""Protocols of URLs that can hold checkpoints. Further protocols of fsspec chain, cache or rewrite (``reference::`` ran
code before fsspec 2026.5)."""


def open_place(url: str, keep: int) -> CheckpointStore:
    """Open the place that ``checkpoint.place`` names. Raises ConfigError for a place that this machine cannot use."""
    protocol, is_url, _ = url.partition("://")
    if "::" in url or (is_url and protocol not in PROTOCOLS):
        raise ConfigError(f"checkpoint.place: {url}: give a folder, or a URL of {', '.join(PROTOCOLS)} without '::'")
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as e:
        raise ConfigError(f"checkpoint.place: {url} cannot be used on this machine: {e}") from e
    return Folder(Path(path), keep) if isinstance(fs, LocalFileSystem) else CheckpointStore(fs, path, keep, url)


def _file(stage: int) -> str:
    return f"stage-{stage}.safetensors"


def _link(file: Path, name: Path) -> None:
    """Give ``file`` a second ``name`` at once: one of several processes succeeds. Raises FileExistsError."""
    try:
        os.link(file, name)
    except FileExistsError:
        raise
    except OSError:  # no links on this file system: another process may read an empty file for a moment
        with name.open("x") as copy:
            copy.write(file.read_text())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
