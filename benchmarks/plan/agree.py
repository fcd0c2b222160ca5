"""``plan`` against ``simulate``: strategy swarm on the fleet that ships and on drawn ones, each as the two commands
predict it.

python benchmarks/plan/agree.py              # the example and seeds 100 to 108 of benchmarks/sim_grid; writes agree.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from muletrain.cli.main import app
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.model.spec import ModelSpec
from muletrain.sim.fleet.simulation import EXAMPLE
from muletrain.sim.plan.question import Question
from muletrain.sim.plan.swarm import predict

sys.path.insert(0, str(Path(__file__).parents[1] / "sim_grid"))
from draw import _understood, drawn

SEEDS = range(100, 109)
HOURS = 24
CLOSE = 0.05
EXAMPLES_RUN = ("model.preset=gpt3-xl", "train.batch=1024", "train.microbatch=1", "fleet.stages=3")


def compared(file: Path, run: tuple[str, ...]) -> dict[str, Any]:
    """Tokens/s of one fleet."""
    config = load_config(None, run)
    question = Question(
        load_fleet(file), config, ModelSpec.from_config(config.model), config.fleet.stages, config.train.microbatch
    )
    found = predict(question)
    layers = [end - first for first, end in (stage.layers for stage in found.stages)]
    begin_s = time.process_time()
    arguments = ["simulate", "fleet", str(file), "--hours", str(HOURS), "--json"]
    for setting in (*run, f"fleet.layers={layers}"):
        arguments += ["--set", setting]
    done = CliRunner().invoke(app, arguments)
    if done.exit_code:
        raise RuntimeError(done.output) from done.exception
    simulated = json.loads(done.output)["tokens_per_s"]
    return {
        "machines": len(question.fleet.peers()),
        "run": " ".join(run),
        "plan": round(found.tokens_per_s, 1),
        "simulate": round(simulated, 1),
        "simulate / plan": round(simulated / found.tokens_per_s, 4),
        "CPU of simulate [s]": round(time.process_time() - begin_s, 1),
    }


def main() -> None:
    rows = [{"fleet": EXAMPLE.stem} | compared(EXAMPLE, EXAMPLES_RUN)]
    print(json.dumps(rows[-1]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            one, file = _understood(drawn(seed)), Path(folder) / "fleet.toml"
            file.write_text(one.fleet)
            run = tuple(s for s in one.run if not s.startswith("fleet.rebalance"))
            rows.append({"fleet": f"seed {seed}"} | compared(file, run))
            print(json.dumps(rows[-1]), flush=True)
    close = sum(abs(row["simulate / plan"] - 1) <= CLOSE for row in rows)
    summary = {"fleets": len(rows), "within 5 %": close}
    print(json.dumps(summary))
    out = Path(__file__).parent / "agree.json"
    out.write_text(json.dumps({"summary": summary, "fleets": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
