"""Starts, watches and ends the peer processes on this machine.

A process reads commands only from standard input, and so ends with us, even if we crash. A process has a separate
session and ignores ``runs.signals.ENDING``, so we alone answer such signals, and end the run in order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Self

from muletrain.cgroups import cpus
from muletrain.errors import MuletrainError
from muletrain.runs.folder import temporary_folder
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.signals import begun_deaf
from muletrain.runs.worker_files import SCRATCH, TICKET_FILE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from muletrain.runs.spec import WorkerSpec

POLL_S = 0.1
"""Seconds between two looks for the ticket."""
START_S = 120.0
"""Most seconds until the founder listens."""
STOP_S = 60.0
"""Most seconds between the request for an orderly end and the end."""

COMMON = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "PYTHONSAFEPATH": "1",
}
"""The environment of all our processes. Idle threads of torch do not spin: on shared cores, a spinning fleet ran at a
twelfth of its speed. Python does not import from the working folder, since a random.py or queue.py there would shadow
the library's."""


class LocalFleet:
    """Owns the processes of one command. The context manager leaves no process behind."""

    def __init__(self, folder: Path, threads: int, wrap: Callable[[str], list[str]] = lambda name: []) -> None:
        """``wrap``: a prefix for the command of the peer of that name (``ip netns exec ...``)."""
        self.folder = folder
        self._wrap = wrap
        self._ending = ExitStack()
        # a killed process cannot remove the folder
        self._scratch = str(self._ending.enter_context(temporary_folder()))
        self._threads = threads
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._ending.close()

    def spawn(self, names: list[str]) -> None:
        """Start the interpreters, since imports take seconds; ``begin`` assigns the work."""
        for name in names:
            with open(self.folder / f"{name}.log", "ab") as log, begun_deaf():
                process = subprocess.Popen(
                    [*self._wrap(name), sys.executable, "-P", "-m", "muletrain.runs.worker"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**environment(self._threads), "TMPDIR": self._scratch, SCRATCH: self._scratch},
                    start_new_session=True,
                )
            self._running[name] = process

    def begin(self, spec: WorkerSpec) -> None:
        """Send ``spec`` to the process of that name."""
        self.tell(spec.name, spec.model_dump_json())

    def wait_for_ticket(self, founder: str, tick: Callable[[], None]) -> Ticket:
        """Wait until the founder listens and has written the ticket. Raises MuletrainError if the founder ends or takes
        too long."""
        path = self.folder / TICKET_FILE
        deadline = time.monotonic() + START_S
        while not path.exists():
            tick()
            if self._running[founder].poll() is not None or time.monotonic() > deadline:
                raise MuletrainError(
                    f"the first peer did not start{self._last_words(founder)}; see {self.folder / founder}.log"
                )
            time.sleep(POLL_S)
        return Ticket.parse(path.read_text(encoding="utf-8"))

    def _last_words(self, name: str) -> str:
        """The last line of a process' log, in parentheses."""
        lines = (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace").split("\n")
        words = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return words and f" ({words[:200]})"

    def alive(self) -> list[str]:
        """Names of running processes. Closes our files for ended processes, or a long run with newcomers would run out
        of files."""
        names = [name for name, process in self._running.items() if process.poll() is None]
        for name in self._running.keys() - names:
            self._hang_up(name)
        return names

    def _hang_up(self, name: str) -> None:
        stdin = self._running[name].stdin
        if stdin is not None:
            with suppress(OSError):
                stdin.close()

    def exit_codes(self) -> dict[str, int]:
        return {name: code for name, process in self._running.items() if (code := process.poll()) is not None}

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def stop(self) -> None:
        """Ask all processes for an orderly end."""
        for name in self.alive():
            self.tell(name, "stop")

    def kill(self) -> None:
        """Kill every process with all children now. All are killed before any pipe closes: a process that sees the end
        of another process would report that as the reason, or remove files in use."""
        for name in self._running:
            self.signal(name, signal.SIGKILL)
        for name, process in self._running.items():
            process.wait()
            self._hang_up(name)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signal a peer's process and its children, including the daemon."""
        with suppress(ProcessLookupError):
            os.killpg(self._running[name].pid, number)

    def tell(self, name: str, line: str) -> None:
        """Write a line to a peer's standard input (see ``worker.py``)."""
        stdin = self._running[name].stdin
        with suppress(OSError, ValueError):  # the process has ended; the exit code says more
            assert stdin is not None
            stdin.write(f"{line}\n".encode())
            stdin.flush()


def threads_per_peer(asked: int | None, local_peers: int) -> int:
    """CPU threads of one peer's compute: ``asked``, or an equal share of the cores."""
    return asked or max(1, cpus() // local_peers)


def environment(threads: int) -> dict[str, str]:
    """The environment of a peer process with ``threads`` threads."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        **COMMON,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
