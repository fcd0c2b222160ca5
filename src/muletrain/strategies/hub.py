"""Strategy ``hub`` (HYBRID sec. 3.2) lets reliable peers serve the stages, and unreliable peers, the clients, compute
for the servers. Servers train together as under strategy ``swarm``; inside a stage the pool decides
(``policy.pool``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from muletrain.policy.assignment import NOWHERE, Move, filled, placed
from muletrain.strategies.swarm import Swarm

if TYPE_CHECKING:
    from muletrain.config.schema import RunConfig
    from muletrain.policy.assignment import View


@dataclass(frozen=True)
class Hub(Swarm):
    """The strategy. ``seats``: names of the servers of each stage; (): as under strategy ``swarm``."""

    pooled = True
    seats: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, config: RunConfig) -> Hub | None:
        """Returns the strategy if the run's configuration has clients."""
        return None if config.hub.clients is None else cls(config.hub.seats)

    @staticmethod
    def asked(config: RunConfig, clients: int) -> RunConfig:
        """Returns ``config`` with ``clients``, unless ``config`` has a number."""
        if config.hub.clients is not None:
            return config
        return config.model_copy(update={"hub": config.hub.model_copy(update={"clients": clients})})

    def assign(self, view: View) -> tuple[Move, ...]:
        """Planned servers get their seats, with or without room. Other newcomers are placed, and lost stages filled, as
        in every strategy. During the run, servers stay and clients move to slow stages; if both moved, the stages would
        be fast in turns."""
        if not view.newcomers:
            return filled(view) if view.stopped else ()
        stage_of = {name: s for s, names in enumerate(self.seats) for name in names}
        seated = {p: s for p in view.newcomers if (s := stage_of.get(view.loads[p].name)) is not None}
        loads = {p: replace(own, stage=seated.get(p, own.stage)) for p, own in view.loads.items()}
        return (*(Move(p, NOWHERE, s) for p, s in seated.items()), *placed(replace(view, loads=loads)))

    def has_place(self, name: str) -> bool:
        return any(name in names for names in self.seats)
