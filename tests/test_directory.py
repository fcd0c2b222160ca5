"""Records of the directory: only its peer signs one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer

from muletrain.network.directory import MAX_TTL_S, Records
from muletrain.network.identity import Key, public_half
from muletrain.network.libp2p import Libp2pNetwork
from muletrain.network.trust import Trust
from tests.daemons import SECRET, world


async def bring(to: Libp2pNetwork, by: Libp2pNetwork, key: str, subkey: Any, record: Any, expires: float) -> list[bool]:
    """What ``to`` says to a record that ``by`` asks it to store, past everything that an honest peer checks before."""
    protocol = by.directory.node.protocol
    key_id, value = DHTID.generate(source=key), MSGPackSerializer.dumps(record)
    stored: list[bool] = await protocol.call_store(PeerID.from_base58(to.peer_id), [key_id], [value], expires, [subkey])
    return stored


def test_only_its_peer_signs_a_record() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            forger = await w.open(a)
            victim, own = Key.new(), Key.at(w.homes[forger.peer_id] / "identity")
            soon, late = time.time() + 60, time.time() + MAX_TTL_S + 30

            def made(
                by: Key = own, run: str = "run", key: str = "k", value: bytes = b"v", expires: float = soon
            ) -> bytes:
                return Records(run, by, forger.trust).make(key, value, expires)

            def of_nobody(by: Key) -> bytes:
                return Records("run", by, Trust("run", Key.new(), SECRET, by)).make("k", b"v", soon)

            fine = made()
            assert await bring(a, forger, "k", forger.peer_id, fine, soon) == [True]
            wrong = {
                "for another": (victim.peer_id, made(), soon),
                "without a peer": (None, made(), soon),
                "for nobody": ("me", made(), soon),
                "unsigned": (forger.peer_id, b"v", soon),
                "no bytes": (forger.peer_id, {"v": 1}, soon),
                "of another run": (forger.peer_id, made(run="other"), soon),
                "from another key": (forger.peer_id, made(key="j"), soon),
                "made to live longer": (forger.peer_id, fine, soon + 1),
                "about an identity of its own": (victim.peer_id, made(victim), soon),
                "with a certificate of its own": (victim.peer_id, of_nobody(victim), soon),
                "to live for ever": (forger.peer_id, made(expires=late), late),
                "to live for NaN": (forger.peer_id, made(expires=float("nan")), float("nan")),
            }
            for name, (subkey, record, expires) in wrong.items():
                assert await bring(a, forger, "k", subkey, record, expires) == [False], name
            assert await a.lookup("k") == {forger.peer_id: b"v"}
            # its own node believes it; whoever reads from there does not
            storage: Any = forger.directory.node.protocol.storage
            storage.store(
                DHTID.generate(source="j"), MSGPackSerializer.dumps(made(key="k")), soon, subkey=victim.peer_id
            )
            assert await a.lookup("j") == {}

    asyncio.run(scenario())


@pytest.mark.parametrize("peer", ["", "me", 7, None, b"x", "0OIl", "12D3KooW", "Qm" + "a" * 44, "x" * 5000])
def test_what_is_no_peer_id_has_no_key(peer: Any) -> None:
    assert public_half(peer) is None


def test_a_peer_id_holds_the_public_key() -> None:
    key = Key.new()
    assert public_half(key.peer_id) == key.public
