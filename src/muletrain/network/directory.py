"""The directory, hivemind's DHT among the members, gives hints, never decisions.

hivemind's nodes store and forward records of any peer. So each peer signs records: the signature covers the run, the
key, the peer, the value and the expiry. The signature is checked when a record is stored and when a record is read.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgpack
from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import get_dht_time

from muletrain.errors import AdmissionError, DeadlineExceeded, NetworkError, ProtocolError
from muletrain.network.identity import SIGNATURE, public_half, signed
from muletrain.network.trust import packed_chain, read_chain, unpacked

if TYPE_CHECKING:
    from muletrain.network.gated import GatedP2P
    from muletrain.network.identity import Key
    from muletrain.network.trust import Chain, Trust

MAX_VALUE = 1 << 16
"""Most bytes of a value."""
MAX_TTL_S = 120.0
"""Longest time for which a record is believed, and kept by members [s]."""
SKEW_S = 5.0
"""Tolerated difference of two machines' clocks [s]: hivemind's 3 s and a little more."""
MAX_KEYS = 1024
"""Most keys kept for other members; the first to expire go first."""
TIMEOUT_S = 20.0
"""Longest time of one question [s]."""


class Records(RecordValidatorBase):  # type: ignore[misc]  # hivemind is untyped
    """Signs our records, opens the rest, and refuses wrong ones before hivemind stores anything."""

    def __init__(self, run_id: str, key: Key, trust: Trust) -> None:
        self._run_id, self._key, self._trust = run_id, key, trust

    def make(self, key: str, value: bytes, expires: float) -> bytes:
        """Our signed record of ``value``. ``expires``: by ``get_dht_time``."""
        bound = (self._run_id, _key_id(key), self._key.peer_id, expires, value)
        signature = self._key.sign("directory", *bound)
        packed: bytes = msgpack.packb([value, signature, packed_chain(self._trust.chain)])
        return packed

    def read(self, key: str, peer: Any, record: Any, expires: float) -> bytes | None:
        """The value of ``record``, or None unless signed by ``peer``, a current member."""
        value, chain = self._opened(_key_id(key), peer, record, expires) or (None, ())
        return value if self._trust.current(peer, chain) else None

    def _opened(self, key_id: bytes, peer: Any, record: Any, expires: float) -> tuple[bytes, Chain] | None:
        """The value and the maker's chain. None unless signed by ``peer``, once admitted, for this key, run and
        expiry."""
        public = public_half(peer)
        if public is None or not isinstance(record, bytes) or not expires <= get_dht_time() + MAX_TTL_S + SKEW_S:
            return None
        try:
            match unpacked(record):
                case [bytes() as value, bytes() as signature, content] if len(signature) == SIGNATURE:
                    chain, bound = read_chain(content), (self._run_id, key_id, peer, expires, value)
                    genuine = len(value) <= MAX_VALUE and self._trust.genuine(peer, chain)
                    return (value, chain) if genuine and signed(public, signature, "directory", *bound) else None
        except AdmissionError:  # no certificate
            pass
        return None

    def validate(self, record: DHTRecord) -> bool:
        """Is ``record`` genuine? hivemind asks before storing a record for another peer, and before taking one.

        Records of removed peers pass: for one wrong record hivemind would refuse a whole answer."""
        peer, value = unpacked(record.subkey), unpacked(record.value)  # no subkey: hivemind's b"" is no msgpack
        return self._opened(record.key, peer, value, record.expiration_time) is not None


class Directory:
    """Values that members announce about themselves, each under a peer id. ``node``: hivemind's."""

    def __init__(self, node: DHTNode, records: Records, own: str) -> None:
        self.node, self._records, self._own = node, records, own

    @classmethod
    async def join(cls, p2p: GatedP2P, records: Records, known: list[str], *, visitor: bool = False) -> Directory:
        """Join through the members at the addresses ``known``; without any, begin a directory. A ``visitor`` stores no
        foreign records, and is not remembered by members."""
        node = await DHTNode.create(
            p2p=p2p,
            initial_peers=known or None,
            ensure_bootstrap_success=False,
            strict=False,
            client_mode=visitor,
            record_validator=records,
            cache_locally=False,
            cache_on_store=False,
            cache_nearest=0,
        )
        node.protocol.storage.maxsize, node.protocol.cache.maxsize = (
            MAX_KEYS,
            0,
        )  # a cached record would hide newer ones
        return cls(node, records, p2p.peer_id.to_base58())

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        """Store ``value`` for ``ttl_s`` seconds, at most MAX_TTL_S. Raises ProtocolError for too large a value,
        NetworkError when no member stored the value."""
        if len(value) > MAX_VALUE:
            raise ProtocolError(f"directory: {len(value)} bytes under '{key}'; at most {MAX_VALUE}")
        expires = get_dht_time() + min(ttl_s, MAX_TTL_S)
        record = self._records.make(key, value, expires)
        stored = await _within(self.node.store(key, record, expires, subkey=self._own), f"storing '{key}'")
        # hivemind also says no when the record came round through a third node first
        if not stored and (await self.lookup(key)).get(self._own) != value:
            raise NetworkError(
                f"directory: no member stored '{key}' for us; are this machine's clock and the others' within 3 s of each other?"
            )

    async def lookup(self, key: str) -> dict[str, bytes]:
        """The values under ``key``, by the member that announced each; wrong records are left out."""
        return {peer: value for peer, (value, _) in (await self.lookup_left(key)).items()}

    async def lookup_left(self, key: str) -> dict[str, tuple[bytes, float]]:
        """As ``lookup``; with each value, the remaining validity [s]."""
        found = await _within(self.node.get(key, latest=True), f"looking up '{key}'")
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        now = get_dht_time()
        values = {
            p: (self._records.read(key, p, e.value, e.expiration_time), e.expiration_time) for p, e in entries.items()
        }
        return {peer: (value, until - now) for peer, (value, until) in values.items() if value is not None}

    async def close(self) -> None:
        with suppress(Exception):  # hivemind's node may be half way through a refresh
            async with asyncio.timeout(5.0):
                await self.node.shutdown()


async def _within(work: Any, what: str) -> Any:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(f"directory: {what} took more than {TIMEOUT_S:.0f} s") from None


def _key_id(key: str) -> bytes:
    encoded: bytes = DHTID.generate(source=key).to_bytes()
    return encoded
