"""``muletrain simulate calibrate``: costs measured in real runs, and how well the model then predicts the runs."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING

from rich.markup import escape

from muletrain.cli.show.console import make_console
from muletrain.cli.show.tables import new_table
from muletrain.config.costs import Costs, explained
from muletrain.errors import ConfigError
from muletrain.sim.fleet.calibration import fit, observe

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.table import Table

    from muletrain.sim.fleet.calibration import Fit, Sample

CONSTANTS = {
    "call_ms": "a forward or backward, beyond the fleet file",
    "hop_ms": "a message between two peers, beyond the link",
    "ending_ms": "the end of a step, beyond its messages",
}


def calibrate(folders: Sequence[Path], out: Path, *, json: bool) -> None:
    """Fit, write (to ``out``) and print the costs. Raises MuletrainError for a folder without data, and ConfigError if
    ``out`` cannot be written."""
    samples = [observe(folder) for folder in folders]
    found = fit(samples)
    try:
        out.write_text(explained(found.costs), encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"--out {out}: {e.strerror}; give a file in a folder that exists") from e
    if json:
        runs = [
            {
                "run": str(s.folder),
                "steps": s.steps,
                "measured": s.throughput,
                "without": s.predicted(Costs()),
                "with": s.predicted(found.costs),
            }
            for s in samples
        ]
        print(jsonlib.dumps({"costs": found.costs.model_dump(), "counts": found.counts, "runs": runs, "out": str(out)}))
        return
    console = make_console()
    console.print(_constants(found))
    console.print()
    console.print(_runs(samples, found.costs))
    if not any(s.hops_s for s in samples):
        console.print(
            "messages were not measured: no run has traces of both ends (muletrain run --set fleet.trace=true)"
        )
    console.print(
        f"wrote {escape(str(out))}; use it with: muletrain simulate fleet FLEET.toml --costs {escape(str(out))}",
        soft_wrap=True,
    )


def _constants(found: Fit) -> Table:
    table = new_table("costs that no fleet file states", [""], ["measured", "from"])
    for name, about in CONSTANTS.items():
        count = found.counts[name]
        table.add_row(about, f"{getattr(found.costs, name):.1f} ms" if count else "not measured", str(count))
    for speed in found.costs.devices:
        table.add_row(escape(speed.device), f"{speed.tflops:.3g} TFLOP/s", str(found.counts[speed.device]))
    return table


def _runs(samples: Sequence[Sample], costs: Costs) -> Table:
    title = "microbatches/s, measured and predicted (flow)"
    table = new_table(title, ["run", "steps"], ["measured", "without costs", "with costs", "error"])
    for s in samples:
        predicted = s.predicted(costs)
        table.add_row(
            escape(s.folder.name),
            f"{s.steps[0]} to {s.steps[1]}",
            f"{s.throughput:.3g}",
            f"{s.predicted(Costs()):.3g}",
            f"{predicted:.3g}",
            f"{100 * (predicted / s.throughput - 1):+.1f} %",
        )
    return table
