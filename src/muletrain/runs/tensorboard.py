"""TensorBoard files as a fold over events.

Written here record by record, not by ``SummaryWriter``: that one imports torch, and a full disk ends its thread with a
traceback and leaves half a record behind, after which readers stop.
"""

from __future__ import annotations

import io
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from muletrain import events as ev

if TYPE_CHECKING:
    from pathlib import Path


class TensorBoardSink:
    """Writes loss, learning rate, gradient norm and speed of every step, and evaluations. Call it with each event.

    What a full disk does not take is left out: the event log says so, and training goes on."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"events.out.tfevents.{time.time():.0f}.{os.getpid()}"
        self._file: int | None = None
        self._closed = False
        self._step = 0

    def __call__(self, event: ev.Event) -> None:
        if isinstance(event, ev.StepDone) and event.step != self._step:  # two peers may tell of one step
            self._step = event.step
            scalars = {"train/loss": event.loss, "train/lr": event.lr, "train/grad_norm": event.grad_norm}
            if event.duration_s > 0:
                scalars["speed/tokens_per_s"] = event.tokens / event.duration_s
            self._write(event, scalars)
        elif isinstance(event, ev.Evaluated):
            self._write(event, {"validation/loss": event.loss, "validation/perplexity": event.perplexity})

    def close(self) -> None:
        """Idempotent; later events are not written."""
        self._closed = True
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, event: ev.StepDone | ev.Evaluated, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._closed:
            return
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        with suppress(OSError):
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                self._append(self._file, Event(wall_time=event.t, file_version="brain.Event:2"))
            self._append(self._file, Event(wall_time=event.t, step=event.step, summary=summary))

    def _append(self, file: int, record: object) -> None:
        """A whole record, or nothing of it. Raises OSError."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        framed = io.BytesIO()
        RecordWriter(framed).write(record.SerializeToString())  # type: ignore[attr-defined]  # protobuf without types
        end = os.fstat(file).st_size
        if os.write(file, framed.getvalue()) < len(framed.getvalue()):
            os.ftruncate(file, end)
