"""A fold over a run's events: progress, loss, speed, the state of each peer, warnings."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from muletrain import events as ev
from muletrain.events.facts import SMOOTHING
from muletrain.runs.worker_files import LEFT
from muletrain.units import format_duration, plural, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from muletrain.events import StepDone

GONE_S = 30.0
"""Seconds after which a suspected peer is gone: then another peer adopts the stage (``fleet.adopt_after``)."""
ENTERS_S = 5.0
"""Seconds that a peer has to be admitted before a first, refused question is news."""
BASE58 = re.compile(r"(?<!/)\b[1-9A-HJ-NP-Za-km-z]{6,64}\b")
SENT_AWAY = frozenset({"expelled", "removed"})
FINAL = SENT_AWAY | {"ended"}  # states without end: the last words of such a peer may come late
GONE = FINAL | {"left", "replaced", "gone"}  # states of peers of which nothing more is to be expected
WINDOW = 20
"""Steps over which speed is measured."""
KNOWN = 3
"""Steps, the first one aside, from which the time of the next ones is estimated."""
OUTLIER = 3.0
"""A step counts as at most so many medians: one that waited for a lost peer says little about the next ones. A peer is
called slow that computes a microbatch in so many times of the fastest peer of its stage."""
NAMED = 4
"""Most peers that a sentence names."""
OVERDUE = 2.0
"""Multiple of the longest recent step, after which the next one is overdue."""


class _Sums(NamedTuple):
    """Over all steps up to one. ``loss`` and ``weight``: decaying with the steps since then."""

    loss: float
    weight: float
    tokens: int


NOTHING = _Sums(0.0, 0.0, 0)


class Pace:
    """Figures of the steps folded so far. Repeated steps count once: two peers may both report a step, and after a step
    back or a resume the fold continues as if the repeated steps had not been taken before."""

    def __init__(self) -> None:
        self.step = 0
        """Steps done; fewer than before after a step back."""
        self.left = 0
        """Steps that were done before the last step back."""
        self.end_s = -math.inf
        """Wall time at which the last step ended."""
        self.over = False
        """No further step is expected, so none is overdue."""
        self._begin_s = math.inf
        self._before_s = 0.0
        """Time of earlier processes that trained the run."""
        self._sums = {0: NOTHING}
        """By steps done."""
        self._recent: deque[StepDone] = deque(maxlen=WINDOW)
        self._steady: deque[float] = deque(maxlen=WINDOW)
        """Durations [s] of the last steps but the first, in which processes also load code and reserve memory."""
        self._seen: set[tuple[int, str]] = set()

    def begin(self, step: int) -> None:
        """Processes begin to train the run after ``step``, perhaps in place of earlier ones."""
        self._before_s, self._begin_s, self.end_s = self.seconds, math.inf, -math.inf
        self._recent.clear()
        self._steady.clear()
        self.back_to(step)
        self.left, self.over = step, False

    def back_to(self, step: int) -> None:
        """Go on after ``step``: later steps will be taken again."""
        self.left, self.step = self.step, step
        self._sums = {k: sums for k, sums in self._sums.items() if k <= step}
        self._seen = {(k, lineage) for k, lineage in self._seen if k <= step}

    def fold(self, event: StepDone) -> bool:
        """Take in a step. Returns False if reported before."""
        if (event.step, event.lineage) in self._seen:
            return False
        self._seen.add((event.step, event.lineage))
        nearest = event.step - 1 if event.step - 1 in self._sums or event.step <= self.step else self.step
        before = self._sums.get(nearest, NOTHING)
        loss, weight = before.loss, before.weight
        if math.isfinite(event.loss):
            loss = SMOOTHING * loss + (1 - SMOOTHING) * event.loss
            weight = SMOOTHING * weight + (1 - SMOOTHING)
        self._sums[event.step] = _Sums(loss, weight, before.tokens + event.tokens)
        before_step, self.step = self.step, event.step
        if self._recent:
            self._steady.append(event.duration_s)
        came_late = math.isinf(self._begin_s) and event.step > before_step + 1
        self._begin_s, self.end_s = min(self._begin_s, event.t - event.duration_s), max(self.end_s, event.t)
        if not came_late:  # a newcomer saw only the end of its first step
            self._recent.append(event)
        return True

    @property
    def _now(self) -> _Sums:
        return self._sums.get(self.step, NOTHING)

    @property
    def loss(self) -> float:
        """Smoothed training loss [nats/token]; NaN before the first step."""
        return self._now.loss / self._now.weight if self._now.weight else math.nan

    @property
    def tokens(self) -> int:
        """Tokens of all steps up to the current one, as far as known."""
        return self._now.tokens

    @property
    def seconds(self) -> float:
        """Time from the start of the first step to the end of the last, including waits, but without the time in which
        no process trained the run [s]."""
        return self._before_s + max(0.0, self.end_s - self._begin_s)

    def tokens_per_s(self, now: float | None = None) -> float:
        """Speed of the whole fleet over the last steps, a wait for a lost peer aside; NaN before the first step. ``now``:
        wall time [s]; once a step is overdue, the time without one counts, too, so the speed of a run that stands still
        goes to zero."""
        seconds = sum(_usual([e.duration_s for e in self._recent])) + self._overdue_s(now)
        return sum(e.tokens for e in self._recent) / seconds if seconds else math.nan

    @property
    def measured(self) -> int:
        """Number of steps that ``tokens_per_s`` is about."""
        return len(self._recent)

    @property
    def begin_s(self) -> float:
        """Wall time at which the processes that train now began their first step; infinite before its end."""
        return self._begin_s

    def seconds_left(self, steps: int, now: float | None = None) -> float:
        """Time to the end of a run of ``steps`` at the speed of the last ones; NaN until enough are known, and once a
        step is overdue."""
        if len(self._steady) < KNOWN or self._overdue_s(now):
            return math.nan
        return max(0, steps - self.step) * statistics.fmean(_usual(self._steady))

    def _overdue_s(self, now: float | None) -> float:
        """Time since the next step should have ended [s]."""
        if now is None or not self._recent or self.over:
            return 0.0
        return max(0.0, now - self.end_s - OVERDUE * max(e.duration_s for e in self._recent))


def _usual(durations: Sequence[float]) -> list[float]:
    """Each of the durations, or ``OUTLIER`` medians if that is less."""
    most = OUTLIER * statistics.median(durations) if durations else 0.0
    return [min(seconds, most) for seconds in durations]


class SkipsView:
    """The updates that all peers skipped, because the gradient was not finite."""

    def __init__(self) -> None:
        self._last = 0
        """The last step that was done."""
        self._steps: dict[int, ev.StepDone] = {}
        """Steps with a skipped update."""
        self._tensors: dict[int, dict[int, str]] = {}
        """By step and stage: name of the stage's first parameter with a gradient that is not finite."""

    def __len__(self) -> int:
        return len(self._steps)

    def fold(self, event: ev.Event) -> None:
        """Take in a step, or one peer's report of a step."""
        match event:
            case ev.StepApplied(skipped=True) if event.not_finite:
                self._tensors.setdefault(event.step, {})[event.stage] = event.not_finite
            case ev.StepDone():
                self._last = event.step
                self._steps.pop(event.step, None)
                if math.isnan(event.grad_norm):
                    self._steps[event.step] = event
            case ev.SteppedBack():
                self._steps = {step: done for step, done in self._steps.items() if step <= event.to}
            case _:
                pass

    def why(self) -> str:
        """The skipped updates at the end of the run, the first tensor that was not finite, and a remedy."""
        first = self._last + 1
        while first - 1 in self._steps:
            first -= 1
        row = plural(self._last - first + 1, "update") + f" (steps {first} to {self._last})"
        where = ""
        if done := self._steps.get(first):
            stage, tensor = min(self._tensors.get(first, {}).items(), default=(0, ""))
            named = f"the first was that of '{printable(tensor)}' in stage {stage}" if tensor else "the first"
            where = f": {named} at step {first}, where the loss was {done.loss:.4g} and the learning rate {done.lr:.4g}"
        return (
            f"the run learned nothing at its end: the last {row} were skipped, because gradients were not finite{where}. "
            f"Try a lower optimizer.lr, or a longer optimizer.warmup; if the first steps fail, look for huge or missing "
            f"numbers in the data and in the first weights, or set compute.precision = 'fp32'. Then start the run again, or "
            f"go on from a checkpoint of a step before {first}, if there is one. train.max_skipped says how many skipped updates in a row "
            f"end a run"
        )


@dataclass
class _Injected:
    event: ev.FaultInjected
    noticed_s: float | None = None
    """Time after the injection; None: not detected."""
    by: set[str] = field(default_factory=set)


class FaultsView:
    """A fold over events: each fault, the detecting peers, and the first detection time."""

    def __init__(self, name_of: Callable[[str], str]) -> None:
        """``name_of``: a peer's name from the id."""
        self._name_of = name_of
        self._faults: list[_Injected] = []
        self._notices: deque[tuple[str, ev.Event, tuple[str, ...]]] = deque(maxlen=100)
        """The newest events that may tell of a fault: name of the peer that it hit, event, possible kinds of fault. An
        event may be read before its fault, because different processes write them."""

    def fold(self, event: ev.Event) -> None:
        match event:
            case ev.FaultInjected():
                self._faults.append(_Injected(event))
                for notice in self._notices:
                    self._attribute(*notice)
            case ev.PeerDown():
                self._noticed(self._name_of(event.peer_id), event, ("kill", "freeze", "partition"))
            case ev.FrameRefused():
                self._noticed(self._name_of(event.remote), event, ("corrupt",))
            case ev.PeerExpelled():
                self._noticed(event.name, event, ("corrupt",))
            case ev.ClientLost() | ev.ClientLate():
                self._noticed(event.name, event, ("kill", "freeze"))
            case ev.PeerJoined():
                self._noticed(event.name, event, ("join",))
            case _:
                pass

    def _noticed(self, name: str, event: ev.Event, kinds: tuple[str, ...]) -> None:
        self._notices.append((name, event, kinds))
        self._attribute(name, event, kinds)

    def _attribute(self, name: str, event: ev.Event, kinds: tuple[str, ...]) -> None:
        """Attribute the event to the newest fault of ``kinds`` that had hit ``name``."""
        for fault in reversed(self._faults):
            if name in fault.event.who and fault.event.what in kinds and fault.event.t <= event.t:
                fault.by.add(event.peer)
                elapsed = event.t - fault.event.t
                fault.noticed_s = elapsed if fault.noticed_s is None else min(elapsed, fault.noticed_s)
                return

    def killed(self, name: str) -> bool:
        """Whether the peer was killed on purpose."""
        return any(fault.event.what == "kill" and name in fault.event.who for fault in self._faults)

    def __len__(self) -> int:
        return len(self._faults)

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Rows of (after step, fault, peers hit, detection)."""
        for fault in self._faults:
            noticed = "not detected"
            if fault.noticed_s is not None:
                noticed = f"after {format_duration(fault.noticed_s)} by {', '.join(sorted(fault.by))}"
            yield str(fault.event.step), fault.event.planned, ", ".join(fault.event.who), noticed


@dataclass
class ClientView:
    """One client, from events of the client and of servers."""

    name: str
    stage: int = -1
    state: str = "working"
    parts: int = 0
    late: int = 0
    redone: int = 0


class ClientsView:
    """All clients of a run."""

    def __init__(self) -> None:
        self._by_name: dict[str, ClientView] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def working(self) -> int:
        """Returns how many are at work."""
        return sum(client.state == "working" for client in self._by_name.values())

    def by_stage(self) -> dict[int, list[ClientView]]:
        """Returns the clients of each stage, both in order."""
        found = defaultdict[int, list[ClientView]](list)
        for client in sorted(self._by_name.values(), key=lambda c: (c.stage, c.name)):
            found[client.stage].append(client)
        return dict(found)

    def ended(self, name: str) -> None:
        """The process of that name was killed."""
        if name in self._by_name:
            self._by_name[name].state = "ended"

    def fold(self, event: ev.Event) -> None:
        """Take in an event."""
        match event:
            case ev.ClientBegan() | ev.ClientEnlisted():
                client = self._client(event.name)
                client.stage, client.state = event.stage, "working"
            case ev.ClientLost():
                self._client(event.name).state = "gone"
            case ev.ClientFinished():
                self._client(event.peer).state = "finished"
            case ev.PoolWorked():
                for name, counts in event.clients.items():
                    client = self._client(name)
                    client.stage = event.stage
                    client.parts += counts.get("parts", 0)
                    client.late += counts.get("late", 0)
                    client.redone += counts.get("redone", 0)

    def _client(self, name: str) -> ClientView:
        return self._by_name.setdefault(name, ClientView(name))


@dataclass
class PeerView:
    """One peer, from events of the peer and suspicions of the rest. Totals are since the start of the run."""

    name: str
    peer_id: str = ""
    stage: int = -1
    device: str = "?"
    precision: str = "?"
    trainer: bool = False
    state: str = "joining"
    suspected_at: float = 0.0
    """Wall time of the suspicion [s]."""
    lost: bool = False
    """The peer neither left in order nor was sent away, and is not back."""
    waits: ev.StepWaits | None = None
    """The present step's wait, if it takes long."""
    step: int = 0
    microbatches: int = 0
    recomputed: int = 0
    compute_s: float = 0.0
    averaging_s: float = 0.0
    apply_s: float = 0.0
    wait_s: float = 0.0
    parts: int = 0
    """Parts of the stage that take turns on the device; 0: the stage stays there. The next four are of a swapped
    stage."""
    loads: int = 0
    loaded_bytes: int = 0
    rounds: int = 0
    passed: int = 0
    """Microbatches that passed in rounds."""
    load_wait_s: float = 0.0
    recent: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Of about the last ten steps: seconds at work, seconds, microbatches, seconds of computing."""
    sent: dict[str, Counter[str]] = field(default_factory=dict)
    """Bytes by receiver (name if known) and traffic class."""

    @property
    def total_s(self) -> float:
        """Wall time of the steps this peer applied [s]."""
        return self.compute_s + self.averaging_s + self.apply_s + self.wait_s

    @property
    def busy(self) -> float:
        """Share of the last steps' time at work: computing, averaging, updating; NaN before the first step."""
        work_s, total_s, _, _ = self.recent
        return work_s / total_s if total_s else math.nan

    @property
    def microbatches_per_s(self) -> float:
        """Over the last steps; 0 before the first."""
        _, total_s, microbatches, _ = self.recent
        return microbatches / total_s if total_s else 0.0

    @property
    def microbatch_s(self) -> float:
        """Time of computing one of the last microbatches, forward and backward [s]; 0 before the first."""
        _, _, microbatches, compute_s = self.recent
        return compute_s / microbatches if microbatches else 0.0

    def sent_bytes(self, kind: str | None = None) -> int:
        """Bytes sent, of one traffic class or of all."""
        return sum(sum(c.values()) if kind is None else c[kind] for c in self.sent.values())


class RunView:
    """The state of a run after the events folded so far."""

    def __init__(self, *, whole: bool = True, earlier: Sequence[ev.Event] = ()) -> None:
        """``whole``: events of all peers arrive, so a stage without events has no peer. ``earlier``: events of
        processes that trained the run before; counted after a resume."""
        self.whole, self._earlier = whole, earlier
        self.started: ev.RunStarted | None = None
        self.finished: ev.RunFinished | None = None
        self.validated: dict[int, ev.Validated] = {}
        """Held-out losses measured during training, by step."""
        self.peers: dict[str, PeerView] = {}
        """By ``Event.peer``: a peer's first name, even if the run renamed the peer. If another peer took over the name:
        the id."""
        self.clients = ClientsView()
        self.failed: dict[str, str] = {}
        """Why processes of this machine gave up or were killed, by the peer's name; planned faults are left out."""
        self.missing: list[str] = []
        self.halted = ""
        """Why no step is done, and what the run waits for: set from an empty stage to the next step."""
        self.rollbacks = 0
        self.probing: ev.ProbeProgress | None = None
        """Set while machines and links are measured."""
        self.warnings: Counter[str] = Counter()
        self.rerouted = 0
        self.replaced = set[str]()
        """Samples that could not be used."""
        self.faults = FaultsView(self.name_of)
        self.pace, self.skips = Pace(), SkipsView()
        self.asides: list[str] = []
        """Sentences that follow from several events, to be shown once."""
        self._called_s = math.nan
        """Wall time at which the command was called that trains the run."""
        self._by_id: dict[str, PeerView] = {}
        self._names: dict[str, str] = {}
        """Names by id, and by the ends of ids that messages have; also of peers without events here."""
        self._strangers: dict[str, ev.JoinRefused | ev.FrameRefused] = {}
        """Peers that asked for something before they were admitted, which happens when all enter at once."""
        self._back = ""
        """Lineage of the last step back."""

    @property
    def prepared_s(self) -> float:
        """Time from the command's beginning to its first step [s]; NaN: not known."""
        return self.pace.begin_s - self._called_s if math.isfinite(self.pace.begin_s) else math.nan

    @property
    def step(self) -> int:
        """Steps done."""
        return self.pace.step

    @property
    def steps(self) -> int:
        """Planned steps of the run; 0: not known yet."""
        return self.started.steps if self.started else 0

    def stages(self, *, present: bool = False) -> dict[int, list[PeerView]]:
        """Peers by stage, both in order. Empty stages are included if events of all peers arrive. ``present``: without
        peers that are gone."""
        count = self.started.stages if self.started and self.whole else 0
        found: dict[int, list[PeerView]] = {s: [] for s in range(count)}
        for peer in sorted(self.peers.values(), key=lambda p: (p.stage, p.name)):
            if not (present and self._has_gone(peer)):
                found.setdefault(peer.stage, []).append(peer)
        return found

    def slow(self) -> list[str]:
        """A clause about each slow peer (``OUTLIER``) of the last steps, the slowest first: such a peer gets few
        microbatches, and is idle otherwise, so shares of time do not show it."""
        found = list[tuple[float, str]]()
        for stage, peers in self.stages(present=True).items():
            each = {p.name: p.microbatch_s for p in peers if p.microbatch_s > 0}
            fastest = min(each, key=lambda name: each[name], default="")
            for name, seconds in each.items():
                if seconds > OUTLIER * each[fastest]:
                    times = f"{format_duration(seconds)} ({fastest}: {format_duration(each[fastest])})"
                    found.append((-seconds, f"{name} is slow: a microbatch of stage {stage} takes {times}"))
        return [clause for _, clause in sorted(found)][:NAMED]

    def gone(self) -> int:
        """Number of peers that are gone, and did not come back."""
        return sum(self._has_gone(peer) and peer.state != "replaced" for peer in self.peers.values())

    def _has_gone(self, peer: PeerView) -> bool:
        return peer.state in GONE

    def ended(self, name: str, how: str) -> None:
        """Note that the process of the peer ``name`` was killed: ``how``."""
        if not self.faults.killed(name):
            self.failed[name] = how
        if name in self.peers:
            peer = self.peers[name]
            peer.suspected_at = peer.suspected_at if peer.lost else self.pace.end_s
            peer.state, peer.lost = "ended", True
        self.clients.ended(name)

    def name_of(self, peer_id: str) -> str:
        """A peer's name; before joining, the end of the id (all ids begin alike)."""
        known = self._by_id.get(peer_id) or self.peers.get(peer_id)
        return known.name if known is not None else self.named(peer_id)

    def named(self, text: str) -> str:
        """``text`` with names in place of ids and ends of ids. Of an unknown id the end stays."""

        def name(found: re.Match[str]) -> str:
            word = found[0]
            return self._names.get(word) or (f"..{word[-8:]}" if len(word) > 40 else word)

        return BASE58.sub(name, text)

    def headline(self, event: ev.Event) -> str:
        """The event as a sentence, with names of peers for ids; empty: only numbers change."""
        if isinstance(event, ev.SteppedBack):  # the reporting process may be behind, or a newcomer without a step
            event = dataclasses.replace(event, step=max(event.step, self.pace.left))
        return self.named(event.sentence())

    def _learn(self, peer_id: str, name: str) -> None:
        if peer_id and name:
            self._names |= {peer_id[-n:]: name for n in (6, 8, len(peer_id)) if n <= len(peer_id)}

    def tokens_per_microbatch(self) -> float:
        """Tokens of a microbatch at full sequence length."""
        return self.started.tokens_per_step / max(1, self.started.microbatches) if self.started else math.nan

    def fold(self, event: ev.Event) -> bool:
        """Fold one event. Returns False for no news: a repeated warning, or a step reported twice."""
        self.faults.fold(event)
        self._hear_of_strangers(event)
        self.clients.fold(event)
        self.skips.fold(event)
        self._learn(getattr(event, "peer_id", ""), getattr(event, "name", ""))
        match event:
            case ev.RunStarted():
                for peer_id, name in event.members.items():
                    self._learn(peer_id, name)
                return self._start(event)
            case ev.RunPrepared():
                self._called_s = event.t - event.seconds
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
            case ev.StepWaits():
                return self._wait(event)
            case ev.StepApplied():
                self._apply(event)
            case ev.SwapWorked():
                self._swap(event)
            case ev.StepDone():
                return self._done(event)
            case ev.PeerDown():
                if not self._suspect(event):
                    return False
            case ev.JoinRefused() | ev.FrameRefused() if event.reason.endswith("before admission"):
                self._strangers.setdefault(event.remote, event)
                return False
            case ev.SampleReplaced():
                self.replaced.add(event.reason)
                return len(self.replaced) == 1
            case ev.MicrobatchRerouted():
                self.rerouted += 1
            case ev.StageEmpty() | ev.NoTrainer():
                self.halted = self.headline(event)
            case ev.PeerLeft():
                self._gone(event.peer_id, "left")
            case ev.PeerExpelled():
                self._gone(event.peer_id, "expelled")
            case ev.MemberRemoved():
                self._gone(event.peer_id, "removed")
            case ev.SteppedBack():
                return self._step_back(event)
            case ev.Validated():
                self.validated[event.step] = event
            case ev.RunFinished():
                self._finish(event)
            case ev.Note() if event.level == "error":
                self.failed.setdefault(event.peer, event.message)
            case _:
                pass
        return self._warn(event)

    def _start(self, event: ev.RunStarted) -> bool:
        if self.started is not None:
            return False
        self.started = event
        if event.first_step:
            for one in self._earlier:
                self._recall(one)
            self.rollbacks = 0  # as all trouble, counted since the resume
        self.pace.begin(event.first_step)
        return True

    def _recall(self, event: ev.Event) -> None:
        match event:
            case ev.RunStarted():
                self.pace.begin(event.first_step)
            case ev.StepDone():
                self.pace.fold(event)
            case ev.SteppedBack():
                self._step_back(event)

    def _step_back(self, event: ev.SteppedBack) -> bool:
        news, self._back = event.lineage != self._back, event.lineage
        if news:
            self.pace.back_to(event.to)
            self.rollbacks, self.halted = self.rollbacks + 1, ""
        return news

    def _warn(self, event: ev.Event) -> bool:
        if not event.is_warning():
            return True
        message = self.headline(event) or event.kind
        self.warnings[message] += 1
        return self.warnings[message] == 1

    def _join(self, event: ev.PeerJoined) -> None:
        teller = event.peer or event.name
        before = self.peers.get(teller)
        if before is not None and before.peer_id not in ("", event.peer_id):
            self._set_aside(self.peers.pop(teller))
        peer = self._by_id[event.peer_id] = self.peers.setdefault(teller, PeerView(event.name))
        for key in ("peer_id", "name", "stage", "device", "precision", "trainer"):
            setattr(peer, key, getattr(event, key))
        peer.state, peer.lost, peer.parts = "ready", False, event.swapped
        self.missing = []

    def _set_aside(self, peer: PeerView) -> None:
        """Rename a peer after another one took over the name, as a machine does that comes back."""
        self.peers[peer.peer_id] = peer
        peer.name = f"{peer.name} ({peer.peer_id[-8:]})"
        self._learn(peer.peer_id, peer.name)
        peer.state = peer.state if peer.state in SENT_AWAY else "replaced"

    def _gone(self, peer_id: str, state: str) -> None:
        if peer_id in self._by_id:
            self._by_id[peer_id].state, self._by_id[peer_id].lost = state, False

    def _wait(self, event: ev.StepWaits) -> bool:
        """News is a wait of which no other peer told."""
        about = event.step, event.what, tuple(event.names)
        news = all((w.step, w.what, tuple(w.names)) != about for p in self.peers.values() if (w := p.waits) is not None)
        self.peers.setdefault(event.peer, PeerView(event.peer)).waits = event
        return news

    def _apply(self, event: ev.StepApplied) -> None:
        peer = self.peers.setdefault(event.peer, PeerView(event.peer))
        peer.waits = None
        peer.stage, peer.step = event.stage, event.step
        if peer.state == "gone":
            self.asides.append(f"{peer.name} is back")
        if peer.state not in FINAL:
            peer.state, peer.lost = "training", False
        peer.microbatches += event.microbatches
        peer.recomputed += event.recomputed
        peer.compute_s += event.forward_s + event.backward_s
        peer.averaging_s += event.averaging_s
        peer.apply_s += event.apply_s
        peer.wait_s += event.wait_s
        worked_s, total_s, done, computed_s = (SMOOTHING * before for before in peer.recent)
        compute_s = event.forward_s + event.backward_s
        work_s = compute_s + event.averaging_s + event.apply_s
        total_s += work_s + event.wait_s
        peer.recent = worked_s + work_s, total_s, done + event.microbatches, computed_s + compute_s
        for receiver, classes in event.sent.items():
            peer.sent.setdefault(receiver, Counter()).update(classes)

    def _swap(self, event: ev.SwapWorked) -> None:
        peer = self.peers.setdefault(event.peer, PeerView(event.peer))
        peer.loads, peer.loaded_bytes = peer.loads + event.loads, peer.loaded_bytes + event.loaded_bytes
        peer.rounds, peer.passed = peer.rounds + event.rounds, peer.passed + event.microbatches
        peer.load_wait_s += event.load_wait_s

    def _done(self, event: ev.StepDone) -> bool:
        if not self.pace.fold(event):
            return False
        self.missing, self.halted = [], ""
        self.pace.over = 0 < self.steps <= self.step
        self._give_up()
        return True

    def _suspect(self, event: ev.PeerDown) -> bool:
        """Returns False for a second report of one loss."""
        peer = self._by_id.get(event.peer_id)
        if peer is not None and (peer.state in ("suspected", "finished") or peer.state in GONE):
            return False
        if peer is not None:
            peer.state, peer.suspected_at, peer.lost = "suspected", event.t, True
        return True

    def _give_up(self) -> None:
        """Mark peers with a long suspicion as gone."""
        for peer in self.peers.values():
            if peer.state == "suspected" and self.pace.end_s - peer.suspected_at > GONE_S:
                peer.state = "gone"
                self.asides.append(f"{peer.name} is gone: no answer for {GONE_S:.0f} s; {self.goes_on(peer.stage)}")

    def goes_on(self, stage: int) -> str:
        """The peers that a stage has left, in words."""
        left = [p.name for p in self.stages(present=True).get(stage, ()) if not p.lost]
        names = ", ".join(left) if len(left) <= NAMED else plural(len(left), "peer")
        return f"stage {stage} goes on with {names}" if left else f"stage {stage} has no peer"

    def _hear_of_strangers(self, event: ev.Event) -> None:
        """Report the strangers that are still not admitted, and forget the rest."""
        if isinstance(event, (ev.Admitted, ev.MemberAdmitted, ev.PeerJoined)):
            self._strangers.pop(event.peer_id, None)
        for remote, refused in list(self._strangers.items()):
            if event.t - refused.t > ENTERS_S:
                del self._strangers[remote]
                if self._warn(refused):
                    self.asides.append(self.headline(refused))

    def _finish(self, event: ev.RunFinished) -> None:
        self.finished = event
        self.pace.over = self.pace.over or event.reason != LEFT or not self.whole
        if event.peer in self.peers:
            self.peers[event.peer].state, self.peers[event.peer].lost = "finished", False
