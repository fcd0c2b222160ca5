"""Events of a run as sentences for people."""

from __future__ import annotations

import re
from typing import Protocol

from muletrain import events as ev
from muletrain.units import format_bytes, format_count, format_duration, plural

ANSWERED = re.compile("answered a probe|it trains in|it is still at|its history")
"""Reasons of a suspicion that came from the peer itself."""


class Known(Protocol):
    """Facts about a run so far."""

    @property
    def left(self) -> int: ...

    def name_of(self, peer_id: str) -> str: ...

    def named(self, text: str) -> str: ...


_OF_SCRIPTS = "\u00ad\u200c\u200d\u200e\u200f"
"""Characters without width that scripts and emoji need: joiners, separators, and marks of direction."""


def printable(text: str, *, lines: bool = False) -> str:
    """Untrusted ``text`` without characters that a terminal obeys or that hide text: control characters, escape
    sequences, marks of direction, characters without width. The result is one line, unless ``lines`` keeps line
    ends."""
    kept = f"{_OF_SCRIPTS}\n\t" if lines else _OF_SCRIPTS
    return "".join(c if c.isprintable() or c in kept else " " if c.isspace() else "\ufffd" for c in text)


def is_warning(event: ev.Event) -> bool:
    """Whether the event is a warning."""
    kinds = (
        ev.JoinRefused,
        ev.FrameRefused,
        ev.PeerDown,
        ev.PeerBanned,
        ev.PeerExpelled,
        ev.CheckpointFailed,
        ev.SteppedBack,
        ev.ProbeFailed,
    )
    return isinstance(event, kinds) or (isinstance(event, (ev.Note, ev.Notice)) and event.level != "info")


def _stepped_back(event: ev.SteppedBack, view: Known) -> str:
    """The sentence; the reporting process may be behind, or a newcomer without a step."""
    stages = f"stage{'s' if len(event.lost) > 1 else ''} {', '.join(map(str, event.lost))}"
    where = f"the checkpoint of step {event.to}" if event.to else "the beginning"
    moves = f"; {', '.join(event.moves)}" if event.moves else ""
    step = max(event.step, view.left)
    origin = f"from step {step} " if step > event.to else ""
    return f"{stages} lost all peers: the run steps back {origin}to {where}{moves}"


def headline(event: ev.Event, view: Known) -> str | None:
    """The event as a sentence, with names of peers for ids; None for events that only change numbers."""
    sentence = _sentence(event, view)
    return None if sentence is None else view.named(sentence)


def _started(event: ev.RunStarted) -> str:
    stages = plural(event.stages, "stage")
    model = f"{format_count(event.params)} parameters in {stages}" if event.params else stages
    return f"run {event.run_id}: {plural(event.steps, 'step')}, {model}, {plural(event.peers, 'peer')}"


def _sentence(event: ev.Event, view: Known) -> str | None:
    match event:
        case ev.RunStarted():
            return _started(event)
        case ev.PeerJoined():
            role = ", trainer" if event.trainer else ""
            size = f"{format_count(event.params)} parameters"
            size += f" in {event.swapped} parts that take turns" if event.swapped else ""
            return f"{event.name} serves stage {event.stage} ({event.device}, {event.precision}, {size}{role})"
        case ev.Waiting():
            return f"waiting: {', '.join(event.missing)}" if event.missing else "nothing is missing any more"
        case ev.ProbeProgress():
            return event.what
        case ev.FleetMeasured():
            return f"measured {plural(len(event.peers), 'peer')}: {event.path}"
        case ev.ProbeFailed():
            return f"the fleet was not measured: {event.reason}"
        case ev.JoinRefused():
            who = view.name_of(event.remote)
            return f"{event.name + f' ({who})' if event.name else who} was not admitted: {event.reason}"
        case ev.FrameRefused():
            return f"refused a message from {view.name_of(event.remote)}: {event.reason}"
        case ev.PeerDown():
            silent = "" if ANSWERED.match(event.reason) else "does not answer and "
            return f"{view.name_of(event.peer_id)} {silent}gets no work: {event.reason}"
        case ev.PeerBanned():
            return f"{view.name_of(event.peer_id)} is banned for {format_duration(event.seconds)}: it keeps sending malformed messages"
        case ev.PeerExpelled():
            return f"{event.name} was expelled after step {event.step}: its results differ from those of its replicas"
        case ev.MemberRemoved():
            return f"{event.name} was removed by the run's owner"
        case ev.PeerLeft():
            return f"{event.name} left in order after step {event.step}"
        case ev.LineageLeft():
            apart = event.step - event.forked_at + 1
            return (
                f"{event.peer}: a partition since step {event.forked_at} healed; this peer drops {plural(apart, 'step')} of its own side, "
                f"and takes the other side's state after step {event.to_step}"
            )
        case ev.FaultInjected():
            return f"chaos: {event.planned} hits {', '.join(event.who)} after step {event.step}"
        case ev.CheckpointWritten():
            cost = f"{format_bytes(event.bytes)}, {format_duration(event.seconds)}"
            return f"checkpoint of step {event.step}: {event.path} ({cost})"
        case ev.CheckpointFailed():
            return f"the checkpoint of step {event.step} failed: {event.reason}"
        case ev.SteppedBack():
            return _stepped_back(event, view)
        case ev.Evaluated():
            before = "" if event.before is None else f" (before training {event.before:.3f})"
            more = "" if event.perplexity is None else f", perplexity {event.perplexity:.1f}"
            return f"step {event.step}: validation loss {event.loss:.3f}{before}{more}"
        case ev.Validated():
            when = f"step {event.step}" if event.step else "before the first step"
            more, what = "", "samples or tokens"
            if event.perplexity is not None:
                more, what = f", perplexity {event.perplexity:,.1f}", "tokens"
            return f"{when}: held-out loss {event.loss:.3f}{more} ({event.tokens:,} {what})"
        case ev.ClientBegan():
            size = f"{format_count(event.params)} parameters"
            return f"{event.name} computes for stage {event.stage} ({event.device}, {event.precision}, {size})"
        case ev.ClientFinished():
            return f"{event.peer} ended after {format_duration(event.seconds)}: {event.reason}"
        case ev.GradientStandsOut():
            return None  # honest data do that, too: it is computed again, and only ``ResultsDiffer`` tells of a fault
        case ev.Note() | ev.Notice():
            return event.message
        case _:
            return None
