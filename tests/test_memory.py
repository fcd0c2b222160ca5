"""A peer never allocates more than its own stage needs: measured, as the peak of a process's memory."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import safetensors.torch
import torch

from muletrain.cli.main import app
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.estimate import Offer, stage_memory
from muletrain.config.load import load_config
from muletrain.config.schema import Precision, RunConfig
from muletrain.model.hf import export_hf
from muletrain.runs.assemble import RunFacts, build_compute
from muletrain.runs.measure import machine
from muletrain.runs.measure.machine import Machine
from muletrain.runs.parts import write_first_checkpoint
from tests.whole_model import build_full

if TYPE_CHECKING:
    from collections.abc import Callable

STAGES = 8


def facts(width: int, folder: Path | None = None, *, delayed: bool = False) -> RunFacts:
    model = {"layers": STAGES, "width": width, "heads": 8, "vocab": 2048, "context": 64, "from": folder and str(folder)}
    fleet = {"stages": STAGES}
    rest = {"compute": {"precision": "fp32"}, "optimizer": {"delayed": delayed}}
    return RunFacts.of(RunConfig.model_validate({"model": model, "fleet": fleet, **rest}))


def serve(facts: RunFacts) -> None:
    """What a peer of stage 1 does: a microbatch, a step, a checkpoint."""

    async def work() -> None:
        compute = build_compute(facts, 1, Machine.probe("cpu", Precision.FP32, 0.001), None)
        x = torch.randn(facts.config.train.microbatch, facts.spec.context, facts.spec.width)
        await compute.forward(Microbatch(0, 0), x)
        await compute.backward(Microbatch(0, 0), x, accumulate=True)
        await compute.apply(await compute.gradient(0) / 1, Update(0, 1.0, skip=False))
        state = await compute.state()
        assert len(safetensors.torch.save(state)) > 12 * compute.n_params
        compute.close()

    asyncio.run(work())


class Cache:
    tokenizer_json, digest = b"{}", ""


def hand_out(facts: RunFacts, into: Path) -> None:
    write_first_checkpoint(facts, Cache, into, "run", lambda done: None)  # type: ignore[arg-type]


def peak_of(work: Callable[[], None]) -> int:
    """Most memory that ``work`` took, files aside (the kernel drops them when it wants to) [bytes]."""

    def own() -> int:
        resident, of_files = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")

    def watch() -> None:
        while not done.wait(0.001):
            peaks.append(own())

    peaks, done = [before := own()], threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return max(peaks) - before


def alone(folder: Path) -> dict[str, int]:
    """A run of one peer whose state is in memory as beside a GPU, with no more of it than it needs: two rounds and a
    checkpoint a step, to the end."""
    for width in (64, 512):
        swapped = alone_facts(width).needs()[0].swapped
        assert swapped is not None
        machine.memory_of = lambda *asked, swapped=swapped: Offer(swapped.least, swapped.on_host)  # type: ignore[misc]
        line = [
            "run",
            "--json",
            *(part for s in (*alone_settings(width), f"data.cache={folder}") for part in ("--set", s)),
        ]
        os.chdir(folder)
        peak = peak_of(lambda line=line: app(line, standalone_mode=False))
    return {
        "alone": peak,
        "expected": swapped.on_host + swapped.least,
        "checkpoints": len([*folder.glob("runs/*/checkpoints/step*")]),
    }


def alone_settings(width: int) -> list[str]:
    own = [
        "swap.whole=true",
        "swap.together=2",
        "train.batch=8",
        "train.microbatch=2",
        "train.steps=3",
        "checkpoint.every=1",
    ]
    sizes = ["model.layers=8", f"model.width={width}", "model.heads=8", "model.context=32"]
    return [*own, *sizes, "fleet.stages=1", "compute.precision=fp32", "compute.threads=1"]


def alone_facts(width: int) -> RunFacts:
    return RunFacts.of(load_config(None, alone_settings(width)), alone=True)


def measure(folder: Path) -> dict[str, int]:
    for path in ("small", "large"):  # the first time is for what any model takes: kernels, threads, modules
        ours = facts(64 if path == "small" else 512, folder / path)
        peaks = {
            "drawn": peak_of(lambda ours=ours: serve(facts(ours.spec.width))),
            "delayed": peak_of(lambda ours=ours: serve(facts(ours.spec.width, delayed=True))),
            "from a folder": peak_of(lambda ours=ours: serve(ours)),
            "handed out": peak_of(lambda ours=ours, path=path: hand_out(ours, folder / f"first-{path}")),
        }
    return peaks


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_peer_holds_its_own_stage_and_the_founder_a_tensor_of_the_others(tmp_path: Path) -> None:
    for path, width in (("small", 64), ("large", 512)):
        spec = facts(width).spec
        weights = {name: p.detach() for name, p in build_full(spec, seed=1).named_parameters()}
        export_hf(weights, spec, None, tmp_path / path, shard_bytes=30_000_000)
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_memory", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed goes back at once
    )
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    ours = facts(512)
    need, need_delayed = (
        stage_memory(ours.spec, ours.cut, 1, tokens=ours.tokens, precision=Precision.FP32, delayed=d).total
        for d in (False, True)
    )
    rest = 4 * (ours.spec.params - ours.spec.stage_params(ours.cut, 1))
    assert rest > 0.3 * need, "a peer that built the whole model would be seen"
    for way, expected in (("drawn", need), ("from a folder", need), ("delayed", need_delayed)):
        assert 0.7 * expected < peaks[way] < 1.15 * expected, (way, peaks, expected)
    largest = 4 * ours.spec.vocab * ours.spec.width
    assert peaks["handed out"] < 3 * largest < 4 * ours.spec.stage_params(ours.cut, 0)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_peer_alone_swaps_in_the_memory_that_was_planned(tmp_path: Path) -> None:
    """Within 10 %. With a copy of the state, a second accumulator or a mean of its own it would be 20 % at least."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_memory", str(tmp_path), "alone"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["checkpoints"] == 4, "two of each run are kept"
    assert 0.9 < found["alone"] / found["expected"] < 1.1, found


if __name__ == "__main__":
    print(json.dumps((alone if "alone" in sys.argv else measure)(Path(sys.argv[1]))))
