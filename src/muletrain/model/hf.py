"""Reads and writes Hugging Face models: a folder with ``config.json`` and safetensors, in the format of
``transformers``. Every model can be written. Only a Llama that the native decoder computes is read here (``native``);
``traced.folder`` reads all other models. Parameter names are the same on both sides, so nothing is renamed.
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
    read_json,
    same,
    stored,
    without_place,
)
from muletrain.model.hf_writing import SHARD_BYTES, cast, new_folder, write_json, write_weights
from muletrain.model.spec import EMBEDDING, HEAD, ModelSpec
from muletrain.model.stage import Stage
from muletrain.model.traced.chain import TracedModel
from muletrain.model.traced.outline import APART

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from muletrain.model.chain import Model

TIED = "tie_word_embeddings"
_OLD = "rotary_emb.inv_freq"
"""End of names of tables that old versions of ``transformers`` stored, and new versions ignore."""
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
    chat_template: str | None = None,
) -> str | None:
    """Write a folder for ``transformers.AutoModelForCausalLM.from_pretrained(out_dir)`` (and AutoTokenizer).

    ``state``: fp32 tensors of all stages by name; a single copy of shared layers is enough, the export repeats the
    layer. ``end_of_text``: the tokenizer's token that ends a document, if any. ``source``: the Hugging Face folder that
    training started from (``model.from``): everything but the weights stays as in that folder, including the declared
    context; special tokens, generation settings and chat template only beside the same tokenizer. The index, or the
    only weights file, is written last. ``dtype``: type of the weights, a name of ``finite.NAMES``, except for what is
    not trained, and what ``transformers`` keeps in fp32. ``chat_template``: of training, if on conversations. Returns a remark for
    people on values that become zero in ``dtype``, if any. Raises CheckpointError when tensors are missing,
    superfluous, of wrong shape or too large for ``dtype``, the source cannot be read, or the folder is not empty or
    cannot be written."""
    out = Path(out_dir)
    exact = spec.in_fp32(dtype) if isinstance(spec, TracedModel) else ()
    tensors, remark = cast(_complete(state, spec), dtype, exact)
    with new_folder(out):
        config = _config(spec, _token_id(tokenizer_json, end_of_text))
        alike = source if source is not None and _same_tokenizer(source, tokenizer_json) else None
        if alike is not None:
            kept = read_json(alike / CONFIG)
            for name in (TOKENIZER, *TEXT_FILES):
                if (alike / name).is_file():
                    shutil.copyfile(alike / name, out / name)
        else:
            kept = {} if source is None else _without_tokens(read_json(source / CONFIG))
            _write_tokenizer(out, spec, tokenizer_json, end_of_text)
        if chat_template is not None:
            (out / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        # the run decides on tying
        config = kept | config if isinstance(spec, TracedModel) else config | kept | {TIED: config[TIED]}
        config["torch_dtype"] = str(NAMES[dtype]).removeprefix("torch.")
        config.pop("dtype", None)
        write_json(out / CONFIG, config)
        generation = {"_from_model_config": True, "eos_token_id": config.get("eos_token_id")}
        if alike is not None and (alike / GENERATION).is_file():
            generation = read_json(alike / GENERATION)
        generation["eos_token_id"] = _with(generation.get("eos_token_id"), _token_id(tokenizer_json, end_of_text))
        write_json(out / GENERATION, generation)
        write_weights(out, tensors, shard_bytes)
    return remark


def expand_shared(state: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """``state`` with each missing layer copied from the nearest layer before, since shared layers are stored once.

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
    """All tensors of an unshared model, in the model's order, with the right shapes; tied tensors once."""
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
    return {name: full[name].long() if spec.frozen.get(name) == "int64" else full[name] for name in shapes}


def _full_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    one_each = tuple((layer, layer + 1) for layer in range(spec.layers))  # a cut that shares nothing
    return Stage(spec, None, one_each).shapes()


def _config(spec: Model, end_id: int | None) -> dict[str, Any]:
    if isinstance(spec, TracedModel):
        return {name: value for name, value in spec.config.items() if name != APART}
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
        TIED: spec.tie,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": end_id,
    }


def _same_tokenizer(source: Path, tokenizer_json: bytes | None) -> bool:
    """Does ``source`` have the checkpoint's tokens? The checkpoint's tokenizer was rewritten, perhaps by another
    version."""
    if tokenizer_json is None:
        return False
    try:
        theirs, _ = read_tokenizer(str(source))
    except DataError:  # no tokenizer
        return False
    ours = Tokenizer.from_str(tokenizer_json.decode())
    return ours.get_vocab(with_added_tokens=True) == theirs.get_vocab(with_added_tokens=True)


def _with(ends: object, end: int | None) -> object:
    """``eos_token_id`` of generation settings, ``end`` included."""
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return ends if end is None or end in known else [*known, end] if known else end


def _without_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` without ids of special tokens, which differ in the new tokenizer."""
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


def import_hf(
    folder: str | Path, *, context: int | None = None, untie: bool = False
) -> tuple[ModelSpec, Callable[[str], Tensor]]:
    """The spec of a Llama folder (``native.is_native``), and a loader that reads one tensor by name, so that a stage
    loads only the stage's tensors.

    Tensors come as fp32; names, shapes and files are checked here, before anything is loaded. If ``config.json`` ties
    head and embedding, either tensor is enough; two tensors that differ are not tied, as in ``transformers``.
    ``untie``: never tie. ``context`` limits the sequence length (rotary embeddings have no table to cut). Dropout is 0:
    the folder does not say. Raises CheckpointError for a tensor that does not fit.
    """
    source = Path(folder)
    tensors, tied = stored(source), bool(read_json(source / CONFIG).get(TIED))
    differ = tied and not untie and {HEAD, EMBEDDING} <= tensors.keys() and not same(tensors[HEAD], tensors[EMBEDDING])
    spec = spec_in(source, context=context, untie=untie or differ)
    shapes = _full_shapes(spec)
    other = {HEAD: EMBEDDING, EMBEDDING: HEAD} if tied else {}
    places = {name: name if name in tensors else other.get(name, name) for name in shapes}
    if missing := sorted(name for name, place in places.items() if place not in tensors):
        raise CheckpointError(f"{source} has no tensor {missing[0]} ({len(missing)} missing)")
    extra = sorted(name for name in tensors.keys() - shapes.keys() - other.keys() if not name.endswith(_OLD))
    if extra:
        raise CheckpointError(without_place(source, extra))
    for name, place in places.items():
        tensors[place].check(shapes[name])

    def load(name: str) -> Tensor:
        if name not in places:
            raise CheckpointError(f"{source} has no tensor {name}")
        return tensors[places[name]].read()

    return spec, load


def spec_in(folder: Path, *, context: int | None = None, untie: bool = False) -> ModelSpec:
    """The spec that ``config.json`` of a Llama folder describes, for any weights. See ``import_hf``."""
    return spec_of(read_json(folder / CONFIG), str(folder), context=context, untie=untie)


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings, under the name with precedence in ``transformers``."""
    settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(settings, dict):
        raise CheckpointError(f"config.json: rope settings {settings!r} are not a table")
    return settings


def spec_of(config: Mapping[str, Any], source: str, *, context: int | None = None, untie: bool = False) -> ModelSpec:
    """The decoder that has the sizes of a Llama's ``config``. Raises CheckpointError, about ``source``, if no decoder
    fits."""
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
            tie=bool(config.get(TIED)) and not untie,
        )
    except (KeyError, TypeError, ValueError, ConfigError) as e:
        raise CheckpointError(f"{source}/{CONFIG} describes no model that fits here: {e}") from e
    if spec.context > longest:
        raise CheckpointError(
            f"{source} was made for {longest} tokens; set model.context = {longest} or less, not {context}"
        )
    return spec


def stops_in(folder: Path) -> tuple[int, ...]:
    """Tokens that end a text of the model in ``folder``, by the generation settings, or else by ``config.json``."""
    found: object = None
    for name in (CONFIG, GENERATION):
        with contextlib.suppress(CheckpointError):
            found = read_json(folder / name).get("eos_token_id", found)
    return tuple(end for end in (found if isinstance(found, list) else [found]) if isinstance(end, int))
