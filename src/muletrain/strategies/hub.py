"""Strategy ``hub`` (HYBRID sec. 3.2) has reliable peers serve the stages, and unreliable ones, the clients, compute for
them. Between servers everything is as under strategy ``swarm``; inside a stage the pool decides (``policy.pool``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.strategies.swarm import Swarm

if TYPE_CHECKING:
    from muletrain.config.schema import RunConfig


@dataclass(frozen=True)
class Hub(Swarm):
    """The strategy; it has no settings."""

    pooled = True

    @classmethod
    def of(cls, config: RunConfig) -> Hub | None:
        """Returns the strategy if the run's configuration has clients."""
        return None if config.hub.clients is None else cls()
