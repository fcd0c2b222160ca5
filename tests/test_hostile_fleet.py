"""Garbage on the ports of a fleet that trains, from strangers and from a member: it is told of, and costs no number."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
from pathlib import Path

import pytest

from muletrain.events import Event, FrameRefused, PeerJoined, StepDone
from muletrain.runs.fleet import LocalFleet

from . import rogue_worker
from .fleet_run import checkpoint_weights, run_fleet
from .reference import train_plainly
from .test_equivalence import facts_of, relative_difference

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="finds the fleet's ports in /proc (Linux)"),
]
HALF_A_HANDSHAKE = b"\x13/multistream/1.0.0\n\x07/noise\n\x00\x20" + bytes(7)  # 32 bytes of noise are announced


def listening_ports(pid: int) -> set[int]:
    """Of a process' children."""
    sockets = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(status.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                sockets |= {os.readlink(d) for d in (status.parent / "fd").iterdir()}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(w[1].split(":")[1], 16) for w in lines if w[3] == "0A" and f"socket:[{w[9]}]" in sockets}


class Vandal:
    """Fills every port of a fleet with garbage, and leaves connections behind that say nothing more."""

    def __init__(self) -> None:
        self.ports: set[int] = set()
        self._left: list[socket.socket] = []

    def strike(self, fleet: LocalFleet) -> None:
        for name in fleet.alive():
            self.ports |= listening_ports(fleet.pid(name))
        for port in self.ports:
            for data in (random.randbytes(50_000), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(300), b""):
                with (
                    socket.create_connection(("127.0.0.1", port), timeout=5) as connection,
                    contextlib.suppress(OSError),
                ):
                    connection.sendall(data)
            for _ in range(5):
                self._left.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                self._left[-1].sendall(HALF_A_HANDSHAKE)

    def close(self) -> None:
        for connection in self._left:
            connection.close()


def test_garbage_from_strangers_and_from_a_member_costs_no_number(tmp_path: Path) -> None:
    facts, cache = facts_of(tmp_path, "train.steps=8")
    expected, _ = train_plainly(facts, facts.source(cache))
    vandal, rogue = Vandal(), "peer-2"

    def watch(fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, StepDone) and event.step in (1, 4):
            vandal.strike(fleet)

    def wrap(name: str) -> list[str]:
        return [sys.executable, rogue_worker.__file__] if name == rogue else []

    try:
        events = run_fleet(facts.config, tmp_path / "run", watch=watch, wrap=wrap)
    finally:
        vandal.close()
    assert len(vandal.ports) >= 4
    assert relative_difference(checkpoint_weights(tmp_path / "run"), expected) <= 1e-5
    ids = {e.name: e.peer_id for e in events if isinstance(e, PeerJoined)}
    refused = [e for e in events if isinstance(e, FrameRefused)]
    assert {e.remote for e in refused} == {ids[rogue]}, "whoever did nothing wrong is not accused"
    assert not [e for e in refused if "internal error" in e.reason]
    for receiver in ids.keys() - {rogue}:
        said = " | ".join(e.reason for e in refused if e.peer == receiver)
        for complaint in (
            "not a frame of this protocol",
            f"100 + {1 << 40} bytes",
            "unknown kind 'nonsense'",
            "forward with fp32 (3, 3)",
            "forward of microbatch 1000",
            "bytes cannot be",
            "not msgpack",
        ):
            assert complaint in said, f"{receiver} does not say: {complaint}"
