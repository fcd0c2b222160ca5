"""Results travel from a device to the host while the device computes the next microbatch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from torch import Tensor

PIECE = 1 << 22
"""Numbers copied at a time: bounds the pinned memory (16 MiB), and a result's wait for the copy of a gradient."""


class Result:
    """A tensor that a stage computed. ``await`` returns the tensor in host memory."""

    def __init__(self, values: Tensor, to_host: Callable[[Tensor], Awaitable[Tensor]] | None = None) -> None:
        """``to_host`` copies ``values``; None: already in host memory."""
        self._values, self._to_host = values, to_host

    def __await__(self) -> Generator[Any, None, Tensor]:
        if self._to_host is None:
            return self._values
        return (yield from self._to_host(self._values).__await__())


class Staging:
    """A buffer in host memory through which tensors leave ``device``. On CUDA the buffer is pinned and copies use a
    separate stream, so that copies run beside the kernels of the compute thread. Not thread-safe: one thread copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._buffer = torch.empty(PIECE, pin_memory=self._stream is not None)

    def follow(self) -> None:
        """Later copies wait for everything that the device has been given so far. Returns at once, in any thread."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.default_stream(self._device))

    def copy(self, values: Tensor, out: Tensor) -> None:
        """Returns when ``values``, at most ``PIECE`` fp32 numbers on the device, are in ``out``. The kernels that
        compute ``values`` have ended, or ``follow`` was called after the launch."""
        staged = self._buffer[: values.numel()]
        if self._stream is None:
            staged.copy_(values)
        else:
            with torch.cuda.stream(self._stream):
                staged.copy_(values, non_blocking=True)
            self._stream.synchronize()
        out.copy_(staged)


def staging_for(device: torch.device) -> Staging | None:
    """None for a device that computes in host memory."""
    return None if device.type == "cpu" else Staging(device)
