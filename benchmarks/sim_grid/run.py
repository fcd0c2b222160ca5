"""Fleets without faults, drawn by seed: every message of the production code, against rates, against what ``plan``
predicts. See README.md.

python benchmarks/sim_grid/run.py --keep FOLDER                  # seeds 0 to 39, and writes results.json
python benchmarks/sim_grid/run.py --keep FOLDER --seeds 100-139  # fresh ones, fresh.json
python benchmarks/sim_grid/run.py --predict                      # bound, rates and plan alone
What was played is kept in FOLDER and not played again."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from muletrain.config.schema import RunConfig
from muletrain.errors import MuletrainError
from muletrain.events import MicrobatchRerouted, PeerDown, StepApplied, StepDone
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.pace import Pace
from muletrain.sim.fleet.rates import TRAINERS
from muletrain.sim.fleet.simulation import simulate_fleet
from muletrain.sim.setting import Setting, seated
from muletrain.sim.steps.steps import cast, play

sys.path.insert(0, str(Path(__file__).parent))
from draw import bound_s, drawn
from tables import fleets, off

if TYPE_CHECKING:
    from muletrain.events import Event

HERE = Path(__file__).parent
TABLES = {"0-39": "results.json", "100-139": "fresh.json"}
LEAST_STEPS, LEAST_MICROBATCHES = 5, 640
"""Each fleet plays at least so many steps, and counts at least so many microbatches. The first step does not count,
because nobody has measured anything yet; with delayed updates the second does not count either, because it runs while
the first is averaged. Which trainer injects a microbatch is random, so short steps vary, and we play more of them."""
PATIENCE, BEGIN_S = 3.0, 300.0
"""A play is cut off after this many times its predicted duration, and so long for the first step [s], in which slow
machines get as much work as fast ones."""
NEAR = 0.15


@dataclass
class Seen:
    """Events of one play, counted."""

    first: int
    """Steps that do not count; ``steps`` after them do."""
    steps: int
    ends_s: list[float] = field(default_factory=list)
    repeated: int = 0
    suspected: Counter[str] = field(default_factory=Counter)
    rerouted: Counter[str] = field(default_factory=Counter)

    def watch(self, event: Event) -> None:
        match event:
            case _ if self.whole:  # the world is taken down, one peer after the other
                pass
            case StepDone() if len(self.ends_s) < event.step:
                self.ends_s.append(event.t)
            case StepApplied():
                self.repeated += event.recomputed
            case PeerDown():
                self.suspected[_kind(event.reason)] += 1
            case MicrobatchRerouted():
                self.rerouted[_kind(event.reason.split(": ", 1)[-1])] += 1

    @property
    def whole(self) -> bool:
        return len(self.ends_s) >= self.first + self.steps

    @property
    def step_s(self) -> float:
        """Mean duration of the steps that count [s]; infinite if none of them ended."""
        ends_s = self.ends_s[self.first - 1 : self.first + self.steps]
        return (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) if len(ends_s) > 1 else math.inf


def _kind(reason: str) -> str:
    """Without numbers, and without the names that it begins with."""
    return re.sub(r"^(N(-N)*: )+", "", re.sub(r"[\w.]*\d[\w.]*", "N", reason))[:120]


def compared(seed: int, limit_s: float = math.inf, *, only_predict: bool = False) -> dict[str, Any]:
    """Play one fleet, and compare the speeds [tokens/s]. ``limit_s``: CPU time. ``failed`` says why a play ended
    early."""
    begin_s = time.process_time()
    found = drawn(seed)
    scene, config = found.setting()
    serving, delayed = seated(scene), config.optimizer.delayed
    cost, trainers = scene.cost, config.fleet.trainers or TRAINERS
    times_s = {
        "bound": bound_s(scene, serving, delayed=delayed),
        "rates": cost.microbatches / Pace(scene, trainers=trainers, delayed=delayed).of(serving).throughput,
        "plan": play(scene, cast(scene, serving, trainers), delayed=delayed).step_s,
    }
    first = 1 + delayed
    seen = Seen(first, max(LEAST_STEPS - first, math.ceil(LEAST_MICROBATCHES / cost.microbatches)))
    failed, played_s = "", 0.0
    if not only_predict:
        horizon_s = BEGIN_S + PATIENCE * (seen.first + seen.steps) * max(times_s["rates"], times_s["plan"])
        failed, played_s = _played(scene, config, seen, horizon_s, begin_s + limit_s)
    times_s["protocol"] = seen.step_s
    return {
        "seed": seed,
        **_described(scene, config, found.fleet),
        "stages": [sum(here) for here in serving],
        **{f"{name}_s": None if math.isinf(s) else round(s, 3) for name, s in times_s.items()},
        **{name: round(cost.microbatches * cost.tokens / s, 1) for name, s in times_s.items()},
        "steps": len(seen.ends_s),
        "played_s": round(played_s, 1),
        "ends_s": [round(s, 2) for s in seen.ends_s],
        "repeated": seen.repeated,
        "suspected": seen.suspected.total(),
        "rerouted": seen.rerouted.total(),
        "reasons": dict(seen.suspected + seen.rerouted),
        "failed": failed,
        "cpu_s": round(time.process_time() - begin_s, 1),
    }


def _played(scene: Setting, config: RunConfig, seen: Seen, horizon_s: float, until_s: float) -> tuple[str, float]:
    """Returns what went wrong (empty: nothing) and the virtual duration [s]. The play ends at ``until_s`` of this
    process' CPU time."""

    def goes_on(now_s: float, steps: float) -> bool:
        return not seen.whole and time.process_time() < until_s

    try:
        outcome = simulate_fleet(
            scene, config, Weather(), hours=horizon_s / 3600, fidelity="protocol", watch=seen.watch, goes_on=goes_on
        )
    except MuletrainError as e:
        return str(e), 0.0
    problems = [outcome.failure] if outcome.failure else []
    problems += [f"{n} x {what}" for what, n in outcome.events.items()]
    if not seen.whole:
        within = "the CPU time that a fleet has" if outcome.partial else f"{horizon_s:.0f} s"
        problems.append(f"{len(seen.ends_s)} of {seen.first + seen.steps} steps in {within}")
    return "; ".join(problems), 3600 * outcome.hours


def _described(scene: Setting, config: RunConfig, fleet: str) -> dict[str, str]:
    """In words."""

    def of(name: str) -> str:
        return "/".join(dict.fromkeys(re.findall(rf"^{name} = (\S+)", fleet, re.MULTILINE)))

    return {
        "machines": ", ".join(f"{kind.count} {kind.device}" for kind in scene.kinds),
        "run": f"{config.model.preset}, {len(scene.cut)} stages, {config.microbatches} x {config.train.microbatch}"
        + (", delayed" if config.optimizer.delayed else ""),
        "links": f"up {of('up_mbps')}, down {of('down_mbps')} Mb/s; {'/'.join(dict.fromkeys([of('local_rtt_ms'), of('rtt_ms')]))} ms; "
        f"{of('queue_s') or 0} s",
    }


def summed_up(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def clean(row: dict[str, Any]) -> bool:
        return not (row["repeated"] or row["rerouted"] or row["suspected"] or row["failed"])

    return {
        "fleets": len(rows),
        "came to the end of all steps": sum(not row["failed"] for row in rows),
        **{
            f"within 15 % of {name}": sum(not row["failed"] and abs(off(row, name)) <= NEAR for row in rows)
            for name in ("rates", "plan")
        },
        **{
            f"farthest from {name}": round(max((off(row, name) for row in rows), key=abs), 3)
            for name in ("rates", "plan")
        },
        "microbatches repeated": sum(row["repeated"] for row in rows),
        "microbatches sent again": sum(row["rerouted"] for row in rows),
        "peers suspected": sum(row["suspected"] for row in rows),
        "fleets with none of this": sum(map(clean, rows)),
        "CPU minutes": round(sum(row["cpu_s"] for row in rows) / 60, 1),
        "longest play, CPU seconds": max(row["cpu_s"] for row in rows),
    }


def effort(seed: int) -> float:
    """Virtual machine-seconds: simulating a link costs a few events for every few milliseconds that it is busy."""
    scene, config = drawn(seed).setting()
    serving = seated(scene)
    return bound_s(scene, serving, delayed=config.optimizer.delayed) * sum(map(sum, serving))


def predictions(rows: list[dict[str, Any]]) -> str:
    """Markdown: a step [s], worst first."""
    lines = ["| seed | machines | run | links, queue | bound | rates | plan | plan against rates |", "|" + "---|" * 8]
    for row in sorted(rows, key=lambda row: -abs(math.log(row["plan"] / row["rates"]))):
        told = " | ".join(
            str(row[name]) for name in ("seed", "machines", "run", "links", "bound_s", "rates_s", "plan_s")
        )
        lines.append(f"| {told} | {row['plan'] / row['rates'] - 1:+.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-39", help="FIRST-LAST, or some: 3,17,105")
    parser.add_argument("--keep", type=Path, help="folder for what was played")
    parser.add_argument("--jobs", type=int, default=2, help="fleets at a time")
    parser.add_argument("--limit", type=float, default=1800.0, help="of a fleet [s of CPU]")
    parser.add_argument("--out", type=Path, help="default for 0-39 and 100-139: results.json and fresh.json")
    parser.add_argument(
        "--predict", action="store_true", help="bound, rates and plan alone: seconds of CPU for all fleets"
    )
    args = parser.parse_args()
    first, *last = args.seeds.split("-")
    seeds = list(range(int(first), int(last[0]) + 1)) if last else [int(seed) for seed in first.split(",")]
    if args.predict:
        print(predictions([compared(seed, only_predict=True) for seed in seeds]))
        return
    if args.keep is None:
        parser.error("--keep: name a folder for what is played")
    args.keep.mkdir(parents=True, exist_ok=True)
    files = {seed: args.keep / f"fleet-{seed}.json" for seed in seeds}
    spawn = multiprocessing.get_context("spawn")
    with (
        Progress() as shown,
        ProcessPoolExecutor(args.jobs, spawn, max_tasks_per_child=1) as pool,  # a fresh process each
    ):
        bar = shown.add_task("fleets", total=len(seeds), completed=sum(file.exists() for file in files.values()))
        left = sorted((seed for seed, file in files.items() if not file.exists()), key=effort, reverse=True)
        plays = [pool.submit(compared, seed, args.limit) for seed in left]  # the longest first: cores end together
        for done in as_completed(plays):
            row = done.result()
            files[row["seed"]].write_text(json.dumps(row, indent=1) + "\n")
            shown.update(bar, advance=1)
            shown.print(
                f"{row['seed']}: {off(row, 'rates'):+.1%} of rates, {off(row, 'plan'):+.1%} of plan, {row['repeated']} repeated, "
                f"{row['suspected']} suspected, {row['cpu_s']} s of CPU {row['failed']}"
            )
    rows = [json.loads(files[seed].read_text()) for seed in seeds]
    print(*(" | ".join(map(str, row)) for row in fleets(rows)), sep="\n")
    print(json.dumps(summed_up(rows), indent=1))
    out = args.out or (HERE / TABLES[args.seeds] if args.seeds in TABLES else None)
    if out is not None:
        out.write_text(json.dumps({"summary": summed_up(rows), "fleets": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
