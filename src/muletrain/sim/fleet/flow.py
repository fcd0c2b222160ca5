"""Flow fidelity: a run under churn on rates instead of messages, so that days with thousands of machines take seconds.

Machines of a kind are alike, and between two events (one leaves, comes, moves) everything flows at a constant rate
(``rates``). What is decided is decided by the policies that decide in production: where newcomers go
(``machines.seat``), who moves and who fills a stage that lost all its peers (``strategies.swarm``).
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal

from muletrain.policy.assignment import Load, View
from muletrain.policy.rebalance import Confirmed
from muletrain.runtime.members.rebalancing import HORIZON_PERIODS
from muletrain.sim.fleet.ledger import Ledger, always
from muletrain.sim.fleet.rates import Rate
from muletrain.sim.machines import fetch_s, mortal, seat, seated
from muletrain.strategies.base import capacity
from muletrain.strategies.swarm import SWARM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muletrain.policy.assignment import Move
    from muletrain.sim.fleet.churn import Change
    from muletrain.sim.fleet.ledger import GoesOn
    from muletrain.sim.fleet.rates import Counts, Rates

HOUR_S = 3600.0
LASTING = 0.02
"""Of all the time: memberships that are there for so long are worth a play of their own."""


@dataclass(frozen=True)
class Weather:
    """How machines come and go. See ``config.fleet.Churn``."""

    trace: tuple[Change, ...] = ()
    leave_per_s: float = 0.0
    bursts_per_s: float = 0.0
    burst_share: float = 0.0
    away_s: float = 1800.0


@dataclass(frozen=True)
class Rules:
    """What of a run's configuration decides under churn."""

    rebalance: Literal["off", "paper", "throughput"]
    period_s: float
    adopt_after_s: float
    checkpoint_every: int
    """Steps; 0: none before the end."""


@dataclass(eq=False)
class _Moving:
    """On its way to ``target``; still at ``source`` until the step ends."""

    kind: int
    source: int | None
    target: int


@dataclass
class Flow:
    """One run of ``horizon_s``. ``play`` it once, then ask ``ledger``."""

    rates: Rates
    weather: Weather
    rules: Rules
    horizon_s: float
    seed: int
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        setting = self.rates.setting
        self._kinds, self._cost = setting.kinds, setting.cost
        self._stages = len(setting.cut)
        self._draw = random.Random(f"flow/{self.seed}")
        self._serving: list[Counts] = seated(setting)
        self._present = [kind.count for kind in self._kinds]
        """By kind, serving or on the way."""
        self._promised = [0] * self._stages
        """Newcomers that are on their way there."""
        self._moving: list[_Moving] = []
        self._gone: deque[int] = deque()
        """Kinds of machines that a trace may bring back."""
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._entered = 0
        self._now, self._again_s = 0.0, 0.0
        self._since_s, self._lasting = 0.0, False
        """Since when everyone is where they are, and whether that was found to last."""
        """``_again_s``: what died with a peer is computed again for so long yet, and nothing else."""
        self._lost: set[int] = set()
        """Stages without peers that nobody has adopted yet."""
        self._leaving = 0
        """Counts redrawn times of departure: older ones are void."""
        self._confirmed = Confirmed()
        self._restless = True
        self._work = tuple(s.forward_flops for s in self._cost.stages)
        self._mortal = mortal(setting)
        self._rate = self._rated()
        self.ledger = Ledger(self.rates, self.horizon_s, self._serving, self._present)

    @property
    def serving(self) -> list[Counts]:
        """By stage and kind, now."""
        return list(self._serving)

    # Time -------------------------------------------------------------------------------------------------------------

    def play(self, goes_on: GoesOn = always) -> Ledger:
        for change in self.weather.trace:
            self._at(change.time_s, lambda peers=change.peers: self._trace(peers))  # type: ignore[misc]
        self._draw_leaving()
        self._draw_burst()
        if self.rules.rebalance != "off":
            self._at(self.rules.period_s, self._tick)
        whole = goes_on(self._now, self.ledger.steps)
        while whole and self._agenda and self._agenda[0][0] < self.horizon_s:
            time_s, _, action = heappop(self._agenda)
            self._until(time_s)
            action()
            whole = goes_on(self._now, self.ledger.steps)
        if whole:
            self._until(self.horizon_s)
        self.ledger.close(partial=not whole)
        return self.ledger

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        self._entered += 1
        heappush(self._agenda, (time_s, self._entered, action))

    def _until(self, time_s: float) -> None:
        if not self._lasting and not self._lost and time_s - self._since_s >= LASTING * self.horizon_s:
            self._lasting, self._rate = True, self.rates.lasts(self._serving)
        again_s = min(self._again_s, time_s - self._now)
        if again_s > 0:
            self.ledger.pass_time(again_s, self._rate, again=True)
            self._again_s -= again_s
        self.ledger.pass_time(time_s - self._now - max(0.0, again_s), self._rate, again=False)
        self._now = time_s

    def _step_end_s(self) -> float:
        """Until the step that is under way is over."""
        if self._rate.throughput <= 0:
            return 0.0
        left = 1.0 - self.ledger.steps % 1.0
        return self._again_s + left * self._cost.microbatches / self._rate.throughput

    # Who is there -----------------------------------------------------------------------------------------------------

    def _add(self, stage: int, kind: int, peers: int) -> None:
        counts = list(self._serving[stage])
        counts[kind] += peers
        self._serving[stage] = tuple(counts)

    def _changed(self) -> None:
        self._restless = True
        self._since_s, self._lasting = self._now, False
        self._rate = self._rated()
        self.ledger.change(self._serving, self._present, self._rate)

    def _rated(self) -> Rate:
        rate = self.rates.of(self._serving)
        return Rate(rate.even, 0.0, 0.0, 0.0, 0.0) if self._lost else rate

    # Churn ------------------------------------------------------------------------------------------------------------

    def _draw_leaving(self) -> None:
        self._leaving += 1
        present = self._present
        rate = self.weather.leave_per_s * sum(present[k] for k in self._mortal)
        if rate > 0:
            version = self._leaving
            self._at(self._now + self._draw.expovariate(rate), lambda: self._leaves(version))

    def _leaves(self, version: int) -> None:
        if version == self._leaving:
            self._replace(self._take_any())
            self._draw_leaving()

    def _draw_burst(self) -> None:
        if self.weather.bursts_per_s > 0:
            self._at(self._now + self._draw.expovariate(self.weather.bursts_per_s), self._burst)

    def _burst(self) -> None:
        present = self._present
        for _ in range(round(self.weather.burst_share * sum(present[k] for k in self._mortal))):
            self._replace(self._take_any())
        self._draw_burst()
        self._draw_leaving()

    def _replace(self, kind: int | None) -> None:
        if kind is not None:
            self._at(self._now + self._draw.expovariate(1 / self.weather.away_s), lambda: self._come(kind))

    def _trace(self, peers: int) -> None:
        for _ in range(-peers):
            if (kind := self._take_any()) is not None:
                self._gone.append(kind)
        for _ in range(peers):
            self._come(self._gone.popleft() if self._gone else self._draw.choice(self._mortal))

    def _take_any(self) -> int | None:
        """One of those that may go, all with the same chance; None: there is none."""
        present = self._present
        number = sum(present[k] for k in self._mortal)
        if not number:
            return None
        chosen = self._draw.randrange(number)
        kind = next(k for k in self._mortal if (chosen := chosen - present[k]) < 0)
        places = [n[kind] for n in self._serving]
        fetching = [m for m in self._moving if m.kind == kind and m.source is None]
        at = self._draw.randrange(sum(places) + len(fetching))
        for stage, n in enumerate(places):
            if (at := at - n) < 0:
                self._take(kind, stage)
                return kind
        self._stop(fetching[at])
        self._present[kind] -= 1
        self.ledger.happened("left")
        self._changed()
        return kind

    def _take(self, kind: int, stage: int) -> None:
        """A machine that serves is gone, and what it held of the step with it."""
        cost = self._cost
        share = 1 / self.rates.service_s[stage][kind] / self._does(stage)
        held = (self.ledger.steps % 1.0) * cost.microbatches * share
        self._add(stage, kind, -1)
        self._present[kind] -= 1
        self.ledger.happened("left")
        if not sum(self._serving[stage]):
            self._lost.add(stage)
            self.ledger.happened("stage lost")
            self._at(self._now + self.rules.adopt_after_s, lambda: self._adopt(stage))
        self._changed()
        self._run_again(stage, held + min(capacity(self._stages) // 2, cost.microbatches * share))

    def _does(self, stage: int) -> float:
        """Microbatches/s of its peers together."""
        return sum(n / s for n, s in zip(self._serving[stage], self.rates.service_s[stage], strict=True))

    def _run_again(self, stage: int, microbatches: float) -> None:
        """Beside the rest of the step, as far as the stage has time to spare for it."""
        self.ledger.repeated += microbatches
        if self._rate.throughput <= 0:
            return
        does = self._does(stage)
        rest_s = (1.0 - self.ledger.steps % 1.0) * self._cost.microbatches / self._rate.throughput
        stalled_s = max(0.0, microbatches / does - rest_s * max(0.0, 1 - self._rate.throughput / does))
        self._again_s += stalled_s
        self.ledger.stalled(stalled_s)

    def _come(self, kind: int) -> None:
        (stage,) = seat(self.rates.setting, [kind], self._serving, self._promised)
        self._present[kind] += 1
        self._fetch(_Moving(kind, None, stage), "joined")
        self._draw_leaving()

    # On the way -------------------------------------------------------------------------------------------------------

    def _fetch(self, moving: _Moving, what: str) -> None:
        """The state of its new stage; it serves from the end of the step on in which it has it."""
        moving.source = None
        if moving not in self._moving:
            self._moving.append(moving)
        self._promised[moving.target] += 1
        self.ledger.happened(what)
        self._restless = True
        self.ledger.change(self._serving, self._present, self._rate)
        nbytes = self._cost.stages[moving.target].state_bytes
        self.ledger.fetched(moving.kind, self._serving[moving.target], nbytes)
        takes_s = fetch_s(self.rates.setting, moving.kind, moving.target, self._serving[moving.target])
        self._at(self._now + takes_s, lambda: self._has_state(moving))

    def _has_state(self, moving: _Moving) -> None:
        if moving in self._moving:
            self._at(self._now + self._step_end_s(), lambda: self._serves(moving))

    def _serves(self, moving: _Moving) -> None:
        if moving in self._moving:
            self._stop(moving)
            self._add(moving.target, moving.kind, 1)
            self._changed()

    def _stop(self, moving: _Moving) -> None:
        """It fetches nothing any more."""
        self._moving.remove(moving)
        self._promised[moving.target] -= 1

    def _departs(self, moving: _Moving) -> None:
        """Between two steps, and never as a stage's last."""
        if moving not in self._moving or moving.source is None:
            return
        if sum(self._serving[moving.source]) < 2 or not self._serving[moving.source][moving.kind]:
            self._moving.remove(moving)
            return
        self._add(moving.source, moving.kind, -1)
        self._changed()
        self._fetch(moving, "moved")

    # Decisions --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self._restless and not self._lost:
            for move in self._decided():
                moving = _Moving(int(move.peer.split(".")[1]), move.source, move.target)
                self._moving.append(moving)
                self._at(self._now + self._step_end_s(), lambda moving=moving: self._departs(moving))  # type: ignore[misc]
        self._at(self._now + self.rules.period_s, self._tick)

    def _decided(self) -> Sequence[Move]:
        horizon_s = HORIZON_PERIODS * self.rules.period_s
        state_bytes = [s.state_bytes for s in self._cost.stages]
        wanted = SWARM.assign(
            View(self._loads(), self._work, state_bytes, rule=self.rules.rebalance, horizon_s=horizon_s)
        )
        self._restless = bool(wanted)  # the same view leads to the same moves
        return self._confirmed.of(wanted)

    def _loads(self) -> dict[str, Load]:
        """What peers would announce: those alike together; requests wait where little is done."""
        leaving = Counter((m.source, m.kind) for m in self._moving if m.source is not None)
        coming = Counter((m.target, m.kind) for m in self._moving)
        loads = {}
        for s, counts in enumerate(self._serving):
            does = self._does(s)
            queue = 1 / does / max(1, sum(counts)) if does else 0.0
            for k, n in enumerate(counts):
                kind, staying = self._kinds[k], n - leaving[s, k]
                if staying > 0:
                    loads[f"{s:04}.{k:03}"] = Load(
                        s, queue, {s: 1 / self.rates.service_s[s][k]}, targets=kind.fits, alike=staying
                    )
        for (s, k), n in sorted(coming.items()):
            loads[f"{s:04}.{k:03}.coming"] = Load(s, 0.0, {}, targets=frozenset(), alike=n)
        return loads

    def _adopt(self, stage: int) -> None:
        """The run steps back to its newest checkpoint; if nobody came meanwhile, a peer of the stage that has most left
        serves it."""
        if stage not in self._lost:
            return
        if not sum(self._serving[stage]) and not any(m.target == stage for m in self._moving):
            loads = {
                f"{s:04}.{k:03}.{i:06}": Load(s, targets=self._kinds[k].fits - {s})
                for s, counts in enumerate(self._serving)
                for k, n in enumerate(counts)
                for i in range(n)
            }
            for move in SWARM.assign(View(loads, self._work, stopped=True)):
                kind = int(move.peer[5:8])
                self._add(move.source, kind, -1)
                self._changed()
                self._fetch(_Moving(kind, None, move.target), "adopted")
        if not sum(self._serving[stage]):
            self._at(self._now + RETRY_S, lambda: self._adopt(stage))
            return
        self._lost.discard(stage)
        every = self.rules.checkpoint_every
        self.ledger.step_back(self.ledger.steps // every * every if every else 0.0)
        self._changed()


RETRY_S = 5.0
"""Between two looks at whether a lost stage is served again."""
