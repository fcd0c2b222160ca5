"""The costs of a run's work in pure numbers: time to compute, to send, to average."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class StageCost:
    """Costs of one stage on any machine."""

    forward_flops: float
    """Operations of one microbatch forward; a backward takes twice as many, and three times with recomputation, less
    ``frozen_flops``."""
    recomputable: bool
    """False for the last stage, which computes both passes at once."""
    state_bytes: int
    """Bytes that a newcomer copies: weights and moments."""
    averaged_bytes: int
    """Bytes of the encoded gradient."""
    tied_bytes: int = 0
    """The part of ``averaged_bytes`` that is shared with another stage: each peer takes the other stage's mean, once
    both stages have averaged."""
    frozen_flops: float = 0.0
    """The part of ``forward_flops`` with weights that are not trained: backward computes no gradient of these."""
    ending_s: float = 0.0
    """Seconds at the end of a step beside messages and links: measured overhead, and updates on the CPU."""

    @property
    def weight_bytes(self) -> int:
        """The fp32 weights, without moments and the copy for delayed updates."""
        return self.state_bytes // 3


@dataclass(frozen=True)
class RunCost:
    """Costs of a whole run. ``forward_bytes[s]``: one microbatch's way to stage s (tokens to the first);
    ``backward_bytes[s]``: the answer from stage s."""

    stages: tuple[StageCost, ...]
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    microbatches: int
    """Microbatches in a step."""
    sequences: int
    tokens: int
    """Tokens in a microbatch."""

    @cached_property
    def tied(self) -> tuple[int, ...]:
        """The two stages that share parameters, if any do."""
        return tuple(s for s, stage in enumerate(self.stages) if stage.tied_bytes)

    @property
    def ids_bytes(self) -> int:
        """A microbatch's tokens, or targets, alone; for samples, the mean of inputs and targets."""
        return self.forward_bytes[0] // 2


def service_s(stage: StageCost, flops: float, *, recompute: bool, by_block: bool = False) -> tuple[float, float]:
    """Seconds of one microbatch forward and backward at ``flops`` operations per second. ``by_block``: backward computes
    each block again, also in the last stage."""
    forward_s, times = stage.forward_flops / flops, 3 if by_block or (recompute and stage.recomputable) else 2
    return forward_s, times * forward_s - stage.frozen_flops / flops


def all_reduce_s(nbytes: float, members: int, narrowest: float, path: float) -> float:
    """Seconds to reduce-scatter and all-gather ``nbytes``: each member reduces an equal shard, and sends and takes 2
    (n-1)/n of all bytes. ``narrowest``: of all members' up- and downlinks; ``path``: the narrowest between two
    members [bytes/s]. Delays are not included."""
    if members < 2:
        return 0.0
    return max(2 * (members - 1) / members * nbytes / narrowest, 2 * nbytes / members / path)


ALIKE = 1.5
"""Factor below which two bandwidths count as equal."""


def averages_at(members: int, up: float, down: float, *, delayed: bool = False) -> float:
    """Share of the narrowest link's bandwidth that is used while replicas average. Pacing keeps queues short: if three
    or more replicas exchange over links that are equally narrow [bytes/s], a link sometimes waits for a busy receiver
    (measured: tests/test_paced_roads.py, benchmarks/full_links). ``delayed``: the next step's activations use the
    gaps."""
    return 0.88 if members > 2 and 1 / ALIKE < up / down < ALIKE and not delayed else 0.97


def steady_shares(expected_s: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Shares of one sender's microbatches by kind of receiver: the steady state of ``policy.wiring``, receivers chosen
    in inverse proportion to expected time."""
    weights = [n / s if n else 0.0 for n, s in zip(counts, expected_s, strict=True)]
    total = sum(weights)
    return [w / total for w in weights] if total else weights
