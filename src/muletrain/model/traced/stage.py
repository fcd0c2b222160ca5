"""A run of traced blocks as a torch module."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from muletrain.model.module import StageModule
from muletrain.model.traced.operators import Causal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from muletrain.model.chain import Model
    from muletrain.model.dropout import Masks
    from muletrain.model.traced.cutting import Parts

TABLES = 4
"""Shapes of microbatches whose tables are kept."""


class TracedStage(StageModule):
    """Parts ``first`` to ``end`` of a chain. ``parts`` makes the chain for a working precision."""

    def __init__(
        self,
        spec: Model,
        parts: Callable[[torch.dtype], Parts],
        run: tuple[int, int],
        shapes: Mapping[str, tuple[int, ...]],
        constants: Mapping[str, Tensor],
    ) -> None:
        chain = parts(torch.float32)
        super().__init__(spec, first=run[0] == 0, last=run[1] == len(chain.parts))
        self._parts, self._run, self._chain = parts, run, chain
        self._constants = dict(constants)
        self._tables = functools.lru_cache(maxsize=TABLES)(self._make_tables)
        names = dict.fromkeys(name for part in chain.parts[slice(*run)] for name in part.weights)
        for name in names:
            place(self, name, nn.Parameter(torch.empty(shapes[name], device="meta")))

    def bind(self, weights: Mapping[str, Tensor]) -> StageModule:
        super().bind(weights)
        chain = self._parts(next(iter(weights.values())).dtype)
        if chain is not self._chain:
            self._chain = chain
            self._tables.cache_clear()
        return self

    def forward(self, inputs: Tensor, masks: Masks | None = None, caches: Mapping[int, Any] | None = None) -> Tensor:
        return self._run_parts(inputs, None, masks)

    def loss(self, inputs: Tensor, targets: Tensor, masks: Masks | None = None) -> Tensor:
        if not self.spec.own_loss:
            return super().loss(inputs, targets, masks)
        return self._run_parts(inputs, targets, masks).float()

    def _run_parts(self, inputs: Tensor, targets: Tensor | None, masks: Masks | None) -> Tensor:
        samples = self.is_first and self._chain.lead == 1
        sequences, length = inputs.shape[0], 1 if samples else inputs.shape[1]
        chain, weights = self._chain, dict(self.named_parameters())
        tables = self._tables(sequences, length, inputs.device)
        first, end = self._run
        env = (
            {chain.inputs: self._cast(inputs)} if self.is_first else unpack(inputs, chain.passed[first - 1], chain.lead)
        )
        for number in range(first, end):
            part = chain.parts[number]
            if number == len(chain.parts) - 1 and chain.targets is not None:
                assert targets is not None, "the last part computes a loss"
                env[chain.targets] = self._cast(targets.to(inputs.device))
            given = [weights[n] for n in part.weights] + [env[n] for n in part.inputs]
            given += [tables[n] for n in part.tables]
            outputs = part.function(*given, inputs.device, masks, part.site, sequences)
            if number == len(chain.parts) - 1:
                last: Tensor = outputs[0]
                return last
            made = {**env, **dict(zip(part.outputs, outputs, strict=True))}
            env = {node.name: made[node.name] for node in chain.passed[number]}
        return pack([env[node.name] for node in chain.passed[end - 1]], self.spec.width, (sequences, length))

    def _cast(self, samples: Tensor) -> Tensor:
        """Floats in the precision of the weights."""
        return samples.to(next(self.parameters()).dtype) if samples.is_floating_point() else samples

    @torch.no_grad()
    def _make_tables(self, sequences: int, length: int, device: torch.device) -> dict[str, Any]:
        holders = self._chain.tables.graph.find_nodes(op="placeholder")
        dtypes = [holder.meta["val"].dtype for holder in holders[: len(self._chain.constants)]]
        given = [self._constants[n].to(device, dtype) for n, dtype in zip(self._chain.constants, dtypes, strict=True)]
        made = self._chain.tables(*given, sequences, length, device)
        named = dict(zip(self._chain.table_names, made, strict=True))
        return {k: Causal() if k in self._chain.masks and is_causal(v, length) else v for k, v in named.items()}


def is_causal(mask: object, length: int) -> bool:
    """Does a mask [..., T, T] let each token see exactly itself and those before it?"""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape[-2:]) != (length, length):
        return False
    return bool((mask == torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()).all())


def place(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register ``parameter`` under a dotted name."""
    *path, leaf = name.split(".")
    for step in path:
        if step not in module._modules:
            module.add_module(step, nn.Module())
        child = module._modules[step]
        assert child is not None
        module = child
    module.register_parameter(leaf, parameter)


def numbers(node: fx.Node, lead: int) -> int:
    """Numbers per token of a value [B, T, ...] that goes from block to block (``lead`` 2), or per sample of [B, ...]."""
    return math.prod(int(size) for size in node.meta["val"].shape[lead:])


def pack(values: list[Tensor], width: int, lead: tuple[int, int]) -> Tensor:
    """All ``values`` side by side in one tensor [B, T, width], with zeros at the end where they are fewer. ``lead``: B and
    T, which is 1 for values [B, ...]."""
    flat = [value.reshape(*lead, -1) for value in values]
    packed = flat[0] if len(flat) == 1 else torch.cat(flat, dim=2)
    return packed if packed.shape[2] == width else nn.functional.pad(packed, (0, width - packed.shape[2]))


def unpack(packed: Tensor, nodes: tuple[fx.Node, ...], lead: int) -> dict[str, Tensor]:
    """The inverse of ``pack``: values by name, in the precision that the chain has there."""
    found, begin = {}, 0
    for node in nodes:
        val, count = node.meta["val"], numbers(node, lead)
        piece = packed if count == packed.shape[2] else packed[..., begin : begin + count]
        begin += count
        found[node.name] = piece.to(val.dtype).reshape(*packed.shape[:lead], *(int(size) for size in val.shape[lead:]))
    return found
