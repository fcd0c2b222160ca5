"""Strategy ``hub`` (HYBRID sec. 3.2) has reliable peers serve the stages, and unreliable ones, the clients, compute for
them. Between servers everything is as under strategy ``swarm``; inside a stage the pool decides (``policy.pool``)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from muletrain.policy.assignment import NOWHERE, Move, filled, placed
from muletrain.strategies.swarm import Swarm

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from muletrain.config.schema import RunConfig
    from muletrain.policy.assignment import View


MOVES_AT = 1.2
"""Times as fast as the slowest stage that a stage must be for its clients to move: they fetch other weights for that."""


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
        """Returns ``config`` with ``clients``, unless it says how many."""
        if config.hub.clients is not None:
            return config
        return config.model_copy(update={"hub": config.hub.model_copy(update={"clients": clients})})

    def assign(self, view: View) -> tuple[Move, ...]:
        """Planned servers get their seats, whether they fit there or not. Others are placed, and lost stages filled, as in
        every strategy. While the run goes on servers stay: clients move to slow stages, and if both did, the stages
        would be fast in turns."""
        if not view.newcomers:
            return filled(view) if view.stopped else ()
        stage_of = {name: s for s, names in enumerate(self.seats) for name in names}
        seated = {p: s for p in view.newcomers if (s := stage_of.get(view.loads[p].name)) is not None}
        loads = {p: replace(own, stage=seated.get(p, own.stage)) for p, own in view.loads.items()}
        return (*(Move(p, NOWHERE, s) for p, s in seated.items()), *placed(replace(view, loads=loads)))

    def has_place(self, name: str) -> bool:
        return any(name in names for names in self.seats)


def stage_to_help(work: Sequence[float], speeds: Sequence[float], fits: Collection[int]) -> int | None:
    """Returns the stage at which one more client raises the throughput most: of those that it ``fits`` into, the one with
    the most work for the speed of its machines; of stages without any, the one with the most work; None: it fits into
    none. ``work``: of each stage, for a sequence; ``speeds``: work that each stage's servers and clients do together in
    a second. Both in any unit."""

    def load(stage: int) -> tuple[float, float]:
        return work[stage] / speeds[stage] if speeds[stage] > 0 else math.inf, work[stage]

    return max(sorted(fits), key=load, default=None)


def stage_to_move_to(
    work: Sequence[float],
    speeds: Sequence[float],
    stage: int,
    clients: int,
    together: float,
    fits: Collection[int],
    drawn: float,
) -> int | None:
    """Returns the stage to which a client of ``stage`` moves, as one of its ``clients`` of like speed, which do so much
    work ``together`` in a second; None: it stays. It moves to the slowest stage, if its own one is clearly faster and
    stays the faster one without it. Only so many go at once, on the average, as make both equally fast: ``drawn``,
    evenly from 0 to 1, decides. Arguments as for ``stage_to_help``."""
    rates = [speed / needed for speed, needed in zip(speeds, work, strict=True)]
    to = min(sorted({*fits} - {stage}), key=lambda s: (rates[s], -work[s]), default=stage)
    own = together / max(1, clients)
    if rates[stage] <= MOVES_AT * rates[to] or rates[stage] - own / work[stage] < rates[to] + own / work[to]:
        return None
    too_much = (rates[stage] - rates[to]) / (1 / work[stage] + 1 / work[to])
    return to if drawn * together < too_much else None
