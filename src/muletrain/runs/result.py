"""Quality of a trained model: held-out loss beside counting baselines, and sample sentences."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from muletrain.cgroups import cpus
from muletrain.compute.probe import free_memory
from muletrain.data.chat import Template, chat_template
from muletrain.data.microbatch import heldout_batches, unmarked
from muletrain.data.ngram import baselines, countable, spread
from muletrain.data.tokens import TokenCache
from muletrain.errors import CapacityError, DataError, MuletrainError
from muletrain.events import Evaluated, Sampled
from muletrain.model.generate import evaluate, generate
from muletrain.model.make import load_model, make_stage
from muletrain.runs.assemble import RunFacts, initial_weights
from muletrain.runs.base import weights_of
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.measure.quality import Quality
from muletrain.units import format_memory

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.data.microbatch import TokenArray
    from muletrain.data.samples import Data
    from muletrain.events import EventLog
    from muletrain.model.chain import Model
    from muletrain.model.module import StageModule
    from muletrain.planning.partition import Cut

HELDOUT_TOKENS = 1 << 20
"""Most held-out tokens to measure on: the loss then has an error of about 0.002 nats."""
COUNTED_TOKENS = 1 << 23
"""Most training tokens that the baselines count: sorting takes about 1 GB."""
REPORT_FLOPS = 4e12
"""FLOPs that the end of a run spends on measuring: about a minute on two cores."""
MEMORY_SHARE = 0.5
"""Largest share of the free memory that the weights may take."""
BATCH = 16
"""Most sequences in one batch."""
LOGITS = 1 << 26
"""Most logits in one batch: 256 MB, of which two or three copies live at once where they are not computed in chunks."""
PROMPTS = ("The ", "If the ", "A class ")
QUESTIONS = ("Hello!", "What is two plus two?", "Tell me a story.")
"""Beginnings of text, and questions to a model that was trained on conversations."""


def check_memory(params: int) -> None:
    """Check that a whole model of ``params`` parameters fits this machine: a peer only ever holds a stage. Raises
    CapacityError."""
    needed, free = 4 * params, free_memory(torch.device("cpu"))
    if needed > MEMORY_SHARE * free:
        raise CapacityError(
            f"the whole model has {format_memory(needed)} of weights, and {format_memory(free)} of memory are free here "
            f"(it may take {MEMORY_SHARE:.0%} of it); call 'muletrain eval' or 'generate' on a larger machine"
        )


def report_tokens(spec: Model) -> int:
    """Number of held-out tokens that the end of a run measures with about ``REPORT_FLOPS``."""
    return max(spec.context, int(REPORT_FLOPS / (spec.layers * spec.layer_flops() + spec.head_flops)))


def quality(checkpoint: Checkpoint, model: StageModule, cache: Data, tokens: int = HELDOUT_TOKENS) -> Quality:
    """Measure mean cross-entropy [nats/token] on at most ``tokens`` held-out tokens, of the model and of the baselines.
    The first token is no target. A module's own loss is measured on samples or whole sequences. Raises DataError if the
    tokenizers of corpus and run differ."""
    if checkpoint.spec.own_loss:
        return _own_quality(checkpoint.spec, model, cache, min(tokens, HELDOUT_TOKENS))
    assert isinstance(cache, TokenCache)
    spec, heldout = checkpoint.spec, _heldout(checkpoint, cache, tokens)
    train = spread(cache.train, COUNTED_TOKENS, cache.row)
    counted = baselines(train, heldout, spec.vocab) if countable(train) else None
    return Quality(
        loss=_loss(spec, model, heldout),
        unigram=None if counted is None else counted.unigram,
        bigram=None if counted is None else counted.bigram,
        tokens=int(unmarked(heldout)[1][1:].sum()),
        heldout=cache.stats.heldout_counted,
        counted=len(train),
        trained=len(cache.train),
    )


def loss_before(checkpoint: Checkpoint, cache: TokenCache, tokens: int = HELDOUT_TOKENS) -> float | None:
    """Measure the loss [nats/token] of the weights of ``model.from`` on the text that ``quality`` uses for the
    checkpoint; None: the run began with weights from a seed. Raises MuletrainError when the folder is gone."""
    if checkpoint.config.model.from_ is None:
        return None
    cut: Cut = tuple((first, end) for first, end in checkpoint.manifest["cut"])
    facts, weights = RunFacts(checkpoint.config, checkpoint.spec, cut), weights_of(checkpoint.config, checkpoint.spec)
    for stage in range(len(cut)):
        load = initial_weights(facts, stage)
        assert load is not None  # the weights are not drawn
        weights |= {name: load(name) for name in make_stage(checkpoint.spec, stage, cut).shapes()}
    return _loss(checkpoint.spec, load_model(checkpoint.spec, weights), _heldout(checkpoint, cache, tokens))


def _heldout(checkpoint: Checkpoint, cache: TokenCache, tokens: int) -> TokenArray:
    if len(cache.heldout) < 2:
        raise DataError("data.heldout: the run holds no text out; give text to measure by 'muletrain eval --data PATH'")
    if cache.tokenizer_json != checkpoint.tokenizer_json:
        raise DataError(
            "data.path: this corpus has another tokenizer than the checkpoint; evaluate on the run's own data"
        )
    return spread(cache.heldout, min(tokens, HELDOUT_TOKENS) + 1, cache.row)


def _loss(spec: Model, model: StageModule, heldout: TokenArray) -> float:
    batch = max(1, min(BATCH, LOGITS // (spec.context * spec.vocab)))
    batches = heldout_batches(heldout, spec.context, batch, apart=spec.apart)
    return evaluate(model, ((torch.from_numpy(inputs), torch.from_numpy(targets)) for inputs, targets in batches))


def _own_quality(spec: Model, model: StageModule, data: Data, tokens: int) -> Quality:
    """Measure at most ``tokens``; a sample that is no text counts as one token. Raises DataError."""
    left_out = list[str]()
    if isinstance(data, TokenCache):
        heldout = spread(data.heldout, tokens + 1)[
            : (min(tokens, len(data.heldout) - 1) // spec.context) * spec.context + 1
        ]
        if len(heldout) <= spec.context:
            raise DataError(
                f"data.heldout: {len(data.heldout)} held-out tokens are no whole sequence of {spec.context}"
            )
        batches, sizes = heldout_batches(heldout, spec.context, BATCH), (len(data.heldout) - 1, len(data.train))
        used = len(heldout) - 1
    else:
        batches = data.heldout_batches(tokens, BATCH, spec.vocab, left_out.append)
        sizes, used = (len(data.heldout), len(data.train)), min(tokens, len(data.heldout))
    try:
        loss = evaluate(model, ((torch.from_numpy(inputs), torch.from_numpy(targets)) for inputs, targets in batches))
    except ValueError as e:
        raise DataError(f"{(*left_out, e)[0]}; nor can another held-out sample be used") from e
    used -= len(left_out)
    return Quality(loss, None, None, used, sizes[0], 0, sizes[1], own_loss=True, left_out=tuple(left_out))


def evaluated(step: int, q: Quality) -> Evaluated:
    """Convert ``q`` to an event."""
    return Evaluated(
        step=step,
        loss=q.loss,
        perplexity=None if q.own_loss else perplexity(q.loss),
        tokens=q.tokens,
        unigram=q.unigram,
        bigram=q.bigram,
        before=q.before,
    )


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def write(
    checkpoint: Checkpoint, model: StageModule, prompt: str, *, chat: bool | None = None, **options: float
) -> str:
    """Return ``prompt`` with the continuation of ``model``, which ``Checkpoint.writer`` loads; with ``chat``, the answer
    to it alone (None: of a model trained on conversations). Raises DataError if there is no chat template."""
    encoder, data, stops = checkpoint.encoder, checkpoint.config.data, checkpoint.stops
    if not (data.counts if chat is None else chat):
        return prompt + generate(model, encoder, prompt, stops=stops, **options)  # type: ignore[arg-type]
    asked, ends = Template(chat_template(data), "all").asked(prompt)
    ending = encoder.tokenizer.encode(ends, add_special_tokens=False).ids
    return generate(model, encoder, asked, stops={*stops, *ending[:1]}, **options).strip()  # type: ignore[arg-type]


def samples(checkpoint: Checkpoint, model: StageModule) -> list[str]:
    if checkpoint.spec.own_loss:
        return []
    chat = checkpoint.config.data.counts
    return [
        f"{p} {answer}" if chat else answer
        for k, p in enumerate(QUESTIONS if chat else PROMPTS)
        for answer in [write(checkpoint, model, p, max_tokens=40, top_k=40, seed=k)]
    ]


def evaluation(folder: Path, log: EventLog) -> tuple[Quality | None, list[str]]:
    """Quality and samples of the checkpoint in ``folder`` at the end of a run. ``log`` gets the figures, and what could
    not be measured. Raises MuletrainError."""
    torch.set_num_threads(cpus())
    checkpoint = Checkpoint.open(folder)
    check_memory(checkpoint.params)
    cache = checkpoint.corpus()
    if isinstance(cache, TokenCache) and not len(cache.heldout):
        log.note("no text is held out (data.heldout = 0): the model was not measured", "info")
        return None, samples(checkpoint, checkpoint.computed())
    tokens, before = report_tokens(checkpoint.spec), None
    try:  # first: both models need not be in memory at once
        before = loss_before(checkpoint, cache, tokens) if isinstance(cache, TokenCache) else None
    except MuletrainError as e:
        log.note(f"the loss before training was not measured: {e}", "warning")
    model = checkpoint.computed()
    result = dataclasses.replace(quality(checkpoint, model, cache, tokens), before=before)
    log.emit(evaluated(checkpoint.step, result))
    texts = samples(checkpoint, model)
    log.emit(Sampled(checkpoint.step, texts))
    return result, texts
