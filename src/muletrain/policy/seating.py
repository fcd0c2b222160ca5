"""Which stage a newcomer is needed at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def most_needed(able: Sequence[int], served: Sequence[int], work: Sequence[float], quarters: Sequence[int]) -> int:
    """Of the stages in ``able`` the most loaded one: unserved ones first, of those the ones that few can serve. By stage, ``served``:
    peers; ``work``: cost, any unit; ``quarters``: of the newcomer's memory that it takes. Lowest stage among equals."""

    def urgency(stage: int) -> tuple[float, int, int]:
        load = work[stage] / served[stage] if served[stage] else float("inf")
        return load, 0 if served[stage] else quarters[stage], -stage

    return max(able, key=urgency)
