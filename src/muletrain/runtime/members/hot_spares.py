"""Hot spares: saying who stands in where a peer that the plan names is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.events import StandInChanged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from muletrain.runtime.members.context import Context
    from muletrain.strategies.base import StandIn


class HotSpares:
    """What was said last of each peer that is missing; ``look`` says what has changed since."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._known: Mapping[StandIn, tuple[str, ...]] = {}

    def look(self, *, speaks: bool) -> None:
        """``speaks``: it is for us to tell."""
        plan, roster = self._ctx.plan, self._ctx.roster
        now = plan.strategy.stand_ins([roster.seated(s).keys() for s in range(plan.stages)])
        before, self._known = self._known, now
        for missing in sorted(before.keys() | now.keys()):
            if speaks and before.get(missing) != now.get(missing):
                self._say(missing, now.get(missing))

    def _say(self, missing: StandIn, spares: tuple[str, ...] | None) -> None:
        stage, pipeline, name = missing
        if spares is None:
            how = "it is there, as planned"
        elif spares:
            how = f"it is missing; {' and '.join(spares)} (spare) takes its microbatches"
        else:
            how = "it is missing, and there is no spare; the stage's other peers share its microbatches, as strategy swarm has it"
        self._ctx.emit(StandInChanged(pipeline=pipeline, stage=stage, seat=name, how=how))
