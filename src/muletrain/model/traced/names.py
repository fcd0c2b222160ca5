"""What the written source calls parts, parameters and tables, and how it states their types."""

from __future__ import annotations

import math
import operator
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from muletrain.model.traced.statements import operator_of

if TYPE_CHECKING:
    from muletrain.model.traced.chain import TracedModel

SIZES = ("sequences", "tokens")
NUMBER = r"\.\d+\."
"""Of a layer, in a parameter's name."""
_KEEPS_VALUES = {"add", "mul", "to", "type_as", "expand", "unsqueeze", "detach", "slice", "view", "reshape"}


def class_names(model: TracedModel) -> list[str]:
    """The name of each part's class: equal parts have one."""
    keys = [
        (id(part.function), *((model.shapes[name], name in model.frozen) for name in part.weights))
        for part in model.parts
    ]
    known: dict[object, str] = {}
    for number, key in enumerate(keys):
        if number in (0, len(model.parts) - 1):
            name = "Embedding" if number == 0 else "Head"
        else:
            name = f"Block{len([n for n in known.values() if n.startswith('Block')]) or ''}"
        known.setdefault(key, name)
    return [known[key] for key in keys]


def short_names(weights: list[str]) -> list[str]:
    """The ends of dotted names, long enough to tell them apart."""
    parts = [re.sub(r"^.*?\.\d+\.", "", name).split(".") for name in weights]
    for length in range(1, max(map(len, parts), default=0) + 1):
        found = [_identifier(p[-length:]) for p in parts]
        if len(set(found)) == len(found) and not {"weight", "bias"} & set(found):
            return found
    whole = [_identifier(["layer", *p]) for p in parts]  # the layer is one module without others inside
    return whole if len({*whole}) == len(whole) else [_identifier(name.split(".")) for name in weights]


def _identifier(path: list[str]) -> str:
    """Members of an ``nn.Sequential`` have numbers for names."""
    name = "_".join(path)
    return f"module_{name}" if name[0].isdigit() else name


def type_of(model: TracedModel, node: fx.Node) -> str:
    """The dtype and shape of a value, whose symbols are those of the model's inputs."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return "int"
    parts, sizes = model.parts, dict[str, str]()
    first = next(part for part in parts if part.inputs)
    for part, name in ((first, "x_0"), (parts[-1], f"x_{len(parts[-1].inputs) - 1}")):  # the inputs, the targets
        given = next(n for n in part.function.graph.nodes if n.name == name).meta["val"]
        sizes |= dict(zip(map(str, given.shape), SIZES, strict=False))
    shape = re.sub(r"\bs\d+\b", lambda m: sizes.get(m[0], m[0]), str(list(value.shape)))
    return f"{str(value.dtype).removeprefix('torch.')} {shape}"


def called_tables(model: TracedModel) -> list[str]:
    """Names of all tables, after what they hold; of a buffer as it is, the expression for it."""
    found = list[str]()
    buffers = {node: f'constants["{full}"]' for _, full, node in constants_of(model)}
    for number, node in enumerate(outputs_of(model.table_function.graph)):
        if (buffer := buffers.get(_given_on(node))) is not None:
            found.append(buffer)
            continue
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
    if value.dtype == torch.int64 and (value.dim() == 1 or (value.dim() == 2 and value.shape[0] == 1)):
        return "positions"
    while operator_of(node) in _KEEPS_VALUES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return operator_of(node) if operator_of(node) in ("cos", "sin") else f"table_{number}"


def constants_of(model: TracedModel) -> list[tuple[str, str, fx.Node]]:
    """What the tables follow from besides sizes: what each is called, its full name, and its placeholder."""
    called = [re.sub(r"\W", "_", name) for name in short_names(list(model.constants))]
    return list(zip(called, model.constants, model.table_function.graph.find_nodes(op="placeholder"), strict=False))


def computes(node: fx.Node) -> bool:
    """Does a table follow from a buffer, which is not one itself?"""
    return any(user.op != "output" and (_given_on(user) is user or computes(user)) for user in node.users)


def _given_on(node: fx.Node) -> fx.Node:
    """The node whose value this one gives on as it is."""
    while operator_of(node) in ("to", "type_as", "alias"):
        given: Any = node.args[0]
        if given.meta["val"].dtype != node.meta["val"].dtype:
            break
        node = given
    return node


def argument_for(table: str) -> str:
    """What a part calls a table: a buffer by the end of its name."""
    found = re.fullmatch(r'constants\["(.*)"\]', table)
    if found is None:
        return table
    return re.sub(r"\W", "_", re.sub(NUMBER, "/", found[1]).rpartition("/")[2].removeprefix("model."))


def outputs_of(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that a graph returns."""
    found: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    return list(found)
