"""What a joiner's machine brings: devices, ports, a name, tickets, and its owner's limits."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muletrain.cli.actions.train import join_run
from muletrain.clock import LoopClock
from muletrain.compute.estimate import Offer
from muletrain.config.schema import Precision
from muletrain.errors import ConfigError, MuletrainError
from muletrain.events import EventLog
from muletrain.network.base import Network
from muletrain.network.memory import MemoryHub
from muletrain.runs import own_peers
from muletrain.runs.host import Host
from muletrain.runs.join.client import JoinClient
from muletrain.runs.join.messages import PIECE, AskPiece, Welcome
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.measure import machine
from muletrain.runs.own_peers import Listening, OwnPeers
from muletrain.runs.session import Limits
from muletrain.runs.spec import WorkerSpec
from muletrain.wire.codec import encode_raw
from muletrain.wire.frame import Frame
from tests.newcomers import GIB, introduction
from tests.virtual import virtually


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


@pytest.mark.parametrize(("gpus", "names"), [(1, ["two"]), (2, ["two-0", "two-1"])])
def test_a_peer_has_the_name_that_was_given_and_several_a_number_each(
    gpus: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_peers, "own_devices", lambda asked: machine.devices(asked, gpus))
    assert OwnPeers.on("two", "cuda", None).names == names
    assert OwnPeers.on("two", "cpu", None).names == ["two"]


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
    with pytest.raises(MuletrainError, match="--announce"):
        join_run(ticket, listening=Listening("127.0.0.1", 0, ("1.2.3.4:4000",)), device="cpu", threads=1, json=True)
    with pytest.raises(MuletrainError, match=r"--model: .*nowhere is no folder .* or leave --model out"):
        join_run(
            ticket,
            listening=Listening("127.0.0.1", 0, ()),
            device="cpu",
            threads=1,
            json=True,
            model=str(tmp_path / "nowhere"),
        )
    assert not list(tmp_path.iterdir()), "no folder of a run that never began"


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
            offset = AskPiece.unpack(payload).offset
            return data[offset : offset + PIECE]

        async def blocks(sender: str, frame: Frame) -> None:
            came.set()

        came = asyncio.Event()
        founder.serve(AskPiece.KIND, part)
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
    with EventLog(tmp_path / "n.jsonl", "n") as log:
        virtually(scenario(Host(spec, log, LoopClock()).limited(hub.join("n"))), 100.0)
    assert took[0] == pytest.approx(5.0, abs=0.6)
    assert took[1] == pytest.approx(10.0, abs=1.2)
