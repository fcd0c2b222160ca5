"""Text to tokens as by the model's own tokenizer: one rule for training, held-out text, prompts and output.

A document is: the tokens that the tokenizer puts before a text (often one, BOS), the text, the token that ends a
document (EOS). A prompt has no end. A special token that the text spells becomes that token, or with
``data.special_tokens = "text"`` stays text. The tokenizer's JSON says all of this: the post-processor adds the tokens
that begin and end a document.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import takewhile
from json import loads
from typing import TYPE_CHECKING, Literal, NamedTuple

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tokenizers import Encoding

SpecialTokens = Literal["parse", "text"]
"""``data.special_tokens``."""

WINDOW = 1 << 16
"""Characters that are encoded as one text. A longer document is encoded in windows."""
OVERLAP = 1 << 10
"""Characters that a window has in common with each neighbour, so that tokens do not depend on the place of the cut."""


class Encoder:
    """The tokenizer that ``json`` describes. Truncation and padding of published files are removed: truncation would
    drop text."""

    def __init__(self, json: bytes, special_tokens: SpecialTokens = "parse") -> None:
        self.tokenizer = Tokenizer.from_str(json.decode())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = special_tokens == "text"
        self.begin, self.end = _frame(self.tokenizer)
        """Tokens that begin and end a document."""
        model = loads(json)["model"]
        name = model.get("unk_token")
        self.unknown = self.tokenizer.token_to_id(name) if isinstance(name, str) else model.get("unk_id")
        """The token of unknown text, if there is one."""
        added = self.tokenizer.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        self.special = sorted({*special, *self.begin, *self.end} - {self.unknown})
        """Special tokens, without that one."""

    @property
    def begin_token(self) -> str | None:
        """The token that begins a document, if there is one."""
        return self.tokenizer.id_to_token(self.begin[0]) if self.begin else None

    @property
    def end_token(self) -> str | None:
        """The token that ends a document. None: there is none, as in files of older versions."""
        return self.tokenizer.id_to_token(self.end[-1]) if self.end else None

    def prompt(self, text: str) -> list[int]:
        """Tokens of a beginning that is to be continued."""
        return self.begun(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def document(self, text: str) -> list[int]:
        """Tokens of a whole document."""
        return [token for ids in Documents(self).tokens([*windows([text])]) for token in ids]

    def decode(self, ids: list[int]) -> str:
        """Text of tokens, special ones included."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def continuation(self, prompt: list[int], ids: list[int]) -> str:
        """Text of ``ids`` after ``prompt``, without special tokens. (Decoded alone, a first word may lose its space.)"""
        before, whole = self.tokenizer.decode(prompt), self.tokenizer.decode(prompt + ids)
        return str(whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(ids))

    def begun(self, ids: list[int]) -> list[int]:
        """``ids`` after the tokens that begin a text, unless they are there."""
        return ids if ids[: len(self.begin)] == self.begin else self.begin + ids

    def ended(self, ids: list[int]) -> list[int]:
        """``ids`` before the tokens that end a document, unless they are there."""
        return ids if self.end and ids[-len(self.end) :] == self.end else ids + self.end


class Window(NamedTuple):
    """Part of a document. The characters of ``text`` up to ``end`` are new, except those of the previous window."""

    text: str
    end: int
    first: bool
    last: bool


def windows(pieces: Iterable[str]) -> Iterator[Window]:
    """The text of a document, cut into windows that overlap by ``2 * OVERLAP``."""
    held, size, first = list[str](), 0, True
    for piece in (long[k : k + WINDOW] for long in pieces for k in range(0, len(long), WINDOW)):
        held.append(piece)
        size += len(piece)
        if size > WINDOW + OVERLAP:
            text = "".join(held)
            yield Window(text[: WINDOW + OVERLAP], WINDOW, first, False)
            held, size, first = [text[WINDOW - OVERLAP :]], size - WINDOW + OVERLAP, False
    yield Window("".join(held), size, first, True)


class Documents:
    """Encodes documents window by window."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._resume = 0
        """The character of the next window from which on tokens count."""

    def tokens(self, pieces: list[Window]) -> Iterator[list[int]]:
        """Tokens of each window, in order."""
        texts = [piece.text for piece in pieces]
        for piece, encoding in zip(
            pieces, self._encoder.tokenizer.encode_batch(texts, add_special_tokens=False), strict=True
        ):
            ids = encoding.ids if piece.first and piece.last else self._part(piece, encoding)
            if piece.first:
                ids = self._encoder.begun(ids)
            yield self._encoder.ended(ids) if piece.last else ids

    def _part(self, piece: Window, encoding: Encoding) -> list[int]:
        """The tokens that count: from the end of the previous window's tokens, up to a border beyond ``piece.end``
        between two tokens that touch. The next window has the same border, since the tokens there do not depend on the
        cut."""
        skipped, begin = 0, 0 if piece.first else self._resume
        offsets = encoding.offsets
        index = bisect_left(offsets, (begin, begin))
        if index == len(offsets) or offsets[index][0] != begin:
            # (a word of thousands of characters, which each window divides in another way)
            encoding = self._encoder.tokenizer.encode(piece.text[begin:], add_special_tokens=False)
            skipped, index, offsets = begin, 0, encoding.offsets
        if piece.last:
            return list(encoding.ids[index:])
        end = piece.end - skipped
        touching = (
            k
            for k in range(max(index + 1, bisect_left(offsets, (end, end))), len(offsets))
            if offsets[k][0] == offsets[k - 1][1] > offsets[k - 1][0]
        )
        border = next(touching, len(offsets))
        at = skipped + offsets[border][0] if border < len(offsets) else len(piece.text)
        self._resume = at - (piece.end - OVERLAP)
        return list(encoding.ids[index:border])


def with_end(tokenizer: Tokenizer, token: str) -> Tokenizer:
    """``tokenizer`` with a post-processor that ends each text with the known ``token``."""
    (begin, end), number = _frame(tokenizer), tokenizer.token_to_id(token)
    assert number is not None, token
    return tokenizer if end[-1:] == [number] else _framed(tokenizer, begin, [*end, number])


def without_end(json: bytes) -> bytes:
    """The tokenizer of ``json`` for other programs: nothing after a text."""
    tokenizer = Tokenizer.from_str(json.decode())
    begin, end = _frame(tokenizer)
    return (_framed(tokenizer, begin, []) if end else tokenizer).to_str(pretty=True).encode()


def _framed(tokenizer: Tokenizer, begin: list[int], end: list[int]) -> Tokenizer:
    tokens = [
        {"id": f"{side}{k}", "ids": [number], "tokens": [tokenizer.id_to_token(number)]}
        for side, ids in (("B", begin), ("E", end))
        for k, number in enumerate(ids)
    ]
    names = [str(token["id"]) for token in tokens]
    single = " ".join([*names[: len(begin)], "$A", *names[len(begin) :]])
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=tokens)
    return tokenizer


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens that the post-processor puts before and after a text."""
    probe = next(found for text in ("a", "A", "1", ".") if (found := tokenizer.encode(text)).ids or text == ".")
    before = len([*takewhile(bool, probe.special_tokens_mask)])
    after = len([*takewhile(bool, probe.special_tokens_mask[before:][::-1])])
    return probe.ids[:before], probe.ids[len(probe.ids) - after :]
