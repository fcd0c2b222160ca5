"""Tables of README.md, and of the console, from the JSON beside it."""

import json
from pathlib import Path
from typing import Any

Found = dict[str, Any]
GIB = 2**30
HEADS = {
    "parts": "part|what|parameters|tokens/s|of the compiled loop|aim|seconds of the part",
    "memory": "what|device at most|estimate|of the estimate",
    "norms": "RMSNorm, forward and backward|ours, ms|torch's in fp32, ours / it|torch's, ours / it|numbers differ by",
}
PARTS = {
    "loop-small": ("plain loop", None, None),
    "compiled-small": ("plain loop, compiled", None, None),
    "peer-small": ("one peer", "compiled-small", 0.9),
    "loop-large": ("plain loop", None, None),
    "compiled-large": ("plain loop, compiled", None, None),
    "peer-large": ("one peer", "compiled-large", 0.9),
    "pipeline": ("two stages, two peers each: processes on the one card", "compiled-small", 0.85),
    "memory": ("device memory, below", None, None),
    "swap": ("swapped through 8 GiB, one step", "compiled-large", None),
    "hub": ("two servers, two clients: processes on the one card", "compiled-small", None),
    "tests": ("tests marked 'cuda'", None, None),
    "norms": ("RMSNorm, below", None, None),
    "eager-small": ("one peer, blocks not compiled", "compiled-small", None),
    "one": ("one peer, a process with data and step records", "compiled-small", 0.9),
    "eager-large": ("one peer, blocks not compiled", "compiled-large", None),
}
"""Part: what it is, the part it is compared with, and the share of that which is asked."""
NONE = "not measured"


def on_gpu() -> Found:
    """The figures of a GPU; empty if there are none yet."""
    path = Path(__file__).with_name("results.json")
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def ran_on() -> str:
    """Where the figures of a GPU come from."""
    found = {(p["device"], p["torch"], p["date"]) for p in on_gpu().values() if "device" in p}
    if not found:
        return "Nothing of this page has run on a GPU: there are no such figures yet"
    return "The figures of a GPU: " + "; ".join(
        f"{device}, torch {torch}, {date}" for device, torch, date in sorted(found)
    )


def parts(found: Found) -> list[list[str]]:
    rows = []
    for name, (what, base, aim) in PARTS.items():
        part = found.get(name)
        params = f"{part['params'] / 1e6:,.1f} M" if part and "params" in part else ""
        took = f"{part['seconds']:.0f}" if part and "seconds" in part else ""
        rows.append([name, what, params, figure(part), share(found, part, base), f"{aim:.2f}" if aim else "", took])
    return rows


def figure(part: Found | None) -> str:
    """Tokens/s, or what the part says instead."""
    if part is None:
        return NONE
    if "counts" in part:
        return ", ".join(f"{n} {what}" for what, n in part["counts"].items())
    if "error" in part:
        return "failed: " + part["error"].replace("|", "/")[:160]
    if "left out" in part:
        return "left out: " + part["left out"]
    return f"{part['tokens_per_s']:,.0f}" if "tokens_per_s" in part else "done"


def share(found: Found, part: Found | None, base: str | None) -> str:
    """Of the compiled loop's tokens/s with the same model; where that failed, of the plain one's."""
    if base is None or part is None or "tokens_per_s" not in part:
        return ""
    for name in (base, base.replace("compiled", "loop")):
        if found.get(name, {}).get("params") == part["params"]:
            ratio = f"{part['tokens_per_s'] / found[name]['tokens_per_s']:.2f}"
            return ratio if name == base else f"{ratio} (not compiled)"
    return ""


def memory(found: Found) -> list[list[str]]:
    """Peaks of the allocator; a CPU has none."""
    rows = [
        [f"stage {row['stage']} of 2, checkpointing '{row['checkpointing']}', graphs {row['graphs']}", *gib(row)]
        for row in found.get("memory", {}).get("rows", ())
    ]
    for name, what in (
        ("peer-small", "one peer, small"),
        ("peer-large", "one peer, large"),
        ("swap", "swapped; its budget"),
    ):
        rows.append([what, *gib(found.get(name, {}))])
    return rows


def norms(found: Found) -> list[list[str]]:
    rows = []
    for row in found.get("norms", {}).get("norms", ()):
        took, apart = row["s"], row["apart"]
        ratios = [f"{took['ours'] / took[way]:.2f}" for way in ("unit", "whole")]
        differ = f"{apart['unit']:.0e} and {apart['whole']:.0e}"
        rows.append([row["dtype"], f"{1000 * took['ours']:.3f}", *ratios, differ])
    return rows or [[NONE] * 5]


def gib(part: Found) -> tuple[str, str, str]:
    most, expected = part.get("peak_bytes"), part.get("estimate_bytes")
    texts = [
        NONE if n is None else f"{n / GIB:.2f} GiB" if n > GIB / 4 else f"{n / 2**20:.1f} MiB" for n in (most, expected)
    ]
    return texts[0], texts[1], f"{most / expected:.2f}" if most and expected else ""
