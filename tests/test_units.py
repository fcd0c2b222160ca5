"""Quantities read and write as people do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from muletrain import units

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "4096", 4096),
        (units.parse_bytes, "1.5 GiB", 1.5 * 2**30),
        (units.parse_bytes, "200 MB", 200e6),
        (units.parse_bytes, "10k", 10_000),
        (units.parse_duration, "90", 90),
        (units.parse_duration, "1h30m", 5400),
        (units.parse_duration, "250 ms", 0.25),
        (units.parse_duration, "2 d", 172800),
    ],
)
def test_parse(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text", "complaint"),
    [
        (units.parse_bytes, "much", "expected a size such as '1.5 GiB' or '200 MB', got 'much'"),
        (units.parse_bytes, "5 Mbit", "expected a size such as '1.5 GiB' or '200 MB', got '5 Mbit'"),
        (units.parse_bytes, "1.2.3 MB", "expected a number with a unit, got '1.2.3 MB'"),
        (units.parse_duration, "1h soon", "expected a duration such as '90 s', '1h30m' or '250 ms', got '1h soon'"),
    ],
)
def test_parse_errors(parse: Callable[[str], float], text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse(text)
    assert str(caught.value) == complaint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_bytes(0), "0 B"),
        (units.format_bytes(999.96), "1 kB"),
        (units.format_bytes(33_500_000), "33.5 MB"),
        (units.format_memory(24 * 2**30), "24 GiB"),
        (units.format_memory(1000 * 2**20), "1000 MiB"),
        (units.format_count(985), "985"),
        (units.format_count(12_345), "12.3k"),
        (units.format_count(2.7e9), "2.7B"),
        (units.plural(1, "step"), "1 step"),
        (units.plural(0, "microbatch"), "0 microbatches"),
        (units.plural(2000, "step"), "2,000 steps"),
        (units.format_duration(0.085), "85 ms"),
        (units.format_duration(4.2), "4.2 s"),
        (units.format_duration(59.97), "1:00"),
        (units.format_duration(125), "2:05"),
        (units.format_duration(3725), "1:02:05"),
        (units.format_duration(400_000), "4 d 15 h"),
        (units.format_duration(math.nan), "?"),
    ],
)
def test_format(text: str, expected: str) -> None:
    assert text == expected
