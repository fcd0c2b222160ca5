"""Builds, traces and cuts a model, once in a process.

Planning asks for the outline alone. The outline comes from the cache, or else from a short model with the first block
of each kind, since tracing takes a quarter of a second for each block. A chain for computing or for comparing digests
is traced whole.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from muletrain.errors import ConfigError
from muletrain.model.chain import TOKENS, Model
from muletrain.model.traced.outline import ADAPTER, Outline, agreed, alike, extend, keep_short, known, lengthened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor, nn

    from muletrain.model.traced.cutting import Parts
    from muletrain.model.traced.stage import Tables

WORTHWHILE = 8
"""Blocks that a short model must save; otherwise the whole model is traced at once."""


class Described(Model):
    """A model that is traced."""

    architecture: str
    """As JSON with sorted keys: the ``transformers`` configuration, or the 'factory' of a module with its own loss,
    with 'arguments' and inputs ('inputs', 'targets', 'vocab_size')."""

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """Fields of ``architecture``."""
        found: dict[str, Any] = json.loads(self.architecture)
        return found


@dataclass(frozen=True)
class Made:
    """The outcome of tracing."""

    parts: Parts
    constants: dict[str, Tensor]
    outline: Outline
    tables: Tables


class _Kinds(NamedTuple):
    """The blocks of a built model of ``transformers``."""

    path: str
    """Path of the list of blocks."""
    first: list[int]
    """For each block, the first block of that kind."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of all parameters of the model; tied parameters once."""


@functools.lru_cache(maxsize=16)
def outlined(spec: Described) -> Outline:
    """The outline, without tracing if cached. A user's module is always traced: the code may change."""
    if spec.own_loss:
        return made(spec, "float32").outline
    return known(spec.architecture, spec.context) or _of_short(spec) or made(spec, "float32").outline


@functools.lru_cache(maxsize=16)
def shapes_of(spec: Described) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters by name, tied ones once: the outline's, which are those of the built model, or no outline can be
    made. So the files of a model that is not computed, such as the base of an adapter, are checked without tracing."""
    import torch

    if spec.own_loss or known(spec.architecture, spec.context) is not None:
        return outlined(spec).shapes
    return _shapes(_built(spec, torch.float32)[0])


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    from muletrain.model.traced.export import INSIDE

    return {name.removeprefix(INSIDE): tuple(p.shape) for name, p in module.named_parameters()}


def digest_of(spec: Described) -> str:
    """Digest of the whole chain, for machines to compare. From the cache, or by tracing."""
    found = None if spec.own_loss else known(spec.architecture, spec.context, whole=True)
    digest = (found or made(spec, "float32").outline).digest
    assert digest is not None
    return digest


@functools.lru_cache(maxsize=8)
def made(spec: Described, precision: str, blocks: int | None = None) -> Made:
    """Build, trace and cut the model, or a model of the first ``blocks``; ``precision``: 'float32', 'bfloat16' or
    'float16'. Raises ConfigError."""
    import torch

    from muletrain.model.traced.costs import costs
    from muletrain.model.traced.cutting import cut
    from muletrain.model.traced.export import trace
    from muletrain.model.traced.factory import check_positions, check_vocabulary, fingerprint
    from muletrain.model.traced.stage import Tables, numbers

    dtype = getattr(torch, precision)
    module, buffers = _built(spec, dtype)
    if blocks is not None:
        del _layers(module)[1][blocks:]
    try:
        given = [spec.inputs, *([spec.targets] if spec.own_loss else [TOKENS] if spec.apart else [])]
        traced = trace(module, spec.context, given, dtype, own=spec.own_loss, repeats=blocks is None)
        if spec.own_loss:
            check_vocabulary(traced, spec.vocab)
        parts = cut(traced, module)
        used = {name for part in parts.parts for name in part.weights}
        if unused := sorted(traced.shapes.keys() - used):
            raise ConfigError(
                f"{unused[0]} takes no part in {'the loss' if spec.own_loss else 'predicting the next token'} ({len(unused)} "
                f"such parameters), so it could not be trained; take a model without it"
            )
        if used == parts.frozen.keys():
            raise ConfigError("no parameter is trained, since all have requires_grad=False; leave it on for some")
    except ConfigError as e:
        raise ConfigError(f"model.{'factory' if spec.own_loss else 'from'}: {e}") from e
    width = max(sum(numbers(node, parts.lead) for node in nodes) for nodes in parts.passed)
    constants = {**buffers(), **traced.values}
    tables = Tables(parts, constants)
    if spec.own_loss:
        check_positions(parts, tables, spec.context)
    own = [fingerprint("" if name in traced.values else name, constants[name]) for name in parts.constants]
    found = Outline(
        digest=_digest(traced.shapes, parts, own if spec.own_loss else []) if blocks is None else None,
        width=width,
        shapes=traced.shapes,
        frozen={name: str(kind).removeprefix("torch.") for name, kind in sorted(parts.frozen.items())},
        parts=costs(parts, traced, spec.context, tables.causal(spec.context), _linear(spec, module)),
    )
    if not spec.own_loss and precision == "float32" and blocks is None:
        found = agreed(found, spec.architecture, spec.context)
    return Made(parts, constants, found, tables)


@functools.lru_cache(maxsize=8)
def computing(spec: Described, precision: str) -> Tables:
    """The graphs and tables that stages compute with. From the cache if equal to the agreed chain, or else by
    tracing."""
    from muletrain.model.traced.kept import keep_graphs, kept_graphs
    from muletrain.model.traced.stage import Tables

    if spec.own_loss:
        return made(spec, precision).tables
    agreed_on, found = digest_of(spec), kept_graphs(spec.architecture, spec.context, precision)
    if found is not None and (precision != "float32" or _digest(outlined(spec).shapes, found.parts, []) == agreed_on):
        return Tables(found.parts, found.constants)
    fresh = made(spec, precision)
    keep_graphs(fresh.parts, fresh.constants, spec.architecture, spec.context, precision)
    return fresh.tables


@functools.lru_cache(maxsize=8)
def kept_in_16_bits(spec: Described) -> tuple[float, ...]:
    """``PartOutline.kept_bytes`` of each part in bf16, from the cache if present."""
    if not (found := outlined(spec).kept_16):
        kinds = outlined(spec).kinds[1:-1]
        like = [kinds.index(kind) for kind in kinds]
        if spec.own_loss or (short := _short(spec, "bfloat16", like)) is None:
            found = tuple(part.kept_bytes for part in made(spec, "bfloat16").outline.parts)
        else:
            first, *blocks, last = (part.kept_bytes for part in short.outline.parts)
            found = (first, *(blocks[k] for k in like), last)
        if not spec.own_loss:
            extend(spec.architecture, spec.context, kept_16=found)
    return found


@functools.lru_cache(maxsize=64)
def tables_bytes_of(spec: Described, sequences: int) -> int:
    """See ``Model.tables_bytes``; from the cache if present."""
    found = outlined(spec).tables.get(sequences)
    if found is None:
        found = (_short_made(spec) or made(spec, "float32")).tables.most_bytes(sequences, spec.context)
        if not spec.own_loss:
            extend(spec.architecture, spec.context, tables={sequences: found})
    return found


def _of_short(spec: Described) -> Outline | None:
    """The outline of the whole model, by tracing only the first block of each kind."""
    with _without_collection():
        if (kinds := _kinds(spec)) is None or (short := _short(spec, "float32", kinds.first)) is None:
            return None
        found = lengthened(short.outline, kinds.path, kinds.first, kinds.shapes)
    if found is not None:
        keep_short(found, spec.architecture, spec.context)
    return found


@contextmanager
def _without_collection() -> Iterator[None]:
    """Suspend garbage collection: imported modules of torch and ``transformers``, and the graph, are no garbage, and
    scanning takes a tenth of the time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _short_made(spec: Described) -> Made | None:
    return None if (kinds := _kinds(spec)) is None else _short(spec, "float32", kinds.first)


def _short(spec: Described, precision: str, first: Sequence[int]) -> Made | None:
    """The model up to the first block of the last kind, and one more, so that shared values are seen; None: no shorter,
    or not traceable. ``first``: for each block, the first block of that kind."""
    blocks = max(first) + 2
    if blocks >= len(first):
        return None
    try:
        found = made(spec, precision, blocks)
    except ConfigError:
        return None
    return found if len(found.outline.parts) == blocks + 2 else None


@functools.lru_cache(maxsize=8)
def _kinds(spec: Described) -> _Kinds | None:
    """The kinds of blocks; None: a short model saves too little, or the blocks are in no list."""
    import torch

    from muletrain.model.traced.export import INSIDE

    if spec.own_loss:
        return None
    module = _built(spec, torch.float32)[0]
    try:
        path, layers = _layers(module)
    except ConfigError:
        return None
    model: Any = module.get_submodule(INSIDE.removesuffix("."))
    first = alike(layers, model.config.to_dict())
    if len(first) - max(first) - 2 < WORTHWHILE:
        return None
    return _Kinds(path.removeprefix(INSIDE), first, _shapes(module))


def _layers(module: nn.Module) -> tuple[str, nn.ModuleList]:
    """Path and list of the modules with most of the parameters. Raises ConfigError if no list exists."""
    from torch import nn

    lists = [(path, child) for path, child in module.named_modules() if isinstance(child, nn.ModuleList) and len(child)]
    if not lists:
        raise ConfigError("model.architecture: its blocks are in no list, so there is no shorter model of the kind")
    return max(lists, key=lambda found: sum(p.numel() for p in found[1].parameters()))


def _linear(spec: Described, module: nn.Module) -> set[str]:
    """The matrices of all linear layers, of a model with an adapter."""
    if ADAPTER not in spec.config:
        return set()
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from muletrain.model.traced.export import INSIDE

    layers = (path for path, child in module.named_modules() if isinstance(child, nn.Linear | Conv1D))
    return {f"{path.removeprefix(INSIDE)}.weight" for path in layers}


def _digest(shapes: Mapping[str, tuple[int, ...]], parts: Parts, buffers: list[str]) -> str:
    """``buffers``: contents of the buffers of a user's module, in a few digits."""
    codes = [hashlib.sha256(part.code.encode()).hexdigest() for part in parts.parts]
    names = [[[name, shapes[name]] for name in part.weights] for part in parts.parts]
    return hashlib.sha256(json.dumps([codes, names, parts.tables.code, *buffers]).encode()).hexdigest()


def _built(spec: Described, dtype: torch.dtype) -> tuple[nn.Module, Callable[[], dict[str, Tensor]]]:
    """The module to trace, and a function that makes the buffers' values."""
    if spec.own_loss:
        from muletrain.model.traced import factory

        module, buffers = factory.build(spec.config, dtype)
        return factory.Loss(module), lambda: buffers
    from muletrain.model.traced import architecture as hf

    model = hf.build(spec.config, dtype)
    whole = (hf.Apart if spec.apart else hf.Whole)(spec, hf.at_one_length(model))
    return whole, lambda: hf.buffers_of(model, spec.context)
