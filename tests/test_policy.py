"""Pure decisions: wiring, claims, cover, deadlines, shards."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muletrain.policy.claims import claimant
from muletrain.policy.cover import resolve
from muletrain.policy.deadline import CEILING_S, FLOOR_S, RECENT, Deadline, Usual, backoff_s
from muletrain.policy.shards import BLOCK, CHUNK, chunk_ranges, shard_ranges
from muletrain.policy.wiring import Wiring


def routed(times: dict[str, float], choices: int) -> Counter[str]:
    wiring = Wiring(random.Random(0))
    for peer in times:
        wiring.add(peer)
    counts: Counter[str] = Counter()
    for _ in range(choices):
        peer = wiring.choose()
        assert peer is not None
        wiring.measured(peer, times[peer])
        counts[peer] += 1
    return counts


def test_wiring_shares_follow_speed() -> None:
    counts = routed({"fast": 1.0, "slow": 3.0}, 400)
    assert counts["slow"] / 400 == pytest.approx(0.25, abs=0.01)


def test_wiring_slow_start_does_not_flood_rarely_chosen_peers() -> None:
    """Without correction the slow peer's average, being younger, would look better than it is."""
    assert routed({"fast": 1.0, "slow": 10.0}, 44)["slow"] <= 6


def test_wiring_newcomer_joins_at_the_floor() -> None:
    wiring = Wiring(random.Random(0))
    wiring.add("old")
    for _ in range(100):
        wiring.choose()
        wiring.measured("old", 1.0)
    wiring.add("new")
    chosen = Counter()
    for _ in range(20):
        peer = wiring.choose()
        assert peer is not None
        chosen[peer] += 1
        wiring.measured(peer, 1.0)
    assert chosen["new"] == pytest.approx(10, abs=1)


def test_wiring_bans_until_announced_again_but_never_the_last() -> None:
    wiring = Wiring(random.Random(0))
    wiring.add("a")
    wiring.add("b")
    wiring.ban("a")
    wiring.ban("b")
    assert wiring.peers() == ["b"]
    wiring.add("a")
    assert wiring.peers() == ["a", "b"]
    assert wiring.choose(exclude={"a", "b"}) is None


def test_claims_move_only_what_the_lost_trainer_had() -> None:
    before = {i: claimant(3, i, ["a", "b", "c"]) for i in range(300)}
    after = {i: claimant(3, i, ["a", "c"]) for i in range(300)}
    assert all(after[i] == t for i, t in before.items() if t != "b")
    assert min(Counter(before.values()).values()) > 60


sets = st.dictionaries(st.sampled_from("abcdef"), st.frozensets(st.integers(0, 9), max_size=6), min_size=1)


@given(sets)
def test_cover_is_disjoint_complete_and_best(sealed: dict[str, frozenset[int]]) -> None:
    cover = resolve(sealed, 10)
    chosen = [sealed[m] for m in cover.chosen]
    union = frozenset().union(*chosen) if chosen else frozenset()
    assert sum(map(len, chosen)) == len(union)
    assert sorted(union | set(cover.gaps)) == list(range(10))
    assert not union & set(cover.gaps)
    assert sorted([*cover.chosen, *cover.dropped]) == sorted(sealed)
    best = max(
        len(frozenset().union(*(sealed[m] for m in subset)))
        for size in range(1, len(sealed) + 1)
        for subset in combinations(sealed, size)
        if sum(len(sealed[m]) for m in subset) == len(frozenset().union(*(sealed[m] for m in subset)))
    )
    assert len(union) == best


def test_cover_many_conflicts_stays_fast_and_disjoint() -> None:
    sealed = {f"p{k:02d}": frozenset({k, k + 1}) for k in range(40)}
    cover = resolve(sealed, 41)
    assert sum(len(sealed[m]) for m in cover.chosen) == 41 - len(cover.gaps)


def test_cover_refuses_foreign_indices() -> None:
    with pytest.raises(ValueError, match=r"outside 0\.\.3"):
        resolve({"a": frozenset({4})}, 4)


def test_what_is_usual_forgets_a_cold_start() -> None:
    usual = Usual(unmeasured_s=10.0, floor_s=0.3, times=2.0)
    assert usual.seconds() == 10.0
    for took in [6.0, 5.0, 7.0, 1.0, 1.0, 1.0, 1.0]:
        usual.measured(took)
    assert usual.seconds() == pytest.approx(2.0)
    assert usual.seconds(2) == pytest.approx(8.0)
    for _ in range(RECENT):
        usual.measured(0.01)
    assert usual.seconds() == 0.3


def test_where_slow_answers_are_usual_nobody_wonders_at_one() -> None:
    """On a link that is full now and then; one slow answer alone is an accident."""
    usual = Usual(unmeasured_s=10.0, floor_s=0.25, times=4.0, slow_times=1.5)
    for took in [0.02] * 10 + [1.2]:
        usual.measured(took)
    assert usual.seconds() == 0.25
    usual.measured(0.8)
    assert usual.seconds() == pytest.approx(1.2)


def test_deadline_follows_measurements_and_doubles() -> None:
    deadline = Deadline(unmeasured_s=20.0)
    assert deadline.seconds() == 20.0
    for _ in range(50):
        deadline.measured(2.0)
    assert 2.0 <= deadline.seconds() < 2.2
    assert deadline.seconds(2) == pytest.approx(4 * deadline.seconds())
    assert deadline.seconds(100) <= CEILING_S
    for _ in range(50):
        deadline.measured(1e-4)
    assert deadline.seconds() == FLOOR_S


@given(st.integers(1, 3_000_000), st.integers(1, 9))
def test_shards_and_chunks_tile_the_gradient(n_params: int, members: int) -> None:
    ranges = shard_ranges(n_params, members)
    assert len(ranges) == members
    tiles = [c for a, b in ranges for c in chunk_ranges(a, b)]
    assert [t[0] for t in tiles] == [0, *[t[1] for t in tiles[:-1]]]
    assert tiles[-1][1] == n_params
    assert all(a % BLOCK == 0 and 0 < b - a <= CHUNK for a, b in tiles)
    sizes = [b - a for a, b in ranges]
    assert max(sizes) - min(sizes) <= 2 * BLOCK


def test_pauses_double_up_to_the_longest_however_often_was_tried() -> None:
    assert [backoff_s(k, 0.05, 0.3) for k in range(5)] == [0.05, 0.1, 0.2, 0.3, 0.3]
    assert backoff_s(5000, 0.05, 0.3) == 0.3
