"""hivemind's ``P2P`` behind the gate: nothing passes between this process and a peer that was not admitted."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import uuid4

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import raise_if_failed, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2

from muletrain.errors import AdmissionError, DeadlineExceeded, MuletrainError, PeerUnreachable
from muletrain.network import deaf

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hivemind.utils.multiaddr import Multiaddr

    from muletrain.network.gate import Gate

T = TypeVar("T")
ADMIT = "muletrain/admit"
ADMIT_TIMEOUT_S = 20.0
"""Longest time of one message of the handshake [s]."""
REACH_S = 10
"""Longest time in which the daemon tries to get a connection [s]; the daemon's default is a minute."""
SYNC_S, SYNC_TIMEOUT_S = 10.0, 30.0
"""Mean time between two questions for renewals, and the longest time of one [s]. Each goes to one random member, so all
members know of a renewal after about log2(members) questions each."""
_MAX_REASON = 300
"""Characters quoted from a daemon's error without a message of ours."""
_IN_WORDS = {
    r"routing: not found|no addresses|no good addresses": "no route to it is known",
    r"dial backoff": "it could not be reached a moment ago",
    r"connection refused": "connection refused",
    r"no route to host|network is unreachable": "there is no network route to it",
    r"i/o timeout|deadline exceeded|deadline reached": "no answer to a connection attempt",
    r"peer id mismatch": "another peer answers at its address",
    r"message did not have trailing newline": "what answers at its address is no peer",
    r"protocols? not supported": "it is starting or ending",
    r"(connection|stream) reset|broken pipe|\bEOF\b|bytes read|connection lost": "the connection broke",
}
"""Explanations of errors of the daemon (go-libp2p) and of sockets, by pattern. An error may match several, one for each
address that was dialled."""
PATIENCE_S = 2.0
"""Time without an answer after which we check whether the peer is still there [s]."""
NOT_DIALLED = ("failed to dial", "routing: not found", "no addresses", "no good addresses", "dial backoff")
"""The daemon's words for a peer without a connection, old or new: nothing of the request has left this machine."""


class Finder(Protocol):
    """Finds relayed ways to peers that cannot be dialled (``network.ways``)."""

    def doubt(self, peer: str) -> None:
        """Check in the background whether silent ``peer`` is reached, and find another way if not."""
        ...

    async def find(self, peer: str) -> bool:
        """Get a missing connection to ``peer``. False: no member reaches ``peer``."""
        ...

    def relayed(self, peer: str) -> bool:
        """Did we reach ``peer`` through a relay the last time?"""
        ...

    def advice(self) -> str:
        """Advice to the user if there is no way between two peers."""
        ...


class GatedP2P(P2P):  # type: ignore[misc]  # hivemind is untyped
    """The daemon's client. Calls, streams and the DHT's own RPCs pass through the overridden methods."""

    gate: Gate
    _finder: Finder | None = None

    @staticmethod
    def _make_process_args(*args: object, **kwargs: object) -> list[str]:
        """The daemon ends with us, not by a signal to all processes of a job (``deaf``)."""
        return [sys.executable, "-I", "-S", deaf.__file__, *P2P._make_process_args(*args, **kwargs)]

    def _terminate(self) -> None:
        """As hivemind's, for a daemon that ignores SIGTERM."""
        if self._child is not None and self._child.returncode is None:
            with suppress(ProcessLookupError):
                self._child.kill()
        super()._terminate()

    async def open_gate(self, gate: Gate, finder: Finder) -> None:
        """Answer handshakes. Must be called before anything else is served."""
        self.gate, self._finder = gate, finder
        self._client.control._handler_tasks = _Running()

        async def admit(payload: bytes, remote: PeerID) -> bytes:
            return gate.answer(remote.to_base58(), payload)

        await self.answer_calls(ADMIT, admit)

    async def answer_calls(self, name: str, handler: Callable[[bytes, PeerID], Awaitable[bytes]]) -> None:
        """Answer the unary calls ``name`` of all peers, admitted or not."""
        await self._client.add_unary_handler(name, handler)

    async def connected(self) -> dict[str, list[str]]:
        """The peers connected with the daemon, and the remote addresses."""
        return {p.peer_id.to_base58(): [str(a) for a in p.addrs] for p in await self._client.list_peers()}

    async def hang_up(self, peer: str) -> None:
        """Close the daemon's connections with ``peer``, if any."""
        if peer in await self.connected():
            with suppress(Exception):  # the peer has gone meanwhile
                await self._client.disconnect(PeerID.from_base58(peer))

    async def enter(self, peer: PeerID) -> None:
        """Do the handshake with ``peer``, unless already done. Raises AdmissionError, and the errors of
        ``exchange``."""
        name = peer.to_base58()
        if not self.gate.entered(name):
            await self.gate.enter(name, self._admission(peer))

    async def sync(self, peer: PeerID) -> None:
        """Ask ``peer`` for renewals. Raises the errors of ``enter``."""
        try:
            await self.gate.sync(self._admission(peer))
        except AdmissionError:  # restarted, or a renewal leaves us out, as the peer tells us then
            self.gate.forget_entry(peer.to_base58())
            await self.enter(peer)

    async def tell(self, peer: PeerID) -> None:
        """Bring the last renewal to a peer named there. Raises AdmissionError if the peer refuses."""
        await self.gate.pass_on(peer.to_base58(), self._admission(peer))

    async def hear_renewals(self) -> None:
        """Ask members for renewals now and then, for ever."""
        while True:
            await asyncio.sleep(SYNC_S * random.uniform(0.5, 1.5))
            if known := self.gate.known():
                peer = PeerID.from_base58(random.choice(known))
                with suppress(MuletrainError):
                    await reaching(self.sync(peer), SYNC_TIMEOUT_S, "hearing of renewals")

    def _admission(self, peer: PeerID) -> Callable[[bytes], Awaitable[bytes]]:
        async def call(payload: bytes) -> bytes:
            async with asyncio.timeout(ADMIT_TIMEOUT_S):
                return await self.exchange(peer, ADMIT, payload)

        return call

    async def _by_any_way(self, peer: PeerID, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run ``attempt``. If nothing left this machine and a relay to ``peer`` is found, run again."""
        finder, name = self._finder, peer.to_base58()
        if finder is None:
            return await attempt()
        patience = asyncio.get_running_loop().call_later(PATIENCE_S, finder.doubt, name)
        try:
            return await attempt()
        except Exception as e:  # the daemon's errors have no common base
            if not not_dialled(e):
                raise
            if not await finder.find(name):
                if self.gate.entered(name) and not finder.relayed(name):
                    raise
                raise PeerUnreachable(f"{plainly(e)}; {finder.advice()}") from e
        finally:
            patience.cancel()
        return await attempt()

    async def exchange(self, peer: PeerID, name: str, payload: bytes) -> bytes:
        """Make a unary call to ``peer``, admitted or not. Raises the daemon's errors."""
        return await self._by_any_way(peer, lambda: self.exchange_directly(peer, name, payload))

    async def exchange_directly(self, peer: PeerID, name: str, payload: bytes) -> bytes:
        """``exchange`` without a search for relays. hivemind's own version loses every later answer of the process when
        an answer arrives in the same turn of the loop as the call's cancellation."""
        control, call_id = self._client.control, uuid4()
        call = p2pd_pb2.CallUnaryRequest(peer=peer.to_bytes(), proto=name, data=payload)
        answer = control._pending_calls[call_id] = _Answer()
        try:
            await control._pending_messages.put(
                p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, callUnary=call)
            )
            return await answer
        except asyncio.CancelledError:
            await control._cancel_unary_call(call_id)
            raise
        finally:
            control._pending_calls.pop(call_id, None)

    async def _call_unary_protobuf_handler(
        self, peer_id: PeerID, handle_name: str, input: Any, output_type: Any
    ) -> Any:
        await self.enter(peer_id)
        return output_type.FromString(await self.exchange(peer_id, handle_name, input.SerializeToString()))

    async def call_binary_stream_handler(self, peer_id: PeerID, handler_name: str) -> Any:
        await self.enter(peer_id)
        return await self._by_any_way(peer_id, lambda: self.open_stream(peer_id, handler_name))

    async def open_stream(
        self, peer: PeerID, name: str
    ) -> tuple[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream to ``peer``, admitted or not."""
        opened = p2pd_pb2.StreamOpenRequest(peer=peer.to_bytes(), proto=[name], timeout=REACH_S)
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opened)
        response, reader, writer = await self._request(request)
        return StreamInfo.from_protobuf(response.streamInfo), reader, writer

    async def dial(self, peer: PeerID, addresses: list[Multiaddr]) -> None:
        """Connect with ``peer``, admitted or not, at one of ``addresses``."""
        dialled = p2pd_pb2.ConnectRequest(
            peer=peer.to_bytes(), addrs=[a.to_bytes() for a in addresses], timeout=REACH_S
        )
        _, _, writer = await self._request(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=dialled))
        writer.close()

    async def _request(
        self, request: p2pd_pb2.Request
    ) -> tuple[p2pd_pb2.Response, asyncio.StreamReader, asyncio.StreamWriter]:
        """The daemon's answer, and the socket. hivemind's own requests leave the socket to the garbage collector after
        failure or cancellation: with a few dozen peers dead a process had more than a hundred open."""
        reader, writer = await self._client.control.daemon_connector.open_connection()
        try:
            await write_pbmsg(writer, request)
            await read_pbmsg_safe(reader, response := p2pd_pb2.Response())
            raise_if_failed(response)
        except BaseException:
            writer.close()
            raise
        return response, reader, writer

    async def _add_protobuf_unary_handler(self, handle_name: str, handler: Any, *args: Any, **kwargs: Any) -> None:
        async def gated(request: Any, context: Any) -> Any:
            if not self.gate.check(context.remote_id.to_base58(), handle_name):
                raise PermissionError("not admitted to this run")
            return await handler(request, context)

        await super()._add_protobuf_unary_handler(handle_name, gated, *args, **kwargs)

    async def add_binary_stream_handler(self, name: str, handler: Any, balanced: bool = False) -> None:
        async def gated(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                if self.gate.check(info.peer_id.to_base58(), f"stream {name}"):
                    await handler(info, reader, writer)
            finally:
                writer.close()

        await super().add_binary_stream_handler(name, gated, balanced=balanced)

    @property
    def daemon(self) -> asyncio.subprocess.Process:
        """The daemon's process."""
        process: asyncio.subprocess.Process = self._child
        return process

    def check_daemon(self) -> None:
        """Raises MuletrainError if the daemon has ended: then no peer can be reached."""
        if (code := self.daemon.returncode) is not None:
            raise MuletrainError(
                f"the network daemon (p2pd) of this peer has ended with code {code}; start the peer again"
            )


class _Running(dict[Any, "asyncio.Task[None]"]):
    """Calls being answered. hivemind forgets an answered call, but keeps one that the caller gave up, with all data,
    for ever."""

    def __setitem__(self, call: Any, task: asyncio.Task[None]) -> None:
        super().__setitem__(call, task)
        task.add_done_callback(lambda _: self.pop(call, None))


class _Answer(asyncio.Future[bytes]):
    """A future that may be answered after cancellation."""

    def set_result(self, result: bytes) -> None:
        if not self.done():
            super().set_result(result)

    def set_exception(self, exception: Any) -> None:
        if not self.done():
            super().set_exception(exception)


async def reaching(work: Awaitable[T], timeout_s: float | None, what: str) -> T:
    """Await ``work`` for at most ``timeout_s``. Raises DeadlineExceeded, and PeerUnreachable for the daemon's errors;
    ``what`` begins the messages."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        within = "" if timeout_s is None else f" within {timeout_s:.1f} s"
        raise DeadlineExceeded(f"no answer{within}", what) from None
    except PeerUnreachable as e:
        raise PeerUnreachable(e.why, e.doing or what) from e
    except MuletrainError:
        raise
    except Exception as e:  # the daemon's errors have no common base: dial failures, resets, unknown protocols
        raise PeerUnreachable(plainly(e), what) from e


def plainly(error: BaseException) -> str:
    """Explanation of a daemon's error, for people: without the tried addresses."""
    raw = " ".join(str(error).split())
    means = [words for pattern, words in _IN_WORDS.items() if re.search(pattern, raw, re.IGNORECASE)]
    return ", ".join(means) or raw[:_MAX_REASON] or type(error).__name__


def not_dialled(error: Exception) -> bool:
    """Does ``error`` mean that nothing of the request has left this machine?"""
    return not isinstance(error, MuletrainError) and any(reason in str(error) for reason in NOT_DIALLED)
