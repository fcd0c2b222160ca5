"""Where events come from: a run folder, or the announcements of a run's members."""

from __future__ import annotations

import gc
import os
import threading
import time
import tomllib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from muletrain import events as ev
from muletrain.dashboard.health import SILENT_S
from muletrain.dashboard.page import RunPage
from muletrain.events import EventTail
from muletrain.locks import Lock
from muletrain.runs.folder import ROOT, lock_of
from muletrain.runs.worker_files import OWNER_FILE, TICKET_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from muletrain.runs.session import Session

WATCHED_S, ALONE_S = 0.25, 2.0
"""Seconds between two looks at a folder, with and without viewers."""
TRACED = (ev.SlotWorked, ev.MicrobatchTaken, ev.MicrobatchServed)
"""Events of single microbatches, which tell nothing of the past."""


def page_of(folder: Path, name: str = "", *, whole: bool = True) -> RunPage:
    """An empty page for the run in ``folder``."""

    def owned() -> bool:
        return (folder / OWNER_FILE).exists() and (folder / TICKET_FILE).exists()

    ticket = (folder / TICKET_FILE).exists() or not whole

    def stops() -> bool:  # a run of one peer that nobody can join has a key, but no ticket
        return (folder / OWNER_FILE).exists()

    about = config_in(folder)
    return RunPage(
        name or folder.name, short(folder), whole=whole, config=about, ticket=ticket, owned=owned, stops=stops
    )


def short(folder: Path) -> str:
    """The folder as people type it: from here, if it lies here."""
    here = os.path.relpath(folder)
    return str(folder.absolute()) if here.startswith("..") else here


def config_in(folder: Path) -> dict[str, Any]:
    """The fields of a run folder's configuration by dotted name; empty: it has none that can be read."""
    try:
        return dict(_flat(tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))))
    except (OSError, ValueError):
        return {}


def _flat(fields: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found = dict[str, Any]()
    for key, value in fields.items():
        inner = isinstance(value, dict)
        found |= _flat(value, f"{before}{key}.") if inner else {f"{before}{key}": str(value)[:200]}
    return found


def follow_session(session: Session) -> RunPage:
    """A page that folds the events of a session of this process, and the earlier ones of its folder."""
    page = page_of(session.folder, whole=session.role != "join")
    page.ticket = session.role != "run"
    for event in EventTail(session.folder, own=True, skip=TRACED).poll():
        page(event)
    session.observe(page, page.ended)
    return page


class FolderSource:
    """Follows a run folder in a thread while the context lasts."""

    def __init__(self, folder: Path, watched: Callable[[], bool], name: str = "") -> None:
        """``watched``: whether anybody looks."""
        self.page = page_of(folder, name)
        self._folder, self._watched = folder, watched
        self._tail = EventTail(folder, own=True, skip=TRACED)
        self._over = threading.Event()
        self._heard_s = 0.0
        """Wall time of the last event."""
        self._thread = threading.Thread(target=self._follow, name=f"follow {folder}", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self.page.loading = True
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join(5.0)

    def _follow(self) -> None:
        gc.disable()  # hundreds of thousands of new objects, none of them garbage: half of the time
        try:
            self.look()
        finally:
            gc.enable()
        while not self._over.is_set():
            self.look()
            self.page.loading, self._tail.skip = False, ()
            self._over.wait(WATCHED_S if self._watched() else ALONE_S)

    def look(self) -> None:
        """Fold the new events."""
        events = self._tail.poll()
        if self.page.loading and events:
            self.page.frames.expect(events[-1].t - events[0].t)
        for event in events:
            self._heard_s = max(self._heard_s, event.t)
            with suppress(ValueError, KeyError, TypeError, AttributeError):  # a strange event must not hide the next
                self.page(event)
        found = lock_of(self._folder)
        live = found is Lock.TAKEN or (found is Lock.NONE and time.time() - self._heard_s < SILENT_S)
        if live != self.page.live:
            self.page.live = live
            self.page.version += 1


def steering_root(folder: Path) -> Path | None:
    """The working directory in which commands find the run in ``folder``; None: there is none."""
    where = folder.absolute().parent
    return where.parent if where.name == ROOT.name else None
