"""The schedules GPipe and 1F1B, played in their fixed order over given links.

A schedule is one order of tasks for each stage (GPipe: Huang et al. 2019, sec. 2.3; 1F1B: PipeDream, Narayanan et al.
2019, sec. 3.2, with a flush at the end of each step). Sends block: a stage continues when its transfer has been
acknowledged, which fits the throughputs published over slow links (``swarm-table2``).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence


Kind = Literal["forward", "backward"]
Task = tuple[Kind, int]
"""The pass and the microbatch."""


@dataclass(frozen=True)
class StageTime:
    """Seconds that one stage computes for one microbatch; recomputation counts as backward."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Link:
    """A link between neighbours. ``ack_s``: from the arrival until the sender continues, uniform between the two;
    ``shared``: all transfers queue for one link."""

    bytes_per_s: float
    latency_s: float = 0.0
    ack_s: tuple[float, float] = (0.0, 0.0)
    shared: bool = False


def gpipe(stages: int, microbatches: int) -> list[list[Task]]:
    """All forward passes, then all backward passes, the last microbatch's first."""
    forward: list[Task] = [("forward", m) for m in range(microbatches)]
    backward: list[Task] = [("backward", m) for m in reversed(range(microbatches))]
    return [forward + backward for _ in range(stages)]


def one_f_one_b(stages: int, microbatches: int) -> list[list[Task]]:
    """Stage s begins with as many forward passes as there are stages from it to the end, then one backward for each
    forward."""
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)
        order: list[Task] = [("forward", m) for m in range(ahead)]
        for m in range(microbatches):
            order.append(("backward", m))
            if m + ahead < microbatches:
                order.append(("forward", m + ahead))
        orders.append(order)
    return orders


def step_s(
    orders: Sequence[Sequence[Task]], times: Sequence[StageTime], sent_bytes: float, link: Link, *, seed: int = 0
) -> float:
    """Play a schedule; return when the last stage ends its last task [s]. ``sent_bytes``: of a microbatch's
    activations; its gradients are as large."""
    draw = random.Random(seed)
    stages, transfer_s = len(orders), sent_bytes / link.bytes_per_s
    done = [0] * stages
    free_s = [0.0] * stages
    link_free_s = end_s = 0.0
    arrived: dict[tuple[int, Kind, int], float] = {(0, "forward", m): 0.0 for _, m in orders[0]}
    arrived |= {(stages - 1, "backward", m): 0.0 for _, m in orders[-1]}
    while True:
        ready = []
        for stage in range(stages):
            if done[stage] < len(orders[stage]):
                kind, microbatch = orders[stage][done[stage]]
                if (stage, kind, microbatch) in arrived:
                    spent_s = times[stage].forward_s if kind == "forward" else times[stage].backward_s
                    computed_s = max(free_s[stage], arrived[stage, kind, microbatch]) + spent_s
                    ready.append((computed_s, stage, kind, microbatch))
        if not ready:
            return end_s
        computed_s, stage, kind, microbatch = min(ready)  # first come, first served on a shared link
        done[stage] += 1
        receiver = stage + 1 if kind == "forward" else stage - 1
        free_s[stage] = computed_s
        if 0 <= receiver < stages:
            sent_s = max(computed_s, link_free_s if link.shared else 0.0) + transfer_s
            link_free_s = sent_s
            arrived[receiver, kind, microbatch] = sent_s + link.latency_s
            free_s[stage] = sent_s + link.latency_s + draw.uniform(*link.ack_s)
        end_s = max(end_s, computed_s)


def steady_s(times: Sequence[StageTime], sent_bytes: float, link: Link, microbatches: int) -> float:
    """Seconds of PipeDream without flush: nobody waits for the end of a step, so the slowest stage counts."""
    sending_s = 2 * (sent_bytes / link.bytes_per_s + link.latency_s + sum(link.ack_s) / 2)
    return microbatches * (max(t.forward_s + t.backward_s for t in times) + sending_s)


def dapple_s(times: Sequence[StageTime], sent_bytes: float, link: Link, microbatches: int) -> float:
    """Warm-up, steady phase and ending [s] of DAPPLE: 1F1B whose stages may be replicated (Fan et al. 2021, sec. 3).
    The replicas' all-reduce lies beside the ending and is left out."""
    return step_s(one_f_one_b(len(times), microbatches), times, sent_bytes, link)
