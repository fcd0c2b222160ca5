"""Tables of README.md from the JSON beside it."""

from collections.abc import Iterable
from statistics import fmean, median
from typing import Any

Row = dict[str, Any]
STRATEGIES = ("hub", "swarm", "pipeline")
DEVICES = {
    1: "one data centre (a hub has no clients)",
    2: "several data centres, 8 to 24 Gb/s, 10 to 100 ms (no clients)",
}
CASES = DEVICES | {3: "nobody leaves", 4: "the RTX 2080 leave, rate 90 %"}
PAPER = {1: (56.1, 53.7, 43.5, 44.3), 2: (65.4, 62.8, 66.2, 55.9)}
PAPER |= {3: (74.8, 77.5, 85.2, 79.1), 4: (82.2, 96.8, 115.7, 114.6)}
ONCE_GB = 512 * 512 * 4096 * 4 * 2 * 2 / 1e9
"""A step's fp32 activations and gradients if each crosses each of two borders once."""


def handed_over(results: Row) -> list[list[str]]:
    """A row for each case of ``shards.py``."""
    return [
        [
            f"{r['servers']}, {r['clients']}",
            f"{r['server_mbps']}, {r['client_mbps']}",
            f"{r['whole']:.1f} ({r['gathered']:.1f})",
            *(f"{r[kind]:.1f} ({r[kind] / r['whole'] - 1:+.0%})" for kind in ("shards", "at best")),
        ]
        for r in results["rows"]
    ]


def saved_by_shards(results: Row, *, even: bool) -> list[float]:
    """Shares of the time that shards save on links of 100 Mb/s; ``even``: with as many clients at each server."""
    rows = [r for r in results["rows"] if r["server_mbps"] == r["client_mbps"] == 100]
    return [1 - r["shards"] / r["whole"] for r in rows if (r["clients"] % r["servers"] == 0) == even]


def over_hub(results: Row, share: float, rate: float, strategy: str) -> list[float]:
    """Times of a step over the hub's on the same draw, layers cut as ``last``."""
    plays = [
        p for p in results["plays"] if (p["cut"], p["share"], p["rate"]) == ("last", share, rate) and "step_s" in p
    ]
    hub = {p["seed"]: p["step_s"] for p in plays if p["strategy"] == "hub"}
    return [p["step_s"] / hub[p["seed"]] for p in plays if p["strategy"] == strategy]


def cell(results: Row, share: float, rate: float) -> Row:
    return next(c for c in results["cells"] if (c["cut"], c["share"], c["rate"]) == ("last", share, rate))


def _step(found: Row) -> str:
    if "median_s" not in found:
        return "no step ended"
    few = f", on {found['ended']}" if found["ended"] < found["draws"] else ""
    return f"{found['median_s']:.0f} ({found['goodput']:.2f}){few}"


def ratio(found: Iterable[float]) -> str:
    values = list(found)
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def figure2(results: Row) -> list[list[str]]:
    rows = []
    for share in (0.3, 0.6):
        for rate in (0.1, 0.5, 0.9):
            found = cell(results, share, rate)
            others = [x for s in STRATEGIES[1:] for x in (_step(found[s]), ratio(over_hub(results, share, rate, s)))]
            rows.append([f"{share:.0%}, {rate:.0%}", _step(found["hub"]), *others])
    return rows


def first(results: Row) -> str:
    """Draws of all six cells on which `swarm` takes longer than the hub or ends no step, and how far it is ahead on others."""
    plays = [p for p in results["plays"] if (p["cut"], p["strategy"]) == ("last", "swarm")]
    keys = {(p["share"], p["rate"]) for p in plays}
    ahead = [x for key in keys for x in over_hub(results, *key, "swarm") if x < 1]
    return f"{len(plays) - len(ahead)} of {len(plays)} draws; on the others it takes at most {1 / min(ahead):.2f} times as long"


def few(results: Row, strategy: str) -> str:
    """Draws at 60 % and 90 % on which fewer than two steps ended."""
    plays = [p for p in results["plays"] if (p["cut"], p["share"], p["rate"]) == ("last", 0.6, 0.9)]
    own = [p for p in plays if p["strategy"] == strategy]
    return f"{sum('few' in p or 'step_s' not in p for p in own)} of {len(own)}"


def table2(results: Row) -> list[list[str]]:
    cells = {c["case"]: c for c in results["cells"] if c["cut"] == "last"}
    return [
        [
            f"{case}: {CASES[case]}; {c['hub']['draws']}",
            *(_step(c[s]) for s in STRATEGIES),
            ", ".join(map(str, PAPER[case])),
        ]
        for case, c in sorted(cells.items())
    ]


def hub_over_1f1b(results: Row, case: int) -> float:
    found = next(c for c in results["cells"] if (c["cut"], c["case"]) == ("last", case))
    return found["hub"]["median_s"] / found["pipeline"]["median_s"]


def devices(results: Row) -> list[list[str]]:
    cells = {(c["stages"], c["rate"], c["devices"]): c["hub"] for c in results["cells"] if c["cut"] == "last"}
    rows = []
    for stages, rate in sorted({(s, r) for s, r, _ in cells}, key=lambda key: (key[1] != 0.7, key)):
        few, many = cells.get((stages, rate, 16)), cells.get((stages, rate, 48))
        row = [f"{stages}, {rate:.0%}, {few['draws'] if few else 0}", f"{few['median_s']:.0f} s" if few else ""]
        rows.append(
            [
                *row,
                *(
                    [f"{many['median_s']:.0f} s", f"{few['median_s'] / many['median_s']:.2f}"]
                    if many and few
                    else ["", ""]
                ),
            ]
        )
    return rows


def processes(rows: list[Row], machines: int, *, seconds: bool) -> list[list[str]]:
    """Steps that ended and, after the first one, seconds of a step."""
    found = {(r["unreliable"], r["rate"], r["strategy"]): r for r in rows}
    named = ("hub", "swarm", "1f1b")

    def text(row: Row) -> str:
        return f"{row['steps']} ({row['step_s']:.0f})" if seconds and "step_s" in row else str(row["steps"])

    keys = dict.fromkeys((r["unreliable"], r["rate"]) for r in rows)
    return [[f"{n} of {machines}, {rate:.0%}", *(text(found[n, rate, s]) for s in named)] for n, rate in keys]


def crossings(rows: list[Row]) -> list[list[str]]:
    """GB a step, mean of the draws, and each draw's seconds with and without the bytes between servers."""
    return [
        [f"{rate:.0%}"]
        + [
            f"{fmean(r['gbytes_a_step'][way] for r in plays(rows, rate, False)):.1f}"
            for way in rows[0]["gbytes_a_step"]
        ]
        + [", ".join(f"{r['step_s']:.1f}" for r in plays(rows, rate, straight)) for straight in (False, True)]
        for rate in (0.1, 0.9)
    ]


def plays(rows: list[Row], rate: float, straight: bool) -> list[Row]:
    return [r for r in rows if r["rate"] == rate and r["straight"] == straight]


def seconds(rows: list[Row], rate: float, straight: bool) -> str:
    return " and ".join(f"{r['step_s']:.0f}" for r in plays(rows, rate, straight))


def saved(rows: list[Row], rate: float) -> list[float]:
    """Share of a step that free bytes between servers save, draw by draw."""
    return [
        1 - b["step_s"] / a["step_s"] for a, b in zip(plays(rows, rate, False), plays(rows, rate, True), strict=True)
    ]


def between(rows: list[Row]) -> list[float]:
    """GB a step from server to server, play by play."""
    return [r["gbytes_a_step"]["from server to server"] for r in rows if not r["straight"]]


def work(results: Row) -> str:
    """Forward passes of clients of 1, 2 and 4 times the speed."""
    passes = [results["1x, 2x, 4x"]["forward passes"][kind] for kind in ("x1", "x2", "x4")]
    return f"{', '.join(f'{n:,}' for n in passes)}: 1 to {passes[1] / passes[0]:.2f} to {passes[2] / passes[0]:.2f}"


def agreement(results: Row) -> str:
    """Played times over predicted ones."""
    found = [fleet["played / predicted"] for fleet in results["fleets"]]
    return (
        f"{min(found):.2f} to {max(found):.2f} times the prediction, {results['summary']['within 10%']} of {len(found)}"
    )


def without_clients(results: Row) -> int:
    """Hubs in whose stages (servers + clients) no client is."""
    return sum(fleet["stages"].count("+0") == fleet["stages"].count("+") for fleet in results["fleets"])


def averaging(results: Row) -> list[float]:
    """Share of averaging in the servers' time: the hub's plays, largest first."""
    return sorted(
        (p["averaging"] for p in results["plays"] if (p["cut"], p["strategy"]) == ("last", "hub")), reverse=True
    )
