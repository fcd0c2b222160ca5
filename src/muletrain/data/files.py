"""Documents of one file: text is one document, and a row of .jsonl, .json, .csv, .tsv or .parquet is one.

A document is text for training without changes. Rows stream, so a file may be larger than memory; a row may not.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import json
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

from muletrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_FORMATS = (
    ({".pdf"}, b"%PDF", "a PDF: convert it, e.g. with `pdftotext`"),
    (
        {".docx", ".doc", ".odt", ".rtf", ".epub", ".pptx"},
        b"\xd0\xcf\x11\xe0",
        "a document of an office program: convert it, e.g. with `pandoc -t plain`",
    ),
    ({".xlsx", ".xls", ".ods"}, None, "a spreadsheet: save it as .csv"),
    ({".ipynb"}, None, "a notebook: convert it, e.g. with `jupyter nbconvert --to markdown`"),
    ({".zip", ".tar", ".tgz", ".7z", ".rar"}, b"PK\x03\x04", "an archive: unpack it, and name its files"),
    ({".bz2"}, b"BZh", "compressed: unpack it, or compress it with gzip"),
    ({".xz"}, b"\xfd7zXZ", "compressed: unpack it, or compress it with gzip"),
    ({".zst"}, b"\x28\xb5\x2f\xfd", "compressed: unpack it, or compress it with gzip"),
    (set[str](), b"\x1f\x8b", "compressed with gzip: let its name end in .gz"),
    (set[str](), b"\xff\xfe", "UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`"),
    (set[str](), b"\xfe\xff", "UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`"),
    ({".arrow", ".feather"}, b"ARROW1", "an Arrow file: save its table as .parquet"),
    (set[str](), b"PAR1", "a Parquet file: let its name end in .parquet"),
    (set[str](), b"version https://git-lfs", "a pointer of git-lfs, not the file itself: call `git lfs pull`"),
)
"""Suffixes, first bytes, and the advice for such a file."""
_HEAD = 4096
"""Bytes in which a file with a NUL is no text."""


def check_text(path: Path) -> None:
    """Raises DataError for a file of a format that holds no plain text."""
    with reading(path), _binary(path) as file:
        head = file.read(_HEAD)
    suffix = path.suffix.lower()
    for suffixes, first, advice in _FORMATS:
        if suffix in suffixes or (first is not None and head.startswith(first)):
            raise DataError(f"data.path: {path} is {advice}, or leave it out of the glob")
    if b"\0" in head:
        raise DataError(
            f"data.path: {path} is binary, not text; give text, .jsonl, .json, .csv, .tsv or .parquet, or leave it out of "
            f"the glob"
        )


def file_lines(path: Path, limit: int) -> Iterator[str]:
    """Lines with line ends, in pieces if longer than ``limit`` bytes. Raises DataError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    number = 1
    with reading(path), _binary(path) as file:
        while True:
            raw = file.readline(limit)
            try:
                text = decoder.decode(_unmarked(raw) if number == 1 else raw, final=not raw)
            except UnicodeDecodeError as error:
                raise _undecodable(path, number, error) from error
            if not raw:
                return
            yield text
            number += raw.endswith(b"\n")


def whole_lines(path: Path) -> Iterator[str]:
    """Whole lines with line ends. Raises DataError."""
    with reading(path), _binary(path) as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield (_unmarked(raw) if number == 1 else raw).decode()
            except UnicodeDecodeError as error:
                raise _undecodable(path, number, error) from error


class reading:
    """Turns errors of a damaged or vanished file into a DataError with the file's name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # (pyarrow's errors are ValueErrors or OSErrors; gzip raises EOFError for a truncated file)
        if isinstance(error, PermissionError):
            raise DataError(f"data.path: {self._path}: {error.strerror}; make it readable for you") from error
        if isinstance(error, OSError | EOFError | ValueError | zlib.error) and not isinstance(error, UnicodeError):
            raise DataError(f"data.path: cannot read {self._path}: {error}; is the file complete?") from error


def _unmarked(raw: bytes) -> bytes:
    return raw.removeprefix(codecs.BOM_UTF8)


def _binary(path: Path) -> gzip.GzipFile | IO[bytes]:
    return gzip.GzipFile(path) if path.suffix == ".gz" else path.open("rb")


def _undecodable(path: Path, line: int, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"data.path: {path}:{line}: not UTF-8 text (byte 0x{error.object[error.start]:02x}); convert the file with "
        f"`iconv -t UTF-8`, or leave it out of the glob"
    )


LINE = 4096
"""Bytes of a line of text after which the line is cut into pieces; bounds memory."""
ROW = 1 << 26
"""Most characters of a row."""
_CHUNK = 1 << 16
"""Characters of a JSON list that are read at once."""
_DECODE = json.JSONDecoder().raw_decode
_PARQUET_ROWS = 1024
"""Rows decoded at once; bounds memory inside a row group."""
_CHAT = ("messages", "conversations", "conversation", "prompt", "completion", "instruction", "chosen", "rejected")
"""Columns of conversations, which are no plain text."""


class Document(NamedTuple):
    """A text. ``place``: file and line, for messages; ``pieces`` gives the text from the beginning at each call;
    ``replaced``: half surrogate pairs, which UTF-8 cannot hold, that became U+FFFD. ``row``: of a table or a data set."""

    place: str
    pieces: Callable[[], Iterable[str]]
    replaced: int = 0
    row: bool = False


class Columns(Protocol):
    """What the rows of a table or data set hold."""

    @property
    def whole(self) -> bool:
        """Is a document never cut?"""
        ...

    def chosen(self, names: Sequence[str], place: str) -> list[str]:
        """The columns to read of these. Raises DataError if the wanted ones are missing."""
        ...

    def document(self, row: dict[str, Any], place: str) -> Document:
        """The document of a row. Raises DataError."""
        ...


@dataclass(frozen=True)
class TextColumn:
    """Rows that are plain text, in column ``name``."""

    name: str
    whole = False

    def chosen(self, names: Sequence[str], place: str) -> list[str]:
        """See ``Columns``."""
        if self.name not in names:
            raise no_field(self.name, place, list(names))
        return [self.name]

    def document(self, row: dict[str, Any], place: str) -> Document:
        """See ``Columns``."""
        return row_document(row, self.name, place)


class EveryColumn:
    """Rows that nobody has looked at yet."""

    whole = False

    def chosen(self, names: Sequence[str], place: str) -> list[str]:
        """See ``Columns``."""
        return list(names)

    def document(self, row: dict[str, Any], place: str) -> Document:
        """See ``Columns``: no documents are read so."""
        raise NotImplementedError


class FileSource:
    """One file. ``documents`` raises DataError with the line that cannot be read."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self.path = path
        self.columns = columns
        self.size = path.stat().st_size
        """Bytes of the file."""

    def fingerprint(self) -> str:
        """Hex SHA-256 of the content."""
        with reading(self.path), self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def documents(self) -> Iterator[Document]:
        """The documents in order."""
        check_text(self.path)
        for place, row in self.rows():
            yield self.columns.document(row, place)

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Place and columns of each row; none in a text."""
        return iter(())


class TextFile(FileSource):
    """UTF-8 text (also .gz): one document."""

    def documents(self) -> Iterator[Document]:
        check_text(self.path)
        if self.columns.whole:
            raise DataError(
                f"data.path: {self.path} is text, and this run trains conversations; leave it out of the glob, or train it in a "
                f"run of its own, without data.format"
            )
        yield Document(str(self.path), partial(file_lines, self.path, LINE))


class JsonlFile(FileSource):
    """One JSON object per line (also .gz)."""

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, line in enumerate(whole_lines(self.path), start=1):
            if line.strip():
                place = f"{self.path}:{number}"
                yield place, _object(_parsed(line, place), place)


class JsonFile(JsonlFile):
    """A list of JSON objects, or one object per line (also .gz)."""

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        first = next((line for line in file_lines(self.path, ROW) if line.strip()), "")
        if first.lstrip().startswith("["):
            yield from _Listed(self.path).rows()
            return
        try:
            row = json.loads(first or "{}")
            lists = [name for name, value in row.items() if isinstance(value, list)] if isinstance(row, dict) else []
            wrapped = lists and lists[0] not in _CHAT and getattr(self.columns, "name", None) not in row
        except (ValueError, RecursionError):
            lists, wrapped = [], True  # an object of many lines
        if wrapped:
            rows = f".{lists[0]}[]" if lists else "."
            raise DataError(
                f"data.path: {self.path}: neither a list of JSON objects nor one object per line; write its rows as one of "
                f"these, e.g. by `jq -c '{rows}' {self.path.name} > rows.jsonl`"
            )
        yield from super().rows()


class CsvFile(FileSource):
    """Rows of .csv (commas) or .tsv (tabulators), also .gz. The first row has the names of the columns."""

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        comma = "\t" if ".tsv" in self.path.name.lower() else ","
        csv.field_size_limit(ROW)
        table, line = csv.reader(whole_lines(self.path), delimiter=comma, strict=True), 1
        names: list[str] | None = None
        while True:
            place = f"{self.path}:{line}"
            try:
                cells = next(table, None)
            except csv.Error as error:
                raise DataError(f"data.path: {place}: this row cannot be read: {error}; correct its quotes") from error
            line = table.line_num + 1
            if cells is None:
                return
            if names is None:
                names = [name.strip() for name in cells]
                for name in self.columns.chosen(names, place):
                    if names.count(name) > 1:
                        raise DataError(f"data.path: {place}: two columns are called '{name}'; rename one")
            elif len(cells) == len(names):
                yield place, dict(zip(names, cells, strict=True))
            elif cells:  # no blank line
                raise DataError(
                    f"data.path: {place}: a row of {len(cells)} cells below {len(names)} columns; put text with "
                    f"{'tabulators' if comma != ',' else 'commas'} in quotes"
                )


class ParquetFile(FileSource):
    """The wanted columns of a Parquet file, read row group by row group."""

    def documents(self) -> Iterator[Document]:
        for place, row in self.rows():
            yield self.columns.document(row, place)

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        import pyarrow.parquet as parquet  # slow to import

        number = 0
        with reading(self.path), parquet.ParquetFile(self.path) as file:
            names = [str(name) for name in file.schema_arrow.names]
            chosen = self.columns.chosen(names, str(self.path))
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=chosen):
                for row in batch.to_pylist():
                    yield f"{self.path}: row {number}", row
                    number += 1


_KINDS: dict[str, type[FileSource]] = {
    ".jsonl": JsonlFile,
    ".ndjson": JsonlFile,
    ".json": JsonFile,
    ".csv": CsvFile,
    ".tsv": CsvFile,
    ".parquet": ParquetFile,
}
"""Any further suffix is text."""


def open_file(path: Path, columns: Columns) -> FileSource:
    """The source of the documents in ``path``, by suffix. Raises DataError."""
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    try:
        return _KINDS.get(suffix, TextFile)(path, columns)
    except OSError as error:
        raise DataError(f"data.path: cannot read {path}: {error.strerror}") from error


def row_document(row: dict[str, Any], field: str, place: str) -> Document:
    """Column ``field`` of a row; an empty cell is an empty text. Raises DataError if not text."""
    if field not in row:
        raise no_field(field, place, list(row))
    text = "" if row[field] is None else row[field]
    if not isinstance(text, str):
        raise DataError(
            f"data.path: {place}: '{field}' is {type(text).__name__}, not text; set data.field to a column of text"
        )
    # JSON may spell half a surrogate pair; two halves make a character
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return Document(place, partial(once, whole), whole.count("\ufffd") - text.count("\ufffd"), row=True)


def no_field(field: str, place: str, available: list[str]) -> DataError:
    """The error for a row or table without column ``field``."""
    if chat := [name for name in available if name in _CHAT]:
        return DataError(
            f"data.path: {place}: no '{field}', but '{chat[0]}', in a run on plain text; train conversations in a run of their own "
            f"(data.format), or set data.field to a column of text"
        )
    return DataError(
        f"data.path: {place}: no '{field}'; for plain text set data.field to one of: {', '.join(available) or '(none)'}; for "
        f"conversations rename the columns: 'messages' (a list), or 'question' and 'answer'"
    )


class _Listed:
    """Objects of a JSON list, parsed one by one from pieces of text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pieces = file_lines(path, LINE)
        self._held = ""
        self._at = self._counted = 0
        """Characters of ``_held`` that are parsed, and the parsed characters with line ends counted in ``_line``."""
        self._line, self._row = 1, 0

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Place and columns of each object. Raises DataError."""
        mark, self._at = self._next(), self._at + 1
        if self._next() == "]":
            mark, self._at = "]", self._at + 1
        while mark != "]":
            self._next()
            self._row += 1
            place = self._place()
            yield place, _object(self._value(), place)
            mark, self._at = self._next(), self._at + 1
            if mark not in {",", "]"}:
                raise self._broken("expecting ',' or ']'" if mark else "the list does not end")
        if self._next():
            raise self._broken("text after the end of the list")

    def _value(self) -> object:
        while True:
            try:
                value, self._at = _DECODE(self._held, self._at)
            except (ValueError, RecursionError) as error:  # perhaps the end has not been read
                if len(self._held) - self._at > ROW or not self._more():
                    raise self._broken(error.msg if isinstance(error, json.JSONDecodeError) else str(error)) from None
            else:
                return value

    def _next(self) -> str:
        """The next character that is not white space, or nothing at the end."""
        while True:
            while self._at < len(self._held) and self._held[self._at].isspace():
                self._at += 1
            if self._at < len(self._held):
                return self._held[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Read as much again as is held of the current row, or a chunk. False at the end of the file."""
        self._place()
        self._held, self._at, self._counted = self._held[self._at :], 0, 0
        wanted, new = max(_CHUNK, len(self._held)), [self._held]
        while wanted > 0 and (piece := next(self._pieces, "")):
            new.append(piece)
            wanted -= len(piece)
        self._held = "".join(new)
        return len(new) > 1

    def _place(self) -> str:
        self._line += self._held.count("\n", self._counted, self._at)
        self._counted = self._at
        return f"{self._path}:{self._line}: row {self._row}"

    def _broken(self, reason: str) -> DataError:
        return DataError(f"data.path: {self._place()}: not JSON: {reason}; correct the file")


def _parsed(line: str, place: str) -> object:
    try:
        return json.loads(
            line.rstrip()
        )  # a fault at the end is in this line's last column, not in the next line's first
    except (ValueError, RecursionError) as error:  # (ten thousand brackets)
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise DataError(f"data.path: {place}: not JSON: {reason}; give one object per line") from error


def _object(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"data.path: {place}: a JSON {type(value).__name__}, not an object; a row is an object")
    return value


def once(text: str) -> Iterable[str]:
    """The pieces of a text that is in memory."""
    return (text,)
