"""The gate: nobody speaks to a member before both sides have proved that they hold the run's secret.

libp2p encrypts, and authenticates the peer id, but lets anyone dial. Here every handler (calls, streams, the DHT's own RPCs) refuses
a remote id that was not admitted, and every outgoing call admits the other side first.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, TYPE_CHECKING

import msgpack
from hivemind.p2p import P2P, PeerID

from muletrain.errors import AdmissionError, DeadlineExceeded, NetworkError, PeerUnreachable, Refused
from muletrain.network.identity import NONCE, proof, same

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ADMIT = "muletrain/admit"
MAX_ADMIT = 4096
MAX_PENDING = 1024
ADMIT_TIMEOUT_S = 20.0


class Gate:
    """Who is admitted, and the handshake that admits. ``refused`` is told (remote, reason)."""

    def __init__(self, run_id: str, secret: bytes, protocol: str, refused: Callable[[str, str], None]) -> None:
        self._run_id, self._secret, self._protocol = run_id, secret, protocol
        self._refused = refused
        self._admitted: set[str] = set()
        self._challenges: dict[str, bytes] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def admitted(self, peer: str) -> bool:
        return peer in self._admitted

    def check(self, peer: str, what: str) -> None:
        """Raises Refused, and reports, when ``peer`` was not admitted."""
        if peer not in self._admitted:
            self._refused(peer, f"{what} before admission")
            raise Refused("not admitted to this run")

    async def ensure(self, own: str, peer: str, call: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Admit ``peer``, and be admitted, before we speak to it. ``call`` reaches its admit handler. Raises AdmissionError
        when it is of another run or version or does not hold our secret, else what ``call`` raises."""
        async with self._locks.setdefault(peer, asyncio.Lock()):
            if peer in self._admitted:
                return
            mine = os.urandom(NONCE)
            answer = await self._ask(call, ["hello", self._protocol, self._run_id, mine])
            theirs, their_proof = answer
            nonces = mine + theirs
            if not same(their_proof, proof(self._secret, "callee", self._run_id, own, peer, nonces)):
                raise AdmissionError(
                    "the peer does not hold this ticket's secret; the ticket is of another run, or was replaced"
                )
            self._admitted.add(peer)
            await self._ask(call, ["proof", proof(self._secret, "caller", self._run_id, own, peer, nonces)])

    async def _ask(self, call: Callable[[bytes], Awaitable[bytes]], message: list[Any]) -> Any:
        reply = msgpack.unpackb(await call(msgpack.packb(message)), max_ext_len=0)
        if not isinstance(reply, list) or len(reply) != 2:
            raise AdmissionError("the other side answered something that is no admission; is it muletrain?")
        ok, content = reply
        if ok is not True:
            raise AdmissionError(str(content)[:500])
        return content

    async def answer(self, own: str, peer: str, payload: bytes) -> bytes:
        """The callee's side of both messages."""
        try:
            reply = [True, self._answer(own, peer, payload)]
        except AdmissionError as e:
            self._refused(peer, str(e))
            reply = [False, str(e)]
        packed: bytes = msgpack.packb(reply)
        return packed

    def _answer(self, own: str, peer: str, payload: bytes) -> Any:
        try:
            if len(payload) > MAX_ADMIT:
                raise ValueError
            kind, *rest = msgpack.unpackb(payload, max_ext_len=0)
            if kind == "hello":
                return self._hello(own, peer, *rest)
            if kind == "proof":
                return self._proof(own, peer, *rest)
        except (ValueError, TypeError, msgpack.UnpackException):
            pass
        raise AdmissionError("malformed admission")

    def _hello(self, own: str, peer: str, protocol: str, run_id: str, nonce: bytes) -> Any:
        if protocol != self._protocol:
            raise AdmissionError(
                f"this run speaks {self._protocol}, the newcomer {str(protocol)[:100]}: install the same version"
            )
        if run_id != self._run_id:
            raise AdmissionError("this peer belongs to another run than the ticket; use the ticket of this run")
        if not isinstance(nonce, bytes) or len(nonce) != NONCE:
            raise AdmissionError("malformed admission")
        if len(self._challenges) >= MAX_PENDING:
            self._challenges.pop(next(iter(self._challenges)))
        own_nonce = os.urandom(NONCE)
        self._challenges[peer] = nonce + own_nonce
        return [own_nonce, proof(self._secret, "callee", self._run_id, peer, own, nonce + own_nonce)]

    def _proof(self, own: str, peer: str, given: bytes) -> Any:
        nonces = self._challenges.pop(peer, None)
        expected = nonces and proof(self._secret, "caller", self._run_id, peer, own, nonces)
        if not expected or not isinstance(given, bytes) or not same(given, expected):
            raise AdmissionError("the newcomer does not hold this run's secret; it needs this run's ticket")
        self._admitted.add(peer)
        return []


class GatedP2P(P2P):  # type: ignore[misc]  # hivemind is untyped
    """hivemind's P2P with the gate in front of everything that comes in and goes out."""

    gate: Gate

    async def open_gate(self, gate: Gate) -> None:
        """Must be called before anything else is served."""
        self.gate = gate

        async def admit(payload: bytes, remote: PeerID) -> bytes:
            return await gate.answer(self.peer_id.to_base58(), remote.to_base58(), payload)

        await self._client.add_unary_handler(ADMIT, admit)
        if self._listen_task is None:
            self._start_listening()

    async def admit(self, peer: PeerID) -> None:
        """The handshake with ``peer``, unless it is done already."""

        async def call(payload: bytes) -> bytes:
            return await raw_call(self, peer, ADMIT, payload, ADMIT_TIMEOUT_S)

        name = peer.to_base58()
        if not self.gate.admitted(name):
            await self.gate.ensure(self.peer_id.to_base58(), name, call)

    async def _add_protobuf_unary_handler(self, handle_name: str, handler: Any, *args: Any, **kwargs: Any) -> None:
        async def gated(request: Any, context: Any) -> Any:
            self.gate.check(context.remote_id.to_base58(), handle_name)
            return await handler(request, context)

        await super()._add_protobuf_unary_handler(handle_name, gated, *args, **kwargs)

    async def add_binary_stream_handler(self, name: str, handler: Any, balanced: bool = False) -> None:
        async def gated(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                self.gate.check(info.peer_id.to_base58(), f"stream {name}")
                await handler(info, reader, writer)
            except Refused:
                pass  # reported by the gate
            finally:
                writer.close()

        await super().add_binary_stream_handler(name, gated, balanced=balanced)

    async def _call_unary_protobuf_handler(self, peer_id: PeerID, *args: Any) -> Any:
        try:
            await self.admit(peer_id)
        except (AdmissionError, NetworkError) as e:
            raise ConnectionError(str(e)) from e  # what hivemind's DHT knows how to handle
        return await super()._call_unary_protobuf_handler(peer_id, *args)

    async def call_binary_stream_handler(self, peer_id: PeerID, handler_name: str) -> Any:
        await self.admit(peer_id)
        return await super().call_binary_stream_handler(peer_id, handler_name)


async def raw_call(p2p: P2P, peer: PeerID, name: str, payload: bytes, timeout_s: float) -> bytes:
    """One unary exchange. Raises PeerUnreachable or DeadlineExceeded."""
    try:
        answer: bytes = await asyncio.wait_for(p2p._client.call_unary_handler(peer, name, payload), timeout_s)
    except TimeoutError:
        raise DeadlineExceeded(f"{name} to {peer.to_base58()[-6:]}: no answer within {timeout_s:.1f} s") from None
    except NetworkError:
        raise
    except Exception as e:  # the daemon's errors have no common base: dial failures, resets, unknown protocols
        raise PeerUnreachable(f"{name} to {peer.to_base58()[-6:]}: {str(e) or type(e).__name__}") from e
    return answer
