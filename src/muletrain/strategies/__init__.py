"""The strategies, and nothing else: what tells the four systems apart. ``STRATEGIES`` is the one list; runs, the
planner, the simulator and the command line find them there. The step protocol knows only the interface
(``base.Strategy``).

To add a fifth one:

1. Write ``strategies/NAME.py``: a frozen dataclass with the methods of ``base.Strategy`` and, if a run's configuration
   chooses it, ``of``.
2. Append it to ``STRATEGIES``, and its name to ``config.plan_file.Strategy``; ``tests/test_strategies.py`` asks each of its
   methods.
3. Write its predictor in ``sim/plan/`` and name it in ``sim.plan.planner``; until there is one, ``muletrain plan`` says
   what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.strategies.pipeline import Pipeline
from muletrain.strategies.swarm import SWARM

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.config.plan_file import Strategy as Name
    from muletrain.config.schema import RunConfig
    from muletrain.strategies.base import Strategy


@dataclass(frozen=True)
class Listed:
    """One strategy of the list. ``of``: the one that a run's configuration asks for; None: ``muletrain run`` does not
    have it yet, it is only planned with. ``choices``: its names for ``--strategy``, one for each schedule.
    ``simulated``: ``muletrain simulate`` plays it."""

    name: Name
    of: Callable[[RunConfig], Strategy | None] | None = None
    choices: tuple[str, ...] = ()
    simulated: bool = False

    @property
    def runs(self) -> bool:
        return self.of is not None


STRATEGIES: tuple[Listed, ...] = (
    Listed("swarm", lambda config: SWARM, ("swarm",), simulated=True),
    Listed("pipeline", Pipeline.of, ("1f1b", "gpipe")),
    Listed("swap"),
    Listed("hub"),
)
CHOICES = tuple(choice for s in STRATEGIES for choice in s.choices)
"""What ``--strategy`` takes for a run."""


def find(name: str) -> Listed:
    """Raises KeyError."""
    by_name: dict[str, Listed] = {s.name: s for s in STRATEGIES}
    return by_name[name]


def strategy_of(config: RunConfig) -> Strategy:
    """The one that a run's configuration asks for: the last of the list that does not decline, and the first declines
    none."""
    return next(found for s in reversed(STRATEGIES) if s.of is not None and (found := s.of(config)) is not None)
