"""Numbers in the pages are written from the benchmarks' files: ``python -m benchmarks.figures`` (``--check`` compares).

A comment in a page names a file, relative to the page, and an f-string over its content ``d`` (of a file that is no
JSON: its text). Up to the next ``<!--/-->`` the page holds the f-string's value:

    <!--= agree.json {max(f["simulate / plan"] for f in d["fleets"]) - 1:.1%} -->2.2 %<!--/-->

The f-string also knows ``load(name)`` (another file of that folder), the functions of ``tables.py`` in that folder,
and the names of ``KNOWN``. A table stands on lines of its own; a figure must not begin a line, where Markdown takes a
comment for a block."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIGURE = re.compile(r"(<!--= (\S+) (.*?) -->)(.*?)(<!--/-->)", re.DOTALL)


def table(head: str, rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table. ``head``: titles with ``|`` between them."""
    titles = head.split("|")
    lines = [[title.strip() for title in titles], None, *([str(cell) for cell in row] for row in rows)]
    rule = "|" + "---|" * len(titles)
    return "\n".join(rule if line is None else re.sub(" +", " ", f"| {' | '.join(line)} |") for line in lines)


def span(values: Iterable[float], spec: str = "") -> str:
    """``least to most``, or one number if both read the same."""
    found = sorted(values)
    ends = [format(value, spec) for value in (found[0], found[-1])]
    return " to ".join(dict.fromkeys(ends))


KNOWN = {"table": table, "span": span, "mean": mean, "median": median}


def value(file: Path, template: str) -> str:
    """The text that ``template`` gives for the content of ``file``."""

    def load(name: str) -> Any:
        text = (file.parent / name).read_text(encoding="utf-8")
        return json.loads(text) if name.endswith(".json") else text

    tables = file.parent / "tables.py"
    known = {**KNOWN, **(runpy.run_path(str(tables)) if tables.exists() else {}), "load": load, "d": load(file.name)}
    try:
        found = str(eval("f'''" + " ".join(template.split()) + "'''", known))
    except Exception as e:
        raise ValueError(f"{file}: {template}: {type(e).__name__}: {e}") from e
    text = re.sub(r"(?<=\d)%", " %", found)
    return f"\n{text}\n" if "\n" in text else text


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]


def stale(page: Path) -> Iterator[str]:
    """Figures of a page that are not those of their file: where, by which rule, what is written and what should be."""
    text = page.read_text(encoding="utf-8")
    for match in FIGURE.finditer(text):
        _, name, template, written, _ = match.groups()
        if written != (right := value(page.parent / name, template)):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{page.relative_to(ROOT)}:{line}: {name} {template}: is {written!r}, should be {right!r}"


def write(page: Path) -> None:
    old = page.read_text(encoding="utf-8")
    new = FIGURE.sub(lambda m: m[1] + value(page.parent / m[2], m[3]) + m[5], old)
    if new != old:
        page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    wrong = [line for page in pages() for line in stale(page)]
    print("\n".join(wrong) or "all figures are those of their files")
    if sys.argv[1:] != ["--check"]:
        for page in pages():
            write(page)
    elif wrong:
        sys.exit("write them: python -m benchmarks.figures")
