"""Do clients of 1, 2 and 4 times the speed do work in that proportion, does one behind 20 Mb/s slow a step down, and how
soon does one that joins work? See README.md. ``python clients.py`` writes clients.json."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from counting import counted, joining
from plays import played, write

from muletrain.config.fleet_file import Fleet, load_fleet

SERVERS = "[[machines]]\nname = 'server'\ncount = 2\ntflops = 1\nmemory_gib = 32\nup_mbps = 1000\ndown_mbps = 1000\n"
CLIENT = "[[machines]]\nname = '{}'\ncount = {}\ntflops = {}\nreliable = false\nmemory_gib = 32\nup_mbps = {}\ndown_mbps = {}\n"
LINKS = "[defaults]\nlocal_rtt_ms = 20\n"
RUN = [
    "model.preset=gpt3-125m",
    "model.context=512",
    "model.vocab=512",
    "train.batch=1024",
    "train.microbatch=32",
    "fleet.stages=2",
    "checkpoint.every=0",
]
SECONDS = 1500.0


def fleet(text: str) -> Fleet:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        return load_fleet(Path(file.name))


def measured(text: str) -> dict[str, Any]:
    with counted() as counts:
        row = played(fleet(text + LINKS), "hub", RUN, seconds=SECONDS)
    by_kind = defaultdict[str, int](int)
    for name, work in counts.work.items():
        by_kind[name.rsplit("-", 1)[0]] += work
    return row | {"forward passes": dict(by_kind)}


def joined(text: str) -> dict[str, Any]:
    """Of clients that come back, in milliseconds: until they ask for the weights, and from these to the first part. Links
    have a round trip of 20 ms."""
    with joining() as found:
        played(fleet(text + LINKS), "hub", RUN, seconds=SECONDS, leave_per_s=1 / 200, away_s=20.0)
    before_ms, after_ms = ([1000 * seconds for seconds in each] for each in zip(*found, strict=True))
    return {
        "clients": len(found),
        "before": round(median(before_ms), 1),
        "after": round(median(after_ms), 1),
        "at once": sum(a + b < 41 for a, b in zip(before_ms, after_ms, strict=True)),
    }


def main() -> None:
    torch.set_num_threads(1)
    of_speed = "".join(CLIENT.format(f"x{x}", 2, x, 1000, 1000) for x in (1, 2, 4))
    four = CLIENT.format("client", 4, 1, 1000, 1000)
    rows = {
        "1x, 2x, 4x": measured(SERVERS + of_speed),
        "four clients": measured(SERVERS + four),
        "and one behind 20 Mb/s": measured(SERVERS + four + CLIENT.format("slow", 1, 1, 20, 20)),
        "join": joined(SERVERS + four),
    }
    for name, row in rows.items():
        print(name, json.dumps(row), flush=True)
    write("clients.json", rows)


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
