"""Made-up events of large or long runs: what a page gets from such a run, without the run."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import TYPE_CHECKING, Any

from muletrain import events as ev

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

BEGIN_S = 1_780_000_000.0
"""Wall time of the first event [s]."""
DEVICES = ("RTX 4090", "RTX 3060", "T4", "M2 Max", "L4")
REGIONS = ("frankfurt", "virginia", "tokyo")


def played(
    peers: int = 8,
    stages: int = 4,
    steps: int = 40,
    *,
    step_s: float = 10.0,
    planned: int = 0,
    losses: int = 0,
    microbatches: int = 64,
    checkpoint: int = 50,
    seed: int = 0,
) -> Iterator[ev.Event]:
    """A run of ``steps`` of ``planned`` (default: as many), in which ``losses`` peers fall silent, and come back later."""
    draw, t = random.Random(seed), BEGIN_S
    names = [f"{REGIONS[k % 3]}-{k}" for k in range(peers)]
    stage_of = {name: k % stages for k, name in enumerate(names)}
    power = {name: draw.uniform(0.4, 1.6) for name in names}
    about = {"run_id": "played", "config_digest": "", "versions": {}, "params": 1_300_000_000}
    sizes = {"steps": planned or steps, "stages": stages, "peers": peers, "microbatches": microbatches}
    yield ev.RunStarted(t=t, peer=names[0], tokens_per_step=microbatches * 2048, **about, **sizes)  # type: ignore[arg-type]
    for name in names:
        t += 1.0 / peers
        yield _joined(name, stage_of[name], t)
    lost, silent = sorted(draw.sample(range(1, steps), losses)), dict[str, int]()
    for step in range(1, steps + 1):
        t += step_s
        if step in lost:
            name = draw.choice([name for name in names if name not in silent])
            silent[name] = step
            yield ev.PeerDown(t=t - 1, peer=names[0], peer_id=f"id-{name}", name=name, reason="no answer within 4 s")
        for name, since in list(silent.items()):
            if step - since > min(60, max(4, steps // 6)):
                del silent[name]
                yield _joined(name, stage_of[name], t - 1)
        present = [name for name in names if name not in silent]
        total = {s: sum(power[n] for n in present if stage_of[n] == s) or 1.0 for s in range(stages)}
        for name in present:
            share = power[name] / total[stage_of[name]]
            yield _applied(name, stage_of[name], step, t, share * microbatches, step_s, present, stage_of, draw)
        loss = 3.2 + 6.5 * math.exp(-step / (0.2 * steps)) + draw.gauss(0, 0.06)
        slow = 1.0 + 0.25 * (len(silent) / max(1, peers / 10))
        yield ev.StepDone(
            t=t,
            peer=names[0],
            step=step,
            loss=loss,
            grad_norm=1.0,
            lr=3e-4,
            tokens=microbatches * 2048,
            duration_s=step_s * slow * draw.uniform(0.95, 1.05),
            lineage=f"{step:08x}",
        )
        if step % checkpoint == 0:
            path = f"runs/played/checkpoints/step-{step:08d}"
            yield ev.CheckpointWritten(t=t, peer=names[0], step=step, path=path, bytes=15_600_000_000, seconds=31.0)
            yield ev.Validated(t=t, peer=names[0], step=step, loss=loss + 0.1, perplexity=math.exp(loss), tokens=65536)


def prepared(t: float, **changes: Any) -> ev.RunPrepared:
    """The first event of a command."""
    text: dict[str, Any] = {"data": "pydoc", "documents": {}, "changes": [], "unit": "tokens", "train": 1, "heldout": 1}
    sizes: dict[str, Any] = {"steps": 12, "first_step": 0, "taken": 1, "epochs": 1.0, "model": "m", "start": "seed 0"}
    how: dict[str, Any] = {"params": 1, "trained_params": 1, "batch": 64, "microbatch": 1, "context": 2048}
    how |= {"optimizer": "adamw", "lr": 3e-4, "warmup": 1, "schedule": "cosine", "final_lr": 0.1, "precision": "fp32"}
    place: dict[str, Any] = {"strategy": "swarm", "stages": 1, "peers": 2, "devices": ["cpu"]}
    return ev.RunPrepared(t=t, peer="summary", **{**text, **sizes, **how, **place, **changes})


def _joined(name: str, stage: int, t: float) -> ev.PeerJoined:
    return ev.PeerJoined(
        t=t,
        peer=name,
        peer_id=f"id-{name}",
        name=name,
        stage=stage,
        device="cuda:0",
        precision="bf16",
        trainer=stage == 0,
        params=81_250_000,
        threads=8,
        chip=DEVICES[sum(map(ord, name)) % len(DEVICES)],
        memory=2_100_000_000,
    )


def _applied(
    name: str,
    stage: int,
    step: int,
    t: float,
    microbatches: float,
    step_s: float,
    present: list[str],
    stage_of: dict[str, int],
    draw: random.Random,
) -> ev.StepApplied:
    busy = draw.uniform(0.5, 0.93) * step_s
    to = [other for other in (draw.choice(present) for _ in range(3)) if stage_of[other] == stage + 1]
    mates = [other for other in (draw.choice(present),) if stage_of[other] == stage and other != name]
    sent: dict[str, dict[ev.TrafficClass, int]] = {f"id-{n}": {"activation": 4_200_000, "control": 9000} for n in to}
    sent |= {f"id-{n}": {"averaging": 40_600_000} for n in mates}
    return ev.StepApplied(
        t=t,
        peer=name,
        step=step,
        stage=stage,
        lineage=f"{step:08x}",
        skipped=False,
        microbatches=round(microbatches),
        recomputed=int(draw.random() < 0.01),
        forward_s=0.28 * busy,
        backward_s=0.52 * busy,
        averaging_s=0.15 * busy,
        apply_s=0.05 * busy,
        wait_s=step_s - busy,
        sent=sent,
    )


def written(events: Iterable[ev.Event], folder: Path) -> Path:
    """Write the events as the files of a run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {}
    for event in events:
        fields = {"kind": event.kind, **vars(event)}  # as ``to_json``, for numbers that are finite
        lines.setdefault(event.peer, []).append(event.to_json() if _odd(event) else json.dumps(fields))
    for peer, text in lines.items():
        (folder / f"{peer}.jsonl").write_text("\n".join(text) + "\n", encoding="utf-8")
    (folder / "config.toml").write_text("[train]\nsteps = 1\n", encoding="utf-8")
    return folder


def _odd(event: ev.Event) -> bool:
    return any(isinstance(value, float) and not math.isfinite(value) for value in vars(event).values())


def later(events: Iterable[ev.Event], seconds: float) -> Iterator[ev.Event]:
    """The same events, ``seconds`` later."""
    return (dataclasses.replace(event, t=event.t + seconds) for event in events)
