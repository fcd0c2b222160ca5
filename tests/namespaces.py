"""Machines as network namespaces: each has one link to a common switch, and no other way. Needs root and iproute2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

SEGMENT, BURST_S, BURST = 1514, 0.002, 16_384
"""Bytes of a packet with its header; what a shaped link sends at once: its rate for so long, or so many bytes where
that is more."""
TRAIN_S = 0.001
"""What a machine hands to its router at once: as many packets as pass in that time, or one."""
CONGESTION = "cubic"
"""How TCP shares a link unless told otherwise, on Linux and macOS: it fills whatever queue there is."""
ALLOWED = "net.ipv4.tcp_allowed_congestion_control"


@dataclass(frozen=True)
class Traffic:
    """Of one machine's link since it was made, as the kernel counts it [bytes, but for ``lost``]."""

    sent: int
    received: int
    lost: int
    """Packets that found a shaped link's queue full, in either direction."""
    up_queue: int
    """What waits now."""
    down_queue: int


class Switch:
    """A bridge in a namespace of its own, and one namespace a machine. A context manager: in the end it kills what
    still runs there, and nothing is left. Machine number k (from 1, in the order given) has the address 10.99.0.k on
    ``eth0``."""

    def __init__(self, machines: Iterable[str], prefix: str = "mule") -> None:
        self._machines = tuple(machines)
        self._prefix = f"{prefix}-{os.getpid()}"
        self.namespace = self.of("s")
        """The bridge's, named ``switch``. The port of machine m is ``to-m``."""

    def of(self, machine: str) -> str:
        """Its namespace."""
        return f"{self._prefix}-{machine}"

    def inside(self, machine: str) -> list[str]:
        """What to put before a command that is to run there."""
        return ["ip", "netns", "exec", self.of(machine)]

    def address(self, machine: str) -> str:
        return f"10.99.0.{self._machines.index(machine) + 1}"

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        _ip("netns", "add", self.namespace)
        self._ip("link", "add", "switch", "type", "bridge")
        self._ip("link", "set", "switch", "up")
        for m in self._machines:
            own = self.of(m)
            _ip("netns", "add", own)
            _ip("-n", own, "link", "set", "lo", "up")
            self._ip("link", "add", f"to-{m}", "type", "veth", "peer", "name", "eth0", "netns", own)
            self._ip("link", "set", f"to-{m}", "master", "switch", "up")
            _ip("-n", own, "addr", "add", f"{self.address(m)}/24", "dev", "eth0")
            _ip("-n", own, "link", "set", "eth0", "up")

    def shape(self, machine: str, *, up_bytes_per_s: float, down_bytes_per_s: float, queue_s: float) -> None:
        """Put a router between ``machine`` and the switch, which sends on at these rates, and keeps ``queue_s`` of each
        direction before it drops. The queues are the router's, beyond the machine, as at home: in the machine's own the
        kernel would hold TCP back."""
        router, own, wan, net = (f"{kind}-{machine}" for kind in ("home", "to", "wan", "net"))
        self._ip("link", "add", router, "type", "bridge")
        self._ip("link", "add", wan, "type", "veth", "peer", "name", net)
        for device, bridge in ((own, router), (wan, router), (net, "switch")):
            self._ip("link", "set", device, "master", bridge, "up")
        self._ip("link", "set", router, "up")
        _choose(CONGESTION, self.inside(machine))
        # a kernel would hand 64 KB from one veth to the next at once; a packet at a time costs much of the CPU where
        # links are wide
        packets = max(1, round(up_bytes_per_s * TRAIN_S / SEGMENT))
        _ip("-n", self.of(machine), "link", "set", "eth0", "gso_max_segs", str(packets))
        for device, rate in ((wan, up_bytes_per_s), (own, down_bytes_per_s)):
            burst = max(BURST, round(rate * BURST_S))
            limit = max(round(rate * queue_s), SEGMENT) + burst
            shaper = ["tbf", "rate", f"{round(8 * rate)}bit", "burst", str(burst), "limit", str(limit)]
            subprocess.run(["tc", "-n", self.namespace, "qdisc", "add", "dev", device, "root", *shaper], check=True)

    def traffic(self) -> dict[str, Traffic]:
        links = {link["ifname"]: link for link in self._json("ip", "-s", "link")}
        queues = {q["dev"]: q for q in self._json("tc", "-s", "qdisc") if q["kind"] == "tbf"}
        found = {}
        for m in self._machines:
            up, down = queues.get(f"wan-{m}", {}), queues.get(f"to-{m}", {})
            shaped = links.get(f"wan-{m}")  # after the router's queue
            sent = links[f"to-{m}"]["stats64"]["rx"] if shaped is None else shaped["stats64"]["tx"]
            found[m] = Traffic(
                sent["bytes"],
                links[f"to-{m}"]["stats64"]["tx"]["bytes"],
                up.get("drops", 0) + down.get("drops", 0),
                up.get("backlog", 0),
                down.get("backlog", 0),
            )
        return found

    def running(self, machine: str) -> list[int]:
        """Processes there."""
        found = subprocess.run(["ip", "netns", "pids", self.of(machine)], capture_output=True, text=True).stdout
        return [int(pid) for pid in found.split()]

    def close(self) -> None:
        """Idempotent."""
        for m in (*self._machines, "s"):
            _wait_for(lambda m=m: not self._killed(m))
            subprocess.run(["ip", "netns", "del", self.of(m)], check=False, stderr=subprocess.DEVNULL)

    def _killed(self, machine: str) -> list[int]:
        for pid in (running := self.running(machine)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return running

    def _ip(self, *arguments: str) -> None:
        _ip("-n", self.namespace, *arguments)

    def _json(self, program: str, *arguments: str) -> list[dict[str, Any]]:
        shown = subprocess.run(
            [program, "-n", self.namespace, "-j", *arguments], check=True, capture_output=True, text=True
        )
        found: list[dict[str, Any]] = json.loads(shown.stdout)
        return found


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _choose(congestion: str, inside: list[str]) -> None:
    """The kernel lets a namespace choose what its own list allows."""
    allowed = subprocess.run(["sysctl", "-n", ALLOWED], check=True, capture_output=True, text=True).stdout.split()
    if congestion not in allowed:
        subprocess.run(["sysctl", "-qw", f"{ALLOWED}={' '.join([*allowed, congestion])}"], check=True)
    subprocess.run([*inside, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={congestion}"], check=True)


def _wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("processes in a network namespace do not end")
        time.sleep(0.1)
