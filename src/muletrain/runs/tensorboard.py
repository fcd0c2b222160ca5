"""TensorBoard files as a fold over events.

``SummaryWriter`` is not used: that class imports torch, and on a full disk the writer's thread dies after half a
record, at which readers stop.
"""

from __future__ import annotations

import io
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from muletrain.runs.figures import Again, Figures, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from muletrain.events import Event

BY_TOKENS = "tokens"
"""Subfolder, and so TensorBoard's name, of the second run, whose steps are tokens."""


class TensorBoardSink:
    """Writes the figures of every step, of stages and peers, and evaluations. A second run has the curves of the whole
    model against tokens. Call the sink with each event. On a full disk, records are skipped; training goes on, and the
    event log reports the disk."""

    def __init__(self, folder: Path, earlier: Iterable[Event] = ()) -> None:
        """``earlier``: see ``Figures``."""
        self._figures = Figures(earlier)
        self._by_step, self._by_tokens = _Records(folder), _Records(folder / BY_TOKENS)

    def __call__(self, event: Event) -> None:
        self._write(self._figures.fold(event))

    def close(self) -> None:
        """Write the rest, and no later events. Idempotent."""
        self._write(self._figures.rest())
        self._by_step.close()
        self._by_tokens.close()

    def _write(self, rows: Iterator[Row | Again]) -> None:
        for row in rows:
            if isinstance(row, Again):
                self._by_step.again = row.step
                self._by_tokens.again = row.tokens + 1 if row.step else 0
                continue
            self._by_step.add(row.step, row)
            if any(not tag.startswith(("stage/", "peer/")) for tag in row.values):
                self._by_tokens.add(row.tokens, row)


class _Records:
    """The file of one run, which is made with the first record."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"events.out.tfevents.{time.time():.0f}.{os.getpid()}"
        self._file: int | None = None
        self._closed = False
        self.again: int | None = None
        """Readers forget older records of this step and of later ones, in all files of the folder."""

    def add(self, step: int, row: Row) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._closed:
            return
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in row.values.items()])
        with suppress(OSError):
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                self._append(self._file, Event(wall_time=row.t, file_version="brain.Event:2"))
            if self.again is not None:
                begin = SessionLog(status=SessionLog.START)
                self._append(self._file, Event(wall_time=row.t, step=self.again, session_log=begin))
                self.again = None
            self._append(self._file, Event(wall_time=row.t, step=step, summary=summary))

    def close(self) -> None:
        self._closed = True
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, file: int, record: Any) -> None:
        """Append the whole record or nothing. Raises OSError."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        framed = io.BytesIO()
        RecordWriter(framed).write(record.SerializeToString())
        end = os.fstat(file).st_size
        if os.write(file, framed.getvalue()) < len(framed.getvalue()):
            os.ftruncate(file, end)
