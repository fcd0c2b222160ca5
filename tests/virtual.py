"""Work on an event loop whose time jumps."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from muletrain.sim.loop import run_virtually

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


def virtually(work: Coroutine[object, object, T], limit_s: float = 10_000.0) -> T:
    """Fails if the work waits for longer than ``limit_s``, or for what never happens, or if one of its tasks fails."""
    problems: list[str] = []
    result = run_virtually(work, limit_s, problems)
    assert problems == []
    return result
