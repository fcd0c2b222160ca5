"""The plan of a run as one event: data, model, steps, and devices."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from muletrain.data.chat import prints_date
from muletrain.data.microbatch import sequence_length
from muletrain.data.samples import SampleData
from muletrain.data.shown import examples
from muletrain.errors import DataError
from muletrain.events import RunPrepared
from muletrain.model.traced.adapter import in_base, is_adapter
from muletrain.model.traced.chain import TracedModel
from muletrain.strategies import listed_of
from muletrain.units import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.config.model_sections import DataConfig
    from muletrain.data.samples import Data
    from muletrain.data.tokens import TokenCache
    from muletrain.runs.assemble import RunFacts

EXAMPLES, EXAMPLE = 3, 600
"""Conversations that are shown before a run, and characters of each."""


def summary_of(
    facts: RunFacts,
    data: Data,
    devices: Sequence[str],
    first_step: int = 0,
    command: str = "run",
    seconds: float = 0.0,
) -> RunPrepared:
    """The summary of a run on ``data`` that ``command`` begins after ``first_step`` (0: a new run). ``devices``: one for
    each process of this machine. ``seconds``: time that preparing took."""
    config, spec = facts.config, facts.spec
    t, o, whole = config.train, config.optimizer, ((0, spec.layers),)
    tokens, size = t.batch * _positions(facts), len(data.train)
    own = isinstance(data, SampleData)
    params = spec.cut_params(facts.cut)
    return RunPrepared(
        data=data.name if isinstance(data, SampleData) else config.data.path,
        documents={} if isinstance(data, SampleData) else _documents(data),
        changes=[] if isinstance(data, SampleData) else data.stats.changes(),
        unit="samples" if own else "tokens",
        train=size,
        heldout=len(data.heldout),
        steps=t.steps,
        first_step=first_step,
        taken=t.steps * t.batch if own else tokens,
        epochs=(t.steps * t.batch if own else tokens) / size,
        model=_named(facts),
        start=_start(facts),
        params=params,
        trained_params=params - spec.frozen_params(whole, 0) - spec.base_params(range(spec.layers + 2)),
        batch=t.batch,
        microbatch=t.microbatch,
        context=0 if own else spec.context,
        optimizer=o.name,
        lr=o.lr,
        warmup=t.steps // 10 if o.warmup is None else o.warmup,
        schedule=o.schedule,
        final_lr=o.final_lr,
        precision=config.compute.precision.value,
        strategy=listed_of(config).name,
        stages=config.fleet.stages,
        peers=config.fleet.peers or 0,
        devices=list(devices),
        command=command,
        seconds=seconds,
        adapter=_adapter(facts),
        date=config.data.date if prints_date(config.data) else "",
        examples=_examples(config.data) if config.data.counts and not first_step else [],
    )


def _examples(data: DataConfig) -> list[list[str]]:
    try:
        return [*examples(data, EXAMPLES, EXAMPLE)]
    except DataError:  # the tokens come from the cache, and a data set of the Hub is out of reach
        return []


def _positions(facts: RunFacts) -> int:
    """Tokens of one row of the batch, over all steps."""
    t, context = facts.config.train, facts.spec.context
    short = min(t.steps, t.sequence_warmup)
    warming = sum(sequence_length(s, context, t.sequence_start, t.sequence_warmup) for s in range(short))
    return warming + (t.steps - short) * context


def _documents(data: TokenCache) -> dict[str, int]:
    stats = data.stats
    names: tuple[str, ...] = (
        "documents",
        "heldout_documents",
        "ends",
        "duplicates",
        "empty",
        "replaced",
        "unknown",
        "special",
    )
    if data.row > 1:
        names += ("counted", "padding")
    return {name: getattr(stats, name) for name in names}


def _start(facts: RunFacts) -> str:
    """Where the first weights come from."""
    config, spec = facts.config, facts.spec
    given = config.model.from_ or config.model.factory
    if given is None or not spec.borders:
        return given or f"seed {config.train.seed}"
    drawn = sum(spec.compression_params(facts.cut, s) for s in range(len(facts.cut)))
    return f"{given}; {format_count(drawn)} of model.compression by seed {config.train.seed}, so the model begins worse than that"


def _adapter(facts: RunFacts) -> str:
    """Rank and adapted layers, e.g. 'rank 16 in q_proj, v_proj (28 of each)'."""
    rank, spec, held = facts.config.adapter.rank, facts.spec, facts.config.adapter.quantise
    if rank is None or not isinstance(spec, TracedModel):
        return ""
    layers = {in_base(name).partition(".lora_")[0] for name in spec.shapes if is_adapter(name)}
    counts = Counter(layer.rpartition(".")[2] for layer in layers)
    alike = {n: sorted(kind for kind in counts if counts[kind] == n) for n in sorted(counts.values(), reverse=True)}
    beside = "" if held == "none" else f", beside weights in {held}"
    return f"rank {rank} in " + "; ".join(f"{', '.join(kinds)} ({n} of each)" for n, kinds in alike.items()) + beside


def _named(facts: RunFacts) -> str:
    spec, sent = facts.spec, ""
    if spec.borders and spec.compression is not None:
        sent = f", of which {spec.passed} are sent between stages ({spec.compression.kind})"
    if not isinstance(spec, TracedModel):
        return f"decoder of {spec.layers} layers, width {spec.width}{sent}"
    kind = spec.factory or str(spec.config.get("model_type"))
    return f"{kind}, {spec.layers} blocks, width {spec.width}{sent}"
