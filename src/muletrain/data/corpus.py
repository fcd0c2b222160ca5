"""From ``data.path`` to unique paragraphs: text, .jsonl, .parquet, Hugging Face datasets, Python's own manual.

A paragraph is the unit of de-duplication and of the hold-out. It runs to the next blank line, keeps its line ends and
closes with one empty line, so that paragraphs joined together read as the text they came from. Everything streams: a
corpus may be larger than memory (16 bytes of hash, about 100 with Python's set, stay behind per unique paragraph).
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from muletrain.data.lines import file_lines, reading, whole_lines
from muletrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from muletrain.config.model_sections import DataConfig

# Text without blank lines is cut at the first line end beyond this, so that it can be held out in parts and memory
# stays bounded.
PARAGRAPH_LIMIT = 4096  # [characters]

_PARQUET_ROWS = 1024  # rows decoded at once; bounds memory inside a row group
_GLOB_CHARACTERS = frozenset("*?[")


class Paragraph(NamedTuple):
    """``document`` counts the texts read so far (a file, a row, a topic); neighbours of one number belong together."""

    document: int
    text: str


class Source(Protocol):
    """One file, dataset or built-in text."""

    size: int  # [bytes], for progress only; 0: unknown

    def fingerprint(self) -> str:
        """Changes when the text does."""
        ...

    def documents(self) -> Iterator[Iterable[str]]:
        """Documents as lines that keep their line ends."""
        ...


class Corpus:
    """The unique paragraphs of ``data.path``, in order.

    Raises DataError when nothing matches, or (while reading) when something cannot be read as text.
    """

    def __init__(self, config: DataConfig) -> None:
        self.path = config.path
        self.sources = _resolve(config)
        self.fraction = 0.0  # of the current pass over the text, for progress
        self.duplicates = 0  # paragraphs dropped in the current pass

    def digest(self) -> str:
        """Hex SHA-256 of the sources' contents in order; file names do not enter."""
        whole = hashlib.sha256()
        for source in self.sources:
            whole.update(f"{type(source).__name__}:{source.fingerprint()}\n".encode())
        return whole.hexdigest()

    def paragraphs(self) -> Iterator[Paragraph]:
        """One pass. A paragraph that equals an earlier one up to white space is dropped."""
        seen: set[bytes] = set()
        self.duplicates, self.fraction = 0, 0.0
        for paragraph in self._all():
            digest = _hash(paragraph.text)
            if digest in seen:
                self.duplicates += 1
                continue
            seen.add(digest)
            yield paragraph
        self.fraction = 1.0

    def _all(self) -> Iterator[Paragraph]:
        document = 0
        total = sum(source.size for source in self.sources) or 1
        before = 0
        for source in self.sources:
            inside = 0
            for lines in source.documents():
                for text in split_paragraphs(lines):
                    # Characters stand in for bytes: near enough for a progress bar, and never beyond the source's
                    # share.
                    inside += len(text)
                    self.fraction = (before + min(inside, source.size)) / total
                    yield Paragraph(document, text)
                document += 1
            before += source.size


def is_heldout(text: str, share: float) -> bool:
    """Whether a paragraph is for validation: its hash decides, so that adding files moves no text between the sides."""
    return int.from_bytes(_hash(text)[:8], "big") < share * 2**64


def split_paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Paragraphs of one document; blank lines separate; beyond ``PARAGRAPH_LIMIT`` it is cut at a line end."""
    held: list[str] = []
    size = 0
    for line in lines:
        if not line.strip():
            if held:
                yield _closed(held)
            held, size = [], 0
            continue
        if size >= PARAGRAPH_LIMIT:
            yield "".join(held)
            held, size = [], 0
        held.append(line)
        size += len(line)
    if held:
        yield _closed(held)


def _closed(lines: list[str]) -> str:
    return "".join(lines).rstrip() + "\n\n"


def _hash(text: str) -> bytes:
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()


class PydocSource:
    """The documentation that ships with Python; it differs a little between Python versions, and so does its digest."""

    def __init__(self) -> None:
        from pydoc_data.topics import topics  # half a megabyte that only this source needs

        self._topics: dict[str, str] = topics
        self.size = sum(map(len, self._topics.values()))

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self._topics, sort_keys=True).encode()).hexdigest()

    def documents(self) -> Iterator[Iterable[str]]:
        for name in sorted(self._topics):
            yield _lines(self._topics[name])


class _FileSource:
    def __init__(self, path: Path, field: str) -> None:
        self.path = path
        self.field = field
        self.size = path.stat().st_size

    def fingerprint(self) -> str:
        with reading(self.path), self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class TextFile(_FileSource):
    """UTF-8 text (or .gz of it): one document."""

    def documents(self) -> Iterator[Iterable[str]]:
        yield file_lines(self.path, PARAGRAPH_LIMIT)


class JsonlFile(_FileSource):
    """One JSON object per line (or .gz of it); ``field`` of each is a document."""

    def documents(self) -> Iterator[Iterable[str]]:
        for number, line in enumerate(whole_lines(self.path), start=1):
            if line.strip():
                yield _lines(_field(_json_row(line, f"{self.path}:{number}"), self.field, f"{self.path}:{number}"))


class ParquetFile(_FileSource):
    """Column ``field`` of a Parquet file, read row group by row group; each value is a document."""

    def documents(self) -> Iterator[Iterable[str]]:
        import pyarrow.parquet as parquet  # slow to import

        number = 0
        with reading(self.path), parquet.ParquetFile(self.path) as file:
            names = [str(name) for name in file.schema_arrow.names]
            if self.field not in names:
                raise _no_field(self.field, str(self.path), names)
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[self.field]):
                for value in batch.column(0).to_pylist():
                    yield _lines(_field({self.field: value}, self.field, f"{self.path}: row {number}"))
                    number += 1


_KINDS: dict[str, type[JsonlFile | ParquetFile]] = {".jsonl": JsonlFile, ".parquet": ParquetFile}


class HubDataset:
    """``hf:NAME[@REVISION][:CONFIG]``: the train split, streamed. NAME may be a local folder, known by its files;
    another is known by its name alone: pin a revision to be sure."""

    size = 0

    def __init__(self, name: str, field: str) -> None:
        self.name = name
        self.field = field

    def fingerprint(self) -> str:
        folder = Path(self.name.partition(":")[0].partition("@")[0])
        known = [self.name]
        for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
            if path.is_file():
                with reading(path), path.open("rb") as file:
                    known.append(f"{path.relative_to(folder)} {hashlib.file_digest(file, 'sha256').hexdigest()}")
        return "\n".join(known)

    def documents(self) -> Iterator[Iterable[str]]:
        for number, row in enumerate(self._rows()):
            yield _lines(_field(row, self.field, f"hf:{self.name}: row {number}"))

    def _rows(self) -> Iterator[dict[str, object]]:
        try:
            import datasets  # optional dependency
        except ImportError as error:
            raise DataError(
                f"data.path: 'hf:{self.name}' needs the package datasets; install it with "
                '`pip install "muletrain[datasets]"`'
            ) from error
        name, _, config = self.name.partition(":")
        name, _, revision = name.partition("@")
        try:
            yield from datasets.load_dataset(
                name, config or None, split="train", streaming=True, revision=revision or None
            )
        except Exception as error:  # datasets raises many kinds: of its own, of fsspec, of HTTP
            raise DataError(
                f"data.path: cannot read Hugging Face dataset '{name}': {error}; check the name, the configuration "
                "(hf:NAME:CONFIG) and the connection"
            ) from error


def absolute(path: str) -> str:
    """``data.path`` so that it means the same in any working directory."""
    return ", ".join(
        item if item == "pydoc" or item.startswith("hf:") else os.path.abspath(os.path.expanduser(item))
        for item in _items(path)
    )


def _items(path: str) -> list[str]:
    return [item for part in path.split(",") if (item := part.strip())]


def _resolve(config: DataConfig) -> list[Source]:
    sources: list[Source] = []
    taken: set[Path] = set()
    for item in _items(config.path):
        if item == "pydoc":
            sources.append(PydocSource())
        elif item.startswith("hf:"):
            sources.append(HubDataset(item.removeprefix("hf:"), config.field))
        else:
            new = [path for path in _files(item) if path.resolve() not in taken]
            taken.update(path.resolve() for path in new)
            sources.extend(_open(path, config.field) for path in new)
    if not sources:
        raise DataError("data.path: empty; give files or globs, 'hf:NAME', or 'pydoc'")
    return sources


def _open(path: Path, field: str) -> Source:
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    try:
        return _KINDS.get(suffix, TextFile)(path, field)
    except OSError as error:
        raise DataError(f"data.path: cannot read {path}: {error.strerror}") from error


def _files(item: str) -> list[Path]:
    pattern = os.path.expanduser(item)
    if os.path.isdir(pattern):
        raise DataError(f"data.path: {item} is a folder; name its files by a glob, e.g. '{_suggest_glob(Path(item))}'")
    if os.path.isfile(pattern):  # before globbing: a file's name may contain brackets
        return [Path(pattern)]
    found = sorted(Path(name) for name in glob.glob(pattern, recursive=True) if os.path.isfile(name))
    if not found:
        what = "no file matches" if _GLOB_CHARACTERS & set(item) else "no such file:"
        where = "" if os.path.isabs(pattern) else f" (relative to {Path.cwd()})"
        raise DataError(
            f"data.path: {what} '{item}'{where}; check the path, or use 'hf:NAME' for a Hugging Face dataset"
        )
    return found


def _suggest_glob(folder: Path) -> str:
    suffixes = Counter(
        path.suffix for path in Path(os.path.expanduser(folder)).iterdir() if path.is_file() and path.suffix
    )
    if suffixes:
        return str(folder / f"*{suffixes.most_common(1)[0][0]}")
    return str(folder / "**" / "*.txt")


def _lines(text: str) -> Iterable[str]:
    # (JSON may spell half a surrogate pair, which no UTF-8 can hold: it becomes the replacement character)
    clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return io.StringIO(clean, newline=None)


def _json_row(line: str, where: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # (ten thousand brackets)
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"data.path: {where}: not JSON: {reason}; a .jsonl file has one object per line") from error
    if not isinstance(row, dict):
        raise DataError(
            f"data.path: {where}: a JSON {type(row).__name__}, not an object; a .jsonl file has one object per line"
        )
    return row


def _field(row: dict[str, object], field: str, where: str) -> str:
    if field not in row:
        raise _no_field(field, where, list(row))
    value = row[field]
    if value is None:  # an empty cell is an empty document
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"data.path: {where}: '{field}' is {type(value).__name__}, not text; set data.field to a column of text"
        )
    return value


def _no_field(field: str, where: str, available: list[str]) -> DataError:
    return DataError(f"data.path: {where}: no '{field}'; set data.field to one of: {', '.join(available) or '(none)'}")
