"""The reference of the documentation, made from the code: ``PARTS`` has a function for each part, which returns Markdown.

The site's build (``scripts/site.py``) puts a part in the place of its mark in a page: ``<!-- made: configuration -->``.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from muletrain.cli.main import PANELS, app
from muletrain.cli.main import simulate as simulate_app
from muletrain.config import plan_file
from muletrain.config.dump import toml_value
from muletrain.config.effects import IDLE
from muletrain.config.fleet_file import Fleet
from muletrain.config.problems import keys_of, submodel
from muletrain.config.schema import RunConfig
from muletrain.events import KINDS, Event, facts, notices
from muletrain.runs.resuming import rule_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pydantic.fields import FieldInfo

UNIT = re.compile(r"\s*\[([^\]]+)\]$")
PLAN = (
    plan_file.Plan,
    plan_file.Prediction,
    plan_file.Split,
    plan_file.Stage,
    plan_file.Memory,
    plan_file.Traffic,
    plan_file.Improvement,
)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown; bars and line ends in cells are made harmless."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: paragraphs in one line each, code in single backticks."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return plain("\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))


def plain(text: str) -> str:
    """Text of help or a docstring without the terminal's markup, and with nothing that HTML would take for a tag."""
    text = re.sub(r"\[/?(?:bold|italic|dim)\]", "", text).replace("``", "`")
    text = re.sub(r"'((?:muletrain|pip) [^']*)'", r"`\1`", text)
    text = re.sub(r"(?<![\w`'-])--[a-z][a-z-]*(?![^`]*`[^`]*$)", r"`\g<0>`", text)
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;").replace("*", r"\*") for part in parts)


# Commands -------------------------------------------------------------------------------------------------------------


def commands() -> str:
    """Every command with its help, arguments and options."""
    program: Any = typer.main.get_command(app)
    parts = []
    for panel, members in PANELS.items():
        parts.append(f"## {panel}")
        parts += [_command(["muletrain", name], program.commands[name]) for name in members]
        if panel == "Prepare":
            group: Any = program.commands[simulate_app.info.name or "simulate"]
            parts += [_command(["muletrain", "simulate", name], command) for name, command in group.commands.items()]
    return "\n\n".join(parts)


def _command(path: list[str], command: Any) -> str:
    context = typer.Context(command, info_name=" ".join(path))
    usage = " ".join([*path, *command.collect_usage_pieces(context)])
    parts = [f"### {' '.join(path)}", f"```text\n{usage}\n```", plain(command.help or "")]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    if arguments:
        rows = [[f"`{p.metavar or p.name.upper()}`", plain(p.help or "")] for p in arguments]
        parts.append(table(["argument", "meaning"], rows))
    if options:
        rows = [[_names(p, context), _default(p), plain(p.help or "")] for p in options]
        parts.append(table(["option", "default", "meaning"], rows))
    return "\n\n".join(part for part in parts if part)


def _names(option: Any, context: Any) -> str:
    """``--seed INTEGER``, as the help writes it."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if option.is_flag:
        return names
    value = option.metavar or option.get_help_record(context)[0].partition(" ")[2].strip("<>")
    return f"{names} `{KINDS_OF_VALUES.get(value, value).strip('[]').replace('|', ' or ')}`"


KINDS_OF_VALUES = {"str": "TEXT", "int": "N", "int range": "N", "float": "X", "float range": "X", "path": "PATH"}
"""How the help's names of types are written, in capitals as all values."""


def _default(option: Any) -> str:
    if option.is_flag or option.default in (None, [], (), "") or callable(option.default):
        return ""
    value = option.default.value if isinstance(option.default, Enum) else option.default
    return f"`{value}`"


# Sections of files ----------------------------------------------------------------------------------------------------


def configuration() -> str:
    """Every field of a run's configuration, by section."""
    return "\n\n".join(_section(f"[{name}]", section, name) for name, section in _sections(RunConfig))


def _sections(kind: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, info in keys_of(kind).items():
        if (section := submodel(info)) is not None:
            yield name, section


def _section(title: str, section: type[BaseModel], run: str | None = None) -> str:
    """A section; of a run's configuration also what a resume may change, and which fields have no effect."""
    head = ["field", "type", "default", "unit", "meaning", *(["when resumed"] if run else [])]
    rows = []
    for name, info in keys_of(section).items():
        meaning, unit = described(info)
        row = [f"`{name}`", kind_of(info), f"`{default_of(info)}`", unit, meaning]
        rows.append(row + ([_RESUME[rule_of(f"{run}.{name}").may]] if run else []))
    anchor = re.sub(r"\W", "", title)
    parts = [f"## {title} {{ #{anchor} }}", prose(section.__doc__), table(head, rows)]
    if idle := [rule for rule in IDLE if run and any(path.startswith(f"{run}.") for path in rule.fields.split())]:
        parts.append("Fields without effect are rejected:")
        parts.append(
            "\n".join(
                f"- {', '.join(f'`{path}`' for path in rule.fields.split())}: {plain(rule.why)}; {plain(rule.remedy)}."
                for rule in idle
            )
        )
    return "\n\n".join(parts)


_RESUME = {"yes": "may change", "from then on": "from then on", "no": "fixed"}


def described(info: FieldInfo) -> tuple[str, str]:
    """What a field means, and its unit."""
    text = info.description or ""
    unit = UNIT.search(text)
    return plain(UNIT.sub("", text)), "" if unit is None or unit[1] == "1" else unit[1]


def default_of(info: FieldInfo) -> str:
    """A field's default as TOML."""
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    return "none" if value is None else toml_value(value)


def kind_of(info: FieldInfo) -> str:
    """A field's type in a reader's words."""
    return _kind(info.annotation)


def _kind(kind: Any) -> str:
    origin, given = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _kind(given[0])
    if origin is Literal:
        return " or ".join(f"`{toml_value(value)}`" for value in given)
    if origin in (tuple, list, frozenset):
        inner = [_kind(part) for part in given if part is not Ellipsis]
        return f"list of {inner[0]}" if Ellipsis in given or origin is not tuple else f"[{', '.join(inner)}]"
    if origin is dict:
        return "table"
    if given:  # a union
        return " or ".join(dict.fromkeys(_kind(part) for part in given if part is not type(None)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(f"`{toml_value(member.value)}`" for member in kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "table"
    return {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )


def fleet() -> str:
    """Every field of a fleet file."""
    top = [
        [f"`{name}`", kind_of(info), f"`{default_of(info)}`", described(info)[0]]
        for name, info in keys_of(Fleet).items()
        if submodel(info) is None
    ]
    head = table(["field", "type", "default", "meaning"], top)
    parts = []
    for name, info in keys_of(Fleet).items():
        if (section := submodel(info)) is not None:
            title = f"[[{name}]]" if get_origin(info.annotation) is tuple else f"[{name}]"
            parts.append(_section(title, section))
    return "\n\n".join(["## The file", head, *parts])


def plan() -> str:
    """Every field of the JSON that ``muletrain plan --json`` prints."""
    parts = []
    for kind in PLAN:
        rows = []
        for name, info in kind.model_fields.items():
            meaning, unit = described(info)
            rows.append([f"`{name}`", meaning, unit])
        title = "The plan" if kind is plan_file.Plan else kind.__name__
        parts += [f"## {title}", prose(kind.__doc__), table(["field", "meaning", "unit"], rows)]
    return "\n\n".join(parts)


# Events ---------------------------------------------------------------------------------------------------------------


def events() -> str:
    """Every event with its fields, and the sentence for people."""
    parts = []
    for title, module in (("Facts", facts), ("Notices", notices)):
        parts += [f"## {title}", prose(module.__doc__)]
        parts += [_event(kind) for kind in KINDS.values() if kind.__module__ == module.__name__]
    return "\n\n".join(parts)


def _event(kind: type[Event]) -> str:
    said = field_docs(kind)
    own = [field for field in dataclasses.fields(kind) if field.name not in ("t", "peer")]
    rows = []
    for field in own:
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = "" if required or field.default is dataclasses.MISSING else f"`{field.default!r}`"
        rows.append([f"`{field.name}`", f"`{field.type}`", default, plain(" ".join(said.get(field.name, "").split()))])
    parts = [f"### {kind.__name__} {{ #{kind.kind} }}", f"`{kind.kind}`" + (" · warning" if kind.WARNING else "")]
    parts.append(prose(kind.__doc__))
    if kind.TEXT:
        parts.append(f"> {plain(kind.TEXT)}")
    if rows:
        parts.append(table(["field", "type", "default", "meaning"], rows))
    return "\n\n".join(part for part in parts if part)


def field_docs(kind: type) -> dict[str, str]:
    """The docstrings below the fields of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(before, ast.AnnAssign)
            and isinstance(before.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[before.target.id] = str(after.value.value)
    return found


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "configuration": configuration,
    "fleet": fleet,
    "plan": plan,
    "events": events,
}
