"""``muletrain config``: every field, explained."""

from typing import Annotated

import typer


def config(
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Explain fleet files (emulated machines and links) instead.")
    ] = False,
) -> None:
    """Print the default configuration, with the meaning and the unit of each field.

    Save it, change it, and pass it to 'muletrain run'."""
    from muletrain.config.dump import describe
    from muletrain.config.fleet_file import Fleet

    print(describe(Fleet) if fleet else describe())
