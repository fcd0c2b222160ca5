"""The base of events, and the form as lines of JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from muletrain.errors import MuletrainError

KINDS: dict[str, type[Event]] = {}
_ADAPTERS: dict[str, TypeAdapter[Event]] = {}
_SHAPES: dict[str, tuple[set[str], tuple[str, ...]]] = {}
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# JSON has no NaN: a diverged loss is written as the text "NaN"
Number = Annotated[float, BeforeValidator(lambda v: _NON_FINITE.get(v, v) if isinstance(v, str) else v)]


class EventError(MuletrainError):
    """A line that is no event: not JSON, unknown kind, or wrong fields."""


@dataclass_transform(frozen_default=True)
class _Frozen:
    """Makes every subclass a frozen dataclass."""

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        dataclass(frozen=True, kw_only=kw_only)(cls)


class Event(_Frozen, kw_only=True):
    """Base of all events. ``kind`` is the class name in snake case."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    kind: ClassVar[str] = "event"
    TEXT: ClassVar[str] = ""
    """The sentence for people, with field names in braces."""
    WARNING: ClassVar[bool] = False

    t: Number = 0.0
    peer: str = ""

    def sentence(self) -> str:
        """The event for people, with ids of peers; empty: only numbers change."""
        return self.TEXT.format_map(vars(self))

    def is_warning(self) -> bool:
        return self.WARNING

    def __init_subclass__(cls, *, abstract: bool = False) -> None:
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        super().__init_subclass__()
        if not abstract:
            KINDS[cls.kind] = cls

    def to_json(self) -> str:
        """One line of JSON without the line end."""
        line = json.dumps({"kind": self.kind, **_plain(dataclasses.asdict(self))}, ensure_ascii=False, allow_nan=False)
        return line if line.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """The event that ``to_json`` wrote. Raises EventError."""
        event = parse(line)
        if not isinstance(event, cls):
            raise EventError(f"expected a {cls.kind} event, got {event.kind}")
        return event


def parse(line: str | bytes) -> Event:
    """The event of a line. Raises EventError."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise EventError(f"not JSON: {e}") from None
    kind = fields.pop("kind", None) if isinstance(fields, dict) else None
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise EventError(f"unknown event kind {kind!r}; was it written by another version of muletrain?")
    try:
        # through JSON again, because strict mode accepts an object for a dataclass only there
        return _adapter(cls).validate_json(json.dumps(fields))
    except ValidationError as e:
        first = e.errors()[0]
        raise EventError(f"{kind} event: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def parse_own(line: bytes) -> Event:
    """The event of a line that a process of this machine wrote: as ``parse``, ten times as fast, but the types of fields
    are believed. Raises EventError."""
    try:
        fields = json.loads(line.decode())
        cls = KINDS[fields.pop("kind")]
        known, numbers = _SHAPES.get(cls.kind) or _shape(cls)
        for name in numbers:
            if type(value := fields.get(name)) is str:
                fields[name] = _NON_FINITE[value]
        if fields.keys() != known:
            return cls(**fields)  # fields with defaults
        event = object.__new__(cls)
        event.__dict__.update(fields)  # a frozen dataclass sets its fields one by one
        return event
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return parse(line)  # says what is wrong


def _shape(cls: type[Event]) -> tuple[set[str], tuple[str, ...]]:
    """Names of all fields, and of those of the type Number."""
    fields = dataclasses.fields(cls)
    numbers = tuple(f.name for f in fields if str(f.type).startswith("Number"))
    return _SHAPES.setdefault(cls.kind, ({f.name for f in fields}, numbers))


def _adapter(cls: type[Event]) -> TypeAdapter[Event]:
    if cls.kind not in _ADAPTERS:
        _ADAPTERS[cls.kind] = TypeAdapter(cls)
    return _ADAPTERS[cls.kind]


def _plain(value: Any) -> Any:
    """``value`` with non-finite floats as text, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
