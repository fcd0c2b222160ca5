"""How many messages does a step take, and how do they grow with the fleet? See README.md.

``python run.py [--peers 64 256] [--events steady freeze]`` plays fleets of the production code, each in a process of its own, and writes
results.json."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.events import StepDone
from muletrain.model.spec import ModelSpec
from muletrain.network.memory import MemoryNetwork
from muletrain.sim.fleet.protocol import Actors
from muletrain.sim.fleet.simulation import weather
from muletrain.sim.setting import setting
from proofs.injection import kind_of

if TYPE_CHECKING:
    from muletrain.events import Event

HERE = Path(__file__).parent
FLEET = '[[machines]]\nname = "a"\ncount = {}\nforward_ms = 300\nbackward_ms = 700\n'
MODEL = ("model.width=256", "model.heads=4", "model.context=512", "model.vocab=512", "train.microbatch=1")
STAGES, EACH = 16, 8
"""Stages, and microbatches of a step for each peer of a stage."""
BEFORE, COUNTED = 2, 2
"""Steps before anything is counted, and steps counted: an event happens as the first of these begins."""
EVENTS = ("steady", "freeze", "death of a speaker", "join")
FROZEN_S = 60.0
SHARDS = ("shard", "reduced")
"""Kinds of frames that carry gradients within a stage: each member to each other one."""
HOPS = ("forward", "backward", "done")


class Fleet(Actors):
    """A fleet of the production code that counts messages, and to which one event happens."""

    def __init__(self, *args: Any, event: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._event, self._steps, self._armed = event, 0, False
        self.messages: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()
        self.seconds = 0.0
        self._since = 0.0

    def note(self, name: str, event: Event) -> None:
        super().note(name, event)
        if isinstance(event, StepDone) and event.step > self._steps:
            self._steps = event.step
            if event.step == BEFORE:
                self._begin_counting()
            if event.step == BEFORE + COUNTED:
                self.seconds = self.clock.now() - self._since
                self._over.set()

    @property
    def counts(self) -> bool:
        return BEFORE <= self._steps < BEFORE + COUNTED

    def _begin_counting(self) -> None:
        self._since = self.clock.now()
        free = [p for p, r in self._rosters.items() if not r.own.trainer and r.own.stage == 1]
        if self._event == "freeze":
            self.freeze(free[0], suspended=False)
        elif self._event == "join":
            self.come(0)
        self._armed = self._event == "death of a speaker"

    def sends(self, sender: str, kind: str) -> None:
        """``sender`` is about to send a message."""
        if self._armed and kind == "entries" and not self._rosters[sender].own.trainer:
            self._armed = False
            self.kill(sender)
        if self.counts:
            self.messages[kind] += 1


def played(peers: int, event: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.toml"
        file.write_text(FLEET.format(peers))
        overrides = (f"fleet.stages={STAGES}", f"model.layers={STAGES}", f"train.batch={EACH * peers // STAGES}")
        fleet, config = load_fleet(file), load_config(None, [*MODEL, *overrides, "checkpoint.every=0"])
        scene = setting(fleet, config, ModelSpec.from_config(config.model))
        actors = Fleet(scene, config, weather(fleet.churn, Path(folder)), math.inf, trainers=2, seed=0, event=event)
        begin = time.process_time()
        send, call = MemoryNetwork.send, MemoryNetwork.call

        async def sending(network: MemoryNetwork, peer: str, frame: Any, **options: Any) -> int:
            actors.sends(network.peer_id, kind := kind_of(frame))
            sent = await send(network, peer, frame, **options)
            if actors.counts:
                actors.sent_bytes[kind] += sent
            return sent

        async def calling(network: MemoryNetwork, peer: str, method: str, payload: bytes, **options: Any) -> bytes:
            actors.sends(network.peer_id, method)
            answer = await call(network, peer, method, payload, **options)
            if actors.counts:
                actors.sent_bytes[method] += len(payload) + len(answer)
            return answer

        MemoryNetwork.send, MemoryNetwork.call = sending, calling  # type: ignore[method-assign]
        try:
            actors.play()
        finally:
            MemoryNetwork.send, MemoryNetwork.call = send, call  # type: ignore[method-assign]
    each = peers * COUNTED
    agreed = {k: n for k, n in actors.messages.items() if k not in SHARDS and k not in HOPS}
    return {
        "peers": peers,
        "event": event,
        "messages": round(sum(agreed.values()) / each, 1),
        "bytes": round(sum(actors.sent_bytes[k] for k in agreed) / each),
        "hops": round(sum(actors.messages[k] for k in HOPS) / each, 1),
        "shards": round(sum(actors.messages[k] for k in SHARDS) / each, 1),
        "step_s": round(actors.seconds / COUNTED, 1),
        "cpu_s": round(time.process_time() - begin, 1),
        "kinds": {k: round(n / each, 2) for k, n in actors.messages.most_common()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[16, 64, 256, 1000])
    parser.add_argument("--events", nargs="+", choices=EVENTS, default=EVENTS[:1])
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    console, rows = Console(), list[dict[str, Any]]()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:  # a fresh process each
        for peers in options.peers:
            for event in options.events if peers > STAGES else EVENTS[:1]:
                rows.append(pool.submit(played, peers, event).result())
                shown = {k: v for k, v in rows[-1].items() if k != "kinds"}
                console.print(shown)
    options.out.write_text(json.dumps({"plays": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
