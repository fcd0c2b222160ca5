"""Microbatches are pure functions of seed and tokens; held-out batches count every target once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muletrain.data.microbatch import IGNORE, MicrobatchSource, heldout_batches, permute, round_keys
from muletrain.errors import DataError
from tests.corpora import SRC


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    image = permute(np.arange(size, dtype=np.uint64), size, round_keys(seed, epoch, 8))
    assert sorted(image.tolist()) == list(range(size))


def test_permute_shuffles() -> None:
    """Where 0 goes over many keys is uniform (chi-squared), and neighbours do not stay together."""
    n, draws = 7, 7000
    first = Counter(int(permute(np.array([0], dtype=np.uint64), n, round_keys(s, 0, 8))[0]) for s in range(draws))
    assert sum((first[k] - draws / n) ** 2 / (draws / n) for k in range(n)) < 22.5  # 99.9 % of 6 degrees of freedom
    image = permute(np.arange(10_007, dtype=np.uint64), 10_007, round_keys(0, 0, 8)).astype(np.int64)
    assert abs(np.corrcoef(image, np.arange(10_007))[0, 1]) < 0.05
    assert abs(np.corrcoef(image[1:], image[:-1])[0, 1]) < 0.05


@given(
    length=st.integers(2, 700),
    context=st.integers(1, 40),
    microbatch=st.integers(1, 5),
    parts=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=80, deadline=None)
def test_an_epoch_sees_each_window_once(length: int, context: int, microbatch: int, parts: int, seed: int) -> None:
    if length <= context:
        return
    source = MicrobatchSource(np.arange(length), seed, microbatch * parts, microbatch, context)
    assert source.windows >= max(1, length // context - 1)
    for epoch in range(3):
        starts = np.sort(source.window_starts(epoch * source.windows, source.windows))
        assert starts[0] >= 0
        assert starts[-1] + context < length
        assert (np.diff(starts) == context).all()
    sequence = np.concatenate(
        [source.microbatch(step, index)[0][:, 0] for step in range(6) for index in range(parts)]
    )  # tokens are positions, so first inputs are window starts
    assert sequence.tolist() == source.window_starts(0, 6 * microbatch * parts).tolist()


def test_microbatch_is_a_pure_function_of_seed_and_tokens() -> None:
    tokens = np.random.default_rng(0).integers(0, 1000, 5000).astype(np.uint16)

    def new(seed: int) -> MicrobatchSource:
        return MicrobatchSource(tokens, seed, 12, 4, 32)

    forward, backward = new(3), new(3)
    keys = [(step, index) for step in range(30) for index in range(3)]
    one = {key: forward.microbatch(*key) for key in keys}
    for key in reversed(keys):
        inputs, targets = backward.microbatch(*key)
        assert inputs.dtype == targets.dtype == np.int64
        assert inputs.shape == targets.shape == (4, 32)
        assert (inputs == one[key][0]).all()
        assert (targets == one[key][1]).all()
        assert (inputs[:, 1:] == targets[:, :-1]).all()
    assert any((new(4).microbatch(*key)[0] != one[key][0]).any() for key in keys)


def test_microbatch_order_is_frozen() -> None:
    """A change here breaks every run that resumes: raise it on purpose only."""
    source = MicrobatchSource(np.arange(1000), 5, 4, 4, 100)
    assert source.window_starts(0, 12).tolist() == [155, 555, 55, 855, 255, 755, 655, 455, 355, 171, 71, 571]


def test_borders_move_and_reach_the_last_token() -> None:
    source = MicrobatchSource(np.arange(200), 0, 1, 1, 16)
    firsts = {int(source.window_starts(e * source.windows, source.windows).min()) for e in range(400)}
    assert firsts == set(range(min(firsts), max(firsts) + 1))
    assert min(firsts) == 0
    assert max(firsts) + source.windows * 16 == 199


def test_bad_microbatch_indices() -> None:
    source = MicrobatchSource(np.arange(100), 0, 8, 4, 10)
    for step, index in ((-1, 0), (0, 2), (0, -1)):
        with pytest.raises(ValueError, match="no microbatch"):
            source.microbatch(step, index)


def test_corpus_shorter_than_a_window_names_the_context() -> None:
    with pytest.raises(DataError, match=r"model\.context: 128 needs 129 tokens.*has 128"):
        MicrobatchSource(np.arange(128), 0, 4, 4, 128)
    assert MicrobatchSource(np.arange(129), 0, 4, 4, 128).microbatch(7, 0)[1][3, -1] == 128


@given(context=st.integers(1, 300), start=st.integers(1, 300), warmup=st.integers(0, 50))
@settings(deadline=None)
def test_sequence_warm_up(context: int, start: int, warmup: int) -> None:
    start = min(start, context)
    source = MicrobatchSource(np.arange(2 * context + 2), 0, 2, 2, context, start, warmup)
    lengths = [source.sequence_length(step) for step in range(warmup + 3)]
    assert lengths == sorted(lengths)
    assert lengths[warmup:] == [context] * 3
    assert all(length % 8 == 0 or length == context for length in lengths)
    assert all(1 <= length <= context for length in lengths)
    for step in range(warmup):
        exact = start + (context - start) * step / warmup
        assert lengths[step] == context or abs(lengths[step] - exact) < 8
    assert source.microbatch(0, 0)[0].shape == (2, lengths[0])


def test_warm_up_takes_the_head_of_the_same_windows() -> None:
    full = MicrobatchSource(np.arange(999), 1, 4, 2, 64)
    warm = MicrobatchSource(np.arange(999), 1, 4, 2, 64, 16, 100)
    inputs, targets = warm.microbatch(50, 1)
    assert inputs.shape == (2, 40)
    assert (inputs == full.microbatch(50, 1)[0][:, :40]).all()
    assert (targets == full.microbatch(50, 1)[1][:, :40]).all()


@given(length=st.integers(2, 500), context=st.integers(1, 50), batch=st.integers(1, 7))
@settings(deadline=None)
def test_heldout_batches_count_every_target_once(length: int, context: int, batch: int) -> None:
    tokens = np.arange(length, dtype=np.uint16)
    batches = list(heldout_batches(tokens, context, batch))
    assert all(inputs.shape == targets.shape == (batch, context) for inputs, targets in batches[:-1])
    inputs = np.concatenate([inputs.ravel() for inputs, _ in batches])
    targets = np.concatenate([targets.ravel() for _, targets in batches])
    counted = targets != IGNORE
    assert targets[counted].tolist() == list(range(1, length))
    assert inputs[counted].tolist() == list(range(length - 1))
    assert (~counted).sum() < context


def test_heldout_of_one_token_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data\.heldout"):
        next(heldout_batches(np.arange(1), 4, 2))


def test_microbatches_need_no_torch() -> None:
    code = "import sys, muletrain.data.microbatch, muletrain.data.ngram; assert 'torch' not in sys.modules"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    subprocess.run([sys.executable, "-c", code], env=env, timeout=180, check=True)
