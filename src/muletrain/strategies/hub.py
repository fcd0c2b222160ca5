"""Strategy ``hub`` (HYBRID sec. 3.2) lets reliable peers serve the stages, and unreliable peers, the clients, compute
for the servers. Servers train together as under strategy ``swarm``; inside a stage the pool decides
(``policy.pool``)."""

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
"""Clients leave a stage only if it is so many times as fast as the slowest stage, because a move costs a download of
weights."""


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


def stage_to_help(
    work: Sequence[float], speeds: Sequence[float], fits: Collection[int], left: Sequence[float] = ()
) -> int | None:
    """Returns the stage at which one more client raises the throughput most: of the stages that the client has room for
    (``fits``), the stage with the most work for the speed of its machines, or, among stages without machines, with the
    most work; None: there is no room for any stage. ``work``: of each stage, for a sequence; ``speeds``: work per
    second of each stage's servers and clients together, in the same unit. ``left``: share of a step that the client has
    for computing at each stage, beside its transfers; at most 0: the transfers take longer than a step, so the client is
    of no use there. Default: transfers take no time."""

    def load(stage: int) -> tuple[float, float]:
        share = left[stage] if left else 1.0
        if share <= 0:
            return share, 0.0  # of stages at which the client has no time, the one with the shortest transfers
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
    left: Sequence[float] = (),
) -> int | None:
    """Returns the stage to which a client of ``stage``, one of ``clients`` of like speed that do ``together`` units of
    work per second, moves; None: the client stays. The client moves to the slowest stage, if its own stage is clearly
    faster, and stays faster without the client. Clients move with the probability that equalises both stages' speed on
    average: ``drawn``, uniform in [0, 1), decides. A client whose transfers leave no time at its stage goes at once to a
    stage where they do. Arguments as for ``stage_to_help``."""
    left = left or [1.0] * len(work)
    others = sorted(s for s in {*fits} - {stage} if left[s] > 0)
    if left[stage] <= 0:
        return stage_to_help(work, speeds, others, left)
    rates = [speed / needed for speed, needed in zip(speeds, work, strict=True)]
    to = min(others, key=lambda s: (rates[s], -work[s]), default=stage)
    own = together / max(1, clients)
    loses, gains = left[stage] / work[stage], left[to] / work[to]  # of each stage's rate, for a unit of speed
    if rates[stage] <= MOVES_AT * rates[to] or rates[stage] - own * loses < rates[to] + own * gains:
        return None
    too_much = (rates[stage] - rates[to]) / (loses + gains)
    return to if drawn * together < too_much else None
