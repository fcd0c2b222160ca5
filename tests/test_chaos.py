"""``--chaos``: the plan's grammar, and plans from seeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muletrain.errors import ConfigError
from muletrain.policy.chaos import PHASES, Bounds, Fault, draw, parse, readable

NAMES = ("peer-0", "peer-1", "peer-2", "peer-3")
BOUNDS = Bounds(NAMES, stages=2, steps=100)


def test_the_grammar() -> None:
    text = "kill stage1@step5; freeze any @ 20s for 1m30s;partition 2|1 | 1@250ms for 15s ; corrupt trainer@50 ;"
    text += "kill peer-3@1h; join@step7;"
    assert parse(text, BOUNDS) == (
        Fault("kill", step=5, target="stage1"),
        Fault("freeze", at_s=20, target="any", for_s=90),
        Fault("partition", at_s=0.25, sides=(2, 1, 1), for_s=15),
        Fault("corrupt", at_s=50, target="trainer"),
        Fault("kill", at_s=3600, target="peer-3"),
        Fault("join", step=7),
    )


@pytest.mark.parametrize(
    ("text", "problem", "place"),
    [
        ("kil any@step5", "unknown fault 'kil'; did you mean 'kill'? known are corrupt, freeze", "^^^          "),
        ("kill any@5s; frieze any@9s", "did you mean 'freeze'?", "             ^^^^^^"),
        ("kill stage2@5s", "unknown target 'stage2'; did you mean", "     ^^^^^^"),
        ("kill nobody@5s", "known are any, trainer, newcomer, stage0, stage1, peer-0", "     ^^^^^^"),
        ("kill", "expected a target", "    ^"),
        ("join any@5s", "expected '@' and a time", "     ^"),
        ("kill any", "expected '@' and a time", "        ^"),
        ("kill any@soon", "expected a time: '@step5' (once step 5 is done) or '@20s'", "         ^"),
        ("kill any@step", "the number of a step", "         ^"),
        ("kill any@step100", "after steps 1 to 99", "         ^^^^^^^"),
        ("kill any@5 weeks", "expected a duration", "         ^^^^^^^"),
        ("kill any@99999h", "more than ten days", "         ^^^^^^"),
        ("kill any@5s for 3s", "the fault ends before this; faults are separated by ';'", "            ^^^^^^"),
        ("freeze any@5s", "expected 'for' and how long", "             ^"),
        ("freeze any@5s\tfor", "how long it lasts", "                 ^"),
        ("move any@5s", "expected 'to' and a stage", "        ^"),
        ("move any to stag1@5s", "unknown stage 'stag1'; did you mean 'stage1'?", "            ^^^^^"),
        (
            "kill any@step5:avaraging",
            "unknown point 'avaraging'; did you mean 'averaging'?",
            "               ^^^^^^^^^",
        ),
        ("kill any@5s:averaging", "the fault ends before this", "           ^^^^^^^^^^"),
        ("join@step5:averaging", "the fault ends before this", "          ^^^^^^^^^^"),
        ("partition any@5s for 1s", "the sizes of the sides", "          ^"),
        ("partition 2|3@5s for 1s", "add up to the fleet's 4 peers", "          ^^^"),
        ("partition 4@5s for 1s", "two or more", "          ^"),
        ("partition 4|0@5s for 1s", "none empty", "          ^^^"),
    ],
)
def test_an_error_shows_where(text: str, problem: str, place: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text, BOUNDS)
    message, shown, carets = str(error.value).split("\n")
    assert problem in message
    assert shown.removeprefix("  ") == text.replace("\t", " ")
    assert carets.removeprefix("  ") == place.rstrip()


@pytest.mark.parametrize("text", ["", " ; ;"])
def test_a_plan_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no fault"):
        parse(text, BOUNDS)


WHEN = st.one_of(
    st.integers(1, 99).map(lambda n: {"step": n}), st.integers(0, 10**7).map(lambda ms: {"at_s": ms / 1000})
)
LASTS = st.integers(1, 10**7).map(lambda ms: ms / 1000)
TARGETS = st.sampled_from(["any", "trainer", "newcomer", "stage0", "stage1", *NAMES])
FAULTS = st.one_of(
    WHEN.map(lambda w: Fault("join", **w)),
    st.builds(lambda k, t, w: Fault(k, target=t, **w), st.sampled_from(["kill", "corrupt"]), TARGETS, WHEN),
    st.builds(
        lambda t, n, p: Fault("kill", target=t, step=n, phase=p), TARGETS, st.integers(1, 99), st.sampled_from(PHASES)
    ),
    st.builds(lambda t, w, k: Fault("move", target=t, stage=k, **w), TARGETS, WHEN, st.integers(0, 1)),
    st.builds(lambda t, w, s: Fault("freeze", target=t, for_s=s, **w), TARGETS, WHEN, LASTS),
    st.builds(
        lambda x, w, s: Fault("partition", sides=x, for_s=s, **w),
        st.sampled_from([(2, 2), (3, 1), (1, 1, 2)]),
        WHEN,
        LASTS,
    ),
)


@given(st.lists(FAULTS, min_size=1, max_size=5).map(tuple))
def test_a_plan_reads_back_as_it_is_printed(plan: tuple[Fault, ...]) -> None:
    assert parse(readable(plan), BOUNDS) == plan


@given(st.text() | st.text("kilfrezpatonyug@|; 0123456789.sm"))
def test_whatever_is_typed_is_a_plan_or_an_error_that_says_so(text: str) -> None:
    try:
        plan = parse(text, BOUNDS)
    except ConfigError:
        return
    assert parse(readable(plan), BOUNDS) == plan


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 5), st.integers(2, 500))
def test_a_drawn_plan_is_valid_and_leaves_every_stage_a_peer(seed: int, stages: int, more: int, steps: int) -> None:
    bounds = Bounds(tuple(f"peer-{k}" for k in range(stages + more)), stages, steps)
    plan = draw(seed, bounds)
    assert plan == draw(seed, bounds)
    assert parse(readable(plan), bounds) == plan
    assert sum(f.kind == "kill" for f in plan) <= more


def test_seeds_draw_different_plans() -> None:
    assert len({draw(seed, BOUNDS) for seed in range(50)}) > 40
