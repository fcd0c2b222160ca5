"""Counts the frames of a virtual fleet, and what clients bring back, by sender."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from muletrain.runtime.pool.messages import Finished, Output
from muletrain.sim.fleet.links import FleetLinks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from muletrain.network.base import Frame


class Counts:
    """``frames`` and ``nbytes``: by kind; ``rows``: sequences in outputs and gradients of inputs that a client brought
    back; ``parts``: all that it brought back."""

    def __init__(self) -> None:
        self.frames, self.nbytes = Counter[str](), Counter[str]()
        self.rows, self.parts = Counter[str](), Counter[str]()


@contextmanager
def counted() -> Iterator[Counts]:
    """Count in all worlds meanwhile."""
    counts, weight = Counts(), FleetLinks.weight

    def weighed(links: FleetLinks, sender: str, frame: Frame) -> int:
        nbytes = weight(links, sender, frame)
        counts.frames[frame.kind] += 1
        counts.nbytes[frame.kind] += nbytes
        if isinstance(frame.message, Output):
            counts.rows[sender] += frame.tensors[0].shape[0]
        counts.parts[sender] += isinstance(frame.message, Output | Finished)
        return nbytes

    FleetLinks.weight = weighed  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        FleetLinks.weight = weight  # type: ignore[method-assign]
