"""Is a peer worth having that swaps its stage of a pipeline? See README.md. ``python pipeline.py`` writes pipeline.json."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from run import SEQUENCES, SPEC

from muletrain.compute.arithmetic import StageSetup
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.estimate import Offer
from muletrain.compute.swap.swapped import Swap, SwappedCompute
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.config.schema import OptimizerConfig, Precision
from muletrain.events import StepDone, SwapWorked
from muletrain.model.make import make_model
from muletrain.runs.assemble import RunFacts
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.simulation import simulate_fleet
from muletrain.sim.setting import setting, stage_needs

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.fleet_run import run_fleet  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARE = 1 / 3
"""Of the memory that its stage needs, what the small peer has."""
MICROBATCHES, ROUNDS = 4, 5
FORWARD_MS, BACKWARD_MS = 150.0, 300.0
BATCH, STEPS, SKIP = 24, 8, 2
PLAYED_S = 120.0
TINY = [
    "model.width=128",
    "model.heads=2",
    "model.layers=8",
    "model.context=16",
    "model.vocab=2048",
    "train.microbatch=1",
    "compute.precision=fp32",
]


def ratio() -> dict[str, float]:
    """How fast the executor is with ``SHARE`` of the memory, against the resident stage: rounds of both take turns, and
    the median over rounds is the ratio, of wall time and of CPU time."""
    cut, setup = SPEC.cut(2), StageSetup(OptimizerConfig(), 1000, seed=0, sequences=SEQUENCES, checkpointing="never")
    run = load_config(
        None, ["fleet.stages=2", f"train.batch={SEQUENCES * MICROBATCHES}", f"train.microbatch={SEQUENCES}"]
    )
    run = run.model_copy(update={"compute": run.compute.model_copy(update={"precision": Precision.FP32})})
    need = stage_needs(run, SPEC, cut)[0]
    budget = int(SHARE * need.total)
    with tempfile.TemporaryDirectory() as name:
        swapped = SwappedCompute(
            SPEC, cut, 0, setup, Swap(Offer(budget), Path(name) / "swap", MICROBATCHES, MICROBATCHES)
        )
        both = {"resident": TorchCompute(SPEC, cut, 0, setup), "swapped": swapped}
        took: dict[str, list[tuple[float, float]]] = {case: [] for case in both}
        for step in range(ROUNDS + 1):
            for case, compute in both.items():
                took[case].append(asyncio.run(passes(compute, step)))
        parts = swapped.parts
        for compute in both.values():
            compute.close()
    pairs = list(zip(took["resident"][1:], took["swapped"][1:], strict=True))
    wall, cpu = (median(a[k] / b[k] for a, b in pairs) for k in (0, 1))
    return {"budget_bytes": budget, "needs_bytes": need.total, "parts": parts, "wall": wall, "cpu": cpu}


async def passes(compute: TorchCompute | SwappedCompute, step: int) -> tuple[float, float]:
    """Wall and CPU seconds of a step's passes and its update."""
    begin, cpu = time.perf_counter(), time.process_time()
    draws = torch.Generator().manual_seed(step)
    ids = torch.randint(0, SPEC.vocab, (MICROBATCHES, SEQUENCES, SPEC.context), generator=draws)
    mbs = [Microbatch(step, i) for i in range(MICROBATCHES)]
    outputs = [await r for r in await asyncio.gather(*(compute.forward(mb, ids[i]) for i, mb in enumerate(mbs)))]
    grads = [torch.ones_like(r) / r.numel() for r in outputs]
    await asyncio.gather(*(compute.backward(mb, g, accumulate=True) for mb, g in zip(mbs, grads, strict=True)))
    gradient = await compute.gradient(step)
    await compute.apply(gradient, Update(step, 1.0, skip=False))
    return time.perf_counter() - begin, time.process_time() - cpu


def profile(peers: int, swapped: float) -> str:
    """A fleet file of paced machines; the fourth swaps, at ``swapped`` of the others' speed."""
    small = f'\n[[machines]]\nname = "small"\nspeed = {swapped}' if peers == 4 else ""
    pacing = f"[pacing]\nforward_ms = {FORWARD_MS}\nbackward_ms = {BACKWARD_MS}\n"
    return f'name = "four"\n[[machines]]\nname = "big"\ncount = 3{small}\n{pacing}'


def settings(peers: int, path: Path) -> list[str]:
    return [
        *TINY,
        "fleet.stages=2",
        f"train.batch={BATCH}",
        f"train.steps={STEPS}",
        f"fleet.peers={peers}",
        f"fleet.profile={path}",
    ]


def real(peers: int, swapped: float) -> tuple[float, int]:
    """Microbatches/s of real processes, and how many of them swapped."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "fleet.toml"
        path.write_text(profile(peers, swapped))
        config = load_config(None, settings(peers, path))
        need = RunFacts.of(config).needs()[0]
        assert need.swapped is not None
        assert need.swapped.least <= SHARE * need.total
        gib = SHARE * need.total / 2**30
        small = {"memory_gib": gib, "swap_folder": name}
        events = run_fleet(
            config,
            Path(name) / "run",
            stages=(1, 0, 1, 0)[:peers] if peers == 4 else (1, 0, 1),
            each=lambda peer: small if peer == "peer-3" else {},
        )
    swaps = {e.peer for e in events if isinstance(e, SwapWorked)}
    done = {e.step: e.t for e in events if isinstance(e, StepDone)}
    return BATCH * (STEPS - SKIP) / (done[STEPS] - done[SKIP]), len(swaps)


def played(peers: int, swapped: float) -> float:
    """Microbatches/s of production peers in the virtual world, with the same times."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "fleet.toml"
        path.write_text(profile(peers, swapped))
        run = load_config(None, settings(peers, path))
        scene = setting(load_fleet(path, peers=peers), run, make_model(run.model))
        return simulate_fleet(scene, run, Weather(), hours=PLAYED_S / 3600, fidelity="protocol").throughput


def main() -> None:
    found = ratio()
    swapped = found["cpu"]
    rows: dict[str, Mapping[str, float]] = {}
    for name, play in (("virtual clock", lambda n: (played(n, swapped), 0)), ("processes", lambda n: real(n, swapped))):
        (three, _), (four, swaps) = play(3), play(4)
        rows[name] = {"three": three, "four": four, "gain": four / three, "swapping": swaps}
    (HERE / "pipeline.json").write_text(json.dumps({"ratio": found, **rows}, indent=1) + "\n")
    table = Table(
        "",
        "three peers",
        "four",
        "gain",
        title=f"microbatches/s; the fourth swaps at {swapped:.2f} of the speed",
        box=None,
    )
    for name, row in rows.items():
        table.add_row(name, f"{row['three']:.2f}", f"{row['four']:.2f}", f"{row['gain']:.2f}")
    Console().print(table)
    Console().print(found)


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
