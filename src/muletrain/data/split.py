"""Which text is held out: whole documents, or separate files.

The hash of a document decides, so that adding files moves no document between the sides, and equal documents are on one
side. In a small corpus this may hold out nothing, or most of the text. Then a document that is more than the held-out
share of all text gives the end, and documents are held out in the order of hashes until enough is. A row stays whole,
unless the row is more than an eighth of all text.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from muletrain.data.corpus import Corpus
    from muletrain.data.files import Document

FEW = 1 << 16
"""Documents up to which a corpus counts as small: in a larger one, hashes hold out about the share that is wanted."""
ROW = 1 / 8
"""The share of all text up to which a row is never cut: an answer without its question is no text to measure on."""
_HASHES = 1 << 64


class Rule(NamedTuple):
    """Documents with a hash ``below`` are held out, and the ends of documents of more than ``longest`` characters, or
    ``longest_row`` for rows: the ``share`` of each."""

    below: int
    share: float
    longest: float = math.inf
    longest_row: float = math.inf

    def cuts(self, length: int, *, row: bool) -> bool:
        """Does a document of ``length`` characters give the end?"""
        return length > (self.longest_row if row else self.longest)


def rule_for(corpus: Corpus, share: float, *, unique: bool) -> Rule:
    """The rule that holds out about ``share`` of the corpus. Reads at most ``FEW`` documents. Raises DataError."""
    below, documents = int(share * _HASHES), list[tuple[int, int, bool]]()
    for document in corpus.documents() if 0 < share < 1 else ():
        digest, length = _weighed(document)
        documents.append((digest >> 64, length, document.row))
        if len(documents) > FEW:
            return Rule(below, share)
    documents = sorted({*documents} if unique else documents)
    whole = sum(length for _, length, _ in documents)
    wanted = share * whole
    if wanted / 2 <= sum(length for first, length, _ in documents if first < below) <= wanted * 2:
        return Rule(below, share)
    rule = Rule(below, share, wanted, max(wanted, ROW * whole))
    held = sum(length * share for _, length, row in documents if rule.cuts(length, row=row))
    uncut = [(first, length) for first, length, row in documents if not rule.cuts(length, row=row)]
    if sum(length for first, length in uncut if first < below) > wanted * 2:
        below = 0  # a few documents, of which many have small hashes
    for first, length in uncut:
        if first >= below and held >= wanted / 2:
            break
        below, held = max(below, first + 1), held + length
    return rule._replace(below=below)


class Part(NamedTuple):
    """A text of one side. Read ``pieces`` before the next part is asked for. ``place``: for messages."""

    heldout: bool
    pieces: Iterable[str]
    place: str


class Split:
    """One pass over the documents of ``corpus``, which ``rule`` divides, then of ``validation``, which is held out as a whole.

    ``unique``: documents that equal an earlier one up to white space are left out. Counts are of the current pass."""

    def __init__(self, corpus: Corpus, validation: Corpus | None, rule: Rule, *, unique: bool) -> None:
        self._corpus, self._validation, self._rule, self._unique = corpus, validation, rule, unique
        self.trained = self.heldout = self.ends = self.duplicates = self.empty = self.replaced = self.both = 0
        """Documents that are trained, held out whole, held out by the end, and left out as duplicates or for lack of
        text; characters that were replaced; trained documents that ``validation`` has, too."""

    def parts(self) -> Iterator[Part]:
        """All text in order. Raises DataError."""
        self.trained = self.heldout = self.ends = self.duplicates = self.empty = self.replaced = self.both = 0
        seen: set[int] = set()
        validation = () if self._validation is None else self._validation.documents()
        known = {_weighed(document)[0] for document in validation}
        for document in self._corpus.documents():
            digest, length = _weighed(document)
            if not length:
                self.empty += 1
            elif digest in seen:
                self.duplicates += 1
            else:
                self.replaced += document.replaced
                self.both += digest in known
                yield from self._divided(document, digest >> 64, length)
            if self._unique:
                seen.add(digest)
        for document in () if self._validation is None else self._validation.documents():
            _, length = _weighed(document)
            self.empty += not length
            if length:
                self.heldout += 1
                self.replaced += document.replaced
                yield Part(True, document.pieces(), document.place)

    def _divided(self, document: Document, first: int, length: int) -> Iterator[Part]:
        """The parts of a document; ``first`` is the first half of the document's hash."""
        cuts = self._rule.cuts(length, row=document.row)
        heldout = not cuts and first < self._rule.below
        self.heldout += heldout
        self.trained += not heldout
        if not cuts:
            yield Part(heldout, document.pieces(), document.place)
            return
        cut = _cut(document.pieces(), int(length * (1 - self._rule.share)), length)
        self.ends += 1
        yield Part(False, _between(document.pieces(), 0, cut), document.place)
        yield Part(True, _between(document.pieces(), cut, length), document.place)


def _weighed(document: Document) -> tuple[int, int]:
    """Hash of a document without white space, and the number of characters, or none for white space alone."""
    digest, length, empty = hashlib.blake2b(digest_size=16), 0, True
    for piece in document.pieces():
        dense = "".join(piece.split())
        empty = empty and not dense
        digest.update(dense.encode())
        length += len(piece)
    return int.from_bytes(digest.digest(), "big"), 0 if empty else length


def _cut(pieces: Iterable[str], nominal: int, length: int) -> int:
    """The character near ``nominal`` at which the end of a document of ``length`` characters begins: of the piece there
    the next line, or else the next word."""
    first = 0
    for piece in pieces:
        if first + len(piece) > nominal:
            for pattern in (r"\n", r"\s"):
                found = re.compile(pattern).search(piece, nominal - first)
                if found and first + found.end() < length:
                    return first + found.end()
            return nominal
        first += len(piece)
    return nominal


def _between(pieces: Iterable[str], begin: int, end: int) -> Iterator[str]:
    """The characters from ``begin`` to ``end``."""
    first = 0
    for piece in pieces:
        if first >= end:
            return
        if part := piece[max(0, begin - first) : end - first]:
            yield part
        first += len(piece)
