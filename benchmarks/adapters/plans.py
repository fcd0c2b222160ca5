"""What does ``plan`` say about an 8B that is fine-tuned by LoRA on four fleets? ``python -m benchmarks.adapters.plans`` runs
the commands of docs/models.md, and writes plans.json; three minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FLEETS = "two-4090", "six-3090", "ten-t4", "one-3060"
OPTIONS = ["--set", "adapter.rank=16", "--set", "model.context=1024", "--batch", "64", "--time-limit", "1m"]


def planned(fleet: str) -> dict[str, Any]:
    """The strategy that is recommended."""
    line = ["plan", str(HERE / "fleets" / f"{fleet}.toml"), "--model", str(HERE / "qwen3-8b"), *OPTIONS, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "muletrain.cli.main", *line], capture_output=True, text=True, check=True
    )
    plan = json.loads(done.stdout)
    found: dict[str, Any] = plan["strategies"][plan["recommended"]]
    return {"fleet": fleet, "params": plan["params"], "tokens": plan["batch"] * plan["context"], **found}


if __name__ == "__main__":
    (HERE / "plans.json").write_text(json.dumps([planned(fleet) for fleet in FLEETS], indent=1) + "\n")
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=HERE.parents[1], check=True)
