"""``muletrain config``, ``doctor``, ``trace`` and ``profile``: look at settings, machine and model before a run."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from muletrain.cli.options import TICKET_VARIABLE, Announce, ConfigFile, JsonObject, Listen, Overrides
from muletrain.errors import ConfigError
from muletrain.runs.join.ticket import read_ticket


def config(
    every: Annotated[bool, typer.Option("--all", help="Print every field.")] = False,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Explain fleet files (emulated machines and links) instead.")
    ] = False,
) -> None:
    """Print the settings that people change first: default, meaning and unit of each, as a file for 'muletrain run'.

    Lines that begin with # are off by default, or follow from other settings. --all prints every field."""
    from muletrain.config.dump import FIRST, describe
    from muletrain.config.fleet_file import Fleet

    if fleet:
        print(describe(Fleet))
    elif every:
        print(describe())
    else:
        print(describe(title="Every value is the default. 'muletrain config --all' prints all settings.", only=FIRST))


def data(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Text or conversations, written like data.path.")],
    overrides: Overrides = None,
    examples: Annotated[int, typer.Option(min=0, help="Documents to show as they are trained.")] = 3,
    json: JsonObject = False,
) -> None:
    """Show what a run would train on: documents, tokens, and of conversations the tokens that count.

    The first documents are shown as the model reads them; the text that it learns to write is green, or in brackets
    where there are no colours. Give the model and the settings of the run by --set:

    muletrain data chat.jsonl --set model.from=Qwen/Qwen3-0.6B"""
    from muletrain.cli.actions.reading import show_data

    show_data(path, overrides or [], examples, json=json)


TicketAsked = Annotated[
    str | None,
    typer.Option(
        metavar="TICKET",
        envvar=TICKET_VARIABLE,
        callback=read_ticket,
        help="Ticket of a run that waits or trains: its members check this machine's clock, and whether they can "
        "connect to it.",
    ),
]
PortChecked = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, help="TCP port for 'start' or 'join'; 0 takes any free one. Default: network.port of CONFIG."
    ),
]
Peers = Annotated[
    bool,
    typer.Option(
        "--peers",
        help="Instead, measure the machines of a run that has not begun, and the links between them. Use it where "
        "'muletrain start' was called.",
    ),
]
RunFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN_DIR", help="For --peers, the run folder of that 'start'. Default: the newest run that waits here."
    ),
]


def doctor(
    config: ConfigFile = None,
    overrides: Overrides = None,
    ticket: TicketAsked = None,
    listen: Listen = "0.0.0.0",
    port: PortChecked = None,
    announce: Announce = None,
    peers: Peers = False,
    run: RunFolder = None,
    json: JsonObject = False,
) -> None:
    """Check whether this machine can train the run, and say how to fix what is wrong.

    Checks Python, torch, GPUs, memory, disk, clock, and how other machines reach this one. Exits with 1 if something
    that training needs is missing; warnings do not count.

    With --peers, every machine that has joined computes a block of the run's model, forward and backward, and all pairs
    measure round trip and bandwidth in both directions, on the connections that training uses. This takes some seconds
    per machine and sends a bounded amount of data. The result is fleet.toml in the run folder, for 'muletrain plan' and
    'muletrain simulate fleet'. 'muletrain start --probe' measures the same before it trains. A run that has begun is
    not measured, because measuring would slow it down and training would distort the figures.
    """
    if peers:
        from muletrain.cli.actions.examine import probe_peers

        probe_peers(run, json=json)
        return
    if run is not None:
        raise ConfigError("--run belongs to --peers; add --peers, or leave --run out")
    from muletrain.cli.actions.examine import examine_machine

    if not examine_machine(config, overrides or [], ticket, listen, port, tuple(announce or ()), json=json):
        raise typer.Exit(1)


TracedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Hugging Face folder of a causal language model (config.json is enough), its name on the Hub, or the "
        "configuration (.toml) of a run, for a module of yours.",
    ),
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for blocks.py and blocks.json.")]
TracedContext = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens of the sequence that costs are stated for. Default: the model's longest."),
]


def trace(model: TracedModel, out: Out, context: TracedContext = None, json: JsonObject = False) -> None:
    """Write a model's blocks as Python, and show what each costs.

    blocks.py has one class for each distinct block, which computes what the model does, and trains to the same
    numbers. blocks.json has parameters, FLOPs and activation bytes of each block. No weights are read, so the largest
    model can be traced on a small machine.

    The file is for reading: runs trace the model themselves, and never import it."""
    from muletrain.cli.actions.tracing import trace_model

    trace_model(model, out, context=context, json=json)


class Arithmetic(StrEnum):
    """Precision of weights and activations."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


ProfiledModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Hugging Face folder (config.json is enough), its name on the Hub, a preset, e.g. 'llama-7b', or the "
        "configuration (.toml) of a run, for a module of yours.",
    ),
]
DeviceName = Annotated[str, typer.Option(help="'cuda', 'cuda:1', 'mps', 'cpu', or 'auto': the best one that is here.")]
PrecisionName = Annotated[Arithmetic, typer.Option(help="'auto': what a run would choose on the device.")]
ProfiledContext = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens of a sequence. Default: as in a run, the model's longest, at most 1024."),
]
Sequences = Annotated[int, typer.Option(min=1, help="Sequences (or samples) of the microbatch, as train.microbatch.")]
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
    model: ProfiledModel,
    device: DeviceName = "auto",
    precision: PrecisionName = Arithmetic.AUTO,
    context: ProfiledContext = None,
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
