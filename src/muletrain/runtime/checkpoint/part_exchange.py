"""Peers give each other parts of checkpoints, as copies of states (``transfer.donor``)."""

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
"""Longest time that a request for a part queues at a donor [s]."""
LOOK_S = 1.0
"""Seconds between two checks whether its turn has come."""


class PartExchange:
    """Gives parts to peers that may have them, and takes parts. Owns the queue of requests."""

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
        """Our stage's part of a checkpoint, from our place or from another peer. Raises CheckpointError, NetworkError or
        ProtocolError."""
        ctx, stage = self._ctx, self._ctx.roster.own.stage
        try:
            state = await self._replicas.read(key, stage)
            if (await ctx.tasks.aside(PartFacts.of, state_buffers(state))).digest == digest:
                return state
        except CheckpointError:
            pass
        return await self.take(key, stage, PartFacts(20 * ctx.compute.n_params, digest), list(ctx.roster.others()))

    async def take(self, key: Key, stage: int, facts: PartFacts, holders: list[PeerId]) -> dict[str, Tensor]:
        """Take a part from ``holders``. Raises NetworkError, or ProtocolError if it is not what ``facts`` say."""
        ask = AskPart(step=key.step, lineage=key.lineage, stage=stage)
        state = await self._receiver.take_part(ask, *key, holders, facts.size)
        if (await self._ctx.tasks.aside(PartFacts.of, state_buffers(state))).digest != facts.digest:
            raise ProtocolError(f"stage {stage}'s part of checkpoint {key.step}: its content is not what was announced")
        return state

    async def _on_ask(self, sender: PeerId, payload: bytes) -> bytes:
        """Offer a part. Raises MuletrainError when it is not here, or not for the sender."""
        ask = AskPart.unpack(payload)
        if self._ctx.tasks.closed:
            raise MuletrainError("this peer begins anew; ask again")
        if not await self._may_have(sender, ask.stage):
            raise MuletrainError(f"stage {ask.stage}'s part is for the coordinator and for peers that serve or keep it")
        offer = self._snapshots.offered(ask.stage, *ask.key, part=True)
        if offer is None:
            async with self._asking:  # one part at a time is read, for all takers
                offer = await self._offer(ask)
        return self._snapshots.grant(offer, sender)

    async def _may_have(self, peer: PeerId, stage: int) -> bool:
        """Does ``peer`` coordinate, keep that part, or serve the stage, by our own roster? Raises ProtocolError for a
        peer that is no member."""
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
