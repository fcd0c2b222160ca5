"""Repeat offenders are left out for a while; what is remembered and told of them is bounded."""

from __future__ import annotations

from muletrain.network.gate import (
    BANNED,
)
from muletrain.network.offences import BAN_S, LIMIT, REPORTS, WINDOW_S, Offences, Reports
from muletrain.policy.recent import MOST
from tests.gates import Someone, _clock, founder, guest, refused

__all__ = ["_clock", "founder"]


def test_repeat_offenders_are_left_out_for_a_while_and_rare_ones_are_not() -> None:
    clock = [0.0]
    offences = Offences(lambda: clock[0])
    for _ in range(3 * LIMIT):
        clock[0] += WINDOW_S / (LIMIT - 2)
        assert not offences.count("rare")
    said = [offences.count("often") for _ in range(LIMIT)]
    assert said == [False] * (LIMIT - 1) + [True]
    assert offences.banned("often")
    assert not offences.banned("rare")
    assert not any(offences.count("often") for _ in range(LIMIT)), "it is told once"
    clock[0] += BAN_S + WINDOW_S + 1
    assert not offences.banned("often")
    assert [offences.count("often") for _ in range(LIMIT)][-1], "and may be again"


def test_the_memory_of_offences_is_bounded() -> None:
    offences = Offences(lambda: 0.0)
    for n in range(3 * MOST):
        for _ in range(LIMIT if n % 2 else 1):
            offences.count(f"peer{n}")
    assert len(offences) <= 2 * MOST
    assert offences.banned(f"peer{3 * MOST - 1}")


def test_a_flood_of_refusals_is_told_in_few_words() -> None:
    clock = [0.0]
    reports = Reports(lambda: clock[0])
    told = [reports.take("wrong") for _ in range(REPORTS + 500)]
    assert told == ["wrong"] * REPORTS + [None] * 500
    clock[0] += 1.0
    assert reports.take("wrong") == "wrong (and 500 refusals that were not told)"
    assert reports.take("wrong") == "wrong"


def test_the_banned_neither_speak_nor_are_spoken_to(founder: Someone) -> None:
    member, other = guest(founder), guest(founder)
    other.enter(member)
    while not founder.gate.offences.count(member.id):
        pass
    assert not member.speaks_to(founder)
    for one, to in [(member, founder), (founder, member)]:
        one.forget(to)
        with refused(BANNED):
            one.enter(to)
    assert other.speaks_to(founder)
    assert other.speaks_to(member)
