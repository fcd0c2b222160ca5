"""A session: peer processes with a console, from start to final report."""

from __future__ import annotations

import dataclasses
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.cgroups import cpus
from muletrain.cli.actions.asked import BY_SIGNAL, Asked
from muletrain.cli.show.console import JsonConsole, LiveConsole, RunView, final_report, make_console
from muletrain.cli.show.final_report import improvement
from muletrain.cli.show.measured_fleet import fleet_tables
from muletrain.cli.show.summary import summary_table
from muletrain.config.trusted import trusted
from muletrain.errors import CheckpointError, MuletrainError
from muletrain.events import (
    CheckpointWritten,
    EventLog,
    EventTail,
    FleetMeasured,
    Note,
    RunPrepared,
    RunStarted,
    SampleReplaced,
    StageEmpty,
    StepDone,
    SteppedBack,
    events_in,
)
from muletrain.runs.folder import DiskWatch
from muletrain.runs.worker_files import EXIT_NO_CHECKPOINT, EXIT_SKIPPED, LEFT, OWNER_FILE, PROBE_FILE, TICKET_FILE
from muletrain.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from muletrain.events import Event
    from muletrain.runs.chaos import Injector
    from muletrain.runs.fleet import LocalFleet
    from muletrain.runs.join.ticket import Ticket
    from muletrain.runs.measure.quality import Quality

POLL_S = 0.1
"""Seconds between two looks at processes and events."""
STOP_S = 90.0
"""Longest wait for an orderly end [s]: a checkpoint may be large, but a person waits."""
SEATED_S = 20.0
"""Time after a peer has failed, before the run begins, in which the remaining peers show that every stage is served
[s]."""
UNFINISHED = 3
"""Exit code: the run ended in order before the last step, and no signal asked for that."""
HEARD_S, STOPPED_S = 3.0, 15.0
"""Time after the end of all servers, in which clients learn about the end, and until which clients must end [s]."""


class Session:
    """The run folder, processes and console of one command. ``console`` prints for people, or JSON lines."""

    hears_all = True
    """Whether the events of all peers of the run arrive in the run folder."""

    def __init__(
        self,
        folder: Path,
        fleet: LocalFleet,
        *,
        json: bool,
        clients: Collection[str] = (),
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """``clients``: our processes that are none of the run's peers, and end with the run. ``begun`` is called when
        the run begins."""
        from muletrain.runs.tensorboard import TensorBoardSink

        self.folder, self.fleet, self.json = folder, fleet, json
        self.view = RunView(whole=self.hears_all, earlier=events_in(folder, RunStarted, StepDone, SteppedBack))
        self.console = JsonConsole(self.view) if json else LiveConsole(self.view)
        self.checkpoint: Path | None = None
        """The newest checkpoint, in the run folder; one from another place is copied there at the end."""
        self._written = ""
        self._unusable: SampleReplaced | None = None
        """The sample that ended the run."""
        self.errors: dict[str, list[str]] = {}
        """Errors of processes that gave up: names of the processes by message."""
        self._clients, self._begun = frozenset(clients), begun
        self._dismissed: float | None = None
        """When the last process ended that is no client, and no newcomer."""
        self._ended: set[str] = set()
        self._lost, self._lost_s = set[str](), 0.0
        """Our processes that failed before the run began, and when the last one did."""
        self._deaths: list[str] = []
        self._tail = EventTail(folder, from_now=True)
        self._board = TensorBoardSink(folder / "tensorboard")
        self._disk = DiskWatch(folder)
        self.asked, self._heard = Asked(), False
        self._asked: float | None = None
        self.chaos: Injector | None = None
        self.founder: str | None = None
        """Name of our founding peer, which measures the fleet on request, and admits machines; None: all of the run's
        processes are ours."""
        self._waits = False
        """The run waits for a peer of a stage that has none."""

    def poll(self) -> None:
        """Handle the events since the last poll, and the first signal."""
        if self.interrupted and not self._heard:
            self._heard = True
            self.end_in_order()
        for event in self._tail.poll():
            self.show(event)
            if self.chaos is not None:
                self.chaos.see(event)
        if self.founder is not None and (self.folder / PROBE_FILE).exists():
            (self.folder / PROBE_FILE).unlink(missing_ok=True)
            self.fleet.tell(self.founder, "probe")
        if self.chaos is not None:
            self.chaos.tick()
        if (news := self._disk.news()) is not None:
            self.show(Note(level="warning", message=news, t=time.time(), peer="disk"))

    def show(self, event: Event) -> None:
        self.console(event)
        self._board(event)
        if isinstance(event, RunStarted):
            self._begun()
        if isinstance(event, CheckpointWritten):
            here, self._written = self.folder / "checkpoints", event.path
            inside = Path(event.path).resolve().parent == here.resolve()
            self.checkpoint = here / (Path(event.path).name if inside else f"step-{event.step:08d}")
        if isinstance(event, FleetMeasured) and isinstance(self.console, LiveConsole):
            self.console.console.print(fleet_tables(event))
        if isinstance(event, RunPrepared) and isinstance(self.console, LiveConsole):
            self.console.console.print(summary_table(event))
        if isinstance(event, StageEmpty | SteppedBack | StepDone):
            self._waits = isinstance(event, StageEmpty)
        if isinstance(event, SampleReplaced) and event.stops:
            self._unusable = self._unusable or event
        if isinstance(event, Note) and event.level == "error":
            self.errors.setdefault(event.message, []).append(event.peer)

    def say(self, text: str) -> None:
        """Print to people, above the live view, which would overwrite a second console's text."""
        if isinstance(self.console, LiveConsole):
            self.console.console.print(text, soft_wrap=True, markup=False)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within the context, a signal (``Asked``) asks for an orderly end. A second one ends at once: SystemExit. Only
        the rest of the report is lost."""
        with self.asked.heard():
            try:
                yield
            except KeyboardInterrupt:
                if not self.asked.at_once:
                    self.say(self.ended_at_once())
                    raise SystemExit(BY_SIGNAL + (self.asked.number or signal.SIGINT)) from None

    def ended_at_once(self) -> str:
        """The state after the second Ctrl-C, and how to go on."""
        if self.view.started is None:
            return "stopped by the user before the first step"
        at = f"step {self.view.step} of {self.view.steps}"
        return f"stopped by the user at {at}, without a last checkpoint\n{self._go_on('from the newest one')}"

    def _go_on(self, whence: str) -> str:
        command = "run" if self.founder is None else "start"
        return f"muletrain {command} --resume {self.folder}   # go on {whence}"

    def end_in_order(self) -> None:
        """Ask the processes to end: the first Ctrl-C does so at the next poll."""
        self._asked = time.monotonic()
        training = self.view.started is not None
        what = "after this step; checkpoint and report follow" if training else "before the first step"
        number = self.asked.number or signal.SIGINT
        why = "" if number == signal.SIGINT else f"{signal.Signals(number).name}: "
        self.say(f"\n{why}stopping {what} (Ctrl-C again ends at once)")
        self.fleet.stop()

    @property
    def interrupted(self) -> bool:
        return self.asked.number > 0

    def watch(self, *, first: str = "", stages: int = 0) -> None:
        """Poll until every process has ended. ``first`` founds a run of ``stages`` that only our processes take part
        in: the run begins without processes that fail earlier, if possible. Raises MuletrainError if all failed, or if
        the run needs a failed one."""
        while alive := self.fleet.alive():
            self.poll()
            self._tell_of_ended()
            self._dismiss(alive)
            begun = not first or self.view.started is not None or self.interrupted
            late = self._asked is not None and time.monotonic() - self._asked > STOP_S
            if late:
                self._say_late()
            if late or self._stranded(alive) or not (begun or self._can_begin(first, stages, alive)):
                self._ended.update(self.fleet.alive())  # we killed these ourselves
                self.fleet.kill()
            time.sleep(POLL_S)
        if self.chaos is not None:
            self.chaos.close()
        self.poll()
        self._tell_of_ended()
        codes = [code for name, code in self.fleet.exit_codes().items() if name not in self._clients]
        if all(code not in (0, EXIT_NO_CHECKPOINT, EXIT_SKIPPED) for code in codes) and not self.interrupted:
            raise MuletrainError(
                f"{self._reasons() or '; '.join(self._deaths) or 'no peer is left'}; logs: {self.folder}/*.log"
            )

    def _can_begin(self, first: str, stages: int, alive: list[str]) -> bool:
        """Can the run begin with our surviving peers? If some failed, ``first`` is told to wait only for the
        survivors."""
        lost = {name for name, code in self.fleet.exit_codes().items() if code} - self._clients
        left = [name for name in alive if name not in self._clients]
        if not lost:
            return True
        if first in lost or len(left) < stages:
            return False
        if lost != self._lost:
            self._lost, self._lost_s = lost, time.monotonic()
            message = f"{', '.join(sorted(lost))} cannot take part: the run begins with {plural(len(left), 'peer')}"
            self.show(Note(level="warning", message=message, t=time.time(), peer="start"))
        self.fleet.tell(first, f"expect {len(left)}")
        waits = " ".join(self.view.missing)
        stuck = "has no peer" in waits and "preparing" not in waits  # the rest serve different stages, for good
        return not stuck or time.monotonic() - self._lost_s < SEATED_S

    def _say_late(self) -> None:
        newest = "there is no checkpoint" if self.checkpoint is None else f"the newest checkpoint is {self.checkpoint}"
        message = f"the run did not end in order within {STOP_S:.0f} s, so its processes are killed; {newest}"
        self.show(Note(level="warning", message=message, t=time.time(), peer="end"))

    def _stranded(self, alive: list[str]) -> bool:
        """Does the run wait for a peer that nobody can bring? All processes of a stage have ended, no machine can join, and
        no planned fault is about one that may."""
        ours = self.hears_all and self.founder is None and self.chaos is None
        if not (ours and self._waits) or self.view.started is None:
            return False
        serving = {self.view.peers[name].stage for name in alive if name in self.view.peers}
        return not serving.issuperset(range(self.view.started.stages))

    def _dismiss(self, alive: list[str]) -> None:
        """End the clients once no other process is left: a client that missed the end looks for a server for minutes.
        So does a newcomer to a run that has already ended."""
        end, outside = self.view.finished, set(self._clients)
        if end is not None and end.reason != LEFT:
            outside.update(name for name in alive if name not in self.view.peers)
        if not outside.issuperset(alive):
            return
        self._dismissed = self._dismissed or time.monotonic()
        waited_s = time.monotonic() - self._dismissed
        if waited_s > STOPPED_S:
            self._ended.update(alive)
            self.fleet.kill()
        elif waited_s > HEARD_S:
            self.fleet.stop()

    def _reasons(self) -> str:
        return self.view.named("; ".join(f"{', '.join(peers)}: {text}" for text, peers in self.errors.items()))

    def _tell_of_ended(self) -> None:
        """Report killed processes, which cannot report anything."""
        for name, code in self.fleet.exit_codes().items():
            if code < 0 and name not in self._ended and not self.interrupted:
                self._ended.add(name)
                hint = ": out of memory?" if code == -signal.SIGKILL else ""
                if self.view.faults.killed(name):
                    hint = ", as --chaos planned"
                how = f"was killed by signal {-code} ({signal.strsignal(-code)}){hint}"
                message = f"the process of {name} {how}; log: {self.folder / name}.log"
                self.view.ended(name, how)
                self._deaths.append(message)
                self.show(Note(level="warning", message=message, t=time.time(), peer=name))

    def wait_for_ticket(self, founder: str) -> Ticket:
        try:
            return self.fleet.wait_for_ticket(founder, self.poll)
        except MuletrainError as e:
            self.poll()
            if self.interrupted:
                raise KeyboardInterrupt from e
            raise MuletrainError("; ".join(self.errors) or str(e)) from e

    def report(self) -> None:
        """Evaluate the last checkpoint and print the final report (or the events). Then raises CheckpointError if no
        checkpoint contains the end of the run, and MuletrainError if the run learned nothing at the end."""
        self._report()
        self.check_learned()
        if EXIT_NO_CHECKPOINT in self.fleet.exit_codes().values():
            newest = f"the newest is {self.checkpoint}" if self.checkpoint is not None else "there is none"
            raise CheckpointError(
                f"the final checkpoint could not be written, and {newest}; free some space, then continue with 'muletrain run "
                f"--resume {self.folder}' ('start --resume' for a run on several machines)"
            )

    def check_learned(self) -> None:
        """Raises MuletrainError if the run's last updates were all skipped, or a sample ended the run."""
        if EXIT_SKIPPED in self.fleet.exit_codes().values():
            raise MuletrainError(self.view.skips.why())
        if (found := self._unusable) is not None:
            raise MuletrainError(f"{found.reason}; correct it and --resume {self.folder}, or set data.on_error=skip")

    def _bring_home(self) -> None:
        """Copy the newest checkpoint to the run folder, if written elsewhere."""
        from muletrain.runs.checkpoint import bring_home

        if self.checkpoint is None or self.checkpoint.is_dir():
            return
        try:
            bring_home(self._written, self.checkpoint)
        except CheckpointError as e:
            self.show(Note(level="warning", message=str(e), t=time.time(), peer="result"))
            self.checkpoint = None

    def _report(self) -> None:
        self._bring_home()
        self.asked.at_once = True
        hurries = self.asked.number not in (0, signal.SIGINT)  # a machine that is taken away kills slow processes
        if self.checkpoint is not None and not hurries:
            self.say("measuring the model on held-out data, for a minute or two at most (Ctrl-C leaves that out)")
        evaluation, texts = self._evaluate() if self.checkpoint is not None and not hurries else (None, [])
        paths = {
            "run folder": self.folder,
            "events": self.folder / "*.jsonl",
            "logs": self.folder / "*.log",
            "tensorboard": self.folder / "tensorboard",
        }
        if self.checkpoint is not None:
            paths |= {"checkpoint": self.checkpoint}
        if self.json:
            return
        make_console().print(final_report(self.view, evaluation, texts, paths))
        if self.checkpoint is not None and EXIT_SKIPPED not in self.fleet.exit_codes().values():
            if evaluation is not None and evaluation.before is not None:
                self.say(f"\n{improvement(evaluation)}")
            if evaluation is not None and evaluation.own_loss:
                named = " ".join(f"--factory {name}" for name in trusted())
                self.say(f"\nmuletrain export {self.folder} --hf my-model {named}   # its state_dict")
            else:
                self.say(f'\nmuletrain generate {self.folder} "The "   # more text from this model')
                self.say(f"muletrain export {self.folder} --hf my-model   # for Hugging Face transformers")
            if self.view.step < self.view.steps:
                self.say(self._go_on(f"after step {self.view.step} of {self.view.steps}"))

    def _evaluate(self) -> tuple[Quality | None, list[str]]:
        """Quality and samples of the last checkpoint, as far as possible; failures become warnings."""
        try:
            with EventLog(self.folder / "result.jsonl", "result") as log:
                log.subscribe(self.show)
                try:
                    return self._quality(log)
                except KeyboardInterrupt:
                    log.note("the model was not evaluated: interrupted", "warning")
                except (MuletrainError, MemoryError, RuntimeError) as e:  # torch's lack of memory is a RuntimeError
                    log.note(f"the model was not evaluated: {e}", "warning")
        except OSError as e:
            self.say(f"the model was not evaluated: {e}")
        return None, []

    def _quality(self, log: EventLog) -> tuple[Quality | None, list[str]]:
        import torch

        from muletrain.data.tokens import TokenCache
        from muletrain.runs.checkpoint import Checkpoint
        from muletrain.runs.result import check_memory, evaluated, loss_before, quality, report_tokens, samples

        assert self.checkpoint is not None
        torch.set_num_threads(cpus())
        checkpoint = Checkpoint.open(self.checkpoint)
        check_memory(checkpoint.params)
        cache = checkpoint.corpus()
        if isinstance(cache, TokenCache) and not len(cache.heldout):
            log.note("no text is held out (data.heldout = 0): the model was not measured", "info")
            return None, samples(checkpoint, checkpoint.model())
        tokens, before = report_tokens(checkpoint.spec), None
        try:  # first: both models need not be in memory at once
            before = loss_before(checkpoint, cache, tokens) if isinstance(cache, TokenCache) else None
        except MuletrainError as e:
            log.note(f"the loss before training was not measured: {e}", "warning")
        model = checkpoint.model()
        result = dataclasses.replace(quality(checkpoint, model, cache, tokens), before=before)
        log.emit(evaluated(checkpoint.step, result))
        return result, samples(checkpoint, model)

    def exit(self) -> None:
        """Raises SystemExit, unless the run's steps are done: with 128 + the signal that asked for the end, or UNFINISHED
        where none did (train.time_limit, 'muletrain stop')."""
        finished = self.view.finished  # events of single steps may be lost, on a full disk
        if not 0 < self.view.steps <= max(self.view.step, finished.steps if finished else 0):
            raise SystemExit(BY_SIGNAL + self.asked.number if self.asked.number else UNFINISHED)

    def close(self) -> None:
        """End every process and delete the secrets."""
        self.fleet.kill()
        self._board.close()
        for secret in (TICKET_FILE, OWNER_FILE):
            with suppress(OSError):
                (self.folder / secret).unlink()
