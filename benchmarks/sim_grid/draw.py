"""Fleets without faults, drawn by seed, and the step that bytes, bandwidths and FLOP alone allow for."""

from __future__ import annotations

import itertools
import json
import math
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.config.fleet_file import load_fleet
from muletrain.config.fleet_sections import Machine
from muletrain.config.load import load_config
from muletrain.errors import CapacityError
from muletrain.model.spec import ModelSpec
from muletrain.sim.setting import Setting, seated, setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.config.schema import RunConfig

COMMITTED = Path(__file__).parent / "seeds.json"
"""Seeds 0 to 39 as they were drawn before the protocol was mended. What fits into memory is the code's own estimate, so
later code could draw other fleets."""
STRATA = 20
"""Each range is cut into so many parts, and so many seeds in a row (0-19, 20-39, ...) have one each."""
MIXES = (
    *[("T4",)] * 3,
    *[("A100",)] * 3,
    *[("RTX 4090",)] * 2,
    ("CPU",),
    ("T4", "A100"),
    ("T4", "RTX 4090"),
    ("A100", "RTX 4090"),
    ("T4", "CPU"),
    ("RTX 4090", "CPU"),
    ("A100", "CPU"),
    ("T4", "A100", "RTX 4090"),
    ("T4", "A100", "CPU"),
    ("T4", "RTX 4090", "CPU"),
    ("A100", "RTX 4090", "CPU"),
    ("T4", "A100", "RTX 4090", "CPU"),
)
PRESETS = ("gpt3-125m", "gpt3-350m", "gpt3-760m", "gpt3-xl", "gpt3-2.7b", "gpt3-6.7b", "llama-7b")
MBPS = 20.0, 10_000.0
LONGEST_S = 900.0
"""A step whose bound is longer is not drawn: what peers say beside the work makes hours of virtual time slow to
play."""
PATIENCE = 40
OF_MACHINES = "mix", "count", "mbps", "uneven", "rtt", "queue"


@dataclass(frozen=True)
class Drawn:
    """One fleet, as text, and what is set beside it."""

    fleet: str
    run: tuple[str, ...]

    def setting(self) -> tuple[Setting, RunConfig]:
        """Raises CapacityError."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "fleet.toml"
            file.write_text(self.fleet)
            fleet = load_fleet(file)
        config = load_config(None, self.run)
        return setting(fleet, config, ModelSpec.from_config(config.model)), config


def drawn(seed: int) -> Drawn:
    """The committed draw of this seed if there is one."""
    known = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}
    return (
        _understood(Drawn(known[str(seed)]["fleet"], tuple(known[str(seed)]["run"])))
        if str(seed) in known
        else draw(seed)
    )


def _understood(found: Drawn) -> Drawn:
    """Without the depth of queues, if fleet files have no field for it."""
    if "queue_s" in Machine.model_fields:
        return found
    lines = (line for line in found.fleet.splitlines() if not line.startswith("queue_s"))
    return Drawn("\n".join(lines) + "\n", found.run)


def draw(seed: int) -> Drawn:
    """The first draw of this seed that is possible."""
    for attempt in itertools.count():
        found = _attempt(seed, attempt)
        if _possible(_understood(found)):
            return found
    raise AssertionError


def _attempt(seed: int, attempt: int) -> Drawn:
    """If the first draw is not possible, we redraw machines and stages twice, then model, stages and batch, and so on.
    After ``PATIENCE`` attempts we redraw everything."""
    block, place = divmod(seed, STRATA)
    rng = random.Random(f"grid/{seed}/{attempt}")

    def uniform(range_: str) -> float:
        """In [0, 1), in another part of it for each seed of the block as long as it is drawn for the first time."""
        if attempt and (attempt > PATIENCE or range_ == "stages" or (attempt % 3 > 0) == (range_ in OF_MACHINES)):
            return rng.random()
        parts = list(range(STRATA))
        random.Random(f"grid/{block}/{range_}").shuffle(parts)
        return (parts[place] + random.Random(f"grid/{seed}/{range_}").random()) / STRATA

    machines = _machines(rng, *map(uniform, OF_MACHINES))
    model, stages, batch, delayed = map(uniform, ("model", "stages", "microbatches", "delayed"))
    sequences, microbatches = rng.choice([1, 1, 2, 4]), round(64 * 16**batch)
    run = (
        f"model.preset={PRESETS[int(len(PRESETS) * model)]}",
        f"fleet.stages={1 + int(8 * stages)}",
        f"train.batch={microbatches * sequences}",
        f"train.microbatch={sequences}",
        "optimizer.state_device=cpu",
        f"optimizer.delayed={'true' if delayed < 0.5 else 'false'}",
        "fleet.rebalance=off",
        "checkpoint.every=0",
    )
    return Drawn(machines, run)


def _machines(
    rng: random.Random, mix: float, count: float, mbps: float, uneven: float, rtt: float, queue: float
) -> str:
    """The fleet file. Each argument is uniform in [0, 1)."""
    kinds = MIXES[int(len(MIXES) * mix)]
    total = max(len(kinds), round(4 * 15**count))
    ends = [0, *sorted(rng.sample(range(1, total), len(kinds) - 1)), total]
    own_region, lines = rng.random() < 0.5, list[str]()
    for n, (device, (begin, end)) in enumerate(zip(kinds, itertools.pairwise(ends), strict=True)):
        alike = n == 0 or rng.random() < 0.5
        down = _within(MBPS[0] * (MBPS[1] / MBPS[0]) ** mbps * (1.0 if alike else 4 ** rng.uniform(-1, 1)))
        up = _within(down / max(1.0, 16 ** (1.5 * uneven - 0.5)))  # a third have equal ones
        depth_s = 0.0 if queue < 0.2 else min(2.0, 2.2 * (queue - 0.2) / 0.75)
        lines += [
            "[[machines]]",
            f'name = "{device.split()[-1].lower()}"',
            f'device = "{device}"',
            f"count = {end - begin}",
            f'region = "{"xyzw"[n] if own_region else "x"}"',
            f"up_mbps = {up:.0f}",
            f"down_mbps = {down:.0f}",
            f"queue_s = {depth_s:.2f}",
            "",
        ]
    rtt_ms = 80**rtt
    local_ms = rng.uniform(1.0, rtt_ms) if own_region and len(kinds) > 1 else rtt_ms
    return "\n".join([*lines, "[defaults]", f"rtt_ms = {rtt_ms:.0f}", f"local_rtt_ms = {local_ms:.0f}", ""])


def _within(mbps: float) -> float:
    return min(MBPS[1], max(MBPS[0], mbps))


def _possible(found: Drawn) -> bool:
    """Every machine holds some stage, every stage has a machine, and a step is not too long."""
    try:
        scene, config = found.setting()
        serving = seated(scene)
    except CapacityError:
        return False
    return not scene.left_out and bound_s(scene, serving, delayed=config.optimizer.delayed) <= LONGEST_S


def bound_s(scene: Setting, serving: Sequence[Sequence[int]], *, delayed: bool) -> float:
    """No step of this layout can be shorter, whatever the protocol [s].

    FLOP: a stage's machines share its microbatches, in whole ones and without a pause. Bytes: what the stage sends and
    takes of activations and their gradients, over all bandwidths of its machines together; and 2 (n-1)/n of the
    gradient, over the narrowest one, for each averages an equal shard. A step begins when the one before is averaged;
    so the first microbatch has to come to a stage before it can begin, and the last one has to go all the way back.
    With delayed updates averaging goes on beside the next step, and only shares its links; and no machine waits for the
    last microbatch of another. Delays and all that is agreed on take no time.
    """
    cost, kinds, last = scene.cost, scene.kinds, len(serving) - 1
    step_s = there_s = 0.0
    back: list[tuple[float, float]] = []
    """Of each stage before: the shortest backward, and what averaging takes."""
    for s, here in enumerate(serving):
        peers = [(kind, n) for kind, n in zip(kinds, here, strict=True) if n]
        members = sum(here)
        services = [(n, kind.service_s(s)) for kind, n in peers]
        up = cost.microbatches * (cost.backward_bytes[s] + (cost.forward_bytes[s + 1] if s < last else 0))
        down = cost.microbatches * (
            (cost.forward_bytes[s] if s else 0) + (cost.backward_bytes[s + 1] if s < last else 0)
        )
        averaged = 2 * (members - 1) / members * cost.stages[s].averaged_bytes
        up_per_s, down_per_s = (
            sum(n * kind.up_bytes_per_s for kind, n in peers),
            sum(n * kind.down_bytes_per_s for kind, n in peers),
        )
        averages_s = averaged / min(min(kind.up_bytes_per_s, kind.down_bytes_per_s) for kind, _ in peers)
        if delayed:
            shared_s = max((up + members * averaged) / up_per_s, (down + members * averaged) / down_per_s)
            step_s = max(step_s, cost.microbatches / sum(n / each for n, each in services), averages_s, shared_s)
            continue
        through_s = there_s + max(whole_s(cost.microbatches, services), up / up_per_s, down / down_per_s)
        step_s = max(step_s, through_s + averages_s)
        for shortest_s, then_s in reversed(back):
            through_s += shortest_s
            step_s = max(step_s, through_s + then_s)
        there_s += min(kind.forward_s[s] for kind, _ in peers)
        back.append((min(kind.backward_s[s] for kind, _ in peers), averages_s))
    return step_s


def whole_s(items: int, machines: Sequence[tuple[int, float]]) -> float:
    """The time in which machines, (how many, seconds apiece), do so many pieces of work, each one a whole piece at a
    time."""
    low, high = 0.0, math.ceil(items / sum(n for n, _ in machines)) * max(each for _, each in machines)
    for _ in range(60):
        middle = (low + high) / 2
        enough = sum(n * int(middle / each) for n, each in machines) >= items
        low, high = (low, middle) if enough else (middle, high)
    return high
