"""``muletrain profile``: measures a model's blocks, shows a table, and draws a picture."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from muletrain.cli.show.console import make_console, say
from muletrain.cli.show.doing import doing
from muletrain.cli.show.pictures import SIZE_IN, check_pictures, headline, write
from muletrain.cli.show.tables import new_table
from muletrain.config.schema import Precision
from muletrain.planning.devices import GIB
from muletrain.units import format_count, format_duration, format_memory, plural

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

    from muletrain.cli.show.pictures import Look
    from muletrain.config.profile_file import BlockCost, Profile


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
        check_pictures([plot])
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
        draw(found, plot)
    if json:
        print(found.model_dump_json())
        return
    make_console(sys.stdout).print(table_of(found))
    if plot is not None:
        say(console, f"wrote {plot}")


NAMED = 24
"""Most blocks with a name in the picture."""


def table_of(profile: Profile) -> RenderableType:
    """The blocks, and the whole model's needs."""
    text = profile.context > 1
    microbatch = plural(profile.sequences, "sequence" if text else "sample")
    if text:
        microbatch += f" of {profile.context:,} tokens"
    title = f"{escape(profile.title)} on {escape(profile.device)} {profile.precision}, {microbatch}"
    right = ["times", "forward", "backward", "load", "weights", "activations", "workspace"]
    table = new_table(title, ["part"], right)
    for block in profile.blocks:
        seconds = (block.forward_s, block.backward_s, block.load_s)
        sizes = (block.parameter_bytes, block.activation_bytes, block.workspace_bytes)
        cells = (*map(_short, seconds), *map(format_memory, sizes))
        table.add_row(block.name, str(len(block.parts)), *cells)
    speed = f"{profile.sequences * profile.context / profile.total_s:,.0f} {'tokens' if text else 'samples'}/s"
    sums = (
        f"all parts together: {format_duration(profile.total_s)} for forward and backward, {speed}, "
        f"{format_count(profile.params)} parameters"
    )
    return Group(table, Text(sums, style="dim"))


def _short(seconds: float) -> str:
    return format_duration(seconds) if seconds >= 0.01 else f"{1000 * seconds:.2f} ms"


def draw(profile: Profile, path: Path) -> None:
    """Draw times above and memory below, a bar for each distinct block. Raises MuletrainError."""
    names = [_label(block) for block in profile.blocks]
    whole_s = sum(len(b.parts) * (b.forward_s + b.backward_s) for b in profile.blocks)

    def on(figure: Figure, look: Look) -> None:
        about = f"{profile.precision}, {profile.sequences} x {profile.context} tokens"
        message = f"{profile.title} takes {format_duration(whole_s)} for a microbatch on {profile.device}"
        headline(figure, look, message, f"{about}; a bar for each kind of block, forward and backward once")
        top, bottom = figure.subplots(2, 1, sharex=True)
        for axes, unit, rows in (
            (top, "ms", {"forward": 1e3, "backward": 1e3, "load": 1e3}),
            (bottom, "MB", {"parameter": 1e-6, "activation": 1e-6, "workspace": 1e-6}),
        ):
            below = [0.0] * len(names)
            for (what, factor), colour in zip(rows.items(), (look.main, look.second, look.faint), strict=True):
                field = f"{what}_s" if unit == "ms" else f"{what}_bytes"
                values = [factor * getattr(block, field) for block in profile.blocks]
                axes.bar(range(len(names)), values, bottom=below, label=what, color=colour)
                below = [a + b for a, b in zip(below, values, strict=True)]
            axes.set(ylabel=f"{unit} of one block")
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        if len(names) <= NAMED:
            bottom.set_xticks(range(len(names)), names)

    width, height = SIZE_IN
    write([path], on, (min(20.0, max(width, 3.5 + 1.1 * len(names))), height))


def _label(block: BlockCost) -> str:
    return block.name if len(block.parts) == 1 else f"{block.name}\n(x {len(block.parts)})"
