"""Render reproductions as Markdown and pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.errors import ConfigError
from muletrain.planning.devices import find_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from reproduction.reproduction import Reproduction, Value

SIZE_INCHES, DOTS_PER_INCH = (9.0, 6.0), 110


def draw(reproduction: Reproduction, path: Path) -> None:
    """Write a PNG. Raises ConfigError if matplotlib is missing or the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "plots need matplotlib: pip install 'muletrain[plots]', or leave --out and --report out"
        ) from None
    figure = Figure(SIZE_INCHES, DOTS_PER_INCH, layout="constrained")
    reproduction.draw(figure)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})
    except OSError as e:
        raise ConfigError(
            f"{path}: the plot cannot be written: {e.strerror}; choose another folder with --out"
        ) from None


def write(reproductions: Sequence[Reproduction], folder: Path) -> Path:
    """Write a report of all reproductions, README.md, and their pictures; return its path. Raises ConfigError as
    ``draw`` does."""
    for reproduction in reproductions:
        draw(reproduction, folder / f"{reproduction.name}.png")
    path = folder / "README.md"
    path.write_text("\n".join(_lines(reproductions)) + "\n", encoding="utf-8")
    return path


def _lines(reproductions: Sequence[Reproduction]) -> Iterable[str]:
    yield "# The papers' figures, held against what follows from what they say"
    yield ""
    yield "Written by `python -m reproduction --report`; no number here was measured on hardware. *Calibration* marks what was fitted to"
    yield "the number beside it, or to one that contains it: it shows that a model can say this, not that it is right. The rest are"
    yield "predictions. Shares differ by points, everything else by per cent of what was published."
    yield ""
    yield "| name | shows | bars met | statements that hold |"
    yield "|---|---|---|---|"
    for r in reproductions:
        bars = f"{sum(b.met for b in r.bars)} of {len(r.bars)}" if r.bars else "none set"
        statements = f"{sum(s.holds for s in r.statements)} of {len(r.statements)}" if r.statements else "–"
        yield f"| [{r.name}](#{r.name}) | {r.title} | {bars} | {statements} |"
    for r in reproductions:
        yield from ("", *_section(r))
    yield from ("", *_speeds(reproductions))


def _speeds(reproductions: Sequence[Reproduction]) -> Iterable[str]:
    """Speeds of GPUs that the models use, in one place."""
    v100 = find_device("V100")
    assert v100 is not None, "the catalogue has it"
    yield from ("## Speeds of GPUs", "")
    yield "No paper states how fast its GPUs compute, so each model has a speed of its own; precision, kernels and overheads"
    yield "differ. HYBRID's minutes need none (they imply 0.07 TFLOP/s, with which `benchmarks/hub` plays). Outside these models a"
    yield "V100 has its catalogue's speed (`planning/devices.py`),"
    yield f"{v100.flops / 1e12:g} TFLOP/s ({v100.source})."
    yield from ("", "| model | constant | TFLOP/s | origin |", "|---|---|--:|---|")
    for r in reproductions:
        for c in r.constants:
            if c.unit == "TFLOP/s":
                yield f"| {r.name} | {c.name} | {c.value:.4g} | {c.origin} |"


def _section(r: Reproduction) -> Iterable[str]:
    yield from (f"## {r.name}", "", f"**{r.title}.** {r.method}", "", f"![{r.title}]({r.name}.png)", "")
    if r.values:
        yield from ("| | published | ours | difference | |", "|---|--:|--:|--:|---|")
        yield from (_row(v) for v in r.values)
        yield ""
    for heading, lines in (
        ("What the paper states, and what we find", [f"{mark(s.holds)} {s.stated}: {s.ours}." for s in r.statements]),
        ("Held to", [f"{mark(b.met)} {b}" for b in r.bars]),
        ("Constants", [str(c) for c in r.constants]),
        ("Not reproduced", r.not_reproduced),
    ):
        if lines:
            yield from (f"{heading}:", "", *(f"- {line}" for line in lines), "")


def _row(v: Value) -> str:
    kind = "calibration" if v.calibrated else "prediction"
    return f"| {v.what} | {number(v.published)} {v.unit} | {number(v.ours)} {v.unit} | {v.difference_text} | {kind} |"


def number(x: float) -> str:
    """Round to four digits, or to a whole number if that is longer."""
    return f"{x:.4g}" if abs(x) < 1000 else f"{x:.0f}"


def mark(good: bool) -> str:
    """Word for a bar that is met or a statement that holds, or not."""
    return "✓" if good else "✗"
