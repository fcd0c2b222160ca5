"""What a traced part costs, counted in its graph: parameters, FLOPs, and what autograd keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

if TYPE_CHECKING:
    from muletrain.model.traced.cutting import Part
    from muletrain.model.traced.export import Traced

aten = torch.ops.aten
_PRODUCTS = {
    "mm": 0,
    "bmm": 0,
    "matmul": 0,
    "linear": 0,
    "addmm": 1,
    "baddbmm": 1,
    "_grouped_mm": 0,
    "grouped_mm_fallback": 0,
}
_CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
"""Matrix products -> which argument is the left factor."""
_VIEWS = {
    "view",
    "reshape",
    "transpose",
    "permute",
    "expand",
    "slice",
    "unsqueeze",
    "squeeze",
    "split",
    "chunk",
    "select",
}
_VIEWS |= {"contiguous", "to", "type_as", "detach", "alias", "t", "unflatten", "flatten", "narrow", "unbind", "movedim"}


@dataclass(frozen=True)
class Cost:
    """Of one part, per token."""

    params: int
    """Parameters that no earlier part has."""
    linear_flops: float
    """Forward FLOPs that do not depend on the length of the sequence."""
    token_flops: float
    """Forward FLOPs for each token of the sequence."""
    kept_bytes: float
    """What autograd keeps between forward and backward in fp32, at the context's length: an upper estimate, every
    result that is no view."""

    def flops(self, tokens: int) -> float:
        """Forward FLOPs per token in a sequence of ``tokens``."""
        return self.linear_flops + self.token_flops * tokens


def cost(part: Part, traced: Traced, context: int, counted: set[str]) -> Cost:
    """Count ``part``. ``counted``: parameters of earlier parts, to which this one's are added."""
    own = [name for name in part.weights if name not in counted]
    counted.update(own)
    half = max(1, context // 2)
    at_half, at_whole = (_flops(part, traced, tokens) / tokens for tokens in (half, context))
    slope = (at_whole - at_half) / (context - half) if context > half else 0.0
    return Cost(
        params=sum(math.prod(traced.shapes[name]) for name in own),
        linear_flops=at_whole - slope * context,
        token_flops=slope,
        kept_bytes=sum(_kept(node, traced, context) for node in part.nodes) / context,
    )


def _flops(part: Part, traced: Traced, tokens: int) -> float:
    """Of one sequence."""
    return sum(_node_flops(node, traced, tokens) for node in part.nodes)


def _node_flops(node: fx.Node, traced: Traced, tokens: int) -> float:
    name = _name(node)
    if name == "scaled_dot_product_attention":
        *heads, length, features = _shape(node.args[0], traced, tokens)
        if len(traced.sizes) == 1:
            return 2.0 * 2 * math.prod(heads) * length * _shape(node.args[1], traced, tokens)[-2] * features
        return 2.0 * 2 * math.prod(heads) * length * tokens / 2 * features  # causal: half the sequence on average
    if name in _CONVOLUTIONS:
        return 2.0 * math.prod(_shape(node, traced, tokens)) * math.prod(_shape(node.args[1], traced, tokens)[1:])
    if name in _PRODUCTS:
        inner = _shape(node.args[_PRODUCTS[name]], traced, tokens)[-1]
        return 2.0 * math.prod(_shape(node, traced, tokens)) * inner
    return 0.0


def _kept(node: fx.Node, traced: Traced, tokens: int) -> float:
    """Bytes of one sequence."""
    val = node.meta.get("val")
    if not isinstance(val, Tensor) or _name(node) in _VIEWS:
        return 0.0
    return float(val.element_size() * math.prod(_shape(node, traced, tokens)))


def _name(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def _shape(node: Any, traced: Traced, tokens: int) -> tuple[int, ...]:
    """Of one sequence of ``tokens``. A size that depends on data counts as ``tokens``."""
    known = {size.node.expr: value for size, value in zip(traced.sizes, (1, tokens), strict=False) if _symbolic(size)}

    def size_of(size: Any) -> int:
        if not _symbolic(size):
            return int(size)
        value = size.node.expr.subs(known)
        return int(value) if value.is_number else tokens

    return tuple(size_of(size) for size in node.meta["val"].shape)


def _symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt)
