"""Progress in a notebook: a bar, the peers behind a click, and the last messages, as HTML that is replaced in place."""

from __future__ import annotations

import html
import io
import math
import sys
import time
from typing import TYPE_CHECKING, Any, Self

from muletrain.cli.show.console import PLAIN_WIDTH, LiveConsole, SafeConsole
from muletrain.cli.show.screen import peers_table, progress_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain import events as ev
    from muletrain.runs.view import RunView

REDRAW_S = 0.5
"""Least time between two drawings [s]."""
LINES = 12
"""Last lines of messages and tables that are shown."""


def in_notebook() -> bool:
    """Is this process the kernel of a notebook?"""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def _plain(file: io.StringIO) -> SafeConsole:
    """A console without colours, whatever the kernel's environment says."""
    return SafeConsole(file=file, width=PLAIN_WIDTH, force_jupyter=False, force_terminal=False, color_system=None)


class NotebookConsole(LiveConsole):
    """Like ``LiveConsole``, in the output of a cell."""

    def __init__(self, view: RunView, now: Callable[[], float] = time.monotonic) -> None:
        self._text = io.StringIO()
        super().__init__(view, _plain(self._text), now=now)
        self._handle: Any = None
        self._drawn = -math.inf

    def __enter__(self) -> Self:
        from IPython.display import HTML, display

        self._handle = display(HTML("muletrain: preparing the run ..."), display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._redraw()

    def __call__(self, event: ev.Event) -> None:
        super().__call__(event)
        if self._now() >= self._drawn + REDRAW_S:
            self._redraw()

    def _print_line(self) -> None:
        """The bar says it."""

    def _redraw(self) -> None:
        from IPython.display import HTML

        self._drawn = self._now()
        if self._handle is not None:
            self._handle.update(HTML(self.drawn()))

    def drawn(self) -> str:
        """The HTML. Text of other machines is escaped."""
        said = "\n".join(self._text.getvalue().rstrip().split("\n")[-LINES:])
        bar = f'<progress value="{self.view.step}" max="{max(1, self.view.steps)}" style="width: 20em"></progress>'
        parts = [f"<div>{bar} {html.escape('  '.join(progress_words(self.view)))}</div>"]
        if self.view.peers:
            peers = io.StringIO()
            _plain(peers).print(peers_table(self.view))
            parts.append(
                f"<details><summary>peers</summary><pre>{html.escape(peers.getvalue().rstrip())}</pre></details>"
            )
        return "".join([*parts, f"<pre>{html.escape(said)}</pre>" if said else ""])
