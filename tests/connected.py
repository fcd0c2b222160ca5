"""Commands on machines that are network namespaces behind one switch, with nothing but TCP between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.namespaces import Switch

namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="needs root and iproute2 to make network namespaces",
)
PYTHON = "python -c"
ONLY_TCP = "7,40 0 0 12,21 4 0 2054,21 0 2 2048,48 0 0 23,21 1 0 6,6 0 0 2,6 0 0 0"
"""Classic BPF: ethertype ARP, or IPv4 whose protocol is TCP: 0 (pass), else 2 (drop)."""
NO_SYN = "10,40 0 0 12,21 0 6 2048,48 0 0 23,21 0 4 6,177 0 0 14,80 0 0 27,84 0 0 18,21 1 0 2,6 0 0 0,6 0 0 2"
"""Classic BPF: IPv4, TCP, SYN without ACK: 2 (drop), else 0 (pass)."""


def connected(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
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
