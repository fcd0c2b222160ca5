"""Turns pydantic's errors into one sentence: the place, the field, the problem, the remedy."""

from __future__ import annotations

import difflib
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel

from muletrain.config.schema import RunConfig
from muletrain.errors import ConfigError, MuletrainError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pydantic import ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

    from muletrain.config.locate import KeyPath, Origins

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "string": 'text in "quotes"',
    "bool": "true or false",
    "tuple": "a list, as in [1, 2]",
    "list": "a list, as in [1, 2]",
    "model": "a table, as in [section]",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_FIELD = re.compile(r"([a-z]+)(?:\[\d+\])?\.[a-z_]+: ")
_DOTTED = re.compile(r"[a-z_]+(?:\[\d+\])?(?:\.[a-z_]+(?:\[\d+\])?)+")


def explain(error: ValidationError, kind: type[BaseModel], origins: Origins) -> ConfigError:
    """The first problem as a ConfigError. Unknown keys come first: a misspelt key often causes further errors."""
    problems = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    first = problems[0]
    if first["type"] == "value_error":
        return _cross_field(str(first["ctx"]["error"]), first["loc"], origins)
    path = first["loc"]
    return ConfigError(f"{origins.where(path)}: {dotted(path)}: {_problem(first, kind)}")


@contextmanager
def located(origins: Origins, kind: type[BaseModel] = RunConfig) -> Iterator[None]:
    """Errors inside that begin with a field's name also tell the place where that field was set."""
    try:
        yield
    except MuletrainError as e:
        section = _FIELD.match(str(e))
        if section is None or section[1] not in kind.model_fields:
            raise
        raise type(e)(f"{_place(str(e), (section[1],), origins)}: {e}") from e


def dotted(path: KeyPath) -> str:
    """('machines', 0, 'name') as 'machines[0].name'."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


def field_at(kind: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    """The declared field at ``path``, or None if there is none."""
    names = [p for p in path if isinstance(p, str)]
    info: FieldInfo | None = None
    for n, name in enumerate(names):
        info = keys_of(kind).get(name)
        sub = submodel(info) if info else None
        if n + 1 < len(names):
            if sub is None:
                return None
            kind = sub
    return info


def keys_of(kind: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a section by TOML name."""
    return {info.alias or name: info for name, info in kind.model_fields.items()}


def submodel(info: FieldInfo) -> type[BaseModel] | None:
    """The section type of a field that holds a section or a list of sections."""
    for arg in (info.annotation, *get_args(info.annotation)):
        if isinstance(arg, type) and issubclass(arg, BaseModel):
            return arg
    return None


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` was probably meant to be."""
    return next(iter(difflib.get_close_matches(name.lower(), list(known), 1, 0.6)), None)


def hint(name: str, known: Iterable[str]) -> str:
    """The suggestion for the unknown ``name``."""
    guess = closest(name, known := list(known))
    return f"did you mean '{guess}'?" if guess else f"known: {', '.join(known)}"


def _cross_field(message: str, loc: KeyPath, origins: Origins) -> ConfigError:
    return ConfigError(f"{_place(message, loc, origins)}: {message}")


def _place(message: str, loc: KeyPath, origins: Origins) -> str:
    """The place of the first field in a message 'section.field: ... other.field ...' that somebody set."""
    named = [_undotted(m) for m in _DOTTED.findall(message)]
    return origins.where(next(filter(origins.knows, named), named[0] if named else loc))


def _undotted(name: str) -> KeyPath:
    return tuple(int(p) if p.isdigit() else p for p in re.findall(r"\w+", name))


def _problem(error: ErrorDetails, kind: type[BaseModel]) -> str:
    code, got, ctx = error["type"], error["input"], error.get("ctx", {})
    if code == "extra_forbidden":
        return _unknown(error["loc"], kind)
    if code == "missing":
        return _missing(error["loc"], kind)
    if code in ("literal_error", "enum"):
        return _choice(ctx["expected"], got)
    if code in _BOUNDS:
        key, words = _BOUNDS[code]
        return f"must be {words} {_plain(ctx[key])}, got {_show(got)}"
    if code == "string_pattern_mismatch":
        info = field_at(kind, error["loc"])
        return f"expected {info.description if info else ctx['pattern']}; got {_show(got)}"
    if code in ("too_long", "too_short"):
        return f"expected {_length(ctx)}, got {ctx['actual_length']}"
    expected = _EXPECTED.get(code) or _EXPECTED.get(code.split("_")[0])
    if code == "string_type" and isinstance(got, list):
        return f'expected one text in "quotes" (several separated by commas), got {_show(got)}'
    return f"expected {expected}, got {_show(got)}" if expected else f"{error['msg']}, got {_show(got)}"


def _unknown(path: KeyPath, kind: type[BaseModel]) -> str:
    parents, name = path[:-1], str(path[-1])
    info = field_at(kind, parents) if parents else None
    owner = (submodel(info) if info else None) or kind
    what = "key" if parents else "section"
    known = list(keys_of(owner))
    if guess := closest(name, known):
        return f"unknown {what}; did you mean '{guess}'?"
    if elsewhere := _homes(name, kind):
        return f"unknown {what}; did you mean '{elsewhere[0]}.{name}'?"
    return f"unknown {what}; known: {', '.join(known)}"


def _homes(name: str, kind: type[BaseModel]) -> list[str]:
    """Sections that have a key ``name``."""
    subs = {key: submodel(info) for key, info in keys_of(kind).items()}
    return [key for key, sub in subs.items() if sub and name in keys_of(sub)]


def _missing(path: KeyPath, kind: type[BaseModel]) -> str:
    if isinstance(path[-1], int):
        return f"missing; the list needs at least {path[-1] + 1} values"
    info = field_at(kind, path)
    return "missing" + (f"; give the {info.description}" if info and info.description else "")


def _choice(expected: str, got: Any) -> str:
    options = re.findall(r"'([^']*)'", expected)
    guess = closest(got, options) if isinstance(got, str) else None
    return f"expected {expected}, got {_show(got)}" + (f"; did you mean '{guess}'?" if guess else "")


def _length(ctx: dict[str, Any]) -> str:
    return f"at least {ctx['min_length']} values" if "min_length" in ctx else f"at most {ctx['max_length']} values"


def _plain(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
