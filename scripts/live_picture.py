"""Draw docs/live.svg: a real run some steps after a peer was killed, as ``muletrain start`` shows the loss of another
machine.

``muletrain run`` knows the processes of its peers, and counts a killed one as gone at once.

muletrain run --set train.steps=60 --chaos "join@step2; kill stage1@step30"
python scripts/live_picture.py runs/FOLDER docs/live.svg
python scripts/live_picture.py runs/FOLDER docs/terminal/chaos-200.svg --width 200
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.text import Text

from muletrain.cli.show.console import sentence_at
from muletrain.cli.show.screen import LINES, status
from muletrain.events import Event, EventTail, FaultInjected, StepDone
from muletrain.runs.view import RunView

MESSAGES = 12
"""Last messages that the picture shows above the screen."""


def until(events: list[Event], step: int | None, kind: str) -> list[Event]:
    """Those up to the first event of ``kind``, or to the end of ``step``; by default to the end of the third step after
    the first kill."""
    if kind:
        return events[: next(n for n, e in enumerate(events) if e.kind == kind) + 1]
    done = [n for n, e in enumerate(events) if isinstance(e, StepDone)]
    if step is not None:
        return events[: next(n for n in done if cast("StepDone", events[n]).step >= step) + 1]
    killed = next(n for n, e in enumerate(events) if isinstance(e, FaultInjected) and e.what == "kill")
    return events[: [n for n in done if n > killed][2] + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--step", type=int, help="default: the third step after the first kill")
    parser.add_argument("--kind", default="", help="instead: the first event of this kind, such as stage_empty")
    parser.add_argument("--width", type=int, default=100, help="columns")
    given = parser.parse_args()
    console = Console(
        record=True,
        width=given.width,
        height=LINES,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    view, said = RunView(), list[Text]()
    for event in until(sorted(EventTail(given.run).poll(), key=lambda e: e.t), given.step, given.kind):
        if view.fold(event) and (sentence := view.headline(event)) and view.started:
            said.append(sentence_at(sentence, event))
    for text in said[-MESSAGES:]:
        console.print(text, overflow="ellipsis", no_wrap=True)
    console.print(status(view))
    svg = console.export_svg(title="muletrain run")
    fontless = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # nothing is fetched from elsewhere
    given.out.write_text(fontless, encoding="utf-8")


if __name__ == "__main__":
    main()
