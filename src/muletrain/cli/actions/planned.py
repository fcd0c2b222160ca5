"""``--plan``: turns the output of 'muletrain plan --json' into a run's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from muletrain.cgroups import cpus
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import read_output
from muletrain.config.model_sections import ModelConfig
from muletrain.config.peer_sections import HubConfig, PipelineConfig, SwapConfig
from muletrain.config.plan_file import VERSION, Plan, Prediction
from muletrain.config.schema import RunConfig
from muletrain.errors import ConfigError
from muletrain.model.make import make_model
from muletrain.model.presets import PRESETS
from muletrain.planning.splits import title
from muletrain.strategies import CHOICES, asks_for, find, listed_as

if TYPE_CHECKING:
    from pathlib import Path

PROCESSES_PER_CORE = 16
"""Most peers per core; more would delay answers too much."""


def planned(config: RunConfig, path: Path, choice: str | None = None, *, spares: bool = True) -> RunConfig:
    """``config`` with strategy, stages and machines of the plan: of the recommended strategy, or of ``choice`` (one of
    ``CHOICES``). ``spares``: whether the run starts with the plan's spares. Raises ConfigError, also if plan and
    ``config`` contradict each other."""
    plan = read_plan(path)
    chosen = chosen_of(plan, path, choice)
    model = config.model
    if not model.model_fields_set and plan.model in PRESETS:
        model = ModelConfig(preset=plan.model)
    _check_model(config.model_copy(update={"model": model}), plan, path)
    for name, own, there in (
        ("batch", config.train.batch, plan.batch),
        ("microbatch", config.train.microbatch, chosen.microbatch),
    ):
        if name in config.train.model_fields_set and own != there:
            raise ConfigError(
                f"train.{name}: {own}, but {path} is for {there}; leave it out, or plan again (muletrain plan --{name})"
            )
    optimizer = config.optimizer
    if chosen.state_device == "cpu" and optimizer.state_device != "cpu":
        if "state_device" in optimizer.model_fields_set:
            raise ConfigError(
                f"optimizer.state_device: '{optimizer.state_device}', but {path} mixes devices in a stage, which needs 'cpu'; leave it "
                f"out, or plan again (muletrain plan --set optimizer.state_device={optimizer.state_device})"
            )
        optimizer = optimizer.model_copy(update={"state_device": "cpu"})
    machines = sum(len(set(stage.machines)) for stage in chosen.stages)
    fleet = config.fleet.model_copy(
        update={
            "stages": len(chosen.stages),
            "layers": tuple(end - first for first, end in (s.layers for s in chosen.stages)),
            "peers": machines + (len(chosen.spares) if spares else 0),
        }
    )
    hub = config.hub
    if find(chosen.strategy).pooled:
        hub = _hub(config, chosen)
        fleet = fleet.model_copy(update={"peers": len(hub.servers)})
    sections = {
        **{name: getattr(config, name) for name in RunConfig.model_fields},
        "model": model,
        "optimizer": optimizer,
        "train": config.train.model_copy(update={"batch": plan.batch, "microbatch": chosen.microbatch}),
        "fleet": fleet,
        "hub": hub,
        "pipeline": _pipeline(chosen),
        "swap": _swap(config.swap, chosen),
    }
    try:
        config = RunConfig.model_validate(sections)
    except ValidationError as e:
        raise ConfigError(f"{path}: {e.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    if not asks_for(config, find(chosen.strategy)):
        field, lacks = ("swap.whole", "stages") if config.swap.whole else ("hub.clients", "no clients")
        raise ConfigError(
            f"{field}: {title(chosen)} of {path} has {lacks}; leave it out, or choose another strategy (--strategy)"
        )
    return config


def read_plan(path: Path) -> Plan:
    """The plan in a file. Raises ConfigError."""

    def remark(text: str) -> str:
        return " (the output of 'plan --network' is not a plan of a fleet)" if '"cost_s"' in text else ""

    return read_output(path, Plan, "plan FLEET.toml", VERSION, remark)


def chosen_of(plan: Plan, path: Path, choice: str | None) -> Prediction:
    """The plan's prediction for ``choice``; default: the recommended one. Raises ConfigError."""
    if choice is None and plan.recommended is None:
        raise ConfigError(f"{path}: the plan recommends no strategy: {plan.why}")
    if choice is None and plan.recommended not in range(len(plan.strategies)):
        raise ConfigError(
            f"{path}: recommended: {plan.recommended}, but there are {len(plan.strategies)} strategies; plan again"
        )
    found = [p for p in plan.strategies if choice is not None and choice in (p.strategy, p.schedule)]
    if choice is not None and not found:
        raise ConfigError(
            f"{path}: the plan has no strategy '{choice}'; it has {', '.join(map(title, plan.strategies))}"
        )
    chosen = plan.strategies[plan.recommended or 0] if choice is None else found[0]
    if chosen.problem:
        raise ConfigError(f"{path}: {title(chosen)} is not possible on this fleet: {chosen.problem}")
    if not find(chosen.strategy).runs:
        *first, last = CHOICES
        raise ConfigError(
            f"{path}: strategy {chosen.strategy} cannot run yet; use --strategy {', '.join(first)} or {last}"
        )
    return chosen


def _check_model(config: RunConfig, plan: Plan, path: Path) -> None:
    if config.model.given is not None:
        from muletrain.runs.assemble import resolve_start

        config = resolve_start(config)
    spec = make_model(config.model)
    if (spec.params, spec.context) != (plan.params, plan.context):
        raise ConfigError(
            f"{path}: the plan is for a model ({plan.model}) with {plan.params} parameters and sequences of {plan.context} tokens, but the "
            f"run's model has {spec.params} and {spec.context}; use the planned configuration (CONFIG.toml, --set), or plan again"
        )


def _swap(own: SwapConfig, chosen: Prediction) -> SwapConfig:
    """Peers serve the whole model if that is planned. Each peer finds out how many microbatches share a load."""
    if not chosen.accumulate:
        return own
    return own.model_copy(update={"whole": True})


def _pipeline(chosen: Prediction) -> PipelineConfig:
    if not chosen.schedule:
        return PipelineConfig()
    return PipelineConfig(
        seats=tuple(stage.machines for stage in chosen.stages),
        schedule=chosen.schedule,
        microbatches=chosen.microbatches,
        spares=chosen.spares,
    )


def _hub(config: RunConfig, chosen: Prediction) -> HubConfig:
    seats = tuple(tuple(name for name in stage.machines if name not in stage.clients) for stage in chosen.stages)
    helpers = tuple(stage.clients for stage in chosen.stages)
    clients = sum(map(len, helpers)) if config.hub.clients is None else config.hub.clients
    return config.hub.model_copy(update={"clients": clients, "seats": seats, "helpers": helpers})


def names_of(config: RunConfig) -> list[str]:
    """Names of a local fleet's peers: the planned ones, then peer-0, peer-1 ..."""
    named, count = [*config.pipeline.machines, *config.hub.servers], config.fleet.local_peers
    return [*named[:count], *(f"peer-{i}" for i in range(len(named), count))]


def clients_of(config: RunConfig) -> list[str]:
    """Names of a local fleet's clients: the planned ones, then client-0, client-1 ..."""
    named, count = config.hub.helping, config.hub.clients or 0
    return [*named[:count], *(f"client-{i}" for i in range(len(named), count))]


def indices_of(config: RunConfig) -> list[int]:
    """For each of a local fleet's peers, then clients, the machine's index in ``fleet.profile``. Raises ConfigError if
    the profile lacks a planned machine."""
    names, planned = (
        names_of(config) + clients_of(config),
        {*config.pipeline.machines, *config.hub.servers, *config.hub.helping},
    )
    if config.fleet.profile is None:
        return list(range(len(names)))
    fleet = load_fleet(config.fleet.profile)
    known = {peer.name for peer in fleet.peers()}
    if unknown := sorted(planned - known):
        raise ConfigError(
            f"fleet.profile: {config.fleet.profile} has no machine '{unknown[0]}', which the plan names; use the fleet file of the plan"
        )
    servers = config.fleet.local_peers
    return [fleet.number(name) if n < servers or name in planned else n for n, name in enumerate(names)]


def follows(config: RunConfig, choice: str, *, local: bool) -> RunConfig:
    """``config`` with the strategy of this name. ``local``: for a local fleet, which has as many clients as servers, if
    any, unless ``config`` says how many. Raises ConfigError for a strategy that needs a plan, or a contradiction."""
    listed = listed_as(choice)
    if listed.ask is None:
        raise ConfigError(f"--strategy {choice}: which machine serves which stage is in a plan; add --plan PLAN.json")
    asked = listed.ask(config, config.fleet.local_peers if local else 0)
    try:
        asked = RunConfig.model_validate({name: getattr(asked, name) for name in RunConfig.model_fields})
    except ValidationError as e:
        raise ConfigError(f"--strategy {choice}: {e.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    if not asks_for(asked, listed):
        raise ConfigError(
            f"--strategy {choice}: the configuration asks for another one; leave out hub.clients, pipeline.seats and swap.whole, or "
            f"--strategy"
        )
    return asked


def check_many(config: RunConfig) -> None:
    """Raises ConfigError if a plan has more machines than this one can emulate."""
    most = PROCESSES_PER_CORE * cpus()
    count = config.fleet.local_peers + (config.hub.clients or 0)
    if (config.pipeline.machines or config.hub.servers) and count > most:
        raise ConfigError(
            f"fleet.peers: the plan has {count} machines, but this machine can run at most {most} processes "
            f"({PROCESSES_PER_CORE} per core); use 'muletrain start --plan', and join from the other machines"
        )
