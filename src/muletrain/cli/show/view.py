"""A fold over a run's events: progress, loss, speed, the state of each peer, warnings."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from muletrain import events as ev
from muletrain.cli.show.injected_faults import FaultsView
from muletrain.units import format_bytes, format_count, format_duration, plural

SMOOTHING = 0.9
"""Weight of the past in the shown loss: about the last ten steps."""
WINDOW = 20
"""Steps over which speed is measured."""
FORGOTTEN = 20
"""Steps after which a suspected peer is no longer shown."""
FINAL = frozenset(
    {"expelled", "removed", "ended"}
)  # states that nothing ends: what such a peer said last may come late
GONE = FINAL | {"left", "replaced"}  # states of peers of which nothing more is to be expected


@dataclass
class PeerView:
    """One peer, from its own events and the suspicions of others. Totals are since the start of the run."""

    name: str
    peer_id: str = ""
    stage: int = -1
    device: str = "?"
    precision: str = "?"
    trainer: bool = False
    params: int = 0
    threads: int = 0
    state: str = "joining"
    suspected_at: int = 0
    """Step of the run at which it became suspected."""
    step: int = 0
    microbatches: int = 0
    recomputed: int = 0
    compute_s: float = 0.0
    averaging_s: float = 0.0
    apply_s: float = 0.0
    wait_s: float = 0.0
    sent: dict[str, Counter[str]] = field(default_factory=dict)
    """Bytes by receiver (name if known) and traffic class."""

    @property
    def total_s(self) -> float:
        """Wall time of the steps this peer applied [s]."""
        return self.compute_s + self.averaging_s + self.apply_s + self.wait_s

    @property
    def idle_share(self) -> float:
        """Share of that time without anything to compute; NaN before the first step."""
        return self.wait_s / self.total_s if self.total_s else math.nan

    def sent_bytes(self, kind: str | None = None) -> int:
        """Bytes sent, of one traffic class or of all."""
        return sum(sum(c.values()) if kind is None else c[kind] for c in self.sent.values())


@dataclass
class ClientView:
    """One client (strategy ``hub``), from its own events and those of its servers."""

    name: str
    stage: int = -1
    state: str = "working"
    parts: int = 0
    late: int = 0
    redone: int = 0


class RunView:
    """The state of a run after the events folded so far."""

    def __init__(self, *, whole: bool = True) -> None:
        """``whole``: events of all peers arrive, so a stage without events has no peer."""
        self.whole = whole
        self.started: ev.RunStarted | None = None
        self.finished: ev.RunFinished | None = None
        self.evaluated: ev.Evaluated | None = None
        self.checkpoint: ev.CheckpointWritten | None = None
        self.peers: dict[str, PeerView] = {}
        """By ``Event.peer``: the name that a peer began with, even if the run renamed it. A peer whose name another one
        took over: by id."""
        self.clients: dict[str, ClientView] = {}
        """By name."""
        self.missing: list[str] = []
        self.probing: ev.ProbeProgress | None = None
        """Set while machines and links are measured."""
        self.warnings: Counter[str] = Counter()
        self.rerouted = 0
        self.faults = FaultsView(self.name_of)
        self.step = 0
        self.last: ev.StepDone | None = None
        self._by_id: dict[str, PeerView] = {}
        self._tokens: dict[int, int] = {}  # of each step
        self._begin, self._end = math.inf, -math.inf  # of all steps, wall time [s]
        self._loss = 0.0
        self._weight = 0.0
        self._recent: deque[ev.StepDone] = deque(maxlen=WINDOW)
        self._seen: set[tuple[int, str]] = set()
        self._back = ""
        """Lineage of the last step back."""

    @property
    def steps(self) -> int:
        """Planned steps of the run; 0: not known yet."""
        return self.started.steps if self.started else 0

    @property
    def loss(self) -> float:
        """Smoothed training loss [nats/token]; NaN before the first step."""
        return self._loss / self._weight if self._weight else math.nan

    @property
    def tokens(self) -> int:
        """Tokens of all steps up to the current one. A step that was done twice counts once."""
        return sum(tokens for step, tokens in self._tokens.items() if step <= self.step)

    @property
    def seconds(self) -> float:
        """Time from the start of the first step to the end of the last, including waits [s]."""
        return max(0.0, self._end - self._begin) if self._tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Speed of the whole fleet over the last steps; NaN before the first step."""
        seconds = sum(e.duration_s for e in self._recent)
        return sum(e.tokens for e in self._recent) / seconds if seconds else math.nan

    @property
    def seconds_left(self) -> float:
        """Time to the end at the speed of the last steps; NaN before the first step."""
        if not self._recent:
            return math.nan
        return max(0, self.steps - self.step) * sum(e.duration_s for e in self._recent) / len(self._recent)

    def stages(self, *, present: bool = False) -> dict[int, list[PeerView]]:
        """Peers by stage, both in order. Empty stages are included if events of all peers arrive. ``present``: without
        peers that are gone."""
        count = self.started.stages if self.started and self.whole else 0
        found: dict[int, list[PeerView]] = {s: [] for s in range(count)}
        for peer in sorted(self.peers.values(), key=lambda p: (p.stage, p.name)):
            if not (present and self._has_gone(peer)):
                found.setdefault(peer.stage, []).append(peer)
        return found

    def gone(self) -> int:
        """Number of peers that are gone."""
        return sum(map(self._has_gone, self.peers.values()))

    def _has_gone(self, peer: PeerView) -> bool:
        return peer.state in GONE or (peer.state == "suspected" and self.step - peer.suspected_at > FORGOTTEN)

    def ended(self, name: str) -> None:
        """Note that the process of the peer ``name`` was killed."""
        if name in self.peers:
            self.peers[name].state = "ended"
        if name in self.clients:
            self.clients[name].state = "ended"

    def name_of(self, peer_id: str) -> str:
        """A peer's name; before it has joined, the end of its id (all ids begin alike)."""
        known = self._by_id.get(peer_id) or self.peers.get(peer_id)
        is_id = len(peer_id) > 40 and peer_id.isalnum()  # base58 of a key, not an address
        return known.name if known is not None else f"..{peer_id[-8:]}" if is_id else peer_id

    def tokens_per_microbatch(self) -> float:
        """Tokens of a microbatch at full sequence length."""
        return self.started.tokens_per_step / max(1, self.started.microbatches) if self.started else math.nan

    def fold(self, event: ev.Event) -> bool:
        """Fold one event. Returns False if it is no news: a repeated warning, or a step reported twice."""
        self.faults.fold(event)
        match event:
            case ev.RunStarted():
                news, self.started = self.started is None, self.started or event
                return news
            case ev.PeerJoined():
                self._join(event)
            case ev.Waiting():
                news = event.missing != self.missing
                self.missing = event.missing
                return news
            case ev.ProbeProgress():
                news, self.probing = event.done == 0, event
                return news
            case ev.FleetMeasured() | ev.ProbeFailed():
                self.probing = None
            case ev.ClientBegan() | ev.ClientEnlisted():
                self._client(event.name, event.stage).state = "working"
            case ev.ClientLost():
                self._client(event.name).state = "gone"
            case ev.ClientFinished():
                self._client(event.peer).state = "finished"
            case ev.PoolWorked():
                self._pool(event)
            case ev.StepApplied():
                self._apply(event)
            case ev.StepDone():
                return self._done(event)
            case ev.PeerSuspected():
                self._suspect(event)
            case ev.MicrobatchRerouted():
                self.rerouted += 1
            case ev.PeerLeft():
                self._gone(event.peer_id, "left")
            case ev.PeerExpelled():
                self._gone(event.peer_id, "expelled")
            case ev.MemberRemoved():
                self._gone(event.peer_id, "removed")
            case ev.CheckpointWritten():
                self.checkpoint = event
            case ev.SteppedBack():
                news, self._back = event.lineage != self._back, event.lineage
                return news
            case ev.Evaluated():
                self.evaluated = event
            case ev.RunFinished():
                self._finish(event)
            case _:
                pass
        return self._warn(event)

    def _warn(self, event: ev.Event) -> bool:
        if not is_warning(event):
            return True
        message = headline(event, self) or event.kind
        self.warnings[message] += 1
        return self.warnings[message] == 1

    def _join(self, event: ev.PeerJoined) -> None:
        teller = event.peer or event.name
        before = self.peers.get(teller)
        if before is not None and before.peer_id not in ("", event.peer_id):
            self._set_aside(self.peers.pop(teller))
        peer = self._by_id[event.peer_id] = self.peers.setdefault(teller, PeerView(event.name))
        for key in ("peer_id", "name", "stage", "device", "precision", "trainer", "params", "threads"):
            setattr(peer, key, getattr(event, key))
        peer.state = "ready"
        self.missing = []

    def _client(self, name: str, stage: int | None = None) -> ClientView:
        client = self.clients.setdefault(name, ClientView(name))
        client.stage = client.stage if stage is None else stage
        return client

    def _pool(self, event: ev.PoolWorked) -> None:
        for name, counts in event.clients.items():
            client = self._client(name, event.stage)
            client.parts += counts.get("parts", 0)
            client.late += counts.get("late", 0)
            client.redone += counts.get("redone", 0)

    def helping(self) -> dict[int, list[ClientView]]:
        """Clients by stage, both in order."""
        found: dict[int, list[ClientView]] = {}
        for client in sorted(self.clients.values(), key=lambda c: (c.stage, c.name)):
            found.setdefault(client.stage, []).append(client)
        return found

    def _set_aside(self, peer: PeerView) -> None:
        """Rename a peer whose name another one took over."""
        self.peers[peer.peer_id] = peer
        peer.name = f"{peer.name} ({peer.peer_id[-8:]})"
        peer.state = peer.state if peer.state in GONE else "replaced"

    def _gone(self, peer_id: str, state: str) -> None:
        if peer_id in self._by_id:
            self._by_id[peer_id].state = state

    def _apply(self, event: ev.StepApplied) -> None:
        peer = self.peers.setdefault(event.peer, PeerView(event.peer))
        peer.stage, peer.step = event.stage, event.step
        peer.state = peer.state if peer.state in FINAL else "training"
        peer.microbatches += event.microbatches
        peer.recomputed += event.recomputed
        peer.compute_s += event.forward_s + event.backward_s
        peer.averaging_s += event.averaging_s
        peer.apply_s += event.apply_s
        peer.wait_s += event.wait_s
        for receiver, classes in event.sent.items():
            peer.sent.setdefault(receiver, Counter()).update(classes)

    def _done(self, event: ev.StepDone) -> bool:
        if (event.step, event.lineage) in self._seen:  # two peers may both report it
            return False
        self._seen.add((event.step, event.lineage))
        self.step, self.last, self.missing = event.step, event, []
        self._tokens[event.step] = event.tokens
        self._begin, self._end = min(self._begin, event.t - event.duration_s), max(self._end, event.t)
        self._recent.append(event)
        if math.isfinite(event.loss):
            self._loss = SMOOTHING * self._loss + (1 - SMOOTHING) * event.loss
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        return True

    def _suspect(self, event: ev.PeerSuspected) -> None:
        peer = self._by_id.get(event.peer_id)
        if peer is not None and peer.state != "suspected" and peer.state not in GONE:
            peer.state, peer.suspected_at = "suspected", self.step

    def _finish(self, event: ev.RunFinished) -> None:
        self.finished = event
        if event.peer in self.peers:
            self.peers[event.peer].state = "finished"


def printable(text: str) -> str:
    """Untrusted ``text`` on one line, without control characters."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


def is_warning(event: ev.Event) -> bool:
    """Whether the event is a warning."""
    kinds = (
        ev.JoinRefused,
        ev.FrameRefused,
        ev.PeerSuspected,
        ev.PeerBanned,
        ev.PeerExpelled,
        ev.CheckpointFailed,
        ev.SteppedBack,
        ev.ProbeFailed,
    )
    return isinstance(event, kinds) or (isinstance(event, (ev.Note, ev.Notice)) and event.level != "info")


def _stepped_back(event: ev.SteppedBack, view: RunView) -> str:
    """The sentence; the process that reports it may be behind, or a newcomer without a step."""
    stages = f"stage{'s' if len(event.lost) > 1 else ''} {', '.join(map(str, event.lost))}"
    where = f"the checkpoint of step {event.to}" if event.to else "the beginning"
    moves = f"; {', '.join(event.moves)}" if event.moves else ""
    step = max(event.step, view.step)
    origin = f"from step {step} " if step > event.to else ""
    return f"{stages} lost all peers: the run steps back {origin}to {where}{moves}"


def essence(reason: str) -> str:
    """``reason`` without the addresses that the network's daemon tried; the event has them."""
    return re.sub(r": (?:Connect failed\. msg=)?failed to dial.*: ([^:]+)$", r": \1", reason, flags=re.DOTALL)


def headline(event: ev.Event, view: RunView) -> str | None:
    """The event as a sentence; None for events that only change numbers."""
    match event:
        case ev.RunStarted():
            return f"run {event.run_id}: {plural(event.steps, 'step')}, {plural(event.stages, 'stage')}, {plural(event.peers, 'peer')}"
        case ev.PeerJoined():
            role = ", trainer" if event.trainer else ""
            size = f"{format_count(event.params)} parameters"
            return f"{event.name} serves stage {event.stage} ({event.device}, {event.precision}, {size}{role})"
        case ev.Waiting():
            return f"waiting: {', '.join(event.missing)}" if event.missing else "nothing is missing any more"
        case ev.ProbeProgress():
            return event.what
        case ev.FleetMeasured():
            return f"measured {plural(len(event.peers), 'peer')}: {event.path}"
        case ev.ProbeFailed():
            return f"the fleet was not measured: {event.reason}"
        case ev.JoinRefused():
            return f"{event.remote} was not admitted: {event.reason}"
        case ev.FrameRefused():
            return f"refused a message from {view.name_of(event.remote)}: {event.reason}"
        case ev.PeerSuspected():
            return f"{view.name_of(event.peer_id)} is suspected and gets no work: {essence(event.reason)}"
        case ev.PeerBanned():
            return f"{view.name_of(event.peer_id)} is banned for {format_duration(event.seconds)}: it keeps sending malformed messages"
        case ev.PeerExpelled():
            return f"{event.name} was expelled after step {event.step}: its results differ from those of its replicas"
        case ev.MemberRemoved():
            return f"{event.name} was removed by the run's owner"
        case ev.PeerLeft():
            return f"{event.name} left in order after step {event.step}"
        case ev.LineageLeft():
            apart = event.step - event.forked_at + 1
            return (
                f"{event.peer}: a partition since step {event.forked_at} healed; this peer drops {plural(apart, 'step')} of its own side, "
                f"and takes the other side's state after step {event.to_step}"
            )
        case ev.FaultInjected():
            return f"chaos: {event.planned} hits {', '.join(event.who)} after step {event.step}"
        case ev.CheckpointWritten():
            cost = f"{format_bytes(event.bytes)}, {format_duration(event.seconds)}"
            return f"checkpoint of step {event.step}: {event.path} ({cost})"
        case ev.CheckpointFailed():
            return f"the checkpoint of step {event.step} failed: {event.reason}"
        case ev.SteppedBack():
            return _stepped_back(event, view)
        case ev.Evaluated():
            return f"step {event.step}: validation loss {event.loss:.3f}, perplexity {event.perplexity:.1f}"
        case ev.ClientBegan():
            size = f"{format_count(event.params)} parameters"
            return f"{event.name} computes for stage {event.stage} ({event.device}, {event.precision}, {size})"
        case ev.ClientFinished():
            return f"{event.peer} ended after {format_duration(event.seconds)}: {event.reason}"
        case ev.ClientLost():
            return replace(event, reason=essence(event.reason)).message
        case ev.Note() | ev.Notice():
            return event.message
        case _:
            return None
