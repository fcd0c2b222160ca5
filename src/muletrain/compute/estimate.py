"""Memory of a stage, from parameter and activation sizes: the estimates decide between stashing and recomputing, and
which machine can serve the stage at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from muletrain.config.schema import Precision
from muletrain.model.pieces import WHOLE
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.config.schema import Checkpointing
    from muletrain.model.chain import Model
    from muletrain.model.pieces import Inside
    from muletrain.planning.partition import Cut


def stash_bytes(spec: Model, cut: Cut, stage: int, tokens: int, precision: Precision, *, by_block: bool = False) -> int:
    """Size of the activations that autograd keeps between forward and backward of ``tokens`` (B * T) tokens [bytes].
    ``by_block``: of the inputs of blocks."""
    size = 4 if precision is Precision.FP32 else 2
    if by_block:
        return int(tokens * spec.borders_bytes(cut, stage, size))
    return int(spec.stage_kept_bytes(cut, stage, tokens, size))


def backward_bytes(
    spec: Model, cut: Cut, stage: int, tokens: int, precision: Precision, *, by_block: bool = False
) -> int:
    """Peak of the graph and the gradients of one microbatch [bytes]. Backward frees a part's graph once the part's
    gradients exist: most gradients come when most graphs have gone. The head has a second gradient between two chunks of
    the loss, and a parameter that several parts use until both are added."""
    size, (first, end), closes = 4 if precision is Precision.FP32 else 2, cut[stage], stage == len(cut) - 1
    passed, entry = tokens * size * spec.width, tokens * spec.entry_kept_bytes(cut, stage, size)
    users_of = {name: users for name, users in spec.users(cut).items() if name not in spec.frozen}
    tied = [(spec.tied[name].size, users) for name, users in users_of.items() if users[-1] == stage]
    twice = sum(numbers for numbers, users in tied if users[0] == users[-1])
    begins = spec.learned_params(0) * (stage == 0) + spec.compression_params(cut, stage)
    parts = [
        (entry, entry, max(0, begins - twice), twice)
    ]  # graph, what is left between passes, gradients: first, second
    for layer in range(first, end):
        graph, params, again = tokens * spec.kept_bytes(layer, size), spec.learned_params(1 + layer), 0
        if spec.share_layers and layer < end - 1:
            params, again = 0, spec.largest_tensor  # tensor by tensor
        parts.append((graph, passed if by_block else graph, params, again))
    kept, trained = passed * by_block + sum(left for _, left, _, _ in parts), spec.trained_params(cut, stage)
    made = spec.learned_params(spec.layers + 1) + sum(numbers for numbers, _ in tied) if closes else 0
    peak = kept + size * made
    if closes:
        peak += spec.head_bytes(tokens, size) + size * made * (tokens > spec.loss_tokens)
    for graph, left, params, again in reversed(parts):
        kept -= left
        made += params
        peak = max(peak, kept + (1 + PASSING) * graph + size * (min(made, trained) + again))
    return int(peak) + spec.recast_bytes(spec.parts_of(cut, stage), size)


PASSING = 0.25
"""Gradients of a block's activations at once in backward, in sizes of the block's graph: of a gated feed-forward, two of
the widest tensors more than were freed."""
STASH_SHARE = 0.25
"""Share of the free memory for graphs kept between forward and backward."""
COPIES = 2
"""Copies of weights and moments made for a checkpoint or a newcomer while training goes on: tensors, and bytes."""
LAMB_TENSORS = 3
"""Temporaries, in sizes of the largest tensor, of a LAMB update in memory (measured: 2.98)."""


def largest_tensor(spec: Model, cut: Cut, stage: int) -> int:
    """Numbers of the largest parameter tensor of ``stage``."""
    head = spec.learned_params(spec.layers + 1) + spec.copied_params(cut, stage)
    return max(spec.learned_params(0) * (stage == 0), head * (stage == len(cut) - 1), spec.largest_tensor)


TIED_PARTS = 5
"""Copies that a peer holds of the gradient of parameters shared with another stage, in fp32: that stage's gradient, and
copies of both for sending, of this step and the last one. The copies are in fp32 after a round of one member, so any
stage may need this factor; in 16 bits the factor is 3. Measured: 5.3 times 82 MB, and 4.2 where one of the stages has
two members."""


def tied_bytes(spec: Model, cut: Cut, stage: int) -> int:
    """The machine's memory for gradients of the parameters that ``stage`` shares with another stage [bytes]."""
    return TIED_PARTS * 4 * spec.shared_params(cut, stage)


@dataclass(frozen=True)
class Offer:
    """The memory that a peer may use [bytes]."""

    device: int
    host: int | None = None
    """Memory of the machine beside an accelerator's own; None if both are one (the CPU, Apple's GPUs)."""

    def __str__(self) -> str:
        beside = "" if self.host is None else f" on its GPU and {format_memory(self.host)} beside it"
        return format_memory(self.device) + beside


class Finer(NamedTuple):
    """A cut of a swapped stage's blocks into pieces, with the needs that differ from those of whole blocks."""

    inside: Inside
    least: int
    between: int


@dataclass(frozen=True)
class SwapMemory:
    """Memory needs of a swapped stage [bytes]. ``disk``: the backing memory is a disk; None: for a device without
    separate host memory (the CPU). ``alone``: the run has one peer, and none can join."""

    beside: int
    """On the device beside the sub-models: inputs, outputs, and windows of the update."""
    least: int
    """On the device, with one block at a time, or one piece of a block (``inside``)."""
    state: int
    """In backing memory: weights and moments."""
    gradients: int
    """In backing memory: two accumulators, the reduced gradient, the last step's, and one that is taken from a replica
    after a round that failed; alone: one accumulator. Measured with two peers, one killed and one joining: 1.04 times the
    estimate."""
    between: int
    """In backing memory, at most: activations between sub-models, of the microbatches under way."""
    update: int = 0
    """In the machine's memory while weights there are updated."""
    tied: int = 0
    """In the machine's memory, never in files: ``tied_bytes``."""
    disk: bool | None = None
    alone: bool = False
    inside: Inside = WHOLE
    """How blocks are cut."""
    finer: tuple[Finer, ...] = ()
    """Other cuts, of which each needs less on the device than the one before: for machines that are too small for two
    neighbouring blocks. Empty: blocks of this model are not cut."""

    def at(self, offer: Offer) -> SwapMemory:
        """The needs on a machine with this offer: with whole blocks if these fit, else with the coarsest pieces that fit,
        else with the finest."""
        if self.on_device(offer) <= offer.device or not self.finer:
            return self
        beside = self.on_device(offer) - self.least
        found = next((cut for cut in self.finer if cut.least + beside <= offer.device), self.finer[-1])
        return replace(self, least=found.least, between=found.between, inside=found.inside, finer=())

    def on_device(self, offer: Offer) -> int:
        """At least, on the device of a machine with this offer."""
        return self.least + (self.tied if offer.host is None else 0)

    def on_disk(self, offer: Offer) -> bool:
        """Is the backing memory of a machine with this offer a disk?"""
        return offer.host is None if self.disk is None else self.disk

    def copies(self, offer: Offer) -> int:
        """In backing memory: copies of the state, for checkpoints and newcomers. A peer alone makes a copy if there is
        room; if not, checkpoints are written from the live state, and training waits meanwhile."""
        if not self.alone:
            return COPIES * self.state
        room = self.on_disk(offer) or (offer.host is not None and self.on_host + self.state <= offer.host)
        return self.state if room else 0

    @property
    def on_host(self) -> int:
        """At least, in the machine's memory beside a GPU."""
        copies = 0 if self.alone else COPIES * self.state
        return self.state + copies + self.gradients + self.between + self.update + self.tied

    def of_host(self, offer: Offer) -> int:
        """Use of a machine's memory beside a GPU, with this offer."""
        return self.on_host + (self.copies(offer) if self.alone else 0)

    def spare(self, offer: Offer) -> int:
        """Memory of the machine beside a GPU that stays free."""
        return max(0, (offer.host or 0) - (self.tied if self.on_disk(offer) else self.of_host(offer)))

    @property
    def in_files(self) -> int:
        """On a disk."""
        return (1 + (1 if self.alone else COPIES)) * self.state + self.gradients + self.between

    def fits(self, offer: Offer) -> bool:
        """Can a machine with this offer swap the stage? The disk is not considered here."""
        need = self.at(offer)
        beside = need.on_disk(offer) or (offer.host is not None and need.on_host <= offer.host)
        return need.on_device(offer) <= offer.device and beside

    def problem(self, offer: Offer) -> str:
        """The reason why the offer does not suffice, and a sufficient offer."""
        need = self.at(offer)
        if (least := need.on_device(offer)) > offer.device:
            whole = "its largest block, which cannot be cut"
            largest = whole if need.inside == WHOLE else "the largest piece of its blocks, which are cut"
            return (
                f"even swapped it needs {format_memory(least)}, for {largest}, the next one and a microbatch, and "
                f"{format_memory(offer.device)} may be used: give more memory (compute.memory), or take a smaller train.microbatch"
            )
        has = "none is" if offer.host is None else f"{format_memory(offer.host)} may be used"
        return (
            f"swapped it needs {format_memory(need.on_host)} of the machine's memory beside a GPU, and {has}: take swap.backing = 'disk' "
            f"(slower: all machines that swap then load from their disks), or begin the run with more stages"
        )


@dataclass(frozen=True)
class StageMemory:
    """The memory that one stage needs [bytes]."""

    weights: int
    """fp32 masters, the working copy of 16-bit arithmetic, the older weights of delayed updates, and the weights beside
    an adapter (``Model.base``)."""
    moments: int
    gradient: int
    """The accumulator (two under delayed updates), one microbatch's gradient, the reduced gradient or, if larger, the
    accumulators that come from clients, and the last step's, kept for peers that lack that one; and ``tied_bytes``."""
    activations: int
    """The graphs that must exist at once, as far as they do not make room for the gradient; more are stashed only if
    memory allows. Or LAMB's temporaries, if larger."""
    copies: int
    """See ``COPIES``; of a peer alone, one copy for a checkpoint, or none: then the checkpoint is written from the
    state itself, piece by piece, and training waits."""
    on_device: int
    """Memory needed on an accelerator."""
    on_host: int
    """Memory needed in the machine beside an accelerator."""
    delayed: int
    """The part that delayed updates need."""
    swapped: SwapMemory | None = None
    """The needs of a swapped stage (``compute.swap``); None: swapping is impossible."""
    graph: int = 0
    """What is kept of a microbatch between forward and backward."""
    activations_on_device: int = 0
    """``activations`` on an accelerator, whose temporaries differ."""
    by_block: bool = False
    """Backward computes one block again at a time."""
    smaller: StageMemory | None = None
    """The next way of serving the stage, slower and with smaller needs: without copies, then also ``by_block``; None:
    this machine has no such choice."""

    def on(self, offer: Offer) -> StageMemory:
        """The needs on a machine with this offer: the first way that fits, else the last."""
        if self.smaller is None or self._fits_whole(offer):
            return self
        return replace(self.smaller, swapped=self.swapped).on(offer)

    def _fits_whole(self, offer: Offer) -> bool:
        need = self.total if offer.host is None else self.on_device
        return need <= offer.device and (offer.host is None or self.on_host <= offer.host)

    @property
    def total(self) -> int:
        """The sum, for a machine with one memory."""
        return self.weights + self.moments + self.gradient + self.activations + self.copies

    def of_device(self, offer: Offer) -> int:
        """The part that the offered device must hold."""
        need = self.on(offer)
        return need.total if offer.host is None else need.on_device

    def fits(self, offer: Offer) -> bool:
        """Can a machine with this offer serve the stage, resident or swapped?"""
        return self.resident(offer) or (self.swapped is not None and self.swapped.fits(offer))

    def resident(self, offer: Offer) -> bool:
        """Does the stage fit into the offered memory as a whole?"""
        return self.on(offer)._fits_whole(offer)

    def spare(self, offer: Offer) -> int:
        """Memory of the machine that stays free."""
        if not self.resident(offer) and self.swapped is not None:
            return self.swapped.at(offer).spare(offer)
        return max(0, offer.device - self.of_device(offer) if offer.host is None else offer.host - self.on_host)

    def need(self, offer: Offer | None = None) -> str:
        """Describe the need to a peer with such an offer."""
        if offer is None:
            return format_memory(self.total)
        beside = "" if offer.host is None else f" on a GPU and {format_memory(self.on_host)} beside it"
        return f"{format_memory(self.of_device(offer))}{beside}"

    def swapping(self, offer: Offer) -> str:
        """Why the stage cannot be swapped there either, as the end of a sentence; empty: swapping was not asked for."""
        return "" if self.swapped is None else f"; {self.swapped.problem(offer)}"

    def __str__(self) -> str:
        delayed = (
            f"; {format_memory(self.delayed)} of it for delayed updates (optimizer.delayed)" if self.delayed else ""
        )
        return (
            f"weights {format_memory(self.weights)}, moments {format_memory(self.moments)}, gradients "
            f"{format_memory(self.gradient)}, activations {format_memory(self.activations)}, copies "
            f"{'for checkpoints ' if self.moments else ''}{format_memory(self.copies)}{delayed}"
        )


PARTS = 3
"""Parts of a client's stage with gradients in memory at once: the part being computed and the parts not counted yet."""


TRANSFERS = 4
"""Number of clients that hand their accumulators over to a server at once: more clients would fill its download."""


def _with_graphs(
    needs: Sequence[StageMemory],
    stage: tuple[Model, Cut, int],
    tokens: int,
    precision: Precision,
    checkpointing: Checkpointing,
    graphs: int = 1,
    update: int = 0,
) -> StageMemory:
    """The ways of serving the stage: ``needs``, which have no activations yet, with these. Under 'auto', each machine
    chooses. ``update``: temporaries of an update, when the microbatch has gone [bytes]."""
    gradient = (4 if precision is Precision.FP32 else 2) * stage[0].trained_params(*stage[1:])
    tables = stage[0].tables_bytes(tokens // stage[0].context)

    def holding(need: StageMemory, *, by_block: bool) -> StageMemory:
        graph = stash_bytes(*stage, tokens, precision, by_block=by_block)
        passing = backward_bytes(*stage, tokens, precision, by_block=by_block)
        on_cpu = passing  # which makes gradients of 16 bits in fp32, and adds them in fp32, tensor by tensor
        if precision is not Precision.FP32:
            packed = stage[0].base_size * stage[0].largest_base(*stage[1:])  # for a product of matrices in 16 bits
            on_cpu = max(passing + 4 * stage[0].largest_tensor + packed, gradient + 4 * largest_tensor(*stage))
        waiting = 0 if by_block else (graphs - 1) * graph
        activations, on_device = (tables + waiting + max(update, n) - gradient for n in (on_cpu, passing))
        return replace(
            need,
            activations=activations,
            graph=graph,
            activations_on_device=on_device,
            on_device=need.on_device + on_device,
            by_block=by_block,
        )

    ways = [holding(need, by_block=checkpointing == "block") for need in needs]
    blockwise = holding(needs[-1], by_block=True)
    if checkpointing == "auto" and blockwise.activations < ways[-1].activations:
        ways.append(blockwise)
    return reduce(lambda smaller, way: replace(way, smaller=smaller), reversed(ways))


def client_memory(
    spec: Model,
    cut: Cut,
    stage: int,
    *,
    tokens: int,
    precision: Precision,
    delayed: bool = False,
    checkpointing: Checkpointing = "always",
) -> StageMemory:
    """Memory of a client of ``stage``, which keeps neither moments nor fp32 masters, and accumulates in the machine's
    memory, with microbatches of ``tokens`` (B * T) tokens.
    ``delayed``: with weights and accumulators of two steps."""
    params, trained = spec.stage_params(cut, stage), spec.trained_params(cut, stage)
    size = 4 if precision is Precision.FP32 else 2
    older, second = params * size * delayed, 4 * trained * delayed
    base = spec.base_bytes(cut, stage)
    weights, accumulators, gradient = params * size + older, 4 * trained + second, trained * size
    coming, going = 4 * params, 4 * trained  # the next weights, and the accumulator on its way to the server
    need = StageMemory(
        weights=weights + base,
        moments=0,
        gradient=accumulators + PARTS * gradient,
        activations=0,
        copies=coming + going,
        on_device=weights + base + gradient,
        on_host=coming + going + accumulators + (PARTS - 1) * gradient,
        delayed=older + second,
    )
    return _with_graphs([need], (spec, cut, stage), tokens, precision, checkpointing)


def stage_memory(
    spec: Model,
    cut: Cut,
    stage: int,
    *,
    tokens: int,
    precision: Precision,
    state_on_cpu: bool = False,
    graphs: int = 1,
    delayed: bool = False,
    checkpointing: Checkpointing = "always",
    lamb: bool = False,
    alone: bool = False,
    pooled: bool = False,
) -> StageMemory:
    """Memory of ``stage`` with microbatches of ``tokens`` (B * T) tokens, of which ``graphs`` are kept at once.

    ``state_on_cpu``: masters and moments stay in the machine's memory, an accelerator has a working copy. ``delayed``:
    two steps are under way at once, each with an accumulator and weights; copies of the state have both weights.
    ``lamb``: the optimizer needs temporaries. ``alone``: the run has one peer, and none can join. So the mean is made in
    the accumulator, no gradient is kept for others, and a copy of the state is made only if there is room. ``pooled``:
    clients hand accumulators over, before the mean is made.
    """
    params, trained = spec.stage_params(cut, stage), spec.trained_params(cut, stage)
    size = 4 if precision is Precision.FP32 else 2
    older = params * size if delayed else 0
    copy = older + (0 if precision is Precision.FP32 else params * size)
    masters, moments = 4 * params, 8 * trained
    reduced = kept = 0 if alone else 4 * trained
    coming = max(reduced, 4 * TRANSFERS * trained * pooled)
    accumulator, second, gradients = 4 * trained, 4 * trained * delayed, size * trained
    tied, base = tied_bytes(spec, cut, stage), spec.base_bytes(cut, stage)
    computing = accumulator + second + gradients

    def with_copies(count: int) -> StageMemory:
        older_copies = count * 4 * params * delayed
        copies = count * (masters + moments) + older_copies
        if state_on_cpu:
            on_device = params * size + older + base + computing
            mean = max(2 * accumulator, coming)  # and scaled
            on_host = masters + moments + mean + kept + copies + tied
        else:
            on_device = masters + copy + moments + base + computing
            on_host = accumulator + coming + kept + copies + tied
        return StageMemory(
            weights=masters + copy + base,
            moments=moments,
            gradient=computing + coming + kept + tied,
            activations=0,
            copies=copies,
            on_device=on_device,
            on_host=on_host,
            delayed=older + second + older_copies,
        )

    needs = [with_copies(count) for count in ((1, 0) if alone else (COPIES,))]
    update = 4 * LAMB_TENSORS * largest_tensor(spec, cut, stage) * lamb
    return _with_graphs(needs, (spec, cut, stage), tokens, precision, checkpointing, graphs, update)
