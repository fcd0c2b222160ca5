"""Several machines: network namespaces joined by one veth pair, with nothing but TCP between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TINY = ["--set", "fleet.peers=2", "--set", "model.width=64", "--set", "model.heads=2", "--set", "model.context=32"]

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 to make network namespaces"
    ),
]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs a muletrain command on machine 'a' or 'b', in a folder of its own."""
    names = {m: f"mule-{os.getpid()}-{m}" for m in "ab"}
    pairs = {m: f"mv{os.getpid() % 100000}{m}" for m in "ab"}
    started: list[subprocess.Popen[str]] = []

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    def on(machine: str, *arguments: str) -> subprocess.Popen[str]:
        (tmp_path / machine).mkdir(exist_ok=True)
        command = ["ip", "netns", "exec", names[machine], sys.executable, "-m", "muletrain.cli.main", *arguments]
        process = subprocess.Popen(
            command, cwd=tmp_path / machine, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    for k, m in enumerate("ab", start=1):
        ip("netns", "add", names[m])
        ip("-n", names[m], "link", "set", "lo", "up")
        if m == "a":
            ip("link", "add", pairs["a"], "netns", names["a"], "type", "veth", "peer", "name", pairs["b"])
        else:
            ip("link", "set", pairs["b"], "netns", names["b"])
        ip("-n", names[m], "addr", "add", f"10.99.0.{k}/24", "dev", pairs[m])
    for m in "ab":
        ip("-n", names[m], "link", "set", pairs[m], "up")
    try:
        yield on
    finally:
        for process in started:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], check=False)


def ticket_in(folder: Path) -> str:
    deadline = time.monotonic() + 60
    while not (found := list(folder.glob("runs/*/ticket"))):
        assert time.monotonic() < deadline, "no ticket"
        time.sleep(0.2)
    return found[0].read_text()


def output(process: subprocess.Popen[str], code: int = 0) -> str:
    out, _ = process.communicate(timeout=100)
    assert process.returncode == code, out
    return out


def test_two_machines_train_and_a_stranger_is_refused(
    machines: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    founder = machines("a", "start", *TINY, "--set", "train.steps=100000")
    ticket = ticket_in(tmp_path / "a")
    joiner = machines("b", "join", ticket, "--data", "pydoc", "--memory", "2")
    peers = ""
    deadline = time.monotonic() + 90
    while peers.count('"stage"') < 2:
        assert time.monotonic() < deadline, peers
        peers = output(machines("b", "status", ticket, "--json"))
    assert '"stage": 0' in peers
    assert '"stage": 1' in peers
    # the end of the ticket protects it against typing errors; another run's ticket is whole, but of another secret
    assert "damaged" in output(machines("b", "join", ticket[:-6] + "AAAAAA"), code=2)
    assert "other" in (late := output(machines("b", "join", _with_other_secret(ticket)), code=2)) or "another" in late
    assert "has begun" in output(machines("b", "join", ticket), code=2)
    output(machines("b", "stop", ticket))
    out, joined = output(founder), output(joiner)
    assert "stage 1 has no peer" in out, "it says what is missing while it waits"
    assert "validation loss" in out
    assert "serves stage 1" in joined
    parts = {p.name for p in (tmp_path / "a").glob("runs/*/checkpoints/step-*/*.safetensors")}
    assert parts == {"stage-0.safetensors", "stage-1.safetensors"}, "parts are collected where 'start' ran"


def test_a_stage_that_fits_nowhere_is_refused_with_the_numbers(
    machines: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    machines("a", "start", *TINY)
    refused = output(machines("b", "join", ticket_in(tmp_path / "a"), "--memory", "0.001"), code=2)
    assert "GiB" in refused
    assert "more memory" in refused


def _with_other_secret(ticket: str) -> str:
    from muletrain.runs.ticket import Ticket

    whole = Ticket.parse(ticket)
    return str(Ticket(whole.run_id, bytes(32), whole.addresses))
