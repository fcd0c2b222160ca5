"""The figures of every step as a fold over events: rows for tools that draw curves (TensorBoard, wandb, trackio)."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

from muletrain import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

PEERS = 64
"""Peers with figures of their own, the first ones that report: tools draw each as a curve. Stages count all peers."""
AHEAD = 2
"""Steps by which a peer's report may come before the step is known to be done."""
PER_PEER: dict[str, Callable[[ev.StepApplied], float]] = {
    "compute_s": lambda e: e.forward_s + e.backward_s,
    "averaging_s": lambda e: e.averaging_s,
    "update_s": lambda e: e.apply_s,
    "idle_s": lambda e: e.wait_s,
    "microbatches": lambda e: e.microbatches,
    "recomputed": lambda e: e.recomputed,
    "sent_bytes": lambda e: sum(sum(classes.values()) for classes in e.sent.values()),
}
"""Figures of a peer's step. A stage has the mean of the seconds, and the sum of the rest."""


class Row(NamedTuple):
    """Figures of ``step``, by the tag that tools show."""

    step: int
    tokens: int
    """Tokens of all steps up to this one."""
    t: float
    """Wall time [s]."""
    values: dict[str, float]


class Again(NamedTuple):
    """Later rows begin at ``step``. Rows of this step and later ones that a tool has are of steps that will be taken
    again."""

    step: int
    tokens: int
    """Tokens of all steps before ``step``."""


class Figures:
    """A fold over events. Each step has its figures once, also if two peers report the step, and after a step back or a
    resume. Those of stages and peers follow once the next step is done, since peers report a step one after another."""

    def __init__(self, earlier: Iterable[ev.Event] = ()) -> None:
        """``earlier``: events of processes that trained the run before, for a resume."""
        self._earlier = earlier
        self._started: ev.RunStarted | None = None
        self._step = 0
        """Steps done."""
        self._tokens = {0: 0}
        """Tokens of all steps, by steps done."""
        self._validated = -1
        """The last step with a held-out loss."""
        self._back = ""
        """Lineage of the last step back."""
        self._applied: dict[int, dict[str, ev.StepApplied]] = {}
        """Reports whose figures are not given yet, by step and peer."""
        self._peers: dict[str, None] = {}
        """Names of the peers with own figures."""

    def fold(self, event: ev.Event) -> Iterator[Row | Again]:
        """Take in an event, and give the figures that are complete now."""
        match event:
            case ev.RunStarted() if self._started is None:
                self._started = event
                if event.first_step:
                    for one in self._earlier:
                        self._recall(one)
                yield self._again(event.first_step, event.first_step + 1 if event.first_step else 0)
            case ev.SteppedBack() if event.lineage != self._back:
                self._back = event.lineage
                yield from self.rest()
                yield self._again(event.to, event.to + 1)
            case ev.StepDone() if event.step > self._step:
                yield from self.rest(event.step - 1)
                self._count(event)
                self._step = event.step
                yield self._row(event, _of_step(event))
            case ev.Evaluated() | ev.Validated() if event.step > self._validated:
                self._validated = event.step
                yield self._row(event, _of_text(event))
            case ev.StepApplied() if self._plausible(event):
                self._applied.setdefault(event.step, {})[event.peer] = event
            case _:
                pass

    def rest(self, until: int | None = None) -> Iterator[Row]:
        """The figures of stages and peers that peers have reported, up to the step ``until``; default: to the last step
        done."""
        until = self._step if until is None else until
        for step in sorted(step for step in self._applied if step <= until):
            reports = list(self._applied.pop(step).values())
            yield Row(step, self._until(step), max(report.t for report in reports), self._together(reports))

    def _together(self, reports: list[ev.StepApplied]) -> dict[str, float]:
        """The figures of one step's reports."""
        values = dict[str, float]()
        stages: dict[int, list[ev.StepApplied]] = {}
        for report in reports:
            stages.setdefault(report.stage, []).append(report)
            if report.peer in self._peers or len(self._peers) < PEERS:
                self._peers[report.peer] = None
                values |= {f"peer/{tag}/{report.peer}": of(report) for tag, of in PER_PEER.items()}
        for stage, of_stage in stages.items():
            values[f"stage/peers/{stage}"] = len(of_stage)
            for tag, of in PER_PEER.items():
                together = statistics.fmean if tag.endswith("_s") else sum
                values[f"stage/{tag}/{stage}"] = together([of(report) for report in of_stage])
        return values

    def _row(self, event: ev.StepDone | ev.Evaluated | ev.Validated, values: dict[str, float]) -> Row:
        return Row(event.step, self._until(event.step), event.t, values)

    def _plausible(self, event: ev.StepApplied) -> bool:
        """Other machines report any numbers, and each stage would be a new curve."""
        stages = math.inf if self._started is None else self._started.stages
        return 0 <= event.stage < stages and self._step <= event.step <= self._step + AHEAD

    def _again(self, done: int, first: int) -> Again:
        """``first``: the first step of the rows to come, which also has figures if it is 0 (held-out loss)."""
        self._applied.clear()
        self._step, self._validated = done, min(self._validated, done)
        return Again(first, self._until(done))

    def _recall(self, event: ev.Event) -> None:
        if isinstance(event, ev.StepDone):
            self._count(event)
        elif isinstance(event, ev.Validated):
            self._validated = max(self._validated, event.step)

    def _count(self, event: ev.StepDone) -> None:
        # a step that is taken again replaces itself
        self._tokens[event.step] = self._until(event.step - 1) + event.tokens

    def _until(self, step: int) -> int:
        """Tokens of all steps up to ``step``, as far as known."""
        while step not in self._tokens and step > 0:
            step -= 1
        return self._tokens.get(step, 0)


def _of_step(event: ev.StepDone) -> dict[str, float]:
    values = {"train/loss": event.loss, "train/lr": event.lr, "train/grad_norm": event.grad_norm}
    if event.duration_s > 0:
        values["speed/tokens_per_s"] = event.tokens / event.duration_s
    return values


def _of_text(event: ev.Evaluated | ev.Validated) -> dict[str, float]:
    more = {} if event.perplexity is None else {"validation/perplexity": event.perplexity}
    return {"validation/loss": event.loss, **more}
