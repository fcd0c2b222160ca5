"""Writes configurations as TOML: exactly (``dump_toml``), or explained field by field (``describe``)."""

from __future__ import annotations

import json
import re
import textwrap
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from muletrain.config.problems import keys_of, submodel
from muletrain.config.schema import RunConfig
from muletrain.config.section import Section

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

FIRST = {
    "model": ("preset", "from", "layers", "width", "heads", "context"),
    "adapter": ("rank",),
    "data": ("path", "tokenizer", "validation"),
    "train": ("steps", "batch", "microbatch", "validate_every"),
    "optimizer": ("name", "lr", "warmup"),
    "fleet": ("stages", "peers"),
    "compute": ("device", "precision", "memory"),
    "checkpoint": ("every", "place"),
    "logging": ("to",),
}
"""The fields that people change first, by section."""
COMMENT_COLUMN = 34
WIDTH = 120


def dump_toml(config: Section) -> str:
    """TOML that loads to an equal config; 'none' turns off a field that is on by default."""
    tables: list[str] = []
    top: list[str] = []
    for key, value in _items(config):
        if isinstance(value, Section):
            tables.append("\n".join([f"[{key}]", *_assignments(value)]))
        elif submodel(type(config).model_fields[key]):
            tables += ["\n".join([f"[[{key}]]", *_assignments(item)]) for item in value]
        elif value is not None:
            top.append(f"{key} = {toml_value(value)}")
    return "\n\n".join(["\n".join(top), *tables] if top else tables) + "\n"


def describe(
    kind: type[BaseModel] = RunConfig,
    title: str = "every value is the default",
    only: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """The configuration type as TOML that loads unchanged: every field (or those of ``only``, by section) with default
    (or an example) and comment.

    Fields that are off by default, and fields with dependent defaults, are commented out."""
    top: list[str] = [f"# {title}"]
    tables: list[str] = []
    for key, info in keys_of(kind).items():
        sub = submodel(info)
        if only is not None and key not in only:
            continue
        if sub is None:
            top += _described(key, info, kind)
        else:
            is_array = get_origin(info.annotation) is tuple
            doc = " ".join((sub.__doc__ or "").split())
            head = [f"# {doc}", f"[[{key}]]" if is_array else f"[{key}]"]
            known = keys_of(sub)
            names = known if only is None else only[key]
            tables.append("\n".join([*head, *(line for k in names for line in _described(k, known[k], sub))]))
    return "\n\n".join(["\n".join(top), *tables]) + "\n"


def toml_value(value: Any) -> str:
    """A scalar, a list or a table as TOML."""
    if isinstance(value, Enum):
        return toml_value(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _key(name: str) -> str:
    """``name`` as a key of TOML, whose bare keys are ASCII."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name, re.ASCII) else toml_value(name)


def _items(model: Section) -> Iterator[tuple[str, Any]]:
    stated = model.stated()
    for name, info in type(model).model_fields.items():
        if name in stated:
            yield info.alias or name, getattr(model, name)


def _assignments(model: Section) -> list[str]:
    known = keys_of(type(model))
    lines = [(key, "none" if value is None else value) for key, value in _items(model)]
    return [f"{key} = {toml_value(value)}" for key, value in lines if value != "none" or known[key].default is not None]


def _described(key: str, info: FieldInfo, kind: type[BaseModel]) -> list[str]:
    default = info.get_default(call_default_factory=True, validated_data={})
    if default is None:
        setting = f"# {key} = {toml_value((info.examples or ['none'])[0])}"
    elif info.default_factory is not None:  # if set, it would also apply to other optimizers
        setting = f"# {key} = {toml_value(default)}"
    else:
        value = (info.examples or [""])[0] if default is PydanticUndefined else default
        yields = issubclass(kind, Section) and key in kind.YIELDS
        setting = f"{'# ' if yields else ''}{key} = {toml_value(value)}"
    comment = textwrap.wrap((info.description or "") + _choices(info), WIDTH - COMMENT_COLUMN - 2)
    first, *rest = comment
    return [f"{setting:<{COMMENT_COLUMN - 2}}  # {first}", *(" " * COMMENT_COLUMN + f"# {line}" for line in rest)]


def _choices(info: FieldInfo) -> str:
    """' (adamw, lamb)' for a field with few values."""
    kind = info.annotation
    if get_origin(kind) is Literal:
        options = list(get_args(kind))
    elif isinstance(kind, type) and issubclass(kind, Enum):
        options = [member.value for member in kind]
    else:
        return ""
    return f" ({', '.join(options)})"
