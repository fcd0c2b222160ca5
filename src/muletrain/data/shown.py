"""The first documents of a corpus as a model reads them, with the parts that it learns to write."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

from muletrain.data.chat import Rendered, Template, columns_of
from muletrain.data.corpus import Corpus

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from muletrain.config.model_sections import DataConfig


def examples(config: DataConfig, count: int, most: int) -> Iterator[list[str]]:
    """Of each of the first documents: its place, then in turn text that does not count and text that does, together at
    most ``most`` characters. ``config``: resolved. Raises DataError."""
    template = Template(config.chat_template or "", config.loss_on) if config.counts else None
    for document in itertools.islice(Corpus(config.path, columns_of(config)).documents(), count):
        if template is None:
            yield [document.place, "", _beginning(document.pieces(), most)]
            continue
        chat = json.loads("".join(document.pieces()))
        yield [document.place, *_divided(template.rendered(chat, document.place), most)]


def _divided(rendered: Rendered, most: int) -> Iterator[str]:
    text, at = rendered.text, 0
    for begin, end in rendered.counted:
        if begin >= most:
            break
        yield text[at:begin]
        at = min(end, most)
        yield text[begin:at]
    if text[at:most] or len(text) > most:
        yield text[at:most] + (" ..." if len(text) > most else "")


def _beginning(pieces: Iterable[str], most: int) -> str:
    held = ""
    for piece in pieces:
        held += piece
        if len(held) > most:
            return f"{held[:most]} ..."
    return held
