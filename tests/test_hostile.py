"""What a hostile or broken member sends: frames drawn at random do no harm to the decoder, nor to a peer at work."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from muletrain.clock import LoopClock
from muletrain.compute.arithmetic import StageSetup
from muletrain.compute.base import Microbatch
from muletrain.compute.checks import is_finite
from muletrain.compute.results import Result
from muletrain.compute.slot import AT_ONCE, Turn
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.load import load_config
from muletrain.config.schema import Codec
from muletrain.errors import ProtocolError
from muletrain.events import Event, FrameRefused
from muletrain.network.base import Frame, PeerId
from muletrain.network.conditions import Conditions
from muletrain.network.intake import Intake
from muletrain.network.memory import MemoryHub
from muletrain.runs.assemble import RunFacts
from muletrain.runtime.checkpoint.messages import CheckpointEnd, PartReady
from muletrain.runtime.checkpoint.roles import Book
from muletrain.runtime.checkpoint.store import Folder
from muletrain.runtime.core.lifecycle import State
from muletrain.runtime.core.messages import Message
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.messages import GetProgress, Progress, Suspected
from muletrain.runtime.members.roster import Genesis, Member, Roster
from muletrain.runtime.microbatch.messages import Backward, Busy, Done, Forward, Gap, Lost, TrainerDone
from muletrain.runtime.peer.incoming import OTHER_KINDS, STEP_KINDS
from muletrain.runtime.peer.messages import Away, Back, Report
from muletrain.runtime.peer.peer import Peer
from muletrain.runtime.peer.peer_host import PeerHost
from muletrain.runtime.recovery.messages import AskStanding, HeldPart, StandsAt
from muletrain.runtime.step.messages import Abstain, Reduced, RoundEntry, Seal, Shard, ShardFacts
from muletrain.runtime.transfer.messages import Block
from muletrain.wire.codec import RAW, decode, encode, encode_ids, encode_raw, encoded_size
from muletrain.wire.frame import pack, read_frame, unpack

from .mutations import mutated

pytestmark = pytest.mark.timeout(1000)

MICROBATCHES = 64
FACTS = RunFacts.of(
    load_config(
        None,
        [
            "model.width=16",
            "model.heads=2",
            "model.layers=2",
            "model.context=8",
            "model.vocab=300",
            "train.microbatch=1",
            f"train.batch={MICROBATCHES}",
            "wire.activations=fp32",
            "wire.gradients=fp32",
            "fleet.peers=4",
        ],
    )
)
PLAN = FACTS.plan()
TOKENS, WIDTH, VOCAB = (PLAN.sequences, PLAN.sequence_length(0)), PLAN.width, PLAN.vocab
MEMBERS = {"first": 0, "second": 0, "third": 1, "last": 1}
GENESIS = Genesis(
    run_id="run",
    config=bytes(32),
    data=bytes(32),
    stages=2,
    coordinator="first",
    first_step=0,
    members=tuple(Member(id=n, name=n, stage=s, trainer=s == 0, addresses=()) for n, s in MEMBERS.items()),
)
AMOUNTS = [300, pytest.param(10_000, marks=pytest.mark.slow)]


def ids(generator: torch.Generator) -> Tensor:
    return torch.randint(0, VOCAB, TOKENS, generator=generator)


def frames(stage: int, index: int) -> list[Frame]:
    """A valid one of each kind, as it would come to a peer of ``stage`` in the first step."""
    generator = torch.Generator().manual_seed(index)
    hidden = torch.randn(*TOKENS, WIDTH, generator=generator)
    inputs = encode_ids(ids(generator)) if stage == 0 else encode(hidden, Codec.FP32)
    at: dict[str, Any] = {"lineage": GENESIS.lineage, "step": 0}
    request = {**at, "index": index, "attempt": 0, "trainer": "first"}
    targets, deadline_s = encode_ids(ids(generator)), 0.02 if stage == 0 else 0.2
    answer = {"loss": 5.0, "busy_s": 0.2, "away_s": 0.1}
    chunk, few = encode(torch.randn(4096, generator=generator), Codec.FP32), (index, (index + 1) % (MICROBATCHES - 1))
    digest = bytes([index]) * 32
    facts = {"content": digest, "square_norm": 1.0, "finite": True}
    entry = {
        **at,
        "stage": stage,
        "round": digest,
        "members": ("first", "second"),
        "shards": (facts, facts),
        "stop": False,
        "holder": "second",
    }
    seal = {
        **at,
        "stage": stage,
        "attempt": 0,
        "indices": few,
        "members": ("first", "second"),
        "weights": digest,
        "stop": False,
        "leaves": False,
        "sketch": bytes(256),
    }
    return [
        Forward(**request, stage=stage, accumulate=(0, 1), gradient=stage > 0, deadline_s=deadline_s).frame(
            [inputs, targets]
        ),
        Backward(**request, stage=1, **answer).frame([encode(hidden, Codec.FP32)]),
        Done(**request, stage=stage, **answer).frame(),
        Busy(**request, stage=1).frame(),
        Lost(**request, stage=1, reason="no").frame(),
        TrainerDone(**at, indices=(index,), losses=(5.0,)).frame(),
        Gap(**at, stage=stage, indices=few).frame(),
        Seal(**seal).frame(),
        Shard(round=digest, step=0, chunk=index).frame([chunk]),
        Reduced(round=digest, step=0, chunk=index, square_norm=1.0, finite=True).frame([chunk]),
        RoundEntry(**entry).frame(),
        Abstain(**at, attempt=1).frame(),
        Away().frame(),
        Back(**at).frame(),
        Suspected(**at, peer="second").frame(),
        PartReady(**at | {"step": 1}, stage=stage, size=1 << 20, digest=digest, place="x").frame(),
        CheckpointEnd(**at | {"step": 1}, reason="").frame(),
        Block(digest=digest, block=index).frame([encode_raw(digest)]),
        Report(event='{"kind": "note", "level": "info", "message": "x", "t": 1.0, "peer": "p"}').frame(),
    ]


def test_what_would_end_a_peer_later_is_refused_when_it_comes() -> None:
    """A square norm whose sums are not finite; a part of a checkpoint that no lineage names."""
    fact = {"content": bytes(32), "finite": True}
    assert ShardFacts.model_validate(fact | {"square_norm": 1e89}).square_norm == 1e89, (
        "as much as fp32 gradients can have"
    )
    with pytest.raises(ValidationError):
        ShardFacts.model_validate(fact | {"square_norm": 1.7e308})
    part = {"step": 1, "stage": 0, "digest": bytes(32)}
    HeldPart.model_validate(part | {"lineage": bytes(32)})
    with pytest.raises(ValidationError):
        HeldPart.model_validate(part | {"lineage": b""})


def test_a_frame_of_every_kind_is_drawn_from() -> None:
    assert {f.kind for f in frames(0, 0)} == STEP_KINDS.keys() | OTHER_KINDS.keys()


# The decoder ------------------------------------------------------------------------------------------------------------


def take(frame: Frame) -> None:
    """As a peer takes it. Raises ProtocolError."""
    kinds: dict[str, type[Message]] = {**STEP_KINDS, **OTHER_KINDS}
    if frame.kind not in kinds:
        raise ProtocolError("unknown kind")
    kinds[frame.kind].parse(frame)
    for tensor in frame.tensors:
        assert tensor.nbytes == encoded_size(tensor.codec, tensor.shape)
        if tensor.codec != RAW:
            assert decode(tensor).shape == tensor.shape


@pytest.mark.parametrize("amount", AMOUNTS)
def test_the_decoder_refuses_or_takes_whole(amount: int) -> None:
    async def scenario() -> None:
        rng, ended = random.Random(amount), Counter[str]()
        for n in range(amount):
            frame = rng.choice(frames(rng.randint(0, 1), n % 63))
            said = ""
            try:
                take(await asyncio.wait_for(unpack(mutated(rng, b"".join(pack(frame)))), 5))
            except ProtocolError as e:
                said = str(e)
            ended["refused" if said else "taken"] += 1
            assert len(said) < 1000, "what is said of it has a bound, too"
        assert min(ended.values()) > amount / 20

    asyncio.run(scenario())


@pytest.mark.parametrize("amount", [30, pytest.param(2_000, marks=pytest.mark.slow)])
def test_a_stream_of_mutated_frames_ends_and_never_hangs(amount: int) -> None:
    """Each on a stream of its own, behind a valid one, in pieces: what comes after the damage may be read as
    anything."""

    async def to_the_end(intake: Intake) -> None:
        while True:
            await read_frame(intake)

    async def stream(rng: random.Random) -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        intake = Intake.take_over(reader, writer)
        _, other = await asyncio.open_connection(sock=theirs)
        valid, *rest = [b"".join(pack(f)) for f in rng.sample(frames(1, rng.randint(0, 62)), 3)]
        data = valid + b"".join(mutated(rng, r) for r in rest)
        try:
            for begin in range(0, len(data), 7000):
                other.write(data[begin : begin + 7000])
            other.write_eof()
            take(await asyncio.wait_for(read_frame(intake), 5))
            with pytest.raises((ProtocolError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(to_the_end(intake), 5)
        finally:
            other.close()
            writer.close()

    async def scenario() -> None:
        rng = random.Random(amount)
        for _ in range(amount):
            await stream(rng)

    asyncio.run(scenario())


# A peer at work ---------------------------------------------------------------------------------------------------------


class Checked(TorchCompute):
    """Notes every tensor that is not what this stage computes with."""

    def __init__(self, stage: int) -> None:
        config = FACTS.config
        setup = StageSetup(config.optimizer, config.train.steps, config.train.seed, config.train.microbatch)
        super().__init__(FACTS.spec, FACTS.cut, stage, setup)
        self.wrong: list[str] = []
        self.computed = 0

    async def forward(self, mb: Microbatch, inputs: Tensor, turn: Turn = AT_ONCE) -> Result:
        self._tokens(mb, inputs)
        return await super().forward(mb, inputs, turn)

    async def backward(self, mb: Microbatch, grad: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool) -> Result | None:
        self._note(grad.dtype == torch.float32 and grad.shape == (*TOKENS, WIDTH), grad)
        self.computed += 1
        return await super().backward(mb, grad, turn, accumulate=accumulate)

    async def loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool
    ) -> tuple[float, Result | None]:
        self._note(inputs.dtype == torch.float32 and inputs.shape == (*TOKENS, WIDTH) and is_finite(inputs), inputs)
        self._tokens(mb, targets)
        loss, gradient = await super().loss_backward(mb, inputs, targets, turn, accumulate=accumulate)
        self.computed += 1
        return loss, gradient

    def _tokens(self, mb: Microbatch, values: Tensor) -> None:
        fits = values.dtype == torch.int64 and values.shape == TOKENS and values.min() >= 0 and values.max() < VOCAB
        self._note(fits and mb.step == 0 and 0 <= mb.index < MICROBATCHES, values)

    def _note(self, fine: bool, values: Tensor) -> None:
        if not fine:
            self.wrong.append(f"{values.dtype} {tuple(values.shape)}")


async def warm_up() -> None:
    """torch's first backward pass takes seconds on a busy machine."""
    compute = Checked(1)
    inputs, targets = (decode(t) for t in frames(1, 0)[0].tensors)
    await compute.loss_backward(Microbatch(0, 0), inputs, targets, accumulate=True)
    compute.close()


class _Tokens:
    def microbatch(self, step: int, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return ids(generator).numpy(), ids(generator).numpy()


class Harm(Conditions):
    """Damages most frames to one peer, while it has an ``rng``. ``done``: how many."""

    def __init__(self, victim: PeerId) -> None:
        self.rng: random.Random | None = None
        self._victim, self.done = victim, 0

    def damage(self, sender: PeerId, receiver: PeerId, packed: bytes) -> bytes:
        if self.rng is None or receiver != self._victim or self.rng.random() < 0.2:
            return packed  # some are fine: what comes after the door is reached, too
        self.done += 1
        return mutated(self.rng, packed)


class Target:
    """The first peer of its stage is the production one; the test speaks for all the others."""

    def __init__(self, stage: int, folder: Path, *, answers: bool = True, host: PeerHost | None = None) -> None:
        self.answers = answers
        self.name = "first" if stage == 0 else "third"
        self.harm = Harm(self.name)
        self.hub, self.problems, self.events = MemoryHub(self.harm), list[dict[str, Any]](), list[Event]()
        self.others = {n: self.hub.join(n) for n in MEMBERS if n != self.name}
        self.got: asyncio.Queue[tuple[PeerId, Frame]] = asyncio.Queue()
        self.forwarded: asyncio.Queue[tuple[PeerId, Frame]] = asyncio.Queue()
        """Forwards that it sent to the next stage, and to whom."""
        for name, net in self.others.items():
            net.receive(partial(self._keep, name))
            net.serve(GetProgress.KIND, self._answer(name))
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: self.problems.append(context))
        self.net = self.hub.join(self.name)
        self.net.on_refusal(lambda who, why: self.events.append(FrameRefused(remote=who, reason=why)))
        self.compute = Checked(stage)
        ctx = Context(self.net, LoopClock(), self.compute, Roster(GENESIS, self.name), PLAN, self.events.append)
        source, host = _Tokens() if stage == 0 else None, host or PeerHost()
        self.peer = Peer(ctx, host=host, source=source, book=Book(Folder(folder, 1)))
        self.running = asyncio.create_task(self.peer.run())

    async def _keep(self, name: str, sender: PeerId, frame: Frame) -> None:
        if frame.kind == Forward.KIND and frame.header["stage"] == 1:
            self.forwarded.put_nowait((name, frame))
        if frame.kind == Backward.KIND:
            self.got.put_nowait((sender, frame))
        elif (
            self.answers and frame.kind == Forward.KIND and frame.header["index"] < MICROBATCHES // 2
        ):  # so the step never ends
            wanted = {k: frame.header[k] for k in ("lineage", "step", "index", "attempt", "trainer")}
            gradient = encode(torch.ones(frame.tensors[0].shape), Codec.FP32)
            answer = Backward(**wanted, stage=1, loss=5.0, busy_s=0.0, away_s=0.0).frame([gradient])
            for _ in range(12):  # most are damaged on their way
                for name in ("third", "last"):  # one of them was asked
                    await self.send(name, answer)

    def _answer(self, name: str) -> Callable[[PeerId, bytes], Awaitable[bytes]]:
        """Still at work on everything: nobody is asked again."""

        async def held(sender: PeerId, payload: bytes) -> bytes:
            everything = tuple(range(MICROBATCHES))
            return Progress(current=True, step=0, stage=MEMBERS[name], in_flight=everything).pack()

        return held

    async def send(self, sender: PeerId, frame: Frame) -> None:
        """Returns when it was handled: what is sent before a refused frame is handled is lost with its stream."""
        channel = {**STEP_KINDS, **OTHER_KINDS}[frame.kind].CHANNEL
        await self.others[sender].send(self.name, frame, channel=channel, timeout_s=20.0)
        await until(lambda: not self.net.inbox, 30)

    async def handled(self) -> None:
        """All that was sent."""
        await until(lambda: not self.net.inbox, 30)
        await asyncio.sleep(0.1)

    def refused(self) -> list[FrameRefused]:
        return [e for e in self.events if isinstance(e, FrameRefused)]


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "did not happen in time"
        await asyncio.sleep(0.001)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
        answer = await target.others["last"].call(target.name, GetProgress.KIND, _ask(), timeout_s=5)
        assert Progress.unpack(answer).current
        await _still_computes_right(target, stage)
        target.running.cancel()
        await asyncio.gather(target.running, return_exceptions=True)

    asyncio.run(scenario())


def _ask() -> bytes:
    return GetProgress(lineage=GENESIS.lineage, step=0).pack()


async def _still_computes_right(target: Target, stage: int) -> None:
    """A microbatch that nobody tampered with goes through."""
    if stage == 0:
        return  # its answer would be up to the next stage, which is the test itself
    await until(lambda: not target.peer.position.work.serving)
    forward = frames(stage, 63)[0]
    forward.header["deadline_s"] = 10.0
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
        await target.send(owing, Done(**request, stage=1, loss=1.0, busy_s=0.0, away_s=0.0).frame())  # without one
        for chunk in (encode(torch.zeros(9), Codec.FP16), encode(torch.zeros(3, 3), Codec.FP32)):
            await target.send("second", Shard(round=bytes(32), step=0, chunk=0).frame([chunk]))
            await target.handled()
        assert [e.remote for e in target.refused()] == [owing] * 3 + ["second"] * 2
        assert target.peer.load() >= held, "it still waits for the answer"
        assert target.compute.computed == 0
        target.running.cancel()
        await asyncio.gather(target.running, return_exceptions=True)

    asyncio.run(scenario())


def test_what_is_sent_again_is_refused_reported_and_counted_against_its_sender(tmp_path: Path) -> None:
    async def scenario() -> None:
        target = Target(1, tmp_path)
        offended: list[str] = []
        target.net.delivery.offended = offended.append
        forward = frames(1, 5)[0]
        await target.send("first", forward)
        await asyncio.wait_for(target.got.get(), 20)
        chunk = Shard(round=bytes(32), step=0, chunk=0).frame([encode(torch.zeros(9), Codec.FP32)])
        for frame, sender in ((forward, "first"), (chunk, "last"), (chunk, "last")):
            await target.send(sender, frame)
        await until(lambda: len(target.refused()) >= 2)
        first, last = sorted(target.refused(), key=lambda e: e.remote)
        assert (first.remote, last.remote) == ("first", "last")
        assert "after its answer" in first.reason
        assert "twice" in last.reason
        assert sorted(offended) == ["first", "last"]
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
        await target.send("first", Back(lineage=b"\xff" * 32, step=0).frame())
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
