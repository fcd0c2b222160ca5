"""Every command says within two seconds what it is doing."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from muletrain.cli.main import app
from muletrain.cli.show import doing as module
from muletrain.cli.show.doing import BEGINS, doing

if TYPE_CHECKING:
    from pathlib import Path

AT_ONCE = {"config", "ticket"}
"""Commands that neither load torch, nor compute, nor ask another machine."""


def test_each_command_has_a_first_line_but_those_that_answer_at_once() -> None:
    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    names = {command.name for group in groups if group is not None for command in group.registered_commands}
    assert names == BEGINS.keys() | AT_ONCE


@pytest.mark.alone
@pytest.mark.parametrize("command", [["run"], ["plan"], ["generate", "nowhere", "The"]])
def test_the_first_line_comes_within_two_seconds(command: list[str], tmp_path: Path) -> None:
    begin = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "muletrain.cli.main", *command], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        took_s = time.monotonic() - begin
        process.kill()
    assert line == f"{BEGINS[command[0]]} ...\n"
    assert took_s < 2


def test_nothing_that_takes_seconds_to_import_comes_before_the_first_line() -> None:
    """On a fast machine two seconds are enough for torch."""
    code = "import sys, muletrain.cli.main; print({'torch', 'transformers', 'hivemind', 'scipy', 'numpy'} & sys.modules.keys())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert said.stdout == "set()\n", said.stderr


def test_a_long_activity_is_told_where_no_terminal_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "SOON_S", 0.01)
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    with doing("tracing the model") as tell:
        deadline = time.monotonic() + 10
        told = ""
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
            told = capsys.readouterr().err
        assert told == "tracing the model ...\n"
        tell(0.25)
    assert capsys.readouterr().err == "tracing the model 25% ...\n"


def test_a_short_activity_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with doing("reading the model"):
        pass
    assert capsys.readouterr().err == ""
