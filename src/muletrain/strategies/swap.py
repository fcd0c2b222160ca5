"""Strategy ``swap`` (ATOM sec. III) lets every peer serve the whole model. The model's blocks pass through a device
that is too small for all blocks (``compute.swap``); peers average the whole model once a step's microbatches are
through. Otherwise this single stage runs as under strategy ``swarm``: measured speed decides who computes a
microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.errors import ConfigError
from muletrain.strategies.base import capacity
from muletrain.strategies.swarm import Swarm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.config.schema import RunConfig


@dataclass(frozen=True)
class Swap(Swarm):
    """The strategy. ``together``: microbatches that wait for each other at a peer; None: the peer decides."""

    together: int | None = None

    @classmethod
    def of(cls, config: RunConfig) -> Swap | None:
        """Returns the strategy if the run's configuration has peers serve the whole model."""
        return cls(config.swap.together) if config.swap.whole else None

    @staticmethod
    def asked(config: RunConfig, clients: int) -> RunConfig:
        """Returns ``config`` with one stage, which every peer serves. Raises ConfigError if the user asks for more
        stages."""
        if "stages" in config.fleet.model_fields_set and config.fleet.stages != 1:
            raise ConfigError(
                f"fleet.stages: {config.fleet.stages} stages, but with strategy swap every peer serves the whole model; leave it out, or "
                f"choose another strategy"
            )
        fleet = config.fleet.model_copy(update={"stages": 1, "peers": config.fleet.peers})
        return config.model_copy(update={"fleet": fleet, "swap": config.swap.model_copy(update={"whole": True})})

    def capacity(self, stages: int) -> int:
        """Twice the microbatches computed together, so that the next group is there when a group is through."""
        return max(capacity(stages), 2 * (self.together or 0))

    def window(self, capacity: int, serving: Sequence[int], trainers: int) -> int:
        """With one peer, the peer's full capacity: no other trainer shares the peer, and more microbatches per load
        mean fewer loads."""
        return capacity if sum(serving) == 1 else super().window(capacity, serving, trainers)
