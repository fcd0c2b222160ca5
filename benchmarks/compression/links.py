"""What does compression between stages save on a link? See README.md. ``python links.py [--steps 8]`` as root.

2 stages x 2 peers, each peer in a network namespace behind a link of 10, 50 or 500 Mb/s (tbf), with the model of ``run.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from muletrain.config.load import load_config
from muletrain.data.tokens import TokenCache
from muletrain.events import StepApplied, StepDone
from muletrain.runs.assemble import RunFacts

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from benchmarks.compression.run import CASES, Case  # noqa: E402
from tests.fleet_run import run_fleet  # noqa: E402
from tests.namespaces import Switch  # noqa: E402

PEERS, SKIP = 4, 2
MBPS = 10, 50, 500
QUEUE_S = 0.1
WAYS = [Case("fp32", 2), Case("fp16", 2), *(c for c in CASES if c.stages == 2)]
BOTH = [Case("bottleneck", 2, 2), Case("maxout", 2, 4)]
"""Sent in 8 bits, too."""


def measure(case: Case, codec: str, mbps: float, steps: int) -> dict[str, Any]:
    """Median seconds a step, and bytes of a step by the kernel's count and by ours."""
    settings = [*case.settings, "train.microbatch=2", f"train.steps={steps}", f"fleet.peers={PEERS}"]
    settings += [f"wire.activations={codec}", "wire.gradients=fp16", "network.listen=0.0.0.0", "checkpoint.every=0"]
    config, names = load_config(None, settings), [f"peer-{k}" for k in range(PEERS)]
    TokenCache.build(config.data, RunFacts.of(config).spec.vocab)
    counts: dict[int, int] = {}

    def watch(fleet: object, event: object) -> None:
        if isinstance(event, StepDone):
            counts[event.step] = sum(t.sent for t in switch.traffic().values())

    with Switch(names) as switch, tempfile.TemporaryDirectory() as folder:
        for name in names:
            speed = mbps * 1e6 / 8
            switch.shape(name, up_bytes_per_s=speed, down_bytes_per_s=speed, queue_s=QUEUE_S)
        run = Path(folder) / "run"
        events = run_fleet(config, run, stages=(0, 0, 1, 1), watch=watch, wrap=switch.inside, timeout_s=300)
    done = [e.duration_s for e in events if isinstance(e, StepDone) and e.step > SKIP]
    ours: dict[str, int] = {}
    for event in events:
        if isinstance(event, StepApplied) and SKIP < event.step < steps:
            for kinds in event.sent.values():
                for kind, sent in kinds.items():
                    ours[kind] = ours.get(kind, 0) + sent // (steps - SKIP - 1)
    last = max(counts)
    return {
        "step_s": statistics.median(done),
        "kernel_bytes": (counts[last] - counts[SKIP]) / (last - SKIP),
        "bytes": ours,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    steps, rows = parser.parse_args().steps, []
    table = Table("way", "factor", "codec", "Mb/s", "step [s]", "MB a step (kernel)")
    for mbps in MBPS:
        ways = [(c, c.way if c.way in ("fp32", "int8", "dynamic8") else "fp16") for c in WAYS if c.way != "none"]
        for case, codec in (*ways, *((case, "int8") for case in BOTH)):
            found = measure(case, codec, mbps, steps)
            row = {"way": case.way, "factor": case.factor, "codec": codec, "mbps": mbps, **found}
            rows.append(row)
            cells = (case.way, case.factor, codec, mbps, f"{found['step_s']:.2f}", f"{found['kernel_bytes'] / 1e6:.2f}")
            table.add_row(*map(str, cells))
            print(json.dumps(row), file=sys.stderr)
    Console().print(table)
    (HERE / "links.json").write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
