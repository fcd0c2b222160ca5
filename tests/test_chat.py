"""Conversations: what is rendered and what counts, how rows are packed, and that a fleet takes the mean over what counts."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from muletrain.compute.checks import weighed
from muletrain.config.load import load_config
from muletrain.config.model_sections import DataConfig
from muletrain.data.chat import (
    Template,
    chat_template,
    conversation,
    kind_of,
    packed,
    plain_template,
    prints_date,
    resolved,
    tokens_of,
)
from muletrain.data.encoder import Encoder
from muletrain.data.microbatch import BEGINS, SILENT, MicrobatchSource, unmarked
from muletrain.data.shown import examples
from muletrain.data.tokens import TokenCache
from muletrain.errors import DataError, ProtocolError
from muletrain.events import StepDone
from muletrain.model.chain import TOKENS
from muletrain.runs.assemble import RunFacts

from .chats import FAMILIES, LLAMA_3, MISTRAL, QWEN_3, SMOLLM_3, chat_tokenizer, chats, write_rows
from .fleet_run import checkpoint_weights, run_fleet
from .reference import train_plainly
from .test_equivalence import EXACT, check_every_microbatch_once, relative_difference

if TYPE_CHECKING:
    from muletrain.events import Event
    from muletrain.runs.fleet import LocalFleet

LONG = {
    "messages": [
        {"role": "user", "content": "Good morning! What is two plus two?"},
        {"role": "assistant", "content": "Good morning. It is four — näturally ☕."},
        {"role": "user", "content": " And two plus four? "},
        {"role": "assistant", "content": "Six."},
    ],
    "tools": None,
}


def of_folder(folder: Path, **fields: Any) -> DataConfig:
    return DataConfig(tokenizer=str(folder), format="messages", cache=str(folder.parent / "cache"), **fields)


# What counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_text_and_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    own = chat_tokenizer(tmp_path / "model", FAMILIES[family])
    config = of_folder(tmp_path / "model", loss_on="all")
    template = Template(chat_template(config), "all")
    shown = template.rendered(LONG, "here")
    kept = {"strftime_now": lambda form: "26 Jul 2024"} if family == "llama3" else {}
    if family == "llama3":  # transformers prints today's date
        own.chat_template = LLAMA_3.replace("strftime_now('%d %b %Y')", "'26 Jul 2024'")
    assert shown.text == own.apply_chat_template(LONG["messages"], tokenize=False), kept
    marked = tokens_of(Encoder((tmp_path / "model" / "tokenizer.json").read_bytes()), shown)
    ids, counts = unmarked(marked)
    assert ids.tolist() == own.apply_chat_template(LONG["messages"], tokenize=True, return_dict=True)["input_ids"]
    assert counts.tolist() == [False] + [True] * (len(ids) - 1)
    assert plain_template(config) == FAMILIES[family], "what is exported is the model's own"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loss_on", ["assistant", "last"])
def test_what_the_assistant_says_counts_and_nothing_else(tmp_path: Path, family: str, loss_on: str) -> None:
    chat_tokenizer(tmp_path / "model", FAMILIES[family])
    config = of_folder(tmp_path / "model", loss_on=loss_on)
    template, encoder = (
        Template(chat_template(config), loss_on),
        Encoder((tmp_path / "model" / "tokenizer.json").read_bytes()),
    )
    if family == "qwen3" and loss_on == "assistant":
        with pytest.raises(DataError, match="here: the template writes turn 2 in another way once later turns follow"):
            template.rendered(LONG, "here")
        return
    shown = template.rendered(LONG, "here")
    said = [shown.text[begin:end] for begin, end in shown.counted]
    wanted = ["Good morning. It is four — näturally ☕.", "Six."][-1 if loss_on == "last" else 0 :]
    assert len(said) == len(wanted)
    for found, right in zip(said, wanted, strict=True):
        assert right in found
        assert "plus" not in found
        assert len(found) <= len(right) + len("<think>\n\n</think>\n\n<|im_end|>\n</s>")
        assert not found.startswith("<|im_start|>")
    ids, counts = unmarked(tokens_of(encoder, shown))
    learned = encoder.decode(ids[counts].tolist())
    assert all(right in learned for right in wanted)
    assert "morning!" not in learned
    assert "plus" not in learned


def test_a_template_prints_the_date_that_the_run_fixes(tmp_path: Path) -> None:
    text = "{{ strftime_now('%d %b %Y') }}|{{ strftime_now( \"%Y-%m-%d\" ) }}|{% set f = '%B %Y' %}{{ strftime_now('%B %Y') }}"
    chat_tokenizer(tmp_path / "model", text + "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for given, right in (
        ({}, "26 Jul 2024|2024-07-26|July 2024"),
        ({"date": "2025-01-02"}, "02 Jan 2025|2025-01-02|January 2025"),
    ):
        config = of_folder(tmp_path / "model", **given)
        found = chat_template(config)
        assert Template(found, "all").rendered(LONG, "here").text.startswith(right)
        assert prints_date(config.model_copy(update={"chat_template": found}))
        assert (plain_template(config) or "").startswith(text)
    chat_tokenizer(tmp_path / "model", SMOLLM_3)
    assert not prints_date(of_folder(tmp_path / "model").model_copy(update={"chat_template": SMOLLM_3}))


def test_what_is_exported_begins_as_the_models_template_does(tmp_path: Path) -> None:
    own = "{% set said = messages %}\n" + SMOLLM_3
    chat_tokenizer(tmp_path / "model", own)
    assert plain_template(of_folder(tmp_path / "model")) == own


def test_examples_show_what_is_learned(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path / "model", SMOLLM_3)
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": LONG["messages"]}] * 3)
    config = resolved(of_folder(tmp_path / "model", path=path))
    found = [*examples(config, 2, 1000)]
    place, *pieces = found[0]
    assert len(found) == 2
    assert place == f"{path}:1"
    assert "".join(pieces) == Template(config.chat_template or "", "assistant").rendered(LONG, "").text
    assert [piece.removesuffix("<|im_end|>") for piece in pieces[1::2]] == [
        "Good morning. It is four — näturally ☕.",
        "Six.",
    ]
    (short,) = examples(config, 1, 100)
    assert "".join(short[1:]) == "".join(pieces)[:100] + " ..."


def test_the_generation_mask_is_that_of_transformers(tmp_path: Path) -> None:
    own = chat_tokenizer(tmp_path / "model", FAMILIES["smollm3"])
    template = Template(chat_template(of_folder(tmp_path / "model")), "assistant")
    encoder = Encoder((tmp_path / "model" / "tokenizer.json").read_bytes())
    for row in chats(30):
        chat = conversation(row, "messages", "here")
        _, counts = unmarked(tokens_of(encoder, template.rendered(chat, "here")))
        masks = own.apply_chat_template(
            chat["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )["assistant_masks"]
        assert counts.tolist() == [bool(m) for m in masks]


def test_rows_of_other_columns_become_conversations() -> None:
    asked, said = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
    share = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    for row, kind, right in (
        ({"conversations": share}, "messages", [asked, said]),
        ({"messages": json.dumps([asked, said])}, "messages", [asked, said]),
        ({"prompt": "Q", "completion": "A"}, "pairs", [asked, said]),
        ({"prompt": [asked], "completion": [said]}, "pairs", [asked, said]),
        ({"instruction": "Q", "input": "", "output": "A"}, "pairs", [asked, said]),
        ({"instruction": "Q", "input": "I", "output": "A"}, "pairs", [{**asked, "content": "Q\n\nI"}, said]),
        ({"system": "S", "prompt": "Q", "response": "A"}, "pairs", [{"role": "system", "content": "S"}, asked, said]),
    ):
        assert kind_of(row, "text") == kind
        assert conversation(row, kind, "here")["messages"] == right
    assert kind_of({"text": "x", "messages": []}, "text") == "text", "the named column goes first"
    assert kind_of({"text": "x", "messages": []}, "body") == "messages"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert conversation({"messages": share, "tools": json.dumps(tools)}, "messages", "here")["tools"] == tools


def test_tables_hold_conversations_and_pairs(tmp_path: Path) -> None:
    """Parquet, CSV and a list in JSON give the tokens of the same rows in JSONL."""
    pairs = [{"prompt": f"What is {k} plus {k}?", "completion": f"It is {2 * k}."} for k in range(40)]
    rows = chats(40)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    (tmp_path / "chat.json").write_text(json.dumps(rows))
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["prompt", "completion"])
        table.writeheader()
        table.writerows(pairs)
    pq.write_table(pa.Table.from_pylist(pairs), tmp_path / "pairs.parquet")
    tokenizer = chat_tokenizer(tmp_path / "model", FAMILIES["smollm3"])
    assert tokenizer.chat_template is not None

    def of(path: str) -> bytes:
        data = DataConfig(path=path, tokenizer=str(tmp_path / "model"), cache=str(tmp_path / "cache"), heldout=0)
        cache = TokenCache.build(resolved(data), 400, context=64)
        return np.asarray(cache.train).tobytes()

    for kind, others, given in (("chat", ("parquet", "json"), rows), ("pairs", ("csv", "parquet"), pairs)):
        right = of(write_rows(tmp_path / f"{kind}.jsonl", given))
        for other in others:
            assert of(str(tmp_path / f"{kind}.{other}")) == right


# Rows -----------------------------------------------------------------------------------------------------------------


def test_packing_is_first_fit_and_loses_nothing() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 5000).tolist()
    rows = packed(lengths, 128)
    filled = np.bincount(rows, weights=lengths)
    assert filled.max() <= 128
    assert filled.sum() == sum(lengths)
    assert len(filled) < 1.05 * sum(lengths) / 128
    assert packed([60, 100, 60, 28], 128) == [0, 1, 0, 1]


def facts_of(tmp_path: Path, rows: list[dict[str, Any]], *overrides: str) -> tuple[RunFacts, TokenCache]:
    path = write_rows(tmp_path / "chat.jsonl", rows)
    asked = [f"data.path={path}", f"data.cache={tmp_path / 'cache'}", "data.chat_template=chatml"]
    config = load_config(None, [*EXACT, "model.context=64", "train.steps=12", *asked, *overrides])
    facts = RunFacts.of(config.model_copy(update={"data": resolved(config.data)}))
    cache = facts.data()
    assert isinstance(cache, TokenCache)
    return facts, cache


@pytest.mark.parametrize("pack", [True, False])
def test_a_cache_has_each_conversation_once_in_one_row(tmp_path: Path, pack: bool) -> None:
    rows = chats(200, silent=True)
    facts, cache = facts_of(tmp_path, rows, "data.heldout=0", f"data.pack={str(pack).lower()}")
    ids, counts = unmarked(cache.train)
    assert len(ids) % 64 == 1
    assert not counts[::64].any(), "the first token of a row would be predicted from another row"
    assert counts.sum() == cache.stats.counted
    encoder, template = Encoder(cache.tokenizer_json), Template(facts.config.data.chat_template or "", "assistant")
    whole = [tokens_of(encoder, template.rendered(conversation(row, "messages", ""), "")) for row in rows]
    held = [marked[:64] for marked in whole if (marked[:64] < SILENT).any()]
    assert cache.stats.documents == len(held)
    assert cache.stats.silent == 200 - len(held)
    assert cache.stats.truncated == sum(len(marked) > 64 for marked in whole)
    assert cache.stats.cut == sum(max(0, len(marked) - 64) for marked in whole)
    assert cache.stats.padding == len(ids) - 1 - sum(map(len, held))
    if not pack:
        assert (len(ids) - 1) // 64 == len(held)
    stored = [row.tobytes() for row in (np.asarray(cache.train[:-1]) & ~np.uint32(BEGINS)).reshape(-1, 64)]
    for marked in held:
        assert any(marked.tobytes() in row for row in stored)


def test_the_batch_counts_itself(tmp_path: Path) -> None:
    facts, cache = facts_of(tmp_path, chats(100, silent=True))
    source = facts.source(cache)
    assert isinstance(source, MicrobatchSource)
    assert source.windows == (len(cache.train) - 1) // 64
    seen = []
    for step in (0, 1, 30):
        found = [source.microbatch(step, index) for index in range(facts.config.microbatches)]
        right = sum(int((targets[:, :-1] < facts.spec.vocab).sum()) for _, targets in found)
        assert {int(n) for _, targets in found for n in targets[:, -1]} == {right}
        weights = [
            weighed(torch.from_numpy(targets), TOKENS, 64, facts.spec.vocab, len(found))[1] for _, targets in found
        ]
        assert sum(weights) == pytest.approx(len(found))
        seen += [inputs for inputs, _ in found]
    assert all(int(inputs.max()) < facts.spec.vocab for inputs in seen)


def test_a_column_that_cannot_be_is_refused() -> None:
    targets = torch.tensor([[1, 2, 9, 9, 2], [9, 9, 9, 9, 2]])
    assert weighed(targets, TOKENS, 4, 9, 3)[1] == 3.0
    for wrong in (1, 0, -5):
        with pytest.raises(ProtocolError, match="count here"):
            weighed(torch.cat([targets[:, :-1], torch.full((2, 1), wrong)], 1), TOKENS, 4, 9, 3)
    uneven = targets.clone()
    uneven[1, -1] = 4
    with pytest.raises(ProtocolError, match="2 to 4 in the batch"):
        weighed(uneven, TOKENS, 4, 9, 3)


def test_an_epoch_is_every_row_once(tmp_path: Path) -> None:
    facts, cache = facts_of(tmp_path, chats(100))
    source = facts.source(cache)
    assert isinstance(source, MicrobatchSource)
    starts = source.window_starts(0, source.windows)
    assert sorted(starts.tolist()) == list(range(0, 64 * source.windows, 64))


# A fleet --------------------------------------------------------------------------------------------------------------


def ragged(rows: int = 60) -> list[dict[str, Any]]:
    """Some microbatches have many targets that count, some a few, and some none."""
    found = chats(rows, seed=3)
    found += [{"messages": [{"role": "user", "content": "What? " * 80}, {"role": "assistant", "content": "No."}]}] * 2
    return found


def equals_one_process(tmp_path: Path, *overrides: str, **options: Any) -> list[Event]:
    """Checks losses and weights."""
    facts, cache = facts_of(tmp_path, ragged(), "data.pack=false", "train.microbatch=2", *overrides)
    source = facts.source(cache)
    torch.set_num_threads(1)
    expected, losses = train_plainly(facts, source)
    events = run_fleet(facts.config, tmp_path / "run", **options)
    assert relative_difference(checkpoint_weights(tmp_path / "run"), expected) <= 1e-5
    done = [e for e in events if isinstance(e, StepDone)]
    assert [e.loss for e in done] == pytest.approx(losses, abs=1e-4)
    return events


def test_a_fleet_takes_the_mean_over_what_counts_though_a_peer_is_killed(tmp_path: Path) -> None:
    """fp32, 2 stages x 2 peers: every tensor within 1e-5 of a plain loop that takes the mean over the batch."""
    killed: list[Event] = []

    def watch(fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 5 and not killed:
            os.killpg(fleet.pid("peer-3"), signal.SIGKILL)
            killed.append(event)

    equals_one_process(tmp_path, watch=watch, lost=frozenset({"peer-3"}))
    assert killed


def test_a_hub_takes_the_mean_over_what_counts(tmp_path: Path) -> None:
    profile = tmp_path / "fleet.toml"
    profile.write_text('[[machines]]\nname = "home"\ncount = 8\n[pacing]\nforward_ms = 40.0\nbackward_ms = 80.0\n')
    hub = ("hub.clients=4", "train.microbatch=4", "train.steps=6", "compute.threads=1", f"fleet.profile={profile}")
    events = equals_one_process(tmp_path, *hub)
    facts, _ = facts_of(tmp_path, ragged(), *hub)
    check_every_microbatch_once(events, facts)


def test_swapping_takes_the_mean_over_what_counts(tmp_path: Path) -> None:
    swap = ("swap.whole=true", "fleet.stages=1", "fleet.peers=2", "compute.threads=1", "train.steps=6")
    equals_one_process(tmp_path, *swap, each=lambda name: {"memory_gib": 0.003})


# Wrong input ----------------------------------------------------------------------------------------------------------

ASKED = {"role": "user", "content": "Q"}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": []}, r"chat.jsonl:3: 'messages' has no message"),
        ({"messages": "hello"}, r"chat.jsonl:3: 'messages' is str; give a list of messages"),
        ({"messages": [ASKED, "x"]}, r"chat.jsonl:3: message 2 of 'messages' is str"),
        ({"messages": [{"content": "x"}]}, r"message 1 of 'messages' has content; give a 'role' and a 'content'"),
        ({"messages": [{"role": "user"}]}, r"message 1 of 'messages' has role"),
        (
            {"prompt": "x"},
            r"chat.jsonl:3: none of the columns messages, conversations, conversation is there, but prompt",
        ),
        ({"messages": [ASKED], "tools": "{"}, r"chat.jsonl:3: 'tools' is not JSON"),
        ({"messages": [{"role": "user", "content": 5}]}, r"chat.jsonl:3: the template does not take this conversation"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        facts_of(tmp_path, [*chats(2), row])
    assert not list((tmp_path / "cache").rglob(".building-*"))


def test_what_a_template_cannot_do_is_said(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chat.jsonl", chats(3))
    with pytest.raises(DataError, match=r"declares no chat template.*set it to 'chatml', to a file of Jinja text"):
        resolved(DataConfig(path=path))
    with pytest.raises(DataError, match=r"'nothing at all' is no file|cannot load"):
        resolved(DataConfig(path=path, chat_template="nothing at all"))
    with pytest.raises(DataError, match="holds plain text, not conversations"):
        resolved(DataConfig(path="pydoc", chat_template="chatml"))
    with pytest.raises(DataError, match="'text', but a chat template writes special tokens"):
        resolved(DataConfig(path=path, chat_template="chatml", special_tokens="text"))
    with pytest.raises(DataError, match=r"it is no Jinja template \(line 1: "):
        Template("{% for", "all").rendered(LONG, "here")
    chat_tokenizer(tmp_path / "model", MISTRAL)
    system = {"messages": [{"role": "system", "content": "S"}, *LONG["messages"]], "tools": None}
    with pytest.raises(DataError, match=r"here: .*Only user and assistant roles are supported!"):
        Template(chat_template(of_folder(tmp_path / "model")), "assistant").rendered(system, "here")


def test_conversations_in_which_nothing_counts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="in none of 9 conversations anything counts"):
        facts_of(tmp_path, [{"messages": [ASKED]}] * 9, "data.heldout=0")


def test_text_among_conversations_is_refused(tmp_path: Path) -> None:
    (tmp_path / "z.txt").write_text("plain text")
    path = write_rows(tmp_path / "chat.jsonl", chats(3))
    data = resolved(DataConfig(path=f"{path},{tmp_path / 'z.txt'}", chat_template="chatml", cache=str(tmp_path / "c")))
    with pytest.raises(DataError, match=r"z.txt is text, and this run trains conversations"):
        TokenCache.build(data, 512, context=64)


def test_a_resolved_template_stays_as_it_is(tmp_path: Path) -> None:
    chat_tokenizer(tmp_path / "model", QWEN_3)
    path = write_rows(tmp_path / "chat.jsonl", chats(3))
    once = resolved(DataConfig(path=path, tokenizer=str(tmp_path / "model"), loss_on="last"))
    assert once.format == "messages"
    assert resolved(once.model_copy(update={"tokenizer": "elsewhere"})) == once.model_copy(
        update={"tokenizer": "elsewhere"}
    )
