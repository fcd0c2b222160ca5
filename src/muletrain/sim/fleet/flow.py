"""Flow fidelity plays a run under churn on rates instead of messages, so that days with thousands of machines take
seconds.

Machines of a kind are alike, and everything flows at a constant rate (``rates``) between two events: a departure, an
arrival or a move. Production policies decide here, too: on seats of newcomers (``setting.seat``), on moves, and on the
adopter of a stage that lost all its peers (``strategies.swarm``).
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal, Protocol

from muletrain.policy.assignment import View
from muletrain.policy.rebalance import Confirmed
from muletrain.runtime.members.rebalancing import HORIZON_PERIODS
from muletrain.sim.fleet.accounts import always
from muletrain.sim.fleet.advance import Progress
from muletrain.sim.fleet.serving import Membership, Moving, kind_of
from muletrain.sim.fleet.trace import Change
from muletrain.sim.setting import fetch_s, seat
from muletrain.strategies.swarm import SWARM

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable, Sequence

    from muletrain.sim.fleet.accounts import Accounts, GoesOn
    from muletrain.sim.fleet.rates import Counts, Rates

HOUR_S = 3600.0
RETRY_S = 5.0
"""Seconds between two looks at whether a lost stage is served again."""


@dataclass(frozen=True)
class Weather:
    """How machines come and go. See ``config.fleet.Churn``."""

    trace: tuple[Change, ...] = ()
    leave_per_s: float = 0.0
    bursts_per_s: float = 0.0
    burst_share: float = 0.0
    away_s: float = 1800.0

    def on(self, exposed: float) -> Weather:
        """Returns the weather of a part of the fleet, with its share of the trace's changes. ``exposed``: see
        ``Setting``."""
        if exposed in (0.0, 1.0):
            return self if exposed else Weather()
        counted, here, changes = 0, 0, list[Change]()
        for change in self.trace:
            counted += change.peers
            if there := round(exposed * counted) - here:
                changes.append(Change(change.time_s, there))
                here += there
        return replace(self, trace=tuple(changes))


@dataclass(frozen=True)
class Rules:
    """The settings of a run that decide under churn."""

    rebalance: Literal["off", "paper", "throughput"]
    period_s: float
    adopt_after_s: float
    checkpoint_every: int
    """Steps between checkpoints; 0: none before the end."""


class Agenda:
    """Actions by due time [s], entered as in an event loop. Actions of the same time run in the order of entry."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._entered = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def call_at(self, time_s: float, action: Callable[[], None]) -> None:
        self._entered += 1
        heappush(self._heap, (time_s, self._entered, action))

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        self.call_at(self.now_s + seconds, action)

    @property
    def next_s(self) -> float:
        """When the next action is due; inf: there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def run_next(self) -> None:
        self.now_s, _, action = heappop(self._heap)
        action()


class Fleet(Protocol):
    """Carries out the decisions of the weather."""

    mortal: list[int]
    """Kinds whose machines may leave."""

    @property
    def may_leave(self) -> int:
        """Machines of these kinds that are there."""

    def lose(self) -> int | None:
        """Remove one of them at random, and return its kind; None: there is none."""

    def come(self, kind: int) -> None: ...


class Churn:
    """Departures and returns of machines under one ``weather``."""

    def __init__(self, weather: Weather, agenda: Agenda | AbstractEventLoop, draw: random.Random, fleet: Fleet) -> None:
        self._weather, self._agenda, self._draw, self._fleet = weather, agenda, draw, fleet
        self._gone: deque[int] = deque()
        """Kinds of machines that a trace may bring back."""
        self._version = 0
        """Number of redraws of the next departure; earlier draws are void."""

    def begin(self) -> None:
        for change in self._weather.trace:
            self._agenda.call_at(change.time_s, partial(self._trace, change.peers))
        self.redraw()
        self._draw_burst()

    def redraw(self) -> None:
        """Draw the next departure anew, for as many machines as there are."""
        self._version += 1
        if (rate := self._weather.leave_per_s * self._fleet.may_leave) > 0:
            self._agenda.call_later(self._draw.expovariate(rate), partial(self._leaves, self._version))

    def _leaves(self, version: int) -> None:
        if version == self._version:
            self._replace(self._fleet.lose())
            self.redraw()

    def _draw_burst(self) -> None:
        if self._weather.bursts_per_s > 0:
            self._agenda.call_later(self._draw.expovariate(self._weather.bursts_per_s), self._burst)

    def _burst(self) -> None:
        for _ in range(round(self._weather.burst_share * self._fleet.may_leave)):
            self._replace(self._fleet.lose())
        self._draw_burst()
        self.redraw()

    def _replace(self, kind: int | None) -> None:
        if kind is not None:
            self._agenda.call_later(self._draw.expovariate(1 / self._weather.away_s), partial(self._fleet.come, kind))

    def _trace(self, peers: int) -> None:
        for _ in range(-peers):
            if (kind := self._fleet.lose()) is not None:
                self._gone.append(kind)
        for _ in range(peers):
            self._fleet.come(self._gone.popleft() if self._gone else self._draw.choice(self._fleet.mortal))


class Flow:
    """One run of ``horizon_s``, played once."""

    def __init__(
        self,
        rates: Rates,
        weather: Weather,
        rules: Rules,
        horizon_s: float,
        seed: int,
        serving: Sequence[Counts] | None = None,
    ) -> None:
        """``serving``: initial peers by stage and kind; default: machines are seated as newcomers."""
        self._setting, self._rules, self._horizon_s = rates.setting, rules, horizon_s
        self._draw = random.Random(f"flow/{seed}")
        self._agenda = Agenda()
        self._members = Membership(rates, serving)
        self._progress = Progress(rates, self._members, horizon_s)
        self.mortal = self._members.mortal
        self._churn = Churn(weather.on(self._setting.exposed), self._agenda, self._draw, self)
        self._confirmed = Confirmed()
        self._restless = True
        """The membership has changed since the policy last wanted no move."""
        self._work = tuple(s.forward_flops for s in self._setting.cost.stages)

    @property
    def may_leave(self) -> int:
        return self._members.may_leave

    @property
    def serving(self) -> list[Counts]:
        """Peers that serve now, by stage and kind."""
        return list(self._members.serving)

    def play(self, goes_on: GoesOn = always) -> Accounts:
        self._churn.begin()
        if self._rules.rebalance != "off":
            self._agenda.call_at(self._rules.period_s, self._tick)
        accounts = self._progress.accounts
        whole = goes_on(0.0, accounts.steps)
        while whole and self._agenda.next_s < self._horizon_s:
            self._progress.until(self._agenda.next_s)
            self._agenda.run_next()
            whole = goes_on(self._agenda.now_s, accounts.steps)
        if whole:
            self._progress.until(self._horizon_s)
        accounts.close(partial=not whole)
        return accounts

    def _changed(self) -> None:
        self._restless = True
        self._progress.changed()

    # Machines leave and come ------------------------------------------------------------------------------------------

    def lose(self) -> int | None:
        """Remove a random machine and return its kind; None: no machine may leave."""
        drawn = self._members.drawn(self._draw)
        if drawn is None:
            return None
        kind, where = drawn
        if isinstance(where, Moving):
            self._members.stops(where)
            self._members.present[kind] -= 1
            self._progress.accounts.happened("left")
            self._changed()
        else:
            self._lose(kind, where)
        return kind

    def _lose(self, kind: int, stage: int) -> None:
        """A serving machine leaves, and its part of the step is lost."""
        share, accounts = self._members.share(stage, kind), self._progress.accounts
        held = self._progress.held(share)
        self._members.add(stage, kind, -1)
        self._members.present[kind] -= 1
        accounts.happened("left")
        if not sum(self._members.serving[stage]):
            self._progress.lost.add(stage)
            accounts.happened("stage lost")
            self._agenda.call_later(self._rules.adopt_after_s, partial(self._adopt, stage))
        self._changed()
        self._progress.repeat(stage, share, held)

    def come(self, kind: int) -> None:
        (stage,) = seat(self._setting, [kind], self._members.serving, self._members.promised)
        self._members.present[kind] += 1
        self._fetch(Moving(kind, None, stage), "joined")
        self._churn.redraw()

    # Peers on their way -----------------------------------------------------------------------------------------------

    def _fetch(self, moving: Moving, what: str) -> None:
        """A peer fetches the state of its new stage and serves there from the end of the present step on."""
        kind, target = moving.kind, moving.target
        self._members.fetches(moving)
        self._progress.accounts.happened(what)
        self._restless = True
        self._progress.noted()
        donors = self._members.serving[target]
        self._progress.accounts.fetched(kind, donors, self._setting.cost.stages[target].state_bytes)
        self._agenda.call_later(fetch_s(self._setting, kind, target, donors), partial(self._has_state, moving))

    def _has_state(self, moving: Moving) -> None:
        if moving in self._members.moving:
            self._agenda.call_later(self._progress.step_end_s, partial(self._serves, moving))

    def _serves(self, moving: Moving) -> None:
        if moving in self._members.moving:
            self._members.stops(moving)
            self._members.add(moving.target, moving.kind, 1)
            self._changed()

    def _departs(self, moving: Moving) -> None:
        """A peer leaves its stage between two steps; the last peer of a stage stays."""
        if moving not in self._members.moving or moving.source is None:
            return
        here = self._members.serving[moving.source]
        if sum(here) < 2 or not here[moving.kind]:
            self._members.moving.remove(moving)
            return
        self._members.add(moving.source, moving.kind, -1)
        self._changed()
        self._fetch(moving, "moved")

    # Decisions --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self._restless and not self._progress.lost:
            view = View(
                self._members.loads(),
                self._work,
                [s.state_bytes for s in self._setting.cost.stages],
                rule=self._rules.rebalance,
                horizon_s=HORIZON_PERIODS * self._rules.period_s,
            )
            wanted = SWARM.assign(view)
            self._restless = bool(wanted)  # the same view leads to the same moves
            for move in self._confirmed.of(wanted):
                moving = Moving(kind_of(move.peer), move.source, move.target)
                self._members.moving.append(moving)
                self._agenda.call_later(self._progress.step_end_s, partial(self._departs, moving))
        self._agenda.call_later(self._rules.period_s, self._tick)

    def _adopt(self, stage: int) -> None:
        """The run rolls back to its newest checkpoint. If no peer came to the lost stage meanwhile, a peer of the most
        populated stage serves there."""
        if stage not in self._progress.lost:
            return
        members, accounts = self._members, self._progress.accounts
        if not sum(members.serving[stage]) and not any(m.target == stage for m in members.moving):
            for move in SWARM.assign(View(members.each(), self._work, stopped=True)):
                members.add(move.source, kind_of(move.peer), -1)
                self._changed()
                self._fetch(Moving(kind_of(move.peer), None, move.target), "adopted")
        if not sum(members.serving[stage]):
            change_s = self._agenda.next_s - self._agenda.now_s  # until then nothing is different
            self._agenda.call_later(max(RETRY_S, change_s), partial(self._adopt, stage))
            return
        self._progress.lost.discard(stage)
        every = self._rules.checkpoint_every
        accounts.step_back(accounts.steps // every * every if every else 0.0)
        self._changed()
