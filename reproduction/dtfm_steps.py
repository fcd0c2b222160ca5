"""How long a step of GPT3-XL takes on a placement, by DT-FM's runtime and by Megatron's: the end-to-end comparison of
Yuan et al. 2022 (sec. 4.1, fig. 4 and 6; app. B).

P pipelines take the sequences of a batch in equal parts, one sequence (a microbatch) after another; all forward passes
come first, then all backward passes, which compute twice as long. Per pipeline, M microbatches, with c seconds of
forward computing in a stage and links of latency a and transfer time t:

- DT-FM (sec. 3.5): receiving, computing and sending overlap, so that the slowest of them sets the pace. Forward: every
  stage's c and every link's a + t once, and M - 1 times the largest c or t. Backward the same with 2c.
- Megatron: nothing overlaps. A stage computes 3c for a microbatch and waits for the exchange with the stage before and
  the one after, each a + t (both directions at a time); the slowest stage sets the pace.

Then gradients: DT-FM by eq. 2; Megatron by a ring in the order of the pipelines, 2 (n - 1) rounds of an n-th of the
gradient over the ring's slowest link. The pipelines of a step wait for each other, and the optimizer takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from reproduction.dtfm_searches import PIPELINES, STAGES, network, placed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from muletrain.planning.placement import Assignment

WIDTH, TOKENS, VOCAB = 2048, 2048, 50257
LAYERS, BATCHES = (24, 32, 40), (1024, 2048, 4096)
FLOP_PER_S = 50e12
"""Of a V100 in fp16, 40 % of its peak; not in the paper."""
LAYOUT_SEEDS = (2022, 2023, 2024)
"""As many random layouts as the paper has, averaged (app. B.1)."""
MESSAGE_BYTES = 2.0 * TOKENS * WIDTH
"""Activations of a sequence in fp16."""
SYSTEMS = ("scheduled", "kernighan-lin", "random", "megatron")


@dataclass(frozen=True)
class Work:
    """Of one step."""

    layers: int
    batch: int
    """Sequences."""

    @property
    def forward_s(self) -> float:
        """Of a sequence in one stage."""
        flop = 24.0 * TOKENS * WIDTH**2 + 4.0 * TOKENS**2 * WIDTH
        return self.layers / STAGES * flop / FLOP_PER_S

    @property
    def gradient_bytes(self) -> float:
        """Of one stage, fp32: an eighth of all parameters."""
        return 4.0 * (12 * WIDTH**2 * self.layers + VOCAB * WIDTH) / STAGES

    @property
    def microbatches(self) -> int:
        return self.batch // PIPELINES


@dataclass(frozen=True, eq=False)
class Links:
    """Means of both directions, (N, N)."""

    latency_s: NDArray[np.float64]
    s_per_byte: NDArray[np.float64]


@cache
def links(case: int) -> Links:
    """As the paper's text has them: cases 1 and 2 were real machines."""
    m = network(f"dtfm-case{case}-text" if case <= 3 else f"dtfm-case{case}")
    delay, gbps = np.array(m.delay_ms), np.array(m.bandwidth_gbps)
    return Links((delay + delay.T) / 2000, 8e-9 / ((gbps + gbps.T) / 2))


def overlapped_s(on: Links, layout: Assignment, work: Work) -> float:
    """A step of DT-FM's runtime."""
    rows = np.array(layout)  # (K, P)
    latency, transfer = (m[rows[:-1], rows[1:]] for m in (on.latency_s, on.s_per_byte * MESSAGE_BYTES))
    slowest = transfer.max(0)
    passes = 0.0
    for computing_s in (work.forward_s, 2 * work.forward_s):
        first = STAGES * computing_s + (latency + transfer).sum(0)
        passes = passes + first + (work.microbatches - 1) * np.maximum(slowest, computing_s)
    share = work.gradient_bytes / PIPELINES
    exchange = max(
        float((2 * (on.latency_s + share * on.s_per_byte)[np.ix_(g, g)] * _others(g)).sum(1).max()) for g in rows
    )
    return float(np.max(passes)) + exchange


def blocking_s(on: Links, layout: Assignment, work: Work) -> float:
    """A step of Megatron's, pipeline and data parallel (its best in cases 2 to 5, app. B.2)."""
    rows = np.array(layout)
    hops = (on.latency_s + on.s_per_byte * MESSAGE_BYTES)[rows[:-1], rows[1:]]
    none = np.zeros((1, PIPELINES))
    waiting = np.concatenate([none, hops]) + np.concatenate([hops, none])  # (K, P): with the stage before, and after
    first = 3 * STAGES * work.forward_s + 2 * hops.sum(0)
    passes = first + (work.microbatches - 1) * (3 * work.forward_s + waiting).max(0)
    piece = work.gradient_bytes / PIPELINES
    around = (on.latency_s + piece * on.s_per_byte)[rows, np.roll(rows, 1, axis=1)]
    return float(passes.max() + 2 * (PIPELINES - 1) * around.max())


def _others(group: NDArray[np.intp]) -> NDArray[np.float64]:
    return 1.0 - np.eye(len(group))


def random_layouts() -> list[Assignment]:
    """Devices in any order, stage by stage."""
    drawn = (np.random.default_rng(seed).permutation(STAGES * PIPELINES) for seed in LAYOUT_SEEDS)
    return [tuple(map(tuple, d.reshape(STAGES, PIPELINES).tolist())) for d in drawn]


def step_s(system: str, case: int, work: Work) -> float:
    """One of ``SYSTEMS``; the layouts that DT-FM's search and its Kernighan-Lin baseline end with are the same for all
    sizes (app. B.1)."""
    if system in ("scheduled", "kernighan-lin"):
        found = placed(case, "dtfm" if system == "scheduled" else system)
        return overlapped_s(links(case), found, work)
    takes = blocking_s if system == "megatron" else overlapped_s
    return float(np.mean([takes(links(case), layout, work) for layout in random_layouts()]))


def ratios(case: int, over: str) -> dict[tuple[int, int], float]:
    """How many times faster a scheduled step is than one of ``over``, by layers and batch."""
    works = [Work(layers, batch) for layers in LAYERS for batch in BATCHES]
    return {(w.layers, w.batch): step_s(over, case, w) / step_s("scheduled", case, w) for w in works}


def slowdowns() -> dict[tuple[int, int], float]:
    """How many times slower a scheduled step around the world (case 5) is than Megatron's in a data centre (case 1)."""
    works = [Work(layers, batch) for layers in LAYERS for batch in BATCHES]
    return {(w.layers, w.batch): step_s("scheduled", 5, w) / step_s("megatron", 1, w) for w in works}
