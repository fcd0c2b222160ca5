"""Speakers: in a large run, a few peers of each stage tell the other stages what their stage agreed on, so that messages
grow with the number of peers, not with its square."""

from __future__ import annotations

import hashlib
import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

DIRECT = 32
"""Peers of a run in which everyone tells everyone: one hop less."""
SPEAKERS = 3
"""Speakers of a stage: two are believed where they agree, so one may die or lie."""


def speakers(key: bytes, peers: Iterable[str]) -> tuple[str, ...]:
    """Returns the speakers among the ``peers`` of a stage, by rendezvous hashing: the same for all that know the same
    peers, and mostly the same when one peer comes or goes. ``key``, as a step's lineage, passes the task around."""
    return tuple(heapq.nsmallest(SPEAKERS, peers, key=lambda p: hashlib.sha256(key + p.encode()).digest()))
