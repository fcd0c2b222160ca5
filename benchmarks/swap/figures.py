"""ATOM's figures 14 to 17 with production peers on a virtual clock, and C = 1 and 4 on real tensors. See README.md.
``python figures.py [speed averaging losses killed]`` writes figures.json."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch
from rich.console import Console

from muletrain.compute.arithmetic import StageSetup
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.estimate import Offer
from muletrain.compute.swap.fit import swap_memory
from muletrain.compute.swap.swapped import Swap, SwappedCompute
from muletrain.config.fleet_file import Fleet, load_fleet
from muletrain.config.load import load_config
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import OptimizerConfig, Precision
from muletrain.events.facts import StepDone
from muletrain.model.make import make_model
from muletrain.model.spec import ModelSpec
from muletrain.optim.norms import square_norm
from muletrain.sim.plan import pipeline as plan_pipeline
from muletrain.sim.plan.question import Question, Scene
from muletrain.sim.plan.swarm import played_step_s, settled
from muletrain.sim.setting import setting
from proofs.play import Outcome, play
from proofs.scenario import Fault, Scenario

HERE = Path(__file__).parent
MBPS = (400, 800, None)
BATCHES, CONTEXT = (512, 32), 2048
"""Sequences of a step. With 512 GPipe has no room for the inputs of a whole step."""
RUN = ["model.preset=gpt3-xl", "train.microbatch=4", "checkpoint.every=0"]
PLAYED = 4
"""Steps that are played."""
PEERS = (2, 4, 8, 12)
SPEC = ModelSpec.from_config(ModelConfig(layers=4, width=64, heads=4, vocab=256, context=32, dropout=0.1))
STEPS, SEQUENCES, MICROBATCHES = 60, 2, 4


def fleet(peers: int, mbps: int | None) -> Fleet:
    """V100s with 16 GiB."""
    links = f"up_mbps = {mbps}\ndown_mbps = {mbps}\n" if mbps else ""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(
            f'[[machines]]\nname = "v100"\ncount = {peers}\ndevice = "V100"\nmemory_gib = 16\nhost_gib = 256\n{links}'
        )
        file.flush()
        return load_fleet(Path(file.name))


def swap_s(peers: int, mbps: int | None, *given: str) -> tuple[float, float]:
    """Seconds of a step with strategy swap, and of its computing."""
    run = load_config(None, [*RUN, "swap.whole=true", "fleet.stages=1", *given])
    scene = Scene(run, setting(fleet(peers, mbps), run, make_model(run.model)))
    found = settled(scene)
    computing_s = run.microbatches / peers / scene.setting.kinds[0].whole_per_s
    return played_step_s(scene, found.roughly_s, PLAYED), computing_s


def speed() -> dict[str, dict[str, float]]:
    """Tokens/s of four peers by batch, link and strategy."""
    found: dict[str, dict[str, float]] = {}
    for batch, mbps in product(BATCHES, MBPS):
        run = load_config(None, [*RUN, f"train.batch={batch}", "fleet.stages=4"])
        question = Question(fleet(4, mbps), run, make_model(run.model), 4, 4)
        took = {"swap": swap_s(4, mbps, f"train.batch={batch}")[0]}
        for p in plan_pipeline.predict(question, 0, 4.0):
            if p.problem or not p.schedule:
                continue
            scene = plan_pipeline.scheduled(question, question.scene_of(p), p.schedule, len(p.microbatches))
            members = plan_pipeline.membership(question, scene, p)
            took[p.schedule] = played_step_s(scene, p.step_s, PLAYED, planned=members)
        found[f"{batch} sequences, {mbps or 'unlimited'} Mb/s"] = {
            name: batch * CONTEXT / s for name, s in took.items()
        }
        Console().print(found)
    return found


def averaging() -> dict[str, float]:
    """Seconds of a step beside its computing, by number of peers, at 800 Mb/s and four microbatches a peer."""
    found = {}
    for peers in PEERS:
        step_s, computing_s = swap_s(peers, 800, f"train.batch={16 * peers}")
        found[str(peers)] = step_s - computing_s
        Console().print(found)
    return found


def losses() -> dict[str, list[float]]:
    """Losses of the same global batch with C = 1 and 4, mean of each step."""
    return {f"C = {c}": asyncio.run(_trained(c)) for c in (1, 4)}


def killed() -> dict[str, float]:
    """Twelve peers that swap, in the fuzzer's world: real tensors, tokens drawn at random. Two are killed, at 30 and 60 % of
    the time. The largest difference of a step's loss from the same run without a kill, and how much longer it takes."""
    whole = _lost(())
    at_s = whole.virtual_s
    fewer = _lost((Fault(0.3 * at_s, "kill", ("peer-0e",)), Fault(0.6 * at_s, "kill", ("peer-0h",))))
    one, other = ({e.step: e.loss for e in o.events if isinstance(e, StepDone)} for o in (whole, fewer))
    return {
        "steps": len(other),
        "difference": max(abs(one[s] - other[s]) for s in one),
        "longer": fewer.virtual_s / at_s,
    }


def _lost(faults: tuple[Fault, ...]) -> Outcome:
    names = tuple(f"peer-0{letter}" for letter in "abcdefghijkl")
    outcome = play(
        Scenario(1, (12,), 12, STEPS, 24, 0.02, faults, overrides=("swap.whole=true",), swapped=names, trace=True)
    )
    assert not outcome.violations, outcome.violations
    return outcome


async def _trained(together: int) -> list[float]:
    setup = StageSetup(OptimizerConfig(lr=1e-2, warmup=5), STEPS, seed=0, sequences=SEQUENCES)
    tokens = SEQUENCES * SPEC.context
    memory = swap_memory(SPEC, SPEC.cut(1), 0, tokens, Precision.FP32, microbatches=together, lamb=False, disk=True)
    with tempfile.TemporaryDirectory() as name:
        swap = Swap(Offer(memory.least), Path(name) / "swap", together, together)
        compute, curve = SwappedCompute(SPEC, SPEC.cut(1), 0, setup, swap), []
        for step in range(STEPS):
            both = await asyncio.gather(*(_one(compute, Microbatch(step, i)) for i in range(MICROBATCHES)))
            curve.append(sum(both) / MICROBATCHES)
            gradient = await compute.gradient(step)
            norm = square_norm(gradient) ** 0.5 / MICROBATCHES
            await compute.apply(gradient, Update(step, min(1.0, 1.0 / norm) / MICROBATCHES, skip=False))
        compute.close()
    return curve


async def _one(compute: SwappedCompute, mb: Microbatch) -> float:
    """Sequences that count upwards, from a random beginning."""
    draws = torch.Generator().manual_seed(1000 * mb.step + mb.index)
    ids = (torch.randint(0, SPEC.vocab, (SEQUENCES, 1), generator=draws) + torch.arange(SPEC.context + 1)) % SPEC.vocab
    return (await compute.loss_backward(mb, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), accumulate=True))[0]


def main() -> None:
    parts = {"speed": speed, "averaging": averaging, "losses": losses, "killed": killed}
    path = HERE / "figures.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in sys.argv[1:] or parts:
        results[name] = parts[name]()
        path.write_text(json.dumps(results, indent=1) + "\n")
    Console().print(results)


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
