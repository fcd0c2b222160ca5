"""Writes a traced chain as Python that people read: one class for each distinct part, and a table of parts with costs.

The file is an ordinary module that needs torch and muletrain's counter-hash dropout only. Nothing here is ever imported
by a run: it is for reading, changing and comparing.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from muletrain.model.traced import operators
from muletrain.model.traced.export import path_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from muletrain.model.traced.chain import TracedModel
    from muletrain.model.traced.cutting import Part

aten = torch.ops.aten
_END = 2**63 - 1
_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "pow": "**",
    "__and__": "&",
    "matmul": "@",
    "mm": "@",
    "bmm": "@",
}
_INFIX |= {"eq": "==", "ne": "!=", "le": "<=", "lt": "<", "ge": ">=", "gt": ">"}
_METHODS = {"view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "rsqrt", "cos", "sin", "tanh"}
_METHODS |= {"split", "chunk", "softmax", "cumsum", "diff", "detach", "contiguous", "sigmoid", "sum", "type_as", "topk"}
_FUNCTIONS = {"linear": "F.linear", "layer_norm": "F.layer_norm", "silu": "F.silu", "gelu": "F.gelu", "relu": "F.relu"}
_FUNCTIONS |= {"cat": "torch.cat", "arange": "torch.arange", "addmm": "torch.addmm", "rms_norm": "F.rms_norm"}
_HEADER = '''"""The blocks of a {kind} model, written by 'muletrain trace'.

{names}
A block takes the values of the block before, and tables: values that follow from the shape of the microbatch alone.
``masks`` is the identity of the microbatch whose dropout is drawn (None: no dropout), ``site`` numbers its first
dropout, and ``sequences`` counts the sequences of the microbatch.
"""

import operator

import torch
import torch.nn.functional as F
from torch import nn

from muletrain.model.traced import operators

inf = float("inf")

'''


def source_of(model: TracedModel) -> str:
    """The Python source of all distinct parts of ``model``, and of its tables."""
    names = class_names(model)
    classes: dict[str, Part] = {}
    for name, part in zip(names, model.parts, strict=True):
        classes.setdefault(name, part)
    listed = "\n".join(f"{name}: {_of(names, name)}" for name in classes)
    text = _HEADER.format(kind=model.config.get("model_type"), names=f"{listed}\n")
    bodies = [_class(model, name, part) for name, part in classes.items()]
    return text + "\n\n".join([*bodies, _tables(model)])


def class_names(model: TracedModel) -> list[str]:
    """The name of each part's class: equal parts have one."""
    known: dict[int, str] = {}
    for number, part in enumerate(model.parts):
        if number in (0, len(model.parts) - 1):
            name = "Embedding" if number == 0 else "Head"
        else:
            name = f"Block{len([n for n in known.values() if n.startswith('Block')]) or ''}"
        known.setdefault(id(part.function), name)
    return [known[id(part.function)] for part in model.parts]


def _of(names: list[str], name: str) -> str:
    layers = [k - 1 for k, n in enumerate(names) if n == name]
    if name in ("Embedding", "Head"):
        return "before the first block" if name == "Embedding" else "after the last block"
    return f"layers {', '.join(map(str, layers))}"


def _class(model: TracedModel, name: str, part: Part) -> str:
    weights = short_names(list(part.weights))
    writer = _Writer(part.function.graph)
    drawn = [n.name for n in part.function.graph.find_nodes(op="placeholder") if n.users][-3:]
    inputs = [f"x_{k}" if len(part.inputs) > 1 else "x" for k in range(len(part.inputs))]
    tables = table_names(model, part)
    given = [*(f"self.{w}" for w in weights), *inputs, *tables, "x.device" if inputs == ["x"] else "x_0.device"]
    body = writer.body([*given, "masks", "site", "sequences"], single=len(part.outputs) == 1)
    optional = {"masks": "masks=None", "site": "site=0", "sequences": "sequences=1"}
    extra = [text for name, text in optional.items() if name in drawn and name not in tables]
    shapes = [model.shapes[w] for w in part.weights]
    return "\n".join(
        [
            f"class {name}(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *(
                f"        self.{w} = nn.Parameter(torch.empty({', '.join(map(str, s))}))"
                for w, s in zip(weights, shapes, strict=True)
            ),
            "",
            f"    def forward(self, {', '.join([*inputs, *tables, *extra])}):",
            *(f"        {line}" for line in body),
            "",
        ]
    )


def short_names(weights: list[str]) -> list[str]:
    """The ends of dotted names, long enough to tell them apart."""
    parts = [re.sub(r"^.*?\.\d+\.", "", name).split(".") for name in weights]
    for length in range(1, max(map(len, parts), default=0) + 1):
        found = ["_".join(p[-length:]) for p in parts]
        if len(set(found)) == len(found) and not {"weight", "bias"} & set(found):
            return found
    return [name.replace(".", "_") for name in weights]


def table_names(model: TracedModel, part: Part) -> list[str]:
    """What the tables of a part are called in all classes."""
    called = dict(zip(model.tables, _called_tables(model), strict=True))
    return [called[name] for name in part.tables]


def _called_tables(model: TracedModel) -> list[str]:
    """Names of all tables, after what they hold."""
    outputs = next(node for node in model.table_function.graph.nodes if node.op == "output").args[0]
    found = list[str]()
    for number, node in enumerate(outputs):
        value = node.meta.get("val")
        kind = "mask" if isinstance(value, Tensor) and value.dtype == torch.bool else "table"
        found.append(node.name if node.op == "placeholder" else f"{kind}_{number}")
    return found


def _tables(model: TracedModel) -> str:
    constants = [re.sub(r"\W", "_", name.rpartition(".")[2]) for name in model.constants]
    writer = _Writer(model.table_function.graph)
    body = writer.body([*constants, "sequences", "tokens", "device"], single=False)
    names = ", ".join(_called_tables(model))
    arguments = ", ".join([*constants, "sequences", "tokens", "device"])
    says = f'    """Returns ({names})."""'
    return "\n".join([f"def tables({arguments}):", says, *(f"    {line}" for line in body), ""])


class _Writer:
    """Writes the lines of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._names = graph, dict[fx.Node, str]()
        self._used: Counter[str] = Counter()

    def body(self, arguments: list[str], *, single: bool) -> list[str]:
        """Statements, with a comment where a module begins. ``single``: the only output is returned as it is."""
        lines, before = list[str](), ""
        given = iter(arguments)
        for node in self._graph.nodes:
            if node.op == "placeholder":
                self._names[node] = next(given)
            elif node.op == "output":
                values = [self._text(v) for v in node.args[0]]
                lines.append(f"return {values[0]}" if single else f"return ({', '.join(values)},)")
            elif (same := self._unchanged(node)) is not None:
                self._names[node] = self._names[same]
            elif node.target is operator.add and isinstance(node.args[1], int):
                self._names[node] = self._expression(node)  # the number of a dropout
            else:
                module = re.sub(r"^.*?\.\d+(\.|$)", "", path_of(node))
                if module not in (before, "the model", ""):
                    lines.append(f"# {module}")
                    before = module
                text = self._expression(node)
                self._names[node] = self._name(node)
                lines.append(f"{self._names[node]} = {text}")
        return lines

    def _unchanged(self, node: fx.Node) -> fx.Node | None:
        """The input of a node that gives it on as it is."""
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
            return None
        name, ours, before = _operator(node), node.meta.get("val"), first.meta.get("val")
        if not isinstance(ours, Tensor) or not isinstance(before, Tensor):
            return None
        whole = name == "slice" and node.args[2:] == (0, _END)
        casts = name in ("to", "type_as") and ours.dtype == before.dtype
        return first if whole or casts or name == "alias" else None

    def _name(self, node: fx.Node) -> str:
        """After the innermost module, or the operator."""
        module = path_of(node).rpartition(".")[2]
        kind = _operator(node).strip("_") or "value"
        stem = module if kind in ("linear", "addmm") and not module.isdigit() else kind
        stem = re.sub(r"\W", "_", stem)
        stem = f"{stem}_" if stem in ("and", "or", "not", "in", "is") else stem
        self._used[stem] += 1
        return f"{stem}_{self._used[stem]}"

    def _expression(self, node: fx.Node) -> str:
        name, arguments = _operator(node), [self._text(a) for a in node.args]
        named = [f"{k}={self._text(v)}" for k, v in node.kwargs.items() if v is not None and k != "pin_memory"]
        if node.target is operator.getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        if name in _INFIX and len(arguments) == 2 and not named:
            return f"{arguments[0]} {_INFIX[name]} {arguments[1]}"
        if name == "neg":
            return f"-{arguments[0]}"
        if name == "slice" and len(arguments) == 4:
            x, axis, begin, end = arguments
            if axis.isdigit():
                return f"{x}[{':, ' * int(axis)}{begin if begin != '0' else ''}:{end if end != str(_END) else ''}]"
        if name == "embedding":
            return f"F.embedding({', '.join([arguments[1], arguments[0], *arguments[2:3]])})"
        if name in _METHODS:
            return f"{arguments[0]}.{name}({', '.join([*arguments[1:], *named])})"
        if name in _FUNCTIONS:
            rest = arguments[:5] if name == "layer_norm" else arguments
            return f"{_FUNCTIONS[name]}({', '.join([*rest, *named])})"
        return f"{_called(node)}({', '.join([*arguments, *named])})"

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, list | tuple):
            inside = ", ".join(map(self._text, value))
            return f"[{inside}]"
        return repr(value)


def _operator(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", ""))


def _called(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target.namespace}.{target._schema.name.partition('::')[2]}.{target._overloadname}"
    if getattr(target, "__module__", "") == operators.__name__:
        return f"operators.{getattr(target, '__name__', '')}"
    return f"operator.{getattr(target, '__name__', '')}"


def table_rows(model: TracedModel) -> Iterator[dict[str, Any]]:
    """A row for each part: its class, its modules, and its costs."""
    for number, (name, part) in enumerate(zip(class_names(model), model.parts, strict=True)):
        last = len(model.parts) - 1
        where = "before" if number == 0 else "after" if number == last else str(number - 1)
        cost = model.costs[number]
        yield {
            "part": where,
            "class": name,
            "parameters": cost.params,
            "flops_per_token": cost.flops(model.context),
            "kept_bytes_per_token": cost.kept_bytes,
            "operators": len(part.nodes),
            "lines": part.code.count("\n"),
        }
