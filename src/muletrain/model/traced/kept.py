"""Graphs of traced chains in the user's cache (``config.cache``), so that a machine traces a model once: a process that
only computes rebuilds the graphs in a tenth of a second.

An entry is data. Operators are looked up by name in torch, ``transformers``, and ``operators``, and the rebuilt
functions must equal the traced text exactly. Otherwise the model is traced again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from muletrain.config.cache import keep, kept
from muletrain.config.section import Section
from muletrain.model.traced import operators
from muletrain.model.traced.cutting import Part, Parts
from muletrain.model.traced.outline import about

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KIND = "graphs"
"""The cache's folder."""
MOST_BYTES = 32 << 20
"""Most bytes of constants; a chain with more is traced each time."""
_OWN = {"histogram": operators.histogram, "dropout": operators.dropout, "attention": operators.attention}


class Computing(NamedTuple):
    """The graph and the constants of a stage."""

    parts: Parts
    """Parts without ``Part.nodes``."""
    constants: dict[str, Tensor]


class _Entry(Section):
    content: str
    digest: str


class _NotData(Exception):
    """A graph that cannot be written as data, or an entry that cannot be read."""


def keep_graphs(parts: Parts, constants: Mapping[str, Tensor], architecture: str, context: int, precision: str) -> None:
    """Keep the graphs, if the written graphs can be read back unchanged."""
    if sum(constants[name].nbytes for name in parts.constants) > MOST_BYTES:
        return
    try:
        content = json.dumps(_written(parts, constants))
        if _text(_read(content).parts) != _text(parts):
            return
    except (_NotData, ValueError, TypeError):
        return
    keep(KIND, _about(architecture, context, precision), _Entry(content=content, digest=_digest(parts, content)))


def kept_graphs(architecture: str, context: int, precision: str) -> Computing | None:
    """The kept graphs; None: missing, or unusable here."""
    entry = kept(KIND, _about(architecture, context, precision), _Entry)
    if entry is None:
        return None
    try:
        found = _read(entry.content)
    except (_NotData, KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError):
        return None
    return found if _digest(found.parts, entry.content) == entry.digest else None


def _about(architecture: str, context: int, precision: str) -> dict[str, object]:
    return {**about(architecture, context), "precision": precision}


def _text(parts: Parts) -> list[object]:
    """Everything that decides the chain's results, except constants."""
    own = [(p.code, p.weights, p.inputs, p.tables, p.outputs, p.site) for p in parts.parts]
    passed = [[(n.name, n.meta["val"].dtype) for n in nodes] for nodes in parts.passed]
    return [own, passed, str(parts.tables.code), parts.constants, parts.apart, parts.table_names, parts.masks]


def _digest(parts: Parts, content: str) -> str:
    return hashlib.sha256(
        "\0".join([content, *(p.code for p in parts.parts), str(parts.tables.code)]).encode()
    ).hexdigest()


# Out ----------------------------------------------------------------------------------------------------------------


def _written(parts: Parts, constants: Mapping[str, Tensor]) -> dict[str, Any]:
    functions = list({id(part.function): part.function for part in parts.parts}.values())
    return {
        "functions": [_graph(function.graph) for function in functions],
        "parts": [
            [functions.index(p.function), *map(list, (p.weights, p.inputs, p.tables, p.outputs)), p.site]
            for p in parts.parts
        ],
        "tables": _graph(parts.tables.graph),
        "constants": [[name, *_tensor(constants[name])] for name in parts.constants],
        "types": [_of_dtype(n.meta["val"].dtype) for n in _holders(parts.tables.graph, len(parts.constants))],
        "table_names": list(parts.table_names),
        "masks": sorted(parts.masks),
        "apart": parts.apart,
        "passed": [
            [
                [n.name, _of_dtype(n.meta["val"].dtype), [int(s) for s in n.meta["val"].shape[parts.lead :]]]
                for n in nodes
            ]
            for nodes in parts.passed
        ],
        "lead": parts.lead,
        "inputs": parts.inputs,
        "targets": parts.targets,
        "frozen": {name: _of_dtype(dtype) for name, dtype in parts.frozen.items()},
    }


def _holders(graph: fx.Graph, count: int) -> Sequence[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))[:count]


def _tensor(value: Tensor) -> tuple[str, list[int], str]:
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _of_dtype(value.dtype), list(value.shape), base64.b64encode(flat.tobytes()).decode()


def _of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _graph(graph: fx.Graph) -> list[list[Any]]:
    found = list[list[Any]]()
    for node in graph.nodes:
        if node.op == "placeholder":
            found.append([node.name])
        elif node.op == "output":
            found.append([node.name, "", _value(node.args[0]), {}])
        elif node.op == "call_function":
            kwargs = {key: _value(value) for key, value in node.kwargs.items()}
            found.append([node.name, _name_of(node.target), _value(tuple(node.args)), kwargs])
        else:
            raise _NotData
    return found


def _name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"op.{target}"
    name = getattr(target, "__name__", "")
    if _OWN.get(name) is target:
        return f"own.{name}"
    if getattr(operator, name, None) is target:
        return f"operator.{name}"
    if name.startswith("sym_") and getattr(torch, name, None) is target:
        return f"torch.{name}"
    raise _NotData


def _value(x: Any) -> Any:
    """A value of a node's arguments as JSON; other types than JSON's become an object with the type's name."""
    if isinstance(x, fx.Node):
        return {"node": x.name}
    if x is None or isinstance(x, bool | int | str):
        return x
    if isinstance(x, float):
        return {"float": x.hex()}
    if isinstance(x, tuple | list):
        return {"tuple" if isinstance(x, tuple) else "list": [_value(v) for v in x]}
    if isinstance(x, torch.dtype | torch.memory_format | torch.layout):
        return {"torch": str(x).removeprefix("torch.")}
    if isinstance(x, slice):
        return {"slice": [_value(v) for v in (x.start, x.stop, x.step)]}
    raise _NotData


# In -----------------------------------------------------------------------------------------------------------------


def _read(content: str) -> Computing:
    about = json.loads(content)
    functions = [fx.GraphModule(nn.Module(), _graph_of(graph)) for graph in about["functions"]]
    parts = tuple(
        Part(functions[k], tuple(weights), tuple(inputs), tuple(tables), tuple(outputs), site, ())
        for k, weights, inputs, tables, outputs, site in about["parts"]
    )
    tables = _graph_of(about["tables"])
    for holder, dtype in zip(_holders(tables, len(about["types"])), about["types"], strict=True):
        holder.meta["val"] = torch.empty(0, dtype=_dtype(dtype), device="meta")
    values, lead = fx.Graph(), int(about["lead"])
    known: dict[str, fx.Node] = {}
    passed = tuple(tuple(_passed(values, known, lead, *each) for each in nodes) for nodes in about["passed"])
    return Computing(
        Parts(
            parts,
            fx.GraphModule(nn.Module(), tables),
            tuple(name for name, *_ in about["constants"]),
            bool(about["apart"]),
            tuple(about["table_names"]),
            frozenset(about["masks"]),
            passed,
            lead,
            about["inputs"],
            about["targets"],
            {name: _dtype(dtype) for name, dtype in about["frozen"].items()},
        ),
        {name: _tensor_of(*each) for name, *each in about["constants"]},
    )


def _passed(graph: fx.Graph, known: dict[str, fx.Node], lead: int, name: str, dtype: str, shape: list[int]) -> fx.Node:
    """A node that describes a value between blocks, and computes nothing."""
    if name not in known:
        node = known[name] = graph.placeholder(name)
        node.meta["val"] = torch.empty(*[1] * lead, *shape, dtype=_dtype(dtype), device="meta")
    return known[name]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise _NotData
    return found


def _tensor_of(dtype: str, shape: list[int], data: str) -> Tensor:
    flat = torch.from_numpy(np.frombuffer(base64.b64decode(data), dtype=np.uint8).copy())
    return flat.view(_dtype(dtype)).reshape(shape)


def _graph_of(nodes: list[list[Any]]) -> fx.Graph:
    graph, env = fx.Graph(), dict[str, fx.Node]()
    for name, *rest in nodes:
        if not rest:
            env[name] = graph.placeholder(name)
        elif not rest[0]:
            graph.output(_value_of(rest[1], env))
        else:
            target, args, kwargs = rest
            given = {key: _value_of(value, env) for key, value in kwargs.items()}
            env[name] = graph.create_node("call_function", _target(target), _value_of(args, env), given, name=name)
    return graph


def _target(name: str) -> Any:
    kind, _, rest = name.partition(".")
    if kind == "op":
        space, operation, overload = rest.split(".")
        if space == "transformers":
            import transformers.integrations.moe  # noqa: F401 # registers them
        elif space != "aten":
            raise _NotData
        return getattr(getattr(getattr(torch.ops, space), operation), overload)
    if kind == "own":
        return _OWN[rest]
    if kind == "operator":
        return getattr(operator, rest)
    if kind == "torch" and rest.startswith("sym_"):
        return getattr(torch, rest)
    raise _NotData


def _value_of(x: Any, env: Mapping[str, fx.Node]) -> Any:
    if not isinstance(x, dict):
        return x
    ((kind, value),) = x.items()
    if kind == "node":
        return env[value]
    if kind == "float":
        return float.fromhex(value)
    if kind in ("tuple", "list", "slice"):
        found = [_value_of(v, env) for v in value]
        return found if kind == "list" else tuple(found) if kind == "tuple" else slice(*found)
    if kind == "torch":
        found = getattr(torch, value)
        if not isinstance(found, torch.dtype | torch.memory_format | torch.layout):
            raise _NotData
        return found
    raise _NotData
