"""``data.tokenizer``: a byte-level BPE trained on the corpus, a ``tokenizer.json``, or that of a Hugging Face model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from muletrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

END_OF_TEXT = "<|endoftext|>"

# What published tokenizers call it, most specific first.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<|endofdocument|>", "<eos>", "</s>", "[SEP]")
_BYTES = 256  # tokens a byte-level vocabulary starts with
_TRAINING_TEXT = 1 << 28  # characters the merges are learnt from; beyond this they hardly change


def train_tokenizer(texts: Iterator[str], vocab: int) -> Tokenizer:
    """Byte-level BPE of at most ``vocab`` tokens with ``END_OF_TEXT`` as token 0; decoding is exact.

    Learns from the first 2^28 characters of ``texts``. A short text yields fewer tokens. Raises DataError when
    ``vocab`` cannot hold the 256 bytes and the end-of-text token.
    """
    if vocab <= _BYTES:
        raise DataError(
            f"model.vocab: {vocab} tokens cannot hold {_BYTES} bytes and {END_OF_TEXT}; give at least {_BYTES + 1}, or "
            "set data.tokenizer to one you have"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, _TRAINING_TEXT), trainer)
    return _as_encoder(tokenizer)


def load_tokenizer(name: str, vocab: int) -> Tokenizer:
    """The tokenizer of a file, of a folder with a ``tokenizer.json``, or of a Hugging Face model.

    Raises DataError when there is none, or when its tokens do not fit ``vocab``.
    """
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    if os.path.isfile(path):
        tokenizer = _from_file(path)
    elif path.endswith(".json"):
        raise DataError(
            f"data.tokenizer: no such file: '{path}'; give a tokenizer.json, a Hugging Face name, or 'train'"
        )
    else:
        tokenizer = _from_hub(name)
    _check_fits(tokenizer, name, vocab)
    return _as_encoder(tokenizer)


def parse_tokenizer(json: bytes) -> Tokenizer:
    """The tokenizer that ``TokenCache.tokenizer_json`` describes."""
    return _as_encoder(Tokenizer.from_str(json.decode()))


def tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """Contents of a ``tokenizer.json``."""
    return tokenizer.to_str(pretty=True).encode()


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """Id of the token that ends a document; None when the tokenizer has none under a usual name."""
    return next((found for name in _END_OF_TEXT_NAMES if (found := tokenizer.token_to_id(name)) is not None), None)


def token_range(tokenizer: Tokenizer) -> int:
    """One more than the largest id that a text may have: the smallest vocabulary a model needs (ids may have gaps). A text
    never becomes a special token, so a model may have no row for one: Gemma 3's text models have none for an image's."""
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ends = end_of_text(tokenizer)
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    return max((number for number in ids if number == ends or number not in special), default=-1) + 1


def check_own(file: Path, vocab: int) -> None:
    """Raises DataError if a model's own tokenizer cannot be read, or has more tokens than the model."""
    if (needed := token_range(_from_file(str(file)))) > vocab:
        raise DataError(
            f"data.tokenizer: {file} has {needed} tokens, and its model {vocab}; give data.tokenizer=FILE of one that fits, or "
            f"correct the model's folder"
        )


def _from_file(path: str) -> Tokenizer:
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the Rust side raises plain Exception
        raise DataError(
            f"data.tokenizer: {path} is not a tokenizer.json: {error}; save one with tokenizers' Tokenizer.save"
        ) from error


def _from_hub(name: str) -> Tokenizer:
    from transformers import AutoTokenizer  # takes seconds to import

    try:
        loaded = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # OSError, ValueError, errors of the hub and of HTTP
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"data.tokenizer: cannot load '{name}' from Hugging Face: {reason} Check name and connection, or download "
            "its tokenizer.json and give that file"
        ) from error
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        raise DataError(
            f"data.tokenizer: '{name}' has no tokenizer.json (no fast tokenizer); choose another, or 'train'"
        )
    return tokenizer


def _check_fits(tokenizer: Tokenizer, name: str, vocab: int) -> None:
    needed = token_range(tokenizer)
    if needed > vocab:
        raise DataError(
            f"data.tokenizer: '{name}' has {needed} tokens, model.vocab = {vocab}; set model.vocab to at least {needed}"
            f" (e.g. {-(-needed // 64) * 64})"
        )


def _as_encoder(tokenizer: Tokenizer) -> Tokenizer:
    # Published files often carry the truncation and padding of their model, which would silently drop text here; and a
    # corpus that spells a special token means the characters, not the token.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _first(texts: Iterator[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return
