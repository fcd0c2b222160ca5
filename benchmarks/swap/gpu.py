"""How fast is a model that is swapped through a small part of a GPU, against the same model resident on it? See README.md.

``python gpu.py 1.3B``, one row of the table each: 1.3B, 6.7B, fsdp; ``--device cpu tiny`` runs all of it without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from muletrain.compute import arithmetic
from muletrain.compute.arithmetic import StageArithmetic, StageSetup
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.estimate import Offer
from muletrain.compute.probe import chip
from muletrain.compute.swap.swapped import Swap, SwappedCompute
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import OptimizerConfig, Precision
from muletrain.model.make import make_stage
from muletrain.model.spec import ModelSpec
from muletrain.optim.norms import square_norm

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """A model, what of the device it may use, and what is measured. ``passes``: tokens that go through together;
    ``step``: tokens of a whole step."""

    model: ModelConfig
    sequences: int
    budget_gib: float
    passes: tuple[int, ...]
    step: int
    asked: str
    repeats: int = 3
    traced: bool = True
    """One more step is traced, for the share of time in which the device computes."""


ROWS = {
    "1.3B": Row(
        ModelConfig(layers=24, width=2048, heads=16, vocab=32000, context=2048, dropout=0.0),
        2,
        8,
        (16384, 4096),
        65536,
        "streaming 0.90 at 16k and 0.70 at 4k, step 0.85, busy 95 %",
    ),
    "6.7B": Row(
        ModelConfig(layers=32, width=4096, heads=32, vocab=32000, context=2048, dropout=0.0),
        2,
        16,
        (16384,),
        131072,
        "streaming 0.90, step 0.80, 270 TFLOP/s",
        1,
        False,
    ),
    "tiny": Row(
        ModelConfig(layers=6, width=128, heads=4, vocab=512, context=128, dropout=0.0), 2, 0.012, (1024, 256), 2048, ""
    ),
}


class Case:
    """One row: the same microbatches, resident and swapped."""

    def __init__(self, row: Row, device: torch.device) -> None:
        self.row, self.device, self.spec = row, device, ModelSpec.from_config(row.model)
        self.gpu = device.type == "cuda"
        precision = Precision.BF16 if self.gpu else Precision.FP32
        optimizer = OptimizerConfig(clip=1.0)
        self.setup = StageSetup(
            optimizer, 1000, seed=0, sequences=row.sequences, device=device, precision=precision, checkpointing="always"
        )
        self.tokens = row.sequences * self.spec.context
        spec = self.spec
        self.flops = 3 * (sum(spec.flops_of(layer) for layer in range(spec.layers)) + spec.head_flops)
        """Of the model for a token: forward and backward, nothing twice."""

    def source(self, shapes: dict[str, tuple[int, ...]]) -> Callable[[str], torch.Tensor]:
        """First weights, drawn where that is fastest."""

        def draw(name: str) -> torch.Tensor:
            shape = shapes[name]
            return torch.ones(shape) if len(shape) == 1 else torch.randn(shape, device=self.device).mul_(0.02).cpu()

        return draw

    def sync(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def batch(self, mb: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        draws = torch.Generator().manual_seed(1000 * mb.step + mb.index)
        ids = torch.randint(0, self.spec.vocab, (self.row.sequences, self.spec.context + 1), generator=draws)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    # Swapped ----------------------------------------------------------------------------------------------------------

    def swapped(self) -> dict[str, object]:
        self.sync()
        most, budget = self.row.step // self.tokens, int(self.row.budget_gib * 2**30)
        before_host, base = rss(), torch.cuda.memory_allocated() if self.gpu else 0
        cut = self.spec.cut(1)
        shapes = make_stage(self.spec, 0, cut).shapes()
        begin = time.perf_counter()
        folder = None if self.gpu else HERE / f"swap-{os.getpid()}"
        offer = Offer(budget, 1 << 40) if self.gpu else Offer(budget)
        compute = SwappedCompute(
            self.spec, cut, 0, self.setup, Swap(offer, folder, most, 1, alone=True), self.source(shapes)
        )
        made_s = time.perf_counter() - begin
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
        found: dict[str, object] = {"made_s": made_s, "runs": compute.plan.runs, "lost": compute.plan.lost}
        try:
            for tokens in self.row.passes:
                found[f"pass {tokens}"] = asyncio.run(self.streamed(compute, tokens // self.tokens))
            found["step"] = asyncio.run(self.stepped(compute, most))
        finally:
            compute.close()
        if self.gpu:
            found["device_bytes"] = torch.cuda.max_memory_allocated() - base
            found["reserved_bytes"] = torch.cuda.max_memory_reserved() - base
        found["host_bytes"], found["budget_bytes"] = rss() - before_host, budget
        found["rounds"], found["microbatches"] = compute.rounds.rounds, compute.rounds.microbatches
        found["expected_host_bytes"] = 16 * self.spec.params + 4 * self.row.step * self.spec.width * (compute.parts - 1)
        return found

    async def streamed(self, compute: SwappedCompute, count: int) -> dict[str, float]:
        """Forward and backward of one round, with its gradient in backing memory."""
        took, traffic = [], compute.arithmetic.loader.traffic
        waits = traffic.wait_s
        for n in range(self.row.repeats + 1):
            begin = time.perf_counter()
            await asyncio.gather(*(self.one(compute, Microbatch(n, i)) for i in range(count)))
            await compute.gradient(n)
            took.append(time.perf_counter() - begin)
            compute.clear(n)
        return {"s": median(took[1:]), "wait_s": (traffic.wait_s - waits) / (self.row.repeats + 1)}

    async def stepped(self, compute: SwappedCompute, count: int) -> dict[str, object]:
        """Whole steps: all microbatches, the norm for clipping, the update. The last one is traced."""
        times: list[tuple[float, float, float]] = []
        for step in range(1 + min(2, self.row.repeats)):
            times.append(await self.step(compute, step, count))
        busy = None
        if self.gpu and self.row.traced:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
                begin = time.perf_counter()
                await self.step(compute, len(times), count)
                traced_s = time.perf_counter() - begin
            busy = {"busy_s": busy_s(traced), "of_s": traced_s}
        return {"s": median(sum(t) for t in times[1:]), "computing, norm, update": times[-1], "busy": busy}

    async def step(self, compute: SwappedCompute, step: int, count: int) -> tuple[float, float, float]:
        begin = time.perf_counter()
        await asyncio.gather(*(self.one(compute, Microbatch(step, i)) for i in range(count)))
        gradient = await compute.gradient(step)
        computed = time.perf_counter()
        norm = (await compute.offload(square_norm, gradient)) ** 0.5 / count
        normed = time.perf_counter()
        await compute.apply(gradient, Update(step, min(1.0, 1.0 / norm) / count, skip=False))
        return computed - begin, normed - computed, time.perf_counter() - normed

    async def one(self, compute: SwappedCompute, mb: Microbatch) -> None:
        await compute.loss_backward(mb, *self.batch(mb), accumulate=True)

    # Resident ---------------------------------------------------------------------------------------------------------

    def resident(self, runs: Sequence[tuple[int, int]]) -> dict[str, float]:
        """Seconds of the passes and of the step's microbatches, resident, with the recomputation of the swapped one: of
        every part but the last. Without an update, and without waiting for the device after each part, as stages do that
        pass their results on."""
        arithmetic.Timer = Untimed  # type: ignore[assignment,misc]
        layers = sorted({end - 1 for _, end in runs if 1 < end <= self.spec.layers})  # block 0 is the embedding
        cut = tuple(zip([0, *layers], [*layers, self.spec.layers], strict=True))
        parts = []
        for s in range(len(cut)):
            shapes = make_stage(self.spec, s, cut).shapes()
            setup = replace(self.setup, updates=False)
            parts.append(StageArithmetic(s, [make_stage(self.spec, s, cut)], setup, self.source(shapes)))
        counts = [tokens // self.tokens for tokens in (*self.row.passes, self.row.step)]
        found = {}
        for count in counts:
            took = []
            for n in range(self.row.repeats + 1):
                self.sync()
                begin = time.perf_counter()
                for i in range(count):
                    self.through(parts, Microbatch(n, i))
                self.sync()
                took.append(time.perf_counter() - begin)
            found[str(count * self.tokens)] = median(took[1:])
        return found

    def through(self, parts: list[StageArithmetic], mb: Microbatch) -> None:
        x, targets = self.batch(mb)
        kept = []
        for part in parts[:-1]:
            keep, x = part.forward(mb, x, False)
            kept.append(keep)
        _, gradients, grad = parts[-1].loss_backward(mb, x, targets.to(self.device), True)
        parts[-1].accumulate(gradients, mb.step)
        for part, keep in zip(reversed(parts[:-1]), reversed(kept), strict=True):
            assert grad is not None
            gradients, grad = part.backward(mb, keep, grad, True)
            part.accumulate(gradients, mb.step)


class Untimed:
    """In place of ``arithmetic.Timer``: nothing waits for the device."""

    def __init__(self, counters: object, device: torch.device) -> None:
        pass

    def __call__(self, counter: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self) -> None:
        pass


def rss() -> int:
    """Bytes of this process in the machine's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def busy_s(traced: torch.profiler.profile) -> float:
    """Seconds in which the device computes: the union of the kernels' times, copies left out."""
    rows = [
        (e.start_ns(), e.start_ns() + e.duration_ns())
        for e in traced.profiler.kineto_results.events()  # type: ignore[union-attr]
        if e.device_type() == torch.autograd.DeviceType.CUDA and not e.name().startswith("Mem")
    ]
    total, until = 0, 0
    for begin, end in sorted(rows):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total / 1e9


def fsdp(row: Row, device: torch.device) -> dict[str, object]:
    """The same size with torch's FSDP2: parameters, gradients and AdamW on the host, checkpointed layers, one process
    (what ZeRO-3 with offload is on one GPU)."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    model = row.model
    config = LlamaConfig(
        hidden_size=model.width,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        vocab_size=model.vocab,
        intermediate_size=-(-8 * model.width // 3 // 64) * 64,
        max_position_embeddings=model.context,
        use_cache=False,
        hidden_act="gelu",
    )
    with tempfile.TemporaryDirectory() as folder:
        init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        with torch.device("meta"):
            net = LlamaForCausalLM(config)
        net.gradient_checkpointing_enable({"use_reentrant": False})
        net.to_empty(device="cpu")
        for parameter in net.parameters():
            parameter.data = torch.randn(parameter.shape, device=device).mul_(0.02).cpu()
        net.model.rotary_emb.__init__(config)  # its buffers are not parameters
        policy = {
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=True),
        }
        for layer in net.model.layers:
            fully_shard(layer, **policy)
        fully_shard(net, **policy)
        net.model.rotary_emb.to(device)
        net.train()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
        count, took = row.step // (row.sequences * model.context), []
        torch.cuda.reset_peak_memory_stats()
        for n in range(3):
            begin = time.perf_counter()
            for i in range(count):
                net.set_requires_gradient_sync(i == count - 1)
                ids = torch.randint(0, model.vocab, (row.sequences, model.context), device=device)
                (net(input_ids=ids, labels=ids).loss / count).backward()
            torch.cuda.synchronize()
            computed = time.perf_counter()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            took.append((time.perf_counter() - begin, computed - begin))
            print(f"step {n}: {took[-1]}", flush=True)
        peak = torch.cuda.max_memory_allocated()
        destroy_process_group()
    step_s, computing_s = sorted(took[1:])[0]
    return {"tokens_per_s": row.step / step_s, "step_s": step_s, "computing_s": computing_s, "device_bytes": peak}


def measured(name: str, device: torch.device) -> dict[str, object]:
    if name.startswith("fsdp"):
        return fsdp(ROWS["1.3B"], device)
    case = Case(ROWS[name], device)
    swapped = case.swapped()
    print(json.dumps(swapped, default=str), flush=True)
    gc.collect()
    resident = case.resident(swapped["runs"])  # type: ignore[arg-type]
    device_name = chip(device)
    return {"device": device_name, "torch": torch.__version__, "cores": os.cpu_count(), "params": case.spec.params,
            "flops_per_token": case.flops, "resident": resident, "swapped": swapped}  # fmt: skip


def show(name: str, found: dict[str, object]) -> None:
    if name.startswith("fsdp"):
        Console().print(found)
        return
    row, resident, swapped = ROWS[name], found["resident"], found["swapped"]
    assert isinstance(resident, dict)
    assert isinstance(swapped, dict)
    title = f"{found['params'] / 1e9:.2f} B parameters through {row.budget_gib:g} GiB on {found['device']}"  # type: ignore[operator]
    table = Table(title=title, box=None)
    for header in ("what", "tokens", "resident s", "swapped s", "of resident", "model TFLOP/s", "waits"):
        table.add_column(header, justify="left" if header == "what" else "right")
    for tokens in row.passes:
        own = swapped[f"pass {tokens}"]
        rate = float(str(found["flops_per_token"])) * tokens / own["s"] / 1e12
        share = resident[str(tokens)] / own["s"]
        cells = (f"{resident[str(tokens)]:.3f}", f"{own['s']:.3f}", f"{share:.2f}", f"{rate:.0f}")
        table.add_row("streaming", f"{tokens:,}", *cells, f"{own['wait_s'] / own['s']:.0%}")
    own = swapped["step"]
    rate = float(str(found["flops_per_token"])) * row.step / own["s"] / 1e12
    cells = (f"{resident[str(row.step)]:.3f}", f"{own['s']:.3f}", f"{resident[str(row.step)] / own['s']:.2f}")
    table.add_row("step", f"{row.step:,}", *cells, f"{rate:.0f}", "")
    Console(width=120).print(table)
    say = Console(width=120).print
    say(
        "computing, norm, update of the last step, in seconds: "
        + ", ".join(f"{t:.3f}" for t in own["computing, norm, update"])
    )
    if own["busy"]:
        say(
            f"device busy {own['busy']['busy_s'] / own['busy']['of_s']:.1%} of a traced step of {own['busy']['of_s']:.2f} s"
        )
    if "device_bytes" in swapped:
        peaks = (swapped["device_bytes"] / 2**30, swapped["reserved_bytes"] / 2**30)
        say(f"device: {peaks[0]:.2f} GiB at most ({peaks[1]:.2f} reserved) of {row.budget_gib:g}")
    expected = swapped["expected_host_bytes"] / 2**30
    say(f"host: {swapped['host_bytes'] / 2**30:.1f} GiB, {expected:.1f} expected; {len(swapped['runs'])} sub-models")
    say(f"asked: {row.asked}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", choices=[*ROWS, "fsdp"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=HERE / "gpu.json", help="figures are added there")
    given = parser.parse_args()
    found = measured(given.row, torch.device(given.device))
    show(given.row, found)
    kept = json.loads(given.out.read_text()) if given.out.exists() else {}
    given.out.write_text(json.dumps(kept | {given.row: found}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
