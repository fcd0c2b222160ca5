"""Reports which peers stand in where a peer that the plan names is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.events import SeatEmpty, SeatFilled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from muletrain.runtime.members.context import Context
    from muletrain.strategies.base import StandIn


class HotSpares:
    """Remembers which seats were empty, and reports changes."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._known: Mapping[StandIn, tuple[str, ...]] = {}

    def look(self, *, speaks: bool) -> None:
        """Compare with the last look. ``speaks``: this peer is the one that reports."""
        plan, roster = self._ctx.plan, self._ctx.roster
        now = plan.strategy.stand_ins([roster.seated(s).keys() for s in range(plan.stages)])
        before, self._known = self._known, now
        for missing in sorted(before.keys() | now.keys()):
            if speaks and before.get(missing) != now.get(missing):
                self._say(missing, now.get(missing))

    def _say(self, missing: StandIn, spares: tuple[str, ...] | None) -> None:
        stage, pipeline, name = missing
        if spares is None:
            self._ctx.emit(SeatFilled(pipeline=pipeline, stage=stage, seat=name))
        else:
            self._ctx.emit(SeatEmpty(pipeline=pipeline, stage=stage, seat=name, spares=" and ".join(spares)))
