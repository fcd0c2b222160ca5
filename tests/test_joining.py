"""Newcomers on slow links: one state, then what was agreed on meanwhile, step by step, while the others train on."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.config.schema import Codec
from muletrain.events import StateMissed, StepApplied, SteppedBack, TransferFailed
from muletrain.network.base import Channel
from muletrain.network.memory import MemoryHub
from muletrain.policy.deadline import Deadline
from muletrain.runtime.averaging.mean_gradient import PIECE, MeanGradient, encoded_piece
from muletrain.runtime.core import blocks as transfer
from muletrain.runtime.core.blocks import Manifest, StateImage
from muletrain.runtime.core.plan import Plan
from muletrain.runtime.core.times import PATIENCE_S
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.detector import AT_ONCE
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Genesis, Roster
from muletrain.runtime.members.row import RoundEntry, ShardFacts
from muletrain.runtime.microbatch.position import Position
from muletrain.runtime.peer import arrival
from muletrain.runtime.step import gradient_log
from muletrain.runtime.step.gradient_log import GradientLog
from muletrain.runtime.step.record import RecordBuilder
from muletrain.sim.loop import run_virtually
from muletrain.strategies.swarm import SWARM
from muletrain.wire.codec import encoded_size
from proofs.play import play
from proofs.scenario import Fault, Scenario
from proofs.verdict import Outcome, readable
from tests.virtual import virtually

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(400)
NEWCOMER = "peer-0j0"


def slow_link(rate: float, steps: int) -> Scenario:
    """A newcomer whose link carries ``rate`` kB/s: its stage's state are 110 MB, a gradient 9 MB as it travels, a step
    takes 0.8 s."""
    small = ("wire.gradients=int8", "optimizer.eps=0.1", "model.vocab=300", "model.dropout=0.0")
    return Scenario(
        1,
        (2, 1),
        1,
        steps,
        4,
        0.01,
        (Fault(1.0, "join", (NEWCOMER,)),),
        overrides=small,
        narrow=((NEWCOMER, 1e3 * rate),),
        weight=1e3,
        tolerance=5e-3,
    )


def applied(outcome: Outcome, name: str) -> list[tuple[float, int, int]]:
    """(virtual s, steps, microbatches of the last of them) of each step."""
    return [(e.t, e.step, e.microbatches) for e in outcome.of(StepApplied, name)]


def test_over_a_slow_link_one_state_and_the_later_gradients_lead_to_serving_and_nobody_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "BLOCK", 4096)
    right, past = StateImage.send, list[Channel]()

    async def send(self: StateImage, *args: Any) -> None:
        past.append(self.channel)
        await right(self, *args)

    monkeypatch.setattr(StateImage, "send", send)
    outcome = play(slow_link(26e3, 26))
    assert outcome.violations == [], "\n".join(readable(outcome))
    others, own = applied(outcome, "peer-1a"), applied(outcome, NEWCOMER)
    assert [n for _, n, _ in own] == list(range(own[0][1], 27)), "one state, and every step from there on"
    serves = next(t for t, _, microbatches in own if microbatches)
    assert past.count(Channel.BULK) >= 5, "what lies back came in the gaps"
    assert sum(1.0 < t < serves for t, _, _ in others) >= 10, "it was on its way for as many steps"
    took = [b[0] - a[0] for a, b in pairwise(t for t in others if t[0] < serves - 4.2)]  # then it averages, too
    assert max(took[1:]) < 1.1 * min(took[1:]), "the others take their time as before"


def test_two_that_catch_up_do_not_wait_for_each_other() -> None:
    frozen = tuple(Fault(1.0, "freeze", (p,), 15.0) for p in ("peer-0b", "peer-0c"))
    outcome = play(Scenario(3, (3, 1), 1, 40, 4, 0.1, frozen))
    assert outcome.violations == [], "\n".join(readable(outcome))
    away = {"peer-0b", "peer-0c"}
    assert any({e.peer, e.source} == away for e in outcome.of(TransferFailed)), "one asked the other"
    for name in ("peer-0b", "peer-0c"):
        assert next(t for t, _, microbatches in applied(outcome, name) if t > 16.0 and microbatches) < 16.0 + 8.0


def test_a_newcomer_does_not_wait_for_a_member_that_does_not_answer() -> None:
    frozen, joins = Fault(1.0, "freeze", ("peer-1b",), 40.0), Fault(2.0, "join", (NEWCOMER,))
    outcome = play(Scenario(3, (2, 2), 2, 40, 4, 0.01, (frozen, joins)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    first, served = (next(t for t, _, n in applied(outcome, NEWCOMER) if n >= least) for least in (0, 1))
    assert first < 2.0 + 6.0
    assert served < first + 2.0, "nor does it send that member anything"


def test_where_nothing_is_kept_it_takes_state_after_state_and_says_why_it_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "BLOCK", 4096)
    monkeypatch.setattr(arrival, "MAX_PURSUITS", 2)
    monkeypatch.setattr(GradientLog, "nbytes", property(lambda self: 1 << 60))
    outcome = play(slow_link(30e3, 24))
    assert "2 states of stage 0 were too old when they arrived" in outcome.ends.pop(NEWCOMER)
    assert set(outcome.ends.values()) == {"finished"}


# What is kept -----------------------------------------------------------------------------------------------------------


class Vector:
    """What keeping a gradient asks of a ``Compute``."""

    n_params = n_trained = 2 * PIECE + 100

    async def offload(self, fn: Any, *args: Any) -> Any:
        return fn(*args)


def context(codec: Codec = Codec.FP16) -> Context:
    founders = tuple(Member(id=p, name=p, stage=0, trainer=True) for p in "ab")
    genesis = Genesis(
        run_id="r", config=bytes(32), data=bytes(32), stages=1, members=founders, coordinator="a", first_step=0
    )
    plan = Plan(1, 1, 1, 1, 1, 2, lambda s: 1, Codec.INT8, codec, None, lambda s: 0.0, 0, 8, SWARM)
    return Context(MemoryHub().join("a"), LoopClock(), Vector(), Roster(genesis, "a"), plan, emit=lambda event: None)  # type: ignore[arg-type]


def step_of(step: int) -> tuple[RecordBuilder, MeanGradient]:
    facts = ShardFacts(content=bytes(32), square_norm=1.0, finite=True)
    entry = RoundEntry(
        lineage=bytes(32),
        step=step,
        stage=0,
        round=bytes([step] * 32),
        members=("a", "b"),
        shards=(facts, facts),
        stop=False,
        holder="a",
    )
    nobody: Any = SimpleNamespace(stage=lambda stage: (), voters=lambda stage: (), version=0)
    builder = RecordBuilder(step, bytes(32), 1, bytes(32), nobody, LoopClock(), Deadline().seconds)
    builder.add(entry)
    gradient = torch.randn(Vector.n_params, generator=torch.Generator().manual_seed(step)).half().float()
    return builder, MeanGradient(entry, gradient)


def kept(own: GradientLog) -> list[int]:
    return [s for s in range(20) if own.applied("nobody", s, bytes(32)) is not None]


def test_those_believed_dead_are_tried_less_and_less() -> None:
    async def scenario() -> None:
        ctx, tries = context(), list[float]()
        ctx.roster.mark_dead("b")
        begin = ctx.clock.now()
        while (now := ctx.clock.now() - begin) < 3600.0:
            tries += [now] if ctx.detector.worth_a_try(("b",)) else []
            await ctx.clock.sleep(0.5)
        assert sum(t < 10.0 for t in tries) >= 8, "after a short partition they meet soon"
        late = [t for t in tries if t >= 1200.0]
        assert 7 <= len(late) <= 9, "every five minutes"
        assert max(b - a for a, b in pairwise(late)) <= PATIENCE_S + 1.0
        ctx.roster.mark_alive("b")
        assert ctx.detector.worth_a_try(("b",)) == ctx.detector.worth_a_try(("b",)) == ("b",)

    run_virtually(scenario(), 4000, [])


def test_those_long_dead_are_not_all_tried_at_once() -> None:
    async def scenario() -> None:
        ctx = context()
        gone = [f"gone-{k}" for k in range(40)]
        for name in gone:
            ctx.roster.admit(Member(id=name, name=name, stage=0, trainer=False))
        tries = Counter(ctx.detector.worth_a_try(gone))
        assert tries.keys() == set(gone), "they may be back in a moment"
        await ctx.clock.sleep(300.0)
        ctx.roster.admit(Member(id="new", name="new", stage=0, trainer=False))
        assert ctx.detector.worth_a_try([*gone, "new"])[-1] == "new", "whoever has just gone does not wait for them"
        await ctx.clock.sleep(60.0)
        for _ in range(600):
            tried = ctx.detector.worth_a_try(gone)
            assert len(tried) <= AT_ONCE
            tries.update(tried)
            await ctx.clock.sleep(1.0)
        assert min(tries.values()) >= 5, "each after a quarter of the time since it has gone"

    run_virtually(scenario(), 4000, [])


def test_a_step_s_gradient_goes_with_the_step_and_needs_no_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient may have 1 GB, and a process with many objects collects seldom."""
    made, most, begun = weakref.WeakSet[MeanGradient](), 0, MeanGradient.__init__

    def begins(self: MeanGradient, *args: Any, **options: Any) -> None:
        nonlocal most
        begun(self, *args, **options)
        made.add(self)
        most = max(most, len(made))

    monkeypatch.setattr(MeanGradient, "__init__", begins)
    gc.collect()
    gc.disable()
    try:
        outcome = play(Scenario(5, (2, 2), 2, 9, 4, 0.01, ()))
    finally:
        gc.enable()
    assert outcome.violations == []
    assert most <= 4 * 2, "of each peer the last step's, and the present one's"


def test_steps_are_kept_for_those_on_their_way_and_no_longer() -> None:
    async def scenario() -> None:
        own = GradientLog(context(), 1 << 30)
        for step in range(3):
            own.add(*step_of(step))
        assert kept(own) == [2]
        own.follow("n", 3)
        own.follow("m", 5)
        for step in range(3, 8):
            own.add(*step_of(step))
        assert kept(own) == [3, 4, 5, 6, 7]
        assert own.applied("n", 6, bytes(32))[0]  # it has come so far
        own.add(*step_of(8))
        assert kept(own) == [5, 6, 7, 8]
        own.arrived("m")
        own.add(*step_of(9))
        assert kept(own) == [6, 7, 8, 9]
        await asyncio.sleep(gradient_log.GONE_S)  # nothing is heard of 'n' any more
        own.add(*step_of(10))
        assert kept(own) == [10]

    virtually(scenario())


@pytest.mark.parametrize("codec", [Codec.FP16, Codec.FP32])
def test_what_is_kept_is_as_small_as_it_travels_and_bounded(codec: Codec) -> None:
    size = encoded_size(codec, (Vector.n_params,))

    async def scenario() -> None:
        own = GradientLog(context(codec), 5 * size)
        own.follow("n", 0)
        before = step_of(0)[1]
        for step in range(4):
            own.add(*step_of(step))
            await asyncio.sleep(1)
        oldest = Manifest.unpack((await own.image("n", bytes(32), None, None, tied=False)).manifest)
        assert oldest.size == size
        assert oldest.pack() == (await before.image(context(codec))).manifest
        for step in range(4, 12):
            own.add(*step_of(step))
            await asyncio.sleep(1)
        assert len(kept(own)) <= 6
        assert kept(own)[-1] == 11
        assert await own.image("n", before.entry.round, None, None, tied=False) is None, "it is gone"

    virtually(scenario())


def test_what_one_member_computed_alone_is_not_rounded() -> None:
    _, holding = step_of(1)
    alone = MeanGradient(holding.entry.model_copy(update={"members": ("a",)}), holding.values + 1e-6)
    assert encoded_piece(alone, 0, Codec.INT8) == bytes(alone.values[:PIECE].numpy().data.cast("B"))


def test_who_was_told_another_history_takes_its_replicas_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A donor's copy is right, and what it tells of the next step is not: the newcomer arrives where nobody else is."""
    right, lied = Position.advance, list[bool]()

    def advance(self: Position, lineage: bytes) -> None:
        lie = self._ctx.net.peer_id == NEWCOMER and not lied
        lied.extend([True] if lie else [])
        right(self, bytes(31) + b"1" if lie else lineage)

    monkeypatch.setattr(Position, "advance", advance)
    # a link on which the state takes about as long as a step
    outcome = play(
        Scenario(1, (2, 1), 1, 10, 4, 0.01, (Fault(1.0, "join", (NEWCOMER,)),), narrow=((NEWCOMER, 250e6),), weight=1e3)
    )
    assert lied
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.of(StateMissed, NEWCOMER)
    assert any(microbatches for _, _, microbatches in applied(outcome, NEWCOMER))


# Beside training ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rate", [30e3, 40e3, 100e3])
def test_state_over_narrow_uplinks_leaves_the_others_nine_tenths(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BLOCK", 4096)
    donors = (("peer-0a", 1e3 * rate), ("peer-0b", 1e3 * rate))
    outcome = play(replace(slow_link(0, 16), narrow=donors, faults=(Fault(4.0, "join", (NEWCOMER,)),)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    others, came = applied(outcome, "peer-1a"), applied(outcome, NEWCOMER)[0][0]
    took = [(a[0], b[0] - a[0]) for a, b in pairwise(others)]
    before = mean(seconds for begin, seconds in took if begin < 3.0)
    meanwhile = mean(seconds for begin, seconds in took if 3.0 < begin < came)
    assert before > 0.9 * meanwhile


def test_a_newcomer_joins_though_all_that_founded_the_run_are_gone() -> None:
    """It knew nobody but the founding peers, and the others never heard of it: it went back to step 0, alone."""
    first, second, third = "peer-0j", "peer-0k", "peer-0l"
    faults = (
        Fault(1.0, "join", (first,)),
        Fault(6.0, "join", (second,)),
        Fault(10.0, "kill", ("peer-0a",)),
        Fault(14.0, "join", (third,)),
        Fault(18.0, "kill", (first,)),
    )
    outcome = play(Scenario(3, (1,), 1, 120, 4, 0.01, faults))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.ends == dict.fromkeys((second, third), "finished")
    assert not outcome.of(SteppedBack)
    assert any(microbatches for _, _, microbatches in applied(outcome, third))
