"""The dashboard without a browser: its fold equals the events, and its server lets in whom it should."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import io
import json
import math
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from muletrain import dashboard
from muletrain import events as ev
from muletrain.cli.actions.dashboard import print_folders
from muletrain.cli.actions.played import Play
from muletrain.cli.show.announcements import Announcements
from muletrain.cli.show.comparison import FIGURES
from muletrain.cli.show.final_report import final_report
from muletrain.cli.show.status import Announced, Down
from muletrain.dashboard import curve as curves
from muletrain.dashboard.curve import Curve
from muletrain.dashboard.frames import MOST, Frames
from muletrain.dashboard.gatekeeper import OWN_HEADER, Gatekeeper
from muletrain.dashboard.health import Facts, health
from muletrain.dashboard.page import MARKS, RunPage
from muletrain.dashboard.publisher import QUEUE, VIEWERS, Publisher
from muletrain.dashboard.server import PORT, Dashboard
from muletrain.dashboard.sources import FolderSource, config_in
from muletrain.dashboard.steering import steer
from muletrain.errors import MuletrainError
from muletrain.events import EventTail
from muletrain.events.event import parse, parse_own
from muletrain.runs.folder import held
from muletrain.runs.view import RunView
from muletrain.runs.worker_files import OWNER_FILE, STOP_FILE
from tests.played_events import BEGIN_S, later, played, prepared, written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def page_of(events: Iterable[ev.Event], **more: Any) -> RunPage:
    now = [BEGIN_S]
    page = RunPage("played", "runs/played", clock=lambda: now[0], **more)
    page.loading = True  # frames may cost more
    for event in events:
        page(event)
        now[0] = event.t
    page.loading = False
    return page


def test_the_page_shows_the_sums_of_the_events() -> None:
    events = list(played(peers=4, stages=2, steps=12, checkpoint=5))
    page = page_of(events)
    sections, peers = page.sections(), page.peers()
    applied = [e for e in events if isinstance(e, ev.StepApplied)]
    done = [e for e in events if isinstance(e, ev.StepDone)]
    sent = sum(size for e in applied for classes in e.sent.values() for size in classes.values())
    assert sections["head"]["step"] == 12
    assert sections["head"]["tokens"] == sum(e.tokens for e in done)
    assert sections["head"]["sent"] == sum(sum(link["bytes"].values()) for link in sections["links"]) == sent
    for name, peer in peers.items():
        assert peer["microbatches"] == sum(e.microbatches for e in applied if e.peer == name)
        assert peer["state"] == "training"
        assert peer["memory"] == 2_100_000_000
    assert [row[0] for row in (p.row() for p in page.curve.points)] == [e.step for e in done]
    assert [p.row()[3] for p in page.curve.points] == pytest.approx([e.loss for e in done], abs=1e-4)
    assert [c["step"] for c in sections["checkpoints"]] == [5, 10]
    assert [h[0] for h in sections["heldout"]] == [5, 10]
    assert [m["kind"] for m in page.marks].count("joined") == 4
    assert sections["health"]["word"] == "done"


def test_a_lost_peer_is_silent_then_gone_then_back() -> None:
    events = [*played(peers=4, stages=2, steps=6)]
    name = "virginia-1"
    page = page_of(events[:-3])
    t = events[-3].t
    page(ev.PeerDown(t=t, peer="frankfurt-0", peer_id=f"id-{name}", name=name, reason="no answer"))
    assert page.peers()[name]["state"] == "silent"
    assert page.marks[-1]["kind"] == "lost"
    page(replace(next(e for e in events if isinstance(e, ev.PeerJoined) and e.name == name), t=t + 1))
    assert page.peers()[name]["state"] == "ready"
    page(ev.PeerDown(t=t + 2, peer="frankfurt-0", peer_id=f"id-{name}", name=name, reason="no answer"))
    assert [m["kind"] for m in page.marks].count("lost") == 2, "the same words, but another loss"


def test_a_killed_process_is_gone_at_once() -> None:
    page = page_of(played(peers=4, stages=2, steps=3))
    page(ev.FaultInjected(t=1, what="kill", who=["tokyo-2"], for_s=0, planned="kill any@step3", step=3))
    page.ended("virginia-1", "was killed")
    assert {name for name, peer in page.peers().items() if peer["state"] == "gone"} == {"tokyo-2", "virginia-1"}


def test_a_step_back_takes_its_steps_from_the_curve() -> None:
    page = page_of(played(peers=2, stages=1, steps=8, planned=20))
    page(ev.SteppedBack(t=1, peer="x", step=8, to=5, lost=[0], moves=[], lineage="b"))
    assert page.curve.points[-1].step == 5
    assert page.marks[-1]["kind"] == "back"


@pytest.mark.parametrize("ended", ["in order", "killed", "killed, without a plan"])
def test_a_resumed_run_goes_on_in_the_same_curve(ended: str) -> None:
    """Also if ``kill -9`` left no last word, with another number of steps and other peers."""
    first = [*played(peers=4, stages=1, steps=6, planned=12)]
    page = page_of(first)
    if ended == "in order":
        page(ev.RunFinished(t=first[-1].t, peer="a", steps=6, seconds=1, reason="stopped"))
        assert page.sections()["health"]["word"] == "stopped"
    page(ev.Validated(t=first[-1].t, peer="a", step=6, loss=1.0, perplexity=2.0, tokens=1))
    if ended != "killed, without a plan":
        page(prepared(first[-1].t + 9, steps=30, first_step=4))
        assert page.sections()["health"]["word"] == "starting"
    for event in played(peers=2, stages=1, steps=8, planned=30):
        if getattr(event, "step", 9) > 4:
            again = replace(event, t=event.t + 99)
            page(replace(again, first_step=4, run_id="again") if isinstance(again, ev.RunStarted) else again)
    sections = page.sections()
    assert [p.step for p in page.curve.points] == [*range(1, 9)]
    assert (sections["head"]["step"], sections["head"]["steps"]) == (8, 30)
    assert sections["head"]["tokens"] == 8 * 64 * 2048
    assert sections["head"]["trained_s"] == pytest.approx(100, abs=10), "the time without processes does not count"
    assert sections["health"]["word"] == "training"
    assert sections["run"]["run_id"] == "again"
    assert sections["heldout"] == [], "step 6 is taken again"
    assert len(page.peers()) == 2, "the peers of earlier processes are no peers of the run"
    assert any("run again: 30 steps" in mark["text"] for mark in page.marks)


def test_the_configuration_on_the_page_has_the_decided_numbers() -> None:
    """``train.epochs`` decides the steps; a file keeps the given number."""
    page = RunPage("run", config={"train.steps": "300", "train.epochs": "1", "data.path": "x"})
    page(prepared(1.0, steps=54))
    assert page.sections()["run"]["config"] == {"train.steps": "54", "train.epochs": "1", "data.path": "x"}


def test_the_throughput_of_an_ended_run_stays(tmp_path: Path) -> None:
    events = [*played(peers=2, stages=1, steps=5, planned=9)]
    now = events[-1].t + 500
    view = RunView()
    for event in events:
        view.fold(event)
    standing = view.pace.tokens_per_s(now)
    view.fold(ev.RunFinished(t=events[-1].t, peer="a", steps=5, seconds=1, reason="stopped by the user"))
    assert view.pace.tokens_per_s(now) == view.pace.tokens_per_s() > 2 * standing
    done = RunView()
    for event in played(peers=2, stages=1, steps=5):
        done.fold(event)
    assert done.pace.tokens_per_s(now) == done.pace.tokens_per_s(), "the model is measured: no step is overdue"


def test_a_killed_run_is_dead_at_once(tmp_path: Path) -> None:
    """The lock says so; only where it is unknown, the last event counts."""
    now = time.time()
    written(later(played(peers=2, stages=1, steps=5, planned=9), now - 55 - BEGIN_S), tmp_path)
    source = FolderSource(tmp_path, lambda: False)
    source.look()
    assert source.page.sections()["health"]["word"] == "training", "a copied folder has no lock"
    with held(tmp_path):
        source.look()
        assert source.page.sections()["health"]["word"] == "training"
    source.look()
    assert source.page.sections()["health"]["word"] == "dead"


def test_runs_side_by_side_without_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a server without a browser; the figures are the page's."""
    one = written(played(peers=2, stages=1, steps=5), tmp_path / "one")
    two = written(played(peers=4, stages=2, steps=6, planned=9), tmp_path / "two")
    (two / "config.toml").write_text("[train]\nsteps = 9\n")
    print_folders([one, two])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for expected in (
        ["figure", "one", "two"],
        ["health", "done", "dead"],
        ["peers", "2", "4"],
        ["train.steps", "1", "9"],
    ):
        assert expected in rows
    assert any(row[:2] == ["loss", "[nats/token]"] for row in rows), "no markup"
    named = (Path(dashboard.__file__).parent / "static" / "panels.js").read_text(encoding="utf-8")
    assert all(f'["{name}", (r) =>' in named for name in FIGURES)


def test_the_slow_peer_of_a_stage_and_the_busiest_stage_are_named() -> None:
    """A peer that gets few microbatches is idle otherwise, so its shares alone say nothing. The busiest stage has the
    figure of its cards, and on one machine no further one is called for."""
    view = RunView()
    for event in played(peers=4, stages=2, steps=6, planned=9):
        if isinstance(event, ev.StepApplied):
            slow, busy = event.peer == "frankfurt-3", 6.0 if event.stage else 3.0
            work = {"forward_s": busy / 3, "backward_s": busy * 2 / 3, "averaging_s": 0.0, "apply_s": 0.0}
            event = replace(event, **work, wait_s=10 - busy, microbatches=3 if slow else 30)
        view.fold(event)
    told = health(view, BEGIN_S + 65, Facts("", True, math.nan, 0, True)).remedy
    assert told.startswith(
        "frankfurt-3 is slow: a microbatch of stage 1 takes 2.0 s (virginia-1: 200 ms). Stage 1 is busy 60 % of the time, "
        "stage 0 only 30 %"
    )
    assert "A further machine helps most there" in told
    console = Console(file=io.StringIO(), width=200)
    console.print(final_report(view, None, [], {}, tables=False))
    assert "frankfurt-3 is slow: a microbatch of stage 1" in console.file.getvalue()  # type: ignore[attr-defined]
    local = health(view, BEGIN_S + 65, Facts("runs/x", True, math.nan, 0, False)).remedy
    assert "further machine" not in local


def test_numbers_that_json_cannot_say_are_left_out() -> None:
    page = page_of(played(peers=2, stages=1, steps=3))
    page(
        ev.StepDone(
            t=BEGIN_S + 99,
            peer="x",
            step=4,
            loss=math.nan,
            grad_norm=math.nan,
            lr=0.1,
            tokens=5,
            duration_s=1,
            lineage="q",
        )
    )
    text = Publisher([page]).full()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))["runs"][0]["curve"]["rows"][-1][3] is None


def test_curves_marks_and_frames_are_bounded() -> None:
    curve, frames, page = Curve(), Frames(), RunPage("x")
    for step in range(1, 3 * curves.MOST + 1):
        curve.add(step, step, step, 2.0, 10, 0.5)
        frames.take(2.0 * step, lambda: b"{}", hurry=True)
    assert curves.MOST / 2 <= len(curve.points) <= curves.MOST
    assert sum(p.steps for p in curve.points) == 3 * curves.MOST
    assert {p.row()[4] for p in curve.points} == {20.0}
    assert len(frames.times) <= MOST
    for k in range(MARKS + 10):
        page(ev.Note(level="info", message=str(k), t=k))
    assert len(page.marks) == MARKS
    assert page.marked == MARKS + 10


def test_an_earlier_time_shows_the_state_of_that_time() -> None:
    events = [*played(peers=4, stages=2, steps=30)]
    page = page_of(events)
    done = next(e for e in events if isinstance(e, ev.StepDone) and e.step == 10)
    found = page.frames.at(done.t)
    assert found is not None
    t, state = found[0], json.loads(found[1])
    until = page_of(e for e in events if e.t <= t)
    assert BEGIN_S < t <= done.t
    assert state["peers"] == until.peers()
    assert state["head"]["step"] == until.sections()["head"]["step"]


HEALTH: list[tuple[str, Callable[[RunView], object], dict[str, Any]]] = [
    ("waiting", lambda v: v.fold(ev.Waiting(missing=["stage 1 has no peer"])), {}),
    ("starting", lambda v: None, {}),
    ("measuring", lambda v: v.fold(ev.ProbeProgress(done=0, total=2, what="links")), {}),
    ("training", lambda v: run(v, 5), {}),
    ("dead", lambda v: run(v, 5), {"live": False}),
    ("done", lambda v: run(v, 20), {}),
    ("stopped", lambda v: (run(v, 5), v.fold(ev.RunFinished(steps=5, seconds=1, reason="time limit"))), {}),
    ("slow", lambda v: run(v, 5), {"usual": 1e9}),
    ("diverging", lambda v: run(v, 5), {"skipped": 4}),
    ("lost", lambda v: (run(v, 5), [v.ended(n, "") for n in ("virginia-1", "frankfurt-3")]), {}),
    ("failed", lambda v: v.fold(ev.Note(level="error", message="no memory", peer="a")), {"live": False}),
]


def run(view: RunView, steps: int) -> None:
    for event in played(peers=4, stages=2, steps=steps, planned=20):
        view.fold(event)


@pytest.mark.parametrize(("word", "happen", "more"), HEALTH)
def test_health_is_one_word_and_a_remedy(word: str, happen: Callable[[RunView], object], more: dict[str, Any]) -> None:
    view = RunView()
    happen(view)
    facts = Facts("runs/x", True, math.nan, 0, True)._replace(**more)
    found = health(view, view.pace.end_s, facts)
    assert found.word == word
    assert found.why
    assert found.remedy or word == "training"


def test_a_run_that_stands_still_is_stalled() -> None:
    view = RunView()
    run(view, 10)
    found = health(view, view.pace.end_s + 300, Facts("", True, 13_000.0, 0, False))
    assert (found.word, found.tone) == ("stalled", "warn")


# Events from files -----------------------------------------------------------------------------------------------------


def test_lines_of_this_machine_read_as_all_lines_do(tmp_path: Path) -> None:
    events = [*played(peers=3, stages=2, steps=4, losses=1), ev.StepDone(1, math.nan, math.inf, 0.1, 3, 1.0, "l")]
    for event in events:
        line = event.to_json().encode()
        assert repr(parse_own(line)) == repr(parse(line))
    with pytest.raises(ev.EventError):
        parse_own(b'{"kind": "nothing"}')
    with pytest.raises(ev.EventError):
        parse_own(b'{"kind": "waiting", "t": 1.0, "peer": "", "missing": [], "more": 1}')
    folder = written(events, tmp_path / "run")
    assert len(EventTail(folder, own=True).poll()) == len(events)
    assert not any(isinstance(e, ev.StepDone) for e in EventTail(folder, own=True, skip=(ev.StepDone,)).poll())


def test_a_folder_is_followed(tmp_path: Path) -> None:
    events = [*played(peers=2, stages=1, steps=6, planned=9)]
    folder = written(events[:-4], tmp_path / "run")
    source = FolderSource(folder, lambda: True)
    source.look()
    before = source.page.sections()["head"]["step"]
    for event in events[-4:]:
        with (folder / f"{event.peer}.jsonl").open("a") as file:
            file.write(event.to_json() + "\nnot an event\n")
    source.look()
    assert source.page.sections()["head"]["step"] == 6 > before
    assert config_in(folder) == {"train.steps": "1"}


@pytest.mark.alone
def test_a_day_of_events_is_read_in_two_seconds(tmp_path: Path) -> None:
    """24 hours of eight peers with a step each ten seconds: about 75,000 events."""
    folder = written(played(8, 4, 8640, losses=40, checkpoint=200), tmp_path / "day")
    source = FolderSource(folder, lambda: False)
    best = math.inf
    for _ in range(3):  # other tests may run beside this one
        source = FolderSource(folder, lambda: False)
        source.page.loading = True
        begun = time.process_time()
        source.look()
        best = min(best, time.process_time() - begun)
    assert source.page.sections()["head"]["step"] == 8640
    assert best < 2.0 * 1.5, "seconds of CPU; benchmarks/dashboard has the figure of a free machine"


def test_announcements_become_events() -> None:
    def member(name: str, step: int, age_s: float = 1.0, down: tuple[Down, ...] = ()) -> Announced:
        about = {"stage": 0, "stages": 1, "trainer": True, "steps": 9, "loss": 2.0, "tokens_per_s": 100.0, "down": down}
        return Announced(id=f"id-{name}", age_s=age_s, name=name, step=step, **about)

    told, page = Announcements(), RunPage("r")
    looks = [
        ([], [], ("a peer for stage 0",)),
        ([member("a", 1), member("b", 1)], [], ()),
        ([member("a", 3), member("b", 1, 99.0)], [], ()),
        ([member("a", 5)], [], ()),
    ]
    for k, look in enumerate(looks):
        for event in told.events(look, 1000.0 + 10 * k):
            page(event)
    assert {p["name"]: p["state"] for p in page.peers().values()} == {"a": "ready", "b": "gone"}
    assert page.sections()["head"]["step"] == 5
    assert page.curve.points[-1].row()[4] == pytest.approx(100.0)


# The server -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def board() -> Iterator[Dashboard]:
    board = Dashboard(0)
    board.pages.append(page_of(played(peers=4, stages=2, steps=5, planned=9)))
    with board:
        yield board


def ask(board: Dashboard, path: str, method: str = "GET", body: str = "", **headers: str) -> tuple[int, Any, str]:
    connection = http.client.HTTPConnection("127.0.0.1", board.gate.port, timeout=5)
    try:
        connection.request(
            method, path, body=body or None, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        data = answer.read()
        text = gzip.decompress(data) if answer.getheader("Content-Encoding") == "gzip" else data
        return answer.status, answer, text.decode()
    finally:
        connection.close()


def test_pages_are_served_with_strict_headers(board: Dashboard) -> None:
    status, answer, text = ask(board, "/")
    assert (status, "<script>" in text, "style=" in text) == (200, False, False)
    assert "default-src 'none'" in str(answer.getheader("Content-Security-Policy"))
    assert "http" not in str(answer.getheader("Content-Security-Policy"))
    status, answer, text = ask(board, "/api/state", Accept_Encoding="gzip")
    assert (status, answer.getheader("Content-Encoding")) == (200, "gzip")
    assert json.loads(text)["steers"] is False
    assert ask(board, "/static/../server.py")[0] == 404


def test_the_link_with_the_token_sets_a_cookie_once(board: Dashboard) -> None:
    status, answer, _ = ask(board, board.url.partition(str(board.gate.port))[2])
    cookie = str(answer.getheader("Set-Cookie")).partition(";")[0]
    assert (status, answer.getheader("Location")) == (303, "/")
    assert json.loads(ask(board, "/api/state", Cookie=cookie)[2])["steers"] is True
    assert ask(board, "/?token=wrong")[0] == 403


@pytest.mark.parametrize(
    ("name", "code"), [("evil.example", 421), ("127.0.0.1:1", 200), ("localhost", 200), ("10.0.0.1", 421)]
)
def test_a_name_that_was_bent_to_this_machine_is_refused(board: Dashboard, name: str, code: int) -> None:
    assert ask(board, "/api/state", Host=name)[0] == code


def test_elsewhere_everything_needs_the_token() -> None:
    with Dashboard(0, "0.0.0.0") as board:
        assert ask(board, "/")[0] == 403
        assert ask(board, "/api/state")[0] == 403
        assert ask(board, "/?token=x")[0] == 403
        cookie = f"{board.gate.cookie}={board.gate.token}"
        assert ask(board, "/api/state", Cookie=cookie)[0] == 200
        assert ask(board, "/api/state", Cookie=cookie[:-1])[0] == 403


def test_commands_need_token_header_and_origin(board: Dashboard) -> None:
    own = {
        "Origin": f"http://127.0.0.1:{board.gate.port}",
        "X_Muletrain": "1",
        "Cookie": f"{board.gate.cookie}={board.gate.token}",
    }
    body = '{"run": 0, "action": "stop"}'
    for missing in own:
        assert ask(board, "/api/act", "POST", body, **{k: v for k, v in own.items() if k != missing})[0] == 403
    assert ask(board, "/api/act", "POST", body, **{**own, "Origin": "http://evil.example"})[0] == 403
    assert ask(board, "/api/act", **own)[0] == 405
    status, _, text = ask(board, "/api/act", "POST", body, **own)
    assert (status, json.loads(text)["ok"]) == (200, False), "this run has no owner's key here"


def test_only_stop_and_kick_of_an_id_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "x"
    folder.mkdir(parents=True)
    for action, peer in (("start", ""), ("kick", ""), ("kick", "--help"), ("kick", "a b; rm"), ("stop", "")):
        assert not asyncio.run(steer(folder, action, peer)).ok
    (folder / OWNER_FILE).touch()
    monkeypatch.setattr("muletrain.runs.here.TAKEN_S", 0.2)
    done = asyncio.run(steer(folder, "stop", ""))
    assert (done.ok, "does not answer" in done.text) == (False, True), "no command runs there"
    assert not (folder / STOP_FILE).exists(), "nor does a later one end at once"


def test_tokens_are_compared_as_a_whole() -> None:
    gate = Gatekeeper("0.0.0.0")
    assert not any(map(gate.has_token, (None, "", gate.token[:-1], gate.token + "x", "é")))
    assert gate.has_token(gate.token)


def test_a_port_in_use_and_a_missing_extra_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(MuletrainError, match="another program uses port"),
    ):
        Dashboard(taken.getsockname()[1]).__enter__()
    with Dashboard() as one, Dashboard() as two:
        assert PORT <= one.gate.port != two.gate.port
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MuletrainError, match=r"pip install 'muletrain\[dashboard\]'"):
        Dashboard()


def lines_of(board: Dashboard, after: str, seconds: float, **headers: str) -> list[str]:
    """Lines of the stream of events until nothing comes for so long."""
    connection = http.client.HTTPConnection("127.0.0.1", board.gate.port, timeout=seconds)
    connection.request(
        "GET", f"/api/events?after={after}", headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    answer, found = connection.getresponse(), list[str]()
    try:
        while line := answer.readline():
            found.append(line.decode().rstrip())
    except TimeoutError:
        pass
    finally:
        connection.close()
    return [line for line in found if line]


def test_a_viewer_gets_changes_and_goes_on_after_a_break(board: Dashboard) -> None:
    page = board.pages[0]
    state = json.loads(ask(board, "/api/state")[2])
    timer = threading.Timer(0.3, page, [ev.Note(level="warning", message="<b>one</b>", t=BEGIN_S + 99)])
    timer.start()
    lines = lines_of(board, state["id"], 1.5)
    timer.join()
    changes = [json.loads(line[6:])["runs"]["0"] for line in lines if line.startswith("data: ")]
    assert [m["text"] for c in changes for m in c.get("marks", [])] == ["<b>one</b>"]
    last = next(line[4:] for line in reversed(lines) if line.startswith("id: "))
    page(ev.Note(level="warning", message="two", t=BEGIN_S + 100))
    again = lines_of(board, state["id"], 0.8, Last_Event_ID=last)
    found = [json.loads(line[6:])["runs"]["0"] for line in again if line.startswith("data: ")]
    assert [m["text"] for c in found for m in c.get("marks", [])] == ["two"]
    assert "event: reset" in lines_of(board, "other-7", 0.5)


def test_a_slow_viewer_is_dropped_and_others_stay() -> None:
    page = page_of(played(peers=2, stages=1, steps=2))

    async def watch() -> tuple[int, int]:
        publisher = Publisher([page])
        publisher.look()
        slow, quick = (publisher.stream(f"{publisher.boot}-{publisher.number}") for _ in range(2))
        await anext(slow), await anext(quick)
        for k in range(QUEUE + 3):
            page(ev.Note(level="info", message=str(k), t=k))
            publisher.look()
            await anext(quick)
        left = [chunk async for chunk in slow]
        await quick.aclose()
        return len(left), len(publisher._viewers)

    left, viewers = asyncio.run(watch())
    assert left < QUEUE
    assert viewers == 0


def test_viewers_are_bounded() -> None:
    async def fill() -> str:
        publisher = Publisher([RunPage("x")])
        publisher.look()
        streams = [publisher.stream(f"{publisher.boot}-{publisher.number}") for _ in range(VIEWERS + 1)]
        firsts = [await anext(stream) for stream in streams]
        for stream in streams:
            await stream.aclose()
        return firsts[-1]

    assert "event: full" in asyncio.run(fill())


def test_without_viewers_nothing_is_serialised(board: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(board.pages[0], "sections", lambda: calls.append(1))
    for k in range(50):
        board.pages[0](ev.Note(level="info", message=str(k), t=k))
    time.sleep(1.0)
    assert not calls


def test_a_simulated_run_has_a_page(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(
        'name = "two"\n[[machines]]\nname = "a"\ncount = 2\nforward_ms = 333\nbackward_ms = 667\n'
        "[defaults]\nlocal_rtt_ms = 50\n"
    )
    small = ("model.width=256", "model.heads=4", "model.context=512", "model.vocab=512", "model.layers=2")
    play = Play(
        file, 60 / 3600, [*small, "train.microbatch=1", "train.batch=4", "fleet.stages=2", "checkpoint.every=0"]
    )
    play.run()
    sections, peers = play.page.sections(), play.page.peers()
    assert sections["head"]["step"] > 2
    assert sections["head"]["tokens"] == sections["head"]["step"] * 4 * 512
    assert sections["head"]["loss"] is None, "nothing is learned"
    assert {peer["stage"] for peer in peers.values()} == {0, 1}
    assert sections["health"]["word"] == "stopped"
    assert play.page.marks[-1]["text"].endswith("the simulated time is over")


def test_a_long_command_is_refused_before_its_end_and_a_strange_number_begins_again() -> None:
    with Dashboard(0) as board:
        here = f"127.0.0.1:{board.gate.port}"
        connection = http.client.HTTPConnection(here, timeout=10)
        connection.putrequest("POST", "/api/act")
        own = {"Cookie": f"{board.gate.cookie}={board.gate.token}", "Origin": f"http://{here}", OWN_HEADER: "1"}
        for name, value in {**own, "Content-Length": "10000000"}.items():
            connection.putheader(name, value)
        connection.endheaders(b"x" * 10_000)  # the rest never comes
        assert connection.getresponse().status == 400
        connection.close()
        connection = http.client.HTTPConnection(here, timeout=10)
        connection.request("GET", f"/api/events?after={board.publisher.boot}-{'9' * 5000}")
        assert connection.getresponse().readline() == b"event: reset\n"
        connection.close()
