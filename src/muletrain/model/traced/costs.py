"""Costs of traced parts: parameters and FLOPs are counted in the graph, and the tensors saved by autograd in a forward
pass on the meta device, which computes no numbers. Attention saves the same tensors as fused kernels."""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from muletrain.model.dropout import Masks, drop_threshold
from muletrain.model.traced import operators
from muletrain.model.traced.outline import PartOutline

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from muletrain.model.traced.cutting import Part, Parts
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
_POINTWISE = {
    "to",
    "type_as",
    "contiguous",
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "pow",
    "sqrt",
    "rsqrt",
    "tanh",
    "sigmoid",
}
_POINTWISE |= {"linear"}
"""Operators of heads that compute each token by itself."""
_CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
"""Matrix product -> index of the left factor's argument."""
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


def costs(
    chain: Parts, traced: Traced, context: int, causal: Collection[str], linear: Collection[str]
) -> tuple[PartOutline, ...]:
    """Count the parts of ``chain``, a cut of ``traced``. ``causal``: masks of attention that need no table; ``linear``:
    parameters for ``PartOutline.linear``."""
    counted: set[str] = set()
    half, kept = max(1, context // 2), _Kept(chain, traced, context, causal)
    sizes = {node.name for node in traced.graph.nodes if not isinstance(node.meta.get("val"), Tensor)}
    found = []
    for part in chain.parts:
        own = [name for name in part.weights if name not in counted]
        counted.update(own)
        at_half, at_whole = (_flops(part, traced, tokens) / tokens for tokens in (half, context))
        slope = (at_whole - at_half) / (context - half) if context > half else 0.0
        found.append(
            PartOutline(
                code=kept.code(part),
                weights=part.weights,
                linear=tuple(n for n, name in enumerate(part.weights) if name in linear),
                params=sum(math.prod(traced.shapes[name]) for name in own),
                linear_flops=at_whole - slope * context,
                token_flops=slope,
                kept_bytes=kept.of(part) / context,
                by_token=_by_token(part, sizes),
            )
        )
    return tuple(found)


def _by_token(part: Part, sizes: Collection[str]) -> bool:
    """Is each token of ``part`` computed by itself? Operators count that are known to do so. ``sizes``: the tables that
    are no tensors."""
    return all(table in sizes for table in part.tables) and all(map(_keeps_tokens, part.nodes))


def _keeps_tokens(node: fx.Node) -> bool:
    name, rest = _name(node), node.args[1:]
    if name == "slice":
        return rest[1:] == (0, sys.maxsize)  # of everything
    shape = list(node.meta["val"].shape) if isinstance(node.meta.get("val"), Tensor) else []
    if name in ("view", "reshape"):
        return shape == list(node.all_input_nodes[0].meta["val"].shape)
    if name == "mean":
        return rest[:1] == ([-1],)  # without, it is the mean of everything
    return name in _POINTWISE or (name in ("layer_norm", "rms_norm") and rest[0] == shape[-1:])


class _Kept:
    """Counts the bytes that autograd saves for the parts of a chain, for one sequence of ``tokens``."""

    def __init__(self, chain: Parts, traced: Traced, tokens: int, causal: Collection[str]) -> None:
        self._chain, self._traced, self._tokens, self._causal = chain, traced, tokens, causal
        self._nodes = {node.name: node for node in traced.graph.nodes}
        self._weights = {name: node for node, name in traced.parameters.items()}
        self._known: dict[object, float] = {}

    def code(self, part: Part) -> str:
        """``PartOutline.code``"""
        kinds = [self._kind(name) for name in part.tables]
        frozen = [n for n, name in enumerate(part.weights) if name in self._traced.frozen]
        return hashlib.sha256(f"{part.code} {kinds} {frozen or ''}".rstrip().encode()).hexdigest()[:16]

    def _kind(self, table: str) -> str:
        node = self._nodes[table]
        if table in self._causal or not isinstance(val := node.meta["val"], Tensor):
            return "causal" if table in self._causal else "size"
        return f"{val.dtype} {_shape(node, self._traced, self._tokens)}"

    def of(self, part: Part) -> float:
        weights = [self._meta(self._weights[name]) for name in part.weights]
        for name, weight in zip(part.weights, weights, strict=True):
            weight.requires_grad_(weight.requires_grad and name not in self._traced.frozen)
        inputs = [self._meta(self._nodes[name]) for name in part.inputs]
        key = (self.code(part), *(tuple(tensor.shape) for tensor in (*weights, *inputs)))
        if key not in self._known:
            try:
                self._known[key] = self._passed(part, weights, inputs)
            except Exception:  # an operator needs numbers; then at most every result is kept
                self._known[key] = sum(_size(node, self._traced, self._tokens) for node in part.nodes)
        return self._known[key]

    def _meta(self, node: fx.Node) -> Tensor:
        dtype = node.meta["val"].dtype
        made = torch.empty(_shape(node, self._traced, self._tokens), dtype=dtype, device="meta")
        return made.requires_grad_(dtype.is_floating_point)

    def _passed(self, part: Part, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> float:
        where = torch.device("meta")
        tables = [self._tables[name] for name in part.tables]
        others = {t.untyped_storage()._cdata for t in (*weights, *tables) if isinstance(t, Tensor)}
        kept: dict[int, Any] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()  # kept alive, so that addresses stay unique
            if storage._cdata not in others:
                kept[storage._cdata] = storage
            return tensor

        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            _Dry(part.function).run(*weights, *inputs, *tables, where, Masks(0, 0, 0), part.site, 1)
        return float(sum(storage.nbytes() for storage in kept.values()))

    @functools.cached_property
    def _tables(self) -> dict[str, Any]:
        """The tables, which all parts share, so that these storages do not count."""
        names = {name: node for node, name in self._traced.constants.items()}
        given = [self._meta(names[name]).detach() for name in self._chain.constants]
        places = [torch.empty(1, self._tokens, dtype=torch.int64, device="meta")] if self._chain.apart else []
        made = self._chain.tables(*given, *places, 1, self._tokens, torch.device("meta"))
        named = zip(self._chain.table_names, made, strict=True)
        return {name: operators.Causal() if name in self._causal else table for name, table in named}


class _Dry(fx.Interpreter):
    """Runs a part on the meta device, where no fused kernel for attention exists."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is operators.attention and drop_threshold(args[4]) == 0:
            return _Fused.apply(*args[:4])  # type: ignore[no-untyped-call]
        return super().call_function(target, args, kwargs)


class _Fused(torch.autograd.Function):
    """Saves the same tensors as fused kernels for attention (Dao et al. 2022, sec. 3.1), and a mask as the added
    numbers."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        out = torch.empty_like(q)[..., : v.shape[-1]]
        added = mask.to(q.dtype) if isinstance(mask, Tensor) else None
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32), added)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("nothing is computed here")


def _flops(part: Part, traced: Traced, tokens: int) -> float:
    """FLOPs of one sequence."""
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


def _size(node: fx.Node, traced: Traced, tokens: int) -> float:
    """Bytes of a result for one sequence; 0 for views."""
    val = node.meta.get("val")
    if not isinstance(val, Tensor) or _name(node) in _VIEWS:
        return 0.0
    return float(val.element_size() * math.prod(_shape(node, traced, tokens)))


def _name(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def _shape(node: Any, traced: Traced, tokens: int) -> tuple[int, ...]:
    """The shape of a result for one sequence of ``tokens``. A size that depends on data counts as ``tokens``."""
    sizes = [traced.sizes, *([] if traced.targets is None else [traced.targets.meta["val"].shape[: len(traced.sizes)]])]
    pairs = [pair for lead in sizes for pair in zip(lead, (1, tokens), strict=False)]
    known = {size.node.expr: value for size, value in pairs if _symbolic(size)}

    def size_of(size: Any) -> int:
        if not _symbolic(size):
            return int(size)
        value = size.node.expr.subs(known)
        return int(value) if value.is_number else tokens

    return tuple(size_of(size) for size in node.meta["val"].shape)


def _symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt)
