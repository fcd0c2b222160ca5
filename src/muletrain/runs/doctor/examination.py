"""``muletrain doctor``: checks, verdicts, and advice.

torch, drivers and networks can crash a process, or hang. So the checks run in separate processes
(``runs.doctor.process``) with a time limit. A check that the process does not reach is reported as missing.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

import muletrain
from muletrain.runs.folder import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PYTHON = ((3, 11), (3, 14))
TORCH = ((2, 11), (2, 14))
"""First supported and first unsupported version, as in pyproject.toml."""


class Verdict(StrEnum):
    """The result of a check. ``MISSING``: a requirement of training is missing."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"
    UNKNOWN = "not checked"


@dataclass(frozen=True)
class Check:
    """The result of one check. ``fix``: advice; empty if nothing is wrong."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


class Question(BaseModel):
    """The input of the checks. ``config``: the run's, as JSON. ``listen``, ``port``, ``announce``: as for ``start``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: str
    ticket: str | None
    listen: str
    port: int
    announce: tuple[str, ...]
    temporary: str = tempfile.gettempdir()
    """Folder of temporary files."""


@dataclass(frozen=True)
class Part:
    """The checks of one process, in order, with the fix for each check that is not reached."""

    name: str
    limit_s: float
    fixes: dict[str, str]


NO_TORCH = (
    f"install one that fits this machine: pip install 'torch>={TORCH[0][0]}.{TORCH[0][1]},<{TORCH[1][0]}.{TORCH[1][1]}' (without a GPU: "
    f"--index-url https://download.pytorch.org/whl/cpu)"
)
NO_GPU = "if nvidia-smi does not answer, install or restart the driver; start a container with --gpus all"
MACHINE = Part(
    "machine",
    120.0,
    {
        "torch": NO_TORCH,
        "GPU": NO_GPU,
        "memory": "close other programs",
        "disk": "look for a network drive that does not answer (see 'mount')",
    },
)
AGAIN = "try again while the run's members answer"
NETWORK = Part(
    "network",
    180.0,
    {
        "network engine": "pip install hivemind==1.1.12; it runs on Linux and macOS (arm64), on Windows in WSL2",
        "listening": "check whether a firewall or a security module blocks listening; try --listen 127.0.0.1",
        "run": "check that the run still goes on and that its port is open to this machine; ask for the current ticket",
        "clock": AGAIN,
        "from outside": AGAIN,
        "hole punching": AGAIN,
        "relay": AGAIN,
    },
)
PARTS = (MACHINE, NETWORK)


def examine(question: Question, told: Callable[[str], None] = lambda part: None) -> Iterator[Check]:
    """Yield the result of every check. ``told`` is called with the name of each part before the start."""
    yield python()
    for part in PARTS:
        told(part.name)
        yield from ask(part, question, [sys.executable, "-P", "-m", "muletrain.runs.doctor.process", part.name])


def python() -> Check:
    """Check the version of Python and the platform."""
    version, system = sys.version_info[:2], f"{platform.system()} {platform.machine()}"
    found = f"{platform.python_version()} on {system}, muletrain {muletrain.__version__}"
    low, high = PYTHON
    if not low <= version < high:
        fix = f"make a virtual environment with Python {low[0]}.{low[1]} to {high[0]}.{high[1] - 1}"
        return Check("Python", Verdict.MISSING, found, fix)
    if system not in ("Linux x86_64", "Linux aarch64", "Darwin arm64"):
        return Check("Python", Verdict.WARNING, found, "muletrain runs on Linux, macOS (arm64) and in WSL2")
    return Check("Python", Verdict.OK, found)


def ask(part: Part, question: Question, command: list[str]) -> Iterator[Check]:
    """Yield the checks of a process, and a finding for each check that was not reached."""
    with temporary_folder() as scratch:  # we remove it if the process is killed
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        late = False
        try:
            out, err = process.communicate(question.model_dump_json(), part.limit_s)
        except subprocess.TimeoutExpired:
            late = True
            _kill(process)
            out, err = process.communicate()
        finally:
            _kill(process)  # and its daemon
    done = list(_read(out))
    yield from done
    left = [name for name in part.fixes if name not in {check.name for check in done}]
    if left and (late or process.returncode):
        yield Check(
            left[0],
            Verdict.MISSING,
            _ending(process.returncode, err, part.limit_s if late else None),
            part.fixes[left[0]],
        )
        for name in left[1:]:
            yield Check(name, Verdict.UNKNOWN, f"not reached after '{left[0]}'", "see above")


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _read(out: str) -> Iterator[Check]:
    for line in out.splitlines():
        with suppress(ValidationError):  # output of a library
            yield TypeAdapter(Check).validate_json(line)


def _ending(code: int, err: str, limit_s: float | None) -> str:
    if limit_s is not None:
        return f"no answer within {limit_s:.0f} s"
    if code < 0:
        return f"the process was killed by signal {-code} ({signal.strsignal(-code)})"
    return next((line.strip() for line in reversed(err.splitlines()) if line.strip()), f"exit code {code}")[:300]


def advised(name: str, problem: str, fix: str) -> Check:
    """A missing check from the error message ``problem``, with the advice after a ';' in place of ``fix``."""
    found, _, own = problem.partition("; ")
    return Check(name, Verdict.MISSING, found, own or fix)
