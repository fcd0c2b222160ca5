"""Writes a traced chain as Python that people read: one class for each distinct part, and a table of parts with costs.

The file is an ordinary module that needs torch, ``operators``, and transformers where the model calls an operator of its
own. Nothing here is ever imported by a run: it is for reading, changing and comparing.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from muletrain.model.traced import operators
from muletrain.model.traced.statements import Writer, listed, operator_of, outputs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from muletrain.model.traced.chain import TracedModel
    from muletrain.model.traced.cutting import Part

_KEEPS_VALUES = {"add", "mul", "to", "type_as", "expand", "unsqueeze", "detach", "slice", "view", "reshape"}
_DROPS = {"dropout_key": "None", "site": "0", "sequences": "1"}
"""What dropouts take, and its default."""
_SAYS = {
    "operators.attention": "(q [B, H, T, E], k, v, mask, probability, dropout_key, site, scale) -> [B, H, T, E]\n"
    "  softmax(q @ k^T * scale) @ v. True in the mask [B, 1, T, T]: the row's token attends to the column's.",
    "operators.dropout": "(x, probability, dropout_key, site, sequences) -> like x",
    "operators.histogram": "(x, bins, low, high) -> float32 [bins]: how many numbers of x lie in each bin",
    "operators.unchanged": "(x, *weights) -> x. The weights are frozen: their gradients are zeros.",
    "torch.ops.transformers.grouped_mm_fallback.default": "(x [N, E], w [G, E, F], ends [G]) -> [N, F]\n"
    "  Rows ends[g - 1] to ends[g] of x, times w[g].",
}
_NO_DROPOUT = "It has no dropout."
_DROPOUT = """``dropout_key`` is the identity of the microbatch whose dropout is drawn, a muletrain.model.dropout.Masks
(None: no dropout). ``site`` numbers a part's first dropout, and no two dropouts have one number. Dropouts: {counts}."""
_PARAMETERS = """Parameters are empty until you load them: a comment names each as the {maker} (N: the layer){older}. A block takes
the values of the block before, and tables: values that follow from the shape of the microbatch alone."""
_TOKENS = "``input_ids`` and ``targets`` (the tokens that follow) are int64\n[sequences, tokens]"
_CONSTANTS = """``constants`` maps names to buffers, as dict(module.named_buffers()) of the {maker} does: they follow from
its configuration, and are not trained."""
_CAUSAL = "torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril().expand(sequences, 1, -1, -1)"
_HEADER = '''"""The blocks of {kind}, written by 'muletrain trace', as they compute in float32.

{names}

{parameters}
{dropout}

The parts make a chain. Of one microbatch, {given}.{constants}

{chain}

{operators}"""

{first}import torch
import torch.nn.functional as F
{last}

'''


@dataclass(frozen=True)
class _Class:
    """One distinct part as it is written."""

    tables: list[int]
    """Which of the part's tables are used."""
    drops: list[str]
    """What its dropouts take."""
    count: int
    """Of its dropouts."""
    text: str


def source_of(model: TracedModel) -> str:
    """The Python source of all distinct parts of ``model``, and of its tables."""
    names = class_names(model)
    parts = {name: part for name, part in reversed(list(zip(names, model.parts, strict=True)))}
    classes = {name: _class(model, name, parts[name], names.count(name)) for name in dict.fromkeys(names)}
    body = "\n\n".join([*(c.text for c in classes.values()), *([_tables(model)] if model.tables else [])])
    counts = ", ".join(f"{c.count} in {name}" for name, c in classes.items())
    dropout = _DROPOUT.format(counts=counts) if any(c.count for c in classes.values()) else _NO_DROPOUT
    last = "import transformers.integrations.moe  # has torch.ops.transformers\n" * ("ops.transformers" in body)
    last += "from torch import nn\n"
    last += "\nfrom muletrain.model.traced import operators\n" * ("operators." in body)
    text = _HEADER.format(
        kind=model.factory or f"a {model.config.get('model_type')} model",
        parameters=textwrap.fill(_parameters(model), 120),
        given=_given(model),
        constants=_said_of_constants(model),
        names="\n".join(f"{name}: {_of(names, name)}" for name in classes),
        dropout=textwrap.fill(dropout, 120),
        chain="\n".join(f"    {line}" for line in _chain(model, names, classes)),
        operators="".join(f"{name}{text}\n" for name, text in _SAYS.items() if name in body),
        first="".join(f"import {m}\n" for m in ("math", "operator") if re.search(rf"(?<![.\w]){m}\.", body)),
        last=last,
    )
    return text + body


def _parameters(model: TracedModel) -> str:
    if model.own_loss:
        return _PARAMETERS.format(maker="module does", older="")
    older = ", and old checkpoints may name or split it otherwise"
    return _PARAMETERS.format(maker="model of transformers does", older=older)


def _said_of_constants(model: TracedModel) -> str:
    if not any(node.users for _, _, node in _constants(model)):
        return ""
    maker = "module" if model.own_loss else "model of transformers"
    return "\n" + textwrap.fill(_CONSTANTS.format(maker=maker), 120)


def _given(model: TracedModel) -> str:
    if not model.own_loss:
        return _TOKENS
    lead = "sequences, tokens" if model.inputs.shape is None else "sequences"
    of = [f"{k.dtype} [{', '.join([lead, *map(str, k.shape or ())])}]" for k in (model.inputs, model.targets)]
    said = "" if model.inputs.shape is None else "\n(``sequences``: how many samples)"
    return f"``inputs`` are {of[0]} and ``targets`` {of[1]}{said}"


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
    made = {name for part in parts[:-1] for name in part.outputs}
    taken = [tuple(n for n in part.inputs if n in made) for part in parts[1:]]
    plain = all(a.outputs == b and len(b) == 1 for a, b in zip(parts, taken, strict=False))
    own, first = model.own_loss, "inputs" if model.own_loss else "input_ids"
    values: dict[str, str] = dict.fromkeys(parts[-1].inputs, "targets") | dict.fromkeys(parts[0].inputs, first)
    for number, name in enumerate(name for part in parts[:-1] for name in part.outputs):
        values[name] = "x" if plain else f"x_{number + 1}"
    values[parts[-1].outputs[0]] = "loss" if own else "logits"
    sites = [part.site for part in parts]
    step = sites[2] - sites[1]
    even = all(site == sites[1] + step * k for k, site in enumerate(sites[1:-1]))

    def call(number: int, function: str) -> str:
        part, written = parts[number], classes[names[number]]
        layer = f"{sites[1]} + {step} * layer" if even and function == "block" else str(sites[number])
        given = {"dropout_key": "dropout_key", "site": layer, "sequences": "sequences"}
        arguments = [values[n] for n in part.inputs] + [called[part.tables[k]] for k in written.tables]
        made = ", ".join(values[n] for n in part.outputs)
        return f"{made} = {function}({', '.join([*arguments, *(f'{n}={given[n]}' for n in written.drops)])})"

    layers: dict[str, list[int]] = {}
    for layer in range(len(kinds)):
        layers.setdefault(call(1 + layer, "block"), []).append(layer)
    runs = " + ".join(f"[{kind}] * {len(list(run))}" for kind, run in itertools.groupby(kinds))
    buffers = {name: f'{name} = constants["{full}"]' for name, full, node in _constants(model) if node.users}
    return [
        f"embedding, blocks, head = {names[0]}(), [kind() for kind in {runs}], {names[-1]}()",
        *_ties(model),
        "# load the parameters here",
        *buffers.values(),
        f"sequences, tokens = {first}.shape" if model.inputs.shape is None else f"sequences, tokens = len({first}), 1",
        *(
            [f"{listed(tables)} = tables({', '.join([*buffers, 'sequences', 'tokens', f'{first}.device'])})"]
            if tables
            else []
        ),
        call(0, "embedding"),
        "for layer, block in enumerate(blocks):",
        *(f"    {text if len(layers) == 1 else f'if layer in {which}: {text}'}" for text, which in layers.items()),
        call(len(parts) - 1, "head"),
        *([] if own else ["loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())"]),
    ]


def _ties(model: TracedModel) -> Iterator[str]:
    """Code that makes parts share their tied parameters."""
    parts, last = model.parts, len(model.parts) - 1
    for name, tied in model.tied.items():
        where = [
            f"{'embedding' if k == 0 else 'head' if k == last else f'blocks[{k - 1}]'}."
            f"{short_names(list(parts[k].weights))[parts[k].weights.index(name)]}"
            for k in tied.parts
        ]
        yield from (f"{other} = {where[0]}  # tied" for other in where[1:])


def _class(model: TracedModel, name: str, part: Part, layers: int) -> _Class:
    weights, graph = short_names(list(part.weights)), part.function.graph
    holders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    inputs = [f"x_{k}" if len(part.inputs) > 1 else "x" for k in range(len(part.inputs))]
    if name == "Embedding" and inputs == ["x"]:
        inputs = ["inputs" if model.own_loss else "input_ids"]
    known = {n for other in model.parts[:-1] for n in (*other.inputs, *other.outputs)}
    if name == "Head" and part.inputs and part.inputs[-1] not in known:
        inputs[-1] = "targets"
    called = dict(zip(model.tables, _called_tables(model), strict=True))
    tables = [called[table] for table in part.tables]
    writer = Writer(graph)
    device = f"{inputs[0]}.device" if inputs else "None"
    body = writer.body([*(f"self.{w}" for w in weights), *inputs, *tables, device, *_DROPS])
    used = [k for k, table in enumerate(tables) if table in writer.read]
    drops = [n for n in _DROPS if n in writer.read and n not in tables]
    arguments = [*inputs, *(tables[k] for k in used), *(f"{n}={_DROPS[n]}" for n in drops)]
    count = sum(
        n.target is operators.dropout or (n.target is operators.attention and n.args[4] != 0) for n in graph.nodes
    )
    values = [holders[f"x_{k}"] for k in range(len(inputs))]
    says = [f"{n}: {_type(model, v)}" for n, v in zip(inputs, values, strict=True)]
    made = ", ".join(_type(model, v) for v in outputs_of(graph))
    lines = [
        f"class {name}(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(
            f"        self.{w} = nn.Parameter(torch.empty({', '.join(map(str, model.shapes[full]))}))  # "
            + (re.sub(r"\.\d+\.", ".N.", full, count=1) if layers > 1 else full)
            for w, full in zip(weights, part.weights, strict=True)
        ),
        "",
        f"    def forward(self, {', '.join(arguments)}):",
        f'        """{", ".join(says)} -> {made}"""',
        *(f"        {line}" for line in body),
        "",
    ]
    return _Class(used, drops, count, "\n".join(lines))


def short_names(weights: list[str]) -> list[str]:
    """The ends of dotted names, long enough to tell them apart."""
    parts = [re.sub(r"^.*?\.\d+\.", "", name).split(".") for name in weights]
    for length in range(1, max(map(len, parts), default=0) + 1):
        found = [_identifier(p[-length:]) for p in parts]
        if len(set(found)) == len(found) and not {"weight", "bias"} & set(found):
            return found
    return [_identifier(name.split(".")) for name in weights]


def _identifier(path: list[str]) -> str:
    """Members of an ``nn.Sequential`` have numbers for names."""
    name = "_".join(path)
    return f"module_{name}" if name[0].isdigit() else name


def _type(model: TracedModel, node: fx.Node) -> str:
    """The dtype and shape of a value, whose symbols are those of the model's inputs."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return "int"
    inputs = next(n for n in model.parts[0].function.graph.nodes if n.name == "x_0").meta["val"]
    sizes = dict(zip(map(str, inputs.shape), ("sequences", "tokens"), strict=False))
    shape = re.sub(r"\bs\d+\b", lambda m: sizes.get(m[0], m[0]), str(list(value.shape)))
    return f"{str(value.dtype).removeprefix('torch.')} {shape}"


def _called_tables(model: TracedModel) -> list[str]:
    """Names of all tables, after what they hold."""
    found = list[str]()
    for number, node in enumerate(outputs_of(model.table_function.graph)):
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
    while operator_of(node) in _KEEPS_VALUES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return operator_of(node) if operator_of(node) in ("cos", "sin") else f"table_{number}"


def _constants(model: TracedModel) -> list[tuple[str, str, fx.Node]]:
    """What the tables follow from besides sizes: what each is called, its full name, and its placeholder."""
    called = [re.sub(r"\W", "_", name) for name in short_names(list(model.constants))]
    return list(zip(called, model.constants, model.table_function.graph.find_nodes(op="placeholder"), strict=False))


def _tables(model: TracedModel) -> str:
    graph, called, constants = model.table_function.graph, _called_tables(model), _constants(model)
    sizes = ["sequences", "tokens", "device"]
    causal = model.causal_masks
    plain = {n: _CAUSAL for n, name in zip(outputs_of(graph), model.tables, strict=True) if name in causal}
    body = Writer(graph, plain).body([*(name for name, _, _ in constants), *sizes], called)
    taken = {name: f"{name}: {_type(model, node)}, {full}" for name, full, node in constants if node.users}
    says = [
        f"{name}: {_type(model, node)}{f', causal up to {model.context} tokens' if node in plain else ''}"
        for name, node in zip(called, outputs_of(graph), strict=True)
    ]
    if taken:
        says = [*says, "", "It takes buffers of the model:", *taken.values()]
    lines = ['"""Returns in this order:', "", *says, '"""', *body]
    return "\n".join([f"def tables({', '.join([*taken, *sizes])}):", *(f"    {x}" if x else x for x in lines), ""])


def table_rows(model: TracedModel) -> Iterator[dict[str, Any]]:
    """A row for each part: its class, its modules, and its costs."""
    for number, (name, part) in enumerate(zip(class_names(model), model.parts, strict=True)):
        last = len(model.parts) - 1
        where = "before" if number == 0 else "after" if number == last else str(number - 1)
        cost = model.outline.parts[number]
        yield {
            "part": where,
            "class": name,
            "parameters": cost.params,
            "flops_per_token": cost.flops(model.context),
            "kept_bytes_per_token": cost.kept_bytes,
            "operators": len(part.nodes),
            "lines": part.code.count("\n"),
        }
