"""What a seed stands for: a base, as ever, and in most worlds one to three kinds of rarer things, so that each world
stays small.

Each kind has dice of its own: older seeds change little when a kind is added.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from muletrain.sim.world.draws import basic, disk_faults, large, links, members, settings

if TYPE_CHECKING:
    from muletrain.sim.world.draws.common import Kind
    from muletrain.sim.world.scenario import Scenario

SHARE = 0.05
"""Of the seeds in which a kind is drawn, if the world allows it, and there are not ``MOST`` already."""
MOST = 3
KINDS: dict[str, Kind] = {**links.KINDS, **members.KINDS, **disk_faults.KINDS, **settings.KINDS}
"""Those that change a world, in the order in which they do; ``sizes.KINDS`` come before."""


def draw(seed: int) -> Scenario:
    """The same scenario for the same seed."""
    size = large.draw(seed)
    drawn = basic.draw(seed, size) if size is None else replace(basic.draw(seed, size[1]), kinds=(size[0],))
    drawn = drawn if size is None else large.finished(drawn)
    for name in sorted(KINDS, key=lambda name: random.Random(f"order/{name}/{seed}").random()):
        rng = random.Random(f"{name}/{seed}")
        if len(drawn.kinds) < MOST and rng.random() < SHARE and (changed := KINDS[name](drawn, rng)) is not None:
            drawn = replace(changed, kinds=(*drawn.kinds, name))
    return drawn
