"""``muletrain dashboard`` and ``--dashboard``: pages from run folders, from a run's members, and from a simulated fleet."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import TYPE_CHECKING

from muletrain.dashboard.server import Dashboard
from muletrain.errors import MuletrainError
from muletrain.runs.asked import Asked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from muletrain.dashboard.sources import FolderSource
    from muletrain.network.libp2p import Libp2pNetwork

LOOK_S = 5.0
"""Seconds between two looks at the members' announcements; they announce every 10 s."""
POLL_S = 0.2


def board_of(port: str | None, host: str) -> Dashboard | None:
    """The dashboard that ``--dashboard`` asks for. Raises MuletrainError."""
    if port is None:
        return None
    if port != "auto" and not (port.isdecimal() and int(port) <= 65535):
        raise MuletrainError(f"--dashboard: '{port}' is no port; give a number up to 65535, or none")
    return Dashboard(None if port == "auto" else int(port), host)


def show_folders(folders: Sequence[Path], board: Dashboard) -> None:
    """Show the runs in ``folders`` until a signal. Raises MuletrainError for a folder without a run."""
    sources = _sources(folders, board.publisher.watched)
    board.pages.extend(source.page for source in sources)
    with board:
        for source in sources:
            source.start()
        _until_a_signal(board)
        for source in sources:
            source.stop()


def print_folders(folders: Sequence[Path]) -> None:
    """Print the runs in ``folders`` side by side. Raises MuletrainError for a folder without a run."""
    from muletrain.cli.show.comparison import comparison
    from muletrain.cli.show.console import make_console

    sources = _sources(folders, lambda: False)
    for source in sources:
        source.look()
    make_console().print(comparison([source.page for source in sources]))


def _sources(folders: Sequence[Path], watched: Callable[[], bool]) -> list[FolderSource]:
    """The runs in ``folders``, default: the newest one. Raises MuletrainError."""
    from muletrain.dashboard.sources import FolderSource
    from muletrain.runs.folder import ROOT, run_folder

    found = [_with_events(folder) for folder in folders] or [run_folder(ROOT)]
    return [FolderSource(f, watched, n) for f, n in zip(found, _distinct(found), strict=True)]


def _with_events(folder: Path) -> Path:
    """``folder``, or the newest run in it. Raises MuletrainError."""
    from muletrain.runs.folder import run_folder

    return folder if any(folder.glob("*.jsonl")) else run_folder(folder)


def _distinct(folders: Sequence[Path]) -> list[str]:
    names = [folder.absolute().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _until_a_signal(board: Dashboard) -> None:
    print(f"dashboard: {board.url}\nCtrl-C ends the page", flush=True)
    wish = Asked()
    with wish.heard():
        while not wish.number:
            time.sleep(POLL_S)


def show_simulated(path: Path, hours: float, overrides: Sequence[str], board: Dashboard) -> None:
    """Play the fleet in ``path`` and show the run until a signal. Raises MuletrainError."""
    from muletrain.cli.actions.played import Play

    play = Play(path, hours, overrides)
    board.pages.append(play.page)
    with board:
        thread = threading.Thread(target=play.run, name="play", daemon=True)
        thread.start()
        _until_a_signal(board)
        play.over.set()
        thread.join(5.0)


def show_members(run: str | None, board: Dashboard) -> None:
    """Show the announcements of a run's members until a signal. Raises MuletrainError if no member answers."""
    from muletrain.cli.actions.visit import announced, as_member, found_run, ticket_of
    from muletrain.cli.show.announcements import Announcements
    from muletrain.dashboard.page import RunPage

    whole = ticket_of(found_run(run))
    page = RunPage(f"run {whole.run_id[:8]}", ticket=True)
    told = Announcements()
    wish = Asked()

    async def look(network: Libp2pNetwork, run_id: str) -> None:
        print(f"dashboard: {board.url}\nCtrl-C ends the page", flush=True)
        while not wish.number:
            try:
                for event in told.events(await announced(network, whole), time.time()):
                    page(event)
            except MuletrainError as e:
                print(f"no answer: {e}", file=sys.stderr)
            for _ in range(int(LOOK_S / POLL_S)):
                await asyncio.sleep(0 if wish.number else POLL_S)

    board.pages.append(page)
    with board, wish.heard():
        asyncio.run(as_member(whole, look))
