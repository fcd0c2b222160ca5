"""Messages about a whole peer: absence, return, counts, and the end of the run."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from muletrain.runtime.core.messages import Digest, Message, Natural

ANNOUNCE_S = 10.0
"""Seconds between announcements in the directory."""
HOLDS_S = 3 * ANNOUNCE_S
"""Seconds for which an announcement holds."""
LOADING = "loading"
"""Announced state of a peer that takes the state of its stage, and serves no peer yet."""
SHOWN_DOWN = 8
"""Number of unreachable peers that 'muletrain status' shows; in a long run many peers go."""


class Presence(Message):
    """The sender had fallen behind, and is at this step again: count on the sender. ``away``: the sender takes a state
    instead, and serves no peer until its next ``Presence``."""

    KIND: ClassVar[str] = "presence"
    lineage: Digest
    step: Natural
    away: bool = False


class Report(Message):
    """An event, as JSON, counted by a peer on another machine, so that the founder's run folder has the event, too."""

    KIND: ClassVar[str] = "report"
    event: Annotated[str, Field(max_length=1 << 16)]


class StopRun(Message):
    """Call: end the run in order after the current step, with a checkpoint."""

    KIND: ClassVar[str] = "stop_run"


class Finished(Message):
    """Call: the last checkpoint is complete, or given up. The receiver may go after passing the news on."""

    KIND: ClassVar[str] = "finished"
    written: bool
