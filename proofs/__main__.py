"""``python -m proofs``: virtual worlds of the production code, with every promise checked after each; and a model of a
step's agreement, with every state explored."""

from typing import Annotated

import typer

from muletrain.cli.main import main
from muletrain.cli.options import Command, JsonLines, Trace
from muletrain.errors import ConfigError
from proofs.fuzzing import check_kind, play_many, play_one

app = typer.Typer(
    help="Prove that muletrain keeps its promises, whatever dies.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.command(cls=Command)
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
    check_kind(kind)
    if trace is not None and seed is None:
        raise ConfigError("--trace shows one world; choose it with --seed N")
    many = range(first, first + seeds)
    broken = play_many(many, kind, jobs, json=json) if seed is None else play_one(seed, kind, json=json, trace=trace)
    raise typer.Exit(1 if broken else 0)


@app.command(cls=Command)
def model(
    only: Annotated[str, typer.Option(metavar="WORDS", help="Only bounds and executions with these words.")] = "",
    without: Annotated[
        str | None, typer.Option(metavar="RULE", help="Switch this rule off, and print how a promise breaks.")
    ] = None,
    large: Annotated[
        bool, typer.Option("--large", help="Also explore the bounds that take many minutes each.")
    ] = False,
    seconds: Annotated[float | None, typer.Option(min=1, help="Most seconds for each of the bounds.")] = None,
    json: JsonLines = False,
) -> None:
    """Explore every execution of the step's agreement within bounds, and check its promises in each state.

    The rules are pure functions (proofs/model/rules.py); proofs/README.md explains them, the bounds, and what the model
    leaves out. Exits with 1 if a promise was broken."""
    from proofs.model.command import show_all, show_without

    if without is not None:
        raise typer.Exit(show_without(without, json=json))
    raise typer.Exit(1 if show_all(only, seconds, large=large, json=json) else 0)


if __name__ == "__main__":
    main(app)
