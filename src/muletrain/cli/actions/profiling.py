"""``muletrain profile``: measures a model's blocks, shows a table, and draws a picture."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from muletrain.cli.actions.hypothetical import need_matplotlib
from muletrain.cli.show.console import make_console, say
from muletrain.cli.show.doing import doing
from muletrain.cli.show.profile_table import draw, table_of
from muletrain.config.schema import Precision
from muletrain.errors import MuletrainError
from muletrain.planning.devices import GIB

if TYPE_CHECKING:
    from pathlib import Path


def profile_model(
    name: str,
    *,
    device: str,
    precision: Precision,
    context: int | None,
    sequences: int,
    memory_gib: float | None,
    untie: bool,
    plot: Path | None,
    again: bool,
    json: bool,
) -> None:
    """Profile the model ``name``, and print the profile. Raises MuletrainError."""
    if plot is not None:
        need_matplotlib()
        if plot.suffix not in (".png", ".svg"):
            raise MuletrainError(f"--plot {plot}: the name must end in .png or .svg")
    from muletrain.compute.probe import choose_precision, pick_device
    from muletrain.compute.profile import Conditions
    from muletrain.runs.measure.profile import measured_profile, model_named

    console = make_console(sys.stderr)
    on = pick_device(device)
    chosen = choose_precision(on) if precision is Precision.AUTO else precision
    at = Conditions(sequences, on, chosen, None if memory_gib is None else int(memory_gib * GIB))
    with doing("building the chain") as tell:
        model = model_named(name, context=context, untie=untie)
        found = measured_profile(model, name, at, lambda what, share: tell(share, f"measuring {what}"), again=again)
    if plot is not None:
        try:
            draw(found, plot)
        except OSError as e:
            raise MuletrainError(f"--plot: cannot write {plot}: {e.strerror or e}; choose another place") from e
    if json:
        print(found.model_dump_json())
        return
    make_console(sys.stdout).print(table_of(found))
    if plot is not None:
        say(console, f"wrote {plot}")
