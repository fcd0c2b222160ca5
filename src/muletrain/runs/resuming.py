"""The changes to the configuration that a resume may make: ``TABLE`` is the rule, also shown in docs/howto/resume.md."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from muletrain.config.dump import toml_value
from muletrain.config.schema import Precision, RunConfig
from muletrain.errors import CheckpointError, ConfigError
from muletrain.runs.assemble import RunFacts

if TYPE_CHECKING:
    from muletrain.data.samples import Data
    from muletrain.runs.checkpoint import Checkpoint


class Rule(NamedTuple):
    """The permission to change ``fields`` at a resume: one field, or ``SECTION.*`` for the section's fields without a
    separate rule."""

    fields: str
    may: Literal["yes", "from then on", "no"]
    """'yes': the run's numbers stay the same, up to rounding. 'from then on': the steps after the checkpoint differ,
    and the run reports the change. 'no': the result would be a different run."""
    effect: str


TABLE = (
    Rule(
        "model.from",
        "yes",
        "the folder may have moved; the checkpoint has all that is needed, but for an adapter's model",
    ),
    Rule("model.stops", "yes", "which tokens end a text"),
    Rule(
        "model.context",
        "from then on",
        "a warm start: weights and moments stay, sequences have the new length, and the data go on after as many tokens",
    ),
    Rule("model.dropout", "from then on", "the share of activations that are dropped"),
    Rule("model.compression_after", "no", "it follows from the first run's stages, which may become fewer"),
    Rule("model.*", "no", "it would be another model"),
    Rule("adapter.from", "yes", "the checkpoint has the adapter"),
    Rule("adapter.*", "no", "it would be another model"),
    Rule("data.share", "yes", "who may fetch the tokens"),
    Rule("data.cache", "yes", "where tokens are kept"),
    Rule("data.tokenizer", "yes", "only the place: another tokenizer is refused, since its tokens mean other text"),
    Rule(
        "data.*",
        "from then on",
        "a first pass through the new data begins, tokenised by the run's tokenizer; equal data at another place goes on",
    ),
    Rule("train.steps", "from then on", "stretches or shortens the learning rate's schedule"),
    Rule("train.batch", "from then on", "the data go on with the next sequence"),
    Rule("train.microbatch", "yes", "with dropout, other masks"),
    Rule("train.seed", "from then on", "another order of the data and other dropout masks"),
    Rule("train.data_offset", "yes", "the resume sets it, so that the data go on where they were"),
    Rule("train.sequence_start", "from then on", "the length of sequences"),
    Rule("train.sequence_warmup", "from then on", "the length of sequences"),
    Rule("train.*", "yes", "what is measured, and when the run ends"),
    Rule("optimizer.state_device", "yes", "where moments are kept"),
    Rule("optimizer.*", "from then on", "both moments stay"),
    Rule("wire.*", "from then on", "how much rounding the wire adds"),
    Rule(
        "fleet.stages", "yes", "the checkpoint is cut again; not with model.share_layers, whose blocks are the stages'"
    ),
    Rule("fleet.layers", "yes", "as fleet.stages"),
    Rule("fleet.*", "yes", "who trains"),
    Rule("pipeline.*", "yes", "who serves what"),
    Rule("hub.*", "yes", "who serves what"),
    Rule("swap.*", "yes", "where a large stage is kept"),
    Rule("compute.precision", "from then on", "the arithmetic; 'auto' stays what was measured first"),
    Rule("compute.*", "yes", "devices, threads and memory"),
    Rule("checkpoint.*", "yes", "when and where checkpoints are written"),
    Rule("network.*", "yes", "the first machine's name, and where its peers listen"),
    Rule("logging.*", "yes", "where figures are shown"),
)
"""A field's rule is the first that names the field, else the section's."""

DERIVED = frozenset({"model.chain"})
"""Fields that follow from ``model.context`` and ``model.dropout``: a change follows from a change of either."""


class Change(NamedTuple):
    """A field that differs between a checkpoint and the resumed run."""

    field: str
    before: Any
    now: Any
    rule: Rule

    @property
    def values(self) -> tuple[str, str]:
        """The two values as TOML."""
        before, now = ("none" if v is None else toml_value(v) for v in (self.before, self.now))
        return before, now


def rule_of(field: str) -> Rule:
    """The rule for 'SECTION.FIELD'."""
    section = f"{field.partition('.')[0]}.*"
    return next(rule for name in (field, section) for rule in TABLE if rule.fields == name)


def as_markdown() -> str:
    """``TABLE`` for docs/howto/resume.md."""
    rows = [f"| `{rule.fields}` | {rule.may} | {rule.effect} |" for rule in TABLE]
    return "\n".join(["| field | may change | what happens |", "|---|---|---|", *rows])


def changes(before: RunConfig, now: RunConfig) -> list[Change]:
    """The fields that differ, in the order of the configuration. A field that is missing in an older version had the
    default value."""
    found = []
    for section in RunConfig.model_fields:
        old, new = getattr(before, section), getattr(now, section)
        for name, info in type(new).model_fields.items():
            field = f"{section}.{info.alias or name}"
            # as JSON, since 1 is True for Python
            if json.dumps(getattr(old, name), default=str) != json.dumps(getattr(new, name), default=str):
                found.append(Change(field, getattr(old, name), getattr(new, name), rule_of(field)))
    return found


def checked(checkpoint: Checkpoint, config: RunConfig) -> list[Change]:
    """The changes of ``config``, resolved, to the run of ``checkpoint``. Raises ConfigError for changes that a resume
    may not make."""
    found = changes(checkpoint.config, config)
    names = {change.field for change in found}
    derived = DERIVED if names & {"model.context", "model.dropout"} else frozenset()
    refused = [c for c in found if c.rule.may == "no" and c.field not in derived]
    if "adapter.digests" in {c.field for c in refused} <= {"adapter.digests", "model.architecture"}:
        raise ConfigError(
            f"model.from: {config.model.from_} has other weights than the model that the adapter was trained with; give the "
            f"folder of that model"
        )
    if config.model.share_layers:
        refused += [c for c in found if c.field in ("fleet.stages", "fleet.layers")]
    if refused:
        listed = ", ".join("{} ({} before, {} now)".format(c.field, *c.values) for c in refused)
        raise ConfigError(
            f"{checkpoint.folder}: a resumed run keeps its model; begin another one to change {listed}, or leave that out "
            f"(docs/howto/resume.md lists what may change)"
        )
    return found


def continued(checkpoint: Checkpoint, config: RunConfig, data: Data, *, meant: bool) -> tuple[RunConfig, list[str]]:
    """``config``, checked and resolved, for the steps after ``checkpoint``, and the changes that affect the run's
    numbers, a line each. ``data``: the run's current data; ``meant``: the user named data for this resume. Raises
    CheckpointError for data that changed unasked, and ConfigError for a changed tokenizer."""
    found, step, before = checked(checkpoint, config), checkpoint.step, checkpoint.config
    said = [c for c in found if c.rule.may == "from then on" and not c.field.startswith("data.")]
    if config.compute.precision is Precision.AUTO and "precision" in checkpoint.manifest:
        measured = Precision(checkpoint.manifest["precision"])  # measuring again could choose other arithmetic
        config = config.model_copy(update={"compute": config.compute.model_copy(update={"precision": measured})})
    precision = checkpoint.manifest.get("precision", before.compute.precision.value)
    said = [c for c in said if c.field != "compute.precision" or c.now.value not in ("auto", precision)]
    lines = ["{}: {} before, {} from step {} on ({})".format(c.field, *c.values, step, c.rule.effect) for c in said]
    context = RunFacts.of(config).spec.context
    done = before.train.data_offset + step * before.train.batch
    if data.digest != checkpoint.manifest.get("data"):
        if data.tokenizer_json != checkpoint.tokenizer_json:
            raise ConfigError(
                f"data.tokenizer: '{config.data.tokenizer}' is not the tokenizer that the model was trained with; leave it out, "
                f"or set it to {checkpoint.folder}/tokenizer.json"
            )
        if not meant and not any(c.field.startswith("data.") for c in found):
            raise CheckpointError(
                f"{checkpoint.folder}: the corpus is not what the run was trained on; restore its files, or, if the run is to "
                f"go on with the new ones, name them: --set data.path={config.data.path}"
            )
        lines.append(f"data: another corpus from step {step} on; a first pass through it begins")
        done = 0
    done = -(-done * checkpoint.spec.context // context)
    train = config.train.model_copy(update={"data_offset": done - step * config.train.batch})
    kept = config.model.model_copy(update={"compression_after": checkpoint.spec.borders or None})
    return config.model_copy(update={"train": train, "model": kept}), lines
