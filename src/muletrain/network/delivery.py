"""Handing frames to whoever receives them, and reporting what was wrong: common to all networks."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from muletrain.errors import Malformed, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from muletrain.network.base import Bounds, Frame, FrameHandler, PeerId, RefusalHandler


@dataclass
class Counters:
    """Bytes by (peer, frame kind), counted where they pass: whole frames sent, tensors received."""

    sent: Counter[tuple[PeerId, str]] = field(default_factory=Counter)
    received: Counter[tuple[PeerId, str]] = field(default_factory=Counter)


class _Receiver(NamedTuple):
    handler: FrameHandler
    bounds: Bounds | None


class Door(NamedTuple):
    """What is asked while a frame of ``sender`` is read (``wire.frame.Door``)."""

    delivery: Delivery
    sender: PeerId

    async def header(self, kind: str, nbytes: int) -> None:
        bounds = (await self.delivery.receiver(kind)).bounds
        if bounds is not None and nbytes > (most := bounds.header(kind)):
            raise Malformed(f"{kind}: a header of {nbytes} bytes; at most {most} are accepted")

    async def expect(self, frame: Frame) -> None:
        bounds = (await self.delivery.receiver(frame.kind)).bounds
        if bounds is not None:
            try:
                await bounds.expect(self.sender, frame)
            except ProtocolError as e:
                raise type(e)(f"{frame.kind}: {e}") from None


class Delivery:
    """One handler for all frames but those of kinds that have their own; until there is one, frames wait (and hold
    their stream back)."""

    def __init__(self, refusal: RefusalHandler | None = None) -> None:
        self.refused: RefusalHandler = refusal or (lambda remote, reason: None)
        self.offended: Callable[[PeerId], None] = lambda remote: None
        """Told of whoever sent what no correct peer sends, after ``refused``."""
        self._receiver: _Receiver | None = None
        self._of_kind: dict[str, _Receiver] = {}
        self._ready = asyncio.Event()

    def receive(self, handler: FrameHandler, kinds: Collection[str] = (), bounds: Bounds | None = None) -> None:
        """``kinds``: of these frames only."""
        receiver = _Receiver(handler, bounds)
        if kinds:
            self._of_kind.update(dict.fromkeys(kinds, receiver))
            return
        self._receiver = receiver
        self._ready.set()

    async def receiver(self, kind: str) -> _Receiver:
        """Of such frames, once there is one."""
        if (receiver := self._of_kind.get(kind)) is not None:
            return receiver
        await self._ready.wait()
        assert self._receiver is not None
        return self._receiver

    def door(self, sender: PeerId) -> Door:
        return Door(self, sender)

    def refuse(self, sender: PeerId, error: ProtocolError, where: str = "") -> None:
        """Report ``error``, and count it against ``sender`` where no correct peer would cause it."""
        self.refused(sender, f"{where}{error}")
        if isinstance(error, Malformed):
            self.offended(sender)

    async def deliver(self, sender: PeerId, frame: Frame) -> bool:
        """False when it was refused or the handler failed: the stream it came on should be closed."""
        try:
            await (await self.receiver(frame.kind)).handler(sender, frame)
        except ProtocolError as e:
            self.refuse(sender, e, f"{frame.kind[:40]}: ")
            return False
        except Exception as e:  # a bug of ours: loud, but one stream only
            context = {"message": f"handling a '{frame.kind[:40]}' frame failed", "exception": e}
            asyncio.get_running_loop().call_exception_handler(context)
            self.refused(sender, f"{frame.kind[:40]}: internal error, {type(e).__name__}: {e}")
            return False
        return True
