"""What a trained model is worth: held-out loss beside counting baselines, and a few sentences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import tokenizers
import torch

from muletrain.data.microbatch import heldout_batches
from muletrain.data.ngram import baselines
from muletrain.errors import DataError
from muletrain.model.generate import evaluate, generate
from muletrain.runs.quality import Quality

if TYPE_CHECKING:
    from muletrain.data.tokens import TokenCache
    from muletrain.model.stage import Stage
    from muletrain.runs.checkpoint import Checkpoint

BATCH = 16
PROMPTS = ("The ", "If the ", "A class ")


def quality(checkpoint: Checkpoint, model: Stage, cache: TokenCache) -> Quality:
    """Mean cross-entropy [nats/token] on the corpus' held-out part, and the baselines'."""
    if cache.tokenizer_json != checkpoint.tokenizer_json:
        raise DataError(
            "data.path: this corpus has another tokenizer than the checkpoint; evaluate on the run's own data"
        )
    batches = (
        (torch.from_numpy(inputs), torch.from_numpy(targets))
        for inputs, targets in heldout_batches(cache.heldout, checkpoint.spec.context, BATCH)
    )
    loss = evaluate(model, batches)
    counted = baselines(cache.train, cache.heldout, checkpoint.spec.vocab)
    return Quality(loss=loss, unigram=counted.unigram, bigram=counted.bigram, tokens=len(cache.heldout) - 1)


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def write(checkpoint: Checkpoint, model: Stage, prompt: str, **options: float) -> str:
    """``prompt`` and its continuation."""
    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.tokenizer_json.decode())
    end = tokenizer.token_to_id("<|endoftext|>")
    return prompt + generate(model, tokenizer, prompt, end_of_text=end, **options)  # type: ignore[arg-type]


def samples(checkpoint: Checkpoint, model: Stage) -> list[str]:
    return [write(checkpoint, model, p, max_tokens=40, top_k=40, seed=k) for k, p in enumerate(PROMPTS)]
