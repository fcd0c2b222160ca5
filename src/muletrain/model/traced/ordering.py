"""Puts the nodes of a graph into an order that follows from their computations, not from the time at which a model's code ran.

The code of ``transformers`` loops over sets (of kinds of layers), whose order differs from process to process. Here each node
comes where it is first needed. Machines then make the same code of one model, pack values in the same order, and add
gradients in the same order. Nodes that draw random numbers or write into tensors stay where they are.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

aten = torch.ops.aten


def by_need(parts: Sequence[Sequence[fx.Node]], output: fx.Node) -> list[list[fx.Node]]:
    """The nodes of each part of a graph in the order of need, without those that nothing needs. ``parts``: in the order in
    which they compute, for ``output``."""
    ordered: list[list[fx.Node]] = []
    wanted = [output]
    for part in reversed(parts):
        nodes = in_order(part, wanted)
        ordered.insert(0, nodes)
        wanted = list(dict.fromkeys([*inputs_of(nodes), *wanted]))
    return ordered


def in_order(nodes: Sequence[fx.Node], wanted: Iterable[fx.Node]) -> list[fx.Node]:
    """``nodes``, which compute one after the other, in the order of need, if those of ``wanted`` among them are needed
    afterwards."""
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
    """Inputs of ``nodes``, one after the other."""
    return chain.from_iterable(node.all_input_nodes for node in nodes)


def _needed_of(run: Sequence[fx.Node], wanted: Iterable[fx.Node]) -> list[fx.Node]:
    """Each of ``wanted`` in ``run`` after what it needs itself."""
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
