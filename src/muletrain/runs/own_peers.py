"""The peer processes of this machine in a run: names, devices and addresses."""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from muletrain.errors import ConfigError
from muletrain.runs.fleet import threads_per_peer
from muletrain.runs.measure.machine import dealt, free_memory_of_machine, own_devices
from muletrain.runs.spec import WorkerSpec

_ADDRESS = re.compile(r"(/(?:ip4|ip6|dns|dns4|dns6)/[^/]+/tcp/)(\d{1,5})")


class Listening(NamedTuple):
    """Where a machine's peers listen: the first on ``port`` (0: any free one), each further one on the next."""

    host: str
    port: int
    announce: tuple[str, ...]
    """Addresses for dialling the first peer; (): ``host``."""

    def port_of(self, peer: int) -> int:
        return self.port + peer if self.port else 0

    def free(self, peers: int) -> bool:
        """Are the ports of so many peers free now?"""
        with suppress(OSError), ExitStack() as held:
            for peer in range(peers):
                family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
                held.enter_context(socket.create_server((self.host, self.port_of(peer)), family=family))
            return True
        return False

    def announced_by(self, peer: int) -> tuple[str, ...]:
        """The addresses for peer number ``peer``: ports are shifted like the peer's port. Raises ConfigError."""
        shifted = []
        for address in self.announce:
            match = _ADDRESS.fullmatch(address)
            if match is None or int(match[2]) + peer > 65535:
                raise ConfigError(f"--announce {address}: write it as /ip4/1.2.3.4/tcp/4000 (or /dns4/NAME/tcp/PORT)")
            shifted.append(f"{match[1]}{int(match[2]) + peer}")
        return tuple(shifted)


@dataclass(frozen=True)
class OwnPeers:
    names: list[str]
    devices: list[str]
    """The device of each."""
    threads: int
    """CPU threads per peer."""
    host_memory: int
    """Each peer's share of the free memory, before any peer took some [bytes]."""

    @classmethod
    def on(cls, name: str, device: str, threads: int | None) -> OwnPeers:
        """One peer per GPU of this machine, or one on the CPU."""
        devices = own_devices(device)
        names = [name] if len(devices) == 1 else [f"{name}-{k}" for k in range(len(devices))]
        return cls.dealt(names, device, threads)

    @classmethod
    def dealt(cls, names: list[str], device: str, threads: int | None) -> OwnPeers:
        """Peers of these ``names``, dealt over the devices of this machine."""
        share = threads_per_peer(threads, len(names))
        return cls(names, dealt(own_devices(device), len(names)), share, free_memory_of_machine(len(names)))

    def specs(self, listening: Listening, **common: Any) -> list[WorkerSpec]:
        """The peers' work, with the shared fields in ``common``. Raises ConfigError."""
        return [
            WorkerSpec(
                role="join",
                name=name,
                threads=self.threads,
                device=device,
                sharing=self.devices.count(device),
                host_memory=self.host_memory,
                listen=listening.host,
                port=listening.port_of(k),
                announce=listening.announced_by(k),
                **common,
            )
            for k, (name, device) in enumerate(zip(self.names, self.devices, strict=True))
        ]


def check_name(name: str | None) -> None:
    """Raises ConfigError for a name that cannot be part of a file name."""
    if name is not None and not re.fullmatch(r"\w[\w.-]{0,63}", name):
        raise ConfigError(f"--name {name!r}: use up to 64 letters, digits, '.', '_' and '-'; it becomes a file name")


def host_name() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname().split(".")[0][:32], flags=re.ASCII) or "peer"
