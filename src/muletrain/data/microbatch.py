"""Microbatch ``(step, index)`` as a pure function of seed and tokens: any trainer can build any microbatch.

Shapes: ``B`` sequences of a microbatch, ``T`` tokens of a sequence (``T <= context``). Imports numpy only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from muletrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.integer]
UintArray = npt.NDArray[np.uint64]

IGNORE = -100  # target that no loss counts (torch's default ignore_index)
BEGUN = IGNORE - 1  # such a target, which begins a conversation
SILENT = 1 << 31
"""Mark of a stored token that does not count as a target."""
BEGINS = 1 << 30
"""Mark of a stored token that begins a conversation, or the padding, in a row of several."""

_LENGTH_MULTIPLE = 8  # lengths are rounded to multiples, for the sake of tensor cores
ROUNDS = 8  # of the permutation; the classical result needs 4, small domains deserve more


def sequence_length(step: int, context: int, start: int | None, warmup: int) -> int:
    """T at ``step`` [tokens]: linear from ``start`` to ``context`` over ``warmup`` steps (SWARM app. G).

    Rounded down to a multiple of 8 during the warm-up (at least 8, at most ``context``).
    """
    if start is None or step >= warmup:
        return context
    length = start + (context - start) * step // warmup
    return min(context, max(_LENGTH_MULTIPLE, length // _LENGTH_MULTIPLE * _LENGTH_MULTIPLE))


def unmarked(tokens: TokenArray) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Token ids, and whether each counts as a target."""
    wide = np.asarray(tokens, dtype=np.int64)
    return wide & (BEGINS - 1), wide < SILENT


def begins(tokens: TokenArray) -> npt.NDArray[np.bool_]:
    """Does each stored token begin a conversation?"""
    return np.asarray(tokens, dtype=np.int64) & BEGINS > 0


class MicrobatchSource:
    """Cuts tokens into windows and deals them out, each once per epoch, in an order the seed determines.

    An epoch has ``windows`` windows of ``context + 1`` tokens, the last of each being the first of the next (only a
    target in one and only an input in the next). Windows start at an offset drawn per epoch, so that borders move.
    Sequence number ``offset + step * batch + index * microbatch + row`` takes the next window of a keyed permutation:
    O(1), nothing is shuffled or stored. During the sequence warm-up a window gives its first ``T`` tokens.

    ``ignored``: the tokens are rows of ``context`` (and one more token), in which some do not count as targets. Windows
    are these rows, a target that does not count is ``ignored``, and a last column of the targets holds the number of
    those that count in the whole batch (``compute.checks.weighed``). ``apart``: a target that begins a conversation is
    ``ignored + 1`` (``compute.checks.positions_in``).

    Raises DataError when the tokens do not fill one window.
    """

    def __init__(
        self,
        tokens: TokenArray,
        seed: int,
        batch: int,
        microbatch: int,
        context: int,
        sequence_start: int | None = None,
        sequence_warmup: int = 0,
        offset: int = 0,
        ignored: int | None = None,
        *,
        apart: bool = False,
    ) -> None:
        if len(tokens) <= context:
            raise DataError(
                f"model.context: {context} needs {context + 1} tokens for one window, but the corpus (data.path) has "
                f"{len(tokens)}; shorten model.context or add text"
            )
        if batch % microbatch:
            raise ValueError(f"microbatch {microbatch} does not divide batch {batch}")
        self._tokens = tokens
        self._seed = seed
        self._batch = batch
        self._microbatch = microbatch
        self._context = context
        self._start = sequence_start
        self._warmup = sequence_warmup
        self._offset = offset
        # As many windows as fit behind every offset below `context`; the same in each epoch, so that a sequence number
        # has its epoch.
        self.windows = max(1, (len(tokens) - (context if ignored is None else 1)) // context)
        self._slack = len(tokens) - 1 - self.windows * context
        self._ignored, self._apart = ignored, apart
        self._counted = (-1, 0)
        """The last step, and its targets that count."""

    def sequence_length(self, step: int) -> int:
        """T at ``step`` [tokens]."""
        return sequence_length(step, self._context, self._start, self._warmup)

    def microbatch(self, step: int, index: int) -> tuple[IntArray, IntArray]:
        """Inputs [B, T] and targets [B, T], or with ``ignored`` [B, T + 1], of microbatch ``index`` of ``step``; targets are
        the inputs' next tokens."""
        if step < 0 or not 0 <= index < self._batch // self._microbatch:
            raise ValueError(
                f"no microbatch ({step}, {index}) with batch {self._batch} and microbatch {self._microbatch}"
            )
        windows = self._windows(step, index * self._microbatch, self._microbatch)
        ids, counts = unmarked(windows)
        inputs, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
        if self._ignored is None:
            return inputs, targets
        targets[~counts[:, 1:]] = self._ignored
        if self._apart:
            targets[begins(windows[:, 1:])] = self._ignored + 1
        return inputs, np.pad(targets, ((0, 0), (0, 1)), constant_values=self.counted(step))

    def counted(self, step: int) -> int:
        """The targets that count in the batch of ``step``; at least 1."""
        if self._counted[0] != step:
            size = self._microbatch
            windows = (self._windows(step, first, size) for first in range(0, self._batch, size))
            found = (unmarked(each[:, 1:])[1].sum() for each in windows)
            self._counted = step, max(1, int(sum(found)))
        return self._counted[1]

    def _windows(self, step: int, first: int, count: int) -> TokenArray:
        """Stored tokens [count, T + 1] of sequences of ``step``."""
        starts = self.window_starts(self._offset + step * self._batch + first, count)
        return np.asarray(self._tokens[starts[:, None] + np.arange(self.sequence_length(step) + 1)])

    def window_starts(self, sequence: int, count: int) -> IntArray:
        """Token positions [count] where sequences ``sequence .. sequence + count - 1`` begin."""
        epochs, ranks = np.divmod(np.arange(sequence, sequence + count, dtype=np.uint64), np.uint64(self.windows))
        starts = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            keys = round_keys(self._seed, int(epoch), ROUNDS + 1)
            offset = int(keys[-1]) % (self._slack + 1)
            starts[of_epoch] = (
                offset + permute(ranks[of_epoch], self.windows, keys[:-1]).astype(np.int64) * self._context
            )
        return starts


def permute(values: UintArray, size: int, keys: UintArray) -> UintArray:
    """Images of ``values`` under a permutation of ``range(size)`` that ``keys`` selects.

    A generalised Feistel network (Black & Rogaway, "Ciphers with arbitrary finite domains", 2002, sec. 5): x = left + a
    * right with ``a * b >= size``, each round adds a hash of one half to the other modulo that half's radix;
    subtraction undoes this for any hash. Results beyond ``size`` are sent through again (cycle walking); as a * b <
    size + a, hardly any are.
    """
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    result = _feistel(values, a, b, keys)
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], a, b, keys)
    return result


def round_keys(seed: int, epoch: int, count: int) -> UintArray:
    """Keys [count] for one epoch: unrelated for neighbouring seeds and epochs."""
    base = _mix(_mix(np.array([seed], dtype=np.uint64)) ^ np.uint64(epoch))
    return _mix(base + np.arange(1, count + 1).astype(np.uint64))


def _feistel(values: UintArray, a: int, b: int, keys: UintArray) -> UintArray:
    right, left = np.divmod(values, np.uint64(a))
    for number, key in enumerate(keys):
        if number % 2:
            right = (right + _mix(left ^ key) % np.uint64(b)) % np.uint64(b)
        else:
            left = (left + _mix(right ^ key) % np.uint64(a)) % np.uint64(a)
    return left + right * np.uint64(a)


def _mix(values: UintArray) -> UintArray:
    """SplitMix64's output function (Steele et al. 2014): a bijection of 64-bit words; arrays wrap silently."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def heldout_batches(
    tokens: TokenArray, context: int, batch: int, *, apart: bool = False
) -> Iterator[tuple[IntArray, IntArray]]:
    """Evaluation batches: inputs and targets [B, context], B = ``batch`` but in the last one.

    Every token that counts, but the first, is a target exactly once. The last window is padded: inputs with token 0, targets with
    ``IGNORE``. ``apart``: a target that begins a conversation is ``BEGUN``. Raises DataError when there is no target at all.
    """
    if len(tokens) < 2:
        raise DataError(
            f"data.heldout: {len(tokens)} held-out tokens give nothing to predict; raise data.heldout or add text"
        )
    windows = -(-(len(tokens) - 1) // context)
    for first in range(0, windows, batch):
        stored = tokens[first * context : (first + batch) * context + 1]
        piece, counts = unmarked(stored)
        rows = min(batch, windows - first)
        inputs = np.zeros(rows * context, dtype=np.int64)
        targets = np.full(rows * context, IGNORE, dtype=np.int64)
        inputs[: len(piece) - 1] = piece[:-1]
        targets[: len(piece) - 1] = np.where(counts, piece, IGNORE)[1:]
        if apart:
            targets[: len(piece) - 1][begins(stored[1:])] = BEGUN
        yield inputs.reshape(rows, context), targets.reshape(rows, context)


class HeldoutSource:
    """Cuts held-out tokens into microbatches of one shape: the windows of ``heldout_batches``, and padding.

    Targets that do not count are ``vocab``, one more than any token: without effect on the loss
    (``compute.base.Microbatch``). ``column``: the targets have the last column of ``MicrobatchSource``, with the number of
    the microbatch. ``apart``: as there.
    Raises DataError when there is no target at all.
    """

    def __init__(
        self,
        tokens: TokenArray,
        context: int,
        sequences: int,
        vocab: int,
        *,
        column: bool = False,
        apart: bool = False,
    ) -> None:
        self._batches = list(heldout_batches(tokens, context, sequences, apart=apart))
        self._sequences, self._vocab, self._column = sequences, vocab, column
        self.targets = sum(int((targets >= 0).sum()) for _, targets in self._batches)
        """Targets of all microbatches that count."""
        if not self.targets:
            raise DataError("data.heldout: no held-out token counts towards the loss; raise data.heldout or add text")

    def __len__(self) -> int:
        return len(self._batches)

    def microbatch(self, index: int) -> tuple[IntArray, IntArray, int]:
        """Inputs and targets [B, T] of held-out microbatch ``index``, and how many targets count."""
        inputs, targets = self._batches[index]
        counted = int((targets >= 0).sum())
        missing = ((0, self._sequences - len(inputs)), (0, 0))
        targets = np.pad(
            np.where(targets < 0, self._vocab + IGNORE - targets, targets), missing, constant_values=self._vocab
        )
        if self._column:
            targets = np.pad(targets, ((0, 0), (0, 1)), constant_values=max(1, counted))
        return np.pad(inputs, missing), targets, counted
