"""Draw the scenario of a seed: a small world with faults (``basic``), and in most worlds one to three rarer kinds of
events, so that each world stays small.

Each kind has its own dice, so a new kind changes few older seeds.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from proofs.draws import basic, hubs, infrastructure, large, members, settings, small

if TYPE_CHECKING:
    from proofs.draws.common import Kind
    from proofs.scenario import Scenario

SHARE = 0.05
"""Share of the seeds in which a kind is drawn, if the world allows it and has fewer than ``MOST`` kinds."""
MOST = 3
KINDS: dict[str, Kind] = {**infrastructure.KINDS, **members.KINDS, **settings.KINDS, **hubs.KINDS}
"""Kinds that change a world; ``large.KINDS`` come before."""


def draw(seed: int, always: str | None = None) -> Scenario:
    """Draw a scenario, the same for the same seed. ``always``: a kind that every world has, unless it cannot; or one of
    ``small.WORLDS``."""
    if always in small.WORLDS:
        return small.WORLDS[always](seed)
    size = large.draw(seed)
    drawn = basic.draw(seed, size) if size is None else replace(basic.draw(seed, size[1]), kinds=(size[0],))
    drawn = drawn if size is None else large.finished(drawn)
    for name in sorted(KINDS, key=lambda name: name != always and random.Random(f"order/{name}/{seed}").random()):
        rng = random.Random(f"{name}/{seed}")
        wanted = len(drawn.kinds) < MOST and rng.random() < SHARE
        if (wanted or name == always) and (changed := KINDS[name](drawn, rng)) is not None:
            drawn = replace(changed, kinds=(*drawn.kinds, name))
        if drawn.alone:  # other kinds need more than one peer
            break
    return drawn
