"""Processes of ``muletrain`` that share one card: a peer, a pipeline of two stages with two peers each, or a hub with two
servers and two clients. ``python -m benchmarks.gpu.fleets pipeline --size small``.

The processes are killed after the last step that counts: a checkpoint of the model would follow."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.gpu.cases import SIZES, Found, parser, tell
from benchmarks.swap.gpu import Case
from muletrain.compute.probe import free_memory
from muletrain.config.load import load_config
from muletrain.events import Event, StepDone
from muletrain.runs.fleet import LocalFleet, threads_per_peer
from tests.fleet_run import run_fleet

KINDS = {
    "one": ("fleet.stages=1", "fleet.peers=1"),
    "pipeline": ("fleet.stages=2", "fleet.peers=4"),
    "hub": ("fleet.stages=2", "fleet.peers=2", "hub.clients=2", "fleet.trainers=1"),
}
WARM = 2
"""First steps that do not count: peers do not know each other's speed yet."""


class Enough(Exception):
    """The steps that count are done."""


def overrides(case: Case, kind: str, batches: int) -> list[str]:
    """The run's settings, with ``batches`` times the loop's step in a step."""
    model = case.row.model
    names = ("layers", "width", "heads", "vocab", "context", "dropout")
    return [
        *KINDS[kind],
        *(f"model.{name}={getattr(model, name)}" for name in names),
        f"train.microbatch={case.row.sequences}",
        f"train.batch={batches * case.row.step // case.spec.context}",
        "train.steps=1000",
        f"compute.device={case.device}",
        f"compute.precision={case.setup.precision.value}",
        "checkpoint.every=0",
    ]


def measured(case: Case, kind: str, steps: int, timeout_s: float, batches: int) -> Found:
    """Tokens/s of the steps after the first two."""
    config, done = load_config(None, overrides(case, kind, batches)), dict[int, StepDone]()
    count = config.fleet.local_peers + (config.hub.clients or 0)
    host = free_memory(torch.device("cpu")) // count

    def watch(fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, StepDone):
            done.setdefault(event.step, event)
            print(f"step {event.step}: loss {event.loss:.3f}, {event.duration_s:.2f} s", flush=True)
            if len(done) == WARM + steps:
                raise Enough

    def each(name: str) -> dict[str, object]:
        return {"sharing": count, "host_memory": host}

    with tempfile.TemporaryDirectory() as folder, suppress(Enough):
        threads = threads_per_peer(None, count)
        run_fleet(config, Path(folder), threads=threads, timeout_s=timeout_s, watch=watch, each=each)
    ends = sorted(event.t for event in done.values())
    step_s = (ends[-1] - ends[WARM - 1]) / steps
    tokens = config.train.batch * case.spec.context
    return {
        "tokens_per_s": tokens / step_s,
        "step_s": step_s,
        "steps": steps,
        "processes": count,
        "step_tokens": tokens,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("kind", choices=list(KINDS))
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--batches", type=int, default=2, help="the loop's steps in one step of the fleet")
    options.add_argument("--timeout", type=float, default=110.0)
    given = options.parse_args()
    case = Case(SIZES[given.size], torch.device(given.device))
    tell(case, measured(case, given.kind, given.steps, given.timeout, given.batches))


if __name__ == "__main__":
    main()
