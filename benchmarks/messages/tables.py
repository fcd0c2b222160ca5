"""Tables of README.md from the JSON beside it."""

import json
from pathlib import Path
from typing import Any

HEAD = "peers|event|messages of a peer and step|before|bytes of a peer and step|before|step [s]|before"


def rows(results: dict[str, Any]) -> list[list[str]]:
    before = {
        (r["peers"], r["event"]): r for r in json.loads((Path(__file__).parent / "before.json").read_text())["plays"]
    }
    found = []
    for r in results["plays"]:
        old = before.get((r["peers"], r["event"]), {})
        cells = [
            f"{each[key]:,}" if key in each else "" for key in ("messages", "bytes", "step_s") for each in (r, old)
        ]
        found.append([f"{r['peers']:,}", r["event"], *cells])
    return found


def growth(results: dict[str, Any], key: str) -> float:
    """Of a steady step's ``key`` for each peer, from 64 peers to most peers."""
    steady = {r["peers"]: r[key] for r in results["plays"] if r["event"] == "steady"}
    return float(steady[max(steady)] / steady[64])


def within(results: dict[str, Any]) -> float:
    """A steady step's seals and attestations for each of most peers."""
    most = max(r["peers"] for r in results["plays"])
    return float(sum(_steady(results, most)["kinds"][kind] for kind in ("seal", "entry")))


def others(results: dict[str, Any], peers: int) -> float:
    """A steady step's messages for each of ``peers`` but for seals and attestations."""
    steady = _steady(results, peers)
    return float(steady["messages"] - sum(steady["kinds"][kind] for kind in ("seal", "entry")))


def _steady(results: dict[str, Any], peers: int) -> dict[str, Any]:
    found: dict[str, Any] = next(r for r in results["plays"] if (r["peers"], r["event"]) == (peers, "steady"))
    return found
