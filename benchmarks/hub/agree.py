"""How near does ``plan`` come to what production servers and clients then do? Fleets drawn at random, each predicted,
and played with every message. See README.md. ``python benchmarks/hub/agree.py [--fleets 10]`` writes agree.json."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from muletrain.config.fleet_file import Fleet, load_fleet
from muletrain.config.load import load_config
from muletrain.model.spec import ModelSpec
from muletrain.sim.plan import hub as plan_hub
from muletrain.sim.plan.question import Question
from muletrain.sim.plan.swarm import NoSteps, played_step_s
from muletrain.strategies import find

HERE = Path(__file__).parent
MODELS = ("gpt3-125m", "gpt3-350m", "gpt3-760m")
SEARCH_S = 6.0


def drawn(seed: int) -> tuple[str, list[str]]:
    """A fleet file, and the settings of a run on it."""
    rng = random.Random(f"hub/{seed}")
    rows = ["name = 'drawn'"]
    kinds = [("server", rng.randint(2, 5), "true"), *((f"client-{k}", rng.randint(2, 6), "false") for k in range(2))]
    for name, count, reliable in kinds:
        mbps = rng.choice((100, 200, 300, 500, 1000))
        rows += [
            f"[[machines]]\nname = '{name}'\ncount = {count}\nreliable = {reliable}\ntflops = {rng.uniform(5, 40):.1f}",
            f"memory_gib = 24\nup_mbps = {mbps}\ndown_mbps = {mbps}",
        ]
    rows.append(f"[defaults]\nlocal_rtt_ms = {rng.choice((2, 10, 30, 60, 100))}")
    run = [
        f"model.preset={rng.choice(MODELS)}",
        "model.context=1024",
        f"train.batch={rng.choice((1024, 2048, 4096))}",
        "checkpoint.every=0",
    ]
    return "\n".join(rows), run


def question_of(fleet: Fleet, run: list[str], stages: int | None = None) -> Question:
    config = load_config(None, run)
    return Question(fleet, config, ModelSpec.from_config(config.model), stages)


def compared(seed: int, *more: str) -> dict[str, Any]:
    """One fleet, predicted and played. ``more``: settings of the run."""
    text, run = drawn(seed)
    run += more
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        question = question_of(load_fleet(Path(file.name)), run)
    found = plan_hub.predict(question, seed=0, time_limit_s=SEARCH_S)
    row: dict[str, Any] = {"seed": seed, "machines": len(question.fleet.peers()), "run": " ".join(run[::2])}
    if found.problem or found.split is None:
        return row | {"problem": found.problem}
    scene, begin_s = question.scene_of(found), time.process_time()
    row |= {
        "stages": "; ".join(f"{len(s.machines) - len(s.clients)}+{len(s.clients)}" for s in found.stages),
        "microbatches": f"{found.microbatches[0]} x {found.microbatch}",
        "predicted": round(found.step_s, 2),
        "parts": [round(v, 2) for v in found.split.model_dump().values()],
    }
    try:
        planned = plan_hub.membership(question.asking(find("hub")), scene, found)
        played_s = played_step_s(scene, found.step_s, steps=6, planned=planned)
    except NoSteps as e:
        return row | {"problem": str(e)}
    return row | {
        "played": round(played_s, 2),
        "played / predicted": round(played_s / found.step_s, 3),
        "CPU of the play [s]": round(time.process_time() - begin_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleets", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--delayed", action="store_true", help="delayed parameter updates; writes delayed.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for seed in range(arguments.first, arguments.first + arguments.fleets):
        rows.append(compared(seed, *(["optimizer.delayed=true"] if arguments.delayed else [])))
        print(json.dumps(rows[-1]), flush=True)
    ratios = [row["played / predicted"] for row in rows if "played / predicted" in row]
    near = {f"within {share:.0%}": sum(abs(ratio - 1) <= share for ratio in ratios) for share in (0.1, 0.2)}
    summary = {"fleets": len(rows), **near}
    print(json.dumps(summary))
    file = HERE / ("delayed.json" if arguments.delayed else "agree.json")
    file.write_text(json.dumps({"summary": summary, "fleets": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
