"""The checkpoints being written, and the ends of earlier ones."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.runtime.checkpoint.store import Key, PartFacts

MAX_OPEN = 8
"""Open checkpoints at once."""
REMEMBERED = 256
"""Ended checkpoints whose ends are remembered."""


@dataclass(eq=False)
class OpenCheckpoint:
    """A checkpoint being written, as far as this peer knows."""

    key: Key
    begin: float
    news: float
    """When the last news of it came."""
    parts: dict[int, PartFacts] = field(default_factory=dict)
    holders: dict[int, set[PeerId]] = field(default_factory=dict)
    here: set[int] = field(default_factory=set)
    """Stages whose parts are in our place."""
    own: tuple[dict[str, Tensor], PartFacts] | None = None
    """Our stage's part, if we are its writer."""
    left_out: str = ""
    """Why a stage's writer does not write its part."""
    ended: str | None = None
    """None: not yet; empty: it is complete; else why it failed."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def lacking(self, stages: int) -> str:
        """Describe what is missing."""
        lacking = sorted(set(range(stages)) - self.parts.keys())
        return f"no part of stages {lacking} came" if lacking else "its parts did not come whole"


class Checkpoints:
    """Owns the open checkpoints that this peer knows, and the ends of earlier ones."""

    def __init__(self) -> None:
        self._open: dict[Key, OpenCheckpoint] = {}
        self._ended: dict[Key, str] = {}
        self._clearing: set[Key] = set()
        self._over = asyncio.Event()

    def __iter__(self) -> Iterator[OpenCheckpoint]:
        """The open checkpoints."""
        return iter(list(self._open.values()))

    def get(self, key: Key) -> OpenCheckpoint | None:
        """That checkpoint, if it is open."""
        return self._open.get(key)

    def full(self) -> bool:
        """Are as many open as may be?"""
        return len(self._open) >= MAX_OPEN

    def begin(self, key: Key, now: float) -> OpenCheckpoint:
        """Open a checkpoint."""
        opened = self._open[key] = OpenCheckpoint(key, now, now)
        return opened

    def before(self, step: int) -> list[OpenCheckpoint]:
        """Open checkpoints of earlier steps."""
        return [o for k, o in self._open.items() if k.step < step]

    def ended(self, key: Key) -> str | None:
        """How that checkpoint ended (``OpenCheckpoint.ended``)."""
        return self._ended.get(key)

    def end(self, key: Key, reason: str) -> bool:
        """Note the end of a checkpoint. True if it is news: then clear up and call ``cleared``."""
        if key in self._ended:
            return False
        self._ended[key] = reason
        self._clearing.add(key)
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        if (opened := self._open.pop(key, None)) is not None:
            opened.ended = reason
            opened.changed.set()
        return True

    def cleared(self, key: Key) -> None:
        """The ended checkpoint was cleared up."""
        self._clearing.discard(key)
        self._over.set()

    async def over(self, key: Key) -> bool:
        """Wait for the end of that checkpoint: True if it is complete."""
        while key not in self._ended or key in self._clearing:
            self._over.clear()
            await self._over.wait()
        return not self._ended[key]
