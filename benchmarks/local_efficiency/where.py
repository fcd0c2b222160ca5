"""Where does a step of the default fleet go? Seconds of each peer's compute slot, and CPU seconds of all its processes.
``python where.py``."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.config.load import load_config
from muletrain.data.tokens import TokenCache
from muletrain.events import StepApplied, StepDone
from muletrain.runs.assemble import RunFacts

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.fleet_run import run_fleet

if TYPE_CHECKING:
    from muletrain.events import Event
    from muletrain.runs.fleet import LocalFleet

FIRST, LAST = 10, 65
TICK_S = 0.01
"""Unit of CPU times in /proc."""
SLOTS = ("forward_s", "backward_s", "averaging_s", "apply_s", "wait_s")


def cpu() -> dict[str, tuple[str, float]]:
    """CPU seconds so far of each process of the fleet, by pid, and whether it is a peer or its daemon."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields, command = status.read_text().rpartition(")")[2].split(), (status.parent / "cmdline").read_text()
        except OSError:  # it has ended
            continue
        kind = "daemons" if "p2pd" in command else "peers" if "muletrain.runs.worker" in command else ""
        if kind:
            found[status.parent.name] = kind, TICK_S * (int(fields[11]) + int(fields[12]))
    return found


def main() -> None:
    config = load_config(None, ["train.steps=70"])
    TokenCache.build(config.data, RunFacts.of(config).spec.vocab)
    marks: dict[int, tuple[float, dict[str, tuple[str, float]]]] = {}

    def watch(fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, StepDone) and event.step in (FIRST, LAST):
            marks[event.step] = time.time(), cpu()

    with tempfile.TemporaryDirectory() as folder:
        events = run_fleet(config, Path(folder), watch=watch)
    (begin, before), (end, after), steps = marks[FIRST], marks[LAST], LAST - FIRST
    print(f"a step takes {(end - begin) / steps:.3f} s")
    for stage in range(config.fleet.stages):
        applied = [e for e in events if isinstance(e, StepApplied) and e.stage == stage and e.step > FIRST]
        times = (
            f"{slot.removesuffix('_s')} {statistics.mean(getattr(e, slot) for e in applied):.3f}" for slot in SLOTS
        )
        print(f"each peer of stage {stage} [s]: {', '.join(times)}")
    used = Counter[str]()
    for pid, (kind, seconds) in after.items():
        used[kind] += seconds - before.get(pid, (kind, 0.0))[1]
    print(f"CPU [s]: {', '.join(f'{kind} {seconds / steps:.3f}' for kind, seconds in used.items())}")


if __name__ == "__main__":
    main()
