"""Handing frames to whoever receives them, and reporting what was wrong: common to all networks."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muletrain.errors import Malformed, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from muletrain.network.base import Frame, FrameHandler, PeerId, RefusalHandler


@dataclass
class Counters:
    """Bytes by (peer, frame kind), counted where they pass: whole frames sent, tensors received."""

    sent: Counter[tuple[PeerId, str]] = field(default_factory=Counter)
    received: Counter[tuple[PeerId, str]] = field(default_factory=Counter)


class Delivery:
    """One handler for all frames but those of kinds that have their own; until there is one, frames wait (and hold their stream back)."""

    def __init__(self, refusal: RefusalHandler | None = None) -> None:
        self.refused: RefusalHandler = refusal or (lambda remote, reason: None)
        self.offended: Callable[[PeerId], None] = lambda remote: None
        """Told of whoever sent what no correct peer sends, after ``refused``."""
        self._handler: FrameHandler | None = None
        self._of_kind: dict[str, FrameHandler] = {}
        self._ready = asyncio.Event()

    def receive(self, handler: FrameHandler, kinds: Collection[str] = ()) -> None:
        """``kinds``: of these frames only."""
        if kinds:
            self._of_kind.update(dict.fromkeys(kinds, handler))
            return
        self._handler = handler
        self._ready.set()

    async def deliver(self, sender: PeerId, frame: Frame) -> bool:
        """False when it was refused or the handler failed: the stream it came on should be closed."""
        handler = self._of_kind.get(frame.kind)
        if handler is None:
            await self._ready.wait()
            handler = self._handler
            assert handler is not None
        try:
            await handler(sender, frame)
        except ProtocolError as e:
            self.refused(sender, f"{frame.kind[:40]}: {e}")
            if isinstance(e, Malformed):
                self.offended(sender)
            return False
        except Exception as e:  # a bug of ours: loud, but one stream only
            context = {"message": f"handling a '{frame.kind[:40]}' frame failed", "exception": e}
            asyncio.get_running_loop().call_exception_handler(context)
            self.refused(sender, f"{frame.kind[:40]}: internal error, {type(e).__name__}: {e}")
            return False
        return True
