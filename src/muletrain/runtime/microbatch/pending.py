"""A request under way, and its answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError

if TYPE_CHECKING:
    from muletrain.network.base import PeerId
    from muletrain.runtime.microbatch.messages import Attempt, Backward, Busy, Done, Lost
    from muletrain.wire.codec import Encoded


class Gone(MuletrainError):
    """The peer lives, but the request will not be answered."""


class Over(MuletrainError):
    """The step of the request has ended without it."""


class Full(MuletrainError):
    """The peer has no room now."""


class AtIt(MuletrainError):
    """The peer is at the microbatch already."""


class FoundUnfinite(Gone):
    """The peer found that the microbatch does not stay finite."""


@dataclass
class Answer:
    """The answer to a request: the loss [nats/token] and, if asked for, d loss / d output as sent. ``unfinite``:
    another peer had found that the microbatch does not stay finite."""

    peer: PeerId
    loss: float
    gradient: Encoded | None
    unfinite: bool
    took_s: float


Reply = tuple["Backward | Done | Busy | Lost", "list[Encoded]"]


@dataclass
class Pending:
    """One peer owes the answer to one request."""

    peer: PeerId
    request: Attempt
    tensors: list[Encoded]
    tried: frozenset[PeerId]
    """Peers that do not compute a copy. ``peer`` is at it, and the others have failed."""
    gradient: bool
    unfinite: bool
    reply: asyncio.Future[Reply | Answer] = field(default_factory=asyncio.Future)
    """The peer's own answer, or that of another peer which computed a copy meanwhile."""
    copy: asyncio.Task[Answer] | None = None
    """The copy's answer, once the peer is suspected (``Silence``), or takes very long."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the gradient to come, which is that of what was sent; None: no gradient comes."""
        return tuple(self.tensors[0].shape) if self.gradient else None

    def copied_by(self, copy: asyncio.Task[Answer]) -> None:
        """``copy`` answers, too, if it comes first."""
        self.copy = copy
        copy.add_done_callback(self._copied)

    def _copied(self, copy: asyncio.Task[Answer]) -> None:
        if not (copy.cancelled() or copy.exception() or self.reply.done()):
            self.reply.set_result(copy.result())
