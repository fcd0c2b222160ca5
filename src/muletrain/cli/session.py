"""Peer processes under a console: start them, show what they say, end them in order, report what came out."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from muletrain.cli.console import JsonConsole, LiveConsole, RunView, final_report, make_console
from muletrain.errors import MuletrainError
from muletrain.events import CheckpointWritten, Evaluated, EventLog, EventTail, Note
from muletrain.runs.worker_files import TICKET_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

    from muletrain.events import Event
    from muletrain.runs.chaos import Injector
    from muletrain.runs.fleet import LocalFleet
    from muletrain.runs.quality import Quality
    from muletrain.runs.ticket import Ticket

POLL_S = 0.1
STOP_S = 90.0
"""After asking for an orderly end; a checkpoint may be large, but a person waits."""


class Session:
    """One command's run folder, processes and console. ``console`` prints for people, or JSON lines."""

    def __init__(self, folder: Path, fleet: LocalFleet, *, json: bool) -> None:
        from muletrain.runs.tensorboard import TensorBoardSink

        self.folder, self.fleet, self.json = folder, fleet, json
        self.view = RunView()
        self.console = JsonConsole(self.view) if json else LiveConsole(self.view)
        self.checkpoint: Path | None = None
        self.errors: list[str] = []
        self._tail = EventTail(folder, from_now=True)
        self._board = TensorBoardSink(folder / "tensorboard")
        self._interrupts = 0
        self._asked: float | None = None
        self.chaos: Injector | None = None

    def poll(self) -> None:
        """Take in what the processes said since the last time."""
        for event in self._tail.poll():
            self.show(event)
            if self.chaos is not None:
                self.chaos.see(event)
        if self.chaos is not None:
            self.chaos.tick()

    def show(self, event: Event) -> None:
        self.console(event)
        self._board(event)
        if isinstance(event, CheckpointWritten):
            self.checkpoint = self.folder / "checkpoints" / f"step-{event.step:08d}"
        if isinstance(event, Note) and event.level == "error":
            self.errors.append(f"{event.peer}: {event.message}")

    def say(self, text: str) -> None:
        if not self.json:
            make_console().print(text, soft_wrap=True)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C (or SIGTERM) asks for an orderly end, a second one ends at once."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
            self.end_in_order()

        before = {s: signal.signal(s, interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def end_in_order(self) -> None:
        """What the first Ctrl-C does."""
        self._asked = time.monotonic()
        self.say("\nending the run in order, with a checkpoint; once more to end it at once")
        self.fleet.stop()

    @property
    def interrupted(self) -> bool:
        return self._interrupts > 0

    def watch(self, *, whole: bool = False) -> None:
        """Until every process has ended. A failed one is survived as long as others go on; all failing raises MuletrainError, and so
        does one that fails before a run begins that needs the ``whole`` fleet: the others would wait for it for ever."""
        while self.fleet.alive():
            self.poll()
            if whole and self.view.started is None and any(self.fleet.exit_codes().values()) and not self.interrupted:
                self.fleet.kill()
            if self._asked is not None and time.monotonic() - self._asked > STOP_S:
                self.fleet.kill()
            time.sleep(POLL_S)
        if self.chaos is not None:
            self.chaos.close()
        self.poll()
        codes = self.fleet.exit_codes()
        if all(codes.values()) and not self.interrupted:
            raise MuletrainError("; ".join(self.errors) or f"all peers ended with {codes}; see {self.folder}/*.log")

    def wait_for_ticket(self, founder: str) -> Ticket:
        try:
            return self.fleet.wait_for_ticket(founder, self.poll)
        except MuletrainError as e:
            self.poll()
            raise MuletrainError(self.errors[0] if self.errors else str(e)) from e

    def report(self) -> None:
        """Evaluate the last checkpoint and print the final report (or its events)."""
        evaluation, texts = self._evaluate() if self.checkpoint is not None else (None, [])
        paths = {
            "run folder": self.folder,
            "events": self.folder / "*.jsonl",
            "tensorboard": self.folder / "tensorboard",
        }
        if self.checkpoint is not None:
            paths |= {"checkpoint": self.checkpoint}
        if self.json:
            return
        console = make_console()
        console.print(final_report(self.view, evaluation, texts, paths))
        if self.checkpoint is not None:
            console.print(f'\nmuletrain generate {self.folder} "The "   # more text from this model', soft_wrap=True)
            console.print(f"muletrain export {self.folder} --hf my-model   # take it home", soft_wrap=True)

    def _evaluate(self) -> tuple[Quality, list[str]]:
        import torch

        from muletrain.data.tokens import TokenCache
        from muletrain.runs.checkpoint import Checkpoint
        from muletrain.runs.result import perplexity, quality, samples

        assert self.checkpoint is not None
        torch.set_num_threads(os.cpu_count() or 1)
        checkpoint = Checkpoint.open(self.checkpoint)
        cache = TokenCache.build(checkpoint.config.data, checkpoint.spec.vocab)
        model = checkpoint.model()
        result = quality(checkpoint, model, cache)
        with EventLog(self.folder / "result.jsonl", "result") as log:
            log.subscribe(self.show)
            log.emit(
                Evaluated(
                    step=checkpoint.step, loss=result.loss, perplexity=perplexity(result.loss), tokens=result.tokens
                )
            )
        return result, samples(checkpoint, model)

    def close(self) -> None:
        """End every process and forget the secret."""
        self.fleet.kill()
        self._board.close()
        with suppress(OSError):
            (self.folder / TICKET_FILE).unlink()
