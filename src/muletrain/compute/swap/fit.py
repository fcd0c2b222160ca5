"""Which sub-models of a stage fit into how much memory, and how many microbatches a load is worth.

The rules: everything inside a sub-model is computed again before the backward, except for the model's last sub-model,
where the backward follows the forward; activations between sub-models are kept in backing memory; the gradient of a
sub-model is summed on the device over the microbatches of a round. C is the smallest number of microbatches with which
loading is hidden as well as possible (``planning.swapping.hidden``). Sub-models take turns on the device. On a device
with separate memory, as many as have room stay there. Smaller sub-models have smaller graphs and leave more room, but
pass more activations. So a few cuts are compared, and the fastest is taken; traffic over the bus counts as time, even
if hidden.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from muletrain.compute.estimate import (
    LAMB_TENSORS,
    PARTS,
    TRANSFERS,
    Finer,
    SwapMemory,
    client_memory,
    largest_tensor,
    stage_memory,
    tied_bytes,
)
from muletrain.compute.swap.backing import update_window
from muletrain.compute.swap.chain import chain_cut
from muletrain.compute.swap.loading import device_window
from muletrain.compute.swap.state import IN_PLACE
from muletrain.config.schema import Precision
from muletrain.errors import CapacityError
from muletrain.model.pieces import WHOLE, decoder_of, most_pieces, pieces_of
from muletrain.planning.swapping import Layer, crossing_bytes, cut_into, held_bytes, hidden, places_bytes, staying
from muletrain.strategies import strategy_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from muletrain.compute.estimate import Offer, StageMemory
    from muletrain.config.schema import RunConfig
    from muletrain.model.chain import Model
    from muletrain.model.pieces import Inside, Kind, Piece
    from muletrain.model.spec import ModelSpec
    from muletrain.planning.partition import Cut
    from muletrain.planning.swapping import Swapping

BACKWARD = 3.0
"""Times of a forward that a backward takes, including the repeated forward."""
PASSING = 8
"""Copies of one microbatch's activations on the device: input, output and both gradients; the next microbatch's input
and gradient, prefetched; and the tensor that is leaving."""
WINDOWS = 8
"""Windows of numbers in memory while weights are updated."""
TENSORS = 8
"""Temporaries, in sizes of the tensor, of a LAMB update of a state on a disk."""
SHARES = 1.0, 0.8, 0.6, 0.4
"""Of the room on the device, for sub-models that take turns: the cuts that are compared."""
HIDDEN_COST = 0.22
"""Seconds by which a second of copies beside the computation delays that: 0.24 with 1.35 B parameters on an H200, 0.21 with
6.7 B (benchmarks/swap)."""
NOMINAL_FLOPS, NOMINAL_BYTES_PER_S = 5e10, 1e9
"""Speeds of device and backing memory before measurements [FLOP/s, bytes/s]."""


def blocks_of(
    spec: Model,
    cut: Cut,
    stage: int,
    tokens: int,
    precision: Precision,
    flops: float,
    times: Mapping[int | Kind, tuple[float, float]] | None = None,
    inside: Inside = WHOLE,
) -> list[Layer]:
    """Times and memory of each block of the stage's chain, or of its pieces, with microbatches of ``tokens`` (B * T).
    ``times``: as measured (``profile.part_times``); None: of a device of ``flops`` [FLOP/s]."""
    size, spec = 4 if precision is Precision.FP32 else 2, spec.placed(cut)
    goes_on = 4.0 * tokens * spec.width
    loss = stage == len(cut) - 1

    def block(
        params: int, forward_flops: float, graph: float, parts: Sequence[int | Kind], passed: float = goes_on
    ) -> Layer:
        forward_s = forward_flops * tokens / flops
        frozen = sum(spec.frozen_flops(part) for part in parts if isinstance(part, int)) if spec.base else 0.0
        backward_s = BACKWARD * forward_s - frozen * tokens / flops
        if times is not None:
            forward_s = tokens * sum(times[part][0] for part in parts)
            backward_s = forward_s + tokens * sum(times[part][1] for part in parts)
        works = (4 + size) * params + graph
        again_s = forward_s if loss else 0.0
        loads = size * params
        for part in parts if spec.base else ():  # a whole block
            assert isinstance(part, int)
            loads += spec.base_size * spec.base_params(range(part, part + 1))
            works += spec.recast_bytes(range(part, part + 1), size)
        return Layer(forward_s, backward_s, float(loads), works, passed, 4.0 * params, again_s)

    def of_piece(piece: Piece, whole_flops: float) -> Layer:
        """More than a block's input and output may enter or leave."""
        wider = max(piece.enters, piece.passed) - spec.width
        graph = piece.kept_bytes(tokens, size) + PASSING * 4 * tokens * max(0, wider)
        return block(piece.params, piece.share * whole_flops, graph, [piece.kind], 4.0 * tokens * piece.passed)

    def layers(index: int) -> Layer:
        """One block; several layers share weights."""
        first, end = runs[index]
        flops = sum(spec.flops_of(layer) for layer in range(first, end))
        params = spec.part_params(first + 1) + spec.compression_params(runs, index)
        kept = tokens * sum(spec.kept_bytes(n, size) for n in range(first, end))
        return block(params, flops, kept, range(first + 1, end + 1))

    runs, own = chain_cut(spec, cut, stage)
    found, decoder = [], decoder_of(spec)
    for index in own:
        if decoder is not None and (pieces := pieces_of(decoder, index, inside)):
            ends = {0: spec.embedding_flops, len(runs) - 1: spec.head_flops}
            whole = ends[index] if index in ends else spec.flops_of(index - 1)
            found += [of_piece(piece, whole) for piece in pieces]
        elif index == 0:
            kept = max(spec.width, spec.embedding_kept_bytes(size))
            found.append(block(spec.part_params(0), spec.embedding_flops, goes_on + tokens * kept, [0]))
        elif index == len(runs) - 1:
            params = spec.part_params(spec.layers + 1) + spec.copied_params(cut, stage)
            found.append(block(params, spec.head_flops, spec.head_bytes(tokens, size), [spec.layers + 1]))
        else:
            found.append(layers(index))
    return found


def swap_memory(
    spec: Model,
    cut: Cut,
    stage: int,
    tokens: int,
    precision: Precision,
    *,
    microbatches: int,
    lamb: bool,
    disk: bool | None = None,
    alone: bool = False,
    client: bool = False,
    pooled: bool = False,
) -> SwapMemory:
    """Memory of ``stage`` with microbatches of ``tokens``, of which so many are there at once. ``lamb``: the optimizer
    needs whole tensors; ``disk``, ``alone``: see ``SwapMemory``. ``client``: of a hub, which holds no moments, but the
    next weights, the sum, the sum on its way to the server, and gradients of parts that are not counted yet. ``pooled``:
    see ``stage_memory``."""
    params, trained = spec.stage_params(cut, stage), spec.trained_params(cut, stage)
    blocks = blocks_of(spec, cut, stage, tokens, precision, NOMINAL_FLOPS)
    goes_on = 4 * tokens * spec.width
    windows = 4 * WINDOWS * update_window(params)
    beside = PASSING * goes_on + windows + 4 * device_window(params) + spec.tables_bytes(tokens // spec.context)
    largest = largest_tensor(spec, cut, stage)
    update = 4 * TENSORS * largest if lamb else windows  # nothing else is there then
    held = 4 if alone else 20 + 4 * (TRANSFERS - 1) * pooled  # accumulators of clients, before the mean
    finer = [
        Finer(inside, max(update, beside + int(needed)), int(between) * microbatches)
        for inside, needed, between in finer_cuts(spec, cut, stage, tokens, precision)
    ]
    return SwapMemory(
        beside=beside,
        least=max(update, beside + int(places_bytes(blocks, _one_by_one(blocks)))),
        state=4 * params + (0 if client else 8 * trained),
        gradients=4 * params + 4 * (PARTS + 2) * trained if client else held * trained,
        between=(len(blocks) - 1) * goes_on * microbatches,
        update=4 * (LAMB_TENSORS * largest if lamb else min(params, IN_PLACE * update_window(params))),
        tied=tied_bytes(spec, cut, stage),
        disk=disk,
        alone=alone or client,
        finer=tuple(finer),
    )


def finer_cuts(
    spec: Model, cut: Cut, stage: int, tokens: int, precision: Precision
) -> list[tuple[Inside, float, float]]:
    """Cuts inside the blocks of ``stage``, from coarse to fine, each with the bytes on the device for one piece beside
    the next, and the bytes between all pieces of one microbatch. Layers are alike: few stand for all."""
    decoder = decoder_of(spec.placed(cut))
    if decoder is None:
        return []
    first, last, layers = stage == 0, stage == len(cut) - 1, cut[stage][1] - cut[stage][0]
    if decoder.borders:
        found, more = _refined(decoder, cut, stage, tokens, precision), 0
    else:
        few = min(layers, ALIKE)
        sizes = [*([] if first else [1]), few, *([] if last else [1])]
        shorter = replace(decoder, layers=sum(sizes))
        found, more = (
            _refined(shorter, shorter.cut(len(sizes), sizes), 0 if first else 1, tokens, precision),
            layers - few,
        )
    return [(inside, needs, between + more * each) for inside, needs, between, each in found]


ALIKE = 3
"""Layers of a shortened stage: each kind of neighbours is there."""


@lru_cache(64)
def _refined(
    decoder: ModelSpec, cut: Cut, stage: int, tokens: int, precision: Precision
) -> list[tuple[Inside, float, float, float]]:
    """``finer_cuts`` of a stage, and the bytes that the pieces of one layer pass on. Step by step, the kind of block or
    piece that needs the most, twice its weights and its work, is cut into one slice more."""
    _, own = chain_cut(decoder, cut, stage)
    inside, most, least = WHOLE, most_pieces(decoder), math.inf
    found: list[tuple[Inside, float, float, float]] = []
    while True:
        blocks = blocks_of(decoder, cut, stage, tokens, precision, NOMINAL_FLOPS, inside=inside)
        if (needs := places_bytes(blocks, _one_by_one(blocks))) < least:
            least = needs
            passed = sum(block.cut_bytes for block in blocks[:-1])
            layer = pieces_of(decoder, next(part for part in own if 0 < part <= decoder.layers), inside)
            each = 4.0 * tokens * (sum(piece.passed for piece in layer) or decoder.width)
            found.append((inside, needs, passed, each))
        kinds: list[str] = []
        for part in own:
            whole = "embedding" if part == 0 else "head" if part == decoder.layers + 1 else "layer"
            kinds += [piece.kind for piece in pieces_of(decoder, part, inside)] or [whole]
        _, largest = max(
            (2 * block.load_bytes + block.work_bytes, kind) for block, kind in zip(blocks, kinds, strict=True)
        )
        if (finer := inside.finer(largest)) == inside or any(map(operator.gt, finer, most)):
            return found[1:]  # the first one has whole blocks
        inside = finer


def stage_needs(
    config: RunConfig, spec: Model, cut: Cut, precision: Precision, *, alone: bool = False
) -> list[StageMemory]:
    """Memory needs of each stage of a run, swapped or not. ``alone``: see ``stage_memory``."""
    strategy, optimizer = strategy_of(config), config.optimizer
    tokens, most = config.train.microbatch * spec.context, min(strategy.capacity(len(cut)), config.microbatches)
    needs = [
        stage_memory(
            spec,
            cut,
            s,
            tokens=tokens,
            precision=precision,
            delayed=optimizer.delayed,
            state_on_cpu=optimizer.state_device == "cpu",
            graphs=most if config.compute.checkpointing == "never" else 1,
            checkpointing=config.compute.checkpointing,
            lamb=optimizer.name == "lamb",
            alone=alone,
            pooled=strategy.pooled,
        )
        for s in range(len(cut))
    ]
    if config.swap.backing == "off" or optimizer.delayed or spec.quantised:
        return needs
    within = _sharing(spec, cut)
    disk, lamb = None if config.swap.backing == "auto" else config.swap.backing == "disk", optimizer.name == "lamb"
    return [
        need
        if s in within
        else replace(
            need,
            swapped=swap_memory(
                spec,
                cut,
                s,
                tokens,
                precision,
                microbatches=most,
                lamb=lamb,
                disk=disk,
                alone=alone,
                pooled=strategy.pooled,
            ),
        )
        for s, need in enumerate(needs)
    ]


def client_needs(config: RunConfig, spec: Model, cut: Cut, precision: Precision) -> list[StageMemory]:
    """Memory that each stage needs of a client of a hub."""
    tokens, late = config.train.microbatch * spec.context, config.optimizer.delayed
    again, disk = config.compute.checkpointing, None if config.swap.backing == "auto" else config.swap.backing == "disk"
    needs = [
        client_memory(spec, cut, s, tokens=tokens, precision=precision, delayed=late, checkpointing=again)
        for s in range(len(cut))
    ]
    if config.swap.backing == "off" or late or spec.quantised:
        return needs
    most, within = strategy_of(config).capacity(len(cut)), _sharing(spec, cut)
    return [
        need
        if s in within
        else replace(
            need,
            swapped=swap_memory(spec, cut, s, tokens, precision, microbatches=most, lamb=False, disk=disk, client=True),
        )
        for s, need in enumerate(needs)
    ]


def _sharing(spec: Model, cut: Cut) -> set[int]:
    """Stages of which two blocks share weights: these cannot be swapped."""
    return {s for stages in spec.users(cut).values() for s in stages if stages.count(s) > 1}


def fitted(blocks: Sequence[Layer], memory: SwapMemory, offer: Offer, load_bytes_per_s: float, most: int) -> Swapping:
    """The best sub-models for a machine with this offer. ``blocks``: cut as ``memory`` says for it (``SwapMemory.at``).
    ``most``: microbatches that may be computed together. Raises CapacityError with the numbers."""
    if not memory.fits(offer):
        raise CapacityError(memory.problem(offer))
    room = offer.device - (memory.beside + memory.on_device(offer) - memory.least)
    found: list[Swapping] = []
    own = offer.host is not None
    for share in SHARES if own else (1.0,):
        cut = _within(blocks, room, share * room, load_bytes_per_s, most)
        kept = staying(blocks, cut.runs, room) if own else ()
        cut = cut_into(blocks, cut.runs, load_bytes_per_s, cut.minibatches, kept)
        found.append(replace(cut, device_bytes=places_bytes(blocks, cut.runs, kept)))
    bus_s = HIDDEN_COST / load_bytes_per_s
    return min(found, key=lambda cut: most * cut.each_s + bus_s * crossing_bytes(blocks, cut, most))


def _within(blocks: Sequence[Layer], room: float, asked: float, load_bytes_per_s: float, most: int) -> Swapping:
    """The best sub-models that take turns in ``asked`` bytes, or in the least sufficient memory; never more than
    ``room``."""
    least = held_bytes(blocks, _one_by_one(blocks))
    asked = max(least, asked)
    while True:  # the search counts two neighbours' own bytes; the places are as large as the largest need
        found = hidden(blocks, asked, load_bytes_per_s, most)
        if (excess := places_bytes(blocks, found.runs) - room) <= 0:
            return found
        if asked <= least:
            return cut_into(blocks, _one_by_one(blocks), load_bytes_per_s, most)
        asked = max(least, asked - excess)


def _one_by_one(blocks: Sequence[Layer]) -> Cut:
    return tuple((i, i + 1) for i in range(len(blocks)))


def swapped_s(blocks: Sequence[Layer], found: Swapping) -> tuple[float, float]:
    """Seconds of a microbatch of a full round, forward and backward."""
    forward_s = sum(block.forward_s for block in blocks)
    return forward_s, found.each_s - forward_s
