"""Inputs, targets and gradients reach a device through pinned memory, on a stream of their own, while the device computes
the microbatch before."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from muletrain.compute.threads import InlineExecutor

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

R = TypeVar("R")

AHEAD = 3
"""Tensors on the device that no computation has taken yet, at most: inputs and targets of a microbatch, and the next
one's. Further tensors are copied when their computation begins."""


class Coming:
    """A tensor on its way to the device. ``take`` or ``drop`` ends it."""

    def __init__(
        self, arrivals: Arrivals, values: Tensor, future: Future[tuple[Tensor, torch.cuda.Event | None]]
    ) -> None:
        self.values = values
        """In the machine's memory."""
        self._arrivals, self._future = arrivals, future

    def take(self) -> Tensor:
        """The tensor on the device. The current stream's later work waits for it; this thread only until its copy has
        begun. Raises the errors of the check and of the copy."""
        try:
            there, event = self._future.result()
        finally:
            self.drop()
        if event is not None:
            stream = torch.cuda.current_stream(there.device)
            stream.wait_event(event)
            there.record_stream(stream)  # the memory came from the copies' stream: not reused before this one is done
        return there

    def drop(self) -> None:
        """Nobody takes the tensor, or it was taken."""
        self._arrivals.ended(self)


class Arrivals:
    """Brings tensors to ``device``. ``bring`` is for the event loop's thread, ``take`` for the computing one."""

    def __init__(self, device: torch.device, thread: Executor) -> None:
        """``thread`` copies."""
        self._device, self._thread = device, thread
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._open: set[Coming] = set()

    def bring(self, values: Tensor, check: Callable[[Tensor], None] | None = None) -> Tensor | Coming:
        """Begin to copy ``values``, after ``check`` of them. Returns ``values`` themselves if enough tensors wait on the
        device already."""
        with self._lock:
            if len(self._open) >= AHEAD:
                return values
            coming = Coming(self, values, self._thread.submit(self._copy, values, check))
            self._open.add(coming)
        return coming

    def ended(self, coming: Coming) -> None:
        with self._lock:
            self._open.discard(coming)

    def _copy(self, values: Tensor, check: Callable[[Tensor], None] | None) -> tuple[Tensor, torch.cuda.Event | None]:
        if check is not None:
            check(values)
        if self._stream is None:
            return values.to(self._device, copy=True), None
        pinned = values.pin_memory()  # torch keeps this memory until the copy has read it, and then uses it again
        with torch.cuda.stream(self._stream):
            there = pinned.to(self._device, non_blocking=True)
            return there, self._stream.record_event()


def arrivals_for(device: torch.device, thread: Executor) -> Arrivals | None:
    """None: the device has no streams, or no thread could copy meanwhile."""
    return Arrivals(device, thread) if device.type == "cuda" and not isinstance(thread, InlineExecutor) else None


def taken(fn: Callable[..., R]) -> Callable[..., R]:
    """``fn``, which takes what is ``Coming`` when it begins."""

    @functools.wraps(fn)  # its name is that of the job
    def call(*given: object) -> R:
        return fn(*(value.take() if isinstance(value, Coming) else value for value in given))

    return call
