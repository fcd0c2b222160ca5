"""Memory of a stage, from its sizes: estimates that decide whether to stash or recompute, and whether a stage fits at
all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.config.schema import Precision
from muletrain.errors import CapacityError
from muletrain.units import format_memory

if TYPE_CHECKING:
    from muletrain.config.schema import OptimizerConfig
    from muletrain.model.spec import ModelSpec
    from muletrain.policy.partition import Cut


def stash_bytes(spec: ModelSpec, cut: Cut, stage: int, tokens: int, precision: Precision) -> int:
    """What autograd keeps between forward and backward of ``tokens`` (B * T) tokens [bytes].

    Per token and layer, in numbers: 2 norms x (fp32 input of the square, normed, weighted) 6D, rotated q, k and v, the
    attention's output D, three feed-forward products and the gate 4F, byte masks D/2; plus rsqrt and log-sum-exp, which
    are small.
    """
    size = 4 if precision is Precision.FP32 else 2
    width, first, end = spec.width, *cut[stage]
    masks = 2 * width if spec.dropout else 0
    norms = 2 * width * (2 * 4 + size)
    per_layer = norms + size * (2 * width + 2 * spec.kv_width + 4 * spec.ffn) + masks
    head = width * (2 * 4 + size) + spec.vocab * (size + 2 * 4) if stage == len(cut) - 1 else 0
    return tokens * ((end - first) * per_layer + head)


@dataclass(frozen=True)
class StageMemory:
    """What one stage needs on its machine [bytes]."""

    weights: int
    """fp32 masters and, with 16-bit arithmetic, the working copy."""
    moments: int
    gradient: int
    """The accumulator, one microbatch's gradient, and the reduced gradient."""
    activations: int
    """One microbatch's graph; more is stashed only where memory allows."""

    @property
    def total(self) -> int:
        return self.weights + self.moments + self.gradient + self.activations


def stage_memory(spec: ModelSpec, cut: Cut, stage: int, *, tokens: int, precision: Precision) -> StageMemory:
    """Memory of ``stage`` with microbatches of ``tokens`` (B * T) tokens."""
    params = spec.stage_params(cut, stage)
    working = 0 if precision is Precision.FP32 else 2
    return StageMemory(
        weights=params * (4 + working),
        moments=params * 8,
        gradient=params * (4 + (working or 4) + 4),
        activations=stash_bytes(spec, cut, stage, tokens, precision),
    )


def check_fits(
    spec: ModelSpec,
    cut: Cut,
    stage: int,
    optimizer: OptimizerConfig,
    memory_bytes: int,
    *,
    tokens: int,
    precision: Precision = Precision.FP32,
) -> StageMemory:
    """The memory ``stage`` needs, for microbatches of ``tokens`` tokens, if ``memory_bytes`` of the device are enough.

    With ``optimizer.state_device`` 'cpu', masters, moments and the reduced gradient do not count. Raises CapacityError
    with the numbers.
    """
    need = stage_memory(spec, cut, stage, tokens=tokens, precision=precision)
    elsewhere = 0
    if optimizer.state_device == "cpu":
        params = spec.stage_params(cut, stage)
        working_copy = params * 4 if precision is Precision.FP32 else 0  # the device then needs one of its own
        elsewhere = need.moments + params * 8 - working_copy
    if need.total - elsewhere > memory_bytes:
        raise CapacityError(
            f"stage {stage} of {len(cut)} needs {format_memory(need.total - elsewhere)}, but only "
            f"{format_memory(memory_bytes)} may be used: weights {format_memory(need.weights)}, moments "
            f"{format_memory(need.moments)}, gradients {format_memory(need.gradient)}, activations "
            f"{format_memory(need.activations)}"
            + (f" (of all that, {format_memory(elsewhere)} lie in CPU memory)" if elsewhere else "")
            + "; use more fleet.stages, a smaller train.microbatch, or, with an accelerator, "
            "optimizer.state_device = 'cpu'"
        )
    return need
