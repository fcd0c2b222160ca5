"""``muletrain trace``: see a model as the chain of blocks that stages are made of."""

from pathlib import Path
from typing import Annotated

import typer

from muletrain.cli.options import JsonObject

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Hugging Face folder of a causal language model (config.json is enough), or its name on the Hub.",
    ),
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for blocks.py and blocks.json.")]
Context = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens of the sequence that costs are stated for. Default: the model's longest."),
]


def trace(model: Model, out: Out, context: Context = None, json: JsonObject = False) -> None:
    """Write a model's blocks as Python, and show what each costs; not yet those of a model.factory.

    blocks.py has one class for each distinct block, which computes what the model does, and trains to the same
    numbers. blocks.json has parameters, FLOPs and activation bytes of each block. No weights are read, so the largest
    model can be traced on a small machine.

    The file is for reading: runs trace the model themselves, and never import it."""
    from muletrain.cli.actions.tracing import trace_model

    trace_model(model, out, context=context, json=json)
