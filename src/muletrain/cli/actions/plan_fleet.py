"""``muletrain plan FLEET.toml``: predict what each strategy does on a fleet, show the plan, and draw it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.markup import escape
from rich.progress import Progress

from muletrain.cli.actions.hypothetical import load_run, need_matplotlib
from muletrain.cli.show.console import make_console, say
from muletrain.cli.show.plan_tables import tell
from muletrain.config.costs import Costs, load_costs
from muletrain.config.fleet_file import Fleet, load_located_fleet
from muletrain.config.load import located
from muletrain.errors import ConfigError
from muletrain.sim.fleet.calibration import with_speeds
from muletrain.sim.fleet.simulation import EXAMPLE
from muletrain.sim.plan.planner import confirmed, plan
from muletrain.sim.plan.question import Question

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Wish(NamedTuple):
    """The run to plan for. None: what the configuration says, or what is fastest."""

    config: Path | None
    model: str | None
    batch: int | None
    microbatch: int | None
    stages: int | None
    overrides: Sequence[str]

    def question(self, fleet: Fleet, measured: Costs) -> Question:
        """Raises ConfigError."""
        given = list(self.overrides)
        for key, value in (
            ("model.preset", self.model),
            ("train.batch", self.batch),
            ("train.microbatch", self.microbatch),
        ):
            given += [f"{key}={value}"] if value else []
        run, spec = load_run(self.config, given)
        fixed = self.config is not None or any(text.startswith("train.microbatch") for text in given)
        stages = self.stages
        if stages is None and any(text.startswith("fleet.stages") for text in self.overrides):
            stages = run.fleet.stages
        if stages is not None and stages > spec.layers:
            raise ConfigError(f"--stages {stages}: the model has {spec.layers} layers; a stage needs at least one")
        return Question(fleet, run, spec, stages, run.train.microbatch if fixed else None, measured)


def plan_fleet(
    path: Path | None,
    wish: Wish,
    *,
    seed: int,
    time_limit_s: float,
    plot: Path | None,
    json: bool,
    costs_file: Path | None = None,
    confirm: bool = False,
) -> None:
    """Print the plan, and draw it to ``plot``. ``costs_file``: see ``config.costs``. Raises ConfigError and
    CapacityError with the place of the cause."""
    if plot is not None:
        need_matplotlib()
    measured = Costs() if costs_file is None else load_costs(costs_file)
    fleet, origins = load_located_fleet(EXAMPLE if path is None else path)
    console = make_console()
    with located(origins, Fleet):
        fleet = with_speeds(fleet, measured)
        question = wish.question(fleet, measured)
        with Progress(console=console, transient=True, disable=json or not console.is_terminal) as progress:
            bar = progress.add_task("planning", total=1.0)

            def watch(what: str, share: float) -> None:
                progress.update(bar, completed=share, description=f"planning: {what}")

            found = plan(question, seed=seed, time_limit_s=time_limit_s, watch=watch)
            if confirm:
                progress.update(bar, description="playing every message of the recommended strategy")
                found = confirmed(question, found)
    if plot is not None:
        from muletrain.cli.show.plan_picture import draw

        draw(found, fleet, plot)
    if json:
        print(found.model_dump_json())
        return
    if path is None:
        say(console, f"no fleet file given; this is the example {escape(str(EXAMPLE))}\n")
    tell(console, found, fleet)
    if plot is not None:
        say(console, f"wrote {escape(str(plot))}")
