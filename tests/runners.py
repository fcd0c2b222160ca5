"""Parts of a peer without the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from muletrain.clock import LoopClock
from muletrain.events import EventLog
from muletrain.runs.host import Host
from muletrain.runs.join.ticket import Ticket
from muletrain.runtime.members.leaving import Departure
from muletrain.runtime.microbatch.position import Position
from muletrain.runtime.step.gradient_log import GradientLog
from muletrain.runtime.step.runner import StepRunner

if TYPE_CHECKING:
    from muletrain.runs.spec import WorkerSpec
    from muletrain.runtime.members.context import Context


TICKET = str(Ticket("run", bytes(32), bytes(32), ()))


def host_of(spec: WorkerSpec) -> Host:
    """Whose log is nowhere."""
    return Host(spec, EventLog(None, spec.name), LoopClock())


class _Nobody:
    """Has no trainers, computes nothing ahead, meets nobody of another lineage, and loses nothing when it leaves."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


def runner_of(ctx: Context) -> StepRunner:
    """At step 0."""
    nobody: Any = _Nobody()
    position = Position(ctx, 0, ctx.roster.genesis.lineage)
    departure, log = Departure(ctx, lambda: None), GradientLog(ctx, 0)
    return StepRunner(ctx, position, departure, log, nobody, nobody, nobody.begin_ahead, nobody.met, ctx.downloader())
