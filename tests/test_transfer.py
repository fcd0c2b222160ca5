"""A stage's state from several donors: block by block, checked against a manifest; damaged blocks, liars and breaks
cost nothing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgpack
import pytest
import torch
from blake3 import blake3

from muletrain.clock import LoopClock
from muletrain.config.schema import Codec
from muletrain.errors import MuletrainError, ProtocolError, Refused
from muletrain.events import Event, FrameRefused, TransferFailed
from muletrain.network.memory import MemoryHub, MemoryNetwork
from muletrain.policy.deadline import Deadline
from muletrain.policy.fork_choice import Chain
from muletrain.runtime.averaging.mean_gradient import fetch_gradient
from muletrain.runtime.averaging.messages import AskGradient
from muletrain.runtime.core.lifecycle import Lifecycle
from muletrain.runtime.core.plan import Plan
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.membership import Membership
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Genesis, Roster
from muletrain.runtime.step.gradient_log import GradientLog
from muletrain.runtime.transfer import blocks as transfer
from muletrain.runtime.transfer import donor as snapshot
from muletrain.runtime.transfer.blocks import Manifest, PartialDownload, StateImage
from muletrain.runtime.transfer.donor import Receiver, Snapshots
from muletrain.runtime.transfer.messages import AskBlocks, AskManifest, AskSnapshot, Block, Snapshot
from muletrain.strategies.swarm import SWARM
from muletrain.wire.codec import encode_raw

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torch import Tensor

SIZES = {"loss_scale": 2, "model/a": 700, "model/empty": 0, "model/b": 1301, "moment1/a": 700}


class State:
    """What a transfer asks of a ``Compute``."""

    n_params = 2001

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {n: torch.randn(size, generator=generator) for n, size in SIZES.items()}
        self.tensors["loss_scale"] = self.tensors["loss_scale"].double()
        self.loaded: dict[str, Tensor] | None = None

    async def state(self) -> dict[str, Tensor]:
        return {n: t.clone() for n, t in self.tensors.items()}

    async def load_state(self, state: dict[str, Tensor]) -> None:
        self.loaded = {n: t.clone() for n, t in state.items()}

    async def offload(self, fn: Any, *args: Any) -> Any:
        return fn(*args)


class Stage:
    """Donors 'a', 'b', 'c' and the taker 't'."""

    def __init__(self, donors: str = "abc", *, taker_trains: bool = True) -> None:
        self.hub, self.said = MemoryHub(), list[Event]()
        names = (*donors, "t")
        members = tuple(Member(id=n, name=n, stage=0, trainer=n != "t" or taker_trains, addresses=()) for n in names)
        genesis = Genesis(
            run_id="r", config=bytes(32), data=bytes(32), stages=1, coordinator=names[0], first_step=0, members=members
        )
        plan = Plan(1, 1, 1, 1, 1, 2, lambda s: 1, Codec.FP32, Codec.FP32, None, lambda s: 0.0, 0, 8, SWARM)
        self.networks: dict[str, MemoryNetwork] = {n: self.hub.join(n) for n in names}
        self.states: dict[str, Any] = {n: State(2 if n == "t" else 1) for n in names}
        self.contexts = {
            n: Context(self.networks[n], LoopClock(), self.states[n], Roster(genesis, n), plan, emit=self.said.append)
            for n in names
        }
        self.at = {
            n: SimpleNamespace(
                step=3,
                applied=bytes(32),
                settled=True,
                away=False,
                life=Lifecycle(),
                chain=Chain(3, (bytes(32),)),
            )
            for n in names
        }
        self.logs: dict[str, Any] = {n: GradientLog(self.contexts[n], 0) for n in donors}
        for n in donors:
            position: Any = self.at[n]
            Snapshots(self.contexts[n], position, self.logs[n], Membership(self.contexts[n]))
            self.networks[n].receive(self._nothing)
        self.receiver = Receiver(self.contexts["t"])
        self.networks["t"].receive(self._block)

    async def _nothing(self, sender: str, frame: Any) -> None:
        raise AssertionError

    async def _block(self, sender: str, frame: Any) -> None:
        self.receiver.taker.on_block(sender, Block.parse(frame), frame.tensors[0])

    def check(self) -> None:
        """What was loaded is the donors' state."""
        loaded, right = self.states["t"].loaded, self.states["a"].tensors
        assert loaded is not None
        assert loaded.keys() == right.keys()
        assert all(torch.equal(loaded[n], right[n]) for n in right)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BLOCK", 100)  # not a whole number of elements, and blocks that span tensors
    monkeypatch.setattr(snapshot, "PAUSE_S", 0.01)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


def refused(stage: Stage) -> list[str]:
    return [e.remote for e in stage.said if isinstance(e, FrameRefused)]


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

        stage.networks["a"].serve(AskBlocks.KIND, blocks)
        digests = blake3(b"abcde").digest()
        partial = PartialDownload.of(bytes(32), Manifest(tensors=(("a", "uint8", (5,)),), block=5, digests=digests))
        fetching = asyncio.create_task(taker.fetch(partial, ["a"]))
        await asked.wait()
        for content in (b"", b"abcd", b"abcdef"):
            with pytest.raises(ProtocolError, match=f"{len(content)} bytes instead of 5"):
                taker.on_block("a", Block(digest=bytes(32), block=0), encode_raw(content))
        for other in (Block(digest=bytes(32), block=1), Block(digest=bytes(31) + b"1", block=0)):
            taker.on_block("a", other, encode_raw(b"abcde"))
        taker.on_block("b", Block(digest=bytes(32), block=0), encode_raw(b"abcde"))
        await asyncio.sleep(0.05)
        assert not fetching.done()
        taker.on_block("a", Block(digest=bytes(32), block=0), encode_raw(b"abcde"))
        taker.on_block("a", Block(digest=bytes(32), block=0), encode_raw(b"fghij"))
        await fetching
        assert bytes(partial.data) == b"abcde", "it came already"

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


def test_a_manifest_that_is_not_what_was_offered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = MemoryNetwork.serve

    def serve(self: MemoryNetwork, method: str, answer: Any) -> None:
        async def lie(sender: str, payload: bytes) -> bytes:
            honest: bytes = await answer(sender, payload)
            return honest[:-1] + bytes([honest[-1] ^ 1])

        right(self, method, lie if (self.peer_id, method) == ("a", AskManifest.KIND) else answer)

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

    async def send(self: StateImage, ctx: Context, taker: str, block: int) -> None:
        if not broken and len(sent) >= 40:
            broken.append(True)
            for donor in "ab":
                stage.hub.barriers.cut(donor, "t")
                asyncio.get_running_loop().call_later(0.3, stage.hub.barriers.mend, donor, "t")
            return
        if stage.hub.barriers.way(ctx.net.peer_id, taker) is not None:
            sent.append(block)
        await right(self, ctx, taker, block)

    stage: Stage

    async def scenario() -> None:
        nonlocal stage
        stage = Stage("ab")
        monkeypatch.setattr(StateImage, "send", send)
        monkeypatch.setattr(transfer, "CALL_S", 0.2)
        stage.receiver.taker.deadline = Deadline(unmeasured_s=0.2, floor_s=0.2)
        await stage.receiver.fetch(lambda offer: True)
        stage.check()
        blocks = -(-sum(t.nbytes for t in stage.states["a"].tensors.values()) // 100)
        assert set(sent) == set(range(blocks))
        assert len(sent) <= blocks + 2 * 2 * transfer.RUN, "only what was under way came again"
        assert any(isinstance(e, TransferFailed) for e in stage.said)

    run(scenario)


def test_a_donor_that_lives_and_sends_nothing_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gave up sending, and is heard of all the time."""
    right, calls = StateImage.send, list[str]()

    async def send(self: StateImage, ctx: Context, taker: str, block: int) -> None:
        calls.append(taker)
        if len(calls) > transfer.RUN:
            await right(self, ctx, taker, block)

    async def scenario() -> None:
        async def lives() -> None:
            while True:
                stage.networks["t"].hear("a")
                await asyncio.sleep(0.05)

        stage = Stage("a")
        monkeypatch.setattr(StateImage, "send", send)
        monkeypatch.setattr(transfer, "LONGEST_S", 0.5)
        stage.receiver.taker.deadline = Deadline(unmeasured_s=0.2, floor_s=0.2)
        living = asyncio.create_task(lives())
        await asyncio.wait_for(stage.receiver.fetch(lambda offer: True), 8)
        living.cancel()
        stage.check()

    run(scenario)


def test_a_manifest_costs_the_taker_no_more_than_its_length() -> None:
    """Shapes of 20,000 dimensions, or 60,000 tensors whose sizes were added up for each block, held the event loop for
    a minute."""
    with pytest.raises(ProtocolError, match="tensors"):
        Manifest.unpack(
            msgpack.packb({"tensors": [["a", "float32", [2**47] * 9]], "block": 1 << 20, "digests": bytes(32)})
        )
    many = tuple((f"t{k}", "float32", (64, 64, 1, 1, 1, 1, 1)) for k in range(60_000))
    size = 60_000 * 64 * 64 * 4
    manifest = Manifest.unpack(Manifest(tensors=many, block=1 << 16, digests=bytes(32 * (size >> 16))).pack())
    begin = time.process_time()
    manifest.check(size)
    assert manifest.span(manifest.blocks - 1)[1] == size
    assert all(b - a <= 1 << 16 for a, b in map(manifest.span, range(manifest.blocks)))
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


def test_a_copy_that_somebody_is_taking_is_not_broken_off_for_another_taker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcomers that come one step after the other would have each other begin anew without end."""

    async def scenario() -> None:
        monkeypatch.setattr(snapshot, "MAX_COPIES", 2)
        stage = Stage("a")
        donor = stage.at["a"]

        async def asked(step: int, after: int = 0) -> int:
            donor.step, donor.chain = step, Chain(step, (bytes(32),) * 4)
            stage.states["a"] = stage.contexts["a"].compute = State(step)  # other weights after each step
            ask = AskSnapshot(stage=0, after=after).pack()
            return Snapshot.unpack(await stage.networks["t"].call("a", AskSnapshot.KIND, ask, timeout_s=5)).step

        stage.logs["a"].reaches = lambda step: step >= 3
        assert [await asked(3), await asked(4), await asked(5)] == [3, 4, 4]
        assert await asked(6, after=5) == 6, "an earlier one is of no use"
        monkeypatch.setattr(snapshot, "BUSY_S", 0.0)
        assert await asked(7) == 7, "nobody takes those that there are"

    run(scenario)


def test_each_of_many_takers_gets_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than one donor serves at once used to be sent away until they gave up."""

    async def scenario() -> None:
        stage = Stage("a")
        sent: list[str] = []
        held_up = asyncio.Event()

        async def send(self: StateImage, ctx: Any, taker: str, block: int) -> None:
            await held_up.wait()
            sent.append(taker)

        monkeypatch.setattr(StateImage, "send", send)
        takers = [f"t{k}" for k in range(20)]
        for taker in takers:
            network = stage.hub.join(taker)
            stage.contexts["a"].roster.admit(Member(id=taker, name=taker, stage=0, trainer=False, addresses=()))
            offer = Snapshot.unpack(await network.call("a", AskSnapshot.KIND, AskSnapshot(stage=0).pack(), timeout_s=5))
            ask = AskBlocks(digest=offer.digest, blocks=(0,)).pack()
            for _ in range(snapshot.MAX_RUNS):
                await network.call("a", AskBlocks.KIND, ask, timeout_s=5)
            with pytest.raises(Refused, match="enough to send"):
                await network.call("a", AskBlocks.KIND, ask, timeout_s=5)
        held_up.set()
        await asyncio.sleep(0.05)
        assert Counter(sent) == dict.fromkeys(takers, snapshot.MAX_RUNS)
        await network.call("a", AskBlocks.KIND, ask, timeout_s=5)

    run(scenario)


def test_a_gradient_in_other_pieces_than_it_has_is_refused() -> None:
    async def scenario() -> None:
        stage, entry = Stage("a"), cast("Any", SimpleNamespace(round=bytes(32), step=0, lineage=bytes(32)))
        zero = f"{0:016}"
        for tensors in ((("x", "uint8", (100,)),), ((zero, "float64", (10,)),), ((zero, "uint8", (10, 10)),)):
            manifest = Manifest(tensors=tensors, block=100, digests=bytes(32))

            async def past(sender: str, payload: bytes, packed: bytes = manifest.pack()) -> bytes:
                return packed

            stage.networks["a"].serve(AskGradient.KIND, past)
            assert await fetch_gradient(stage.contexts["t"], stage.receiver.taker, entry, ["a"]) is None
            assert not stage.contexts["t"].roster.is_alive("a")
            stage.contexts["t"].roster.alive("a")

    run(scenario)


def test_a_copy_that_is_still_being_sent_is_kept_however_slow_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of blocks may take longer than a copy is kept after the last question for it."""

    async def scenario() -> None:
        monkeypatch.setattr(snapshot, "KEPT_S", 0.2)
        whole = Context.send

        async def slowly(self: Context, *args: Any, **how: Any) -> None:
            await asyncio.sleep(0.06)
            await whole(self, *args, **how)

        monkeypatch.setattr(Context, "send", slowly)
        stage, begin = Stage("a"), time.monotonic()
        await stage.receiver.fetch(lambda offer: True, rounds=1)
        assert time.monotonic() - begin > 2 * snapshot.KEPT_S
        stage.check()

    run(scenario)


def test_copies_are_dropped_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(snapshot, "KEPT_S", 0.1)
        stage = Stage("a")
        await stage.receiver.fetch(lambda offer: True)
        named = [t.get_name() for t in asyncio.all_tasks()]
        assert named.count("copies") == 1
        await asyncio.sleep(0.4)
        assert "copies" not in [t.get_name() for t in asyncio.all_tasks()], "the copy went, and whoever looked after it"

    run(scenario)
