"""``muletrain``: the commands. Heavy imports happen inside them, so that help and configuration answer at once."""

from __future__ import annotations

import json as jsonlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muletrain import __version__
from muletrain.cli.commands.doctor import doctor
from muletrain.cli.commands.plan import plan
from muletrain.cli.commands.simulate import app as simulate_app
from muletrain.errors import ConfigError, DataError, MuletrainError, no_room
from muletrain.policy.chaos import HELP as CHAOS_HELP
from muletrain.runs.join.ticket import read_ticket
from muletrain.strategies import CHOICES

app = typer.Typer(
    help="Train large transformer models on whatever machines you can get.\n\nBegin with [bold]muletrain run[/bold]: a small model, "
    "four peer processes on this machine, three minutes.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

app.add_typer(simulate_app, name="simulate")
app.command()(doctor)
app.command()(plan)

ConfigFile = Annotated[
    Path | None, typer.Argument(metavar="CONFIG.toml", help="Configuration; without one, the defaults.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one field, e.g. model.layers=12. Repeatable."),
]
Resume = Annotated[
    Path | None,
    typer.Option(metavar="RUN_DIR", help="Go on with the run of this folder, from its newest complete checkpoint."),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        metavar="PLAN.json",
        help="What 'muletrain plan FLEET.toml --json' printed: strategy, stages, microbatches, and which machine serves what.",
    ),
]


if TYPE_CHECKING:
    Choice = str
else:
    Choice = StrEnum("Choice", [(name, name) for name in CHOICES])
Strategy = Annotated[
    Choice | None, typer.Option(help="Which of the plan's strategies. Default: the one that it recommends.")
]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable events, one JSON object a line.")]
JsonObject = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="OUT.json",
        help="Write what each peer's slots (receive, compute, send, average) did, and when, for https://ui.perfetto.dev",
    ),
]
Where = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="A run folder (its newest checkpoint) or a checkpoint folder.")
]
Announce = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS",
        help="What others should dial where it is not what we listen on (port forwarding), e.g. /ip4/1.2.3.4/tcp/4000. Repeatable.",
    ),
]
Ticketed = Annotated[
    str | None,
    typer.Argument(
        metavar="TICKET",
        envvar="MULETRAIN_TICKET",
        callback=read_ticket,
        help="Ticket, file with one, or '-' for standard input. Default: that of the run this machine is in.",
    ),
]


def _version(asked: bool) -> None:
    if asked:
        print(f"muletrain {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    config: ConfigFile = None,
    overrides: Overrides = None,
    resume: Resume = None,
    chaos: Annotated[str | None, typer.Option(metavar="PLAN", help=CHAOS_HELP)] = None,
    seed: Annotated[int | None, typer.Option(help="Draws the plan of '--chaos random', and who 'any' is.")] = None,
    trace: Trace = None,
    plan: PlanFile = None,
    strategy: Strategy = None,
    json: Json = False,
) -> None:
    """Train with a local fleet: all peers are processes on this machine, with --plan one for each machine of the plan.
    Ctrl-C ends it in order, with a checkpoint."""
    from muletrain.cli.commands.train import run_local

    run_local(
        config,
        overrides or [],
        json=json,
        resume=resume,
        chaos=chaos,
        seed=seed,
        trace=trace,
        plan=plan,
        strategy=strategy,
    )


@app.command()
def start(
    config: ConfigFile = None,
    overrides: Overrides = None,
    listen: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port; 0: any free one. Open it in your firewall.")
    ] = 0,
    announce: Announce = None,
    resume: Resume = None,
    plan: PlanFile = None,
    strategy: Strategy = None,
    name: Annotated[
        str | None, typer.Option(help="What others see of this machine: its name in the plan. Default: its host name.")
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="When all are there, and before training: measure every machine and the links between them, and write fleet.toml "
            "(for 'muletrain plan') into the run folder.",
        ),
    ] = False,
    share_data: Annotated[
        bool,
        typer.Option(
            "--share-data",
            help="As --set data.share=true: members may ask for the tokens of your training text, which say the text itself, and a few "
            "keep them on their disks, so that the run goes on without this machine. Whoever has the ticket can read the text then.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Begin a run on several machines: prints a ticket, waits until every stage is served, trains, collects
    checkpoints."""
    from muletrain.cli.commands.machines import start_run

    start_run(
        config,
        overrides or [],
        listen=listen,
        port=port,
        announce=tuple(announce or ()),
        json=json,
        resume=resume,
        plan=plan,
        strategy=strategy,
        name=name,
        probe=probe,
        share_data=share_data,
    )


@app.command()
def join(
    ticket: Annotated[
        str,
        typer.Argument(
            metavar="TICKET",
            envvar="MULETRAIN_TICKET",
            callback=read_ticket,
            help="What 'muletrain start' printed (or any member's 'muletrain ticket'), a file with it, or '-' for standard input. Other "
            "users of this machine see arguments, not files or the environment.",
        ),
    ],
    data: Annotated[
        str | None, typer.Option(help="The run's corpus, to build microbatches too (checked by digest).")
    ] = None,
    tokens: Annotated[
        float,
        typer.Option(
            min=0,
            help="Of a run that shares its tokens (data.share): keep them in this machine's cache, up to this size [GiB], build "
            "microbatches where others that have the data are gone, and give the tokens to other members; 0: take none.",
        ),
    ] = 1.0,
    place: Annotated[
        str | None,
        typer.Option(
            help="Write checkpoints to the run's checkpoint.place from here, too, with this machine's rights; give it exactly as "
            "'start' shows it. Default: other peers write this one's part."
        ),
    ] = None,
    stage: Annotated[
        int | None, typer.Option(min=0, help="Serve this stage; default: the one that needs a peer most.")
    ] = None,
    memory: Annotated[float | None, typer.Option(help="Memory this peer may use [GiB]; default: what is free.")] = None,
    hours: Annotated[
        float | None, typer.Option(min=0.001, help="Leave in order after so many hours; default: with the run's end.")
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(min=0.01, help="What training may send, and take in, at most [Mbit/s]; default: all there is."),
    ] = None,
    pause_file: Annotated[
        Path | None,
        typer.Option(help="While this file is there, the machine is yours: leave in order, join again after."),
    ] = None,
    device: Annotated[str, typer.Option(help="'auto' (every GPU, or the CPU), 'cpu', 'cuda:1'")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: all cores.")] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="What others see of this machine; in the run's plan, its name there. Default: its host name."
        ),
    ] = None,
    listen: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="TCP port; 0: any free one. Several GPUs take the ones that follow, too."),
    ] = 0,
    announce: Announce = None,
    private: Annotated[
        bool,
        typer.Option(
            "--private",
            help="Listen to no other machine: members lead others to this one, as they do where a firewall is in the way.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Add this machine to a run: one peer for every GPU, or one for the CPU. Ctrl-C leaves in order, between two
    steps."""
    from muletrain.cli.commands.machines import Limits, join_run

    join_run(
        ticket,
        data=data,
        tokens=tokens,
        place=place,
        stage=stage,
        memory=memory,
        device=device,
        threads=threads,
        listen=listen,
        port=port,
        json=json,
        name=name,
        announce=tuple(announce or ()),
        private=private,
        limits=Limits(hours=hours, bandwidth_mbps=bandwidth, pause_file=pause_file),
    )


@app.command()
def status(ticket: Ticketed = None, json: JsonObject = False) -> None:
    """Show how far the run is and who is in it; before it begins, what it waits for."""
    from muletrain.cli.commands.machines import show_status

    show_status(ticket, json=json)


@app.command()
def stop(ticket: Ticketed = None) -> None:
    """End the run in order, with a checkpoint in the run folder of 'start'."""
    from muletrain.cli.commands.machines import stop_run

    stop_run(ticket)


@app.command()
def kick(
    who: Annotated[
        str, typer.Argument(metavar="NAME|ID", help="As 'muletrain status' shows it; of an id, its end will do.")
    ],
    ticket: Ticketed = None,
) -> None:
    """Remove a peer from the run, where it was started: it is refused from now on, and the ticket is replaced."""
    from muletrain.cli.commands.machines import kick_peer

    kick_peer(who, ticket)


@app.command()
def ticket() -> None:
    """Print a ticket to the run this machine is in. Whoever has it can join: treat it as a password."""
    from muletrain.cli.commands.machines import own_ticket

    print(own_ticket())


@app.command()
def config(
    fleet: Annotated[
        bool, typer.Option("--fleet", help="The schema of fleet profiles (emulated machines and links).")
    ] = False,
) -> None:
    """Print the default configuration, every field with its meaning and unit. Save it, change it, give it to 'run'."""
    from muletrain.config.dump import describe
    from muletrain.config.fleet import Fleet

    print(describe(Fleet) if fleet else describe())


@app.command("eval")
def evaluate(
    where: Where,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Other text, or where the run's is now; written like data.path.")
    ] = None,
    json: JsonObject = False,
) -> None:
    """Loss and perplexity on the held-out part of the run's data (which must be here), beside a unigram's and a
    bigram's."""
    import dataclasses
    import time

    from muletrain.cli.show.console import make_console
    from muletrain.cli.show.report import quality_table
    from muletrain.runs.checkpoint import Checkpoint
    from muletrain.runs.result import check_memory, evaluated, quality

    checkpoint = Checkpoint.open(where)
    check_memory(checkpoint.spec)
    try:
        cache = checkpoint.corpus(data)
    except DataError as e:
        raise DataError(f"{e}; --data PATH names other text, or where the run's is now") from e
    result = quality(checkpoint, checkpoint.model(), cache)
    if json:
        print(dataclasses.replace(evaluated(checkpoint.step, result), t=time.time(), peer="eval").to_json())
    else:
        make_console().print(quality_table(result))


@app.command()
def generate(
    where: Where,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the text begins with.")],
    tokens: Annotated[int, typer.Option(min=1, help="At most this many new tokens.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the k likeliest; 0: from all.")] = 40,
    seed: Annotated[int, typer.Option(help="The same seed writes the same text.")] = 0,
    json: JsonObject = False,
) -> None:
    """Continue a prompt with a trained model."""
    from muletrain.runs.checkpoint import Checkpoint
    from muletrain.runs.result import check_memory, write

    if not prompt:
        raise MuletrainError("the prompt is empty; give at least one character")
    checkpoint = Checkpoint.open(where)
    check_memory(checkpoint.spec)
    text = write(
        checkpoint, checkpoint.model(), prompt, max_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    print(jsonlib.dumps({"step": checkpoint.step, "prompt": prompt, "text": text}) if json else text)


@app.command()
def export(
    where: Where,
    hf: Annotated[Path, typer.Option("--hf", metavar="DIR", help="Folder for the Hugging Face checkpoint.")],
    source: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the folder of model.from is now, if it was moved.")
    ] = None,
) -> None:
    """Write a Hugging Face checkpoint (safetensors, config, tokenizer) that 'transformers' loads to the same logits.

    If the run started from one (model.from), everything but the weights stays as it was there: special tokens,
    generation settings, chat template, declared context."""
    from muletrain.model.hf import export_hf
    from muletrain.runs.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(where)
    export_hf(
        checkpoint.weights(),
        checkpoint.spec,
        checkpoint.tokenizer_json,
        hf,
        end_of_text=checkpoint.end_of_text,
        source=checkpoint.source(source),
    )
    print(f"wrote {hf}: load it with transformers.AutoModelForCausalLM.from_pretrained('{hf}')")


def main() -> None:
    """Entry point: errors that teach, without a traceback, and exit code 2."""
    if sys.platform == "win32":
        sys.exit("muletrain needs Linux or macOS; on Windows run it inside WSL2 (wsl --install), it works there")
    try:
        app()
    except MuletrainError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except OSError as e:
        if (full := no_room(e)) is None:
            raise
        print(f"error: {full}", file=sys.stderr)
        sys.exit(2)


@app.command()
def fuzz(
    seeds: Annotated[int, typer.Option(min=1, help="How many scenarios, from --first on.")] = 100,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Play this one only, and print its timeline.")] = None,
    trace: Trace = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: all cores.")] = None,
    json: Json = False,
) -> None:
    """Break the protocol, or fail to: whole runs in a virtual world, with faults drawn from seeds; every promise is
    checked after each.

    The code that runs is the one that trains. A seed replays its scenario exactly on this machine; with another torch
    or kind of processor numbers may round otherwise, and of two histories of a run the other one may stay. Exits with 1
    when a promise was broken."""
    from muletrain.cli.commands.fuzz import play_many, play_one

    if trace is not None and seed is None:
        raise ConfigError("--trace shows one world: say which, by --seed N")
    many = range(first, first + seeds)
    broken = play_many(many, jobs, json=json) if seed is None else play_one(seed, json=json, trace=trace)
    raise typer.Exit(1 if broken else 0)


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Without one: what there is.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All of them, as one report in docs/reproduction (Markdown, PNG).")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Plot or report go there; default: here, or docs/reproduction."),
    ] = None,
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Numbers only (needs no matplotlib).")] = False,
    json: JsonObject = False,
) -> None:
    """The papers' tables and figures: published and ours side by side, calibration told from prediction, and what
    cannot be reproduced.

    Computed anew in seconds, fits included; nothing is trained. Writes a plot. Exits with 1 where it is not what it is
    held to."""
    from muletrain.cli.commands.reproduce import check_arguments, list_all, show_one, write_all

    check_arguments(name, out, every=every, no_plot=no_plot)
    if name is None and not every:
        list_all(json=json)
        return
    met = write_all(out, json=json) if name is None else show_one(name, out, plot=not no_plot, json=json)
    raise typer.Exit(0 if met else 1)


def _flowing(text: str) -> str:
    """A docstring as paragraphs that the terminal breaks: where a source line ends says nothing to those who ask for
    help."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


for _command in (*app.registered_commands, *simulate_app.registered_commands):
    if _command.callback is not None:
        _command.help = _flowing(_command.callback.__doc__ or "")


if __name__ == "__main__":
    main()
