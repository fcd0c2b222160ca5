"""One rule turns text into tokens, in training, in held-out text and in prompts: that of the model's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from muletrain.data import encoder as encoder_module
from muletrain.data.encoder import Encoder, without_end
from muletrain.data.tokenizer import load_tokenizer, train_tokenizer
from muletrain.errors import DataError
from tests.corpora import build, folder, words, write_rows

__all__ = ["folder"]

SPECIAL = ["<unk>", "<|begin|>", "<|im_start|>", "<|im_end|>", "<|stop|>"]
CHAT = "<|im_start|>user\nIs 3 even?<|im_end|>\n<|im_start|>assistant\nno<|im_end|>"


def write_model(where: Path, **declared: Any) -> Any:
    """A model's folder, whose tokenizer begins each text with a token. Returns the tokenizer as ``transformers`` has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        words(0, 50),
        trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>", **declared).save_pretrained(where)
    return AutoTokenizer.from_pretrained(where)


def test_documents_are_encoded_as_the_models_own_tokenizer_does(folder: Path) -> None:
    own = write_model(folder / "model", eos_token="<|stop|>")
    write_rows(folder / "a.jsonl", [{"text": f"{CHAT} {n}"} for n in range(40)])
    cache = build(path="a.jsonl", tokenizer="model")
    end = own.convert_tokens_to_ids("<|stop|>")
    expected = [[*own(f"{CHAT} {n}").input_ids, end] for n in range(40)]
    assert expected[0][:2] == [1, 2]
    sides = [tokens.tolist() for tokens in (cache.train, cache.heldout)]
    for side in sides:
        ends = [k + 1 for k, token in enumerate(side) if token == end]
        for begin, stop in zip([0, *ends], ends, strict=False):
            expected.remove(side[begin:stop])
    assert expected == []
    assert cache.stats.special == 160
    assert cache.stats.changes() == ["160 special tokens in the text count as such (data.special_tokens)"]


def test_special_tokens_may_stay_text(folder: Path) -> None:
    own = write_model(folder / "model", eos_token="<|stop|>")
    write_rows(folder / "a.jsonl", [{"text": CHAT}])
    cache = build(path="a.jsonl", tokenizer="model", special_tokens="text", heldout=0)
    own.backend_tokenizer.encode_special_tokens = True
    assert cache.train.tolist() == [*own.backend_tokenizer.encode(CHAT).ids, 4]
    assert cache.stats.special == 0
    assert Encoder(cache.tokenizer_json, "text").prompt(CHAT) == cache.train.tolist()[:-1]


def test_prompts_begin_as_documents_do_and_generation_stops_at_their_end(folder: Path) -> None:
    own = write_model(folder / "model", eos_token="<|stop|>")
    encoder = Encoder(load_tokenizer("model", 300))
    assert encoder.prompt(CHAT) == own(CHAT).input_ids
    assert encoder.document(CHAT) == [*encoder.prompt(CHAT), 4]
    assert (encoder.begin_token, encoder.end_token) == ("<|begin|>", "<|stop|>")
    rendered = f"<|begin|>{CHAT}<|stop|>"
    assert encoder.document(rendered) == encoder.document(CHAT), "what a chat template wrote is not there twice"


def test_a_continuation_keeps_its_first_space() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "b": 2, "▁a": 3, "▁b": 4}, merges=[("▁", "a"), ("▁", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    encoder = Encoder(tokenizer.to_str().encode())
    assert encoder.continuation([3], [4, 4]) == " b b"


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|stop|>"}, "config.json": {"eos_token_id": 3}}, "<|stop|>"),
        ({"config.json": {"model_type": "llama", "eos_token_id": [3, 4]}}, "<|im_end|>"),
        ({"generation_config.json": {"eos_token_id": 3}}, "<|im_end|>"),
    ],
)
def test_the_model_declares_what_ends_a_document(files: dict[str, Any], end: str, folder: Path) -> None:
    write_model(folder / "model")
    (folder / "model" / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (folder / "model" / name).write_text(json.dumps(content))
    assert Encoder(load_tokenizer("model", 300)).end_token == end
    assert Encoder(load_tokenizer("model/tokenizer.json", 300)).end_token == end
    assert Encoder(load_tokenizer("model", 300, "<|im_start|>")).end_token == "<|im_start|>"


def test_without_an_end_token_a_corpus_is_refused(folder: Path) -> None:
    write_model(folder / "model")
    (folder / "a.txt").write_text("Text.")
    with pytest.raises(
        DataError,
        match=r"data\.tokenizer: 'model' declares no token that ends a document .* set data\.end_token to one of <unk>, <\|b",
    ):
        build(path="a.txt", tokenizer="model")
    with pytest.raises(DataError, match=r"data\.end_token: 'model' has no token '<none>'; give one of <unk>"):
        build(path="a.txt", tokenizer="model", end_token="<none>")
    cache = build(path="a.txt", tokenizer="model", end_token="<|stop|>", heldout=0)
    assert cache.train.tolist()[-1] == 4


def test_a_special_token_for_which_the_model_has_no_row_is_refused_where_the_text_has_it(folder: Path) -> None:
    tokenizer = train_tokenizer(iter(["a mule carries loads and more loads"] * 9), 270)
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "own.json"))
    write_rows(folder / "a.jsonl", [{"text": "a mule"}, {"text": "a <image>"}])
    given = {"path": "a.jsonl", "tokenizer": "own.json", "heldout": 0}
    with pytest.raises(
        DataError, match=r"a\.jsonl:2: the text has the token '<image>' \(270\), and the model only 270; set"
    ):
        build(270, **given)
    assert max(build(270, special_tokens="text", **given).train) < 270
    assert 270 in build(271, **given).train


def test_text_that_the_tokenizer_does_not_know_is_counted(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"mule": 0, "<end>": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "own.json"))
    (folder / "a.txt").write_text("mule horse mule cow")
    cache = build(path="a.txt", tokenizer="own.json", end_token="<end>", heldout=0)
    assert cache.train.tolist() == [0, 2, 0, 2, 1]
    assert cache.stats.changes() == ["2 tokens of text that the tokenizer does not know: it is lost"]


def test_what_others_read_has_no_end_after_a_text(folder: Path) -> None:
    own = write_model(folder / "model", eos_token="<|stop|>")
    (folder / "out").mkdir()
    (folder / "out" / "tokenizer.json").write_bytes(without_end(load_tokenizer("model", 300)))
    read = AutoTokenizer.from_pretrained(folder / "out")
    assert read(CHAT).input_ids == own(CHAT).input_ids


@pytest.mark.parametrize(
    "text",
    ["Paragraph number 7 speaks of the mule. ", "a b, c.\n\n", "mule", "ab ", "ß𝄞", "日本語。", "\n \n\t "],
)
def test_a_long_document_has_the_tokens_of_the_whole(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "WINDOW", 500)
    monkeypatch.setattr(encoder_module, "OVERLAP", 40)
    write_model(folder / "model", eos_token="<|stop|>")
    encoder = Encoder(load_tokenizer("model", 300))
    whole = text * 777
    assert encoder.document(whole) == [*encoder.begun(encoder.tokenizer.encode(whole, add_special_tokens=False).ids), 4]
