"""Several machines: network namespaces joined by one veth pair, with nothing but TCP between them."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import io
import json
import math
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
from rich.console import Console

from muletrain import __version__
from muletrain.cli.actions.join_run import Limits, join_run
from muletrain.cli.actions.own_peers import Listening
from muletrain.cli.actions.visit import show_status
from muletrain.cli.show.status import Announced, status_of
from muletrain.clock import LoopClock
from muletrain.compute.estimate import Offer, StageMemory
from muletrain.config.load import load_config
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import Precision, RunConfig
from muletrain.data.tokens import TokenCache
from muletrain.errors import AdmissionError, CapacityError, ConfigError, MuletrainError, PeerUnreachable
from muletrain.events import Event, EventLog, JoinRefused, Note
from muletrain.model.hf import export_hf
from muletrain.model.spec import ModelSpec
from muletrain.network.base import Frame, Network
from muletrain.network.memory import MemoryHub
from muletrain.runs.assemble import RunFacts, build_compute
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.first_weights import write_first_checkpoint
from muletrain.runs.host import Host
from muletrain.runs.join import newcomer
from muletrain.runs.join.admission import RunInfo
from muletrain.runs.join.client import JoinClient, find_admitter
from muletrain.runs.join.messages import PIECE, READY_EVERY_S, AskPart, JoinRequest, Ready, Welcome
from muletrain.runs.join.rendezvous import Rendezvous
from muletrain.runs.join.seating import Seating
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.measure import machine
from muletrain.runs.spec import WorkerSpec
from muletrain.runs.worker import PROTOCOL
from muletrain.runtime.members.roster import Genesis
from muletrain.sim.loop import run_virtually
from muletrain.strategies.swarm import SWARM
from muletrain.wire.codec import encode_raw
from tests.fleet_run import checkpoint_weights
from tests.namespaces import Switch
from tests.reference import train_plainly
from tests.test_equivalence import EXACT, facts_of, relative_difference
from tests.test_network import OWNER, SECRET, world
from tests.whole_model import build_full

TINY = ["--set", "model.width=64", "--set", "model.heads=2", "--set", "model.context=32"]

pytestmark = pytest.mark.timeout(480)
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


def hugging_face_folder(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of TINY's sizes that no seed of a run draws; its weights."""
    spec = ModelSpec.from_config(ModelConfig(width=64, heads=2, context=32))
    weights = {name: p.detach() for name, p in build_full(spec, seed=77).named_parameters()}
    export_hf(weights, spec, None, folder)
    return weights


# Without a network --------------------------------------------------------------------------------------------------------


def test_the_founder_does_not_begin_with_a_guest_that_left() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        founder = hub.join("founder")
        own = rendezvous_of(founder, [1, 1], expected=4)
        own.open()

        async def come(name: str) -> asyncio.Task[Genesis]:
            nets[name] = hub.join(name)
            client = JoinClient(nets[name], "founder")
            await client.join(introduction(name))
            return asyncio.create_task(client.begin(Ready(trainer=False, place="")))

        nets: dict[str, Network] = {}
        own.seat("founder", introduction("founder"))
        own.ready("founder", Ready(trainer=True, place=""))
        gathering = asyncio.create_task(own.gather())
        waiting = []
        for name in ("one", "two"):  # out of step with each other, so that one of them always speaks
            waiting.append(await come(name))
            await asyncio.sleep(READY_EVERY_S / 3)
        leaver = await come("leaver")
        leaver.cancel()
        await nets["leaver"].close()
        await asyncio.sleep(4 * READY_EVERY_S)
        assert not gathering.done()
        assert own.missing() == ["1 more of 4 peers"], "its seat is free again"
        waiting.append(await come("three"))
        genesis = await asyncio.wait_for(gathering, READY_EVERY_S)
        assert {m.id for m in genesis.members} == {"founder", "one", "two", "three"}
        assert await asyncio.wait_for(asyncio.gather(*waiting), READY_EVERY_S) == [genesis] * 3

    problems: list[str] = []
    run_virtually(scenario(), 1000.0, problems)
    assert problems == []


def rendezvous_of(
    net: Network,
    bytes_of_stages: list[int],
    expected: int,
    *,
    emit: Callable[[Event], None] = lambda event: None,
    info: RunInfo | None = None,
    trainers: int | None = 1,
    checkpoint: Checkpoint | None = None,
) -> Rendezvous:
    needs = [
        StageMemory(
            weights=n, moments=0, gradient=0, delayed=0, activations=0, copies=0, on_device=n // 2, on_host=n // 2
        )
        for n in bytes_of_stages
    ]
    return Rendezvous(
        net=net,
        emit=emit,
        info=info or RunInfo("{}", bytes(32), b"t"),
        seating=Seating(needs, [1.0] * len(needs), SWARM),
        run_id="run",
        config_digest=bytes(32),
        expected=expected,
        trainers=trainers,
        checkpoint=checkpoint,
    )


def test_the_machines_that_wait_are_servers_and_clients() -> None:
    async def waiting() -> list[int]:
        own = rendezvous_of(MemoryHub().join("a"), [1, 1], expected=4)
        own.seat("a", introduction("a"))
        own.add("c", introduction("c"), Welcome(config="", stage=1, data=bytes(32), tokenizer_size=0, client=True))
        own.seat("b", introduction("b"))
        return own.machines()

    assert asyncio.run(waiting()) == [1, 2]


def test_every_peer_with_the_data_trains_unless_fewer_are_wanted() -> None:
    async def trainers(limit: int | None) -> tuple[list[str], list[str]]:
        said: list[Event] = []
        hub = MemoryHub()
        own = rendezvous_of(hub.join("a"), [1], expected=4, trainers=limit, emit=said.append)
        for name in "bcd":
            JoinClient(hub.join(name), "a")
        for name in "abcd":
            own.seat(name, introduction(name))
            own.ready(name, Ready(trainer=name != "c", place=""))
        genesis = await own.gather()
        return [m.id for m in genesis.members if m.trainer], [e.message for e in said if isinstance(e, Note)]

    assert asyncio.run(trainers(None)) == (["a", "b", "d"], [])
    told = ["2 of 3 peers that have the data build microbatches (fleet.trainers)"]
    assert asyncio.run(trainers(2)) == (["a", "b"], told)


def test_a_newcomer_with_another_corpus_says_why_it_does_not_come(tmp_path: Path) -> None:
    """Both the one who came and the one who waits are told."""
    (tmp_path / "ours.txt").write_text("\n\n".join(f"Mules carry {n} loads over bad roads." for n in range(300)))
    (tmp_path / "theirs.txt").write_text("\n\n".join(f"Horses carry {n} riders over good ones." for n in range(300)))
    config = load_config(
        None, [f"data.path={tmp_path}/ours.txt", f"data.cache={tmp_path}/cache", "model.vocab=300", "fleet.peers=2"]
    )
    cache = TokenCache.build(config.data, config.model.vocab)
    ticket = Ticket("run", bytes(32), bytes(32), ("/memory/p2p/founder",))
    spec = WorkerSpec(
        role="join",
        name="b",
        ticket=str(ticket),
        folder=str(tmp_path),
        data=f"{tmp_path}/theirs.txt",
        memory_gib=1.0,
        device="cpu",
        precision="fp32",
    )
    told: list[Event] = []

    async def scenario() -> None:
        hub = MemoryHub()
        info = RunInfo(config.model_dump_json(by_alias=True), bytes.fromhex(cache.digest), cache.tokenizer_json)
        own = rendezvous_of(hub.join("founder"), [1, 1], 2, emit=told.append, info=info)
        own.open()
        own.seat("founder", introduction("founder"))
        waiting = own.missing()
        with (
            EventLog(tmp_path / "b.jsonl", "b") as log,
            pytest.raises(AdmissionError, match=r"theirs\.txt: this corpus"),
        ):
            await newcomer.join(Host(spec, log, LoopClock()), hub.join("b"))
        assert own.missing() == waiting, "its seat is free again"

    asyncio.run(scenario())
    (refused,) = [e for e in told if isinstance(e, JoinRefused)]
    assert refused.remote == "b"
    assert "theirs.txt: this corpus has digest" in refused.reason
    assert "join without --data" in refused.reason


def introduction(name: str, memory: int = 1, *, device: str = "cpu", host: int | None = None) -> JoinRequest:
    return JoinRequest(
        version=__version__,
        name=name,
        stage=None,
        device=device,
        flops=0,
        memory=memory,
        host_memory=host,
        addresses=(),
    )


GIB = 2**30


def test_a_waiting_run_says_what_a_stage_needs_and_the_largest_offer_that_came() -> None:
    own = rendezvous_of(MemoryHub().join("founder"), [4 * GIB, 10 * GIB], expected=2)
    assert own.missing() == [
        "stage 0 has no peer (needs 4 GiB)",
        "stage 1 has no peer (needs 10 GiB)",
        "a peer with the data (trainer)",
    ]
    own.seat("founder", introduction("founder", 5 * GIB))
    own.ready("founder", Ready(trainer=True, place=""))
    assert own.missing() == ["stage 1 has no peer (needs 10 GiB; the largest offer so far is 5 GiB)"]
    with pytest.raises(CapacityError, match=r"needs 4 GiB \(weights .* may use 3 GiB: give it more memory"):
        own.seat("small", introduction("small", 3 * GIB))
    assert own.seat("middle", introduction("middle", 8 * GIB)) == 0
    assert own.missing() == ["stage 1 has no peer (needs 10 GiB; the largest offer so far is 8 GiB)", "1 preparing"]
    gpu = introduction("gpu", 8 * GIB, device="cuda", host=4 * GIB)
    with pytest.raises(CapacityError, match="needs 5 GiB on a GPU and 5 GiB beside it"):
        own.seat("gpu", gpu.model_copy(update={"stage": 1}))
    assert own.seat("gpu", gpu.model_copy(update={"stage": 1, "host_memory": 5 * GIB})) == 1
    for name in ("middle", "gpu"):
        own.ready(name, Ready(trainer=False, place=""))
    assert own.missing() == []


def test_guests_of_one_name_get_names_of_their_own_and_a_place_that_is_given_back_frees_its_name() -> None:
    own = rendezvous_of(MemoryHub().join("founder"), [1, 1], expected=2)
    for peer in ("a", "b", "b"):  # the second asks twice
        own.seat(peer, introduction("mule"))
    assert own.names() == {"a": "mule", "b": "mule-0"}
    assert own.remove("a")
    own.seat("c", introduction("mule"))
    assert own.names() == {"b": "mule-0", "c": "mule"}


def test_a_machine_takes_the_stage_that_few_can_serve() -> None:
    own = rendezvous_of(MemoryHub().join("founder"), [4 * GIB, 10 * GIB, 4 * GIB], expected=3)
    assert own.seat("large", introduction("large", 12 * GIB)) == 1
    assert own.seat("small", introduction("small", 5 * GIB)) == 0
    assert own.seat("twin", introduction("twin", 5 * GIB)) == 2
    roomy = rendezvous_of(MemoryHub().join("founder"), [4 * GIB, 10 * GIB], expected=2)
    assert roomy.seat("huge", introduction("huge", 100 * GIB)) == 0, "where it makes no difference, the first"


def test_kinds_of_devices_are_not_mixed_in_a_stage_where_it_can_be_avoided() -> None:
    said: list[Event] = []
    own = rendezvous_of(MemoryHub().join("founder"), [1, 1], expected=2, emit=said.append)
    coming = [("cpu", 0), ("cuda", 1), ("cuda", 1), ("cuda", 1), ("cpu", 0), ("mps", 0)]
    for k, (device, expected) in enumerate(coming):
        peer = introduction(f"p{k}", device=device, host=1 if device == "cuda" else None)
        assert own.seat(f"p{k}", peer) == expected
    assert [type(e).__name__ for e in said] == ["Note"], "the last one found no stage of its kind"


@pytest.mark.parametrize(
    ("asked", "gpus", "expected"),
    [
        ("auto", 0, ["auto"]),
        ("auto", 1, ["cuda:0"]),
        ("auto", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cpu", 2, ["cpu"]),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("cuda", 0, ["cuda"]),
        ("cuda:1", 2, ["cuda:1"]),
        ("mps", 0, ["mps"]),
    ],
)
def test_a_machine_brings_every_gpu_it_has(asked: str, gpus: int, expected: list[str]) -> None:
    assert machine.devices(asked, gpus) == expected


def test_peers_of_a_local_fleet_are_dealt_over_the_gpus_and_share_what_is_free() -> None:
    assert machine.dealt(["cuda:0", "cuda:1", "cuda:2"], 4) == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    assert machine.dealt(["auto"], 2) == ["auto", "auto"]
    four, free = machine.free_memory_of_machine(4), machine.free_memory_of_machine(1)
    assert four == pytest.approx(free / 4, rel=0.2)
    own = machine.Machine.probe("cpu", Precision.FP32, None, sharing=4, host=four)
    assert own.offer == Offer(four)
    assert own.kind.startswith("cpu")
    assert machine.Machine.probe("cpu", Precision.FP32, 2.0, sharing=4, host=four).offer == Offer(2 * GIB), "as told"


def test_several_peers_of_a_machine_announce_a_port_each() -> None:
    assert Listening("", 0, ("/ip4/1.2.3.4/tcp/4000", "/dns4/lab.org/tcp/80")).announced_by(2) == (
        "/ip4/1.2.3.4/tcp/4002",
        "/dns4/lab.org/tcp/82",
    )
    for wrong in ("1.2.3.4:4000", "/ip4/1.2.3.4/udp/4000", "/ip4/1.2.3.4/tcp/65535"):
        with pytest.raises(ConfigError, match="--announce"):
            Listening("", 0, (wrong,)).announced_by(1)


def test_who_joins_gets_its_first_weights_and_needs_no_folder(tmp_path: Path) -> None:
    class Cache:
        tokenizer_json, digest = b"{}", ""

    first = hugging_face_folder(tmp_path / "llama")
    model = {"width": 64, "heads": 2, "context": 32, "from": str(tmp_path / "llama")}
    facts = RunFacts.of(RunConfig.model_validate({"model": model}))
    write_first_checkpoint(facts, Cache, tmp_path / "checkpoints", "run", lambda done: None)  # type: ignore[arg-type]
    checkpoint = Checkpoint.newest_intact(tmp_path, pytest.fail)
    assert checkpoint is not None
    shutil.rmtree(tmp_path / "llama")

    async def scenario() -> None:
        hub = MemoryHub()
        own = rendezvous_of(hub.join("founder"), [1, 1], expected=2, checkpoint=checkpoint)
        own.open()
        own.seat("founder", introduction("founder"))
        client = JoinClient(hub.join("newcomer"), "founder")
        welcome = await client.join(introduction("newcomer"))
        await client.part(welcome, tmp_path / "part")
        here = machine.Machine.probe("cpu", Precision.FP32, 1.0)
        compute = build_compute(facts, welcome.stage, here, None, tmp_path / "part")
        state = await compute.state()
        weights = {name.removeprefix("model/"): t for name, t in state.items() if name.startswith("model/")}
        assert "lm_head.weight" in weights, "the second stage"
        assert all(torch.equal(weights[name], first[name]) for name in weights)
        compute.close()

    asyncio.run(scenario())


def test_before_the_run_begins_any_member_says_that_the_founder_admits() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        founder, member, newcomer = (hub.join(name) for name in ("founder", "member", "newcomer"))
        with pytest.raises(AdmissionError, match="ask for a ticket of 'muletrain start'"):
            await find_admitter(newcomer, ("/memory/p2p/founder",))  # does not serve it yet
        with pytest.raises(AdmissionError, match="it names none"):
            await find_admitter(newcomer, ())
        JoinClient(member, founder.peer_id)
        addresses = ("/memory/p2p/gone", "/memory/p2p/member")
        assert await find_admitter(newcomer, addresses) == "founder"

    asyncio.run(scenario())


def test_a_ticket_passed_on_keeps_room_for_the_founder_and_for_us() -> None:
    founder = tuple(f"/ip4/10.0.0.{k}/tcp/1/p2p/F" for k in range(20))
    own = [f"/ip4/10.0.1.{k}/tcp/1/p2p/M" for k in range(20)]
    ticket = Ticket("run", bytes(32), bytes(32), (*founder, "/ip4/10.0.2.1/tcp/1/p2p/X"))
    passed_on = Ticket.parse(str(ticket.passed_on("F", own)))
    assert passed_on.addresses == (*founder[:8], *own[:8])
    few = Ticket("run", bytes(32), bytes(32), (founder[0], "/ip4/10.0.2.1/tcp/1/p2p/X")).passed_on("F", own[:2])
    assert few.addresses == (founder[0], *own[:2], "/ip4/10.0.2.1/tcp/1/p2p/X")
    assert "10.0" in repr(few)
    assert "secret" not in repr(few)


def test_the_peers_of_one_machine_may_write_their_tickets_at_once(tmp_path: Path) -> None:
    write = "import sys; from pathlib import Path; from muletrain.runs.worker_files import write_secret\n"
    loop = "for _ in range(3000): write_secret(Path(sys.argv[1]), 'x' * 100)"
    command = [sys.executable, "-c", write + loop, str(tmp_path / "ticket")]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [w.communicate(timeout=180)[1] for w in writers] == ["", ""]
    assert (tmp_path / "ticket").read_text() == "x" * 100
    assert (tmp_path / "ticket").stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["ticket"]


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
    console.print(status_of([], ["stage 1 has no peer", "2 more of 4 peers"]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 4 of 10  loss 4.250  10,000 tokens/s" in text
    assert ["1", "b", "serving", "3", "0", "s", "ago"] in [line.split() for line in text.splitlines()]
    assert "no recent announcement" in text
    assert "stage 1 has no peer, 2 more of 4 peers" in " ".join(text.split())


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
    assert ["0", "a", "serving", "4", "0", "s", "ago", "d-of-new"] in rows


def test_status_marks_who_does_not_answer() -> None:
    down = [{"id": f"id-of-{name}", "name": name, "stage": 1} for name in "bc"]
    peers = [Announced.read("id-of-a", announced(name="a", stage=0, step=4, down=down))]
    peers += [Announced.read("id-of-b", announced()), Announced.read("id-of-d", announced(name="d", stage=2))]
    console = Console(file=io.StringIO(), width=80)
    console.print(status_of([p for p in peers if p is not None], ()))
    rows = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert [row[:3] for row in rows[2:]] == [
        ["0", "a", "serving"],
        ["1", "b", "suspected"],
        ["1", "c", "gone"],
        ["2", "d", "serving"],
    ]


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


def test_names_that_would_steer_a_terminal_are_refused_at_the_door() -> None:
    assert introduction("Grace-2.local").name == "Grace-2.local"
    for name in ("\x1b[2J", "a b", "a\nb", "\u202eb", ""):
        with pytest.raises(ValueError, match="name"):
            introduction(name)


@pytest.mark.parametrize("name", ["", "../up", "a/b", "-x", "x" * 65])
def test_a_name_that_could_not_name_a_file_and_data_that_are_not_there_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ticket = str(Ticket("run", bytes(32), bytes(32), ("/ip4/127.0.0.1/tcp/1/p2p/X",)))
    with pytest.raises(MuletrainError, match=r"--data pydoc,x\.txt: no such file: '.*/x\.txt'; check the path"):
        join_run(
            ticket,
            listening=Listening("127.0.0.1", 0, ()),
            data="pydoc,x.txt",
            device="cpu",
            threads=1,
            json=True,
        )
    with pytest.raises(MuletrainError, match="--name"):
        join_run(
            ticket,
            listening=Listening("127.0.0.1", 0, ()),
            device="cpu",
            threads=1,
            json=True,
            name=name,
        )
    assert not list(tmp_path.iterdir())


def test_an_owners_limits(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    limits = Limits(hours=1 / 3600, bandwidth_mbps=80, pause_file=mine)
    assert limits.bandwidth_bytes_per_s == 10e6
    assert limits.exceeded() is None
    assert limits.wait_until_free()
    mine.touch()
    assert str(mine) in str(limits.exceeded())
    begin = time.monotonic()
    assert not limits.wait_until_free(), "the time is over before the file is gone"
    assert time.monotonic() - begin < 5
    mine.unlink()
    assert "hours are over" in str(limits.exceeded())
    assert not Limits(hours=0).wait_until_free()
    assert Limits().wait_until_free()


def test_an_owners_bandwidth_counts_from_the_first_byte_on(tmp_path: Path) -> None:
    """A checkpoint's part before the run begins, in calls and in frames: 10 MB at 1 MB/s."""
    data, took = bytes(5_000_000), list[float]()
    hub = MemoryHub()

    async def scenario(network: Network) -> None:
        founder, clock = hub.join("f"), LoopClock()

        async def part(sender: str, payload: bytes) -> bytes:
            offset = AskPart.unpack(payload).offset
            return data[offset : offset + PIECE]

        async def blocks(sender: str, frame: Frame) -> None:
            came.set()

        came = asyncio.Event()
        founder.serve(AskPart.KIND, part)
        network.receive(blocks)
        welcome = Welcome.model_construct(stage=0, part_size=len(data), part_digest=hashlib.sha256(data).digest())
        begin = clock.now()
        await JoinClient(network, "f").part(welcome, tmp_path / "part")
        took.append(clock.now() - begin)
        for _ in range(5):
            came.clear()
            await founder.send("n", Frame("block", {}, [encode_raw(data[:1_000_000])]))
            await came.wait()
        took.append(clock.now() - begin)

    assert Limits(bandwidth_mbps=16).share(2) == 1e6, "for each of two processes"
    spec = WorkerSpec(
        role="join",
        name="n",
        folder=str(tmp_path),
        ticket=str(Ticket("run", bytes(32), bytes(32), ())),
        bandwidth_bytes_per_s=1e6,
    )
    problems: list[str] = []
    with EventLog(tmp_path / "n.jsonl", "n") as log:
        run_virtually(scenario(Host(spec, log, LoopClock()).limited(hub.join("n"))), 100.0, problems)
    assert problems == []
    assert took[0] == pytest.approx(5.0, abs=0.6)
    assert took[1] == pytest.approx(10.0, abs=1.2)


def _with_other_secret(ticket: str) -> str:
    whole = Ticket.parse(ticket)
    return str(dataclasses.replace(whole, secret=bytes(32)))
