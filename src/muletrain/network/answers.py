"""Answering calls: the handlers of one peer, and what callers learn of their errors. All networks share this."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError, ProtocolError
from muletrain.network.quota import Quota

if TYPE_CHECKING:
    from muletrain.network.base import CallHandler, PeerId
    from muletrain.network.delivery import Delivery

MAX_METHOD = 64
"""Characters of an unknown method that are repeated to the caller."""


class Answers:
    """Answers the calls to one peer."""

    def __init__(self, own: PeerId, delivery: Delivery) -> None:
        """``own``: this peer, whose calls to itself count for no quota. ``delivery`` hears of wrong calls."""
        self._own, self._delivery = own, delivery
        self._handlers: dict[str, tuple[CallHandler, bool]] = {}
        self._quota = Quota()

    def serve(self, method: str, handler: CallHandler, *, free: bool) -> None:
        """Answer ``method`` with ``handler``; ``free``: its answers count for no quota."""
        self._handlers[method] = handler, free

    async def answer(self, sender: PeerId, method: str, payload: bytes) -> tuple[bool, bytes]:
        """(True, the answer), or (False, the reason for which the caller gets none)."""
        handler, free = self._handlers.get(method, (None, False))
        if handler is None:
            return False, f"'{method[:MAX_METHOD]}' is not served here (not yet, or not any more)".encode()
        try:
            if sender == self._own:
                return True, await handler(sender, payload)
            return True, await self._quota.answer(sender, handler, payload, free=free)
        except MuletrainError as e:
            if isinstance(e, ProtocolError):
                self._delivery.refuse(sender, e, f"{method}: ")
            return False, str(e).encode()
        except Exception as e:  # a bug of ours: loud here, an answer there
            context = {"message": f"answering '{method}' failed", "exception": e}
            asyncio.get_running_loop().call_exception_handler(context)
            return False, f"{method}: internal error, {type(e).__name__}: {e}".encode()
