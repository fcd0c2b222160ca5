"""Are virtual links like real ones? The same fleet of six between namespaces and in the virtual world, at six rates and
depths of queue. See README.md. ``python check.py [--link 20x1] [--keep FOLDER]`` as root."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from muletrain.config.fleet_file import Fleet, load_fleet
from muletrain.events import Event, StepDone
from muletrain.model.spec import ModelSpec
from muletrain.sim.fleet.flow import HOUR_S, Weather
from muletrain.sim.fleet.protocol import Actors
from muletrain.sim.fleet.rates import TRAINERS
from muletrain.sim.setting import setting

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
from run import CASES, Case, Window, longest, median, play, windows  # noqa: E402
from timed import Call, TimedNetwork, call_in_turn  # noqa: E402

BAR = 0.15
STEPS = 4
LINKS = {
    f"{mbps}x{depth_s}": (float(mbps), float(depth_s))
    for mbps, depth_s in ((10, 2), (15, 0.25), (20, 1), (30, 0.5), (50, 0.5), (100, 0.25))
}
"""Mb/s in both directions, and seconds of queue."""


class TimedActors(Actors):
    """Virtual peers that time their calls as the real ones do (``peer.py``)."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.timed: defaultdict[str, list[Call]] = defaultdict(list)
        self._calling: list[asyncio.Task[None]] = []

    def arrive(self, name: str) -> Any:
        network = TimedNetwork(super().arrive(name), self.clock.now, self.timed[name].append)
        others = self._rosters[name].others
        self._calling.append(asyncio.create_task(call_in_turn(network, self.clock, others)))
        return network

    async def _run(self) -> Any:
        try:
            return await super()._run()
        finally:
            for task in self._calling:
                task.cancel()
            await asyncio.gather(*self._calling, return_exceptions=True)


def virtual(case: Case, folder: Path, hours: float) -> tuple[list[Window], dict[str, list[Call]], list[float]]:
    """What the virtual fleet did: when it averaged, its calls, and its steps' lengths [s]."""
    config = case.config(folder)
    machine = f'[[machines]]\nname = "home"\ncount = {case.peers}\nup_mbps = {case.up}\ndown_mbps = {case.down}\n'
    queue = f"queue_s = {case.queue_s}\n" if "queue_s" in _machine_fields() else ""
    pacing = f"[pacing]\nforward_ms = {case.forward_ms}\nbackward_ms = {2 * case.forward_ms}\n"
    (folder / "virtual.toml").write_text(machine + queue + pacing)
    scene = setting(load_fleet(folder / "virtual.toml"), config, ModelSpec.from_config(config.model))
    events: list[Event] = []
    actors = TimedActors(
        scene,
        config,
        Weather(),
        HOUR_S * hours,
        trainers=config.fleet.trainers or TRAINERS,
        seed=0,
        watch=events.append,
    )
    actors.play()
    ends = {e.step: e.t for e in events if isinstance(e, StepDone) and e.step <= case.steps + 1}
    return windows(events, case.steps), actors.timed, [ends[s] - ends[s - 1] for s in sorted(ends) if s - 1 in ends]


def _machine_fields() -> set[str]:
    return set(Fleet.model_fields["machines"].annotation.__args__[0].model_fields)  # type: ignore[union-attr]


def compared(name: str, folder: Path) -> dict[str, Any]:
    rate, queue_s = LINKS[name]
    case = replace(CASES["home"], title=name, up=rate, down=rate, queue_s=queue_s, steps=STEPS)
    real = play(case, folder)
    seconds = sum(real["steps_s"]) / len(real["steps_s"]) if real["steps_s"] else 60.0
    averagings, timed, steps = virtual(case, folder, 2 * (STEPS + 2) * seconds / HOUR_S)
    calls = longest(timed, averagings, None)
    found = {
        "averaging_s": (median(real["averaging_s"]), median([w.seconds for w in averagings])),
        "longest_call_s": (real["calls"]["longest_s"], calls["longest_s"]),
        "p99_call_s": (real["calls"]["p99_s"], calls["p99_s"]),
        "median_call_s": (real["calls"]["median_s"], calls["median_s"]),
        "step_s": (median(real["steps_s"]), median(steps)),
    }
    off = {key: there / here - 1 if here else 0.0 for key, (here, there) in found.items()}
    return {"real": real, "measured": found, "off": off}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link", action="append", choices=list(LINKS), help="default: all")
    parser.add_argument("--keep", type=Path, help="folder for the runs' events")
    options = parser.parse_args()
    path = HERE / "check.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in options.link or LINKS:
        with tempfile.TemporaryDirectory(prefix="mule-") as scratch:
            folder = Path(scratch) if options.keep is None else options.keep.resolve() / name
            folder.mkdir(parents=True, exist_ok=True)
            results[name] = compared(name, folder)
        path.write_text(json.dumps(results, indent=1) + "\n")
    console = Console(width=160)
    console.print(
        "| Mb/s, queue | averaging, real and virtual | off by | longest call | off by | 99 % of calls | step |"
    )
    for name, r in results.items():
        m, off = r["measured"], r["off"]
        averaging, call, p99, step = (
            f"{m[key][0]:.2f} s, {m[key][1]:.2f} s" for key in ("averaging_s", "longest_call_s", "p99_call_s", "step_s")
        )
        apart = [f"{off[key]:+.0%}" for key in ("averaging_s", "longest_call_s")]
        cells = (f"{name.replace('x', ', ')} s", averaging, apart[0], call, apart[1], p99, step)
        console.print("| " + " | ".join(cells) + " |")
    worst = max(abs(r["off"][key]) for r in results.values() for key in ("averaging_s", "longest_call_s"))
    console.print(f"off by {worst:.0%} at most (bar: {BAR:.0%})")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
