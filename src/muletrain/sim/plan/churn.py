"""Predict losses from churn: lost stages, rollbacks, states that newcomers fetch, absent machines.

A layout of stages is played as rates under the fleet file's churn (``sim.fleet.flow``), from the planned membership. In
a hub only clients leave, so a hub loses the clients' part of the work in the time of their absence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.sim.fleet.flow import HOUR_S, Flow, Rules, Weather
from muletrain.sim.fleet.rates import rates_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.sim.fleet.rates import Counts
    from muletrain.sim.plan.question import Question, Scene

EVENTS, HOURS = 240.0, (6.0, 240.0)
"""Approximate departures in a play, and the least and most hours of a play."""


def rate_per_s(weather: Weather) -> float:
    """Departures per second of each machine, single or in bursts."""
    return weather.leave_per_s + weather.bursts_per_s * weather.burst_share


def kept(question: Question, scene: Scene, serving: Sequence[Sequence[int]]) -> float:
    """The part of a layout's tokens/s that remains under churn, at most 1. ``serving``: by stage and kind."""
    leaves = [n for n, kind in enumerate(scene.setting.kinds) if kind.leaves]
    exposed = sum(counts[k] for counts in serving for k in leaves)
    if question.weather == Weather() or not exposed:
        return 1.0
    known = tuple(map(tuple, serving))
    key = scene.setting.cut, known, tuple(kind.name for kind in scene.setting.kinds), scene.run.swap.backing
    if key not in question.churned:
        question.churned[key] = _kept(question.weather, scene, known, exposed)
    return question.churned[key]


def _kept(weather: Weather, scene: Scene, serving: Sequence[Counts], exposed: int) -> float:
    fleet = scene.run.fleet
    rates = rates_of(scene.setting, scene.run)
    rules = Rules(fleet.rebalance, fleet.rebalance_period, fleet.adopt_after, scene.run.checkpoint.every)
    often = rate_per_s(weather) * exposed
    hours = min(HOURS[1], max(HOURS[0], EVENTS / (HOUR_S * often) if often else 0.0))
    if weather.trace:
        hours = min(hours, weather.trace[-1].time_s / HOUR_S + HOURS[0])
    steady = rates.of(serving).throughput
    played = Flow(rates, weather, rules, HOUR_S * hours, seed=0, serving=serving).play().outcome()
    return min(1.0, played.throughput / steady) if steady else 1.0


def present(weather: Weather, machines: int) -> float:
    """The mean part of ``machines`` that is present under churn."""
    if weather.trace and machines:
        there, since_s, total = machines, 0.0, 0.0
        for change in weather.trace:
            total += there * (change.time_s - since_s)
            there, since_s = max(0, there + change.peers), change.time_s
        traced = min(1.0, total / since_s / machines) if since_s else 1.0
    else:
        traced = 1.0
    return traced / (1 + rate_per_s(weather) * weather.away_s)
