"""Says which frames a peer takes, before it reads them (``network.base.Bounds``).

Headers have the bounds of their kind's fields. Tensors have the codec and shape that follow from the run's
configuration: inputs and gradients of this cut, chunks of this stage's averaging, blocks of the size that was asked
for. So no member can make this peer read, or hold, more than a correct member sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muletrain.errors import Malformed

if TYPE_CHECKING:
    from muletrain.network.base import Frame, PeerId
    from muletrain.runtime.core.messages import Message
    from muletrain.runtime.members.membership import Membership
    from muletrain.wire.codec import Encoded

Check = Callable[["PeerId", Any, "list[Encoded]"], None]
"""Raises ProtocolError for a message that is not expected from its sender now, or whose tensors have another shape or
codec than expected. The tensors' bytes have not been read yet."""


@dataclass(frozen=True)
class Expected:
    """What one peer takes. ``checks``: of each kind that carries tensors, and of kinds that only some peers take."""

    membership: Membership
    kinds: Mapping[str, type[Message]]
    microbatches: int
    checks: Mapping[type[Message], Check]

    def header(self, kind: str) -> int:
        if kind not in self.kinds:
            raise Malformed(f"frame of unknown kind {kind[:64]!r}")
        described = 128 * self.kinds[kind].TENSORS
        return 128 + described + self.kinds[kind].most(self.microbatches)

    async def expect(self, sender: PeerId, frame: Frame) -> None:
        self.header(frame.kind)
        await self.membership.acquaint(sender)
        frame.message = message = self.kinds[frame.kind].parse(frame)
        if (check := self.checks.get(type(message))) is not None:
            check(sender, message, frame.tensors)
