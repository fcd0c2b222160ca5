"""The quality of a model, beside a unigram and a bigram model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quality:
    """Mean cross-entropy on the held-out text [nats/token] of the model, and of a unigram and a bigram model (None: too
    little training text)."""

    loss: float
    unigram: float | None
    bigram: float | None
    """Interpolated with the unigram."""
    tokens: int
    """Held-out tokens used."""
    heldout: int
    """Held-out tokens in total."""
    counted: int
    """Training tokens that unigram and bigram counted."""
    trained: int
    """Training tokens in total."""
    before: float | None = None
    """Loss of the weights of ``model.from`` on the same text; None: the run began with different weights, or the loss
    is unknown."""
    own_loss: bool = False
    """``loss`` is the own loss of a user's module, on samples or tokens."""
    left_out: tuple[str, ...] = ()
    """The reason for each held-out sample that could not be used."""
