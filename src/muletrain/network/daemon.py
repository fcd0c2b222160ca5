"""The libp2p daemon (hivemind's ``p2pd``) of one peer: a process beside ours."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muletrain.errors import NetworkError
from muletrain.network.gated import GatedP2P
from muletrain.network.identity import Key

if TYPE_CHECKING:
    from pathlib import Path

MAX_SOCKET_PATH = {"darwin": 103}
"""Most bytes of a unix socket's path by platform (``sun_path`` without the final zero); 107 elsewhere."""
SOCKET = "p2pclient-12345678901.sock"
"""The longest name that hivemind gives a socket."""
START_S = 90.0
"""Longest start of the daemon [s]. An idle machine needs 0.1 s; when fleets shared two cores, 15 s (hivemind's limit)
were not enough."""
GARBAGE = "50"
"""Garbage that the daemon lets pile up, in per cent of live memory (Go's GOGC; 100 is the default). The daemon
remembers a little about every peer ever met: half the garbage, half the growth."""


@dataclass(frozen=True)
class Daemon:
    """A running daemon, and the listening addresses."""

    p2p: GatedP2P
    key: Key
    listen: str
    port: int

    @classmethod
    async def start(
        cls, folder: Path, listen: str, port: int, announce: tuple[str, ...], *, private: bool = False
    ) -> Daemon:
        """Start a daemon. ``port`` 0: any free one. ``private``: unreachable from remote machines. Raises
        NetworkError."""
        check_socket_folder(folder, sys.platform)
        free = _check_port_free(listen, port)
        if announce and port == 0:  # the daemon would not tell which port it took
            port = free
        identity = folder / "identity"
        key = Key.at(identity)
        local = listen.startswith("127.")
        os.environ.setdefault("GOGC", GARBAGE)  # the daemon inherits it
        prefixed: Any = type("LocalP2P", (GatedP2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})
        try:
            p2p: GatedP2P = await prefixed.create(
                host_maddrs=[f"/{'ip6' if ':' in listen else 'ip4'}/{listen}/tcp/{port}"],
                announce_maddrs=list(announce) or None,
                identity_path=str(identity),
                check_if_identity_free=False,
                startup_timeout=START_S,
                nat_port_map=not local,
                auto_nat=not local,
                idle_timeout=60,
                use_relay=False,
                force_reachability="private" if private else None,
            )
        except Exception as e:  # the daemon's errors have no common base
            raise NetworkError(
                f"the network daemon did not start on {listen}:{port}: {' '.join(str(e).split())[:500]}"
            ) from e
        return cls(p2p, key, listen, port)

    async def addresses(self) -> list[str]:
        """The addresses at which peers may dial the daemon."""
        return [str(a) for a in await self.p2p.get_visible_maddrs(latest=True)]

    def inside(self, addresses: list[str]) -> tuple[str, int]:
        """(host, port) at which this process can dial the daemon, given ``addresses``."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.listen, self.listen)
        told = (a.split("/") for a in addresses)
        return host, self.port or next(int(part[4]) for part in told if part[2:4] == [host, "tcp"])


def check_socket_folder(folder: Path, platform: str) -> None:
    """Raises NetworkError if the daemon's sockets in ``folder`` would have longer paths than ``platform``
    (``sys.platform``) allows."""
    length, limit = len(os.fsencode(folder / SOCKET)), MAX_SOCKET_PATH.get(platform, 107)
    if length > limit:
        raise NetworkError(
            f"{folder}: {length - limit} bytes too long for unix sockets; set TMPDIR to a folder with a short path, e.g. TMPDIR=/tmp"
        )


def _check_port_free(listen: str, port: int) -> int:
    """``port``, or a free one for 0. The daemon listens with SO_REUSEPORT: a second daemon on the same port would
    silently take half of the first one's callers. Raises NetworkError."""
    try:
        address = ipaddress.ip_address(listen)
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((listen, port))
            return int(probe.getsockname()[1])
    except ValueError as e:
        raise NetworkError(
            f"network.listen: {listen!r} is no address; write it as 192.168.1.7, or 0.0.0.0 for all addresses"
        ) from e
    except OSError as e:
        what = f"cannot listen on {listen}:{port}: {e.strerror}"
        if e.errno in (errno.EADDRINUSE, errno.EACCES):
            raise NetworkError(f"network.port: {what}; choose another (--port), or 0 for any free one") from e
        raise NetworkError(
            f"network.listen: {what}; give an address of this machine, or 0.0.0.0 for all addresses"
        ) from e


async def end_daemon(p2p: GatedP2P) -> None:
    """Ask the daemon to end, and kill the process on failure."""
    with suppress(Exception):
        async with asyncio.timeout(5.0):
            await p2p.shutdown()
        return
    with suppress(Exception):  # the daemon does not end when asked
        p2p.daemon.kill()
        await p2p.daemon.wait()
