"""False gradients: those that stand out are computed again by another peer, and only disagreement has consequences."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from muletrain.compute.arithmetic import StageArithmetic
from muletrain.errors import ProtocolError
from muletrain.events import (
    Event,
    FaultInjected,
    FrameRefused,
    GradientStandsOut,
    PeerExpelled,
    ResultsDiffer,
    StepApplied,
    StepSkipped,
)
from muletrain.optim.sketch import SIZE, packed, sketch, unpacked
from muletrain.policy.outliers import Sum, alike, outlying, strange
from muletrain.runs.chaos import spoil_next
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Genesis, Roster
from muletrain.runtime.members.row import Seal
from muletrain.runtime.microbatch.messages import Forward
from muletrain.runtime.microbatch.stage_server import StageServer
from muletrain.runtime.step.audit import Audit, most_accuse, standing_out
from muletrain.wire.frame import Frame
from proofs.play import play
from proofs.reference import SingleProcess, facts_of, stage_compute
from proofs.scenario import Fault, Scenario
from proofs.verdict import Outcome, readable

pytestmark = pytest.mark.timeout(480)
EXPELLED = "does not compute what its replicas compute"


# What stands out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [5, SIZE, 100_003])
def test_a_sketch_is_linear_and_as_long_as_its_gradient(n: int) -> None:
    a, b = torch.randn(n), 3 * torch.randn(n)
    first, second, both = (sketch(x, b"seed") for x in (a, b, a + b))
    assert np.allclose(both, first + second, rtol=0, atol=1e-5 * float((a + b).norm()))
    assert np.linalg.norm(first) == pytest.approx(float(a.norm()), rel=0.5)
    assert n < 1000 or not np.allclose(sketch(a, b"another"), first)
    a[n // 2] = math.nan
    assert not np.isfinite(unpacked(packed(sketch(a, b"seed")))).all()


def test_signs_never_change() -> None:
    """Peers of other versions draw the same; else each would find that the other computes falsely."""
    ones = sketch(torch.ones(3 * SIZE), bytes(range(32)))
    assert set(ones) == {ones[0]}
    rows = [sketch(torch.eye(500, 1).roll(64 * k, 0).flatten(), bytes(range(32)))[0] for k in range(6)]
    assert rows == [-1, -1, -1, 1, -1, -1]


def sums(**lengths: tuple[int, float]) -> dict[str, Sum]:
    """(count, length of the mean) by member."""
    direction = np.full(SIZE, SIZE**-0.5)
    return {m: Sum(count, direction * length * count) for m, (count, length) in lengths.items()}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (sums(a=(4, 1.0), b=(4, 1.2), c=(1, 2.4)), []),
        (sums(a=(4, 1.0), b=(4, 100.0), c=(4, 1.1)), ["b"]),
        (sums(a=(4, 1.0), b=(4, 100.0)), ["b"]),
        (sums(a=(4, 1.0), b=(4, math.nan)), ["b"]),
        (sums(a=(4, 1.0), b=(4, math.inf), c=(2, math.nan)), ["c", "b"]),
        (sums(a=(4, 1.0), b=(4, 0.0)), ["b"]),
        (sums(a=(4, 1.0), b=(4, 0.01)), ["a"]),  # of two the larger: if it is right, nothing but time is lost
        (sums(a=(4, 1.0), b=(4, 0.01), c=(4, 1.0)), ["b"]),
        (sums(a=(64, 1.0), b=(1, 20.0)), []),  # noise: one microbatch is up to 8 times as long as the mean of 64
        (sums(a=(64, 1.0), b=(1, 200.0)), ["b"]),
        (sums(a=(4, math.nan), b=(4, math.nan)), []),  # they confirm each other
        (sums(a=(4, 0.0), b=(4, 0.0)), []),
        (sums(a=(4, math.nan)), ["a"]),
        (sums(a=(4, 1e9)), []),  # nothing to compare it with
        ({}, []),
    ],
)
def test_who_is_suspected(given: dict[str, Sum], expected: list[str]) -> None:
    assert outlying(given) == expected


def test_honest_gradients_of_few_microbatches_are_not_suspected() -> None:
    """Pure noise in many dimensions, or none at all; each replica has its share of 16 microbatches."""
    rng = np.random.default_rng(0)
    for noise in (0.0, 1.0, 100.0):
        for _ in range(200):
            counts = rng.multinomial(16, rng.dirichlet(np.ones(3)))
            made = {
                str(k): Sum(int(n), n * np.ones(SIZE) + noise * math.sqrt(n) * rng.standard_normal(SIZE))
                for k, n in enumerate(counts)
                if n
            }
            assert outlying(made) == []


def test_what_is_alike() -> None:
    a = np.linspace(1, 2, SIZE)
    assert alike(a, a * 1.05)
    assert not alike(a, a * 2)
    assert not alike(a, -a)
    assert alike(a * math.nan, a * math.inf)
    assert not alike(a, a * math.nan)
    assert alike(0 * a, 0 * a)


def test_what_is_strange() -> None:
    assert not strange(1e9, [])
    assert strange(math.inf, [])
    assert strange(50.0, [1.0, 2.0, 1.0])
    assert not strange(5.0, [1.0, 2.0, 1.0])
    assert strange(0.0, [1.0])
    assert not strange(0.0, [0.0])


# Who is left out ------------------------------------------------------------------------------------------------------

ONE = np.linspace(1, 2, SIZE)


def seal(*indices: int, total: float | None = None, gave_up: tuple[int, ...] = (), accused: str = "") -> Seal:
    """``total``: the sketch, in multiples of one that a microbatch has."""
    return Seal(
        attempt=0,
        indices=indices,
        members=("a",),
        weights=bytes(32),
        stop=False,
        leaves=False,
        sketch=packed((len(indices) if total is None else total) * ONE),
        gave_up=gave_up,
        accused=tuple(accused),
    )


def test_who_stands_out_is_left_out_unless_it_is_the_second_result() -> None:
    seals = {"a": seal(0, 1, 2), "b": seal(3, 4, total=math.nan), "c": seal(5)}
    assert standing_out(seals, again=()) == ["b"]
    assert standing_out({"a": seal(0, 1, 2), "b": seal(3), "c": seal(5)}, again=()) == []
    assert standing_out({"b": seal(3, 4, total=math.nan)}, again=()) == ["b"], "alone"
    assert standing_out({"b": seal(3, 4, total=200)}, again=()) == [], "nothing to compare it with"
    assert standing_out({"a": seal(0, 1), "c": seal(2, 3, 4, total=501)}, again=(2, 3)) == []
    assert standing_out({"a": seal(0, 1), "c": seal(2, 3, 4, total=501)}, again=(7,)) == ["c"]


@pytest.mark.parametrize(
    ("accused", "expelled"),
    [
        ({"a": "", "b": "a", "c": ""}, ()),  # one accuser is not enough
        ({"a": "", "b": "a", "c": "a"}, ("a",)),
        ({"a": "a", "b": "a"}, ()),
        ({"a": "", "b": "a", "c": "a", "d": "", "e": ""}, ()),  # nor are two of four
        ({"a": "", "b": "a", "c": "a", "d": "a", "e": ""}, ("a",)),
        ({"a": "", "b": "c", "c": "b", "d": ""}, ()),
        ({"c": "", "a": "c", "b": "c"}, ()),  # the checkpoint coordinator of these tests
    ],
)
def test_who_is_expelled(accused: dict[str, str], expelled: tuple[str, ...]) -> None:
    assert most_accuse({m: seal(accused=who) for m, who in accused.items()}, spared="c") == expelled


def test_the_expelled_are_not_counted_in_again() -> None:
    members = tuple(Member(id=p, name=p, stage=0, trainer=True) for p in "ab")
    roster = Roster(
        Genesis(run_id="r", config=bytes(32), data=bytes(32), stages=1, members=members, coordinator="a", first_step=0),
        "a",
    )
    roster.expel("b")
    assert not roster.mark_alive("b")
    assert roster.stage(0) == ("a",)
    with pytest.raises(ProtocolError, match="expelled"):
        roster.admit(members[1].model_copy(update={"since": 5}))


def test_chaos_spoils_one_gradient() -> None:
    compute = stage_compute(facts_of(Scenario(1, (1, 1), 1, 1, 1, 0.0, ())), 0)
    spoil_next(compute)

    async def finite(step: int) -> bool:
        return bool((await compute.gradient(step)).isfinite().all())

    async def scenario() -> None:
        (await compute.gradient(0))[1] = 1.0
        assert await finite(0), "it may be sealed already"
        compute.clear(0)
        assert await finite(1), "of no microbatches: nobody would miss it"
        (await compute.gradient(1))[1] = 1.0
        assert not await finite(1)
        compute.clear(1)
        assert await finite(1)

    asyncio.run(scenario())


# Whole runs -----------------------------------------------------------------------------------------------------------


def played(stages: tuple[int, ...], *faults: Fault, steps: int = 3) -> Outcome:
    outcome = play(Scenario(1, stages, 2, steps, 8, 0.01, faults))
    assert outcome.violations == [], "\n".join(readable(outcome))
    return outcome


def corrupt(who: str, how: str, for_s: float = 0.8) -> Fault:
    """During the first step."""
    return Fault(0.0, "corrupt", (who,), for_s, how=how)


@pytest.fixture
def liars_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer never finds itself faulty."""
    right = Audit.is_faulty

    def others_are(self: Audit, member: str) -> bool:
        return right(self, member) and member != self.me

    monkeypatch.setattr(Audit, "is_faulty", others_are)


@pytest.mark.usefixtures("liars_stay")
@pytest.mark.parametrize("how", ["nan", "hundredfold", "zero"])
def test_of_three_the_liar_is_expelled_and_no_number_changes(how: str) -> None:
    outcome = played((2, 3), corrupt("peer-1a", how, 60.0), steps=5)
    assert [p for p, end in outcome.ends.items() if EXPELLED in end] == ["peer-1a"]
    assert len(outcome.of(PeerExpelled, peer_id="peer-1a")) == 4, "all others take note of it"
    assert not outcome.of(StepApplied, skipped=True)


@pytest.mark.usefixtures("liars_stay")
def test_who_missed_that_it_is_expelled_hears_of_it_from_the_record_or_those_with_its_state() -> None:
    """It would go on otherwise, among those that do not listen to it any more, and its owner would never know."""
    told = {EXPELLED, "was expelled: it computed false gradients"}
    heard = set[str]()
    # in one of these moments it has what the others judge it by, in another not
    for seed, before_s in itertools.product((7, 1, 9, 13, 5, 19), (0.005, 0.01, 0.015)):
        liar = corrupt("peer-1a", "hundredfold", 60.0)
        end = frozen_before(PeerExpelled, seed, before_s, for_s=0.9, liar=liar).ends["peer-1a"]
        assert any(text in end for text in told), end
        heard |= {text for text in told if text in end}
        if heard == told:
            return
    raise AssertionError(f"only: {heard}")


@pytest.mark.parametrize("seed", [22, pytest.param(24, marks=pytest.mark.slow)])
def test_where_all_that_are_left_gave_up_they_stand_for_what_they_compute_again(seed: int) -> None:
    """The liar freezes while others compute its microbatches again; when it is back, they may have lost another."""
    for before_s in (-0.3, -0.03, 0.005, 0.03, 0.3):
        frozen_before(GradientStandsOut, seed, before_s, for_s=2.5, liar=corrupt("peer-1a", "hundredfold"))


def frozen_before(kind: type[Event], seed: int, before_s: float, for_s: float, liar: Fault) -> Outcome:
    """The liar freezes so long before the first event of ``kind``."""
    late = Fault(60.0, "freeze", ("peer-1a",), for_s)  # a world without a freeze goes another way
    scenario = Scenario(seed, (2, 3), 2, 9, 8, 0.01, (liar, late))
    at_s = play(scenario).of(kind)[0].t
    outcome = play(replace(scenario, faults=(liar, replace(late, at_s=at_s - before_s))))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.of(FaultInjected, what="freeze"), "it froze before it left"
    return outcome


def test_one_bad_moment_leaves_a_replica_out_of_the_step_and_no_number_changes() -> None:
    outcome = played((2, 2), corrupt("peer-1b", "hundredfold"))
    assert set(outcome.ends.values()) == {"finished"}
    assert outcome.of(ResultsDiffer, step=1, name="peer-1b")
    assert outcome.of(StepApplied, "peer-1b", step=1, stage=1, skipped=False, microbatches=0)


def test_who_computes_falsely_step_after_step_leaves() -> None:
    outcome = played((2, 2), corrupt("peer-1b", "nan", 60.0))
    assert outcome.ends["peer-1b"].startswith("step 2: this peer")
    assert EXPELLED in outcome.ends["peer-1b"]


@pytest.mark.parametrize(("stages", "begin_s"), [((3, 2, 3), 2.2), ((2, 3, 2), 0.0)])
def test_false_gradients_of_a_middle_stage_are_not_blamed_on_those_before_it(
    stages: tuple[int, ...], begin_s: float
) -> None:
    """Nor in the very first step, when nobody knows yet how long gradients are: then two peers of three decide."""
    outcome = played(stages, Fault(begin_s, "corrupt", ("peer-1b",), 0.8, how="hundredfold"))
    assert {end for p, end in outcome.ends.items() if p != "peer-1b"} == {"finished"}
    assert {e.remote for e in outcome.of(FrameRefused)} == {"peer-1b"}
    assert not [e for e in outcome.of(GradientStandsOut) if e.name.startswith("peer-0")]


def test_activations_that_another_replica_computes_finite_cost_no_number() -> None:
    outcome = played((2, 2), corrupt("peer-0b", "activations"))
    assert set(outcome.ends.values()) == {"finished"}
    assert outcome.of(FrameRefused, remote="peer-0b")


@pytest.mark.parametrize(("stages", "how"), [((2, 1), "nan"), ((2, 1, 2), "activations")])
def test_a_lone_replica_s_bad_moment_costs_no_number(stages: tuple[int, ...], how: str) -> None:
    """Whom it gave what is not finite, compute it again, too."""
    outcome = played(stages, corrupt("peer-1a", how, 0.4))
    assert set(outcome.ends.values()) == {"finished"}
    assert not outcome.of(StepApplied, skipped=True)


@pytest.mark.parametrize("judge", ["peer-1b", "peer-1c"])
def test_the_judge_may_die(judge: str) -> None:
    played((2, 3), corrupt("peer-1a", "nan"), Fault(1.1, "kill", (judge,)))


def not_finite(patch: pytest.MonkeyPatch, stage: int, *, activations: bool = False, factor: float = math.nan) -> None:
    """Microbatch 3 of step 1 is like that, whoever computes it: also where a single process does."""
    forward, differentiate = StageArithmetic.forward, StageArithmetic.differentiate
    mean_gradient = SingleProcess.mean_gradient

    def spoiled_forward(self: StageArithmetic, mb: Any, inputs: Any, stash: bool, positions: Any) -> Any:
        kept, output = forward(self, mb, inputs, stash, positions)
        return kept, output * math.nan if activations and mb[:2] == (1, 3) and self.stage == stage else output

    def spoiled(self: StageArithmetic, mb: Any, output: Any, leaf: Any, seed: Any, accumulate: bool) -> Any:
        bad = mb[:2] == (1, 3) and not activations and self.stage == stage
        return differentiate(self, mb, output, leaf, seed * factor if bad else seed, accumulate)

    def spoiled_mean(self: SingleProcess, step: int, inputs: Any, targets: Any) -> Any:
        up_to, before = (k * mean_gradient(self, step, inputs[:k], targets[:k])[0] for k in (4, 3))
        third, (mean, loss) = (up_to - before) / len(inputs), mean_gradient(self, step, inputs, targets)
        return mean + (third * (factor - 1) if step == 1 else 0.0), loss

    patch.setattr(StageArithmetic, "forward", spoiled_forward)
    patch.setattr(StageArithmetic, "differentiate", spoiled)
    patch.setattr(SingleProcess, "mean_gradient", spoiled_mean)


@pytest.mark.parametrize(
    ("stages", "activations"), [((2, 2), False), ((2, 3, 1), False), ((1, 1), False), ((2, 2), True), ((1, 1, 2), True)]
)
def test_a_step_that_is_not_finite_is_skipped_by_everyone_as_by_a_single_process(
    stages: tuple[int, ...], activations: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_finite(monkeypatch, len(stages) - 2 if activations else len(stages) - 1, activations=activations)
    outcome = played(stages)
    assert set(outcome.ends.values()) == {"finished"}, "nobody lied"
    assert {e.skipped for e in outcome.of(StepApplied, step=2)} == {True}
    assert len(outcome.of(StepApplied, step=2)) == len(outcome.of(StepApplied, skipped=True)) == sum(stages)
    assert outcome.of(StepSkipped)
    assert not outcome.of(ResultsDiffer)


def test_who_finds_that_a_microbatch_is_not_finite_is_asked_again_where_nobody_else_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other replica declines it until then."""
    not_finite(monkeypatch, 0, activations=True)
    right, declined, again = StageServer.on_forward, list[str](), list[str]()

    async def first_declined(self: StageServer, sender: str, message: Forward, frame: Frame) -> None:
        if (message.step, message.index) == (1, 3) and not again:
            if self.ctx.roster.own.name == "peer-0b":
                declined.append(sender)
                return self.decline(sender, message, "its accumulator is sealed")
            again.extend([sender] * message.unfinite)
        await right(self, sender, message, frame)

    monkeypatch.setattr(StageServer, "on_forward", first_declined)
    outcome = played((2, 2))
    assert set(outcome.ends.values()) == {"finished"}
    assert len(declined) == 1, "one try is enough"


@pytest.mark.parametrize("stages", [(2, 2), (3, 3)])
def test_an_honest_outlier_is_computed_again_and_counts(
    stages: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    not_finite(monkeypatch, len(stages) - 1, factor=300.0)
    outcome = played(stages)
    assert set(outcome.ends.values()) == {"finished"}
    assert outcome.of(GradientStandsOut)
    assert not [*outcome.of(ResultsDiffer), *outcome.of(FrameRefused)]
