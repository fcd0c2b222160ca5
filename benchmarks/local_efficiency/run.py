"""How much of a plain PyTorch loop's speed does a local fleet keep? See README.md. ``python run.py [--pairs 5]
[--seconds 20]``."""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from muletrain.config.load import load_config
from muletrain.data.tokens import TokenCache
from muletrain.events import StepDone
from muletrain.runs.assemble import RunFacts

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.fleet_run import run_fleet  # noqa: E402

if TYPE_CHECKING:
    from muletrain.config.schema import RunConfig

CASES = {
    "default": ([], [1, 2, 4]),
    "width512": (
        [
            "model.width=512",
            "model.heads=8",
            "model.layers=8",
            "model.context=256",
            "model.dropout=0.0",
            "train.batch=64",
            "train.microbatch=4",
            "compute.checkpointing=never",
        ],
        [16],
    ),
}
"""Overrides of the default configuration, and the microbatch counts the plain loop may choose from."""
SPIN = {"spin": {}, "passive": {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}}


def measure(arguments: list[str], env: dict[str, str], timeout_s: float) -> float:
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=timeout_s, check=True
    )
    return float(json.loads(done.stdout.strip().splitlines()[-1])["tokens_per_s"])


def plain(config: str, seconds: float, threads: int, spin: str, microbatches: int) -> float:
    env = {"OMP_NUM_THREADS": str(threads), "PLAIN_MICROBATCHES": str(microbatches), **SPIN[spin]}
    return measure([str(HERE / "plain.py"), config, str(seconds)], env, 10 * seconds + 120)


def pipelining(config: str, seconds: float, schedule: str) -> float:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = {"OMP_NUM_THREADS": "1", **SPIN["passive"]}
    arguments = [str(HERE / "pipelining.py"), config, str(seconds), schedule]
    other = subprocess.Popen(
        [sys.executable, *arguments, "1", port],
        env={**os.environ, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return measure([*arguments, "0", port], env, 10 * seconds + 120)
    finally:
        other.kill()
        other.wait()


def fleet(config: RunConfig, seconds: float, expected: float) -> float:
    """Tokens/s between the third and the last step of a run of about ``seconds``."""
    tokens = config.train.batch * config.model.context
    steps = max(6, int(seconds * expected / tokens))
    train = config.train.model_copy(update={"steps": steps})
    with tempfile.TemporaryDirectory() as folder:
        events = run_fleet(config.model_copy(update={"train": train}), Path(folder), timeout_s=20 * seconds + 120)
    done = [e for e in events if isinstance(e, StepDone)]
    return tokens * (len(done) - 3) / (done[-1].t - done[2].t)


def compare(name: str, pairs: int, seconds: float) -> dict[str, object]:
    overrides, counts = CASES[name]
    config = load_config(None, overrides)
    text = config.model_dump_json(by_alias=True)
    TokenCache.build(config.data, RunFacts.of(config).spec.vocab)
    settings = [(t, s, m) for t in (1, 2) for s in SPIN for m in counts]
    best = max(settings, key=lambda setting: plain(text, seconds / 3, *setting))
    rows = []
    for _ in range(pairs):
        alone = plain(text, seconds, *best)
        rows.append(
            {
                "plain": alone,
                "fleet": fleet(config, seconds, alone),
                "gpipe": pipelining(text, seconds, "gpipe"),
                "1f1b": pipelining(text, seconds, "1f1b"),
            }
        )
        print(name, json.dumps(rows[-1]), flush=True)
    medians = {k: statistics.median(r[k] for r in rows) for k in rows[0]}
    ratios = {k: statistics.median(r[k] / r["plain"] for r in rows) for k in rows[0]}
    return {"case": name, "best_plain": best, "pairs": rows, "tokens_per_s": medians, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--case", choices=list(CASES), action="append")
    arguments = parser.parse_args()
    results = [compare(name, arguments.pairs, arguments.seconds) for name in arguments.case or CASES]
    if not arguments.case:  # the page tells of all cases
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    table = Table(
        "case", "plain loop [tok/s]", "fleet / plain", "GPipe / plain", "1F1B / plain", title="median of the pairs"
    )
    for r in results:
        ratio, speed = r["ratio"], r["tokens_per_s"]
        table.add_row(
            str(r["case"]),
            f"{speed['plain']:,.0f}",
            *(f"{ratio[k]:.2f}" for k in ("fleet", "gpipe", "1f1b")),  # type: ignore[index]
        )
    Console().print(table)


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
