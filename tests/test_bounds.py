"""What one member can make another read, hold, compute and send: every kind of message has a bound, and what is beyond
it is refused before any work (docs/trust.md)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import itertools
import pkgutil
import re
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgpack
import pytest
import torch

import muletrain.runs
import muletrain.runtime
from muletrain.config.schema import Codec
from muletrain.errors import Malformed, MuletrainError, ProtocolError, Refused
from muletrain.network import quota
from muletrain.network.delivery import Delivery
from muletrain.network.memory import MemoryHub, MemoryNetwork
from muletrain.network.quota import Quota
from muletrain.network.relay import DIALS, MAX_REQUEST, PIPES_EACH, Relay
from muletrain.policy.cover import Cover, resolve
from muletrain.policy.debts import Debts
from muletrain.policy.recent import MOST, Recent
from muletrain.runs.measure.probing import MOST as MOST_ECHOED
from muletrain.runs.measure.probing import PIECES, Echo, Prober
from muletrain.runtime.checkpoint.store import Key
from muletrain.runtime.core.lifecycle import Lifecycle
from muletrain.runtime.core.messages import Message
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.messages import GetProgress, Progress
from muletrain.runtime.members.rebalancing import Rebalancer
from muletrain.runtime.microbatch.messages import Gap, TrainerDone
from muletrain.runtime.peer.incoming import OTHER_KINDS, STEP_KINDS
from muletrain.runtime.recovery.forks import AskStay, History
from muletrain.runtime.recovery.messages import AskStanding, StepBack
from muletrain.runtime.step.averaging import KEPT_BYTES, Limits
from muletrain.runtime.step.messages import Shard
from muletrain.runtime.transfer import donor as snapshot
from muletrain.runtime.transfer.messages import MAX_RUN, AskBlocks, AskSnapshot
from muletrain.wire.codec import encode, encode_raw, encoded_size
from muletrain.wire.frame import MAX_HEADER, MAX_PAYLOAD, PREFIX, read_frame

from .test_hostile import GENESIS, MEMBERS, PLAN, Target, frames, resident_bytes, until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from muletrain.network.base import Frame
    from muletrain.network.delivery import Delivery
    from muletrain.runtime.microbatch.microbatches import Microbatches

pytestmark = pytest.mark.timeout(300)

MEMORY_TIMES = 80
"""Bytes that a header or a call may cost its receiver, for each of its own: of many empty lists Python makes so
much."""
CPU_S_PER_BYTE = 3e-6
"""Of a header or a call. What is fine costs a tenth of it; the rest is room for a machine that does other things."""
TRUST = Path(__file__).parents[1] / "docs" / "trust.md"


def kinds() -> dict[str, type[Message]]:
    """Every message that has a name, of all modules."""
    for package in (muletrain.runtime, muletrain.runs):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)

    def below(cls: type[Message]) -> Iterator[type[Message]]:
        for sub in cls.__subclasses__():
            yield sub
            yield from below(sub)

    return {c.KIND: c for c in below(Message) if "KIND" in c.__dict__ and c.__module__.startswith("muletrain.")}


KINDS = kinds()


def run(scenario: Callable[[], Coroutine[Any, Any, None]], timeout_s: float = 120.0) -> None:
    asyncio.run(asyncio.wait_for(scenario(), timeout_s))


async def repeat(times: int, what: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    for _ in range(times):
        await what()


async def ended(target: Target) -> None:
    target.running.cancel()
    await asyncio.gather(target.running, return_exceptions=True)


# Every kind ---------------------------------------------------------------------------------------------------------------


def filled(schema: dict[str, Any], length: int, wrong: Any = None) -> Any:
    """A message with ``length`` items in each list at the top, ``wrong`` ones if there are some, and few in those
    inside."""
    known = {d["ref"]: d for d in schema.get("definitions", ())}

    def fill(of: dict[str, Any], length: int) -> Any:
        match of:
            case {"type": "definition-ref", "schema_ref": name}:
                return fill(known[name], length)
            case {"type": "model-fields", "fields": fields}:
                return {name: fill(f["schema"], length) for name, f in fields.items()}
            case {"schema": inner}:
                return fill(inner, length)
            case {"type": "str", "max_length": most}:
                return "a" * min(length, most)
            case {"type": "bytes", "max_length": most}:
                return bytes(max(of.get("min_length", 0), min(length, most)))
            case {"type": "tuple", "variadic_item_index": 0, "items_schema": [item], "max_length": most}:
                few = min(length, most)
                return [wrong] * few if wrong is not None else [fill(item, 3) for _ in range(few)]
            case {"type": "tuple", "items_schema": items}:
                return [fill(item, 3) for item in items]
            case {"type": "literal", "expected": [first, *_]}:
                return first
        return {"float": 0.5, "bool": True}.get(of["type"], of.get("ge", 0))

    return fill(schema, length)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_message_costs_its_receiver_a_bounded_multiple_of_its_bytes(kind: str) -> None:
    """A kind with a field that has no bound has no largest size, and fails here."""
    cls = KINDS[kind]
    assert cls.most() > 0
    schema: Any = cls.__pydantic_core_schema__
    for wrong, length in itertools.product((None, "", [], {}), (30_000, 100)):
        packed: bytes = msgpack.packb(filled(schema, length, wrong))
        names: bytes = msgpack.packb({f"n{k}": 0 for k in range(length)})
        for payload in (packed, names):
            seconds, peak = cost(cls, payload)
            assert seconds <= 0.02 + CPU_S_PER_BYTE * len(payload), (wrong, length)
            assert peak <= (1 << 16) + MEMORY_TIMES * len(payload), (wrong, length)


def cost(cls: type[Message], payload: bytes) -> tuple[float, int]:
    """CPU seconds, the least of three, and bytes at most."""

    def taken() -> float:
        begin = time.process_time()
        with contextlib.suppress(ProtocolError):
            cls.unpack(payload)
        return time.process_time() - begin

    seconds = min(taken() for _ in range(3))
    tracemalloc.start()
    try:
        taken()
        return seconds, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_is_larger_than_its_kind_can_be_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgpack, "unpackb", lambda *_, **__: pytest.fail("unpacked"))
    for cls in KINDS.values():
        if cls.most() < 1 << 20:
            with pytest.raises(Malformed, match="are accepted"):
                cls.unpack(bytes(cls.most() + 1))


def test_a_field_without_a_bound_is_found() -> None:
    class Loose(Message):
        names: tuple[str, ...]

    with pytest.raises(TypeError, match="a list without max_length"):
        Loose.most()


def test_the_table_names_every_kind_and_its_bound() -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \| ([\d.]+ [kM]?B)", TRUST.read_text(), re.MULTILINE))
    assert len(rows) == len(KINDS)
    assert rows == {kind: size(cls) for kind, cls in KINDS.items()}


def size(cls: type[Message]) -> str:
    """Most bytes of a header in a run of 64 microbatches, or of a call, which carries at most 1 MB."""
    most = min(cls.most(64), MAX_HEADER if cls.KIND in STEP_KINDS | OTHER_KINDS else 1 << 20)
    for unit, step in (("B", 1000), ("kB", 1000), ("MB", 1000)):
        if most < step or unit == "MB":
            return f"{most:.0f} {unit}" if unit == "B" or most >= 10 else f"{most:.1f} {unit}"
        most = most / 1000  # type: ignore[assignment]
    raise AssertionError


def delivery(net: MemoryNetwork) -> Delivery:
    """What stands between a peer's network and its handlers."""
    return net.delivery


async def ready(target: Target) -> None:
    """Until the peer takes frames."""
    await delivery(target.net).receiver("seal")


def microbatches(target: Target) -> Microbatches:
    return target.peer._microbatches


# Frames: refused before they are read --------------------------------------------------------------------------------------


class Stream:
    """A frame whose tensors never come; ``read``: bytes that were asked for."""

    def __init__(self, data: bytes) -> None:
        self._data, self.read = data, 0

    async def readexactly(self, n: int) -> bytes:
        part = self._data[self.read : self.read + n]
        self.read += n
        if len(part) < n:
            raise asyncio.IncompleteReadError(part, n)
        return part


def claimed(frame: Frame, tensors: list[tuple[str, tuple[int, ...]]]) -> bytes:
    """``frame`` as if it had other tensors; none of their bytes."""
    header: bytes = msgpack.packb([frame.kind, frame.header, [[codec, list(shape)] for codec, shape in tensors]])
    return PREFIX.pack(b"MT", 1, 0, len(header), sum(encoded_size(*t) for t in tensors)) + header


HUGE: list[tuple[str, tuple[int, ...]]] = [("fp32", (1 << 28,)), ("int8", (1 << 15, 1 << 15)), ("raw", (MAX_PAYLOAD,))]


@pytest.mark.parametrize("stage", [0, 1])
def test_tensors_that_no_correct_peer_sends_are_refused_before_they_are_read(stage: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        target = Target(stage, tmp_path)
        await ready(target)
        offended: list[str] = []
        delivery(target.net).offended = offended.append
        door = delivery(target.net).door("last" if stage else "second")
        for frame, tensor in itertools.product(frames(stage, 3), HUGE):
            for tensors in ([tensor], [tensor] * max(1, len(frame.tensors))):
                stream = Stream(
                    data := claimed(frame, tensors) if sum(encoded_size(*t) for t in tensors) <= MAX_PAYLOAD else b""
                )
                if data:
                    with pytest.raises(ProtocolError):
                        await read_frame(stream, door=door)
                    assert stream.read == len(data), f"{frame.kind} {tensors}: no byte of a tensor"
        for frame in frames(stage, 3):
            held = [(t.codec, t.shape) for t in frame.tensors]
            stream = Stream(data := claimed(frame, held))
            mine = frame.kind != "backward" or stage == 0
            if held and mine:
                with pytest.raises(asyncio.IncompleteReadError):
                    await read_frame(stream, door=door)
                assert stream.read > len(data), f"{frame.kind}: what is expected is read"
        await ended(target)

    run(scenario)


@pytest.mark.parametrize("kind", ["nonsense", "k" * 64, "get_progress", *STEP_KINDS, *OTHER_KINDS])
def test_a_header_larger_than_its_kind_needs_is_not_read(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        target = Target(1, tmp_path)
        await ready(target)
        start: bytes = b"\x93" + msgpack.packb(kind)
        stream = Stream(PREFIX.pack(b"MT", 1, 0, MAX_HEADER, 0) + start + bytes(MAX_HEADER - len(start)))
        if kind != "round_entry":  # that of 4096 members may be as large as any
            with pytest.raises(Malformed, match=r"unknown kind|are accepted"):
                await read_frame(stream, door=delivery(target.net).door("last"))
            assert stream.read < 400
        await ended(target)

    run(scenario)


def test_who_sends_them_is_counted_as_an_offender_and_memory_is_as_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        target, offended = Target(1, tmp_path), list[str]()
        await ready(target)
        delivery(target.net).offended = offended.append
        before = resident_bytes()
        large = encode(torch.zeros(16 << 20), Codec.FP32)
        wrong = [f for f in frames(1, 5) if f.kind in ("forward", "shard", "reduced")]
        for frame in wrong:
            frame.tensors = [large, *frame.tensors[1:]]
            await target.send("last", frame)
            await target.handled()  # what is sent before that is lost with the stream
        assert offended == ["last"] * len(wrong)
        assert len(target.refused()) == len(wrong)
        del large, wrong, frame
        assert resident_bytes() - before < 32 << 20
        await ended(target)

    run(scenario)


def test_a_probe_larger_than_any_is_refused_before_it_is_read() -> None:
    async def scenario() -> None:
        net = MemoryHub().join("a")
        prober = Prober(net, net, "a", cast("Any", None), lambda names: None, cast("Any", None))
        prober.open()
        data = claimed(Echo(number=1).frame([encode_raw(b"")]), [("raw", (MOST_ECHOED // PIECES + 1,))])
        stream = Stream(data)
        with pytest.raises(Malformed, match="too large"):
            await read_frame(stream, door=delivery(net).door("b"))
        assert stream.read == len(data)

    run(scenario)


def test_a_request_for_a_relay_has_a_bound() -> None:
    async def scenario() -> None:
        stream = Stream(PREFIX.pack(b"MT", 1, 0, MAX_REQUEST + 1, 0) + bytes(MAX_REQUEST + 1))
        with pytest.raises(Malformed, match="are accepted"):
            await read_frame(stream, 0, max_header=MAX_REQUEST)
        assert stream.read == PREFIX.size

    run(scenario)


# What is held for one sender ------------------------------------------------------------------------------------------------


def test_chunks_of_one_member_take_no_room_from_the_others_and_are_bounded_by_a_round(tmp_path: Path) -> None:
    """However small they are: each costs more than its values."""

    async def scenario() -> None:
        target = Target(1, tmp_path)
        await ready(target)
        averager = target.peer.runner.state.averager
        limits, taken = Limits.of(target.compute.n_params, PLAN.chunk), 0
        for number in range(10 * limits.sent):
            try:
                chunk = encode(torch.zeros(1), Codec.FP32)
                averager.on_chunk("last", Shard(round=number.to_bytes(32, "big"), step=0, chunk=0), chunk)
                taken += 1
            except ProtocolError:
                pass
        assert taken * (KEPT_BYTES + chunk.nbytes) <= limits.waiting < 3 * (8 * target.compute.n_params + 10_000)
        target.peer.roster.moved("first", 1)
        averager.on_chunk("first", Shard(round=bytes(32), step=0, chunk=1), encode(torch.zeros(9), Codec.FP32))
        await ended(target)

    run(scenario)


def test_tables_by_peer_do_not_grow_with_those_that_are_gone() -> None:
    known: Recent[int] = Recent()
    for k in range(2 * MOST):
        known[str(k)] = k
        known["0"] = 0
    assert len(known) == MOST
    assert {"0", str(2 * MOST - 1)} <= known.keys()
    debts = Debts(per_s=2.0)
    assert debts.add("a", 10.0, now=0.0) == 10.0
    assert debts.owed("a", now=3.0) == 4.0
    assert debts.owed("a", now=9.0) == 0.0


# What is drawn by calls -----------------------------------------------------------------------------------------------------


def test_answers_to_one_member_are_paced_beyond_a_first_amount_and_others_are_not_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(quota, "BURST", 1 << 20)
        monkeypatch.setattr(quota, "PER_S", 1 << 20)
        hub = MemoryHub()
        a, b, c = (hub.join(n) for n in "abc")

        async def answer(sender: str, payload: bytes) -> bytes:
            return bytes(1 << 18)

        a.serve("ask", answer)
        a.serve("gradient", answer, free=True)
        begin = time.monotonic()
        for _ in range(4):
            await b.call("a", "ask", b"", timeout_s=9)
        assert time.monotonic() - begin < 0.3
        await b.call("a", "ask", b"", timeout_s=9)
        assert time.monotonic() - begin > 0.2
        between = time.monotonic()
        await c.call("a", "ask", b"", timeout_s=9)
        await b.call("a", "gradient", b"", timeout_s=9)
        assert time.monotonic() - between < 0.2

    run(scenario)


def test_one_member_has_a_bounded_number_of_calls_answered_at_once() -> None:
    async def scenario() -> None:
        limited, done = Quota(), asyncio.Event()

        async def slow(sender: str, payload: bytes) -> bytes:
            await done.wait()
            return b""

        calls = [asyncio.create_task(limited.answer("a", slow, b"", free=False)) for _ in range(quota.AT_ONCE)]
        await asyncio.sleep(0)
        with pytest.raises(MuletrainError, match="calls of yours"):
            await limited.answer("a", slow, b"", free=False)
        other = asyncio.create_task(limited.answer("b", slow, b"", free=False))
        done.set()
        await asyncio.gather(*calls, other)
        again = [limited.answer("a", slow, b"", free=False) for _ in range(quota.AT_ONCE)]
        assert await asyncio.gather(*again) == [b""] * quota.AT_ONCE, "none of the first ones counts any more"

    run(scenario)


class Donor:
    """Offers copies, and sends them to takers that do not read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stuck = asyncio.Event()

        async def send(ctx: Context, *args: Any, **more: Any) -> None:
            await self.stuck.wait()

        monkeypatch.setattr(Context, "send", send)
        self.hub, self.takers = MemoryHub(), dict[str, MemoryNetwork]()
        self.net, self.n, self.now = self.hub.join("a"), 0, 0.0

        async def state() -> dict[str, torch.Tensor]:
            self.n += 1
            self.now += 3.0  # a large state
            return {"w": torch.full((1000,), float(self.n))}

        async def offload(fn: Any, *args: Any) -> Any:
            return fn(*args)

        own = SimpleNamespace(stage=0)
        chain = SimpleNamespace(lineages=(b"",), at=lambda _: b"")
        self.position: Any = SimpleNamespace(
            step=0, applied=bytes(32), away=False, settled=True, life=Lifecycle(), chain=chain
        )
        log: Any = SimpleNamespace(follow=lambda *_: None, copy=lambda *_: None, reaches=lambda _: False)
        clock: Any = SimpleNamespace(now=lambda: self.now, sleep=asyncio.sleep)
        compute: Any = SimpleNamespace(state=state, offload=offload)
        roster: Any = SimpleNamespace(own=own, expelled=lambda _: False)
        ctx = Context(self.net, clock, compute, roster, cast("Any", None), lambda _: None)

        async def serves(peer: str, stage: int) -> bool:
            return True

        membership: Any = SimpleNamespace(serves=serves)
        self.ctx, self.snapshots = ctx, snapshot.Snapshots(ctx, self.position, log, membership)

    async def offer(self, taker: str) -> bytes:
        self.position.step += 1
        ask = AskSnapshot(stage=0, after=self.position.step).pack()
        return snapshot.Snapshot.unpack(await self.call(taker, AskSnapshot.KIND, ask)).digest

    async def ask(self, taker: str, digest: bytes, blocks: int) -> None:
        await self.call(taker, AskBlocks.KIND, AskBlocks(digest=digest, blocks=(0,) * blocks).pack())

    async def call(self, taker: str, kind: str, payload: bytes) -> bytes:
        if taker not in self.takers:
            self.takers[taker] = self.hub.join(taker)
        return await self.takers[taker].call("a", kind, payload, timeout_s=9)


def test_one_taker_has_a_bounded_number_of_blocks_at_once_and_each_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        donor = Donor(monkeypatch)
        digest = await donor.offer("t")
        donor.position.step -= 1
        assert await donor.offer("other") == digest
        more: bytes = msgpack.packb({"digest": digest, "blocks": [0] * (MAX_RUN + 1)})
        with pytest.raises(Refused):
            await donor.call("t", AskBlocks.KIND, more)
        for _ in range(snapshot.MAX_RUNS):
            await donor.ask("t", digest, MAX_RUN)
        with pytest.raises(MuletrainError, match="enough to send"):
            await donor.ask("t", digest, MAX_RUN)
        await donor.ask("other", digest, 1)
        donor.stuck.set()
        await asyncio.sleep(0.01)
        with pytest.raises(MuletrainError, match="4 times"):
            await donor.ask("t", digest, MAX_RUN)
        await donor.ctx.tasks.close()

    run(scenario)


def test_takers_that_do_not_read_keep_no_more_copies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        donor, made = Donor(monkeypatch), 0
        for k in range(12):
            donor.now += 11.0  # nobody has asked for the others for a while
            try:
                await donor.ask(f"liar-{k}", await donor.offer(f"liar-{k}"), 1)
                made += 1
            except MuletrainError:
                continue
        assert made <= snapshot.MAX_COPIES + 1
        donor.stuck.set()
        await asyncio.sleep(0.01)
        await donor.offer("honest")
        await donor.ctx.tasks.close()

    run(scenario)


def test_one_taker_has_copies_made_for_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        donor = Donor(monkeypatch)
        with pytest.raises(MuletrainError, match="many copies"):
            await repeat(20, lambda: donor.offer("liar"))
        assert 3.0 * donor.n <= snapshot.COPYING_S + 8.0
        await donor.offer("honest")
        donor.now += 120.0
        await donor.offer("liar")
        await donor.ctx.tasks.close()

    run(scenario)


# What one message has a peer ask of others ----------------------------------------------------------------------------------


def test_a_history_or_an_order_told_again_and_again_has_all_peers_asked_now_and_then(tmp_path: Path) -> None:
    async def scenario() -> None:
        target, asked = Target(1, tmp_path), list[str]()

        async def count(sender: str, payload: bytes) -> bytes:
            asked.append(sender)
            raise MuletrainError("no")

        for net in target.others.values():
            for kind in (AskStay.KIND, AskStanding.KIND):
                net.serve(kind, count)
        await ready(target)
        here = Key(target.peer.position.step, target.peer.position.applied)
        for k in range(50):
            tale = History(step=1, lineages=(bytes(32), bytes([k]) * 32), over=True).pack()
            await target.others["last"].call(target.name, History.KIND, tale, timeout_s=9)
            order = StepBack.of(k + 1, here, (), {}, ()).pack()
            await target.others["last"].call(target.name, StepBack.KIND, order, timeout_s=9)
        await asyncio.sleep(0.2)
        assert len(asked) <= 4 * len(MEMBERS)
        await ended(target)

    run(scenario)


def test_looking_for_many_microbatches_asks_each_peer_twice_at_most(tmp_path: Path) -> None:
    async def scenario() -> None:
        target, asked = Target(0, tmp_path, answers=False), 0
        await ready(target)
        survey = microbatches(target).survey

        async def held(sender: str, payload: bytes) -> bytes:
            nonlocal asked
            asked += not GetProgress.unpack(payload).brief
            await asyncio.sleep(0.05)
            return Progress(
                current=True, step=0, stage=1, accumulated=(1, 2), accumulated_losses=(5.0, float("nan"))
            ).pack()

        for net in target.others.values():
            net.serve(GetProgress.KIND, held)
        work = [survey.still_missing(GENESIS.lineage, 0, index, (0, 1), lambda: 30.0) for index in range(4)]
        answers = await asyncio.gather(*work)
        assert asked <= 2 * len(target.others)
        assert [missing for missing, _ in answers[1:]] == [(0,), (0,), (0, 1)]
        assert [loss for _, loss in answers[1:]] == [5.0, None, None]
        del answers
        gc.collect()
        kept = [o for o in gc.get_objects() if type(o) is Progress and o.accumulated == (1, 2)]
        assert not kept, "no answer is kept"
        await ended(target)

    run(scenario)


def test_what_a_replica_holds_that_its_stage_goes_on_without_is_run_again(tmp_path: Path) -> None:
    """Else one that hangs, or lies, would hold up its stage until the others give up. Its own stage must say so, and
    most of it."""

    async def scenario() -> None:
        target = Target(0, tmp_path, answers=False)
        trainers = microbatches(target)._trainers
        await until(lambda: bool(trainers))
        trainer, counts = trainers[0], trainers[0]._counts
        gap: dict[str, Any] = {"lineage": GENESIS.lineage, "step": 0, "stage": 1, "indices": ()}
        assert counts("last")
        await trainer.on_gap("second", Gap(**gap, without=("last",)))
        assert counts("last"), "the word of another stage is not enough"
        await trainer.on_gap("third", Gap(**gap, without=("last",)))
        assert not counts("last")
        assert counts("third")
        await trainer.on_gap("third", Gap(**gap))
        assert counts("last"), "what was said last counts"
        await ended(target)

    run(scenario)


def test_a_relay_gives_one_member_half_of_its_pipes_and_dials_for_it_now_and_then() -> None:
    async def scenario() -> None:
        dialled = 0

        async def dial(*_: Any) -> None:
            nonlocal dialled
            dialled += 1
            raise OSError("nobody there")

        async def connected() -> dict[str, list[str]]:
            return {}

        gate = SimpleNamespace(admitted=lambda _: pytest.fail("looked for a way"))
        p2p: Any = SimpleNamespace(dial=dial, connected=connected, gate=gate)
        relay = Relay(p2p, ("", 0), [], Delivery(), private=False, carries=True, told=lambda *_: None)
        peer = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"
        for _ in range(int(3 * DIALS)):
            assert not await relay._reaches(peer, "relay", ["/ip4/10.0.0.1/tcp/22/p2p/" + peer])
        assert DIALS <= dialled <= DIALS + 2
        relay._streams["a"] = PIPES_EACH + 1
        await relay._lend("a", "b", [], cast("Any", None))

    run(scenario)


# Work that is more than it looks --------------------------------------------------------------------------------------------


def test_a_replica_that_claims_all_microbatches_does_not_stop_the_others_for_long() -> None:
    sealed = {f"r{k:02}": frozenset(range(64 * k, 64 * k + 64)) for k in range(15)}
    sealed["liar"] = frozenset(range(64 * 15))
    begin = time.process_time()
    assert resolve(sealed, 64 * 15) == Cover(("liar",), tuple(sorted(sealed.keys() - {"liar"})), ())
    sealed["liar"] = frozenset(range(0, 64 * 15, 64))
    assert resolve(sealed, 64 * 15).dropped == ("liar",)
    assert time.process_time() - begin < 0.2


def test_what_is_nested_deeply_harms_nobody() -> None:
    deep = b"[" * 60_000
    asked = Rebalancer.__new__(Rebalancer)
    asked._ctx = cast("Any", SimpleNamespace(roster=None))
    assert asked._read("a", deep) is None
    from muletrain.events import Event, EventError

    with pytest.raises(EventError):
        Event.from_json(deep)
    with pytest.raises(ProtocolError):
        TrainerDone.unpack(b"\x91" * 60_000)


def test_many_wrong_fields_are_not_described_one_by_one() -> None:
    names: bytes = msgpack.packb({f"n{k}": 0 for k in range(10_000)})
    with pytest.raises(Malformed, match="fields are invalid"):
        TrainerDone.unpack(names)
