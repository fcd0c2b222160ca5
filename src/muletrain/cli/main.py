"""``muletrain``: the commands. Heavy imports happen inside them, so that help and configuration answer at once."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from muletrain import __version__
from muletrain.errors import MuletrainError

app = typer.Typer(
    help="Train large transformer models on whatever machines you can get.\n\nBegin with [bold]muletrain run[/bold]: a small model, "
    "four peer processes on this machine, three minutes.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Configuration; without one, the defaults.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one field, e.g. model.layers=12. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable events, one JSON object a line.")]
Where = Annotated[Path, typer.Argument(help="A run folder (its newest checkpoint) or a checkpoint folder.")]


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
def run(config: ConfigFile = None, overrides: Overrides = None, json: Json = False) -> None:
    """Train with a local fleet: all peers are processes on this machine. Ctrl-C ends it in order, with a checkpoint."""
    from muletrain.cli.train import run_local

    run_local(config, overrides or [], json=json)


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
def evaluate(where: Where, json: Json = False) -> None:
    """Loss and perplexity on the held-out part of the run's data, beside a unigram's and a bigram's."""
    from muletrain.cli.console import make_console
    from muletrain.cli.report import quality_table
    from muletrain.data.tokens import TokenCache
    from muletrain.runs.checkpoint import Checkpoint
    from muletrain.runs.result import perplexity, quality

    checkpoint = Checkpoint.open(where)
    result = quality(checkpoint, checkpoint.model(), TokenCache.build(checkpoint.config.data, checkpoint.spec.vocab))
    if json:
        numbers: dict[str, Any] = {"step": checkpoint.step, "loss": result.loss, "perplexity": perplexity(result.loss)}
        print(jsonlib.dumps(numbers | {"unigram": result.unigram, "bigram": result.bigram, "tokens": result.tokens}))
    else:
        make_console().print(quality_table(result))


@app.command()
def generate(
    where: Where,
    prompt: Annotated[str, typer.Argument(help="What the text begins with.")],
    tokens: Annotated[int, typer.Option(min=1, help="At most this many new tokens.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the k likeliest; 0: from all.")] = 40,
    seed: Annotated[int, typer.Option(help="The same seed writes the same text.")] = 0,
) -> None:
    """Continue a prompt with a trained model."""
    from muletrain.runs.checkpoint import Checkpoint
    from muletrain.runs.result import write

    if not prompt:
        raise MuletrainError("the prompt is empty; give at least one character")
    checkpoint = Checkpoint.open(where)
    print(
        write(
            checkpoint, checkpoint.model(), prompt, max_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed
        )
    )


@app.command()
def export(
    where: Where,
    hf: Annotated[Path, typer.Option("--hf", metavar="DIR", help="Folder for the Hugging Face checkpoint.")],
) -> None:
    """Write a Hugging Face checkpoint (safetensors, config, tokenizer) that 'transformers' loads to the same logits."""
    from muletrain.model.hf import export_hf
    from muletrain.runs.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(where)
    export_hf(checkpoint.weights(), checkpoint.spec, checkpoint.tokenizer_json, hf, end_of_text="<|endoftext|>")
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


if __name__ == "__main__":
    main()
