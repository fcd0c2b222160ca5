"""Pictures for slides: size, fonts and colours, light or dark by the file's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from muletrain.errors import MuletrainError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg")
SIZE_IN = (11.0, 6.2)
"""Width and height of a slide [inches]."""


class Look(NamedTuple):
    """Colours that people without full colour vision can tell apart (Okabe and Ito 2008)."""

    back: str
    text: str
    faint: str
    main: str
    second: str


LIGHT = Look("white", "#1f2328", "#b9bec6", "#0072b2", "#d55e00")
DARK = Look("#15181d", "#e6e6e6", "#555c66", "#56b4e9", "#e69f00")


def check_pictures(paths: Sequence[Path]) -> None:
    """Raises MuletrainError if matplotlib is not installed, or a name has another ending."""
    for path in paths:
        if path.suffix not in ENDINGS:
            raise MuletrainError(
                f"--plot {path}: the name must end in .png or .svg (.dark.png, .dark.svg: a dark picture)"
            )
    if not paths:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise MuletrainError("--plot needs matplotlib: pip install 'muletrain[plots]', or leave it out") from e


def write(paths: Sequence[Path], draw: Callable[[Figure, Look], None], size_in: tuple[float, float] = SIZE_IN) -> None:
    """Write the picture that ``draw`` makes to each of ``paths``. Raises MuletrainError for a path that cannot be
    written."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    for path in paths:
        look = DARK if path.stem.endswith(".dark") else LIGHT
        coloured = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        style: dict[Any, Any] = {"font.size": 12.0, "legend.frameon": False, **dict.fromkeys(coloured, look.text)}
        style |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), look.back)
        style |= dict.fromkeys(("axes.spines.top", "axes.spines.right"), False)
        with rc_context(style):
            figure = Figure(figsize=size_in, layout="constrained")
            draw(figure, look)
            try:
                figure.savefig(path, dpi=150)
            except OSError as e:
                raise MuletrainError(f"--plot: cannot write {path}: {e.strerror or e}; choose another place") from e


def headline(figure: Figure, look: Look, message: str, about: str) -> None:
    """Write the picture's message, and below it in small letters its subject."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure.text(0.02, 0.925, message, fontsize=17, fontweight="bold")
    figure.text(0.02, 0.875, about, fontsize=11, color=look.text, alpha=0.75)
    if isinstance(engine := figure.get_layout_engine(), ConstrainedLayoutEngine):
        engine.set(rect=(0.01, 0.01, 0.98, 0.84))


def counted(axes: Axes, axis: str = "y") -> None:
    """Ticks such as '12k' and '1.5M'."""
    from matplotlib.ticker import FuncFormatter

    from muletrain.units import format_count

    getattr(axes, f"{axis}axis").set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
