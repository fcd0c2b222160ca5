"""Handing frames to receivers, and reporting errors. All networks share this."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from muletrain.errors import Malformed, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from muletrain.network.base import Bounds, FrameHandler, PeerId, RefusalHandler
    from muletrain.network.offences import Reports
    from muletrain.wire.frame import Frame


@dataclass
class Counters:
    """Bytes by (peer, frame kind): of whole frames sent, and of tensors received."""

    sent: Counter[tuple[PeerId, str]] = field(default_factory=Counter)
    received: Counter[tuple[PeerId, str]] = field(default_factory=Counter)


class _Receiver(NamedTuple):
    handler: FrameHandler
    bounds: Bounds | None


class Door(NamedTuple):
    """Asks the receiver's bounds while a frame of ``sender`` is read (``wire.frame.Door``)."""

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
    """Hands each frame to the handler of its kind, or to the handler for all kinds. Until there is one, frames wait and
    hold the stream back."""

    def __init__(
        self,
        refused: RefusalHandler | None = None,
        offended: Callable[[PeerId], None] | None = None,
        reports: Reports | None = None,
    ) -> None:
        """``refused`` is told the error, ``offended`` the sender of frames that no correct peer sends. ``reports``
        limits the calls of ``refused``."""
        self.refused: RefusalHandler = refused or (lambda remote, reason: None)
        self.offended: Callable[[PeerId], None] = offended or (lambda remote: None)
        self._reports = reports
        self._receiver: _Receiver | None = None
        self._of_kind: dict[str, _Receiver] = {}
        self._ready = asyncio.Event()

    def receive(self, handler: FrameHandler, kinds: Collection[str] = (), bounds: Bounds | None = None) -> None:
        """Hand frames of ``kinds`` to ``handler``; without ``kinds``, all without a specific handler."""
        receiver = _Receiver(handler, bounds)
        if kinds:
            self._of_kind.update(dict.fromkeys(kinds, receiver))
            return
        self._receiver = receiver
        self._ready.set()

    async def receiver(self, kind: str) -> _Receiver:
        """Wait for a receiver of ``kind``."""
        if (receiver := self._of_kind.get(kind)) is not None:
            return receiver
        await self._ready.wait()
        assert self._receiver is not None
        return self._receiver

    def door(self, sender: PeerId) -> Door:
        return Door(self, sender)

    def report(self, remote: str, reason: str) -> None:
        """Tell that something of ``remote`` (a peer id or an address) was refused."""
        told = reason if self._reports is None else self._reports.take(reason)
        if told is not None:
            self.refused(remote, told)

    def refuse(self, sender: PeerId, error: ProtocolError, where: str = "") -> None:
        """Report ``error``, and count an offence of ``sender`` if no correct peer causes such an error."""
        self.report(sender, f"{where}{error}")
        if isinstance(error, Malformed):
            self.offended(sender)

    async def deliver(self, sender: PeerId, frame: Frame) -> bool:
        """Hand ``frame`` over. False: refused, or the handler failed; the stream should be closed."""
        try:
            await (await self.receiver(frame.kind)).handler(sender, frame)
        except ProtocolError as e:
            self.refuse(sender, e, f"{frame.kind[:40]}: ")
            return False
        except Exception as e:  # a bug of ours: loud, but one stream only
            context = {"message": f"handling a '{frame.kind[:40]}' frame failed", "exception": e}
            asyncio.get_running_loop().call_exception_handler(context)
            self.report(sender, f"{frame.kind[:40]}: internal error, {type(e).__name__}: {e}")
            return False
        return True
