"""A session: the peer processes of this machine in one run, from start to end, in one of three roles. A console shows
the events, if there is one."""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from muletrain.errors import CheckpointError, MuletrainError
from muletrain.events import (
    CheckpointWritten,
    ClientFinished,
    EventLog,
    EventTail,
    Note,
    RunStarted,
    SampleReplaced,
    StageEmpty,
    StepDone,
    SteppedBack,
    Validated,
    events_in,
)
from muletrain.runs.again import resuming
from muletrain.runs.asked import BY_SIGNAL, Asked
from muletrain.runs.folder import DiskWatch, has_checkpoint, latest_checkpoint
from muletrain.runs.metrics import Metrics
from muletrain.runs.sampling import Sampling
from muletrain.runs.view import RunView
from muletrain.runs.worker_files import (
    EXIT_NO_CHECKPOINT,
    EXIT_SKIPPED,
    LEFT,
    OWNER_FILE,
    PROBE_FILE,
    STOP_FILE,
    TICKET_FILE,
)
from muletrain.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from muletrain.config.schema import RunConfig
    from muletrain.events import Event
    from muletrain.runs.chaos import Injector
    from muletrain.runs.fleet import LocalFleet
    from muletrain.runs.join.ticket import Ticket
    from muletrain.runs.measure.quality import Quality
    from muletrain.runs.metrics import MetricsServer
    from muletrain.runs.spec import WorkerSpec
    from muletrain.runs.tensorboard import TensorBoardSink
    from muletrain.runs.trackers import TrackerSink

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

Role = Literal["run", "start", "join"]
"""``run``: all of the run's processes are ours. ``start``: this machine founds the run, and further machines may join.
``join``: this machine serves a run of another owner, and can leave it."""


class Silent:
    """The base of consoles: folds events into ``view``, and shows nothing."""

    def __init__(self, view: RunView) -> None:
        self.view = view

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, event: Event) -> None:
        """Fold and show an event."""
        self.view.fold(event)

    def say(self, text: str) -> None:
        """Tell people; programs get events alone."""


class Limits:
    """The limits of a machine's owner."""

    def __init__(
        self, hours: float | None = None, bandwidth_mbps: float | None = None, pause_file: Path | None = None
    ) -> None:
        self.bandwidth_bytes_per_s = None if bandwidth_mbps is None else bandwidth_mbps * 1e6 / 8
        self._end = None if hours is None else time.monotonic() + hours * 3600
        self._hours, self._pause_file = hours, pause_file

    def share(self, processes: int) -> float | None:
        """The bandwidth of each of ``processes`` on this machine [bytes/s]."""
        return None if self.bandwidth_bytes_per_s is None else self.bandwidth_bytes_per_s / processes

    @property
    def paused(self) -> bool:
        return self._pause_file is not None and self._pause_file.exists()

    def exceeded(self) -> str | None:
        """Why this machine should not train now."""
        if self._end is not None and time.monotonic() >= self._end:
            return f"the {self._hours:g} hours are over"
        return f"{self._pause_file} exists" if self.paused else None

    def wait_until_free(self, say: Callable[[str], None] = lambda text: None) -> bool:
        """Wait while the pause file exists. Returns False when the hours are over."""
        if self.paused:
            say(f"paused: joins when {self._pause_file} is gone")
        while self.paused and (self._end is None or time.monotonic() < self._end):
            time.sleep(POLL_S)
        return self.exceeded() is None


class Session:
    """The run folder, processes and console of this machine in a run."""

    def __init__(
        self,
        role: Role,
        folder: Path,
        fleet: LocalFleet,
        workers: Sequence[WorkerSpec] = (),
        console: Callable[[RunView], Silent] = Silent,
        *,
        stages: int = 0,
        limits: Limits | None = None,
        begun: Callable[[], None] = lambda: None,
        config: RunConfig | None = None,
        metrics: MetricsServer | None = None,
    ) -> None:
        """``workers``: work of our processes; a founder is the first. ``stages``: of a run that only our processes take
        part in. ``limits``: the session leaves when one is reached. ``begun`` is called when the run begins. ``config``:
        of a run that this machine begins, and of no other owner's. ``metrics`` serves this session's. Raises ConfigError
        if a tool of ``logging.to`` does not take the run."""
        self.role, self.folder, self.fleet, self.workers = role, folder, fleet, list(workers)
        self.founder = self.workers[0].name if workers else ""
        """The peer that measures the fleet on request, and begins the run, unless we join one."""
        self._clients = frozenset(worker.name for worker in workers if worker.client and role != "join")
        """Our processes that are none of the run's peers, and end with the run."""
        # a machine that joined gets events of its own peers alone
        earlier = events_in(folder, RunStarted, StepDone, SteppedBack, Validated)
        self.view = RunView(whole=role != "join", earlier=earlier)
        self.console = console(self.view)
        self.checkpoint: Path | None = None
        """The newest checkpoint, in the run folder; one from another place is copied there at the end."""
        self._written = ""
        self._unusable: SampleReplaced | None = None
        """The sample that ended the run."""
        self.errors: dict[str, list[str]] = {}
        """Errors of processes that gave up: names of the processes by message."""
        self._goodbyes: list[str] = []
        """Why our clients ended."""
        self._stages, self._limits, self._begun = stages, limits or Limits(), begun
        self._dismissed: float | None = None
        """Since when only clients and newcomers are left."""
        self._ended: set[str] = set()
        self._lost, self._lost_s = set[str](), 0.0
        """Our processes that failed before the run began, and when the last one did."""
        self._deaths: list[str] = []
        self._tail = EventTail(folder, from_now=True)
        drawn = config is None or "tensorboard" in config.logging.to
        self.board = folder / "tensorboard" if drawn else None
        """The folder of TensorBoard's files."""
        self._sinks = _sinks(folder, config, earlier)
        self._reporters: list[Callable[[Event], None]] = [*self._sinks]
        if metrics is not None:
            own = Metrics([worker.name for worker in self.workers], whole=role != "join", earlier=earlier)
            metrics.show(own)
            self._reporters.append(own)
        self._mourners: list[Callable[[str, str], None]] = []
        self._disk, self._sampling = DiskWatch(folder), Sampling(folder, config)
        self.asked = Asked()
        self._stopped_s: float | None = None
        """When the processes were asked to end."""
        self._paused = False
        """The session leaves because of the owner's pause file."""
        self.chaos: Injector | None = None
        self._waits = False
        """The run waits for a peer of a stage that has none."""

    def observe(self, reporter: Callable[[Event], None], ended: Callable[[str, str], None]) -> None:
        """``reporter`` gets every event from now on. ``ended`` is told about each killed process of ours: its peer's name,
        and how."""
        self._reporters.append(reporter)
        self._mourners.append(ended)

    def begin(self) -> Ticket | None:
        """Assign work to every process; the ticket of a founder admits the others. Returns that ticket; None: no machine
        can join by us."""
        first, *others = self.workers
        self.fleet.begin(first)
        ticket = self._wait_for_ticket() if first.role == "found" and not first.alone else None
        if ticket is not None:
            others = [other.model_copy(update={"ticket": str(ticket)}) for other in others]
        for other in others:
            self.fleet.begin(other)
        if self.chaos is not None:
            like = next(worker for worker in (*reversed(others), first) if not worker.client)
            own = {"role": "join", "ticket": str(ticket), "config": None, "resume": None, "port": 0, "announce": ()}
            self.chaos.newcomer = like.model_copy(update=own)
        return ticket

    def _wait_for_ticket(self) -> Ticket:
        try:
            return self.fleet.wait_for_ticket(self.founder, self.poll)
        except MuletrainError as e:
            self.poll()
            if self.interrupted:
                raise KeyboardInterrupt from e
            raise MuletrainError("; ".join(self.errors) or str(e)) from e

    def poll(self) -> None:
        """Handle the events since the last poll, and the first wish to end."""
        if self._stopped_s is None and (reason := self._reason_to_stop()) is not None:
            self.stop(reason)
        for event in self._tail.poll():
            self.show(event)
            if self.chaos is not None:
                self.chaos.see(event)
        if self.role == "start" and self.founder and (self.folder / PROBE_FILE).exists():
            (self.folder / PROBE_FILE).unlink(missing_ok=True)
            self.fleet.tell(self.founder, "probe")
        if self.chaos is not None:
            self.chaos.tick()
        if (news := self._disk.news()) is not None:
            self._warn(news, "disk")
        if self._stopped_s is None:
            try:
                self._sampling.look(self.checkpoint)
            except OSError as e:  # no memory for another process: the run needs none
                self._warn(f"no text is written while the run trains: {e}", "samples")

    def _reason_to_stop(self) -> str | None:
        """Why the session should end now, as the beginning of a sentence."""
        if self.interrupted:
            by = signal.Signals(self.asked.number)
            return "\n" if by == signal.SIGINT else f"\n{by.name}: "
        if self.role != "join" and (self.folder / STOP_FILE).exists():
            (self.folder / STOP_FILE).unlink(missing_ok=True)
            return "asked by 'muletrain stop' or on the page: "
        if (exceeded := self._limits.exceeded()) is None:
            return None
        self._paused = self._limits.paused
        return f"{exceeded}: "

    def show(self, event: Event) -> None:
        self.console(event)
        self._report(event)
        if isinstance(event, RunStarted):
            self._begun()
        if isinstance(event, CheckpointWritten):
            here, self._written = self.folder / "checkpoints", event.path
            inside = Path(event.path).resolve().parent == here.resolve()
            self.checkpoint = here / (Path(event.path).name if inside else f"step-{event.step:08d}")
        if isinstance(event, ClientFinished):
            self._goodbyes.append(event.reason)
        if isinstance(event, StageEmpty | SteppedBack | StepDone):
            self._waits = isinstance(event, StageEmpty)
        if isinstance(event, SampleReplaced) and event.stops:
            self._unusable = self._unusable or event
        if isinstance(event, Note) and event.level == "error":
            self.errors.setdefault(event.message, []).append(event.peer)

    def _report(self, event: Event) -> None:
        """Pass an event to the tools that show figures. Training goes on whatever they do."""
        for reporter in list(self._reporters):
            try:
                reporter(event)
            except Exception as e:
                self._reporters.remove(reporter)
                self._warn(
                    f"{type(reporter).__name__} failed on a {event.kind} event and gets no more events: {e!r}",
                    "logging",
                )

    def say(self, text: str) -> None:
        """Tell people."""
        self.console.say(text)

    def _warn(self, message: str, peer: str) -> None:
        self.show(Note(level="warning", message=message, t=time.time(), peer=peer))

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within the context, a signal (``Asked``) asks for an orderly end. A second one ends at once: SystemExit. Once
        the processes have ended in order, only the rest of the report is lost: the exit code stays the session's."""
        with self.asked.heard():
            try:
                yield
            except KeyboardInterrupt:
                reports = bool(self.asked.at_once) and not self.fleet.alive()
                if not reports:
                    self.say(self._ended_at_once())
                code = self.exit_code() if reports else BY_SIGNAL + (self.asked.number or signal.SIGINT)
                if code:
                    raise SystemExit(code) from None

    def _ended_at_once(self) -> str:
        """The state after the second Ctrl-C, and how to go on."""
        if self.role == "join":
            return "left at once: the other members will notice that this machine is gone"
        if not self.training:
            return "stopped by the user before the first step"
        at = f"step {self.view.step} of {self.view.steps}"
        return f"stopped by the user at {at}, without a last checkpoint\n{self._command('from the newest one')}"

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint in the run folder, also of earlier processes; None: there is none."""
        return self.checkpoint or (latest_checkpoint(self.folder) if has_checkpoint(self.folder) else None)

    def go_on(self) -> str:
        """The command that continues a run which ended early; empty: all steps are done, or this machine has no
        checkpoint."""
        if self.newest is None or 0 < self.view.steps <= self.view.step:
            return ""
        if self.role != "join":
            at = f" of {self.view.steps}" if self.view.steps else ""
            return self._command(f"after step {self.view.step}{at}")
        if self.checkpoint is None or not self.checkpoint.is_dir():
            return ""
        return self._command(f"after step {int(self.checkpoint.name[5:13])}, with your own data.path")

    def _command(self, whence: str) -> str:
        return f"{self._resuming}   # go on {whence}"

    @property
    def _resuming(self) -> str:
        return resuming(self.folder, "run" if self.role == "run" else "start")

    def stop(self, reason: str = "") -> None:
        """Ask the processes to end in order; a machine that joined only leaves. ``reason``: begins the sentence for
        people."""
        self._stopped_s = time.monotonic()
        if self.role == "join":
            when = "after this step" if self.training else "before the run begins"
            if self.view.started is None and self.view.clients:
                when = "at once"
            self.asked.at_once = () if self.interrupted else (signal.SIGINT,)  # as the sentence says
            self.say(f"{reason}leaving {when}; Ctrl-C leaves at once")
        else:
            what = "after this step; checkpoint and report follow" if self.training else "before the first step"
            self.say(f"{reason}stopping {what} (Ctrl-C again ends at once)")
        self.fleet.stop()

    @property
    def interrupted(self) -> bool:
        return self.asked.number > 0

    @property
    def training(self) -> bool:
        """Has a process of ours begun to train, or to compute for the run?"""
        return self.view.started is not None or len(self.view.clients) > 0

    @property
    def _late(self) -> bool:
        """Does an orderly end take too long? A machine that joined waits for a step, which takes the time it takes, unless
        a signal ended the command that no person can repeat."""
        waits = self.role == "join" and self.training and self.asked.number in (0, signal.SIGINT)
        return self._stopped_s is not None and not waits and time.monotonic() - self._stopped_s > STOP_S

    def watch(self) -> None:
        """Poll until every process has ended. A process may fail before the run begins. A run of our processes alone then
        begins with the rest, if every stage has a peer. Raises MuletrainError if all failed, or the run needs a failed
        one."""
        while alive := self.fleet.alive():
            self.poll()
            self._tell_of_ended()
            self._dismiss(alive)
            begun = not self._stages or self.view.started is not None or self.interrupted
            if self._late:
                newest = (
                    f"the newest checkpoint is {self.checkpoint}"
                    if self.checkpoint
                    else "none was written since the start"
                )
                self._warn(
                    f"the run did not end in order within {STOP_S:.0f} s, so its processes are killed; {newest}", "end"
                )
            if self._late or self._stranded(alive) or not (begun or self._can_begin(alive)):
                self._ended.update(self.fleet.alive())  # we killed these ourselves
                self.fleet.kill()
            time.sleep(POLL_S)
        if self.chaos is not None:
            self.chaos.close()
        self._sampling.close()
        self.poll()
        self._tell_of_ended()
        codes = [code for name, code in self.fleet.exit_codes().items() if name not in self._clients]
        if all(code not in (0, EXIT_NO_CHECKPOINT, EXIT_SKIPPED) for code in codes) and not self.interrupted:
            logs = any(log.stat().st_size for log in self.folder.glob("*.log"))
            more = f"; logs: {self.folder}/*.log" if logs or self.view.started else ""
            raise MuletrainError(f"{self._reasons() or '; '.join(self._deaths) or 'no peer is left'}{more}")

    def _can_begin(self, alive: list[str]) -> bool:
        """Can the run begin with our surviving peers? If some failed, the founder is told to wait only for the
        survivors."""
        lost = {name for name, code in self.fleet.exit_codes().items() if code} - self._clients
        left = [name for name in alive if name not in self._clients]
        if not lost:
            return True
        if self.founder in lost or len(left) < self._stages:
            return False
        if lost != self._lost:
            self._lost, self._lost_s = lost, time.monotonic()
            who = ", ".join(sorted(lost))
            self._warn(f"{who} cannot take part: the run begins with {plural(len(left), 'peer')}", "start")
        self.fleet.tell(self.founder, f"expect {len(left)}")
        waits = " ".join(self.view.missing)
        stuck = "has no peer" in waits and "preparing" not in waits  # the rest serve different stages, for good
        return not stuck or time.monotonic() - self._lost_s < SEATED_S

    def _stranded(self, alive: list[str]) -> bool:
        """Does the run wait for a peer that nobody can bring? All processes of a stage have ended, no machine can join, and
        no planned fault is about one that may."""
        if self.role != "run" or self.chaos is not None or not self._waits or self.view.started is None:
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
            self._dismissed = None
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
                for tell in (self.view.ended, *self._mourners):
                    tell(name, how)
                self._deaths.append(message)
                self._warn(message, name)

    # The end --------------------------------------------------------------------------------------------------------

    def goodbye(self) -> str:
        """How this machine's part in a run of another owner ended."""
        end = self.view.finished
        if self._goodbyes:
            return "; ".join(dict.fromkeys(self._goodbyes))
        if end is not None and end.reason == LEFT:
            return f"left the run in order after step {end.steps}"
        return "left before the run began" if self._stopped_s and not self.training else "the run has ended"

    @property
    def comes_back(self) -> bool:
        """Whether the session left for a pause; the run may continue meanwhile."""
        end = self.view.finished
        return self._paused and (self.view.started is None or (end is not None and end.reason == LEFT))

    def bring_home(self) -> None:
        """Copy the newest checkpoint to the run folder, if written elsewhere."""
        from muletrain.runs.checkpoint import bring_home

        if self.checkpoint is None or self.checkpoint.is_dir():
            return
        try:
            bring_home(self._written, self.checkpoint)
        except CheckpointError as e:
            self._warn(str(e), "result")
            self.checkpoint = None

    def evaluate(self) -> tuple[Quality | None, list[str]]:
        """Quality and samples of the last checkpoint, as far as possible; failures become warnings."""
        from muletrain.runs.result import evaluation

        assert self.checkpoint is not None
        try:
            with EventLog(self.folder / "result.jsonl", "result") as log:
                log.subscribe(self.show)
                try:
                    return evaluation(self.checkpoint, log)
                except KeyboardInterrupt:
                    log.note("the model was not evaluated: interrupted", "warning")
                except (MuletrainError, MemoryError, RuntimeError) as e:  # torch's lack of memory is a RuntimeError
                    log.note(f"the model was not evaluated: {e}", "warning")
        except OSError as e:
            self.say(f"the model was not evaluated: {e}")
        return None, []

    @property
    def unlearned(self) -> bool:
        """Were the run's last updates all skipped?"""
        return EXIT_SKIPPED in self.fleet.exit_codes().values()

    def check(self) -> None:
        """Raises MuletrainError if the run learned nothing at the end, or a sample ended the run, and CheckpointError if
        no checkpoint contains the end of the run."""
        if self.unlearned:
            raise MuletrainError(self.view.skips.why())
        if (found := self._unusable) is not None:
            raise MuletrainError(f"{found.reason}; correct it and --resume {self.folder}, or set data.on_error=skip")
        if EXIT_NO_CHECKPOINT in self.fleet.exit_codes().values():
            newest = (
                f"the newest is {self.checkpoint}"
                if self.checkpoint is not None
                else "none was written since the start"
            )
            raise CheckpointError(
                f"the final checkpoint could not be written, and {newest}; free some space, then continue with "
                f"'{self._resuming}'"
            )

    def exit_code(self) -> int:
        """0 if the run's steps are done; else 128 + the signal that asked for the end, or UNFINISHED where none did
        (train.time_limit, 'muletrain stop'). A machine that joined may leave early."""
        finished = self.view.finished  # events of single steps may be lost, on a full disk
        done = 0 < self.view.steps <= max(self.view.step, finished.steps if finished else 0)
        if self.role != "join" and done:
            return 0
        if self.interrupted:
            return BY_SIGNAL + self.asked.number
        return 0 if self.role == "join" else UNFINISHED

    def close(self) -> None:
        """End every process and delete the secrets."""
        self.fleet.kill()
        self._sampling.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as e:
                self._warn(f"{type(sink).__name__} did not end in order: {e!r}", "logging")
        for secret in (TICKET_FILE, OWNER_FILE, STOP_FILE):
            with suppress(OSError):
                (self.folder / secret).unlink()


def _sinks(folder: Path, config: RunConfig | None, earlier: Sequence[Event]) -> list[TensorBoardSink | TrackerSink]:
    """The tools of ``logging.to``; for another owner's run the default, since only this machine's owner may choose
    others."""
    from muletrain.runs.tensorboard import TensorBoardSink
    from muletrain.runs.trackers import TrackerSink

    sinks = list[TensorBoardSink | TrackerSink]()
    for tool in dict.fromkeys(("tensorboard",) if config is None else config.logging.to):
        if tool == "tensorboard" or config is None:
            sinks.append(TensorBoardSink(folder / "tensorboard", earlier))
        else:
            sinks.append(TrackerSink(tool, folder, config, earlier))
    return sinks
