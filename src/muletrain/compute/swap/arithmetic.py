"""``SwappedArithmetic`` computes rounds: microbatches that pass each sub-model one by one while the sub-model is on the
device (ATOM sec. III-C, fig. 12). Decides nothing about order, threads or cancellation.

Shapes: B sequences, T tokens, D width, G trained parameters of the stage, S parameters of a sub-model.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muletrain.compute.arithmetic import Counters, Timer
from muletrain.compute.probe import precision_dtype
from muletrain.compute.scaling import LossScale
from muletrain.compute.swap.loading import Drain, Ferry, Loader
from muletrain.compute.threads import on_cores
from muletrain.config.schema import Precision
from muletrain.optim.rules import make_rule
from muletrain.optim.sketch import sketch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from muletrain.compute.arithmetic import StageSetup
    from muletrain.compute.base import Microbatch, Update
    from muletrain.compute.swap.backing import Backing, Region
    from muletrain.compute.swap.chain import SubModel
    from muletrain.compute.swap.state import State
    from muletrain.compute.threads import Threads
    from muletrain.model.dropout import Masks
    from muletrain.optim.sketch import Sketch

BESIDE = 0.75
"""Share of the cores that updates while the device computes. The remaining cores launch kernels and copy weights. With
all 16 of a machine an update was no faster (H200)."""


@dataclass(eq=False)
class Passage:
    """One microbatch under way through the stage. ``targets``: at the last stage; ``grad``: at earlier stages, once
    received."""

    mb: Microbatch
    inputs: Tensor
    targets: Tensor | None = None
    grad: Tensor | None = None
    accumulate: bool = False
    weight: float = 1.0
    """Of the loss (``checks.weighed``)."""
    positions: Tensor | None = None
    """See ``StageModule.forward``."""
    between: Region | None = None
    """The input of each sub-model but the first, and later the gradient, each fp32 [B, T, D]."""
    loss: float = 0.0
    output: Tensor | None = None
    inputs_gradient: Tensor | None = None
    shape: tuple[int, ...] = ()
    """The output's."""
    rows: tuple[int, int] = (0, 0)
    """B, T of the activations between sub-models."""
    dropped: bool = False
    """Nobody waits any more."""


@dataclass
class Spare:
    """Regions for ``Passage.between`` that are not in use, by size."""

    regions: list[Region] = field(default_factory=list)

    def take(self, numbers: int, backing: Backing) -> Region:
        found = next((r for r in self.regions if r.values.numel() >= numbers), None)
        if found is None:
            self.regions.clear()  # sequences have become longer: the old buffers are too small from now on
            return backing.region(numbers, copied=True)
        self.regions.remove(found)
        return found


@dataclass
class _Accumulator:
    """A gradient in backing memory, flat [G]. ``empty``: the contents do not count. ``region`` None: not allocated yet.
    A round uses the sum's region while the sum is empty, so that a step of one round needs no second region."""

    region: Region | None
    empty: bool = True


class SwappedArithmetic:
    """Owns the stage's accumulator, loss scale and counters. Any thread may read the state."""

    def __init__(
        self,
        where: tuple[int, int],
        models: Sequence[SubModel],
        setup: StageSetup,
        state: State,
        backing: Backing,
        threads: Threads,
        *,
        kept: Sequence[int] = (),
        base: Mapping[str, Tensor] | None = None,
        alone: bool = False,
    ) -> None:
        """``where``: the stage, and the number of stages; ``kept``, ``base``: see ``Loader``; ``alone``: each round
        is added to the accumulator at once, and an update runs beside the next forward: nobody waits for the digest."""
        self.stage, self._last = where[0], where[0] == where[1] - 1
        self.models = models
        self._begins = [0, *accumulate(model.width for model in models[1:])]
        """Of the inputs of all sub-models but the first, where each begins: numbers for each token."""
        self.setup, self.state, self._backing, self._threads = setup, state, backing, threads
        self._jobs = jobs = threads.jobs
        self.counters = Counters()
        self._timed = Timer(self.counters, setup.device)
        dtype = precision_dtype(setup.precision)
        self.loader = Loader(models, state, setup.device, dtype, jobs, kept, base or {}, inline=setup.inline)
        self.drain = Drain(models, self.loader.traffic, setup.device, jobs, inline=setup.inline)
        self.ferry = Ferry(setup.device)
        self.scale = LossScale(fp16=setup.precision is Precision.FP16)
        self._rule = make_rule(setup.optimizer, setup.total_steps, state.layout, torch.device("cpu"), moments=False)
        self._parts: dict[Microbatch, Region | None] = {}
        """Gradients of parts that are not counted yet; None: nothing of the part is trained."""
        self._returned: list[Region] = []
        """Regions for gradients that are free again."""
        self._sum = _Accumulator(self._region())
        own = backing.on_disk and not alone
        self._round = _Accumulator(self._region() if own else None)  # a disk may be full later
        state.order = [[(part.begin, part.end) for part in model.segments] for model in models]
        self._trained_from = next((k for k, model in enumerate(models) if model.trainable.size), len(models))
        """All earlier sub-models are frozen as a whole."""
        self._alone = alone
        self._beside = alone and (state.in_place or not self._rule.by_tensor)
        """Updates run beside the next forward pass. Whole tensors of a state on a disk take the memory of loaded
        sub-models."""
        self._summed: list[Sequence[Passage]] = []
        """Alone: the rounds in the accumulator. Nothing can be subtracted, so all rounds are computed again if a part
        of a later round does not count."""
        self._spare = Spare()
        self._changing = threading.Lock()
        """Held while the state changes, or is copied."""

    # Rounds -----------------------------------------------------------------------------------------------------------

    def forward(self, passages: Sequence[Passage]) -> None:
        """Compute the outputs of a stage before the last."""
        self._ahead(passages, len(self.models))
        self._timed.finish()

    def backward(self, passages: Sequence[Passage]) -> None:
        """Differentiate a stage before the last, after ``forward``."""
        self._back(passages, len(self.models) - 1)
        self._timed.finish()

    def loss(self, passages: Sequence[Passage]) -> None:
        """Compute and differentiate the last stage."""
        last = len(self.models) - 1
        self._ahead(passages, last)
        back = [p for p in passages if self._wanted(p)]
        model, parameters = self.models[last], self.loader.get(last, last - 1 if last > 0 and back else None)
        for p, (x, *_) in self._arriving(last, passages):
            with self._jobs.at("loss", part=last), self._timed("forward_s"), torch.set_grad_enabled(p in back):
                leaf = self._leaf(x, last)
                assert p.targets is not None  # at the last stage
                loss = model.loss(leaf, p.targets, self._masks(p), self.scale.of(p.mb.step), p.positions)
                loss = loss if p.mb.heldout else loss * p.weight
                p.loss = float(loss.detach())
            if p in back:
                seed = torch.full_like(loss, self.scale.of(p.mb.step))
                self._differentiate(p, last, loss, leaf, parameters, seed)
            del loss
        self._end_of(last, back)
        del parameters, leaf  # the last sub-model's weights leave the device
        if last > 0:
            self._back(back, last - 1)
        self._timed.finish()

    def again(self, passages: Sequence[Passage]) -> None:
        """Compute the gradients of a round anew: some microbatches do not count."""
        if self._last:
            self.loss(passages)
        else:
            self.forward(passages)
            self.backward(passages)
        for p in passages:
            self.free(p)

    def _ahead(self, passages: Sequence[Passage], end: int) -> None:
        """Forward through the sub-models before ``end``, without graphs."""
        count = len(self.models)
        for k in range(end):
            self.loader.get(k, k + 1 if k + 1 < count else None)
            for p, (x, *_) in self._arriving(k, passages):
                with self._jobs.at("forward", part=k), self._timed("forward_s"), torch.no_grad():
                    output = self.models[k](self._leaf(x, k), self._masks(p), p.targets, p.positions).float()
                    if k + 1 < count:
                        p.rows = (output.shape[0], output.shape[1])
                        self.ferry.store(output, self._between(p, k + 1))
                    else:
                        p.output = output.to("cpu", copy=True)

    def _back(self, passages: Sequence[Passage], begin: int) -> None:
        """Backward through the sub-models from ``begin`` to the first."""
        passages = [p for p in passages if self._wanted(p)]
        end = self._trained_from if self.stage == 0 else 0
        for k in range(begin, end - 1, -1) if passages else ():
            parameters: list[Tensor] = []  # the previous sub-model's parameters leave first
            first = min(1, len(self.models) - 1) if k == 0 else None  # only a neighbour has a place beside ``k``
            parameters = self.loader.get(k, k - 1 if k > end else first)
            for p, (x, seed) in self._arriving(k, passages, backward=True):
                with self._jobs.at("backward", part=k), torch.enable_grad():
                    with self._timed("recompute_s"):
                        leaf = self._leaf(x, k)
                        output = self.models[k](leaf, self._masks(p), p.targets, p.positions).float()
                    self.counters.recomputed += k == 0
                    if k + 1 == len(self.models):
                        seed = seed * self.scale.of(p.mb.step)
                    self._differentiate(p, k, output, leaf, parameters, seed)
                del output, x, leaf, seed
            self._end_of(k, passages)

    def _differentiate(
        self, p: Passage, k: int, output: Tensor, leaf: Tensor, parameters: list[Tensor], seed: Tensor
    ) -> None:
        """Gradients of sub-model ``k``: the parameters' into the sum, the inputs' to the place of the next
        sub-model."""
        with self._timed("backward_s"):
            wanted = [leaf] if leaf.requires_grad else []
            targets = wanted + (parameters if p.accumulate else [])
            gradients = torch.autograd.grad(output, targets, seed) if targets else ()
            if leaf.requires_grad and k > 0:
                self.ferry.store(gradients[0], self._between(p, k))
            elif leaf.requires_grad:
                p.inputs_gradient = (gradients[0].float() / self.scale.of(p.mb.step)).to("cpu", copy=True).contiguous()
            if p.accumulate:
                before = self._sum.region if self._alone and not self._sum.empty else None
                self.drain.add(self.models[k], gradients[len(wanted) :], 1 / self.scale.of(p.mb.step), before)

    def _end_of(self, k: int, passages: Sequence[Passage]) -> None:
        """Sub-model ``k`` is done: send off the gradient."""
        if any(p.accumulate for p in passages):
            if self._alone:
                self.drain.send(self.models[k], self._total(), added=not self._sum.empty)
            else:
                if self._round.region is None and self._sum.empty:
                    self._sum, self._round = self._round, self._sum
                self._round.region = self._round.region or self._region()
                self.drain.send(self.models[k], self._round.region)
            self._round.empty = False

    def _region(self) -> Region:
        if self._returned:
            return self._returned.pop()
        return self._backing.region(self.state.layout.trained, copied=True)

    def _wanted(self, p: Passage) -> bool:
        """Is any gradient wanted?"""
        return p.accumulate or (self.stage > 0 and not p.mb.heldout)

    def _arriving(
        self, k: int, passages: Sequence[Passage], *, backward: bool = False
    ) -> Iterator[tuple[Passage, list[Tensor]]]:
        """The microbatches that are still wanted, each with the input of sub-model ``k``, and in ``backward`` with d
        loss / d output, on the device. The next microbatch is fetched while one computes."""

        def fetched(p: Passage) -> list[Callable[[], Tensor]]:
            if p.dropped:
                return []
            places = [p.inputs if k == 0 else self._between(p, k)]
            if backward and k + 1 < len(self.models):
                places.append(self._between(p, k + 1))
            elif backward:
                assert p.grad is not None  # at a stage before the last
                places.append(p.grad)
            return [self.ferry.fetch(place) for place in places]

        coming = fetched(passages[0]) if passages else []
        for n, p in enumerate(passages):
            arrived = [get() for get in coming]
            coming = fetched(passages[n + 1]) if n + 1 < len(passages) else []
            if arrived and not p.dropped:
                yield p, arrived
            arrived.clear()

    def _leaf(self, x: Tensor, k: int) -> Tensor:
        """``x`` as the input of sub-model ``k``; a leaf if the gradient is wanted: not if nothing earlier is
        trained."""
        wanted = torch.is_grad_enabled() and (self.stage > 0 or k > self._trained_from)
        return x.detach().requires_grad_() if wanted else x

    def _masks(self, p: Passage) -> Masks | None:
        return None if p.mb.heldout else self.setup.masks(self.setup.seed, p.mb.step, p.mb.index, p.mb.first)

    def _between(self, p: Passage, k: int) -> Tensor:
        """The place of the input of sub-model ``k`` > 0, fp32 [B, T, D], or less than D if that is compressed, or more
        between pieces of a block."""
        tokens = p.rows[0] * p.rows[1]
        if p.between is None:
            self.ferry.finish()  # no copy is under way where the new one may take memory from
            p.between = self._spare.take(tokens * self._begins[-1], self._backing)
        begin, end = (tokens * self._begins[n] for n in (k - 1, k))
        return p.between.values[begin:end].view(*p.rows, -1)

    def free(self, p: Passage) -> None:
        """The backward is done, or no longer wanted."""
        if p.between is not None:
            p.between.release(0, p.between.values.numel())
            self._spare.regions.append(p.between)
            p.between = None

    # The accumulator and the step -------------------------------------------------------------------------------------

    def commit(self, counting: Sequence[Passage]) -> None:
        """Add the gradient of the last round, of ``counting``, to the accumulator."""
        self.drain.finish()
        if self._alone:
            self._sum.empty &= self._round.empty
            self._summed.append(counting)
        elif not self._round.empty and self._sum.empty:
            self._sum, self._round = self._round, self._sum
        elif not self._round.empty:
            assert self._round.region is not None  # a gradient is there
            self._add(self._round.region.values)
        self._round.empty = True
        self.drain.drop()

    def commit_again(self, counting: Sequence[Passage]) -> None:
        """Add the gradient of some microbatches of the last round, or of none, computed anew; a failure leaves nothing
        behind. Alone: the gradient of all rounds."""
        self.drop_round()
        rounds = [counting]
        if self._alone and not self._sum.empty:
            rounds = [*self._summed, counting]
            self.clear()
        try:
            for passages in filter(None, rounds):
                self.again(passages)
                self.commit(passages)
        except BaseException:
            self.drop_round()
            raise

    def keep_part(self, mb: Microbatch) -> None:
        """Keep the gradient of the last round, of the part ``mb``, beside the accumulator."""
        self.drain.finish()
        self._parts[mb] = None if self._round.empty else self._round.region
        if not self._round.empty:
            self._round.region = None
        self._round.empty = True
        self.drain.drop()

    def count_part(self, mb: Microbatch) -> None:
        """Add the gradient of the part ``mb`` to the accumulator."""
        if (region := self._parts.get(mb)) is not None:
            self.add(region.values)
        self.drop_part(mb)

    def drop_part(self, mb: Microbatch) -> None:
        """Forget the gradient of the part ``mb``."""
        if (region := self._parts.pop(mb, None)) is not None:
            self._returned.append(region)

    def sketch_part(self, mb: Microbatch, seed: bytes) -> Sketch:
        """The sketch of the gradient of the part ``mb``."""
        region = self._parts[mb]
        return sketch(torch.zeros(1) if region is None else region.values, seed)

    def drop_round(self) -> None:
        """Forget the gradient of the last round."""
        self.drain.drop()
        self.drain.finish()
        self._round.empty = True

    def add(self, gradient: Tensor) -> None:
        """Add ``gradient``, fp32 [G], to the accumulator."""
        self.accumulated()
        self._add(gradient)

    def _add(self, gradient: Tensor) -> None:
        total = self._total()
        for a, b in total.windows():
            part = gradient[a:b]
            total.values[a : a + len(part)].add_(part)
        self._sum.empty = False

    def _total(self) -> Region:
        """The sum's region. None exists while a round uses the region and nothing was added."""
        self._sum.region = self._sum.region or self._region()
        return self._sum.region

    def clear(self) -> None:
        """Empty the accumulator."""
        self._sum.empty, self._summed = True, []

    def accumulated(self) -> Tensor:
        """The accumulator, flat fp32 [G]."""
        total = self._total()
        if self._sum.empty:
            self.state.finish()  # an update's gradient may be there
            for a, b in total.windows():
                total.values[a:b].zero_()
            self._sum.empty = False
        return total.values

    def apply(self, gradient: Tensor, update: Update) -> None:
        """Optimizer step with ``gradient``, fp32 [G]."""
        with self._jobs.at("apply"), self._timed("apply_s"):
            self.loader.forget()  # the update needs the memory
            with self._changing:
                if update.skip:
                    self.state.finish()
                elif self._beside:
                    # ``gradient`` may be the accumulator: no other leaves the device before all new weights were loaded
                    self.state.begin_update(self._rule)
                    self._threads.submit(self._threads.updates, self._update_beside, gradient, update)
                else:
                    self.state.update(self._rule, gradient, update)
                self.scale.update(update.step, skipped=update.skip)
            self.clear()
        self._timed.finish()

    def _update_beside(self, gradient: Tensor, update: Update) -> None:
        try:
            with on_cores(BESIDE):
                self.state.update(self._rule, gradient, update)
        except BaseException as e:
            self.state.abandon(e)
            raise

    def copied_state(self) -> dict[str, Tensor]:
        """Weights, moments and loss scale of one moment. The copy is in backing memory: a copy on a disk takes no
        memory."""
        with self._changing:
            return {**self.state.copy(), **self.scale.state()}

    def lent_state(self) -> dict[str, Tensor]:
        """The same, but no copy: weights and moments themselves."""
        return {**self.state.named(), **self.scale.state()}

    def change(self, fn: Callable[..., None], *args: object) -> None:
        """Change the state: nothing on the device is valid any more."""
        fn(*args)
        self.loader.forget()

    def close(self) -> None:
        self.state.abandon(CancelledError())
        self.loader.close()
        self.drain.close()
