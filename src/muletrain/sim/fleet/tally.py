"""Build an ``Outcome``, as in fidelity 'flow', from the events of production peers."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from statistics import median
from typing import TYPE_CHECKING

from muletrain.sim.fleet.accounts import RECOVERED, GaveUp, Outcome, Point

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from muletrain.events import StepApplied, TrafficClass
    from muletrain.sim.setting import Setting

CLASSES: dict[str, str] = {"activation": "activations", "gradient": "gradients", "averaging": "averaging"}
"""Other frames are control; state transfers take time, but their frames are not of true size."""
USUAL_STEPS = 5
"""Number of steps whose median share of the optimum counts as undisturbed."""


class Tally:
    """Adds up events of all peers, and present machines. ``idle`` has the parts that a peer's clock can tell apart:
    averaging with agreement, and waiting for work."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._microbatches = setting.cost.microbatches
        self.steps = 0
        self._gave_up: list[GaveUp] = []
        self._lost = self._repeated = 0
        self._ends: list[float] = [0.0]
        self._back: set[tuple[int, int]] = set()
        self._events: Counter[str] = Counter()
        self._since: Counter[str] = Counter()
        self._averaging = 0.0
        self._bytes: defaultdict[tuple[str, str], defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._curve: list[Point] = []
        self._now, self._optimum, self._possible = 0.0, 0.0, 0.0
        self._before = 0.0
        """Microbatches possible until the end of the last step."""
        self._shares: deque[float] = deque(maxlen=USUAL_STEPS)
        self._left_s: float | None = None
        """When the first machine left since the last step or during a recovery [s]."""
        self._outage: tuple[float, float] | None = None
        self._recoveries_s: list[float] = []
        self._peers: tuple[int, ...] = ()

    def present(self, now: float, serving: Sequence[Sequence[int]]) -> None:
        """``serving``: peers present from now on, by stage and kind."""
        self._pass_time(now)
        kinds = self._setting.kinds
        self._optimum = sum(n * kinds[k].whole_per_s for counts in serving for k, n in enumerate(counts))
        self._peers = tuple(map(sum, serving))

    def _pass_time(self, now: float) -> None:
        self._possible += self._optimum * (now - self._now)
        self._now = now

    def happened(self, what: str) -> None:
        if what == "left" and self._left_s is None:
            self._left_s = self._now
        self._events[what] += 1
        self._since[what] += 1

    def gave_up(self, now: float, peer: str, why: str) -> None:
        self._gave_up.append(GaveUp(now, peer, why))
        self.happened("gave up")

    def done(self, now: float, step: int) -> None:
        """``step`` steps are done; several peers may report the same step."""
        if step <= self.steps:
            return
        took_s = now - self._ends[-1]
        self.steps = step
        self._ends.append(now)
        self._curve.append(
            Point(now, self._microbatches / max(took_s, 1e-9), self._optimum, self._peers, dict(self._since))
        )
        self._since = Counter()
        self._pass_time(now)
        self._look(self._microbatches / (self._possible - self._before or 1.0), now - took_s)
        self._before = self._possible

    def _look(self, share: float, begin_s: float) -> None:
        """A step from ``begin_s`` on used this share of the optimum. A fleet has recovered at the end of the last
        slower step after a departure."""
        if (
            self._outage is None
            and self._left_s is not None
            and self._shares
            and share < RECOVERED * median(self._shares)
        ):
            self._outage = self._left_s, median(self._shares)
        if self._outage is not None and share >= RECOVERED * self._outage[1]:
            self._recoveries_s.append(begin_s - self._outage[0])
            self._outage = None
        if self._outage is None:
            self._left_s = None
            self._shares.append(share)

    def step_back(self, step: int, to: int) -> None:
        """Count each rollback once, though all peers report it."""
        if (step, to) in self._back:
            return
        self._back.add((step, to))
        self._lost += (self.steps - to) * self._microbatches
        self.steps = to
        self.happened("stepped back")

    def applied(self, kind: int, event: StepApplied, sent: Sequence[tuple[int, Mapping[TrafficClass, int]]]) -> None:
        """Add one peer's step; ``sent``: bytes by the receiver's kind."""
        kinds = self._setting.kinds
        self._repeated += event.recomputed
        self._averaging += (event.averaging_s + event.apply_s) * kinds[kind].whole_per_s
        for receiver, classes in sent:
            for name, nbytes in classes.items():
                self._bytes[kinds[kind].region, kinds[receiver].region][CLASSES.get(name, "control")] += nbytes

    def outcome(self, end_s: float, *, partial: bool) -> Outcome:
        """Returns the outcome at ``end_s``. The unfinished step counts in proportion to the previous step's time, or
        not at all without a previous step, or if peers gave up."""
        steps = float(self.steps)
        if len(self._ends) > 1 and not self._gave_up:
            steps += min(0.99, (end_s - self._ends[-1]) / (self._ends[-1] - self._ends[-2]))
        done, possible = steps * self._microbatches, self._possible or 1.0
        share, averaging, lost = done / possible, self._averaging / possible, self._lost / possible
        idle = {"averaging": averaging, "steps taken back": lost, "waiting for work": 1 - share - averaging - lost}
        return Outcome(
            hours=end_s / 3600,
            steps=steps,
            throughput=done / (end_s or 1.0),
            share_of_optimum=share,
            idle=idle,
            bytes={link: dict(classes) for link, classes in sorted(self._bytes.items())},
            lost_microbatches=self._lost,
            repeated_microbatches=self._repeated,
            events=dict(sorted(self._events.items())),
            recoveries_s=tuple(self._recoveries_s),
            not_recovered=self._outage is not None,
            curve=tuple(self._curve),
            partial=partial,
            gave_up=tuple(self._gave_up),
        )
