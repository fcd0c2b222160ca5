"""Networks without symmetry, to compare searches on."""

from __future__ import annotations

import numpy as np

from muletrain.planning.placement import Task
from reproduction.dtfm_searches import ACTIVATION_BYTES, GRADIENT_BYTES

# between AWS regions, measured by DT-FM: its published scheduler has two more than its paper [ms, Gbit/s]
CITIES = ("oregon", "virginia", "ohio", "tokyo", "seoul", "singapore", "sydney", "london", "frankfurt", "ireland")
PATHS = (
    (
        (67, 0.79),
        (49, 1.10),
        (96, 0.523),
        (124, 0.46),
        (163, 0.341),
        (139, 0.36),
        (136, 0.42),
        (143, 0.404),
        (124, 0.482),
    ),
    ((11, 1.12), (143, 0.524), (172, 0.5), (230, 0.364), (197, 0.383), (76, 1.16), (90, 1.02), (67, 1.05)),
    ((130, 0.694), (159, 0.529), (197, 0.452), (185, 0.484), (86, 1.05), (99, 0.799), (77, 1.14)),
    ((34, 1.10), (73, 1.01), (100, 0.761), (210, 0.366), (223, 0.36), (199, 0.465)),
    ((74, 1.14), (148, 0.58), (238, 0.342), (235, 0.358), (228, 0.335)),
    ((92, 0.816), (169, 0.5), (155, 0.535), (179, 0.492)),
    ((262, 0.326), (265, 0.328), (254, 0.344)),
    ((14, 1.14), (12, 1.09)),
    ((24, 1.08),),
)


def jittered(cities: list[int], seed: int, replicas: tuple[int, ...] = (8,) * 8) -> Task:
    """A device in each of these cities; every link is up to 20 % better or worse than its cities', in each direction by
    itself."""
    rng = np.random.default_rng(seed)
    base = {(i, i): (5.0, 2.0) for i in range(len(CITIES))}
    for i, row in enumerate(PATHS):
        for j, path in enumerate(row, i + 1):
            base[i, j] = base[j, i] = path
    both = np.array([[base[a, b] for b in cities] for a in cities])
    delay, gbps = (both[:, :, k] * rng.uniform(0.8, 1.2, both.shape[:2]) for k in (0, 1))
    return Task(delay, gbps, replicas, ACTIVATION_BYTES, GRADIENT_BYTES)


def asymmetric(seed: int) -> dict[str, Task]:
    """By name: 64 devices in four regions of unequal size, and in ten cities at random, as 8 stages x 8 pipelines;
    other shapes."""
    four = [0] * 26 + [1] * 19 + [2] * 12 + [3] * 7
    return {
        f"four unequal regions, {seed}": jittered(four, seed),
        f"ten cities, {seed}": jittered(_drawn(seed, 64), seed + 100),
        f"4 stages x 6 pipelines, {seed}": jittered(_drawn(seed + 1, 24), seed + 200, (6,) * 4),
        f"stages of 8, 8, 6, 6 and 4, {seed}": jittered(_drawn(seed + 2, 32), seed + 300, (8, 8, 6, 6, 4)),
    }


def untuned() -> dict[str, Task]:
    """By name: networks that nothing was tuned on. Regions of unequal size; ten cities at random, in several shapes;
    links at random."""
    rng = np.random.default_rng(77)
    delay, gbps = rng.uniform(1, 250, (64, 64)), np.exp(rng.uniform(np.log(0.2), np.log(4), (64, 64)))
    return {
        "regions of 22, 20, 13 and 9": jittered(_regions((22, 20, 13, 9), 11), 511),
        "regions of 30, 14, 11, 6 and 3": jittered(_regions((30, 14, 11, 6, 3), 12), 512),
        "ten cities, 7": jittered(_drawn(7, 64), 507),
        "ten cities, 8": jittered(_drawn(8, 64), 508),
        "ten cities, 16 stages x 4 pipelines": jittered(_drawn(9, 64), 509, (4,) * 16),
        "ten cities, 4 stages x 16 pipelines": jittered(_drawn(10, 64), 510, (16,) * 4),
        "ten cities, 12 stages x 6 pipelines": jittered(_drawn(11, 72), 513, (6,) * 12),
        "links at random": Task(delay, gbps, (8,) * 8, ACTIVATION_BYTES, GRADIENT_BYTES),
    }


def large(stages: int, pipelines: int) -> Task:
    """In ten cities at random."""
    return jittered(_drawn(0, stages * pipelines), 400, (pipelines,) * stages)


def _regions(sizes: tuple[int, ...], seed: int) -> list[int]:
    cities = np.random.default_rng(seed).permutation(len(CITIES))[: len(sizes)]
    return [int(city) for city, size in zip(cities, sizes, strict=True) for _ in range(size)]


def _drawn(seed: int, devices: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(0, len(CITIES), devices).tolist()
    return drawn
