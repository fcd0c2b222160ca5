"""The condition of a run as one word, with the reason and the remedy."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Literal, NamedTuple

from muletrain.runs.again import GOES_ON, resuming
from muletrain.runs.view import GONE
from muletrain.units import format_duration, plural

if TYPE_CHECKING:
    from muletrain.runs.view import PeerView, RunView

Tone = Literal["good", "note", "warn", "bad", "idle"]

SILENT_S = 60.0
"""Seconds without an event after which a run that no process holds counts as ended."""
SLOW = 0.6
"""A run is slow below this share of its usual speed."""
SKIPPED = 3
"""Skipped updates in the last steps from which a run counts as diverging."""
AVERAGING = 0.4
"""Share of the peers' time above which averaging is what a step waits for."""
CLEARLY = 1.1
"""Times that a stage is busier than the next one, from which it is named."""


class Health(NamedTuple):
    """A word for people, how good it is, why, and a remedy with the command for it, if there is one."""

    word: str
    tone: Tone
    why: str
    remedy: str = ""
    command: str = ""


class Facts(NamedTuple):
    """Facts about a run that its view lacks."""

    folder: str
    """Of the run; empty: unknown."""
    live: bool
    """Whether a process still holds the run, as far as known."""
    usual: float
    """Median speed of the run so far [tokens/s]; NaN: unknown."""
    skipped: int
    """Skipped updates among the last ten steps."""
    ticket: bool
    """Whether other machines can join, as far as known."""
    command: str = "run"
    """The command that began the run: 'run' or 'start'."""


def health(view: RunView, now: float, facts: Facts) -> Health:
    """The condition of the run at ``now`` (wall time [s])."""
    return (
        _over(view, facts)
        or _silent(view, facts)
        or _before(view, facts)
        or _lost(view, facts)
        or _troubled(view, now, facts)
        or _training(view, facts)
    )


def answering(peer: PeerView) -> bool:
    """Is the peer there, as far as the others know?"""
    return peer.state not in GONE and peer.state != "suspected"


def _over(view: RunView, facts: Facts) -> Health | None:
    took = format_duration(view.pace.seconds)
    if 0 < view.steps <= view.step:
        command = f'muletrain generate {facts.folder} "The "' if facts.folder else ""
        return Health("done", "good", f"{plural(view.steps, 'step')} in {took}", "Try the model.", command)
    if view.failed and (not facts.live or view.finished is not None):
        name, why = next(iter(view.failed.items()))
        return Health("failed", "bad", f"{name}: {view.named(why)}", "Correct the cause, then resume.", _resume(facts))
    if view.finished is not None:
        at = f"step {view.step} of {view.steps}: {view.finished.reason}"
        return Health("stopped", "idle", at, "Resume from the newest checkpoint.", _resume(facts))
    return None


def _silent(view: RunView, facts: Facts) -> Health | None:
    if facts.live:
        return None
    why = f"the run's command ended at step {view.step} without a last word"
    remedy = f"Read the logs in the run folder. {GOES_ON.removesuffix(': ')}:" if facts.command == "start" else ""
    return Health("dead", "bad", why, remedy or "Read the logs in the run folder, then resume.", _resume(facts))


def _resume(facts: Facts) -> str:
    return resuming(facts.folder, facts.command) if facts.folder else ""


def _before(view: RunView, facts: Facts) -> Health | None:
    if view.probing is not None:
        return Health("measuring", "note", view.probing.what, "Training follows.")
    if view.missing:
        return Health("waiting", "warn", "; ".join(view.missing), *_invitation(view, facts))
    if view.started is None:
        return Health("starting", "note", "peers load the model and the data", "Nothing to do yet.")
    return None


def _invitation(view: RunView, facts: Facts) -> tuple[str, str]:
    if facts.ticket:
        return "Join a machine, unless one is still preparing. Print the ticket with:", "muletrain ticket"
    return "Nothing to do if peers are still preparing.", ""


def _lost(view: RunView, facts: Facts) -> Health | None:
    empty = [stage for stage, peers in view.stages().items() if not any(map(answering, peers))]
    if not empty:
        return None
    which = f"{'stage' if len(empty) == 1 else 'stages'} {', '.join(map(str, empty[:8]))}"
    remedy = "Another peer takes the stage over after fleet.adopt_after, if it has room. Or join a machine:"
    return Health("lost", "bad", f"no peer of {which} answers", remedy, "muletrain ticket" if facts.ticket else "")


def _troubled(view: RunView, now: float, facts: Facts) -> Health | None:
    if facts.skipped >= SKIPPED:
        why = f"{plural(facts.skipped, 'update')} of the last ten were skipped: gradients are not finite"
        return Health("diverging", "bad", why, "Lower the learning rate, and resume an earlier checkpoint.")
    silent = _silent_peers(view)
    left = view.pace.seconds_left(view.steps, now)
    speed = view.pace.tokens_per_s(now)
    waited_s = now - view.pace.end_s
    stands = view.step and math.isnan(left) and waited_s > 5.0 and len(view.peers) and speed < SLOW * facts.usual
    if stands:
        why = f"no step for {format_duration(waited_s)}{f'; no answer from {silent}' if silent else ''}"
        return Health(
            "stalled", "warn", why, "The run repeats the step by itself. If it lasts, look at the peers below."
        )
    if speed < SLOW * facts.usual:
        why = f"{speed:,.0f} tokens/s, usually {facts.usual:,.0f}"
        cause = (
            f"No answer from {silent}." if silent else slowest(view, facts) or "Look below where a step's time goes."
        )
        return Health("slow", "warn", why, cause)
    return None


def _silent_peers(view: RunView) -> str:
    names = [peer.name for peer in view.peers.values() if peer.state == "suspected"]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def slowest(view: RunView, facts: Facts) -> str:
    """Sentences about the largest part of a step: a peer much slower than the others of its stage, averaging, or the
    stage that is busy most of the time, as the peers' cards show it."""
    busy, averaging_s, all_s = dict[int, float](), 0.0, 0.0
    for stage, peers in view.stages(present=True).items():
        averaging_s, all_s = averaging_s + sum(p.averaging_s for p in peers), all_s + sum(p.total_s for p in peers)
        if shares := [peer.busy for peer in peers if not math.isnan(peer.busy)]:
            busy[stage] = statistics.fmean(shares)
    slow = view.slow()
    named = "".join(f"{clause}. " for clause in slow)
    if all_s and averaging_s > AVERAGING * all_s:
        share = 100 * averaging_s / all_s
        return f"{named}Averaging takes {share:.0f} % of a step: a larger train.batch helps, further machines do not."
    ranked = sorted(busy, key=lambda s: -busy[s])
    if len(ranked) < 2 or busy[ranked[0]] < CLEARLY * busy[ranked[1]]:
        return named.strip()
    first, second = ranked[:2]
    # peers of one machine share its cores, so another process there computes nothing more
    alone = facts.command == "run" and facts.folder
    helps = "" if alone else " A further machine helps most there."
    return (
        f"{named}Stage {first} is busy {100 * busy[first]:.0f} % of the time, stage {second} only {100 * busy[second]:.0f} %: "
        f"the other stages wait for stage {first}.{helps}"
    )


def _training(view: RunView, facts: Facts) -> Health:
    silent = _silent_peers(view)
    if silent:
        return Health("training", "warn", f"no answer from {silent}; the others go on", "Nothing to do.")
    return Health("training", "good", "every stage has a peer that answers", slowest(view, facts))
