"""The documentation's site: it builds without a warning, has no dead link, asks no other host, and its reference is complete."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest
import typer

import muletrain
from muletrain.api import Run
from muletrain.cli.main import app
from muletrain.config.fleet_file import Fleet
from muletrain.config.problems import keys_of, submodel
from muletrain.config.schema import RunConfig
from muletrain.events import KINDS
from muletrain.events.notices import Notice
from scripts import pictures, reference

if TYPE_CHECKING:
    from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
HERE = "http://here/"


class Page(HTMLParser):
    """Links, sources and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.sources, self.anchors = set[str](), set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif "src" in given:
            self.sources.add(given["src"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.sources.add(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    return {path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    found = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    found |= {f"benchmarks/{path.parent.name}.md" for path in ROOT.glob("benchmarks/*/README.md")}
    assert found - named == set()


def test_no_link_is_dead(site: Path, pages: dict[str, Page]) -> None:
    dead = []
    for name, page in pages.items():
        if name == "404.html":  # its links begin at the server's root
            continue
        for link in page.links | page.sources:
            there = urlsplit(urljoin(HERE + name, link))
            if there.netloc != "here" or there.scheme != "http":
                continue
            path = unquote(there.path).lstrip("/")
            path += "index.html" if path.endswith("/") or not path else ""
            known = (
                there.fragment in ("", "__top") or path not in pages or unquote(there.fragment) in pages[path].anchors
            )
            if not (site / path).is_file() or not known:
                dead.append((name, link))
    assert dead == []


def test_no_page_asks_another_host(site: Path, pages: dict[str, Page]) -> None:
    asked = {source for page in pages.values() for source in page.sources if urlsplit(source).netloc}
    assert asked == set()
    for path in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?https?:", path.read_text(encoding="utf-8")) == [], path


def test_search_finds_settings_commands_and_functions(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    text = " ".join(f"{each['title']} {each['text']}" for each in index["docs"])
    for words in (
        "validate_every",
        "--pause-file",
        "wire.activations",
        "muletrain kick",
        "Exactly once",
        "step_skipped",
    ):
        assert words in text


def page_of(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text(encoding="utf-8")


def sections(kind: type[BaseModel]) -> list[tuple[str, str]]:
    found = []
    for name, info in keys_of(kind).items():
        section = submodel(info)
        found += [(name, key) for key in ([] if section is None else keys_of(section))]
    return found


def rows(markdown: str, heading: str) -> set[str]:
    """First cells of the tables below a heading."""
    part = re.split(r"^## ", markdown, flags=re.MULTILINE)
    below = next(text for text in part if text.startswith(heading))
    return set(re.findall(r"^\| `([^`]+)`", below, re.MULTILINE))


def test_the_reference_has_every_field(site: Path) -> None:
    text, fleet = reference.configuration(), reference.fleet()
    for section, field in sections(RunConfig):
        assert field in rows(text, f"[{section}]"), f"{section}.{field}"
    for section, field in sections(Fleet):
        assert field in rows(fleet, f"[[{section}]]" if f"[[{section}]]" in fleet else f"[{section}]"), (section, field)
    shown = page_of(site, "reference/configuration")
    assert all(f'id="{section}"' in shown for section, _ in sections(RunConfig))


def test_every_field_has_a_meaning() -> None:
    for name, info in keys_of(RunConfig).items():
        section = submodel(info)
        assert section is not None
        assert section.__doc__, name
        assert [key for key, each in keys_of(section).items() if not each.description] == []


def test_the_reference_has_every_command_and_option(site: Path) -> None:
    text = reference.commands()
    program: Any = typer.main.get_command(app)
    groups = {"simulate": program.commands["simulate"].commands}
    commands = {name: command for name, command in program.commands.items() if name not in groups}
    commands |= {f"{group} {name}": command for group, members in groups.items() for name, command in members.items()}
    shown = page_of(site, "reference/commands")
    for name, command in commands.items():
        below = text.partition(f"### muletrain {name}\n")[2].partition("\n### ")[0]
        assert below, name
        options = [
            name
            for each in command.params
            if each.param_type_name == "option" and not each.hidden
            for name in each.opts
        ]
        assert [option for option in options if f"`{option}`" not in below] == []
        assert f"muletrain {name}<" in shown


def test_the_reference_has_every_event(site: Path) -> None:
    shown = page_of(site, "reference/events")
    assert [kind for kind in KINDS if f'id="{kind}"' not in shown and KINDS[kind] is not Notice] == []


def test_the_reference_has_the_python_interface(site: Path) -> None:
    shown = page_of(site, "reference/python")
    names = [f"muletrain.api.{name}" for name in muletrain._API]
    names += [f"muletrain.api.Run.{name}" for name in vars(Run) if not name.startswith("_")]
    assert [name for name in names if f'id="{name}"' not in shown] == []


def test_values_and_markup_are_written_for_readers() -> None:
    assert reference.plain("run 'muletrain plan' with --plan <x> [bold]now[/bold]") == (
        "run `muletrain plan` with `--plan` &lt;x> now"
    )
    assert reference.table(["a"], [["x|y\nz"]]) == "| a |\n| --- |\n| x\\|y z |"


@pytest.mark.parametrize("draw", pictures.PICTURES)
def test_pictures_are_as_the_script_draws_them(draw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    picture = draw()
    picture.write()
    drawn = (tmp_path / f"{picture.name}.svg").read_text(encoding="utf-8")
    assert drawn == (ROOT / "docs" / "assets" / f"{picture.name}.svg").read_text(encoding="utf-8")
