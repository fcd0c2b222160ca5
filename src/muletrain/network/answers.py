"""Answering calls: the handlers of one peer, and the errors reported to callers. All networks share this."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from muletrain.clock import loop_time_s
from muletrain.errors import MuletrainError, ProtocolError
from muletrain.policy.recent import Debts

if TYPE_CHECKING:
    from muletrain.network.base import CallHandler, PeerId
    from muletrain.network.delivery import Delivery


NOT_SERVED = "is not served here (not yet, or not any more)"
"""Ends the reason of a refusal."""
MAX_CALL = 1 << 20
"""Most bytes of a payload, and of an answer."""
MAX_METHOD = 64
"""Characters of an unknown method that are repeated to the caller."""
AT_ONCE = 64
"""Most calls of one member that are answered at the same time."""
BURST, PER_S = 64 << 20, 1 << 20
"""Bytes of answers that one member has at once, and per second after that."""
LEAST = 1 << 12
"""Bytes that each answer counts for at least: small answers cost work, too."""


class Quota:
    """Limits one peer's answers, by member: small questions may have large answers, which leave unpaced, beside the traffic
    of the step.

    A member gets BURST bytes of answers at once and PER_S bytes a second after that; further answers wait. A correct
    peer needs far less. Calls that hand out a gradient or a checkpoint do not count (``free``): the handlers count each
    member's bytes.
    """

    def __init__(self) -> None:
        self._answering: Counter[PeerId] = Counter()
        self._debts = Debts(PER_S)
        """Bytes."""

    async def answer(self, sender: PeerId, handler: CallHandler, payload: bytes, *, free: bool) -> bytes:
        """Run ``handler``, and return the answer once the quota of ``sender`` permits. Raises the handler's errors, and
        MuletrainError for too many calls at once."""
        if self._answering[sender] >= AT_ONCE:
            raise MuletrainError(f"{AT_ONCE} calls of yours are being answered; wait for some of them")
        self._answering[sender] += 1
        try:
            answer = await handler(sender, payload)
            if not free:
                now = loop_time_s()
                beyond = self._debts.add(sender, max(LEAST, len(answer)), now) - BURST
                if beyond > 0:
                    await asyncio.sleep(beyond / PER_S)
            return answer
        finally:
            self._answering[sender] -= 1
            if not self._answering[sender]:
                del self._answering[sender]


class Answers:
    """Answers the calls to one peer."""

    def __init__(self, own: PeerId, delivery: Delivery) -> None:
        """``own``: this peer, with no quota on calls to itself. ``delivery`` hears of wrong calls."""
        self._own, self._delivery = own, delivery
        self._handlers: dict[str, tuple[CallHandler, bool]] = {}
        self._quota = Quota()

    def serve(self, method: str, handler: CallHandler, *, free: bool) -> None:
        """Answer ``method`` with ``handler``; ``free``: answers count for no quota."""
        self._handlers[method] = handler, free

    async def answer(self, sender: PeerId, method: str, payload: bytes) -> tuple[bool, bytes]:
        """(True, the answer), or (False, the reason for which the caller gets none)."""
        handler, free = self._handlers.get(method, (None, False))
        if handler is None:
            return False, f"'{method[:MAX_METHOD]}' {NOT_SERVED}".encode()
        try:
            if sender == self._own:
                return True, await handler(sender, payload)
            answer = await self._quota.answer(sender, handler, payload, free=free)
            if len(answer) > MAX_CALL:
                raise MuletrainError(
                    f"{method}: an answer of {len(answer):,} bytes; a call carries at most {MAX_CALL:,}"
                )
            return True, answer
        except MuletrainError as e:
            if isinstance(e, ProtocolError):
                self._delivery.refuse(sender, e, f"{method}: ")
            return False, str(e).encode()
        except Exception as e:  # a bug of ours: loud here, an answer there
            context = {"message": f"answering '{method}' failed", "exception": e}
            asyncio.get_running_loop().call_exception_handler(context)
            return False, f"{method}: internal error, {type(e).__name__}: {e}".encode()
