"""What would happen: a fleet file and a run's configuration, played at either fidelity: as rates, or with every
message."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from muletrain.sim.fleet.churn import TRACE_A, read_trace
from muletrain.sim.fleet.flow import HOUR_S, Flow, Rules, Weather
from muletrain.sim.fleet.ledger import always
from muletrain.sim.fleet.pace import Pace
from muletrain.sim.fleet.rates import TRAINERS, Rates

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.config.fleet_sections import Churn
    from muletrain.config.schema import RunConfig
    from muletrain.events import Event
    from muletrain.sim.fleet.actors import Planned
    from muletrain.sim.fleet.ledger import GoesOn, Outcome
    from muletrain.sim.machines import Setting

Fidelity = Literal["flow", "protocol"]
EXAMPLE = Path(__file__).parent / "fleets" / "spot-t4.toml"


def weather(churn: Churn, folder: Path) -> Weather:
    """``folder``: where the fleet file is, from which its trace is named. Raises DataError with the trace's line."""
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
    goes_on: GoesOn = always,
) -> Outcome:
    """Strategy ``swarm`` for so many hours; with ``planned`` membership ``pipeline`` (fidelity 'protocol'). The same
    seed gives the same outcome. ``watch`` is told of every event of the peers, what their slots do among them (fidelity
    'protocol'). ``goes_on`` hears how far it is, every tenth of a real second or more often, and may end it. Raises
    CapacityError where a stage gets no machine."""
    horizon_s, trainers = HOUR_S * hours, config.fleet.trainers or TRAINERS
    if fidelity == "protocol":
        from muletrain.sim.fleet.actors import Actors

        actors = Actors(setting, config, weather, horizon_s, trainers=trainers, seed=seed, watch=watch, planned=planned)
        return actors.play(goes_on)
    pace = Pace(setting, trainers=trainers, delayed=config.optimizer.delayed)
    return Flow(pace, weather, _rules(config), horizon_s, seed).play(goes_on).outcome()


def by_rates(setting: Setting, config: RunConfig, weather: Weather, *, hours: float, seed: int = 0) -> Outcome:
    """As fidelity 'flow', but no step is played to put rates right: milliseconds instead of seconds, to compare many
    runs."""
    rates = Rates(setting, trainers=config.fleet.trainers or TRAINERS, delayed=config.optimizer.delayed)
    return Flow(rates, weather, _rules(config), HOUR_S * hours, seed).play().outcome()


def _rules(config: RunConfig) -> Rules:
    fleet = config.fleet
    return Rules(fleet.rebalance, fleet.rebalance_period, fleet.adopt_after, config.checkpoint.every)
