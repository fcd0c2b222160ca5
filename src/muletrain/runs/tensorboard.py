"""TensorBoard files as a fold over events.

``SummaryWriter`` is not used: that class imports torch, and on a full disk the writer's thread dies after half a
record, at which readers stop.
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
    """Writes loss, learning rate, gradient norm and speed of every step, and evaluations. Call the sink with each
    event. On a full disk, records are skipped; training goes on, and the event log reports the disk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"events.out.tfevents.{time.time():.0f}.{os.getpid()}"
        self._file: int | None = None
        self._closed = False
        self._step = 0

    def __call__(self, event: ev.Event) -> None:
        if isinstance(event, ev.StepDone) and event.step != self._step:  # two peers may report one step
            self._step = event.step
            scalars = {"train/loss": event.loss, "train/lr": event.lr, "train/grad_norm": event.grad_norm}
            if event.duration_s > 0:
                scalars["speed/tokens_per_s"] = event.tokens / event.duration_s
            self._write(event, scalars)
        elif isinstance(event, ev.Evaluated | ev.Validated):
            more = {} if event.perplexity is None else {"validation/perplexity": event.perplexity}
            self._write(event, {"validation/loss": event.loss, **more})

    def close(self) -> None:
        """Write no later events. Idempotent."""
        self._closed = True
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, event: ev.StepDone | ev.Evaluated | ev.Validated, values: dict[str, float]) -> None:
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
        """Append the whole record or nothing. Raises OSError."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        framed = io.BytesIO()
        RecordWriter(framed).write(record.SerializeToString())  # type: ignore[attr-defined]  # protobuf without types
        end = os.fstat(file).st_size
        if os.write(file, framed.getvalue()) < len(framed.getvalue()):
            os.ftruncate(file, end)
