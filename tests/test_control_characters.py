"""Text of models, other machines and files never controls a terminal, nor hides in a log."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest

from muletrain import events as ev
from muletrain.cli import main as program
from muletrain.cli.show.console import LiveConsole, RunView, make_console
from muletrain.cli.show.doing import doing
from muletrain.cli.show.final_report import final_report
from muletrain.cli.show.tables import new_table
from muletrain.errors import MuletrainError
from muletrain.units import printable

if TYPE_CHECKING:
    from collections.abc import Callable

BAD = "a\x1b]0;title\x07\x1b[2Jb\rc\x9b31md\u202ee\u2066f\u200bg\x00h\x7f"
"""Escape sequences, a carriage return, CSI as one character, marks of direction, no width, NUL, DEL."""


def obeyed(text: str) -> set[str]:
    return {c for c in text if not c.isprintable() and c != "\n"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _printed(console_of: Callable[[io.StringIO], object]) -> str:
    file = io.StringIO()
    console_of(file)
    return file.getvalue()


def test_a_console_prints_none_of_it_wherever_the_text_stands() -> None:
    table = new_table(BAD, [BAD])
    table.add_row(BAD)
    for shown in (BAD, table, final_report(RunView(), None, [BAD], {"run folder": BAD})):
        said = _printed(lambda file, shown=shown: make_console(file).print(shown))  # type: ignore[misc]
        assert "title" in said or "a" in said
        assert obeyed(said) == set()


def test_a_terminal_still_gets_its_colours() -> None:
    file = Terminal()
    console = make_console(file)
    console.print("[bold]fine[/bold]", BAD)
    said = file.getvalue()
    assert "\x1b[1m" in said
    assert "\x1b]0;" not in said
    assert "\u202e" not in said


def test_events_of_other_machines_are_shown_and_written_without_it() -> None:
    file = io.StringIO()
    with LiveConsole(RunView(), make_console(file)) as console:
        for event in (
            ev.Note(level="warning", message=BAD, t=1.0, peer=BAD),
            ev.PeerJoined("id", BAD, 0, BAD, "fp32", True, 1, 1, peer=BAD),
            ev.SampleReplaced(sample=1, other=2, reason=BAD, stops=False),
        ):
            console(event)
            line = event.to_json()
            assert obeyed(line) == set()
            assert ev.Event.from_json(line) == event
    assert obeyed(file.getvalue()) == set()


def test_an_error_and_an_activity_are_told_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(**_: object) -> None:
        raise MuletrainError(BAD + "\nsecond line")

    with pytest.raises(SystemExit):
        program._run(fails)  # (main ends a process at once whose threads are busy, and other tests leave some)
    monkeypatch.setattr("muletrain.cli.show.doing.SOON_S", 0.0)
    with doing(BAD) as tell:
        tell(0.5)
    said = capsys.readouterr().err
    assert "second line" in said
    assert obeyed(said) == set()


def test_lines_stay_where_they_are_wanted() -> None:
    assert printable("a\n\tb\rc", lines=True) == "a\n\tb c"
    assert printable("a\nb") == "a b"
    assert (
        json.loads(json.dumps(printable("schön 漢字 👩\u200d🚀 می\u200cخواهم")))
        == "schön 漢字 👩\u200d🚀 می\u200cخواهم"
    )
