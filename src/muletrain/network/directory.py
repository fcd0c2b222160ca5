"""The directory: hivemind's DHT among the members. It gives hints, never decisions."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hivemind.dht import DHTNode
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from muletrain.errors import DeadlineExceeded, NetworkError, ProtocolError

if TYPE_CHECKING:
    from muletrain.network.gated import GatedP2P

MAX_VALUE = 1 << 16
TIMEOUT_S = 20.0


class Directory:
    """Values that members announce about themselves, each under its own peer id."""

    def __init__(self, node: DHTNode, own: str) -> None:
        self._node, self._own = node, own

    @classmethod
    async def join(cls, p2p: GatedP2P, known: list[str], *, visitor: bool = False) -> Directory:
        """Through the members at the addresses ``known``; none of them: a directory of our own. A ``visitor`` stores nothing for
        others, and they do not remember it."""
        node = await DHTNode.create(
            p2p=p2p, initial_peers=known or None, ensure_bootstrap_success=False, strict=False, client_mode=visitor
        )  # fmt: skip
        return cls(node, p2p.peer_id.to_base58())

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        """Raises NetworkError when nobody could store it."""
        if len(value) > MAX_VALUE:
            raise ProtocolError(f"directory: {len(value)} bytes under '{key}'; at most {MAX_VALUE}")
        stored = await _within(
            self._node.store(key, value, get_dht_time() + ttl_s, subkey=self._own), f"storing '{key}'"
        )
        # hivemind says no, too, when the record came round through a third node first
        if not stored and (await self.lookup(key)).get(self._own) != value:
            raise NetworkError(
                f"directory: nobody stored '{key}' for us; are this machine's clock and the others' within 3 s of each other?"
            )

    async def lookup(self, key: str) -> dict[str, bytes]:
        """What is known under ``key``; anything that is no announcement is left out."""
        found = await _within(self._node.get(key, latest=True), f"looking up '{key}'")
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        values = {peer: getattr(entry, "value", None) for peer, entry in entries.items() if _is_peer_id(peer)}
        return {peer: v for peer, v in values.items() if isinstance(v, bytes) and len(v) <= MAX_VALUE}

    async def close(self) -> None:
        with suppress(Exception):  # hivemind's node may be half way through a refresh
            await asyncio.wait_for(self._node.shutdown(), 5.0)


async def _within(work: Any, what: str) -> Any:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(f"directory: {what} took more than {TIMEOUT_S:.0f} s") from None


def _is_peer_id(text: Any) -> bool:
    if not isinstance(text, str) or len(text) > 128:
        return False
    try:
        return str(PeerID.from_base58(text).to_base58()) == text
    except Exception:  # the parser raises several types
        return False
