"""``data.tokenizer``: a byte-level BPE trained on the corpus, a file, or the tokenizer of a Hugging Face model.

Each becomes one ``tokenizer.json``, for ``encoder``. A model's tokenizer is read as by ``transformers.AutoTokenizer``,
vocabularies and SentencePiece models included.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from muletrain.config.cache import keep, kept
from muletrain.config.section import Section
from muletrain.data.encoder import Encoder, with_end
from muletrain.errors import CheckpointError, DataError
from muletrain.model.hf_hub import is_hub_name, text_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

END_OF_TEXT = "<|endoftext|>"
TOKENIZER = "tokenizer.json"
VOCABULARIES = (
    TOKENIZER,
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tiktoken.model",
    "tekken.json",
)
"""Files of which a folder needs one, to have a tokenizer."""
_DECLARED = ("tokenizer_config.json", "config.json", "generation_config.json")
_FILES = (*VOCABULARIES, *_DECLARED, "merges.txt", "special_tokens_map.json", "added_tokens.json")
_BYTES = 256
"""Tokens with which a byte-level vocabulary starts."""
_TRAINING_TEXT = 1 << 28
"""Characters from which the merges are learnt; more hardly change the merges."""


class _Read(Section):
    """A model's tokenizer as one ``tokenizer.json``."""

    json_: str = Field(description="its content")
    end: str | None = Field(description="the declared token that ends a document")


def train_tokenizer(texts: Iterable[str], vocab: int, special: Sequence[str] = ()) -> Tokenizer:
    """Byte-level BPE of at most ``vocab`` tokens with ``END_OF_TEXT`` as token 0, then the ``special`` ones; decoding is
    exact.

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
        special_tokens=[END_OF_TEXT, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, _TRAINING_TEXT), trainer)
    return with_end(tokenizer, END_OF_TEXT)


def load_tokenizer(name: str, vocab: int, end: str | None = None) -> bytes:
    """The ``tokenizer.json`` of a file, of a model's folder, or of a Hugging Face model. ``end``: the token that ends a
    document; default: the declared one.

    Raises DataError when there is none, when the tokens do not fit ``vocab``, or when none ends a document.
    """
    tokenizer, declared = read_tokenizer(name)
    if end is not None and tokenizer.token_to_id(end) is None:
        raise DataError(f"data.end_token: '{name}' has no token '{end}'; give one of {_special(tokenizer)}")
    if (end := end or declared) is None:
        raise DataError(
            f"data.tokenizer: '{name}' declares no token that ends a document (eos_token in tokenizer_config.json, "
            f"eos_token_id in config.json), and documents would run together; set data.end_token to one of "
            f"{_special(tokenizer)}"
        )
    kept_as_it_is = end == Encoder(tokenizer_json(tokenizer)).end_token and Path(name).is_file()
    tokenizer = with_end(tokenizer, end)
    if (needed := token_range(tokenizer)) > vocab:
        raise DataError(
            f"data.tokenizer: '{name}' has {needed} tokens, model.vocab = {vocab}; set model.vocab to at least {needed} "
            f"(e.g. {-(-needed // 64) * 64})"
        )
    return Path(name).read_bytes() if kept_as_it_is else tokenizer_json(tokenizer)


def tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """Contents of a ``tokenizer.json``."""
    return tokenizer.to_str(pretty=True).encode()


def token_range(tokenizer: Tokenizer) -> int:
    """One more than the largest id that a model needs (ids may have gaps): special tokens count only at the beginning
    or end of documents. Gemma 3's text models, for example, have no row for an image's."""
    encoder = Encoder(tokenizer_json(tokenizer))
    added = tokenizer.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special} - {*encoder.begin, *encoder.end}
    return max({*tokenizer.get_vocab(with_added_tokens=True).values()} - special, default=-1) + 1


def has_tokenizer(folder: Path) -> bool:
    """Does a folder hold a tokenizer?"""
    return any((folder / name).is_file() for name in VOCABULARIES)


def check_own(folder: Path, vocab: int) -> None:
    """Raises DataError if the tokenizer of a model's folder cannot be read, or has more tokens than the model."""
    tokenizer, end = read_tokenizer(str(folder))
    if (needed := token_range(tokenizer if end is None else with_end(tokenizer, end))) > vocab:
        raise DataError(
            f"data.tokenizer: {folder} has {needed} tokens, and its model {vocab}; give data.tokenizer=FILE of one that fits, "
            f"or correct the model's folder"
        )


def read_tokenizer(name: str) -> tuple[Tokenizer, str | None]:
    """A tokenizer, and the token that is declared to end a document. Raises DataError."""
    path = Path(name).expanduser()
    if path.name == TOKENIZER and any((path.parent / declared).is_file() for declared in _DECLARED):
        path = path.parent
    if path.is_dir():
        return _of_folder(path)
    if path.is_file():
        return _of_file(path)
    if path.suffix == ".json":
        raise DataError(
            f"data.tokenizer: no such file: '{path}'; give a tokenizer.json, a Hugging Face name, or 'train'"
        )
    if is_hub_name(name):
        try:
            return _of_folder(text_folder(name, _FILES))
        except CheckpointError as e:
            raise DataError(f"data.tokenizer: {e}") from e
    return _of_model(name)


def _of_file(path: Path) -> tuple[Tokenizer, str | None]:
    """A file, and the token with which its post-processor ends a document, as in our own tokenizers."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception
        raise DataError(
            f"data.tokenizer: {path} is not a tokenizer.json: {error}; save one with tokenizers' Tokenizer.save"
        ) from error
    return tokenizer, Encoder(tokenizer_json(tokenizer)).end_token


def _of_folder(folder: Path) -> tuple[Tokenizer, str | None]:
    """The tokenizer of a model, read by ``transformers`` unless there is ``tokenizer.json`` alone. Results are cached:
    ``transformers`` takes seconds to import."""
    present = [name for name in _FILES if (folder / name).is_file()]
    if not {*present} & {*VOCABULARIES}:
        raise DataError(
            f"data.tokenizer: {folder} has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt), and "
            f"a new one would not fit its weights; copy it from where the model came from, or set data.tokenizer"
        )
    files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in present}
    about = {"files": files, "versions": [_version("transformers"), tokenizers.__version__]}
    if (found := kept("tokenizers", about, _Read)) is not None:
        return Tokenizer.from_str(found.json_), found.end
    if TOKENIZER in files and "tokenizer_config.json" not in files:
        tokenizer, end = _of_file(folder / TOKENIZER)
        end = _declared(folder, tokenizer) or end
    else:
        tokenizer, end = _of_model(str(folder))
        end = end or _declared(folder, tokenizer)
    keep("tokenizers", about, _Read(json_=tokenizer.to_str(), end=end))
    return tokenizer, end


def _of_model(name: str) -> tuple[Tokenizer, str | None]:
    """The tokenizer that ``transformers`` reads from a folder or the Hub."""
    from transformers import AutoTokenizer  # takes seconds to import

    try:
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, errors of the hub and of HTTP
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = "" if os.path.isdir(name) else " from Hugging Face"
        raise DataError(
            f"data.tokenizer: cannot load '{name}'{where}: {reason} Check {'its files' if not where else 'name and connection'}, "
            f"or give a tokenizer.json"
        ) from error
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        raise DataError(
            f"data.tokenizer: '{name}' has no tokenizer.json, and none can be made of it ({type(loaded).__name__}); choose "
            f"another, or 'train'"
        )
    end = getattr(loaded, "eos_token", None)
    return tokenizer, end if end is not None and tokenizer.token_to_id(end) is not None else None


def _declared(folder: Path, tokenizer: Tokenizer) -> str | None:
    """The token that ``config.json`` or ``generation_config.json`` declares to end a text."""
    for name in _DECLARED[1:]:
        try:
            ends: Any = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        first = ends[0] if isinstance(ends, list) and ends else ends
        if isinstance(first, int) and (token := tokenizer.id_to_token(first)) is not None:
            return token
    return None


def _special(tokenizer: Tokenizer) -> str:
    names = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    return ", ".join(names[:8]) or "its tokens"


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return
