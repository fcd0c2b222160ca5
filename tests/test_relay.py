"""Peers that cannot reach each other directly: real daemons on this machine, of which some cannot be dialled."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hivemind.p2p import P2P, PeerID

from muletrain.config.schema import Codec
from muletrain.errors import DeadlineExceeded, PeerUnreachable
from muletrain.events import Note, StepApplied, StepDone
from muletrain.network.pipes import ACCEPTED, ASK_S, RELAY, WAIT, WORKS
from muletrain.network.relay import MAX_PIPES, Relay
from muletrain.network.ways import Failures
from muletrain.wire.codec import decode, encode
from muletrain.wire.frame import Frame, pack
from tests.daemons import OWNER, World, child, number, world
from tests.fleet_run import checkpoint_weights, run_fleet
from tests.polling import poll
from tests.reference import train_plainly
from tests.test_equivalence import facts_of, relative_difference
from tests.virtual import virtually

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.events import Event
    from muletrain.network.base import Network
    from muletrain.network.libp2p import Libp2pNetwork
    from muletrain.network.pipes import Ends
    from muletrain.runs.fleet import LocalFleet

pytestmark = pytest.mark.timeout(240)
NUMBERS = itertools.count(1)
NOWHERE = {"announce": ("/ip4/192.0.2.1/udp/1",), "private": True}
"""Nobody can dial it: its daemon tells an address of no use, and nobody can guess the other."""

NOBODY = "12D3KooWGRUfrbLzBgGzBUyN4dRkd7TMbE3Xtz5VuwLqFzV7WAVD"


def ways(net: Libp2pNetwork, peer: Network) -> int:
    return net.relay.pipes.to(peer.peer_id)


def carried(net: Libp2pNetwork) -> int:
    return sum(net.carried().values())


async def two_private(w: World, *members: Libp2pNetwork) -> tuple[Libp2pNetwork, Libp2pNetwork]:
    one, other = await asyncio.gather(w.open(*members, **NOWHERE), w.open(*members, **NOWHERE))
    for net in (one, other):
        for member in members:
            await net.call(member.peer_id, "echo", b"", timeout_s=10)
    return one, other


async def until_it_is_there(w: World, sender: Libp2pNetwork, receiver: Libp2pNetwork) -> None:
    """A frame is sent again and again, as the protocol does."""
    n = next(NUMBERS)

    async def come() -> None:
        while (got := await w.next(receiver, 60.0))[0] != sender.peer_id or number(got[1]) != n:
            pass

    arrived = asyncio.create_task(come())
    while not arrived.done():
        with contextlib.suppress(PeerUnreachable, DeadlineExceeded):
            await sender.call(receiver.peer_id, "echo", b"", timeout_s=2)
            await sender.send(receiver.peer_id, Frame("x", {"n": n}), timeout_s=2)
        await asyncio.sleep(0.01)
    await arrived


def test_two_peers_that_cannot_listen_speak_by_way_of_a_third() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b, c = await two_private(w, a)
            assert await b.call(c.peer_id, "echo", b"there", timeout_s=10) == b"there"
            values = torch.randn(1 << 20)
            frame = Frame("x", {"n": 1}, [encode(values, Codec.FP32)])
            for sender, receiver in ((b, c), (c, b)):
                for n in range(4):
                    await sender.send(receiver.peer_id, Frame("x", {"n": n}, frame.tensors))
                got = [await w.next(receiver) for _ in range(4)]
                assert [(who, number(f)) for who, f in got] == [(sender.peer_id, n) for n in range(4)]
            assert carried(a) > 2 * 4 * 4 * values.numel()
            assert (ways(b, c), ways(c, b)) == (1, 1)
            await a.call(b.peer_id, "echo", b"", timeout_s=10)
            assert ways(a, b) == 0, "the private one opened this connection"
            assert not any(w.refusals.values())

    asyncio.run(scenario())


@pytest.mark.alone
@pytest.mark.parametrize(
    ("end", "limit_s"), [(signal.SIGKILL, 10.0), pytest.param(signal.SIGSTOP, 25.0, marks=pytest.mark.slow)]
)
def test_when_the_relay_dies_or_freezes_another_takes_over_in_seconds(end: signal.Signals, limit_s: float) -> None:
    async def scenario() -> None:
        async with world() as w:
            spare = await w.open(carries=False)
            with child(w.folder / "child") as (process, address, daemon):
                await spare.connect([address], timeout_s=10)
                b, c = await two_private(w, spare)
                for net in (b, c):
                    await net.connect([address], timeout_s=10)
                await b.send(c.peer_id, Frame("x", {"n": 0}))
                assert (await w.next(c))[0] == b.peer_id
                spare.relay.carries = True
                lost: list[str] = []
                b.on_lost(lambda peer, channel: lost.append(peer))
                for pid in (process.pid, daemon):
                    os.kill(pid, end)
                begin = time.monotonic()
                if end == signal.SIGKILL:
                    await poll(lambda: c.peer_id in lost)  # before anything was sent
                await until_it_is_there(w, b, c)
                assert time.monotonic() - begin < limit_s
                assert carried(spare) > 0

    asyncio.run(scenario())


def test_a_way_that_broke_is_found_again_whoever_lost_the_connection() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b, c = await two_private(w, a)
            lost: list[str] = []
            b.on_lost(lambda peer, channel: lost.append(peer))
            for ends, connection in [(b, a), (c, a), (a, b), (a, c), (b, c)]:
                await until_it_is_there(w, b, c)
                lost.clear()
                await ends.p2p.hang_up(connection.peer_id)
                await poll(lambda: c.peer_id in lost)

    asyncio.run(scenario())


def test_when_both_look_for_each_other_one_way_is_made() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b, c = await two_private(w, a)
            calls = (s.call(r.peer_id, "echo", b"x", timeout_s=20) for s, r in ((b, c), (c, b)) for _ in range(10))
            assert await asyncio.gather(*calls) == [b"x"] * 20
            assert (ways(b, c), ways(c, b)) == (1, 1)

    asyncio.run(scenario())


def test_who_looks_while_the_other_one_is_being_let_in_takes_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        looked = asyncio.Event()

        async def late(relay: Relay, *what: Any) -> bool:
            await looked.wait()
            return await reaches(relay, *what)

        async def look(n: Libp2pNetwork, m: Libp2pNetwork) -> None:
            for _ in range(100):  # a member that failed just now is asked again after 5 s
                if await n.relay.ways.find(m.peer_id):
                    return
                await asyncio.sleep(0.1)
            raise AssertionError("no way was found")

        reaches = Relay._reaches
        async with world() as w:
            a = await w.open()
            b, c = sorted(await two_private(w, a), key=lambda net: net.peer_id)
            both = ((b, c), (c, b))
            await poll(lambda: not any(n.relay.ways.searches(m.peer_id) for n, m in both))  # hearing of renewals
            b.relay.cut(c.peer_id)
            await poll(lambda: ways(b, c) == ways(c, b) == 0)
            monkeypatch.setattr(Relay, "_reaches", late)
            first = asyncio.create_task(look(c, b))
            await poll(lambda: b.relay.ways.expects(c.peer_id))
            second = asyncio.create_task(look(b, c))
            await asyncio.sleep(0.5)
            looked.set()
            await asyncio.gather(first, second)
            assert (ways(b, c), ways(c, b)) == (1, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", [ACCEPTED, WORKS, WAIT])
def test_a_member_that_only_says_that_it_leads_there_is_passed_over(answer: bytes) -> None:
    """It answers first, since it asks nobody."""

    async def lie(sender: str, target: str, addresses: list[str], ends: Ends) -> None:
        ends[1].write(answer)
        await ends[1].drain()

    async def scenario() -> None:
        async with world() as w:
            liar, honest = await w.open(), await w.open(carries=False)
            await honest.connect(liar.addresses(), timeout_s=10)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(liar.relay, "_lend", lie)
                b, c = await two_private(w, liar, honest)
                honest.relay.carries = True
                begin = time.monotonic()
                await until_it_is_there(w, b, c)
                assert time.monotonic() - begin < 15
                assert ways(b, c) == 1

    asyncio.run(scenario())


def test_a_member_that_brings_pipes_of_nobody_is_taken_seriously_a_few_times_and_only_while_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        tried = asyncio.Event()

        async def late(relay: Relay, *what: Any) -> bool:
            await tried.wait()
            return False

        async with world() as w:
            liar = await w.open()
            b = await w.open(liar)
            await liar.call(b.peer_id, "echo", b"", timeout_s=10)
            monkeypatch.setattr(Relay, "_reaches", late)
            began: list[asyncio.StreamWriter] = []
            for _ in range(MAX_PIPES + 6):
                _, _, writer = await liar.p2p.open_stream(PeerID.from_base58(b.peer_id), RELAY)
                began.append(writer)
                writer.write(b"".join(pack(Frame("relay", {"for": NOBODY, "addresses": []}))))
            expected = b.relay.ways._expected
            await poll(lambda: expected[NOBODY] >= MAX_PIPES)
            await asyncio.sleep(0.5)
            assert expected[NOBODY] == MAX_PIPES
            for writer in began:
                writer.close()
            tried.set()
            begin = time.monotonic()
            await poll(lambda: not b.relay.ways.expects(NOBODY))
            assert time.monotonic() - begin < ASK_S / 2

    asyncio.run(scenario())


def test_who_is_dead_is_unreachable_as_before() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b, c = await two_private(w, a)
            await b.call(c.peer_id, "echo", b"x", timeout_s=10)
            await c.close()
            for _ in range(2):
                begin = time.monotonic()
                with pytest.raises(PeerUnreachable):
                    await b.call(c.peer_id, "echo", b"x", timeout_s=10)
                assert time.monotonic() - begin < 10

    asyncio.run(scenario())


def test_members_are_asked_for_a_way_to_the_dead_less_and_less() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        asked, when, begin = Failures(), list[float](), loop.time()
        while loop.time() < begin + 7200.0:
            if loop.time() >= asked.again_s:
                asked.count()
                when.append(loop.time())
            await asyncio.sleep(1.0)
        gaps = [round(b - a) for a, b in pairwise(when)]
        assert gaps[:4] == [5, 5, 5, 10]
        assert set(gaps[10:]) == {300}

    virtually(scenario(), 8000)


def test_what_a_relay_changes_is_never_taken() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b, c = await two_private(w, a)
            await b.send(c.peer_id, Frame("x", {"n": 0}))
            await w.next(c)
            plain, changed = asyncio.StreamWriter.write, list[int]()

            def write(writer: asyncio.StreamWriter, data: Any) -> None:
                if len(data) > 1000 and any(writer in pipe.writers for pipe in a.relay.lent.open) and not changed:
                    changed.append(len(data))
                    data = bytes([*data[:500], data[500] ^ 1, *data[501:]])
                plain(writer, data)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(asyncio.StreamWriter, "write", write)
                large = [encode(torch.zeros(1 << 18), Codec.FP32)]
                first = b.relay.pipes.open[0]
                with contextlib.suppress(PeerUnreachable, DeadlineExceeded):
                    await b.send(c.peer_id, Frame("x", {"n": 1}, large), timeout_s=5)
                await poll(lambda: first not in b.relay.pipes.open)
            await b.send(c.peer_id, Frame("x", {"n": 2}, large))
            frames = [(await w.next(c))[1]]
            while number(frames[-1]) < 2:  # the first one may have been sent again
                frames.append((await w.next(c))[1])
            assert all(not decode(f.tensors[0]).any() for f in frames)
            assert not w.refusals[c.peer_id], "nor did it get as far as a frame"

    asyncio.run(scenario())


def test_a_relay_is_for_members_between_members() -> None:
    async def ask(p2p: Any, relay: Libp2pNetwork, **header: Any) -> bytes:
        _, reader, writer = await P2P.call_binary_stream_handler(p2p, PeerID.from_base58(relay.peer_id), RELAY)
        try:
            writer.write(b"".join(pack(Frame("relay", header))))
            return await asyncio.wait_for(reader.read(1), 10)
        except ConnectionError:  # who refuses a stream closes it with the request still unread
            return b""
        finally:
            writer.close()

    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b, c = await two_private(w, a)
            stranger = await P2P.create(initial_peers=a.addresses())
            try:
                assert await ask(stranger, a, to=b.peer_id, addresses=[]) == b""
                assert w.refusals[a.peer_id] == [
                    (stranger.peer_id.to_base58(), "stream muletrain/relay before admission")
                ]
                assert await ask(b.p2p, a, to=stranger.peer_id.to_base58(), addresses=[]) == b"", "nor to strangers"
                assert await ask(b.p2p, a, to=c.peer_id, addresses=[]) in (ACCEPTED, WORKS), "perhaps they met already"
                assert await ask(b.p2p, a, to=7) == b""
                assert w.refusals[a.peer_id][1:] == [
                    (b.peer_id, "a stream for relays must begin with the peer that it is for")
                ]
            finally:
                await stranger.shutdown()

    asyncio.run(scenario())


def test_where_nobody_leads_there_people_are_told_which_port_to_open() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open(carries=False)
            b, c = await two_private(w, a)
            begin = time.monotonic()
            with pytest.raises(PeerUnreachable, match=r"open a TCP port here .*, or one there"):
                await b.call(c.peer_id, "echo", b"x", timeout_s=20)
            address = a.addresses()[0]
            port = address.split("/")[4]
            with pytest.raises(PeerUnreachable, match=f"open TCP port {port} here, or one there"):
                await a.call(NOBODY, "echo", b"x", timeout_s=20)
            await a.close()
            with pytest.raises(PeerUnreachable, match=rf"open to this machine:\n  TCP port {port} of 127\.0\.0\.1 \("):
                await w.open(initial_peers=(address,), owner=OWNER.public)
            assert time.monotonic() - begin < 30

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_a_fleet_with_two_peers_that_cannot_listen_computes_what_one_process_computes(tmp_path: Path) -> None:
    """They serve adjacent stages; of two members that may carry between them one is killed: the one that does."""
    facts, cache = facts_of(tmp_path, "fleet.stages=3", "fleet.peers=5", "fleet.trainers=2")
    expected, _ = train_plainly(facts, facts.source(cache))
    private, relays, lost, ways = ("peer-3", "peer-4"), {"peer-1", "peer-2"}, set[str](), list[str]()
    names: dict[str, str] = {}

    def each(name: str) -> dict[str, Any]:
        if name in private:
            return NOWHERE
        return {} if name in relays else {"bandwidth_bytes_per_s": 1e12}  # does not carry

    def watch(fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, Note) and "cannot be reached directly, only through" in event.message:
            ways.append(event.message.rsplit(maxsplit=1)[-1])
        if (peer_id := getattr(event, "peer_id", None)) and (name := getattr(event, "name", None)):
            names[peer_id[-6:]] = name  # a relay whose name is not known yet is told by the end of its id
        if isinstance(event, StepDone) and event.step == 7 and not lost:
            ids = {fleet.pid(name): name for name in relays}
            carrier = next(r for w in reversed(ways) if (r := names.get(w, w)) in relays)
            os.killpg(next(pid for pid, name in ids.items() if name == carrier), signal.SIGKILL)
            lost.add(carrier)
            ways.clear()

    events = run_fleet(
        facts.config, tmp_path / "run", watch=watch, lost=lost, stages=(0, 0, 0, 1, 2), each=each, timeout_s=350
    )
    assert relative_difference(checkpoint_weights(tmp_path / "run"), expected) <= 1e-5
    assert {names.get(way, way) for way in ways} & relays == relays - lost, "the other one took over"
    applied = [e for e in events if isinstance(e, StepApplied) and e.peer in relays and e.step > 1]
    assert sum(c.get("relayed", 0) for e in applied for c in e.sent.values()) > 20 * 16 * 32 * 64 * 4, "counted"
