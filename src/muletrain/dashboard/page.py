"""The state of one run that the page shows: a fold over the run's events, and nothing else."""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from muletrain import events as ev
from muletrain.dashboard.curve import Curve
from muletrain.dashboard.frames import Frames
from muletrain.dashboard.health import Facts, answering, health
from muletrain.runs.view import GONE, RunView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MARKS = 2000
"""Most events on the event line; the oldest are dropped and counted."""
TEXT = 240
"""Most characters of a sentence on the page."""
LINKED = 64
"""Most peers whose single links are shown."""
TARGETS = 8
"""Most links of a peer to the next stage, and to other peers."""
PAST = 0.8
"""Weight of the past in recent figures: about the last five steps."""
SECONDS = ("forward_s", "backward_s", "averaging_s", "apply_s", "wait_s")
"""Kinds of a step's time, as fields of ``StepApplied``."""
DECIDED = {
    "train.steps": "steps",
    "train.batch": "batch",
    "train.microbatch": "microbatch",
    "optimizer.lr": "lr",
    "optimizer.warmup": "warmup",
    "compute.precision": "precision",
    "fleet.stages": "stages",
}
"""Fields of a configuration that a run may decide differently (``train.epochs``, a resume), as fields of
``RunPrepared``."""
RECENT = 200
"""Steps over which the usual speed is measured."""

KINDS: dict[type[ev.Event], str] = {
    ev.PeerJoined: "joined",
    ev.ClientBegan: "joined",
    ev.PeerDown: "lost",
    ev.ClientLost: "lost",
    ev.StageEmpty: "lost",
    ev.PeerLeft: "left",
    ev.ClientFinished: "left",
    ev.PeerMoved: "moved",
    ev.CheckpointWritten: "checkpoint",
    ev.CheckpointFailed: "warning",
    ev.JoinRefused: "refused",
    ev.FrameRefused: "refused",
    ev.PeerBanned: "refused",
    ev.MemberRemoved: "kicked",
    ev.PeerExpelled: "kicked",
    ev.SteppedBack: "back",
    ev.LineageLeft: "back",
    ev.FaultInjected: "fault",
    ev.Validated: "heldout",
    ev.Evaluated: "heldout",
    ev.RunStarted: "run",
}
"""Kinds of marks on the event line; others are 'warning' or 'note'."""
UNMARKED = (ev.StepApplied, ev.StepDone)
"""Events of every step, which are no marks."""


@dataclass
class Load:
    """Recent figures of a peer, with decaying weights."""

    seconds: list[float] = field(default_factory=lambda: [0.0] * len(SECONDS))
    weight: float = 0.0
    microbatches: float = 0.0
    params: int = 0
    memory: int = 0
    """By estimate, for its stage."""
    used: int = 0
    chip: str = ""
    sent: dict[str, float] = field(default_factory=dict)
    """Bytes by receiver's id."""
    under_way: set[tuple[int, int]] = field(default_factory=set)
    """Step and index of the microbatches that the peer has (with ``fleet.trace``)."""

    def fold(self, event: ev.StepApplied) -> None:
        new = 1 - PAST
        self.weight = PAST * self.weight + new
        now = (event.forward_s, event.backward_s, event.averaging_s, event.apply_s, event.wait_s)
        if math.isfinite(sum(now)):
            self.seconds = [PAST * before + new * value for before, value in zip(self.seconds, now, strict=True)]
        self.microbatches = PAST * self.microbatches + new * event.microbatches
        sent = {peer: PAST * size for peer, size in self.sent.items() if size > 1000}
        for peer, classes in event.sent.items():
            sent[peer] = sent.get(peer, 0.0) + new * sum(classes.values())
        self.sent = sent
        if self.under_way:
            self.under_way = {key for key in self.under_way if key[0] >= event.step}

    def per_s(self, amount: float) -> float | None:
        """A recent sum per second."""
        total = sum(self.seconds)
        return number(amount / total) if total else None

    @property
    def busy(self) -> float | None:
        """Share of the time in which the peer did not wait."""
        total = sum(self.seconds)
        return round(1 - self.seconds[-1] / total, 3) if total else None


class RunPage:
    """A fold over one run's events. Thread safe."""

    def __init__(
        self,
        name: str,
        folder: str = "",
        *,
        whole: bool = True,
        config: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
        ticket: bool = False,
        owned: Callable[[], bool] = lambda: False,
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        """``whole``: see ``RunView``. ``config``: fields by dotted name. ``clock``: of the events. ``ticket``: other
        machines can join. ``owned``: whether this machine may remove peers now; ``stops``: whether it may stop the run."""
        self.name, self.folder, self.config = name, folder, dict(config or {})
        self.clock, self.live, self.loading, self.ticket, self.owned = clock, True, False, ticket, owned
        self.stops = stops
        self.frames = Frames()
        self.curve = Curve()
        self.version = 0
        """Number of events folded."""
        self.marks: deque[dict[str, Any]] = deque(maxlen=MARKS)
        self.marked = 0
        """Number of marks, dropped ones included."""
        self._whole = whole
        self._view = RunView(whole=whole)
        self._loads: dict[str, Load] = {}
        self._places: dict[str, int] = {}
        """Stage by peer's id."""
        self._links: dict[tuple[int, int], dict[str, int]] = {}
        """Bytes by stages of sender and receiver (-1: unknown), and kind."""
        self._prepared: ev.RunPrepared | None = None
        self._checkpoints: dict[int, dict[str, Any]] = {}
        self._heldout: dict[int, list[float | None]] = {}
        self._samples: deque[dict[str, Any]] = deque(maxlen=50)
        self._speeds: deque[float] = deque(maxlen=RECENT)
        self._skips: deque[bool] = deque(maxlen=10)
        self._last: ev.StepDone | None = None
        self._first_t = self._last_t = 0.0
        self._lock = threading.RLock()

    # Events -----------------------------------------------------------------------------------------------------------

    def __call__(self, event: ev.Event) -> None:
        """Take in an event."""
        with self._lock:
            if self.frames.times and self.frames.due(event.t) and event.t > self._last_t:
                self.frames.take(self._last_t, self._frame, hurry=self.loading)
            self._fold(event)
            self.version += 1
            self._first_t = event.t if self.version == 1 else self._first_t
            self._last_t = max(self._last_t, event.t)
            if not self.frames.times:
                self.frames.take(event.t, self._frame, hurry=self.loading)

    def ended(self, name: str, how: str) -> None:
        """The process of the peer ``name`` on this machine was killed: ``how``."""
        with self._lock:
            self._view.ended(name, how)
            self.version += 1

    def _fold(self, event: ev.Event) -> None:
        self._restart(event)
        peer = self._view.peers.get(getattr(event, "name", "")) if isinstance(event, ev.PeerDown) else None
        was = peer.state if peer is not None else ""
        news = self._view.fold(event)
        if peer is not None and peer.state != was:
            news = True  # the same words as at an earlier loss
        self._take(event, news)
        if news and not isinstance(event, UNMARKED):
            self._mark(event, self._view.headline(event))
        for text in self._view.asides:
            self._add_mark(event.t, "lost" if " is gone" in text else "note", text)
        self._view.asides.clear()

    def _restart(self, event: ev.Event) -> None:
        """The run goes on in new processes, whether or not the old ones had a last word: keep the knowledge of its
        steps. A command's first event is its plan; a folder that lacks that event still has the new processes' run id."""
        before = self._view
        if before.started is None or not isinstance(event, ev.RunPrepared | ev.RunStarted):
            return
        if isinstance(event, ev.RunPrepared) or event.run_id != before.started.run_id:
            self._view = RunView(whole=self._whole)
            self._view.pace, self._view.validated = before.pace, before.validated
            self._cut(event.first_step)

    def _cut(self, step: int) -> None:
        """Steps after ``step`` will be taken again."""
        self.curve.cut(step)
        self._heldout = {of: row for of, row in self._heldout.items() if of <= step}

    def _take(self, event: ev.Event, news: bool) -> None:
        match event:
            case ev.StepApplied():
                self._applied(event)
            case ev.StepDone() if news:
                self._done(event)
            case ev.PeerJoined():
                self._places[event.peer_id] = event.stage
                load = self._load(event.peer or event.name)
                load.params, load.memory, load.chip = event.params, event.memory, event.chip
                load.under_way = set()
            case ev.MicrobatchTaken():
                self._load(event.peer).under_way.add((event.step, event.index))
            case ev.MicrobatchServed():
                self._load(event.peer).under_way.discard((event.step, event.index))
            case ev.FaultInjected(what="kill"):
                for name in event.who:
                    self._view.ended(name, "killed by --chaos")
            case ev.SteppedBack() if news:
                self._cut(event.to)
            case ev.Validated() | ev.Evaluated():
                self._heldout[event.step] = [event.step, round(event.t, 2), number(event.loss), self._view.pace.tokens]
            case ev.CheckpointWritten():
                about = {"step": event.step, "t": event.t, "path": event.path, "bytes": event.bytes}
                self._checkpoints[event.step] = {**about, "seconds": number(event.seconds)}
            case ev.RunPrepared():
                self._prepared = event
            case ev.Sampled():
                texts = [text[:2000] for text in event.texts]
                self._samples.append({"step": event.step, "t": event.t, "texts": texts})
            case _:
                pass

    def _load(self, peer: str) -> Load:
        return self._loads.setdefault(peer, Load())

    def _applied(self, event: ev.StepApplied) -> None:
        self._load(event.peer).fold(event)
        self._load(event.peer).used = event.memory
        for receiver, classes in event.sent.items():
            link = self._links.setdefault((event.stage, self._places.get(receiver, -1)), {})
            for kind, size in classes.items():
                link[kind] = link.get(kind, 0) + size

    def _done(self, event: ev.StepDone) -> None:
        self._last = event
        self._skips.append(math.isnan(event.grad_norm))
        if event.duration_s > 0:
            self._speeds.append(event.tokens / event.duration_s)
        tokens = self._view.pace.tokens
        self.curve.add(event.step, event.t, tokens, event.loss, event.tokens, event.duration_s)

    def _mark(self, event: ev.Event, text: str) -> None:
        if isinstance(event, ev.RunFinished):
            text = f"{event.peer} ended after step {event.steps}: {event.reason}"
        kind = KINDS.get(type(event), "warning" if event.is_warning() else "note")
        if text:
            self._add_mark(event.t, kind, text, event.peer)

    def _add_mark(self, t: float, kind: str, text: str, peer: str = "") -> None:
        self.marked += 1
        mark = {"n": self.marked, "t": round(t, 2), "step": self._view.step, "kind": kind, "text": text[:TEXT]}
        self.marks.append({**mark, "peer": peer[:128]})

    # The state --------------------------------------------------------------------------------------------------------

    def sections(self) -> dict[str, Any]:
        """The state now, by section; curves and marks aside."""
        with self._lock:
            return self._sections(self.clock() if self.live else self._last_t)

    def peers(self) -> dict[str, dict[str, Any]]:
        """The peers now, by key."""
        with self._lock:
            return self._peers()

    def growing(self) -> tuple[Curve, list[dict[str, Any]]]:
        """Curve and marks, which mostly grow at the end."""
        return self.curve, list(self.marks)

    def locked(self) -> threading.RLock:
        """Hold this to read several parts of one state."""
        return self._lock

    def _frame(self) -> bytes:
        state = {**self._sections(self._last_t, past=True), "peers": self._peers()}
        return json.dumps(state, separators=(",", ":")).encode()

    def _sections(self, now: float, *, past: bool = False) -> dict[str, Any]:
        view = self._view
        usual = statistics.median(self._speeds) if len(self._speeds) >= 10 else math.nan
        live = True if past else self.live
        command = self._prepared.command if self._prepared is not None else "run" if self._whole else "start"
        facts = Facts(self.folder, live, usual, sum(self._skips), self.ticket, command)
        found: dict[str, Any] = {
            "head": self._head(now),
            "health": health(view, now, facts)._asdict(),
            "stages": self._stages(),
            "links": [{"from": a, "to": b, "bytes": kinds} for (a, b), kinds in sorted(self._links.items())[:400]],
            "clients": self._clients(),
        }
        if not past:
            found |= {
                "run": self._about(),
                "heldout": list(self._heldout.values()),
                "checkpoints": [*self._checkpoints.values()][-50:],
                "samples": list(self._samples),
            }
        return found

    def _about(self) -> dict[str, Any]:
        started, prepared = self._view.started, self._prepared
        about: dict[str, Any] = {"name": self.name, "folder": self.folder, "whole": self._whole, "live": self.live}
        about |= {"owned": self.owned(), "stops": self.stops(), "loading": self.loading}
        decided = {} if prepared is None else {key: str(getattr(prepared, name)) for key, name in DECIDED.items()}
        about["config"] = {key: decided.get(key, value) for key, value in self.config.items()}
        if started is not None:
            keys = ("run_id", "steps", "stages", "params", "microbatches", "tokens_per_step", "first_step")
            about |= {key: getattr(started, key) for key in keys}
        if prepared is not None:
            told = ("data", "model", "strategy", "optimizer", "lr", "precision", "batch", "context", "epochs")
            about |= {f"of_{key}": getattr(prepared, key) for key in told}
        return about

    def _head(self, now: float) -> dict[str, Any]:
        view, last = self._view, self._last
        return {
            "t": round(self._last_t, 2),
            "first_t": round(self._first_t, 2),
            "step": view.step,
            "steps": view.steps,
            "loss": number(view.pace.loss),
            "tokens": view.pace.tokens,
            "tokens_per_s": number(view.pace.tokens_per_s(now)),
            "trained_s": number(view.pace.seconds),
            "left_s": number(view.pace.seconds_left(view.steps, now)),
            "lr": number(last.lr) if last else None,
            "grad_norm": number(last.grad_norm) if last else None,
            "skipped": len(view.skips),
            "rerouted": view.rerouted,
            "recomputed": sum(peer.recomputed for peer in view.peers.values()),
            "sent": sum(sum(kinds.values()) for kinds in self._links.values()),
        }

    def _stages(self) -> list[dict[str, Any]]:
        keys = {stage: list[str]() for stage in self._view.stages()}
        for key, peer in self._view.peers.items():
            keys[peer.stage].append(key)
        return [self._stage(stage, of_stage) for stage, of_stage in sorted(keys.items())]

    def _stage(self, stage: int, keys: list[str]) -> dict[str, Any]:
        peers = [self._view.peers[key] for key in keys]
        present = [self._load(key) for key, peer in zip(keys, peers, strict=True) if answering(peer)]
        loads = [load for load in present if load.weight]
        times = [sum(load.seconds[k] / load.weight for load in loads) for k in range(len(SECONDS))]
        rate = sum(load.per_s(load.microbatches) or 0.0 for load in loads)
        return {
            "stage": stage,
            "states": dict(Counter(shown_state(peer.state) for peer in peers)),
            "seconds": [number(seconds / max(1, len(loads))) for seconds in times],
            "microbatches_per_s": number(rate) if loads else None,
            "params": max((load.params for load in present), default=0),
        }

    def _peers(self) -> dict[str, dict[str, Any]]:
        few = len(self._view.peers) <= LINKED
        return {key: self._peer(key, peer, few) for key, peer in self._view.peers.items()}

    def _peer(self, key: str, peer: Any, linked: bool) -> dict[str, Any]:
        load = self._load(key)
        found: dict[str, Any] = {
            "name": peer.name,
            "id": peer.peer_id,
            "stage": peer.stage,
            "state": shown_state(peer.state),
            "why": peer.state,
            "device": load.chip or peer.device,
            "precision": peer.precision,
            "trainer": peer.trainer,
            "step": peer.step,
            "microbatches": peer.microbatches,
            "per_s": load.per_s(load.microbatches),
            "busy": load.busy,
            "params": load.params,
            "memory": load.memory,
            "used": load.used,
            "parts": peer.parts,
            "recomputed": peer.recomputed,
            "send": load.per_s(sum(load.sent.values())),
            "under_way": len(load.under_way),
        }
        if linked:
            most = sorted(load.sent.items(), key=lambda item: -item[1])
            onward = [item for item in most if self._places.get(item[0]) == peer.stage + 1][:TARGETS]
            rest = [item for item in most if item not in onward][:TARGETS]
            found["to"] = {self._view.name_of(to): load.per_s(size) for to, size in onward + rest}
        return found

    def _clients(self) -> list[dict[str, Any]]:
        return [
            {"name": c.name, "stage": stage, "state": c.state, "parts": c.parts, "late": c.late, "redone": c.redone}
            for stage, clients in self._view.clients.by_stage().items()
            for c in clients[:256]
        ]


def shown_state(state: str) -> str:
    """A state of ``PeerView`` as one of: joining, ready, training, silent, gone, finished."""
    if state == "suspected":
        return "silent"
    return "gone" if state in GONE else state


def number(value: float) -> float | None:
    """``value`` with six significant digits; None if it is not finite, which JSON cannot say."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
