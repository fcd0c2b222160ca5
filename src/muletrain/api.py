"""muletrain from Python: ``muletrain.train``, ``start``, ``join`` and ``load``.

A run is the process of the command (``python -m muletrain``), with the settings of its TOML file, so scripts need no
``__main__`` guard, and notebooks no event loop. The process ends in order when its Python does.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from muletrain.cli.show.console import LiveConsole
from muletrain.cli.show.notebook import NotebookConsole, in_notebook
from muletrain.config.trusted import trust, trusted
from muletrain.errors import CheckpointError, MuletrainError
from muletrain.events import Evaluated, StepDone, Validated
from muletrain.events.event import EventError, parse
from muletrain.given import Given, sets
from muletrain.runs.folder import GIVEN
from muletrain.runs.view import RunView

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping

    from torch import nn

    from muletrain.events import Event
    from muletrain.runs.checkpoint import Checkpoint

E = TypeVar("E", bound="Event")
OWNER = "MULETRAIN_OWNER"
"""Environment variable: the process that a command belongs to (``cli.main``)."""
STOP_S = 120.0
"""Longest wait for a run to end in order when its Python ends [s]."""
KEPT = 100_000
"""Events that a ``Run`` keeps; the files of the run folder have all (``muletrain.events.read_events``)."""
_SAID = 50
"""Lines of the process' standard error that an error quotes from."""


class Events:
    """The events of a run, the last ``KEPT`` and those to come, until it ends: iterate, also with ``async for``."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __iter__(self) -> Iterator[Event]:
        queue_: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        with self._run._news:
            for event in self._run._events:
                queue_.put(event)
            if self._run._ended:
                queue_.put(None)
            self._run._readers.append(queue_.put)
        try:
            while (found := queue_.get()) is not None:
                yield found
        finally:
            with self._run._news:
                self._run._readers.remove(queue_.put)

    async def __aiter__(self) -> AsyncIterator[Event]:
        import asyncio

        events, end = iter(self), object()
        while (found := await asyncio.to_thread(next, events, end)) is not end:
            yield found  # type: ignore[misc]


class Run:
    """A run of this machine, as ``train``, ``start`` and ``join`` begin it."""

    def __init__(self, command: list[str], *, show: bool = True, given: Given | None = None) -> None:
        """``command``: arguments of ``muletrain``. ``show``: show progress, as the command would. ``given``: the objects of
        this script for the run."""
        self._given = given
        trust(*(() if given is None else given.factories))
        self.view = RunView(whole=command[0] != "join")
        self.folder: Path | None = None
        self.ticket: str | None = None
        """For ``join`` on other machines, once the run waits for them (``start``)."""
        self._news = threading.Condition()
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._readers: list[Callable[[Event | None], None]] = []
        self._callbacks: list[tuple[type[Any], Callable[[Any], object]]] = []
        self._failure: BaseException | None = None
        self._ended = False
        self._said: deque[str] = deque(maxlen=_SAID)
        self._console = (NotebookConsole if in_notebook() else LiveConsole)(self.view) if show else None
        run = {} if given is None or given.run is None else {GIVEN: str(given.run)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "muletrain", *command, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, OWNER: str(os.getpid()), **run},
            start_new_session=True,  # Ctrl-C is this process', which stops the run in order
        )
        _running.add(self)
        self._threads = [
            threading.Thread(target=target, name=f"muletrain-{target.__name__}", daemon=True)
            for target in (self._listen, self._read)
        ]
        for thread in self._threads:
            thread.start()

    # Events of the run -----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._said.append(line.rstrip())

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            with self._process.stdout as lines, self._console or contextlib.nullcontext():
                for line in lines:
                    self._line(line)
        except Exception as e:  # such as a terminal that is gone: nobody may wait for ever
            self._failure = self._failure or e
            self.stop()
        self._process.wait()
        self._threads[0].join(5.0)
        if self._given is not None:
            self._given.give_up()
        with self._news:
            self._ended = True
            for tell in self._readers:
                tell(None)
            self._news.notify_all()
        _running.discard(self)

    def _line(self, line: str) -> None:
        try:
            event = parse(line)
        except EventError:  # the folder, or the ticket
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                with self._news:
                    self.folder = Path(said["folder"]) if said.get("kind") == "folder" else self.folder
                    self.ticket = said["ticket"] if said.get("kind") == "ticket" else self.ticket
                    self._news.notify_all()
            return
        if self._console is None:
            self.view.fold(event)
        else:
            self._console(event)
        with self._news:
            self._events.append(event)
            for tell in self._readers:
                tell(event)
            self._news.notify_all()
        for callback in [callback for kind, callback in self._callbacks if isinstance(event, kind)]:
            try:
                callback(event)
            except BaseException as e:  # the user's code: ``wait`` raises it
                self._failure = self._failure or e
                self.stop()

    def events(self) -> Events:
        """The last ``KEPT`` events, and those to come (``muletrain.events``)."""
        return Events(self)

    def on(self, kind: type[E]) -> Callable[[Callable[[E], object]], Callable[[E], object]]:
        """A decorator: the function gets each event of this kind, in a thread of the run. An error in it stops the run,
        and ``wait`` raises it."""

        def register(callback: Callable[[E], object]) -> Callable[[E], object]:
            with self._news:
                self._callbacks.append((kind, callback))
            return callback

        return register

    @property
    def running(self) -> bool:
        """Does the process run?"""
        return not self._ended

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.view.step

    @property
    def loss(self) -> float | None:
        """The held-out loss at the end [nats/token], or else that of the last step; None: there is none yet."""
        measured = self._newest_loss(Evaluated)
        return self._newest_loss(StepDone) if measured is None else measured

    def _newest_loss(self, *kinds: type[Evaluated | Validated | StepDone]) -> float | None:
        with self._news:
            return next((e.loss for e in reversed(self._events) if isinstance(e, kinds)), None)

    def status(self) -> dict[str, Any]:
        """Steps, tokens/s and peers, as they are now, the loss of the last step, and the held-out loss that was measured last
        (None: not yet)."""
        stages = {stage: [peer.name for peer in peers] for stage, peers in self.view.stages(present=True).items()}
        rate = self.view.pace.tokens_per_s(None)
        return {
            "step": self.view.step,
            "steps": self.view.steps,
            "loss": self._newest_loss(StepDone),
            "heldout_loss": self._newest_loss(Evaluated, Validated),
            "tokens_per_s": rate,
            "stages": stages,
            "running": self.running,
            "folder": self.folder,
        }

    # The end of the run ----------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask the run to end after this step, with a checkpoint; a machine that joined only leaves. Returns at once."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float | None = None) -> Run:
        """Return at the run's end. KeyboardInterrupt stops the run in order first. Raises MuletrainError with the reason
        if it failed, TimeoutError, and the error of a callback."""
        try:
            with self._news:
                if not self._news.wait_for(lambda: self._ended, timeout_s):
                    raise TimeoutError(f"the run has not ended within {timeout_s:g} s")
        except KeyboardInterrupt:
            self.stop()
            with self._news:
                self._news.wait_for(lambda: self._ended, STOP_S)
            raise
        if self._failure is not None:
            raise self._failure
        if self._process.returncode in (1, 2):
            raise MuletrainError(self._reason())
        return self

    def _reason(self) -> str:
        """The error of the command, else the last lines of its standard error."""
        errors = [n for n, line in enumerate(self._said) if line.startswith("error: ")]
        lines = list(self._said)[errors[-1] :] if errors else list(self._said)
        return "\n".join(lines).removeprefix("error: ") or f"the run ended with exit code {self._process.returncode}"

    def _waited(self, ready: Callable[[], bool]) -> None:
        with self._news:
            self._news.wait_for(lambda: ready() or self._ended)
        if not ready():
            self.wait()
            raise MuletrainError("the run ended before that")

    # Results of the run ---------------------------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Checkpoint:
        """The newest checkpoint. Raises CheckpointError if there is none."""
        if self.folder is None:
            raise CheckpointError("the run has written no checkpoint yet")
        return load(self.folder)

    def model(self) -> nn.Module:
        """``model()`` of the newest checkpoint (see ``load``). Raises CheckpointError."""
        return self.checkpoint.model()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, of the package ``tokenizers``: ``encode(text).ids`` are tokens. ``transformers`` reads one of its own
        from the folder that ``export`` writes."""
        return self.checkpoint.encoder.tokenizer

    def export(self, folder: str | Path, *, merge: bool = False, dtype: str = "fp32") -> Path:
        """Write the new folder ``folder`` as ``muletrain export`` does: a Hugging Face folder, an adapter of peft, or a
        module's weights. ``merge``: a trained adapter is added to the model, and the whole is written. ``dtype`` of the
        weights: 'fp32', 'bf16' or 'fp16'. Returns the folder. Raises MuletrainError, also for a folder that has files."""
        more = ["--merge"] if merge else []
        _command("export", str(self.folder), "--hf", str(folder), "--dtype", dtype, *more, *_factories())
        return Path(folder)

    def push(self, name: str, *, private: bool = True, merge: bool = False) -> str:
        """Upload ``export`` to the Hugging Face Hub as OWNER/NAME (``hf auth login`` first). Returns the address. Raises
        MuletrainError, and the errors of ``huggingface_hub``."""
        from huggingface_hub import HfApi

        with tempfile.TemporaryDirectory(prefix="muletrain-push-") as folder:
            self.export(Path(folder) / "model", merge=merge)
            api = HfApi()
            api.create_repo(name, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=name, folder_path=str(Path(folder) / "model")))

    def __repr__(self) -> str:
        return f"<muletrain.Run {self.folder or 'preparing'}: step {self.view.step} of {self.view.steps or '?'}>"


_running: weakref.WeakSet[Run] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """A script that ends without ``wait`` leaves no process behind."""
    left = list(_running)
    for run in left:
        run.stop()
    for run in left:
        with contextlib.suppress(Exception):
            run._process.wait(STOP_S)


def train(
    config: str | Path | None = None,
    *,
    model: Any = None,
    data: Any = None,
    tokenizer: Any = None,
    wait: bool = True,
    show: bool = True,
    strategy: str | None = None,
    metrics: int | str | None = None,
    **sections: Mapping[str, Any],
) -> Run:
    """Train with peers on this machine, as ``muletrain run`` does.

    ``config``: a TOML file.

    ``model``: a Hugging Face name or folder; a ``transformers`` model (with ``tokenizer``), which begins with the weights
    that it has now; an ``nn.Module`` whose ``forward(inputs, targets)`` returns the mean loss; or fields of the section, of
    which ``from`` and ``factory`` may be such objects.

    ``data``: a path as in ``data.path``; texts, rows (dictionaries), a ``datasets.Dataset`` or ``DatasetDict``; lists of token
    ids; for a module, a dataset of (input, target) tuples with a length, or the two datasets (train, held out); or fields of
    the section, of which ``path`` and ``validation`` may be such objects.

    Further ``sections`` as in the file: ``adapter={"rank": 16}, train={"epochs": 2}``. ``wait``: return at the end of the
    run. ``show``: show progress. ``strategy``: as ``--strategy``. ``metrics``: port or 'HOST:PORT' that serves metrics for
    Prometheus, as ``--metrics``; 0: any free port. Raises MuletrainError, before anything starts if the settings or the data
    cannot be used.
    """
    given = Given("run", config, model, data, tokenizer, sections)
    more = [*(["--strategy", strategy] if strategy else []), *_served(metrics)]
    run = Run(["run", *given.arguments, *more], show=show, given=given)
    return run.wait() if wait else run


def start(
    config: str | Path | None = None,
    *,
    model: Any = None,
    data: Any = None,
    tokenizer: Any = None,
    port: int = 0,
    announce: Iterable[str] = (),
    name: str | None = None,
    show: bool = True,
    metrics: int | str | None = None,
    **sections: Mapping[str, Any],
) -> Run:
    """Begin a run on several machines, as ``muletrain start`` does; returns once ``Run.ticket`` is known.

    ``config``, ``model``, ``data``, ``tokenizer``, ``sections``: see ``train``; but a module or a dataset of (input, target)
    comes from a package that is installed on each machine (``model={"factory": "mypackage.models:build"}``), since code goes
    over no network. ``port``: TCP port; 0: any free one. ``announce``: addresses that other machines dial. ``name``: of this
    machine in the run. ``metrics``: see ``train``. Raises MuletrainError.
    """
    given = Given("start", config, model, data, tokenizer, sections)
    command = ["start", *given.arguments, "--port", str(port), *_served(metrics)]
    for address in announce:
        command += ["--announce", address]
    run = Run([*command, *([] if name is None else ["--name", name])], show=show, given=given)
    run._waited(lambda: run.ticket is not None)
    return run


def join(ticket: str, *, name: str | None = None, data: str | None = None, show: bool = True) -> Run:
    """Serve a run with this machine, as ``muletrain join`` does. Returns at once; ``wait`` returns at the end, and raises
    MuletrainError if the run does not take this machine. ``name``: of this machine in the run. ``data``: path of the run's
    text on this machine, so that it builds microbatches, too. ``show``: show progress."""
    command = ["join", ticket, *([] if name is None else ["--name", name]), *([] if data is None else ["--data", data])]
    return Run(command, show=show)


def load(where: str | Path, *, factory: Iterable[str] = ()) -> Checkpoint:
    """The newest checkpoint of a run folder, a checkpoint's folder, or a Hugging Face folder or name.

    ``model()``: the model on the CPU in fp32, tokens int64 [B, T] to logits [B, T, V], or a module of yours as that module.
    ``encoder``: text to tokens and back. ``weights()``: name -> tensor in fp32. ``step``: steps that are done. ``factory``:
    factories of the run that this process may import, as ``--factory``. Raises MuletrainError.
    """
    from muletrain.runs.pretrained import trained_in

    trust(*factory)
    return trained_in(Path(where))


def generate(
    where: str | Path,
    prompt: str,
    *,
    tokens: int = 100,
    temperature: float = 0.8,
    chat: bool | None = None,
    source: str | Path | None = None,
) -> str:
    """The text with which a trained model goes on after ``prompt``, or answers it (see ``muletrain generate``).

    ``where``: as for ``load``. ``tokens``: most new ones. ``temperature``: 0 always takes the likeliest token. ``chat``:
    answer by the chat template, or continue the text; default: as the run was trained, and a model of Hugging Face answers if
    it declares a chat template. ``source``: the folder of ``model.from`` if it moved. Raises MuletrainError.
    """
    from muletrain.runs.result import write

    checkpoint = load(where)
    model = checkpoint.writer(None if source is None else Path(source))
    return write(checkpoint, model, prompt, chat=chat, max_tokens=tokens, temperature=temperature, top_k=40)


def evaluate(
    where: str | Path,
    tasks: Iterable[str],
    *,
    include: str | Path | None = None,
    fewshot: int | None = None,
    limit: int | None = None,
    source: str | Path | None = None,
) -> list[dict[str, Any]]:
    """The scores of ``muletrain eval --tasks``, by lm-eval: 'task', 'metric', 'value', 'error' (standard error or None),
    'shots' and 'samples' (questions).

    ``where``: a run folder, a checkpoint, a Hugging Face folder or name, an adapter of peft. ``include``: folder with YAML
    files of your own tasks. ``fewshot``: examples before each question. ``limit``: most questions of each task.
    ``source``: the folder of ``model.from`` if it moved. Raises MuletrainError.
    """
    given = {"--include": include, "--fewshot": fewshot, "--limit": limit, "--source": source}
    more = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    found: dict[str, Any] = json.loads(_command("eval", str(where), "--tasks", ",".join(tasks), *more, "--json"))
    scores: list[dict[str, Any]] = found["scores"]
    return scores


def doctor() -> dict[str, Any]:
    """The findings of ``muletrain doctor --json`` on this machine."""
    found: dict[str, Any] = json.loads(_command("doctor", "--json", codes=(0, 1)))
    return found


def plan(
    fleet: str | Path, *, model: str | None = None, batch: int | None = None, **sections: Mapping[str, Any]
) -> dict[str, Any]:
    """The predictions of ``muletrain plan --json`` for the machines of a fleet file. ``model``: a Hugging Face folder or
    name, or a preset. ``batch``: sequences of a step. ``sections``: as for ``train``. Raises MuletrainError."""
    more = [*([] if model is None else ["--model", model]), *([] if batch is None else ["--batch", str(batch)])]
    found: dict[str, Any] = json.loads(_command("plan", str(fleet), *more, *sets(sections), "--json"))
    return found


def simulate(
    fleet: str | Path,
    *,
    model: str | None = None,
    batch: int | None = None,
    hours: float | None = None,
    **sections: Mapping[str, Any],
) -> dict[str, Any]:
    """The outcome of ``muletrain simulate fleet --json``: ``hours`` of training on the machines of a fleet file, in a virtual
    world. ``model``, ``batch``, ``sections``: as for ``plan``. Raises MuletrainError."""
    more = [
        *([] if model is None else ["--model", model]),
        *([] if batch is None else ["--set", f"train.batch={batch}"]),
    ]
    more += [] if hours is None else ["--hours", str(hours)]
    found: dict[str, Any] = json.loads(_command("simulate", "fleet", str(fleet), *more, *sets(sections), "--json"))
    return found


def _served(metrics: int | str | None) -> list[str]:
    return [] if metrics is None else ["--metrics", str(metrics)]


def _factories() -> list[str]:
    """Options that let a command import what the user named in this process."""
    return [word for name in trusted() for word in ("--factory", name)]


def _command(*arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    """The output of a command. Raises MuletrainError."""
    done = subprocess.run([sys.executable, "-m", "muletrain", *arguments], capture_output=True, text=True, check=False)
    if done.returncode not in codes:
        lines = done.stderr.strip().splitlines()
        found = next((n for n, line in enumerate(lines) if line.startswith("error: ")), 0)
        raise MuletrainError("\n".join(lines[found:]).removeprefix("error: "))
    return done.stdout
