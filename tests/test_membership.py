"""Who is in: strangers, forgers, the kicked, and those who send rubbish, on real daemons."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2

from muletrain.cli.actions.visit import as_member, kick_peer
from muletrain.config.load import load_config
from muletrain.errors import AdmissionError, MuletrainError, NetworkError
from muletrain.events import Event, MemberRemoved, Note, StepDone
from muletrain.network.base import Channel
from muletrain.network.gate import MALFORMED, OTHER_SECRET
from muletrain.network.gated import ADMIT
from muletrain.network.identity import Key
from muletrain.network.libp2p import CALL, FAILED, STRANGER, Libp2pNetwork
from muletrain.network.offences import LIMIT
from muletrain.network.streams import FRAMES
from muletrain.network.trust import chain_from
from muletrain.runs.fleet import LocalFleet
from muletrain.runs.join.admission import serve_admitter
from muletrain.runs.join.messages import AskBegun, Begun
from muletrain.runs.join.removal import AskMembers, Members, remove, serve_members
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.worker_files import OWNER_FILE, PROTOCOL, TICKET_FILE, write_secret
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Genesis
from muletrain.wire.frame import Frame, pack
from tests.daemons import OWNER, SECRET, World, world
from tests.fleet_run import run_fleet
from tests.polling import poll

# Strangers ----------------------------------------------------------------------------------------------------------------

PLAIN_HIVEMIND = """
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
                sys.executable,
                "-c",
                PLAIN_HIVEMIND,
                a.peer_id,
                a.addresses()[0],
                CALL,
                ADMIT,
                FRAMES,
                hello,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "TMPDIR": str(w.folder)},
            )
            out, _ = await asyncio.wait_for(process.communicate(), 60)
            said = json.loads(out)
            me = said.pop("me")
            assert "not admitted" in said["call"]
            assert MALFORMED in said["admit"]
            closed = said["stream"].startswith(
                ("error: BrokenPipe", "error: ConnectionReset")
            )  # before its hello was out
            assert closed or said["stream"] == "b''", "not even its hello was acknowledged"
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
                storage: Any = net.directory.node.protocol.storage
                kept = [peer for _, item in storage.items() for peer, _ in item.value.items()]
                assert set(kept) <= {a.peer_id, b.peer_id}, "nothing of a stranger's is kept for others"
            reasons = {why for who, why in w.refusals[a.peer_id] if who == me}
            assert {"call before admission", f"stream {FRAMES} before admission", MALFORMED} <= reasons
            assert {f"DHTProtocol.rpc_{rpc} before admission" for rpc in ("ping", "find", "store")} <= reasons

    asyncio.run(scenario())


# The kicked ---------------------------------------------------------------------------------------------------------------


async def roll(net: Libp2pNetwork, *others: Libp2pNetwork, stages: tuple[int, ...] = ()) -> None:
    """``net`` says that these, and itself, are in the run, by the names 'a', 'b', ..., and serve these stages."""
    names = {n.peer_id: chr(ord("a") + k) for k, n in enumerate((net, *others))}
    serve_members(net, lambda: names, lambda: dict(zip(names, stages, strict=False)))
    serve_admitter(net, net.peer_id)


def test_the_first_peer_is_not_removed_whichever_member_the_ticket_names() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b = await w.open(a)
            c = await w.open(a)
            await roll(b, a, c)
            members = tuple(Member(id=n.peer_id, name="m", stage=0, trainer=True, place="") for n in (a, b, c))
            zeros = bytes(32)
            genesis = Genesis(
                run_id="r", config=zeros, data=zeros, stages=1, members=members, coordinator=a.peer_id, first_step=0
            )

            async def began_with(sender: str, payload: bytes) -> bytes:
                return Begun(genesis=genesis).pack()

            b.serve(AskBegun.KIND, began_with)
            owner = await w.open(a, owner=OWNER, visitor=True)
            with pytest.raises(MuletrainError, match="first peer"):
                await remove(owner, tuple(b.addresses()), a.peer_id)
            with pytest.raises(MuletrainError, match="no member but"):  # it is the only one that says who is there
                await remove(owner, tuple(b.addresses()), b.peer_id)

    asyncio.run(scenario())


def test_a_kicked_member_gets_nothing_on_any_way() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b = await w.open(a)
            c = await w.open(a)
            await roll(a, b, c)
            for one, other in [(a, b), (a, c), (b, c), (c, b), (c, a)]:
                await one.send(other.peer_id, Frame("x", {"from": one.peer_id}))
                await w.next(other)
            for net in (a, b, c):
                await net.announce("peers", b"here", 60)
            asleep = await w.open(a)  # another identity that c got while it could
            owner = await w.open(a, owner=OWNER, visitor=True)
            with pytest.raises(MuletrainError, match="first peer"):
                await remove(owner, tuple(a.addresses()), "a")
            with pytest.raises(MuletrainError, match=r"no peer of the run is called 'd'.*b \(.*c \("):
                await remove(owner, tuple(a.addresses()), "d")
            lost = list[str]()
            c.on_lost(lambda peer, channel: lost.append(peer))
            done = await remove(owner, tuple(a.addresses()), c.peer_id[-8:])
            assert (done.name, done.id, done.kept, done.told) == ("c", c.peer_id, 2, 2)
            await poll(lambda: {a.peer_id, b.peer_id} <= set(lost))  # its streams are closed
            await gets_nothing(w, c, (a, b))
            await gets_nothing(w, asleep, (a,))
            with pytest.raises(AdmissionError, match=OTHER_SECRET):
                await w.open(a)  # a new identity, the old ticket
            for one, other in [(a, b), (b, a)]:
                await one.send(other.peer_id, Frame("x", {"n": 1}))
                assert (await w.next(other))[1].header == {"n": 1}, "the others go on, on the streams they had"
                assert await one.lookup("peers") == {n.peer_id: b"here" for n in (a, b)}
                with pytest.raises(NetworkError):
                    await one.call(c.peer_id, "echo", b"", timeout_s=5)
                with pytest.raises(NetworkError):
                    await one.send(c.peer_id, Frame("x", {}), timeout_s=5)
            newcomer = await w.open(a, secret=done.secret)
            await newcomer.send(b.peer_id, Frame("x", {"n": 2}))
            assert (await w.next(b))[0] == newcomer.peer_id

    asyncio.run(scenario())


def test_kick_warns_of_a_stage_without_peers_and_tells_of_each_victim_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "this"
    folder.mkdir(parents=True)
    key = Key.at(folder / OWNER_FILE)

    async def kick(who: str) -> str:
        await asyncio.to_thread(kick_peer, who, None)
        return capsys.readouterr().out

    async def scenario() -> None:
        async with world() as w:
            a = await w.open(owner=key, protocol=PROTOCOL)
            b, c, d = [await w.open(a, owner=key.public, protocol=PROTOCOL) for _ in "bcd"]
            ticket = Ticket("run", SECRET, key.public, tuple(a.addresses()))
            write_secret(folder / TICKET_FILE, str(ticket))
            await roll(a, b, c, d, stages=(0, 1, 2, 1))
            told = await kick("c")
            assert "it was the only peer of stage 2" in told
            assert "join again" not in told
            await roll(a, b, c, d, stages=(0, 1))  # rosters keep those that they believe dead
            told = await kick("d")
            assert "only peer" not in told
            assert "join again" not in told, "c is out for good"
            ticket = Ticket.parse((folder / TICKET_FILE).read_text())
            e = await w.open(a, owner=key.public, protocol=PROTOCOL, secret=ticket.secret)
            names = {a.peer_id: "a", b.peer_id: "b", c.peer_id: "c", d.peer_id: "d", e.peer_id: "c"}
            serve_members(a, lambda: names)
            assert f"c ({e.peer_id[-8:]})" in await kick("c"), "not the one that was called so before"
            assert b.trust.belongs

    asyncio.run(scenario())


async def gets_nothing(w: World, kicked: Libp2pNetwork, members: tuple[Libp2pNetwork, ...]) -> None:
    for member in members:
        with pytest.raises(NetworkError):
            await kicked.call(member.peer_id, "echo", b"hello", timeout_s=5)
        for channel in Channel:
            with pytest.raises(NetworkError):
                await kicked.send(member.peer_id, Frame("x", {"late": 1}), channel=channel, timeout_s=5)
        target = PeerID.from_base58(member.peer_id)
        raw = await kicked.p2p.exchange(target, CALL, b"\4echohello")  # past its own gate
        assert raw == STRANGER
        with pytest.raises(Exception, match="not admitted"):  # nor by hivemind's own way of calling
            await P2P._call_unary_protobuf_handler(
                kicked.p2p, target, "DHTProtocol.rpc_find", dht_pb2.FindRequest(), dht_pb2.FindResponse
            )
        assert w.got[member.peer_id].empty()
    assert not kicked.trust.belongs
    assert kicked.trust.secret is None
    with contextlib.suppress(NetworkError):
        await kicked.announce("peers", b"still here", 60)
    for member in members:
        assert kicked.peer_id not in await member.lookup("peers")
    assert not {m.peer_id for m in members} & (await kicked.lookup("fresh")).keys()


def test_repeat_offenders_are_banned() -> None:
    """Whoever sends rubbish, in calls or on streams, is refused each time, and left out after some; the others go
    on."""

    async def scenario() -> None:
        async with world() as w:
            banned: list[str] = []
            a = await w.open(on_ban=banned.append)
            b, rogue = await w.open(a), await w.open(a)
            await rogue.send(a.peer_id, Frame("x", {}))
            lost = list[str]()
            rogue.on_lost(lambda peer, channel: lost.append(peer))
            target = PeerID.from_base58(a.peer_id)
            for n in range(LIMIT):
                assert not banned
                if n % 2:
                    assert (await rogue.p2p.exchange(target, CALL, b"\xff"))[:1] == FAILED
                else:
                    _, reader, writer = await rogue.p2p.call_binary_stream_handler(target, FRAMES)
                    writer.write(b"this is no frame, as anyone can see")
                    assert await asyncio.wait_for(reader.read(), 5) == b""
                    writer.close()
            assert banned == [rogue.peer_id]
            assert len([1 for who, _ in w.refusals[a.peer_id] if who == rogue.peer_id]) == LIMIT
            await poll(lambda: lost == [a.peer_id])  # its streams are closed
            for one, other in [(rogue, a), (a, rogue)]:
                with pytest.raises(NetworkError):
                    await one.call(other.peer_id, "echo", b"", timeout_s=5)
                with pytest.raises(NetworkError):
                    await one.send(other.peer_id, Frame("x", {}), timeout_s=5)
            assert await b.call(a.peer_id, "echo", b"on", timeout_s=5) == b"on"
            assert await rogue.call(b.peer_id, "echo", b"on", timeout_s=5) == b"on", "each judges for itself"

    asyncio.run(scenario())


TINY = [
    "model.width=64",
    "model.heads=2",
    "model.context=32",
    "model.vocab=512",
    "train.batch=16",
    "train.microbatch=2",
    "train.steps=100000",
    "checkpoint.every=0",
    "fleet.peers=3",
]


@pytest.mark.slow
def test_a_fleet_goes_on_without_the_kicked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``muletrain kick`` on real processes: the kicked one ends, and says why; the others train on."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "this"
    config = load_config(None, [*TINY, f"data.cache={tmp_path / 'cache'}"])
    tickets: list[str] = []
    steps = Counter[str]()

    def watch(fleet: LocalFleet, event: Event) -> None:
        if not isinstance(event, StepDone):
            return
        if not tickets:
            assert (folder / OWNER_FILE).stat().st_mode & 0o777 == 0o400
            tickets.append((folder / TICKET_FILE).read_text())
            kick_peer("peer-2", None)
            tickets.append((folder / TICKET_FILE).read_text())
        elif fleet.exit_codes():
            steps["without it"] += 1
            if steps["without it"] == 1:
                assert set(asyncio.run(as_member(Ticket.parse(tickets[1]), members))) == {"peer-0", "peer-1"}
            elif steps["without it"] == 4:
                fleet.stop()

    events = run_fleet(config, folder, watch=watch, lost=frozenset({"peer-2"}), stages=(0, 1, 1))
    (said,) = [e.message for e in events if isinstance(e, Note) and e.level == "error"]
    assert "owner removed this peer" in said
    assert {e.peer for e in events if isinstance(e, MemberRemoved) and e.name == "peer-2"} == {"peer-0", "peer-1"}
    assert steps["without it"] >= 4


async def members(net: Libp2pNetwork, run_id: str) -> list[str]:
    """Names of who is in the run by a certificate that counts."""
    answer = Members.unpack(
        await net.call(sorted(net.p2p.gate.known())[0], AskMembers.KIND, AskMembers().pack(), timeout_s=10)
    )
    counting = [m for m in answer.members if net.trust.current(m.id, chain_from(m.certificate))]
    return [m.name for m in counting]
