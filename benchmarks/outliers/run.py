"""How often would an honest gradient be doubted? One process trains the default text; its microbatches are dealt to
imaginary replicas."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
from collections import deque
from pathlib import Path

import numpy as np
import torch

from muletrain.compute.arithmetic import StageSetup
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.load import load_config
from muletrain.data.tokens import TokenCache
from muletrain.optim.sketch import sketch
from muletrain.policy import outliers
from muletrain.runs.assemble import RunFacts

FACTORS = (2.0, 3.0, 5.0, 7.0, 10.0)
DEALS = 20
"""Ways in which each step's microbatches are dealt."""


async def measure(steps: int) -> tuple[np.ndarray, list[list[float]]]:
    """Sketches [steps, stages, microbatches, SIZE], and the lengths of the gradients between the stages, in the order
    of their coming."""
    settings = [
        "train.microbatch=1",
        "train.batch=16",
        "model.width=128",
        "model.heads=4",
        "model.context=128",
        "fleet.stages=2",
    ]
    facts = RunFacts.of(load_config(None, [*settings, f"train.steps={steps}"]))
    config = facts.config
    cache = TokenCache.build(config.data, facts.spec.vocab)
    source, m = facts.source(cache), config.microbatches
    stages = [
        TorchCompute(facts.spec, facts.cut, s, StageSetup(config.optimizer, steps, config.train.seed, 1))
        for s in (0, 1)
    ]
    sketches, lengths = np.zeros((steps, 2, m, 64)), list[list[float]]()
    for step in range(steps):
        total, lengths_now = [torch.zeros(c.n_params) for c in stages], list[float]()
        for index in range(m):
            mb = Microbatch(step, index)
            inputs, targets = (torch.from_numpy(a) for a in source.microbatch(step, index))
            hidden = await (await stages[0].forward(mb, inputs))
            _, result = await stages[1].loss_backward(mb, hidden, targets, accumulate=True)
            assert result is not None
            gradient = await result
            lengths_now.append(float(gradient.norm()))
            await stages[0].backward(mb, gradient, accumulate=True)
            for s, compute in enumerate(stages):
                own = await compute.gradient(step)
                sketches[step, s, index] = sketch(own, bytes([step % 256, s]))
                total[s] += own
                compute.clear(step)
        lengths.append(lengths_now)
        norm = math.sqrt(sum(float((t / m).square().sum()) for t in total))
        for compute, t in zip(stages, total, strict=True):
            await compute.apply(t / m, Update(step, min(1.0, 1.0 / norm), skip=False))
    for compute in stages:
        compute.close()
    return sketches, lengths


def rates(sketches: np.ndarray, lengths: list[list[float]]) -> dict[str, dict[str, float]]:
    """By factor: share of deals in which a replica is doubted, of single microbatches against the others of their step,
    and of gradients between stages."""
    steps, stages, m, _ = sketches.shape
    result = {}
    for factor in FACTORS:
        outliers.FACTOR = factor
        rng, doubts, deals = random.Random(0), 0, 0
        for step in range(steps):
            for s in range(stages):
                for _ in range(DEALS):
                    replicas = rng.randint(2, 4)
                    weights = [rng.random() ** 2 for _ in range(replicas)]
                    owner = rng.choices(range(replicas), weights, k=m)
                    sums = {
                        str(r): outliers.Sum(owner.count(r), sketches[step, s, [o == r for o in owner]].sum(0))
                        for r in set(owner)
                    }
                    doubts += bool(outliers.outlying(sums))
                    deals += 1
        before, odd = deque[float](maxlen=64), 0
        for length in (x for now in lengths for x in now):
            odd += outliers.strange(length, before)
            before.append(length)
        result[str(factor)] = {"suspected": doubts / deals, "asked twice": odd / (steps * m)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    sketches, lengths = asyncio.run(measure(steps))
    single = np.linalg.norm(sketches, axis=-1)
    spread = {
        str(q): float(np.quantile(single / np.median(single, axis=2, keepdims=True), q)) for q in (0.5, 0.99, 1.0)
    }
    first = rates(sketches[:5], lengths[:5])
    results = {
        "steps": steps,
        "length over the step's median": spread,
        "all": rates(sketches, lengths),
        "first 5 steps": first,
    }
    (Path(__file__).parent / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
