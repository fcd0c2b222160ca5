"""wandb and trackio as folds over events: both packages have ``init``, ``log`` and ``finish``."""

from __future__ import annotations

import importlib
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from muletrain.errors import ConfigError
from muletrain.events import StepDone, Validated
from muletrain.runs.figures import Again, Figures, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from muletrain.config.schema import RunConfig
    from muletrain.events import Event

Package = Literal["wandb", "trackio"]
TOLD = ("model", "adapter", "train", "optimizer", "fleet", "pipeline", "hub", "swap", "wire", "compute")
"""Sections of the configuration that the packages get. Paths of data and places of checkpoints may hold secrets."""


class TrackerSink:
    """Sends the figures of every step to a package. A resumed run goes on in the same run of the package. Steps that are
    taken again after a step back are left out: they give the same figures, and the packages take steps in order. Call
    the sink with each event."""

    def __init__(self, package: Package, folder: Path, config: RunConfig, earlier: Sequence[Event] = ()) -> None:
        """``folder``: the run folder, which names the run. ``earlier``: see ``Figures``; the package has these steps.
        Raises ConfigError if the package refuses the run."""
        self._figures = Figures(earlier)
        self._logged = max((e.step for e in earlier if isinstance(e, StepDone | Validated)), default=-1)
        """The last step that the package has."""
        self._row: Row | None = None
        """Figures of the step that is not complete yet."""
        name = folder.resolve().name
        told = {section: getattr(config, section).model_dump(mode="json", by_alias=True) for section in TOLD}
        try:
            with redirect_stdout(sys.stderr):  # standard output is ours, and JSON with --json
                self._module = importlib.import_module(package)
                own = _arguments(package, self._module, folder)
                self._run: Any = self._module.init(
                    project=config.logging.project, name=name, config=told, resume="allow", **own
                )
        except Exception as e:  # each package has exceptions of its own
            raise ConfigError(f"logging.to: {package} does not take the run: {e}") from e

    def __call__(self, event: Event) -> None:
        self._send(self._figures.fold(event))

    def close(self) -> None:
        """Send the rest, and end the package's run. Idempotent."""
        if self._run is None:
            return
        try:
            with redirect_stdout(sys.stderr):
                try:
                    self._send(self._figures.rest())
                    self._log()
                finally:
                    self._module.finish()
        finally:
            self._run = None

    def _send(self, rows: Iterator[Row | Again] | Iterator[Row]) -> None:
        for row in rows:
            if isinstance(row, Again) or row.step <= self._logged or (self._row and row.step < self._row.step):
                continue
            if self._row is not None and self._row.step != row.step:
                self._log()
            values = row.values if self._row is None else self._row.values | row.values
            self._row = row._replace(values=values)

    def _log(self) -> None:
        """Send the figures of the step, which are complete now."""
        row, self._row = self._row, None
        if row is not None and self._run is not None:
            self._logged = row.step
            self._run.log({**row.values, "train/tokens": row.tokens}, step=row.step)


def _arguments(package: Package, module: Any, folder: Path) -> dict[str, Any]:
    """The arguments of ``init`` that only one of the packages has."""
    if package == "trackio":
        return {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    # wandb would send what the terminal shows, and so the ticket of ``start``, and the arguments of the command
    settings = module.Settings(console="off", x_disable_meta=True)
    return {"id": folder.resolve().name, "dir": str(folder), "settings": settings}


def check_packages(config: RunConfig) -> None:
    """Raises ConfigError if a package of ``logging.to`` is missing."""
    for package in config.logging.to:
        if find_spec(package) is None:
            raise ConfigError(
                f"logging.to: '{package}' needs the package of that name: pip install 'muletrain[{package}]', or leave it out"
            )
