"""What README and docs tell people to type can be typed, and what they link to is there."""

from __future__ import annotations

import re
import shlex
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer
from typer.testing import CliRunner

from muletrain.cli.main import app
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.policy.chaos import Bounds, parse
from muletrain.runs.join.ticket import PREFIX
from proofs.__main__ import app as proofs
from reproduction.__main__ import app as reproduction

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
        *ROOT.glob("examples/*.md"),
    ]
}
PROGRAMS = {"muletrain": app, "python -m proofs": proofs, "python -m reproduction": reproduction}
COMMANDS = {name: typer.main.get_command(program) for name, program in PROGRAMS.items()}
QUICK = (
    "muletrain config",
    "muletrain config --all",
    "muletrain config --fleet",
    "python -m reproduction swarm-table2",
)
"""Commands of the pages that run here. ``test_tutorials.py`` types the tutorials and runs Python, and tests of their own run
other commands. The rest needs machines, a cloud, a run folder or minutes: its options are parsed, and its settings loaded."""
PEERS, CLIENTS = (tuple(f"{kind}-{k}" for k in range(4)) for kind in ("peer", "client"))
FOLDERS = ("src", "tests", "benchmarks", "proofs", "reproduction", "docs", "examples", "scripts")
MODULES = [f"/{path.relative_to(ROOT).as_posix()}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
WRITTEN = {"blocks/blocks.py"}
"""Modules that a command writes."""
PLACEHOLDERS = {
    "TICKET": f"{PREFIX}x",
    "$MULETRAIN_TICKET": f"{PREFIX}x",
    "-": f"{PREFIX}x",
    "N": "7",
    "GIB": "7",
    "PLAN": "random",
}


def blocks(text: str) -> list[str]:
    """Commands of ours in shell blocks, which have all that they need."""
    return _commands("\n".join(re.findall(r"^```sh\b[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).split("\n"))


def tomls(text: str) -> list[str]:
    """TOML files that a page shows."""
    return re.findall(r"^```toml\b[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def mentioned(text: str) -> list[str]:
    """Commands of ours inside of sentences, which may lack arguments."""
    return _commands(re.findall(r"`([^`]+)`", _without_blocks(text)))


def _commands(pieces: list[str]) -> list[str]:
    parts = (part for piece in pieces for part in " ".join(piece.split()).split("&& "))
    return [part for part in parts if any(part.startswith(f"{name} ") or part == name for name in PROGRAMS)]


def _split(line: str) -> tuple[Any, list[str]]:
    """The program that a command line begins with, and its words."""
    name = next(name for name in PROGRAMS if line.startswith(name))
    return COMMANDS[name], shlex.split(line.removeprefix(name), comments=True)


def leaves(command: Any, path: str) -> list[tuple[str, Any]]:
    """The commands under ``command``, with the words that call each."""
    inner = getattr(command, "commands", None)
    return [(path, command)] if inner is None else [x for n, c in inner.items() for x in leaves(c, f"{path} {n}")]


@pytest.mark.parametrize(("path", "command"), leaves(COMMANDS["muletrain"], "muletrain"))
def test_the_help_of_each_command_has_an_example_that_can_be_typed(path: str, command: Any) -> None:
    example = command.epilog.removeprefix("[dim]Example:[/] ")
    assert f"{example} ".startswith(f"{path} ")
    assert problem(example) == ""
    shown = CliRunner().invoke(app, [*path.split()[1:], "--help"], env={"COLUMNS": "100", "TERM": "dumb"}).output
    assert " ".join(example.split()) in " ".join(shown.split())


def _without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def unknown(line: str) -> list[str]:
    """Words of a command line that name no command or option of ours."""
    here, words = _split(line)
    wrong = list[str]()
    for word in words:
        if word.startswith("--"):
            if word.split("=")[0] not in {"--help", *(o for p in here.params for o in (*p.opts, *p.secondary_opts))}:
                wrong.append(word)
        elif commands := getattr(here, "commands", None):
            if word not in commands:
                return [word]
            here = commands[word]
    return wrong


def parsed(line: str) -> dict[str, Any]:
    """The arguments of a whole command line, which is parsed as the shell's, and does nothing. Raises what the command
    would."""
    given = dict[str, Any]()
    program, words = _split(line)
    command = list(takewhile(lambda word: word != ">", words))
    called = _called(program, command)
    with patch.object(called, "callback", lambda **arguments: given.update(arguments)):
        program.main(args=[PLACEHOLDERS.get(word, word) for word in command], standalone_mode=False)
    return given


def _called(here: Any, words: list[str]) -> Any:
    """The command of the program ``here`` that ``words`` begin with."""
    for word in words:
        here = getattr(here, "commands", {}).get(word, here)
    return here


def check(given: dict[str, Any]) -> None:
    """Of a parsed command line: are its fields those of a configuration, and its faults a plan? Raises ConfigError."""
    config = load_config(None, given.get("overrides") or [])
    if (chaos := given.get("chaos")) not in (None, "random"):
        parse(chaos, Bounds(PEERS, config.fleet.stages, config.train.steps, CLIENTS))


def problem(line: str) -> str:
    """Why a command line cannot run; empty: it can."""
    try:
        check(parsed(line))
    except Exception as e:  # typer's errors have no public name
        return str(e)
    return ""


def links(text: str) -> list[str]:
    """Targets of links and pictures that lie in this repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", _without_blocks(text))
    return [target for target in targets if "://" not in target]


def anchors(text: str) -> set[str]:
    """Names of a page's headings as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(text: str, folder: Path) -> list[str]:
    """Links of a page in ``folder`` that lead nowhere."""
    wrong = list[str]()
    for link in links(text):
        path, _, anchor = link.partition("#")
        there = not path or (folder / path).exists()
        if not there or (anchor and anchor not in anchors((folder / path).read_text("utf-8") if path else text)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_option_exists(page: str) -> None:
    lines = [*blocks(PAGES[page]), *mentioned(PAGES[page])]
    assert {line: found for line in lines if (found := unknown(line))} == {}


@pytest.mark.parametrize("line", sorted({line for text in PAGES.values() for line in blocks(text)}))
def test_every_command_of_a_block_parses(line: str) -> None:
    """With its arguments, fields of the configuration, and faults."""
    check(parsed(line))


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_sentence_parses_as_far_as_it_goes(page: str) -> None:
    lacking = re.compile("Missing parameter|requires an argument")
    problems = {line: problem(line) for line in mentioned(PAGES[page])}
    assert {line: found for line, found in problems.items() if found and not lacking.search(found)} == {}


def test_help_shows_the_names_of_extras() -> None:
    """Brackets that are not escaped are styles of the terminal, which vanish."""
    every = [COMMANDS["muletrain"]]
    for command in every:
        every.extend(getattr(command, "commands", {}).values())
    helps = [parameter.help or "" for command in every for parameter in command.params if hasattr(parameter, "help")]
    assert sum("muletrain\\[" in text for text in helps) >= 3
    assert [text for text in helps if "muletrain[" in text] == []


def test_the_pages_have_commands() -> None:
    assert len({line for text in PAGES.values() for line in blocks(text)}) > 40


@pytest.mark.parametrize("line", QUICK)
def test_what_is_quick_runs(line: str) -> None:
    assert any(line in text for text in PAGES.values())
    program = next(name for name in PROGRAMS if line.startswith(name))
    result = CliRunner().invoke(PROGRAMS[program], shlex.split(line.removeprefix(program)))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("block", sorted({block for text in PAGES.values() for block in tomls(text)}))
def test_every_file_of_a_block_loads(block: str, tmp_path: Path) -> None:
    """A fleet has machines, a run has none."""
    (tmp_path / "my.toml").write_text(block, encoding="utf-8")
    if "machines" in tomllib.loads(block):
        load_fleet(tmp_path / "my.toml")
    else:
        load_config(tmp_path / "my.toml")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    assert broken(PAGES[page], (ROOT / page).parent) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_module_that_is_named_exists(page: str) -> None:
    """By the end of its path, since pages leave the package's folders out."""
    named = set(re.findall(r"`([\w/]+\.py)`", PAGES[page])) - WRITTEN
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in MODULES)} == set()


def test_the_readme_is_short_and_leads_to_each_kind_of_page() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 120
    kinds = {f"docs/{kind}/index.md" for kind in ("tutorials", "howto", "explanations", "reference")}
    assert kinds - set(links(PAGES["README.md"])) == set()


def test_no_page_names_what_lies_beside_the_repository() -> None:
    pages = {**PAGES, "mkdocs.yml": (ROOT / "mkdocs.yml").read_text(encoding="utf-8")}
    assert [page for page, text in pages.items() if "../shared" in text or "/work/" in text] == []


@pytest.mark.parametrize(
    ("line", "found"), [("muletrain walk", ["walk"]), ("muletrain run --sed model.layers=1 # --x", ["--sed"])]
)
def test_what_does_not_exist_is_found(line: str, found: list[str]) -> None:
    assert unknown(blocks(f"```sh\n{line}\n```")[0]) == found


@pytest.mark.parametrize(
    ("line", "why"),
    [("muletrain join", "ticket"), ("muletrain start --port many", "integer"), ("muletrain simulate fleet a b", "b")],
)
def test_what_does_not_parse_is_found(line: str, why: str) -> None:
    with pytest.raises(Exception, match=why):
        parsed(line)


def test_links_that_lead_nowhere_are_found() -> None:
    text = "# One Page\n[a](#one-page) [b](#other) [c](LICENSE) [d](absent.md) [e](docs/trust.md#not-protected) [f](https://example.org)"
    assert broken(text, ROOT) == ["#other", "absent.md"]


def test_the_list_of_longer_tests_names_tests() -> None:
    for line in (ROOT / "tests" / "full.txt").read_text().splitlines():
        file, _, name = line.partition("::")
        if not line.startswith("#"):
            assert re.search(
                rf"^(async )?def {name.partition('[')[0]}\b", (ROOT / "tests" / file).read_text(), re.MULTILINE
            ), line
