"""Predict the speed of a fleet by ``rates``, corrected by played ``steps``, for ``plan`` and ``simulate``.

Rates treat a stage as one queue shared by all its peers. In fact each sender chooses by its own requests, so some
requests queue at one peer while another is idle: with 40 T4 and four A100 in three stages a step takes 13 to 60 %
longer than by rates, and as long as played (both compared with the production code: tests/test_fidelities.py). Under
churn memberships change too often to play each, so a membership gets the correction of the nearest played membership.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from muletrain.sim.fleet.rates import Rate, Rates
from muletrain.sim.steps.steps import Took, cast, play, steps_of
from muletrain.strategies.swarm import SWARM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.sim.fleet.rates import Counts
    from muletrain.sim.setting import Setting

PLAYABLE_S, BUDGET_S = 15.0, 5.0
"""Core seconds of the longest play; and of all plays of one run after the first, and as many for lasting
memberships."""
MICROBATCH_S, RECEIVER_S, SHARD_S = 7e-5, 1e-6, 1e-4
"""Core seconds of a play per microbatch and stage, per receiver that a sender considers, and per shard."""
NEAR = 0.05
"""Two memberships share a correction if at most this part of all compute is placed differently."""


class Slower(NamedTuple):
    """Parts of the rates that remain: while microbatches are computed, and over whole steps."""

    computing: float
    whole: float


class Pace(Rates):
    """Rates of one setting, corrected by played steps. ``budget_s``: see ``BUDGET_S``."""

    def __init__(self, setting: Setting, *, trainers: int, delayed: bool, budget_s: float = BUDGET_S) -> None:
        super().__init__(setting, trainers=trainers, delayed=delayed)
        self._found: dict[tuple[Counts, ...], Slower] = {}
        self.budget_s = self._lasting_s = budget_s
        self._playable: bool | None = None

    def of(self, serving: Sequence[Counts]) -> Rate:
        rate = super().of(serving)
        if rate.throughput <= 0:
            return rate
        left = self._slower(tuple(serving), rate)
        if left is None:
            return rate
        throughput = min(rate.slowest, rate.throughput * left.whole)
        linked = max(throughput, rate.linked)
        windowed = min(linked, max(throughput, rate.windowed * left.computing))
        return Rate(rate.even, rate.slowest, linked, windowed, throughput)

    def lasts(self, serving: Sequence[Counts]) -> Rate:
        """Rate a membership that lasts long enough to be played."""
        known, effort_s = tuple(serving), effort_of(self.setting, serving)
        if (
            self._playable
            and known not in self._found
            and effort_s <= self._lasting_s
            and (rate := super().of(serving)).throughput > 0
        ):
            self._lasting_s -= effort_s
            self._play(known, rate)
        return self.of(serving)

    def step(self, serving: Sequence[Counts]) -> Took:
        """Play a step. Use rates if a play would take too long, or if steps are so short that several end at once."""
        if effort_of(self.setting, serving) <= PLAYABLE_S:
            took = play(self.setting, cast(self.setting, serving, self._trainers), delayed=self._delayed)
            if took.step_s > 0:
                return took
        rate, microbatches = super().of(serving), self.setting.cost.microbatches
        return Took(microbatches / rate.throughput, microbatches / rate.windowed)

    def _slower(self, serving: tuple[Counts, ...], rate: Rate) -> Slower | None:
        """Find the correction; None: such a fleet is too large to play."""
        if self._playable is None:
            self._playable = effort_of(self.setting, serving) <= PLAYABLE_S
        if not self._playable or serving in self._found:
            return self._found.get(serving)
        if self._found:
            near = min(self._found, key=lambda played: self._apart(played, serving))
            effort_s = effort_of(self.setting, serving)
            if effort_s > self.budget_s or self._apart(near, serving) <= NEAR * rate.even:
                return self._found[near]
            self.budget_s -= effort_s
        return self._play(serving, rate)

    def _play(self, serving: tuple[Counts, ...], rate: Rate) -> Slower:
        took, microbatches = self.step(serving), self.setting.cost.microbatches
        left = Slower(microbatches / took.computing_s / rate.windowed, microbatches / took.step_s / rate.throughput)
        return self._found.setdefault(serving, left)

    def _apart(self, one: Sequence[Counts], other: Sequence[Counts]) -> float:
        """Microbatches/s of the machines that the two memberships place differently; a move counts once."""
        more = less = 0.0
        for here, there in zip(one, other, strict=True):
            for a, b, each in zip(here, there, self.whole_per_s, strict=True):
                more, less = more + max(0, a - b) * each, less + max(0, b - a) * each
        return max(more, less)


def effort_of(setting: Setting, serving: Sequence[Counts]) -> float:
    """Core seconds that a play takes."""
    peers, microbatches = list(map(sum, serving)), setting.cost.microbatches
    step_s = microbatches * sum(MICROBATCH_S + RECEIVER_S * n for n in peers) + SHARD_S * sum(n * n for n in peers)
    return (1 + steps_of(setting, SWARM)) * step_s
