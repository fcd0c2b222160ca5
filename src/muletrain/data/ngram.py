"""Unigram and interpolated bigram losses: the baselines that a trained model must beat.

Bigrams are smoothed by Jelinek and Mercer's interpolation ("Interpolated estimation of Markov source parameters from
sparse data", 1980):  p(b | a) = w2 c(a, b) / c(a) + w1 c(b) / N + w0 / V,  with weights that sum to one, tuned by
expectation maximisation on part of the training tokens that the counts leave out, never on held-out text. Imports numpy
only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muletrain.data.microbatch import unmarked
from muletrain.errors import DataError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.integer]

# The tuning slice is every tenth block of 256 pairs: spread over the corpus like the held-out documents, as text in
# order drifts.
_BLOCK = 256
_EVERY = 10
_ITERATIONS = 50
_PIECES = 64


@dataclass(frozen=True)
class Baselines:
    """Held-out losses [nats/token] over all held-out tokens but the first, as in the model's evaluation."""

    unigram: float
    bigram: float
    unigram_weights: tuple[float, float]  # uniform, unigram
    bigram_weights: tuple[float, float, float]  # uniform, unigram, bigram


class Counts:
    """Unigram and bigram counts of ``pairs`` [n, 2] over ``vocab`` tokens; bigrams are stored sparsely."""

    def __init__(self, pairs: IntArray, vocab: int) -> None:
        self._vocab = vocab
        self._firsts = np.bincount(pairs[:, 0], minlength=vocab)
        self._seconds = np.bincount(pairs[:, 1], minlength=vocab)
        self._codes, self._counts = np.unique(pairs[:, 0] * vocab + pairs[:, 1], return_counts=True)

    def probabilities(self, pairs: IntArray) -> FloatArray:
        """Components [3, n] of the mixture for each pair: uniform, unigram, bigram (zero after a token never seen)."""
        codes = pairs[:, 0] * self._vocab + pairs[:, 1]
        places = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        together = np.where(self._codes[places] == codes, self._counts[places], 0)
        uniform = np.full(len(pairs), 1.0 / self._vocab)
        unigram = self._seconds[pairs[:, 1]] / self._seconds.sum()
        return np.stack([uniform, unigram, together / np.maximum(self._firsts[pairs[:, 0]], 1)])


def spread(tokens: TokenArray, limit: int, row: int = 1) -> TokenArray:
    """``tokens``, or of more than ``limit``, about so many (never more) in pieces from the whole range: a corpus
    drifts. ``row``: pieces are whole rows of so many tokens, then one more token."""
    if len(tokens) <= limit:
        return tokens
    if row > 1:
        rows = spread(np.arange(len(tokens) // row), max(1, (limit - 1) // row))
        return np.concatenate([tokens[:-1].reshape(-1, row)[rows].reshape(-1), tokens[-1:]])
    pieces = min(_PIECES, limit)
    starts = np.linspace(0, len(tokens) - limit // pieces, pieces).astype(np.int64)
    return np.concatenate([tokens[start : start + limit // pieces] for start in starts])


def countable(train: TokenArray) -> bool:
    """Are there enough tokens that count, for counts and for the tuning slice?"""
    return int(unmarked(train)[1][1:].sum()) >= _BLOCK * _EVERY


def baselines(train: TokenArray, heldout: TokenArray, vocab: int) -> Baselines:
    """Unigram and bigram losses of ``heldout`` under counts of ``train``. Raises DataError when either is too short."""
    if not countable(train) or len(heldout) < 2:
        raise DataError(
            f"data.path: {len(train)} training and {len(heldout)} held-out tokens are too few for n-gram baselines "
            f"(more than {_BLOCK * _EVERY} and 1 are needed); add text"
        )
    pairs = _pairs(train)
    tuning = np.arange(len(pairs)) // _BLOCK % _EVERY == _EVERY - 1
    tuned = Counts(pairs[~tuning], vocab).probabilities(pairs[tuning])
    two, three = _tune(tuned[:2]), _tune(tuned)
    # Weights keep; counts are taken again over all training tokens, for the strongest baseline the training text
    # affords.
    final = Counts(pairs, vocab).probabilities(_pairs(heldout))
    return Baselines(
        unigram=_loss(two, final[:2]),
        bigram=_loss(three, final),
        unigram_weights=(float(two[0]), float(two[1])),
        bigram_weights=(float(three[0]), float(three[1]), float(three[2])),
    )


def _pairs(tokens: TokenArray) -> IntArray:
    """Each token that counts, after the token before it."""
    wide, counts = unmarked(tokens)
    return np.stack([wide[:-1], wide[1:]], axis=1)[counts[1:]]


def _tune(components: FloatArray) -> FloatArray:
    """Weights [k] that make the mixture of ``components`` [k, n] likeliest; none is zero."""
    weights = np.full(len(components), 1.0 / len(components))
    for _ in range(_ITERATIONS):
        shares = weights[:, None] * components
        weights = (shares / shares.sum(axis=0)).mean(axis=1)
    floor = 1.0 / components.shape[1]  # a slice in which every token was seen before must not rule out unseen ones
    weights = np.maximum(weights, floor)
    return np.asarray(weights / weights.sum())


def _loss(weights: FloatArray, components: FloatArray) -> float:
    return float(-np.log(weights @ components).mean())
