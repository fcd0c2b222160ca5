"""Who is in: strangers, forgers, the kicked, and those who send rubbish, on real daemons."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer

from muletrain.network.base import Frame
from muletrain.network.directory import MAX_TTL_S, Records
from muletrain.network.gated import ADMIT
from muletrain.network.identity import Key, public_half
from muletrain.network.libp2p import CALL, Libp2pNetwork
from muletrain.network.membership import Membership
from muletrain.network.streams import FRAMES
from muletrain.wire.frame import pack
from tests.test_network import SECRET, world

# Strangers ----------------------------------------------------------------------------------------------------------------

STRANGER = """
import asyncio, json, sys, time
from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2

async def outcome(work):
    try:
        return repr(await asyncio.wait_for(work, 10))
    except Exception as e:
        return "error: " + repr(e)

async def main():
    member, address, call, admit, frames, hello = sys.argv[1:]
    p2p = await P2P.create(initial_peers=[address])
    target, client = PeerID.from_base58(member), p2p._client
    async def stream():
        _, reader, writer = await p2p.call_binary_stream_handler(target, frames)
        writer.write(bytes.fromhex(hello))
        return await reader.read()
    def dht(name, request):
        return p2p.call_protobuf_handler(target, "DHTProtocol.rpc_" + name, request, dht_pb2.FindResponse)
    key, tag = DHTID.generate(source="plans").to_bytes(), b""
    store = dht_pb2.StoreRequest(keys=[key], subkeys=[tag], values=[b"x"], expiration_time=[time.time() + 60], in_cache=[False])
    said = {
        "call": await outcome(client.call_unary_handler(target, call, b"\4echohello")),
        "admit": await outcome(client.call_unary_handler(target, admit, b"let me in")),
        "stream": await outcome(stream()),
        "ping": await outcome(dht("ping", dht_pb2.PingRequest())),
        "find": await outcome(dht("find", dht_pb2.FindRequest(keys=[key]))),
        "store": await outcome(dht("store", store)),
    }
    node = await DHTNode.create(p2p=p2p, initial_peers=[address], ensure_bootstrap_success=False, strict=False)
    said["got"] = await outcome(node.get("plans", latest=True))
    said["node store"] = await outcome(node.store("plans", b"mine", time.time() + 60, subkey=p2p.peer_id.to_base58()))
    said["neighbours"] = repr(list(node.protocol.routing_table.uid_to_peer_id))
    said["me"] = p2p.peer_id.to_base58()
    print(json.dumps(said))
    await node.shutdown()
    await p2p.shutdown()

asyncio.run(main())
"""


def test_a_plain_hivemind_process_gets_nothing() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b = await w.open(a)
            for net in (a, b):
                await net.announce("plans", b"attack at dawn", 60)
            hello = b"".join(pack(Frame("hello", {"channel": "pipe"})) + pack(Frame("x", {"n": 0}))).hex()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", STRANGER, a.peer_id, a.addresses()[0], CALL, ADMIT, FRAMES, hello,
                stdout=asyncio.subprocess.PIPE, env={**os.environ, "TMPDIR": str(w.folder)},
            )  # fmt: skip
            out, _ = await asyncio.wait_for(process.communicate(), 60)
            said = json.loads(out)
            me = said.pop("me")
            assert "not admitted" in said["call"]
            assert "malformed admission" in said["admit"]
            assert said["stream"] == "b''", "not even its hello was acknowledged"
            for rpc in ("ping", "find", "store"):
                assert "error: P2PHandlerError" in said[rpc]
                assert "not admitted" in said[rpc]
            assert said["got"] == "None"
            assert said["neighbours"] == "[]", "it learns of no node of the directory"
            seen = " ".join(said.values())
            assert "dawn" not in seen
            assert b.peer_id not in seen
            for net in (a, b):
                assert await net.lookup("plans") == {n.peer_id: b"attack at dawn" for n in (a, b)}
                assert w.got[net.peer_id].empty()
                storage: Any = net._directory._node.protocol.storage  # type: ignore[union-attr]
                kept = [peer for _, item in storage.items() for peer, _ in item.value.items()]
                assert set(kept) <= {a.peer_id, b.peer_id}, "nothing of a stranger's is kept for others"
            reasons = {why for who, why in w.refusals[a.peer_id] if who == me}
            assert {"call before admission", f"stream {FRAMES} before admission", "malformed admission"} <= reasons
            assert {f"DHTProtocol.rpc_{rpc} before admission" for rpc in ("ping", "find", "store")} <= reasons

    asyncio.run(scenario())


# The directory ------------------------------------------------------------------------------------------------------------


def key_of(net: Libp2pNetwork) -> Key:
    directory: Any = net._directory
    key: Key = directory._records._key
    return key


async def bring(to: Libp2pNetwork, by: Libp2pNetwork, key: str, subkey: Any, record: Any, expires: float) -> list[bool]:
    """What ``to`` says to a record that ``by`` asks it to store, past everything that an honest peer checks before."""
    protocol = by._directory._node.protocol  # type: ignore[union-attr]
    key_id, value = DHTID.generate(source=key), MSGPackSerializer.dumps(record)
    stored: list[bool] = await protocol.call_store(PeerID.from_base58(to.peer_id), [key_id], [value], expires, [subkey])
    return stored


def test_only_its_peer_signs_a_record() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            forger = await w.open(a)
            victim, own = Key.new(), key_of(forger)
            soon, late = time.time() + 60, time.time() + MAX_TTL_S + 30

            def made(
                by: Key = own, run: str = "run", key: str = "k", value: bytes = b"v", expires: float = soon
            ) -> bytes:
                return Records(run, by, forger.members).make(key, value, expires)

            def of_nobody(by: Key) -> bytes:
                return Records("run", by, Membership("run", Key.new(), SECRET, by)).make("k", b"v", soon)

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
            storage: Any = forger._directory._node.protocol.storage  # type: ignore[union-attr]
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
