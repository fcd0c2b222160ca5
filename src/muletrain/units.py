"""Quantities as people write and read them: bytes, rates, durations, counts. Pure; parsers raise ValueError.

Sizes and rates are decimal (1 MB = 10^6 bytes, as networks count); written with an 'i', binary (1 MiB = 2^20 bytes, as
memory counts).
"""

from __future__ import annotations

import math
import re

_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SIZE = re.compile(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([kmgtp]?)(i?)(b|bit)?\s*", re.IGNORECASE)
_COUNTS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_DURATION = re.compile(r"([0-9.]+)\s*(ms|s|min|m|h|d)\s*")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str) -> int:
    """'1.5 GiB', '200 MB', '4096' -> bytes."""
    match = _SIZE.fullmatch(text)
    if match is None or (match[4] or "").lower() == "bit":
        raise ValueError(f"expected a size such as '1.5 GiB' or '200 MB', got {text!r}")
    return int(_number(match[1], text) * _scale(match[2], match[3]))


def parse_rate(text: str) -> float:
    """'50 Mb/s' or '50 Mbit/s' (bits), '6 MB/s' (bytes) -> bytes/s. A small b is a bit, a capital B a byte."""
    size, slash, second = text.strip().rpartition("/")
    match = _SIZE.fullmatch(size)
    if not slash or second != "s" or match is None or match[4] is None:
        raise ValueError(f"expected a rate such as '50 Mb/s' or '6 MB/s', got {text!r}")
    return _number(match[1], text) * _scale(match[2], match[3]) / (1 if match[4] == "B" else 8)


def parse_duration(text: str) -> float:
    """'90', '1h30m', '250 ms', '2 d' -> seconds."""
    if re.fullmatch(r"\s*\d+(\.\d*)?\s*", text):
        return float(text)
    parts = list(_DURATION.finditer(text.strip()))
    if not parts or "".join(m.group() for m in parts) != text.strip():
        raise ValueError(f"expected a duration such as '90 s', '1h30m' or '250 ms', got {text!r}")
    return sum(_number(m[1], text) * _SECONDS[m[2]] for m in parts)


def parse_count(text: str) -> int:
    """'125M', '2.7B', '512' -> a whole number."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmbgt]?)\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"expected a count such as '125M' or '512', got {text!r}")
    return round(_number(match[1], text) * _COUNTS[match[2].lower()])


def format_bytes(n: float) -> str:
    """Bytes, decimal: '512 B', '33.5 MB'."""
    return _scaled(n, 1000.0, ["B", "kB", "MB", "GB", "TB", "PB"])


def format_memory(n: float) -> str:
    """Bytes, binary: '24 GiB'."""
    return _scaled(n, 1024.0, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"])


def format_rate(bytes_per_s: float) -> str:
    """'6.25 MB/s'."""
    return f"{format_bytes(bytes_per_s)}/s"


def format_count(n: float) -> str:
    """'985', '12.3k', '125M', '2.7B'."""
    return _scaled(n, 1000.0, ["", "k", "M", "B", "T"]).replace(" ", "")


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
