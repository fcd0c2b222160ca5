"""A peer writes its part of a checkpoint between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.runtime.checkpoint.store import Key

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.runtime.checkpoint.coordinator import Coordinator
    from muletrain.runtime.checkpoint.own_part import OwnPart
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.microbatch.position import Position


class PartWriter:
    """Copies the state between two steps, and lets the copy be written while training goes on. Without memory for a
    copy (``Compute.lends``), training waits until the checkpoint has ended."""

    def __init__(self, ctx: Context, position: Position, own_part: OwnPart, coordinator: Coordinator) -> None:
        self._ctx, self._position, self._own_part, self._coordinator = ctx, position, own_part, coordinator
        self._written: Key | None = None
        """The last checkpoint that was written because no trainer was left."""

    async def write(self, key: Key, *, last: bool) -> None:
        """Write our part of checkpoint ``key``, if the checkpoint begins there. Drop a checkpoint that was written
        because no trainer was left: the run has gone on, and the copied state would block due checkpoints."""
        if (earlier := self._written) is not None:
            self._written = None
            self._own_part.drop(earlier)
        if self._own_part.begins(key, last=last):
            self._spawn(key, await self._own_part.copy(key))
            if self._ctx.compute.lends:
                await self._coordinator.ended(key)

    async def write_what_there_is(self) -> None:
        """Write our part of a checkpoint of the weights before this step, once: the step may never be done."""
        at = self._position
        key = Key(at.step, at.applied)
        done = key == self._written or not key.step or at.work.all_completed  # else a checkpoint follows soon
        if done or not at.settled or at.away or not self._own_part.begins(key, last=True):
            return
        state = await self._own_part.copy(key)
        if at.settled and key == Key(at.step, at.applied):
            self._written = key
            self._spawn(key, state)

    def _spawn(self, key: Key, state: dict[str, Tensor] | None) -> None:
        if state is not None:
            self._ctx.spawn(self._own_part.write(key, state), f"part of checkpoint {key.step}")
