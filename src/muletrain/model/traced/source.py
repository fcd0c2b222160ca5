"""Writes a traced chain as Python that people read: one class for each distinct part, and a table of parts with costs.

The file is an ordinary module that needs torch, ``operators``, and transformers where the model calls an operator of its
own. Nothing here is ever imported by a run: it is for reading, changing and comparing.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muletrain.model.traced import operators
from muletrain.model.traced.names import (
    NUMBER,
    SIZES,
    argument_for,
    called_tables,
    class_names,
    computes,
    constants_of,
    outputs_of,
    short_names,
    type_of,
)
from muletrain.model.traced.statements import Writer, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from muletrain.model.traced.chain import TracedModel
    from muletrain.model.traced.cutting import Part

_DROPS = {"dropout_key": "None", "site": "0", "sequences": "1"}
"""What dropouts take, and its default."""
_SAYS = {
    "operators.attention": "(q [B, H, T, E], k, v, mask, probability, dropout_key, site, scale) -> [B, H, T, E]\n"
    "  softmax(q @ k^T * scale) @ v, with dropout of the softmax if a probability is given. True in the mask [B, 1, T, T]:\n"
    "  the row's token attends to the column's.",
    "operators.dropout": "(x, probability, dropout_key, site, sequences) -> like x; x holds so many sequences, in order",
    "operators.histogram": "(x, bins, low, high) -> float32 [bins]: how many numbers of x lie in each bin. With\n"
    "  high = bins - 1, how many integers are 0, 1, ...",
    "grouped_mm_fallback": "(x [N, E], w [G, E, F], ends [G]) -> [N, F]: an operator of transformers, with gradients\n"
    "  Rows ends[g - 1] (for g = 0: the first row) to ends[g] of x, times w[g].",
}
_LOAD = '''
def load(part, state, number=None):
    """Copy a part's parameters from a state_dict. ``number``: what stands for N in the names of a layer's."""
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(state[part.NAMES[name].replace(".N.", f".{number}.")])
'''
_NO_DROPOUT = "The model has no dropout."
_DROPOUT = """``dropout_key`` says which dropout is drawn: muletrain.model.dropout.Masks(seed, step, microbatch), another one for
each microbatch (None: no dropout, as in evaluation; train() and eval() change nothing). The model's
dropouts are numbered. ``site`` is the number of a part's first one. Dropouts: {counts}."""
_PARAMETERS = """Parameters are empty until they are loaded: NAMES has their names in the {maker}. {tied}A block takes
the values of the block before, and what follows from the shape of the microbatch alone, which ``tables`` makes. In other precisions
than float32 a model may compute parts of itself in float32; such casts are not here."""
_UNTIED = "No two parts share a parameter. "
_TOKENS = "``input_ids`` and ``targets`` (the tokens that follow) are int64\n[sequences, tokens]"
_LOADED = """``state`` is model.state_dict(){constants} of {maker}."""
_CONSTANTS = (
    """, and ``constants`` are dict(model.named_buffers()), which follow from its configuration and are not trained,"""
)
_LOSS = """The loss is the cross-entropy alone, as in a run of muletrain: no auxiliary loss of a router, for example."""
_CAUSAL = "torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril().expand(sequences, 1, -1, -1)"
_HEADER = '''"""The blocks of {kind}, written by 'muletrain trace', as they compute in float32.

{names}

{parameters}
{dropout}

The parts make a chain. Of one microbatch, {given}.
{loaded}

{chain}

{operators}"""

{first}import torch
import torch.nn.functional as F
{last}

{load}


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
    distinct = [name for name in dict.fromkeys(names) if parts[name].outputs]  # nothing may come before the first block
    classes = {name: _class(model, name, parts[name], names.count(name)) for name in distinct}
    body = "\n\n".join([*(c.text for c in classes.values()), *([_tables(model)] if model.tables else [])])
    counts = ", ".join(f"{c.count} in {name}" for name, c in classes.items())
    dropout = _DROPOUT.format(counts=counts) if any(c.count for c in classes.values()) else _NO_DROPOUT
    theirs = sorted(
        {f"{n.target}" for part in model.parts for n in part.nodes if f"{n.target}".startswith("transformers.")}
    )
    last = "import transformers.integrations.moe  # registers torch.ops.transformers\n" * bool(theirs)
    last += "from torch import nn\n"
    last += "\nfrom muletrain.model.traced import operators\n" * ("operators." in body)
    last += "".join(f"\n{name.split('.')[1]} = torch.ops.{name}\n" for name in theirs)
    text = _HEADER.format(
        kind=model.factory or f"a {model.config.get('model_type')} model",
        parameters=textwrap.fill(_parameters(model), 120),
        given=_given(model),
        loaded=textwrap.fill(_loaded(model), 120),
        names="\n".join(f"{name}: {_of(names, name)}" for name in classes),
        dropout=textwrap.fill(dropout, 120),
        chain="\n".join(f"    {line}" for line in _chain(model, names, classes)),
        operators="".join(f"{name}{text}\n" for name, text in _SAYS.items() if name in body),
        first="".join(f"import {m}\n" for m in ("math", "operator") if re.search(rf"(?<![.\w]){m}\.", body)),
        last=last,
        load=_LOAD.strip("\n"),
    )
    return text + body


def _parameters(model: TracedModel) -> str:
    maker = "module" if model.own_loss else "model of transformers"
    return _PARAMETERS.format(maker=maker, tied="" if model.tied else _UNTIED)


def _loaded(model: TracedModel) -> str:
    said = _CONSTANTS if any(node.users for _, _, node in constants_of(model)) else ""
    if model.own_loss:
        return _LOADED.format(constants=said, maker=f"the model that {model.factory} makes")
    maker = "transformers.AutoModelForCausalLM.from_pretrained(FOLDER)"
    return f"{_LOADED.format(constants=said, maker=f'model = {maker}')} {_LOSS}"


def _given(model: TracedModel) -> str:
    if not model.own_loss:
        return _TOKENS
    lead = "sequences, tokens" if model.inputs.shape is None else "sequences"
    of = [f"{k.dtype} [{', '.join([lead, *map(str, k.shape or ())])}]" for k in (model.inputs, model.targets)]
    said = "" if model.inputs.shape is None else "\n(``sequences``: how many samples)"
    return f"``inputs`` are {of[0]} and ``targets`` {of[1]}{said}"


def _of(names: list[str], name: str) -> str:
    layers = [k - 1 for k, n in enumerate(names) if n == name]
    if name in ("Embedding", "Head"):
        return "before the first block" if name == "Embedding" else "after the last block"
    return f"layers {', '.join(map(str, layers))}"


def _chain(model: TracedModel, names: list[str], classes: Mapping[str, _Class]) -> list[str]:
    """Code that runs all parts one after the other."""
    parts, tables = model.parts, called_tables(model)
    called, kinds = dict(zip(model.tables, tables, strict=True)), names[1:-1]
    made = {name for part in parts[:-1] for name in part.outputs}
    taken = [tuple(n for n in part.inputs if n in made) for part in parts[1:]]
    begin = 0 if names[0] in classes else 1
    plain = all(a.outputs == b and len(b) == 1 for a, b in zip(parts[begin:], taken[begin:], strict=False))
    own, first = model.own_loss, "inputs" if model.own_loss else "input_ids"
    begins = next(part for part in parts if part.inputs)
    values: dict[str, str] = dict.fromkeys(parts[-1].inputs, "targets") | dict.fromkeys(begins.inputs, first)
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
        if function == "block":
            arguments = [_of_layer(text, number - 1) for text in arguments]
        made = ", ".join(values[n] for n in part.outputs)
        return f"{made} = {function}({', '.join([*arguments, *(f'{n}={given[n]}' for n in written.drops)])})"

    layers: dict[str, list[int]] = {}
    for layer in range(len(kinds)):
        layers.setdefault(call(1 + layer, "block"), []).append(layer)
    runs = " + ".join(f"[{kind}] * {len(list(run))}" for kind, run in itertools.groupby(kinds))
    each = f"{kinds[0]}() for _ in range({len(kinds)})" if len({*kinds}) == 1 else f"kind() for kind in {runs}"
    buffers = {name: f'{name} = constants["{full}"]' for name, full, node in constants_of(model) if computes(node)}
    results = [name for name in tables if name.isidentifier() and name not in SIZES]
    numbers = [_number(part.weights, k) for k, part in enumerate(parts[1:-1])]
    loop = "for layer, block in enumerate(blocks):"
    return [
        f"embedding, blocks, head = {'nn.Identity' if begin else names[0]}(), nn.ModuleList({each}), {names[-1]}()",
        *_ties(model),
        *([] if begin else ["load(embedding, state)"]),
        loop if numbers == [*range(len(kinds))] else f"for layer, block in zip({numbers}, blocks):",
        "    load(block, state, layer)",
        "load(head, state)",
        *buffers.values(),
        f"sequences, tokens = {first}.shape" if model.inputs.shape is None else f"sequences, tokens = len({first}), 1",
        *([f"{listed(results)} = tables({', '.join([*buffers, *SIZES, f'{first}.device'])})"] if results else []),
        *([] if begin else [call(0, "embedding")]),
        loop if len(layers) > 1 or any("layer" in text for text in layers) else "for block in blocks:",
        *(f"    {text if len(layers) == 1 else f'if layer in {which}: {text}'}" for text, which in layers.items()),
        call(len(parts) - 1, "head"),
        *([] if own else ["loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())"]),
    ]


def _of_layer(text: str, layer: int) -> str:
    """An argument of a block, with the layer's number as a variable where it names a buffer of its own."""
    own = text.replace(f".{layer}.", ".{layer}.", 1)
    return text if own == text else own.replace("[", "[f", 1)


def _number(weights: Sequence[str], layer: int) -> int:
    """Which member of its list a layer is, by the names of its parameters."""
    found = re.search(r"\.(\d+)\.", next(iter(weights), ""))
    return int(found[1]) if found else layer


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
    called = dict(zip(model.tables, called_tables(model), strict=True))
    tables = [argument_for(called[table]) for table in part.tables]
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
    says = [f"{n}: {type_of(model, v)}" for n, v in zip(inputs, values, strict=True)]
    made = ", ".join(type_of(model, v) for v in outputs_of(graph))
    lines = [
        f"class {name}(nn.Module):",
        "    NAMES = {" + "}" * (not weights),
        *(
            f'        "{w}": "{re.sub(NUMBER, ".N.", full, count=1) if layers > 1 else full}",'
            for w, full in zip(weights, part.weights, strict=True)
        ),
        *(["    }"] if weights else []),
        "",
        "    def __init__(self):",
        "        super().__init__()",
        *(
            f"        self.{w} = nn.Parameter(torch.empty({', '.join(map(str, model.shapes[full]))})"
            f"{', requires_grad=False' if full in model.frozen else ''})"
            for w, full in zip(weights, part.weights, strict=True)
        ),
        "",
        f"    def forward(self, {', '.join(arguments)}):",
        f'        """{", ".join(says)} -> {made}"""',
        *(f"        {line}" for line in body),
        "",
    ]
    return _Class(used, drops, count, "\n".join(lines))


def _tables(model: TracedModel) -> str:
    graph, called, constants = model.table_function.graph, called_tables(model), constants_of(model)
    sizes = [*SIZES, "device"]
    causal = model.causal_masks
    plain = {n: _CAUSAL for n, name in zip(outputs_of(graph), model.tables, strict=True) if name in causal}
    given = {name for name in called if name in sizes or name.startswith("constants[")}
    made = {name: node for name, node in zip(called, outputs_of(graph), strict=True) if name not in given}
    results = [name if name in made else None for name in called]
    body = Writer(graph, plain).body([*(name for name, _, _ in constants), *sizes], results)
    taken = {name: f"{name}: {type_of(model, node)}, {full}" for name, full, node in constants if computes(node)}
    far = f"; so is the model's own in sequences of at most {model.context} tokens"
    says = [f"{name}: {type_of(model, node)}{f', causal{far}' if node in plain else ''}" for name, node in made.items()]
    if taken:
        says = [*says, "", "Takes buffers of the model:", *taken.values()]
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
