"""Corpora: paragraphs of files and data sets, held-out text, tokenizers, and errors that say what to do."""

from __future__ import annotations

import gzip
import json
import math
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muletrain.config.model_sections import DataConfig
from muletrain.data.corpus import PARAGRAPH_LIMIT, Corpus, is_heldout, split_paragraphs
from muletrain.data.lines import reading
from muletrain.data.tokenizer import END_OF_TEXT, check_own, load_tokenizer, train_tokenizer
from muletrain.data.tokens import TokenCache
from muletrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
from tests.corpora import folder, texts, words

__all__ = ["folder"]


# Corpora


def test_paragraphs_keep_their_lines_and_close_with_an_empty_one() -> None:
    lines = ["\n", "a\n", "  b\n", " \t\n", "\n", "c"]
    assert list(split_paragraphs(lines)) == ["a\n  b\n\n", "c\n\n"]


def test_text_without_blank_lines_is_cut_at_a_line_end() -> None:
    line = "x" * 99 + "\n"
    parts = list(split_paragraphs([line] * 100))
    assert len(parts) > 1
    assert all(len(part) <= PARAGRAPH_LIMIT + 100 and part.endswith("x\n") for part in parts[:-1])
    assert "".join(parts).rstrip() == (line * 100).rstrip()


def test_all_formats_give_the_same_paragraphs(folder: Path) -> None:
    documents = ["One.\n\nTwo, of\nlines.\n", "Drei: äöü 𝄞\n"]
    expected = ["One.\n\n", "Two, of\nlines.\n\n", "Drei: äöü 𝄞\n\n"]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbf" + "\n".join(documents).replace("\n", "\r\n").encode())
    (folder / "a.jsonl").write_text(rows)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    pq.write_table(pa.table({"other": [1, 2], "text": documents}), folder / "a.parquet", row_group_size=1)
    for name in ("a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"):
        assert texts(name) == expected, name


def test_long_lines_survive_in_pieces(folder: Path) -> None:
    # 1, 2 and 4 bytes: pieces end inside characters
    text = "".join(np.random.default_rng(0).choice(list("xß𝄞"), 5 * PARAGRAPH_LIMIT).tolist())
    (folder / "a.txt").write_text(text)
    assert "".join(texts("a.txt")) == text + "\n\n"


def test_globs_are_sorted_and_files_read_once(folder: Path) -> None:
    for name in ("b", "a", "c"):
        (folder / f"{name}.txt").write_text(f"This is {name}.")
    assert texts("b.txt, *.txt") == ["This is b.\n\n", "This is a.\n\n", "This is c.\n\n"]


def test_duplicates_go_whatever_their_white_space(folder: Path) -> None:
    (folder / "a.txt").write_text("same  text\n\nother\n\nsame\n text\n\nSame text\n")
    corpus = Corpus(DataConfig(path="a.txt"))
    assert [paragraph.text for paragraph in corpus.paragraphs()] == ["same  text\n\n", "other\n\n", "Same text\n\n"]
    assert corpus.duplicates == 1
    assert corpus.fraction == 1.0


@given(st.sampled_from([0.01, 0.05, 0.2, 0.45]))
@settings(deadline=None)
def test_held_out_share_is_about_right(share: float) -> None:
    n = 4000
    held = sum(is_heldout(text, share) for text in words(0, n))
    assert abs(held - n * share) < 4 * math.sqrt(n * share * (1 - share))


def test_adding_a_file_moves_no_text_between_sides(folder: Path) -> None:
    def heldout(path: str) -> set[str]:
        return {text for text in texts(path) if is_heldout(text, 0.2)}

    (folder / "b.txt").write_text("\n\n".join(words(0, 300)))
    before = heldout("*.txt")
    (folder / "a.txt").write_text("\n\n".join(words(200, 300)))
    assert before
    assert before < heldout("*.txt")
    assert heldout("*.txt") & set(texts("b.txt")) == before


def test_half_surrogates_in_json_become_replacement_characters(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": null}\n')
    assert texts("a.jsonl") == ["a\ufffdb\n\n"]


def test_pydoc_has_many_duplicates() -> None:
    corpus = Corpus(DataConfig())
    unique = [paragraph.text for paragraph in corpus.paragraphs()]
    assert len(unique) > 1500
    assert corpus.duplicates > 200
    assert len({" ".join(text.split()) for text in unique}) == len(unique)


def write_bad_files() -> None:
    Path("empty.txt").write_text("\n \n")
    Path("latin.txt").write_bytes(b"a" * 5000 + "\nein b\xe4r".encode("latin-1"))
    Path("latin.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe4"}\n')
    Path("deep.jsonl").write_text('{"text": "a"}\n' + "[" * 100_000 + "\n")
    Path("long.txt").write_bytes(b"line\n" * 3 + b"x" * 9000 + b"\xff and so on\n")
    Path("cut.txt").write_bytes("ende ä".encode()[:-1])
    Path("field.jsonl").write_text('{"text": "a"}\n{"body": "b", "id": 1}\n')
    Path("number.jsonl").write_text('{"text": 3}\n')
    Path("list.jsonl").write_text("[1]\n")
    Path("broken.jsonl").write_text('{"text": "a"}\n\n{"text": \n')
    Path("half.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abc"}\n' * 99)[:-20])
    Path("bad.parquet").write_bytes(b"not parquet at all")
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), "field.parquet")
    Path("sub").mkdir()
    Path("sub/x.md").write_text("x")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing*.txt", r"data\.path: no file matches 'nothing\*\.txt'.*check the path"),
        ("nothing.txt", r"data\.path: no such file: 'nothing\.txt'"),
        ("sub", r"data\.path: sub is a folder; .*'sub/\*\.md'"),
        (" , ", r"data\.path: empty"),
        ("empty.txt", r"data\.path: the corpus 'empty\.txt' has no text; check the files"),
        ("latin.txt", r"data\.path: latin\.txt:2: not UTF-8 text \(byte 0xe4\); convert"),
        ("latin.jsonl", r"data\.path: latin\.jsonl:2: not UTF-8 text"),
        ("cut.txt", r"data\.path: cut\.txt:1: not UTF-8 text"),
        ("long.txt", r"data\.path: long\.txt:4: not UTF-8 text \(byte 0xff\)"),
        ("deep.jsonl", r"data\.path: deep\.jsonl:2: not JSON"),
        ("field.jsonl", r"data\.path: field\.jsonl:2: no 'text'; set data\.field to one of: body, id"),
        ("field.parquet", r"data\.path: field\.parquet: no 'text'; set data\.field to one of: body, id"),
        ("number.jsonl", r"data\.path: number\.jsonl:1: 'text' is int, not text"),
        ("list.jsonl", r"data\.path: list\.jsonl:1: a JSON list"),
        ("broken.jsonl", r"data\.path: broken\.jsonl:3: not JSON: Expecting value; a"),
        ("half.jsonl.gz", r"data\.path: cannot read half\.jsonl\.gz.*complete\?"),
        ("bad.parquet", r"data\.path: cannot read bad\.parquet"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_errors_name_field_file_and_remedy(path: str, message: str) -> None:
    write_bad_files()
    with pytest.raises(DataError, match=message):
        TokenCache.build(DataConfig(path=path), 300)


def test_a_file_that_may_not_be_read() -> None:
    with (
        pytest.raises(DataError, match=r"data\.path: a\.txt: Permission denied; make it readable"),
        reading(Path("a.txt")),
    ):
        raise PermissionError(13, "Permission denied")


def test_hugging_face_datasets_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> Iterator[dict[str, str]]:
        calls.append((args, kwargs))
        return iter([{"body": "First."}, {"body": "Second.\n\nThird."}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert texts("hf:org/name@main:en", "body") == ["First.\n\n", "Second.\n\n", "Third.\n\n"]
    assert calls == [(("org/name", "en"), {"split": "train", "streaming": True, "revision": "main"})]
    with pytest.raises(DataError, match=r"hf:org/name: row 0: no 'text'; set data\.field to one of: body"):
        texts("hf:org/name")


@pytest.mark.slow
def test_a_hugging_face_folder_is_read_by_the_library_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    pytest.importorskip("datasets", reason="the package datasets is not installed: pip install '.[dev]'")
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text('{"body": "Of JSON."}\n{"body": "Second.\\n\\nThird."}\n')
    (folder / "rows" / "validation.jsonl").write_text('{"body": "Not to be trained on."}\n')
    (folder / "table").mkdir()
    pq.write_table(pa.table({"text": words(0, 500)}), folder / "table" / "train.parquet", row_group_size=100)
    assert texts("hf:rows", "body") == ["Of JSON.\n\n", "Second.\n\n", "Third.\n\n"]
    assert texts(f"hf:{folder / 'table'}") == [f"{text}\n\n" for text in words(0, 500)]
    with pytest.raises(DataError, match=r"hf:rows: row 0: no 'text'; set data\.field to one of: body"):
        texts("hf:rows")
    with pytest.raises(DataError, match=r"cannot read Hugging Face dataset 'no/such'"):
        texts("hf:no/such")
    before = TokenCache.build(DataConfig(path="hf:table"), 300)
    pq.write_table(pa.table({"text": words(0, 501)}), folder / "table" / "train.parquet")
    assert TokenCache.build(DataConfig(path="hf:table"), 300).digest != before.digest, (
        "the folder's files are what counts"
    )


def test_hugging_face_failures_teach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r'data\.path.*pip install "muletrain\[datasets\]"'):
        texts("hf:name")

    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match=r"data\.path: cannot read .*'name': no route; check the name"):
        texts("hf:name")


# Tokenizers


def test_trained_tokenizer_is_exact_and_ignores_special_spelling() -> None:
    tokenizer = train_tokenizer(iter(words(0, 200)), 300)
    text = f"  Ünïcode 𝄞\n\n\tnew {END_OF_TEXT} end"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert 0 not in ids
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
        loaded = load_tokenizer(name, 300)
        assert loaded.decode(loaded.encode("a long text of many tokens").ids) == "a long text of many tokens"
        assert loaded.decode(loaded.encode("a").ids) == "a"


def test_a_special_token_beyond_the_vocabulary_needs_no_room_in_it(tmp_path: Path) -> None:
    """Gemma 3's tokenizer has one for images, which its text model has not. No text becomes a special token."""
    tokenizer = train_tokenizer(iter(["a mule carries loads and more loads"] * 9), 270)
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(tmp_path / "own.json"))
    check_own(tmp_path / "own.json", 270)
    loaded = load_tokenizer(str(tmp_path / "own.json"), 270)
    assert max(loaded.encode("a mule <image>").ids) < 270
    tokenizer.add_tokens(["carriesloads"])
    tokenizer.save(str(tmp_path / "own.json"))
    with pytest.raises(DataError, match="has 272 tokens, and its model 270"):
        check_own(tmp_path / "own.json", 270)


def test_bad_tokenizers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"data\.tokenizer: bad\.json is not a tokenizer\.json"):
        load_tokenizer("bad.json", 300)
    with pytest.raises(DataError, match=r"data\.tokenizer: no such file: 'missing\.json'"):
        load_tokenizer("missing.json", 300)

    class Offline:
        @staticmethod
        def from_pretrained(name: str) -> None:
            raise OSError(f"We couldn't connect to load {name}.\nmore lines")

    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=Offline))
    with pytest.raises(DataError, match=r"cannot load 'gpt2' from Hugging Face: We couldn't connect.*give that file$"):
        load_tokenizer("gpt2", 300)


def test_hugging_face_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedTokenizerFast

    inner = train_tokenizer(iter(words(0, 200)), 300)
    fast = types.SimpleNamespace(from_pretrained=lambda _name: PreTrainedTokenizerFast(tokenizer_object=inner))
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=fast))
    assert load_tokenizer("org/name", 300).encode("mule").ids == inner.encode("mule").ids
    slow = types.SimpleNamespace(from_pretrained=lambda _name: object())
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=slow))
    with pytest.raises(DataError, match=r"'org/name' has no tokenizer\.json"):
        load_tokenizer("org/name", 300)
