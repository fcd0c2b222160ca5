"""From ``data.path`` to documents: files, Hugging Face datasets, Python's own manual.

A document is a text for training without changes: a file of text, a row of a table, a topic. Everything streams: a
corpus may be larger than memory.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from muletrain.data.files import Columns, Document, FileSource, once, open_file, reading
from muletrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

PYDOC, HUB = "pydoc", "hf:"
_GLOB_CHARACTERS = frozenset("*?[")


class Source(Protocol):
    """One file, dataset or built-in text."""

    size: int
    """Bytes, for progress only; 0: unknown."""

    def fingerprint(self) -> str:
        """Changes when the text does."""
        ...

    def documents(self) -> Iterator[Document]:
        """The documents in order."""
        ...


class Corpus:
    """The documents of ``path`` (written like ``data.path``), in order; ``columns``: what a row holds.

    Raises DataError when nothing matches, or (while reading) when something cannot be read as text.
    """

    def __init__(self, path: str, columns: Columns) -> None:
        self.path = path
        self.columns = columns
        self.sources = _resolve(path, columns)
        self._before = self._size = self._inside = 0
        self._total = sum(source.size for source in self.sources)

    def digest(self) -> str:
        """Hex SHA-256 of the sources' contents in order; file names do not enter."""
        whole = hashlib.sha256()
        for source in self.sources:
            whole.update(f"{type(source).__name__}:{source.fingerprint()}\n".encode())
        return whole.hexdigest()

    def first_row(self) -> dict[str, Any]:
        """The first row of a table or data set; {}: there is none. Raises DataError."""
        for source in self.sources:
            if isinstance(source, FileSource | HubDataset):
                for _, row in source.rows():
                    return row
        return {}

    def documents(self) -> Iterator[Document]:
        """One pass over all documents."""
        self._before = 0
        for source in self.sources:
            self._size, self._inside = source.size, 0
            yield from source.documents()
            self._before += source.size

    def passed(self, characters: int) -> float:
        """Count characters as read, and return the share of the pass that is done. Characters stand in for bytes: near
        enough for progress, and never beyond the source's share."""
        self._inside += characters
        return (self._before + min(self._inside, self._size)) / (self._total or 1)


class PydocSource:
    """The documentation that ships with Python. Text and digest differ a little between Python versions.

    The manual has repetitions: a topic that another topic contains is left out, so that held-out text is not
    trained."""

    def __init__(self) -> None:
        from pydoc_data.topics import topics  # half a megabyte that only this source needs

        self._topics = _unrepeated([topics[name] for name in sorted(topics)])
        self.size = sum(map(len, self._topics))

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self._topics).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        for text in self._topics:
            yield Document(PYDOC, partial(once, text))


class HubDataset:
    """``hf:NAME[@REVISION][:CONFIG][#SPLIT]``: the split ``train``, or another one, streamed. NAME may be a local
    folder, identified by the files; a remote data set is identified by name alone: pin a revision to be sure."""

    size = 0

    def __init__(self, name: str, columns: Columns) -> None:
        self.name = name
        self.columns = columns

    def fingerprint(self) -> str:
        folder = Path(re.split("[#:@]", self.name, maxsplit=1)[0])
        known = [self.name]
        for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
            if path.is_file():
                with reading(path), path.open("rb") as file:
                    known.append(f"{path.relative_to(folder)} {hashlib.file_digest(file, 'sha256').hexdigest()}")
        return "\n".join(known)

    def documents(self) -> Iterator[Document]:
        for place, row in self.rows():
            yield self.columns.document(row, place)

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Place and columns of each row. Raises DataError."""
        for number, row in enumerate(self._rows()):
            yield f"{HUB}{self.name}: row {number}", row

    def _rows(self) -> Iterator[dict[str, Any]]:
        try:
            import datasets  # optional dependency
        except ImportError as error:
            raise DataError(
                f"data.path: '{HUB}{self.name}' needs the package datasets; install it with "
                '`pip install "muletrain[datasets]"`'
            ) from error
        name, _, split = self.name.partition("#")
        name, _, config = name.partition(":")
        name, _, revision = name.partition("@")
        try:
            yield from datasets.load_dataset(
                name, config or None, split=split or "train", streaming=True, revision=revision or None
            )
        except Exception as error:  # datasets raises many kinds: of its own, of fsspec, of HTTP
            raise DataError(
                f"data.path: cannot read Hugging Face dataset '{name}': {error}; check the name, the configuration and the "
                f"split (hf:NAME:CONFIG#SPLIT) and the connection"
            ) from error


def absolute(path: str) -> str:
    """``data.path`` with the same meaning in any working directory."""
    return ", ".join(
        item if item == PYDOC or item.startswith(HUB) else _absolute(item).replace(",", "\\,") for item in _items(path)
    )


def _absolute(item: str) -> str:
    item = os.path.expanduser(item)
    if os.path.isabs(item) or os.path.isfile(item) or not _GLOB_CHARACTERS & set(item):
        return os.path.abspath(item)
    return os.path.normpath(os.path.join(glob.escape(os.getcwd()), item))


def _items(path: str) -> list[str]:
    """The parts of ``path`` between commas. A comma of a file's name counts as one if the file exists; ``\\,`` always
    does."""
    parts, items = re.split(r"(?<!\\),", path), []
    while parts:
        # the longest run of parts that names a file, else one part
        runs = [",".join(parts[:end]) for end in range(len(parts), 1, -1)]
        found = next((k for k, run in enumerate(runs) if os.path.isfile(_plain(run))), len(runs))
        used = len(parts) - found
        if item := _plain(",".join(parts[:used])):
            items.append(item)
        parts = parts[used:]
    if twice := sorted(item for item, count in Counter(items).items() if count > 1):
        raise DataError(
            f"data.path: '{twice[0]}' is listed twice, and files are read once; list it once, and to weigh its text more "
            f"repeat its rows"
        )
    return items


def _plain(item: str) -> str:
    return os.path.expanduser(item.strip().replace("\\,", ","))


def _resolve(path: str, columns: Columns) -> list[Source]:
    sources: list[Source] = []
    taken: set[Path] = set()
    for item in _items(path):
        if item == PYDOC:
            sources.append(PydocSource())
        elif item.startswith(HUB):
            sources.append(HubDataset(item.removeprefix(HUB), columns))
        else:
            new = [path for path in _files(item) if path.resolve() not in taken]
            taken.update(path.resolve() for path in new)
            sources.extend(open_file(path, columns) for path in new)
    if not sources:
        raise DataError("data.path: empty; give files or globs, 'hf:NAME', or 'pydoc'")
    return sources


def _files(item: str) -> list[Path]:
    if os.path.isdir(item):
        if not any(path.is_file() for path in Path(item).rglob("*")):
            raise DataError(f"data.path: {item} is a folder without files; give text or rows (.jsonl, .csv, .parquet)")
        raise DataError(f"data.path: {item} is a folder; name its files by a glob, e.g. '{_suggest_glob(Path(item))}'")
    if os.path.isfile(item):  # before globbing: a file's name may contain brackets
        return [Path(item)]
    found = sorted(Path(name) for name in glob.glob(item, recursive=True) if os.path.isfile(name))
    if not found:
        what = "no file matches" if _GLOB_CHARACTERS & set(item) else "no such file:"
        where = "" if os.path.isabs(item) else f" (relative to {Path.cwd()})"
        how = "; in a glob, [[] stands for a bracket" if "[" in item else ""
        raise DataError(
            f"data.path: {what} '{item}'{where}; check the path, or use 'hf:NAME' for a Hugging Face dataset{how}"
        )
    return found


def _suggest_glob(folder: Path) -> str:
    suffixes = Counter(path.suffix for path in folder.iterdir() if path.is_file() and path.suffix)
    if suffixes:
        return str(folder / f"*{suffixes.most_common(1)[0][0]}")
    return str(folder / "**" / "*.txt")


def _unrepeated(texts: list[str]) -> list[str]:
    """``texts``, except where longer ones (of equally long ones, later ones) contain most paragraphs."""
    known = [{" ".join(part.split()) for part in re.split(r"\n\s*\n", text)} for text in texts]
    order = sorted(range(len(texts)), key=lambda k: (len(texts[k]), k))
    repeated = {
        k
        for place, k in enumerate(order)
        if any(2 * sum(map(len, known[k] & known[other])) > sum(map(len, known[k])) for other in order[place + 1 :])
    }
    return [text for k, text in enumerate(texts) if k not in repeated]
