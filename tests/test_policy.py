"""Pure decisions: wiring, claims, cover, deadlines, shards."""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muletrain.policy.cover import resolve
from muletrain.policy.deadline import CEILING_S, FLOOR_S, RECENT, Deadline, Usual, backoff_s
from muletrain.policy.overdue import Overdue
from muletrain.policy.rooms import KEPT_S, Rooms, Turns
from muletrain.policy.shards import BLOCK, CHUNK, chunk_ranges, shard_ranges
from muletrain.policy.trips import Trips
from muletrain.policy.wiring import WAYS, Wiring, claimant


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


def test_of_a_peers_word_counts_what_the_own_measurement_allows() -> None:
    """A peer that says that it needs no time, and answers late, gets more work. Deadlines grow with the answers."""
    trips = Trips()
    for _ in range(100):
        assert trips.measured(1.0, 0.2, 0.7) == pytest.approx((0.2, 0.1))
        assert trips.measured(1.0, 5.0, 0.0) == (1.0, 0.0)
        assert trips.measured(2.0, 0.0, 1e6) == pytest.approx((0.0, 0.0), abs=1e-5)
    assert 2.0 <= trips.deadline_s() < 6.0


def test_before_any_answer_requests_are_looked_at_often_and_none_is_overdue_for_an_hour() -> None:
    """On devices that need minutes for a microbatch, whole stages were overdue in a run's first step, but for one peer: it
    did the work of all. Nor is a peer overdue whose full queue takes longer than the first answers."""
    trips = Trips(queue_s=lambda: 500.0)
    assert trips.deadline_s(9) == trips.deadline_s(1) == 60.0
    assert trips.long_s() == 3600.0
    trips.measured(50.0, 50.0, 0.0)
    assert trips.long_s() == 500.0
    trips.measured(100.0, 50.0, 0.0)
    assert 500.0 < trips.long_s() < 3600.0


def test_an_overdue_peer_comes_last_for_a_number_of_steps_that_doubles() -> None:
    overdue = Overdue()
    assert overdue.note("a", 10)
    assert not overdue.note("a", 13), "it is asked last already"
    assert [step for step in range(20) if "a" in overdue.at(step)] == [10, 11, 12, 13], "also after a step back"
    assert overdue.note("a", 15)
    assert [step for step in range(30) if "a" in overdue.at(step)] == [*range(15, 23)]
    assert overdue.note("a", 31), "it did its part for as many steps"
    assert overdue.at(34) == {"a"}
    assert not overdue.at(35)


def test_a_full_peer_is_sent_nothing_until_it_has_room_or_a_pause_is_over() -> None:
    rooms = Rooms()
    rooms.refused("a", 0.0, 1.0)
    assert (rooms.full(3.9), rooms.full(4.0)) == ({"a"}, set())
    rooms.offered("a", 1.0)
    assert not rooms.full(1.0)
    rooms.sent("a", 1.0, more=True)
    assert rooms.full(4.9) == {"a"}, "it tells us again"
    rooms.sent("a", 5.0, more=False)
    assert not rooms.full(5.0)
    for seconds in (8.0, 16.0, 32.0, 32.0):
        rooms.refused("a", 10.0, 1.0)
        assert (rooms.full(9.9 + seconds), rooms.full(10.0 + seconds)) == ({"a"}, set())
    rooms.answered("a", took=True)
    rooms.refused("a", 10.0, 1.0)
    assert not rooms.full(14.0)
    rooms.begin()
    assert not rooms.full(10.0)


def test_who_offers_room_that_it_does_not_have_is_not_believed_for_long() -> None:
    rooms, sent = Rooms(), 0
    rooms.refused("liar", 0.0, 1.0)
    for _ in range(100):
        rooms.offered("liar", 0.0)
        if "liar" not in rooms.full(0.0):
            sent += 1
            rooms.sent("liar", 0.0, more=False)
            rooms.refused("liar", 0.0, 1.0)
    assert sent == 3
    rooms.answered("liar", took=True)
    rooms.offered("liar", 0.0)
    assert not rooms.full(0.0)


def test_who_uses_an_offer_of_room_too_late_does_not_doubt_the_next() -> None:
    """A run without faults stood for an hour: its only usable peer had room, and its offers were ignored. Found by 'python
    -m proofs fuzz --kind keep' (seed 118000)."""
    rooms, now_s = Rooms(), 0.0
    rooms.refused("a", now_s, 1.0)
    for _ in range(10):
        rooms.offered("a", now_s)
        now_s += KEPT_S
        rooms.sent("a", now_s, more=False)
        rooms.refused("a", now_s, 1.0)
    assert rooms.offered("a", now_s)
    assert not rooms.full(now_s)


def test_those_that_a_full_peer_refused_have_their_turns_in_order() -> None:
    turns = Turns[int](capacity=2)
    for sender, request in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        assert not turns.admits(sender, request, held=2, now_s=0.0, more=False)
    assert turns.next(held=2, now_s=0.0) == []
    assert turns.next(held=1, now_s=0.0) == [("a", 3)]
    assert turns.next(held=1, now_s=0.0) == [], "the place is kept"
    assert not turns.admits("d", 5, held=1, now_s=1.0, more=False), "also from who is nearer"
    assert turns.admits("a", 6, held=1, now_s=1.0, more=True)
    assert turns.next(held=0, now_s=1.0) == [("b", 2), ("c", 4)]
    assert turns.next(held=0, now_s=1.0 + KEPT_S) == [("d", 5), ("a", 6)], "who did not come has lost its place"


def test_wiring_does_not_try_a_slow_device_until_fast_ones_have_done_as_much() -> None:
    """Each of a stage's senders began with one microbatch for every receiver: a CPU had as many at once as a GPU."""

    def chosen(device_s: dict[str, float], choices: int, slow_s: float) -> Counter[str]:
        wiring, counts = Wiring(random.Random(0)), Counter[str]()
        for peer, seconds in sorted(device_s.items(), key=lambda item: item[1]):
            wiring.add(peer, seconds)
        for _ in range(choices):
            peer = wiring.choose()
            assert peer is not None
            counts[peer] += 1
            wiring.measured(peer, slow_s if peer == "slow" else 0.01)
        return counts

    assert chosen({"fast": 0.0, "slow": 0.0}, 30, 5.0)["slow"] >= 1
    devices = {"fast": 0.01, "other": 0.01, "slow": 5.0}
    assert chosen(devices, 990, 5.0)["slow"] == 0
    assert chosen(devices, 1010, 5.0)["slow"] == 1
    assert chosen(devices, 2300, 0.01)["slow"] == pytest.approx(100, abs=3), "then what was measured counts"
    assert set(chosen({"fast": 5.0, "slow": 5.0}, 2, 5.0)) == {"fast", "slow"}, "where all are slow nobody waits"


def test_wiring_gives_a_slow_peer_nothing_that_the_step_would_wait_for() -> None:
    """Proportional shares gave a CPU one microbatch in a hundred steps, and made that step five times as long."""

    def step(wiring: Wiring, number: int, microbatches: int, now_s: float) -> tuple[Counter[str], float]:
        """Each microbatch comes back before the next one goes, except from ``slow``. Returns when the last one is back,
        too."""
        counts, last_s = Counter[str](), 0.0
        for _ in range(microbatches):
            peer = wiring.choose(step=number, now_s=now_s)
            assert peer is not None
            counts[peer] += 1
            now_s += 0.1 if peer != "slow" else 0.0
            last_s = max(last_s, now_s + times_s[peer])
            wiring.measured(peer, times_s[peer], now_s=now_s)
        return counts, max(now_s, last_s)

    times_s, wiring, now_s = {"fast": 0.2, "other": 0.2, "slow": 5.0}, Wiring(random.Random(0)), 0.0
    for peer in times_s:
        wiring.add(peer)
    given = Counter[str]()
    for number in range(100):
        counts, now_s = step(wiring, number, 20, now_s)  # 2 s without the slow peer
        given += counts if number else {}
    assert given["slow"] <= 1
    assert abs(given["fast"] - given["other"]) <= 10
    for number in range(100, 110):
        counts, now_s = step(wiring, number, 200, now_s)  # 20 s: it is of use in three quarters of that
        given = counts if number == 100 else given + counts
    assert 10 <= given["slow"] <= 40, "one in 51"
    given = Counter[str]()
    for number in range(50, 60):
        counts, now_s = step(wiring, number, 200, now_s)
        given += counts
    assert given["slow"] >= 10, "also after a step back"
    wiring.remove("fast")
    wiring.remove("other")
    assert wiring.choose(step=200, now_s=now_s) == "slow", "nobody else is there"


@pytest.mark.parametrize("long", [0, 1, 50])
def test_wiring_takes_one_long_time_for_no_slow_peer(long: int) -> None:
    """A first call that compiled, or a device that somebody else used for a moment: the peer got 3 of 2,940 microbatches."""
    wiring, counts, now_s = Wiring(random.Random(0)), Counter[str](), 0.0
    for peer in ("a", "b"):
        wiring.add(peer)
    for step in range(300):
        free_s = {"a": now_s, "b": now_s}
        for _ in range(4):
            peer = wiring.choose(
                under_way={p: round((s - now_s) / 0.05) for p, s in free_s.items()}, step=step, now_s=now_s
            )
            assert peer is not None
            free_s[peer] += 10.0 if (peer, counts[peer]) == ("b", long) else 0.05
            counts[peer] += 1
            wiring.measured(peer, 10.0 if (peer, counts[peer]) == ("b", long + 1) else 0.05, now_s=free_s[peer])
        now_s = max(free_s.values())
    assert counts["b"] > 450, "of 600"


@pytest.mark.parametrize("every", [2, 20])
def test_wiring_gives_an_erratic_peer_nothing_that_steps_would_wait_for(every: int) -> None:
    """A peer that takes 200 times as long now and then: each such time holds up a step."""
    wiring, draw, now_s, counts = Wiring(random.Random(0)), random.Random(1), 0.0, Counter[str]()
    for peer in ("steady", "erratic"):
        wiring.add(peer)
    for step in range(400):
        free_s, back = dict.fromkeys(("steady", "erratic"), now_s), list[tuple[float, str, float]]()
        for _ in range(16):
            owed = Counter(peer for _, peer, _ in back)
            peer = wiring.choose(under_way=owed, step=step, now_s=now_s)
            assert peer is not None
            takes_s = 10.0 if peer == "erratic" and draw.random() < 1 / every else 0.05
            free_s[peer] += takes_s
            back.append((free_s[peer], peer, takes_s))
            counts[peer] += 1
        for now_s, peer, takes_s in sorted(back):
            wiring.measured(peer, takes_s, now_s=now_s)
    assert now_s < 1.3 * 400 * 16 * 0.05, "as long as the steady one needs alone"
    assert counts["erratic"] > 0


@pytest.mark.parametrize("senders", [1, 4])
@pytest.mark.parametrize("slow_s", [1.0, 5.0])
def test_wiring_gives_slow_peers_no_queue_while_the_fast_one_is_full(senders: int, slow_s: float) -> None:
    """A GPU among three CPUs, and half of what they admit under way: the GPU was full, the CPUs got the rest, and the step
    took 2.5 and 12.6 times as long as the GPU alone. That was then the usual length of a step, for ever."""
    times_s = {"gpu": 0.05, "cpu0": slow_s, "cpu1": slow_s, "cpu2": slow_s}
    wirings, now_s, microbatches, lengths_s = [Wiring(random.Random(k)) for k in range(senders)], 0.0, 64, list[float]()
    for wiring in wirings:
        wiring.serve(times_s)
    for step in range(12):
        begun_s, back, free_s = now_s, list[tuple[float, int, str]](), dict.fromkeys(times_s, now_s)
        left, done = dict.fromkeys(range(senders), microbatches // senders), 0
        while done < microbatches:
            for k, wiring in enumerate(wirings):
                while left[k] and sum(sender == k for _, sender, _ in back) < 48 // senders:
                    mine = Counter(peer for _, sender, peer in back if sender == k)
                    full = {p for p, held in Counter(p for *_, p in back).items() if held >= 24}
                    if (peer := wiring.choose(under_way=mine, full=full, step=step, now_s=now_s)) is None:
                        break
                    free_s[peer] = max(now_s, free_s[peer]) + times_s[peer]
                    heapq.heappush(back, (free_s[peer], k, peer))
                    left[k] -= 1
            now_s, k, peer = heapq.heappop(back)
            wirings[k].measured(peer, times_s[peer], now_s=now_s)
            done += 1
        lengths_s.append(now_s - begun_s)
    assert statistics.median(lengths_s) < 1.3 * microbatches * times_s["gpu"]


def test_wiring_waits_for_a_fast_peer_that_is_full_but_not_longer_than_a_slow_one_takes() -> None:
    wiring = Wiring(random.Random(0))
    for peer, seconds in (("fast", 0.01), ("slow", 5.0), ("slow", 5.0)):
        wiring.add(peer)
        wiring.measured(peer, seconds)
    assert wiring.choose(full={"fast"}) == "slow", "nobody knows yet how long a step is"
    wiring.measured("fast", 0.01, now_s=1.0)
    assert wiring.choose(full={"fast"}, step=1, now_s=1.0) is None
    assert wiring.choose(full={"fast"}, step=1, now_s=1.0, waited_s=5.0) == "slow"
    assert wiring.choose({"fast"}, step=1, now_s=1.0) == "slow", "there is nobody to wait for"
    assert wiring.choose(full={"fast", "slow"}, step=1, now_s=1.0, waited_s=9.0) is None


def test_wiring_does_not_take_a_full_link_for_a_slow_peer() -> None:
    """By mean ways, those that got most looked as slow as a CPU that got nothing: more under way made mixed fleets
    slower."""
    wiring = Wiring(random.Random(0))
    for peer in ("gpu", "cpu"):
        wiring.add(peer)
    wiring.measured("cpu", 5.0, 0.1)
    for waited_s in (0.0, 2.0, 6.0, 4.0):
        wiring.measured("gpu", 0.2, 0.1 + waited_s)
    assert wiring.expected_s("gpu") == pytest.approx(0.2)
    for _ in range(WAYS):
        wiring.measured("gpu", 0.2, 3.0)
    assert wiring.expected_s("gpu") == 3.0, "its link has become slow"


def test_wiring_tries_a_slow_peer_again_now_and_then() -> None:
    wiring = Wiring(random.Random(0))
    for peer, seconds in (("fast", 0.01), *(WAYS * [("slow", 1.0)])):
        wiring.add(peer)
        wiring.measured(peer, seconds)
    wiring.choose()
    wiring.measured("fast", 0.01, now_s=0.1)
    chosen = Counter(wiring.choose(step=1, now_s=1.0) for _ in range(200_000))
    assert 1 <= chosen["slow"] <= 20, "2,000 by its speed"


def test_wiring_believes_no_device_to_be_faster_than_what_was_measured() -> None:
    """A newcomer may say what it wants of its device, and links count, too."""
    wiring = Wiring(random.Random(0))
    for peer in ("a", "b"):
        wiring.add(peer, 1.0)
        wiring.measured(peer, 2.0)
    wiring.add("boasts", 1e-12)
    wiring.add("unknown")
    assert wiring.expected_s("boasts") == wiring.expected_s("unknown") == 2.0


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


def test_one_answer_after_a_nap_does_not_make_a_deadline_long() -> None:
    deadline = Deadline(floor_s=1.0)
    for _ in range(20):
        deadline.measured(0.1)
    deadline.measured(1770.0)
    assert deadline.seconds() < 6.0
    for _ in range(10):
        deadline.measured(1770.0)
    assert deadline.seconds(longest_s=math.inf) > 1770.0, "they do take so long"


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


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_of_a_pool_the_last_word_counts(gamma: float) -> None:
    """It is an average already."""
    wiring = Wiring(random.Random(0), gamma)
    wiring.serve({"pool": 1.0})
    wiring.measured("pool", 1.0)
    wiring.measured("pool", 3.0)
    assert (wiring.expected_s("pool") == pytest.approx(3.0)) == (gamma == 1.0)
