"""Cuts a flat graph into parts: a part before the first block, the blocks, and a part after the last block.

A part is a function of weights, of values from earlier parts, and of *tables*: values that depend on the shape of the
microbatch alone (positions, masks, rotary angles), or on the positions in conversations that share a row. Every stage
computes the tables itself, so only values that depend on samples or weights travel. Targets reach every stage, but only
the last part uses targets. Equal parts have equal code, and share one function.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from muletrain.errors import ConfigError
from muletrain.model.traced import operators
from muletrain.model.traced.export import path_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from muletrain.model.traced.export import Traced

aten = torch.ops.aten
_FIRST_ARGUMENTS_OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def by_need(parts: Sequence[Sequence[fx.Node]], output: fx.Node) -> list[list[fx.Node]]:
    """The nodes of each part of a graph in the order of need, without unused nodes. ``parts``: in order of computing,
    for ``output``.

    The code of ``transformers`` loops over sets (of kinds of layers), and a set's order differs from process to
    process. Here each node is placed at the first need, so machines make the same code of one model, pack values in the
    same order, and add gradients in the same order. Nodes that draw random numbers or write into tensors stay in
    place."""
    ordered: list[list[fx.Node]] = []
    wanted = [output]
    for part in reversed(parts):
        nodes = in_order(part, wanted)
        ordered.insert(0, nodes)
        wanted = list(dict.fromkeys([*inputs_of(nodes), *wanted]))
    return ordered


def in_order(nodes: Sequence[fx.Node], wanted: Iterable[fx.Node]) -> list[fx.Node]:
    """The sequence ``nodes`` in the order of need, if nodes in ``wanted`` are needed afterwards."""
    runs: list[list[fx.Node]] = [[]]
    for node in nodes:
        if _stays(node):
            runs += [[node], []]
        else:
            runs[-1].append(node)
    after: list[fx.Node] = []
    for run in reversed(runs):
        stays = len(run) == 1 and _stays(run[0])
        after = (run if stays else _needed_of(run, chain(inputs_of(after), wanted))) + after
    return after


def inputs_of(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Inputs of ``nodes``, one after another."""
    return chain.from_iterable(node.all_input_nodes for node in nodes)


def _needed_of(run: Sequence[fx.Node], wanted: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes of ``wanted`` in ``run``, each after all needed nodes of ``run``."""
    own, done = set(run), dict[fx.Node, None]()
    for root in wanted:
        stack = [root] if root in own else []
        while stack:
            node = stack[-1]
            if missing := [n for n in node.all_input_nodes if n in own and n not in done]:
                stack.append(missing[0])
            else:
                done[stack.pop()] = None
    return list(done)


def _stays(node: fx.Node) -> bool:
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target is aten.dropout.default:
        return bool(node.args[1]) and bool(node.args[2])
    if target is aten.scaled_dot_product_attention.default:
        return bool(node.kwargs.get("dropout_p") or (len(node.args) > 4 and node.args[4]))
    return target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags


@dataclass(frozen=True)
class Part:
    """One part of the chain."""

    function: fx.GraphModule
    """(weights, values, tables, where, masks, site, sequences) -> values, each of the first three unpacked. Equal parts
    have the same function."""
    weights: tuple[str, ...]
    """Parameters, in the function's order."""
    inputs: tuple[str, ...]
    tables: tuple[str, ...]
    outputs: tuple[str, ...]
    site: int
    """Number of the part's first dropout."""
    nodes: tuple[fx.Node, ...]
    """The part's nodes in the flat graph."""

    @property
    def code(self) -> str:
        return str(self.function.code)


@dataclass(frozen=True)
class Parts:
    """The whole chain: ``parts[0]``, blocks ``parts[1:-1]``, ``parts[-1]``."""

    parts: tuple[Part, ...]
    tables: fx.GraphModule
    """(constants, positions if ``apart``, sequences, tokens, where) -> tables"""
    constants: tuple[str, ...]
    """Buffers and constants that the tables follow from."""
    apart: bool
    """Tables follow from the positions of the tokens in their conversations, too."""
    table_names: tuple[str, ...]
    masks: frozenset[str]
    """Tables that are used only as attention masks."""
    passed: tuple[tuple[fx.Node, ...], ...]
    """Values passed from each part to later parts."""
    lead: int
    """Dimensions that all values between blocks begin with: batch and length, or batch alone."""
    inputs: str
    """Inputs of the first part."""
    targets: str | None
    """Further inputs of the last part."""
    frozen: Mapping[str, torch.dtype]
    """Parameters that are not trained, with the types that the parts compute with."""


def cut(traced: Traced, module: nn.Module) -> Parts:
    """Cut ``traced``, the graph of ``module``. Raises ConfigError where no chain of blocks is found, and for operators
    that draw random numbers."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # sympy: seconds, for tracing alone

    path, block_of = _blocks(module, traced)
    count = max(block_of.values()) + 1
    for node in traced.graph.nodes:
        _refuse_random(node)
        if traced.targets is not None and free_unbacked_symbols(node.meta.get("val")):
            raise ConfigError(
                f"{path_of(node)} makes a value ({node.target}) whose shape depends on data, so microbatches would not add "
                f"up; compute with a mask of fixed shape instead"
            )
    fixed = _fixed(traced)
    place = _places(traced, fixed, path, block_of)
    _hoist(traced, fixed, place)
    parts: list[Part] = []
    site, functions = 0, dict[str, fx.GraphModule]()
    in_parts: list[list[fx.Node]] = [[] for _ in range(count + 2)]
    for node in traced.graph.nodes:
        if node is not traced.inputs and place.get(node, -1) >= 0:
            in_parts[place[node]].append(node)
    ordered = by_need(in_parts, traced.output)
    passed = _passed(traced, chain([traced.inputs], *ordered), place, count + 2)
    tables = {n for n, part in place.items() if part == -1} | traced.constants.keys()
    tables |= set() if traced.positions is None else {traced.positions}
    for number, nodes in enumerate(ordered):
        made = _Function(traced, nodes, tables)
        own = tuple(n for n in passed[number] if place[n] == number and n is not traced.inputs)
        outputs = own if number <= count else (traced.output,)
        part = made.part(outputs, site, functions)
        site += made.sites
        parts.append(part)
    targets = None if traced.targets is None else traced.targets.name
    passed_on = tuple(passed[: count + 1])
    return Parts(
        tuple(parts),
        *_tables(traced, place, parts),
        passed_on,
        len(traced.sizes),
        traced.inputs.name,
        targets,
        traced.frozen,
    )


def _blocks(module: nn.Module, traced: Traced) -> tuple[str, dict[int, int]]:
    """Path of the list of modules with most of the parameters, and the block of each member. The members are the
    layers; a member without parameters (an activation) belongs to the block before."""
    seen = {name for node in traced.graph.nodes if node.op == "call_function" for name in _around(node)}
    best, most = None, 0
    for path, child in module.named_modules():
        if not isinstance(child, nn.ModuleList | nn.Sequential) or len(child) == 0:
            continue
        begins = [next(member.parameters(), None) is not None for member in child]
        if not all(f"{path}.{k}" in seen for k, begin in enumerate(begins) if begin):
            continue
        size = sum(p.numel() for p in child.parameters())
        if size > most:
            best, most = (path, {k: max(0, sum(begins[: k + 1]) - 1) for k in range(len(begins))}), size
    if best is None:
        raise ConfigError(
            "the model has no list of layers (nn.ModuleList, nn.Sequential) that it runs one after the other, so it cannot "
            "be cut; keep its layers in one"
        )
    return best


def _around(node: fx.Node) -> list[str]:
    """Paths of the modules around a node."""
    return [str(entry[0]) for entry in (node.meta.get("nn_module_stack") or {}).values() if isinstance(entry, tuple)]


def _refuse_random(node: fx.Node) -> None:
    """Raises ConfigError for a random operator, except for the two kinds with a deterministic counterpart."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return
    if target not in (aten.dropout.default, aten.scaled_dot_product_attention.default):
        raise ConfigError(
            f"{path_of(node)} calls {target}, which draws random numbers that another machine could not draw "
            f"again; switch it off (dropout and attention dropout are supported)"
        )


def _fixed(traced: Traced) -> set[fx.Node]:
    """Nodes that depend on the microbatch's shape and positions alone."""
    fixed: set[fx.Node] = {traced.device, *traced.constants, *([] if traced.positions is None else [traced.positions])}
    for node in traced.graph.nodes:
        if node.op != "call_function":
            continue
        if traced.size_of(node) is not None or (all(n in fixed for n in node.all_input_nodes) and not _drops(node)):
            fixed.add(node)
    return fixed


def _drops(node: fx.Node) -> bool:
    return node.target in (aten.dropout.default, aten.scaled_dot_product_attention.default)


def _places(traced: Traced, fixed: set[fx.Node], path: str, block_of: dict[int, int]) -> dict[fx.Node, int]:
    """Node -> part: 0 before the blocks, 1 + k in block k, then the part after the blocks; -1: the tables."""
    place: dict[fx.Node, int] = {traced.inputs: 0}
    now, count = 0, max(block_of.values()) + 1
    prefix = f"{path}."
    nodes = [n for n in traced.graph.nodes if n.op == "call_function"]
    numbers = {n: _number(n, prefix) for n in nodes}
    in_block = {n: None if number is None else block_of[number] for n, number in numbers.items()}
    last = max(i for i, n in enumerate(nodes) if in_block[n] is not None and n not in fixed)
    of_targets: set[fx.Node] = set() if traced.targets is None else {traced.targets}
    for i, node in enumerate(nodes):
        block = in_block[node]
        if node in fixed:
            place[node] = -1 if block is None else 1 + block
            continue
        used = [n for n in node.all_input_nodes if n in of_targets]
        if used and all(n in of_targets or n in fixed for n in node.all_input_nodes):
            of_targets.add(node)
            place[node] = count + 1
            continue
        if used and i <= last:
            raise ConfigError(
                f"{path_of(node)} uses the targets before the last block has computed, and they are there only "
                f"after it; compare with them at the end"
            )
        if block is not None:
            if 1 + block < now:
                raise ConfigError(
                    f"{path}.{block} computes after a later block did, and each part of the model is one run of blocks; call "
                    f"the members of {path} in their order, each once"
                )
            now = 1 + block
        place[node] = now if i <= last else count + 1
    return place


def _number(node: fx.Node, prefix: str) -> int | None:
    for path in _around(node):
        if path.startswith(prefix):
            return int(path[len(prefix) :].partition(".")[0])
    return None


def _hoist(traced: Traced, fixed: set[fx.Node], place: dict[fx.Node, int]) -> None:
    """A fixed value that another part needs is a table, with all its origins. So is a size that a block computes: the
    graph has the size once, in the first block that needs the size, and that block's code must not depend on later
    blocks."""
    blocks = range(1, max(place.values()))
    for node in reversed(list(traced.graph.nodes)):
        if node not in fixed or (here := place.get(node, -1)) < 0:
            continue
        size = here in blocks and not isinstance(node.meta.get("val"), Tensor)
        if size or any(place.get(u, -1) != here for u in node.users):
            place[node] = -1


def _passed(
    traced: Traced, ordered: Iterable[fx.Node], place: dict[fx.Node, int], parts: int
) -> list[tuple[fx.Node, ...]]:
    """Values that are alive after each part, in order of creation."""
    alive: list[list[fx.Node]] = [[] for _ in range(parts)]
    for node in ordered:
        until = max((place[u] for u in node.users if u in place), default=-1)
        for number in range(place[node], until):
            alive[number].append(node)
    for number, nodes in enumerate(alive[:-1]):
        for node in nodes:
            val = node.meta.get("val")
            if (
                not isinstance(val, Tensor)
                or not val.is_floating_point()
                or tuple(val.shape[: len(traced.sizes)]) != traced.sizes
            ):
                raise ConfigError(
                    f"{path_of(node)} makes a value ({node.target}, {_describe(val)}) that is used after part "
                    f"{number}, and from block to block only floating-point tensors [samples, "
                    f"{'tokens, ' if len(traced.sizes) > 1 else ''}...] can be sent; compute it in each block, or give it such a shape"
                )
    return [tuple(nodes) for nodes in alive]


def _describe(val: object) -> str:
    return f"{val.dtype} {tuple(val.shape)}" if isinstance(val, Tensor) else type(val).__name__


class _Function:
    """Makes a part's function from the part's nodes."""

    def __init__(self, traced: Traced, nodes: Sequence[fx.Node], tables: set[fx.Node]) -> None:
        self._traced, self._nodes, own = traced, nodes, {*nodes, traced.device}
        outside = list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in own))
        self._weights = [n for n in outside if n in traced.parameters]
        self._tables = [n for n in outside if n in tables]
        self._values = [n for n in outside if n not in traced.parameters and n not in tables]
        self.sites = 0

    def part(self, outputs: tuple[fx.Node, ...], site: int, functions: dict[str, fx.GraphModule]) -> Part:
        graph, env = fx.Graph(), {}
        for kind, nodes in (("weight", self._weights), ("x", self._values), ("table", self._tables)):
            for number, node in enumerate(nodes):
                env[node] = graph.placeholder(f"{kind}_{number}")
                env[node].meta.update(node.meta)
        env[self._traced.device] = graph.placeholder("where")
        masks, first, sequences = (graph.placeholder(name) for name in ("masks", "site", "sequences"))
        for node in self._nodes:
            env[node] = self._copied(graph, node, lambda n: env[n], (masks, first, sequences))
            env[node].meta.update(node.meta)  # for readers of the code
        graph.output(tuple(env[n] for n in outputs))
        module = fx.GraphModule(nn.Module(), graph)
        shared = functions.setdefault(str(module.code), module)
        return Part(
            shared,
            tuple(self._traced.parameters[n] for n in self._weights),
            tuple(n.name for n in self._values),
            tuple(n.name for n in self._tables),
            tuple(n.name for n in outputs),
            site,
            tuple(self._nodes),
        )

    def _copied(
        self, graph: fx.Graph, node: fx.Node, new: Callable[[fx.Node], fx.Node], drop: tuple[fx.Node, ...]
    ) -> fx.Node:
        if node.target is aten.histc.default:
            return graph.call_function(operators.histogram, fx.map_arg(node.args, new))
        if not _drops(node):
            # named after the operator alone, so that equal parts have equal code
            args, kwargs = fx.map_arg((node.args, node.kwargs), new)
            return graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        masks, site, sequences = drop
        site = site if self.sites == 0 else graph.call_function(operator.add, (site, self.sites))
        args = fx.map_arg(node.args, new)
        if node.target is aten.dropout.default:
            if not args[2] or args[1] == 0:
                return args[0]  # type: ignore[return-value]
            self.sites += 1
            return graph.call_function(operators.dropout, (args[0], args[1], masks, site, sequences))
        given = dict(zip(_FIRST_ARGUMENTS_OF_ATTENTION, args, strict=False)) | fx.map_arg(dict(node.kwargs), new)
        probability = given.get("dropout_p", 0.0)
        self.sites += 1 if probability else 0
        named = {name: given[name] for name in ("is_causal", "scale", "enable_gqa") if given.get(name)}
        first = (given["query"], given["key"], given["value"], given.get("attn_mask"))
        return graph.call_function(operators.attention, (*first, probability, masks, site), named)


def _tables(
    traced: Traced, place: dict[fx.Node, int], parts: Iterable[Part]
) -> tuple[fx.GraphModule, tuple[str, ...], bool, tuple[str, ...], frozenset[str]]:
    """The function that makes the tables of ``parts``, with the names of constants (inputs) and outputs."""
    wanted = list(dict.fromkeys(name for part in parts for name in part.tables))
    flat = {node.name: node for node in traced.graph.nodes}
    roots = [flat[name] for name in wanted]
    nodes = in_order([node for node in traced.graph.nodes if place.get(node) == -1], roots)
    constants = [node for node in dict.fromkeys([*inputs_of(nodes), *roots]) if node in traced.constants]
    graph, env = fx.Graph(), {}
    for number, node in enumerate(constants):
        env[node] = graph.placeholder(f"constant_{number}")
        env[node].meta.update(node.meta)
    if traced.positions is not None:
        env[traced.positions] = graph.placeholder("positions")
        env[traced.positions].meta.update(traced.positions.meta)
    sizes = [graph.placeholder("sequences"), graph.placeholder("tokens")]
    env[traced.device] = graph.placeholder("where")
    for node in nodes:
        if (size := traced.size_of(node)) is not None:
            env[node] = sizes[size]
        else:
            # named after the operator alone, so that the order of tracing does not show
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            env[node].meta.update(node.meta)
    graph.output(tuple(env[node] for node in roots))
    masks = frozenset(node.name for node in roots if node.users and all(_masks(user, node) for user in node.users))
    names = tuple(traced.constants[node] for node in constants)
    return fx.GraphModule(nn.Module(), graph), names, traced.positions is not None, tuple(wanted), masks


def _masks(user: fx.Node, node: fx.Node) -> bool:
    """Does ``user`` take ``node`` only as the attention mask?"""
    attends = user.target is aten.scaled_dot_product_attention.default
    return attends and len(user.args) > 3 and user.args[3] is node and user.all_input_nodes.count(node) == 1
