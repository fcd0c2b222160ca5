"""What does compression between stages cost in quality? See README.md. ``python run.py [--steps 240] [--seeds 3] [--jobs 2]``.

Every training is written to training.json when it ends, and is left out the next time; ``--again`` begins anew.
``--random``: instead, how far learned layers come whose way back begins with a random matrix (random.json).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import track

from muletrain.config.load import load_config
from muletrain.config.schema import Codec
from muletrain.data.microbatch import HeldoutSource
from muletrain.data.ngram import spread
from muletrain.data.tokens import TokenCache
from muletrain.model.make import make_stage
from muletrain.model.stage import initial_weight
from muletrain.runs.assemble import RunFacts
from muletrain.wire.codec import decode, encode

if TYPE_CHECKING:
    from muletrain.model.module import StageModule

HERE = Path(__file__).parent
TRAINING, RANDOM = HERE / "training.json", HERE / "random.json"
CONFIG = [
    "model.layers=4",
    "model.width=128",
    "model.heads=4",
    "model.dropout=0",
    "train.microbatch=16",
    "train.batch=16",
    "compute.precision=fp32",
    f"data.path={sysconfig.get_path('stdlib')}/*.py",  # text that every machine has: some 4 MB, not all of it seen once
]
LEARNING_RATE, WARM_UP = 3e-3, 50
EVERY, HELDOUT, LONGER = 20, 16_384, 1.6
"""Steps from one measurement to the next; held-out tokens of each; and how many times as many steps as without
compression a training takes at most until it is as good."""


@dataclass(frozen=True)
class Case:
    """One way to send activations and gradients from stage to stage."""

    way: str
    """'none', a codec, or a kind of ``model.compression``."""
    stages: int = 1
    factor: int = 1

    @property
    def learned(self) -> bool:
        return self.way in ("bottleneck", "maxout")

    @property
    def settings(self) -> list[str]:
        kind = [f"model.compression={self.way}", f"model.compression_factor={self.factor}"] if self.learned else []
        return [*CONFIG, f"fleet.stages={self.stages}", f"fleet.peers={self.stages}", *kind]

    @property
    def codec(self) -> Codec | None:
        return Codec(self.way) if self.way in ("int8", "dynamic8") else None


CASES = [
    Case("none"),
    *(Case(codec, stages, 2) for stages in (2, 4) for codec in ("int8", "dynamic8")),
    *(Case(kind, stages, factor) for stages in (2, 4) for factor in (2, 4) for kind in ("bottleneck", "maxout")),
]


class _Sent(torch.autograd.Function):
    """What arrives in the next stage, and of its gradient in this one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codec: Codec) -> torch.Tensor:
        ctx.codec = codec
        return decode(encode(x, codec))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return decode(encode(grad, ctx.codec)), None


def loss_of(stages: list[StageModule], codec: Codec | None, inputs: Any, targets: Any) -> torch.Tensor:
    x = torch.from_numpy(inputs)
    for stage in stages[:-1]:
        x = stage(x)
        if codec is not None:
            x = _Sent.apply(x, codec)
    return stages[-1].loss(x, torch.from_numpy(targets))


def trained(case: Case, seed: int, steps: int, target: float | None, *, random: bool = False) -> dict[str, Any]:
    """Held-out loss [nats/token] each ``EVERY`` steps: for ``steps``, and on until ``target``, if that is not reached.
    ``random``: the way back does not begin as the transpose of the way there."""
    torch.set_num_threads(1)
    facts = RunFacts.of(load_config(None, [*case.settings, f"train.seed={seed}", f"train.steps={10 * steps}"]))
    cache = TokenCache.build(facts.config.data, facts.spec.vocab)
    source = facts.source_of(cache.train)
    held = HeldoutSource(spread(cache.heldout, HELDOUT + 1), facts.spec.context, 16, facts.spec.vocab)
    stages = [make_stage(facts.spec, s, facts.cut) for s in range(case.stages)]
    for stage in stages:
        names = {n: n.replace("compression.", "drawn.") if random else n for n in stage.shapes()}
        stage.bind({n: initial_weight(facts.spec, names[n], shape, seed) for n, shape in stage.shapes().items()})
    parameters = [p for stage in stages for p in stage.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    curve: list[float] = []
    for step in range(1, int(steps * LONGER) + 1):
        for group in adamw.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARM_UP)
        adamw.zero_grad()
        loss_of(stages, case.codec, *source.microbatch(step - 1, 0)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adamw.step()
        if step % EVERY == 0:
            with torch.no_grad():
                each = [float(loss_of(stages, case.codec, *held.microbatch(k)[:2])) for k in range(len(held))]
            curve.append(sum(each) / len(each))
            if step >= steps and (target is None or curve[-1] <= target):
                break
    return {**asdict(case), "seed": seed, "steps": steps, "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--random", action="store_true")
    given = parser.parse_args()
    if given.random:
        rows = []
        for case in track([c for c in CASES if c.learned], "training", console=Console(stderr=True)):
            loss = trained(case, 0, given.steps, math.inf, random=True)["curve"][-1]
            rows.append({**asdict(case), "perplexity": math.exp(loss)})
            RANDOM.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
        return
    found: list[dict[str, Any]] = [] if given.again or not TRAINING.exists() else json.loads(TRAINING.read_text())
    found = [row for row in found if row["steps"] == given.steps]
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        for some in (CASES[:1], CASES[1:]):  # the rest is trained until it is as good as the first
            wanted = []
            for seed in range(given.seeds):
                done = {(r["way"], r["stages"], r["factor"]) for r in found if r["seed"] == seed}
                best = [r["curve"][-1] for r in found if r["way"] == "none" and r["seed"] == seed]
                left = (case for case in some if (case.way, case.stages, case.factor) not in done)
                wanted += [(case, seed, given.steps, best[0] if best else None) for case in left]
            begin = time.monotonic()
            for row in track(
                pool.imap_unordered(_star, wanted), "training", total=len(wanted), console=Console(stderr=True)
            ):
                found.append(row)
                TRAINING.write_text("[\n" + ",\n".join(json.dumps(r) for r in sorted(found, key=_order)) + "\n]\n")
            print(f"{len(wanted)} trainings in {time.monotonic() - begin:.0f} s", file=sys.stderr)


def _star(given: tuple[Case, int, int, float | None]) -> dict[str, Any]:
    return trained(*given)


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    cases = [(c.way, c.stages, c.factor) for c in CASES]
    return cases.index((row["way"], row["stages"], row["factor"])), row["seed"]


if __name__ == "__main__":
    main()
