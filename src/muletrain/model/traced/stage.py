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
        sequences, length = inputs.shape[0], inputs.shape[1]
        chain, weights = self._chain, dict(self.named_parameters())
        tables = self._tables(sequences, length, inputs.device)
        first, end = self._run
        env = {chain.parts[0].inputs[0]: inputs} if self.is_first else unpack(inputs, chain.passed[first - 1])
        for number in range(first, end):
            part = chain.parts[number]
            given = [weights[n] for n in part.weights] + [env[n] for n in part.inputs]
            given += [tables[n] for n in part.tables]
            outputs = part.function(*given, inputs.device, masks, part.site, sequences)
            if number == len(chain.parts) - 1:
                logits: Tensor = outputs[0]
                return logits
            made = {**env, **dict(zip(part.outputs, outputs, strict=True))}
            env = {node.name: made[node.name] for node in chain.passed[number]}
        return pack([env[node.name] for node in chain.passed[end - 1]], self.spec.width)

    @torch.no_grad()
    def _make_tables(self, sequences: int, length: int, device: torch.device) -> dict[str, Any]:
        given = [self._constants[name].to(device) for name in self._chain.constants]
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


def numbers(node: fx.Node) -> int:
    """Numbers per token of a value [B, T, ...] that goes from block to block."""
    return math.prod(int(size) for size in node.meta["val"].shape[2:])


def pack(values: list[Tensor], width: int) -> Tensor:
    """All ``values`` [B, T, ...] side by side in one tensor [B, T, width], with zeros at the end where they are fewer."""
    flat = [value.flatten(2) if value.dim() > 2 else value.unsqueeze(2) for value in values]
    packed = flat[0] if len(flat) == 1 else torch.cat(flat, dim=2)
    return packed if packed.shape[2] == width else nn.functional.pad(packed, (0, width - packed.shape[2]))


def unpack(packed: Tensor, nodes: tuple[fx.Node, ...]) -> dict[str, Tensor]:
    """The inverse of ``pack``: values by name, in the precision that the chain has there."""
    found, begin = {}, 0
    for node in nodes:
        val, count = node.meta["val"], numbers(node)
        piece = packed if count == packed.shape[2] else packed[..., begin : begin + count]
        begin += count
        found[node.name] = piece.to(val.dtype).view(*packed.shape[:2], *(int(size) for size in val.shape[2:]))
    return found
