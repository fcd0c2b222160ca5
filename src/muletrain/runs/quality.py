"""How good a model is, beside models that only count words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quality:
    """Mean cross-entropy on the held-out text [nats/token], of the model and of two models that only count words."""

    loss: float
    unigram: float
    bigram: float
    """Interpolated with the unigram."""
    tokens: int
    """Held-out tokens it was measured on."""
