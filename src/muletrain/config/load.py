"""Reads a configuration: TOML, with ``--set`` on top, becomes one clear error or a config that can run."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from datetime import date, time
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from muletrain.config.dump import describe, dump_toml
from muletrain.config.effects import check_effects
from muletrain.config.locate import KeyPath, Origins, key_lines
from muletrain.config.problems import dotted, explain, field_at, keys_of, located, submodel
from muletrain.config.schema import ADAPTER_LR, FINE_TUNING_LR, RunConfig
from muletrain.config.trusted import trust
from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pydantic.fields import FieldInfo

__all__ = [
    "describe",
    "digest",
    "dump_toml",
    "load_config",
    "load_located",
    "load_toml",
    "load_toml_located",
    "located",
    "read_output",
]

T = TypeVar("T", bound=BaseModel)


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """The run of a file (None: defaults) and of ``SECTION.FIELD=VALUE`` overrides, of which later ones win.

    Raises ConfigError: one sentence with the place ('my.toml:12' or '--set ...'), the field and the remedy.
    """
    return load_located(path, overrides)[0]


def load_located(
    path: Path | None = None, overrides: Sequence[str] = (), base: RunConfig | None = None, *, kept: bool = False
) -> tuple[RunConfig, Origins]:
    """Like ``load_config``, with the origins of the values, for later errors (``located``). ``base``: values instead of
    a file. ``kept``: the file is from an earlier run; fields there, and in ``base``, need not have an effect. The
    factories that the user names are trusted (``trusted``), but not those of ``base``."""
    config, origins = _load(RunConfig, path, overrides, "" if base is None else dump_toml(base))
    with located(origins):
        named = [text.partition("=")[0].strip() for text in overrides]
        check_effects(config, named if kept or base is not None else None)
    for section in ("model", "data"):
        if base is None or any(text.partition("=")[0].strip() == f"{section}.factory" for text in overrides):
            trust(getattr(config, section).factory)
    return config, origins


def read_output(
    path: Path, kind: type[T], command: str, version: int, remark: Callable[[str], str] = lambda text: ""
) -> T:
    """A file that ``muletrain COMMAND --json`` wrote: a ``kind`` of this ``version``. ``remark`` names another possible
    kind of file with that text. Raises ConfigError."""
    name, what = kind.__name__.lower(), f"'muletrain {command} --json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: cannot be read ({e}); {what} > {path}' writes a {name}") from None
    try:
        found = kind.model_validate_json(text)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"])) or name
        raise ConfigError(f"{path}: not an output of {what}'{remark(text)}: {where}: {first['msg']}") from None
    if (theirs := getattr(found, "version", version)) != version:
        raise ConfigError(
            f"{path}: version {theirs} of the format, but this muletrain reads {version}; run {what}' again"
        )
    return found


def load_toml(kind: type[T], path: Path | None, overrides: Sequence[str] = ()) -> T:
    """A ``kind`` from TOML. Types are strict (no "12" for 12); 'none' is null. Raises ConfigError."""
    return load_toml_located(kind, path, overrides)[0]


def load_toml_located(kind: type[T], path: Path | None, overrides: Sequence[str] = ()) -> tuple[T, Origins]:
    """Like ``load_toml``, with the origins of the values, for later errors (``located``)."""
    return _load(kind, path, overrides)


def _load(kind: type[T], path: Path | None, overrides: Sequence[str], text: str = "") -> tuple[T, Origins]:
    raw, origins = _read(path) if path is not None else (tomllib.loads(text), Origins())
    for text in overrides:
        _override(raw, text, kind, origins)
    if kind is RunConfig:
        _fine_tune(raw)
    _refuse_dates(raw, (), origins)
    try:
        # through JSON, whose strict mode accepts a list for a tuple and text for an enum
        return kind.model_validate_json(json.dumps(_nulls(kind, raw)), strict=True), origins
    except ValidationError as e:
        raise explain(e, kind, origins) from None


def _fine_tune(raw: dict[str, Any]) -> None:
    """A model that was trained before is trained further by small steps, unless the user says otherwise."""
    model, optimizer = raw.get("model"), raw.setdefault("optimizer", {})
    begins = isinstance(model, dict) and model.get("from") not in (None, "none")
    adapter = raw.get("adapter", {})
    adapts = isinstance(adapter, dict) and any(adapter.get(name) not in (None, "none") for name in ("rank", "from"))
    if begins and isinstance(optimizer, dict) and optimizer.get("name", "adamw") == "adamw":
        optimizer.setdefault("lr", ADAPTER_LR if adapts else FINE_TUNING_LR)


def digest(config: RunConfig) -> str:
    """SHA-256 (hex) of the fields that define the run's numbers, except the place of the run and the times of
    saving."""
    parts = config.model_dump(
        mode="json",
        by_alias=True,
        include={"model": True, "data": True, "train": True, "optimizer": True, "wire": True, "fleet": {"stages"}},
        exclude={"data": {"path", "cache"}, "train": {"time_limit"}, "optimizer": {"state_device"}},
    )
    if config.fleet.layers is not None:  # else they follow from the rest
        parts["fleet"]["layers"] = config.fleet.layers
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], Origins]:
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), Origins(str(path), key_lines(text))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; 'muletrain config > {path}' writes one to start from") from None
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {e.start}); save it as UTF-8") from None
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(_syntax(path, str(e))) from None


def _syntax(path: Path, message: str) -> str:
    """tomllib's 'Invalid value (at line 3, column 7)' in the form of our messages."""
    match = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", message, re.DOTALL)
    if match is None:
        return f"{path}: not valid TOML: {message}"
    twice = "overwrite" in match[1] or "twice" in match[1]
    remedy = "name each key and table once" if twice else "write text in \"quotes\", one 'key = value' per line"
    return f"{path}:{match[2]}:{match[3]}: not valid TOML: {match[1]}; {remedy}"


def _override(raw: dict[str, Any], text: str, kind: type[BaseModel], origins: Origins) -> None:
    name, equals, value = text.partition("=")
    path: KeyPath = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise ConfigError(f"--set {text}: write it as SECTION.FIELD=VALUE, e.g. --set model.layers=12")
    if len(path) == 1 and name.strip() in keys_of(kind):
        raise ConfigError(f"--set {text}: {name} is a section; set one of its fields, e.g. --set {name}.FIELD={value}")
    origins.override(path, text)
    section = raw
    for part in path[:-1]:
        section = section.setdefault(str(part), {})
        if not isinstance(section, dict):
            raise ConfigError(f"{origins.where(path[:1])}: {part}: expected a table, as in [{part}], got {section!r}")
    section[str(path[-1])] = _value(value.strip(), field_at(kind, path))


def _value(text: str, info: FieldInfo | None) -> Any:
    """A TOML value, or else the text itself: for a text field, ``2024`` and ``corpus/*.txt`` need no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as e:
        if text.startswith("{") and info is not None and get_origin(info.annotation) is dict:
            raise ConfigError(
                f"--set: {text} is not valid TOML: {e}; in double quotes a backslash is written twice, in single quotes once"
            ) from e
        return text
    wants_text = info is not None and info.annotation in (str, str | None)
    value = parsed["value"] if len(parsed) == 1 else text
    return text if wants_text and not isinstance(value, str) else value


def _refuse_dates(value: Any, path: KeyPath, origins: Origins) -> None:
    """TOML has dates and times, JSON would carry both as text."""
    if isinstance(value, date | time):
        raise ConfigError(
            f'{origins.where(path)}: {dotted(path)}: {value} is a date or a time, which no field takes; put text in "quotes"'
        )
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _refuse_dates(item, (*path, key), origins)


def _nulls(kind: type[BaseModel], raw: dict[str, Any]) -> dict[str, Any]:
    """``raw`` with null for 'none' where a field may be off, because TOML has no null."""
    known = keys_of(kind)
    return {key: _null(known[key], value) if key in known else value for key, value in raw.items()}


def _null(info: FieldInfo, value: Any) -> Any:
    if value == "none" and type(None) in get_args(info.annotation):
        return None
    sub = submodel(info)
    if sub and isinstance(value, dict):
        return _nulls(sub, value)
    if sub and isinstance(value, list):
        return [_nulls(sub, item) if isinstance(item, dict) else item for item in value]
    return value
