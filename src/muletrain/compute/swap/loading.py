"""Weights come to the device beside the computation, and gradients leave it.

One thread loads the next sub-model while the current one computes; another one brings summed gradients into backing
memory. Weights in 16 bits are made from the fp32 masters on the way. On CUDA each thread has a stream and two pinned
buffers of its own.
"""

from __future__ import annotations

import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from muletrain.compute.executor import InlineExecutor
from muletrain.compute.swap.backing import WINDOW, return_freed_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from muletrain.compute.jobs import Jobs
    from muletrain.compute.swap.backing import Region
    from muletrain.compute.swap.chain import SubModel
    from muletrain.compute.swap.state import State


@dataclass
class Traffic:
    """Counted since the start. ``wait_s``: seconds in which computing waited for weights, or for gradients to leave."""

    loads: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    wait_s: float = 0.0


class _Lane:
    """One direction between backing memory and the device. Its thread runs one copy after the other."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype, *, inline: bool) -> None:
        self.thread: Executor = InlineExecutor() if inline else ThreadPoolExecutor(1, thread_name_prefix=name)
        self._cuda = device.type == "cuda"
        self._device, self._turn = device, 0
        if self._cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._staging = [torch.empty(WINDOW, dtype=dtype, pin_memory=True) for _ in range(2)]
            self._free = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def to_device(self, source: Tensor, target: Tensor) -> None:
        """At most ``WINDOW`` numbers; they are there after ``finish``."""
        if not self._cuda:
            target.copy_(source)
            return
        k = self._turn = 1 - self._turn
        self._free[k].synchronize()
        staged = self._staging[k][: source.numel()]
        staged.copy_(source)
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
            self._free[k].record(self._stream)

    def to_backing(self, source: Tensor, target: Tensor) -> None:
        """At most ``WINDOW`` numbers; they are there when it returns."""
        if not self._cuda:
            target.copy_(source)
            return
        staged = self._staging[0][: source.numel()]
        with torch.cuda.stream(self._stream):
            staged.copy_(source, non_blocking=True)
        self._stream.synchronize()
        target.copy_(staged)

    def follow(self) -> None:
        """What is copied from now on waits for what the device was told to do so far: memory that was freed meanwhile may
        still be read by that."""
        if self._cuda:
            self._stream.wait_stream(torch.cuda.default_stream(self._device))

    def finish(self) -> None:
        if self._cuda:
            self._stream.synchronize()


class Loader:
    """Keeps at most two sub-models on the device: the one that computes, and the next. Only the compute thread calls
    it."""

    def __init__(
        self,
        models: Sequence[SubModel],
        state: State,
        device: torch.device,
        dtype: torch.dtype,
        jobs: Jobs,
        *,
        inline: bool,
    ) -> None:
        self._models, self._state, self._device, self._dtype, self._jobs = models, state, device, dtype, jobs
        self._lane = _Lane("load", device, dtype, inline=inline)
        self.traffic = Traffic()
        self._held: dict[int, Tensor] = {}
        self._coming: dict[int, Future[Tensor]] = {}
        self.prefetch = True

    def get(self, k: int, then: int | None = None) -> list[Tensor]:
        """Sub-model ``k`` computes next: returns its parameters. ``then`` is loaded meanwhile."""
        if self._device.type == "cpu":
            return_freed_memory()  # of the last sub-model: the next one's blocks have other sizes
        if k not in self._held:
            begin = time.perf_counter()
            if k not in self._coming:
                self._begin(k, {k})
            self._held[k] = self._coming.pop(k).result()
            self.traffic.wait_s += time.perf_counter() - begin
        if then is not None and self.prefetch and then not in self._held and then not in self._coming:
            self._begin(then, {k, then})
        return self._models[k].bind(self._held[k])

    def forget(self) -> None:
        """The weights have changed."""
        self._make_room(set())

    def _begin(self, k: int, keep: set[int]) -> None:
        """Load sub-model ``k``, in place of all but ``keep``."""
        free = self._make_room(keep)
        self._coming[k] = self._lane.thread.submit(self._load, self._models[k], free)

    def _make_room(self, keep: set[int]) -> list[Tensor]:
        """Let go of all but ``keep``. Returns memory that may be used again."""
        for k in [k for k in self._coming if k not in keep]:
            self._held[k] = self._coming.pop(k).result()
        free = []
        for k in [k for k in self._held if k not in keep]:
            free.append(self._held.pop(k))
            self._models[k].unbind()
        return free

    def _load(self, model: SubModel, free: list[Tensor]) -> Tensor:
        begin = time.perf_counter()
        with self._jobs.at("load", part=model.number):
            fitting = next((t for t in free if t.numel() == model.size), None)
            free.clear()  # what does not fit is freed before more is taken
            target = torch.empty(model.size, dtype=self._dtype, device=self._device) if fitting is None else fitting
            self._lane.follow()
            source = self._state.model
            direct = target.device.type == "cpu" and target.dtype == torch.float32
            for a, b, at in model.pieces(WINDOW):
                source.expect(b, min(2 * b - a, source.values.numel()))
                if direct:
                    source.read(a, target[at : at + b - a])
                else:
                    self._lane.to_device(source.values[a:b], target[at : at + b - a])
                    source.release(a, b)
            self._lane.finish()
        self.traffic.loads += 1
        self.traffic.loaded_bytes += target.numel() * target.element_size()
        self.traffic.load_s += time.perf_counter() - begin
        return target

    def close(self) -> None:
        self._lane.thread.shutdown(wait=False, cancel_futures=True)
        self._held.clear()
        self._coming.clear()


class Drain:
    """Sums the gradients of one sub-model on the device, and brings the sum into backing memory while the next one
    computes. Only the compute thread calls it."""

    def __init__(self, traffic: Traffic, device: torch.device, jobs: Jobs, *, inline: bool) -> None:
        self._traffic, self._device, self._jobs = traffic, device, jobs
        self._lane = _Lane("drain", device, torch.float32, inline=inline)
        self._leaving: Future[None] | None = None
        self._sum: Tensor | None = None
        self._views: list[Tensor] = []
        self._free: Tensor | None = None
        """Memory of the last sum, which has left."""

    def add(self, model: SubModel, gradients: Sequence[Tensor], alpha: float) -> None:
        """Add ``alpha`` x ``gradients`` of a microbatch, in the order of the sub-model's layout."""
        if self._sum is None:
            self.finish()  # one sum at a time
            self._sum, self._free = self._free, None
            if self._sum is None or self._sum.numel() != model.size:
                self._sum = None  # before another one is taken
                self._sum = torch.empty(model.size, device=self._device)
            self._sum.zero_()
            self._views = list(model.layout.views(self._sum).values())
        torch._foreach_add_(self._views, list(gradients), alpha=alpha)

    def send(self, model: SubModel, target: Region) -> None:
        """Bring the sum to its place in ``target``, flat [P]; zeros if nothing was added."""
        values, self._sum, self._views = self._sum, None, []
        self.finish()
        self._leaving = self._lane.thread.submit(self._store, model, values, target)

    def finish(self) -> None:
        """Returns when the last sum is in backing memory."""
        if self._leaving is not None:
            begin = time.perf_counter()
            leaving, self._leaving = self._leaving, None
            leaving.result()
            self._traffic.wait_s += time.perf_counter() - begin

    def drop(self) -> None:
        """Forget what was added and not sent."""
        self._sum, self._free, self._views = None, None, []

    def _store(self, model: SubModel, values: Tensor | None, target: Region) -> None:
        with self._jobs.at("drain", part=model.number), torch.no_grad():
            for a, b, at in model.pieces(WINDOW):
                if values is None:
                    target.values[a:b].zero_()
                elif values.device.type == "cpu":
                    target.write(a, values[at : at + b - a])
                    continue
                else:
                    self._lane.to_backing(values[at : at + b - a], target.values[a:b])
                target.release(a, b)
        self._free = values

    def close(self) -> None:
        self._lane.thread.shutdown(wait=False, cancel_futures=True)
