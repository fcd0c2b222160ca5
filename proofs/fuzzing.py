"""``python -m proofs fuzz``: plays virtual worlds on all cores, and prints the timelines of broken promises."""

from __future__ import annotations

import gc
import json as jsonlib
import multiprocessing
import os
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from muletrain.cgroups import cpus
from muletrain.cli.show.console import make_console
from muletrain.cli.show.doing import doing
from muletrain.errors import ConfigError
from muletrain.timeline import check_trace, write_trace
from muletrain.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from proofs.scenario import Scenario

SHOWN_FAILURES = 3
"""Most timelines printed; further failures are listed by seed."""


def check_kind(kind: str | None) -> None:
    """Raises ConfigError for a kind that is never drawn."""
    if kind is not None:
        from proofs.draws import KINDS, small

        if kind not in (known := sorted({*KINDS, *small.WORLDS})):
            raise ConfigError(f"--kind {kind}: no such kind; there are {', '.join(known)}")


def play_one(seed: int, kind: str | None, *, json: bool, trace: Path | None = None) -> int:
    """Play one seed and print its timeline. ``trace``: where to write a timeline of all slots. Returns the number of
    broken promises."""
    if trace is not None:
        check_trace(trace)
    with _processes(1) as pool:
        result = pool.submit(_play, seed, kind, trace).result()
        if result["violations"]:
            result["smallest"] = pool.submit(_smallest, seed, kind).result()
    _show(result, json=json)
    return len(result["violations"])


def play_many(seeds: range, kind: str | None, jobs: int | None, *, json: bool) -> int:
    """Play all seeds and print the first failures. Returns the number of seeds that broke a promise."""
    console, begin, failed, faults, kinds = make_console(), time.monotonic(), [], 0, Counter[str]()
    longest = 0.0, seeds.start  # a step, in medians of its run; and its seed
    stood: list[tuple[float, int]] = []  # the longest wait while no fault went on [s]; and its seed
    too_long: list[tuple[float, int, str]] = []  # such waits above the bound; and their scenarios
    with _processes(jobs or cpus()) as pool, doing("playing virtual worlds") as tell:
        for done, future in enumerate(as_completed([pool.submit(_play, seed, kind) for seed in seeds]), 1):
            result = future.result()
            faults += result["faults"]
            kinds.update(result["kinds"])
            longest = max(longest, (result["longest"], result["seed"]))
            stood.append((result["stood_s"], result["seed"]))
            if result["stood_s"] > result["bound_s"]:
                too_long.append((result["stood_s"], result["seed"], result["scenario"]))
            tell(done / len(seeds), f"virtual worlds, {done} of {len(seeds)}")
            if result["violations"]:
                failed.append(result["seed"])
                if len(failed) <= SHOWN_FAILURES:
                    _show(result, json=json)
    seconds = time.monotonic() - begin
    stood.sort()
    too_long.sort(reverse=True)
    if json:
        summary = {"seeds": len(seeds), "faults": faults, "failed": sorted(failed), "seconds": seconds}
        waits = {"stood_s": [s for s, _ in stood], "longest_stood": stood[-1], "too_long": too_long}
        print(jsonlib.dumps({**summary, "kinds": dict(sorted(kinds.items())), "longest": longest, **waits}))
        return len(failed)
    console.print(
        f"{plural(len(seeds), 'world')} with {plural(faults, 'fault')} in {seconds:.0f} s: {len(failed)} broke a promise"
    )
    console.print(f"the longest step took {longest[0]:.0f} times the median of its run (seed {longest[1]})")
    usual_s, most_s = stood[len(stood) // 2][0], stood[int(0.99 * len(stood))][0]
    console.print(
        f"while no fault went on, the longest wait for a step took {usual_s:.1f} s (median), {most_s:.0f} s (99 of 100), at most "
        f"{stood[-1][0]:.0f} s (seed {stood[-1][1]}); more than 30 s and two steps in {len(too_long)}"
    )
    for waited_s, seed, scenario in too_long[:SHOWN_FAILURES]:
        console.print(f"{waited_s:.0f} s, seed {seed}: {scenario}", soft_wrap=True, markup=False, highlight=False)
    if failed:
        console.print(
            f"failed seeds: {sorted(failed)}; replay one with: python -m proofs fuzz --seed {min(failed)}"
            f"{f' --kind {kind}' if kind else ''}",
            soft_wrap=True,
        )
    return len(failed)


@contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh interpreters with one thread each, and a fixed hash seed, so that a seed also replays the order of sets."""
    fixed = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
    before = {name: os.environ.get(name) for name in fixed}
    os.environ.update(fixed)
    try:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_begin) as pool:
            yield pool
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _begin() -> None:
    """Import the world once, and exclude it from garbage collection."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import proofs.play  # noqa: F401  # takes seconds: in the background processes only

    gc.freeze()


def _end_with_parent() -> None:
    """Exit with the parent, which cannot stop us if it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _play(seed: int, kind: str | None = None, trace: Path | None = None) -> dict[str, Any]:
    from proofs.draws import draw
    from proofs.play import play
    from proofs.shrink import as_code
    from proofs.verdict import readable

    drawn = draw(seed, kind)
    outcome = play(replace(drawn, trace=trace is not None))
    gc.collect()  # a failed task that was not awaited warns when it is collected: now, not during a later seed
    if trace is not None:
        write_trace(trace, outcome.events)
    return {
        "seed": seed,
        "scenario": as_code(drawn),
        "faults": len(outcome.scenario.faults),
        "kinds": list(outcome.scenario.kinds),
        "longest": outcome.longest,
        "stood_s": outcome.stood_s,
        "bound_s": outcome.scenario.bound_s,
        "violations": outcome.violations,
        "timeline": list(readable(outcome)),
    }


def _smallest(seed: int, kind: str | None) -> str:
    """The smallest scenario that breaks the same promise, as code for a test."""
    from proofs.draws import draw
    from proofs.play import play
    from proofs.shrink import as_code, shrunk, sorts

    drawn = draw(seed, kind)
    broken = sorts(play(drawn).violations)

    def fails(scenario: Scenario) -> bool:
        try:
            return bool(broken & sorts(play(scenario).violations))
        except ConfigError:  # one setting is left without another that it needs
            return False

    return as_code(shrunk(drawn, fails))


def _show(result: dict[str, Any], *, json: bool) -> None:
    if json:
        print(jsonlib.dumps(result))
    else:
        print("\n".join(result["timeline"]))
        if "smallest" in result:
            print(f"smallest scenario that still breaks it: {result['smallest']}")
