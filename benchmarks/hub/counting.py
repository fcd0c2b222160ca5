"""Counts the frames of a virtual fleet, and what clients bring back, by client."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from muletrain.policy.pool import Pool
from muletrain.runtime.pool.messages import Finished, Output
from muletrain.sim.fleet.links import FleetLinks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from muletrain.network.base import Frame


class Counts:
    """``frames`` and ``nbytes``: by kind; ``work``: forward passes of a sequence in the results of a client that counted,
    checks of others included; ``parts``: all that it brought back."""

    def __init__(self) -> None:
        self.frames, self.nbytes = Counter[str](), Counter[str]()
        self.work, self.parts = Counter[str](), Counter[str]()


@contextmanager
def counted() -> Iterator[Counts]:
    """Count in all worlds meanwhile."""
    counts, weight, done = Counts(), FleetLinks.weight, Pool.done

    def weighed(links: FleetLinks, sender: str, frame: Frame) -> int:
        nbytes = weight(links, sender, frame)
        counts.frames[frame.kind] += 1
        counts.nbytes[frame.kind] += nbytes
        counts.parts[sender] += isinstance(frame.message, Output | Finished)
        return nbytes

    def noted(pool: Pool, worker: str, number: int, now: float) -> bool:
        part = pool.part(worker, number)
        if (counted := done(pool, worker, number, now)) and part is not None:
            counts.work[worker or "servers"] += part.cost
        return counted

    FleetLinks.weight, Pool.done = weighed, noted  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        FleetLinks.weight, Pool.done = weight, done  # type: ignore[method-assign]
