"""Metrics for Prometheus: a fold over events, its names in documentation and dashboard, and the server."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from muletrain import events as ev
from muletrain.errors import MuletrainError
from muletrain.runs.metrics import METRICS, STATES, Metrics, MetricsServer, address, as_markdown
from tests.test_cli import SMALL, TWO, start

ROOT = Path(__file__).parents[1]


def started(stages: int = 2, **more: Any) -> ev.RunStarted:
    about = {"run_id": "r", "config_digest": "d", "versions": {}, "steps": 10, "peers": 2, "microbatches": 4}
    return ev.RunStarted(**{**about, "stages": stages, "tokens_per_step": 100, **more})


def joined(name: str, stage: int) -> ev.PeerJoined:
    about = {"device": "cpu", "precision": "fp32", "trainer": True, "params": 1, "threads": 1}
    return ev.PeerJoined(peer_id=f"id-{name}", name=name, peer=name, stage=stage, **about)


def applied(name: str, step: int, stage: int, sent: Any = None, **more: Any) -> ev.StepApplied:
    about = {"lineage": "l", "skipped": False, "microbatches": 3, "recomputed": 1, "forward_s": 1.0, "backward_s": 2.0}
    rest = {"averaging_s": 0.5, "apply_s": 0.25, "wait_s": 4.0, "sent": sent or {}}
    return ev.StepApplied(step=step, stage=stage, peer=name, **{**about, **rest, **more})


def done(step: int, lineage: str = "", **more: Any) -> ev.StepDone:
    about = {"loss": 5.0 - step, "grad_norm": 1.0, "lr": 0.1, "tokens": 100, "duration_s": 0.2}
    return ev.StepDone(step=step, lineage=lineage or str(step), t=100.0 + step, **{**about, **more})


def folded(*events: ev.Event, own: Any = ("a",)) -> Metrics:
    metrics = Metrics(own)
    for event in events:
        metrics(event)
    return metrics


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return read(generate_latest(registry).decode())


def read(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and labels, as a monitor reads them."""
    order = ("stage", "peer", "kind", "state", "le")
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(s.name, *(s.labels[label] for label in order if label in s.labels)): s.value for s in found}


RUN = (
    started(),
    joined("a", 0),
    joined("b", 1),
    applied("a", 1, 0, {"id-b": {"activation": 10, "control": 1}}),
    applied("b", 1, 1, {"id-a": {"gradient": 7}}),
    done(1),
    done(1),
    ev.MicrobatchRerouted(step=1, index=0, stage=1, reason="late"),
    ev.SwapWorked(1, 1, loads=1, loaded_bytes=50, rounds=1, microbatches=1, load_s=1.0, load_wait_s=0.5),
    ev.Validated(1, 4.5, 90.0, 10),
    ev.CheckpointWritten(step=1, path="p", bytes=99, seconds=0.5),
    ev.CheckpointFailed(step=1, reason="full"),
    ev.JoinRefused(remote="x", reason="no"),
    ev.FrameRefused(remote="x", reason="no"),
    done(2, loss=2.0, grad_norm=float("nan"), duration_s=3.0),
    ev.SteppedBack(step=2, to=1, lost=[1], moves=[], lineage="back", peer="a"),
    ev.SteppedBack(step=2, to=1, lost=[1], moves=[], lineage="back", peer="b"),
    ev.ClientEnlisted(peer_id="id-c", name="c", stage=1),
)


def test_the_metrics_are_the_sums_of_the_events() -> None:
    found = samples(folded(*RUN))
    expected = {
        ("muletrain_step",): 1,
        ("muletrain_planned_steps",): 10,
        ("muletrain_loss",): 2.0,
        ("muletrain_validation_loss",): 4.5,
        ("muletrain_learning_rate",): 0.1,
        ("muletrain_trained_tokens",): 100,
        ("muletrain_processed_tokens_total",): 200,
        ("muletrain_skipped_steps_total",): 1,
        ("muletrain_rollbacks_total",): 1,
        ("muletrain_step_duration_seconds_count",): 2,
        ("muletrain_step_duration_seconds_sum",): 3.2,
        ("muletrain_step_duration_seconds_bucket", "0.25"): 1,
        ("muletrain_step_duration_seconds_bucket", "5.0"): 2,
        ("muletrain_peers", "0", "training"): 1,
        ("muletrain_peers", "1", "gone"): 0,
        ("muletrain_clients", "1"): 1,
        ("muletrain_peer_seconds_total", "1", "backward"): 2.0,
        ("muletrain_own_seconds_total", "0", "a", "idle"): 4.0,
        ("muletrain_microbatches_total", "1"): 3,
        ("muletrain_own_microbatches_total", "0", "a"): 3,
        ("muletrain_recomputed_microbatches_total", "0"): 1,
        ("muletrain_rerouted_microbatches_total", "1"): 1,
        ("muletrain_sent_bytes_total", "0", "activation"): 10,
        ("muletrain_received_bytes_total", "1", "activation"): 10,
        ("muletrain_own_sent_bytes_total", "0", "a", "control"): 1,
        ("muletrain_own_received_bytes_total", "0", "a", "gradient"): 7,
        ("muletrain_swapped_bytes_total", "1"): 50,
        ("muletrain_swap_wait_seconds_total", "1"): 0.5,
        ("muletrain_checkpoints_total", "written"): 1,
        ("muletrain_checkpoints_total", "failed"): 1,
        ("muletrain_checkpoint_step",): 1,
        ("muletrain_checkpoint_bytes",): 99,
        ("muletrain_checkpoint_seconds",): 0.5,
        ("muletrain_refusals_total", "join"): 1,
        ("muletrain_refusals_total", "message"): 1,
        ("muletrain_warnings_total", "checkpoint_failed"): 1,
    }
    assert {key: found.get(key) for key in expected} == pytest.approx(expected)
    assert not any("b" in key for key in found), "b is no peer of this machine"
    assert {m.name for m in METRICS} <= {re.sub("_(bucket|sum|count)$", "", name) for name, *_ in found}


def test_a_strict_parser_takes_the_names_and_units() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(folded(*RUN))
    families = list(openmetrics.text_string_to_metric_families(exposition.generate_latest(registry).decode()))
    assert len(families) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch("muletrain_[a-z_]+", metric.name)
        assert metric.help
        assert metric.name.endswith("_total") == (metric.type == "counter"), metric
        assert not re.search("milli|micro_|_ms|kilo|mega|minutes", metric.name), "base units"
        assert set(metric.labels) <= {"stage", "peer", "kind", "state"}
        assert "peer" not in metric.labels or "_own_" in metric.name


def test_before_the_run_begins_nothing_is_claimed() -> None:
    found = samples(Metrics())
    assert ("muletrain_loss",) not in found
    assert found[("muletrain_processed_tokens_total",)] == 0


def test_a_thousand_peers_are_few_series_and_strangers_cannot_make_more() -> None:
    events: list[ev.Event] = [started(stages=8, peers=1000)]
    events += [joined(f"p{n}", n % 8) for n in range(1000)]
    traffic = {f"id-p{n}": {"activation": 5} for n in range(4)}
    events += [applied(f"p{n}", 1, n % 8, traffic) for n in range(1000)]
    events += [applied(f"x{n}", 1, n, traffic) for n in range(8, 500)]  # stages that the run has not
    events += [applied("evil", 1, 0, wait_s=float("nan"), forward_s=-5.0, microbatches=-3)]
    metrics = folded(*events, done(1), own=("p0", "p1"))
    begin = time.perf_counter()
    found = samples(metrics)
    assert time.perf_counter() - begin < 2.0
    assert len(found) < 250
    assert {key[2] for key in found if key[0].startswith("muletrain_own_")} == {"p0", "p1"}
    assert found[("muletrain_peers", "3", "training")] == 125
    assert found[("muletrain_peer_seconds_total", "0", "idle")] == 125 * 4.0
    assert found[("muletrain_peer_seconds_total", "0", "forward")] == 125 + 0.0
    assert found[("muletrain_received_bytes_total", "1", "activation")] == 5000


def test_a_machine_that_joined_counts_its_own_peers() -> None:
    metrics = Metrics(["a"], whole=False)
    for event in (started(), joined("a", 1), applied("a", 4, 1), done(4)):
        metrics(event)
    found = samples(metrics)
    assert {key for key in found if key[0] == "muletrain_peers"} == {("muletrain_peers", "1", s) for s in STATES}


def test_the_documentation_has_the_table_of_the_code() -> None:
    assert as_markdown() in (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")


def test_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    board = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    labels = {m.name: {*m.labels, "instance"} for m in METRICS}
    for histogram in [m for m in METRICS if m.type == "histogram"]:
        for end in ("_bucket", "_sum", "_count"):
            labels[histogram.name + end] = {"le", "instance"}
    asked = defaultdict[str, int](int)
    for panel in board["panels"]:
        for target in panel["targets"]:
            known = {"instance"}
            for name, given in re.findall(r"(muletrain_\w+)(?:\{([^}]*)\})?", target["expr"]):
                assert name in labels, f"{panel['title']}: {name}"
                asked[name] += 1
                known |= labels[name]
                assert {part.partition("=")[0] for part in given.split(",") if part} <= labels[name]
            for group in re.findall(r"by \(([^)]*)\)", target["expr"]):
                assert set(group.split(", ")) <= known, panel["title"]
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known, panel["title"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = [tuple(panel["gridPos"][k] for k in "xywh") for panel in board["panels"]]
    for n, (x, y, w, h) in enumerate(places):
        assert x + w <= 24
        for left, top, wide, high in places[:n]:
            assert x >= left + wide or left >= x + w or y >= top + high or top >= y + h, board["panels"][n]["title"]
    assert {v["name"] for v in board["templating"]["list"]} == set(
        re.findall(r"\$\{?(datasource|instance)", str(board))
    )


def test_an_address_is_a_port_or_a_host_with_one() -> None:
    assert address("9464") == ("127.0.0.1", 9464)
    assert address("0.0.0.0:1") == ("0.0.0.0", 1)
    assert address("[::1]:80") == ("::1", 80)
    for wrong in ("", "host", "host:", "70000", "-1", "1:2:x"):
        with pytest.raises(MuletrainError, match="is no PORT and no HOST:PORT, such as 9464"):
            address(wrong)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
        assert isinstance(text, str)
        return text


def test_the_server_shows_one_session_after_another_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with MetricsServer("0") as server:
        assert "muletrain" not in get(server.url)
        server.show(folded(*RUN))
        assert "muletrain_step 1.0" in get(server.url)
        server.show(folded(started(), done(1), done(2), done(3)))
        assert "muletrain_step 3.0" in get(server.url)
        assert "python_info" not in get(server.url), "its own registry"
        port = int(server.url.split(":")[2].split("/")[0])
        with pytest.raises(MuletrainError, match=f"cannot serve on 127.0.0.1:{port}: another program uses that port"):
            MetricsServer(str(port)).__enter__()
    with closing(socket.create_server(("127.0.0.1", port))):
        pass
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_a_client_that_asks_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muletrain.runs.metrics.SILENT_S", 0.2)
    with MetricsServer("0") as server:
        server.show(folded(*RUN))
        port = int(server.url.split(":")[2].split("/")[0])
        with closing(socket.create_connection(("127.0.0.1", port), timeout=10)) as silent:
            assert "muletrain_step 1.0" in get(server.url)
            assert silent.recv(1) == b"", "the server closed the connection"


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MuletrainError, match=r"pip install 'muletrain\[metrics\]', or leave it out"):
        MetricsServer("0")


def test_a_port_in_use_is_an_error_before_the_run(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        process = start("run", "--metrics", port, cwd=tmp_path)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 2, out + err
    assert "another program uses that port" in " ".join(err.split())
    assert not (tmp_path / "runs").exists()


def test_a_run_serves_what_its_events_say(tmp_path: Path) -> None:
    process = start("run", *SMALL, *TWO, "--set", "train.steps=40", "--metrics", "0", cwd=tmp_path)
    seen = ""
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split()[1]
        assert line.startswith("metrics: http://127.0.0.1:"), line
        reader = threading.Thread(target=process.stdout.read)
        reader.start()
        while process.poll() is None:
            try:
                seen = get(url)
            except OSError:
                break
            time.sleep(0.05)
        assert process.wait(timeout=100) == 0
        reader.join()
    finally:
        process.kill()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
    told = read(seen)
    (folder,) = (tmp_path / "runs").iterdir()
    metrics = Metrics(["peer-0", "peer-1"])
    for event in ev.EventTail(folder).poll():
        metrics(event)
    expected = samples(metrics)
    assert expected[("muletrain_step",)] == 40
    last = told[("muletrain_step",)]
    assert 0 < last <= 40
    counters = {m.name for m in METRICS if m.type == "counter"}
    if last == 40:  # the last look was at the end of training, when all but the final measurement had been counted
        assert {k: v for k, v in told.items() if k[0] in counters} == pytest.approx(
            {k: v for k, v in expected.items() if k[0] in counters}
        )
    assert {key[2] for key in told if key[0] == "muletrain_own_seconds_total"} == {"peer-0", "peer-1"}


class Reader:
    """A command, and the lines that it prints."""

    def __init__(self, *arguments: str, cwd: Path, **env: str) -> None:
        self.process = start(*arguments, cwd=cwd, **env)
        self.lines = list[str]()
        self._threads = [
            threading.Thread(target=self._read, args=(pipe,)) for pipe in (self.process.stdout, self.process.stderr)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, pipe: Any) -> None:
        with pipe:
            self.lines.extend(iter(pipe.readline, ""))

    def until(self, pattern: str) -> str:
        """The first group of ``pattern``, once a line has it."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found[1]
            time.sleep(0.05)
        raise AssertionError("".join(self.lines))

    def end(self, number: int = 0) -> int:
        if number:
            self.process.send_signal(number)
        code = self.process.wait(timeout=120)
        for thread in self._threads:
            thread.join()
        return code


def test_each_machine_serves_its_own_peers_and_a_joiner_logs_nowhere_else(tmp_path: Path) -> None:
    """The founder's configuration names trackio; the machine that joins writes files of its own."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    options = ["--set", "fleet.peers=2", "--set", "train.steps=100000", "--set", 'logging.to=["trackio"]']
    local = ("--listen", "127.0.0.1", "--metrics", "0")
    founder = Reader("start", *SMALL, *options, *local, "--name", "a", cwd=ours, TRACKIO_DIR=str(ours / "trackio"))
    commands = [founder]
    try:
        ticket = founder.until(r"muletrain join (\S+)")
        joiner = Reader(
            "join", ticket, *local, "--name", "b", "--device", "cpu", cwd=theirs, TRACKIO_DIR=str(theirs / "trackio")
        )
        commands.append(joiner)
        urls = [command.until(r"metrics: (http://127.0.0.1:\d+/metrics)") for command in commands]
        founder.until(r"step ([3-9]|\d\d+)/100000")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            told, others = (read(get(url)) for url in urls)
            if others.get(("muletrain_own_microbatches_total", "1", "b"), 0) > 20:
                break
            time.sleep(0.2)
        for found, name, stage in ((told, "a", "0"), (others, "b", "1")):
            own = {key[1:3] for key in found if key[0].startswith("muletrain_own_")}
            assert own == {(stage, name)}
            assert found[("muletrain_step",)] > 1
        assert told[("muletrain_peers", "1", "training")] == 1, "the founder knows both"
        assert told[("muletrain_sent_bytes_total", "1", "gradient")] > 0, "the coordinator gets all reports"
        assert told[("muletrain_own_received_bytes_total", "0", "a", "gradient")] > 0
        assert ("muletrain_microbatches_total", "0") not in others
        assert founder.end(signal.SIGINT) == 130
        assert joiner.end() == 0
    finally:
        for command in commands:
            command.process.kill()
            command.end()
    assert (ours / "trackio").exists()
    assert not (theirs / "trackio").exists()
    assert list(theirs.glob("runs/*/tensorboard/events.*"))
    assert not list(ours.glob("runs/*/tensorboard")), "logging.to does not name it"
