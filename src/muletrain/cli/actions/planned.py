"""``--plan``: what 'muletrain plan --json' printed, as a run's configuration."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pydantic import ValidationError

from muletrain.config.fleet_file import load_fleet
from muletrain.config.plan_file import VERSION, Plan, Prediction
from muletrain.config.schema import ModelConfig, PipelineConfig, RunConfig
from muletrain.errors import ConfigError
from muletrain.model.presets import PRESETS
from muletrain.model.spec import ModelSpec
from muletrain.planning.splits import title
from muletrain.strategies import CHOICES, find

if TYPE_CHECKING:
    from pathlib import Path

PROCESSES_PER_CORE = 16
"""More peers than that on one machine keep each other from answering in time."""


def planned(config: RunConfig, path: Path, choice: str | None = None, *, spares: bool = True) -> RunConfig:
    """``config`` with the strategy, the stages and the machines of the plan: of the strategy that is recommended, or of
    the ``choice`` ('swarm', 'gpipe', '1f1b'). ``spares``: the run begins with them, too. Raises ConfigError, also where
    plan and ``config`` are about different things."""
    plan = read_plan(path)
    chosen = _chosen(plan, path, choice)
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
                f"train.{name}: {own}, and {path} is for {there}; leave it out, or plan again (muletrain plan --{name})"
            )
    optimizer = config.optimizer
    if chosen.state_device == "cpu" and optimizer.state_device != "cpu":
        if "state_device" in optimizer.model_fields_set:
            raise ConfigError(
                f"optimizer.state_device: '{optimizer.state_device}', and {path} mixes devices in a stage, which needs 'cpu'; leave it "
                f"out, or plan again (muletrain plan --set optimizer.state_device={optimizer.state_device})"
            )
        optimizer = optimizer.model_copy(update={"state_device": "cpu"})
    peers = sum(len(set(stage.machines)) for stage in chosen.stages) + (len(chosen.spares) if spares else 0)
    sections = {
        **{name: getattr(config, name) for name in RunConfig.model_fields},
        "model": model,
        "optimizer": optimizer,
        "train": config.train.model_copy(update={"batch": plan.batch, "microbatch": chosen.microbatch}),
        "fleet": config.fleet.model_copy(
            update={
                "stages": len(chosen.stages),
                "layers": tuple(end - first for first, end in (s.layers for s in chosen.stages)),
                "peers": peers,
            }
        ),
        "pipeline": _pipeline(chosen),
    }
    try:
        return RunConfig.model_validate(sections)
    except ValidationError as e:
        raise ConfigError(f"{path}: {e.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def read_plan(path: Path) -> Plan:
    """Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"{path}: cannot be read ({e}); 'muletrain plan FLEET.toml --json > {path}' writes a plan"
        ) from None
    try:
        plan = Plan.model_validate_json(text)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        network = (
            " ('plan --network' places devices of a network, which is no plan of a fleet)" if '"cost_s"' in text else ""
        )
        raise ConfigError(
            f"{path}: not what 'muletrain plan FLEET.toml --json' prints{network}: {where}: {first['msg']}"
        ) from None
    if plan.version != VERSION:
        raise ConfigError(f"{path}: a plan of version {plan.version}, this muletrain reads {VERSION}; plan again")
    return plan


def _chosen(plan: Plan, path: Path, choice: str | None) -> Prediction:
    if choice is None and plan.recommended is None:
        raise ConfigError(f"{path}: the plan recommends nothing: {plan.why}")
    if choice is None and plan.recommended not in range(len(plan.strategies)):
        raise ConfigError(f"{path}: recommended: {plan.recommended}, of {len(plan.strategies)} strategies; plan again")
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
            f"{path}: strategy {chosen.strategy} does not run yet; take --strategy {', '.join(first)} or {last}"
        )
    return chosen


def _check_model(config: RunConfig, plan: Plan, path: Path) -> None:
    if config.model.from_ is not None:
        from muletrain.runs.assemble import resolve_start

        config = resolve_start(config)
    spec = ModelSpec.from_config(config.model)
    if (spec.params, spec.context) != (plan.params, plan.context):
        raise ConfigError(
            f"{path}: the plan is for a model ({plan.model}) of {plan.params} parameters and sequences of {plan.context} tokens, the run's "
            f"has {spec.params} and {spec.context}: give the configuration that was planned with (CONFIG.toml, --set), or plan again"
        )


def _pipeline(chosen: Prediction) -> PipelineConfig:
    if not chosen.schedule:
        return PipelineConfig()
    return PipelineConfig(
        seats=tuple(stage.machines for stage in chosen.stages),
        schedule=chosen.schedule,
        microbatches=chosen.microbatches,
        spares=chosen.spares,
    )


def machines_of(config: RunConfig) -> list[str]:
    """That the run's plan names: those with a seat first, stage by stage."""
    return [*(name for row in config.pipeline.seats for name in dict.fromkeys(row)), *config.pipeline.spares]


def names_of(config: RunConfig) -> list[str]:
    """Of a local fleet's peers: those that are planned, and then peer-0, peer-1 ..."""
    named, count = machines_of(config), config.fleet.local_peers
    return [*named[:count], *(f"peer-{i}" for i in range(len(named), count))]


def indices_of(config: RunConfig) -> list[int]:
    """Which machine of ``fleet.profile`` each of a local fleet's peers is. Raises ConfigError for a planned one that it
    does not have."""
    names = names_of(config)
    if config.fleet.profile is None:
        return list(range(len(names)))
    fleet = load_fleet(config.fleet.profile)
    known = {peer.name for peer in fleet.peers()}
    if unknown := sorted({*machines_of(config)} - known):
        raise ConfigError(
            f"fleet.profile: {config.fleet.profile} has no machine '{unknown[0]}', which the plan names; give the fleet file that was "
            f"planned"
        )
    return [fleet.number(name) for name in names]


def check_many(config: RunConfig) -> None:
    """Raises ConfigError where a plan has more machines than this one can play."""
    most = PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if config.pipeline.seats and config.fleet.local_peers > most:
        raise ConfigError(
            f"fleet.peers: the plan has {config.fleet.local_peers} machines, and as many processes are too many for this one (at most "
            f"{most}, {PROCESSES_PER_CORE} a core): use 'muletrain start --plan', and join from the others"
        )
