"""How long does it take to average 25 M fp32 parameters? See README.md. ``python run.py``."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
CASES = [("fp32", 2, "-"), ("fp32", 4, "-"), ("fp16", 2, "-"), ("int8", 2, "-"), ("fp32", 2, "shaped")]
BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
LIMIT_S = 240


def group(commands: list[list[str]]) -> list[dict[str, Any]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, *c], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, start_new_session=True
        )
        for c in commands
    ]
    try:
        return [json.loads(p.communicate(timeout=LIMIT_S)[0].splitlines()[-1]) for p in processes]
    finally:
        for p in processes:
            with __import__("contextlib").suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)


def ours(codec: str, members: int, shaped: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        reports = group(
            [[str(HERE / "member.py"), str(r), str(members), folder, codec, shaped] for r in range(members)]
        )
    assert len({r["check"] for r in reports}) == 1, "replicas differ"
    rounds = [max(r["seconds"][k] for r in reports) for k in range(len(reports[0]["seconds"]))]
    gigabytes = 2 * (members - 1) * 25e6 * BYTES[codec] * 6 / 1e9
    return {
        "codec": codec,
        "members": members,
        "shaped": shaped == "shaped",
        "median_s": statistics.median(rounds),
        "rounds": rounds,
        "python_cpu_s_per_gb": sum(r["cpu_s"] for r in reports) / gigabytes,
        "daemon_cpu_s_per_gb": sum(r["daemon_cpu_s"] for r in reports) / gigabytes,
    }


def hivemind() -> float:
    with tempfile.TemporaryDirectory() as folder:
        reports = group([[str(HERE / "hivemind_member.py"), str(r), folder] for r in range(2)])
    return statistics.median(max(s) for s in zip(*(r["seconds"] for r in reports), strict=True))


def main() -> None:
    results: dict[str, Any] = {"cases": [ours(*case) for case in CASES]}
    try:
        results["hivemind_s"] = hivemind()
    except (subprocess.TimeoutExpired, ValueError, IndexError) as e:
        results["hivemind_s"] = f"failed: {type(e).__name__}"
    table = Table(
        "what", "peers", "median [s]", "CPU s/GB, python", "CPU s/GB, daemon", title="25 M parameters, 5 rounds"
    )
    for r in results["cases"]:
        name = f"muletrain {r['codec']}" + (", 100 ms, 200 Mb/s" if r["shaped"] else "")
        table.add_row(
            name,
            str(r["members"]),
            f"{r['median_s']:.2f}",
            f"{r['python_cpu_s_per_gb']:.1f}",
            f"{r['daemon_cpu_s_per_gb']:.1f}",
        )
    table.add_row("hivemind.DecentralizedAverager", "2", str(results["hivemind_s"])[:5], "", "")
    Console().print(table)
    shaped = results["cases"][-1]
    results["shaped_over_ideal"] = shaped["median_s"] / (25e6 * 4 / 25e6)
    print(f"shaped: {results['shaped_over_ideal']:.2f} x (100 MB each way / 25 MB/s)")
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
