"""The hook of ``mkdocs.yml``: what the site has beside the pages of ``docs``.

- Pages of other folders: the benchmarks' reports, ``CONTRIBUTING.md``, and files that pages link to, each under its
  path in the repository.
- The parts that are made from the code (``scripts/reference.py``), and sections of the README: ``<!-- readme: Try it -->``.
- Pictures of ``docs/assets`` as part of the page, so that they follow the palette that the reader chose.

Links stay as they are in the repository, where they work on a file server, too.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from mkdocs.structure.files import File, Files  # noqa: E402

from scripts.reference import PARTS  # noqa: E402

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
MADE = re.compile(r"^<!-- made: (\w+) -->$", re.MULTILINE)
SECTION = re.compile(r"^<!-- readme: (.+) -->$", re.MULTILINE)
PICTURE = re.compile(r"^!\[([^\]]*)\]\(([^)\s]*assets/[\w-]+\.svg)\)$", re.MULTILINE)
COMMENT = re.compile(r"<!--[=/].*?-->", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages beside ``docs``, and every file of the repository that a page links to."""
    beside = [ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *sorted(ROOT.glob("benchmarks/**/README.md"))]
    for path in beside:
        _add(files, config, path)
    for path in [*beside, *sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"]:
        for target in targets(path):
            if target.is_file() and target != ROOT / "README.md" and files.get_file_from_path(uri(target)) is None:
                _add(files, config, target)
    return files


def _add(files: Files, config: MkDocsConfig, path: Path) -> None:
    files.append(File.generated(config, uri(path), abs_src_path=str(path)))


def targets(page: Path) -> list[Path]:
    """Files and folders of the repository that a page links to."""
    links = [match[2] for match in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8")))]
    return [(page.parent / link).resolve() for link in links if "://" not in link and not link.startswith("mailto:")]


def uri(path: Path) -> str:
    """The address of a file of the repository in the site's sources. A benchmark's report is a page of its section, not an
    index of one."""
    found = path.relative_to(ROOT).as_posix().removeprefix("docs/")
    return re.sub(r"^(benchmarks/.+|examples)/README\.md$", r"\1.md", found)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its parts from elsewhere, and with links as they are in the site."""
    source = Path(page.file.abs_src_path or ROOT / "docs" / page.file.src_uri)
    markdown = SECTION.sub(lambda m: _linked(section(m[1]), ROOT / "README.md", page.file.src_uri), markdown)
    markdown = _linked(COMMENT.sub("", markdown), source, page.file.src_uri)
    markdown = MADE.sub(lambda m: PARTS[m[1]](), markdown)
    return PICTURE.sub(lambda m: picture(source.parent / m[2], m[1]), markdown)


def section(title: str) -> str:
    """A section of the README, with its heading."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"README.md has no section {title!r}")
    return found[0]


def _linked(markdown: str, source: Path, to: str) -> str:
    """Links from the file ``source`` to files of the repository, as links of the page ``to``."""

    def link(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if "://" in match[2] or not target.is_relative_to(ROOT) or not target.exists():
            return match[0]
        if target.is_dir():
            target = target / "README.md"
        if target == ROOT / "README.md":
            target = ROOT / "docs" / "index.md"
        return f"{match[1]}{posixpath.relpath(uri(target), posixpath.dirname(to) or '.')}{match[3]}"

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def picture(path: Path, title: str) -> str:
    """An SVG of ours as HTML. The site's style sheet colours it, in place of its own."""
    text = re.sub(r"<style>.*?</style>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"\n\s*\n", "\n", text).strip()
    return f'<figure class="picture" markdown="0">\n{text}\n<figcaption>{title}</figcaption>\n</figure>'
