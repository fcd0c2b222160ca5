"""Writes and reads events in a JSONL file per process."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, Self

from muletrain.events.event import Event, EventError, parse, parse_own
from muletrain.events.notices import Note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MAX_WAITING = 4096
"""Most events that wait for room on a full disk."""


class EventLog:
    """A log that appends events to a JSONL file, line by line, and notifies subscribers. Thread safe.

    The caller never sees a failed write (full disk): events wait for room, the oldest are dropped and counted if too
    many wait, and subscribers get one Note. A subscriber that raises is removed, with a Note. ``path`` None: no file.
    """

    def __init__(self, path: Path | None, peer: str, *, now: Callable[[], float] = time.time) -> None:
        self.path = path
        self.peer = peer
        self.dropped = 0
        """Number of events that were lost."""
        self._waiting: deque[bytes] = deque()
        self._told = False
        self._now = now
        self._lock = threading.RLock()
        self._subscribers: list[Callable[[Event], None]] = []
        self._file: int | None = None if path is None else _open(path)

    def emit(self, event: Event, peer: str | None = None) -> None:
        """Stamp, write and notify. Subscribers are called in this thread, in order, and should be quick. ``peer``: name
        of the process that the event comes from; default: this one."""
        with self._lock:
            stamped = dataclasses.replace(event, t=self._now(), peer=peer or self.peer)
            trouble = self._write(stamped)
            self._notify(stamped)
            if trouble is not None:
                self._notify(dataclasses.replace(trouble, t=stamped.t, peer=self.peer))

    def note(self, message: str, level: Literal["info", "warning", "error"] = "info") -> None:
        """Emit a Note."""
        self.emit(Note(level=level, message=message))

    def subscribe(self, callback: Callable[[Event], None]) -> None:
        """``callback`` gets every event from now on."""
        with self._lock:
            self._subscribers.append(callback)

    def close(self) -> None:
        """Close the file; later events go to subscribers only. Idempotent."""
        with self._lock:
            if self._file is not None:
                self._write_waiting()
                os.close(self._file)
            self._file = None
            self.dropped += len(self._waiting)
            self._waiting.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, event: Event) -> Note | None:
        """Returns a Note for people when the file first stops taking events."""
        if self._file is None:
            return None
        self._waiting.append(event.to_json().encode() + b"\n")
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self.dropped += 1
        reason = self._write_waiting()
        if reason is None or self._told:
            return None
        self._told = True
        message = f"{self.path}: {reason}; training continues, and the newest {MAX_WAITING} events wait for room"
        return Note(level="warning", message=message)

    def _write_waiting(self) -> str | None:
        """Write as many as fit, oldest first. Returns why not all."""
        assert self._file is not None
        while self._waiting:
            end: int | None = None
            try:
                end = os.fstat(self._file).st_size
                if os.write(self._file, self._waiting[0]) < len(self._waiting[0]):
                    self._tear_off(end)
                    return "no space for a whole line"
            except OSError as e:
                self._tear_off(end)
                return e.strerror or str(e)
            self._waiting.popleft()
        return None

    def _tear_off(self, end: int | None) -> None:
        """Remove half a line, if one was written; truncating works on a full disk."""
        try:
            if self._file is not None and end is not None:
                os.ftruncate(self._file, end)
        except OSError:
            pass  # readers skip the torn line

    def _notify(self, event: Event) -> None:
        for callback in list(self._subscribers):
            try:
                callback(event)
            except Exception as e:  # training continues whatever a reporter does
                self._subscribers.remove(callback)
                name = getattr(callback, "__qualname__", type(callback).__name__)
                self.note(f"{name} failed on a {event.kind} event and gets no more events: {e!r}", "warning")


def read_events(path: Path) -> Iterator[Event]:
    """Every event of a file, which may still grow; a torn last line is left out. Raises EventError with the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield _located(line, f"{path}:{number}")


def events_in(folder: Path, *kinds: type[Event]) -> list[Event]:
    """The events of ``kinds`` in all files of a run folder, by wall time. Lines that are no event are left out."""
    begins = tuple(f'{{"kind": "{kind.kind}"'.encode() for kind in kinds)
    found = list[Event]()
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as file:
            for line in file:
                if line.startswith(begins):  # most are of different kinds, and parsing takes long
                    with suppress(EventError):
                        found.append(parse(line))
    return sorted(found, key=lambda e: e.t)


class EventTail:
    """Follows all ``*.jsonl`` files of a run folder, including new ones."""

    def __init__(
        self, folder: Path, *, from_now: bool = False, own: bool = False, skip: tuple[type[Event], ...] = ()
    ) -> None:
        """``from_now``: skip earlier events. ``own``: processes of this machine wrote the files (``parse_own``). ``skip``:
        kinds to leave out."""
        self.folder = folder
        self._parse = parse_own if own else parse
        self.skip = skip
        old = folder.glob("*.jsonl") if from_now else ()
        # to the last whole line: the writer cuts off a torn one
        self._offsets: dict[Path, int] = {path: path.read_bytes().rfind(b"\n") + 1 for path in old}

    def poll(self) -> list[Event]:
        """New events since the last poll, by wall time. A line that is no event becomes a Note."""
        events = [event for path in sorted(self.folder.glob("*.jsonl")) for event in self._new(path)]
        return sorted(events, key=lambda e: e.t)

    def _new(self, path: Path) -> Iterator[Event]:
        start = self._offsets.get(path, 0)
        if path.stat().st_size <= start:
            return
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = start + len(whole)
        skip = tuple(f'{{"kind": "{kind.kind}"'.encode() for kind in self.skip)
        for line in whole.splitlines():
            if skip and line.startswith(skip):
                continue
            try:
                yield _located(line, path.name, self._parse)
            except EventError as e:
                yield Note(level="warning", message=str(e), t=time.time(), peer=path.stem)


def _open(path: Path) -> int:
    """Open for appending, and cut off half a line that a killed process left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    size = os.fstat(file).st_size
    tail = os.pread(file, 1 << 16, max(0, size - (1 << 16)))
    if size and not tail.endswith(b"\n"):
        os.ftruncate(file, size - (len(tail) - tail.rfind(b"\n") - 1))
    return file


def _located(line: bytes, where: str, read: Callable[[bytes], Event] = parse) -> Event:
    try:
        return read(line)
    except EventError as e:
        raise EventError(f"{where}: {e}") from None
