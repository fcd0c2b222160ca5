"""The gate: nobody speaks to a member before both sides have proved that they hold the run's secret.

libp2p encrypts, and authenticates the peer id, but lets anyone dial. Here every handler (calls, streams, the DHT's own RPCs) refuses
a remote id that was not admitted, and every outgoing call admits the other side first. Two messages: ``hello`` (version, run, nonce;
answer: the callee's nonce and proof), ``proof`` (the caller's). A proof is an HMAC bound to version, run, both ids and both nonces.
The callee keeps nothing between them: its nonce is derived from the caller's id and nonce by a key of this process.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import msgpack

from muletrain.errors import AdmissionError
from muletrain.network.identity import NONCE, derive, proof, same

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MAX_ADMIT = 4096
BURST, PER_S = 200.0, 50.0
"""Admissions answered at once, and per second after that."""
OTHER_SECRET = "the other side does not hold this ticket's secret: the ticket is of another run or was replaced; ask for the current one"


class Gate:
    """Who is admitted, and the handshake that admits. ``refused`` is told (remote, reason)."""

    def __init__(
        self, own: str, run_id: str, secret: bytes, protocol: str, refused: Callable[[str, str], None]
    ) -> None:
        self._own, self._run_id, self._secret, self._protocol = own, run_id, secret, protocol
        self._refused = refused
        self._came_in: set[str] = set()  # proved themselves to us
        self._let_us_in: set[str] = set()  # accepted our proof, and gave theirs
        self._nonce_key = os.urandom(32)
        self._locks: dict[str, asyncio.Lock] = {}
        self._tokens, self._refilled = BURST, 0.0

    def admitted(self, peer: str) -> bool:
        """May it speak to us?"""
        return peer in self._came_in or peer in self._let_us_in

    def entered(self, peer: str) -> bool:
        """May we speak to it?"""
        return peer in self._let_us_in

    def forget_entry(self, peer: str) -> None:
        """It says that it does not know us: it was restarted."""
        self._let_us_in.discard(peer)

    def check(self, peer: str, what: str) -> bool:
        """Reports when ``peer`` may not speak to us."""
        if self.admitted(peer):
            return True
        self._refused(peer, f"{what} before admission")
        return False

    async def enter(self, peer: str, call: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Admit ``peer``, and be admitted, unless that is done. ``call`` reaches its admit handler; its errors pass.

        Raises AdmissionError when it is of another run or version or does not hold our secret."""
        lock = self._locks.setdefault(peer, asyncio.Lock())
        async with lock:
            if peer not in self._let_us_in:
                await self._handshake(peer, call)

    async def _handshake(self, peer: str, call: Callable[[bytes], Awaitable[bytes]]) -> None:
        mine = os.urandom(NONCE)
        theirs, their_proof = _pair_of_bytes(await self._ask(call, ["hello", self._protocol, self._run_id, mine]))
        genuine = same(their_proof, self._proof("callee", self._own, peer, mine + theirs))
        if genuine:
            self._came_in.add(peer)  # before our proof is out: it may speak to us as soon as it has that
        own_proof = self._proof("caller", self._own, peer, mine + theirs)
        try:
            await self._ask(call, ["proof", mine, own_proof])  # even if theirs is wrong: so that they can report it
        except AdmissionError:
            if genuine:
                raise
        if not genuine:
            raise AdmissionError(OTHER_SECRET)
        self._let_us_in.add(peer)

    async def _ask(self, call: Callable[[bytes], Awaitable[bytes]], message: list[Any]) -> Any:
        match _unpacked(await call(msgpack.packb(message))):
            case [True, content]:
                return content
            case [False, str() as reason]:
                raise AdmissionError(reason[:500])
        raise AdmissionError("the other side's answer is no admission; is it a muletrain of this version?")

    def answer(self, peer: str, payload: bytes) -> bytes:
        """The callee's side of both messages."""
        try:
            reply = [True, self._answer(peer, payload)]
        except AdmissionError as e:
            self._refused(peer, str(e))
            reply = [False, str(e)]
        packed: bytes = msgpack.packb(reply)
        return packed

    def _answer(self, peer: str, payload: bytes) -> Any:
        if not self._take_token():
            raise AdmissionError("too many peers ask to be admitted; try again in some seconds")
        match _unpacked(payload) if len(payload) <= MAX_ADMIT else None:
            case ["hello", str() as protocol, str() as run_id, bytes() as nonce] if len(nonce) == NONCE:
                return self._on_hello(peer, protocol, run_id, nonce)
            case ["proof", bytes() as nonce, bytes() as given] if len(nonce) == NONCE:
                return self._on_proof(peer, nonce, given)
        raise AdmissionError("malformed admission")

    def _on_hello(self, peer: str, protocol: str, run_id: str, nonce: bytes) -> Any:
        if protocol != self._protocol:
            raise AdmissionError(
                f"this run speaks {self._protocol}, the newcomer {protocol[:100]}: install the same version on both"
            )
        if run_id != self._run_id:
            raise AdmissionError(
                f"this peer belongs to run {self._run_id}, the ticket to run {run_id[:100]}: use the ticket of this run"
            )
        nonces = nonce + self._own_nonce(peer, nonce)
        return [nonces[NONCE:], self._proof("callee", peer, self._own, nonces)]

    def _on_proof(self, peer: str, nonce: bytes, given: bytes) -> Any:
        if not same(given, self._proof("caller", peer, self._own, nonce + self._own_nonce(peer, nonce))):
            raise AdmissionError("the newcomer does not hold this run's secret; it needs this run's current ticket")
        self._came_in.add(peer)
        self._let_us_in.add(peer)  # it has checked ours already
        return []

    def _own_nonce(self, peer: str, nonce: bytes) -> bytes:
        return derive(self._nonce_key, peer.encode() + nonce)

    def _proof(self, role: str, caller: str, callee: str, nonces: bytes) -> bytes:
        return proof(self._secret, role, [self._protocol, self._run_id, caller, callee], nonces)

    def _take_token(self) -> bool:
        now = asyncio.get_running_loop().time()
        self._tokens = min(BURST, self._tokens + (now - self._refilled) * PER_S)
        self._refilled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def _unpacked(payload: bytes) -> Any:
    try:
        return msgpack.unpackb(payload, max_ext_len=0)
    except Exception:  # msgpack raises a dozen unrelated types on garbage
        return None


def _pair_of_bytes(content: Any) -> tuple[bytes, bytes]:
    match content:
        case [bytes() as nonce, bytes() as given] if len(nonce) == NONCE:
            return nonce, given
    raise AdmissionError("the other side's answer is no admission; is it a muletrain of this version?")
