"""The network of namespaces that machines are tested on: nothing but TCP passes, at the links' rates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.connected import PYTHON, connected, namespaces, output
from tests.namespaces import Switch

machines = pytest.fixture(connected)


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
from muletrain.network.base import Channel
from muletrain.wire.frame import Frame
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
