"""The parts of checkpoints in this peer's own place: of its stage, and of stages that it keeps or gathers."""

from __future__ import annotations

import asyncio
import errno
from contextlib import suppress
from typing import TYPE_CHECKING

import safetensors
import safetensors.torch

from muletrain.errors import CheckpointError, DeadlineExceeded
from muletrain.events import PartNotKept
from muletrain.runtime.checkpoint.store import Key, PartFacts, PartsGone

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.runtime.checkpoint.progress import OpenCheckpoint
    from muletrain.runtime.checkpoint.roles import Book, Roles
    from muletrain.runtime.members.context import Context

READ_S = 0.3
"""Seconds that a look at the place may take. After that, others are told what was known before."""


class PartReplicas:
    """Owns the book's list of parts in the place."""

    def __init__(self, ctx: Context, roles: Roles, book: Book) -> None:
        self._ctx, self._roles, self._book, self._place = ctx, roles, book, book.place
        self._tidied = False
        self._looking: asyncio.Task[dict[Key, dict[int, PartFacts]]] | None = None

    @property
    def name(self) -> str:
        """The place's name."""
        return self._place.name

    def hangs(self) -> str:
        """Why nothing can be written now; empty: writing works."""
        return f"{self._place.where(Key(0, b''))}: the disk or store hangs" if self._place.disk.hangs else ""

    def has(self, opened: OpenCheckpoint, stage: int, facts: PartFacts) -> None:
        """Note that a part is in the place."""
        opened.here.add(stage)
        self._book.parts.setdefault(opened.key, {})[stage] = facts

    async def store(self, opened: OpenCheckpoint, stage: int, facts: PartFacts, buffers: list[memoryview]) -> str:
        """Write a part to the place. Returns why the checkpoint fails because of that; empty: it does not."""
        place, key, failed = self._place, opened.key, None
        if self._tidied:
            return ""
        try:
            await place.disk.call(place.write_part, key, stage, buffers)
        except OSError as e:
            failed = e
        shared = self._roles.shares_target()
        if opened.ended or (opened.ended is not None and shared):
            with suppress(OSError):  # the checkpoint ended while we wrote, and was tidied up before
                await place.disk.call(place.abandon, key)
        elif failed is None:
            self.has(opened, stage, facts)
            opened.news = self._ctx.clock.now()
            opened.holders.setdefault(stage, set()).add(self._ctx.net.peer_id)
        elif shared:
            return self._why(failed, key)
        else:
            self._ctx.emit(PartNotKept(reason=str(failed)))
            opened.here.discard(stage)
        return ""

    async def read(self, key: Key, stage: int) -> dict[str, Tensor]:
        """Read a part from the place. Raises CheckpointError."""
        try:
            content = await self._place.disk.call(self._place.read_part, key, stage)
            state: dict[str, Tensor] = await self._ctx.tasks.aside(safetensors.torch.load, content)
        except (OSError, safetensors.SafetensorError) as e:
            raise CheckpointError(f"stage {stage}'s part of checkpoint {key.step} is not here: {e}") from e
        return state

    async def readable(self) -> dict[Key, dict[int, PartFacts]]:
        """The parts of all checkpoints in the place."""
        complete = self._book.complete
        if self._ctx.tasks.closed:
            return dict(self._book.parts)
        with suppress(OSError):  # the store cannot be reached now: use its last answer
            found = await self._place.disk.call(self._place.complete)
            complete.clear()
            complete.update(found)
        return self._known()

    def _known(self) -> dict[Key, dict[int, PartFacts]]:
        parts, complete = self._book.parts, self._book.complete
        return {key: {**parts.get(key, {}), **complete.get(key, {})} for key in {*parts, *complete}}

    async def readable_soon(self) -> dict[Key, dict[int, PartFacts]]:
        """The same, or what was known before if the disk takes longer: who asks must not wait for it. One look is under
        way at a time, however many ask."""
        if self._looking is None or self._looking.done():
            self._looking = self._ctx.spawn(self.readable(), "look at checkpoints")
        try:
            return await self._ctx.clock.deadline(asyncio.shield(self._looking), READ_S, "the checkpoints' place")
        except DeadlineExceeded:
            return self._known()

    async def publish(self, opened: OpenCheckpoint) -> str:
        """Complete a checkpoint whose parts are all here. Returns where it is. Raises PartsGone, or CheckpointError if it
        fails."""
        book, key = self._book, opened.key
        try:
            where = await self._place.disk.call(self._place.publish, key, book.about, dict(opened.parts), book.files)
        except PartsGone:
            raise
        except OSError as e:
            raise CheckpointError(self._why(e, key)) from e
        book.complete[key] = dict(opened.parts)
        return where

    async def is_complete(self, key: Key) -> bool:
        """Has a peer that shares the place completed it?"""
        try:
            return key in await self._place.disk.call(self._place.complete)
        except OSError:
            return False

    async def clear(self, key: Key, reason: str) -> None:
        """Remove parts that nobody needs after the end of ``key``; ``reason``: why it failed."""
        place, parts, shared = self._place, self._book.parts, self._roles.shares_target()
        coordinates = self._roles.coordinates()
        with suppress(OSError):
            if reason:
                parts.pop(key, None)
                # first, so that the disk has room for events; in a shared place the coordinator may still gather them
                if not shared or coordinates:
                    await place.disk.call(place.abandon, key)
            else:  # where the place is shared, its publisher removes what is older
                for old in [k for k in parts if k.step <= key.step - (not shared)]:
                    del parts[old]
                if not shared:
                    await place.disk.call(place.drop, key.step)

    async def tidy(self, *, over: bool) -> None:
        """Remove all parts, since this peer goes, or the run is ``over`` with its last checkpoint complete. In a shared
        place other peers may still need theirs."""
        self._tidied = True
        if over or not self._roles.shares_target():
            self._book.parts.clear()
            with suppress(OSError):
                await self._place.disk.call(self._place.drop, self._ctx.plan.steps + 1)

    def _why(self, error: OSError, key: Key) -> str:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return f"{error.strerror or error}: {self._place.where(key)} ({'free some space; ' * full}training goes on)"
