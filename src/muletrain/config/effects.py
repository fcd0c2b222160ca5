"""Fields that lose their effect through another field. A user who sets one gets an error. A configuration from a
checkpoint or from another member is accepted: an older version may have written the field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from muletrain.config.schema import RunConfig


class Idle(NamedTuple):
    """Fields that have no effect in some configurations."""

    fields: str
    """Paths, separated by spaces."""
    where: Callable[[RunConfig], bool]
    why: str
    remedy: str


IDLE = (
    Idle(
        "train.sequence_warmup",
        lambda c: c.train.sequence_start is None,
        "without train.sequence_start",
        "set that",
    ),
    Idle(
        "train.sequence_start",
        lambda c: not c.train.sequence_warmup,
        "without train.sequence_warmup",
        "set that",
    ),
    Idle(
        "optimizer.final_lr",
        lambda c: c.optimizer.schedule == "constant",
        "with optimizer.schedule = 'constant'",
        "take another schedule",
    ),
    Idle("model.arguments", lambda c: c.model.factory is None, "without model.factory", "set that"),
    Idle(
        "model.compression_factor model.compression_after",
        lambda c: c.model.compression == "none",
        "without model.compression",
        "set that",
    ),
    Idle(
        "model.compression",
        lambda c: c.fleet.stages == 1 and c.model.compression_after is None,
        "with fleet.stages = 1, since nothing goes from stage to stage",
        "take more stages",
    ),
    Idle(
        "adapter.alpha adapter.dropout adapter.targets adapter.ranks adapter.alphas adapter.rslora adapter.dora adapter.base "
        "adapter.quantise",
        lambda c: c.adapter.rank is None and c.adapter.from_ is None,
        "without adapter.rank",
        "set that",
    ),
    Idle(
        "train.steps",
        lambda c: c.train.epochs is not None,
        "with train.epochs, which gives the steps",
        "leave out that",
    ),
    Idle(
        "data.chat_template data.date data.loss_on data.pack",
        lambda c: c.data.format == "text",
        "with data.format = 'text', in which every token counts",
        "change that",
    ),
    Idle(
        "model.attention",
        lambda c: c.data.format == "text" or not c.data.pack,
        "where each row is one text (data.format = 'text', data.pack = false)",
        "change that",
    ),
    Idle("data.on_error", lambda c: c.data.factory is None, "without data.factory", "set that"),
    Idle(
        "data.path data.format data.validation data.field data.tokenizer data.special_tokens data.end_token data.heldout "
        "data.deduplicate data.share",
        lambda c: c.data.factory is not None,
        "with data.factory, which gives samples instead of text",
        "leave out data.factory",
    ),
    Idle(
        "data.heldout",
        lambda c: c.data.validation is not None,
        "with data.validation, which is all that is held out",
        "leave out data.validation",
    ),
    Idle(
        "train.validate_every",
        lambda c: not c.data.heldout and c.data.validation is None and c.data.factory is None,
        "with data.heldout = 0 and no data.validation",
        "hold some text out",
    ),
    Idle(
        "data.share",
        lambda c: c.fleet.trainers == 1,
        "with fleet.trainers = 1",
        "let two peers build microbatches",
    ),
    Idle("fleet.rebalance_period", lambda c: c.fleet.rebalance == "off", "with fleet.rebalance = 'off'", "change that"),
    Idle(
        "pipeline.schedule pipeline.microbatches pipeline.spares",
        lambda c: not c.pipeline.seats,
        "without pipeline.seats",
        "name the peers of each stage there",
    ),
    Idle(
        "hub.seats hub.helpers hub.verify",
        lambda c: c.hub.clients is None,
        "without hub.clients",
        "say there how many clients a local fleet has",
    ),
    Idle("swap.folder", lambda c: c.swap.backing == "ram", "with swap.backing = 'ram'", "change that"),
    Idle(
        "logging.project",
        lambda c: not {"wandb", "trackio"}.intersection(c.logging.to),
        "without 'wandb' or 'trackio' in logging.to",
        "name one there",
    ),
    Idle("swap.folder swap.together", lambda c: c.swap.backing == "off", "with swap.backing = 'off'", "change that"),
)


def check_effects(config: RunConfig, among: Collection[str] | None = None) -> None:
    """Raises ConfigError for a field with a value other than the default and no effect. ``among``: paths of the only
    checked fields, and of values inside; None: all fields."""
    for idle in IDLE:
        if not idle.where(config):
            continue
        for path in idle.fields.split():
            if among is not None and not any(f"{asked}.".startswith(f"{path}.") for asked in among):
                continue
            section, name = path.split(".")
            values: Any = getattr(config, section)
            default = type(values).model_fields[name].get_default(call_default_factory=True)
            if (value := getattr(values, name)) != default:
                raise ConfigError(f"{path}: {value!r} has no effect {idle.why}; {idle.remedy}, or leave {name} out")
