"""Corpora: documents of files and data sets, exactly as they are, and errors that say what to do."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from muletrain.config.model_sections import DataConfig
from muletrain.data.corpus import Corpus, absolute
from muletrain.data.files import LINE, TextColumn, reading
from muletrain.data.tokens import TokenCache
from muletrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
from tests.corpora import folder, texts, words, write_rows

__all__ = ["folder"]


def test_all_formats_give_the_same_documents(folder: Path) -> None:
    documents = ["One.\r\n\r\n\r\n  Two, of\nlines.", "Drei: äöü 𝄞\n"]
    rows = [{"id": 1, "text": text} for text in documents]
    table = io.StringIO(newline="")
    csv.writer(table).writerows([["id", "text"], *([1, text] for text in documents)])
    tabs = io.StringIO(newline="")
    csv.writer(tabs, delimiter="\t").writerows([["id", "text"], *([1, text] for text in documents)])
    (folder / "b.csv").write_bytes(table.getvalue().encode("utf-8-sig"))
    (folder / "b.tsv.gz").write_bytes(gzip.compress(tabs.getvalue().encode()))
    (folder / "b.json").write_text(json.dumps(rows))
    (folder / "b.json.gz").write_bytes(gzip.compress(json.dumps(rows, indent=2).encode()))
    write_rows(folder / "c.json", rows)
    write_rows(folder / "a.jsonl", rows)
    write_rows(folder / "a.ndjson", rows)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    pq.write_table(pa.table({"other": [1, 2], "text": documents}), folder / "a.parquet", row_group_size=1)
    for name in sorted(os.listdir()):
        assert texts(name) == documents, name
    for k, text in enumerate(documents):
        (folder / f"a{k}.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert texts("a0.txt, a1.txt") == documents


def test_long_lines_survive_in_pieces(folder: Path) -> None:
    # 1, 2 and 4 bytes: pieces end inside characters
    text = "".join(np.random.default_rng(0).choice(list("xß𝄞"), 5 * LINE).tolist())
    (folder / "a.txt").write_text(text)
    assert texts("a.txt") == [text]


def test_globs_are_sorted_and_files_read_once(folder: Path) -> None:
    for name in ("b", "a", "c"):
        (folder / f"{name}.txt").write_text(f"This is {name}.")
    assert texts("b.txt, *.txt") == ["This is b.", "This is a.", "This is c."]


@pytest.mark.parametrize("place", ["here", "mules, and [other] animals"])
def test_files_may_have_commas_and_brackets_in_their_names(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / place).mkdir()
    monkeypatch.chdir(folder / place)
    names = ["a, b.txt", "c[1].txt", "d.txt", "e,f,g.txt"]
    for name in names:
        Path(name).write_text(name)
    for path, expected in [
        ("a, b.txt", names[:1]),
        ("c[1].txt, a, b.txt,d.txt", [names[1], names[0], names[2]]),
        ("e,f,g.txt", names[3:]),
        (r"e\,f*.txt, d.txt", [names[3], names[2]]),
        ("*.txt", names),
    ]:
        assert texts(path) == expected
        anywhere = absolute(path)
        with monkeypatch.context() as moved:
            moved.chdir("/")
            assert texts(anywhere) == expected, anywhere
            assert absolute(anywhere) == anywhere


def test_half_surrogates_in_json_become_replacement_characters(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": "\\ud834\\udd1e \ufffd"}\n')
    documents = [*Corpus("a.jsonl", TextColumn("text")).documents()]
    assert texts("a.jsonl") == ["a\ufffdb", "𝄞 \ufffd"]
    assert [document.replaced for document in documents] == [1, 0]


def test_the_manual_of_python_has_no_topic_that_another_one_contains() -> None:
    paragraphs = [{" ".join(part.split()) for part in text.split("\n\n")} for text in texts("pydoc")]
    assert len(paragraphs) > 40
    for own in paragraphs:
        assert max(len(own & other) / len(own) for other in paragraphs if other is not own) < 0.6


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
    Path("chat.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    Path("chat.json").write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    Path("pairs.csv").write_text("prompt,completion\nHello,Goodbye\n")
    Path("wrapped.json").write_text('{"version": 1, "data": [{"text": "a"}]}')
    Path("pretty.json").write_text('{\n  "data": [\n    {"text": "a"}\n  ]\n}\n')
    Path("half.json").write_text('[{"text": "a"},\n {"text": "b"')
    Path("comma.json").write_text('[{"text": "a"},\n]')
    Path("more.json").write_text('[{"text": "a"}]\n[{"text": "b"}]')
    Path("words.json").write_text('["a", "b"]')
    Path("ragged.csv").write_text("id,text\n" + "1,a\n" * 5000 + "2,one, two\n")
    Path("quotes.csv").write_text('id,text\n1,"a\nb"\n2,"c" d\n')
    Path("open.csv").write_text('id,text\n1,"a"\n2,"b\n' + "3,c\n" * 5)
    Path("semicolons.csv").write_text("id;text\n1;a\n")
    Path("twice.csv").write_text("text,id,text\na,1,b\n")
    Path("pointer.txt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    Path("rows.jsonl").write_text('{"text": "a"}\n' * 8999 + '{"text": "b\n')
    Path("a.docx").write_bytes(b"PK\x03\x04 and so on")
    Path("a.pdf").write_bytes(b"%PDF-1.7 and so on")
    Path("text.dat").write_bytes(b"%PDF-1.7 and so on")
    Path("a.zip").write_bytes(b"PK\x03\x04 and so on")
    Path("a.bin").write_bytes(b"abc\0\1\2")
    Path("a.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    Path("a.ipynb").write_text('{"cells": []}')
    Path("wide.txt").write_bytes("abc".encode("utf-16"))
    Path("a.gzip").write_bytes(gzip.compress(b"abc"))
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
        (
            "field.jsonl",
            r"data\.path: field\.jsonl:2: no 'text'; for plain text set data\.field to one of: body, id; for conv",
        ),
        (
            "field.parquet",
            r"data\.path: field\.parquet: no 'text'; for plain text set data\.field to one of: body, id; for conv",
        ),
        ("number.jsonl", r"data\.path: number\.jsonl:1: 'text' is int, not text"),
        ("list.jsonl", r"data\.path: list\.jsonl:1: a JSON list"),
        ("broken.jsonl", r"data\.path: broken\.jsonl:3: not JSON: Expecting value at column 9; give"),
        ("half.jsonl.gz", r"data\.path: cannot read half\.jsonl\.gz.*complete\?"),
        ("chat.jsonl", r"chat\.jsonl:1: no 'text', but 'messages', in a run on plain text"),
        ("chat.json", r"chat\.json:1: no 'text', but 'messages', in a run on plain text"),
        ("pairs.csv", r"pairs\.csv:1: no 'text', but 'prompt', in a run on plain text"),
        ("wrapped.json", r"wrapped\.json: neither a list .* `jq -c '\.data\[\]' wrapped\.json > rows\.jsonl`"),
        (
            "pretty.json",
            r"pretty\.json: neither a list of JSON objects nor one object per line; .*`jq -c '\.' pretty\.json",
        ),
        ("half.json", r"half\.json:2: row 2: not JSON: Expecting ',' delimiter"),
        ("comma.json", r"comma\.json:2: row 2: not JSON: Expecting value"),
        ("more.json", r"more\.json:2: row 1: not JSON: text after the end of the list"),
        ("words.json", r"words\.json:1: row 1: a JSON str, not an object"),
        ("ragged.csv", r"ragged\.csv:5002: a row of 3 cells below 2 columns; put text with commas in quotes"),
        ("quotes.csv", r"quotes\.csv:4: this row cannot be read: .*correct its quotes"),
        ("open.csv", r"open\.csv:3: this row cannot be read: unexpected end of data; correct its quotes"),
        (
            "semicolons.csv",
            r"semicolons\.csv:1: no 'text'; for plain text set data\.field to one of: id;text; for conv",
        ),
        ("twice.csv", r"twice\.csv:1: two columns are called 'text'; rename one"),
        ("pointer.txt", r"pointer\.txt is a pointer of git-lfs, not the file itself: call `git lfs pull`"),
        ("rows.jsonl", r"rows\.jsonl:9000: not JSON: Unterminated string starting at column 10"),
        ("a.docx", r"a\.docx is a document of an office program: convert it, e\.g\. with `pandoc"),
        ("a.pdf", r"a\.pdf is a PDF: convert it, e\.g\. with `pdftotext`"),
        ("text.dat", r"text\.dat is a PDF"),
        ("a.zip", r"a\.zip is an archive: unpack it, and name its files"),
        ("a.bin", r"a\.bin is binary, not text; give text, \.jsonl, \.json"),
        ("a.zst", r"a\.zst is compressed: unpack it, or compress it with gzip"),
        ("a.ipynb", r"a\.ipynb is a notebook: convert it"),
        ("wide.txt", r"wide\.txt is UTF-16: convert it with `iconv -f UTF-16"),
        ("a.gzip", r"a\.gzip is compressed with gzip: let its name end in \.gz"),
        ("a.txt, a.txt", r"data\.path: 'a\.txt' is listed twice, and files are read once"),
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
    assert texts("hf:org/name@main:en", "body") == ["First.", "Second.\n\nThird."]
    assert texts("hf:org/name#test", "body") == ["First.", "Second.\n\nThird."]
    assert calls == [
        (("org/name", "en"), {"split": "train", "streaming": True, "revision": "main"}),
        (("org/name", None), {"split": "test", "streaming": True, "revision": None}),
    ]
    with pytest.raises(
        DataError, match=r"hf:org/name: row 0: no 'text'; for plain text set data\.field to one of: body"
    ):
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
    assert texts("hf:rows", "body") == ["Of JSON.", "Second.\n\nThird."]
    assert texts("hf:rows#validation", "body") == ["Not to be trained on."]
    assert texts(f"hf:{folder / 'table'}") == words(0, 500)
    with pytest.raises(DataError, match=r"hf:rows: row 0: no 'text'; for plain text set data\.field to one of: body"):
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
