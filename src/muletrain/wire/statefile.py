"""A state as the bytes of a safetensors file, without a copy. ``safetensors.torch.save`` doubles the memory and holds
the interpreter's lock throughout (400 MB: 1.3 s in which no event loop of the process turns).

Layout: header length (u64, little endian), a JSON header of names, types, shapes and offsets, then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
"""The types that a state may have (``runtime.core.blocks.DTYPES``), in safetensors' words."""
PIECE = 1 << 20
"""Most numbers of a piece."""


def header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[bytes, list[str]]:
    """The beginning of a file with tensors of these types and shapes, and the names in the order of the bytes."""
    names = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))  # so all are aligned
    entries: dict[str, object] = {}
    end = 0
    for name in names:
        dtype, shape = tensors[name]
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, names


def tensor_bytes(tensor: Tensor) -> memoryview:
    """In the tensor's own memory, if that is contiguous and on the CPU."""
    found: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return found


class StateBuffers:
    """The file's bytes in order, again in each iteration: pieces in the tensors' own memory, or copies made one by one of
    tensors on another device. Numbers of 16 bits become fp32. No tensor may change until all bytes were read."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self._head, self._names = header({name: (_stored(t.dtype), t.shape) for name, t in state.items()})

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(self._head)
        for name in self._names:
            flat = self._state[name].detach().reshape(-1)
            for begin in range(0, flat.numel(), PIECE):
                yield tensor_bytes(flat[begin : begin + PIECE].to(_stored(flat.dtype)))


def _stored(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cut(buffers: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Cut ``buffers`` into runs of ``size`` bytes; the last may be shorter."""
    run: list[memoryview] = []
    room = size
    for buffer in buffers:
        while len(buffer):
            taken, buffer = buffer[:room], buffer[room:]
            run.append(taken)
            room -= len(taken)
            if not room:
                yield run
                run, room = [], size
    if run:
        yield run
