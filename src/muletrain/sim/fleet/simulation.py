"""Simulate a fleet file with a run's configuration: as rates, or with every message of the production code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from muletrain.sim.fleet.accounts import always
from muletrain.sim.fleet.flow import HOUR_S, Flow, Rules, Weather
from muletrain.sim.fleet.pace import BUDGET_S, Pace
from muletrain.sim.fleet.rates import TRAINERS, rates_of
from muletrain.sim.fleet.trace import TRACE_A, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muletrain.config.fleet_sections import Churn
    from muletrain.config.schema import RunConfig
    from muletrain.events import Event
    from muletrain.sim.fleet.accounts import GoesOn, Outcome
    from muletrain.sim.fleet.planned import Planned
    from muletrain.sim.fleet.rates import Counts
    from muletrain.sim.setting import Setting

Fidelity = Literal["flow", "protocol"]
EXAMPLE = Path(__file__).parent / "fleets" / "spot-t4.toml"


def weather(churn: Churn, folder: Path) -> Weather:
    """Read a fleet file's churn; ``Weather()``: no machine ever leaves. ``folder``: the file's, to which a trace's path is
    relative. Raises DataError with the trace's line."""
    if churn.trace is None and not churn.leave_per_hour and not churn.bursts_per_hour:
        return Weather()
    trace = () if churn.trace is None else read_trace(TRACE_A if churn.trace == "a" else folder / churn.trace)
    return Weather(
        trace=trace,
        leave_per_s=churn.leave_per_hour / HOUR_S,
        bursts_per_s=churn.bursts_per_hour / HOUR_S,
        burst_share=churn.burst_share,
        away_s=60 * churn.away_min,
    )


def simulate_fleet(
    setting: Setting,
    config: RunConfig,
    weather: Weather,
    *,
    hours: float,
    seed: int = 0,
    fidelity: Fidelity = "flow",
    watch: Callable[[Event], None] | None = None,
    planned: Planned | None = None,
    serving: Sequence[Counts] | None = None,
    budget_s: float = BUDGET_S,
    goes_on: GoesOn = always,
) -> Outcome:
    """Play strategy ``swarm`` for ``hours``, or another strategy with ``planned`` membership (fidelity 'protocol').
    ``serving``: initial peers by stage and kind (fidelity 'flow'); default: machines are seated as newcomers.
    ``budget_s``: core seconds for played steps after the first; see ``pace``.

    The same seed gives the same outcome. ``watch`` receives every event of the peers and slots (fidelity 'protocol').
    ``goes_on`` is called at least every tenth of a real second, and may end the play. Raises CapacityError if a stage
    gets no machine."""
    horizon_s, trainers = HOUR_S * hours, config.fleet.trainers or TRAINERS
    if fidelity == "protocol":
        from muletrain.sim.fleet.protocol import Actors

        actors = Actors(setting, config, weather, horizon_s, trainers=trainers, seed=seed, watch=watch, planned=planned)
        return actors.play(goes_on)
    pace = Pace(setting, trainers=trainers, delayed=config.optimizer.delayed, budget_s=budget_s)
    return Flow(pace, weather, _rules(config), horizon_s, seed, serving).play(goes_on).outcome()


def by_rates(setting: Setting, config: RunConfig, weather: Weather, *, hours: float, seed: int = 0) -> Outcome:
    """Play fidelity 'flow' on uncorrected rates: milliseconds instead of seconds, to compare many runs."""
    return Flow(rates_of(setting, config), weather, _rules(config), HOUR_S * hours, seed).play().outcome()


def _rules(config: RunConfig) -> Rules:
    fleet = config.fleet
    return Rules(fleet.rebalance, fleet.rebalance_period, fleet.adopt_after, config.checkpoint.every)
