"""A quota of answers for each member: small questions may have large answers, which leave unpaced, beside the traffic
of the step.

A member gets BURST bytes of answers at once and PER_S bytes a second after that; its further answers wait. A correct
peer needs far less. Calls that hand out a gradient or a checkpoint do not count (``free``): their handlers count what
each member takes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from muletrain.clock import loop_time_s
from muletrain.errors import MuletrainError
from muletrain.policy.debts import Debts

if TYPE_CHECKING:
    from muletrain.network.base import CallHandler, PeerId

AT_ONCE = 64
"""Most calls of one member that are answered at the same time."""
BURST, PER_S = 64 << 20, 1 << 20
"""Bytes of answers that one member has at once, and per second after that."""
LEAST = 1 << 12
"""Bytes that each answer counts for at least: it costs work, too."""


class Quota:
    """Limits one peer's answers, by member."""

    def __init__(self) -> None:
        self._answering: Counter[PeerId] = Counter()
        self._debts = Debts(PER_S)
        """Bytes."""

    async def answer(self, sender: PeerId, handler: CallHandler, payload: bytes, *, free: bool) -> bytes:
        """Run ``handler``, and return its answer once the quota of ``sender`` allows it. Raises what the handler
        raises, and MuletrainError for too many calls at once."""
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
