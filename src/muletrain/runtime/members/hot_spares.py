"""With planned membership: saying who stands in where the peer that the plan names is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.events import Note

if TYPE_CHECKING:
    from muletrain.policy.seats import Seats
    from muletrain.runtime.members.context import Context


class HotSpares:
    """What was said last of each seat; ``look`` says what has changed since."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._known: dict[tuple[int, int], tuple[str, ...]] = {}
        """(stage, pipeline) of empty seats -> the spares of their stage."""

    def look(self, *, speaks: bool) -> None:
        """``speaks``: it is for us to tell."""
        seats, roster = self._ctx.plan.seats, self._ctx.roster
        if seats is None:
            return
        serving = [roster.seated(s).keys() for s in range(self._ctx.plan.stages)]
        # of a stage without anybody the run speaks otherwise
        now = {(s, p): tuple(seats.spares(s, serving[s])) for s, p in seats.empty(serving) if serving[s]}
        before, self._known = self._known, now
        for seat in sorted(before.keys() | now.keys()):
            if speaks and before.get(seat) != now.get(seat):
                self._say(seats, *seat, now.get(seat))

    def _say(self, seats: Seats, stage: int, pipeline: int, spares: tuple[str, ...] | None) -> None:
        name = seats.names[stage][pipeline]
        if spares is None:
            how = f"'{name}' is at stage {stage}: pipeline {pipeline} is as planned there"
        elif spares:
            how = f"pipeline {pipeline} has no '{name}' at stage {stage}: {' and '.join(spares)} (spare) takes its microbatches"
        else:
            how = (
                f"pipeline {pipeline} has no '{name}' at stage {stage}, and the stage has no spare: there it is wired as strategy swarm, "
                f"the stage's other peers share its microbatches"
            )
        self._ctx.emit(Note(level="info" if spares is None else "warning", message=how))
