"""The real network: hivemind's libp2p daemon and DHT, in our event loop (no forks)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from muletrain.errors import AdmissionError, MuletrainError, NetworkError, PeerUnreachable, ProtocolError, Refused
from muletrain.network.base import CallHandler, Channel, Frame, FrameHandler, PeerId, RefusalHandler
from muletrain.wire.frame import MAX_PAYLOAD, pack, size

try:
    from hivemind.dht import DHTNode
    from hivemind.p2p import PeerID
    from hivemind.utils import get_dht_time
    from hivemind.utils.multiaddr import Multiaddr

    from muletrain.network.gate import Gate, GatedP2P, raw_call
    from muletrain.network.identity import write_identity
    from muletrain.network.streams import FRAMES, Outgoing, receive_stream
except ImportError as e:  # pragma: no cover - platforms without hivemind's wheels
    raise MuletrainError(
        f"the network engine (hivemind) cannot be loaded here: {e}. It runs on Linux and macOS (arm64); on Windows use WSL2"
    ) from e

if TYPE_CHECKING:
    from pathlib import Path

MAX_CALL = 1 << 20
CALL = "muletrain/call"
SEPARATOR = b"\0"
OK, FAILED = b"\0", b"\1"
SELF_QUEUE = 1024
"""Frames to ourselves waiting for the handler."""


class Libp2pNetwork:
    """``Network`` over libp2p. Create with ``create``."""

    def __init__(self, p2p: GatedP2P, max_frame_bytes: int) -> None:
        self._p2p = p2p
        self._max_frame = max_frame_bytes
        self.peer_id: PeerId = p2p.peer_id.to_base58()
        self._dht: DHTNode | None = None
        self._outgoing: dict[tuple[PeerId, Channel], Outgoing] = {}
        self._own: dict[Channel, asyncio.Queue[Frame]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._handlers: dict[str, CallHandler] = {}
        self._receive: FrameHandler | None = None
        self._ready = asyncio.Event()
        self._refusal: RefusalHandler = lambda remote, reason: None
        self._maddrs: list[str] = []
        self._closed = False

    @classmethod
    async def create(
        cls, *, run_id: str, secret: bytes, protocol: str, folder: Path, listen: str = "127.0.0.1", port: int = 0,
        announce: tuple[str, ...] = (), initial_peers: tuple[str, ...] = (), max_frame_bytes: int = MAX_PAYLOAD,
        on_refusal: RefusalHandler | None = None,
    ) -> Libp2pNetwork:  # fmt: skip
        """Start the daemon, be admitted by an initial peer, join the directory.

        ``folder``: short path for the key and the daemon's sockets. Raises AdmissionError, PeerUnreachable, or NetworkError when the
        daemon does not start.
        """
        logging.getLogger("hivemind").setLevel(logging.ERROR)
        identity = folder / "identity"
        if not identity.exists():
            write_identity(identity)
        local = listen.startswith("127.")
        prefixed: Any = type("LocalP2P", (GatedP2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})
        try:
            p2p = await prefixed.create(
                initial_peers=list(initial_peers) or None, host_maddrs=[f"/ip4/{listen}/tcp/{port}"],
                announce_maddrs=list(announce) or None, identity_path=str(identity), check_if_identity_free=False,
                nat_port_map=not local, auto_nat=not local, idle_timeout=60,
            )  # fmt: skip
        except Exception as e:  # the daemon's errors have no common base
            raise NetworkError(f"the network daemon did not start on {listen}:{port}: {e}") from e
        self = cls(p2p, max_frame_bytes)
        if on_refusal is not None:
            self._refusal = on_refusal
        try:
            await self._start(run_id, secret, protocol, initial_peers)
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self, run_id: str, secret: bytes, protocol: str, initial_peers: tuple[str, ...]) -> None:
        await self._p2p.open_gate(Gate(run_id, secret, protocol, lambda remote, why: self._refusal(remote, why)))
        await self._p2p._client.add_unary_handler(CALL, self._answer)
        await self._p2p.add_binary_stream_handler(FRAMES, self._on_stream)
        reached = await self._enter(initial_peers) if initial_peers else []
        self._dht = await DHTNode.create(p2p=self._p2p, initial_peers=reached or None, ensure_bootstrap_success=False)
        self._maddrs = [str(a) for a in await self._p2p.get_visible_maddrs()]

    async def _enter(self, addresses: tuple[str, ...]) -> list[str]:
        """Be admitted by at least one of ``addresses``; the ones that did."""
        reached, problems = [], []
        for address in addresses:
            try:
                await self.connect([address], timeout_s=15.0)
                reached.append(address)
            except NetworkError as e:
                problems.append(f"{address}: {e}")
        if not reached:
            raise PeerUnreachable(
                "no member of the run could be reached; is it running, and is its port open to this machine?\n  "
                + "\n  ".join(problems)
            )
        return reached

    # Calls ----------------------------------------------------------------------------------------------------------

    def serve(self, method: str, handler: CallHandler) -> None:
        self._handlers[method] = handler

    async def _answer(self, request: bytes, remote: Any) -> bytes:
        """All methods share one libp2p handler, so that serving one is immediate."""
        sender = remote.to_base58()
        name, _, payload = request.partition(SEPARATOR)
        method = name.decode(errors="replace")
        try:
            self._p2p.gate.check(sender, f"call {method[:40]}")
            if method not in self._handlers:
                raise Refused(f"{method[:40]}: this peer does not answer that now")
            return OK + await self._handlers[method](sender, payload)
        except ProtocolError as e:
            self._refusal(sender, str(e))
            return FAILED + str(e).encode()
        except MuletrainError as e:
            return FAILED + str(e).encode()

    async def call(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        if len(payload) > MAX_CALL:
            raise ProtocolError(f"{method}: {len(payload)} bytes; a call carries at most {MAX_CALL}")
        target = PeerID.from_base58(peer)
        try:
            await self._p2p.admit(target)
        except AdmissionError as e:
            raise Refused(str(e)) from e
        answer = await raw_call(self._p2p, target, CALL, method.encode() + SEPARATOR + payload, timeout_s)
        if answer[:1] != OK:
            raise Refused(answer[1:].decode(errors="replace") or "refused without a reason")
        return answer[1:]

    # Frames ---------------------------------------------------------------------------------------------------------

    async def send(
        self, peer: PeerId, frame: Frame, *, channel: Channel = Channel.PIPE, timeout_s: float = 60.0
    ) -> int:
        if peer == self.peer_id:
            await self._own_queue(channel).put(frame)
            return 0
        outgoing = self._outgoing.setdefault((peer, channel), Outgoing(self._p2p, peer, channel))
        buffers = pack(frame)
        try:
            await outgoing.send(buffers, timeout_s)
        except AdmissionError as e:
            raise Refused(str(e)) from e
        return size(buffers)

    def receive(self, handler: FrameHandler) -> None:
        self._receive = handler
        self._ready.set()

    def on_refusal(self, handler: RefusalHandler) -> None:
        self._refusal = handler

    async def _on_stream(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sender = info.peer_id.to_base58()

        async def handle(frame: Frame) -> None:
            await self._deliver(sender, frame)

        try:
            await receive_stream(reader, self._max_frame, handle)
        except ProtocolError as e:
            self._refusal(sender, str(e))  # and the stream is closed; a correct peer opens another

    async def _deliver(self, sender: PeerId, frame: Frame) -> None:
        await self._ready.wait()
        assert self._receive is not None
        await self._receive(sender, frame)

    def _own_queue(self, channel: Channel) -> asyncio.Queue[Frame]:
        if channel not in self._own:
            self._own[channel] = asyncio.Queue(SELF_QUEUE)
            self._spawn(self._drain_own(self._own[channel]))
        return self._own[channel]

    async def _drain_own(self, queue: asyncio.Queue[Frame]) -> None:
        while True:
            frame = await queue.get()
            try:
                await self._deliver(self.peer_id, frame)
            except ProtocolError as e:
                self._refusal(self.peer_id, str(e))

    # Directory ------------------------------------------------------------------------------------------------------

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        assert self._dht is not None
        await self._dht.store(key, value, get_dht_time() + ttl_s, subkey=self.peer_id)

    async def lookup(self, key: str) -> dict[PeerId, bytes]:
        assert self._dht is not None
        found = await self._dht.get(key, latest=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        return {
            peer: entry.value
            for peer, entry in entries.items()
            if isinstance(peer, str) and isinstance(entry.value, bytes)
        }

    # Addresses ------------------------------------------------------------------------------------------------------

    def addresses(self) -> list[str]:
        return self._maddrs

    async def connect(self, addresses: list[str], *, timeout_s: float) -> PeerId:
        try:
            maddrs = [Multiaddr(a) for a in addresses]
            target = PeerID.from_base58(maddrs[0]["p2p"])
        except Exception as e:  # multiaddr's parser raises many types
            raise PeerUnreachable(f"{addresses[:1]}: not the address of a peer") from e
        transports = [Multiaddr(str(m).rsplit("/p2p/", 1)[0]) for m in maddrs]
        try:
            await asyncio.wait_for(self._p2p._client.connect(target, transports), timeout_s)
        except Exception as e:  # the daemon's errors have no common base
            raise PeerUnreachable(f"cannot dial: {str(e) or f'no answer within {timeout_s:.0f} s'}") from e
        await self._p2p.admit(target)
        return str(target.to_base58())

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for outgoing in self._outgoing.values():
            await outgoing.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._dht is not None:
            with suppress(Exception):  # hivemind's node may be half way through a refresh
                await asyncio.wait_for(self._dht.shutdown(), 5.0)
        with suppress(Exception):
            await asyncio.wait_for(self._p2p.shutdown(), 10.0)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
