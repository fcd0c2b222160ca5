"""Several machines: network namespaces joined by one veth pair, with nothing but TCP between them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from muletrain.runs.join.ticket import Ticket
from tests.fleet_run import checkpoint_weights
from tests.namespaces import Switch
from tests.reference import train_plainly
from tests.test_equivalence import EXACT, facts_of, relative_difference
from tests.whole_model import hugging_face_folder

TINY = ["--set", "model.width=64", "--set", "model.heads=2", "--set", "model.context=32"]

namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="needs root and iproute2 to make network namespaces",
)
PYTHON = "python -c"
ONLY_TCP = "7,40 0 0 12,21 4 0 2054,21 0 2 2048,48 0 0 23,21 1 0 6,6 0 0 2,6 0 0 0"
"""Classic BPF: ethertype ARP, or IPv4 whose protocol is TCP: 0 (pass), else 2 (drop)."""

NO_SYN = "10,40 0 0 12,21 0 6 2048,48 0 0 23,21 0 4 6,177 0 0 14,80 0 0 27,84 0 0 18,21 1 0 2,6 0 0 0,6 0 0 2"
"""Classic BPF: IPv4, TCP, SYN without ACK: 2 (drop), else 0 (pass)."""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Runs a muletrain command on machine 'a', 'b' or 'c' (one switch between them that passes TCP alone, no other
    route), in a folder of its own, with caches and temporary files of its own. ``PYTHON`` as the first argument: that
    code instead."""
    started: list[subprocess.Popen[str]] = []
    scratch: dict[str, str] = {}
    switch = Switch("abc")

    def on(machine: str, *arguments: str) -> subprocess.Popen[str]:
        (tmp_path / machine).mkdir(exist_ok=True)
        run = ["-c", *arguments[1:]] if arguments[0] == PYTHON else ["-m", "muletrain.cli.main", *arguments]
        process = subprocess.Popen(
            [*switch.inside(machine), sys.executable, *run],
            cwd=tmp_path / machine,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": scratch[machine], "XDG_CACHE_HOME": f"{scratch[machine]}/cache"},
        )
        started.append(process)
        return process

    with switch:
        for m in "abc":
            scratch[m] = tempfile.mkdtemp(prefix="mule-")  # sockets need short paths
            only_tcp(switch.namespace, f"to-{m}")
        try:
            yield on
        finally:
            for process in started:  # their peers and daemons end with them
                process.kill()
                process.communicate()
            for m in "abc":
                wait_for(lambda m=m: not switch.running(m))
            left = {m: [p.name for p in Path(folder).iterdir() if p.name != "cache"] for m, folder in scratch.items()}
            for folder in scratch.values():
                shutil.rmtree(folder)
    assert not any(left.values()), left


def only_tcp(namespace: str, device: str) -> None:
    """Whatever else comes in there is dropped (and ARP, without which nobody finds anybody)."""
    for command in (
        ["qdisc", "add", "dev", device, "clsact"],
        ["filter", "add", "dev", device, "ingress", "bpf", "da"],
    ):
        bytecode = ["bytecode", ONLY_TCP] if "filter" in command else []
        done = subprocess.run(["tc", "-n", namespace, *command, *bytecode], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this kernel cannot drop what is not TCP: {done.stderr}")


def firewall(machine: str) -> None:
    """The switch lets nobody connect to ``machine``; what it connects to itself may answer."""
    namespace, device = f"mule-{os.getpid()}-s", f"to-{machine}"
    command = ["filter", "add", "dev", device, "egress", "bpf", "da", "bytecode", NO_SYN]
    subprocess.run(["tc", "-n", namespace, *command], check=True)


def wait_for(condition: Callable[[], object], timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.2)


def ticket_in(folder: Path) -> str:
    wait_for(lambda: list(folder.glob("runs/*/ticket")), 150)
    return next(folder.glob("runs/*/ticket")).read_text()


def output(process: subprocess.Popen[str], code: int = 0) -> str:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == code, out
    return out


def trained(machine: Path, peer: str) -> int:
    """Steps that the peer of that name applied."""
    return sum(p.read_text().count('"step_applied"') for p in machine.glob(f"runs/*/{peer}.jsonl"))


RECEIVER = """
import socket, sys
sockets = [socket.socket(socket.AF_INET, kind) for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM)]
for s in sockets:
    s.bind(("10.99.0.1", 7000))
    s.settimeout(20)
sockets[1].listen()
print("listening", flush=True)
print(sockets[1].accept()[0].recv(100).decode())
sockets[0].settimeout(0)
try:
    print(sockets[0].recv(100).decode())
except BlockingIOError:
    print("nothing else")
"""
SENDER = """
import socket
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.sendto(b"by UDP", ("10.99.0.1", 7000))
socket.create_connection(("10.99.0.1", 7000), timeout=20).sendall(b"by TCP")
"""


@namespaces
def test_nothing_but_tcp_passes_between_the_machines(machines: Callable[..., subprocess.Popen[str]]) -> None:
    receiver = machines("a", PYTHON, RECEIVER)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "listening\n"
    output(machines("b", PYTHON, SENDER))
    assert output(receiver) == "by TCP\nnothing else\n"


TAKER = """
import socket, sys, time
listening = socket.create_server(("0.0.0.0", 7000))
print("listening", flush=True)
taken, begin, size = listening.accept()[0], time.monotonic(), 0
while got := taken.recv(1 << 16):
    size += len(got)
print(size, time.monotonic() - begin)
"""
GIVER = """
import socket, sys
to = socket.create_connection((sys.argv[1], 7000), timeout=20)
to.sendall(bytes(3_000_000))
"""


@namespaces
def test_a_shaped_link_has_its_rates_and_its_queue() -> None:
    """3 MB up by 8 Mb/s, and by 16 Mb/s down: what waits is the router's, and nothing is lost before its queue is
    full."""
    with Switch("ab") as switch:
        switch.shape("a", up_bytes_per_s=1e6, down_bytes_per_s=2e6, queue_s=2.0)

        def start(machine: str, code: str, *arguments: str) -> subprocess.Popen[str]:
            command = [*switch.inside(machine), sys.executable, "-c", code, *arguments]
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

        for sender, receiver, expected_s in (("a", "b", 3.0), ("b", "a", 1.5)):
            taker = start(receiver, TAKER)
            assert taker.stdout is not None
            taker.stdout.readline()
            giver, waiting = start(sender, GIVER, switch.address(receiver)), [0]
            while giver.poll() is None:
                traffic = switch.traffic()["a"]
                waiting.append(traffic.up_queue if sender == "a" else traffic.down_queue)
            size, seconds = map(float, output(taker).split())
            assert size == 3e6
            assert seconds == pytest.approx(expected_s, rel=0.15)
            assert 30_000 < max(waiting) < (2.1e6 if sender == "a" else 4.1e6)
        after = switch.traffic()["a"]
        assert after.lost == 0
        assert after.sent > 3e6
        assert after.received > 3e6
    assert f"mule-{os.getpid()}" not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout


PEER = """
import asyncio, os, sys, time
from pathlib import Path
from muletrain.network.base import Channel, Frame
from muletrain.network.identity import Key
from muletrain.network.libp2p import Libp2pNetwork
from muletrain.wire.codec import encode_raw

async def main(first=None):
    owner = Key.of_seed(b"o" * 32)
    net = await Libp2pNetwork.create(
        run_id="run", secret=b"s" * 32, protocol="1", folder=Path.cwd(), listen="0.0.0.0", owner=owner.public if first else owner,
        initial_peers=(first,) if first else (),
    )
    here, came = asyncio.get_running_loop().create_future(), []
    async def echo(sender, payload):
        here.done() or here.set_result(sender)
        return payload
    async def receive(sender, frame):
        came.append(frame)
    net.serve("echo", echo)
    net.receive(receive)
    if first is None:
        print(net.addresses()[0], flush=True)
        other, content, begin = await here, os.urandom(2_000_000), time.monotonic()
        for _ in range(8):
            await net.send(other, Frame("x", {}, [encode_raw(content)]), channel=Channel.BULK)
        await net.call(other, "echo", b"", timeout_s=60)
        await asyncio.sleep(5)
        await net.close()
        return
    founder, longest, begin, calls = first.rpartition("/p2p/")[2], 0.0, time.monotonic(), 0
    while len(came) < 8:
        sent = time.monotonic()
        await net.call(founder, "echo", b"x" * 200, timeout_s=60)
        longest, calls = max(longest, time.monotonic() - sent), calls + 1
        await asyncio.sleep(0.1)
    print(calls, longest, time.monotonic() - begin)
    await net.close()

asyncio.run(main(*sys.argv[1:]))
"""


@namespaces
@pytest.mark.slow
def test_calls_come_between_the_packets_of_long_frames(machines: Callable[..., subprocess.Popen[str]]) -> None:
    """16 MB go out by 35 Mb/s; probes of who sends them are answered all the same, as ``ShapedNetwork`` has it, too."""
    limit = ["qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "35mbit", "burst", "64kb", "latency", "200ms"]
    subprocess.run(["tc", "-n", f"mule-{os.getpid()}-a", *limit], check=True)
    founder = machines("a", PYTHON, PEER)
    assert founder.stdout is not None
    address = re.sub(r"^/ip4/[^/]*", "/ip4/10.99.0.1", founder.stdout.readline().strip())
    calls, longest, seconds = map(float, output(machines("b", PYTHON, PEER, address)).split())
    assert seconds > 3, "the link is not as narrow as it is to be"
    assert calls > 10
    assert longest < 1, "a call waited for what was sent before it"


@namespaces
def test_two_machines_train_and_a_stranger_is_refused(
    machines: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    founder = machines("a", "start", *TINY, "--set", "train.steps=100000")
    ticket = ticket_in(tmp_path / "a")
    before = output(machines("c", "status", ticket))
    assert "has not started" in before
    assert "stage 1 has no peer" in before
    # the end of the ticket protects it against typing errors; another run's ticket is whole, but of another secret
    assert "damaged" in output(machines("c", "join", ticket[:-6] + "AAAAAA"), code=2)
    assert "other" in (told := output(machines("c", "join", _with_other_secret(ticket)), code=2)) or "another" in told
    joiner = machines("b", "join", ticket, "--data", "pydoc", "--memory", "2", "--name", "helping-hand")
    wait_for(lambda: trained(tmp_path / "b", "helping-hand") > 2)
    status: dict[str, Any] = {"step": 0}
    while not status["step"]:  # peers announce their step now and then
        status = json.loads(output(machines("c", "status", ticket, "--json")))
    assert [p["stage"] for p in status["peers"]] == [0, 1]
    assert 0 < status["step"] < status["steps"] == 100000
    assert 0 < status["loss"] < 10
    assert status["tokens_per_s"] > 0
    assert status["missing"] == []
    passed_on = ticket_in(tmp_path / "b")  # any member takes newcomers in
    late = machines("c", "join", passed_on, "--data", "pydoc", "--name", "late")
    wait_for(lambda: trained(tmp_path / "c", "late"))
    assert '"late"' in output(machines("c", "status", ticket, "--json"))
    output(machines("b", "stop"))  # of the run that this machine is in
    out, joined, came_later = output(founder), output(joiner), output(late)
    assert "serves stage" in came_later
    assert "stage 1 has no peer" in out, "it says what is missing while it waits"
    assert "validation loss" in out
    assert "gets stage 1 of 0..1 ready" in joined
    assert "serves stage 1" in joined
    assert re.search(r"step \d+/100000  loss \d", joined), "progress is shown there, too"
    assert "nobody" not in joined
    table = out[out.index("Sent over the network") :]
    assert "helping-hand" in table, "what other machines counted is in the report of 'start', too"
    parts = {p.name for p in (tmp_path / "a").glob("runs/*/checkpoints/step-*/*.safetensors")}
    assert parts == {"stage-0.safetensors", "stage-1.safetensors"}, "parts are collected where 'start' ran"


@namespaces
def test_a_stage_that_fits_nowhere_is_refused_with_the_numbers(
    machines: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    machines("a", "start", *TINY)
    refused = output(machines("b", "join", ticket_in(tmp_path / "a"), "--memory", "0.001"), code=2)
    assert re.search(r"needs [\d.]+ MiB .* may use 1.02 MiB", refused)
    assert "more memory" in refused


@pytest.mark.slow
@namespaces
def test_who_leaves_before_the_start_is_not_counted_on_and_any_member_lets_others_in(
    machines: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """From a Hugging Face folder, too, which only the founder has, and only until it hands out the first weights."""
    first = hugging_face_folder(tmp_path / "llama")
    settings = [
        "--set",
        "fleet.peers=3",
        "--set",
        "train.steps=6",
        "--set",
        "compute.precision=bf16",
        "--set",
        f"model.from={tmp_path / 'llama'}",
        "--set",
        "optimizer.lr=1e-30",
        "--set",
        "optimizer.weight_decay=0",
    ]
    founder = machines("a", "start", *TINY, *settings, "--json")
    ticket = ticket_in(tmp_path / "a")
    shutil.rmtree(tmp_path / "llama")
    leaver = machines("b", "join", ticket, "--stage", "1")
    ticket_in(tmp_path / "b")
    leaver.send_signal(signal.SIGINT)
    assert "left before the run began" in output(leaver)
    assert not list(tmp_path.glob("b/runs/*/ticket")), "the secret goes with the peer"
    second = machines("b", "join", ticket)
    wait_for(lambda: list(tmp_path.glob("b/runs/*/ticket")))
    passed_on = output(machines("b", "ticket")).strip()
    wait_for(lambda: any('"kind": "waiting"' in p.read_text() for p in tmp_path.glob("b/runs/*/*.jsonl")))
    third = machines("c", "join", passed_on)
    said = [json.loads(line) for line in output(founder).splitlines()]
    assert re.search(r"waiting: .*1 more of 3 peers", told := output(second)), "who waits is told for what"
    assert "serves stage" in told
    assert "serves stage" in output(third)
    by_kind = {kind: [e for e in said if e["kind"] == kind] for kind in {e["kind"] for e in said}}
    assert [e["ticket"] for e in by_kind["ticket"]] == [ticket]
    assert by_kind["run_started"][0]["peers"] == 3
    assert [e["step"] for e in by_kind["step_done"]] == [1, 2, 3, 4, 5, 6]
    assert by_kind["evaluated"][0]["step"] == 6
    parts = {p.name for p in (tmp_path / "a").glob("runs/*/checkpoints/*/*.safetensors")}
    assert parts == {"stage-0.safetensors", "stage-1.safetensors"}
    last = checkpoint_weights(next((tmp_path / "a").glob("runs/*")))
    assert all(torch.equal(last[name], first[name]) for name in first), "who joined served the folder's weights"
    logs = [json.loads(line) for m in "bc" for p in tmp_path.glob(f"{m}/runs/*/*.jsonl") for line in p.open()]
    assert [e["precision"] for e in logs if e["kind"] == "peer_joined"] == ["bf16", "bf16"], "as the run says"


@namespaces
@pytest.mark.slow
@pytest.mark.timeout(800)
def test_machines_behind_firewalls_train_by_way_of_another(
    machines: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Two that nobody can connect to (one says so, the other does not know) serve adjacent stages."""
    settings = [*EXACT, "fleet.stages=3", "fleet.trainers=1"]
    firewall("b")
    firewall("c")
    founder = machines("a", "start", *(word for s in settings for word in ("--set", s)))
    ticket = ticket_in(tmp_path / "a")
    joiners = [
        machines("b", "join", ticket, "--stage", "1", "--name", "b", "--private"),
        machines("c", "join", ticket, "--stage", "2", "--name", "c"),
    ]
    facts, cache = facts_of(tmp_path, "fleet.stages=3")
    torch.set_num_threads(1)
    expected, _ = train_plainly(facts, facts.source(cache))
    out, _ = founder.communicate(timeout=600)
    assert founder.returncode == 0, out
    for joiner in joiners:
        output(joiner)
    assert relative_difference(checkpoint_weights(next((tmp_path / "a").glob("runs/*"))), expected) <= 1e-5
    said = [e["message"] for e in _events(tmp_path) if e["kind"] == "note"]
    assert [m for m in said if "cannot be reached directly, only through " in m], said
    assert "relayed" in out[out.index("Sent over the network") :]


@namespaces
@pytest.mark.slow
def test_who_cannot_reach_the_founder_is_told_which_port_to_open(
    machines: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    firewall("a")
    founder = machines("a", "start", *TINY, "--port", "4711")
    ticket = ticket_in(tmp_path / "a")
    begin = time.monotonic()
    told = output(machines("b", "join", ticket, "--private"), code=2)
    assert time.monotonic() - begin < 60  # most of it imports
    assert "no member of the run could be reached" in told
    assert "TCP port 4711 of 10.99.0.1" in told
    founder.send_signal(signal.SIGINT)
    assert "TCP port 4711 of 10.99.0.1" in output(founder), "it says so itself"


def _events(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for p in folder.glob("*/runs/*/*.jsonl") for line in p.open()]


def _with_other_secret(ticket: str) -> str:
    whole = Ticket.parse(ticket)
    return str(dataclasses.replace(whole, secret=bytes(32)))
