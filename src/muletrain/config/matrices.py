"""Delay and bandwidth between every two devices: a JSON file (``NET.json``), or the name of a built-in network.

``dtfm-case1`` to ``-case5`` are the five networks of DT-FM's evaluation (Yuan et al. 2022, sec. 4), copied from the
published scheduler (github.com/DS3Lab/DT-FM, 64 devices each). The paper's text gives other numbers for cases 1 to 3;
``dtfm-case1-text`` to ``-case3-text`` have the text's numbers.
"""

from __future__ import annotations

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from muletrain.config.problems import hint
from muletrain.errors import ConfigError

MOST, LEAST_GBPS = 1e9, 1e-9
"""Bounds of plausible values: at most 12 days or 1e18 bit/s, at least 1 bit/s."""
UNITS = {"delay_ms": "give milliseconds", "bandwidth_gbps": "give Gbit/s, and 0 for no link"}


class Matrices(NamedTuple):
    """N x N, from row to column; diagonals are ignored."""

    name: str
    delay_ms: list[list[float]]
    bandwidth_gbps: list[list[float]]
    """0: no link."""
    regions: tuple[str, ...]
    """One per device; () if unknown."""


_TEXT = {
    # The published bandwidths of cases 1 and 2 are an eighth of the text's: bytes instead of bits. (Case 2 keeps the
    # published eight machines: the text's four machines of four GPUs would make 48 devices, not 64.)
    "dtfm-case1-text": ("dtfm-case1", {3.125: 25.0}, {}),
    "dtfm-case2-text": ("dtfm-case2", {1.25: 10.0}, {}),
    "dtfm-case3-text": ("dtfm-case3", {5.0: 10.0}, {11.0: 10.0}),
}
"""By name: the published network, and the bandwidths [Gbit/s] and delays [ms] that differ in the text."""


def shipped() -> list[str]:
    """Names of the built-in networks."""
    return sorted([*(path.stem for path in _folder().glob("*.json")), *_TEXT])


def load_matrices(name: str) -> Matrices:
    """The network of a file, or the built-in one of that name. Raises ConfigError."""
    if not Path(name).exists():
        if name in _TEXT:
            origin, gbps, ms = _TEXT[name]
            found = load_matrices(origin)
            delays, bandwidths = _replaced(found.delay_ms, ms), _replaced(found.bandwidth_gbps, gbps)
            return found._replace(name=name, delay_ms=delays, bandwidth_gbps=bandwidths)
        if name in shipped():
            return _read(_folder() / f"{name}.json")
        raise ConfigError(f"{name}: no such file and no built-in network; {hint(name, shipped())}")
    return _read(Path(name))


def _folder() -> Path:
    return Path(str(files("muletrain.config"))) / "measured"


def _replaced(rows: list[list[float]], others: dict[float, float]) -> list[list[float]]:
    return [[others.get(value, value) for value in row] for row in rows]


def _read(path: Path) -> Matrices:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {e.start}); save it as UTF-8") from None
    except json.JSONDecodeError as e:
        raise ConfigError(f"{path}:{e.lineno}:{e.colno}: not valid JSON: {e.msg}") from None
    except RecursionError:
        raise ConfigError(f"{path}: lists are nested too deeply; use two levels") from None
    if not isinstance(raw, dict):
        raise ConfigError(f'{path}: expected an object, {{"delay_ms": [[...]], "bandwidth_gbps": [[...]]}}')
    keys = ("delay_ms", "bandwidth_gbps", "regions")
    for key in raw:
        if key not in keys:
            raise ConfigError(f"{path}: {key}: unknown key; {hint(key, keys)}")
    delay_ms, bandwidth_gbps = (_matrix(path, key, raw.get(key)) for key in keys[:2])
    if len(delay_ms) != len(bandwidth_gbps):
        raise ConfigError(
            f"{path}: delay_ms has {len(delay_ms)} rows and bandwidth_gbps {len(bandwidth_gbps)}; give both one row per device"
        )
    regions = raw.get("regions", [])
    if (
        not isinstance(regions, list)
        or not all(isinstance(r, str) for r in regions)
        or len(regions) not in (0, len(delay_ms))
    ):
        raise ConfigError(f"{path}: regions: expected a list of {len(delay_ms)} names, one per device; or leave it out")
    return Matrices(path.stem, delay_ms, bandwidth_gbps, tuple(regions))


def _matrix(path: Path, key: str, rows: Any) -> list[list[float]]:
    if rows is None:
        raise ConfigError(f"{path}: {key}: missing; give a list of N lists of N numbers, from row to column")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise ConfigError(f"{path}: {key}: expected a list of N lists of N numbers, one per device")
    for i, row in enumerate(rows):
        if len(row) != len(rows):
            raise ConfigError(
                f"{path}: {key}[{i}] has {len(row)} values, but there are {len(rows)} rows; give each row one value per device"
            )
        for j, value in enumerate(row):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{path}: {key}[{i}][{j}]: expected a number, got {json.dumps(value)[:40]}")
            if not math.isfinite(value) or value < 0:
                zero = ", 0 for no link" if key == "bandwidth_gbps" else ""
                raise ConfigError(f"{path}: {key}[{i}][{j}]: expected a finite number of at least 0{zero}, got {value}")
            if value > MOST or (key == "bandwidth_gbps" and 0 < value < LEAST_GBPS):
                raise ConfigError(f"{path}: {key}[{i}][{j}]: {value} is not plausible; {UNITS[key]}")
    return [[float(value) for value in row] for row in rows]
