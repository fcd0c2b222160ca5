"""A member's view of another peer: ``muletrain doctor --ticket`` asks, to find a wrong clock or a closed port early.

The one call is ``run.seen``. A member connects back to the caller's address only, and a few times per second at most.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from muletrain.errors import NetworkError
from muletrain.policy.recent import Bucket
from muletrain.runtime.core.messages import Call, Header

if TYPE_CHECKING:
    from muletrain.network.base import Network, PeerId
    from muletrain.network.libp2p import Libp2pNetwork

DIAL_S = 4.0
"""Longest attempt to connect back [s]."""
BURST, PER_S = 10.0, 2.0
"""Attempts to connect back, at once and per second, for all callers together."""
CALL_TIMEOUT_S = 12.0
"""Longest call, with an attempt to connect back [s]."""


class Seen(Header):
    """A member's view of the caller. ``time``: the member's wall clock [s]. ``host``: the caller's address; '': relayed. ``reached``:
    whether the caller's port answers; None: not tried. ``carries``: whether the member relays traffic."""

    time: Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)]
    host: Annotated[str, Field(max_length=64, pattern=r"^[0-9a-fA-F.:]*$")]
    reached: bool | None
    carries: bool


class AskSeen(Call[Seen]):
    """Asks a member for its view of the caller. ``port``: TCP port of the caller to connect to; 0: none."""

    KIND: ClassVar[str] = "run.seen"
    port: Annotated[int, Field(ge=0, lt=65536)]


def serve_sight(net: Libp2pNetwork, *, carries: bool) -> None:
    """Answer ``run.seen``."""
    dials = Bucket(BURST, PER_S)

    async def answer(sender: PeerId, ask: AskSeen) -> Seen:
        host, port = await net.seen_at(sender), ask.port
        reached = await connects(host, port) if port and host and dials.take(time.monotonic()) else None
        return Seen(time=time.time(), host=host, reached=reached, carries=carries)

    AskSeen.serve(net, answer)


async def connects(host: str, port: int) -> bool:
    """Whether a TCP connection to ``host`` and ``port`` succeeds."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return True
    return False


async def seen_by(net: Network, member: PeerId, port: int = 0) -> tuple[Seen, float, float]:
    """The member's answer, the lead of the member's clock over ours, and the error of that lead [s]. Raises
    NetworkError."""
    begin, clock = time.time(), time.monotonic()
    seen = await AskSeen(port=port).ask(net, member, timeout_s=CALL_TIMEOUT_S)
    half_s = (time.monotonic() - clock) / 2
    return seen, seen.time - begin - half_s, half_s


async def sights(net: Network, members: list[PeerId], port: int) -> dict[PeerId, tuple[Seen, float, float]]:
    """Answers by member, as ``seen_by``. The clock comes from a quick call on an open connection, the port from a
    second, slower call."""

    async def both(member: PeerId) -> tuple[Seen, float, float]:
        await seen_by(net, member)
        _, ahead_s, off_s = await seen_by(net, member)
        seen, _, _ = await seen_by(net, member, port)
        return seen, ahead_s, off_s

    answers = await asyncio.gather(*map(both, members), return_exceptions=True)
    found = {}
    for member, answer in zip(members, answers, strict=True):
        if isinstance(answer, tuple):
            found[member] = answer
        elif not isinstance(answer, NetworkError):
            raise answer
    return found
