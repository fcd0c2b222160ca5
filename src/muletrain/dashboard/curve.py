"""The steps of a run as points of curves, thinned so that a day of steps stays small."""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST = 2048
"""Most points of a curve: more than a screen has columns."""


@dataclass
class Point:
    """The figures of one or several consecutive steps."""

    step: int
    """The last step of the point."""
    t: float
    """Wall time at which that step ended [s]."""
    tokens: int
    """Tokens of all steps up to that one."""
    steps: int
    loss_sum: float
    """Over the ``losses`` steps with a finite loss [nats/token]."""
    losses: int
    step_tokens: int
    seconds: float

    def joined(self, later: Point) -> Point:
        """This point and the next one as a single point."""
        return Point(
            later.step,
            later.t,
            later.tokens,
            self.steps + later.steps,
            self.loss_sum + later.loss_sum,
            self.losses + later.losses,
            self.step_tokens + later.step_tokens,
            self.seconds + later.seconds,
        )

    def row(self) -> list[float | None]:
        """Step, wall time [s], tokens, loss [nats/token], speed [tokens/s], duration of a step [s]; None: unknown."""
        loss = round(self.loss_sum / self.losses, 5) if self.losses else None
        speed = round(self.step_tokens / self.seconds, 2) if self.seconds > 0 else None
        return [self.step, round(self.t, 2), self.tokens, loss, speed, round(self.seconds / self.steps, 4)]


class Curve:
    """The points of a run. Once there are ``MOST``, each two neighbours become one."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.generation = 0
        """Changes when earlier points changed, so that a viewer needs all of them again."""
        self.stride = 1
        """Steps of a full point."""

    def add(self, step: int, t: float, tokens: int, loss: float, step_tokens: int, seconds: float) -> None:
        """Append a step."""
        finite = math.isfinite(loss)
        point = Point(step, t, tokens, 1, loss if finite else 0.0, int(finite), step_tokens, seconds)
        if self.points and self.points[-1].steps < self.stride:
            self.points[-1] = self.points[-1].joined(point)
        else:
            self.points.append(point)
        if len(self.points) > MOST:
            self._thin()

    def cut(self, step: int) -> None:
        """Drop everything after ``step``: those steps will be taken again."""
        kept = [point for point in self.points if point.step <= step]
        if len(kept) < len(self.points):
            self.points, self.generation = kept, self.generation + 1

    def _thin(self) -> None:
        pairs = zip(self.points[::2], self.points[1::2], strict=False)
        rest = self.points[-1:] if len(self.points) % 2 else []
        self.points = [first.joined(second) for first, second in pairs] + rest
        self.stride, self.generation = 2 * self.stride, self.generation + 1
