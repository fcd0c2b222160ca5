"""``muletrain profile``: what each block of a model takes on this machine."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from muletrain.cli.options import JsonObject


class Arithmetic(StrEnum):
    """Precision of weights and activations."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Hugging Face folder (config.json is enough), its name on the Hub, or a preset, e.g. 'llama-7b'.",
    ),
]
DeviceName = Annotated[str, typer.Option(help="'cuda', 'cuda:1', 'mps', 'cpu', or 'auto': the best one that is here.")]
PrecisionName = Annotated[Arithmetic, typer.Option(help="'auto': what a run would choose on the device.")]
Context = Annotated[int | None, typer.Option(min=2, help="Tokens of a sequence. Default: the model's longest.")]
Sequences = Annotated[int, typer.Option(min=1, help="Sequences of the microbatch, as train.microbatch.")]
Memory = Annotated[
    float | None,
    typer.Option(min=0.0, metavar="GIB", help="Memory of the device that may be used. Default: all that is free."),
]
Untie = Annotated[bool, typer.Option("--untie", help="With an output matrix of its own, as model.untie.")]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="OUT.png", help="Draw times and memory of the blocks (.png or .svg); needs matplotlib."),
]
Again = Annotated[bool, typer.Option("--again", help="Measure even if the cache has the profile.")]


def profile(
    model: Model,
    device: DeviceName = "auto",
    precision: PrecisionName = Arithmetic.AUTO,
    context: Context = None,
    sequences: Sequences = 1,
    memory: Memory = None,
    untie: Untie = False,
    plot: Plot = None,
    again: Again = False,
    json: JsonObject = False,
) -> None:
    """Measure what each block of a model takes on a device: forward, backward, loading, memory.

    The blocks run one by one, with everything else off the device. So a device that has room for one block profiles the
    largest model. Equal blocks are measured once. Weights are drawn: none are read or fetched.

    Times are medians of several passes with one microbatch. Activations are what is kept from forward to backward.
    Workspace is what the peak of memory has beyond weights and activations: outputs, temporaries, gradients.

    'muletrain profile MODEL --json > PROFILE.json' writes what 'muletrain plan --profile PROFILE.json' plans with.
    Profiles are kept in ~/.cache/muletrain/profiles, by model, device, precision, microbatch and versions; --again
    measures anew. Run it on an idle machine."""
    from muletrain.cli.actions.profiling import profile_model
    from muletrain.config.schema import Precision

    profile_model(
        model,
        device=device,
        precision=Precision(precision.value),
        context=context,
        sequences=sequences,
        memory_gib=memory,
        untie=untie,
        plot=plot,
        again=again,
        json=json,
    )
