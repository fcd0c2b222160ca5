"""Messages about a whole peer: that it is away or back, what it counted, and that the run ends."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from muletrain.runtime.core.messages import Digest, Message, Natural


class Away(Message):
    """The sender serves nobody until it says ``Back``: it takes a state."""

    KIND: ClassVar[str] = "away"


class Back(Message):
    """A peer that had fallen behind is at this step again: count on it."""

    KIND: ClassVar[str] = "back"
    lineage: Digest
    step: Natural


class Report(Message):
    """What a peer on another machine counted, to the coordinator: an event as JSON, so that the run folder of 'start'
    has it."""

    KIND: ClassVar[str] = "report"
    event: Annotated[str, Field(max_length=1 << 16)]


class StopRun(Message):
    """Call: end the run in order, after the current step, with a checkpoint."""

    KIND: ClassVar[str] = "stop_run"


class Finished(Message):
    """Call: the last checkpoint is complete (or given up): the member may go, after it has told the others."""

    KIND: ClassVar[str] = "finished"
    written: bool
