"""``muletrain data``: what a run would train on."""

from __future__ import annotations

import itertools
import json as jsonlib
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.text import Text

from muletrain.cli.show.console import make_console
from muletrain.cli.show.doing import doing
from muletrain.cli.show.tables import new_table
from muletrain.config.load import load_config
from muletrain.data.chat import Rendered, Template, columns_of, resolved
from muletrain.data.corpus import Corpus, absolute
from muletrain.data.tokens import TokenCache
from muletrain.errors import ConfigError
from muletrain.units import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from muletrain.config.model_sections import DataConfig

SHOWN = 1500
"""Characters of an example."""
LEARNED, READ = "green", "dim"


def show_data(path: str, overrides: Sequence[str], examples: int, *, json: bool) -> None:
    """Tokenise the data of such a run, and print figures and examples. Raises MuletrainError."""
    from muletrain.runs.assemble import RunFacts, resolve_start

    config = load_config(None, [f"data.path={absolute(path)}", *overrides])
    if config.data.factory is not None:
        raise ConfigError("data.factory: its samples are no text; 'muletrain data' shows text and conversations")
    data = config.data
    if config.model.from_ is not None:
        if data.tokenizer == "train":
            data = data.model_copy(update={"tokenizer": config.model.from_})
        config = resolve_start(config, weights=False)
    facts = RunFacts.of(config.model_copy(update={"data": resolved(data)}))
    with doing("reading the text") as tell:
        cache = facts.data(lambda done: tell(done, "tokenising the text"))
    assert isinstance(cache, TokenCache)
    data, train = facts.config.data, config.train
    source = facts.source(cache)
    about = {"format": data.format, "sequences": source.windows, "steps_per_epoch": source.windows / train.batch}
    if json:
        print(jsonlib.dumps({**about, "context": facts.spec.context, **asdict(cache.stats)}))
        return
    console, stats = make_console(), cache.stats
    table = new_table("", ["", data.path], ["to train on", "held out"])
    noun = "conversations" if data.counts else "documents"
    table.add_row(noun, "", f"{stats.documents:,}", f"{stats.heldout_documents:,}")
    table.add_row("tokens", "", f"{stats.train_tokens:,}", f"{stats.heldout_tokens:,}")
    if data.counts:
        share = stats.padding / (stats.train_tokens + stats.heldout_tokens)
        table.add_row(
            "of these, that count", f"data.loss_on = {data.loss_on}", f"{stats.counted:,}", f"{stats.heldout_counted:,}"
        )
        table.add_row("padding", "", f"{share:.0%}", "")
    table.add_row("sequences", f"of {facts.spec.context:,} tokens", f"{source.windows:,}", "")
    table.add_row("steps in an epoch", f"of {train.batch:,} sequences", f"{about['steps_per_epoch']:,.1f}", "")
    console.print(table)
    for line in stats.changes():
        console.print(line)
    if data.counts:
        console.print(
            "conversations in one sequence see those before them (data.pack = false: each has a sequence of its own)"
            if data.pack
            else "each conversation has a sequence of its own"
        )
    for place, shown in itertools.islice(_examples(data), examples):
        console.print(f"\n[bold]{printable(place)}[/bold]", highlight=False)
        console.print(_coloured(shown))


def _examples(data: DataConfig) -> Iterator[tuple[str, Rendered]]:
    """Documents as they are trained, with their places."""
    template = Template(data.chat_template or "", data.loss_on) if data.counts else None
    for document in Corpus(data.path, columns_of(data)).documents():
        if template is not None:
            yield document.place, template.rendered(jsonlib.loads("".join(document.pieces())), document.place)
            continue
        text, size = [], 0
        for piece in document.pieces():
            text.append(piece)
            if (size := size + len(piece)) > SHOWN:
                break
        yield document.place, Rendered("".join(text), [(0, size)])


def _coloured(shown: Rendered) -> Text:
    text = Text(printable(shown.text[:SHOWN], lines=True), style=READ)
    for begin, end in shown.counted:
        text.stylize(f"not dim {LEARNED}", begin, end)
    return text + Text(" ..." if len(shown.text) > SHOWN else "")
