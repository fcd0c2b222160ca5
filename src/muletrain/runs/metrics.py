"""Metrics for Prometheus: a fold over events, and the server that a monitor reads. ``METRICS`` is the list, also shown in
docs/runs.md. Every label has few values: stages of the run, kinds that the code names, and peers of this machine alone."""

from __future__ import annotations

import errno
import math
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from muletrain import events as ev
from muletrain.errors import MuletrainError
from muletrain.runs.view import GONE, RunView

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

INSTALL = "pip install 'muletrain[metrics]'"
LOOPBACK = "127.0.0.1"
SILENT_S = 10.0
"""Longest wait for the request of a client that has connected [s]."""
BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
"""Upper ends of the histogram of step durations [s]."""
STATES = ("ready", "training", "suspected", "gone", "finished")
"""States of peers. 'gone': the run goes on without the peer."""
SECONDS: dict[str, str] = {
    "forward": "forward_s",
    "backward": "backward_s",
    "averaging": "averaging_s",
    "update": "apply_s",
    "idle": "wait_s",
}
"""Kinds of a step's time, and the fields of ``StepApplied``."""


class Metric(NamedTuple):
    """One metric, as a monitor sees it."""

    name: str
    type: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    help: str


METRICS = (
    Metric("muletrain_step", "gauge", (), "Steps done; fewer after a step back"),
    Metric("muletrain_planned_steps", "gauge", (), "Steps of the whole run"),
    Metric("muletrain_step_duration_seconds", "histogram", (), "Wall time of a step; repeated steps count again"),
    Metric("muletrain_loss", "gauge", (), "Training loss of the last step [nats per token]"),
    Metric("muletrain_validation_loss", "gauge", (), "Last held-out loss [nats per token]"),
    Metric(
        "muletrain_gradient_norm", "gauge", (), "Global gradient norm of the last step before clipping; NaN: skipped"
    ),
    Metric("muletrain_learning_rate", "gauge", (), "Learning rate of the last step"),
    Metric("muletrain_trained_tokens", "gauge", (), "Tokens of all steps done, each step counted once"),
    Metric(
        "muletrain_processed_tokens_total",
        "counter",
        (),
        "Tokens of the steps that this command saw; repeated steps count again",
    ),
    Metric("muletrain_skipped_steps_total", "counter", (), "Updates skipped because the gradient was not finite"),
    Metric("muletrain_rollbacks_total", "counter", (), "Steps back to a checkpoint after a stage lost all its peers"),
    Metric("muletrain_peers", "gauge", ("stage", "state"), "Peers by state: " + ", ".join(STATES)),
    Metric("muletrain_clients", "gauge", ("stage",), "Clients at work for the servers of a stage (strategy hub)"),
    Metric(
        "muletrain_peer_seconds_total",
        "counter",
        ("stage", "kind"),
        "Time of the stage's peers by kind: " + ", ".join(SECONDS),
    ),
    Metric("muletrain_own_seconds_total", "counter", ("stage", "peer", "kind"), "The same for this machine's peers"),
    Metric("muletrain_microbatches_total", "counter", ("stage",), "Microbatches accumulated by the stage's peers"),
    Metric("muletrain_own_microbatches_total", "counter", ("stage", "peer"), "The same for this machine's peers"),
    Metric(
        "muletrain_recomputed_microbatches_total",
        "counter",
        ("stage",),
        "Microbatches computed again because a peer was lost or slow",
    ),
    Metric(
        "muletrain_rerouted_microbatches_total",
        "counter",
        ("stage",),
        "Microbatches sent to another peer of the stage after the first choice failed",
    ),
    Metric(
        "muletrain_sent_bytes_total",
        "counter",
        ("stage", "kind"),
        "Bytes sent by the stage's peers, by kind of traffic",
    ),
    Metric(
        "muletrain_received_bytes_total",
        "counter",
        ("stage", "kind"),
        "Bytes sent to the stage's peers, as their senders report",
    ),
    Metric(
        "muletrain_own_sent_bytes_total", "counter", ("stage", "peer", "kind"), "Bytes sent by this machine's peers"
    ),
    Metric(
        "muletrain_own_received_bytes_total",
        "counter",
        ("stage", "peer", "kind"),
        "Bytes sent to this machine's peers, as their senders report",
    ),
    Metric(
        "muletrain_swapped_bytes_total",
        "counter",
        ("stage",),
        "Weights loaded for stages that are larger than the device",
    ),
    Metric(
        "muletrain_swap_wait_seconds_total", "counter", ("stage",), "Time in which computing waited for such weights"
    ),
    Metric("muletrain_checkpoints_total", "counter", ("kind",), "Checkpoints by kind: written, failed"),
    Metric("muletrain_checkpoint_step", "gauge", (), "Step of the newest checkpoint"),
    Metric("muletrain_checkpoint_bytes", "gauge", (), "Size of the newest checkpoint"),
    Metric("muletrain_checkpoint_seconds", "gauge", (), "Time that the newest checkpoint took"),
    Metric(
        "muletrain_refusals_total",
        "counter",
        ("kind",),
        "Refusals by kind: join (a machine was not admitted), message (malformed)",
    ),
    Metric("muletrain_warnings_total", "counter", ("kind",), "Warnings by kind of event, repeated ones too"),
)


def as_markdown() -> str:
    """``METRICS`` for docs/runs.md."""
    rows = [f"| `{m.name}` | {m.type} | {', '.join(f'`{label}`' for label in m.labels)} | {m.help} |" for m in METRICS]
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows])


class Metrics:
    """A fold over the events of one session, and what Prometheus' package calls a collector. Thread safe."""

    def __init__(self, own: Iterable[str] = (), *, whole: bool = True, earlier: Sequence[ev.Event] = ()) -> None:
        """``own``: names of this machine's peers. ``whole``, ``earlier``: see ``RunView``."""
        self._own = frozenset(own)
        self._view = RunView(whole=whole, earlier=earlier)
        self._counts: defaultdict[str, defaultdict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
        """Counters by name and labels."""
        self._gauges: dict[str, float] = {}
        """Gauges without labels that are not in ``_view``."""
        self._durations = [0] * (len(BUCKETS) + 1)
        self._duration_s = 0.0
        self._places: dict[str, tuple[int, str]] = {}
        """Stage and name of each peer, by id."""
        self._lock = threading.Lock()

    def __call__(self, event: ev.Event) -> None:
        """Take in an event."""
        with self._lock:
            news = self._view.fold(event)
            self._view.asides.clear()
            if event.is_warning():
                self._add("muletrain_warnings_total", 1, event.kind)
            match event:
                case ev.StepDone() if news:
                    self._done(event)
                case ev.StepApplied() if self._known(event.stage):
                    self._applied(event)
                case ev.SwapWorked() if self._known(event.stage):
                    self._add("muletrain_swapped_bytes_total", event.loaded_bytes, str(event.stage))
                    self._add("muletrain_swap_wait_seconds_total", event.load_wait_s, str(event.stage))
                case ev.MicrobatchRerouted() if self._known(event.stage):
                    self._add("muletrain_rerouted_microbatches_total", 1, str(event.stage))
                case ev.PeerJoined():
                    self._places[event.peer_id] = event.stage, event.peer or event.name
                case ev.Evaluated() | ev.Validated():
                    self._gauges["muletrain_validation_loss"] = event.loss
                case ev.SteppedBack() if news:
                    self._add("muletrain_rollbacks_total", 1)
                case ev.CheckpointWritten():
                    self._add("muletrain_checkpoints_total", 1, "written")
                    self._gauges["muletrain_checkpoint_step"] = event.step
                    self._gauges["muletrain_checkpoint_bytes"] = event.bytes
                    self._gauges["muletrain_checkpoint_seconds"] = event.seconds
                case ev.CheckpointFailed():
                    self._add("muletrain_checkpoints_total", 1, "failed")
                case ev.JoinRefused():
                    self._add("muletrain_refusals_total", 1, "join")
                case ev.FrameRefused():
                    self._add("muletrain_refusals_total", 1, "message")
                case _:
                    pass

    def collect(self) -> Iterator[Any]:
        """The metrics as families of ``prometheus_client``."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        with self._lock:
            counts = {name: dict(values) for name, values in self._counts.items()}
            gauges = self._all_gauges()
            below = [sum(self._durations[: n + 1]) for n in range(len(self._durations))]
            duration_s = self._duration_s
        for metric in METRICS:
            if metric.type == "histogram":
                family = HistogramMetricFamily(metric.name, metric.help)
                ends = [*map(str, BUCKETS), "+Inf"]
                family.add_metric((), list(zip(ends, below, strict=True)), duration_s)
            elif metric.type == "counter":
                family = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
                for labels, value in counts.get(metric.name, {} if metric.labels else {(): 0}).items():
                    family.add_metric(labels, value)
            else:
                family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
                for labels, value in gauges.get(metric.name, {}).items():
                    family.add_metric(labels, value)
            yield family

    def _known(self, stage: int) -> bool:
        """Is it a stage of the run? Events of other machines may name any number, and each would be a new series."""
        return self._view.started is not None and 0 <= stage < self._view.started.stages

    def _add(self, name: str, value: float, *labels: str) -> None:
        """Add to a counter. Other machines report the values: a counter must not fall, nor become NaN."""
        if math.isfinite(value) and value >= 0:
            self._counts[name][labels] += value

    def _done(self, event: ev.StepDone) -> None:
        self._durations[bisect_left(BUCKETS, event.duration_s)] += 1
        self._duration_s += event.duration_s
        self._add("muletrain_processed_tokens_total", event.tokens)
        if math.isnan(event.grad_norm):
            self._add("muletrain_skipped_steps_total", 1)
        self._gauges["muletrain_loss"] = event.loss
        self._gauges["muletrain_gradient_norm"] = event.grad_norm
        self._gauges["muletrain_learning_rate"] = event.lr

    def _applied(self, event: ev.StepApplied) -> None:
        stage = str(event.stage)
        own = (stage, event.peer) if event.peer in self._own else None
        self._add("muletrain_microbatches_total", event.microbatches, stage)
        self._add("muletrain_recomputed_microbatches_total", event.recomputed, stage)
        if own:
            self._add("muletrain_own_microbatches_total", event.microbatches, *own)
        for kind, field in SECONDS.items():
            self._add("muletrain_peer_seconds_total", getattr(event, field), stage, kind)
            if own:
                self._add("muletrain_own_seconds_total", getattr(event, field), *own, kind)
        for receiver, classes in event.sent.items():
            to, name = self._places.get(receiver, (-1, ""))
            for sent, nbytes in classes.items():
                self._add("muletrain_sent_bytes_total", nbytes, stage, sent)
                if own:
                    self._add("muletrain_own_sent_bytes_total", nbytes, *own, sent)
                if self._known(to):
                    self._add("muletrain_received_bytes_total", nbytes, str(to), sent)
                    if name in self._own:
                        self._add("muletrain_own_received_bytes_total", nbytes, str(to), name, sent)

    def _all_gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        view = self._view
        found: dict[str, dict[tuple[str, ...], float]] = {name: {(): value} for name, value in self._gauges.items()}
        if view.started is not None:
            found["muletrain_step"] = {(): view.step}
            found["muletrain_planned_steps"] = {(): view.steps}
            found["muletrain_trained_tokens"] = {(): view.pace.tokens}
        peers = found["muletrain_peers"] = {}
        for stage, of_stage in view.stages().items():
            if self._known(stage):
                states = Counter(_state(peer.state) for peer in of_stage)
                peers |= {(str(stage), state): states[state] for state in STATES}
        clients = found["muletrain_clients"] = {}
        for stage, helpers in view.clients.by_stage().items():
            if self._known(stage):
                clients[(str(stage),)] = sum(client.state == "working" for client in helpers)
        return found


def _state(state: str) -> str:
    """A state of ``PeerView`` as one of ``STATES``."""
    return "gone" if state in GONE else "ready" if state == "joining" else state


class MetricsServer:
    """Serves the metrics of a command over HTTP while the context lasts."""

    def __init__(self, where: str) -> None:
        """``where``: PORT, or HOST:PORT; 0 takes any free port. Raises MuletrainError: not such an address, or the
        package is missing."""
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as e:
            raise MuletrainError(f"--metrics needs prometheus_client: {INSTALL}, or leave it out") from e
        self._host, self._port = address(where)
        self._registry = CollectorRegistry(auto_describe=False)
        self._shown: Metrics | None = None
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Raises MuletrainError if the port cannot be had."""
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(self._port, self._host, self._registry)
        except OSError as e:
            why = (
                "another program uses that port; choose another one, or 0 for any that is free"
                if e.errno == errno.EADDRINUSE
                else e.strerror or str(e)
            )
            raise MuletrainError(f"--metrics: cannot serve on {self._host}:{self._port}: {why}") from None
        # a client that connects and asks nothing must not keep a thread
        handler = self._server.RequestHandlerClass
        self._server.RequestHandlerClass = type("Handler", (handler,), {"timeout": SILENT_S})
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        assert self._thread is not None
        self._thread.join()

    @property
    def url(self) -> str:
        """The address for a monitor."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_port}/metrics"

    def show(self, metrics: Metrics) -> None:
        """Serve these from now on."""
        if self._shown is not None:
            self._registry.unregister(self._shown)
        self._shown = metrics
        self._registry.register(metrics)


def address(where: str) -> tuple[str, int]:
    """Host and port of ``PORT`` or ``HOST:PORT``. Raises MuletrainError."""
    host, _, port = where.strip().rpartition(":")
    if not port.isdecimal() or not port.isascii() or int(port) > 65535:
        raise MuletrainError(f"--metrics: '{where}' is no PORT and no HOST:PORT, such as 9464 or 0.0.0.0:9464")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)
