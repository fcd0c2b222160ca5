"""Two rules over the same view decide which peers move to another stage: the paper's and ours.

Both are pure functions of the announcements. So all peers with equal announcements compute equal moves, and each peer
carries out its own move. Neither rule takes a stage's last peer, and neither acts on a view without peers of some
stage: an empty stage must be adopted, not balanced, and a stage that no announcement names shows that the view is
incomplete. Clients of a hub choose their stage by the last two functions.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from muletrain.policy.assignment import Move

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from muletrain.policy.assignment import Load, View

HYSTERESIS = 0.25
"""A plan must raise the pipeline's throughput by this share of the movers' mean speed. Measured speeds vary by some
percent of one peer's speed; a useful move gains about the peer's whole speed."""
MOVES_AT = 1.2
"""Clients leave a stage only if it is so many times as fast as the slowest stage, because a move costs a download of
weights."""
EPSILON = 1e-9
"""Relative difference that is no gain: sums of the same speeds in another order differ in the last bits."""


class Confirmed:
    """Passes moves that follow from measured speeds only if the previous view led to the same moves."""

    def __init__(self) -> None:
        self._before: set[tuple[int, int]] = set()
        """(source, target) of the moves that the last view led to."""

    def of(self, wanted: tuple[Move, ...]) -> tuple[Move, ...]:
        found = tuple(m for m in wanted if not m.measured or (m.source, m.target) in self._before)
        self._before = {(m.source, m.target) for m in wanted}
        return found


def by_queue(view: View) -> tuple[Move, ...]:
    """Returns the move of SWARM app. D, algorithm 2: the peer with the shortest queue of the least loaded stage moves
    to the most loaded one. Lowest stage and lowest id among equals; at most one move."""
    served = view.served()
    if not all(served):
        return ()
    loads = [sum(view.loads[p].queue * view.loads[p].alike for p in peers) for peers in served]
    source, target = loads.index(min(loads)), loads.index(max(loads))
    able = [p for p in served[source] if view.loads[p].may_move_to(target)]
    several = sum(view.loads[p].alike for p in served[source]) > 1
    if loads[source] == loads[target] or not several or not able:
        return ()
    peer = min(able, key=lambda p: (view.loads[p].queue, p))
    return (Move(peer, source, target),)


def by_throughput(view: View, horizon_s: float, *, exchange: bool = True) -> tuple[Move, ...]:
    """Returns the moves that maximise the slowest stage's throughput, if the gain within ``horizon_s`` exceeds the
    cost.

    A stage's throughput is the sum over its peers, a pipeline's is the slowest stage's. The plan grows move by move,
    each to the currently slowest stage, from the stage that leaves most for the slower of both. The prefix of greatest
    net gain is taken, so several equally slow stages are relieved at once, and two moves can make an exchange. The gain
    counts from the arrival of the last mover; until then the movers serve nobody, and their lost work is the price.
    Every plan raises the throughput by a part of the movers' speed (``HYSTERESIS``), so under a constant view the moves
    end.

    Without ``exchange`` no stage both gives and gets. A stage's loss was measured there, but a stage's gain follows
    from the stages' costs; if the costs are wrong, a swap that promises much gains nothing, and is promised again.

    The strongest peer of each stage stays, in every view with that peer: even peers with different partial views leave
    no stage empty.
    """
    served = view.served()
    if not all(served):
        return ()
    plan = _Plan(view, served, exchange)
    best: tuple[Move, ...] = ()
    best_net = 0.0
    while (move := plan.next_move()) is not None:
        plan.take(move)
        net = plan.net_gain(horizon_s)
        if net > best_net * (1 + EPSILON) and plan.pays():
            best, best_net = tuple(plan.moves), net
    return best


class _Plan:
    """Holds moves in the order of finding, and the stages' throughput afterwards [microbatches/s]."""

    def __init__(self, view: View, served: list[list[str]], exchange: bool) -> None:
        self._view, self._exchange = view, exchange
        self._powers = _powers(view)
        self.moves: list[Move] = []
        self._gave: set[int] = set()
        self._got: set[int] = set()
        loads = view.loads
        self._here = {p: self._speed(p, s) for s, peers in enumerate(served) for p in peers}
        """Throughput of each peer at the current stage."""
        self._before = [sum(self._here[p] * loads[p].alike for p in peers) for peers in served]
        self._after = list(self._before)
        self._left = list(self._before)
        """Throughput of the remaining peers alone."""
        keepers = {min(peers, key=self._staying) for peers in served}
        self._spare = {p: load.alike - (p in keepers) for p, load in loads.items()}
        self._movable = [[p for p in peers if self._spare[p]] for peers in served]

    def _staying(self, peer: str) -> tuple[bool, float, str]:
        """Orders the peers of a stage: one that cannot move stays first, then the strongest."""
        return self._view.loads[peer].targets != frozenset(), -self._here[peer], peer

    def _speed(self, peer: str, stage: int) -> float:
        """Returns the speed measured there [microbatches/s], else one from the peer's power."""
        measured = self._view.loads[peer].speeds.get(stage)
        if _usable(measured):
            assert measured is not None
            return measured
        return self._powers[peer] / self._view.work[stage]

    def next_move(self) -> Move | None:
        """Returns the move to the slowest stage that leaves most for the slower of the two stages, and more than
        before; the first of equals by stage and id."""
        after, target = self._after, self._after.index(min(self._after))
        if not self._exchange and target in self._gave:
            return None
        best, best_rank, work = None, (after[target] * (1 + EPSILON), 0.0, 0), self._view.work[target]
        for source in sorted(range(len(after)), key=lambda s: -after[s]):
            if after[source] < best_rank[0]:
                break  # and so are all that follow, even before a peer leaves
            if source == target or (not self._exchange and source in self._got):
                continue
            for peer in self._movable[source]:
                load = self._view.loads[peer]
                if not load.may_move_to(target):
                    continue
                there = self._speed(peer, target) if target in load.speeds else self._powers[peer] / work
                left, reached = after[source] - self._here[peer], after[target] + there
                rank = (left if left < reached else reached), left, -source
                if rank > best_rank:
                    best, best_rank = Move(peer, source, target, measured=True), rank
        return best

    def take(self, move: Move) -> None:
        self.moves.append(move)
        self._gave.add(move.source)
        self._got.add(move.target)
        self._spare[move.peer] -= 1
        if not self._spare[move.peer]:
            self._movable[move.source].remove(move.peer)
        leaves = self._here[move.peer]
        self._after[move.source] -= leaves
        self._left[move.source] -= leaves
        self._after[move.target] += self._speed(move.peer, move.target)

    def net_gain(self, horizon_s: float) -> float:
        """Returns the microbatches gained within the horizon, less the movers' lost work while moving. Until all are
        prepared, nothing changes."""
        seconds = [self._view.state_bytes[m.target] / self._view.loads[m.peer].bytes_per_s for m in self.moves]
        horizon_s -= max(self._view.loads[m.peer].prepares(m.target) for m in self.moves)
        if horizon_s <= 0:
            return 0.0
        moving_s = min(horizon_s, max(seconds))
        before = min(self._before)
        gained = (min(self._left) - before) * moving_s + (min(self._after) - before) * (horizon_s - moving_s)
        lost = sum(self._here[m.peer] * s for m, s in zip(self.moves, seconds, strict=True))
        return gained - lost

    def pays(self) -> bool:
        moved = sum(self._speed(m.peer, m.target) for m in self.moves) / len(self.moves)
        return min(self._after) - min(self._before) >= HYSTERESIS * moved


def _powers(view: View) -> dict[str, float]:
    """Returns the power of every peer [work/s]. An unmeasured peer counts as the median of the rest."""
    powers = {p: _power(load, view.work) for p, load in view.loads.items()}
    known = [power for p, power in powers.items() if power is not None for _ in range(view.loads[p].alike)]
    usual = median(known) if known else 1.0
    return {p: power or usual for p, power in powers.items()}


def _power(load: Load, work: Sequence[float]) -> float | None:
    """Returns the power measured at the current stage, or the mean over earlier stages."""
    if 0 <= load.stage < len(work) and _usable(speed := load.speeds.get(load.stage)):
        assert speed is not None
        return speed * work[load.stage]
    past = [v * work[s] for s, v in load.speeds.items() if 0 <= s < len(work) and _usable(v)]
    return sum(past) / len(past) if past else None


def _usable(speed: float | None) -> bool:
    return speed is not None and math.isfinite(speed) and speed > 0


def stage_to_help(
    work: Sequence[float], speeds: Sequence[float], fits: Collection[int], left: Sequence[float] = ()
) -> int | None:
    """Returns the stage at which one more client raises the throughput most: of the stages that the client has room for
    (``fits``), the stage with the most work for the speed of its machines, or, among stages without machines, with the
    most work; None: there is no room for any stage. ``work``: of each stage, for a sequence; ``speeds``: work per
    second of each stage's servers and clients together, in the same unit. ``left``: share of a step that the client has
    for computing at each stage, beside its transfers; at most 0: the transfers take longer than a step, so the client is
    of no use there. Default: transfers take no time."""

    def load(stage: int) -> tuple[float, float]:
        share = left[stage] if left else 1.0
        if share <= 0:
            return share, 0.0  # of stages at which the client has no time, the one with the shortest transfers
        return work[stage] / speeds[stage] if speeds[stage] > 0 else math.inf, work[stage]

    return max(sorted(fits), key=load, default=None)


def stage_to_move_to(
    work: Sequence[float],
    speeds: Sequence[float],
    stage: int,
    clients: int,
    together: float,
    fits: Collection[int],
    drawn: float,
    left: Sequence[float] = (),
) -> int | None:
    """Returns the stage to which a client of ``stage``, one of ``clients`` of like speed that do ``together`` units of
    work per second, moves; None: the client stays. The client moves to the slowest stage, if its own stage is clearly
    faster, and stays faster without the client. Clients move with the probability that equalises both stages' speed on
    average: ``drawn``, uniform in [0, 1), decides. A client whose transfers leave no time at its stage goes at once to a
    stage where they do. Arguments as for ``stage_to_help``."""
    left = left or [1.0] * len(work)
    others = sorted(s for s in {*fits} - {stage} if left[s] > 0)
    if left[stage] <= 0:
        return stage_to_help(work, speeds, others, left)
    rates = [speed / needed for speed, needed in zip(speeds, work, strict=True)]
    to = min(others, key=lambda s: (rates[s], -work[s]), default=stage)
    own = together / max(1, clients)
    loses, gains = left[stage] / work[stage], left[to] / work[to]  # of each stage's rate, for a unit of speed
    if rates[stage] <= MOVES_AT * rates[to] or rates[stage] - own * loses < rates[to] + own * gains:
        return None
    too_much = (rates[stage] - rates[to]) / (loses + gains)
    return to if drawn * together < too_much else None
