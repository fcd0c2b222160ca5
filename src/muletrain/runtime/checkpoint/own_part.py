"""Our own stage's part of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.errors import CapacityError
from muletrain.runtime.checkpoint.store import PartFacts
from muletrain.wire.statefile import state_buffers

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.runtime.checkpoint.coordinator import Coordinator
    from muletrain.runtime.checkpoint.part_replicas import PartReplicas
    from muletrain.runtime.checkpoint.progress import Checkpoints
    from muletrain.runtime.checkpoint.roles import Roles
    from muletrain.runtime.checkpoint.store import Key
    from muletrain.runtime.members.context import Context


class OwnPart:
    """Decides whether we write our stage's part, and writes it. Owns which part is being written.

    A writer keeps one copy of its stage's state. It leaves out a checkpoint that is due while its part of an earlier one
    is not safe yet. Only the run's last checkpoint waits for its turn."""

    def __init__(
        self, ctx: Context, roles: Roles, replicas: PartReplicas, checkpoints: Checkpoints, coordinator: Coordinator
    ) -> None:
        self._ctx, self._roles, self._replicas = ctx, roles, replicas
        self._checkpoints, self._coordinator = checkpoints, coordinator
        self._writing: Key | None = None
        """The checkpoint whose part we hash or store now."""

    @property
    def copies(self) -> int:
        """How many copies of our state are kept for checkpoints."""
        return sum(opened.own is not None for opened in self._checkpoints)

    def begins(self, key: Key, *, last: bool) -> bool:
        """Its step was applied: should we write our stage's part now? If another copy of the state is in use, we leave
        the checkpoint out; the ``last`` one waits (``wants``)."""
        self._coordinator.due(key, last=last)
        if not self._roles.is_writer() or self._checkpoints.ended(key) is not None or self._roles.coordinator is None:
            return False
        reason = self.busy()
        if reason is not None and not last:
            self._coordinator.leave_out(key, f"left out: {reason}")
        return reason is None

    def drop(self, key: Key) -> None:
        """Give up checkpoint ``key``, unless it has ended."""
        if self._checkpoints.ended(key) is None and self._roles.coordinator is not None:
            self._coordinator.leave_out(key, "left out: the run went on before it was complete")

    def wants(self, key: Key) -> bool:
        """Should we still offer our stage's part of the last checkpoint? A peer that shares the place leaves that to the
        writer."""
        if self._checkpoints.ended(key) is not None or self.busy() is not None:
            return False
        if self._roles.shares_target() and not self._roles.is_writer():
            return False
        opened = self._checkpoints.get(key)
        return opened is None or self._ctx.roster.own.stage not in opened.here

    def busy(self) -> str | None:
        """Why there is no room for another copy of the state; None: there is."""
        earlier = self._writing or next((o.key for o in self._checkpoints if o.own is not None), None)
        if earlier is not None:
            return f"checkpoint {earlier.step} is not complete yet (the store is slower than checkpoint.every)"
        return (self._roles.shares_target() and self._replicas.hangs()) or None

    def unsafe(self) -> str | None:
        """Why this peer should not leave its stage yet: a checkpoint would lose a part."""
        stage = self._ctx.roster.own.stage
        for opened in self._checkpoints:
            step, holders = opened.key.step, opened.holders.get(stage, set())
            there = (stage in opened.here and self._roles.shares_target()) or self._alive(holders)
            if opened.key == self._writing or (opened.own is not None and not there):
                return f"its part of checkpoint {step} is on its way"
            if self._roles.coordinates() and opened.here:
                return f"it coordinates checkpoint {step}"
        return None

    def _alive(self, holders: set[PeerId]) -> bool:
        """Is one of ``holders``, other than us, alive?"""
        return any(self._ctx.roster.is_alive(p) for p in holders - {self._ctx.net.peer_id})

    async def copy(self, key: Key) -> dict[str, Tensor] | None:
        """A copy of the state for checkpoint ``key``; None if there is no room for it: then that checkpoint is left out, and
        training goes on."""
        try:
            return await self._ctx.compute.state()
        except CapacityError as e:
            self._coordinator.leave_out(key, f"left out: {e}")
            return None

    async def write(self, key: Key, state: dict[str, Tensor]) -> None:
        """Write our stage's part to the place, if we share it, and announce the part."""
        if self._checkpoints.ended(key) is not None:
            return
        self._writing = key
        try:
            await self._write(key, state)
        finally:
            self._writing = None

    async def _write(self, key: Key, state: dict[str, Tensor]) -> None:
        ctx, stage = self._ctx, self._ctx.roster.own.stage
        opened = self._coordinator.open(key)
        buffers = state_buffers(state)
        facts = await ctx.tasks.aside(PartFacts.of, buffers)
        if self._roles.shares_target() and (why := await self._replicas.store(opened, stage, facts, buffers)):
            await self._coordinator.fail(key, why)
        if opened.ended is None:
            opened.own, opened.parts[stage] = (state, facts), facts
            opened.holders.setdefault(stage, set()).add(ctx.net.peer_id)
            await self._coordinator.announce(opened, stage, facts)
            opened.changed.set()
