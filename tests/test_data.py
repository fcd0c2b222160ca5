"""Corpora, token cache, microbatches and n-gram baselines."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muletrain.config.model_sections import DataConfig
from muletrain.data import tokens as tokens_module
from muletrain.data.corpus import PARAGRAPH_LIMIT, Corpus, is_heldout, split_paragraphs
from muletrain.data.lines import reading
from muletrain.data.microbatch import IGNORE, MicrobatchSource, heldout_batches, permute, round_keys
from muletrain.data.ngram import Counts, baselines
from muletrain.data.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from muletrain.data.tokens import TokenCache
from muletrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

SRC = Path(__file__).parent.parent / "src"


def words(start: int, count: int) -> list[str]:
    """Distinct paragraphs."""
    return [f"Paragraph number {n} speaks of the mule {n * n} and its load." for n in range(start, start + count)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; the cache goes beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture(scope="module")
def pydoc(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    return TokenCache.build(DataConfig(cache=str(tmp_path_factory.mktemp("pydoc"))), 1024)


def texts(path: str, field: str = "text") -> list[str]:
    return [paragraph.text for paragraph in Corpus(DataConfig(path=path, field=field)).paragraphs()]


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


# Token cache


def sides(cache: TokenCache) -> tuple[str, str]:
    return cache.decode(cache.train.tolist()), cache.decode(cache.heldout.tolist())


def test_cache_holds_each_paragraph_on_one_side(pydoc: TokenCache) -> None:
    train, heldout = sides(pydoc)
    assert pydoc.train.dtype == np.uint16
    assert not pydoc.train.flags.writeable
    expected: dict[bool, list[str]] = {False: [], True: []}
    for text in (paragraph.text for paragraph in Corpus(DataConfig()).paragraphs()):
        expected[is_heldout(text, 0.05)].append(text)
    assert train.replace(END_OF_TEXT, "") == "".join(expected[False])
    assert heldout.replace(END_OF_TEXT, "") == "".join(expected[True])
    normal = {" ".join(text.split()) for text in expected[False]}
    assert not normal & {" ".join(text.split()) for text in expected[True]}


def test_cache_counts(pydoc: TokenCache) -> None:
    stats = pydoc.stats
    train, heldout = (text.replace(END_OF_TEXT, "") for text in sides(pydoc))
    assert stats.train_bytes == len(train.encode())
    assert stats.heldout_bytes == len(heldout.encode())
    assert stats.characters == len(train) + len(heldout)
    assert (stats.train_tokens, stats.heldout_tokens) == (len(pydoc.train), len(pydoc.heldout))
    assert stats.paragraphs == len(texts("pydoc"))
    assert 0.03 < stats.heldout_paragraphs / stats.paragraphs < 0.07
    tokens = stats.train_tokens + stats.heldout_tokens
    assert 2 < (stats.train_bytes + stats.heldout_bytes) / tokens < 5
    assert pydoc.vocab == 1024


def test_documents_end_in_end_of_text(folder: Path) -> None:
    rows = [{"text": "\n\n".join(words(n * 10, 10))} for n in range(5)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cache = TokenCache.build(DataConfig(path="a.jsonl", heldout=0.1), 300)
    train, _ = sides(cache)
    parts = train.split(END_OF_TEXT)
    assert parts.pop() == ""
    for part, row in zip(parts, rows, strict=True):
        assert part == "".join(t + "\n\n" for t in row["text"].split("\n\n") if not is_heldout(t, 0.1))


def test_heldout_text_does_not_shape_the_vocabulary(folder: Path) -> None:
    marked = [text + " zq" * 50 if is_heldout(text + " zq" * 50, 0.3) else text for text in words(0, 300)]
    (folder / "a.txt").write_text("\n\n".join(marked))
    cache = TokenCache.build(DataConfig(path="a.txt", heldout=0.3), 300)
    assert "zq" in cache.decode(cache.heldout.tolist())
    assert not [token for token in json.loads(cache.tokenizer_json)["model"]["vocab"] if "zq" in token]


def test_bounded_batches_give_the_same_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.txt").write_text("\n\n".join(words(0, 500)))
    config = DataConfig(path="a.txt")
    whole = TokenCache.build(config, 300)
    monkeypatch.setattr(tokens_module, "_BATCH", 1 << 10)
    again = TokenCache.build(config.model_copy(update={"cache": str(folder / "other")}), 300)
    assert again.folder != whole.folder
    assert again.digest == whole.digest


def test_cache_is_reused_and_follows_content(folder: Path) -> None:
    (folder / "a.txt").write_text("\n\n".join(words(0, 200)))
    config = DataConfig(path="a.txt")
    progress: list[float] = []
    first = TokenCache.build(config, 300, progress.append)
    assert progress == sorted(progress)
    assert progress[-1] == 1.0
    assert len(progress) > 100
    assert first.folder.parent == folder.parent / "cache" / "muletrain" / "tokens"
    stamp = (first.folder / "train.bin").stat().st_mtime_ns
    reused: list[float] = []
    assert TokenCache.build(config, 300, reused.append).digest == first.digest
    assert reused == [1.0]
    assert (first.folder / "train.bin").stat().st_mtime_ns == stamp
    os.rename("a.txt", "b.txt")
    assert TokenCache.build(DataConfig(path="b.txt"), 300).folder == first.folder
    for changed in (
        TokenCache.build(DataConfig(path="b.txt"), 301),
        TokenCache.build(DataConfig(path="b.txt", heldout=0.1), 300),
    ):
        assert changed.digest != first.digest
    (folder / "b.txt").write_text("\n\n".join(words(1, 200)))
    assert TokenCache.build(DataConfig(path="b.txt"), 300).digest != first.digest


@pytest.mark.parametrize("name", ["train.bin", "heldout.bin", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_damaged_cache_is_rebuilt(folder: Path, name: str, damage: str) -> None:
    (folder / "a.txt").write_text("\n\n".join(words(0, 200)))
    config = DataConfig(path="a.txt")
    good = TokenCache.build(config, 300)
    file = good.folder / name
    content = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(content[:-2])
    elif damage == "flip":
        file.write_bytes(content[:1] + bytes([content[1] ^ 0x80]) + content[2:])
    else:
        file.unlink()
    assert TokenCache.open(good.folder) is None
    assert TokenCache.build(config, 300).digest == good.digest
    assert file.read_bytes() == content
    assert [path.name for path in good.folder.parent.iterdir()] == [good.folder.name]


def test_build_survives_removal_by_another_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that judged the old cache damaged may remove the new one: it is built again."""
    (folder / "a.txt").write_text("\n\n".join(words(0, 200)))
    replace = os.replace
    removed: list[Path] = []

    def replace_then_lose(source: Path, target: Path) -> None:
        replace(source, target)
        if not removed:
            removed.append(target)
            shutil.rmtree(target)

    monkeypatch.setattr(os, "replace", replace_then_lose)
    cache = TokenCache.build(DataConfig(path="a.txt"), 300)
    assert removed == [cache.folder]
    assert TokenCache.open(cache.folder) is not None


def _build_at(barrier: Any, queue: Any, config: DataConfig) -> None:
    barrier.wait(60)
    queue.put(TokenCache.build(config, 300).digest)


def test_several_processes_build_at_once(folder: Path) -> None:
    (folder / "a.txt").write_text("\n\n".join(words(0, 2000)))
    config = DataConfig(path=str(folder / "a.txt"), cache=str(folder / "cache"))
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_build_at, args=(barrier, queue, config)) for _ in range(3)]
    for process in processes:
        process.start()
    digests = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(set(digests)) == 1
    assert len(list((folder / "cache" / "tokens").iterdir())) == 1


def test_digest_does_not_depend_on_the_process(pydoc: TokenCache, tmp_path: Path) -> None:
    code = (
        "from muletrain.data.tokens import TokenCache; from muletrain.config.schema import DataConfig; "
        f"print(TokenCache.build(DataConfig(cache={str(tmp_path)!r}), 1024).digest)"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONHASHSEED": "77", "RAYON_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=180, check=True
    )
    assert done.stdout.strip() == pydoc.digest


def test_loaded_tokenizer_gives_wide_tokens_and_its_json(folder: Path) -> None:
    (folder / "a.txt").write_text("\n\n".join(words(0, 200)))
    tokenizer = train_tokenizer(iter(words(0, 200)), 300)
    description = json.loads(tokenizer.to_str())
    description["added_tokens"][0]["id"] = 70000  # beyond 16 bits
    description["model"]["vocab"][END_OF_TEXT] = 70000
    (folder / "t.json").write_text(json.dumps(description))
    cache = TokenCache.build(DataConfig(path="a.txt", tokenizer="t.json"), 70001)
    assert cache.train.dtype == np.uint32
    assert (cache.vocab, cache.end_of_text, int(cache.train[-1])) == (70001, 70000, 70000)
    assert json.loads(cache.tokenizer_json)["model"]["vocab"][END_OF_TEXT] == 70000
    with pytest.raises(DataError, match=r"has 70001 tokens, model\.vocab = 70000"):
        TokenCache.build(DataConfig(path="a.txt", tokenizer="t.json"), 70000)


def test_nothing_held_out_says_so(folder: Path) -> None:
    (folder / "a.txt").write_text("Only one paragraph.")
    with pytest.raises(DataError, match=r"data\.heldout: none of 1 paragraphs is (held out|left for training)"):
        TokenCache.build(DataConfig(path="a.txt"), 300)
    assert list((folder.parent / "cache" / "muletrain" / "tokens").iterdir()) == []


def test_unwritable_cache_names_the_field(folder: Path) -> None:
    (folder / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"data\.cache: cannot write .*file.*set data\.cache"):
        TokenCache.build(DataConfig(cache=str(folder / "file")), 300)


# Microbatches


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    image = permute(np.arange(size, dtype=np.uint64), size, round_keys(seed, epoch, 8))
    assert sorted(image.tolist()) == list(range(size))


def test_permute_shuffles() -> None:
    """Where 0 goes over many keys is uniform (chi-squared), and neighbours do not stay together."""
    n, draws = 7, 7000
    first = Counter(int(permute(np.array([0], dtype=np.uint64), n, round_keys(s, 0, 8))[0]) for s in range(draws))
    assert sum((first[k] - draws / n) ** 2 / (draws / n) for k in range(n)) < 22.5  # 99.9 % of 6 degrees of freedom
    image = permute(np.arange(10_007, dtype=np.uint64), 10_007, round_keys(0, 0, 8)).astype(np.int64)
    assert abs(np.corrcoef(image, np.arange(10_007))[0, 1]) < 0.05
    assert abs(np.corrcoef(image[1:], image[:-1])[0, 1]) < 0.05


@given(
    length=st.integers(2, 700),
    context=st.integers(1, 40),
    microbatch=st.integers(1, 5),
    parts=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=80, deadline=None)
def test_an_epoch_sees_each_window_once(length: int, context: int, microbatch: int, parts: int, seed: int) -> None:
    if length <= context:
        return
    source = MicrobatchSource(np.arange(length), seed, microbatch * parts, microbatch, context)
    assert source.windows >= max(1, length // context - 1)
    for epoch in range(3):
        starts = np.sort(source.window_starts(epoch * source.windows, source.windows))
        assert starts[0] >= 0
        assert starts[-1] + context < length
        assert (np.diff(starts) == context).all()
    sequence = np.concatenate(
        [source.microbatch(step, index)[0][:, 0] for step in range(6) for index in range(parts)]
    )  # tokens are positions, so first inputs are window starts
    assert sequence.tolist() == source.window_starts(0, 6 * microbatch * parts).tolist()


def test_microbatch_is_a_pure_function_of_seed_and_tokens() -> None:
    tokens = np.random.default_rng(0).integers(0, 1000, 5000).astype(np.uint16)

    def new(seed: int) -> MicrobatchSource:
        return MicrobatchSource(tokens, seed, 12, 4, 32)

    forward, backward = new(3), new(3)
    keys = [(step, index) for step in range(30) for index in range(3)]
    one = {key: forward.microbatch(*key) for key in keys}
    for key in reversed(keys):
        inputs, targets = backward.microbatch(*key)
        assert inputs.dtype == targets.dtype == np.int64
        assert inputs.shape == targets.shape == (4, 32)
        assert (inputs == one[key][0]).all()
        assert (targets == one[key][1]).all()
        assert (inputs[:, 1:] == targets[:, :-1]).all()
    assert any((new(4).microbatch(*key)[0] != one[key][0]).any() for key in keys)


def test_microbatch_order_is_frozen() -> None:
    """A change here breaks every run that resumes: raise it on purpose only."""
    source = MicrobatchSource(np.arange(1000), 5, 4, 4, 100)
    assert source.window_starts(0, 12).tolist() == [155, 555, 55, 855, 255, 755, 655, 455, 355, 171, 71, 571]


def test_borders_move_and_reach_the_last_token() -> None:
    source = MicrobatchSource(np.arange(200), 0, 1, 1, 16)
    firsts = {int(source.window_starts(e * source.windows, source.windows).min()) for e in range(400)}
    assert firsts == set(range(min(firsts), max(firsts) + 1))
    assert min(firsts) == 0
    assert max(firsts) + source.windows * 16 == 199


def test_bad_microbatch_indices() -> None:
    source = MicrobatchSource(np.arange(100), 0, 8, 4, 10)
    for step, index in ((-1, 0), (0, 2), (0, -1)):
        with pytest.raises(ValueError, match="no microbatch"):
            source.microbatch(step, index)


def test_corpus_shorter_than_a_window_names_the_context() -> None:
    with pytest.raises(DataError, match=r"model\.context: 128 needs 129 tokens.*has 128"):
        MicrobatchSource(np.arange(128), 0, 4, 4, 128)
    assert MicrobatchSource(np.arange(129), 0, 4, 4, 128).microbatch(7, 0)[1][3, -1] == 128


@given(context=st.integers(1, 300), start=st.integers(1, 300), warmup=st.integers(0, 50))
@settings(deadline=None)
def test_sequence_warm_up(context: int, start: int, warmup: int) -> None:
    start = min(start, context)
    source = MicrobatchSource(np.arange(2 * context + 2), 0, 2, 2, context, start, warmup)
    lengths = [source.sequence_length(step) for step in range(warmup + 3)]
    assert lengths == sorted(lengths)
    assert lengths[warmup:] == [context] * 3
    assert all(length % 8 == 0 or length == context for length in lengths)
    assert all(1 <= length <= context for length in lengths)
    for step in range(warmup):
        exact = start + (context - start) * step / warmup
        assert lengths[step] == context or abs(lengths[step] - exact) < 8
    assert source.microbatch(0, 0)[0].shape == (2, lengths[0])


def test_warm_up_takes_the_head_of_the_same_windows() -> None:
    full = MicrobatchSource(np.arange(999), 1, 4, 2, 64)
    warm = MicrobatchSource(np.arange(999), 1, 4, 2, 64, 16, 100)
    inputs, targets = warm.microbatch(50, 1)
    assert inputs.shape == (2, 40)
    assert (inputs == full.microbatch(50, 1)[0][:, :40]).all()
    assert (targets == full.microbatch(50, 1)[1][:, :40]).all()


@given(length=st.integers(2, 500), context=st.integers(1, 50), batch=st.integers(1, 7))
@settings(deadline=None)
def test_heldout_batches_count_every_target_once(length: int, context: int, batch: int) -> None:
    tokens = np.arange(length, dtype=np.uint16)
    batches = list(heldout_batches(tokens, context, batch))
    assert all(inputs.shape == targets.shape == (batch, context) for inputs, targets in batches[:-1])
    inputs = np.concatenate([inputs.ravel() for inputs, _ in batches])
    targets = np.concatenate([targets.ravel() for _, targets in batches])
    counted = targets != IGNORE
    assert targets[counted].tolist() == list(range(1, length))
    assert inputs[counted].tolist() == list(range(length - 1))
    assert (~counted).sum() < context


def test_heldout_of_one_token_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data\.heldout"):
        next(heldout_batches(np.arange(1), 4, 2))


def test_microbatches_need_no_torch() -> None:
    code = "import sys, muletrain.data.microbatch, muletrain.data.ngram; assert 'torch' not in sys.modules"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    subprocess.run([sys.executable, "-c", code], env=env, timeout=180, check=True)


# n-grams


def test_baselines_of_pydoc(pydoc: TokenCache) -> None:
    result = baselines(pydoc.train, pydoc.heldout, 1024)
    assert 5.8 < result.unigram < 6.2
    assert 3.8 < result.bigram < 4.6
    train, heldout = pydoc.train.tolist(), pydoc.heldout.tolist()
    first, second = Counter(train[:-1]), Counter(train[1:])
    both = Counter(itertools.pairwise(train))
    w = result.bigram_weights
    plain = 0.0
    for a, b in itertools.pairwise(heldout):
        plain -= math.log(w[0] / 1024 + w[1] * second[b] / (len(train) - 1) + w[2] * both[a, b] / max(first[a], 1))
    assert result.bigram == pytest.approx(plain / (len(heldout) - 1), abs=1e-9)


def test_mixture_is_a_distribution() -> None:
    rng = np.random.default_rng(1)
    counts = Counts(rng.integers(0, 20, (200, 2)), 21)
    for a in range(20):
        pairs = np.array([[a, b] for b in range(21)])
        assert counts.probabilities(pairs).sum(axis=1) == pytest.approx([1, 1, 1])


def test_weights_do_not_see_the_heldout() -> None:
    rng = np.random.default_rng(2)
    train = rng.integers(0, 50, 6000)
    one, two = baselines(train, train[:100], 64), baselines(train, rng.integers(0, 64, 500), 64)
    assert one.bigram_weights == two.bigram_weights
    assert one.unigram_weights == two.unigram_weights


def test_known_entropies() -> None:
    """A random walk on a ring: unigram is log n, bigram log 2; unseen tokens stay possible."""
    steps = np.random.default_rng(3).choice([-1, 1], 60_001)
    walk = np.cumsum(steps) % 31  # odd ring: every token is reached
    result = baselines(walk[:50_000], walk[50_000:], 40)
    assert result.unigram == pytest.approx(math.log(31), abs=0.05)
    assert result.bigram == pytest.approx(math.log(2), abs=0.02)
    assert math.isfinite(baselines(walk[:50_000], np.array([1, 39, 38]), 40).bigram)


def test_too_few_tokens_for_baselines() -> None:
    with pytest.raises(DataError, match=re.escape("data.path: 10 training and 5 held-out tokens")):
        baselines(np.arange(10), np.arange(5), 20)
