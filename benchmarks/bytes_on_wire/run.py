"""How many bytes cross the network, by our count and by the kernel's? See README.md. ``python run.py`` as root (network namespaces)."""

from __future__ import annotations

import json
import os
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
PREFIX = f"mulebytes{os.getpid() % 10000}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def machine(k: int) -> str:
    return f"{PREFIX}-{k}"


def build() -> None:
    """One namespace a peer, joined by a bridge in a namespace of its own."""
    ip("netns", "add", PREFIX)
    ip("-n", PREFIX, "link", "add", "name", "switch0", "type", "bridge")
    ip("-n", PREFIX, "link", "set", "switch0", "up")
    for k in range(PEERS):
        ip("netns", "add", machine(k))
        ip("-n", machine(k), "link", "set", "lo", "up")
        ip("link", "add", "wire", "netns", machine(k), "type", "veth", "peer", "name", f"p{k}", "netns", PREFIX)
        ip("-n", PREFIX, "link", "set", f"p{k}", "master", "switch0", "up")
        ip("-n", machine(k), "addr", "add", f"10.88.0.{k + 1}/24", "dev", "wire")
        ip("-n", machine(k), "link", "set", "wire", "up")


def sent_bytes(k: int) -> int:
    shown = subprocess.run(
        ["ip", "netns", "exec", machine(k), "cat", "/sys/class/net/wire/statistics/tx_bytes"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(shown.stdout)


def main() -> None:
    config = load_config(None, CONFIG)
    facts = RunFacts.of(config)
    TokenCache.build(config.data, facts.spec.vocab)
    first: dict[int, int] = {}
    last: dict[int, int] = {}

    def watch(fleet: object, event: object) -> None:
        if isinstance(event, StepDone) and event.step in (1, STEPS):
            (first if event.step == 1 else last).update({k: sent_bytes(k) for k in range(PEERS)})

    try:
        build()
        with tempfile.TemporaryDirectory() as folder:
            events = run_fleet(
                config,
                Path(folder),
                stages=(0, 0, 1, 1),
                watch=watch,
                wrap=lambda name: ["ip", "netns", "exec", machine(int(name[-1]))],
            )
    finally:
        for name in (PREFIX, *(machine(k) for k in range(PEERS))):
            subprocess.run(["ip", "netns", "del", name], check=False)
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
