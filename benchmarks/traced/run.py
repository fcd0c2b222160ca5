"""Does a traced Llama train as fast as the same model on the native decoder? One stage, passes of both in turn."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig

from muletrain.compute.arithmetic import StageSetup
from muletrain.compute.base import Microbatch
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.schema import OptimizerConfig
from muletrain.model.chain import Model
from muletrain.model.spec import ModelSpec
from muletrain.model.traced.chain import TracedModel

SIZES = {"layers": 4, "width": 512, "heads": 8, "kv_heads": 8, "ffn": 1408, "vocab": 1024, "context": 256}


def models() -> dict[str, Model]:
    """The same Llama twice."""
    config = LlamaConfig(
        hidden_size=SIZES["width"],
        intermediate_size=SIZES["ffn"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"],
        vocab_size=SIZES["vocab"],
        max_position_embeddings=SIZES["context"],
        tie_word_embeddings=False,
    )
    native = ModelSpec(
        **SIZES, activation="silu", dropout=0.0, rope_theta=10000.0, norm_eps=config.rms_norm_eps, share_layers=False
    )
    return {"native": native, "traced": TracedModel(json.dumps(config.to_dict(), sort_keys=True), SIZES["context"])}


def stage_of(model: Model, sequences: int) -> TorchCompute:
    """The whole model as one stage. Both draw the same weights, since they have the same names."""
    return TorchCompute(model, model.cut(1), 0, StageSetup(OptimizerConfig(), 100, 0, sequences))


async def measure(pairs: int, passes: int, sequences: int) -> tuple[dict[str, list[tuple[float, float]]], float]:
    """By model, wall and CPU seconds of each round of ``passes`` microbatches, rounds in turn; and the relative
    difference of the two models' gradients."""
    stages = {name: stage_of(model, sequences) for name, model in models().items()}
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, SIZES["vocab"], (sequences, SIZES["context"] + 1), generator=draws)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in stages}
    sums = []
    for index in range(pairs + 1):  # the first round is not counted
        for name in sorted(stages, reverse=index % 2 == 1):  # the first round: in the order of ``stages``
            wall, cpu = time.perf_counter(), time.process_time()
            for k in range(passes):
                mb = Microbatch(0, index * passes + k)
                await stages[name].loss_backward(mb, tokens[:, :-1], tokens[:, 1:], accumulate=True)
            gradient = await stages[name].gradient(0)
            if index:
                found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            else:
                sums.append(gradient.clone())
    for stage in stages.values():
        stage.close()
    first, second = (stage.arithmetic.layout.views(total) for stage, total in zip(stages.values(), sums, strict=True))
    difference = max(float((first[n] - second[n]).norm() / first[n].norm()) for n in first)
    return found, difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found, difference = asyncio.run(measure(args.pairs, args.passes, args.sequences))
    tokens = args.passes * args.sequences * SIZES["context"]
    results: dict[str, object] = {
        **SIZES,
        "sequences": args.sequences,
        "threads": args.threads,
        "pairs": args.pairs,
        "gradient difference": difference,
    }
    for kind, at in (("wall", 0), ("cpu", 1)):
        ratios = [n[at] / t[at] for n, t in zip(found["native"], found["traced"], strict=True)]
        results[f"traced over native, {kind}"] = statistics.median(ratios)
        results[f"ratios, {kind}"] = [round(r, 3) for r in ratios]
        results |= {
            f"{name} tokens/s, {kind}": tokens / statistics.median(r[at] for r in f) for name, f in found.items()
        }
    print(json.dumps(results, indent=1))
    (Path(__file__).parent / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
