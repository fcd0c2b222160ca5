"""Writes a traced graph as statements of Python: what changes nothing is left out, operators are written as people do."""

from __future__ import annotations

import builtins
import itertools
import keyword
import math
import operator
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from muletrain.model.traced import operators
from muletrain.model.traced.export import path_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
_MOVES = {"view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "contiguous", "flatten"}
"""They change how numbers lie, so the result is named after the value that they are called on."""
_BINDS = {"+": 2, "-": 2, "*": 3, "/": 3, "//": 3, "@": 3, "**": 6}
"""How strongly Python binds the operands; comparisons and & come last."""
_COMPARED, _NEGATED, _ATOM = 1, 4, 9
_WIDTH, _LINE = 104, 109
"""Of the longest expression that has others inside; and with the name of its value."""
_RESERVED = {*keyword.kwlist, *dir(builtins), "F", "nn", "torch", "math", "operator", "operators", "transformers"}


class Writer:
    """Writes the lines of one graph. A value that only one statement of the same module uses is written inside it, while
    the line stays short; all others get a name. Where an operator writes into its input, every value has its own line."""

    def __init__(self, graph: fx.Graph, instead: Mapping[fx.Node, str] | None = None) -> None:
        """``instead``: expressions for nodes that are not written as the graph computes them."""
        self._copies = any(_writes(n) and not _alone(n) for n in graph.nodes)
        """Must a value that equals another one be a copy of it? Where something is written into, it may be."""
        self._origins: dict[fx.Node, fx.Node] = {}
        """Node -> the node that has its value, unchanged."""
        known: dict[str, fx.Node] = {}
        for node in graph.nodes:
            same = self._unchanged(node) or known.setdefault(self._computation(node), node)
            self._origins[node] = node if same is node else self._origins[same]
        self._instead = {self._origins[node]: text for node, text in (instead or {}).items()}
        self._nodes = self._needed(graph)
        self._users: dict[fx.Node, list[fx.Node]] = {node: [] for node in self._nodes}
        """Node -> who takes its value, once for each time."""
        for user in self._nodes:
            for node in self._inputs(user):
                self._users[node].append(user)
        modules = {_module(n) for n in self._nodes}
        self._holders = {m[: k.start()] for m in modules for k in re.finditer(r"\.", m)}
        """Modules that have others inside."""
        self._weighted = {
            _module(u) for n in graph.find_nodes(op="placeholder") for u in n.users if n.name.startswith("weight_")
        }
        self._names: dict[fx.Node, str] = {}
        self._inside: dict[fx.Node, int] = {}
        """Values that are written inside others, where ``_names`` has the expression -> how strongly it binds."""
        self._bases: dict[fx.Node, str] = {}
        self._taken = set(_RESERVED)
        self._lines, self._header = list[str](), ""
        self.read: set[str] = set()
        """Arguments and values that the lines use."""

    def body(self, arguments: list[str], results: Sequence[str | None] | None = None) -> list[str]:
        """Returns statements, with a comment where a module begins. ``results``: names of the outputs; None stands for one
        that is not returned. Without ``results``, a single output is returned as it is."""
        given, stream = iter(arguments), set[fx.Node]()
        self._taken |= {*arguments, *filter(None, results or ())}
        wanted, roles = self._wanted(results or ()), self._roles()
        for node in self._nodes:
            if node.op == "placeholder":
                self._names[node] = next(given)
                stream |= {node} if node.name.startswith("x_") else set()
            elif node.op == "output":
                values = [self._text(v) for v in list[Any](node.args[0])]  # type: ignore[arg-type]
                named = [(n, value) for n, value in zip(results or values, values, strict=True) if n]
                self._lines += [f"{name} = {value}" for name, value in named if name != value]
                single = results is None and len(values) == 1
                self._lines.append(f"return {values[0] if single else listed([name for name, _ in named])}")
            elif node.target is operator.add and getattr(node.args[0], "name", "") == "site":
                self._names[node] = f"site + {node.args[1]}"  # the number of a dropout
            elif node in wanted:
                self._state(node, wanted[node])
            elif node in roles:
                self._state(node, self._free(roles[node]))
            elif not _module(node) and operator_of(node) == "add" and stream.intersection(self._inputs(node)):
                stream.add(node)
                self._state(node, self._free("residual"), "residual")
            elif node not in self._names:
                text, strength = self._expression(node)
                if len(text) <= _WIDTH and self._fits_inside(node):
                    self._names[node], self._inside[node] = text, strength
                else:
                    self._state(node, self._name(node))
        return self._lines

    def _needed(self, graph: fx.Graph) -> list[fx.Node]:
        """Nodes that the outputs follow from, and all arguments."""
        needed = {n for n in graph.nodes if n.op in ("placeholder", "output")}
        for node in reversed(graph.nodes):
            if node in needed:
                needed.update(self._inputs(node))
        return [n for n in graph.nodes if n in needed]

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        leaves = [] if node in self._instead else tree_leaves((node.args, node.kwargs))
        return [self._origins[n] for n in leaves if isinstance(n, fx.Node)]

    def _wanted(self, results: Sequence[str | None]) -> dict[fx.Node, str]:
        """What makes the outputs -> their names."""
        output = self._nodes[-1]
        found: dict[fx.Node, str] = {}
        for node, name in zip(self._inputs(output), results, strict=False):
            if node.op != "placeholder" and name:
                found.setdefault(node, name)
        return found

    def _roles(self) -> dict[fx.Node, str]:
        """Attention, what it takes, and what goes to the experts of a mixture."""
        found: dict[fx.Node, str] = {}
        for call in self._nodes:
            if call.target is operators.attention:
                found[call] = "attention"
                found |= dict(zip(self._inputs(call), "qkv", strict=False))
            elif operator_of(call).startswith("grouped_mm"):
                found |= {call: "grouped_mm", self._inputs(call)[2]: "group_ends"}
            elif operator_of(call).strip("_") == "index_put" and operator_of(self._inputs(call)[0]) == "empty_like":
                found[call] = "inverse_order"
        return {n: role for n, role in found.items() if n.op != "placeholder" and n.target is not operator.getitem}

    def _fits_inside(self, node: fx.Node) -> bool:
        """Does one statement alone use a value, which has no name of its own?"""
        if self._copies or isinstance(node.meta.get("val"), list | tuple) or len(self._users[node]) != 1:
            return False
        (user,), module = self._users[node], _module(node)
        near = _within(module, _module(user)) or _within(_module(user), module)
        return near and not self._named(node) and user.op != "output" and user.target is not operator.getitem

    def _named(self, node: fx.Node) -> bool:
        """Is a node what a module with weights makes of them?"""
        return self._made_by_module(node) and _module(node) in self._weighted

    def _made_by_module(self, node: fx.Node) -> bool:
        """Is a node what its module returns?"""
        return any(u.op == "output" or not _within(_module(u), _module(node)) for u in self._users[node])

    def _state(self, node: fx.Node, name: str, header: str | None = None) -> None:
        """Write a statement for ``node``; before it, what makes it too long."""
        while True:
            text, _ = self._expression(node)
            inside = [n for n in self._inputs(node) if n in self._inside]
            if len(name) + len(text) <= _LINE or not inside:
                break
            longest = max(inside, key=lambda n: len(self._names[n]))
            del self._inside[longest]
            self._state(longest, self._name(longest))
        header = self._section(node) if header is None else header
        if header not in (self._header, "the model", ""):
            self._lines.append(f"# {header}")
            self._header = header
        self._names[node] = name
        self._lines.append(f"{self._unpacked(node)} = {text}")

    def _section(self, node: fx.Node) -> str:
        """The module of a block in whose code a node is: a layer without others inside is written in its holder's."""
        module = _module(node)
        simple = module in self._weighted - self._holders and module != path_of(node)
        return module.rpartition(".")[0] or module if simple else module

    def _unpacked(self, node: fx.Node) -> str:
        """The target of an assignment; of an operator with several results one for each."""
        name, values = self._names[node], node.meta.get("val")
        if not isinstance(values, list | tuple) or any(user.target is not operator.getitem for user in node.users):
            return name
        returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else []
        ends = [r.name for r in returns] if len(returns) == len(values) else [str(k) for k in range(len(values))]
        if operator_of(node) == "sort":
            name, ends = "sorted", ["values", "order"]
        first = [u for user in node.users if user.args[1] == 0 for u in user.users]
        if len(ends) == 2 and any(operator_of(u) in ("silu", "gelu") for u in first):
            ends = ["gate", "up"]
        used = {int(str(user.args[1])) for user in node.users}
        names = [self._free(f"{name}_{end}") if k in used else "_" for k, end in enumerate(ends)]
        self._names |= {user: names[int(str(user.args[1]))] for user in node.users}
        return listed(names)

    def _computation(self, node: fx.Node) -> str:
        """What a node computes, the same text for equal values."""
        if node.op != "call_function" or self._copies:
            return node.name
        return str((node.target, tree_map_only(fx.Node, self._origins.__getitem__, (node.args, node.kwargs))))

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
        if name == "__and__" and operator_of(first) == "new_ones" and ours.dtype == torch.bool and not self._copies:
            other: Any = node.args[1]
            return other if str(other.meta["val"].shape) == str(ours.shape) else None
        if str(ours.shape) != str(before.shape):  # sizes may be symbols
            return None
        if name in ("slice", "view", "reshape", "expand"):
            return first
        exact = name in ("mul", "div") or not ours.is_floating_point()  # -0.0 + 0 is 0.0
        neutral = node.args[1:] == (_NEUTRAL.get(name),) and not node.kwargs
        return first if exact and neutral and not self._copies else None

    def _name(self, node: fx.Node) -> str:
        """After the module that returns it, the value whose numbers it moves, or the operator."""
        module, kind = _module(node).rpartition(".")[2], operator_of(node).strip("_") or "value"
        kind = self._pattern(node) or kind
        made = kind in ("linear", "addmm") or (kind not in _MOVES and self._made_by_module(node))
        if made and module.isidentifier():
            base = stem = module
        elif kind in _MOVES:
            base = self._base(node)
            stem = f"{base}_{kind}"
        else:
            base = stem = kind
        self._bases[node] = base
        return self._free(re.sub(r"\W", "_", stem))

    def _pattern(self, node: fx.Node) -> str | None:
        """What several operators together are."""
        kind, given, users = operator_of(node), self._inputs(node), {operator_of(u) for u in self._users.get(node, ())}
        parts = [operator_of(n) for n in given]
        if kind == "mul" and "rsqrt" in parts:
            return "normed"
        if kind == "mul" and any(operator_of(n) == "cat" and self._negates(n) for n in given):
            return "rotated"
        if kind == "mul" and {"silu", "gelu"} & {*parts}:
            return "gated"
        if kind == "add" and "rotated" in map(self._pattern, given):
            return "rotary"
        if kind == "cat" and {"cos", "sin"} <= users:
            return "angles"
        return "picked" if kind == "index" else None

    def _negates(self, node: fx.Node) -> bool:
        return any(operator_of(n) == "neg" for n in self._inputs(node))

    def _base(self, node: fx.Node) -> str:
        """The name of the value that a node moves, without what moved it before."""
        source = self._inputs(node)[0]
        while source in self._inside and operator_of(source) in _MOVES:
            source = self._inputs(source)[0]
        if source in self._inside:
            return self._pattern(source) or operator_of(source).strip("_")
        return self._bases.get(source) or self._names[source].removeprefix("self.")

    def _free(self, stem: str) -> str:
        """``stem``, with a number if another value has this name."""
        names = itertools.chain([stem], (f"{stem}_{k}" for k in itertools.count(1 if stem in _RESERVED else 2)))
        name = next(n for n in names if n not in self._taken)
        self._taken.add(name)
        return name

    def _expression(self, node: fx.Node) -> tuple[str, int]:
        """The expression for a node, and how strongly its last operator binds."""
        if node in self._instead:
            return self._instead[node], _ATOM
        name, given = operator_of(node), list[Any](node.args)
        if _writes(node) and _alone(node):
            name = name.removesuffix("_")
        if node.target is operators.attention and not given[4]:
            del given[4:7]  # it draws nothing
        first = next((k for k, a in enumerate(given) if k and isinstance(a, bool)), len(given))
        arguments, named = [self._text(a) for a in given[:first]], dict(node.kwargs)
        if isinstance(node.target, torch._ops.OpOverload):
            named |= {a.name: v for a, v in zip(node.target._schema.arguments[first:], given[first:], strict=False)}
        skipped = ("pin_memory", "layout", "cudnn_enable", "cudnn_enabled")
        keywords = [f"{k}={self._text(v)}" for k, v in named.items() if v is not None and k not in skipped]
        if name in _INFIX and len(arguments) == 2 and not keywords:
            sign = _INFIX[name]
            binds = _BINDS.get(sign, _COMPARED)
            left = self._text(given[0], binds if sign in "+-*/@" else binds + 1)
            if not (sign == "**" and left.startswith("-")):  # a negative number
                return f"{left} {sign} {self._text(given[1], binds + 1)}", binds
        if name == "neg":
            return f"-{self._text(given[0], _NEGATED)}", _NEGATED
        return self._called(node, name, given, arguments, keywords), _ATOM

    def _called(self, node: fx.Node, name: str, given: list[Any], arguments: list[str], keywords: list[str]) -> str:
        x = self._text(given[0], _ATOM) if given else ""
        if node.target is operator.getitem:
            return f"{x}[{arguments[1]}]"
        if name == "index":
            return f"{x}[{', '.join(':' if i is None else self._text(i) for i in given[1])}]"
        if name == "slice" and len(arguments) == 4:
            _, axis, begin, end = arguments
            if axis.isdigit():
                last = int(axis) > 1 and int(axis) == given[0].meta["val"].dim() - 1
                before = "..., " if last else ":, " * int(axis)
                return f"{x}[{before}{begin if begin != '0' else ''}:{end if end != str(_END) else ''}]"
        if name == "embedding" and not keywords:
            padding = [f"padding_idx={a}" for a in arguments[2:3] if a != "-1"]
            return f"F.embedding({', '.join([arguments[1], arguments[0], *padding])})"
        if name in ("mean", "sum") and len(arguments) == 2 and isinstance(given[1], list) and len(given[1]) == 1:
            arguments[1] = self._text(given[1][0])
        if name in ("view", "reshape") and isinstance(given[1], list):  # torch finds out one size, readers should not
            known = node.meta["val"].shape
            sizes = [known[k] if s == -1 and isinstance(known[k], int) else s for k, s in enumerate(given[1])]
            return f"{x}.{name}({self._text(sizes)})"
        if name in _METHODS:
            return f"{x}.{name}({', '.join([*arguments[1:], *keywords])})"
        if name in _LOSSES and len(node.args) == 2 and not keywords:
            return f"{_LOSSES[name]}({', '.join(arguments)})"
        return f"{_FUNCTIONS.get(name) or _called(node)}({', '.join([*arguments, *keywords])})"

    def _text(self, value: Any, binds: int = 0) -> str:
        """``value`` as an operand of what binds so strongly."""
        if isinstance(value, fx.Node):
            node = self._origins[value]
            name = self._names[node]
            if node in self._inside:
                return f"({name})" if self._inside[node] < binds else name
            self.read.add(name.partition(" ")[0])  # 'site' of 'site + 1'
            return name
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._text, value))}]"
        return f"float('{value}')" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _module(node: fx.Node) -> str:
    """The module that a node belongs to, from its block on; "" for the block itself."""
    return re.sub(r"^.*?\.\d+(\.|$)", "", path_of(node))


def _within(module: str, other: str) -> bool:
    return other in ("", "the model") or f"{module}.".startswith(f"{other}.")


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
        if target.namespace == "transformers":  # the file gives it this name
            return operator_of(node)
        return f"torch.ops.{target.namespace}.{target._schema.name.partition('::')[2]}.{target._overloadname}"
    module = str(getattr(target, "__module__", "")).removeprefix("_").rpartition(".")[2]
    return f"{module}.{getattr(target, '__name__', '')}"


def listed(values: Sequence[str]) -> str:
    """A tuple of any length."""
    return ", ".join(values) if len(values) > 1 else f"({''.join(f'{v},' for v in values)})"
