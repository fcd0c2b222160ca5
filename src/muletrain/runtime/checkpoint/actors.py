"""The checkpoint actors of one peer, built together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.runtime.checkpoint.coordinator import Coordinator
from muletrain.runtime.checkpoint.own_part import OwnPart
from muletrain.runtime.checkpoint.part_exchange import PartExchange
from muletrain.runtime.checkpoint.part_replicas import PartReplicas
from muletrain.runtime.checkpoint.progress import Checkpoints
from muletrain.runtime.checkpoint.roles import Roles

if TYPE_CHECKING:
    from muletrain.runtime.checkpoint.roles import Book
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.membership import Membership
    from muletrain.runtime.transfer.donor import Receiver, Snapshots


class Checkpointing:
    """Owns a peer's checkpoint actors."""

    def __init__(
        self, ctx: Context, snapshots: Snapshots, receiver: Receiver, membership: Membership, book: Book
    ) -> None:
        self.roles = roles = Roles(ctx.roster, book)
        self.replicas = replicas = PartReplicas(ctx, roles, book)
        self.checkpoints = checkpoints = Checkpoints()
        self.exchange = PartExchange(ctx, roles, replicas, checkpoints, snapshots, receiver, membership)
        self.coordinator = Coordinator(ctx, roles, replicas, checkpoints, self.exchange)
        self.own_part = OwnPart(ctx, roles, replicas, checkpoints, self.coordinator)
