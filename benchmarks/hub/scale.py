"""What do many clients cost their servers? Messages and bytes of a step, and CPU time of everything that is played, by
part. See README.md. ``python scale.py [--clients 1000] [--servers 16]`` writes scale.json. A step has enough sequences
(``--each`` for every client) for clients to have its weights long before it ends."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from clients import CLIENT, LINKS, SERVERS, fleet
from counting import counted
from plays import played, write

RUN = [
    "model.preset=gpt3-125m",
    "model.context=512",
    "model.vocab=512",
    "fleet.stages=2",
    "fleet.trainers=4",
    "checkpoint.every=0",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--servers", type=int, default=16)
    parser.add_argument("--each", type=int, default=16)
    parser.add_argument("--microbatch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=900.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = SERVERS.replace("count = 2", f"count = {arguments.servers}").replace("1000", "10000")
    text += CLIENT.format("client", arguments.clients, 1, 100, 100) + LINKS
    batch = arguments.each * arguments.clients // arguments.microbatch * arguments.microbatch
    run = [*RUN, f"train.batch={batch}", f"train.microbatch={arguments.microbatch}"]
    with counted() as counts:
        row = played(fleet(text), "hub", run, seconds=arguments.seconds)
    parts, steps = sum(counts.parts.values()), max(1.0, row["steps"])
    row |= {
        "clients": arguments.clients,
        "servers": arguments.servers,
        "sequences_a_step": batch,
        "frames_a_step": round(sum(counts.frames.values()) / steps),
        "gbytes_a_step": round(sum(counts.nbytes.values()) / steps / 1e9, 2),
        "parts_a_step": round(parts / steps),
        "cpu_ms_a_part": round(1000 * row["cpu_s"] / max(1, parts), 2),
        "by_kind": dict(counts.frames.most_common(8)),
    }
    print(json.dumps(row), flush=True)
    write("scale.json", row)


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
