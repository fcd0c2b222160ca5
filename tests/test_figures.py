"""Numbers that pages quote are those of the benchmarks' files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.figures import FIGURE, ROOT, pages, span, stale, table, value, write

TEXT = "# A page\n\nIt takes <!--= a.json {d['s']:.1f} s, {d['share']:.0%} more -->{}<!--/--> here.\n"


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in pages()])
def test_every_figure_is_that_of_its_file(page: str) -> None:
    """Otherwise: ``python -m benchmarks.figures``."""
    assert list(stale(ROOT / page)) == []


def test_every_mark_is_whole_and_stands_where_markdown_reads_on() -> None:
    """A comment that begins a line makes a block of it, which only a table needs; some readers end it at ``--``."""
    for page in pages():
        text = page.read_text("utf-8")
        assert text.count("<!--=") == text.count("<!--/-->") == len(FIGURE.findall(text)), page
        assert re.findall(r"^<!--= .*-->.+<!--/-->", text, re.MULTILINE) == [], page
        assert not any("--" in m[3] for m in FIGURE.finditer(text)), page
        assert not any("|" in m[3] and "\n" not in m[4] for m in FIGURE.finditer(text)), page


def test_a_figure_that_is_not_its_files_is_found_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.figures.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(TEXT.replace("{}", "1.3 s, 20 % more"))
    (tmp_path / "a.json").write_text('{"s": 1.25, "share": 0.2}')
    assert [line.split(": ", 1)[0] for line in stale(page)] == ["page.md:3"]
    write(page)
    assert "-->1.2 s, 20 % more<!--/--> here" in page.read_text()
    assert list(stale(page)) == []


def test_tables_beside_a_file_are_known(tmp_path: Path) -> None:
    (tmp_path / "tables.py").write_text("def twice(d):\n    return [[k, 2 * v] for k, v in d.items()]")
    (tmp_path / "a.json").write_text('{"x": 1}')
    assert value(tmp_path / "a.json", '{table("|n", twice(d))}') == "\n| | n |\n|---|---|\n| x | 2 |\n"


def test_helpers() -> None:
    assert (span([3, 1, 2]), span([1.04, 1.01], ".1f")) == ("1 to 3", "1.0")
    assert table("a|b", []) == "| a | b |\n|---|---|"
