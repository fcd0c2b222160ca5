"""Streamed lines of a UTF-8 file, perhaps a .gz. A file that is not text is refused, with name and line."""

from __future__ import annotations

import codecs
import gzip
import zlib
from typing import IO, TYPE_CHECKING

from muletrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
