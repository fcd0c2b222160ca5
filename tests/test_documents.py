"""A user's text is trained as it is: nothing is left out or cut that was not asked for, and whole documents are held out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from muletrain.data import tokens as tokens_module
from muletrain.data.tokens import TokenCache
from muletrain.errors import DataError
from tests.corpora import build, folder, sides, words, write_rows

__all__ = ["folder"]

TEMPLATE = "### Instruction\n\nAnswer in one word.\n\n### Question\n\nIs {} even?\n\n### Answer\n\n{}"


def instructions(count: int) -> list[str]:
    return [TEMPLATE.format(n, "no" if n % 2 else "yes") for n in range(count)]


def test_repeated_paragraphs_and_rows_are_all_trained(folder: Path) -> None:
    rows = [*instructions(400), *["Weigh this."] * 3]
    write_rows(folder / "a.jsonl", [{"text": text} for text in rows])
    cache = build(path="a.jsonl")
    train, heldout = sides(cache)
    assert sorted(train + heldout) == sorted(rows)
    assert cache.stats.duplicates == 0
    assert cache.stats.changes() == []


def test_repeated_lines_of_code_stay(folder: Path) -> None:
    code = "\n\n".join(f"def f{n}(x):\n    y = x + {n}\n\n    return y" for n in range(300)) + "\n"
    (folder / "a.py").write_text(code)
    cache = build(path="a.py")
    (train,), (heldout,) = sides(cache)
    assert train + heldout == code


def test_whole_documents_are_deduplicated_on_request_and_counted(folder: Path) -> None:
    rows = [*words(0, 400), "  Twice.", "Twice.\n", "twice."]
    write_rows(folder / "a.jsonl", [{"text": text} for text in rows] + [{"text": None}, {"text": " \n"}])
    cache = build(path="a.jsonl", deduplicate="documents")
    train, heldout = sides(cache)
    assert sorted(train + heldout) == sorted([*words(0, 400), "  Twice.", "twice."])
    assert (cache.stats.duplicates, cache.stats.empty) == (1, 2)
    assert cache.stats.changes() == [
        "2 documents without text left out",
        "1 document left out that equal an earlier one (data.deduplicate)",
    ]
    assert cache.digest != build(path="a.jsonl").digest


def test_rows_are_held_out_whole(folder: Path) -> None:
    rows = instructions(400)
    write_rows(folder / "a.jsonl", [{"text": text} for text in rows])
    train, heldout = sides(build(path="a.jsonl"))
    assert {*train} | {*heldout} == {*rows}
    assert not {*train} & {*heldout}
    assert 0.02 < len(heldout) / len(rows) < 0.09


def test_a_long_document_is_held_out_by_its_end(folder: Path) -> None:
    text = "\n\n\n".join(words(0, 500)) + "\n\n"
    (folder / "a.txt").write_text(text)
    cache = build(path="a.txt")
    (train,), (heldout,) = sides(cache)
    assert train + heldout == text, "blank lines stay as they are, and nothing is put before the end"
    assert 0.03 < len(heldout) / len(text) < 0.06
    assert train.endswith("\n"), "it is cut at a line end"
    assert (cache.stats.documents, cache.stats.heldout_documents, cache.stats.ends) == (1, 0, 1)
    (folder / "b.txt").write_text(" ".join(words(0, 100)))
    (train,), (heldout,) = sides(build(path="b.txt"))
    assert train + heldout == " ".join(words(0, 100))
    assert train.endswith(" "), "a text of one line is cut between words"


@pytest.mark.parametrize("count", [2, 3, 7, 13, 17, 30])
def test_a_few_documents_leave_no_side_empty(count: int, folder: Path) -> None:
    rows = [f"{text} " * (n % 3 + 1) for n, text in enumerate(words(0, count))]
    write_rows(folder / "a.jsonl", [{"text": text} for text in rows])
    cache = build(path="a.jsonl", heldout=0.1)
    train, heldout = sides(cache)
    assert sorted(re.sub(r"\s", "", "".join(train + heldout))) == sorted(re.sub(r"\s", "", "".join(rows)))
    assert 0.04 < sum(map(len, heldout)) / sum(map(len, rows)) < 0.25
    assert cache.stats.heldout_documents + cache.stats.ends > 0
    if count >= 13:
        assert cache.stats.ends == 0, "rows stay whole"


@pytest.mark.parametrize("count", range(8, 40, 3))
def test_a_few_rows_stay_whole(count: int, folder: Path) -> None:
    rows = [TEMPLATE.format(n, f"{n:040}") for n in range(count)]
    write_rows(folder / "a.jsonl", [{"text": text} for text in rows])
    cache = build(path="a.jsonl")
    train, heldout = sides(cache)
    assert heldout
    assert sorted(train + heldout) == sorted(rows), "no answer is held out whose question is trained"
    assert sum(map(len, heldout)) <= sum(map(len, rows)) / 8
    assert cache.stats.ends == 0


def test_a_few_rows_of_which_many_have_small_hashes_are_trained_all_the_same(folder: Path) -> None:
    """Of these, by their hashes four would be held out, a quarter of the text."""
    rows = [f"Series 194: row number {n:02} of sixteen." for n in range(16)]
    write_rows(folder / "a.jsonl", [{"text": text} for text in rows])
    train, heldout = sides(build(path="a.jsonl"))
    assert sorted(train + heldout) == rows
    assert len(heldout) == 1


def test_a_row_of_more_than_an_eighth_of_the_text_gives_its_end_and_the_others_stay_whole(folder: Path) -> None:
    rows = ["\n".join(words(0, 100)), *instructions(15)]
    write_rows(folder / "a.jsonl", [{"text": text} for text in rows])
    cache = build(path="a.jsonl")
    train, heldout = sides(cache)
    assert cache.stats.ends == 1
    assert 0 < len(heldout[0]) < len(rows[0]) / 8
    assert train[0] + heldout[0] == rows[0]
    assert {*train[1:], *heldout[1:]} == {*rows[1:]}


def test_adding_files_moves_no_document_between_the_sides(folder: Path) -> None:
    for n, text in enumerate(words(0, 300)):
        (folder / f"b{n}.txt").write_text(text)
    train, heldout = map(set, sides(build(path="*.txt")))
    for n, text in enumerate(words(200, 300)):
        (folder / f"a{n}.txt").write_text(text)
    more_train, more_heldout = map(set, sides(build(path="*.txt")))
    assert heldout
    assert heldout < more_heldout
    assert train < more_train
    assert not more_train & more_heldout, "equal documents are on one side"


def test_a_validation_file_is_held_out_and_all_else_is_trained(folder: Path) -> None:
    write_rows(folder / "a.jsonl", [{"text": text} for text in words(0, 300)])
    write_rows(folder / "v.jsonl", [{"text": text} for text in [*words(900, 3), ""]])
    cache = build(path="a.jsonl", validation="v.jsonl")
    assert sides(cache) == (words(0, 300), words(900, 3))
    assert (cache.stats.documents, cache.stats.heldout_documents, cache.stats.empty) == (300, 3, 1)
    assert build(path="a.jsonl").digest != cache.digest
    with pytest.raises(DataError, match=r"data\.validation: no such file: 'none\.jsonl'"):
        build(path="a.jsonl", validation="none.jsonl")
    (folder / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match=r"data\.validation: 'empty\.txt' has no text"):
        build(path="a.jsonl", validation="empty.txt")


def test_nothing_is_held_out_on_request(folder: Path) -> None:
    write_rows(folder / "a.jsonl", [{"text": text} for text in words(0, 300)])
    cache = build(path="a.jsonl", heldout=0)
    assert sides(cache) == (words(0, 300), [])
    assert (cache.stats.heldout_tokens, len(cache.heldout)) == (0, 0)
    again = TokenCache.open(cache.folder)
    assert again is not None
    assert len(again.heldout) == 0


def test_a_document_larger_than_a_batch_streams(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "_BATCH", 1 << 17)
    text = "".join(f"{line}\n" for line in words(0, 5_000))
    (folder / "a.txt").write_text(text)
    (train,), (heldout,) = sides(build(path="a.txt"))
    assert train + heldout == text
