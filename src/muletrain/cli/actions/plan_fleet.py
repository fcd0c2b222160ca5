"""``muletrain plan FLEET.toml``: predict each strategy's performance on a fleet, show the plan, and draw a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.markup import escape

from muletrain.cli.actions.hypothetical import load_run, model_setting
from muletrain.cli.show.console import make_console, say
from muletrain.cli.show.doing import doing
from muletrain.cli.show.pictures import check_pictures
from muletrain.cli.show.plan_tables import tell
from muletrain.config.costs import Costs, DeviceSpeed, load_costs
from muletrain.config.fleet_file import Fleet, load_located_fleet
from muletrain.config.load import located
from muletrain.config.profile_file import read_profile
from muletrain.errors import ConfigError
from muletrain.model.measured import MeasuredModel, speed_of
from muletrain.sim.fleet.advice import quality_of
from muletrain.sim.fleet.calibration import same_device, with_speeds
from muletrain.sim.fleet.simulation import EXAMPLE, weather
from muletrain.sim.plan.planner import confirmed, plan
from muletrain.sim.plan.question import Question
from muletrain.units import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.config.profile_file import Profile
    from muletrain.model.chain import Model


class Wish(NamedTuple):
    """The run to plan for. None: the configured strategy, or the fastest."""

    config: Path | None
    model: str | None
    batch: int | None
    microbatch: int | None
    stages: int | None
    overrides: Sequence[str]

    def question(self, fleet: Fleet, measured: Costs) -> Question:
        """Raises ConfigError."""
        given = [*self.overrides, *([model_setting(self.model)] if self.model else [])]
        for key, value in (
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


def with_profiles(question: Question, profiles: Sequence[Profile]) -> tuple[Model, Costs]:
    """Returns the model with the measured costs of blocks, and the costs with the speed of each profiled device. The
    blocks' shares come from the first profile. Raises ConfigError for a profile of another model, and of a device that
    the fleet lacks or has a stated speed for."""
    from muletrain.runs.measure.profile import digest_of

    spec, costs = question.spec, question.costs
    for profile in profiles:
        if profile.model != digest_of(spec):
            raise ConfigError(
                f"--profile: the profile of {profile.title} ({format_count(profile.params)} parameters, sequences of {profile.context} "
                f"tokens) is not of the planned model ({format_count(spec.params)}, {spec.context} tokens), or other versions of "
                f"transformers or torch made it; profile this model"
            )
        machines = [m for m in question.fleet.machines if m.device and same_device(m.device, profile.device)]
        if not machines:
            named = ", ".join(sorted({m.device for m in question.fleet.machines if m.device})) or "none"
            raise ConfigError(
                f"--profile: no machine of the fleet file has device = '{profile.device}'; it names {named}"
            )
        if stated := [m.name for m in machines if m.tflops is not None or m.forward_ms is not None]:
            raise ConfigError(
                f"--profile: the fleet file states the speed of '{stated[0]}' itself (tflops or forward_ms); leave that out to "
                f"plan with the measured times of {profile.device}"
            )
    speeds = tuple(DeviceSpeed(device=p.device, tflops=speed_of(spec, p) / 1e12) for p in profiles)
    others = tuple(d for d in costs.devices if not any(same_device(d.device, p.device) for p in profiles))
    return MeasuredModel(spec, profiles[0]), costs.model_copy(update={"devices": (*others, *speeds)})


def plan_fleet(
    path: Path | None,
    wish: Wish,
    *,
    seed: int,
    time_limit_s: float,
    plot: Sequence[Path] = (),
    json: bool,
    costs_file: Path | None = None,
    profiles: Sequence[Path] = (),
    quality: Sequence[str] = (),
    confirm: bool = False,
) -> None:
    """Print the plan, and draw a picture to each of ``plot``. ``costs_file``: see ``config.costs``; ``profiles``: outputs of
    ``muletrain profile``, one for each kind of device; ``quality``: see ``advice.quality_of``. Raises ConfigError and
    CapacityError with the place of the cause."""
    check_pictures(plot)
    measured = Costs() if costs_file is None else load_costs(costs_file)
    fleet, origins = load_located_fleet(EXAMPLE if path is None else path)
    console = make_console()
    with located(origins, Fleet):
        if profiles:
            spec, measured = with_profiles(wish.question(fleet, measured), [read_profile(path) for path in profiles])
            question = replace(wish.question(fleet := with_speeds(fleet, measured), measured), spec=spec)
        else:
            question = wish.question(fleet := with_speeds(fleet, measured), measured)
        churn = weather(fleet.churn, Path(path or EXAMPLE).parent)
        question = replace(question, weather=churn, quality=quality_of(quality))
        with doing("planning") as tell_of:
            found = plan(
                question,
                seed=seed,
                time_limit_s=time_limit_s,
                watch=lambda what, share: tell_of(share, f"planning: {what}"),
            )
            if confirm:
                tell_of(what="playing every message of the recommended strategy")
                found = confirmed(question, found)
    if plot:
        from muletrain.cli.show.plan_picture import draw

        draw(found, fleet, plot)
    if json:
        print(found.model_dump_json())
        return
    if path is None:
        say(console, f"no fleet file given; this is the example {escape(str(EXAMPLE))}\n")
    tell(console, found, fleet)
    for path in plot:
        say(console, f"wrote {escape(str(path))}")
