"""What a hostile or broken member sends does no harm to a peer at work."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from muletrain.compute.base import Microbatch
from muletrain.config.schema import Codec
from muletrain.network.base import PeerId
from muletrain.runtime.averaging.messages import Shard
from muletrain.runtime.core.lifecycle import State
from muletrain.runtime.members.row import Row, Sync
from muletrain.runtime.microbatch.messages import Backward, Gap, Lost
from muletrain.runtime.peer.messages import Presence
from muletrain.runtime.recovery.messages import AskStanding, StandsAt
from muletrain.wire.codec import decode, encode, encode_ids, encode_raw
from muletrain.wire.frame import Frame

from .targets import (
    GENESIS,
    MEMBERS,
    MICROBATCHES,
    TOKENS,
    VOCAB,
    WIDTH,
    Checked,
    Target,
    frames,
    resident_bytes,
    until,
    warm_up,
)

pytestmark = pytest.mark.timeout(1000)

AMOUNTS = [300, pytest.param(10_000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_peer_at_work_takes_no_harm_from_mutated_frames(stage: int, amount: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        await warm_up()
        target = Target(stage, tmp_path)
        rng, before = random.Random(f"{stage}/{amount}"), resident_bytes()
        if stage == 0:  # it trains, so it has work of its own
            await until(lambda: target.compute.computed > 2)
        target.harm.rng = rng
        while target.harm.done < amount:
            forward, *rest = frames(stage, rng.randrange(63))
            await target.send(rng.choice(sorted(target.others)), rng.choice([forward] * 5 + rest))
        await target.handled()
        target.harm.rng = None
        assert not target.running.done(), target.running
        assert target.problems == []
        assert target.compute.wrong == []
        assert resident_bytes() - before < 150 << 20
        assert len(target.refused()) > amount * 0.8
        assert not any("internal error" in e.reason for e in target.refused())
        answer = await target.others["last"].call(target.name, Sync.KIND, _ask(), timeout_s=5)
        assert Row.unpack(answer).current
        await _still_computes_right(target, stage)
        target.running.cancel()
        await asyncio.gather(target.running, return_exceptions=True)

    asyncio.run(scenario())


def _ask() -> bytes:
    return Sync(lineage=GENESIS.lineage, step=0).pack()


async def _still_computes_right(target: Target, stage: int) -> None:
    """A microbatch that nobody tampered with goes through."""
    if stage == 0:
        return  # its answer would be up to the next stage, which is the test itself
    await until(lambda: not target.peer.position.work.serving)
    forward = frames(stage, 63)[0]
    while not target.got.empty():
        target.got.get_nowait()
    await target.send("first", forward)
    async with asyncio.timeout(20):
        while True:
            _, answer = await target.got.get()
            if answer.header["index"] == 63:
                break
    alone = Checked(stage)
    inputs, targets = (decode(t) for t in forward.tensors)
    loss, gradient = await alone.loss_backward(Microbatch(0, 63), inputs, targets, accumulate=False)
    alone.close()
    assert answer.header["loss"] == loss
    assert gradient is not None
    assert torch.equal(decode(answer.tensors[0]), await gradient)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"index": MICROBATCHES}, "forward of microbatch 64"),
        ({"stage": 0}, "at a peer of stage 1"),
        ({"lineage": bytes(32)}, "another lineage"),
        ({"tensors": (0, encode(torch.zeros(*TOKENS, WIDTH + 1), Codec.FP32))}, "expected"),
        ({"tensors": (0, encode(torch.zeros(*TOKENS, WIDTH), Codec.FP16))}, "forward with fp16"),
        ({"tensors": (0, encode(torch.full((*TOKENS, WIDTH), torch.nan), Codec.FP32))}, "not finite"),
        ({"tensors": (1, encode_ids(torch.full(TOKENS, VOCAB)))}, f"expected 0..{VOCAB - 1}"),
        ({"tensors": (1, encode_raw(b"12345678"))}, "forward with fp32"),
    ],
    ids=["index", "stage", "lineage", "shape", "codec", "nan", "token", "tokens"],
)
def test_who_sends_a_wrong_forward_is_named_by_its_receiver(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        target = Target(1, tmp_path)
        forward = frames(1, 5)[0]
        if "tensors" in change:
            position, tensor = change["tensors"]
            forward.tensors[position] = tensor
        else:
            forward = Frame(forward.kind, forward.header | change, forward.tensors)
        await target.send("first", forward)
        await until(target.refused)
        (event,) = target.refused()
        assert event.remote == "first"
        assert said in event.reason
        assert target.compute.computed == 0
        assert not target.running.done()
        target.running.cancel()
        await asyncio.gather(target.running, return_exceptions=True)

    asyncio.run(scenario())


def test_a_gradient_or_a_chunk_of_another_kind_is_refused_at_the_door(tmp_path: Path) -> None:
    async def scenario() -> None:
        target = Target(0, tmp_path, answers=False)
        owing, forward = await asyncio.wait_for(target.forwarded.get(), 20)
        request = {k: forward.header[k] for k in ("lineage", "step", "index", "attempt", "trainer")}
        held = target.peer.load()
        wrong = [encode(torch.zeros(*TOKENS, WIDTH - 1), Codec.FP32), encode(torch.zeros(*TOKENS, WIDTH), Codec.INT8)]
        for gradient in wrong:
            await target.send(owing, Backward(**request, stage=1, loss=1.0, busy_s=0.0, away_s=0.0).frame([gradient]))
            await target.handled()  # what is sent before that is lost with the stream
        await target.send(owing, Backward(**request, stage=1, loss=1.0, busy_s=0.0, away_s=0.0).frame())  # without one
        for chunk in (encode(torch.zeros(9), Codec.FP16), encode(torch.zeros(3, 3), Codec.FP32)):
            await target.send("second", Shard(round=bytes(32), step=0, chunk=0).frame([chunk]))
            await target.handled()
        assert [e.remote for e in target.refused()] == [owing] * 3 + ["second"] * 2
        assert target.peer.load() >= held, "it still waits for the answer"
        assert target.compute.computed == 0
        target.running.cancel()
        await asyncio.gather(target.running, return_exceptions=True)

    asyncio.run(scenario())


def test_what_is_sent_again_is_not_computed_again(tmp_path: Path) -> None:
    """A chunk is refused, reported and counted against its sender. Who sends a microbatch may have got it from two peers, the
    first of which is gone, so it is told to ask about it."""

    async def scenario() -> None:
        target = Target(1, tmp_path)
        offended: list[str] = []
        target.net.delivery.offended = offended.append
        forward = frames(1, 5)[0]
        await target.send("first", forward)
        await asyncio.wait_for(target.got.get(), 20)
        await target.send("first", forward)
        await until(lambda: target.declined)
        assert "has accumulated and answered" in Lost.parse(target.declined[0]).reason
        chunk = Shard(round=bytes(32), step=0, chunk=0).frame([encode(torch.zeros(9), Codec.FP32)])
        for _ in range(2):
            await target.send("last", chunk)
        await until(target.refused)
        (last,) = target.refused()
        assert "twice" in last.reason
        assert (last.remote, offended) == ("last", ["last"])
        assert target.compute.computed == 1
        target.running.cancel()
        await asyncio.gather(target.running, return_exceptions=True)

    asyncio.run(scenario())


def test_word_of_a_branch_that_nobody_else_knows_makes_nobody_begin_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        await warm_up()
        target = Target(1, tmp_path)
        asked: list[PeerId] = []

        def answer(name: str) -> Callable[[PeerId, bytes], Awaitable[bytes]]:
            async def stands(sender: PeerId, payload: bytes) -> bytes:
                """The liar serves another stage, and is alone with what it says."""
                asked.append(name)
                branch = b"\xff" * 8 if name == "first" else GENESIS.lineage[:8]
                return StandsAt(
                    branch=branch, step=0, stage=MEMBERS[name], state=State.TRAINING, targets=(), parts=()
                ).pack()

            return stands

        for name, net in target.others.items():
            net.serve(AskStanding.KIND, answer(name))
        await target.send("first", Presence(lineage=b"\xff" * 32, step=0).frame())
        await until(lambda: len(asked) == len(target.others))
        await target.send("first", frames(1, 5)[0])
        await asyncio.wait_for(target.got.get(), 20)
        assert not target.running.done()
        target.running.cancel()
        await asyncio.gather(target.running, return_exceptions=True)

    asyncio.run(scenario())


def test_a_gap_that_comes_before_the_first_step_ends_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        await warm_up()
        target = Target(0, tmp_path)
        for index in range(MICROBATCHES):
            gap = Gap(lineage=GENESIS.lineage, step=0, stage=1, indices=(index,)).frame()
            await target.send("third", gap)
        await until(lambda: target.compute.computed or target.running.done())
        assert not target.running.done(), target.running
        target.running.cancel()
        await asyncio.gather(target.running, return_exceptions=True)

    asyncio.run(scenario())
