"""Draw docs/live.svg: a real run some steps after a peer was killed, as ``muletrain start`` shows the loss of another
machine.

``muletrain run`` knows the processes of its peers, and counts a killed one as gone at once.

muletrain run --set train.steps=60 --chaos "join@step2; kill stage1@step30"
python scripts/live_picture.py runs/FOLDER docs/live.svg --steps 3
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from muletrain.cli.show.console import status
from muletrain.events import Event, EventTail, FaultInjected, StepDone
from muletrain.runs.view import RunView
from muletrain.units import printable

WIDTH = 104  # columns


def until(events: list[Event], steps: int) -> list[Event]:
    """Those up to the ``steps``-th step after the first kill."""
    killed = next(n for n, e in enumerate(events) if isinstance(e, FaultInjected) and e.what == "kill")
    done = [n for n, e in enumerate(events) if isinstance(e, StepDone) and n > killed]
    return events[: done[steps - 1] + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=3, help="after the kill")
    given = parser.parse_args()
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    view = RunView()
    for event in until(sorted(EventTail(given.run).poll(), key=lambda e: e.t), given.steps):
        sentence = view.headline(event) if view.fold(event) else ""
        if sentence and view.started:
            style = "yellow" if event.is_warning() else ""
            console.print(Text(printable(sentence), style=style), overflow="ellipsis", no_wrap=True)
    console.print(status(view))
    svg = console.export_svg(title="muletrain run")
    fontless = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # nothing is fetched from elsewhere
    given.out.write_text(fontless, encoding="utf-8")


if __name__ == "__main__":
    main()
