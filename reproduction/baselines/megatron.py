"""Megatron's grid: GPUs cut layers (tensor), runs of layers (pipeline) and batches (data) at once, and the best cut is
searched for (Narayanan et al. 2021, sec. 2-3)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Device:
    """A GPU and its link to any other."""

    flop_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Grid:
    """``tensor`` x ``pipeline`` x ``data`` GPUs, and what a step takes them [s]."""

    tensor: int
    pipeline: int
    data: int
    step_s: float = inf


def best_grid(gpus: int, device: Device, *, width: float, layers: int, tokens: int, microbatches: int) -> Grid:
    """The fastest of all cuts of ``gpus``. ``microbatches`` of one sequence of ``tokens`` each in a step, shared by the
    pipelines."""
    grids = [
        Grid(t, p, gpus // (t * p))
        for t in range(1, gpus + 1)
        if gpus % t == 0
        for p in range(1, gpus // t + 1)
        if gpus // t % p == 0 and layers % p == 0 and microbatches % (gpus // (t * p)) == 0
    ]
    timed = [
        Grid(
            g.tensor,
            g.pipeline,
            g.data,
            grid_s(g, device, width=width, layers=layers, tokens=tokens, microbatches=microbatches),
        )
        for g in grids
    ]
    return min(timed, key=lambda g: g.step_s)


def grid_s(grid: Grid, device: Device, *, width: float, layers: int, tokens: int, microbatches: int) -> float:
    """Time of a step [s]; fp32, with activation checkpointing.

    A layer has 12 width^2 parameters (8 FLOP each and token: forward twice, backward) and all-reduces its activations
    two times a pass among ``tensor`` GPUs (sec. 2.3), so six times; neighbours in the pipeline exchange them twice;
    bubbles as in GPipe (sec. 2.2.1); gradients are all-reduced among ``data``.
    """
    activations = 4.0 * tokens * width
    params = 12.0 * width**2
    computing_s = 8 * params * tokens / grid.tensor / device.flop_per_s
    reducing_s = 6 * all_reduce_s(activations, grid.tensor, device.bytes_per_s)
    passing_s = 2 * activations / device.bytes_per_s if grid.pipeline > 1 else 0.0
    stage_s = layers // grid.pipeline * (computing_s + reducing_s) + passing_s
    slots = microbatches // grid.data + grid.pipeline - 1
    held = 4 * params * layers / grid.pipeline / grid.tensor
    return slots * stage_s + all_reduce_s(held, grid.data, device.bytes_per_s)


def all_reduce_s(size_bytes: float, members: int, bytes_per_s: float) -> float:
    """A ring: each member sends 2 (members - 1) / members of it (Patarasu and Yuan 2009)."""
    return 2 * (members - 1) / members * size_bytes / bytes_per_s
