"""Calls over libp2p: one request, one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hivemind.p2p import PeerID

from muletrain.errors import AdmissionError, Malformed, ProtocolError, Refused
from muletrain.network.answers import Answers
from muletrain.network.gated import reaching

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.network.base import CallHandler, PeerId
    from muletrain.network.delivery import Delivery
    from muletrain.network.gated import GatedP2P

MAX_CALL = 1 << 20
"""Most bytes of a payload, and of an answer."""
CALL = "muletrain/call"
OK, FAILED, STRANGER = b"\0", b"\1", b"\2not admitted to this run"


class Calls:
    """The outgoing and incoming calls of one peer. A request is a method's length (one byte), the method and the
    payload; an answer is OK or FAILED, then the answer or a reason."""

    def __init__(self, p2p: GatedP2P, own: PeerId, delivery: Delivery, heard: Callable[[PeerId], None]) -> None:
        """``heard`` is told of each peer that calls or answers."""
        self._p2p, self._own, self._delivery, self._heard = p2p, own, delivery, heard
        self._answers = Answers(own, delivery)

    async def open(self) -> None:
        """Answer calls from now on."""
        await self._p2p.answer_calls(CALL, self._on_call)

    def serve(self, method: str, handler: CallHandler, *, free: bool) -> None:
        self._answers.serve(method, handler, free=free)

    async def call(self, peer: PeerId, method: str, payload: bytes, timeout_s: float) -> bytes:
        """Raises as ``Network.call``, and ProtocolError for too large a payload."""
        if len(payload) > MAX_CALL:
            raise ProtocolError(f"{method}: {len(payload)} bytes; a call carries at most {MAX_CALL}")
        self._p2p.check_daemon()
        try:
            answer = await reaching(self._ask(peer, method, payload), timeout_s, f"{method} to {peer[-6:]}")
        except AdmissionError as e:
            raise Refused(str(e)) from e
        self._heard(peer)
        if answer[:1] != OK:
            raise Refused(answer[1:].decode(errors="replace") or "refused without a reason")
        return answer[1:]

    async def _ask(self, peer: PeerId, method: str, payload: bytes) -> bytes:
        if peer == self._own:
            return await self._answer(peer, method, payload)
        target, name = PeerID.from_base58(peer), method.encode()
        request = bytes([len(name)]) + name + payload
        await self._p2p.enter(target)
        answer = await self._p2p.exchange(target, CALL, request)
        if answer[:1] == STRANGER[:1]:  # the peer was restarted and does not know us any more
            self._p2p.gate.forget_entry(peer)
            await self._p2p.enter(target)
            answer = await self._p2p.exchange(target, CALL, request)
        return answer

    async def _on_call(self, request: bytes, remote: PeerID) -> bytes:
        sender = remote.to_base58()
        if not self._p2p.gate.check(sender, "call"):
            return STRANGER
        self._heard(sender)
        end = 1 + request[0] if request else 0
        if not 1 < end <= len(request) or len(request) - end > MAX_CALL:
            self._delivery.refuse(sender, Malformed("malformed call"))
            return FAILED + b"malformed call"
        answer = await self._answer(sender, request[1:end].decode(errors="replace"), request[end:])
        return answer if self._p2p.gate.admitted(sender) else STRANGER

    async def _answer(self, sender: PeerId, method: str, payload: bytes) -> bytes:
        answered, answer = await self._answers.answer(sender, method, payload)
        if len(answer) > MAX_CALL:
            answered, answer = False, f"{method}: the answer is too large".encode()
        return (OK if answered else FAILED) + answer
