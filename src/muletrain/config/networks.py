"""Published networks between regions, for ``[matrix] preset``, with sources."""

from __future__ import annotations

from typing import NamedTuple


class Network(NamedTuple):
    """Paths between ``regions``, from row to column; the diagonal is the path inside a region."""

    regions: tuple[str, ...]
    rtt_ms: tuple[tuple[float, ...], ...]
    bandwidth_mbps: tuple[tuple[float, ...], ...]
    source: str


def _mbps(gbps: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(1000 * value, 3) for value in row) for row in gbps)


_MEASURED = "DT-FM (Yuan et al. 2022) sec. 4, measured between AWS regions; we take the latency as a round trip"
NETWORKS: dict[str, Network] = {
    "regional-4": Network(
        ("virginia", "oregon", "california", "ohio"),
        ((5, 67, 59, 11), (67, 5, 12, 49), (59, 12, 5, 52), (11, 49, 52, 5)),
        _mbps(((2, 1.15, 1.05, 1.12), (1.15, 2, 1.25, 1.1), (1.05, 1.25, 2, 1.02), (1.12, 1.1, 1.02, 2))),
        f"{_MEASURED} (case 4)",
    ),
    "worldwide-8": Network(
        ("oregon", "virginia", "ohio", "tokyo", "seoul", "london", "frankfurt", "ireland"),
        (
            (5, 67, 49, 96, 124, 136, 143, 124),
            (67, 5, 11, 143, 172, 76, 90, 67),
            (49, 11, 5, 130, 159, 86, 99, 77),
            (96, 143, 130, 5, 34, 210, 223, 199),
            (124, 172, 159, 34, 5, 238, 235, 228),
            (136, 76, 86, 210, 238, 5, 14, 12),
            (143, 90, 99, 223, 235, 14, 5, 24),
            (124, 67, 77, 199, 228, 12, 24, 5),
        ),
        _mbps(
            (
                (2, 0.79, 1.1, 0.523, 0.46, 0.42, 0.404, 0.482),
                (0.79, 2, 1.12, 0.524, 0.5, 1.16, 1.02, 1.05),
                (1.1, 1.12, 2, 0.694, 0.529, 1.05, 0.799, 1.14),
                (0.523, 0.524, 0.694, 2, 1.1, 0.366, 0.36, 0.465),
                (0.46, 0.5, 0.529, 1.1, 2, 0.342, 0.358, 0.335),
                (0.42, 1.16, 1.05, 0.366, 0.342, 2, 1.14, 1.09),
                (0.404, 1.02, 0.799, 0.36, 0.358, 1.14, 2, 1.08),
                (0.482, 1.05, 1.14, 0.465, 0.335, 1.09, 1.08, 2),
            )
        ),
        f"{_MEASURED} (case 5)",
    ),
}
