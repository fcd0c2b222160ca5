"""A stage's state from several donors: block by block, checked against a manifest; damaged blocks, liars and breaks
cost nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest
import torch
from blake3 import blake3

from muletrain.clock import LoopClock
from muletrain.errors import Malformed, MuletrainError, NetworkError, ProtocolError
from muletrain.events import TransferFailed
from muletrain.network.memory import MemoryNetwork
from muletrain.policy.deadline import Deadline
from muletrain.policy.fork_choice import Chain
from muletrain.runtime.averaging.mean_gradient import fetch_gradient
from muletrain.runtime.core import blocks as transfer
from muletrain.runtime.core.blocks import (
    AskBlocks,
    Block,
    Blocks,
    Downloader,
    Manifest,
    PartialDownload,
    StateImage,
    _Expected,
)
from muletrain.runtime.transfer import donor as snapshot
from muletrain.runtime.transfer.donor import STATES
from muletrain.runtime.transfer.messages import AskSnapshot, Snapshot
from muletrain.sim.loop import run_virtually
from muletrain.wire.codec import RAW, Encoded, encode_raw
from muletrain.wire.frame import Frame
from tests.donors import Stage, refused, run, small_blocks

_small = pytest.fixture(autouse=True)(small_blocks)


@pytest.mark.parametrize("donors", ["a", "ab", "abc"])
def test_the_state_comes_from_all_donors(donors: str) -> None:
    async def scenario() -> None:
        stage = Stage(donors)
        taken = await stage.receiver.fetch(lambda offer: True)
        assert taken.step == 3
        stage.check()
        came = {n: stage.networks["t"].counters.received[n, Block.KIND] for n in donors}
        assert all(came.values()), "each sent some"
        assert sum(came.values()) == sum(t.nbytes for t in stage.states["a"].tensors.values()), "no block came twice"

    run(scenario)


def test_a_block_of_another_size_is_refused_and_one_that_nobody_waits_for_is_dropped() -> None:
    async def scenario() -> None:
        stage = Stage("a")
        taker, asked = stage.receiver.taker, asyncio.Event()

        async def blocks(sender: str, payload: bytes) -> bytes:
            asked.set()
            return b""

        async def came(sender: str, block: int, content: bytes, of: bytes = bytes(32)) -> None:
            await taker.blocks._on_frame(sender, Block(digest=of, block=block).frame([encode_raw(content)]))

        stage.networks["a"].serve(AskBlocks.KIND, blocks)
        digests = blake3(b"abcde").digest()
        partial = PartialDownload.of(bytes(32), Manifest(tensors=(("a", "uint8", (5,)),), block=5, digests=digests))
        fetching = asyncio.create_task(taker.fetch(partial, ["a"]))
        await asked.wait()
        for content in (b"", b"abcd", b"abcdef"):
            with pytest.raises(ProtocolError, match=f"{len(content)} bytes instead of 5"):
                await came("a", 0, content)
        await came("a", 1, b"abcde")
        await came("a", 0, b"abcde", of=bytes(31) + b"1")
        await came("b", 0, b"abcde")
        await asyncio.sleep(0.05)
        assert not fetching.done()
        await came("a", 0, b"abcde")
        await came("a", 0, b"fghij")
        await fetching
        assert bytes(partial.data) == b"abcde", "it came already"

    run(scenario)


def test_a_block_that_nobody_asked_for_is_not_read() -> None:
    """Beyond the size of any that was asked for; what was asked for has its own size."""

    async def scenario() -> None:
        own = Stage("a").contexts["t"].blocks

        def frame(size: int) -> Frame:
            return Block(digest=bytes(32), block=0).frame([Encoded(RAW, (size,), [memoryview(bytes(size))])])

        await own.expect("a", frame(own.largest))  # late
        with pytest.raises(ProtocolError, match="none was asked for"):
            await own.expect("a", frame(own.largest + 1))
        own.waiting["a", bytes(32), 0] = _Expected(memoryview(bytearray(100)), Stage("a").receiver.taker)
        with pytest.raises(Malformed):
            await own.expect("a", frame(99))
        await own.expect("a", frame(100))

    run(scenario)


def test_a_damaged_block_is_noticed_and_comes_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    right, damaged = StateImage.views, []

    def views(self: StateImage, begin: int, end: int) -> list[memoryview]:
        found = right(self, begin, end)
        if self.manifest and not damaged:  # named already: what is read now goes out
            damaged.append(begin)
            return [memoryview(bytes([found[0][0] ^ 1]) + bytes(found[0][1:])), *found[1:]]
        return found

    async def scenario() -> None:
        stage = Stage("ab")
        monkeypatch.setattr(StateImage, "views", views)
        await stage.receiver.fetch(lambda offer: True)
        stage.check()
        assert len(refused(stage)) == 1
        assert damaged

    run(scenario)


def test_a_donor_with_another_state_is_outvoted_and_one_that_is_behind_is_not_waited_for() -> None:
    async def scenario() -> None:
        stage = Stage("abcd")
        stage.states["c"].tensors["model/a"][0] += 1
        stage.at["d"].step = 2
        await stage.receiver.fetch(lambda offer: True)
        stage.check()
        assert not stage.networks["c"].counters.sent["t", Block.KIND]

    run(scenario)


@pytest.mark.parametrize("ahead", [0, 1], ids=["together", "a step apart"])
def test_what_one_donor_alone_claims_is_not_taken_however_far_it_is(ahead: int) -> None:
    async def scenario() -> None:
        stage = Stage("abc")
        for donor, chain in {
            "b": Chain(3 + ahead, (bytes(32),) * (1 + ahead)),
            "c": Chain(7, (b"\xff" * 32,) * 5),  # of a later branch, too
        }.items():
            stage.at[donor].step, stage.at[donor].applied, stage.at[donor].chain = chain.step, chain.lineages[-1], chain
        assert (await stage.receiver.fetch(lambda offer: True)).step == 3
        stage.check()
        assert not stage.networks["c"].counters.sent["t", Block.KIND]

    run(scenario)


def test_one_that_gives_a_true_history_and_a_false_state_is_not_believed_for_its_history() -> None:
    """Honest donors are a step apart, so each alone has its state."""

    async def scenario() -> None:
        stage = Stage("abc")
        stage.states["a"].tensors["model/a"][0] += 1
        chain = Chain(4, (bytes(32),) * 2)
        stage.at["c"].step, stage.at["c"].applied, stage.at["c"].chain = chain.step, chain.lineages[-1], chain
        assert (await stage.receiver.fetch(lambda offer: True)).step == 4
        assert not stage.networks["a"].counters.sent["t", Block.KIND]

    run(scenario)


def test_a_manifest_that_is_not_what_was_offered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = MemoryNetwork.serve

    def serve(self: MemoryNetwork, method: str, answer: Any) -> None:
        async def lie(sender: str, payload: bytes) -> bytes:
            honest: bytes = await answer(sender, payload)
            return honest[:-1] + bytes([honest[-1] ^ 1]) if honest else honest

        right(self, method, lie if (self.peer_id, method) == ("a", AskBlocks.KIND) else answer)

    async def scenario() -> None:
        monkeypatch.setattr(MemoryNetwork, "serve", serve)
        stage = Stage("ab")
        await stage.receiver.fetch(lambda offer: True)
        stage.check()
        assert refused(stage) == ["a"]

    run(scenario)


def test_what_came_before_a_break_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both donors go away in the middle; the one that comes back sends what is missing, and no more."""
    right, sent, broken = StateImage.send, list[int](), list[bool]()

    async def send(self: StateImage, by: Blocks, taker: str, block: int) -> None:
        if not broken and len(sent) >= 40:
            broken.append(True)
            for donor in "ab":
                stage.hub.barriers.cut(donor, "t")
                asyncio.get_running_loop().call_later(0.3, stage.hub.barriers.mend, donor, "t")
            return
        if stage.hub.barriers.way(by.net.peer_id, taker) is not None:
            sent.append(block)
        await right(self, by, taker, block)

    stage: Stage

    async def scenario() -> None:
        nonlocal stage
        stage = Stage("ab")
        monkeypatch.setattr(StateImage, "send", send)
        monkeypatch.setattr(transfer, "GONE_S", 0.2)
        stage.receiver.taker.deadline = Deadline(unmeasured_s=0.2, floor_s=0.2)
        await stage.receiver.fetch(lambda offer: True)
        stage.check()
        blocks = -(-sum(t.nbytes for t in stage.states["a"].tensors.values()) // 100)
        assert set(sent) == set(range(blocks))
        assert len(sent) <= blocks + 2 * 2 * transfer.RUN, "only what was under way came again"
        assert any(isinstance(e, TransferFailed) for e in stage.said)

    run(scenario)


def test_a_donor_that_lives_and_sends_nothing_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends nothing for a second, and is heard of all the time."""
    right, begin = StateImage.send, time.monotonic()

    async def send(self: StateImage, by: Blocks, taker: str, block: int) -> None:
        if time.monotonic() - begin > 1.0:
            await right(self, by, taker, block)

    async def scenario() -> None:
        stage = Stage("a")
        monkeypatch.setattr(StateImage, "send", send)
        monkeypatch.setattr(transfer, "CEILING_S", 0.5)
        await _taken_from_one_that_lives(stage)
        assert any(isinstance(e, TransferFailed) for e in stage.said)

    run(scenario)


@pytest.mark.parametrize(("gone_s", "ends_s"), [(1e9, 200.0), (95.0, 110.0)])
def test_after_a_long_stall_a_lost_block_is_asked_for_again_and_the_only_donors_death_seen(
    gone_s: float, ends_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waits that had doubled during the stall were those of the blocks after it, too: 600 s for the next question, and
    for a look whether the donor is there."""

    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        image, begin, gave = StateImage({"x": torch.zeros(200)}), loop.time(), set[int]()

        async def offload(work: Any, *args: Any) -> Any:
            return work(*args)

        await image.name(offload)
        blocks: Any = SimpleNamespace(clock=LoopClock(), largest=0, waiting={})

        def give(k: int) -> None:
            expected = blocks.waiting.get(("a", image.digest, k))
            if expected is not None and not expected.whole.done():
                expected.into[:] = b"".join(map(bytes, image.views(k * image.block, (k + 1) * image.block)))
                expected.taker.came = loop.time()
                expected.whole.set_result(None)

        async def call(donor: str, kind: str, payload: bytes, timeout_s: float) -> bytes:
            ask = AskBlocks.unpack(payload)
            if not ask.blocks:
                return image.manifest
            if loop.time() - begin >= 100.0:  # until then nothing comes; then the second block is lost once
                for k in ask.blocks:
                    if k != 1 or gave:
                        loop.call_later(0.1, give, k)
                gave.update(ask.blocks)
            return b""

        blocks.net = SimpleNamespace(call=call, heard_s=lambda donor: min(loop.time(), begin + gone_s))
        taker = Downloader(blocks, offload)
        monkeypatch.setattr(transfer, "LANES", 1)  # of eight blocks
        for _ in range(9):
            taker.deadline.measured(0.1)
        with contextlib.suppress(NetworkError):
            await taker.fetch(PartialDownload.of(image.digest, Manifest.unpack(image.manifest)), ["a"])
        return loop.time() - begin

    assert run_virtually(scenario(), 5000.0, []) <= ends_s


@pytest.mark.parametrize("lost", [True, False])
def test_the_only_donor_is_asked_again_and_sends_nothing_twice_that_was_not_lost(
    monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Its link breaks below blocks that it believes to be sent (fuzz, traced 261012: a taker waited for them until the
    step was given up); or its link is busy for a second."""
    right, calls = StateImage.send, list[int]()

    async def send(self: StateImage, by: Blocks, taker: str, block: int) -> None:
        calls.append(block)
        if lost and len(calls) <= transfer.RUN:
            return
        if not lost:
            await held_up.wait()
        await right(self, by, taker, block)

    held_up: asyncio.Event

    async def scenario() -> None:
        nonlocal held_up
        held_up, stage = asyncio.Event(), Stage("a")
        asyncio.get_running_loop().call_later(1.0, held_up.set)
        monkeypatch.setattr(StateImage, "send", send)
        await _taken_from_one_that_lives(stage)
        blocks = -(-sum(t.nbytes for t in stage.states["a"].tensors.values()) // 100)
        assert len(calls) == blocks + (transfer.RUN if lost else 0)
        assert not any(isinstance(e, TransferFailed) for e in stage.said)

    run(scenario)


def test_blocks_that_came_while_their_taker_slept_are_taken_and_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a nap of ten minutes it asked without end, and its event loop stood still."""
    right, sent = StateImage.send, list[int]()

    async def send(self: StateImage, by: Blocks, taker: str, block: int) -> None:
        await asyncio.sleep(0.01)
        sent.append(block)
        await right(self, by, taker, block)

    async def scenario() -> None:
        stage, naps_s = Stage("a"), [0.0]
        loop = asyncio.get_running_loop()

        async def overslept(awaitable: Any, seconds: float, what: str) -> None:
            await awaitable
            naps_s[0] += 700.0

        monkeypatch.setattr(StateImage, "send", send)
        clock: Any = SimpleNamespace(now=lambda: loop.time() + naps_s[0], deadline=overslept)
        stage.contexts["t"].blocks.clock = clock
        await stage.receiver.fetch(lambda offer: True)
        stage.check()
        assert naps_s[0] > 0.0
        assert len(sent) == len({*sent})

    run(scenario)


async def _taken_from_one_that_lives(stage: Stage) -> None:
    async def lives() -> None:
        while True:
            stage.networks["t"].hear("a")
            await asyncio.sleep(0.05)

    stage.receiver.taker.deadline = Deadline(unmeasured_s=0.2, floor_s=0.2)
    living = asyncio.create_task(lives())
    await asyncio.wait_for(stage.receiver.fetch(lambda offer: True), 8)
    living.cancel()
    stage.check()


def test_a_manifest_costs_the_taker_no_more_than_its_length() -> None:
    """Shapes of 20,000 dimensions, or 60,000 tensors whose sizes were added up for each block, held the event loop for
    a minute."""
    with pytest.raises(ProtocolError, match="tensors"):
        Manifest.unpack(
            msgpack.packb({"tensors": [["a", "float32", [2**47] * 9]], "block": 1 << 20, "digests": bytes(32)})
        )
    many = tuple((f"t{k}", "float32", (64, 64, 1, 1, 1, 1, 1)) for k in range(60_000))
    size = 60_000 * 64 * 64 * 4
    manifest = Manifest.unpack(Manifest(tensors=many, block=60_000, digests=bytes(32 * (size // 60_000))).pack())
    begin = time.process_time()
    manifest.check(size)
    assert manifest.span(manifest.blocks - 1)[1] == size
    assert all(b - a <= 60_000 for a, b in map(manifest.span, range(manifest.blocks)))
    assert time.process_time() - begin < 5.0


def test_nobody_takes_what_is_absurd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest of more bytes than the stage has, or of blocks that do not fit."""
    good: dict[str, Any] = {"tensors": (("a", "float32", (100,)),), "block": 100, "digests": bytes(32 * 4)}
    Manifest(**good).check(limit=400)
    for wrong in (
        {"tensors": (("a", "float32", (1 << 40,)),)},
        {"digests": bytes(32 * 3)},
        {"digests": bytes(32 * 4 + 1)},
        {"tensors": (("a", "int8", (400,)),)},
    ):
        with pytest.raises(ProtocolError):
            Manifest(**good | wrong).check(limit=400)

    async def scenario() -> None:
        stage = Stage("ab")
        for name in "ab":
            stage.at[name].settled = False
        monkeypatch.setattr(snapshot, "SETTLE_TRIES", 2)
        with pytest.raises(MuletrainError, match="no replica of stage 0 gives"):
            await stage.receiver.fetch(lambda offer: True, rounds=2)

    run(scenario)


def test_a_gradient_in_other_pieces_than_it_has_is_refused() -> None:
    async def scenario() -> None:
        stage, entry = Stage("a"), cast("Any", SimpleNamespace(round=bytes(32), step=0, lineage=bytes(32)))
        zero = f"{0:016}"
        for tensors in ((("x", "uint8", (100,)),), ((zero, "float64", (10,)),), ((zero, "uint8", (10, 10)),)):
            manifest = Manifest(tensors=tensors, block=100, digests=bytes(32))

            async def past(sender: str, payload: bytes, packed: bytes = manifest.pack()) -> bytes:
                return packed

            stage.networks["a"].serve(AskBlocks.KIND, past)
            assert await fetch_gradient(stage.contexts["t"], stage.receiver.taker, entry, ["a"]) is None
            assert not stage.contexts["t"].roster.is_alive("a")
            stage.contexts["t"].roster.mark_alive("a")

    run(scenario)


def test_a_block_that_is_taken_by_drips_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A taker that acknowledged a byte a minute kept the donor from any newer copy."""

    async def drips(*_: object) -> None:
        await asyncio.sleep(1e5)

    async def scenario() -> None:
        stage = Stage("a")
        ask, given = AskSnapshot(stage=0), stage.contexts["a"].blocks
        offer = Snapshot.unpack(await stage.networks["t"].call("a", ask.KIND, ask.pack(), timeout_s=10.0))
        monkeypatch.setattr(StateImage, "send", drips)
        monkeypatch.setattr(transfer, "CEILING_S", 0.5)
        blocks = AskBlocks(digest=offer.digest, blocks=(0,))
        await stage.networks["t"].call("a", blocks.KIND, blocks.pack(), timeout_s=10.0)
        assert given.sends(STATES) == {offer.digest}
        await asyncio.sleep(1.0)
        assert not given.sends(STATES)

    run(scenario)
