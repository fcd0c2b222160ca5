"""The token cache: a corpus tokenised once, memory-mapped ever after.

A cache is a folder ``<data.cache>/tokens/<key>`` with ``train.bin``, ``heldout.bin`` (little-endian uint16, or uint32
for larger vocabularies), ``tokenizer.json`` and ``meta.json``. The key follows from the sources' contents, the
tokenizer and the options. A folder is built under another name and renamed when complete, so a cache that exists is
whole, however many processes build.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from muletrain.config.cache import cache_folder
from muletrain.data.corpus import Corpus, is_heldout
from muletrain.data.tokenizer import (
    end_of_text,
    load_tokenizer,
    parse_tokenizer,
    token_range,
    tokenizer_json,
    train_tokenizer,
)
from muletrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from muletrain.config.model_sections import DataConfig

    Progress = Callable[[float], None]

FORMAT = 2  # goes up when the same text would give other tokens or files

_PIECE = 1 << 14  # characters encoded as one text: long enough to be quick, short enough to spread over threads
_BATCH = 1 << 21  # characters encoded at once; bounds memory to some hundred MB
_ATTEMPTS = 5  # to publish; a failure means that another process interfered, and none does so twice
_TRAIN_SHARE = 0.3  # of the progress bar goes to training a tokenizer


@dataclass(frozen=True)
class TokenStats:
    """Statistics of a cache. ``heldout_bytes / heldout_tokens`` turns nats per token into bits per byte. No document is
    truncated: a long one fills several sequences."""

    documents: int
    """Documents that are trained, some of them without their end."""
    heldout_documents: int
    """Documents that are held out whole: of the corpus, or all of ``data.validation``."""
    ends: int
    """Long documents whose end is held out. They count among ``documents``."""
    duplicates: int
    """Documents left out because an earlier one is equal (``data.deduplicate``)."""
    empty: int
    """Documents left out because they have no text."""
    replaced: int
    """Half surrogate pairs in the text, which no UTF-8 can hold: each became U+FFFD."""
    special: int
    """Special tokens that the text spells, and that are trained as such (``data.special_tokens``)."""
    characters: int
    """Characters of both sides."""
    train_bytes: int
    """Bytes of the training text in UTF-8."""
    heldout_bytes: int
    """Bytes of the held-out text in UTF-8."""
    train_tokens: int
    """Tokens to train on, with those that begin and end documents."""
    heldout_tokens: int
    """Held-out tokens. 0: nothing is held out (``data.heldout = 0``)."""


@dataclass(frozen=True)
class TokenCache:
    """Tokens of both sides, and what they were made with.

    ``train`` and ``heldout`` are read-only maps of token ids; position is the index. ``digest`` identifies tokens and
    tokenizer (hex SHA-256): two peers of one digest build the same microbatches. ``end_of_text`` closes each document;
    None: no such token.
    """

    folder: Path
    train: np.memmap[Any, np.dtype[Any]]
    heldout: np.memmap[Any, np.dtype[Any]]
    tokenizer_json: bytes
    digest: str
    vocab: int  # smallest model.vocab that holds every token id
    end_of_text: int | None
    stats: TokenStats

    @classmethod
    def build(cls, config: DataConfig, vocab: int, progress: Progress | None = None) -> TokenCache:
        """The cache for ``config``: opened if intact, else made. ``progress`` gets the share done, 0 to 1.

        Raises DataError when the corpus or the tokenizer cannot be used, when one side is empty, or the folder cannot
        be written.
        """
        corpus = Corpus(config)
        tokenizer = None if config.tokenizer == "train" else load_tokenizer(config.tokenizer, vocab)
        parent = cache_folder(config) / "tokens"
        folder = parent / _key(config, corpus, tokenizer, vocab)
        found = cls.open(folder)
        if found is None:
            builder = _Builder(corpus, config.heldout, progress or _no_progress)
            try:
                parent.mkdir(parents=True, exist_ok=True)
                found = _build(builder, tokenizer, vocab, folder)
            except OSError as error:
                raise DataError(
                    f"data.cache: cannot write {parent}: {error.strerror or error}; free space, or set data.cache to "
                    "another folder"
                ) from error
        if progress:
            progress(1.0)
        return found

    @classmethod
    def open(cls, folder: Path) -> TokenCache | None:
        """The cache in ``folder``; None when there is none, or a damaged one (every byte is checked)."""
        try:
            meta = json.loads((folder / "meta.json").read_bytes())
            stats = TokenStats(**{field.name: int(meta["stats"][field.name]) for field in fields(TokenStats)})
            if meta["format"] != FORMAT or _digest(folder) != meta["digest"]:
                return None
            dtype = np.dtype(meta["dtype"])
            train = np.memmap(folder / "train.bin", dtype=dtype, mode="r", shape=(stats.train_tokens,))
            heldout = np.memmap(folder / "heldout.bin", dtype=dtype, mode="r", shape=(stats.heldout_tokens,))
            text = (folder / "tokenizer.json").read_bytes()
            return cls(folder, train, heldout, text, meta["digest"], int(meta["vocab"]), meta["end_of_text"], stats)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def train_file(self) -> tuple[Path, int]:
        """The file of the training side's tokens, and the bytes of each token."""
        return self.folder / "train.bin", self.train.dtype.itemsize

    @property
    def heldout_file(self) -> Path:
        """The file of the held-out side's tokens."""
        return self.folder / "heldout.bin"

    def decode(self, tokens: list[int]) -> str:
        """Text of token ids, special tokens included."""
        return str(parse_tokenizer(self.tokenizer_json).decode(tokens, skip_special_tokens=False))


class _Builder:
    """One build: trains a tokenizer if need be, then writes both sides in a single pass."""

    def __init__(self, corpus: Corpus, share: float, progress: Progress) -> None:
        self._corpus = corpus
        self._share = share
        self._progress = progress

    def write(self, folder: Path, tokenizer: tokenizers.Tokenizer | None, vocab: int) -> None:
        """Fill ``folder``, which exists and is empty."""
        done = 0.0
        if tokenizer is None:
            tokenizer = train_tokenizer(self._training_text(_TRAIN_SHARE), vocab)
            done = _TRAIN_SHARE
        dtype = np.dtype("<u2" if token_range(tokenizer) <= 1 << 16 else "<u4")
        (folder / "tokenizer.json").write_bytes(tokenizer_json(tokenizer))
        with (
            _Side(folder / "train.bin", tokenizer, dtype) as train,
            _Side(folder / "heldout.bin", tokenizer, dtype) as heldout,
        ):
            for paragraph in self._corpus.paragraphs():
                side = heldout if is_heldout(paragraph.text, self._share) else train
                side.add(paragraph.document, paragraph.text)
                self._progress(done + (1 - done) * self._corpus.fraction)
        _check_sides(train, heldout, self._share, self._corpus.path)
        stats = TokenStats(
            documents=train.documents,
            heldout_documents=heldout.documents,
            ends=0,
            duplicates=self._corpus.duplicates,
            empty=0,
            replaced=0,
            special=0,
            characters=train.characters + heldout.characters,
            train_bytes=train.bytes,
            heldout_bytes=heldout.bytes,
            train_tokens=train.tokens,
            heldout_tokens=heldout.tokens,
        )
        meta = {
            "format": FORMAT,
            "digest": _digest(folder),
            "dtype": dtype.str,
            "vocab": token_range(tokenizer),
            "end_of_text": end_of_text(tokenizer),
            "stats": asdict(stats),
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=2))

    def _training_text(self, share: float) -> Iterator[str]:
        # (held-out text must not shape the vocabulary either)
        for paragraph in self._corpus.paragraphs():
            self._progress(share * self._corpus.fraction)
            if not is_heldout(paragraph.text, self._share):
                yield paragraph.text


class _Side:
    """Writer of one .bin file: paragraphs of a document are encoded together, end-of-text follows the last."""

    def __init__(self, path: Path, tokenizer: tokenizers.Tokenizer, dtype: np.dtype[Any]) -> None:
        self.paragraphs = self.documents = self.characters = self.bytes = self.tokens = 0
        self._file = path.open("wb")
        self._tokenizer = tokenizer
        self._end = end_of_text(tokenizer)
        self._dtype = dtype
        self._document: int | None = None
        self._piece: list[str] = []
        self._piece_size = 0
        self._pieces: list[tuple[str, bool]] = []  # text, whether it ends a document
        self._pieces_size = 0

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._file:
            if kind is None:
                self._close_piece(ends=True)
                self._flush()

    def add(self, document: int, text: str) -> None:
        """Append a paragraph; documents come in order."""
        if document != self._document:
            self._close_piece(ends=True)
            self.documents += 1
        elif self._piece_size + len(text) > _PIECE:
            self._close_piece(ends=False)
        self._document = document
        self._piece.append(text)
        self._piece_size += len(text)
        self.paragraphs += 1
        self.characters += len(text)
        self.bytes += len(text.encode())

    def _close_piece(self, *, ends: bool) -> None:
        if not self._piece:
            return
        self._pieces.append(("".join(self._piece), ends))
        self._pieces_size += self._piece_size
        self._piece, self._piece_size = [], 0
        if self._pieces_size >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        texts = [text for text, _ in self._pieces]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for (_, ends), encoding in zip(self._pieces, encodings, strict=True):
            ids = encoding.ids
            if ends and self._end is not None:
                ids.append(self._end)
            self._file.write(np.asarray(ids, dtype=self._dtype).tobytes())
            self.tokens += len(ids)
        self._pieces, self._pieces_size = [], 0


def _build(builder: _Builder, tokenizer: tokenizers.Tokenizer | None, vocab: int, folder: Path) -> TokenCache:
    for _ in range(_ATTEMPTS):
        work = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
        try:
            builder.write(work, tokenizer, vocab)
            _publish(work, folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        if (cache := TokenCache.open(folder)) is not None:
            return cache
        # (another process, still looking at the damaged cache that stood here, may have removed this one in its place)
    raise DataError(
        f"data.cache: {folder} does not keep what is written to it; check the disk, or set data.cache to another folder"
    )


def _publish(work: Path, folder: Path) -> None:
    """Rename ``work`` to ``folder``, unless another process was first; a damaged cache there is moved away."""
    for _ in range(_ATTEMPTS):
        try:
            os.replace(work, folder)
            return
        except OSError:
            if not folder.exists():
                raise
        if TokenCache.open(folder) is not None:
            return
        _remove(folder)


def _remove(folder: Path) -> None:
    # Renamed before it is deleted, so that nobody meets a half-deleted cache under its own name.
    grave = Path(tempfile.mkdtemp(prefix=".damaged-", dir=folder.parent))
    try:
        os.replace(folder, grave / "cache")
    except FileNotFoundError:
        pass
    finally:
        shutil.rmtree(grave, ignore_errors=True)


def _check_sides(train: _Side, heldout: _Side, share: float, path: str) -> None:
    total = train.paragraphs + heldout.paragraphs
    if not total:
        raise DataError(
            f"data.path: the corpus '{path}' has no text; check the files, and data.field for .jsonl and .parquet"
        )
    if not heldout.tokens or not train.tokens:
        side, change = ("held out", "raise") if not heldout.tokens else ("left for training", "lower")
        raise DataError(
            f"data.heldout: none of {total} paragraphs is {side} at a share of {share}; {change} it, or add text "
            "(blank lines separate paragraphs)"
        )


def _key(config: DataConfig, corpus: Corpus, tokenizer: tokenizers.Tokenizer | None, vocab: int) -> str:
    if tokenizer is None:
        made_with = f"train {vocab} by tokenizers {tokenizers.__version__}"
    else:
        made_with = hashlib.sha256(tokenizer_json(tokenizer)).hexdigest()
    parts = [FORMAT, corpus.digest(), config.field, repr(config.heldout), made_with]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def digest_of(parts: Sequence[bytes]) -> bytes:
    """``TokenCache.digest`` of the SHA-256 of ``train.bin``, ``heldout.bin`` and ``tokenizer.json``."""
    return hashlib.sha256(b"".join(parts)).digest()


def _digest(folder: Path) -> str:
    parts = []
    for name in ("train.bin", "heldout.bin", "tokenizer.json"):
        with (folder / name).open("rb") as file:
            parts.append(hashlib.file_digest(file, "sha256").digest())
    return digest_of(parts).hex()


def _no_progress(_share: float) -> None:
    return None
