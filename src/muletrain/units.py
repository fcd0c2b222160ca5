"""Quantities and text as people write and read: bytes, durations, counts. Pure; parsers raise ValueError.

Sizes are decimal (1 MB = 10^6 bytes, as networks count); written with an 'i', binary (1 MiB = 2^20 bytes, as
memory counts).
"""

from __future__ import annotations

import math
import re

_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SIZE = re.compile(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)
_DURATION = re.compile(r"([0-9.]+)\s*(ms|s|min|m|h|d)\s*")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str) -> int:
    """'1.5 GiB', '200 MB', '4096' -> bytes."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a size such as '1.5 GiB' or '200 MB', got {text!r}")
    return int(_number(match[1], text) * _scale(match[2], match[3]))


def parse_duration(text: str) -> float:
    """'90', '1h30m', '250 ms', '2 d' -> seconds."""
    if re.fullmatch(r"\s*\d+(\.\d*)?\s*", text):
        return float(text)
    parts = list(_DURATION.finditer(text.strip()))
    if not parts or "".join(m.group() for m in parts) != text.strip():
        raise ValueError(f"expected a duration such as '90 s', '1h30m' or '250 ms', got {text!r}")
    return sum(_number(m[1], text) * _SECONDS[m[2]] for m in parts)


def format_bytes(n: float) -> str:
    """Bytes, decimal: '512 B', '33.5 MB'."""
    return _scaled(n, 1000.0, ["B", "kB", "MB", "GB", "TB", "PB"])


def format_memory(n: float) -> str:
    """Bytes, binary: '24 GiB'."""
    return _scaled(n, 1024.0, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"])


def format_count(n: float) -> str:
    """'985', '12.3k', '125M', '2.7B'."""
    return _scaled(n, 1000.0, ["", "k", "M", "B", "T"]).replace(" ", "")


def plural(count: int, noun: str) -> str:
    """'1 step', '2,000 steps', '3 microbatches'."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{count:,} {noun}{ending}"


def format_duration(seconds: float) -> str:
    """'85 ms', '4.2 s', '2:05', '1:02:05', '3 d 4 h'; '?' when unknown."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def _scaled(n: float, base: float, names: list[str]) -> str:
    power = 0
    while abs(_three_digits(n)) >= base and power + 1 < len(names):
        n, power = n / base, power + 1
    return f"{_three_digits(n):.4g} {names[power]}".strip()


def _three_digits(n: float) -> float:
    return float(f"{n:.3g}") if abs(n) < 1000 else round(n)


def _scale(prefix: str, binary: str) -> float:
    return (1024.0 if binary else 1000.0) ** _PREFIXES[prefix.lower()]


def _number(digits: str, text: str) -> float:
    try:
        return float(digits)
    except ValueError:
        raise ValueError(f"expected a number with a unit, got {text!r}") from None


_OF_SCRIPTS = "\u00ad\u200c\u200d\u200e\u200f"
"""Characters without width that scripts and emoji need: joiners, separators, and marks of direction."""


def printable(text: str, *, lines: bool = False) -> str:
    """Untrusted ``text`` without characters that a terminal obeys or that hide text: control characters, escape
    sequences, marks of direction, characters without width. The result is one line, unless ``lines`` keeps line
    ends."""
    kept = f"{_OF_SCRIPTS}\n\t" if lines else _OF_SCRIPTS
    return "".join(c if c.isprintable() or c in kept else " " if c.isspace() else "\ufffd" for c in text)
