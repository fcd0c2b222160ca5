"""How many bytes cross the network, by our count and by the kernel's? See README.md. ``python run.py`` as root (network
namespaces)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from muletrain.config.load import load_config
from muletrain.data.tokens import TokenCache
from muletrain.events import PeerJoined, StepApplied, StepDone
from muletrain.runs.assemble import RunFacts

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.fleet_run import run_fleet  # noqa: E402
from tests.namespaces import Switch  # noqa: E402

PEERS, STEPS = 4, 20
CONFIG = [
    "model.width=256",
    "model.heads=8",
    "model.layers=2",
    "model.vocab=512",
    "train.batch=32",
    "train.microbatch=4",
    f"train.steps={STEPS}",
    "network.listen=0.0.0.0",
]


def main() -> None:
    config = load_config(None, CONFIG)
    facts = RunFacts.of(config)
    TokenCache.build(config.data, facts.spec.vocab)
    first: dict[str, int] = {}
    last: dict[str, int] = {}

    def watch(fleet: object, event: object) -> None:
        if isinstance(event, StepDone) and event.step in (1, STEPS):
            (first if event.step == 1 else last).update({m: t.sent for m, t in switch.traffic().items()})

    with Switch([f"peer-{k}" for k in range(PEERS)]) as switch, tempfile.TemporaryDirectory() as folder:
        events = run_fleet(config, Path(folder), stages=(0, 0, 1, 1), watch=watch, wrap=switch.inside)
    report(
        [e for e in events if isinstance(e, StepApplied) and e.step > 1],
        events,
        facts,
        sum(last.values()) - sum(first.values()),
    )


def report(applied: list[StepApplied], events: list[object], facts: RunFacts, kernel: int) -> None:
    classes: Counter[str] = Counter()
    averaging: Counter[str] = Counter()
    trainer_tokens = 0
    stage_of = {e.peer_id: e.stage for e in events if isinstance(e, PeerJoined)}
    for e in applied:
        for receiver, counts in e.sent.items():
            classes.update(counts)
            averaging[e.peer] += counts.get("averaging", 0)
            if stage_of[receiver] == 0:  # tokens, from a trainer
                trainer_tokens += counts.get("activation", 0)
    steps = STEPS - 1
    elements = steps * facts.config.train.batch * facts.spec.context * facts.spec.width
    gradient_bytes = {s: 2 * facts.spec.stage_params(facts.cut, s) * steps for s in (0, 1)}
    stage = {e.peer: e.stage for e in applied}
    rows = {
        "activation bytes per element": ((classes["activation"] - trainer_tokens) / elements, 1.1),
        "gradient bytes per element": (classes["gradient"] / elements, 1.1),
        "averaging per peer over 2(n-1)/n x its stage's gradient": (
            max(averaging[p] / gradient_bytes[stage[p]] for p in averaging),
            1.1,
        ),
        "kernel's count (veth) over ours": (kernel / sum(classes.values()), 1.15),
    }
    table = Table(
        "what", "measured", "at most", title=f"2 stages x 2 peers, int8 activations, fp16 averaging, {steps} steps"
    )
    for what, (measured, bound) in rows.items():
        table.add_row(what, f"{measured:.4f}", str(bound))
    Console().print(table)
    result = {"rows": {k: v[0] for k, v in rows.items()}, "ours": dict(classes), "kernel": kernel}
    (HERE / "results.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
