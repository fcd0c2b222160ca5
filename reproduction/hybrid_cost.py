"""What a hub costs: stages served by reliable machines as parameter servers, and by unreliable ones as their clients.

The latency model of HYBRID (sec. 3.1-3.3). In each stage every reliable machine is a frontal server, which takes
activations from the stage before, or a backward server, which passes them on to the next one; a lone one is both.
Clients get their part of a microbatch from a frontal server and give it to a backward server; servers work on parts of
it too. Times are in seconds; a transfer of b bytes takes delay + b * 8 / bandwidth in its own direction; a bandwidth of
0 is no link.

- Inside a stage (eq. 1), each machine works on a part of the microbatch in proportion to its speed (sec. 3.3.1), so
  that all compute equally long: work of the stage's layers / speed of all its machines. To that comes the dearest
  transfer. A client takes its part from the frontal server and gives it to the backward server that are cheapest for it
  (sec. 3.3.1). Between servers no choice is named, and the dearest pair counts, a frontal and a backward one, with the
  larger of their two parts.
- Between stages (sec. 3.2.1) a microbatch is cut into equal segments by the sending servers, and into equal segments by
  the receiving ones, in the order they are listed; each overlap is one transfer, all at the same time: the slowest
  counts. Activations go from backward to frontal servers, gradients the other way.
- A stage takes for a microbatch (eq. 2): activations from the stage before + gradients from the stage after + inside.
  The slowest stage sets the pace: a step takes microbatches x its time (filling and draining not counted, as in the
  paper).

Readings of the paper, where it leaves something open: work is that of forward and backward together, and the transfers
of eq. 1 are counted once; averaging costs nothing, as it overlaps (sec. 3.3.1), and so one stage of everything is hard
to beat where each machine holds the whole model. Beyond the paper: memory, layers of unequal work, and machines that
are not used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class HubTask:
    """The task: N devices, L layers."""

    delay_ms: NDArray[np.float64]
    """Delays from row to column, (N, N); diagonals and links between two unreliable devices are unused."""
    bandwidth_gbps: NDArray[np.float64]
    """Bandwidths likewise; 0: no link; inf: no limit."""
    flops: tuple[float, ...]
    """By device [FLOP/s]."""
    reliable: tuple[bool, ...]
    """By device: whether it may be a server."""
    work: tuple[float, ...]
    """By layer: forward and backward of one microbatch [FLOP]."""
    activation_bytes: float
    """Bytes of one microbatch from a stage to the next; its gradient is as large."""
    microbatches: int = 1
    """Microbatches in a step."""
    memory_bytes: tuple[float, ...] = ()
    """By device; (): no limits."""
    layer_bytes: tuple[float, ...] = ()
    """By layer, with its activations of one whole microbatch: each device of a stage holds all the stage's layers."""


@dataclass(frozen=True)
class HubStage:
    """A stage's machines and layers. A single reliable device is in ``frontal`` and in ``backward``, else each is in
    one."""

    frontal: tuple[int, ...]
    """In the order of their segments."""
    backward: tuple[int, ...]
    clients: tuple[int, ...]
    layers: tuple[int, int]
    """First layer, and the one after the last."""

    @property
    def servers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.frontal, *self.backward)))

    @property
    def devices(self) -> tuple[int, ...]:
        return (*self.servers, *self.clients)


@dataclass(frozen=True)
class StageTime:
    """Of one microbatch [s]."""

    activations_s: float
    """From the stage before."""
    gradients_s: float
    """From the stage after."""
    inside_s: float
    """The dearest transfer inside the stage."""
    compute_s: float

    @property
    def total_s(self) -> float:
        return self.activations_s + self.gradients_s + self.inside_s + self.compute_s


@dataclass(frozen=True)
class HubCost:
    """Of one allocation."""

    stages: tuple[StageTime, ...]
    microbatches: int

    @property
    def step_s(self) -> float:
        """Eq. 2."""
        return self.microbatches * max(stage.total_s for stage in self.stages)


def evaluate(task: HubTask, stages: Sequence[HubStage]) -> HubCost:
    """Evaluate an allocation by eq. 1 and 2. Times are inf if a link is missing. Raises ValueError for an invalid
    allocation."""
    _check(task, stages)
    times = []
    for k, stage in enumerate(stages):
        activations_s = _between_s(task, stages[k - 1].backward, stage.frontal) if k else 0.0
        gradients_s = _between_s(task, stages[k + 1].frontal, stage.backward) if k + 1 < len(stages) else 0.0
        speed = sum(task.flops[d] for d in stage.devices)
        work = sum(task.work[slice(*stage.layers)])
        times.append(StageTime(activations_s, gradients_s, _inside_s(task, stage, speed), work / speed))
    return HubCost(tuple(times), task.microbatches)


def _inside_s(task: HubTask, stage: HubStage, speed: float) -> float:
    dearest = 0.0
    for client in stage.clients:
        part = task.activation_bytes * task.flops[client] / speed
        takes_s = min(_link_s(task, server, client, part) for server in stage.frontal)
        gives_s = min(_link_s(task, client, server, part) for server in stage.backward)
        dearest = max(dearest, takes_s + gives_s)
    for front in stage.frontal:
        for back in stage.backward:
            part = task.activation_bytes * max(task.flops[front], task.flops[back]) / speed
            dearest = max(dearest, _link_s(task, front, back, part))
    return dearest


def _between_s(task: HubTask, senders: Sequence[int], receivers: Sequence[int]) -> float:
    slowest = 0.0
    for i, sender in enumerate(senders):
        for j, receiver in enumerate(receivers):
            # in units of 1 / (senders x receivers): whole numbers, so that segments that only touch have no overlap
            first = max(i * len(receivers), j * len(senders))
            end = min((i + 1) * len(receivers), (j + 1) * len(senders))
            if end > first:
                part = task.activation_bytes * (end - first) / (len(senders) * len(receivers))
                slowest = max(slowest, _link_s(task, sender, receiver, part))
    return slowest


def _link_s(task: HubTask, sender: int, receiver: int, nbytes: float) -> float:
    if sender == receiver:
        return 0.0
    gbps = float(task.bandwidth_gbps[sender][receiver])
    return float(task.delay_ms[sender][receiver]) / 1000 + nbytes * 8 / (gbps * 1e9) if gbps > 0 else math.inf


def _check(task: HubTask, stages: Sequence[HubStage]) -> None:
    count, layers = len(task.flops), len(task.work)
    if (
        not stages
        or [s.layers[0] for s in stages] != [0, *(s.layers[1] for s in stages[:-1])]
        or stages[-1].layers[1] != layers
    ):
        raise ValueError(f"the stages' layers are not 0 to {layers} without a gap")
    if any(end <= first for first, end in (s.layers for s in stages)):
        raise ValueError("a stage has at least one layer")
    used = [d for stage in stages for d in stage.devices]
    if len(used) != len(set(used)) or not set(used) <= set(range(count)):
        raise ValueError("a device serves one stage at most, and is one of the task's")
    for stage in stages:
        if not stage.frontal or not stage.backward:
            raise ValueError("a stage needs a frontal and a backward server")
        if len(stage.frontal) + len(stage.backward) != max(len(stage.servers), 2):
            raise ValueError("a device is a frontal or a backward server; only a lone one is both")
        if not all(task.reliable[d] for d in stage.servers) or any(task.reliable[d] for d in stage.clients):
            raise ValueError("servers are reliable devices, and clients are not")
        if task.memory_bytes:
            needs = sum(task.layer_bytes[slice(*stage.layers)])
            if any(task.memory_bytes[d] < needs * (1 - 1e-12) for d in stage.devices):  # but for rounding
                raise ValueError(f"a stage needs {needs:.3g} bytes, and one of its devices has less")
