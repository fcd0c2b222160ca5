"""Estimates steps of strategies with planned membership in pure numbers, splits a step into parts, and recommends a
strategy.

Strategy ``pipeline``: one estimate of a pipeline (``roughly_s``) ranks placements; ``sim.steps`` plays the best ones.
Strategy ``swap``: every machine computes the whole model (``swapping``).

A part of a step is the time saved without that part. A step without links and averaging is compute (the busiest
machine's) and bubble; links between stages add the pipeline part; the end of a step adds the data-parallel part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from muletrain.config.plan_file import Split
from muletrain.strategies import find
from muletrain.strategies.pipeline import in_flight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.config.plan_file import Prediction
    from muletrain.strategies.pipeline import Schedule

ALIKE = 0.01
"""Relative difference below which two throughputs count as equal."""


@dataclass(frozen=True)
class Station:
    """One stage of one pipeline, with the times for a microbatch [s].

    ``on_*`` is the transfer of activations to the next stage, ``back_*`` that of gradients to the stage before. The
    path between two machines carries one transfer after another, for ``on_s`` each; a transfer arrives ``on_delay_s``
    later. ``on_up_s`` is the time on this machine's uplink, which all transfers share."""

    forward_s: float
    backward_s: float
    on_s: float = 0.0
    on_delay_s: float = 0.0
    back_s: float = 0.0
    back_delay_s: float = 0.0
    on_up_s: float = 0.0
    back_up_s: float = 0.0

    def slowed(self, by: float) -> Station:
        """The same stage on a machine that also does other work; the paths stay the same."""
        return replace(
            self,
            forward_s=by * self.forward_s,
            backward_s=by * self.backward_s,
            on_up_s=by * self.on_up_s,
            back_up_s=by * self.back_up_s,
        )

    @property
    def busy_s(self) -> float:
        """Seconds for which a microbatch occupies the busiest slot."""
        return max(self.forward_s + self.backward_s, self.on_s, self.back_s, self.on_up_s + self.back_up_s)


def pipeline_shares(
    pipelines: Sequence[tuple[Station, ...]], microbatches: int, machines: Sequence[Sequence[int]] = ()
) -> tuple[int, ...]:
    """Share out a step's microbatches over pipelines. ``machines``: by stage and pipeline, if some serve several
    pipelines.

    Each microbatch goes to the pipeline whose busiest machine then has the least work, and among equals to the pipeline
    with the least total work. If each machine serves one pipeline, the result is optimal."""
    if not machines:
        machines = np.arange(len(pipelines) * len(pipelines[0])).reshape(len(pipelines[0]), -1).tolist()
    at, busy_s = np.array(machines), np.array([[s.busy_s for s in stations] for stations in pipelines]).T
    load_s, shares = np.zeros(at.max() + 1), [0] * len(pipelines)
    for _ in range(microbatches):
        after = load_s[at] + busy_s
        most = after.max(0)
        p = int(np.where(most <= most.min() * (1 + 1e-9), after.sum(0), np.inf).argmin())
        load_s[at[:, p]] = after[:, p]
        shares[p] += 1
    return tuple(shares)


def parted(compute_s: float, free_s: float, linked_s: float, step_s: float) -> Split:
    """Split a step of ``step_s`` that computes for ``linked_s``, without links for ``free_s``, and without waiting
    for ``compute_s``."""
    linked_s = min(linked_s, step_s)
    free_s = min(free_s, linked_s)
    compute_s = min(compute_s, free_s)
    return Split(
        compute_s=compute_s,
        bubble_s=free_s - compute_s,
        pipeline_s=linked_s - free_s,
        data_parallel_s=step_s - linked_s,
    )


def roughly_s(schedule: Schedule, stations: Sequence[Station], microbatches: int) -> float:
    """Estimate the time that one pipeline computes [s].

    One microbatch passes through alone. The rest follow at the pace of the busiest slot, or of a stage whose
    microbatches in flight all travel to the last stage and back (Little's law)."""
    last, through_s = len(stations) - 1, 0.0
    rest_s = (microbatches - 1) * max(s.busy_s for s in stations)
    for s, station in reversed(list(enumerate(stations))):
        through_s += station.forward_s + station.backward_s + station.on_s + station.on_delay_s
        if s < last:
            through_s += stations[s + 1].back_s + stations[s + 1].back_delay_s
            room = in_flight(schedule, len(stations), s, microbatches)
            rest_s = max(rest_s, through_s * (microbatches - room) / room)
    return through_s + rest_s


def recommend(predictions: Sequence[Prediction], *, all_stay: bool = True) -> tuple[int | None, str]:
    """Returns the index of the fastest prediction under the fleet's churn, or None, and the reason. Only strategies that
    are possible and run today count. If the fastest one leaves machines out, an equally fast one with planned membership
    is preferred: its plan names the working machines. Unless ``all_stay``, planned pipelines are avoided among equals: they
    lose most when a machine leaves. A hub without clients is avoided among equals: its machines do not move."""
    possible = [i for i, p in enumerate(predictions) if not p.problem]
    able = [i for i in possible if predictions[i].runnable]
    if not able:
        return None, "nothing that runs today is possible on this fleet"
    best = max(able, key=lambda i: predictions[i].expected_per_s)
    least = (1 - ALIKE) * predictions[best].expected_per_s
    alike = [i for i in able if predictions[i].expected_per_s >= least]
    best = max(alike, key=lambda i: (not clientless(predictions[i]), predictions[i].expected_per_s))
    if predictions[best].left_out or not all_stay:
        best = next((i for i in alike if bool(predictions[i].schedule) == all_stay), best)
    chosen = predictions[best]
    faster = [predictions[i] for i in possible if predictions[i].expected_per_s > (1 + ALIKE) * chosen.expected_per_s]
    churned = chosen.churned_tokens_per_s is not None
    why = f"the fastest strategy that runs today{' while machines come and go' if churned else ''}"
    if same := [title(predictions[i]) for i in able if i != best and _as_fast(predictions[i], chosen)]:
        why += f"; as fast: {' and '.join(same)}"
    if not all_stay and not chosen.schedule and any(predictions[i].schedule for i in able):
        why += "; some machines may leave (reliable = false), which costs a planned pipeline most"
    if faster:
        rest = ", ".join(f"{title(p)} ({p.expected_per_s / chosen.expected_per_s:.2f} times as fast)" for p in faster)
        why += f"; predicted to be faster, but not yet runnable: {rest}"
    return best, why


def _as_fast(p: Prediction, chosen: Prediction) -> bool:
    return p.expected_per_s >= (1 - ALIKE) * chosen.expected_per_s and p.left_out in ((), chosen.left_out)


def clientless(p: Prediction) -> bool:
    """Is ``p`` a hub without clients? Then it is a layout on fewer machines, whatever it leaves out."""
    return find(p.strategy).pooled and not any(stage.clients for stage in p.stages)


def title(p: Prediction) -> str:
    """'pipeline, 1F1B'."""
    names = {"gpipe": "GPipe", "1f1b": "1F1B"}
    return f"{p.strategy}, {names.get(p.schedule, p.schedule)}" if p.schedule else p.strategy


def named(p: Prediction) -> str:
    """'pipeline, 1F1B', or 'desk alone (swarm)': of one machine, the strategy matters little."""
    machines = {name for stage in p.stages for name in stage.machines}
    return f"{machines.pop()} alone ({title(p)})" if len(machines) == 1 else title(p)
