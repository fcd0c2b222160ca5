"""Texts in a folder of their own, and the documentation of Python's library as tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from muletrain.config.model_sections import DataConfig
from muletrain.data.corpus import Corpus
from muletrain.data.tokens import TokenCache

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
