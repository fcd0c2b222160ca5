"""How fast is a model four times as large as the memory, against one that fits? See README.md. ``python run.py [--steps 3]
[--tokens 4096 1024]``; as root, for the memory limit."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from muletrain.compute.arithmetic import StageSetup
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.estimate import Offer
from muletrain.compute.swap.swapped import Swap, SwappedCompute
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import OptimizerConfig
from muletrain.model.spec import ModelSpec
from muletrain.optim.norms import square_norm

HERE = Path(__file__).parent
CGROUP = Path("/sys/fs/cgroup/memory")
SPEC = ModelSpec.from_config(ModelConfig(layers=10, width=512, heads=8, vocab=2048, context=256, dropout=0.1))
SMALL = replace(SPEC, layers=1, width=64, heads=2, kv_heads=2, ffn=128)
SEQUENCES = 2
FOLD = 4
"""The model (weights, gradient and moments, fp32) has so many times the budget."""
CASES = ("resident", "swapped", "with replicas", "no prefetch", "one by one")
SLACK = 1.1
READ = 1 << 28
"""Bytes that are written and read to measure the disk."""


def budget() -> int:
    """Bytes that the swapped stage may use."""
    return 16 * SPEC.params // FOLD


# One case, in a process of its own --------------------------------------------------------------------------------------


class Limit:
    """A cgroup (v1) of this process with a memory limit, page cache included; without root, none."""

    def __init__(self, nbytes: int | None) -> None:
        self._folder = CGROUP / f"muletrain-swap-{os.getpid()}"
        self.enforced = False
        if nbytes is None:
            return
        try:
            self._folder.mkdir()
            (self._folder / "memory.limit_in_bytes").write_text(str(nbytes))
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))
            self.enforced = True
        except OSError as e:
            print(f"no memory limit: {e}", file=sys.stderr)

    def peak(self) -> int | None:
        return int((self._folder / "memory.max_usage_in_bytes").read_text()) if self.enforced else None


def child(case: str, steps: int, tokens: int, folder: Path) -> None:
    """Train, and print the case's figures as JSON."""
    microbatches = tokens // (SEQUENCES * SPEC.context)
    warm = StageSetup(OptimizerConfig(), 1000, seed=0, sequences=SEQUENCES)
    asyncio.run(train(TorchCompute(SMALL, SMALL.cut(1), 0, warm), 1, 2))  # libraries load before the limit counts
    before = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limit = Limit(None if case == "resident" else int(SLACK * budget()))
    setup = StageSetup(OptimizerConfig(), 1000, seed=0, sequences=SEQUENCES, checkpointing="never")
    if case == "resident":
        compute: TorchCompute | SwappedCompute = TorchCompute(SPEC, SPEC.cut(1), 0, setup)
    else:
        most = 1 if case == "one by one" else microbatches
        swap = Swap(Offer(budget()), folder, most, most, alone=case != "with replicas")
        compute = SwappedCompute(SPEC, SPEC.cut(1), 0, setup, swap)
        compute.arithmetic.loader.prefetch = case != "no prefetch"
    begun = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = time.process_time()
    took_s = sorted(asyncio.run(train(compute, steps, microbatches)))
    if swapped := isinstance(compute, SwappedCompute):
        compute.state_.finish()  # the last update
    used = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "tokens_per_s": tokens / took_s[len(took_s) // 2],
        "step_s": took_s,
        "cpu_s": (time.process_time() - cpu_s) / (steps + 1),
        "kernel_s": (used.ru_stime - begun.ru_stime) / (steps + 1),
        "page_faults": (used.ru_minflt - begun.ru_minflt) / (steps + 1),
        "forward_s": compute.counters.forward_s / (steps + 1),
        "backward_s": compute.counters.backward_s / (steps + 1),
        "apply_s": compute.counters.apply_s / (steps + 1),
        "recompute_s": compute.counters.recompute_s / (steps + 1),
        "wait_s": compute.arithmetic.loader.traffic.wait_s / (steps + 1) if swapped else 0.0,
        "loaded_bytes": compute.arithmetic.loader.traffic.loaded_bytes / (steps + 1) if swapped else 0,
        "parts": compute.parts,
        "peak_bytes": limit.peak() if swapped else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before,
        "enforced": limit.enforced,
    }
    compute.close()
    print(json.dumps(figures), flush=True)
    os._exit(0)


async def train(compute: TorchCompute | SwappedCompute, steps: int, microbatches: int) -> list[float]:
    """Seconds of each step but the first: all microbatches, the norm for clipping, the update. A peer alone is through with
    that in the next step."""
    took = []
    for step in range(steps + 1):
        begin = time.perf_counter()
        await asyncio.gather(*(one(compute, Microbatch(step, i)) for i in range(microbatches)))
        gradient = await compute.gradient(step)
        norm = (await compute.offload(square_norm, gradient)) ** 0.5 / microbatches
        await compute.apply(gradient, Update(step, min(1.0, 1.0 / norm) / microbatches, skip=False))
        took.append(time.perf_counter() - begin)
    return took[1:]


async def one(compute: TorchCompute | SwappedCompute, mb: Microbatch) -> None:
    draws = torch.Generator().manual_seed(1000 * mb.step + mb.index)
    ids = torch.randint(0, SPEC.vocab, (SEQUENCES, SPEC.context + 1), generator=draws)
    await compute.loss_backward(mb, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), accumulate=True)


# All of them -----------------------------------------------------------------------------------------------------------


def measured(words: list[str]) -> dict[str, object]:
    """The figures of one case, or what went wrong."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(OSError):  # there was no limit
            (CGROUP / f"muletrain-swap-{process.pid}").rmdir()
    if lines := out.strip().splitlines():
        return dict(json.loads(lines[-1]))
    return {"problem": err.strip()[-500:] or f"ended with {process.returncode} (-9: out of memory)"}


def disk_rate(folder: Path) -> float:
    """Bytes/s that the disk reads, past the page cache."""
    path = folder / "rate"
    with path.open("wb") as file:
        file.write(os.urandom(1 << 20) * (READ >> 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 22):
            pass
    path.unlink()
    return READ / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="steps that count, of each case")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 1024], help="tokens of a step")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], int(given.child[1]), int(given.child[2]), given.folder)
        return
    results: dict[str, object] = {"params": SPEC.params, "budget_bytes": budget(), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(dir=given.folder) as name, Progress(console=Console(stderr=True)) as progress:
        folder = Path(name)
        results["load_average"], results["disk_bytes_per_s"] = os.getloadavg()[0], disk_rate(folder)
        todo = [(tokens, case) for tokens in given.tokens for case in CASES]
        bar = progress.add_task("cases", total=len(todo))
        for tokens, case in todo:
            progress.update(bar, description=f"{case}, {tokens} tokens a step")
            words = [
                sys.executable,
                __file__,
                "--folder",
                str(folder / "swap"),
                "--child",
                case,
                str(given.steps),
                str(tokens),
            ]
            results[f"{case}, {tokens}"] = measured(words)
            progress.advance(bar)
    show(results, given.tokens)
    if (given.steps, given.tokens) == (parser.get_default("steps"), parser.get_default("tokens")):  # as the page says
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)


def show(results: dict[str, object], tokens: list[int]) -> None:
    table = Table(title=f"{SPEC.params / 1e6:.0f} M parameters, budget {budget() / 2**20:.0f} MiB", box=None)
    for header in (
        "tokens a step",
        "case",
        "tokens/s",
        "of resident",
        "of its CPU time",
        "waits",
        "update",
        "recomputes",
        "peak / budget",
    ):
        table.add_column(header, justify="left" if header == "case" else "right")
    for count in tokens:
        resident = results[f"resident, {count}"]
        for case in CASES:
            found = results[f"{case}, {count}"]
            assert isinstance(found, dict)
            assert isinstance(resident, dict)
            if "problem" in found:
                table.add_row(str(count), case, found["problem"].splitlines()[-1][:60])
                continue
            share = found["tokens_per_s"] / resident.get("tokens_per_s", float("nan"))
            step_s = found["step_s"][len(found["step_s"]) // 2]
            cpu = resident.get("cpu_s", float("nan")) / found["cpu_s"]
            times = (f"{found[name] / step_s:.0%}" for name in ("wait_s", "apply_s", "recompute_s"))
            peak = "-" if found["peak_bytes"] is None else f"{found['peak_bytes'] / budget():.2f}"
            table.add_row(str(count), case, f"{found['tokens_per_s']:,.0f}", f"{share:.2f}", f"{cpu:.2f}", *times, peak)
    Console().print(table)
    Console().print(f"the disk reads {float(str(results['disk_bytes_per_s'])) / 1e6:,.0f} MB/s past the page cache")


if __name__ == "__main__":
    main()
