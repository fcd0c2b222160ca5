"""Samples that are not text, as ``data.factory`` returns them: (train, heldout), two sequences of (input, target).

A sequence has a length, and gives sample k at [k], always the same: arrays or tensors of fixed shape and type. Floats
become fp32, integers int64. Microbatch ``(step, index)`` is a pure function of seed and samples: each epoch deals out
every sample once, in an order that the seed determines. The place of a sample that cannot be used is taken by the next
one that can, so machines with the same samples build the same microbatch.
"""

from __future__ import annotations

import functools
import hashlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from muletrain.config.trusted import imported
from muletrain.data.microbatch import ROUNDS, permute, round_keys
from muletrain.data.tokens import TokenCache
from muletrain.errors import ConfigError, DataError
from muletrain.model.chain import TensorType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from muletrain.config.model_sections import DataConfig
    from muletrain.model.chain import Model

    Array = npt.NDArray[Any]

TRIED = 1000
"""Samples after an unusable one that are tried in its place."""
COMPARED = 64
"""Samples of each side, evenly spread, that the digest covers."""


class Samples(Protocol):
    """One side: such as a dataset of torch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]: ...


@dataclass(frozen=True)
class SampleData:
    """Both sides, and the type of the samples. ``digest`` (hex SHA-256) covers the lengths and some samples."""

    name: str
    train: Samples
    heldout: Samples
    inputs: TensorType
    targets: TensorType
    digest: str
    tokenizer_json: bytes = b""

    @classmethod
    def build(cls, name: str, *, skips: bool = False) -> SampleData:
        """The samples of the factory ``name``. Raises ConfigError for an unusable factory, and DataError for samples
        that differ between readings, and (unless ``skips``) for samples of different shapes."""
        return _built(name, skips)

    def sample(self, side: Samples, k: int) -> tuple[Array, Array]:
        """Sample ``k``, as all are. Raises DataError."""
        found = _read(self._named(side, k), side, k)
        kinds = tuple(map(_kind, found))
        if kinds != (self.inputs, self.targets):
            raise DataError(
                f"data.factory: {self._named(side, k)} is {kinds[0]} and {kinds[1]}, others are {self.inputs} and "
                f"{self.targets}; give all the same shapes and types"
            )
        return found

    def usable(self, side: Samples, k: int, vocab: int) -> tuple[Array, Array]:
        """Sample ``k``. Raises DataError with the sample's name, also for numbers that are not finite or not below
        ``vocab``."""
        inputs, targets = self.batch(side, np.array([k]), vocab)
        return inputs[0], targets[0]

    def or_next(
        self, side: Samples, k: int, vocab: int, found: Callable[[int, int, str], None] | None = None
    ) -> tuple[Array, Array]:
        """Sample ``k``, or the first usable one after ``k``, reported to ``found`` (k, the replacement, the reason).
        Raises DataError if there is none among the next ``TRIED``."""
        reason: DataError | None = None
        for other in (n % len(side) for n in range(k, k + min(TRIED, len(side)))):
            try:
                sample = self.usable(side, other, vocab)
            except DataError as e:
                reason = reason or e
                continue
            if reason is not None and found is not None:
                found(k, other, str(reason))
            return sample
        raise DataError(f"{reason}; nor can the samples after it be used")

    def batch(self, side: Samples, which: npt.NDArray[np.int64], vocab: int) -> tuple[Array, Array]:
        """Inputs and targets [B, ...]. Raises DataError that names the first sample that cannot be used."""
        both = _stacked(self.sample(side, int(k)) for k in which)
        for what, x in zip(("input", "target"), both, strict=True):
            integers, rows = x.dtype == np.int64, x.reshape(len(x), -1)
            fine = ((rows >= 0) & (rows < vocab) if integers else np.isfinite(rows)).all(axis=1)
            if not fine.all():
                wrong = "has numbers that are not finite (NaN or infinite); correct or leave it out"
                if integers:
                    wrong = f"is out of range: integers from {x.min()} to {x.max()}, and model.vocab = {vocab}; "
                    remedy = f"set model.vocab = {x.max() + 1} or more, and give the module as many rows and classes"
                    wrong += remedy if x.min() >= 0 else "they must not be negative"
                name = self._named(side, int(which[fine.argmin()]))
                raise DataError(f"data.factory: the {what} of {name} {wrong}")
        return both

    def heldout_batches(
        self, most: int, batch: int, vocab: int, left_out: Callable[[str], None]
    ) -> Iterator[tuple[Array, Array]]:
        """Batches of at most ``most`` held-out samples, evenly spread. Samples that cannot be used are left out, and
        ``left_out`` is called with the reason for each."""
        which = _spread(len(self.heldout), most)
        for first in range(0, len(which), batch):
            usable = []
            for k in which[first : first + batch]:
                try:
                    usable.append(self.usable(self.heldout, int(k), vocab))
                except DataError as e:
                    left_out(str(e))
            if usable:
                yield _stacked(usable)

    def _named(self, side: Samples, k: int) -> str:
        return _named(self.name, k, "held-out sample" if side is self.heldout else "sample")


Data = TokenCache | SampleData
"""The training data of a run."""


class SampleSource:
    """Deals out the training samples; see ``MicrobatchSource``."""

    def __init__(self, data: SampleData, seed: int, batch: int, microbatch: int, vocab: int, offset: int = 0) -> None:
        self._data, self._seed, self._vocab = data, seed, vocab
        self._batch, self._microbatch, self._offset = batch, microbatch, offset
        self.windows = len(data.train)
        """Samples of an epoch."""
        self.found: Callable[[int, int, str], None] | None = None
        """Called with an unusable sample, the replacement, and the reason."""

    def microbatch(self, step: int, index: int) -> tuple[Array, Array]:
        """Inputs and targets [B, ...] of microbatch ``index`` of ``step``."""
        if step < 0 or not 0 <= index < self._batch // self._microbatch:
            raise ValueError(
                f"no microbatch ({step}, {index}) with batch {self._batch} and microbatch {self._microbatch}"
            )
        size = len(self._data.train)
        first = self._offset + step * self._batch + index * self._microbatch
        numbers = np.arange(first, first + self._microbatch, dtype=np.uint64)
        epochs, ranks = np.divmod(numbers, np.uint64(size))
        which = np.empty(len(numbers), dtype=np.int64)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            which[of_epoch] = permute(ranks[of_epoch], size, round_keys(self._seed, int(epoch), ROUNDS))
        return _stacked(self._data.or_next(self._data.train, int(k), self._vocab, self.found) for k in which)


class HeldoutSamples:
    """Whole microbatches of held-out samples, at most ``most``, evenly spread. See ``HeldoutSource``; there is no
    padding, since the module's own loss would count padding. Raises DataError if there is no microbatch."""

    def __init__(self, data: SampleData, most: int, samples: int, vocab: int) -> None:
        self._data, self._samples, self._vocab = data, samples, vocab
        size = min(most, len(data.heldout))
        if size < samples:
            raise DataError(
                f"train.validate_every: {size} held-out samples (of {len(data.heldout)}, measured: at most {most}) are no "
                f"microbatch of {samples}; let '{data.name}' hold out more, raise train.validate_tokens, or lower train.microbatch"
            )
        self._which = _spread(len(data.heldout), size - size % samples)
        self.targets = len(self._which)
        self.found: Callable[[int, int, str], None] | None = None
        """See ``SampleSource``."""

    def __len__(self) -> int:
        return self.targets // self._samples

    def microbatch(self, index: int) -> tuple[Array, Array, int]:
        """Inputs and targets [B, ...] of held-out microbatch ``index``, and the number of samples. Raises DataError."""
        which = self._which[index * self._samples : (index + 1) * self._samples]
        samples = _stacked(self._data.or_next(self._data.heldout, int(k), self._vocab, self.found) for k in which)
        return *samples, self._samples


def open_data(config: DataConfig, spec: Model, progress: Callable[[float], None] | None = None) -> Data:
    """The tokens or the samples that ``spec`` trains on. Raises DataError, and ConfigError if the model does not take
    this kind."""
    if config.factory is None:
        if spec.inputs.shape is not None:
            raise ConfigError(f"data.factory: the model takes {spec.inputs}, which no text has; set it")
        if config.counts and spec.own_loss:
            raise ConfigError(
                "data.format: conversations are trained by the cross-entropy of what counts, and this module has "
                "a loss of its own; train it on text"
            )
        return TokenCache.build(config, spec.vocab, progress, context=spec.context)
    skips = config.on_error == "skip"
    data = SampleData.build(config.factory, skips=skips)
    if (data.inputs, data.targets) != (spec.inputs, spec.targets):
        raise ConfigError(
            f"data.factory: the samples of '{config.factory}' are {data.inputs} and {data.targets}, and the model takes "
            f"{spec.inputs} and {spec.targets}"
        )
    for side in (data.train, data.heldout):
        which = _spread(len(side), COMPARED)
        if not skips:
            data.batch(side, which, spec.vocab)
        for k in which if skips else ():
            data.or_next(side, int(k), spec.vocab)
    return data


@functools.lru_cache(maxsize=1)
def _built(name: str, skips: bool) -> SampleData:
    make = imported("data.factory", name)
    try:
        train, heldout = make()
        sizes = len(train), len(heldout)
    except ConfigError as e:
        raise ConfigError(f"data.factory: {e}") from e
    except (Exception, SystemExit) as e:  # whatever the user's code raises
        raise ConfigError(
            f"data.factory: '{name}' does not return (train, heldout), two sequences of (input, target): "
            f"{type(e).__name__}: {e}; call it yourself to see why"
        ) from e
    if not all(sizes):
        raise DataError(f"data.factory: '{name}' has {sizes[0]} samples to train on and {sizes[1]} held out; give some")
    inputs, targets = map(_kind, _first(name, train, skips=skips))
    data = SampleData(name, train, heldout, inputs, targets, "")
    digest = hashlib.sha256(f"{sizes} {inputs} {targets}".encode())
    for side, size in zip((train, heldout), sizes, strict=True):
        for k in _spread(size, COMPARED):
            once, again = (_bytes(data, side, int(k), skips=skips) for _ in range(2))
            if once != again:
                raise DataError(
                    f"data.factory: sample {k} of '{name}' is another one each time; draw what is random from its number"
                )
            digest.update(once)
    return SampleData(name, train, heldout, inputs, targets, digest.hexdigest())


def _first(name: str, side: Samples, *, skips: bool) -> tuple[Array, Array]:
    """The first sample; with ``skips``, the first readable one."""
    for k in range(min(TRIED, len(side)) - 1 if skips else 0):
        with suppress(DataError):
            return _read(_named(name, k), side, k)
    last = len(side) - 1 if skips else 0
    return _read(_named(name, last), side, last)


def _named(name: str, k: int, what: str = "sample") -> str:
    return f"{what} {k} of '{name}'"


def _bytes(data: SampleData, side: Samples, k: int, *, skips: bool) -> bytes:
    try:
        return b"".join(x.tobytes() for x in data.sample(side, k))
    except DataError:
        if not skips:
            raise
        return b"unusable"


def _stacked(samples: Iterable[tuple[Array, Array]]) -> tuple[Array, Array]:
    inputs, targets = (np.stack(x) for x in zip(*samples, strict=True))
    return inputs, targets


def _read(named: str, side: Samples, k: int) -> tuple[Array, Array]:
    try:
        given, target = side[k]
        return _array(given), _array(target)
    except (Exception, SystemExit) as e:  # whatever the user's code raises
        raise DataError(
            f"data.factory: {named} is not (input, target), two arrays of numbers: {type(e).__name__}: {e}"
        ) from e


def _array(value: Any) -> Array:
    found = np.asarray(value)
    if found.dtype.kind not in "fiu":
        raise TypeError(f"numbers of type {found.dtype}; give floats or integers")
    return np.ascontiguousarray(found, np.float32 if found.dtype.kind == "f" else np.int64).reshape(found.shape)


def _kind(x: Array) -> TensorType:
    return TensorType.parse(f"{x.dtype}[{', '.join(map(str, x.shape))}]")


def _spread(size: int, most: int) -> npt.NDArray[np.int64]:
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64))
