"""A strategy contains the differences between the four systems, and nothing else. ``STRATEGIES`` is the only list:
runs, the planner, the simulator and the command line (``--strategy`` of ``run``, ``start`` and ``simulate``) look
there. The step protocol knows only the interface (``base.Strategy``).

To add a fifth strategy:

1. Write ``strategies/NAME.py``: a frozen dataclass with the methods of ``base.Strategy`` and, if a run's configuration
   can ask for the strategy, ``of``.
2. Append the strategy to ``STRATEGIES``, and its name to ``config.plan_file.StrategyName``.
   ``tests/test_strategies.py`` calls each method; add a configuration that asks for the strategy there (``made``).
3. If a run must know more, add a section to the configuration (``config/peer_sections.py``, ``config/schema.py``; may a
   resumed run change it? ``runs.resuming.TABLE``), filled from a plan (``cli/actions/planned.py``).
4. Write a predictor in ``sim/plan/`` and name it in ``sim.plan.planner.predict``, or ``muletrain plan`` reports it
   missing. ``planner.confirmed`` plays the recommended plan as strategy swarm, unless the plan has a schedule. New
   schedules and fields belong into ``config.plan_file.Prediction``.
5. Let the fuzzer draw the strategy (``proofs/draws/``).
6. Describe the strategy in ``README.md``, ``docs/planning.md`` and ``docs/explanations/strategies.md``, and name it where people read the
   choices: ``cli/options.py``, ``cli/commands/simulate.py``, the messages of ``cli/actions/planned.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.strategies.hub import Hub
from muletrain.strategies.pipeline import Pipeline
from muletrain.strategies.swap import Swap
from muletrain.strategies.swarm import SWARM

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.config.plan_file import StrategyName
    from muletrain.config.schema import RunConfig
    from muletrain.strategies.base import Strategy


@dataclass(frozen=True)
class Listed:
    """One strategy of the list. ``of``: returns the strategy if a run's configuration asks for it, else None; without
    ``of`` the strategy can be planned, but does not run yet. ``choices``: names for ``--strategy``, one for each
    schedule."""

    name: StrategyName
    of: Callable[[RunConfig], Strategy | None] | None = None
    choices: tuple[str, ...] = ()
    ask: Callable[[RunConfig, int], RunConfig] | None = None
    """Returns a configuration that asks for the strategy, without a plan; the number: of clients, if the strategy can
    have clients. None: the strategy needs a plan."""
    pooled: bool = False
    """See ``base.Strategy``."""

    @property
    def runs(self) -> bool:
        return self.of is not None

    @property
    def simulated(self) -> bool:
        """Does 'simulate fleet' play the strategy? 'muletrain plan --confirm' plays planned strategies."""
        return self.ask is not None


STRATEGIES: tuple[Listed, ...] = (
    Listed("swarm", lambda config: SWARM, ("swarm",), lambda config, clients: config),
    Listed("pipeline", Pipeline.of, ("1f1b", "gpipe")),
    Listed("swap", Swap.of, ("swap",), Swap.asked),
    Listed("hub", Hub.of, ("hub",), Hub.asked, pooled=True),
)
CHOICES = tuple(choice for s in STRATEGIES for choice in s.choices)
"""Values of ``--strategy`` for a run."""


def find(name: str) -> Listed:
    """Returns the strategy of that name. Raises KeyError."""
    by_name: dict[str, Listed] = {s.name: s for s in STRATEGIES}
    return by_name[name]


def listed_as(name: str) -> Listed:
    """Returns the strategy that ``--strategy`` calls ``name``. Raises KeyError."""
    by_choice = {choice: s for s in STRATEGIES for choice in s.choices}
    return by_choice[name]


def strategy_of(config: RunConfig) -> Strategy:
    """Returns the strategy that a run's configuration asks for: the last of the list that accepts the configuration.
    The first accepts any."""
    return next(found for s in reversed(STRATEGIES) if s.of is not None and (found := s.of(config)) is not None)


def listed_of(config: RunConfig) -> Listed:
    """Returns the entry of the list that a run's configuration asks for."""
    return next(listed for listed in reversed(STRATEGIES) if asks_for(config, listed))


def asks_for(config: RunConfig, listed: Listed) -> bool:
    """Does a run's configuration ask for the strategy ``listed``?"""
    return listed.of is not None and strategy_of(config) == listed.of(config)
