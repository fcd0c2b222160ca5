"""A peer at work to which others send, and which they ask, what no correct peer would."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import torch
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
from muletrain.events import Event, FrameRefused
from muletrain.network.base import PeerId
from muletrain.network.delivery import Delivery
from muletrain.network.memory import Conditions, MemoryHub, MemoryNetwork
from muletrain.runs.assemble import RunFacts
from muletrain.runtime.averaging.messages import Reduced, Shard
from muletrain.runtime.checkpoint.checkpointing import Book
from muletrain.runtime.checkpoint.messages import CheckpointEnd, PartReady
from muletrain.runtime.checkpoint.store import Folder
from muletrain.runtime.core.blocks import Block
from muletrain.runtime.core.messages import Message
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.messages import Suspected
from muletrain.runtime.members.roster import Genesis, Member, Roster
from muletrain.runtime.members.row import RoundEntry, Row, Seal, Statements, Sync, TiedEntry
from muletrain.runtime.microbatch.messages import Backward, Forward, Gap, Lost, Room, TrainerDone, Why
from muletrain.runtime.peer.incoming import KINDS as OF_A_PEER
from muletrain.runtime.peer.messages import Presence, Report
from muletrain.runtime.peer.peer import Peer
from muletrain.runtime.peer.reporting import PeerHost
from muletrain.wire.codec import decode, encode, encode_ids, encode_raw
from muletrain.wire.frame import Frame

from .mutations import mutated

MICROBATCHES = 64
KINDS: dict[str, type[Message]] = {**OF_A_PEER, Block.KIND: Block}
"""All frames that a peer takes."""
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
    members=tuple(Member(id=n, name=n, stage=s, trainer=s == 0) for n, s in MEMBERS.items()),
)


def ids(generator: torch.Generator) -> Tensor:
    return torch.randint(0, VOCAB, TOKENS, generator=generator)


def frames(stage: int, index: int) -> list[Frame]:
    """A valid one of each kind, as it would come to a peer of ``stage`` in the first step."""
    generator = torch.Generator().manual_seed(index)
    hidden = torch.randn(*TOKENS, WIDTH, generator=generator)
    inputs = encode_ids(ids(generator)) if stage == 0 else encode(hidden, Codec.FP32)
    at: dict[str, Any] = {"lineage": GENESIS.lineage, "step": 0}
    request = {**at, "index": index, "attempt": 0, "trainer": "first"}
    targets = encode_ids(ids(generator))
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
        "attempt": 0,
        "indices": few,
        "members": ("first", "second"),
        "weights": digest,
        "stop": False,
        "leaves": False,
        "sketch": bytes(256),
    }
    said = {**at, "stage": stage}
    return [
        Forward(**request, stage=stage, accumulate=(0, 1), gradient=stage > 0).frame([inputs, targets]),
        Backward(**request, stage=1, **answer).frame([encode(hidden, Codec.FP32)]),
        Room(**request, stage=1).frame(),
        Lost(**request, stage=1, why=Why.GONE, reason="no").frame(),
        TrainerDone(**at, indices=(index,), losses=(5.0,)).frame(),
        Gap(**at, stage=stage, indices=few).frame(),
        Statements(**said, seal=Seal(**seal)).frame(),
        Shard(round=digest, step=0, chunk=index).frame([chunk]),
        Reduced(round=digest, step=0, chunk=index, square_norm=1.0, finite=True).frame([chunk]),
        Statements(**said, entry=RoundEntry(**entry)).frame(),
        Statements(**said, abstains=1).frame(),
        Statements(**at, stage=0, entries=(RoundEntry(**entry).for_record(),)).frame(),
        Statements(**said, tied=TiedEntry(rounds=(bytes(32), bytes(32)), product=1.0)).frame(),
        Presence(**at).frame(),
        Suspected(**at, peer="second").frame(),
        PartReady(**at | {"step": 1}, stage=stage, size=1 << 20, digest=digest, place="x").frame(),
        CheckpointEnd(**at | {"step": 1}, reason="").frame(),
        Block(digest=digest, block=index).frame([encode_raw(digest)]),
        Report(event='{"kind": "note", "level": "info", "message": "x", "t": 1.0, "peer": "p"}').frame(),
    ]


class Checked(TorchCompute):
    """Notes every tensor that is not what this stage computes with."""

    def __init__(self, stage: int) -> None:
        config = FACTS.config
        setup = StageSetup(config.optimizer, config.train.steps, config.train.seed, config.train.microbatch)
        super().__init__(FACTS.spec, FACTS.cut, stage, setup)
        self.wrong: list[str] = []
        self.computed = 0

    async def forward(
        self, mb: Microbatch, inputs: Tensor, turn: Turn = AT_ONCE, positions: Tensor | None = None
    ) -> Result:
        self._tokens(mb, inputs)
        return await super().forward(mb, inputs, turn, positions)

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
        self.declined: list[Frame] = []
        self.forwarded: asyncio.Queue[tuple[PeerId, Frame]] = asyncio.Queue()
        """Forwards that it sent to the next stage, and to whom."""
        for name, net in self.others.items():
            net.receive(partial(self._keep, name))
            net.serve(Sync.KIND, self._answer(name))
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
        elif frame.kind == Lost.KIND:
            self.declined.append(frame)
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
            return Row(current=True, step=0, stage=MEMBERS[name], in_flight=everything).pack()

        return held

    async def send(self, sender: PeerId, frame: Frame) -> None:
        """Returns when it was handled: what is sent before a refused frame is handled is lost with its stream."""
        channel = KINDS[frame.kind].CHANNEL
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


def run(scenario: Callable[[], Coroutine[Any, Any, None]], timeout_s: float = 120.0) -> None:
    asyncio.run(asyncio.wait_for(scenario(), timeout_s))


async def ended(target: Target) -> None:
    target.running.cancel()
    await asyncio.gather(target.running, return_exceptions=True)


def delivery(net: MemoryNetwork) -> Delivery:
    """What stands between a peer's network and its handlers."""
    return net.delivery


async def ready(target: Target) -> None:
    """Until the peer takes frames."""
    await delivery(target.net).receiver("statements")
