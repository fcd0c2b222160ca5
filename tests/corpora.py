"""Texts in a folder of their own, and the documentation of Python's library as tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from muletrain.config.model_sections import DataConfig
from muletrain.data.corpus import Corpus
from muletrain.data.files import TextColumn
from muletrain.data.tokenizer import END_OF_TEXT
from muletrain.data.tokens import TokenCache

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    return ["".join(document.pieces()) for document in Corpus(path, TextColumn(field)).documents()]


def build(vocab: int = 300, **fields: Any) -> TokenCache:
    return TokenCache.build(DataConfig(**fields), vocab)


def sides(cache: TokenCache) -> tuple[list[str], list[str]]:
    """Documents of the training side and of the held-out side, without the token that ends each."""
    found = [cache.decode(tokens.tolist()).split(END_OF_TEXT) for tokens in (cache.train, cache.heldout)]
    assert all(side.pop() == "" for side in found)
    return found[0], found[1]


def write_rows(path: Path, rows: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
