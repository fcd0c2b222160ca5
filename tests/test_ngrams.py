"""Baselines of n-grams."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter

import numpy as np
import pytest

from muletrain.data.microbatch import SILENT
from muletrain.data.ngram import Counts, baselines, countable
from muletrain.data.tokens import TokenCache
from muletrain.errors import DataError
from tests.corpora import pydoc

__all__ = ["pydoc"]


def test_baselines_of_pydoc(pydoc: TokenCache) -> None:
    result = baselines(pydoc.train, pydoc.heldout, 1024)
    assert 5.8 < result.unigram < 6.2
    assert 3.8 < result.bigram < 4.6
    train, heldout = pydoc.train.tolist(), pydoc.heldout.tolist()
    first, second = Counter(train[:-1]), Counter(train[1:])
    both = Counter(itertools.pairwise(train))
    w = result.bigram_weights
    plain = 0.0
    for a, b in itertools.pairwise(heldout):
        plain -= math.log(w[0] / 1024 + w[1] * second[b] / (len(train) - 1) + w[2] * both[a, b] / max(first[a], 1))
    assert result.bigram == pytest.approx(plain / (len(heldout) - 1), abs=1e-9)


def test_mixture_is_a_distribution() -> None:
    rng = np.random.default_rng(1)
    counts = Counts(rng.integers(0, 20, (200, 2)), 21)
    for a in range(20):
        pairs = np.array([[a, b] for b in range(21)])
        assert counts.probabilities(pairs).sum(axis=1) == pytest.approx([1, 1, 1])


def test_weights_do_not_see_the_heldout() -> None:
    rng = np.random.default_rng(2)
    train = rng.integers(0, 50, 6000)
    one, two = baselines(train, train[:100], 64), baselines(train, rng.integers(0, 64, 500), 64)
    assert one.bigram_weights == two.bigram_weights
    assert one.unigram_weights == two.unigram_weights


def test_known_entropies() -> None:
    """A random walk on a ring: unigram is log n, bigram log 2; unseen tokens stay possible."""
    steps = np.random.default_rng(3).choice([-1, 1], 60_001)
    walk = np.cumsum(steps) % 31  # odd ring: every token is reached
    result = baselines(walk[:50_000], walk[50_000:], 40)
    assert result.unigram == pytest.approx(math.log(31), abs=0.05)
    assert result.bigram == pytest.approx(math.log(2), abs=0.02)
    assert math.isfinite(baselines(walk[:50_000], np.array([1, 39, 38]), 40).bigram)


def test_too_few_tokens_for_baselines() -> None:
    with pytest.raises(DataError, match=re.escape("data.path: 10 training and 5 held-out tokens")):
        baselines(np.arange(10), np.arange(5), 20)


def test_only_tokens_that_count_make_pairs() -> None:
    """A few answers in much text, such as a small data set of conversations, are too few."""
    train = np.random.default_rng(0).integers(0, 20, 9000).astype(np.uint32)
    few = train | np.where(np.arange(9000) % 100, np.uint32(SILENT), np.uint32(0))
    assert countable(train)
    assert not countable(few)
    with pytest.raises(DataError, match="too few for n-gram baselines"):
        baselines(few, train, 20)
