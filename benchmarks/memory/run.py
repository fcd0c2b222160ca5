"""The peak memory of a peer, against what ``plan`` says: ``python -m benchmarks.memory.run`` measures all cases and writes
results.json.

Each case is a stage of some model, served in a fresh process, in the memory that the estimate asks for: with all that a
peer holds at once (copies of the state, the mean, the last mean) while a microbatch is computed. A stage of one such
layer is served first, for what any stage takes: modules, threads, kernels of these shapes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from muletrain.compute.base import Compute, Microbatch, Update
from muletrain.compute.estimate import COPIES, PARTS, TRANSFERS, Offer, StageMemory
from muletrain.compute.probe import precision_dtype
from muletrain.compute.swap.backing import return_freed_memory
from muletrain.config.load import load_config
from muletrain.config.schema import Precision
from muletrain.model.stage import _seen_apart
from muletrain.model.traced.chain import TracedModel
from muletrain.runs.assemble import RunFacts, build_compute, resolve_start
from muletrain.runs.base import store_of
from muletrain.runs.measure.machine import Machine
from muletrain.runtime.checkpoint.store import PartFacts
from muletrain.wire.statefile import StateBuffers

STEPS = 2
BASE = "model.layers=4 model.heads=8 model.context=128 compute.precision=fp32 train.microbatch=1 train.batch=4"
TRACED = {
    "model_type": "gpt2",
    "n_embd": 512,
    "n_layer": 4,
    "n_head": 8,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}
RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Case:
    """A stage of a run with ``settings``."""

    settings: str
    stage: int = 0
    alone: bool = False
    client: bool = False
    server: bool = False
    """Of a hub: clients hand over what they accumulated."""
    copied: bool = True
    """Of a peer alone: there is memory for a copy of its state."""
    traced: bool = False
    bf16: bool = False
    """Of a Llama whose files have bf16."""

    def facts(self, folder: Path, *, small: bool = False) -> RunFacts:
        """``small``: with one layer a stage."""
        settings = f"{BASE} {self.settings}".split()
        if self.bf16:
            settings = [s for s in settings if not s.startswith(("model.layers", "model.heads"))]
            own = save_llama(folder / str(small), layers=2 if small else 4)
            return RunFacts.of(
                resolve_start(load_config(None, [*settings, f"model.from={own}", "data.tokenizer=other"]))
            )
        if self.traced:
            layers = {"n_layer": 2} if small else {}
            (folder / "config.json").write_text(json.dumps(TRACED | layers))
            settings = [s for s in settings if not s.startswith(("model.layers", "model.heads"))]
            settings.append(f"model.from={folder}")
        elif small:
            settings.append(f"model.layers={load_config(None, settings).fleet.stages}")
        return RunFacts.of(load_config(None, settings), alone=self.alone)

    def need(self, facts: RunFacts) -> StageMemory:
        """In the memory that is offered."""
        need = (facts.client_needs() if self.client else facts.needs())[self.stage]
        return need if self.copied or need.smaller is None else need.smaller


def save_llama(folder: Path, **sizes: int) -> Path:
    """A new Llama in bf16, with about one tensor a file."""
    from transformers import LlamaConfig, LlamaForCausalLM

    numbers = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "vocab_size": 8192}
    numbers |= {"num_hidden_layers": sizes["layers"], "max_position_embeddings": 2048}
    model = LlamaForCausalLM(LlamaConfig(**numbers, tie_word_embeddings=False)).bfloat16()
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


CASES = {
    "alone": Case("model.width=512 fleet.stages=1", alone=True, copied=False),
    "alone, with a copy, in 16 bits": Case("model.width=512 fleet.stages=1 compute.precision=bf16", alone=True),
    "alone, delayed, in 16 bits": Case(
        "model.width=512 fleet.stages=1 compute.precision=bf16 optimizer.delayed=true", alone=True, copied=False
    ),
    "block by block": Case(
        "model.width=512 model.layers=6 model.context=1024 fleet.stages=1 compute.checkpointing=block",
        alone=True,
        copied=False,
    ),
    "shared layers": Case(
        "model.width=768 model.layers=8 model.share_layers=true model.context=512 fleet.stages=1",
        alone=True,
        copied=False,
    ),
    "LAMB": Case("model.width=256 model.vocab=32768 fleet.stages=1 optimizer.name=lamb", alone=True, copied=False),
    "chunked loss": Case("model.width=512 model.vocab=32768 model.context=2048 fleet.stages=4", stage=3),
    "a long context": Case("model.width=256 model.context=4096 fleet.stages=2", stage=1),
    "conversations in a row": Case(
        "model.width=256 model.context=2048 model.attention=conversation data.path=chat.jsonl fleet.stages=2 "
        "optimizer.delayed=true",
        stage=1,
    ),
    "compression": Case("model.width=512 model.compression=bottleneck model.context=512 fleet.stages=3", stage=1),
    "delayed": Case("model.width=512 fleet.stages=4 optimizer.delayed=true", stage=1),
    "traced": Case("fleet.stages=2", traced=True),
    "an adapter": Case("adapter.rank=16 fleet.stages=2", stage=1, bf16=True),
    "all weights of that model": Case("fleet.stages=2", stage=1, bf16=True),
    "an adapter, in 16 bits": Case(
        "adapter.rank=16 model.context=512 compute.precision=bf16 fleet.stages=2", stage=1, bf16=True
    ),
    "an adapter, block by block": Case(
        "adapter.rank=16 model.context=1024 compute.checkpointing=block fleet.stages=2", stage=1, bf16=True
    ),
    "an adapter beside NF4": Case("adapter.rank=16 adapter.quantise=nf4 fleet.stages=2", stage=1, bf16=True),
    "an adapter beside int8, in 16 bits": Case(
        "adapter.rank=16 adapter.quantise=int8 model.context=512 compute.precision=bf16 fleet.stages=2",
        stage=1,
        bf16=True,
    ),
    "a client of a hub": Case("model.width=512 fleet.stages=4 hub.clients=1", stage=1, client=True),
    "a server of a hub": Case("model.width=512 fleet.stages=4 hub.clients=4", stage=1, server=True),
    "a middle stage": Case("model.width=512 fleet.stages=4", stage=1),
}


async def serve(case: Case, facts: RunFacts) -> None:
    """Some steps of the stage, as a peer of the run does them."""
    precision, need = facts.config.compute.precision, case.need(facts)
    machine = Machine(torch.device("cpu"), Precision(precision), Offer(need.total))
    store, base = store_of(facts.config, facts.spec, [Path(facts.config.model.from_ or "")]), None
    if store is not None:
        parts = facts.spec.parts_of(facts.cut, case.stage)
        base = {name: tensor for part in parts for name, tensor in (store.part(part) or {}).items()}
    compute = build_compute(facts.drawn(), case.stage, machine, None, updates=not case.client, base=base)
    if facts.spec.quantised:  # pages of files that were read once are no need
        base = store = None
        forget_peak()
    assert compute.by_block == need.by_block
    for step in range(STEPS):
        await (help_with if case.client else lead)(case, facts, compute, step)
    compute.close()


async def lead(case: Case, facts: RunFacts, compute: Compute, step: int) -> None:
    """A step of a peer with weights and moments: while a microbatch is computed, earlier copies are still there."""
    copies = [await compute.state() for _ in range(0 if compute.lends else 1 if case.alone else COPIES)]
    last = None if case.alone else torch.ones(compute.n_trained)
    await compute_one(facts, compute, Microbatch(step, 0))
    if case.server:
        for coming in [torch.ones(compute.n_trained) for _ in range(TRANSFERS)]:
            compute.add(step, coming)
    gradient = await compute.gradient(step)
    mean = gradient if case.alone else await compute.room(compute.n_trained)
    mean.copy_(gradient).mul_(0.5)
    if compute.delayed:  # meanwhile the next step computes
        await compute_one(facts, compute, Microbatch(step + 1, 0))
        compute.clear(step + 1)
    await compute.apply(mean, Update(step, 1.0, skip=False))
    del copies, last
    if compute.lends:
        PartFacts.of(StateBuffers(await compute.state()))


async def help_with(case: Case, facts: RunFacts, compute: Compute, step: int) -> None:
    """A step of a client: the next weights come while parts are computed, and the sum goes to the server."""
    coming = torch.ones(compute.n_params)
    going = (await compute.gradient(step)).clone()
    parts = [Microbatch(step, index, first=0, whole=2) for index in range(PARTS)]
    for part in parts:
        await compute_one(facts, compute, part)
    for part in parts:
        compute.count(part)
    compute.add(step, going)
    await compute.load_weights(coming)
    compute.clear(step)


async def compute_one(facts: RunFacts, compute: Compute, mb: Microbatch) -> None:
    spec, last = facts.spec, compute.stage == compute.stages - 1
    tokens = torch.randint(spec.vocab, (facts.config.train.microbatch, spec.context))
    inputs = tokens if compute.stage == 0 else torch.randn(*tokens.shape, spec.passed)
    if last:
        await compute.loss_backward(mb, inputs, tokens, accumulate=True)
        return
    await compute.forward(mb, inputs)
    await compute.backward(mb, torch.ones(*tokens.shape, spec.passed), accumulate=True)


def forget_peak() -> None:
    """The peak is now the present."""
    gc.collect()
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")


def resident(peak: bool = False) -> int:
    """This process's memory, or its peak since ``clear_refs`` [bytes]."""
    name = "VmHWM:" if peak else "VmRSS:"
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def peak_of(work: Callable[[], None]) -> int:
    """Most memory that ``work`` took, by the kernel's own mark, which no load of the machine makes miss a peak [bytes].
    Needs Linux."""
    forget_peak()
    before = resident()
    work()
    return resident(peak=True) - before


def measure(name: str, folder: Path) -> dict[str, int]:
    case = CASES[name]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    asyncio.run(serve(case, case.facts(folder, small=True)))
    facts = case.facts(folder)
    estimate = case.need(facts).total
    if isinstance(facts.spec, TracedModel):  # the first process on a machine traces, which takes more
        facts.spec._tables_in(precision_dtype(facts.config.compute.precision))
    _seen_apart.cache_clear()
    return {
        "estimate": estimate,
        "measured": peak_of(lambda: asyncio.run(serve(case, facts))),
        "params": facts.spec.stage_params(facts.cut, case.stage),
    }


def measured(name: str) -> dict[str, int]:
    """``measure`` in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.memory.run", name, folder],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed goes back at once
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
    else:
        RESULTS.write_text(json.dumps({name: measured(name) for name in CASES}, indent=1) + "\n")
