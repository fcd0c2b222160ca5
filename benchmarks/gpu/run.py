"""What does one card do under muletrain, against a plain PyTorch loop? See README.md. One command, nine minutes at most.

``python run.py`` on a machine with a CUDA device; ``--tiny`` runs all of it on a CPU in some three minutes. ``--only
NAME`` (again for more) runs single parts, or all whose names begin so. Each part is a process with a time limit; its
error stands in the table, and the other parts run. The JSON is written after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEADLINE_S = 525.0
"""Of all parts together: nine minutes, less what comes before and after."""
PATIENCE = 3
"""With ``--tiny``, parts and their sum may take so many times as long: the cores may be busy with other work."""
LEAST_S = 20.0
"""A part that has less time left is not begun."""
CUDA_TESTS = ("tests/test_cuda.py", "tests/test_cuda_swap.py", "tests/test_profile.py")
Found = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A module of this folder, its arguments, and its longest time. ``size``: without ``--tiny``."""

    name: str
    limit_s: float
    module: str
    arguments: tuple[str, ...] = ()
    size: str = "small"


PARTS = (
    Part("loop-small", 50, "loop"),
    Part("compiled-small", 90, "loop", ("--compile",)),
    Part("peer-small", 60, "peer"),
    Part("loop-large", 60, "loop", size="large"),
    Part("compiled-large", 90, "loop", ("--compile",), "large"),
    Part("peer-large", 90, "peer", size="large"),
    Part("pipeline", 150, "fleets", ("pipeline",)),
    Part("memory", 50, "memory"),
    Part("swap", 75, "swapped", size="large"),
    Part("hub", 120, "fleets", ("hub",)),
    Part("tests", 90, "tests"),
    Part("norms", 30, "norms", size="large"),
    Part("eager-small", 45, "peer", ("--eager",)),
    Part("one", 75, "fleets", ("one",)),
    Part("eager-large", 60, "peer", ("--eager",), "large"),
)
"""In the order in which they run: what is left out for time stands last."""


def command(part: Part, *, tiny: bool, limit_s: float) -> list[str]:
    if part.module == "tests":
        return [sys.executable, "-m", "pytest", "-m", "cuda", "-o", "addopts=", "-q", "-p", "no:cacheprovider",
                "-W", "ignore", "--tb=short", *CUDA_TESTS]  # fmt: skip
    found = [sys.executable, "-m", f"benchmarks.gpu.{part.module}", *part.arguments]
    found += ["--size", f"tiny-{part.size}" if tiny else part.size]
    if tiny:
        found += ["--device", "cpu", "--seconds", "1"]
    if part.module == "fleets":
        found += ["--timeout", f"{limit_s - 5:.0f}"]
    return found


def environment(*, tiny: bool) -> dict[str, str]:
    """The package need not be installed."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = {"OMP_NUM_THREADS": "1"} if tiny else {}  # two cores, and processes that would spin
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "PYTHONUNBUFFERED": "1", **own}


def measured(part: Part, limit_s: float, *, tiny: bool) -> Found:
    """Run ``part`` in a process of its own. Returns its figures, or ``{"error": ...}``; never raises for the part."""
    begin, over = time.monotonic(), False
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out:
        process = subprocess.Popen(
            command(part, tiny=tiny, limit_s=limit_s),
            cwd=ROOT,
            env=environment(tiny=tiny),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            over = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        said = out.read()
    found: Found = {"error": f"over its limit of {limit_s:.0f} s; last words: {last_words(said)}"}
    if not over:
        found = tested(said, process.returncode) if part.module == "tests" else told(said, process.returncode)
    if "error" in found:
        print(f"--- {part.name}\n{said[-3000:]}\n---", flush=True)
    return found | {"seconds": round(time.monotonic() - begin, 1)}


def told(said: str, code: int) -> Found:
    """The JSON of a part's last line."""
    lines = said.strip().splitlines()
    if code == 0 and lines and lines[-1].startswith("{"):
        found: Found = json.loads(lines[-1])
        return found
    return {"error": f"exit code {code}: {last_words(said)}"}


def tested(said: str, code: int) -> Found:
    """Counts of pytest's last line. Code 5: no test was left, since there is no GPU."""
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|errors?|skipped|deselected)", said)}
    if code in (0, 1) and counts:
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        return {"counts": counts, "failed": failed} | ({"error": last_words(said)} if code else {})
    return {"counts": counts} if code == 5 else {"error": f"exit code {code}: {last_words(said)}"}


def last_words(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "none"


def wanted(only: Iterable[str]) -> list[Part]:
    """The parts whose names ``only`` gives, or begins. Raises SystemExit for a name of no part."""
    only = list(only)
    for name in only:
        if not any(part.name.startswith(name) for part in PARTS):
            raise SystemExit(f"--only: no part '{name}'; there are {', '.join(part.name for part in PARTS)}")
    return [part for part in PARTS if not only or any(part.name.startswith(name) for name in only)]


def has_gpu() -> bool:
    """Asked in another process, which gives the device back."""
    asked = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


def write(path: Path, found: Found) -> None:
    """At once: a reader, or the next run, never finds half a file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def show(found: Found) -> None:
    """Both tables on the console; without ``rich`` as Markdown."""
    tables = runpy.run_path(str(HERE / "tables.py"))
    for name in ("parts", "memory", "norms"):
        head, rows = tables["HEADS"][name], tables[name](found)
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            print("\n".join(" | ".join(row) for row in [head.split("|"), *rows]))
            continue
        table = Table(*head.split("|"))
        for row in rows:
            table.add_row(*row)
        Console(width=150).print(table, markup=False)


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, into tiny.json")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a part, or how its name begins")
    parser.add_argument("--deadline", type=float, help=f"for all parts together, default: {DEADLINE_S:.0f} [s]")
    parser.add_argument("--out", type=Path, help="default: results.json beside this file, with --tiny tiny.json")
    given = parser.parse_args()
    parts, factor = wanted(given.only), PATIENCE if given.tiny else 1
    deadline_s = given.deadline or factor * DEADLINE_S
    if not given.tiny and not has_gpu():
        raise SystemExit("no CUDA device here: --tiny runs all of it on a CPU")
    out = given.out or HERE / ("tiny.json" if given.tiny else "results.json")
    kept: Found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    for part in parts:
        left_s = deadline_s - (time.monotonic() - begin)
        if left_s < LEAST_S:
            found: Found = {"left out": f"{max(0.0, left_s):.0f} s were left"}
            if part.name in kept and "error" not in kept[part.name]:
                continue  # the figures of an earlier run stay
        else:
            limit_s = min(factor * part.limit_s, left_s)
            print(f"{part.name}: at most {limit_s:.0f} s", flush=True)
            found = measured(part, limit_s, tiny=given.tiny)
        kept[part.name] = found | {"date": time.strftime("%Y-%m-%d")}
        write(out, kept)
    show(kept)
    print(f"{time.monotonic() - begin:.0f} s; {out}")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=ROOT, env=environment(tiny=True), check=False)
