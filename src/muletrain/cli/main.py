"""The program ``muletrain``: commands, and error reports.

``commands`` declares options and help, ``actions`` does the work, ``show`` renders text for people. Actions and
libraries are imported when a command runs, so that help and configuration answer at once.
"""

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import typer

from muletrain.cli.commands.dashboard import dashboard
from muletrain.cli.commands.plan_command import plan
from muletrain.cli.commands.prepare import config, data, doctor, profile, trace
from muletrain.cli.commands.simulate import calibrate, fleet
from muletrain.cli.commands.steer import kick, status, stop, ticket
from muletrain.cli.commands.train import join, run, start
from muletrain.cli.commands.trained import evaluate, export, generate
from muletrain.cli.options import Command
from muletrain.cli.show.doing import begins
from muletrain.config.cache import cache_folder
from muletrain.config.model_sections import DataConfig
from muletrain.errors import DataError, MuletrainError, of_the_disk
from muletrain.runs.fleet import COMMON
from muletrain.units import printable

PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Train": {"run": run, "start": start, "join": join},
    "Watch and steer": {
        "dashboard": dashboard,
        "status": status,
        "stop": stop,
        "kick": kick,
        "ticket": ticket,
    },
    "Prepare": {"config": config, "data": data, "doctor": doctor, "plan": plan, "trace": trace, "profile": profile},
    "Use a trained model": {"eval": evaluate, "generate": generate, "export": export},
}
"""Commands by the headings of the help."""

EXAMPLES = {
    "run": "muletrain run --set train.steps=60 --chaos 'kill stage1@step30'",
    "start": "muletrain start my.toml --port 4000",
    "join": "muletrain join TICKET --data corpus.jsonl --hours 8",
    "dashboard": "muletrain dashboard runs/one runs/two",
    "status": "muletrain status",
    "stop": "muletrain stop",
    "kick": "muletrain kick lab-pc-3f2a",
    "ticket": "muletrain ticket",
    "config": "muletrain config > my.toml",
    "data": "muletrain data chat.jsonl --set data.loss_on=last",
    "doctor": "muletrain doctor my.toml --ticket TICKET",
    "plan": "muletrain plan fleet.toml --model llama-7b --plot plan.svg",
    "trace": "muletrain trace Qwen/Qwen3-0.6B --out blocks",
    "profile": "muletrain profile llama-7b --device cuda --plot blocks.svg",
    "eval": "muletrain eval runs/FOLDER",
    "generate": "muletrain generate runs/FOLDER 'If the' --tokens 50",
    "export": "muletrain export runs/FOLDER --hf my-model",
    "fleet": "muletrain simulate fleet fleet.toml --model llama-7b --hours 24 --plot day.svg",
    "calibrate": "muletrain simulate calibrate runs/FOLDER --out costs.toml",
}
"""An example for the help of each command."""

LEAVE_S = 1.0
"""Longest wait for each thread at the end of a command [s]."""

app = typer.Typer(
    help="Train large transformer models on whatever machines you can get.\n\nStart with [bold]muletrain run[/bold]: a "
    "small model, four peer processes on this machine, about two minutes.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
simulate = typer.Typer(
    help="Predict how a fleet trains: the production code and rules in a virtual world.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


def _add(to: typer.Typer, name: str, command: Callable[..., None], panel: str | None = None) -> None:
    """The help is the docstring, as paragraphs that the terminal wraps."""
    paragraphs = (command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    example = f"[dim]Example:[/] {EXAMPLES[name]}"
    to.command(name, cls=Command, help=text, epilog=example, rich_help_panel=panel)(command)


for _panel, _commands in PANELS.items():
    for _name, _command in _commands.items():
        _add(app, _name, _command, _panel)
for _command in (fleet, calibrate):
    _add(simulate, _command.__name__, _command)
app.add_typer(simulate, name="simulate", rich_help_panel="Prepare")


def _version(asked: bool) -> None:
    if asked:
        from muletrain import __version__

        print(f"muletrain {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(program: typer.Typer = app) -> None:
    """Run ``program``. An error prints its message without a traceback and exits with code 2."""
    if sys.platform == "win32":
        sys.exit("muletrain runs on Linux and macOS; on Windows, install WSL2 (wsl --install) and run it there")
    os.environ.update(COMMON | os.environ)
    with suppress(DataError):  # a user without a home: torch takes a temporary folder, and leaves it
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder(DataConfig()) / "compiled"))
    if owner := os.environ.pop("MULETRAIN_OWNER", ""):  # see ``muletrain.api``
        threading.Thread(target=_end_with, args=(int(owner),), name="owner", daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal lacks (LANG=C) is a '?', no traceback
    try:
        _run(program)
    except SystemExit as e:
        if _hangs() and isinstance(e.code, int):
            sys.stdout.flush()
            os._exit(e.code)  # the interpreter would wait for that thread
        raise


def _end_with(owner: int) -> None:
    """End in order when the process ``owner``, our parent, is gone."""
    while os.getppid() == owner:
        time.sleep(LEAVE_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _hangs() -> bool:
    """Is a thread of this process, such as that of a device, busy when the command is through?"""
    threads = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    for thread in threads:
        thread.join(LEAVE_S)
    return any(thread.is_alive() for thread in threads)


def _run(program: typer.Typer) -> None:
    try:
        program(obj=begins)
    except MuletrainError as e:
        print(f"error: {printable(str(e), lines=True)}", file=sys.stderr)
        sys.exit(2)
    except OSError as e:
        if (full := of_the_disk(e)) is None:
            raise
        print(f"error: {printable(full)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
