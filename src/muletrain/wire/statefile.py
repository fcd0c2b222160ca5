"""A state as the bytes of a safetensors file, without a copy. ``safetensors.torch.save`` doubles the memory and holds
the interpreter's lock throughout (400 MB: 1.3 s in which no event loop of the process turns).

Layout: header length (u64, little endian), a JSON header of names, types, shapes and offsets, then the tensors' bytes.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
"""The types that a state may have (``runtime.transfer.blocks.DTYPES``), in safetensors' words."""


def state_buffers(state: Mapping[str, Tensor]) -> list[memoryview]:
    """The file's bytes in order, in the tensors' own memory: no tensor may change until all bytes were read."""
    header: dict[str, object] = {}
    buffers: list[memoryview] = []
    offset = 0
    for name, tensor in sorted(
        state.items(), key=lambda item: (-item[1].element_size(), item[0])
    ):  # so all are aligned
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
        buffers.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(struct.pack("<Q", len(text)) + text), *buffers]


def cut(buffers: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
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
