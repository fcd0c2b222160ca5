"""``SwappedCompute``: one stage with weights, moments and gradients in backing memory, computed by sub-models that take
turns on the device. No part knows the network.

The device holds the sub-models that ``fit`` chose. The numbers equal ``TorchCompute``'s: the same arithmetic on the
same fp32 masters; only the sums of gradients are taken in a different order. Shapes: B sequences, T tokens, D width, P
parameters.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from muletrain.compute import checks
from muletrain.compute.probe import precision_dtype
from muletrain.compute.profile import Conditions, part_times
from muletrain.compute.results import Result
from muletrain.compute.slot import AT_ONCE, Turn
from muletrain.compute.swap.arithmetic import Passage, SwappedArithmetic
from muletrain.compute.swap.backing import Disk, Memory, keep_freed_memory_small, return_freed_memory
from muletrain.compute.swap.chain import chain_of, sub_models
from muletrain.compute.swap.fit import NOMINAL_BYTES_PER_S, NOMINAL_FLOPS, blocks_of, fitted, swap_memory
from muletrain.compute.swap.loading import Lane, device_window
from muletrain.compute.swap.state import State
from muletrain.compute.threads import ThreadedCompute, Threads
from muletrain.errors import CapacityError
from muletrain.events import SwapWorked
from muletrain.model.loss import positions_in
from muletrain.model.make import make_stage
from muletrain.model.stage import initial_weight

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from torch import Tensor

    from muletrain.compute.arithmetic import Counters, StageSetup
    from muletrain.compute.base import Microbatch, Update
    from muletrain.compute.estimate import Offer, SwapMemory
    from muletrain.compute.swap.backing import Backing, Region
    from muletrain.model.chain import Model
    from muletrain.model.module import StageModule
    from muletrain.optim.sketch import Sketch
    from muletrain.planning.partition import Cut
    from muletrain.planning.swapping import Layer

PROBED = 1 << 22
"""Numbers that are read to measure how fast weights are loaded."""
PATIENCE, PATIENCE_MAX_S, PATIENCE_FIRST_S = 0.1, 2.0, 0.05
"""A round waits for more calls for this share of the last round's time, at most so long, and so long at first [s]."""
ARRIVING_S = 0.01
"""A round that has enough calls waits on while each next one comes within this time [s]."""


@dataclass(eq=False)
class Call:
    """One waiting call. ``kind``: which calls are computed together; ``p`` None: computed alone."""

    kind: str
    turn: Turn
    order: int
    work: Callable[[Sequence[Passage]], Awaitable[None]]
    p: Passage | None
    done: asyncio.Future[None]
    round: Round | None = None

    @property
    def urgency(self) -> tuple[int, int]:
        return self.turn.priority, self.order

    @property
    def single(self) -> bool:
        """Is this never computed with others? The gradient of a part of a microbatch must not be mixed with others."""
        return self.p is None or (self.p.mb.whole > 0 and self.kind != "forward")

    def together(self, other: Call) -> bool:
        """Can both be in one round?"""
        if self.single or other.single or self.p is None or other.p is None:
            return self is other
        return (self.kind, self.p.mb.step) == (other.kind, other.p.mb.step)


@dataclass(eq=False)
class Round:
    """Calls that are computed together. ``over``: settled which calls count."""

    calls: list[Call]
    counted: set[Call] = field(default_factory=set)
    settled: set[Call] = field(default_factory=set)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Rounds:
    """Runs one round at a time: the most urgent of the waiting calls, and all of the same kind and step, up to a bound.
    Only for the event loop's thread.

    At an idle device, a call waits a moment while fewer than C calls wait: each round loads the whole stage. The calls
    of a round are settled together: a caller that resumed counts, a cancelled one does not, and the round's gradient
    becomes the accumulator's only after all callers have done either."""

    def __init__(self, enough: int, most: int, settle: Callable[[Round], None]) -> None:
        """``enough``: C; ``most``: calls of a round; ``settle``: told once about each round that is over."""
        self._enough, self._most, self._settle = enough, most, settle
        self._waiting: list[Call] = []
        self._order = itertools.count()
        self._arrived: asyncio.Event | None = None
        self._worker: asyncio.Task[None] | None = None
        self._open: set[Round] = set()
        self._last_s = PATIENCE_FIRST_S / PATIENCE
        self.rounds = self.microbatches = 0
        self._closed = False

    async def call(
        self, kind: str, turn: Turn, work: Callable[[Sequence[Passage]], Awaitable[None]], p: Passage | None = None
    ) -> None:
        """Returns when ``work`` on ``p`` (and the rest of the round) is done. Raises the errors of ``work`` and
        ``turn.begins``."""
        if self._closed:
            raise asyncio.CancelledError
        call = Call(kind, turn, next(self._order), work, p, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if self._arrived is not None:
            self._arrived.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            await call.done
        except BaseException:
            if call in self._waiting:
                self._waiting.remove(call)
            if p is not None:
                p.dropped = True
            self._resumed(call, counts=False)
            raise
        self._resumed(call, counts=True)

    def _resumed(self, call: Call, *, counts: bool) -> None:
        if (round_ := call.round) is None:
            return
        round_.settled.add(call)
        if counts:
            round_.counted.add(call)
        if len(round_.settled) == len(round_.calls):
            self._open.discard(round_)
            self._settle(round_)
            round_.over.set()

    async def settled(self) -> None:
        """Returns when every finished round is settled."""
        for round_ in [r for r in self._open if all(c.done.done() for c in r.calls)]:
            await round_.over.wait()

    async def _work(self) -> None:
        try:
            await self._work_off()
        except Exception as e:  # nobody may wait for ever
            for call in [c for c in self._waiting if not c.done.done()]:
                call.done.set_exception(e)

    async def _work_off(self) -> None:
        while self._waiting:
            calls = await self._begun(await self._chosen())
            if not calls:
                continue
            round_ = Round(calls)
            self._open.add(round_)
            for call in calls:
                call.round = round_
            begin = asyncio.get_running_loop().time()
            await self._run(round_)
            if calls[0].p is not None:
                self._last_s = asyncio.get_running_loop().time() - begin
                self.rounds, self.microbatches = self.rounds + 1, self.microbatches + len(calls)
                await round_.over.wait()  # the next round needs room for a gradient

    async def _run(self, round_: Round) -> None:
        passages = [c.p for c in round_.calls if c.p is not None]
        try:
            await round_.calls[0].work(passages)
        except Exception as e:
            for call in round_.calls:
                if not call.done.done():
                    call.done.set_exception(e)
        for call in round_.calls:
            if not call.done.done():
                call.done.set_result(None)

    async def _chosen(self) -> list[Call]:
        """The calls of the next round: waits for more of the most urgent one's kind while few are there."""
        loop = asyncio.get_running_loop()
        until = loop.time() + min(PATIENCE * self._last_s, PATIENCE_MAX_S)
        while self._waiting:
            first = min(self._waiting, key=lambda c: c.urgency)
            calls = sorted((c for c in self._waiting if first.together(c)), key=lambda c: c.urgency)
            left_s = until - loop.time()
            if first.single or len(calls) >= self._most or left_s <= 0:
                return calls[: self._most]
            if len(calls) >= self._enough:
                left_s = min(left_s, ARRIVING_S)
            self._arrived = asyncio.Event()
            try:
                async with asyncio.timeout(left_s):
                    await self._arrived.wait()
            except TimeoutError:
                until = loop.time()
        return []

    async def _begun(self, calls: list[Call]) -> list[Call]:
        """The ``calls`` that pass the check."""
        begun = []
        for call in calls:
            if call not in self._waiting:  # cancelled meanwhile
                continue
            self._waiting.remove(call)
            try:
                call.turn.begins()
            except Exception as e:
                if not call.done.done():
                    call.done.set_exception(e)
                continue
            begun.append(call)
        return begun

    def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
        self._closed = True
        for call in (*self._waiting, *(call for round_ in self._open for call in round_.calls)):
            call.done.cancel()


@dataclass(frozen=True)
class Swap:
    """How a stage is swapped. ``offer``: the usable memory; ``folder``: for backing memory on a disk, None: pinned
    memory of the machine; ``most``: microbatches computed together at most; ``least``: C, None: as many as hide the
    loading; ``alone``: see ``SwapMemory``."""

    offer: Offer
    folder: Path | None
    most: int
    least: int | None = None
    alone: bool = False


class SwappedCompute(ThreadedCompute):
    """The ``Compute`` protocol for a stage that does not fit into the device. ``source``: see ``TorchCompute``.

    Raises CapacityError if device, memory or disk are too small, CheckpointError when ``source`` gives wrong shapes.
    """

    delayed = False

    def __init__(
        self,
        spec: Model,
        cut: Cut,
        stage: int,
        setup: StageSetup,
        swap: Swap,
        source: Callable[[str], Tensor] | None = None,
    ) -> None:
        self.stage, self.stages, self._spec, self._setup = stage, len(cut), spec, setup
        tokens = setup.sequences * spec.context
        lamb = setup.optimizer.name == "lamb"
        disk = swap.folder is not None
        memory = swap_memory(
            spec,
            cut,
            stage,
            tokens,
            setup.precision,
            microbatches=swap.most,
            lamb=lamb,
            disk=disk,
            alone=swap.alone,
            client=not setup.updates,
        ).at(swap.offer)
        if not memory.fits(swap.offer):  # before a block is measured for which the device may be too small
            raise CapacityError(memory.problem(swap.offer))
        self.lends = not memory.copies(swap.offer)
        at = Conditions(setup.sequences, setup.device, setup.precision)
        if setup.device.type == "cpu":
            keep_freed_memory_small()
        times = None if setup.inline else part_times(spec, at, memory.inside)
        if setup.device.type == "cpu":
            return_freed_memory()  # of the blocks that were measured
        blocks = blocks_of(spec, cut, stage, tokens, setup.precision, NOMINAL_FLOPS, times, memory.inside)
        fitted(blocks, memory, swap.offer, NOMINAL_BYTES_PER_S, 1)  # refuse before taking room on the disk
        chain, gpu = chain_of(spec, cut, stage, memory.inside), setup.device if setup.device.type == "cuda" else None
        self._backing: Backing = Disk(swap.folder) if swap.folder is not None else Memory(gpu)
        self._failure: BaseException | None = None
        """Why the accumulator lacks something, until emptied."""
        try:
            self._backing.reserve(memory.in_files)
            self._begin(spec, cut, chain, swap, (blocks, memory), source)
        except BaseException:
            self._backing.close()
            raise

    def _begin(
        self,
        spec: Model,
        cut: Cut,
        chain: Sequence[StageModule],
        swap: Swap,
        needs: tuple[list[Layer], SwapMemory],
        source: Callable[[str], Tensor] | None,
    ) -> None:
        """Write the first state, and cut the stage into sub-models. Raises as the constructor does."""
        stage, setup = self.stage, self._setup
        whole = make_stage(spec, stage, cut)
        shapes, layout = whole.shapes(), whole.layout()
        self.layout, self.n_params, self.n_trained = layout, layout.size, layout.trained
        self.threads = Threads(stage, delayed=swap.alone, inline=setup.inline)
        self.jobs = self.threads.jobs
        self.state_ = state = State(layout, self._backing, moments=setup.updates)
        source = source or (lambda name: initial_weight(spec, name, shapes[name], setup.seed))
        state.begin(source)
        base = {name: source(name) for name in whole.base_shapes()}
        rate = NOMINAL_BYTES_PER_S if setup.inline else measured_rate(state.model, setup)
        self.plan = fitted(*needs, swap.offer, rate, swap.most)
        self.parts, self.by_block = len(self.plan.runs), False
        models = sub_models(chain, self.plan.runs, layout)
        where, plan = (stage, len(cut)), self.plan
        self.arithmetic = SwappedArithmetic(
            where, models, setup, state, self._backing, self.threads, kept=plan.kept, base=base, alone=swap.alone
        )
        self.rounds = Rounds(min(swap.least or self.plan.minibatches, swap.most), swap.most, self._settle)
        self._kept: dict[Microbatch, Passage] = {}
        self._told: dict[str, Any] = {}
        self._uncounted: set[Microbatch] = set()
        """Parts whose gradients are kept, and not counted yet."""
        self._together: dict[Microbatch, int] = {}
        """Microbatches of the last round of each, until discarded or until the step is over."""
        self._closed = False

    @property
    def counters(self) -> Counters:
        """Times and recomputations, since the start."""
        return self.arithmetic.counters

    @property
    def skipped(self) -> int:
        return self.arithmetic.scale.skipped

    def worked(self, step: int) -> SwapWorked:
        """The work since the last call, at the end of ``step``."""
        traffic, rounds, before = self.arithmetic.loader.traffic, self.rounds, self._told
        self._told = now = {
            "loads": traffic.loads,
            "loaded_bytes": traffic.loaded_bytes,
            "rounds": rounds.rounds,
            "microbatches": rounds.microbatches,
            "load_s": traffic.load_s,
            "load_wait_s": traffic.wait_s,
        }
        return SwapWorked(step=step, stage=self.stage, **{name: n - before.get(name, 0) for name, n in now.items()})

    # Forward and backward ---------------------------------------------------------------------------------------------

    async def forward(
        self, mb: Microbatch, inputs: Tensor, turn: Turn = AT_ONCE, positions: Tensor | None = None
    ) -> Result:
        self._check(mb, inputs)
        checks.check_positions(positions, inputs)
        passage = Passage(mb, inputs, positions=positions)
        try:
            await self.rounds.call("forward", turn, self._on_device(self.arithmetic.forward), passage)
        except BaseException:
            self._freed(passage)
            raise
        self._forget(mb)
        self._kept[mb] = passage
        assert passage.output is not None  # computed
        output, passage.output = passage.output, None
        passage.shape = tuple(output.shape)
        return Result(output)

    async def backward(self, mb: Microbatch, grad: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool) -> Result | None:
        checks.check_gradient_shape(grad, self._kept[mb].shape)
        passage = self._kept.pop(mb)
        passage.grad, passage.accumulate, passage.dropped = grad, accumulate, False

        begun = False

        def begins() -> None:
            nonlocal begun
            turn.begins()
            begun = True

        own_turn, work = Turn(turn.priority, begins), self._on_device(self.arithmetic.backward)
        try:
            await self.rounds.call("backward", own_turn, work, passage)
        finally:
            if begun:
                self._freed(passage)
            else:  # another turn may follow
                self._kept[mb] = passage
        return None if passage.inputs_gradient is None else Result(passage.inputs_gradient)

    async def loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool
    ) -> tuple[float, Result | None]:
        self._check(mb, inputs)
        vocab = self._spec.vocab
        declared, places = self._spec.targets, None
        targets, weight = checks.weighed(targets, declared, inputs.shape[1], vocab, self._setup.microbatches)
        checks.check_targets(targets, inputs, self._spec, self._setup.sequences)
        if self._spec.apart:
            places, targets = positions_in(targets, vocab)
        checks.check_sample_values("targets", targets, vocab + (mb.heldout or weight is not None))
        weight = mb.share(len(inputs)) if weight is None else weight
        passage = Passage(mb, inputs, targets, accumulate=accumulate, weight=weight, positions=places)
        try:
            await self.rounds.call("loss", turn, self._on_device(self.arithmetic.loss), passage)
        finally:
            self._freed(passage)
        gradient = passage.inputs_gradient
        return passage.loss, None if gradient is None else Result(gradient)

    def _check(self, mb: Microbatch, inputs: Tensor) -> None:
        if self.stage == 0:
            checks.check_sample_shape("inputs", inputs, self._spec.inputs, self._spec, self._setup.sequences)
            checks.check_sample_values("inputs", inputs, self._spec.vocab)
        else:
            checks.check_activation_shape(inputs, self._spec, self._setup.sequences)

    def busy_s(self, mb: Microbatch, took_s: float) -> float:
        return took_s / self._together.get(mb, 1)

    def discard(self, mb: Microbatch) -> None:
        self._together.pop(mb, None)
        self._forget(mb)
        if mb in self._uncounted:
            self._uncounted.discard(mb)
            self._submit(self.arithmetic.drop_part, mb)

    def _forget(self, mb: Microbatch) -> None:
        if (passage := self._kept.pop(mb, None)) is not None:
            self._freed(passage)

    def count(self, mb: Microbatch) -> None:
        self._uncounted.remove(mb)
        self._submit(self.arithmetic.count_part, mb)

    async def part_sketch(self, mb: Microbatch, seed: bytes) -> Sketch:
        if mb not in self._uncounted:
            raise KeyError(mb)
        return await self._compute(self.arithmetic.sketch_part, mb, seed)

    def _freed(self, passage: Passage) -> None:
        """The memory is free once the device no longer uses the tensor."""
        if not self._closed:
            self._submit(self.arithmetic.free, passage)

    # Rounds -----------------------------------------------------------------------------------------------------------

    def _on_device(self, fn: Callable[..., None]) -> Callable[[Sequence[Passage]], Awaitable[None]]:
        async def work(passages: Sequence[Passage]) -> None:
            self._together |= {p.mb: len(passages) for p in passages}
            await asyncio.get_running_loop().run_in_executor(self.threads.compute, fn, passages)

        return work

    def _settle(self, round_: Round) -> None:
        """A round is over. If all callers counted, the gradient is the accumulator's; if some did, the counted part is
        computed again; else the gradient is dropped."""
        arithmetic = self.arithmetic
        counting = [c.p for c in round_.counted if c.p is not None and c.p.accumulate]
        wanted = [c.p for c in round_.calls if c.p is not None and c.p.accumulate]
        if not wanted or self._closed:
            return
        if wanted[0].mb.whole and counting:
            self._uncounted.add(wanted[0].mb)
            return self._submit(arithmetic.keep_part, wanted[0].mb)
        settle = arithmetic.commit if len(counting) == len(wanted) else arithmetic.commit_again
        self._submit(settle, sorted(counting, key=lambda p: p.mb))

    def _submit(self, fn: Callable[..., None], *args: object) -> None:
        """Queue ``fn`` behind the device's work; later calls see the effect. If ``fn`` fails, ``gradient`` and
        ``apply`` raise that error until the accumulator is emptied."""

        def done(future: Future[None]) -> None:
            if not future.cancelled() and (error := future.exception()) is not None and self._failure is None:
                self._failure = error

        self.threads.submit(self.threads.compute, fn, *args).add_done_callback(done)

    def _raise_failure(self) -> None:
        """Raises any failure since the accumulator was emptied."""
        if self._failure is not None:
            raise self._failure

    # The accumulator and the step -------------------------------------------------------------------------------------

    def add(self, step: int, gradient: Tensor) -> None:
        self._submit(self.arithmetic.add, gradient)

    def clear(self, step: int) -> None:
        self._submit(self._cleared)

    def _cleared(self) -> None:
        self._failure = None
        self.arithmetic.clear()

    async def gradient(self, step: int) -> Tensor:
        """The accumulator itself, in backing memory, until the step is applied."""
        await self.rounds.settled()
        accumulated = await self._compute(self.arithmetic.accumulated)
        self._raise_failure()
        return accumulated

    async def room(self, numbers: int) -> Tensor:
        """In backing memory. Raises CapacityError if the disk is full."""
        return (await self.offload(self._backing.region, numbers)).values

    async def apply(self, gradient: Tensor, update: Update, turn: Turn = AT_ONCE) -> None:
        """Raises ProtocolError unless ``gradient`` is fp32 [G]. A cancelled call has either not started or is
        completed.
        """
        checks.check_gradient_shape(gradient, (self.n_trained,))

        async def work(nobody: Sequence[Passage]) -> None:
            await self._compute(self.arithmetic.apply, gradient, update)
            self._failure = None

        await self.rounds.call("apply", turn, work)
        self._together = {mb: n for mb, n in self._together.items() if mb.step > update.step}

    # The state --------------------------------------------------------------------------------------------------------

    async def digest(self) -> bytes:
        return await self._read(self.state_.digest)

    async def copied_weights(self, begin: int = 0, end: int | None = None) -> Tensor:
        return await self.offload(self.state_.copied_weights, begin, end)

    def newest_for(self) -> tuple[int, ...]:
        return ()

    async def load_weights(self, weights: Tensor, steps: Collection[int] = ()) -> None:
        checks.check_gradient_shape(weights, (self.n_params,))
        await self._compute(self.arithmetic.change, self.state_.load_weights, weights)

    async def state(self) -> dict[str, Tensor]:
        """The copy is in backing memory: a copy on a disk takes no memory."""
        return await self._read(self.arithmetic.lent_state if self.lends else self.arithmetic.copied_state)

    async def load_state(self, state: dict[str, Tensor]) -> None:
        await self._compute(self.arithmetic.change, self._load, state)

    def _load(self, state: dict[str, Tensor]) -> None:
        self.state_.load(state)
        self.arithmetic.scale.load_state(state, 0)

    def close(self) -> None:
        """Remove the files of the backing memory; running work keeps open files."""
        self._closed = True
        self.rounds.close()
        self.threads.close()
        self.arithmetic.close()
        self._kept.clear()
        self._backing.close()


def measured_rate(model: Region, setup: StageSetup) -> float:
    """How fast weights come from backing memory [bytes/s, in the precision that the device computes in]."""
    numbers, dtype = min(PROBED, model.values.numel()), precision_dtype(setup.precision)
    lane = Lane("probe", setup.device, dtype, device_window(model.values.numel()), inline=True)
    target = torch.empty(numbers, dtype=dtype, device=setup.device)
    begin = time.perf_counter()
    for _again in range(2 if setup.device.type == "cuda" else 1):  # the first copy takes buffers
        begin = time.perf_counter()
        for a in range(0, numbers, lane.window(model)):
            b = min(a + lane.window(model), numbers)
            lane.to_device(model.values[a:b], target[a:b], pinned=model.pinned)
            model.release(a, b)
        lane.finish()
    return target.nbytes / max(1e-9, time.perf_counter() - begin)
