"""What does an adapter save, against training all weights, and how fast is it? See README.md. ``python -m
benchmarks.adapters.run [--only speed bytes]``; bytes needs root."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory.run import save_llama
from muletrain.compute.base import Microbatch
from muletrain.compute.estimate import Offer
from muletrain.config.load import load_config
from muletrain.config.schema import Precision
from muletrain.events import StepApplied
from muletrain.events.event import parse
from muletrain.runs.assemble import RunFacts, build_compute, resolve_start
from muletrain.runs.base import store_of
from muletrain.runs.measure.machine import Machine
from tests.chats import SMOLLM_3, chat_tokenizer, chats, write_rows
from tests.namespaces import Switch
from tests.test_survival import command

HERE = Path(__file__).parent
LAYERS, CONTEXT, SEQUENCES, RANK = 8, 256, 2, 16
ADAPTER = [f"adapter.rank={RANK}"]


def facts_of(base: Path, *settings: str) -> RunFacts:
    asked = [f"model.from={base}", f"model.context={CONTEXT}", "data.tokenizer=other", f"train.microbatch={SEQUENCES}"]
    asked += ["fleet.stages=1", "train.batch=8", "compute.precision=fp32", *settings]
    return RunFacts.of(resolve_start(load_config(None, asked)))


def stage_of(facts: RunFacts) -> Any:
    machine = Machine(torch.device("cpu"), Precision.FP32, Offer(64 << 30))
    store = store_of(facts.config, facts.spec, [Path(facts.config.model.from_ or "")])
    assert store is not None
    base = {n: t for part in range(facts.spec.layers + 2) for n, t in (store.part(part) or {}).items()}
    return build_compute(facts, 0, machine, None, base=base)


def plain_of(base: Path) -> Any:
    """The same by peft and transformers alone."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    )


async def speed(base: Path, pairs: int, passes: int) -> dict[str, Any]:
    """Tokens/s of one microbatch after the other, forward and backward, rounds in turn."""
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 8192, (SEQUENCES, CONTEXT + 1), generator=draws)
    stages = {"held in bf16": stage_of(facts_of(base, *ADAPTER))}
    stages["held in fp32"] = stage_of(facts_of(base, *ADAPTER, "adapter.base=fp32"))
    model = plain_of(base).train()
    found: dict[str, list[float]] = {name: [] for name in ("plain", *stages)}

    async def once(name: str) -> None:
        for k in range(passes):
            if name == "plain":
                loss = model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
                loss.backward()
            else:
                await stages[name].loss_backward(Microbatch(0, k), tokens[:, :-1], tokens[:, 1:], accumulate=True)
                await stages[name].gradient(0)

    for index in range(pairs + 1):
        for name in sorted(found, reverse=index % 2 == 1):
            begin = time.perf_counter()
            await once(name)
            if index:
                found[name].append(passes * SEQUENCES * CONTEXT / (time.perf_counter() - begin))
    for stage in stages.values():
        stage.close()
    return {
        "tokens_per_s": {name: statistics.median(rates) for name, rates in found.items()},
        "of plain": {
            name: statistics.median(a / b for a, b in zip(found[name], found["plain"], strict=True)) for name in stages
        },
    }


class Peer:
    """A command in a machine's namespace."""

    def __init__(
        self, switch: Switch, machine: str, folder: Path, *arguments: str, settings: list[str] | None = None
    ) -> None:
        folder.mkdir(parents=True)
        cache = f"XDG_CACHE_HOME={folder / 'cache'}"
        line = ["env", cache, *command(*arguments, "--json", settings=settings or [])]
        self._out = (folder / "out").open("w+")
        self._process = subprocess.Popen(
            [*switch.inside(machine), *line], cwd=folder, stdout=self._out, stderr=subprocess.STDOUT
        )

    def said(self) -> list[dict[str, Any]]:
        text = Path(self._out.name).read_text(errors="replace")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]

    def wait_for(self, kind: str, seconds: float = 300.0, **fields: Any) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for event in self.said():
                if event["kind"] == kind and all(event.get(name) == value for name, value in fields.items()):
                    return event
            assert self._process.poll() is None, Path(self._out.name).read_text()
            time.sleep(0.02)
        raise TimeoutError(kind)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def moved(base: Path, data: Path, folder: Path, settings: list[str], *owner: str) -> dict[str, float]:
    """Bytes averaged in a step by a peer, and what the kernel counts for a newcomer of stage 1 until it serves. ``owner``:
    arguments of a newcomer that has the model."""
    run = [f"model.from={base}", f"data.path={data}", f"model.context={CONTEXT}", "train.steps=100000", "fleet.peers=3"]
    run += [
        "train.batch=8",
        "train.microbatch=2",
        "checkpoint.every=0",
        "fleet.rebalance=off",
        "compute.precision=fp32",
    ]
    peers: list[Peer] = []
    with Switch(("a", "b", "c", "d"), prefix="ad") as switch:
        try:
            peers.append(
                founder := Peer(switch, "a", folder / "a", "start", "--listen", "0.0.0.0", settings=run + settings)
            )
            ticket = founder.wait_for("ticket")["ticket"]
            options = ["--listen", "0.0.0.0", "--threads", "1"]
            for machine in "bc":
                stage = ["--stage", "1", "--name", machine]
                peers.append(Peer(switch, machine, folder / machine, "join", ticket, *options, *stage, *owner))
            founder.wait_for("step_done", step=3)
            peers.append(
                newcomer := Peer(
                    switch, "d", folder / "d", "join", ticket, *options, "--stage", "1", "--name", "d", *owner
                )
            )
            applied = newcomer.wait_for("step_applied")
            received = switch.traffic()["d"].received
            steps = [parse(json.dumps(e)) for e in peers[1].said() if e["kind"] == "step_applied"]
        finally:
            for peer in peers:
                peer.end()
    averaged = [
        sum(kinds.get("averaging", 0) for kinds in e.sent.values()) for e in steps if isinstance(e, StepApplied)
    ]
    return {"averaged": statistics.median(averaged[1:]), "newcomer": received, "step": applied["step"]}


def bytes_of(base: Path, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    data = write_rows(folder / "chat.jsonl", chats(400))
    return {
        "adapter": moved(base, data, folder / "1", ADAPTER),
        "adapter, newcomers have the model": moved(base, data, folder / "2", ADAPTER, "--model", str(base)),
        "all weights": moved(base, data, folder / "3", []),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=("speed", "bytes"), default=("speed", "bytes"))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    out = HERE / "results.json"
    results = json.loads(out.read_text()) if out.exists() else {}
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as name:
        base = save_llama(Path(name) / "base", layers=LAYERS)
        chat_tokenizer(base, SMOLLM_3, 8192)
        spec = facts_of(base, *ADAPTER).spec
        cut = spec.cut(2)
        results |= {"params": spec.cut_params(cut), "adapter": sum(spec.trained_params(cut, s) for s in range(2))}
        results["stage 1"] = {"adapter": spec.trained_params(cut, 1), "base": spec.base_bytes(cut, 1)}
        whole = facts_of(base).spec
        results["all"] = whole.stage_params(whole.cut(2), 1)
        if "speed" in given.only:
            results["speed"] = asyncio.run(speed(base, given.pairs, 4))
        if "bytes" in given.only:
            results["bytes"] = bytes_of(base, Path(name) / "runs")
    print(json.dumps(results, indent=1))
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=HERE.parents[1], check=True)
