"""The real network: hivemind's libp2p daemon and DHT, in our event loop (no forks)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from muletrain.errors import (
    AdmissionError,
    Malformed,
    MuletrainError,
    NetworkError,
    PeerUnreachable,
    ProtocolError,
    Refused,
)
from muletrain.network.base import (
    Bounds,
    CallHandler,
    Channel,
    Frame,
    FrameHandler,
    LossHandler,
    PeerId,
    RefusalHandler,
)
from muletrain.network.delivery import Counters, Delivery
from muletrain.network.quota import Quota
from muletrain.wire.frame import MAX_PAYLOAD, pack, reread, size

try:
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    from muletrain.network.daemon import Daemon, end_daemon
    from muletrain.network.directory import Directory, Records
    from muletrain.network.gate import Gate
    from muletrain.network.gated import GatedP2P, reaching
    from muletrain.network.offences import Reports
    from muletrain.network.pacing import Pacer
    from muletrain.network.relay import Relay
    from muletrain.network.streams import FRAMES, Incoming, Outgoing
    from muletrain.network.trust import Trust, chain_bytes
except ImportError as e:  # pragma: no cover - platforms without hivemind's wheels
    raise MuletrainError(
        f"the network engine (hivemind) cannot be loaded here: {e}. It runs on Linux and macOS (arm64); on Windows use WSL2"
    ) from e

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

    from muletrain.network.identity import Key
    from muletrain.wire.frame import Buffer

MAX_CALL = 1 << 20
CALL = "muletrain/call"
MAX_METHOD = 64
"""Characters of a method that are repeated to who calls it."""
OK, FAILED, STRANGER = b"\0", b"\1", b"\2not admitted to this run"
SYNC_S, SYNC_TIMEOUT_S = 10.0, 30.0
"""Between questions for renewals, each to one member drawn by chance: all know of one after about log2(members) of
them."""
ENTER_TIMEOUT_S = 12.0
SELF_QUEUE = 1024
"""Frames to ourselves waiting for the handler."""


class Libp2pNetwork:
    """``Network`` over libp2p. Create with ``create``."""

    def __init__(self, p2p: GatedP2P, max_frame_bytes: int, on_refusal: RefusalHandler | None) -> None:
        self._p2p = p2p
        self.peer_id: PeerId = p2p.peer_id.to_base58()
        self.counters = Counters()
        self._delivery = Delivery(on_refusal)
        self._lost: LossHandler = lambda peer: None
        self._incoming = Incoming(max_frame_bytes)
        self._pacer = Pacer()
        self._outgoing: dict[tuple[PeerId, Channel], Outgoing] = {}
        self._own: dict[Channel, asyncio.Queue[Frame]] = {}
        self._handlers: dict[str, tuple[CallHandler, bool]] = {}
        self._quota = Quota()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._directory: Directory | None = None
        self._relay: Relay | None = None
        self._maddrs: list[str] = []
        self._on_renewal: Callable[[frozenset[PeerId]], None] = lambda gone: None
        self._on_ban: Callable[[PeerId], None] = lambda peer: None
        self._delivery.offended, self._reports = self._offended, Reports()
        self._closed = False
        self.damage: Callable[[list[Buffer]], list[Buffer]] = lambda buffers: buffers
        """What becomes of a frame on its way: for injected faults."""

    @classmethod
    async def create(
        cls,
        *,
        run_id: str,
        secret: bytes,
        owner: bytes | Key,
        protocol: str,
        folder: Path,
        listen: str = "127.0.0.1",
        port: int = 0,
        announce: tuple[str, ...] = (),
        initial_peers: tuple[str, ...] = (),
        max_frame_bytes: int = MAX_PAYLOAD,
        on_refusal: RefusalHandler | None = None,
        on_renewal: Callable[[frozenset[PeerId]], None] = lambda gone: None,
        on_ban: Callable[[PeerId], None] = lambda peer: None,
        on_relay: Callable[[PeerId, PeerId], None] = lambda peer, relay: None,
        visitor: bool = False,
        private: bool = False,
        carries: bool = True,
    ) -> Libp2pNetwork:
        """Start the daemon, be admitted by an initial peer, join the directory.

        ``folder``: short path for the key ('identity', made if missing) and the daemon's sockets. ``owner``: the run
        owner's public key, or where the owner is, the whole one. ``protocol``: version that both sides must have. A
        ``visitor`` comes for a question: it is let in for some minutes, and keeps no part of the directory.
        ``on_renewal`` is told who is out by the owner's word, ``on_ban`` whom this process leaves out for a while
        (``offences.py``), ``on_relay`` whom it reaches by way of whom. ``private``: no other machine can connect to
        this one. ``carries``: it relays for others. Raises AdmissionError, PeerUnreachable, or NetworkError when the
        daemon does not start.
        """
        logging.getLogger("hivemind").setLevel(logging.ERROR)
        daemon = await Daemon.start(folder, "127.0.0.1" if private else listen, port, announce, private=private)
        p2p, key = daemon.p2p, daemon.key
        self = cls(p2p, max_frame_bytes, on_refusal)
        self._on_renewal, self._on_ban = on_renewal, on_ban
        try:
            self._maddrs = await daemon.addresses()
            self._relay = Relay(
                p2p,
                daemon.inside(self._maddrs),
                self._maddrs,
                private=private,
                carries=carries,
                told=on_relay,
                offended=self._misused,
            )
            trust = Trust(run_id, owner, secret, key)
            gate = Gate(self.peer_id, run_id, protocol, trust, self._refused, self._renewed, visitor=visitor)
            await self._start(gate, Records(run_id, key, trust), initial_peers, visitor)
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self, gate: Gate, records: Records, initial_peers: tuple[str, ...], visitor: bool) -> None:
        await self._p2p.open_gate(gate)
        await self._p2p._client.add_unary_handler(CALL, self._on_call)
        await self._p2p.add_binary_stream_handler(FRAMES, self._on_stream)
        assert self._relay is not None
        await self._relay.open()
        reached = await self._enter(initial_peers) if initial_peers else []
        self._directory = await Directory.join(self._p2p, records, reached, visitor=visitor)
        self._maddrs = [
            str(a) for a in await self._p2p.get_visible_maddrs(latest=True)
        ]  # what a router opened for us, too
        if not visitor:
            self._keep(asyncio.create_task(self._hear_renewals()))

    async def _enter(self, addresses: tuple[str, ...]) -> list[str]:
        """Be admitted by at least one of ``addresses``; the ones that did."""
        reached, problems, no_entry = [], list[str](), list[AdmissionError]()
        by_peer: dict[str, list[str]] = {}
        for address in addresses:
            by_peer.setdefault(address.rsplit("/p2p/", 1)[-1], []).append(address)
        entering = (self.connect(known, timeout_s=ENTER_TIMEOUT_S) for known in by_peer.values())
        for known, result in zip(
            by_peer.values(), await asyncio.gather(*entering, return_exceptions=True), strict=True
        ):
            match result:
                case str():
                    reached.append("/p2p/" + result)
                case NetworkError():
                    problems.append(f"{', '.join(dict.fromkeys(map(_port, known)))} ({result})")
                case AdmissionError():
                    no_entry.append(result)
                case BaseException():
                    raise result
        if not reached and no_entry:
            raise no_entry[0]
        if not reached:
            raise PeerUnreachable(
                "no member of the run could be reached from here. The run has to be there, and one of these open to this machine:\n  "
                + "\n  ".join(problems)
            )
        return reached

    # Calls ----------------------------------------------------------------------------------------------------------

    def serve(self, method: str, handler: CallHandler, *, free: bool = False) -> None:
        self._handlers[method] = handler, free

    async def call(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        if len(payload) > MAX_CALL:
            raise ProtocolError(f"{method}: {len(payload)} bytes; a call carries at most {MAX_CALL}")
        self._p2p.check_daemon()
        try:
            answer = await reaching(self._ask(peer, method, payload), timeout_s, f"{method} to {peer[-6:]}")
        except AdmissionError as e:
            raise Refused(str(e)) from e
        self._hear(peer)
        if answer[:1] != OK:
            raise Refused(answer[1:].decode(errors="replace") or "refused without a reason")
        return answer[1:]

    async def _ask(self, peer: PeerId, method: str, payload: bytes) -> bytes:
        if peer == self.peer_id:
            return await self._answer(peer, method, payload)
        target, name = PeerID.from_base58(peer), method.encode()
        request = bytes([len(name)]) + name + payload
        await self._p2p.enter(target)
        answer = await self._p2p.exchange(target, CALL, request)
        if answer[:1] == STRANGER[:1]:  # it was restarted and does not know us any more
            self._p2p.gate.forget_entry(peer)
            await self._p2p.enter(target)
            answer = await self._p2p.exchange(target, CALL, request)
        return answer

    async def _on_call(self, request: bytes, remote: PeerID) -> bytes:
        sender = remote.to_base58()
        if not self._p2p.gate.check(sender, "call"):
            return STRANGER
        self._hear(sender)
        end = 1 + request[0] if request else 0
        if not 1 < end <= len(request) or len(request) - end > MAX_CALL:
            self._refused(sender, "malformed call")
            self._offended(sender)
            return FAILED + b"malformed call"
        answer = await self._answer(sender, request[1:end].decode(errors="replace"), request[end:])
        return answer if self._p2p.gate.admitted(sender) else STRANGER

    async def _answer(self, sender: PeerId, method: str, payload: bytes) -> bytes:
        handler, free = self._handlers.get(method, (None, False))
        if handler is None:
            return FAILED + f"'{method[:MAX_METHOD]}' is not served here (not yet, or not any more)".encode()
        try:
            own = sender == self.peer_id
            answer = OK + await (
                handler(sender, payload) if own else self._quota.answer(sender, handler, payload, free=free)
            )
        except MuletrainError as e:
            if isinstance(e, ProtocolError):
                self._refused(sender, f"{method}: {e}")
            if isinstance(e, Malformed):
                self._offended(sender)
            return FAILED + str(e).encode()
        except Exception as e:  # a bug of ours: loud here, an answer there
            context = {"message": f"answering '{method}' failed", "exception": e}
            asyncio.get_running_loop().call_exception_handler(context)
            return FAILED + f"{method}: internal error, {type(e).__name__}: {e}".encode()
        return answer if len(answer) <= MAX_CALL + 1 else FAILED + f"{method}: the answer is too large".encode()

    # Frames ---------------------------------------------------------------------------------------------------------

    async def send(
        self, peer: PeerId, frame: Frame, *, channel: Channel = Channel.PIPE, timeout_s: float = 60.0
    ) -> int:
        if peer == self.peer_id:
            await reaching(self._own_queue(channel).put(reread(frame)), timeout_s, f"{frame.kind} to ourselves")
            return 0
        buffers = self.damage(pack(frame))
        outgoing = self._outgoing.get((peer, channel))
        if outgoing is None:
            outgoing = self._outgoing[peer, channel] = Outgoing(
                self._p2p, peer, channel, self._pacer, self._hear, self._ended
            )
        try:
            await outgoing.send(buffers, timeout_s)
        except AdmissionError as e:
            raise Refused(str(e)) from e
        self.counters.sent[peer, frame.kind] += size(buffers)
        return size(buffers)

    def receive(self, handler: FrameHandler, kinds: Collection[str] = (), bounds: Bounds | None = None) -> None:
        self._delivery.receive(handler, kinds, bounds)

    def on_refusal(self, handler: RefusalHandler) -> None:
        self._delivery.refused = handler

    def on_lost(self, handler: LossHandler) -> None:
        self._lost = handler

    def heard_s(self, peer: PeerId) -> float:
        return self._incoming.heard.get(peer, float("-inf"))

    def queued_s(self, peer: PeerId) -> float:
        return self._pacer.queued_s(peer)

    def give_up(self, peer: PeerId) -> None:
        self._pacer.give_up(peer)

    def moved(self) -> int:
        return self._incoming.moved + self._pacer.moved

    def _hear(self, peer: PeerId) -> None:
        self._incoming.heard[peer] = asyncio.get_running_loop().time()

    def _ended(self, peer: PeerId) -> None:
        if not self._closed:
            self._lost(peer)

    def _refused(self, remote: str, reason: str) -> None:
        if (report := self._reports.take(reason)) is not None:
            self._delivery.refused(remote, report)

    async def _on_stream(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the stream ends or brings something wrong; a correct peer opens another."""
        task = asyncio.current_task()
        assert task is not None
        self._keep(task)
        sender = info.peer_id.to_base58()
        try:
            door = self._delivery.door(sender)
            async with aclosing(self._incoming.frames(sender, reader, writer, door)) as frames:
                async for frame in frames:
                    if not self._p2p.gate.admitted(sender):
                        return
                    self.counters.received[sender, frame.kind] += sum(t.nbytes for t in frame.tensors)
                    if not await self._delivery.deliver(sender, frame):
                        return
            self._ended(sender)
        except ProtocolError as e:
            self._refused(sender, str(e))
            if isinstance(e, Malformed):
                self._offended(sender)
        except asyncio.CancelledError:
            if not self._closed:
                raise
            # asyncio's stream server complains about a cancelled callback

    def _own_queue(self, channel: Channel) -> asyncio.Queue[Frame]:
        if channel not in self._own:
            self._own[channel] = asyncio.Queue(SELF_QUEUE)
            self._keep(asyncio.create_task(self._drain_own(self._own[channel])))
        return self._own[channel]

    async def _drain_own(self, queue: asyncio.Queue[Frame]) -> None:
        while True:
            await self._delivery.deliver(self.peer_id, await queue.get())

    # Renewals -------------------------------------------------------------------------------------------------------

    @property
    def trust(self) -> Trust:
        return self._p2p.gate.trust

    def certificate(self, peer: PeerId) -> bytes:
        """What ``peer`` showed us, as ``trust.chain_from`` reads it."""
        return chain_bytes(self._p2p.gate.certificate(peer))

    def renew(self, kept: Iterable[PeerId], secret: bytes) -> None:
        """The owner's act (where its key is): only these stay. Nobody else knows it before ``tell_renewal``."""
        self._p2p.gate.adopt(self.trust.renew(kept, secret), secret)

    async def tell_renewal(self, peer: PeerId, *, timeout_s: float) -> None:
        """Bring the last renewal to a peer that it names. Raises what ``call`` raises, and AdmissionError."""
        await reaching(self._p2p.tell(PeerID.from_base58(peer)), timeout_s, f"telling {peer[-6:]} who stays")

    def _renewed(self, gone: frozenset[PeerId]) -> None:
        for peer in gone:
            self._cut(peer)
        self._on_renewal(gone)

    def _offended(self, peer: PeerId) -> None:
        """It sent what no correct peer sends."""
        if peer != self.peer_id and self._p2p.gate.offences.count(peer):
            self._cut(peer)
            self._on_ban(peer)

    def _misused(self, peer: PeerId, reason: str) -> None:
        self._refused(peer, reason)
        self._offended(peer)

    def _cut(self, peer: PeerId) -> None:
        """Close all streams between us."""
        self._incoming.close(peer)
        if self._relay is not None:
            self._relay.cut(peer)
        for key in [k for k in self._outgoing if k[0] == peer]:
            self._outgoing.pop(key).stop()

    async def _hear_renewals(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S * random.uniform(0.5, 1.5))
            if known := self._p2p.gate.known():
                peer = random.choice(known)
                with suppress(MuletrainError):
                    await reaching(self._p2p.sync(PeerID.from_base58(peer)), SYNC_TIMEOUT_S, "hearing of renewals")

    # Directory and addresses ----------------------------------------------------------------------------------------

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        assert self._directory is not None
        await self._directory.announce(key, value, ttl_s)

    async def lookup(self, key: str) -> dict[PeerId, bytes]:
        assert self._directory is not None
        return await self._directory.lookup(key)

    async def lookup_left(self, key: str) -> dict[PeerId, tuple[bytes, float]]:
        """As ``lookup``; with each value, how long it still holds [s]."""
        assert self._directory is not None
        return await self._directory.lookup_left(key)

    def carried(self) -> dict[PeerId, int]:
        assert self._relay is not None
        carried, self._relay.carried = self._relay.carried, Counter()
        return dict(carried)

    def addresses(self) -> list[str]:
        """Loopback addresses only where there is nothing else: no other machine can dial them."""
        return [a for a in self._maddrs if not a.startswith(("/ip4/127.", "/ip6/::1/"))] or self._maddrs

    async def seen_at(self, peer: PeerId) -> str:
        """The IP address at the other end of a connection with ``peer``; '' where there is none but by way of
        others."""
        assert self._relay is not None
        if self._relay.indirect(peer):
            return ""
        known = (p for p in await self._p2p._client.list_peers() if p.peer_id.to_base58() == peer)
        parts = (str(a).split("/") for p in known for a in p.addrs)
        return next((part[2] for part in parts if part[1:2] in (["ip4"], ["ip6"])), "")

    async def connect(self, addresses: list[str], *, timeout_s: float) -> PeerId:
        try:
            peer = addresses[0].rsplit("/p2p/", 1)[1]
            target = PeerID.from_base58(peer)
            transports = [Multiaddr(a.rsplit("/p2p/", 1)[0]) for a in addresses]
        except Exception as e:  # multiaddr's parser raises many types
            raise PeerUnreachable(f"{addresses[:1]}: not the address of a peer (it should end in /p2p/ID)") from e
        self._p2p.check_daemon()
        await reaching(self._dial(target, transports), timeout_s, f"dialling {addresses[0]}")
        return peer

    async def _dial(self, target: PeerID, transports: list[Multiaddr]) -> None:
        await self._p2p.dial(target, transports)
        await self._p2p.enter(target)

    # The end --------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for outgoing in self._outgoing.values():
            outgoing.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._relay is not None:
            await self._relay.close()
        if self._directory is not None and not self._p2p.daemon_ended:
            await self._directory.close()
        await end_daemon(self._p2p)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _port(address: str) -> str:
    """What a firewall would have to let through."""
    match address.split("/"):
        case ["", _, host, "tcp", port, *_]:
            return f"TCP port {port} of {host}"
    return address
