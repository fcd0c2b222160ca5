"""What happened, as typed events: one JSONL stream per process, which everything that reports is a fold over.

``EventLog`` writes and notifies, ``read_events`` and ``EventTail`` read. An event's ``t`` (wall time [s]) and ``peer``
(name of the process that wrote it) are added by the log. Steps are numbered by the state they lead to: the first is 1.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from muletrain.errors import MuletrainError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_KINDS: dict[str, type[Event]] = {}
_ADAPTERS: dict[str, TypeAdapter[Event]] = {}
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

MAX_WAITING = 4096
"""Events kept for a disk that has no room for them."""

# JSON has no NaN: a diverged loss travels as the text "NaN"
Number = Annotated[float, BeforeValidator(lambda v: _NON_FINITE.get(v, v) if isinstance(v, str) else v)]
TrafficClass = Literal["activation", "gradient", "averaging", "state", "control", "relayed"]
TRAFFIC_CLASSES: tuple[TrafficClass, ...] = ("activation", "gradient", "averaging", "state", "control", "relayed")
"""What a peer sends of its own, and what it carries between two others."""


class EventError(MuletrainError):
    """A line that is no event: not JSON, of unknown kind, or with other fields than its kind has."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base: ``kind`` is the class name in snake case."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    kind: ClassVar[str] = "event"

    t: Number = 0.0
    peer: str = ""

    def __init_subclass__(cls) -> None:
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        _KINDS[cls.kind] = cls

    def to_json(self) -> str:
        """One line of JSON without its line end."""
        return json.dumps({"kind": self.kind, **_plain(dataclasses.asdict(self))}, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """The event ``to_json`` wrote. Raises EventError."""
        event = _parse(line)
        if not isinstance(event, cls):
            raise EventError(f"expected a {cls.kind} event, got {event.kind}")
        return event


@dataclass(frozen=True)
class RunStarted(Event):
    """A process began its part of the run."""

    run_id: str
    config_digest: str
    versions: dict[str, str]
    steps: int
    stages: int
    peers: int
    microbatches: int
    """Per step."""
    tokens_per_step: int
    first_step: int = 0
    """Steps done before, where a run goes on."""


@dataclass(frozen=True)
class PeerJoined(Event):
    """A peer serves a stage from now on."""

    peer_id: str
    name: str
    stage: int
    device: str
    precision: str
    trainer: bool
    params: int
    """Parameters of its stage."""
    threads: int
    chip: str = ""
    """What computes, by its maker's name."""


@dataclass(frozen=True)
class Waiting(Event):
    """The run cannot go on until these have come, e.g. ['a peer for stage 1']."""

    missing: list[str]


@dataclass(frozen=True)
class ProbeProgress(Event):
    """Machines and links are being measured: ``done`` of ``total`` rounds, and what comes next."""

    done: int
    total: int
    what: str


@dataclass(frozen=True)
class FleetMeasured(Event):
    """The fleet file of the machines that are here was written."""

    path: str
    peers: list[str]
    """By name."""
    lacking: list[str]
    """What could not be measured, in words."""


@dataclass(frozen=True)
class ProbeFailed(Event):
    """Nothing was measured."""

    reason: str


@dataclass(frozen=True)
class Admitted(Event):
    """This process let a peer in."""

    peer_id: str


@dataclass(frozen=True)
class JoinRefused(Event):
    """Somebody wanted in and was turned away."""

    remote: str
    reason: str


@dataclass(frozen=True)
class FrameRefused(Event):
    """Something arrived that no correct peer of this run would send."""

    remote: str
    reason: str


@dataclass(frozen=True)
class StepApplied(Event):
    """One peer applied a step. The seconds are those of its compute slot and add up to the step's wall time."""

    step: int
    stage: int
    lineage: str
    """Hash of the step record, hex."""
    skipped: bool
    """The gradient was not finite: weights stayed."""
    microbatches: int
    """Accumulated by this peer."""
    recomputed: int
    """Computed again without accumulating."""
    forward_s: Number
    backward_s: Number
    averaging_s: Number
    apply_s: Number
    wait_s: Number
    """Idle: nothing to compute."""
    sent: dict[str, dict[TrafficClass, int]]
    """Bytes put on the wire since the previous StepApplied, by receiving peer and class."""


@dataclass(frozen=True)
class StepDone(Event):
    """The whole fleet's step, written by one peer."""

    step: int
    loss: Number
    """Mean cross-entropy [nats/token]."""
    grad_norm: Number
    """Global, before clipping."""
    lr: Number
    tokens: int
    duration_s: Number
    lineage: str


@dataclass(frozen=True)
class MicrobatchTaken(Event):
    """A peer admitted a microbatch (with ``fleet.trace``)."""

    step: int
    index: int
    stage: int


@dataclass(frozen=True)
class MicrobatchServed(Event):
    """Its backward is through (with ``fleet.trace``)."""

    step: int
    index: int
    stage: int
    busy_s: Number
    """This peer's own work on it."""


@dataclass(frozen=True)
class SlotWorked(Event):
    """Until ``t``, one of a peer's slots worked (with ``fleet.trace``): 'receive', 'compute', 'send' or 'average'."""

    slot: str
    what: str
    """'forward', 'backward', 'apply', ..., or the kind of the frame that was sent."""
    step: int
    seconds: Number
    index: int = -1
    """The microbatch; -1: it is about the step."""


@dataclass(frozen=True)
class MicrobatchRerouted(Event):
    """A microbatch went to another peer of ``stage`` than the one first chosen."""

    step: int
    index: int
    stage: int
    reason: str


@dataclass(frozen=True)
class PeerSuspected(Event):
    """No more work is sent to a peer until it announces itself again."""

    peer_id: str
    reason: str


@dataclass(frozen=True)
class MemberAdmitted(Event):
    """A peer that joins the running run, or serves another stage from now on, introduced itself."""

    peer_id: str
    name: str
    stage: int


@dataclass(frozen=True)
class PeerLeft(Event):
    """A peer went in order, after ``step``: nobody counts on it any more."""

    peer_id: str
    name: str
    step: int


@dataclass(frozen=True)
class LineageLeft(Event):
    """A partition healed: this peer leaves the history of its side and goes on with the other one, from the state of
    its replicas."""

    forked_at: int
    """The first step that the two sides did differently, from 1."""
    step: int
    """Steps done on this side,"""
    lineage: str
    """and the hash of its last record, hex."""
    to_step: int
    to_lineage: str


@dataclass(frozen=True)
class PeerExpelled(Event):
    """A peer's gradient of ``step`` was not what two others of its stage computed: nobody counts on it any more."""

    peer_id: str
    name: str
    step: int


@dataclass(frozen=True)
class MemberRemoved(Event):
    """The run's owner removed a peer: nothing of it is accepted any more, and nothing is sent to it."""

    peer_id: str
    name: str


@dataclass(frozen=True)
class PeerBanned(Event):
    """This process leaves a peer out, which sent what no correct peer sends, again and again."""

    peer_id: str
    seconds: Number


@dataclass(frozen=True)
class CheckpointWritten(Event):
    """A complete checkpoint is on disk."""

    step: int
    path: str
    bytes: int
    seconds: Number


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """Training goes on without this checkpoint."""

    step: int
    reason: str


@dataclass(frozen=True)
class SteppedBack(Event):
    """Stages lost all their peers: this process begins anew at the newest complete checkpoint, as all do. Steps are
    lost, no numbers."""

    step: int
    """Steps that this process had done; 0: it was coming."""
    to: int
    """Steps in the checkpoint; 0: the beginning."""
    lost: list[int]
    moves: list[str]
    """Who serves another stage from now on."""
    lineage: str


@dataclass(frozen=True)
class Evaluated(Event):
    """The model on the held-out text."""

    step: int
    loss: Number
    """Mean cross-entropy [nats/token]."""
    perplexity: Number
    tokens: int
    """Held-out tokens it was measured on."""
    unigram: Number | None = None
    """Loss of counting tokens, on the same text; None: too little training text to count."""
    bigram: Number | None = None
    """... of counting pairs of them, interpolated with the unigram."""


@dataclass(frozen=True)
class FaultInjected(Event):
    """``--chaos`` did this to peers of a local fleet."""

    what: str
    """'kill', 'freeze', 'corrupt', 'partition' or 'join'."""
    who: list[str]
    """Names."""
    for_s: Number
    """How long it lasts; 0 where that means nothing."""
    planned: str
    """As the plan says it."""
    step: int
    """Steps done by then."""


@dataclass(frozen=True)
class Note(Event):
    """Anything else a person should read."""

    level: Literal["info", "warning", "error"]
    message: str


@dataclass(frozen=True)
class RunFinished(Event):
    """A process ended in order."""

    steps: int
    seconds: Number
    reason: str


class EventLog:
    """Appends events to a JSONL file, a line at a time, and tells subscribers. Thread safe.

    A write that fails (full disk) never reaches the caller: events wait for room, the oldest of too many are dropped
    and counted; subscribers get one Note. A subscriber that raises is removed, with a Note. ``path`` None: subscribers
    only.
    """

    def __init__(self, path: Path | None, peer: str, *, now: Callable[[], float] = time.time) -> None:
        self.path = path
        self.peer = peer
        self.dropped = 0
        """Events that will never be in the file."""
        self._waiting: deque[bytes] = deque()
        self._told = False
        self._now = now
        self._lock = threading.RLock()
        self._subscribers: list[Callable[[Event], None]] = []
        self._file: int | None = None if path is None else _open(path)

    def emit(self, event: Event, peer: str | None = None) -> None:
        """Stamp, write, notify (subscribers are called in this thread, in order; they should be quick). ``peer``: who
        said it, if it is passed on for another process."""
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
        """Returns what to tell people, once, when the file stops taking events."""
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
        message = f"{self.path}: {reason}; events wait for room (the newest {MAX_WAITING} do), training goes on"
        return Note(level="warning", message=message)

    def _write_waiting(self) -> str | None:
        """As many as fit, oldest first; why not all."""
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
        """Half a line may have been written: shrinking works on a full disk."""
        try:
            if self._file is not None and end is not None:
                os.ftruncate(self._file, end)
        except OSError:
            pass  # readers skip the torn line

    def _notify(self, event: Event) -> None:
        for callback in list(self._subscribers):
            try:
                callback(event)
            except Exception as e:  # whatever a reporter does wrong, training goes on
                self._subscribers.remove(callback)
                name = getattr(callback, "__qualname__", type(callback).__name__)
                self.note(f"{name} failed on a {event.kind} event and gets no more: {e!r}", "warning")


def read_events(path: Path) -> Iterator[Event]:
    """Every event of a finished or growing file; a torn last line is left out. Raises EventError with the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield _located(line, f"{path}:{number}")


class EventTail:
    """Follows all ``*.jsonl`` files of a run folder; new files are found as they appear."""

    def __init__(self, folder: Path, *, from_now: bool = False) -> None:
        """``from_now``: what is written already is another process's past."""
        self.folder = folder
        old = folder.glob("*.jsonl") if from_now else ()
        # up to the last whole line: a torn one is cut off when its file is opened again
        self._offsets: dict[Path, int] = {path: path.read_bytes().rfind(b"\n") + 1 for path in old}

    def poll(self) -> list[Event]:
        """What was written since the last poll, in the order of wall time. A line that is no event becomes a Note."""
        events = [event for path in sorted(self.folder.glob("*.jsonl")) for event in self._new(path)]
        return sorted(events, key=lambda e: e.t)

    def _new(self, path: Path) -> Iterator[Event]:
        start = self._offsets.get(path, 0)
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = start + len(whole)
        for line in whole.splitlines():
            try:
                yield _located(line, path.name)
            except EventError as e:
                yield Note(level="warning", message=str(e), t=time.time(), peer=path.stem)


def _open(path: Path) -> int:
    """Opens for appending; half a line left by a killed process is cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    size = os.fstat(file).st_size
    tail = os.pread(file, 1 << 16, max(0, size - (1 << 16)))
    if size and not tail.endswith(b"\n"):
        os.ftruncate(file, size - (len(tail) - tail.rfind(b"\n") - 1))
    return file


def _located(line: bytes, where: str) -> Event:
    try:
        return _parse(line)
    except EventError as e:
        raise EventError(f"{where}: {e}") from None


def _parse(line: str | bytes) -> Event:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise EventError(f"not JSON: {e}") from None
    kind = fields.pop("kind", None) if isinstance(fields, dict) else None
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise EventError(f"unknown event kind {kind!r}; was it written by another version of muletrain?")
    try:
        # by way of JSON again: only there does strict mode take an object for a dataclass
        return _adapter(cls).validate_json(json.dumps(fields))
    except ValidationError as e:
        first = e.errors()[0]
        raise EventError(f"{kind} event: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _adapter(cls: type[Event]) -> TypeAdapter[Event]:
    if cls.kind not in _ADAPTERS:
        _ADAPTERS[cls.kind] = TypeAdapter(cls)
    return _ADAPTERS[cls.kind]


def _plain(value: Any) -> Any:
    """Non-finite floats as text, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
