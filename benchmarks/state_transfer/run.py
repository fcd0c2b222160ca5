"""How fast does a newcomer get a stage's state? See README.md. ``python run.py``."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
LIMIT_S = 240


def transfer(donors: int) -> dict[str, Any]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "member.py"), str(rank), str(donors), folder],
                stdout=subprocess.PIPE,
                env=env,
                start_new_session=True,
            )
            for rank in range(donors + 1)
        ]
        try:
            report: dict[str, Any] = json.loads(processes[0].communicate(timeout=LIMIT_S)[0].splitlines()[-1])
            for process in processes[1:]:
                process.communicate(timeout=LIMIT_S)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    median = statistics.median(report["seconds"])
    return {"donors": donors, "median_s": median, "mb_per_s": report["bytes"] / median / 1e6, **report}


def main() -> None:
    results = [transfer(donors) for donors in (1, 2, 3)]
    table = Table(
        "donors", "median [s]", "MB/s", "first, with the donors' copy [s]", title="300 MB of state, 5 transfers"
    )
    for r in results:
        table.add_row(str(r["donors"]), f"{r['median_s']:.2f}", f"{r['mb_per_s']:.0f}", f"{r['first']:.2f}")
    Console().print(table)
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
