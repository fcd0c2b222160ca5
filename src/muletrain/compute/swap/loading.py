"""Weights come to the device, and gradients leave, beside the computation.

One thread loads the next sub-model while the current one computes; another one brings summed gradients into backing
memory. Weights in 16 bits are made from the fp32 masters on the way: on the GPU, where pinned memory comes at the speed
of the bus, and on the CPU, where a file is read through pinned buffers. Activations between sub-models also leave the
device and come back beside the computation.
"""

from __future__ import annotations

import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from muletrain.compute.swap.backing import SMALLEST_WINDOW, WINDOW, return_freed_memory
from muletrain.compute.threads import InlineExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from muletrain.compute.jobs import Jobs
    from muletrain.compute.swap.backing import Region
    from muletrain.compute.swap.chain import SubModel
    from muletrain.compute.swap.state import State


DEVICE_WINDOW, WINDOWS_IN_DEVICE = 1 << 24, 64
"""Numbers in a window of the device at most, and windows in a small stage at least."""
ALIGNED = 128
"""Numbers of which the weights' place on the device is a multiple: matrix products are slow elsewhere."""


def device_window(params: int) -> int:
    """Numbers that are copied at a time from or to pinned memory, of a stage with ``params``. In 16 bits the numbers
    pass through a buffer of the device. Small copies would keep the computing thread from launching kernels: all
    threads take turns."""
    return max(SMALLEST_WINDOW, min(DEVICE_WINDOW, params // WINDOWS_IN_DEVICE))


@dataclass
class Traffic:
    """Counted since the start. ``wait_s``: seconds in which computing waited for weights, or for gradients to leave."""

    loads: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    wait_s: float = 0.0


class Lane:
    """One direction between backing memory and the device. A thread runs one copy at a time."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype, window: int, *, inline: bool) -> None:
        """``window``: numbers that are copied at a time from or to pinned memory."""
        self.thread: Executor = InlineExecutor() if inline else ThreadPoolExecutor(1, thread_name_prefix=name)
        self._cuda = device.type == "cuda"
        self._device, self._dtype, self._window, self._turn = device, dtype, window, 0
        self._staging: list[Tensor] = []
        self._arriving: Tensor | None = None
        if self._cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._free = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def window(self, region: Region) -> int:
        """Numbers to copy at a time."""
        return self._window if region.pinned else WINDOW

    def to_device(self, source: Tensor, target: Tensor, *, pinned: bool) -> None:
        """At most a ``window``; they are there after ``finish``. ``pinned``: ``source`` is."""
        if not self._cuda:
            target.copy_(source)
        elif pinned and source.is_contiguous():
            with torch.cuda.stream(self._stream):
                if target.dtype == source.dtype:
                    target.copy_(source, non_blocking=True)
                    return
                if self._arriving is None:
                    self._arriving = torch.empty(self._window, device=self._device)
                arriving = self._arriving[: source.numel()]
                arriving.copy_(source, non_blocking=True)
                target.copy_(arriving)
        else:
            self._staged(source, target)

    def _staged(self, source: Tensor, target: Tensor) -> None:
        if not self._staging:
            self._staging = [torch.empty(WINDOW, dtype=self._dtype, pin_memory=True) for _ in range(2)]
        k = self._turn = 1 - self._turn
        self._free[k].synchronize()
        staged = self._staging[k][: source.numel()].view(source.shape)
        staged.copy_(source)
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
            self._free[k].record(self._stream)

    def to_backing(self, source: Tensor, target: Tensor, *, pinned: bool) -> None:
        """At most a ``window``; they are there after ``finish``. ``pinned``: ``target`` is."""
        if not self._cuda:
            target.copy_(source)
            return
        if pinned and target.is_contiguous():
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
            return
        if not self._staging:
            self._staging = [torch.empty(WINDOW, dtype=self._dtype, pin_memory=True)]
        staged = self._staging[0][: source.numel()].view(source.shape)
        with torch.cuda.stream(self._stream):
            staged.copy_(source, non_blocking=True)
        self._stream.synchronize()
        target.copy_(staged)

    def follow(self) -> None:
        """Later copies wait for the device work queued so far, which may still read memory that was freed meanwhile."""
        if self._cuda:
            self._stream.wait_stream(torch.cuda.default_stream(self._device))

    def finish(self) -> None:
        if self._cuda:
            self._stream.synchronize()


class Ferry:
    """Copies of activations between sub-models, between the device and backing memory. On CUDA copies run beside the
    computation, in the order of the calls. Only for the compute thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def store(self, values: Tensor, place: Tensor) -> None:
        """Copy ``values`` to ``place`` in backing memory, visible to every later ``fetch``."""
        if self._stream is None:
            place.copy_(values)
            return
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            place.copy_(values, non_blocking=True)
        values.record_stream(self._stream)

    def fetch(self, place: Tensor) -> Callable[[], Tensor]:
        """Begin to copy ``place`` to the device. Call the returned function when the computation needs the copy."""
        if self._stream is None:
            return lambda: place.to(self._device)
        values = torch.empty_like(place, device=self._device)
        self._stream.wait_stream(torch.cuda.default_stream(self._device))  # the memory may have been another tensor's
        with torch.cuda.stream(self._stream):
            values.copy_(place, non_blocking=True)
            arrived = self._stream.record_event()
        # else, if nobody calls ``get``, the memory could be reused during the copy
        values.record_stream(self._stream)

        def get() -> Tensor:
            torch.cuda.default_stream(self._device).wait_event(arrived)
            return values

        return get

    def finish(self) -> None:
        """Returns when nothing is under way."""
        if self._stream is not None:
            self._stream.synchronize()


class Loader:
    """Keeps some sub-models on the device, and at most two more: the current and the next. Both take turns at the
    beginning and at the end of one place, so that no memory is allocated or freed in between. All places are in one
    buffer. Only for the compute thread."""

    def __init__(
        self,
        models: Sequence[SubModel],
        state: State,
        device: torch.device,
        dtype: torch.dtype,
        jobs: Jobs,
        kept: Sequence[int],
        base: Mapping[str, Tensor],
        *,
        inline: bool,
    ) -> None:
        """``kept``: the sub-models that stay on the device after loading, until the weights change. ``base``: the weights of
        ``Model.base``, in the machine's memory."""
        self._base = base
        self._models, self._state, self._device, self._dtype, self._jobs = models, state, device, dtype, jobs
        self.lane = Lane("load", device, dtype, device_window(state.layout.size), inline=inline)
        self.traffic = Traffic()
        turns = [m for m in models if m.number not in kept]
        shared = max([m.size for m in turns] + [a.size + b.size for a, b in pairwise(turns)], default=0) + ALIGNED
        self._kept, self._size, self._places = frozenset(kept), shared, dict[int, int]()
        """Where each sub-model's place begins."""
        for turn, model in enumerate(turns):
            self._places[model.number] = (shared - model.size) // ALIGNED * ALIGNED if turn % 2 else 0
        for k in kept:
            self._places[k] = -(-self._size // ALIGNED) * ALIGNED
            self._size = self._places[k] + models[k].size
        self._buffer: Tensor | None = None
        self._held: dict[int, Tensor] = {}
        places = dict(
            zip(state.layout.names, zip(state.layout.ranges(), state.layout.shapes, strict=True), strict=True)
        )
        names = {model.number: {name for block in model.blocks for name in block.exact(dtype)} for model in models}
        self._exact_places = {k: {name: places[name] for name in sorted(found)} for k, found in names.items()}
        self._beside: dict[int, dict[str, Tensor]] = {}
        """Of each loaded sub-model, the parameters outside its place: fp32 parameters, and the base."""
        self._coming: dict[int, Future[Tensor]] = {}
        self.prefetch = True

    def get(self, k: int, then: int | None = None) -> list[Tensor]:
        """Sub-model ``k`` computes next: returns the parameters. ``then`` is loaded meanwhile, or the next absent one
        in this direction."""
        if self._device.type == "cpu":
            return_freed_memory()  # of the last sub-model: the next one has blocks of different sizes
        if k not in self._held:
            begin = time.perf_counter()
            if k not in self._coming:
                self._begin(k, {k})
            self._held[k] = self._coming.pop(k).result()
            self.traffic.wait_s += time.perf_counter() - begin
        if then is not None and then != k and self.prefetch:
            beyond = range(then, len(self._models) if then > k else -1, then - k)
            then = next((n for n in beyond if not (n in self._held and n in self._kept)), k)
            if then not in self._held and then not in self._coming:
                self._begin(then, {k, then})
        return self._models[k].bind(self._held[k], self._beside[k])

    def forget(self) -> None:
        """The weights have changed. On the CPU, the memory is freed for the update."""
        self._let_go(set(), stay=False)
        if self._device.type == "cpu":
            self._buffer = None

    def _begin(self, k: int, keep: set[int]) -> None:
        """Load sub-model ``k``, after making room. Sub-models in ``keep`` are not unloaded."""
        self._let_go(keep)
        if self._buffer is None:
            self._buffer = torch.empty(self._size, dtype=self._dtype, device=self._device)
        model, at = self._models[k], self._places[k]
        place = self._buffer.data[at : at + model.size]  # autograd must not take the copy for a change of the neighbour
        self.lane.follow()
        self._coming[k] = self.lane.thread.submit(self._load, model, place)

    def _let_go(self, keep: set[int], *, stay: bool = True) -> None:
        """Unload all sub-models that are not in ``keep``. ``stay``: sub-models that are kept between steps stay, too."""
        for k in [k for k in self._coming if k not in keep]:
            self._held[k] = self._coming.pop(k).result()
        for k in [k for k in self._held if k not in keep and not (stay and k in self._kept)]:
            del self._held[k], self._beside[k]
            self._models[k].unbind()

    def _load(self, model: SubModel, target: Tensor) -> Tensor:
        begin = time.perf_counter()
        with self._jobs.at("load", part=model.number):
            source = self._state.model
            direct = target.device.type == "cpu" and target.dtype == torch.float32
            for part in model.pieces(self.lane.window(source)):
                a, b = part.begin, part.end
                self._state.ready(a, b)
                source.expect(b, min(2 * b - a, source.values.numel()))
                if direct and part.rows == 1:
                    source.read(a, part.own(target))
                else:
                    self.lane.to_device(part.of(source.values), part.own(target), pinned=source.pinned)
                    source.release(a, b)
            beside = {
                name: source.values[a:b].to(target.device, copy=True).view(shape)
                for name, ((a, b), shape) in self._exact_places[model.number].items()
            }
            base = {name: self._base[name].to(target.device) for name in model.base}
            self._beside[model.number] = beside | base
            self.lane.finish()
        self.traffic.loads += 1
        self.traffic.loaded_bytes += target.nbytes + sum(tensor.nbytes for tensor in base.values())
        self.traffic.load_s += time.perf_counter() - begin
        return target

    def close(self) -> None:
        self.lane.thread.shutdown(wait=False, cancel_futures=True)
        self._buffer = None
        self._held.clear()
        self._beside.clear()
        self._coming.clear()


class Drain:
    """Sums the gradients of one sub-model on the device, and brings the sum into backing memory while the next one
    computes. Only for the compute thread."""

    def __init__(
        self, models: Sequence[SubModel], traffic: Traffic, device: torch.device, jobs: Jobs, *, inline: bool
    ) -> None:
        self._traffic, self._device, self._jobs = traffic, device, jobs
        window = device_window(sum(model.size for model in models))
        self._lane = Lane("drain", device, torch.float32, window, inline=inline)
        self._size = max(model.trainable.size for model in models)
        self._buffer: Tensor | None = None
        self._leaving: Future[None] | None = None
        self._sum: Tensor | None = None
        self._views: list[Tensor] = []

    def add(self, model: SubModel, gradients: Sequence[Tensor], alpha: float, before: Region | None = None) -> None:
        """Add ``alpha`` x ``gradients`` of a microbatch, in the order of the sub-model's layout. ``before``: the
        initial sum, flat [P]; None: zeros."""
        if self._sum is None:
            self.finish()  # one sum at a time
            if self._buffer is None:
                self._buffer = torch.empty(self._size, device=self._device)
            self._sum = self._buffer[: model.trainable.size]
            self._fill(model, self._sum, before)
            self._views = list(model.trainable.views(self._sum).values())
        if gradients:
            torch._foreach_add_(self._views, list(gradients), alpha=alpha)

    def _fill(self, model: SubModel, total: Tensor, before: Region | None) -> None:
        if before is None:
            total.zero_()
            return
        for part in model.pieces(self._lane.window(before), trained=True):
            if self._device.type == "cpu" and part.rows == 1:
                before.read(part.begin, part.own(total))
            else:
                part.own(total).copy_(part.of(before.values), non_blocking=before.pinned and part.rows == 1)

    def send(self, model: SubModel, target: Region, *, added: bool = False) -> None:
        """Copy the sum to ``target``, flat [P]; zeros if nothing was added. ``added``: the sum began with the values
        there."""
        values, self._sum, self._views = self._sum, None, []
        self.finish()
        if values is None and added:
            return
        self._lane.follow()
        self._leaving = self._lane.thread.submit(self._store, model, values, target)

    def finish(self) -> None:
        """Returns when the last sum is in backing memory."""
        if self._leaving is not None:
            begin = time.perf_counter()
            leaving, self._leaving = self._leaving, None
            leaving.result()
            self._traffic.wait_s += time.perf_counter() - begin

    def drop(self) -> None:
        """Forget the unsent sum. On the CPU, the memory is freed for the update."""
        self._sum, self._views = None, []
        if self._device.type == "cpu":
            self._buffer = None

    def _store(self, model: SubModel, values: Tensor | None, target: Region) -> None:
        with self._jobs.at("drain", part=model.number), torch.no_grad():
            for part in model.pieces(self._lane.window(target), trained=True):
                place = part.of(target.values)
                if values is None:
                    place.zero_()
                elif values.device.type == "cpu" and part.rows == 1:
                    target.write(part.begin, part.own(values))
                    continue
                else:
                    self._lane.to_backing(part.own(values), place, pinned=target.pinned)
                target.release(part.begin, part.end)
            self._lane.finish()

    def close(self) -> None:
        self._lane.thread.shutdown(wait=False, cancel_futures=True)
        self._buffer = None
