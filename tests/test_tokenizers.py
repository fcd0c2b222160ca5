"""Tokenizers: trained on the corpus, from a file, from the folder or the name of a model; converted or refused."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from muletrain.config.schema import RunConfig
from muletrain.data.encoder import Encoder
from muletrain.data.tokenizer import END_OF_TEXT, check_own, load_tokenizer, train_tokenizer
from muletrain.errors import DataError
from muletrain.runs.assemble import resolve_start
from tests.corpora import build, folder, words
from tests.traced_models import write_folder, write_text

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["folder"]

TEXT = "Paragraph number 7 speaks\n\nof  ünïcode 𝄞 and </s> its load."


def write_bpe(where: Path) -> None:
    """GPT-2's files: vocab.json and merges.txt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(words(0, 200), trainer)
    tokenizer.model.save(str(where))
    (where / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (where / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))


def write_sentencepiece(where: Path, kind: str) -> None:
    """Llama's files: tokenizer.model and tokenizer_config.json."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words(0, 200)),
        model_prefix=str(where / "tokenizer"),
        vocab_size=290,
        model_type=kind,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (where / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (where / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("write", "end"),
    [
        (write_bpe, END_OF_TEXT),
        (lambda where: write_sentencepiece(where, "bpe"), "</s>"),
        (lambda where: write_sentencepiece(where, "unigram"), "</s>"),
    ],
    ids=["vocab+merges", "sentencepiece bpe", "sentencepiece unigram"],
)
def test_a_model_without_tokenizer_json_has_its_own_converted(
    write: Callable[[Path], None], end: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model").mkdir()
    write(folder / "model")
    own = AutoTokenizer.from_pretrained(folder / "model")
    encoder = Encoder(load_tokenizer("model", 300))
    assert encoder.prompt(TEXT) == own(TEXT).input_ids
    assert encoder.document(TEXT) == [*own(TEXT).input_ids, own.convert_tokens_to_ids(end)]
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert load_tokenizer("model", 300) == encoder_json(encoder), "what was converted once is kept"


def encoder_json(encoder: Encoder) -> bytes:
    return encoder.tokenizer.to_str(pretty=True).encode()


def test_pretrained_weights_never_get_a_new_tokenizer(folder: Path) -> None:
    write_folder(folder / "model", write_text(folder / "a.txt"), "gpt2")
    for file in (folder / "model").glob("*token*"):
        file.unlink()
    given = {"model": {"from": str(folder / "model"), "context": 16}, "data": {"path": "a.txt"}}
    with pytest.raises(
        DataError, match=r"data\.tokenizer: .*model has no tokenizer .* a new one would not fit its weights"
    ):
        resolve_start(RunConfig.model_validate(given))
    train_tokenizer(iter(words(0, 200)), 300).save(str(folder / "own.json"))
    given["data"]["tokenizer"] = "own.json"
    assert resolve_start(RunConfig.model_validate(given)).data.tokenizer == "own.json"
    given["data"]["tokenizer"] = "train"
    write_bpe_into(folder / "model")
    config = resolve_start(RunConfig.model_validate(given))
    assert config.data.tokenizer == str(folder / "model")
    cache = build(config.model.vocab, **config.data.model_dump())
    assert Encoder(cache.tokenizer_json).prompt(TEXT) == AutoTokenizer.from_pretrained(folder / "model")(TEXT).input_ids


def write_bpe_into(where: Path) -> None:
    """The same, beside the model's own configuration."""
    config = (where / "config.json").read_bytes()
    write_bpe(where)
    (where / "config.json").write_bytes(config)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"vocab.json": "{"}, r"data\.tokenizer: cannot load 'model': .*Check its files, or give a tokenizer\.json"),
        ({"tokenizer.model": "not SentencePiece"}, r"data\.tokenizer: cannot load 'model'"),
        ({"spiece.model": "\0"}, r"data\.tokenizer: cannot load 'model'"),
        (
            {"vocab.json": "{}", "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["own.Own", null]}}'},
            r"data\.tokenizer: cannot load 'model'",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(files: dict[str, str], reason: str, folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name, content in files.items():
        (folder / "model" / name).write_text(content)
    with pytest.raises(DataError, match=reason):
        load_tokenizer("model", 300)


def test_a_trained_tokenizer_is_exact() -> None:
    tokenizer = train_tokenizer(iter(words(0, 200)), 300)
    text = "  Ünïcode 𝄞\r\n\n\tnew end"
    encoder = Encoder(tokenizer.to_str().encode())
    assert encoder.decode(encoder.prompt(text)) == text
    assert encoder.document(f"a{END_OF_TEXT}b") == [*encoder.prompt("a"), 0, *encoder.prompt("b"), 0]
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    assert tokenizer.get_vocab_size() == 300


def test_vocabulary_too_small_for_bytes() -> None:
    with pytest.raises(DataError, match=r"model\.vocab: 256 .* at least 257"):
        train_tokenizer(iter(["text"]), 256)


def test_loaded_tokenizer_must_fit_and_does_not_truncate(folder: Path) -> None:
    tokenizer = train_tokenizer(iter(words(0, 200)), 300)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    (folder / "model").mkdir()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    for name in ("model", "model/tokenizer.json"):
        with pytest.raises(
            DataError, match=r"data\.tokenizer: '.*' has 300 tokens, model\.vocab = 299; .*at least 300"
        ):
            load_tokenizer(name, 299)
        loaded = Encoder(load_tokenizer(name, 300))
        for text in ("a long text of many tokens", "a"):
            assert loaded.decode(loaded.prompt(text)) == text


def test_a_special_token_beyond_the_vocabulary_needs_no_room_in_it(folder: Path) -> None:
    """Gemma 3's tokenizer has one for images, which its text model has not."""
    tokenizer = train_tokenizer(iter(["a mule carries loads and more loads"] * 9), 270)
    tokenizer.add_special_tokens(["<image>"])
    (folder / "model").mkdir()
    tokenizer.save("model/tokenizer.json")
    check_own(folder / "model", 270)
    load_tokenizer("model", 270)
    tokenizer.add_tokens(["carriesloads"])
    tokenizer.save("model/tokenizer.json")
    with pytest.raises(DataError, match="has 272 tokens, and its model 270"):
        check_own(folder / "model", 270)


def test_bad_tokenizers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"data\.tokenizer: bad\.json is not a tokenizer\.json"):
        load_tokenizer("bad.json", 300)
    with pytest.raises(DataError, match=r"data\.tokenizer: no such file: 'missing\.json'"):
        load_tokenizer("missing.json", 300)

    class Offline:
        @staticmethod
        def from_pretrained(name: str, **_: Any) -> None:
            raise OSError(f"We couldn't connect to load {name}.\nmore lines")

    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=Offline))
    with pytest.raises(
        DataError, match=r"cannot load 'gpt2' from Hugging Face: We couldn't connect.*give a tokenizer\.json$"
    ):
        load_tokenizer("gpt2", 300)


def test_the_end_of_a_document_is_declared_or_named_and_never_guessed(folder: Path) -> None:
    """The file of GPT-2's tokenizer has the usual token, but does not declare its use."""
    bare = json.loads(train_tokenizer(iter(words(0, 200)), 300).to_str()) | {"post_processor": None}
    (folder / "bare.json").write_text(json.dumps(bare))
    with pytest.raises(DataError, match=r"declares no token .* set data\.end_token to one of <\|endoftext\|>"):
        load_tokenizer("bare.json", 300)
    named = Encoder(load_tokenizer("bare.json", 300, END_OF_TEXT))
    assert (named.end_token, named.document("mule")[-1]) == (END_OF_TEXT, 0)
    (folder / "own.json").write_bytes(train_tokenizer(iter(words(0, 200)), 300).to_str().encode())
    assert Encoder(load_tokenizer("own.json", 300)).end_token == END_OF_TEXT, "ours declares it"


def test_hugging_face_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedTokenizerFast

    inner = train_tokenizer(iter(words(0, 200)), 300)
    whole = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END_OF_TEXT)
    fast = types.SimpleNamespace(from_pretrained=lambda _name, **_: whole)
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=fast))
    assert Encoder(load_tokenizer("name", 300)).document("mule") == inner.encode("mule").ids
    slow = types.SimpleNamespace(from_pretrained=lambda _name, **_: object())
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=slow))
    with pytest.raises(DataError, match=r"'name' has no tokenizer\.json"):
        load_tokenizer("name", 300)
