"""The newcomer's side of admission."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from muletrain.errors import AdmissionError, DeadlineExceeded, NetworkError, PeerUnreachable, ProtocolError
from muletrain.runs.join.admission import serve_admitter
from muletrain.runs.join.messages import (
    ASK_EVERY_S,
    CALL_S,
    PIECE,
    READY_EVERY_S,
    AskAdmitter,
    AskBegun,
    AskPiece,
    Begin,
    Declined,
    JoinRequest,
    Ready,
)
from muletrain.runs.join.patience import patiently
from muletrain.runtime.core.messages import Header

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
    from pathlib import Path

    from muletrain.network.base import Network, PeerId
    from muletrain.runs.join.messages import Welcome
    from muletrain.runtime.core.messages import Call
    from muletrain.runtime.members.messages import Member
    from muletrain.runtime.members.roster import Genesis

T = TypeVar("T")
A = TypeVar("A", bound=Header)
AHEAD = 4
"""Pieces that a newcomer asks for at once."""


def members_in(addresses: tuple[str, ...]) -> list[PeerId]:
    """The ids of the members at a ticket's addresses."""
    return list(dict.fromkeys(a.rsplit("/p2p/", 1)[-1] for a in addresses))


async def first_answer(asked: Iterable[Coroutine[Any, Any, T]]) -> tuple[T | None, list[NetworkError]]:
    """The first result of calls to several members side by side, so that a frozen member holds up nobody; None: none
    answers. Also returned: the errors until then."""
    calls, problems = [asyncio.create_task(call) for call in asked], list[NetworkError]()
    try:
        for call in asyncio.as_completed(calls):
            try:
                return await call, problems
            except NetworkError as e:
                problems.append(e)
        return None, problems
    finally:
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def find_admitter(net: Network, addresses: tuple[str, ...]) -> PeerId:
    """Ask the members at a ticket's addresses for the peer that admits newcomers. Raises PeerUnreachable when no member
    answers, and AdmissionError when no answer names a peer."""

    async def answer(member: PeerId) -> PeerId:
        return (await AskAdmitter().ask(net, member, timeout_s=CALL_S)).id

    admitter, problems = await first_answer(map(answer, members_in(addresses)))
    if admitter is not None:
        return admitter
    said = "; ".join(map(str, problems))
    if problems and all(isinstance(e, (PeerUnreachable, DeadlineExceeded)) for e in problems):
        raise PeerUnreachable(f"no member of the ticket answers ({said})")
    raise AdmissionError(
        f"no member of the ticket knows who admits newcomers ({said or 'it names none'}); "
        f"ask for a ticket of 'muletrain start' itself"
    )


async def find_founder(net: Network, addresses: tuple[str, ...]) -> PeerId:
    """Ask the members at a ticket's addresses for the founder. Raises as ``find_admitter``."""
    admitter = await find_admitter(net, addresses)
    try:
        genesis = (await AskBegun().ask(net, admitter, timeout_s=CALL_S)).genesis
    except NetworkError:
        genesis = None
    return admitter if genesis is None else genesis.coordinator  # before the run begins, only the founder admits


async def ask_missing(net: Network, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """The conditions that a run waits for; empty after the beginning. Raises AdmissionError when no member can be
    asked, and NetworkError."""
    admitter = await find_admitter(net, addresses)
    return (await AskBegun().ask(net, admitter, timeout_s=CALL_S)).missing


class JoinClient:
    """A newcomer's connection to the admitter, before step 0 the founder."""

    def __init__(self, net: Network, admitter: PeerId, tell: Callable[[str], None] = lambda reason: None) -> None:
        """``tell`` gets the reason for a repeated question."""
        self.admitter = admitter
        self.contacts: tuple[Member, ...] = ()
        """Live members of a run that has begun, by the admitter's last word."""
        self._net, self._tell = net, tell
        self._genesis: asyncio.Future[Genesis] = asyncio.get_running_loop().create_future()
        net.serve(Begin.KIND, self._on_begin)
        serve_admitter(net, admitter)

    async def join(self, request: JoinRequest) -> Welcome:
        """Get a stage. Raises Refused with the admitter's reason, or another NetworkError."""
        return await self._ask(request)

    async def tokenizer(self, welcome: Welcome) -> bytes:
        """Load the tokenizer. Raises ProtocolError for pieces that do not fit, or another NetworkError."""
        return b"".join([piece async for piece in self._pieces(welcome.tokenizer_size)])

    async def part(self, welcome: Welcome, into: Path) -> None:
        """Write our stage's part of the checkpoint to the file ``into``. Raises ProtocolError for content that differs
        from the promised digest, or another NetworkError."""
        digest = hashlib.sha256()
        with into.open("wb") as file:
            async for piece in self._pieces(welcome.part_size, part=True):
                digest.update(piece)
                file.write(piece)
        if digest.digest() != welcome.part_digest:
            raise ProtocolError("the checkpoint part that came is not the one that was promised; join again")

    async def decline(self, reason: str) -> None:
        """Give the stage back, with the reason, if the admitter can be reached."""
        declined = Declined(reason=reason[:1000])
        with suppress(NetworkError):
            await self._net.call(self.admitter, declined.KIND, declined.pack(), timeout_s=CALL_S)

    async def begin(
        self, ready: Ready | None, tell: Callable[[tuple[str, ...]], None] = lambda missing: None
    ) -> Genesis:
        """Wait for the beginning. ``ready``: of a guest with a stage. ``tell`` gets the missing conditions now and then.
        Raises NetworkError when the founder goes away meanwhile."""
        pause_s = ASK_EVERY_S if ready is None else READY_EVERY_S
        while True:
            begun = await self._ask(AskBegun(ready=ready))
            if begun.genesis is not None:
                self.contacts = begun.members
                return begun.genesis
            tell(begun.missing)
            done, _ = await asyncio.wait({self._genesis}, timeout=pause_s)
            if done:
                return self._genesis.result()

    async def _pieces(self, size: int, *, part: bool = False) -> AsyncIterator[bytes]:
        """``size`` bytes of the tokenizer, or of our ``part``, in order. Raises ProtocolError for a piece of another length."""

        async def piece(offset: int) -> bytes:
            ask = AskPiece(offset=offset, part=part).pack()
            answer = await patiently(
                lambda: self._net.call(self.admitter, AskPiece.KIND, ask, timeout_s=CALL_S), self._tell
            )
            if len(answer) != min(PIECE, size - offset):
                raise ProtocolError(f"{AskPiece.KIND}: the pieces do not add up to {size} bytes")
            return answer

        for begin in range(0, size, AHEAD * PIECE):
            for data in await asyncio.gather(*map(piece, range(begin, min(size, begin + AHEAD * PIECE), PIECE))):
                yield data

    async def _ask(self, call: Call[A]) -> A:
        """Ask the admitter, within a newcomer's patience: each question may be repeated."""
        return await patiently(lambda: call.ask(self._net, self.admitter, timeout_s=CALL_S), self._tell)

    async def _on_begin(self, sender: PeerId, payload: bytes) -> bytes:
        if sender != self.admitter:
            raise ProtocolError("only the founder begins the run")
        begin = Begin.unpack(payload)
        if not self._genesis.done():
            self._genesis.set_result(begin.genesis)
        return b""
