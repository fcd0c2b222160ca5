"""Memory of a stage, from parameter and activation sizes: the estimates decide between stashing and recomputing, and
which machine can serve the stage at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from muletrain.config.schema import Precision
from muletrain.model.pieces import WHOLE
from muletrain.units import format_memory

if TYPE_CHECKING:
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


STASH_SHARE = 0.25
"""Share of the free memory for graphs kept between forward and backward."""
COPIES = 2
"""Copies of weights and moments made for a checkpoint or a newcomer while training goes on: tensors, and bytes."""


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
            f"swapped it needs {format_memory(need.on_host)} of the machine's memory beside a GPU, and {has}: take swap.backing = 'disk', "
            f"or begin the run with more stages"
        )


@dataclass(frozen=True)
class StageMemory:
    """The memory that one stage needs [bytes]."""

    weights: int
    """fp32 masters, the working copy of 16-bit arithmetic, and the older weights of delayed updates."""
    moments: int
    gradient: int
    """The accumulator (two under delayed updates), one microbatch's gradient, the reduced gradient, and the last
    step's, kept for peers that lack that one; and ``tied_bytes``."""
    activations: int
    """The graphs that must exist at once; more are stashed only if memory allows."""
    copies: int
    """See ``COPIES``."""
    on_device: int
    """Memory needed on an accelerator."""
    on_host: int
    """Memory needed in the machine beside an accelerator."""
    delayed: int
    """The part that delayed updates need."""
    swapped: SwapMemory | None = None
    """The needs of a swapped stage (``compute.swap``); None: swapping is impossible."""
    blockwise: StageMemory | None = None
    """The needs if backward computes one block again at a time; None: not a choice of this machine."""

    def on(self, offer: Offer) -> StageMemory:
        """The needs on a machine with this offer: blockwise if whole graphs do not fit."""
        return self.blockwise if self.blockwise is not None and not self._fits_whole(offer) else self

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


def _with_graphs(
    need: StageMemory,
    stage: tuple[Model, Cut, int],
    tokens: int,
    precision: Precision,
    checkpointing: Checkpointing,
    graphs: int = 1,
) -> StageMemory:
    """``need``, which has no activations yet, with these. Under 'auto', each machine chooses."""
    spec, cut, number = stage

    def holding(activations: int) -> StageMemory:
        return replace(need, activations=activations, on_device=need.on_device + activations)

    size = 4 if precision is Precision.FP32 else 2
    whole = holding(graphs * stash_bytes(*stage, tokens, precision))
    largest = int(spec.largest_kept_bytes(cut, number, tokens, size))
    blockwise = holding(stash_bytes(*stage, tokens, precision, by_block=True) + largest)
    if checkpointing == "block":
        return blockwise
    smaller = checkpointing == "auto" and blockwise.activations < whole.activations
    return replace(whole, blockwise=blockwise if smaller else None)


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
    weights, accumulators, gradient = params * size + older, 4 * trained + second, trained * size
    coming, going = 4 * params, 4 * trained  # the next weights, and the accumulator on its way to the server
    need = StageMemory(
        weights=weights,
        moments=0,
        gradient=accumulators + PARTS * gradient,
        activations=0,
        copies=coming + going,
        on_device=weights + gradient,
        on_host=coming + going + accumulators + (PARTS - 1) * gradient,
        delayed=older + second,
    )
    return _with_graphs(need, (spec, cut, stage), tokens, precision, checkpointing)


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
) -> StageMemory:
    """Memory of ``stage`` with microbatches of ``tokens`` (B * T) tokens, of which ``graphs`` are kept at once.

    ``state_on_cpu``: masters and moments stay in the machine's memory, an accelerator has a working copy. ``delayed``:
    two steps are under way at once, each with an accumulator and weights; copies of the state have both weights.
    """
    params, trained = spec.stage_params(cut, stage), spec.trained_params(cut, stage)
    size = 4 if precision is Precision.FP32 else 2
    older = params * size if delayed else 0
    copy = older + (0 if precision is Precision.FP32 else params * size)
    masters, moments, reduced, kept = 4 * params, 8 * trained, 4 * trained, 4 * trained
    accumulator, second, gradients = 4 * trained, 4 * trained * delayed, size * trained
    tied = tied_bytes(spec, cut, stage)
    older_copies = COPIES * 4 * params * delayed
    copies = COPIES * (masters + moments) + older_copies
    computing = accumulator + second + gradients
    if state_on_cpu:
        on_device = params * size + older + computing
        on_host = masters + moments + 2 * reduced + kept + copies + tied  # as received, and scaled
    else:
        on_device = masters + copy + moments + computing
        on_host = accumulator + reduced + kept + copies + tied
    need = StageMemory(
        weights=masters + copy,
        moments=moments,
        gradient=accumulator + second + gradients + reduced + kept + tied,
        activations=0,
        copies=copies,
        on_device=on_device,
        on_host=on_host,
        delayed=older + second + older_copies,
    )
    return _with_graphs(need, (spec, cut, stage), tokens, precision, checkpointing, graphs)
