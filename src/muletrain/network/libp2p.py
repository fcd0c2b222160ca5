"""The real network: hivemind's libp2p daemon and DHT, in our event loop (no forks)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from muletrain.clock import loop_time_s
from muletrain.errors import (
    AdmissionError,
    Malformed,
    MuletrainError,
    NetworkError,
    PeerUnreachable,
    ProtocolError,
    Refused,
)
from muletrain.network.answers import MAX_CALL, Answers
from muletrain.network.base import Bounds, CallHandler, Channel, FrameHandler, LossHandler, PeerId, RefusalHandler
from muletrain.network.delivery import Counters, Delivery
from muletrain.network.jobs import Jobs
from muletrain.network.pacing import Pacer
from muletrain.wire.frame import MAX_PAYLOAD, Frame, pack, reread, size

try:
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    from muletrain.network.daemon import Daemon, end_daemon
    from muletrain.network.directory import Directory, Records
    from muletrain.network.gate import Gate
    from muletrain.network.gated import GatedP2P, reaching
    from muletrain.network.offences import Reports
    from muletrain.network.relay import Relay
    from muletrain.network.streams import FRAMES, Incoming, Outgoing, greet
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

CALL = "muletrain/call"
OK, FAILED, STRANGER = b"\0", b"\1", b"\2not admitted to this run"
SELF_QUEUE = 1024
"""Most frames to ourselves that wait for the handler."""
ENTER_TIMEOUT_S = 12.0
"""Longest time in which one peer is dialled and admits us [s]."""


class Libp2pNetwork:
    """``Network`` over libp2p. Create with ``create``.

    The request of a call is a method's length (one byte), the method and the payload; an answer is OK or FAILED, then
    the answer or a reason. Frames travel on streams, by peer and channel."""

    directory: Directory
    relay: Relay

    def __init__(
        self,
        p2p: GatedP2P,
        max_frame_bytes: int,
        on_refusal: RefusalHandler | None,
        on_renewal: Callable[[frozenset[PeerId]], None],
        on_ban: Callable[[PeerId], None],
    ) -> None:
        self.p2p = p2p
        """The daemon's client: streams and calls below this class's."""
        self.peer_id: PeerId = p2p.peer_id.to_base58()
        self._on_renewal, self._on_ban = on_renewal, on_ban
        self._delivery = Delivery(on_refusal, self._offended, Reports())
        self._answers = Answers(self.peer_id, self._delivery)
        self.counters, self._pacer = Counters(), Pacer()
        self._losses: dict[str, LossHandler] = {}
        """See ``Network.on_lost``."""
        self._incoming = Incoming(max_frame_bytes)
        self._outgoing: dict[tuple[PeerId, Channel], Outgoing] = {}
        self._own: dict[Channel, asyncio.Queue[Frame]] = {}
        self._jobs = Jobs()
        self._damaging = False
        self._maddrs: list[str] = []
        self._renewals: asyncio.Task[None] | None = None
        self._closed = False

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
        """Start the daemon, be admitted by an initial peer, and join the directory.

        ``folder``: a short path for the key ('identity', made if missing) and the daemon's sockets. ``owner``: the run
        owner's public key, or the whole key on the owner's machine. ``protocol``: the version that both sides must
        have. A ``visitor`` comes for a question, is admitted for some minutes and keeps no part of the directory.
        ``on_renewal`` is told the removed peers after a renewal, ``on_ban`` which peer this process bans
        (``offences``), ``on_relay`` (peer, relay) of each way found. ``private``: unreachable from remote machines.
        ``carries``: relay for other peers. Raises AdmissionError, PeerUnreachable, or NetworkError if the daemon does
        not start.
        """
        logging.getLogger("hivemind").setLevel(logging.ERROR)
        daemon = await Daemon.start(folder, "127.0.0.1" if private else listen, port, announce, private=private)
        p2p, key = daemon.p2p, daemon.key
        self = cls(p2p, max_frame_bytes, on_refusal, on_renewal, on_ban)
        try:
            self._maddrs = await daemon.addresses()
            inside = daemon.inside(self._maddrs)
            self.relay = Relay(
                p2p, inside, self._maddrs, self._delivery, private=private, carries=carries, told=on_relay
            )
            trust = Trust(run_id, owner, secret, key)
            report, renewed = self._delivery.report, self._renewed
            await p2p.open_gate(
                Gate(self.peer_id, run_id, protocol, trust, report, renewed, visitor=visitor), self.relay.ways
            )
            await self._start(Records(run_id, key, trust), initial_peers, visitor)
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self, records: Records, initial_peers: tuple[str, ...], visitor: bool) -> None:
        await self.p2p.answer_calls(CALL, self._on_call)
        await self.p2p.add_binary_stream_handler(FRAMES, self._on_stream)
        await self.relay.open()
        reached = await _enter(self, initial_peers) if initial_peers else []
        self.directory = await Directory.join(self.p2p, records, reached, visitor=visitor)
        # ports that a router opened for us, too
        self._maddrs = [str(a) for a in await self.p2p.get_visible_maddrs(latest=True)]
        if not visitor:
            self._renewals = asyncio.create_task(self.p2p.hear_renewals())

    # Calls ----------------------------------------------------------------------------------------------------------

    def serve(self, method: str, handler: CallHandler, *, free: bool = False) -> None:
        self._answers.serve(method, handler, free=free)

    async def call(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Raises as ``Network.call``, and ProtocolError for too large a payload."""
        if len(payload) > MAX_CALL:
            raise ProtocolError(f"{method}: {len(payload)} bytes; a call carries at most {MAX_CALL}")
        self.p2p.check_daemon()
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
        await self.p2p.enter(target)
        answer = await self.p2p.exchange(target, CALL, request)
        if answer[:1] == STRANGER[:1]:  # the peer was restarted and does not know us any more
            self.p2p.gate.forget_entry(peer)
            await self.p2p.enter(target)
            answer = await self.p2p.exchange(target, CALL, request)
        return answer

    async def _on_call(self, request: bytes, remote: PeerID) -> bytes:
        sender = remote.to_base58()
        if not self.p2p.gate.check(sender, "call"):
            return STRANGER
        self._hear(sender)
        end = 1 + request[0] if request else 0
        if not 1 < end <= len(request) or len(request) - end > MAX_CALL:
            self._delivery.refuse(sender, Malformed("malformed call"))
            return FAILED + b"malformed call"
        answer = await self._answer(sender, request[1:end].decode(errors="replace"), request[end:])
        return answer if self.p2p.gate.admitted(sender) else STRANGER

    async def _answer(self, sender: PeerId, method: str, payload: bytes) -> bytes:
        answered, answer = await self._answers.answer(sender, method, payload)
        return (OK if answered else FAILED) + answer

    # Frames ---------------------------------------------------------------------------------------------------------

    async def send(
        self, peer: PeerId, frame: Frame, *, channel: Channel = Channel.PIPE, timeout_s: float = 60.0
    ) -> int:
        if peer == self.peer_id:
            await reaching(self._own_queue(channel).put(reread(frame)), timeout_s, f"{frame.kind} to ourselves")
            return 0
        buffers = self._damaged(pack(frame))
        outgoing = self._outgoing.get((peer, channel))
        if outgoing is None:
            outgoing = Outgoing(self.p2p, peer, channel, self._pacer, self._hear, self._ended)
            self._outgoing[peer, channel] = outgoing
        try:
            await outgoing.send(buffers, timeout_s)
        except AdmissionError as e:
            raise Refused(str(e)) from e
        self.counters.sent[peer, frame.kind] += size(buffers)
        return size(buffers)

    def damage_next(self) -> None:
        """Flip a bit in the prefix of the next frame to another peer, as if the transport's check had failed: for injected
        faults."""
        self._damaging = True

    def _damaged(self, buffers: list[Buffer]) -> list[Buffer]:
        if not self._damaging:
            return buffers
        self._damaging = False
        first = bytes(buffers[0])
        return [bytes([first[0] ^ 1]) + first[1:], *buffers[1:]]

    def receive(self, handler: FrameHandler, kinds: Collection[str] = (), bounds: Bounds | None = None) -> None:
        self._delivery.receive(handler, kinds, bounds)

    def on_refusal(self, handler: RefusalHandler) -> None:
        self._delivery.refused = handler

    def on_lost(self, handler: LossHandler, whose: str = "members") -> None:
        self._losses[whose] = handler

    def heard_s(self, peer: PeerId) -> float:
        return self._incoming.heard.get(peer, float("-inf"))

    def _hear(self, peer: PeerId) -> None:
        """Something of ``peer`` came now."""
        self._incoming.heard[peer] = loop_time_s()

    def queued_s(self, peer: PeerId) -> float:
        return self._pacer.queued_s(peer)

    def give_up(self, peer: PeerId) -> None:
        self._pacer.give_up(peer)

    def moved(self) -> int:
        return self._incoming.moved + self._pacer.moved

    def _ended(self, peer: PeerId, channel: Channel) -> None:
        if not self._jobs.over:
            for handler in self._losses.values():
                handler(peer, channel)

    async def _on_stream(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive until the stream ends or brings something wrong; a correct peer opens another."""
        sender = info.peer_id.to_base58()
        with self._jobs.serving():
            try:
                channel = await greet(reader, writer)
            except ProtocolError as e:
                self._delivery.refuse(sender, e)
                return
            except (asyncio.IncompleteReadError, ConnectionError):
                return  # no frame was sent on it
            await self._receive(sender, channel, reader, writer)
            self._ended(sender, channel)

    async def _receive(
        self, sender: PeerId, channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            frames = self._incoming.frames(sender, channel, reader, writer, self._delivery.door(sender))
            async with aclosing(frames):
                async for frame in frames:
                    if not self.p2p.gate.admitted(sender):
                        return
                    self.counters.received[sender, frame.kind] += sum(t.nbytes for t in frame.tensors)
                    if not await self._delivery.deliver(sender, frame):
                        return
        except ProtocolError as e:
            self._delivery.refuse(sender, e)

    def _own_queue(self, channel: Channel) -> asyncio.Queue[Frame]:
        if channel not in self._own:
            self._own[channel] = asyncio.Queue(SELF_QUEUE)
            self._jobs.spawn(self._drain_own(self._own[channel]))
        return self._own[channel]

    async def _drain_own(self, queue: asyncio.Queue[Frame]) -> None:
        while True:
            await self._delivery.deliver(self.peer_id, await queue.get())

    # Who belongs to the run -----------------------------------------------------------------------------------------

    @property
    def trust(self) -> Trust:
        return self.p2p.gate.trust

    def certificate(self, peer: PeerId) -> bytes:
        """The certificate that ``peer`` showed us, for ``trust.chain_from``."""
        return chain_bytes(self.p2p.gate.certificate(peer))

    def renew(self, kept: Iterable[PeerId], secret: bytes) -> None:
        """End the membership of all but ``kept``, on the owner's machine. ``tell_renewal`` informs the peers."""
        self.p2p.gate.adopt(self.trust.renew(kept, secret), secret)

    async def tell_renewal(self, peer: PeerId, *, timeout_s: float) -> None:
        """Bring the last renewal to a peer named there. Raises the errors of ``call``, and AdmissionError."""
        await reaching(self.p2p.tell(PeerID.from_base58(peer)), timeout_s, f"telling {peer[-6:]} who stays")

    def _renewed(self, gone: frozenset[PeerId]) -> None:
        for peer in gone:
            self._cut(peer)
        self._on_renewal(gone)

    def _offended(self, peer: PeerId) -> None:
        """Count a message that no correct peer sends, and ban ``peer`` after too many."""
        if peer != self.peer_id and self.p2p.gate.offences.count(peer):
            self._cut(peer)
            self._on_ban(peer)

    def _cut(self, peer: PeerId) -> None:
        self._incoming.close(peer)
        for key in [k for k in self._outgoing if k[0] == peer]:
            self._outgoing.pop(key).stop()
        self.relay.cut(peer)

    # Directory and addresses ----------------------------------------------------------------------------------------

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        await self.directory.announce(key, value, ttl_s)

    async def lookup(self, key: str) -> dict[PeerId, bytes]:
        return await self.directory.lookup(key)

    def carried(self) -> dict[PeerId, int]:
        return dict(self.relay.lent.take_carried())

    def addresses(self) -> list[str]:
        """Loopback addresses only if there is nothing else: no remote machine can dial loopback."""
        return [a for a in self._maddrs if not a.startswith(("/ip4/127.", "/ip6/::1/"))] or self._maddrs

    async def seen_at(self, peer: PeerId) -> str:
        """The IP address at the far end of a connection with ``peer``; '' if only reached through relays."""
        if self.relay.pipes.to(peer):
            return ""
        parts = (address.split("/") for address in (await self.p2p.connected()).get(peer, []))
        return next((part[2] for part in parts if part[1:2] in (["ip4"], ["ip6"])), "")

    async def connect(self, addresses: list[str], *, timeout_s: float) -> PeerId:
        try:
            peer = addresses[0].rsplit("/p2p/", 1)[1]
            target = PeerID.from_base58(peer)
            transports = [Multiaddr(a.rsplit("/p2p/", 1)[0]) for a in addresses]
        except Exception as e:  # multiaddr's parser raises many types
            raise PeerUnreachable(f"{addresses[:1]}: not the address of a peer (it should end in /p2p/ID)") from e
        self.p2p.check_daemon()
        await reaching(self._dial(target, transports), timeout_s, f"dialling {addresses[0]}")
        return peer

    async def _dial(self, target: PeerID, transports: list[Multiaddr]) -> None:
        await self.p2p.dial(target, transports)
        await self.p2p.enter(target)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._renewals is not None:
            self._renewals.cancel()
            await asyncio.gather(self._renewals, return_exceptions=True)
        self._jobs.cancel()
        for outgoing in self._outgoing.values():
            outgoing.stop()
        await self._jobs.end()
        if hasattr(self, "relay"):
            await self.relay.close()
        if hasattr(self, "directory") and self.p2p.daemon.returncode is None:
            await self.directory.close()
        await end_daemon(self.p2p)


async def _enter(net: Libp2pNetwork, addresses: Iterable[str]) -> list[str]:
    """Connect with the peers at ``addresses``, all at once; '/p2p/ID' of each that admitted us. Raises AdmissionError
    or PeerUnreachable if none did."""
    by_peer: dict[str, list[str]] = {}
    for address in addresses:
        by_peer.setdefault(address.rsplit("/p2p/", 1)[-1], []).append(address)
    entering = (net.connect(known, timeout_s=ENTER_TIMEOUT_S) for known in by_peer.values())
    results = await asyncio.gather(*entering, return_exceptions=True)
    reached, problems, no_entry = [], list[str](), list[AdmissionError]()
    for known, result in zip(by_peer.values(), results, strict=True):
        match result:
            case str():
                reached.append("/p2p/" + result)
            case NetworkError():
                problems.append(f"{', '.join(dict.fromkeys(map(_port, known)))} ({result.why})")
            case AdmissionError():
                no_entry.append(result)
            case BaseException():
                raise result
    if not reached and no_entry:
        raise no_entry[0]
    if not reached:
        raise PeerUnreachable(
            "no member of the run could be reached from here. The run must be up (a resumed run has a new ticket), and one of "
            "these ports open to this machine:\n  " + "\n  ".join(problems)
        )
    return reached


def _port(address: str) -> str:
    """The port of ``address`` in a firewall's words."""
    match address.split("/"):
        case ["", _, host, "tcp", port, *_]:
            return f"TCP port {port} of {host}"
    return address
