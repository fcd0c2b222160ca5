"""All-reduce and what is held of it: every member states the same facts, and serves what they say, under every
codec."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.compute.jobs import Jobs
from muletrain.config.schema import Codec
from muletrain.errors import ProtocolError
from muletrain.network.base import Channel
from muletrain.network.memory import Conditions, MemoryHub
from muletrain.policy.deadline import CEILING_S
from muletrain.policy.fork_choice import Chain
from muletrain.policy.shards import CHUNK
from muletrain.runtime.averaging.averager import Averager, contents
from muletrain.runtime.averaging.mean_gradient import MeanGradient, fetch_gradient
from muletrain.runtime.averaging.messages import Reduced, Shard
from muletrain.runtime.averaging.rounds import Attendance, Round, RoundFailed, usual_round
from muletrain.runtime.core.blocks import AskBlocks
from muletrain.runtime.core.plan import Plan
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Genesis, Roster
from muletrain.runtime.members.row import RoundEntry, Row, ShardFacts, Sync
from muletrain.sim.loop import run_virtually
from muletrain.strategies.swarm import SWARM
from muletrain.wire.frame import Frame
from tests.runners import runner_of
from tests.virtual import virtually

SIZE = 3 * 4096 + 100
IDS = ("a", "b", "c")
ROUND = Round(bytes(32), bytes(32), 0, 0, IDS, IDS, IDS, 3, SIZE, False)


class Vector:
    """What averaging asks of a ``Compute``."""

    n_params = n_trained = SIZE

    def __init__(self) -> None:
        self.jobs = Jobs(LoopClock().now)

    async def room(self, numbers: int) -> torch.Tensor:
        return torch.empty(numbers)

    async def offload(self, fn: Any, *args: Any) -> Any:
        return fn(*args)


def members(hub: MemoryHub, codec: Codec) -> dict[str, tuple[Context, Averager]]:
    founders = tuple(Member(id=p, name=p, stage=0, trainer=True) for p in IDS)
    genesis = Genesis(
        run_id="r", config=bytes(32), data=bytes(32), stages=1, members=founders, coordinator="a", first_step=0
    )
    plan = Plan(1, 1, 3, 1, 1, 2, lambda s: 1, Codec.INT8, codec, None, lambda s: 0.0, 0, 8, SWARM)
    found = {}
    for p in IDS:
        net = hub.join(p)
        ctx = Context(net, LoopClock(), Vector(), Roster(genesis, p), plan, emit=lambda event: None)  # type: ignore[arg-type]
        averager = Averager(ctx, tuple, usual_round())

        async def on_frame(sender: str, frame: Any, averager: Averager = averager) -> None:
            if frame.kind == "wrong":
                raise ProtocolError("no frame of this protocol")
            kind = Shard if frame.kind == Shard.KIND else Reduced
            averager.on_chunk(sender, kind.parse(frame), frame.tensors[0])

        net.receive(on_frame)
        found[p] = ctx, averager
    return found


def gives(ctx: Context, gradient: MeanGradient, after_s: float = 0.0) -> None:
    """The peer of ``ctx`` holds ``gradient``, and each run of its blocks comes ``after_s`` seconds after the question."""

    async def blocks(sender: str, payload: bytes) -> bytes:
        ask, image = AskBlocks.unpack(payload), await gradient.image(ctx)
        if not ask.blocks:
            assert ask.digest == gradient.entry.round
            return image.manifest
        await asyncio.sleep(after_s)
        for block in ask.blocks:
            ctx.spawn(image.send(ctx.blocks, sender, block), "blocks")
        return b""

    ctx.net.serve(AskBlocks.KIND, blocks)


def gradients() -> dict[str, torch.Tensor]:
    return {p: torch.randn(SIZE, generator=torch.Generator().manual_seed(k)) for k, p in enumerate(IDS)}


@pytest.mark.parametrize("codec", [Codec.FP32, Codec.FP16, Codec.INT8, Codec.DYNAMIC8])
def test_every_member_states_the_same_and_serves_what_it_states(codec: Codec) -> None:
    async def scenario() -> None:
        group, own = members(MemoryHub(), codec), gradients()
        results = await asyncio.gather(*(averager.reduce(ROUND, own[p]) for p, (_, averager) in group.items()))
        (gradient, facts), *others = results
        assert all(torch.equal(gradient, g) and facts == f for g, f in others)
        assert (gradient - sum(own.values()) / 3).norm() < 0.02 * gradient.norm()
        assert sum(f.square_norm for f in facts) == pytest.approx(float(gradient.norm()) ** 2, rel=1e-5)
        assert contents(gradient, 3, CHUNK) == tuple(f.content for f in facts)
        entry = RoundEntry(
            lineage=bytes(32),
            step=0,
            stage=0,
            round=ROUND.id,
            members=IDS,
            shards=facts,
            stop=False,
            holder="a",
        )
        (giver, _), (taker, _) = group["a"], group["b"]
        gives(giver, MeanGradient(entry, gradient))
        blocks = taker.downloader()
        taken = await fetch_gradient(taker, blocks, entry, ["a"])
        assert taken is not None
        assert torch.equal(taken.values, gradient)
        assert taker.roster.is_alive("a")
        gradient[5] += 1.0
        gives(giver, MeanGradient(entry, gradient))
        assert await fetch_gradient(taker, blocks, entry, ["a"]) is None, "it is not what its holders attest"
        assert not taker.roster.is_alive("a")

    virtually(scenario())


@pytest.mark.parametrize("magnitude", [1e-22, 1e-15, 1e-8, 1.0, 1e6, 1e15])
@pytest.mark.parametrize("codec", [Codec.FP16, Codec.INT8])
def test_averaging_is_as_exact_at_any_magnitude_as_in_fp32(codec: Codec, magnitude: float) -> None:
    """fp16 had no scale: a loss on targets of 1e4 was never finite, and one of 1e-8 was trained 30 times less by two
    replicas than by one."""

    async def mean(codec: Codec) -> tuple[torch.Tensor, float]:
        group, own = members(MemoryHub(), codec), gradients()
        work = (averager.reduce(ROUND, own[p] * magnitude) for p, (_, averager) in group.items())
        (found, facts), *_ = await asyncio.gather(*work)
        assert all(f.finite for f in facts)
        return found, sum(f.square_norm for f in facts)

    async def scenario() -> None:
        (exact, square), (found, found_square) = await mean(Codec.FP32), await mean(codec)
        assert (found / magnitude - exact / magnitude).norm() < (0.02 if codec is Codec.INT8 else 1e-3) * (
            exact / magnitude
        ).norm()
        assert found_square == pytest.approx(square, rel=1e-2)
        assert square == pytest.approx(float(exact.double().norm()) ** 2, rel=1e-6)

    virtually(scenario())


@pytest.mark.parametrize("frozen", [True, False])
def test_a_holder_that_is_frozen_is_given_up_soon_and_a_slow_one_is_not(frozen: bool) -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        group = members(hub, Codec.FP32)
        ctx, giver = group["b"][0], group["a"][0]
        gradient = torch.zeros(SIZE)
        facts = ShardFacts(content=contents(gradient, 1, CHUNK)[0], square_norm=0.0, finite=True)
        entry = RoundEntry(
            lineage=bytes(32),
            step=0,
            stage=0,
            round=ROUND.id,
            members=("a",),
            shards=(facts,),
            stop=False,
            holder="a",
        )

        async def held(sender: str, payload: bytes) -> bytes:
            return Row(current=False, step=1, stage=0).pack()

        gives(giver, MeanGradient(entry, gradient), after_s=25.0)
        giver.net.serve(Sync.KIND, held)
        blocks = ctx.downloader()
        await ctx.detector.is_gone("a", bytes(32), 0)
        if frozen:
            hub.barriers.freeze("a")
            assert await fetch_gradient(ctx, blocks, entry, ["a"]) is None
            assert ctx.clock.now() < 5.0
            assert not ctx.roster.is_alive("a")
        else:
            taken = await fetch_gradient(ctx, blocks, entry, ["a"])
            assert taken is not None
            assert torch.equal(taken.values, gradient)
            assert ctx.roster.is_alive("a")

    virtually(scenario())


def test_who_applies_a_step_for_long_is_waited_for_as_long_as_that_takes() -> None:
    """Large stages: 10 s a step here, and a slower device still applies it when we ask."""

    async def scenario() -> None:
        group = members(MemoryHub(), Codec.FP32)
        ctx, other = group["a"][0], group["b"][0].net
        runner = runner_of(ctx)

        async def held(sender: str, payload: bytes) -> bytes:
            return Row(current=False, step=0, stage=0).pack()

        async def apply(gradient: Any, update: Any, turn: Any) -> None:
            await asyncio.sleep(10.0)

        async def digest() -> bytes:
            return bytes(32)

        ctx.compute.apply, ctx.compute.digest = apply, digest  # type: ignore[method-assign]
        ctx.compute.clear = lambda step: None  # type: ignore[method-assign]
        other.serve(Sync.KIND, held)
        await runner.apply(SimpleNamespace(clip_scale=lambda clip: 1.0, skip=False), torch.zeros(SIZE))  # type: ignore[arg-type]
        await runner.rejoin(Chain(1, (bytes(32),)))
        await runner.exchange.ask("b")
        await asyncio.sleep(12.0)
        await runner.exchange.ask("b")
        assert ctx.roster.is_alive("b")
        await asyncio.sleep(60.0)
        await runner.exchange.ask("b")
        assert not ctx.roster.is_alive("b")

    virtually(scenario())


def test_a_norm_that_is_not_that_of_its_chunk_fails_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Context.send

    async def lies(self: Context, peer: str, message: Any, tensors: Any = (), **how: Any) -> None:
        if isinstance(message, Reduced):
            message = message.model_copy(update={"square_norm": message.square_norm * 1.01})
        await right(self, peer, message, tensors, **how)

    monkeypatch.setattr(Context, "send", lies)

    async def scenario() -> None:
        group, own = members(MemoryHub(), Codec.FP32), gradients()
        work = (averager.reduce(ROUND, own[p]) for p, (_, averager) in group.items())
        results = await asyncio.gather(*work, return_exceptions=True)
        assert all(isinstance(r, RoundFailed) for r in results)
        assert any("norm" in str(r) for r in results)

    virtually(scenario())


def test_what_is_not_finite_is_agreed_on_whatever_it_is() -> None:
    async def scenario() -> None:
        group, own = members(MemoryHub(), Codec.FP16), gradients()
        own["b"][4200] = float("nan")
        results = await asyncio.gather(*(averager.reduce(ROUND, own[p]) for p, (_, averager) in group.items()))
        facts = {r[1] for r in results}
        assert len(facts) == 1
        assert [f.finite for f in results[0][1]] == [True, False, True]

    virtually(scenario())


class FarApart(Conditions):
    """Two of the members are."""

    def delay_s(self, sender: str, receiver: str) -> float:
        return 1.0 if {sender, receiver} == {"a", "b"} else 0.1


@pytest.mark.parametrize("already_waiting", [True, False])
def test_chunks_that_were_lost_with_their_stream_fail_the_round_at_once(already_waiting: bool) -> None:
    """Neither side would find out by itself: the sender believes that they came, and answers probes."""

    async def scenario() -> None:
        hub = MemoryHub(FarApart())
        group, own = members(hub, Codec.FP32), gradients()
        for ctx, averager in group.values():
            ctx.net.on_lost(averager.broken)
        names = IDS if already_waiting else IDS[1:]
        work = [asyncio.create_task(group[p][1].reduce(ROUND, own[p])) for p in names]
        await asyncio.sleep(0.5)
        hub.barriers.cut("a", "b")
        await asyncio.sleep(2.0)
        hub.barriers.mend("a", "b")
        if not already_waiting:
            await asyncio.sleep(2.0)
            work.append(asyncio.create_task(group["a"][1].reduce(ROUND, own["a"])))
        done, pending = await asyncio.wait(work, timeout=10.0)
        assert {type(t.exception()) for t in done} == {RoundFailed}
        for task in pending:
            task.cancel()
        assert (work[0] if already_waiting else work[-1]) in done

    virtually(scenario())


def test_refused_frames_on_other_channels_than_that_of_chunks_fail_no_round() -> None:
    async def scenario() -> None:
        hub = MemoryHub(FarApart())
        group, own = members(hub, Codec.FP32), gradients()
        lost: list[Channel] = []
        for ctx, averager in group.values():

            def on_lost(peer: str, channel: Channel, averager: Averager = averager) -> None:
                lost.append(channel)
                averager.broken(peer, channel)

            ctx.net.on_lost(on_lost)
        work = [asyncio.create_task(group[p][1].reduce(ROUND, own[p])) for p in IDS]
        for _ in range(5):
            for to, channel in itertools.product("ab", [c for c in Channel if c is not Channel.AVERAGE]):
                await group["c"][0].net.send(to, Frame("wrong", {}), channel=channel)
            await asyncio.sleep(0.3)
        assert Channel.CONTROL in lost
        assert len({facts for _, facts in await asyncio.gather(*work)}) == 1

    virtually(scenario())


def test_a_refused_frame_on_the_channel_of_chunks_fails_the_round_at_once_and_counts_against_its_sender() -> None:
    """The chunks behind it are lost, and its receiver knows that, too."""

    async def scenario() -> None:
        group, own = members(MemoryHub(FarApart()), Codec.FP32), gradients()
        for ctx, averager in group.values():
            ctx.net.on_lost(averager.broken)
        work = [asyncio.create_task(group[p][1].reduce(ROUND, own[p])) for p in "ab"]
        await asyncio.sleep(0.5)
        await group["c"][0].net.send("b", Frame("wrong", {}), channel=Channel.AVERAGE)
        await asyncio.sleep(0.5)
        assert isinstance(work[1].exception(), RoundFailed)
        assert group["b"][1].silent() == {"c": 1}
        group["b"][1].begin()
        assert group["b"][1].silent() == {}
        assert group["b"][1].owing() == {}, "else later rounds wait for a member that is not in them"
        assert not work[0].done()
        work[0].cancel()

    virtually(scenario())


def test_a_member_that_says_it_comes_on_but_sends_nothing_fails_the_round() -> None:
    """It answers every question, so it is never silent."""

    async def scenario() -> None:
        clock, moved = LoopClock(), itertools.count()

        async def probe(*_: Any, brief: bool) -> Row:
            return Row(current=True, step=0, stage=0, round=ROUND.id, moved=next(moved))

        detector, roster = SimpleNamespace(probe=probe, silent_s=lambda member: 0.0), SimpleNamespace(name=str)
        ctx: Any = SimpleNamespace(clock=clock, detector=detector, roster=roster)
        watching = Attendance(ctx, ROUND, lambda: {"b": 2}, set, tuple, CEILING_S).watch()
        with pytest.raises(RoundFailed, match="has sent nothing for 60"):
            await asyncio.wait_for(watching, 2 * CEILING_S)

    run_virtually(scenario(), 2 * CEILING_S, [])


def test_chunks_of_rounds_that_failed_use_up_nobodys_room() -> None:
    """After some attempts in vain the chunks of an honest member were refused for the rest of the step."""

    async def scenario() -> None:
        group, own = members(MemoryHub(), Codec.FP32), gradients()
        for k in range(1, 12):
            attempt = replace(ROUND, id=bytes([k]) * 32)
            work = [asyncio.create_task(group[p][1].reduce(attempt, own[p])) for p in IDS if p != "b"]
            await asyncio.sleep(1.0)
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        means = await asyncio.gather(*(group[p][1].reduce(ROUND, own[p]) for p in IDS))
        assert all(torch.equal(mean, means[0][0]) for mean, _ in means)

    virtually(scenario())
