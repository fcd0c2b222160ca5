"""How exact are the two 8-bit codecs, and how long do they take? See README.md. ``python codecs.py``, on one thread."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from muletrain.config.schema import Codec
from muletrain.wire.codec import decode, encode

HERE = Path(__file__).parent
SHAPE, OUTLIER, ROUNDS = (4, 512, 1024), 60.0, 9


def ns_each(work: Callable[[], object]) -> float:
    """Median over the rounds [ns a number]."""
    work()
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return 1e9 * median(found) / torch.Size(SHAPE).numel()


def main() -> None:
    torch.set_num_threads(1)
    plain = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    outlier = plain.clone()
    outlier[..., 7] *= OUTLIER
    rows = []
    for codec in (Codec.INT8, Codec.DYNAMIC8):
        off = [float((decode(encode(x, codec)) - x).norm() / x.norm()) for x in (plain, outlier)]
        sent = encode(plain, codec)
        times = ns_each(lambda codec=codec: encode(plain, codec)), ns_each(lambda sent=sent: decode(sent))
        rows.append(
            {"codec": codec.value, "plain": off[0], "outlier": off[1], "encode_ns": times[0], "decode_ns": times[1]}
        )
        print(rows[-1])
    (HERE / "codecs.json").write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=HERE.parents[1], check=True)


if __name__ == "__main__":
    main()
