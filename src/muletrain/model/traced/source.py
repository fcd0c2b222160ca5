"""Writes a traced chain as Python that people read: one class for each distinct part, and a table of parts with costs.

The file is an ordinary module that needs torch and muletrain's counter-hash dropout only. Nothing here is ever imported
by a run: it is for reading, changing and comparing.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from muletrain.model.traced import operators
from muletrain.model.traced.export import path_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from muletrain.model.traced.chain import TracedModel
    from muletrain.model.traced.cutting import Part

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
_KEEPS_VALUES = {"add", "mul", "to", "type_as", "expand", "unsqueeze", "detach", "slice", "view", "reshape"}
_DROPS = {"masks": "dropout_key", "site": "site", "sequences": "sequences"}
_OPTIONAL = {"dropout_key": "dropout_key=None", "site": "site=0", "sequences": "sequences=1"}
_SAYS = {
    "operators.attention": "(q [B, H, T, E], k, v, mask, probability, dropout_key, site) -> [B, H, T, E]\n"
    "    softmax(q @ k^T * scale) @ v. True in the mask [B, 1, T, T]: the row's token attends to the column's.",
    "operators.dropout": "(x, probability, dropout_key, site, sequences) -> like x",
    "operators.histogram": "(x, bins, low, high) -> float32 [bins]: how many numbers of x lie in each bin",
    "torch.ops.transformers.grouped_mm_fallback.default": "(x [N, E], w [G, E, F], ends [G]) -> [N, F]\n"
    "    Rows ends[g - 1] to ends[g] of x times w[g].",
}
_IMPORTS = {
    r"math\.": "import math",
    r"operator\.": "import operator",
    r"torch\.": "\nimport torch",
    r"F\.": "import torch.nn.functional as F",
    r"torch\.ops\.transformers\.": "import transformers.integrations.moe  # holds torch.ops.transformers",
    r"nn\.": "from torch import nn",
    r"operators\.": "\nfrom muletrain.model.traced import operators",
}
_HEADER = '''"""The blocks of a {kind} model, written by 'muletrain trace', as they compute in float32.

{names}

Parameters are empty until you load them: a comment names each as the model of transformers does (N: the layer). A block
takes the values of the block before, and tables: values that follow from the shape of the microbatch alone.
{dropout}

The parts make a chain, from input_ids to the loss of targets, the tokens that follow (both int64 [sequences, tokens]){constants}:

{chain}
{operators}"""

{imports}


'''


@dataclass(frozen=True)
class _Class:
    """One distinct part as it is written."""

    part: Part
    """The first of those that are equal."""
    inputs: list[str]
    tables: list[int]
    """Which of the part's tables are used."""
    extra: list[str]
    """What its dropouts take."""
    sites: int
    """How many dropouts it has."""
    text: str


def source_of(model: TracedModel) -> str:
    """The Python source of all distinct parts of ``model``, and of its tables."""
    names = class_names(model)
    classes: dict[str, _Class] = {}
    for name, part in zip(names, model.parts, strict=True):
        if name not in classes:
            classes[name] = _class(model, name, part, names.count(name))
    body = "\n\n".join([*(c.text for c in classes.values()), _tables(model)])
    dropout = "There is no dropout in it."
    if any(c.sites for c in classes.values()):
        dropout = (
            "``dropout_key`` is the identity of the microbatch whose dropout is drawn, a muletrain.model.dropout.Masks (None: no\n"
            "dropout). ``site`` numbers a part's first dropout, and no two dropouts may have the same number. Dropouts: "
            + ", ".join(f"{c.sites} in {name}" for name, c in classes.items())
            + "."
        )
    known = "; constants: the model's buffers by name" if _constants(model)[1] else ""
    chain = "\n".join(f"    {line}" for line in _chain(model, names, classes))
    used = [f"{name}{text}" for name, text in _SAYS.items() if name in body]
    code = f"torch. nn. {body}"
    return (
        _HEADER.format(
            kind=model.config.get("model_type"),
            names="\n".join(f"{name}: {_of(names, name)}" for name in classes),
            dropout=dropout,
            constants=known,
            chain=chain,
            operators="".join(f"\n{line}" for line in used) + ("\n" if used else ""),
            imports="\n".join(line for find, line in _IMPORTS.items() if re.search(rf"(?<![.\w]){find}", code)).strip(),
        )
        + body
    )


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


def _chain(model: TracedModel, names: list[str], classes: Mapping[str, _Class]) -> list[str]:
    """Code that runs all parts one after the other."""
    parts, tables = model.parts, _called_tables(model)
    called, kinds = dict(zip(model.tables, tables, strict=True)), names[1:-1]
    plain = all(a.outputs == b.inputs and len(b.inputs) == 1 for a, b in itertools.pairwise(parts))
    values: dict[str, str] = dict(zip(parts[0].inputs, ["input_ids"], strict=False))
    for name in (name for part in parts[:-1] for name in part.outputs):
        values[name] = "x" if plain else f"x_{len(values)}"
    values[parts[-1].outputs[0]] = "logits"
    sites = [part.site for part in parts]
    step = sites[2] - sites[1]
    even = all(site == sites[1] + step * k for k, site in enumerate(sites[1:-1]))

    def call(number: int, function: str) -> str:
        part, written = parts[number], classes[names[number]]
        layer = f"{sites[1]} + {step} * layer" if even and function == "block" else sites[number]
        given = {"dropout_key": "dropout_key", "site": f"site={layer}", "sequences": "sequences=sequences"}
        arguments = [values[n] for n in part.inputs] + [called[part.tables[k]] for k in written.tables]
        made = ", ".join(values[n] for n in part.outputs)
        return f"{made} = {function}({', '.join([*arguments, *(given[n] for n in written.extra)])})"

    layers: dict[str, list[int]] = {}
    for layer in range(len(kinds)):
        layers.setdefault(call(1 + layer, "block"), []).append(layer)
    runs = " + ".join(f"[{kind}] * {len(list(run))}" for kind, run in itertools.groupby(kinds))
    buffers = [f'constants["{name}"]' for name in _constants(model)[1]]
    return [
        f"embedding, blocks, head = {names[0]}(), [kind() for kind in {runs}], {names[-1]}()",
        "# load the parameters here",
        "sequences, tokens = input_ids.shape",
        f"{_listed(tables)} = tables({', '.join([*buffers, 'sequences', 'tokens', 'input_ids.device'])})",
        call(0, "embedding"),
        "for layer, block in enumerate(blocks):",
        *(f"    {text if len(layers) == 1 else f'if layer in {which}: {text}'}" for text, which in layers.items()),
        call(len(parts) - 1, "head"),
        "loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())",
    ]


def _class(model: TracedModel, name: str, part: Part, count: int) -> _Class:
    weights = short_names(list(part.weights))
    holders = {node.name: node for node in part.function.graph.find_nodes(op="placeholder")}
    inputs = [f"x_{k}" if len(part.inputs) > 1 else "x" for k in range(len(part.inputs))]
    if name == "Embedding" and inputs == ["x"] and not holders["x_0"].meta["val"].is_floating_point():
        inputs = ["input_ids"]
    tables = table_names(model, part)
    writer = _Writer(part.function.graph)
    device = f"{inputs[0]}.device" if inputs else "None"
    body = writer.body([*(f"self.{w}" for w in weights), *inputs, *tables, device, *_DROPS.values()])
    used = [k for k, table in enumerate(tables) if table in writer.read]
    extra = [n for n in _DROPS.values() if n in writer.read and n not in tables]
    arguments = [*inputs, *(tables[k] for k in used), *(_OPTIONAL[n] for n in extra)]
    drops = [n for n in part.function.graph.nodes if n.target is operators.dropout or (_attends(n) and n.args[4])]
    values = [holders[f"x_{k}"] for k in range(len(inputs))]
    known = [f"{n}: {_type(model, v)}" for n, v in zip(inputs, values, strict=True)]
    made = ", ".join(_type(model, v) for v in _outputs(part.function.graph))
    lines = [
        f"class {name}(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(
            f"        self.{w} = nn.Parameter(torch.empty({', '.join(map(str, model.shapes[full]))}))  # "
            + (re.sub(r"\.\d+\.", ".N.", full, count=1) if count > 1 else full)
            for w, full in zip(weights, part.weights, strict=True)
        ),
        "",
        f"    def forward(self, {', '.join(arguments)}):",
        f'        """{", ".join(known)} -> {made}"""',
        *(f"        {line}" for line in body),
        "",
    ]
    return _Class(part, inputs, used, extra, len(drops), "\n".join(lines))


def short_names(weights: list[str]) -> list[str]:
    """The ends of dotted names, long enough to tell them apart."""
    parts = [re.sub(r"^.*?\.\d+\.", "", name).split(".") for name in weights]
    for length in range(1, max(map(len, parts), default=0) + 1):
        found = ["_".join(p[-length:]) for p in parts]
        if len(set(found)) == len(found) and not {"weight", "bias"} & set(found):
            return found
    return [name.replace(".", "_") for name in weights]


def _listed(values: Sequence[str]) -> str:
    """A tuple of any length."""
    return ", ".join(values) if len(values) > 1 else f"({''.join(f'{v},' for v in values)})"


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    found: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    return list(found)


def _type(model: TracedModel, node: fx.Node) -> str:
    """The dtype and shape of a value, whose symbols are those of the model's inputs."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return "int"
    inputs = next(n for n in model.parts[0].function.graph.nodes if n.name == "x_0").meta["val"]
    sizes = dict(zip(map(str, inputs.shape), ("sequences", "tokens"), strict=False))
    shape = re.sub(r"\bs\d+\b", lambda m: sizes.get(m[0], m[0]), str(list(value.shape)))
    return f"{str(value.dtype).removeprefix('torch.')} {shape}"


def table_names(model: TracedModel, part: Part) -> list[str]:
    """What the tables of a part are called in all classes."""
    called = dict(zip(model.tables, _called_tables(model), strict=True))
    return [called[name] for name in part.tables]


def _called_tables(model: TracedModel) -> list[str]:
    """Names of all tables, after what they hold."""
    found = list[str]()
    for number, node in enumerate(_outputs(model.table_function.graph)):
        name = node.name if node.op == "placeholder" else _held(node, number)
        again = sum(re.fullmatch(rf"{name}(_\d+)?", other) is not None for other in found)
        found.append(f"{name}_{again + 1}" if again else name)
    return found


def _held(node: fx.Node, number: int) -> str:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        factors: list[Any] = [node]
        while products := [f for f in factors if isinstance(f, fx.Node) and f.target is operator.mul]:
            factors = [f for f in factors if f is not products[0]] + list(products[0].args)
        times = math.prod(f for f in factors if isinstance(f, int))
        if sorted(f.name for f in factors if isinstance(f, fx.Node)) == ["sequences", "tokens"]:
            return "rows" if times == 1 else f"rows_times_{times}"
        return f"number_{number}"
    if value.dtype == torch.bool:
        return "attention_mask"
    if value.dtype == torch.int64 and value.dim() == 2 and value.shape[0] == 1:
        return "positions"
    while _operator(node) in _KEEPS_VALUES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return _operator(node) if _operator(node) in ("cos", "sin") else f"table_{number}"


def _constants(model: TracedModel) -> tuple[list[str], list[str]]:
    """All constants of the tables as they are called, and the full names of those that are used."""
    called = [re.sub(r"\W", "_", name) for name in short_names(list(model.constants))]
    holders = model.table_function.graph.find_nodes(op="placeholder")
    return called, [name for name, node in zip(model.constants, holders, strict=False) if node.users]


def _tables(model: TracedModel) -> str:
    graph, called = model.table_function.graph, _called_tables(model)
    constants, used = _constants(model)
    sizes = ["sequences", "tokens", "device"]
    body = _Writer(graph).body([*constants, *sizes], called)
    holders = zip(model.constants, constants, graph.find_nodes(op="placeholder"), strict=False)
    taken = {name: f"{name}: {_type(model, node)}, {full}" for full, name, node in holders if full in used}
    made = [f"{name}: {_type(model, node)}" for name, node in zip(called, _outputs(graph), strict=True)]
    says = ['"""Returns what the parts take, in this order:', "", *(f"    {line}" for line in made)]
    if taken:
        says += ["", "from buffers of the model, on the device:", "", *(f"    {line}" for line in taken.values())]
    lines = [*says, '"""', *body]
    return "\n".join([f"def tables({', '.join([*taken, *sizes])}):", *(f"    {x}" if x else x for x in lines), ""])


class _Writer:
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
                lines.append(f"return {values[0] if single else _listed([name for name, _ in named])}")
            elif (same := self._unchanged(node)) is not None:
                self._names[node] = self._names[same]
            elif node.target is operator.add and getattr(node.args[0], "name", "") == "site":
                self._names[node] = f"site + {node.args[1]}"  # the number of a dropout
            elif node not in self._names:
                text, known = self._expression(node), {self._names[n] for n in node.all_input_nodes}
                self._names[node] = wanted.get(node) or self._name(node)
                if not module and _operator(node) == "add" and known & stream:
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
        for node, name in zip(_outputs(self._graph), results, strict=False):
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
        return _listed([f"{name}_{end}" if f"{name}_{end}" in found else "_" for end in ends])

    def _unchanged(self, node: fx.Node) -> fx.Node | None:
        """The input of a node that gives it on as it is."""
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
            return None
        name, ours, before = _operator(node), node.meta.get("val"), first.meta.get("val")
        if not isinstance(ours, Tensor) or not isinstance(before, Tensor) or ours.dtype != before.dtype:
            return None
        if name in ("to", "type_as", "alias"):
            return first
        if str(ours.shape) != str(before.shape):  # sizes may be symbols
            return None
        if name in ("slice", "view", "reshape", "expand"):
            return first
        neutral = (
            1 if name in ("mul", "div") else 0 if name in ("add", "sub") and not ours.is_floating_point() else None
        )
        other = node.args[1] if len(node.args) == 2 else None
        equal = neutral is not None and not isinstance(other, fx.Node) and other == neutral
        return first if equal and not node.kwargs and not self._copies else None

    def _name(self, node: fx.Node) -> str:
        """After the innermost module, or the operator."""
        module = path_of(node).rpartition(".")[2]
        kind = _operator(node).strip("_") or "value"
        stem = module if kind in ("linear", "addmm") and not module.isdigit() else kind
        stem = re.sub(r"\W", "_", stem)
        self._used[stem] += 1
        name = f"{stem}_{self._used[stem]}"
        return self._name(node) if name in self._taken else name

    def _expression(self, node: fx.Node) -> str:
        name, given = _operator(node), list(node.args)
        if _writes(node) and _alone(node):
            name = name.removesuffix("_")
        if _attends(node) and not given[4]:
            given[5:7] = None, 0  # what it does not draw with
        first = next((k for k, a in enumerate(given) if k and isinstance(a, bool)), len(given))
        arguments, named = [self._text(a) for a in given[:first]], dict(node.kwargs)
        if isinstance(node.target, torch._ops.OpOverload):
            named |= {a.name: v for a, v in zip(node.target._schema.arguments[first:], given[first:], strict=False)}
        skipped = ("pin_memory", "layout", "cudnn_enable")
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
            return f"F.embedding({', '.join([arguments[1], arguments[0], *arguments[2:3]])})"
        if name in ("mean", "sum") and len(arguments) == 2 and len(given[1]) == 1:
            arguments[1] = self._text(given[1][0])
        if name in _METHODS:
            return f"{arguments[0]}.{name}({', '.join([*arguments[1:], *keywords])})"
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
    others = [a.meta["val"] for a in node.args[1:] if isinstance(a, fx.Node)]
    alike = all(isinstance(o, Tensor) and o.dtype == written.meta["val"].dtype for o in others)
    seen = [u for u in written.users if u is not node and (_aliases(u) or not u < node)]
    return alike and not seen and maker.op == "call_function" and not _aliases(maker)


def _aliases(node: fx.Node) -> bool:
    """May a node's result lie in the memory of its input?"""
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else []
    return node.op == "output" or any(r.alias_info is not None for r in returns)


def _attends(node: fx.Node) -> bool:
    return node.target is operators.attention


def _operator(node: fx.Node) -> str:
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
