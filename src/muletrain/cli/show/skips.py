"""A fold over a run's skipped updates: the number, and the cause of the skips at the end."""

from __future__ import annotations

import math

from muletrain import events as ev
from muletrain.cli.show.sentences import printable
from muletrain.units import plural


class SkipsView:
    """The updates that all peers skipped, because the gradient was not finite."""

    def __init__(self) -> None:
        self._last = 0
        """The last step that was done."""
        self._steps: dict[int, ev.StepDone] = {}
        """Steps with a skipped update."""
        self._tensors: dict[int, dict[int, str]] = {}
        """By step and stage: name of the stage's first parameter with a gradient that is not finite."""

    def __len__(self) -> int:
        return len(self._steps)

    def fold(self, event: ev.Event) -> None:
        """Take in a step, or one peer's report of a step."""
        match event:
            case ev.StepApplied(skipped=True) if event.not_finite:
                self._tensors.setdefault(event.step, {})[event.stage] = event.not_finite
            case ev.StepDone():
                self._last = event.step
                self._steps.pop(event.step, None)
                if math.isnan(event.grad_norm):
                    self._steps[event.step] = event
            case ev.SteppedBack():
                self._steps = {step: done for step, done in self._steps.items() if step <= event.to}
            case _:
                pass

    def why(self) -> str:
        """The skipped updates at the end of the run, the first tensor that was not finite, and a remedy."""
        first = self._last + 1
        while first - 1 in self._steps:
            first -= 1
        row = plural(self._last - first + 1, "update") + f" (steps {first} to {self._last})"
        where = ""
        if done := self._steps.get(first):
            stage, tensor = min(self._tensors.get(first, {}).items(), default=(0, ""))
            named = f"the first was that of '{printable(tensor)}' in stage {stage}" if tensor else "the first"
            where = f": {named} at step {first}, where the loss was {done.loss:.4g} and the learning rate {done.lr:.4g}"
        return (
            f"the run learned nothing at its end: the last {row} were skipped, because gradients were not finite{where}. "
            f"Try a lower optimizer.lr, or a longer optimizer.warmup; if the first steps fail, look for huge or missing "
            f"numbers in the data and in the first weights, or set compute.precision = 'fp32'. Then start the run again, or "
            f"go on from a checkpoint of a step before {first}, if there is one. train.max_skipped says how many skipped updates in a row "
            f"end a run"
        )
