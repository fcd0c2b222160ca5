"""A sketch stands for a gradient with a few numbers: sums under random signs (Johnson and Lindenstrauss 1984; Achlioptas
2003).

A sketch is linear: the sketch of a sum is the sum of the sketches. A sketch is as long as the gradient, within about an
eighth. So replicas compare gradients that none has whole, and the difference of an accumulator's sketches is the sketch
of the added gradient.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SIZE = 64
"""Numbers in a sketch: the length is off by 1 / sqrt(2 SIZE), a tenth."""
ROWS = 1 << 16
"""Rows of ``SIZE`` numbers that are summed at once, in fp32; the sums of blocks in fp64."""

Sketch = NDArray[np.float64]
"""[SIZE]; not finite exactly where the gradient is not (or sums overflow fp32)."""


def sketch(values: Tensor, seed: bytes) -> Sketch:
    """The sketch of ``values``, flat fp32, computed on the device of ``values``. Every row of ``SIZE`` numbers has one
    sign, drawn from ``seed`` as numpy promises to draw it for ever: peers have different versions of everything."""
    total = np.zeros(SIZE)
    whole = values.numel() // SIZE
    tail = torch.zeros(SIZE, device=values.device)
    tail[: values.numel() - whole * SIZE] = values[whole * SIZE :]
    rows = values[: whole * SIZE].view(-1, SIZE)
    bits = np.random.PCG64(int.from_bytes(seed, "big"))
    for block in (*torch.split(rows, ROWS), tail.view(1, SIZE)):
        raw = bits.random_raw((block.shape[0] + 63) // 64)
        signs = np.unpackbits(raw.astype("<u8").view(np.uint8))[: block.shape[0]].astype(np.float32)
        total += (torch.from_numpy(2 * signs - 1).to(values.device) @ block).double().cpu().numpy()
    return total


def packed(values: Sketch) -> bytes:
    """The form on the wire: float32, little endian."""
    with np.errstate(over="ignore"):
        return values.astype("<f4").tobytes()


def unpacked(data: bytes) -> Sketch:
    return np.frombuffer(data, "<f4").astype(np.float64)
