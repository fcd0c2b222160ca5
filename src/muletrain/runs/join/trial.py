"""A joiner first builds everything that came over the network in a process with limits: the run's model from the
configuration, and tokens of this machine's data by the run's tokenizer. So no field needs a separate bound. After a
success there, this process repeats the work.

``python -m muletrain.runs.join.trial`` reads a ``Question`` a line from standard input, and prints a line of JSON for each.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from muletrain import errors
from muletrain.config.trusted import trust, trusted
from muletrain.errors import CapacityError, MuletrainError
from muletrain.script import look_at, places
from muletrain.units import format_memory

if TYPE_CHECKING:
    from muletrain.compute.estimate import Offer

BUILD_S = 300.0
"""CPU seconds, and seconds, within which the run's model must be built, and the run's tokenizer loaded."""
LEAST_BYTES, MOST_BYTES = 1 << 30, 16 << 30
"""Lower and upper limit of the memory that the process may take beside the program."""
SAMPLE = "The mules carried 12,345 loads, über alle Berge; 山を越えて。\n\n\t" * 200
"""A text that a tokenizer must encode in that time, before the machine's data."""
STARTED_S = 120.0
"""Seconds within which the process must have imported the program."""


class Question(BaseModel):
    """``config``: the run's; ``tokenizer``: base64 of the tokenizer's file, with ``data``: place of the text on this
    machine, and ``digest``: the corpus'. ``stage``: to be built. ``room``: bytes; ``cpu_s``: seconds of CPU. ``scripts``:
    see ``script.places``."""

    model_config = ConfigDict(extra="forbid")
    config: str
    stage: int
    room: int
    cpu_s: float
    factories: tuple[str, ...]
    scripts: tuple[str, ...]
    tokenizer: str | None = None
    data: str = "none"
    digest: str = ""


class Trial:
    """The process, from the first question on. Begin early: importing the program takes seconds."""

    def __init__(self) -> None:
        self._room = LEAST_BYTES
        self._process: asyncio.Task[asyncio.subprocess.Process] = asyncio.create_task(_begun())

    def bound(self, offer: Offer) -> None:
        """Limit the memory of the process to ``offer`` from the next question on."""
        self._room = min(MOST_BYTES, max(LEAST_BYTES, offer.device if offer.host is None else offer.host))

    async def build(self, config: str, stage: int) -> None:
        """Build the facts of the run, and ``stage``. Raises the MuletrainError of building, and CapacityError beyond a
        limit."""
        question = Question(
            config=config, stage=stage, room=self._room, cpu_s=BUILD_S, factories=trusted(), scripts=places()
        )
        await self._ask("the run's model", question)

    async def tokens(self, config: str, tokenizer: bytes, data: str, digest: str) -> None:
        """Make the cache of tokens of ``data``. Raises as ``build``."""
        question = Question(
            config=config,
            stage=0,
            room=self._room,
            cpu_s=BUILD_S,
            factories=trusted(),
            scripts=places(),
            tokenizer=base64.b64encode(tokenizer).decode(),
            data=data,
            digest=digest,
        )
        await self._ask("the run's tokenizer", question)

    async def _ask(self, what: str, question: Question) -> None:
        process = await self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(ConnectionError):
            process.stdin.write(question.model_dump_json().encode() + b"\n")
            await process.stdin.drain()
        limit_s = None if question.tokenizer is not None else STARTED_S + BUILD_S  # a corpus may take hours
        try:
            async with asyncio.timeout(limit_s):
                line = await process.stdout.readline()
        except TimeoutError:
            await self._anew()
            raise CapacityError(f"{what} takes more than {BUILD_S:.0f} s to build; {_ASK}") from None
        if not line:
            code = await process.wait()
            await self._anew()
            raise CapacityError(
                f"{what} ended a process that may use {format_memory(self._room)} and {BUILD_S:.0f} s"
                f" ({signal.strsignal(-code) if code < 0 else f'exit code {code}'}); {_ASK}"
            )
        answer: dict[str, str] = json.loads(line)
        if "error" in answer:
            kind: Any = getattr(errors, answer["error"], CapacityError)
            raise kind(answer["message"])

    async def _anew(self) -> None:
        """Restart the process, which has ended or exceeded the time limit."""
        await self.close()
        self._process = asyncio.create_task(_begun())

    async def close(self) -> None:
        """End the process."""
        process = await self._process
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _begun() -> asyncio.subprocess.Process:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "CUDA_VISIBLE_DEVICES": ""}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "muletrain.runs.join.trial"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        limit=1 << 20,
    )


_ASK = "nothing was taken; give more (--memory), or ask the person who began the run"


# In the process ---------------------------------------------------------------------------------------------------------


def _limit(room: int, cpu_s: float) -> None:
    """Take no more memory than ``room`` beside the program, and ``cpu_s`` of CPU from now on."""
    used_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used_s + cpu_s) + 1, hard))
    with suppress(OSError, ValueError):  # not on macOS
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[5]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]  # mapped files of tokens, which may be large, do not count
        resource.setrlimit(resource.RLIMIT_DATA, (now + room, hard))


def _answer(question: Question) -> None:
    from muletrain.model.make import make_stage
    from muletrain.runs.assemble import RunFacts
    from muletrain.runs.corpus import own_data
    from muletrain.runs.join.limits import told_config

    trust(*question.factories)
    look_at(*question.scripts)
    facts = RunFacts.of(told_config(question.config))
    if question.tokenizer is None:
        facts.needs(), facts.client_needs(), facts.plan()
        if question.stage < len(facts.cut):  # otherwise refused by ``check_welcome``
            make_stage(facts.spec, question.stage, facts.cut)
        return
    from tokenizers import Tokenizer

    tokenizer = base64.b64decode(question.tokenizer)
    Tokenizer.from_buffer(tokenizer).encode(SAMPLE)
    resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    host: Any = SimpleNamespace(spec=SimpleNamespace(data=question.data))
    own_data(host, facts, tokenizer, question.digest)


def _told(error: BaseException, room: int) -> dict[str, str]:
    """The answer for an error. Lack of memory may be the error's cause, or in the message."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError) or "alloc" in text:
        message = f"what came from the run takes more than {format_memory(room)} of memory to build; {_ASK}"
        return {"error": "CapacityError", "message": message}
    if isinstance(error, MuletrainError):
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "ConfigError", "message": f"what came from the run cannot be used ({text[:300]}); {_ASK}"}


def main() -> None:
    import torch  # noqa: F401 # counts as program
    import transformers  # noqa: F401

    import muletrain.runs.corpus  # noqa: F401

    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of libraries are no answers
    for line in sys.stdin:
        question = Question.model_validate_json(line)
        _limit(question.room, question.cpu_s)
        try:
            _answer(question)
            answer = {}
        except BaseException as e:  # a library in Rust may raise a BaseException
            answer = _told(e, question.room)
        print(json.dumps(answer), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
