"""How good a model is, beside models that only count tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quality:
    """Mean cross-entropy on the held-out text [nats/token], of the model and of two models that only count tokens
    (None: the training text is too short to count)."""

    loss: float
    unigram: float | None
    bigram: float | None
    """Interpolated with the unigram."""
    tokens: int
    """Held-out tokens it was measured on ..."""
    heldout: int
    """... of so many."""
    counted: int
    """Training tokens that were counted ..."""
    trained: int
    """... of so many."""
