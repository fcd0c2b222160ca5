"""``muletrain eval``, ``generate`` and ``export``: use the trained model of a run."""

import dataclasses
import json as jsonlib
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muletrain.cli.options import Factories, JsonObject, Model, Where
from muletrain.errors import ConfigError, DataError, MuletrainError

if TYPE_CHECKING:
    Weights = str
else:
    Weights = StrEnum("Weights", [(name, name) for name in ("fp32", "bf16", "fp16")])


Source = Annotated[Path | None, typer.Option(metavar="DIR", help="Where the folder of model.from is now, if it moved.")]


def evaluate(
    where: Model,
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Evaluate on this text (written like data.path) instead of the run's."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most held-out tokens; that of train.validate_tokens gives the run's own measurement."
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Measure these benchmarks by lm-eval (pip install 'muletrain\\[eval]') instead, such as hellaswag,arc_easy.",
        ),
    ] = None,
    include: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder with YAML files of your own --tasks, as lm-eval reads them."),
    ] = None,
    fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question of --tasks. Default: as the task says.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most questions of each of --tasks.")] = None,
    source: Source = None,
    factory: Factories = None,
    json: JsonObject = False,
) -> None:
    """Measure loss and perplexity on the held-out part of the run's data, or of --data with a model of transformers.

    A unigram and a bigram model of the same text stand beside it. The data must be on this machine; --data says where
    they are if they moved. Of a module with its own loss (model.factory), that loss is measured; --factory must name
    the factory, and a data.factory too.

    With --tasks, lm-eval measures benchmarks instead, with the whole model in fp32: an adapter is merged."""
    if tasks is not None:
        _benchmarks(where, tasks, include, fewshot, limit, source, others=(data, tokens), json=json)
        return
    if (include, fewshot, limit) != (None, None, None):
        raise ConfigError("--include, --fewshot and --limit are about --tasks; give that, too")
    from muletrain.cli.show.console import make_console
    from muletrain.cli.show.final_report import quality_table
    from muletrain.config.trusted import trust
    from muletrain.runs.pretrained import Pretrained, trained_in
    from muletrain.runs.result import HELDOUT_TOKENS, check_memory, evaluated, quality

    trust(*(factory or ()))
    checkpoint = trained_in(where)
    if isinstance(checkpoint, Pretrained):
        checkpoint = checkpoint.measured()
    check_memory(checkpoint.params)
    try:
        cache = checkpoint.corpus(data)
    except DataError as e:
        raise DataError(f"{e}; --data PATH names the text if it moved, or another one") from e
    result = quality(checkpoint, checkpoint.computed(source), cache, tokens or HELDOUT_TOKENS)
    if json:
        print(dataclasses.replace(evaluated(checkpoint.step, result), t=time.time(), peer="eval").to_json())
    else:
        make_console().print(quality_table(result))


def _benchmarks(
    where: Path,
    tasks: str,
    include: Path | None,
    fewshot: int | None,
    limit: int | None,
    source: Path | None,
    *,
    others: tuple[object, ...],
    json: bool,
) -> None:
    """Print the scores of ``--tasks``."""
    if any(option is not None for option in others):
        raise ConfigError("--tasks: a benchmark has texts of its own; leave out --data and --tokens")
    from rich.markup import escape

    from muletrain.cli.show.console import make_console
    from muletrain.cli.show.tables import new_table
    from muletrain.runs.harness import benchmarks

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError("--tasks: it names no task; write --tasks hellaswag,arc_easy")
    scores = benchmarks(where, names, include=include, shots=fewshot, limit=limit, source=source)
    if json:
        print(jsonlib.dumps({"model": str(where), "scores": [score.to_dict() for score in scores]}))
        return
    table = new_table("", ["task", "metric"], ["value", "error", "shots", "questions"])
    for score in scores:
        error = "-" if score.error is None else f"{score.error:.4f}"
        table.add_row(
            escape(score.task),
            escape(score.metric),
            f"{score.value:.4f}",
            error,
            str(score.shots),
            f"{score.samples:,}",
        )
    make_console().print(table)


def generate(
    where: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Beginning of the text.")],
    tokens: Annotated[int, typer.Option(min=1, help="Most new tokens.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the k likeliest tokens; 0 draws from all.")] = 40,
    seed: Annotated[int, typer.Option(help="The same seed writes the same text.")] = 0,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--text",
            help="Answer the prompt, asked by the chat template, or continue it. Default: as the run was trained; a model of Hugging "
            "Face answers if it declares a chat template.",
        ),
    ] = None,
    source: Source = None,
    factory: Factories = None,
    json: JsonObject = False,
) -> None:
    """Continue a prompt with a trained model, or answer it if the model is one for conversations.

    A module of yours (model.factory, which --factory must name) writes text if it was trained on text and its
    forward(inputs), without targets, returns logits."""
    from muletrain.config.trusted import trust
    from muletrain.runs.pretrained import trained_in
    from muletrain.runs.result import check_memory, write
    from muletrain.units import printable

    if not prompt:
        raise MuletrainError("the prompt is empty; give at least one character")
    trust(*(factory or ()))
    checkpoint = trained_in(where)
    check_memory(checkpoint.params)
    options = {"max_tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    text = write(checkpoint, checkpoint.writer(source), prompt, chat=chat, **options)
    if json:
        print(jsonlib.dumps({"step": checkpoint.step, "prompt": prompt, "text": text}))
    else:
        print(printable(text, lines=True))


def export(
    where: Where,
    hf: Annotated[
        Path,
        typer.Option(
            "--hf", metavar="DIR", help="New folder for the Hugging Face checkpoint, an adapter, or a module's weights."
        ),
    ],
    merge: Annotated[
        bool, typer.Option("--merge", help="Add a trained adapter to the model, and write the whole model.")
    ] = False,
    source: Source = None,
    dtype: Annotated[Weights, typer.Option(help="Type of the weights.")] = "fp32",
    factory: Factories = None,
) -> None:
    """Write a Hugging Face checkpoint that 'transformers' loads to the same logits.

    It consists of safetensors, config and tokenizer. If the run started from a Hugging Face checkpoint (model.from),
    everything but the weights stays as it was: special tokens, generation settings, chat template, declared context. Of
    a model that was trained on conversations, the template is the one of the training.

    Of an adapter (adapter.rank), it is a folder that 'peft' loads; --merge adds the adapter to the model instead, and
    writes the whole.

    Of a module of yours (model.factory, which --factory must name), it is model.safetensors alone: the whole module's
    state_dict, under its own names, for load_state_dict."""
    from muletrain.config.trusted import trust
    from muletrain.model.hf_writing import check_new
    from muletrain.runs import exporting
    from muletrain.runs.checkpoint import Checkpoint

    trust(*(factory or ()))
    check_new(hf)
    print(exporting.export(Checkpoint.open(where), hf, merge=merge, source=source, dtype=dtype))
