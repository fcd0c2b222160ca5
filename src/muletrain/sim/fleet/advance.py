"""Progress of a fleet that is played as rates: the rate between two changes, and repeated work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.sim.fleet.accounts import Accounts
from muletrain.sim.fleet.rates import Rate
from muletrain.strategies.base import capacity

if TYPE_CHECKING:
    from muletrain.sim.fleet.rates import Rates
    from muletrain.sim.fleet.serving import Membership

LASTING = 0.02
"""Share of a play for which a membership must last before its own steps are played."""


class Progress:
    """The rate of one ``fleet``, and its ``accounts``. Nothing flows while a stage is ``lost``."""

    def __init__(self, rates: Rates, fleet: Membership, horizon_s: float) -> None:
        self.lost: set[int] = set()
        """Stages without peers that no peer has adopted yet."""
        self._rates, self._fleet, self._horizon_s = rates, fleet, horizon_s
        self._microbatches = rates.setting.cost.microbatches
        self._rate = self._rated()
        self._now_s = self._since_s = 0.0
        self._lasting = False
        """The membership has not changed since ``_since_s`` and counts as lasting."""
        self._again_s = 0.0
        """Seconds for which the run only repeats work that died with a peer."""
        self.accounts = Accounts(rates, horizon_s, fleet.serving, fleet.present)

    def until(self, time_s: float) -> None:
        """Time passes, at the present rate."""
        if not self._lasting and not self.lost and time_s - self._since_s >= LASTING * self._horizon_s:
            self._lasting, self._rate = True, self._rates.lasts(self._fleet.serving)
        again_s = min(self._again_s, time_s - self._now_s)
        if again_s > 0:
            self.accounts.pass_time(again_s, self._rate, again=True)
            self._again_s -= again_s
        self.accounts.pass_time(time_s - self._now_s - max(0.0, again_s), self._rate, again=False)
        self._now_s = time_s

    def changed(self) -> None:
        """The serving peers have changed."""
        self._since_s, self._lasting = self._now_s, False
        self._rate = self._rated()
        self.noted()

    def noted(self) -> None:
        """Tell the accounts the serving and the present peers."""
        self.accounts.change(self._fleet.serving, self._fleet.present, self._rate)

    def _rated(self) -> Rate:
        rate = self._rates.of(self._fleet.serving)
        return Rate(rate.even, 0.0, 0.0, 0.0, 0.0) if self.lost else rate

    @property
    def step_end_s(self) -> float:
        """Seconds until the present step ends."""
        return self._again_s + self._rest_s if self._rate.throughput > 0 else 0.0

    @property
    def _rest_s(self) -> float:
        """Seconds that the rest of the present step takes."""
        return (1.0 - self.accounts.steps % 1.0) * self._microbatches / self._rate.throughput

    def held(self, share: float) -> float:
        """Microbatches of the present step accumulated by a peer that does ``share`` of a stage's work."""
        return (self.accounts.steps % 1.0) * self._microbatches * share

    def repeat(self, stage: int, share: float, held: float) -> None:
        """A peer died with ``held`` accumulated microbatches and some in flight. Its stage repeats them in the spare
        time of the rest of the step; the remainder stalls the run."""
        microbatches = held + min(capacity(len(self._fleet.serving)) // 2, self._microbatches * share)
        self.accounts.repeated += microbatches
        if self._rate.throughput <= 0:
            return
        does = self._fleet.does(stage)
        stalled_s = max(0.0, microbatches / does - self._rest_s * max(0.0, 1 - self._rate.throughput / does))
        self._again_s += stalled_s
        self.accounts.stalled(stalled_s)
