"""What the README tells people to type exists: every command, and every option."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from muletrain.cli.main import app

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(app)


def lines(text: str) -> list[str]:
    """Of shell blocks, and code inside of sentences."""
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    pieces = (piece for line in [*blocks.split("\n"), *inline] for piece in " ".join(line.split()).split("&& "))
    return [piece for piece in pieces if piece.startswith("muletrain ")]


def unknown(line: str) -> list[str]:
    """Words of a command line that name no command or option of ours."""
    here: Any = COMMANDS
    wrong = list[str]()
    for word in shlex.split(line, comments=True)[1:]:
        if word.startswith("--"):
            if word.split("=")[0] not in {"--help", *(o for p in here.params for o in (*p.opts, *p.secondary_opts))}:
                wrong.append(word)
        elif commands := getattr(here, "commands", None):
            if word not in commands:
                return [word]
            here = commands[word]
    return wrong


def test_the_readme_s_commands_and_options_exist() -> None:
    assert len(lines(README)) > 30
    assert {line: found for line in lines(README) if (found := unknown(line))} == {}


@pytest.mark.parametrize(
    ("line", "found"), [("muletrain walk", ["walk"]), ("muletrain run --sed model.layers=1 # --x", ["--sed"])]
)
def test_what_does_not_exist_is_found(line: str, found: list[str]) -> None:
    assert unknown(lines(f"```sh\n{line}\n```")[0]) == found
