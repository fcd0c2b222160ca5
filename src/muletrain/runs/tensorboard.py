"""TensorBoard files as a fold over events."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from muletrain import events as ev

if TYPE_CHECKING:
    from pathlib import Path


class TensorBoardSink:
    """Writes loss, learning rate, gradient norm and speed of every step, and evaluations. Call it with each event."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import: only runs that write pay for it

        self._writer = SummaryWriter(str(folder))
        self._step = 0

    def __call__(self, event: ev.Event) -> None:
        if isinstance(event, ev.StepDone) and event.step != self._step:  # two peers may tell of one step
            self._step = event.step
            self._scalars(event, {"train/loss": event.loss, "train/lr": event.lr, "train/grad_norm": event.grad_norm})
            if event.duration_s > 0:
                self._scalars(event, {"speed/tokens_per_s": event.tokens / event.duration_s})
        elif isinstance(event, ev.Evaluated):
            self._scalars(event, {"validation/loss": event.loss, "validation/perplexity": event.perplexity})

    def close(self) -> None:
        """Write what is buffered; idempotent."""
        with suppress(OSError):
            self._writer.close()

    def _scalars(self, event: ev.StepDone | ev.Evaluated, values: dict[str, float]) -> None:
        with suppress(OSError):  # a full disk: the event log says so, and training goes on without these files
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, event.step, walltime=event.t)
