"""``muletrain fuzz`` and ``reproduce``: check that muletrain keeps its promises."""

from pathlib import Path
from typing import Annotated

import typer

from muletrain.cli.options import JsonLines, JsonObject, Trace
from muletrain.errors import ConfigError


def fuzz(
    seeds: Annotated[int, typer.Option(min=1, help="How many scenarios to play, starting at --first.")] = 100,
    first: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Play only this seed, and print its timeline.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="Play only worlds with this kind of event, e.g. 'hub' or 'resume'.")
    ] = None,
    trace: Trace = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one per core.")] = None,
    json: JsonLines = False,
) -> None:
    """Play whole runs with random faults in a virtual world, and check every promise after each.

    The code under test is the code that trains. A seed replays its scenario exactly on this machine; another version of
    torch or another kind of processor may round differently, which can decide between two equally long histories of a
    run. Exits with 1 if a promise was broken."""
    from muletrain.cli.actions.fuzzing import check_kind, play_many, play_one

    check_kind(kind)

    if trace is not None and seed is None:
        raise ConfigError("--trace shows one world; choose it with --seed N")
    many = range(first, first + seeds)
    broken = play_many(many, kind, jobs, json=json) if seed is None else play_one(seed, kind, json=json, trace=trace)
    raise typer.Exit(1 if broken else 0)


def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Default: list the names.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Write one report of all in docs/reproduction (Markdown, PNG).")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder of the plot or report. Default: this folder, or docs/reproduction."
        ),
    ] = None,
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Print numbers only (needs no matplotlib).")] = False,
    json: JsonObject = False,
) -> None:
    """Compare the papers' tables and figures with ours, side by side.

    Tells calibration from prediction, and names what cannot be reproduced. Everything is computed anew in seconds, fits
    included; nothing is trained. Writes a plot. Exits with 1 if a result misses its bar."""
    from muletrain.cli.actions.compare_papers import check_arguments, list_all, show_one, write_all

    check_arguments(name, out, every=every, no_plot=no_plot)
    if name is None and not every:
        list_all(json=json)
        return
    met = write_all(out, json=json) if name is None else show_one(name, out, plot=not no_plot, json=json)
    raise typer.Exit(0 if met else 1)
