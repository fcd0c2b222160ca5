"""Profiles a model block by block, with everything else off the device, so that a device needs room for one block only
(ATOM sec. III-D profiles sub-models of a traced graph); and measures one block quickly, which takes nearly all of a
peer's time.

Equal blocks are measured once. Weights are drawn, so none have to be there. Shapes: B sequences, T tokens, D width.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from muletrain.compute.probe import chip, free_memory, precision_dtype
from muletrain.config.cache import keep, kept
from muletrain.config.profile_file import BlockCost
from muletrain.config.section import Section
from muletrain.errors import CapacityError
from muletrain.model.dropout import Masks
from muletrain.model.make import make_block
from muletrain.model.piece_modules import HeadPiece, piece_module
from muletrain.model.pieces import WHOLE, decoder_of, pieces_of
from muletrain.model.stage import INIT_STD
from muletrain.model.traced.chain import TracedModel
from muletrain.units import format_memory, plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from muletrain.config.schema import Precision
    from muletrain.model.chain import Model, TensorType
    from muletrain.model.module import StageModule
    from muletrain.model.pieces import Inside, Kind, Piece

PASSES, LOADS = (3, 50), 5
"""Fewest passes over a block and most, beside one warm-up pass; and number of copies of the weights to the device."""
BUDGET_S = 2.0
"""Seconds of passes over one block, unless the fewest passes take longer."""
QUICK_S, QUICK_PASSES = 1.0, 4
"""The same for ``block_times``, and the passes for which the time must suffice: with fewer sequences, if need be."""


@dataclass(frozen=True)
class Conditions:
    """The subject of a profile. ``memory``: usable bytes of the device; None: all free bytes."""

    sequences: int
    device: torch.device
    precision: Precision
    memory: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        return precision_dtype(self.precision)

    def room(self) -> int:
        """Bytes that may be used now."""
        free = free_memory(self.device)
        return free if self.memory is None else min(free, self.memory)


def name_of(model: Model, part: int) -> str:
    """The name of part ``part`` of the chain."""
    return "embedding" if part == 0 else "head" if part == model.layers + 1 else f"block {part - 1}"


def alike(model: Model) -> list[list[int]]:
    """The parts of the chain (0: before the first block), equal ones together."""
    keys: list[object] = ["embedding", *["block"] * model.layers, "head"]
    if isinstance(model, TracedModel):
        keys = model.outline.kinds
    groups: dict[object, list[int]] = {}
    for part, key in enumerate(keys):
        groups.setdefault(key, []).append(part)
    return list(groups.values())


def profiled(model: Model, at: Conditions) -> Iterator[BlockCost]:
    """Measure the distinct blocks in order. Raises CapacityError with the numbers for one that does not fit."""
    hidden = torch.randn(at.sequences, model.context, model.width).to(at.dtype)
    samples = model.inputs.shape is not None
    size = plural(at.sequences, "sample") if samples else f"{at.sequences} x {model.context} tokens"
    for parts in alike(model):
        name = name_of(model, parts[0])
        need, has = needed(model, parts[0], at), at.room()
        too_large = (
            f"{name} of the model needs about {format_memory(need)} for its weights, their gradients and the activations "
            f"of {size}, and {format_memory(has)} may be used on {at.device}: take fewer --sequences, a shorter --context, or "
            f"a device with more memory"
        )
        if need > has:
            raise CapacityError(too_large)
        try:
            yield _cost(model, parts, at, hidden)
        except RuntimeError as e:  # torch's lack of memory is one
            problem = " ".join(str(e).split())[:200]
            raise CapacityError(f"{too_large} ({problem})") from e
        if at.device.type == "cuda":
            torch.cuda.empty_cache()


def needed(model: Model, part: int, at: Conditions) -> int:
    """Estimate the bytes that one block takes: weights, gradients, saved activations and outputs."""
    size, tokens = at.dtype.itemsize, at.sequences * model.context
    passed = 3 * size * tokens * model.width
    if part == 0:
        return int(2 * size * model.embedding_params + tokens * model.embedding_kept_bytes(size) + passed)
    if part == model.layers + 1:
        return int(2 * size * model.head_params + model.head_bytes(tokens, size) + passed)
    return int(2 * size * model.params_of(part - 1) + tokens * model.kept_bytes(part - 1, size) + passed)


class Block:
    """One block, alone on the device."""

    def __init__(self, model: Model, part: int, at: Conditions, hidden: Tensor, piece: Piece | None = None) -> None:
        """``piece``: instead of the whole block, the first slice of a kind."""
        runs = ((0, 0), *((layer, layer + 1) for layer in range(model.layers)), (model.layers, model.layers))
        # where stages meet differs from run to run, and what compresses there is small beside a block
        self._module: StageModule = (
            make_block(model.compressed(None), part, runs) if piece is None else piece_module(piece)
        )
        self._device, self._last = at.device, part == model.layers + 1
        shapes = self._module.shapes() | self._module.base_shapes()
        self._host = {name: _drawn(shape, at) for name, shape in shapes.items()}
        self._inputs = _samples(model.inputs, model, at) if part == 0 else hidden.to(at.device)
        self._targets = _samples(model.targets, model, at)

    @property
    def parameter_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._host.values())

    def load(self, *, copy: bool = True) -> float:
        """Copy the weights to the device. Returns seconds. ``copy`` False: not where they are there already."""
        begin = now(self._device)
        loaded = {name: weight.to(self._device, copy=copy, non_blocking=True) for name, weight in self._host.items()}
        took_s = now(self._device) - begin
        self._module.bind(loaded)
        return took_s

    def once(self, sequences: int | None = None) -> tuple[float, float]:
        """Returns seconds of forward and of backward, with gradients of weights and inputs, as in training.
        ``sequences``: fewer than the microbatch has."""
        inputs = self._inputs[:sequences].detach()
        wanted: list[Tensor] = [p for p in self._module.parameters() if p.requires_grad]
        if not self._module.is_first:
            wanted.append(inputs.requires_grad_())
        begin = now(self._device)
        masks, seed = Masks(0, 0, 0), None
        if isinstance(self._module, HeadPiece):
            output = self._module.score(inputs, self._targets[:sequences])
            seed = torch.ones_like(output)
        elif self._last:
            output = self._module.loss(inputs, self._targets[:sequences], masks)
        else:
            output = self._module(inputs, masks)
            seed = torch.ones_like(output)
        between = now(self._device)
        if wanted:
            torch.autograd.grad(output, wanted, seed)
        return between - begin, now(self._device) - between

    def median_s(self, fewest: int, budget_s: float, sequences: int | None = None) -> tuple[float, float]:
        """Returns the medians of ``once``, repeated for ``budget_s``."""
        deadline, found = time.perf_counter() + budget_s, list[tuple[float, float]]()
        while len(found) < fewest or (len(found) < PASSES[1] and time.perf_counter() < deadline):
            found.append(self.once(sequences))
        forward_s, backward_s = (median(times) for times in zip(*found, strict=True))
        return forward_s, backward_s

    def memory(self) -> tuple[int, int]:
        """Returns bytes that autograd keeps from forward to backward, and the peak beyond these."""
        weights = {w.untyped_storage()._cdata for w in self._module.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                kept[storage._cdata] = storage.nbytes()
            return tensor

        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                self.once()
            peak = torch.cuda.max_memory_allocated(self._device) - before
        else:
            with _Live() as live, saved_tensors_hooks(pack, lambda tensor: tensor):
                self.once()
            peak = live.peak
        activations, inputs = sum(kept.values()), kept.get(self._inputs.untyped_storage()._cdata, 0)
        return activations, max(0, peak - (activations - inputs))


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class is untyped
    """Counts the bytes of live tensors that operators make. Memory inside a kernel is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage(), given)
        return made

    def _count(self, storage: Any, given: set[int]) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known or key in given:  # a view, or the result of an operator in place
            return
        self._known.add(key)
        self._now += nbytes
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._now -= nbytes


def _samples(kind: TensorType, model: Model, at: Conditions) -> Tensor:
    """A microbatch of ``kind``."""
    shape = kind.batch(at.sequences, model.context)
    drawn = torch.randint(0, model.vocab, shape) if kind.dtype == "int64" else torch.rand(shape)
    return drawn.to(at.device)


def _drawn(shape: tuple[int, ...], at: Conditions) -> Tensor:
    weight = torch.ones(shape) if len(shape) == 1 else torch.randn(shape).mul_(INIT_STD)
    weight = weight.to(at.dtype)
    return weight.pin_memory() if at.device.type == "cuda" else weight


def _cost(model: Model, parts: list[int], at: Conditions, hidden: Tensor) -> BlockCost:
    block = Block(model, parts[0], at, hidden)
    load_s = median(block.load() for _ in range(LOADS))
    block.once()  # libraries load, and choose how to compute
    forward_s, backward_s = block.median_s(PASSES[0], BUDGET_S)
    activations, workspace = block.memory()
    return BlockCost(
        first=parts[0],
        parts=tuple(parts),
        name=name_of(model, parts[0]),
        forward_s=forward_s,
        backward_s=backward_s,
        load_s=load_s,
        parameter_bytes=block.parameter_bytes,
        activation_bytes=activations,
        workspace_bytes=workspace,
    )


@dataclass(frozen=True)
class BlockTimes:
    """Median times of one block for a microbatch of ``sequences`` times ``tokens`` [s]."""

    forward_s: float
    backward_s: float
    sequences: int
    tokens: int


def _quick(model: Model, part: int, at: Conditions, budget_s: float, piece: Piece | None = None) -> BlockTimes:
    """Measure one block, or a ``piece``, with as few sequences as the budget demands. Raises CapacityError if memory is
    too small."""
    try:
        block = Block(model, part, at, torch.randn(at.sequences, model.context, model.width).to(at.dtype), piece)
        block.load(copy=False)
        block.once(1)  # libraries load, and choose how to compute
        count = max(1, min(at.sequences, int(budget_s / QUICK_PASSES / sum(block.once(1)))))
        return BlockTimes(*block.median_s(1, budget_s, count), count, model.context)
    except RuntimeError as e:  # torch's lack of memory is one
        problem = " ".join(str(e).split())[:200]
        raise CapacityError(f"a block of the model could not be computed on {at.device}: {problem}") from e


class KindTimes(Section):
    """Entry of the cache: seconds of a forward and of a backward for each token, by kind of block (``alike``)."""

    each: tuple[tuple[float, float], ...]


def part_times(model: Model, at: Conditions, inside: Inside = WHOLE) -> dict[int | Kind, tuple[float, float]]:
    """Seconds of a forward and of a backward for each token, by part of the chain (0: before the first block), or by kind
    of piece where blocks are cut ``inside``. One block or piece of each kind is measured (ATOM, sec. III-D), unless the
    cache has this model on this kind of device. Raises CapacityError if memory is too small."""
    groups: list[tuple[Sequence[int | Kind], int, Piece | None]] = []
    decoder = decoder_of(model.compressed(None))
    for parts in alike(model):
        pieces = [] if decoder is None else [p for p in pieces_of(decoder, parts[0], inside) if p.opens]
        groups += [([piece.kind], parts[0], piece) for piece in pieces] or [(parts, parts[0], None)]
    about: dict[str, object] = {
        "model": model.compressed(None).to_json(),
        "device": chip(at.device),
        "sequences": at.sequences,
    }
    about |= {"precision": at.precision.value, "threads": torch.get_num_threads(), "torch": torch.__version__}
    if inside != WHOLE:
        about["inside"] = list(inside)
    known = kept("times", about, KindTimes)
    if known is None or len(known.each) != len(groups):
        found = (_quick(model, part, at, QUICK_S / 2, *filter(None, [piece])) for _, part, piece in groups)
        tokens = ((times, times.sequences * times.tokens) for times in found)
        known = KindTimes(each=tuple((times.forward_s / n, times.backward_s / n) for times, n in tokens))
        keep("times", about, known)
    return {part: times for (parts, *_), times in zip(groups, known.each, strict=True) for part in parts}


def block_times(spec: Model, sequences: int, device: torch.device, precision: Precision) -> BlockTimes:
    """Measure the first block: dropout, residuals, norms, attention over the whole context. Uses fewer than
    ``sequences`` to save time. Raises CapacityError if memory is too small."""
    return _quick(spec, 1, Conditions(sequences, device, precision), QUICK_S)


def now(device: torch.device) -> float:
    """Seconds, once ``device`` has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
