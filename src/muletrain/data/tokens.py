"""The token cache: a corpus tokenised once, memory-mapped ever after.

A cache is a folder ``<data.cache>/tokens/<key>`` with ``train.bin``, ``heldout.bin`` (little-endian uint16, or uint32
for larger vocabularies), ``tokenizer.json`` and ``meta.json``. The key follows from the sources' contents, the
tokenizer and every option that changes tokens. A folder is built under another name and renamed when complete, so a cache that exists is
whole, however many processes build.

Conversations are uint32 in rows of ``model.context`` tokens, with padding, and one more token at the end; a token that
does not count as a target is marked ``SILENT``. In a row of several, the first token of each but the first, and of the
padding, is marked ``BEGINS``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from muletrain.config.cache import cache_folder
from muletrain.data.chat import CHATML_TOKENS, Template, chat_template, columns_of, packed, tokens_of
from muletrain.data.corpus import Corpus
from muletrain.data.encoder import Documents, Encoder, windows
from muletrain.data.microbatch import BEGINS, SILENT
from muletrain.data.split import Split, rule_for
from muletrain.data.tokenizer import load_tokenizer, tokenizer_json, train_tokenizer
from muletrain.errors import DataError
from muletrain.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from muletrain.config.model_sections import DataConfig
    from muletrain.data.encoder import Window
    from muletrain.data.split import Part

    Progress = Callable[[float], None]

FORMAT = 6  # goes up when the same text would give other tokens or files

_PIECE = 1 << 14  # characters from which a tokenizer learns at once
_BATCH = 1 << 21  # characters encoded at once; bounds memory to some hundred MB
_ATTEMPTS = 5  # to publish; a failure means that another process interfered, and none does so twice
_ROLES = 8  # of conversations that an error names
_TRAIN_SHARE = 0.3  # of the progress bar goes to training a tokenizer


@dataclass(frozen=True)
class TokenStats:
    """Statistics of a cache. ``heldout_bytes / heldout_tokens`` turns nats per token into bits per byte. No text is
    truncated: a long one fills several sequences. A conversation fills one at most."""

    documents: int
    """Documents that are trained, some without the end."""
    heldout_documents: int
    """Documents that are held out whole: of the corpus, or all of ``data.validation``."""
    ends: int
    """Long documents with the end held out, also counted in ``documents``."""
    duplicates: int
    """Documents left out because an earlier one is equal (``data.deduplicate``)."""
    empty: int
    """Documents left out for lack of text."""
    both: int
    """Documents that are trained, and in ``data.validation``, too."""
    replaced: int
    """Half surrogate pairs in the text, which no UTF-8 can hold: each became U+FFFD."""
    special: int
    """Special tokens that the text spells, and that are trained as such (``data.special_tokens``)."""
    unknown: int
    """Tokens that stand for text that the tokenizer does not know: that text is lost."""
    characters: int
    """Characters of both sides."""
    train_bytes: int
    """Bytes of the training text in UTF-8."""
    heldout_bytes: int
    """Bytes of the held-out text in UTF-8."""
    train_tokens: int
    """Tokens to train on, including the tokens that begin and end documents."""
    heldout_tokens: int
    """Held-out tokens. 0: nothing is held out (``data.heldout = 0``)."""
    counted: int
    """Training tokens that count towards the loss: of text all but the first."""
    heldout_counted: int
    """Held-out tokens that count."""
    padding: int
    """Tokens of both sides that fill rows of conversations."""
    truncated: int
    """Conversations longer than a sequence."""
    cut: int
    """Tokens that were cut off these."""
    silent: int
    """Conversations left out because no token of theirs counts."""

    def changes(self) -> list[str]:
        """Omissions and changes in the user's text, one line each, with the count."""
        lines = [
            (self.truncated, f"{{}} cut to model.context, which loses {plural(self.cut, 'token')}", "conversation"),
            (self.silent, "{} left out in which nothing counts (data.loss_on)", "conversation"),
            (self.empty, "{} without text left out", "document"),
            (self.duplicates, "{} left out that equal an earlier one (data.deduplicate)", "document"),
            (self.both, "{} to train on, also in data.validation: the held-out loss is too low", "document"),
            (self.replaced, "{} replaced: half a surrogate pair is no text", "character"),
            (self.unknown, "{} of text that the tokenizer does not know: it is lost", "token"),
            (self.special, "{} in the text count as such (data.special_tokens)", "special token"),
        ]
        return [line.format(plural(count, noun)) for count, line, noun in lines if count]


@dataclass(frozen=True)
class TokenCache:
    """Tokens of both sides, and the tokenizer.

    ``train`` and ``heldout`` are read-only maps of token ids; position is the index. ``digest`` identifies tokens and
    tokenizer (hex SHA-256): two peers of one digest build the same microbatches.
    """

    folder: Path
    train: npt.NDArray[Any]
    heldout: npt.NDArray[Any]
    tokenizer_json: bytes
    digest: str
    stats: TokenStats
    row: int = 1
    """Tokens of a row of conversations (``model.context``); 1: plain text."""

    @classmethod
    def build(
        cls,
        config: DataConfig,
        vocab: int,
        progress: Progress | None = None,
        *,
        measured: bool = False,
        context: int = 0,
    ) -> TokenCache:
        """The cache for ``config``: opened if intact, else made. ``vocab``: of the model. ``progress`` gets the share done,
        0 to 1. ``measured``: all text is held out, to measure a model on it. ``context``: tokens of a sequence, for
        conversations.

        Raises DataError when the corpus or the tokenizer cannot be used, when a side is empty that should not be, or the
        folder cannot be written.
        """
        builder = _Builder(config, vocab, progress or _no_progress, measured=measured, context=context)
        parent = cache_folder(config) / "tokens"
        folder = parent / builder.key()
        found = cls.open(folder)
        if found is None:
            try:
                parent.mkdir(parents=True, exist_ok=True)
                found = _build(builder, folder)
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
            train = _tokens(folder / "train.bin", dtype, stats.train_tokens)
            heldout = _tokens(folder / "heldout.bin", dtype, stats.heldout_tokens)
            tokenizer = (folder / "tokenizer.json").read_bytes()
            return cls(folder, train, heldout, tokenizer, meta["digest"], stats, int(meta["row"]))
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
        return Encoder(self.tokenizer_json).decode(tokens)


class _Builder:
    """One build: trains a tokenizer if need be, then writes both sides in a single pass."""

    def __init__(self, config: DataConfig, vocab: int, progress: Progress, *, measured: bool, context: int) -> None:
        self._config, self._vocab, self._progress = config, vocab, progress
        columns = columns_of(config)
        self._corpus = Corpus(config.path, columns)
        self._chat = config.counts
        self._row = context if self._chat else 1
        self._template = chat_template(config) if self._chat else ""
        self._validation = None
        if config.validation is not None and not measured:
            try:
                self._validation = Corpus(config.validation, columns)
            except DataError as error:
                raise DataError(str(error).replace("data.path", "data.validation", 1)) from error
        self._share = 1.0 if measured else 0.0 if config.validation is not None else config.heldout
        self._unique = config.deduplicate == "documents"
        self._tokenizer = None
        if config.tokenizer != "train":
            self._tokenizer = load_tokenizer(config.tokenizer, vocab, config.end_token)

    def key(self) -> str:
        """The cache's name."""
        made_with = f"train by tokenizers {tokenizers.__version__}"
        if self._tokenizer is not None:
            made_with = hashlib.sha256(self._tokenizer).hexdigest()
        c = self._config
        text = [self._corpus.digest(), self._validation and self._validation.digest(), c.field]
        parts = [FORMAT, *text, repr(self._share), c.deduplicate, c.special_tokens, self._vocab, made_with]
        if self._chat:
            parts += [c.format, self._template, c.loss_on, c.pack and "marked", self._row]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def write(self, folder: Path) -> None:
        """Fill ``folder``, which exists and is empty."""
        rule = rule_for(self._corpus, self._share, unique=self._unique)
        if self._chat:
            rule = rule._replace(longest_row=math.inf)
        split = Split(self._corpus, self._validation, rule, unique=self._unique)
        train, heldout = self._encoded(folder, split)
        self._check(split, train, heldout)
        stats = TokenStats(
            documents=split.trained - train.silent,
            heldout_documents=split.heldout - heldout.silent,
            ends=split.ends,
            duplicates=split.duplicates,
            empty=split.empty,
            both=split.both,
            replaced=split.replaced,
            special=train.special + heldout.special,
            unknown=train.unknown + heldout.unknown,
            characters=train.characters + heldout.characters,
            train_bytes=train.bytes,
            heldout_bytes=heldout.bytes,
            train_tokens=train.tokens,
            heldout_tokens=heldout.tokens,
            counted=train.counted,
            heldout_counted=heldout.counted,
            padding=train.padding + heldout.padding,
            truncated=train.truncated + heldout.truncated,
            cut=train.cut + heldout.cut,
            silent=train.silent + heldout.silent,
        )
        meta = {"format": FORMAT, "digest": _digest(folder), "dtype": train.dtype.str, "stats": asdict(stats)}
        meta["row"] = self._row
        (folder / "meta.json").write_text(json.dumps(meta, indent=2))

    def _encoded(self, folder: Path, split: Split) -> tuple[_Side, _Side]:
        """Write the tokenizer and the tokens of both sides."""
        own, done = self._tokenizer, 0.0
        if own is None:
            special = [token for token in CHATML_TOKENS if token in self._template]
            own = tokenizer_json(train_tokenizer(self._training_text(split), self._vocab, special))
            done = _TRAIN_SHARE
        (folder / "tokenizer.json").write_bytes(own)
        encoder = Encoder(own, self._config.special_tokens)
        files = folder / "train.bin", folder / "heldout.bin"
        with self._side(files[0], encoder) as train, self._side(files[1], encoder) as heldout:
            for part in split.parts():
                (heldout if part.heldout else train).add(part, self._counted(part.pieces, done, 1 - done))
        return train, heldout

    def _side(self, path: Path, encoder: Encoder) -> _Side:
        if not self._chat:
            return _Side(path, encoder, self._vocab)
        template = Template(self._template, self._config.loss_on)
        return _Conversations(path, encoder, self._vocab, template, self._row, pack=self._config.pack)

    def _training_text(self, split: Split) -> Iterator[str]:
        """Text in chunks; held-out text must not shape the vocabulary either."""
        template = Template(self._template, "all") if self._chat else None
        for part in split.parts():
            held, size = list[str](), 0
            pieces: Iterable[str] = () if part.heldout else self._counted(part.pieces, 0.0, _TRAIN_SHARE)
            if template is not None and not part.heldout:
                pieces = (template.rendered(json.loads("".join(pieces)), part.place).text,)
            for piece in pieces:
                held.append(piece)
                size += len(piece)
                if size >= _PIECE:
                    yield "".join(held)
                    held, size = [], 0
            yield "".join(held)

    def _counted(self, pieces: Iterable[str], done: float, share: float) -> Iterator[str]:
        for piece in pieces:
            yield piece
            self._progress(done + share * self._corpus.passed(len(piece)))

    def _check(self, split: Split, train: _Side, heldout: _Side) -> None:
        documents = split.trained + split.heldout
        if not documents:
            raise DataError(
                f"data.path: the corpus '{self._corpus.path}' has no text; check the files, and data.field for rows"
            )
        if self._chat and not train.counted and self._share < 1:
            raise DataError(
                f"data.path: in none of {plural(documents, 'conversation')} anything counts towards the loss (data.loss_on = "
                f"'{self._config.loss_on}'; {train.truncated} are longer than model.context = {self._row}; roles: "
                f"{', '.join(sorted(train.roles | heldout.roles)) or 'none'}); give some in which the role 'assistant' speaks"
                f"{', or raise model.context' if train.truncated else ''}"
            )
        if self._validation is not None and not heldout.characters:
            raise DataError(f"data.validation: '{self._validation.path}' has no text; check the files, or leave it out")
        if not train.characters and self._share < 1:
            raise DataError(f"data.path: '{self._corpus.path}' has too little text to train on; add some")
        if not heldout.characters and self._share:
            silent = f" (nothing counts in {plural(heldout.silent, 'conversation')})" if heldout.silent else ""
            raise DataError(
                f"data.heldout: {documents} documents give nothing to hold out at a share of {self._share}{silent}; raise it, add "
                f"text, give data.validation, or set it to 0"
            )


class _Side:
    """Writer of one .bin file: the tokens of one document after the other. Counts text and tokens."""

    def __init__(self, path: Path, encoder: Encoder, vocab: int) -> None:
        self.characters = self.bytes = self.tokens = self.special = self.unknown = 0
        self.padding = self.truncated = self.cut = self.silent = 0
        self.roles: set[str] = set()
        """Some of the roles in conversations."""
        self.dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
        self._file = path.open("wb")
        self._encoder, self._documents, self._vocab = encoder, Documents(encoder), vocab
        self._windows: list[tuple[Window, str]] = []
        self._size = 0

    @property
    def counted(self) -> int:
        """Tokens that count towards the loss."""
        return max(0, self.tokens - 1)

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._file:
            if kind is None:
                self._flush()

    def add(self, part: Part, pieces: Iterable[str]) -> None:
        """Append a document."""
        for window in windows(self._measured(pieces)):
            self._windows.append((window, part.place))
            self._size += len(window.text)
            if self._size >= _BATCH:
                self._flush()

    def _measured(self, pieces: Iterable[str]) -> Iterator[str]:
        for piece in pieces:
            self.characters += len(piece)
            self.bytes += len(piece.encode())
            yield piece

    def _flush(self) -> None:
        ids = self._documents.tokens([window for window, _ in self._windows])
        for (window, place), found in zip(self._windows, ids, strict=True):
            wide = np.asarray(found, dtype=np.int64)
            own = len(self._encoder.begin) * window.first + len(self._encoder.end) * window.last
            self.special += int(np.isin(wide, self._encoder.special).sum()) - own
            self.unknown += int((wide == self._encoder.unknown).sum())
            self._check(wide, place)
            self._file.write(wide.astype(self.dtype).tobytes())
            self.tokens += len(found)
        self._windows, self._size = [], 0

    def _check(self, wide: npt.NDArray[np.int64], place: str) -> None:
        """Raises DataError for tokens that the model does not have."""
        if len(wide) and wide.max() >= self._vocab:
            raise DataError(
                f"data.path: {place}: the text has the token '{self._encoder.tokenizer.id_to_token(int(wide.max()))}' "
                f'({wide.max()}), and the model only {self._vocab}; set data.special_tokens = "text", or '
                f"take a tokenizer that fits (a model with random weights can have another model.vocab)"
            )


class _Conversations(_Side):
    """Writer of a file of rows: conversations that fit together, and padding."""

    def __init__(self, path: Path, encoder: Encoder, vocab: int, template: Template, row: int, *, pack: bool) -> None:
        super().__init__(path, encoder, vocab)
        self.dtype = np.dtype("<u4")
        self._template, self._row, self._pack = template, row, pack
        self._lengths: list[int] = []
        self._kept = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 # closed by __exit__
        self._counted = 0

    @property
    def counted(self) -> int:
        return self._counted

    def add(self, part: Part, pieces: Iterable[str]) -> None:
        chat = json.loads("".join(pieces))
        if len(self.roles) < _ROLES:
            self.roles |= {message["role"] for message in chat["messages"]}
        rendered = self._template.rendered(chat, part.place)
        marked = tokens_of(self._encoder, rendered)
        self.truncated += len(marked) > self._row
        self.cut += max(0, len(marked) - self._row)
        marked = marked[: self._row]
        counts = marked < SILENT
        if not counts.any():
            self.silent += 1
            return
        wide = marked.astype(np.int64) & (SILENT - 1)
        self._check(wide, part.place)
        self.unknown += int((wide == self._encoder.unknown).sum())
        self.characters += len(rendered.text)
        self.bytes += sum(len(rendered.text[begin:end].encode()) for begin, end in rendered.counted)
        self._counted += int(counts.sum())
        self._lengths.append(len(marked))
        self._kept.write(marked.tobytes())

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._kept:
            super().__exit__(kind, *rest)

    def _flush(self) -> None:
        self._kept.flush()
        if self._lengths:
            self._pack_rows(np.memmap(self._kept, np.uint32, "r"))

    def _pack_rows(self, kept: npt.NDArray[np.uint32]) -> None:
        count = len(self._lengths)
        rows = np.asarray(packed(self._lengths, self._row) if self._pack else range(count))
        ends = np.cumsum(self._lengths)
        order = np.argsort(rows, kind="stable")
        for held in np.split(order, np.flatnonzero(np.diff(rows[order])) + 1):
            row = np.full(self._row, SILENT, dtype=self.dtype)
            used = np.concatenate([kept[ends[k] - self._lengths[k] : ends[k]] for k in held])
            row[: len(used)] = used
            if self._pack:
                inner = np.cumsum([self._lengths[k] for k in held])
                row[inner[inner < self._row]] |= BEGINS
            self._file.write(row.tobytes())
            self.padding += self._row - len(used)
            self.tokens += self._row
        self._file.write(np.full(1, SILENT, dtype=self.dtype).tobytes())
        self.tokens += 1


def _build(builder: _Builder, folder: Path) -> TokenCache:
    for _ in range(_ATTEMPTS):
        work = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
        try:
            builder.write(work)
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
    # Renamed before deletion, so that nobody meets a half-deleted cache under the final name.
    grave = Path(tempfile.mkdtemp(prefix=".damaged-", dir=folder.parent))
    try:
        os.replace(folder, grave / "cache")
    except FileNotFoundError:
        pass
    finally:
        shutil.rmtree(grave, ignore_errors=True)


def digest_of(parts: Sequence[bytes]) -> bytes:
    """``TokenCache.digest`` of the SHA-256 of ``train.bin``, ``heldout.bin`` and ``tokenizer.json``."""
    return hashlib.sha256(b"".join(parts)).digest()


def _digest(folder: Path) -> str:
    parts = []
    for name in ("train.bin", "heldout.bin", "tokenizer.json"):
        with (folder / name).open("rb") as file:
            parts.append(hashlib.file_digest(file, "sha256").digest())
    return digest_of(parts).hex()


def _tokens(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype)


def _no_progress(_share: float) -> None:
    return None
