"""The real network: hivemind's libp2p daemon and DHT, in our event loop (no forks)."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError, PeerUnreachable
from muletrain.network.base import Bounds, CallHandler, Channel, FrameHandler, LossHandler, PeerId, RefusalHandler
from muletrain.network.delivery import Delivery
from muletrain.network.entry import enter
from muletrain.wire.frame import MAX_PAYLOAD, Frame

try:
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    from muletrain.network.calls import Calls
    from muletrain.network.daemon import Daemon, end_daemon
    from muletrain.network.directory import Directory, Records
    from muletrain.network.gate import Gate
    from muletrain.network.gated import GatedP2P, reaching
    from muletrain.network.offences import Reports
    from muletrain.network.relay import Relay
    from muletrain.network.traffic import Traffic
    from muletrain.network.trust import Trust, chain_bytes
except ImportError as e:  # pragma: no cover - platforms without hivemind's wheels
    raise MuletrainError(
        f"the network engine (hivemind) cannot be loaded here: {e}. It runs on Linux and macOS (arm64); on Windows use WSL2"
    ) from e

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

    from muletrain.network.delivery import Counters
    from muletrain.network.identity import Key


class Libp2pNetwork:
    """``Network`` over libp2p. Create with ``create``."""

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
        self._traffic = Traffic(p2p, self.peer_id, self._delivery, max_frame_bytes)
        self._calls = Calls(p2p, self.peer_id, self._delivery, self._traffic.hear)
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
        for part in self._calls, self._traffic, self.relay:
            await part.open()
        reached = await enter(self, initial_peers) if initial_peers else []
        self.directory = await Directory.join(self.p2p, records, reached, visitor=visitor)
        # ports that a router opened for us, too
        self._maddrs = [str(a) for a in await self.p2p.get_visible_maddrs(latest=True)]
        if not visitor:
            self._renewals = asyncio.create_task(self.p2p.hear_renewals())

    # Calls and frames -----------------------------------------------------------------------------------------------

    def serve(self, method: str, handler: CallHandler, *, free: bool = False) -> None:
        self._calls.serve(method, handler, free=free)

    async def call(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        return await self._calls.call(peer, method, payload, timeout_s)

    async def send(
        self, peer: PeerId, frame: Frame, *, channel: Channel = Channel.PIPE, timeout_s: float = 60.0
    ) -> int:
        return await self._traffic.send(peer, frame, channel, timeout_s)

    def receive(self, handler: FrameHandler, kinds: Collection[str] = (), bounds: Bounds | None = None) -> None:
        self._delivery.receive(handler, kinds, bounds)

    def on_refusal(self, handler: RefusalHandler) -> None:
        self._delivery.refused = handler

    def on_lost(self, handler: LossHandler, whose: str = "members") -> None:
        self._traffic.losses[whose] = handler

    def heard_s(self, peer: PeerId) -> float:
        return self._traffic.heard_s(peer)

    def queued_s(self, peer: PeerId) -> float:
        return self._traffic.pacer.queued_s(peer)

    def give_up(self, peer: PeerId) -> None:
        self._traffic.pacer.give_up(peer)

    def moved(self) -> int:
        return self._traffic.moved()

    @property
    def counters(self) -> Counters:
        """Bytes of frames sent and received so far."""
        return self._traffic.counters

    def damage_next(self) -> None:
        """Send the next frame damaged: for injected faults."""
        self._traffic.damage_next()

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
        self._traffic.cut(peer)
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
        await self._traffic.close()
        if hasattr(self, "relay"):
            await self.relay.close()
        if hasattr(self, "directory") and self.p2p.daemon.returncode is None:
            await self.directory.close()
        await end_daemon(self.p2p)
