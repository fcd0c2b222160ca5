"""A run of traced blocks as a torch module."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from muletrain.errors import ConfigError
from muletrain.model.compression import PREFIX, Borders
from muletrain.model.loss import Head
from muletrain.model.module import StageModule
from muletrain.model.traced.held import quantised, recast
from muletrain.model.traced.operators import Causal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from muletrain.model.chain import Model
    from muletrain.model.dropout import Masks
    from muletrain.model.traced.cutting import Part, Parts

TABLES = 4
"""Number of microbatch shapes with kept tables."""
MOST_MASK = 1 << 27
"""Largest mask that is made for an estimate, in numbers."""


class Tables:
    """The tables of a ``chain``, shared by all stages and blocks in this process."""

    def __init__(self, chain: Parts, constants: Mapping[str, Tensor]) -> None:
        self.chain, self._constants = chain, constants
        self.of = functools.lru_cache(maxsize=TABLES)(self._make)
        self.at = functools.lru_cache(maxsize=TABLES)(self._made_at)  # a tensor is equal to itself alone
        self.most_bytes = functools.lru_cache(maxsize=TABLES)(self._most_bytes)

    @torch.no_grad()
    def _make(self, sequences: int, length: int, device: torch.device) -> dict[str, Any]:
        chain, made = self.chain, self._values(sequences, length, device)
        named = dict(zip(chain.table_names, made, strict=True))
        return {k: Causal() if k in chain.masks and is_causal(v, length) else v for k, v in named.items()}

    @torch.no_grad()
    def _made_at(self, positions: Tensor, device: torch.device) -> dict[str, Any]:
        sequences, length = positions.shape
        return dict(zip(self.chain.table_names, self._values(sequences, length, device, positions), strict=True))

    def causal(self, length: int) -> set[str]:
        """Masks for which fused kernels need no table, in sequences of ``length`` tokens.

        A mask's function compares positions, and compares constants with distances (a window) or quotients (chunks) of
        positions. A mask that is causal a little beyond the largest constant is causal in longer sequences, too. A mask
        from a table, or with constants too large to try, does not count as causal: the estimate then has a table too
        many.
        """
        tried = min(length, self._largest_number(length) + 2)
        if not self.chain.masks or self.chain.apart or tried**2 > MOST_MASK:
            return set()
        made = self._make(1, tried, torch.device("cpu"))
        return {name for name, table in made.items() if isinstance(table, Causal)}

    def _largest_number(self, length: int) -> int:
        """The largest integer below ``length`` in the functions of masks; ``length`` if a mask depends on a table."""
        graph = self.chain.tables.graph
        named = zip(self.chain.table_names, graph.output_node().args[0], strict=True)  # type: ignore[arg-type]
        origins, found = {node for name, node in named if name in self.chain.masks}, [0]
        values = dict(
            zip(graph.find_nodes(op="placeholder"), (self._constants[n] for n in self.chain.constants), strict=False)
        )
        for node in reversed(graph.nodes):
            if node not in origins:
                continue
            origins.update(node.all_input_nodes)
            fx.node.map_aggregate((node.args, node.kwargs), lambda x: found.append(x) if type(x) is int else None)
            if node in values:
                found.append(int(values[node]) if values[node].numel() == 1 else length)
        return max(number for number in found if number <= length)

    def _values(
        self, sequences: int, length: int, device: torch.device, positions: Tensor | None = None
    ) -> Sequence[Any]:
        chain = self.chain
        holders = chain.tables.graph.find_nodes(op="placeholder")
        dtypes = [holder.meta["val"].dtype for holder in holders[: len(chain.constants)]]
        given = [self._constants[n].to(device, dtype) for n, dtype in zip(chain.constants, dtypes, strict=True)]
        if chain.apart:
            places = torch.arange(length).expand(sequences, -1) if positions is None else positions
            given.append(places.to(device))
        made: Sequence[Any] = chain.tables(*given, sequences, length, device)
        return made

    def _most_bytes(self, sequences: int, length: int) -> int:
        """Bytes of the tables of ``TABLES`` such shapes, and of the masks for the last shape."""
        made = zip(self.chain.table_names, self._values(sequences, length, torch.device("meta")), strict=True)
        sizes = {name: table.nbytes for name, table in made if isinstance(table, Tensor)}
        return sum(sizes.values()) + (TABLES - 1) * sum(sizes[name] for name in sizes.keys() - self.causal(length))


class TracedStage(StageModule):
    """Parts ``first`` to ``end`` of a chain. ``tables`` has the chain for a working precision."""

    def __init__(
        self,
        spec: Model,
        tables: Callable[[torch.dtype], Tables],
        run: tuple[int, int],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        chain = tables(torch.float32).chain
        super().__init__(spec, max(0, run[0] - 1), first=run[0] == 0, last=run[1] == len(chain.parts))
        self._tables_in, self._run, self.tables = tables, run, tables(torch.float32)
        self._dtype = torch.float32
        names = dict.fromkeys(name for part in chain.parts[slice(*run)] for name in part.weights)
        for name in names:
            place(self, name, nn.Parameter(torch.empty(shapes[name], device="meta")))
        if spec.borders:
            self._compress(chain)

    def _compress(self, chain: Parts) -> None:
        """Add the layers at borders. Raises ConfigError for a border that more goes through than one value of a token."""
        first, end = self._run
        with torch.device("meta"):
            borders = Borders(self.spec, max(0, first - 1), min(end, len(chain.parts) - 1) - 1)
        for border in map(int, borders._modules):
            vals = [node.meta["val"] for node in chain.passed[border + 1]]
            if len(vals) != 1 or not vals[0].is_floating_point() or vals[0].shape[-1] != self.spec.width:
                raise ConfigError(
                    f"model.compression: from layer {border + 1} go {', '.join(str(list(val.shape[1:])) for val in vals)}, and only "
                    f"one tensor of {self.spec.width} features can be compressed; leave it out, or cut elsewhere (fleet.layers)"
                )
        if PREFIX in self._modules:
            raise ConfigError(f"model.compression: the model has a part named '{PREFIX}'; rename that")
        self.compression = borders

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in super().shapes().items() if name not in self.spec.base}

    def base_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in super().shapes().items() if name in self.spec.base}

    def held(self, name: str, weight: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        kind = self.spec.quantised.get(name)
        return weight.to(device) if kind is None else quantised(weight, kind, dtype, device)

    def bind(self, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> StageModule:
        """See ``StageModule.bind``. A part without parameters computes in the precision of the remaining
        ``weights``."""
        super().bind(weights, dtype)
        exact = self.tables.chain.frozen
        kinds = (weight.dtype for name, weight in weights.items() if name not in exact)
        self._dtype = dtype or next(kinds, next((weight.dtype for weight in weights.values()), self._dtype))
        self.tables = self._tables_in(self._dtype)
        return self

    @property
    def frozen(self) -> Collection[str]:
        return () if self.spec.base else self.tables.chain.frozen

    def exact(self, dtype: torch.dtype) -> frozenset[str]:
        kinds, own = self._tables_in(dtype).chain.frozen, self.shapes()
        return frozenset(name for name, kind in kinds.items() if kind != dtype and name in own)

    def forward(
        self,
        inputs: Tensor,
        masks: Masks | None = None,
        caches: Mapping[int, Any] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        return self._run_parts(inputs, None, masks, positions)[0]

    def loss(
        self,
        inputs: Tensor,
        targets: Tensor,
        masks: Masks | None = None,
        scale: float = 1.0,
        positions: Tensor | None = None,
    ) -> Tensor:
        if not self.spec.own_loss:
            return super().loss(inputs, targets, masks, scale, positions)
        (loss,) = self._run_parts(inputs, targets, masks)
        return loss.float()

    def before_head(self, inputs: Tensor, masks: Masks | None, positions: Tensor | None = None) -> Head:
        head, weights = self.tables.chain.parts[-1], dict[str, Tensor](self.named_parameters())
        given = self._in_kinds(head.weights, [weights[name] for name in head.weights])

        def logits(values: Sequence[Tensor]) -> Tensor:
            x = values[0]
            tables = self.tables.of(1, x.shape[1], x.device) if head.tables else {}
            sizes = [tables[name] for name in head.tables]
            found: Tensor = head.function(*given, *values, *sizes, x.device, None, head.site, 1)[0]
            return found

        return Head(
            logits, self._run_parts(inputs, None, masks, positions, end=-1), [w for w in given if w.requires_grad]
        )

    def _in_kinds(self, names: Sequence[str], given: Sequence[Tensor]) -> list[Tensor]:
        """The weights ``given``. Operators get frozen weights in the types of the graph."""
        kinds = self.tables.chain.frozen
        return [recast(weight, kinds.get(name, weight.dtype)) for name, weight in zip(names, given, strict=True)]

    def _compute(self, part: Part, *given: Any) -> Any:
        """``part`` of weights, inputs and more."""
        weights = self._in_kinds(part.weights, given[: len(part.weights)])
        return part.function(*weights, *given[len(part.weights) :])

    def _run_parts(
        self,
        inputs: Tensor,
        targets: Tensor | None,
        masks: Masks | None,
        positions: Tensor | None = None,
        end: int = 0,
    ) -> list[Tensor]:
        """The values for the next stage; of the last part, the logits or the loss. ``end`` -1: instead, the inputs of the
        last part."""
        samples = self.is_first and self.tables.chain.lead == 1
        sequences, length = inputs.shape[0], 1 if samples else inputs.shape[1]
        chain, weights = self.tables.chain, dict[str, Tensor](self.named_parameters())
        of, device = self.tables, inputs.device
        tables = of.of(sequences, length, device) if positions is None else of.at(positions, device)
        first, last = self._run
        if self.is_first:
            env = {chain.inputs: self._cast(inputs)}
        else:
            passed = self.compression.enter(self._cast(inputs), first - 1) if self.spec.borders else inputs
            env = unpack(passed, chain.passed[first - 1], chain.lead)
        for number in range(first, last + end):
            part = chain.parts[number]
            if number == len(chain.parts) - 1 and chain.targets is not None:
                assert targets is not None, "the last part computes a loss"
                env[chain.targets] = self._cast(targets.to(inputs.device))
            given = [weights[n] for n in part.weights] + [env[n] for n in part.inputs]
            given += [tables[n] for n in part.tables]
            rest = (inputs.device, masks, part.site, sequences)
            is_block = 0 < number < len(chain.parts) - 1
            compute = functools.partial(self._compute, part)
            outputs = self._block(compute, *given, *rest) if is_block else compute(*given, *rest)
            if number == len(chain.parts) - 1:
                return [outputs[0]]
            made = {**env, **dict(zip(part.outputs, outputs, strict=True))}
            env = {node.name: made[node.name] for node in chain.passed[number]}
            if number - 1 in self.spec.borders:
                ((name, value),) = env.items()
                value = self.compression.leave(value, number - 1)
                if number == last - 1:
                    return [pack([value], self.spec.passed, (sequences, length))]
                env = {name: self.compression.enter(value, number)}
        if end:
            return [env[name] for name in chain.parts[-1].inputs]
        return [pack([env[node.name] for node in chain.passed[last - 1]], self.spec.width, (sequences, length))]

    def _cast(self, samples: Tensor) -> Tensor:
        """Floats in the precision of the weights."""
        return samples.to(self._dtype) if samples.is_floating_point() else samples


def is_causal(mask: object, length: int) -> bool:
    """Does a mask [..., T, T] let each token see exactly itself and all earlier tokens?"""
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
    """Numbers per token of a value [B, T, ...] between blocks (``lead`` 2), or per sample of [B, ...]."""
    return math.prod(int(size) for size in node.meta["val"].shape[lead:])


def pack(values: list[Tensor], width: int, lead: tuple[int, int]) -> Tensor:
    """All ``values`` side by side in one tensor [B, T, width], padded with zeros. ``lead``: B and T, which is 1 for
    values [B, ...]."""
    flat = [value.reshape(*lead, -1) for value in values]
    packed = flat[0] if len(flat) == 1 else torch.cat(flat, dim=2)
    return packed if packed.shape[2] == width else nn.functional.pad(packed, (0, width - packed.shape[2]))


def unpack(packed: Tensor, nodes: tuple[fx.Node, ...], lead: int) -> dict[str, Tensor]:
    """The inverse of ``pack``: values by name, in the chain's precision."""
    found, begin = {}, 0
    for node in nodes:
        val, count = node.meta["val"], numbers(node, lead)
        piece = packed if count == packed.shape[2] else packed[..., begin : begin + count]
        begin += count
        found[node.name] = piece.to(val.dtype).reshape(*packed.shape[:lead], *(int(size) for size in val.shape[lead:]))
    return found
