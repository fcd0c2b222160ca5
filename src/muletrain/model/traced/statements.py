"""Writes a traced graph as statements of Python: what changes nothing is left out, operators are written as people do."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from muletrain.model.traced import operators
from muletrain.model.traced.export import path_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_END = 2**63 - 1
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "__and__": "&", "matmul": "@", "mm": "@"}
_INFIX |= {"bmm": "@", "eq": "==", "ne": "!=", "le": "<=", "lt": "<", "ge": ">=", "gt": ">"}
_INFIX |= {"floor_divide": "//", "floordiv": "//"}
_METHODS = {"view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "rsqrt", "cos", "sin", "tanh"}
_METHODS |= {"split", "chunk", "softmax", "cumsum", "diff", "detach", "contiguous", "sigmoid", "sum", "type_as", "topk"}
_METHODS |= {"mean", "sort", "to", "new_ones", "index_put", "masked_fill", "flatten", "clone", "exp", "clamp", "select"}
_FUNCTIONS = {"linear": "F.linear", "layer_norm": "F.layer_norm", "silu": "F.silu", "gelu": "F.gelu", "relu": "F.relu"}
_FUNCTIONS |= {"cat": "torch.cat", "arange": "torch.arange", "addmm": "torch.addmm", "rms_norm": "F.rms_norm"}
_FUNCTIONS |= {"empty_like": "torch.empty_like"}
_FUNCTIONS |= {"conv1d": "F.conv1d", "conv2d": "F.conv2d", "group_norm": "F.group_norm"}
_LOSSES = {"cross_entropy_loss": "F.cross_entropy", "mse_loss": "F.mse_loss", "smooth_l1_loss": "F.smooth_l1_loss"}
"""Written so if they have no other arguments than these two, prediction and target."""
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}


class Writer:
    """Writes the lines of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._names = graph, dict[fx.Node, str]()
        self._used: Counter[str] = Counter()
        self._taken: set[str] = set()
        self._copies = any(_writes(n) and not _alone(n) for n in graph.nodes)
        """Must a value that equals another one be a copy of it? Where something is written into, it may be."""
        self.read: set[str] = set()
        """Arguments and values that the lines use."""

    def body(self, arguments: list[str], results: Sequence[str] | None = None) -> list[str]:
        """Statements, with a comment where a module begins. ``results``: what the outputs are called (else there may be a
        single one, which is returned as it is)."""
        lines, before = list[str](), ""
        given, stream = iter(arguments), set[str]()
        self._taken = {*arguments, *(results or ())}
        wanted = self._wanted(results or ())
        for node in self._graph.nodes:
            module = re.sub(r"^.*?\.\d+(\.|$)", "", path_of(node))
            if node.op == "placeholder":
                self._names[node] = next(given)
                stream |= {self._names[node]} if node.name.startswith("x_") else set()
            elif node.op == "output":
                values = [self._text(v) for v in node.args[0]]
                named = list(zip(results or values, values, strict=True))
                lines += [f"{name} = {value}" for name, value in named if name != value]
                single = results is None and len(values) == 1
                lines.append(f"return {values[0] if single else listed([name for name, _ in named])}")
            elif (same := self._unchanged(node)) is not None:
                self._names[node] = self._names[same]
            elif node.target is operator.add and getattr(node.args[0], "name", "") == "site":
                self._names[node] = f"site + {node.args[1]}"  # the number of a dropout
            elif node not in self._names:
                text, known = self._expression(node), {self._names[n] for n in node.all_input_nodes}
                self._names[node] = wanted.get(node) or self._name(node)
                if not module and operator_of(node) == "add" and known & stream:
                    stream.add(self._names[node])
                    module = "residual"
                if module not in (before, "the model", ""):
                    lines.append(f"# {module}")
                    before = module
                lines.append(f"{self._unpacked(node)} = {text}")
        return lines

    def _wanted(self, results: Sequence[str]) -> dict[fx.Node, str]:
        """What makes the outputs -> their names."""
        found: dict[fx.Node, str] = {}
        for node, name in zip(outputs_of(self._graph), results, strict=False):
            while (same := self._unchanged(node)) is not None:
                node = same
            found.setdefault(node, name)
        return found

    def _unpacked(self, node: fx.Node) -> str:
        """The target of an assignment; of an operator with several results one for each."""
        name, values = self._names[node], node.meta.get("val")
        if not isinstance(values, list | tuple) or any(user.target is not operator.getitem for user in node.users):
            return name
        returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else []
        ends = [r.name for r in returns] if len(returns) == len(values) else [str(k) for k in range(len(values))]
        self._names |= {user: f"{name}_{ends[int(str(user.args[1]))]}" for user in node.users}
        found = {self._names[user] for user in node.users}
        return listed([f"{name}_{end}" if f"{name}_{end}" in found else "_" for end in ends])

    def _unchanged(self, node: fx.Node) -> fx.Node | None:
        """The input of a node that gives it on as it is."""
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
            return None
        name, ours, before = operator_of(node), node.meta.get("val"), first.meta.get("val")
        if not isinstance(ours, Tensor) or not isinstance(before, Tensor) or ours.dtype != before.dtype:
            return None
        if name in ("to", "type_as", "alias"):
            return first
        if str(ours.shape) != str(before.shape):  # sizes may be symbols
            return None
        if name in ("slice", "view", "reshape", "expand"):
            return first
        exact = name in ("mul", "div") or not ours.is_floating_point()  # -0.0 + 0 is 0.0
        neutral = node.args[1:] == (_NEUTRAL.get(name),) and not node.kwargs
        return first if exact and neutral and not self._copies else None

    def _name(self, node: fx.Node) -> str:
        """After the innermost module, or the operator."""
        module = path_of(node).rpartition(".")[2]
        kind = operator_of(node).strip("_") or "value"
        stem = module if kind in ("linear", "addmm") and not module.isdigit() else kind
        stem = re.sub(r"\W", "_", stem)
        self._used[stem] += 1
        name = f"{stem}_{self._used[stem]}"
        return self._name(node) if name in self._taken else name

    def _expression(self, node: fx.Node) -> str:
        name, given = operator_of(node), list[Any](node.args)
        if _writes(node) and _alone(node):
            name = name.removesuffix("_")
        if node.target is operators.attention and not given[4]:
            given[5:7] = None, 0  # what it does not draw with
        first = next((k for k, a in enumerate(given) if k and isinstance(a, bool)), len(given))
        arguments, named = [self._text(a) for a in given[:first]], dict(node.kwargs)
        if isinstance(node.target, torch._ops.OpOverload):
            named |= {a.name: v for a, v in zip(node.target._schema.arguments[first:], given[first:], strict=False)}
        skipped = ("pin_memory", "layout", "cudnn_enable", "cudnn_enabled")
        keywords = [f"{k}={self._text(v)}" for k, v in named.items() if v is not None and k not in skipped]
        if node.target is operator.getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        if name == "index":
            return f"{arguments[0]}[{', '.join(':' if i is None else self._text(i) for i in given[1])}]"
        if name in _INFIX and len(arguments) == 2 and not keywords and not arguments[0].startswith("-"):
            return f"{arguments[0]} {_INFIX[name]} {arguments[1]}"
        if name == "neg":
            return f"-{arguments[0]}"
        if name == "slice" and len(arguments) == 4:
            x, axis, begin, end = arguments
            if axis.isdigit():
                return f"{x}[{':, ' * int(axis)}{begin if begin != '0' else ''}:{end if end != str(_END) else ''}]"
        if name == "embedding" and not keywords:
            return f"F.embedding({', '.join([arguments[1], arguments[0], *(a for a in arguments[2:3] if a != '-1')])})"
        if name in ("mean", "sum") and len(arguments) == 2 and isinstance(given[1], list) and len(given[1]) == 1:
            arguments[1] = self._text(given[1][0])
        if name in _METHODS:
            return f"{arguments[0]}.{name}({', '.join([*arguments[1:], *keywords])})"
        if name in _LOSSES and len(node.args) == 2 and not keywords:
            return f"{_LOSSES[name]}({', '.join(arguments)})"
        return f"{_FUNCTIONS.get(name) or _called(node)}({', '.join([*arguments, *keywords])})"

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            self.read.add(self._names[value].partition(" ")[0])  # 'site' of 'site + 1'
            return self._names[value]
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._text, value))}]"
        return f"float('{value}')" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _writes(node: fx.Node) -> bool:
    """Does an operator write into its first argument?"""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _alone(node: fx.Node) -> bool:
    """Does nobody else see what an operator writes into, so that a new value serves as well?"""
    written: Any = node.args[0]
    maker = written.args[0] if written.target is operator.getitem else written
    others = [a.meta.get("val") for a in node.args[1:] if isinstance(a, fx.Node)]
    alike = all(isinstance(o, Tensor) and o.dtype == written.meta["val"].dtype for o in others)
    seen = [u for u in written.users if u is not node and (_aliases(u) or not u < node)]
    return alike and not seen and maker.op == "call_function" and not _aliases(maker)


def _aliases(node: fx.Node) -> bool:
    """May a node's result lie in the memory of its input?"""
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else []
    return node.op == "output" or any(r.alias_info is not None for r in returns)


def operator_of(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", ""))


def _called(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target.namespace}.{target._schema.name.partition('::')[2]}.{target._overloadname}"
    module = str(getattr(target, "__module__", "")).removeprefix("_").rpartition(".")[2]
    return f"{module}.{getattr(target, '__name__', '')}"


def listed(values: Sequence[str]) -> str:
    """A tuple of any length."""
    return ", ".join(values) if len(values) > 1 else f"({''.join(f'{v},' for v in values)})"


def outputs_of(graph: fx.Graph) -> list[fx.Node]:
    found: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    return list(found)
