"""Parts of checkpoints between peers: as copies of states are given and taken (``transfer.donor``)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from muletrain.errors import CheckpointError, MuletrainError, ProtocolError
from muletrain.runtime.checkpoint.messages import AskPart
from muletrain.runtime.checkpoint.store import PartFacts
from muletrain.wire.statefile import state_buffers

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.runtime.checkpoint.part_replicas import PartReplicas
    from muletrain.runtime.checkpoint.progress import Checkpoints
    from muletrain.runtime.checkpoint.roles import Roles
    from muletrain.runtime.checkpoint.store import Key
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.membership import Membership
    from muletrain.runtime.transfer.donor import Receiver, Snapshots
    from muletrain.runtime.transfer.messages import Snapshot

TURN_S = 30.0
"""Seconds, at most, that a request for a part waits for its turn."""
LOOK_S = 1.0
"""Seconds between two looks whether it has come."""


class PartExchange:
    """Gives parts to peers that may have them, and takes parts. Owns the turns of those that ask."""

    def __init__(
        self,
        ctx: Context,
        roles: Roles,
        replicas: PartReplicas,
        checkpoints: Checkpoints,
        snapshots: Snapshots,
        receiver: Receiver,
        membership: Membership,
    ) -> None:
        self._ctx, self._roles, self._replicas, self._checkpoints = ctx, roles, replicas, checkpoints
        self._snapshots, self._receiver, self._membership = snapshots, receiver, membership
        self._asking = asyncio.Lock()
        ctx.net.serve(AskPart.KIND, self._on_ask)

    async def base(self, key: Key, digest: bytes) -> dict[str, Tensor]:
        """Our stage's part of a checkpoint: from our place, else from whoever has it. Raises CheckpointError,
        NetworkError or ProtocolError."""
        ctx, stage = self._ctx, self._ctx.roster.own.stage
        try:
            state = await self._replicas.read(key, stage)
            if (await ctx.tasks.aside(PartFacts.of, state_buffers(state))).digest == digest:
                return state
        except CheckpointError:
            pass
        return await self.take(key, stage, PartFacts(20 * ctx.compute.n_params, digest), list(ctx.roster.others()))

    async def take(self, key: Key, stage: int, facts: PartFacts, holders: list[PeerId]) -> dict[str, Tensor]:
        """A part from those that have it. Raises NetworkError, or ProtocolError if it is not what ``facts`` say."""
        ask = AskPart(step=key.step, lineage=key.lineage, stage=stage)
        state = await self._receiver.take_part(ask, *key, holders, facts.size)
        if (await self._ctx.tasks.aside(PartFacts.of, state_buffers(state))).digest != facts.digest:
            raise ProtocolError(f"stage {stage}'s part of checkpoint {key.step}: its content is not what was announced")
        return state

    async def _on_ask(self, sender: PeerId, payload: bytes) -> bytes:
        """Raises MuletrainError when the part is not here, or not for the sender."""
        ask = AskPart.unpack(payload)
        if self._ctx.tasks.closed:
            raise MuletrainError("this peer begins anew; ask again")
        if not await self._may_have(sender, ask.stage):
            raise MuletrainError(f"stage {ask.stage}'s part is for peers that serve it or keep it, and the coordinator")
        offer = self._snapshots.offered(ask.stage, *ask.key, part=True)
        if offer is None:
            async with self._asking:  # one at a time is read, and held, for all that want it
                offer = await self._offer(ask)
        return self._snapshots.grant(offer, sender)

    async def _may_have(self, peer: PeerId, stage: int) -> bool:
        """By our own roster: ``peer`` coordinates, or keeps that part, or serves the stage, also because a step back
        that we know of moved it there. Raises ProtocolError for one that is no member, and has none of them."""
        if peer == self._roles.coordinator:
            return True
        return peer in self._roles.keepers(stage, peer) or await self._membership.serves(peer, stage)

    async def _offer(self, ask: AskPart) -> Snapshot:
        until = self._ctx.clock.now() + TURN_S
        while (offer := self._snapshots.offered(ask.stage, *ask.key, part=True)) is None and self._snapshots.crowded():
            if self._ctx.clock.now() > until:
                raise MuletrainError("this peer has enough copies to send; ask again")
            await self._ctx.clock.sleep(LOOK_S)
        if offer is not None:
            return offer
        opened = self._checkpoints.get(ask.key)
        if opened is not None and opened.own is not None and ask.stage == self._ctx.roster.own.stage:
            state = opened.own[0]
        else:
            try:
                state = await self._replicas.read(ask.key, ask.stage)
            except CheckpointError as e:
                raise MuletrainError(str(e)) from None
        return await self._snapshots.offer(ask.stage, *ask.key, state, part=True)
