"""Sends the state of pages to viewers: once in full, then changes, numbered so that a viewer can go on after a break."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from muletrain.dashboard.page import RunPage

EACH_S = 0.4
"""Seconds between two looks for changes, while somebody watches."""
SHARE = 0.1
"""Most of a core that these looks take; large fleets are looked at less often."""
QUEUE = 32
"""Changes that wait for a slow viewer; with more the viewer is dropped, and connects again."""
KEPT, KEPT_BYTES = 256, 8_000_000
"""Changes that a viewer may miss and still get, and their total size [bytes]."""
BEAT_S = 15.0
"""Seconds after which a silent stream sends a comment, so that broken connections are noticed."""
VIEWERS = 32
"""Most viewers at once."""


class _Sent:
    """The parts of one page that viewers have."""

    def __init__(self) -> None:
        self.version = -1
        self.sections: dict[str, str] = {}
        self.peers: dict[str, str] = {}
        self.generation, self.points, self.tail = -1, 0, ""
        self.marked = 0

    def changes(self, page: RunPage) -> dict[str, Any]:
        """The parts that changed since the last call; empty: none."""
        found: dict[str, Any] = {}
        with page.locked():
            self.version = page.version
            sections = {key: _json(value) for key, value in page.sections().items()}
            peers = {key: _json(value) for key, value in page.peers().items()}
            found |= self._curve(page)
            if page.marked > self.marked:
                found["marks"] = [mark for mark in page.marks if mark["n"] > self.marked]
                self.marked = page.marked
        changed = {key: text for key, text in sections.items() if self.sections.get(key) != text}
        others = {key: text for key, text in peers.items() if self.peers.get(key) != text}
        gone = self.peers.keys() - peers.keys()
        self.sections, self.peers = sections, peers
        if changed:
            found["set"] = {key: json.loads(text) for key, text in changed.items()}
        if others or gone:
            found["peers"] = {key: json.loads(text) for key, text in others.items()} | dict.fromkeys(gone)
        return found

    def _curve(self, page: RunPage) -> dict[str, Any]:
        curve, _ = page.growing()
        points = curve.points
        tail = _json(points[-1].row()) if points else ""
        first = 0 if curve.generation != self.generation else max(0, self.points - 1)
        same = curve.generation == self.generation and len(points) == self.points and tail == self.tail
        self.generation, self.points, self.tail = curve.generation, len(points), tail
        return {} if same else {"curve": {"from": first, "rows": [point.row() for point in points[first:]]}}


class Publisher:
    """Owns the viewers. All methods run in one event loop, but ``watched``."""

    def __init__(self, pages: list[RunPage]) -> None:
        self.pages = pages
        self.boot = secrets.token_hex(4)
        """Distinguishes the numbers of this process from those of earlier ones."""
        self.number = 0
        self._shown: list[RunPage] = []
        self._sent: dict[int, _Sent] = {}
        self._kept: deque[tuple[int, str]] = deque(maxlen=KEPT)
        self._kept_bytes = 0
        self._viewers: set[asyncio.Queue[tuple[int, str] | None]] = set()
        self._looked: asyncio.Task[None] | None = None

    def watched(self) -> bool:
        """Does anybody look?"""
        return bool(self._viewers)

    def full(self) -> str:
        """The whole state as JSON, for a new viewer."""
        self.look()
        runs = []
        for page in self.pages:
            fresh = _Sent()
            runs.append(fresh.changes(page))
        return _json({"id": f"{self.boot}-{self.number}", "now": time.time(), "runs": runs})

    def look(self) -> None:
        """Send the changes since the last look."""
        if self._shown != self.pages:
            self._begin_again()
        runs = {}
        for k, page in enumerate(self.pages):
            sent = self._sent.setdefault(k, _Sent())
            if changes := sent.changes(page):
                runs[str(k)] = changes
        if not runs:
            return
        self.number += 1
        text = _json({"runs": runs, "now": time.time()})
        self._keep(text)
        for queue in list(self._viewers):
            try:
                queue.put_nowait((self.number, text))
            except asyncio.QueueFull:  # too slow: the browser connects again and says where it was
                self._viewers.discard(queue)
                queue.get_nowait()
                queue.put_nowait(None)

    def _begin_again(self) -> None:
        """Other pages are shown now: viewers need the whole state."""
        self._shown = list(self.pages)
        self.boot, self.number = secrets.token_hex(4), 0
        self._sent.clear()
        self._kept.clear()
        self._kept_bytes = 0
        self.dismiss()

    def dismiss(self) -> None:
        """End all streams."""
        for queue in self._viewers:
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)
        self._viewers.clear()

    def _keep(self, text: str) -> None:
        if len(self._kept) == KEPT:
            self._kept_bytes -= len(self._kept[0][1])
        self._kept.append((self.number, text))
        self._kept_bytes += len(text)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= len(self._kept.popleft()[1])

    async def stream(self, after: str) -> AsyncIterator[str]:
        """Server-sent events after the state with the id ``after``. Ends when the viewer is too slow."""
        boot, _, number = after.partition("-")
        known = boot == self.boot and number.isdecimal() and len(number) < 16
        self.look()
        missed = [item for item in self._kept if known and item[0] > int(number)]
        complete = known and int(number) + len(missed) == self.number
        if not complete or len(self._viewers) >= VIEWERS:
            yield "event: reset\ndata: {}\n\n" if not complete else "event: full\ndata: {}\n\n"
            return
        queue: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue(QUEUE)
        self._viewers.add(queue)
        if self._looked is None or self._looked.done():
            self._looked = asyncio.create_task(self._keep_looking())
        try:
            yield "retry: 500\n\n"
            for item in missed:
                yield self._frame(*item)
            while True:
                try:
                    item_or_end = await asyncio.wait_for(queue.get(), BEAT_S)
                except TimeoutError:
                    yield ": still here\n\n"
                    continue
                if item_or_end is None:
                    return
                yield self._frame(*item_or_end)
        finally:
            self._viewers.discard(queue)

    def _frame(self, number: int, text: str) -> str:
        return f"id: {self.boot}-{number}\ndata: {text}\n\n"

    async def _keep_looking(self) -> None:
        """Look for changes as long as somebody watches."""
        while self._viewers:
            begun = time.monotonic()
            self.look()
            took_s = time.monotonic() - begun
            await asyncio.sleep(max(EACH_S, took_s / SHARE))


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
