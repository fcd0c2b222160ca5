"""Parts of a peer without the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.clock import LoopClock
from muletrain.events import EventLog
from muletrain.runs.host import Host
from muletrain.runs.join.ticket import Ticket
from muletrain.runtime.members.leaving import Departure
from muletrain.runtime.microbatch.position import Position
from muletrain.runtime.step.gradient_log import GradientLog
from muletrain.runtime.step.runner import StepRunner

if TYPE_CHECKING:
    from muletrain.network.base import PeerId
    from muletrain.runs.spec import WorkerSpec
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.microbatch.inflight import InFlightStep


TICKET = str(Ticket("run", bytes(32), bytes(32), ()))


def host_of(spec: WorkerSpec) -> Host:
    """Whose log is nowhere."""
    return Host(spec, EventLog(None, spec.name), LoopClock())


class _Nobody:
    """Has no trainers, meets nobody of another lineage, and loses nothing when it leaves."""

    def take_over_orphans(self, work: InFlightStep, *, late: bool) -> None:
        pass

    async def begin_ahead(self, work: InFlightStep) -> None:
        pass

    def met(self, peer: PeerId) -> None:
        pass

    def unsafe(self) -> str | None:
        return None


def runner_of(ctx: Context) -> StepRunner:
    """At step 0."""
    nobody, position = _Nobody(), Position(ctx, 0, ctx.roster.genesis.lineage)
    return StepRunner(ctx, position, GradientLog(ctx, 0), Departure(ctx, nobody), nobody, nobody, ctx.downloader())
