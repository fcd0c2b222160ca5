"""The content of a reproduction: published and our numbers side by side, calibrated ones, bars, and what is not
reproduced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

POINTS = "%"
"""Unit of shares: their differences are percentage points; those of everything else are relative."""


@dataclass(frozen=True)
class Value:
    """A published number and ours."""

    what: str
    published: float
    ours: float
    unit: str = ""
    calibrated: bool = False
    """Ours was fitted to this number, or to one that contains it: no evidence."""

    @property
    def difference(self) -> float:
        """Our number minus the published one: percentage points for shares, else per cent of the published one."""
        apart = self.ours - self.published
        return apart if self.unit == POINTS else 100 * apart / self.published

    @property
    def difference_text(self) -> str:
        apart = round(self.difference, 1) + 0.0  # no "-0.0"
        return f"{apart:+.1f} {'points' if self.unit == POINTS else '%'}"


@dataclass(frozen=True)
class Statement:
    """A statement of the paper in words or pictures, and our result."""

    stated: str
    ours: str
    holds: bool


@dataclass(frozen=True)
class Bar:
    """A bound on a reproduction. ``at_least``: ``value`` must reach ``limit``, else it must not exceed it."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{self.what}: {self.value:.4g} (bar: {sign} {self.limit:g})"


@dataclass(frozen=True)
class Constant:
    """A number missing from the paper. ``origin``: its source, or what it was fitted to."""

    name: str
    value: float
    unit: str
    origin: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value:.4g} {self.unit}".strip() + f" ({self.origin})"


def nothing_to_draw(figure: Figure) -> None:
    """For reproductions of single numbers."""


@dataclass(frozen=True)
class Reproduction:
    """One table or figure. ``draw`` fills an empty figure."""

    name: str
    title: str
    method: str
    values: tuple[Value, ...] = ()
    statements: tuple[Statement, ...] = ()
    bars: tuple[Bar, ...] = ()
    constants: tuple[Constant, ...] = ()
    not_reproduced: tuple[str, ...] = ()
    draw: Callable[[Figure], None] = field(default=nothing_to_draw, repr=False)

    @property
    def met(self) -> bool:
        """Every bar, and every statement."""
        return all(bar.met for bar in self.bars) and all(statement.holds for statement in self.statements)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "title": self.title,
            "method": self.method,
            "values": [{**vars(v), "difference": v.difference} for v in self.values],
            "statements": [vars(s) for s in self.statements],
            "bars": [{**vars(b), "met": b.met} for b in self.bars],
            "constants": [vars(c) for c in self.constants],
            "not_reproduced": list(self.not_reproduced),
            "met": self.met,
        }
