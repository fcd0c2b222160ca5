"""Networks of real daemons on loopback, and a daemon in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muletrain.errors import (
    ProtocolError,
)
from muletrain.network.base import Network
from muletrain.network.identity import Key
from muletrain.network.libp2p import Libp2pNetwork
from muletrain.wire.frame import Frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


SECRET = b"s" * 32
OWNER = Key.of_seed(b"o" * 32)


class World:
    """Opens networks with short socket paths, notes what they refuse and receive, closes them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._networks, self._opened = folder, list[Libp2pNetwork](), 0
        self.homes: dict[str, Path] = {}
        self.refusals: dict[str, list[tuple[str, str]]] = {}
        self.got: dict[str, asyncio.Queue[tuple[str, Frame]]] = {}

    async def open(self, *peers: Libp2pNetwork, folder: str = "", **changes: Any) -> Libp2pNetwork:
        self._opened += 1
        home = self.folder / (folder or str(self._opened))
        home.mkdir()
        told: list[tuple[str, str]] = []
        owner = OWNER.public if peers else OWNER
        options = {"run_id": "run", "secret": SECRET, "owner": owner, "protocol": "1", "folder": home} | changes
        options.setdefault("initial_peers", tuple(p.addresses()[0] for p in peers))
        net = await Libp2pNetwork.create(on_refusal=lambda who, why: told.append((who, why)), **options)
        self._networks.append(net)
        got: asyncio.Queue[tuple[str, Frame]] = asyncio.Queue()

        async def receive(sender: str, frame: Frame) -> None:
            if frame.kind == "wrong":
                raise ProtocolError("that was wrong")
            got.put_nowait((sender, frame))

        async def echo(sender: str, payload: bytes) -> bytes:
            return payload

        net.receive(receive)
        net.serve("echo", echo)
        self.refusals[net.peer_id], self.got[net.peer_id], self.homes[net.peer_id] = told, got, home
        return net

    async def next(self, net: Network, timeout_s: float = 10.0) -> tuple[str, Frame]:
        return await asyncio.wait_for(self.got[net.peer_id].get(), timeout_s)

    async def close(self) -> None:
        await asyncio.gather(*(n.close() for n in self._networks))


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory(prefix="mule-") as folder:
        opened = World(Path(folder))
        try:
            yield opened
        finally:
            await opened.close()


def number(frame: Frame) -> int:
    return int(frame.header["n"])


CHILD = """
import asyncio, sys
from pathlib import Path
from muletrain.network.gate import NO_SECRET, OTHER_SECRET
from muletrain.network.identity import Key
from muletrain.network.libp2p import Libp2pNetwork
async def main():
    net = await Libp2pNetwork.create(run_id="run", secret=b"s" * 32, protocol="1", folder=Path(sys.argv[1]), owner=Key.of_seed(b"o" * 32))
    async def echo(sender, payload): return payload
    async def receive(sender, frame): pass
    net.serve("echo", echo)
    net.receive(receive)
    print(net.addresses()[0], net.p2p.daemon.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@contextlib.contextmanager
def child(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A peer in a process of its own: the process, its address, its daemon's pid."""
    folder.mkdir(exist_ok=True)
    process, daemon = subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True), 0
    try:
        assert process.stdout is not None
        address, pid = process.stdout.readline().split()
        daemon = int(pid)
        yield process, address, daemon
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(ProcessLookupError):  # it ends by itself, but not if a failed test leaves it stopped
            if daemon:
                os.kill(daemon, signal.SIGKILL)
        assert process.stdout is not None
        process.stdout.close()
