"""Hugging Face in and out: a folder with ``config.json`` and safetensors, as ``transformers`` reads and writes it.

Every model can be written. What is read here is a Llama that the native decoder computes: what would change the outputs
(biases, scaled rotary embeddings, other head widths) is refused by name. ``traced.folder`` reads everything else.
Parameter names are the same on both sides, so nothing is renamed.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from muletrain.data.encoder import Encoder, without_end
from muletrain.data.tokenizer import read_tokenizer
from muletrain.errors import CheckpointError, ConfigError, DataError
from muletrain.model.finite import NAMES
from muletrain.model.hf_files import (
    CONFIG,
    GENERATION,
    TEXT_FILES,
    TOKENIZER,
    Stored,
    read_json,
    stored,
)
from muletrain.model.hf_writing import SHARD_BYTES, cast, new_folder, write_json, write_weights
from muletrain.model.spec import ModelSpec
from muletrain.model.stage import Stage
from muletrain.model.traced.chain import TracedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from muletrain.model.chain import Model

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = "model.layers."


# Out ----------------------------------------------------------------------------------------------------------------


def export_hf(
    state: Mapping[str, Tensor],
    spec: Model,
    tokenizer_json: bytes | None,
    out_dir: str | Path,
    *,
    end_of_text: str | None = None,
    source: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    dtype: str = "fp32",
) -> str | None:
    """Write what ``transformers.AutoModelForCausalLM.from_pretrained(out_dir)`` (and AutoTokenizer) reads.

    ``state``: fp32 tensors of all stages by name; shared layers need only be there once, the export repeats them.
    ``end_of_text``: the tokenizer's token that ends a document, if it has one. ``source``: the Hugging Face folder that
    training started from (``model.from``): everything but the weights stays as it is there, the declared context
    included; its special tokens, generation settings and chat template only beside its own tokenizer. The index, or the
    only weights file, is written after what it speaks of. ``dtype``: type of the weights, a name of ``finite.NAMES``.
    Returns a remark for people on values that become zero in it, if any do. Raises CheckpointError when tensors are missing,
    superfluous, of other shapes or too large for ``dtype``, the source cannot be read, or the folder is not empty or cannot
    be written."""
    out = Path(out_dir)
    tensors, remark = cast(_complete(state, spec), dtype)
    with new_folder(out):
        config = _config(spec, _token_id(tokenizer_json, end_of_text))
        if source is not None and _same_tokenizer(source, tokenizer_json):
            kept = read_json(source / CONFIG)
            for name in (TOKENIZER, *TEXT_FILES):
                if (source / name).is_file():
                    shutil.copyfile(source / name, out / name)
        else:
            kept = {} if source is None else _without_tokens(read_json(source / CONFIG))
            _write_tokenizer(out, spec, tokenizer_json, end_of_text)
        # a native head was trained apart from the embedding
        config = kept | config if isinstance(spec, TracedModel) else config | kept | {"tie_word_embeddings": False}
        config["torch_dtype"] = str(NAMES[dtype]).removeprefix("torch.")
        config.pop("dtype", None)
        write_json(out / CONFIG, config)
        generation = {"_from_model_config": True, "eos_token_id": config.get("eos_token_id")}
        if source is not None and "eos_token_id" in kept and (source / GENERATION).is_file():
            generation = read_json(source / GENERATION)
        generation["eos_token_id"] = _with(generation.get("eos_token_id"), _token_id(tokenizer_json, end_of_text))
        write_json(out / GENERATION, generation)
        write_weights(out, tensors, shard_bytes)
    return remark


def expand_shared(state: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """``state`` with a layer that is missing taken from the nearest one before it: how shared layers are stored.

    Without ``spec.share_layers`` nothing is added.
    """
    full = dict(state)
    if not spec.share_layers:
        return full
    leaves = [name.removeprefix(f"{_LAYER}0.") for name in state if name.startswith(f"{_LAYER}0.")]
    for layer in range(1, spec.layers):
        for leaf in leaves:
            full.setdefault(f"{_LAYER}{layer}.{leaf}", full[f"{_LAYER}{layer - 1}.{leaf}"])
    return full


def _complete(state: Mapping[str, Tensor], spec: Model) -> dict[str, Tensor]:
    """All tensors of an unshared model, in its order, with the right shapes. Tied ones are there once."""
    if isinstance(spec, TracedModel):
        full, shapes = dict(state), spec.shapes
    else:
        assert isinstance(spec, ModelSpec)
        full, shapes = expand_shared(state, spec), _full_shapes(spec)
    if wrong := sorted(full.keys() ^ shapes.keys()):
        what = "is missing" if wrong[0] in shapes else "has no place in the model"
        raise CheckpointError(f"cannot export: {wrong[0]} {what} ({len(wrong)} such tensors)")
    for name, shape in shapes.items():
        if tuple(full[name].shape) != shape:
            raise CheckpointError(f"cannot export: {name} has shape {tuple(full[name].shape)}, the model needs {shape}")
    return {name: full[name] for name in shapes}


def _full_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    one_each = tuple((layer, layer + 1) for layer in range(spec.layers))  # a cut that shares nothing
    return Stage(spec, None, one_each).shapes()


def _config(spec: Model, end_id: int | None) -> dict[str, Any]:
    if isinstance(spec, TracedModel):
        return spec.config
    assert isinstance(spec, ModelSpec)
    return _llama_config(spec, end_id)


def _llama_config(spec: ModelSpec, end_id: int | None) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.width,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_width,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
        "hidden_act": spec.activation,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,  # read by transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},  # and by transformers 5
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": end_id,
    }


def _same_tokenizer(source: Path, tokenizer_json: bytes | None) -> bool:
    """Has ``source`` the checkpoint's tokens? The checkpoint's tokenizer was written again, by another version perhaps."""
    if tokenizer_json is None:
        return False
    try:
        theirs, _ = read_tokenizer(str(source))
    except DataError:  # it has none
        return False
    ours = Tokenizer.from_str(tokenizer_json.decode())
    return ours.get_vocab(with_added_tokens=True) == theirs.get_vocab(with_added_tokens=True)


def _with(ends: object, end: int | None) -> object:
    """``eos_token_id`` of generation settings, ``end`` included."""
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return ends if end is None or end in known else [*known, end] if known else end


def _without_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer is another one: ids of the old one's special tokens mean something else."""
    return {name: value for name, value in config.items() if not name.endswith("_token_id")}


def _write_tokenizer(out: Path, spec: Model, tokenizer_json: bytes | None, end_of_text: str | None) -> None:
    if tokenizer_json is None:
        return
    (out / TOKENIZER).write_bytes(without_end(tokenizer_json))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.context,
        "bos_token": Encoder(tokenizer_json).begin_token,
        "eos_token": end_of_text,
        "clean_up_tokenization_spaces": False,
    }
    write_json(out / "tokenizer_config.json", config)


def _token_id(tokenizer_json: bytes | None, token: str | None) -> int | None:
    if tokenizer_json is None or token is None:
        return None
    return Encoder(tokenizer_json).tokenizer.token_to_id(token)


# In -----------------------------------------------------------------------------------------------------------------


def import_hf(folder: str | Path, *, context: int | None = None) -> tuple[ModelSpec, Callable[[str], Tensor]]:
    """The spec of a Llama folder, and a loader that reads one tensor by name: a stage loads its own and nothing else.

    Tensors come as fp32; names, shapes and files are checked here, before anything is loaded. A tied head is a copy of
    the embedding. ``context`` limits the sequence length (rotary embeddings have no table to cut). Dropout is 0: the
    folder does not say. Raises CheckpointError for whatever does not fit.
    """
    source = Path(folder)
    config, spec = read_json(source / CONFIG), spec_in(source, context=context)
    tensors, shapes = stored(source), _full_shapes(spec)
    tied = bool(config.get("tie_word_embeddings")) and _HEAD not in tensors
    _check_names(source, tensors, shapes, tied=tied)
    for name in tensors.keys() & shapes.keys():
        tensors[name].check(shapes[name])

    def load(name: str) -> Tensor:
        tensor = _EMBEDDING if tied and name == _HEAD else name
        if tensor not in tensors:
            raise CheckpointError(f"{source} has no tensor {name}")
        return tensors[tensor].read()

    return spec, load


def spec_in(folder: Path, *, context: int | None = None) -> ModelSpec:
    """The spec that ``config.json`` of a Llama folder describes, whatever its weights. See ``import_hf``."""
    config = read_json(folder / CONFIG)
    _refuse_foreign(folder, config)
    return _spec(folder, config, context)


def is_native(folder: Path) -> bool:
    """Does the native decoder compute what the model in ``folder`` does? Others are traced. Raises CheckpointError if
    there is no readable ``config.json``."""
    config = read_json(folder / CONFIG)
    if config.get("model_type") != "llama" or config.get("attention_dropout"):
        return False
    try:
        _refuse_foreign(folder, config)
        return config.get("head_dim") in (None, int(config["hidden_size"]) // int(config["num_attention_heads"]))
    except (CheckpointError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return False


def _refuse_foreign(source: Path, config: dict[str, Any]) -> None:
    """Settings under which the same weights would mean something else."""
    if config.get("model_type") != "llama":
        raise CheckpointError(
            f"{source} holds a {config.get('model_type')!r} model; only 'llama' checkpoints can be taken over"
        )
    for bias in ("attention_bias", "mlp_bias"):
        if config.get(bias):
            raise CheckpointError(f"{source}: config.json has {bias} = true, but this decoder has no biases")
    kind = rope_of(config).get("rope_type", rope_of(config).get("type", "default"))
    if kind != "default":
        raise CheckpointError(f"{source}: rotary embeddings of type {kind!r}; only the default is supported")


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings of transformers 5 ('rope_parameters') or 4 ('rope_scaling')."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise CheckpointError(f"config.json: rope settings {settings!r} are not a table")
    return settings


def _spec(source: Path, config: dict[str, Any], context: int | None) -> ModelSpec:
    try:
        longest = int(config.get("max_position_embeddings", 2048))
        spec = ModelSpec(
            layers=int(config["num_hidden_layers"]),
            width=int(config["hidden_size"]),
            heads=int(config["num_attention_heads"]),
            kv_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
            ffn=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            context=context or longest,
            activation=config.get("hidden_act", "silu"),
            dropout=0.0,
            rope_theta=float(rope_of(config).get("rope_theta", config.get("rope_theta", 10000.0))),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            share_layers=False,
        )
    except (KeyError, TypeError, ValueError, ConfigError) as e:
        raise CheckpointError(f"{source / 'config.json'} describes no model that fits here: {e}") from e
    if spec.context > longest:
        raise CheckpointError(
            f"{source} was made for {longest} tokens; set model.context = {longest} or less, not {context}"
        )
    if config.get("head_dim") not in (None, spec.head_width):
        raise CheckpointError(f"{source}: head_dim = {config['head_dim']} is not hidden_size / num_attention_heads")
    return spec


def stops_in(folder: Path) -> tuple[int, ...]:
    """Tokens that end a text of the model in ``folder``, by its generation settings, or else by its ``config.json``."""
    found: object = None
    for name in (CONFIG, GENERATION):
        with contextlib.suppress(CheckpointError):
            found = read_json(folder / name).get("eos_token_id", found)
    return tuple(end for end in (found if isinstance(found, list) else [found]) if isinstance(end, int))


def _check_names(
    source: Path, tensors: Mapping[str, Stored], shapes: dict[str, tuple[int, ...]], *, tied: bool
) -> None:
    wanted = shapes.keys() - ({_HEAD} if tied else set())
    if missing := sorted(wanted - tensors.keys()):
        raise CheckpointError(f"{source} has no tensor {missing[0]} ({len(missing)} missing)")
    extra = sorted(name for name in tensors.keys() - shapes.keys() if not name.endswith("rotary_emb.inv_freq"))
    if extra:
        raise CheckpointError(f"{source}: {extra[0]} has no place in this decoder ({len(extra)} such tensors)")
