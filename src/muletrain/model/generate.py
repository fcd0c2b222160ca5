"""Measures the held-out loss of a trained model, and generates text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from muletrain.data.microbatch import IGNORE
from muletrain.model.loss import positions_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from muletrain.model.module import StageModule


class TextEncoder(Protocol):
    """The part of ``data.encoder.Encoder`` that generation uses."""

    def prompt(self, text: str) -> list[int]: ...

    def continuation(self, prompt: list[int], ids: list[int]) -> str: ...


@torch.no_grad()
def evaluate(model: StageModule, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Mean loss of the whole ``model``, over all targets that count [nats/token] or, for a model with its own loss,
    over all samples; each batch is (inputs, targets).

    Raises ValueError when there is no target.
    """
    total, count = 0.0, 0
    device = next(model.parameters()).device
    for inputs, targets in batches:
        counted, places = len(targets), None
        if not model.spec.own_loss:
            counted = int((targets >= 0).sum())
            targets = torch.where(targets < 0, model.spec.vocab + IGNORE - targets, targets)
            if model.spec.apart:
                places, targets = positions_in(targets, model.spec.vocab)
        total += float(model.loss(inputs.to(device), targets, positions=places)) * counted if counted else 0.0
        count += counted
    if count == 0:
        raise ValueError("no target to evaluate on")
    return total / count


def generate(
    model: StageModule,
    encoder: TextEncoder,
    prompt: str,
    *,
    max_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    stops: Collection[int] = (),
) -> str:
    """The continuation of ``prompt``, at most ``max_tokens``, ending before one of ``stops`` (token ids) or where
    the context is full. ``temperature`` 0 takes the likeliest token; ``top_k`` 0 draws from all.

    Raises ValueError when the prompt has no tokens.
    """
    ids = encoder.prompt(prompt)
    stream = generate_ids(model, ids, max_tokens=max_tokens, temperature=temperature, top_k=top_k, seed=seed)
    out = []
    for token in stream:
        if token in stops:
            break
        out.append(token)
    return encoder.continuation(ids, out)


@torch.no_grad()
def generate_ids(
    model: StageModule, prompt: Sequence[int], *, max_tokens: int, temperature: float, top_k: int, seed: int
) -> Iterator[int]:
    """Sampled token ids one by one. Of a prompt longer than the context, only the end is kept, with room for one
    token."""
    if not prompt:
        raise ValueError("the prompt has no tokens; give at least one")
    device = next(model.parameters()).device
    kept = list(prompt)[-(model.spec.context - 1) :] if model.spec.context > 1 else list(prompt)[-1:]
    room = min(max_tokens, model.spec.context - len(kept))
    caches = model.caches()
    draws = torch.Generator().manual_seed(seed)
    fresh = kept
    for _ in range(room):
        tokens = torch.tensor([fresh], dtype=torch.int64, device=device)
        logits = model(tokens, None, caches)[0, -1].float().cpu()
        token = _sample(logits, temperature, top_k, draws)
        yield token
        fresh = [token] if caches is not None else [*fresh, token]


def _sample(logits: Tensor, temperature: float, top_k: int, draws: torch.Generator) -> int:
    """``logits`` [V] -> a token id."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        smallest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=draws))
