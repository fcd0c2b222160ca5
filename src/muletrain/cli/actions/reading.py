"""``muletrain data``: what a run would train on."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from typing import TYPE_CHECKING

from muletrain.cli.show.console import make_console
from muletrain.cli.show.doing import doing
from muletrain.cli.show.summary import Example, dated
from muletrain.cli.show.tables import new_table
from muletrain.config.load import load_config
from muletrain.data import shown
from muletrain.data.chat import prints_date, resolved, with_format
from muletrain.data.corpus import absolute
from muletrain.data.tokens import TokenCache
from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from muletrain.runs.assemble import RunFacts

SHOWN = 1500
"""Characters of an example."""


def show_data(path: str, overrides: Sequence[str], examples: int, *, json: bool) -> None:
    """Tokenise the data of such a run, and print figures and examples. Raises MuletrainError."""
    from muletrain.runs.assemble import RunFacts, attending, resolve_start

    config = load_config(None, [f"data.path={absolute(path)}", *overrides])
    if config.data.factory is not None:
        raise ConfigError("data.factory: its samples are no text; 'muletrain data' shows text and conversations")
    config = config.model_copy(update={"data": with_format(config.data)})
    data = config.data
    if config.model.from_ is not None:
        if data.tokenizer == "train":
            data = data.model_copy(update={"tokenizer": config.model.from_})
        config = resolve_start(config, weights=False, attends=True)
    remarks = list[str]()
    with doing("reading the text") as tell:
        facts = RunFacts.of(attending(config.model_copy(update={"data": resolved(data)}), remarks.append))
        cache = facts.data(lambda done: tell(done, "tokenising the text"))
    assert isinstance(cache, TokenCache)
    data, train = facts.config.data, config.train
    source = facts.source(cache)
    about = {"format": data.format, "sequences": source.windows, "steps_per_epoch": source.windows / train.batch}
    if json:
        print(jsonlib.dumps({**about, "context": facts.spec.context, **asdict(cache.stats)}))
        return
    console, stats = make_console(), cache.stats
    console.print(data_table(facts, cache))
    for line in [*stats.changes(), *([dated(data.date)] if prints_date(data) else [])]:
        console.print(line)
    if data.counts:
        apart = (
            "a token sees its own conversation alone" if data.pack else "each conversation has a sequence of its own"
        )
        console.print(*(remarks or [apart]), soft_wrap=True, markup=False)
    for found in shown.examples(data, examples, SHOWN):
        console.print(Example(found))


def data_table(facts: RunFacts, cache: TokenCache) -> Table:
    """Documents, tokens and sequences of both sides."""
    data, train, stats, windows = facts.config.data, facts.config.train, cache.stats, facts.source(cache).windows
    table = new_table("", ["", data.path], ["to train on", "held out"])
    noun = "conversations" if data.counts else "documents"
    table.add_row(noun, "", f"{stats.documents:,}", f"{stats.heldout_documents:,}")
    table.add_row(
        "tokens, with padding" if data.counts else "tokens", "", f"{stats.train_tokens:,}", f"{stats.heldout_tokens:,}"
    )
    if data.counts:
        share = stats.padding / (stats.train_tokens + stats.heldout_tokens)
        table.add_row(
            "of these, that count", f"data.loss_on = {data.loss_on}", f"{stats.counted:,}", f"{stats.heldout_counted:,}"
        )
        table.add_row("padding", "", f"{share:.0%}", "")
    table.add_row("sequences", f"of {facts.spec.context:,} tokens", f"{windows:,}", "")
    table.add_row("steps in an epoch", f"of {train.batch:,} sequences", f"{windows / train.batch:,.1f}", "")
    return table
