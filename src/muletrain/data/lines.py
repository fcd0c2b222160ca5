"""Lines of a UTF-8 file, perhaps a .gz, as they stream by. What cannot be read as text is reported with file and
line."""

from __future__ import annotations

import codecs
import gzip
import zlib
from typing import IO, TYPE_CHECKING

from muletrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def file_lines(path: Path, limit: int) -> Iterator[str]:
    """Lines with their ends, pieces of a line where it is longer than ``limit`` bytes. Raises DataError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    number, first = 1, True
    with reading(path), _binary(path) as file:
        while True:
            raw = file.readline(limit)
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                raise _undecodable(path, number, error) from error
            if not raw:
                return
            yield _clean(text, first=first)
            number, first = number + raw.endswith(b"\n"), False


def whole_lines(path: Path) -> Iterator[str]:
    """Lines with their ends, each whole. Raises DataError."""
    with reading(path), _binary(path) as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield _clean(raw.decode(), first=number == 1)
            except UnicodeDecodeError as error:
                raise _undecodable(path, number, error) from error


class reading:
    """Turns what a damaged or vanished file raises into a DataError that names it."""

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


def _clean(line: str, *, first: bool) -> str:
    if first:
        line = line.removeprefix("\ufeff")  # byte-order mark
    return line[:-2] + "\n" if line.endswith("\r\n") else line


def _binary(path: Path) -> gzip.GzipFile | IO[bytes]:
    return gzip.GzipFile(path) if path.suffix == ".gz" else path.open("rb")


def _undecodable(path: Path, line: int, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"data.path: {path}:{line}: not UTF-8 text (byte 0x{error.object[error.start]:02x}); convert the file with "
        f"`iconv -t UTF-8`, or leave it out of the glob"
    )
