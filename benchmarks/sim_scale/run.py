"""How large a fleet can be simulated, and how fast? See README.md.

``python run.py [--quick]`` plays ever larger fleets at both fidelities, each in a process of its own, and writes
results.json."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.model.spec import ModelSpec
from muletrain.network.memory import MemoryNetwork
from muletrain.sim.fleet.simulation import simulate_fleet, weather
from muletrain.sim.setting import setting

if TYPE_CHECKING:
    from muletrain.sim.fleet.accounts import Outcome
    from muletrain.sim.fleet.simulation import Fidelity

HERE = Path(__file__).parent
FLEET = '[[machines]]\nname = "a"\ncount = {}\nforward_ms = 300\nbackward_ms = 700\n'
CHURN = "reliable = false\n[churn]\nleave_per_hour = 0.05\naway_min = 30\n"
MODEL = (
    "model.width=256",
    "model.heads=4",
    "model.context=512",
    "model.vocab=512",
    "train.microbatch=1",
    "checkpoint.every=0",
)
FLOW = (1_000, 10_000, 30_000)
FLOW_STAGES, FLOW_HOURS, FLOW_BATCH = 100, 32.0, 65_536
PROTOCOL = (32, 128, 512)
STAGES, PROTOCOL_S, EACH = 16, 150.0, 64
"""Of the protocol's fleets: stages, virtual seconds, microbatches of a step for each peer of a stage."""
GOAL_PEERS, GOAL_S = 1_000, 600.0
"""To be played in a minute."""
HOPS = ("forward", "backward", "done")
"""Kinds of frames: a microbatch's way to a stage and back."""


def played(text: str, fidelity: Fidelity, seconds: float, *overrides: str) -> tuple[Outcome, float]:
    """And the CPU time it took [s]."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.toml"
        file.write_text(text)
        fleet, config = load_fleet(file), load_config(None, [*MODEL, *overrides])
        scene = setting(fleet, config, ModelSpec.from_config(config.model))
        begin = time.process_time()
        outcome = simulate_fleet(
            scene, config, weather(fleet.churn, Path(folder)), hours=seconds / 3600, seed=0, fidelity=fidelity
        )
        return outcome, time.process_time() - begin


def counted() -> Counter[str]:
    """Messages that the peers of this process send from now on, by kind; answers to calls are not counted."""
    counts: Counter[str] = Counter()
    send, call = MemoryNetwork.send, MemoryNetwork.call

    @wraps(send)
    def sending(network: MemoryNetwork, peer: str, frame: Any, **options: Any) -> Any:
        counts[frame.kind] += 1
        return send(network, peer, frame, **options)

    @wraps(call)
    def calling(network: MemoryNetwork, peer: str, method: str, payload: bytes, **options: Any) -> Any:
        counts[method] += 1
        return call(network, peer, method, payload, **options)

    for name, wrapped in (("send", sending), ("call", calling)):
        setattr(MemoryNetwork, name, wrapped)
    return counts


def flow(peers: int) -> dict[str, Any]:
    stages = (f"fleet.stages={FLOW_STAGES}", f"model.layers={FLOW_STAGES}", f"train.batch={FLOW_BATCH}")
    outcome, cpu_s = played(FLEET.format(peers) + CHURN, "flow", FLOW_HOURS * 3600, *stages)
    events = sum(outcome.events.values())
    return {
        "peers": peers,
        "cpu_s": round(cpu_s, 1),
        "events": events,
        "ms_per_event": round(1e3 * cpu_s / events, 3),
        "mb": peak_mb(),
    }


def protocol(peers: int) -> dict[str, Any]:
    counts = counted()
    stages = (f"fleet.stages={STAGES}", f"model.layers={STAGES}", f"train.batch={EACH * peers // STAGES}")
    outcome, cpu_s = played(FLEET.format(peers), "protocol", PROTOCOL_S, *stages)
    messages, hops = counts.total(), sum(counts[kind] for kind in HOPS)
    return {
        "peers": peers,
        "cpu_s": round(cpu_s, 1),
        "messages": messages,
        "ms_per_message": round(1e3 * cpu_s / messages, 3),
        "messages_per_s": round(messages / cpu_s),
        "hops_per_s": round(hops / cpu_s),
        "steps": round(outcome.steps, 2),
        "goal_s": round(cpu_s * GOAL_PEERS / peers * GOAL_S / PROTOCOL_S),
        "mb": peak_mb(),
        "kinds": dict(counts.most_common()),
    }


def peak_mb() -> int:
    """Of this process' memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if platform.system() == "Linux" else 1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest fleets only")
    options = parser.parse_args()
    console, results = Console(), dict[str, list[dict[str, Any]]]()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:  # a fresh process each
        for play, sizes in ((flow, FLOW), (protocol, PROTOCOL)):
            rows = results[play.__name__] = []
            for peers in sizes[:1] if options.quick else sizes:
                rows.append(pool.submit(play, peers).result())
                console.print(f"{play.__name__}, {peers:,} peers: {rows[-1]['cpu_s']} s of CPU")
    for name, rows in results.items():
        shown = [key for key in rows[0] if key != "kinds"]
        table = Table(*shown, title=name)
        for row in rows:
            table.add_row(*(f"{row[key]:,}" for key in shown))
        console.print(table)
    if not options.quick:
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
