"""``muletrain status``: what peers announce in the directory, and what is shown of it."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from muletrain.cli.actions.visit import ask_to_stop, found_run, show_status, stop_run, ticket_of
from muletrain.cli.show.status import Announced, announced_by, status_of
from muletrain.clock import LoopClock
from muletrain.errors import MuletrainError, PeerUnreachable
from muletrain.events import EventLog, RunFinished, StepDone, StepWaits, Validated
from muletrain.network.memory import MemoryHub
from muletrain.runs.folder import held
from muletrain.runs.join.removal import CALL_TIMEOUT_S, AskMembers, Listed, Members, serve_members, serving
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.view import Pace, RunView
from muletrain.runs.worker_files import LEFT, OWNER_FILE, PROTOCOL, STOP_FILE, TICKET_FILE
from muletrain.runtime.peer.messages import LOADING, StopRun
from muletrain.runtime.peer.reporting import Shown
from tests.daemons import OWNER, SECRET, world
from tests.played_events import played, prepared
from tests.test_console import applied
from tests.virtual import virtually

if TYPE_CHECKING:
    from collections.abc import Callable


def announced(**changes: object) -> bytes:
    fine = {
        "name": "b",
        "stage": 1,
        "stages": 3,
        "trainer": False,
        "step": 3,
        "steps": 10,
        "loss": 4.5,
        "tokens_per_s": 1e4,
    }
    return json.dumps(fine | changes).encode()


def test_what_makes_no_sense_in_the_directory_hides_nobody() -> None:
    assert Announced.read("id", announced()) is not None
    assert Announced.read("id", announced(loss=None)) is not None, "no step is done yet"
    wrong = [
        {"stage": "x"},
        {"stage": 3},
        {"step": 11},
        {"stages": 10**9},
        {"loss": math.nan},
        {"name": ""},
        {"step": -1},
    ]
    for value in (b"\xff", b"[]", b"7", b"{}", b"[" * 60_000, *(announced(**w) for w in wrong)):
        assert Announced.read("id", value) is None, value[:40]
    named = Announced.read("id", announced(name="\x1b[2Jb\u202e"))
    assert named is not None
    assert named.name == "\ufffd[2Jb\ufffd", "no name steers a terminal"


def test_status_shows_progress_and_which_stage_nobody_serves() -> None:
    peers = [
        Announced.read("id-of-a", announced(name="a", stage=0, step=4, loss=4.25)),
        Announced.read("id-of-b", announced()),
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(status_of([p for p in peers if p is not None], ()))
    console.print(status_of([], ["stage 1 has no peer", "2 of 4 peers ready"]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 4 of 10  loss 4.250  10,000 tokens/s" in text
    assert ["1", "b", "training", "3", "0", "s", "ago"] in [line.split() for line in text.splitlines()]
    assert "no recent announcement" in text
    assert "stage 1 has no peer; 2 of 4 peers ready" in " ".join(text.split())


def test_status_shows_for_whom_the_run_waits_and_what_comes_next() -> None:
    told = StepWaits(step=5, what="the stage's replicas to seal", names=["b"], more=2, seconds=31.0, then="asks again")
    peer = Announced.read("id-of-a", announced(name="a", stage=0, step=4, waits=told.reason()))
    assert peer is not None
    console = Console(file=io.StringIO(), width=80)
    console.print(status_of([peer], ()))
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "a has waited 31 s for the stage's replicas to seal (b, 2 more); asks again" in text
    view = RunView()
    assert view.fold(replace(told, peer="a"))
    assert not view.fold(replace(told, peer="b")), "one peer of those that wait for the same is enough"
    assert view.peers["a"].waits is not None
    view.fold(applied("a", 0, step=5))
    assert view.peers["a"].waits is None


def test_status_shows_how_old_its_news_is_and_believes_the_fresh() -> None:
    """After a step back, what one that died said before goes further than the run is."""
    old = Announced.read("id-of-old", announced(name="a", stage=0, step=9, loss=3.0), age_s=24.7)
    new = Announced.read("id-of-new", announced(name="a", stage=0, step=4), age_s=-1.0)
    assert old is not None
    assert new is not None
    console = Console(file=io.StringIO(), width=80)
    console.print(status_of([old, new], ()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 4 of 10  loss 4.500" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "a", "suspected", "9", "25", "s", "ago", "d-of-old"] in rows, "two of one name: ids tell them apart"
    assert ["0", "a", "training", "4", "0", "s", "ago", "d-of-new"] in rows


def test_status_marks_who_does_not_answer() -> None:
    down = [{"id": f"id-of-{name}", "name": name, "stage": 1} for name in "bc"]
    peers = [Announced.read("id-of-a", announced(name="a", stage=0, step=4, down=down))]
    peers += [Announced.read("id-of-b", announced()), Announced.read("id-of-d", announced(name="d", stage=2))]
    console = Console(file=io.StringIO(), width=80)
    console.print(status_of([p for p in peers if p is not None], ()))
    rows = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert [row[:3] for row in rows[2:]] == [
        ["0", "a", "training"],
        ["1", "b", "suspected"],
        ["1", "c", "gone"],
        ["2", "d", "training"],
    ]


def test_status_shows_members_whose_clock_is_off_and_needs_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """What they announce has expired on its way, but other members know them."""

    async def scenario() -> tuple[str, str]:
        async with world() as w:
            a = await w.open(protocol=PROTOCOL)
            names, stages = (
                {a.peer_id: "a", "id-of-slow": "slow", "id-of-dead": "dead"},
                {a.peer_id: 0, "id-of-slow": 1},
            )
            serve_members(a, lambda: names, lambda: stages)
            ticket = str(Ticket("run", SECRET, OWNER.public, tuple(a.addresses())))
            await asyncio.to_thread(show_status, ticket, json=False)
            await a.announce("run/peers", announced(name="a", stage=0, step=4), 20)
            code = (
                "import sys; from muletrain.cli.actions.visit import show_status; show_status(sys.argv[1], json=False); "
                "print({'torch', 'scipy'} & sys.modules.keys())"
            )
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, ticket, stdout=asyncio.subprocess.PIPE, env={**os.environ, "COLUMNS": "200"}
            )
            return capsys.readouterr().out, (await child.communicate())[0].decode()

    nobody, some = asyncio.run(scenario())
    assert "a (stage 0), slow (stage 1)" in " ".join(nobody.split())
    assert "without an announcement that counts: slow (stage 1)" in some
    assert "dead" not in some
    assert "step 4 of 10" in some
    assert some.endswith("set()\n"), "torch takes seconds to import"


@pytest.mark.parametrize("lives", [True, False])
def test_frozen_members_hold_up_the_question_who_serves_no_longer_than_one_of_them(lives: bool) -> None:
    """They are asked side by side, for they announced themselves half a minute ago. So a member that lives is heard at
    once, and if there is none, the answer of one is waited for."""

    async def scenario() -> tuple[list[str], float]:
        hub = MemoryHub()
        frozen, living = [f"frozen-{n}" for n in range(6)], hub.join("living")
        for name in frozen:
            hub.join(name)
            hub.barriers.freeze(name)

        async def members(sender: str, payload: bytes) -> bytes:
            by_stage = (("a", 0), ("slow", 1), ("dead", None))
            return Members(members=tuple(Listed(id=n, name=n, certificate=b"", stage=s) for n, s in by_stage)).pack()

        async def garbage(sender: str, payload: bytes) -> bytes:
            return b"garbage"

        living.serve(AskMembers.KIND, members)
        hub.join("liar").serve(AskMembers.KIND, garbage)
        known = await serving(hub.join("visitor"), ["liar", *frozen, *frozen, *(["living"] if lives else [])])
        return [m.name for m in known], LoopClock().now()

    names, took_s = virtually(scenario())
    assert names == (["a", "slow"] if lives else []), "the dead serve no stage"
    assert took_s <= (1.0 if lives else CALL_TIMEOUT_S + 1.0)


@pytest.mark.alone
def test_status_leaves_out_who_left_and_has_the_runs_figures_once(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open(protocol=PROTOCOL)
            b = await w.open(a, protocol=PROTOCOL)
            await a.announce("run/peers", announced(name="a", stage=0, step=4), 20)
            await b.announce("run/peers", announced(left=True), 30)
            ticket = str(Ticket("run", SECRET, OWNER.public, tuple(a.addresses())))
            for as_json in (True, False):
                await asyncio.to_thread(show_status, ticket, json=as_json)

    asyncio.run(scenario())
    told, shown = capsys.readouterr().out.split("\n", 1)
    status = json.loads(told)
    assert (status["step"], status["loss"], status["tokens_per_s"]) == (4, 4.5, 1e4)
    (peer,) = status["peers"]
    assert (peer["name"], peer["step"]) == ("a", 4)
    assert 10 <= peer["age_s"] <= 14, "it said so for 30 s, and 20 were left"
    assert not {"loss", "tokens_per_s"} & peer.keys(), "those are the run's"
    assert "no recent announcement" in shown


@pytest.mark.alone
def test_status_of_a_run_that_is_over() -> None:
    async def over() -> str:
        async with world() as w:
            gone = await w.open(protocol=PROTOCOL)
            return str(Ticket("run", SECRET, OWNER.public, tuple(gone.addresses())))

    ticket = asyncio.run(over())
    with pytest.raises(PeerUnreachable, match=re.escape(Ticket.parse(ticket).ports())):
        show_status(ticket, json=False)


def test_a_stop_that_comes_as_the_run_ends_says_so() -> None:
    """The members announced themselves, and are at their end: they serve no stop any more, or are gone."""

    async def scenario() -> None:
        async with world() as w:
            knows = await w.open()
            member = await w.open(knows)
            visitor = await w.open(knows, visitor=True)
            with pytest.raises(MuletrainError, match="no peer has announced itself yet"):
                await ask_to_stop(visitor, "run")
            await member.announce("run/peers", announced(), 60.0)
            assert not await ask_to_stop(visitor, "run"), "it serves none"

            async def fails(sender: str, payload: bytes) -> bytes:
                raise MuletrainError("too many calls")

            member.serve(StopRun.KIND, fails)
            with pytest.raises(MuletrainError, match=r"^b: too many calls$"):
                await ask_to_stop(visitor, "run")

            async def stops(sender: str, payload: bytes) -> bytes:
                return b""

            member.serve(StopRun.KIND, stops)
            assert await ask_to_stop(visitor, "run") == "in the run folder of the machine of a member"
            await member.announce("run/peers", announced(name="c", collects=True), 60.0)
            assert await ask_to_stop(visitor, "run") == "in the run folder of the machine of c"
            await member.close()
            assert not await ask_to_stop(visitor, "run"), "it is gone"

    asyncio.run(scenario())


def test_a_stop_of_a_run_that_has_ended_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MuletrainError, match="no running run under"):
        stop_run(None)
    with EventLog(tmp_path / "runs" / "a" / "peer-0.jsonl", "peer-0") as log:
        log.emit(RunFinished(steps=9, seconds=1.0, reason=LEFT))
        with pytest.raises(MuletrainError, match="no running run under"):
            stop_run(None)
        log.emit(RunFinished(steps=9, seconds=1.0, reason="all steps done"))
    stop_run(None)
    assert capsys.readouterr().out == "the run has ended\n"


def test_many_peers_are_a_line_for_each_stage_unless_all_are_asked_for() -> None:
    down = [{"id": "id-of-3", "name": "p3", "stage": 0}, {"id": "gone", "name": "gone", "stage": 1}]
    read = [
        Announced.read(f"id-of-{n}", announced(name=f"p{n}", stage=n % 2, step=4, down=down if n == 0 else []))
        for n in range(40)
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(status_of([p for p in read if p is not None], ()))
    short = console.file.getvalue()  # type: ignore[attr-defined]
    console.print(status_of([p for p in read if p is not None], (), verbose=True))
    whole = console.file.getvalue()[len(short) :]  # type: ignore[attr-defined]
    rows = [" ".join(line.split()) for line in short.splitlines()]
    assert rows[2:] == [
        "0 20 20 training 4",
        "1 20 19 training, 1 suspected, 1 gone 4",
        "2 0 no recent announcement -",
        "--verbose lists each peer",
    ]
    assert sum("training" in line for line in whole.splitlines()) == 39


def begun(folder: Path, steps: int = 0, command: str = "run") -> None:
    """Write the events of a command that is at step ``steps`` of 9, with one peer; the owner's key is older."""
    (folder / OWNER_FILE).touch()
    with EventLog(folder / "summary.jsonl", "summary") as log:
        log.emit(prepared(0.0, steps=9, command=command))
    with EventLog(folder / "peer-0.jsonl", "peer-0") as log:
        first, joined, *rest = played(peers=1, stages=1, steps=9)
        log.emit(replace(first, run_id="one"))
        log.emit(joined)
        done = (e for e in rest if isinstance(e, StepDone))
        for _ in range(steps):
            log.emit(next(done))


def test_status_and_stop_know_the_run_that_a_command_of_this_machine_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of one peer, which nobody can join, and while the command prepares; by the folder, too."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs") / "a"
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()

    def said(act: Callable[[], None]) -> str:
        act()
        return " ".join(capsys.readouterr().out.split())

    with held(folder):
        for run in (None, str(folder)):
            assert said(lambda run=run: show_status(run, json=False)) == (  # type: ignore[misc]
                "training has not started: this machine prepares model and data"
            )
        assert said(lambda: stop_run(None)) == "the run in runs/a ends before its first step"
        assert (folder / STOP_FILE).exists(), "the command finds it later"
        (folder / STOP_FILE).unlink()
        begun(folder, steps=4)
        assert said(lambda: show_status(None, json=False)).startswith("step 4 of 9 loss")
        show_status(str(folder), json=True)
        told = json.loads(capsys.readouterr().out)
        assert (told["step"], [p["age_s"] for p in told["peers"]]) == (4, [0.0])
        taken = threading.Timer(0.5, lambda: (folder / STOP_FILE).unlink())
        taken.start()
        assert said(lambda: stop_run(None)) == (
            "the run in runs/a ends after the current step, with a checkpoint in that folder"
        )
        monkeypatch.setattr("muletrain.runs.here.TAKEN_S", 0.2)
        with pytest.raises(MuletrainError, match="runs/a: the command of the run does not answer"):
            stop_run(str(folder))
        with pytest.raises(MuletrainError, match="'run' with one peer has no ticket"):
            ticket_of(found_run(None))
        with pytest.raises(
            MuletrainError, match=r"^runs/aa: no run folder, no ticket .*; the newest runs here: runs/a$"
        ):
            show_status("runs/aa", json=False)
        other = Path("runs") / "b"
        other.mkdir()
        with held(other):
            for act in (lambda: show_status(None, json=False), lambda: stop_run(None), lambda: found_run(None)):
                with pytest.raises(MuletrainError, match="2 runs go on here: runs/a, runs/b; name one"):
                    act()
    with pytest.raises(MuletrainError, match="runs/a ended at step 4 of 9; go on: muletrain run --resume runs/a"):
        show_status(str(folder), json=False)


def test_machines_of_one_run_may_share_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cluster; the command that began the run knows most, and one that joins has no ticket at first."""
    monkeypatch.chdir(tmp_path)
    folders = [Path("runs") / name for name in ("a-join", "b-start")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / TICKET_FILE).write_text(
            str(Ticket("run", SECRET, OWNER.public, (f"/ip4/1.1.1.1/tcp/1/p2p/{folder}",)))
        )
    (folders[1] / "config.toml").touch()
    with held(folders[0]), held(folders[1]):
        assert found_run(None).folder == folders[1]


def test_a_founder_that_was_killed_does_not_call_the_run_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on; a resume here would begin a second run."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs") / "a"
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    begun(folder, steps=4, command="start")
    (folder / TICKET_FILE).write_text(str(Ticket("run", SECRET, OWNER.public, ("/ip4/127.0.0.1/tcp/1/p2p/x",))))

    def nobody(*_: object) -> None:
        raise PeerUnreachable("nobody answers")

    monkeypatch.setattr("muletrain.cli.actions.visit._told_by_members", nobody)
    for run in (None, str(folder)):
        with pytest.raises(MuletrainError) as told:
            show_status(run, json=False)
        assert "Other machines may train the run still: look there" in str(told.value)
        assert str(told.value).endswith("only if no machine is left: muletrain start --resume runs/a")


def test_a_peer_that_loads_its_stage_is_not_called_training_and_news_have_an_age() -> None:
    peers = [
        Announced.read("id-of-a", announced(name="a", stage=0, step=4), age_s=9.0),
        Announced.read("id-of-b", announced(step=0, loss=None, tokens_per_s=None, state=LOADING)),
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(status_of([p for p in peers if p is not None], ()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 4 of 10, 9 s ago  loss 4.500" in text
    assert ["1", "b", "loading", "-", "0", "s", "ago"] in [line.split() for line in text.splitlines()]


def test_the_announced_loss_is_as_smooth_as_that_of_the_terminal() -> None:
    """And the speed does not count the first step, of which a newcomer sees only the end."""
    pace, announces = Pace(), Shown()
    for step, loss in enumerate((9.0, 3.0, 6.0, math.nan, 4.0), 1):
        event = StepDone(
            step=step, loss=loss, grad_norm=1, lr=1, tokens=100, duration_s=0.1 if step == 1 else 2, lineage=""
        )
        pace.fold(event)
        announces.fold(event, whole=step > 1)
    assert announces.loss / announces.weight == pytest.approx(pace.loss)
    assert announces.tokens / announces.seconds == pytest.approx(50)


def test_figures_that_are_not_finite_hide_no_peer_of_this_machine() -> None:
    view = RunView()
    first, joined, *_ = played(peers=1, stages=1, steps=2)
    view.fold(first)
    view.fold(joined)
    view.fold(StepDone(step=1, loss=math.nan, grad_norm=math.nan, lr=1, tokens=9, duration_s=1, lineage=""))
    view.fold(Validated(step=1, loss=math.nan, perplexity=math.nan, tokens=1))
    (peer,) = announced_by(view, 0.0)
    assert (peer.step, peer.loss, peer.heldout_loss, peer.heldout_step) == (1, None, None, 1)
