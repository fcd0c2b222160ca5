"""``--dashboard`` of real commands: their pages equal the events, and the owner stops the run from one."""

from __future__ import annotations

import http.client
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from muletrain.cli.options import Command
from muletrain.events import EventTail
from tests.played_events import played, written
from tests.test_cli import SMALL, TWO
from tests.test_docs import parsed
from tests.test_metrics import Reader

ADDRESS = r"dashboard: (\S+)"


def ask(url: str, path: str, body: dict[str, Any] | None = None, *, token: bool = True) -> Any:
    """The answer to a request, of somebody with the token of the printed address."""
    found = re.match(r"http://(\S+?):(\d+)/\?token=(\S+)", url)
    assert found is not None
    host, port, secret = found.groups()
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    headers = {"Origin": f"http://{host}:{port}", "X-Muletrain": "1"}
    if token:
        headers["Cookie"] = f"muletrain-{port}={secret}"
    try:
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def state(url: str) -> dict[str, Any]:
    (run,) = ask(url, "/api/state")["runs"]
    return {**run["set"], "peers": run.get("peers", {}), "curve": run.get("curve", {"rows": []})["rows"]}


def until(url: str, step: int) -> dict[str, Any]:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if (found := state(url))["head"]["step"] >= step:
            return found
        time.sleep(0.2)
    raise AssertionError(found)


def test_a_port_is_optional_and_never_swallows_the_next_word() -> None:
    for line, port, config in (
        ("muletrain run --dashboard", "auto", None),
        ("muletrain run --dashboard my.toml", "auto", "my.toml"),
        ("muletrain run --dashboard 9000 my.toml", "9000", "my.toml"),
        ("muletrain run --dashboard --json", "auto", None),
    ):
        given = parsed(line)
        assert given["dashboard"] == port
        assert given["config"] == (None if config is None else Path(config))
    assert Command.ALONE["--dashboard"] == "auto"


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    command = Reader("dashboard", "nowhere", cwd=tmp_path)
    assert command.end() == 2
    assert "no run folder" in " ".join("".join(command.lines).split())


def test_the_page_of_a_folder_ends_in_order(tmp_path: Path) -> None:
    folder = written(played(peers=2, stages=1, steps=5, planned=9), tmp_path / "runs" / "x")
    command = Reader("dashboard", str(folder), "--port", "0", cwd=tmp_path)
    found = until(command.until(ADDRESS), 5)
    assert found["health"]["word"] == "dead"
    assert found["run"]["owned"] is False
    assert command.end(signal.SIGINT) == 0


@pytest.mark.parametrize("peers", [2, 1])
def test_a_run_is_shown_and_its_owner_stops_it_from_the_page(tmp_path: Path, peers: int) -> None:
    """Also a run of one peer, which works in the command itself, and which nobody can join."""
    cut = ["--set", "fleet.stages=1", "--set", f"fleet.peers={peers}"]
    command = Reader("run", *SMALL, *cut, "--set", "train.steps=100000", "--dashboard", "0", cwd=tmp_path)
    try:
        url = command.until(ADDRESS)
        found = until(url, 5)
        assert found["health"]["word"] in ("training", "slow")
        assert (found["run"]["stops"], found["run"]["owned"]) == (True, peers > 1)
        states = {p["name"]: p["state"] for p in found["peers"].values()}
        assert states == {f"peer-{n}": "training" for n in range(peers)}
        assert all(p["memory"] > 0 for p in found["peers"].values())
        assert all(50e6 < p["used"] < 8e9 for p in found["peers"].values()), "of a process with torch in it"
        (folder,) = (tmp_path / "runs").iterdir()
        done = {e.step: e for e in EventTail(folder).poll() if e.kind == "step_done"}  # type: ignore[attr-defined]
        for step, t, _, loss, *_ in found["curve"]:
            assert loss == pytest.approx(done[step].loss, abs=1e-4)
            assert t == pytest.approx(done[step].t, abs=0.01)
        assert ask(url, "/api/act", {"run": 0, "action": "stop"}, token=False)["ok"] is False
        told = ask(url, "/api/act", {"run": 0, "action": "stop"})
        assert told["ok"], told
        assert command.end() == 3, "ended in order before the last step"
    finally:
        command.process.kill()


def test_every_machine_has_its_page_and_a_visitor_sees_the_members(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    sets = (*SMALL, *TWO, "--set", "train.steps=100000", "--listen", "127.0.0.1")
    founder = Reader("start", *sets, "--name", "a", "--dashboard", "0", cwd=ours)
    others = list[Reader]()
    try:
        ticket = founder.until(r"muletrain join (\S+)")
        assert state(founder.until(ADDRESS))["health"]["word"] in ("starting", "waiting")
        others.append(Reader("join", ticket, "--name", "b", "--listen", "127.0.0.1", "--dashboard", "0", cwd=theirs))
        whole = until(founder.until(ADDRESS), 3)
        assert {p["name"] for p in whole["peers"].values()} == {"a", "b"}
        part = until(others[0].until(ADDRESS), 0)
        assert part["run"]["whole"] is False
        others.append(Reader("status", "--dashboard", "0", ticket, cwd=theirs))
        url, deadline = others[1].until(ADDRESS), time.monotonic() + 60
        while len(state(url)["peers"]) < 2 and time.monotonic() < deadline:
            time.sleep(0.5)
        assert {p["name"] for p in state(url)["peers"].values()} == {"a", "b"}
        assert state(url)["head"]["steps"] == 100000
        assert others[1].end(signal.SIGINT) == 0
    finally:
        for command in (*others, founder):
            command.process.kill()
