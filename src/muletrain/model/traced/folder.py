"""Reads the Hugging Face folder of a traced model: the configuration, and the weights under the names of the traced
parameters."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muletrain.errors import CheckpointError, ConfigError
from muletrain.model.finite import NAMES
from muletrain.model.hf import rope_of, spec_in
from muletrain.model.hf_files import Stored, mapped, read_json, same, stored, without_place
from muletrain.model.native import is_native
from muletrain.model.traced.adapter import in_base
from muletrain.model.traced.chain import TracedModel
from muletrain.model.traced.outline import ADAPTER, APART

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import Tensor, nn

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
"""Names of the longest sequence in configurations."""
_INV_FREQ = "rotary_emb.inv_freq"
USUAL_CONTEXT = 1024
"""Most tokens of a sequence if the user names no ``model.context``."""


def import_traced(
    folder: Path,
    *,
    context: int | None = None,
    dropout: float | None = None,
    untie: bool = False,
    adapter: dict[str, Any] | None = None,
) -> TracedModel:
    """The chain of the model in ``folder``, with ``adapter`` (``adapter.described``). ``context`` limits the sequence
    length; ``dropout`` replaces every dropout probability of the configuration. Tensors that ``config.json`` ties and
    that differ are not tied. Raises CheckpointError for weights that do not fit the architecture, and ConfigError for a
    model that cannot be built, traced or cut."""
    model = traced_in(folder, context=context, dropout=dropout, untie=untie)
    if not untie and stored(folder).keys() != model.shapes.keys() and other_heads(folder):
        model = traced_in(folder, context=context, dropout=dropout, untie=True)
    load_traced(folder, model)
    return with_adapter(model, adapter)


def with_adapter(model: TracedModel, adapter: dict[str, Any] | None) -> TracedModel:
    """``model`` with ``adapter``; None: without."""
    config = {name: value for name, value in model.config.items() if name not in (ADAPTER, APART)}
    config |= {} if adapter is None else {ADAPTER: adapter}
    return dataclasses.replace(model, architecture=json.dumps(config, sort_keys=True))


def check_config(folder: Path, *, context: int | None = None, dropout: float | None = None, untie: bool = False) -> int:
    """The vocabulary of the model that ``config.json`` in ``folder`` describes. Raises ConfigError for a model that is
    neither native nor traceable."""
    if is_native(folder):
        return spec_in(folder).vocab
    traced = traced_in(folder, context=run_context(folder, context), dropout=dropout, untie=untie)
    _ = traced.layers
    return traced.vocab


def run_context(folder: Path, context: int | None) -> int:
    """The sequence length of a run [tokens]: ``context``, or the declared maximum of the model in ``folder``, up to
    ``USUAL_CONTEXT``."""
    if context is not None:
        return context
    return min(USUAL_CONTEXT, (spec_in if is_native(folder) else traced_in)(folder).context)


def traced_in(
    folder: Path, *, context: int | None = None, dropout: float | None = None, untie: bool = False
) -> TracedModel:
    """The chain that ``config.json`` in ``folder`` describes, for any weights. See ``import_traced``."""
    from muletrain.model.traced.architecture import build, checked

    source = read_json(folder / "config.json")
    config = checked(source)
    if untie:
        config["tie_word_embeddings"] = False
    if dropout is not None:
        config |= {name: dropout for name, value in config.items() if _is_dropout(name, value)}
    longest = next((config[name] for name in _LENGTHS if isinstance(config.get(name), int)), None)
    if context is None and longest is None:
        build(config)  # refuses models of no text, which declare no length
        raise ConfigError(f"model.context: {folder}/config.json names no longest sequence; set model.context=N")
    most = None if longest is None else int(longest * _stretched(config))
    if context is not None and most is not None and context > most:
        raise CheckpointError(f"{folder} was made for {most} tokens; set model.context = {most} or less, not {context}")
    return TracedModel(json.dumps(config, sort_keys=True), int(context or longest or 0))


def _stretched(config: dict[str, Any]) -> float:
    """Factor by which a text may be longer than declared: rotary embeddings of type 'dynamic' allow that."""
    rope = rope_of(config)
    factor = rope.get("factor") if "dynamic" in (rope.get("rope_type"), rope.get("type")) else 1
    return factor if isinstance(factor, int | float) and factor > 1 else 1


def _is_dropout(name: str, value: object) -> bool:
    probability = isinstance(value, int | float) and not isinstance(value, bool)
    return probability and (name.endswith("pdrop") or "dropout" in name)


def load_traced(folder: Path, model: TracedModel) -> Callable[[str], Tensor]:
    """A loader of the fp32 weights in ``folder`` by name, one tensor at a time. Names and shapes are checked before the
    return. If an older version of ``transformers`` wrote the folder with old names, the whole model is read through
    ``transformers``. Raises CheckpointError, also for tensors that the model does not take."""
    if ADAPTER in model.config:
        load = load_traced(folder, with_adapter(model, None))
        return lambda name: load(in_base(name))
    if (places := _places(folder, model)) is None:
        return _converted(folder, model)
    return lambda name: places[name].read()


def load_base(folder: Path, model: TracedModel, kind: str) -> Callable[[str], Tensor]:
    """A loader of the weights of ``model.base`` in ``folder`` by name. ``kind``: ``AdapterConfig.base``. Raises as
    ``load_traced``."""
    plain = with_adapter(model, None)
    if (places := _places(folder, plain)) is not None and kind == "auto":
        read = mapped(places.values())
        return lambda name: read(places[in_base(name)])
    load, dtype = load_traced(folder, plain), NAMES[base_kind(folder) if kind == "auto" else kind]

    def held(name: str) -> Tensor:
        value = load(in_base(name))
        found = value.to(dtype)
        return found if kind != "auto" or bool((found == value).all()) else value

    return held


def base_kind(folder: Path) -> str:
    """The type of most numbers in ``folder``, 'fp32', 'bf16' or 'fp16'. Raises CheckpointError."""
    numbers = Counter[str]()
    for tensor in stored(folder).values():
        numbers[tensor.dtype] += math.prod(tensor.shape)
    return {"BF16": "bf16", "F16": "fp16"}.get(max(numbers, key=numbers.__getitem__, default=""), "fp32")


def _places(folder: Path, model: TracedModel) -> dict[str, Stored] | None:
    """The place of each parameter in the files, after a check of shapes; None: the files have old names. Raises
    CheckpointError."""
    tensors = stored(folder)
    where = _stored_names(folder, model, tensors)
    if where is None:
        return None
    for name, shape in model.shapes.items():
        tensors[where[name]].check(shape)
    return {name: tensors[at] for name, at in where.items()}


def other_heads(folder: Path) -> list[str]:
    """Tensors in ``folder`` that ``config.json`` ties to a tensor with different values, and that ``transformers``
    therefore does not tie. Raises CheckpointError."""
    tensors, known = stored(folder), _known(folder)
    found = []
    for name, first in known.first.items():
        if name != first and name in tensors and (other := known.name_in(tensors, first)) not in (None, name):
            found += [] if same(tensors[name], tensors[other or name]) else [name]
    return found


def _stored_names(folder: Path, model: TracedModel, tensors: Mapping[str, Stored]) -> dict[str, str] | None:
    """Name of each parameter -> name in the files; None if a parameter is missing under all known names. Raises
    CheckpointError for tensors that no parameter takes."""
    if tensors.keys() == model.shapes.keys():
        return {name: name for name in tensors}
    known = _known(folder)
    found = {name: known.name_in(tensors, name) for name in model.shapes}
    names = {name: at for name, at in found.items() if at is not None}
    if len(names) < len(found):
        return None
    used = {*names.values(), *(name for name, first in known.first.items() if first in names)}
    if unused := sorted(name for name in tensors.keys() - used if not known.ignores(name)):
        raise CheckpointError(without_place(folder, unused))
    return names


class _Known:
    """Facts about the files of a model, declared by the model's class."""

    def __init__(self, model: nn.Module) -> None:
        from muletrain.model.traced.export import first_names

        own: Any = model
        self.first = first_names(model)
        """Each parameter's name -> the first name of the same tensor."""
        self._prefix = f"{getattr(own, 'base_model_prefix', '')}."
        """Prefix of names that a model without a head leaves out."""
        patterns = {*(own._keys_to_ignore_on_load_unexpected or ())}
        for ending, pattern in ((_INV_FREQ, r"rotary_emb\.inv_freq"), ("position_ids", r"(^|\.)position_ids$")):
            if any(name.endswith(ending) for name, _ in model.named_buffers()):
                patterns.add(pattern)  # as in ``transformers``: older versions stored such tables
        self._ignored = [re.compile(pattern) for pattern in sorted(patterns)]

    def name_in(self, stored: Collection[str], name: str) -> str | None:
        """The name in the files of the parameter ``name``."""
        same = [name, *(other for other, first in self.first.items() if first == self.first.get(name, name))]
        return next((n for full in same for n in (full, full.removeprefix(self._prefix)) if n in stored), None)

    def ignores(self, name: str) -> bool:
        """Does ``transformers`` silently ignore a tensor of this name?"""
        return any(pattern.search(name) for pattern in self._ignored)


def _known(folder: Path) -> _Known:
    return _known_of(json.dumps(read_json(folder / "config.json"), sort_keys=True))


@functools.lru_cache(maxsize=4)
def _known_of(config: str) -> _Known:
    from muletrain.model.traced.architecture import build

    return _Known(build(json.loads(config)))


def _converted(folder: Path, model: TracedModel) -> Callable[[str], Tensor]:
    """Load through ``transformers``, which knows the names of older versions."""
    state = _whole(str(folder), model.architecture)
    for name, shape in model.shapes.items():
        if name not in state or tuple(state[name].shape) != shape:
            what = "is missing" if name not in state else f"has shape {tuple(state[name].shape)}"
            raise CheckpointError(f"{folder}: {name} {what}; config.json describes {shape}")
    for name, first in _known(folder).first.items():
        if name not in model.shapes and name in state and not bool((state[name] == state[first]).all()):
            raise CheckpointError(
                f"{folder}: {name} differs from {first}, to which config.json ties it; set model.untie=true, or correct "
                f"tie_word_embeddings"
            )
    return lambda name: state[name].detach().float()


@functools.lru_cache(maxsize=1)
def _whole(folder: str, architecture: str) -> dict[str, Tensor]:
    return dict(whole_in(folder, architecture).state_dict())


def whole_in(folder: str, architecture: str) -> nn.Module:
    """The model in ``folder`` with weights in fp32, read by ``transformers``. Raises CheckpointError."""
    import torch

    from muletrain.model.traced.architecture import quiet

    with quiet(), torch.random.fork_rng(devices=[]):
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        config: dict[str, Any] = json.loads(architecture)
        torch.manual_seed(0)  # for weights that may be missing: the same on every machine
        try:
            loaded, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=CONFIG_MAPPING[config["model_type"]].from_dict(config),
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as e:  # transformers raises any exception
            raise CheckpointError(f"{folder}: transformers cannot read the weights: {e}") from e
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            name = sorted(map(str, info[kind]))[0]
            raise CheckpointError(f"{folder} has no tensor {name} of the shape that config.json describes")
    if info["unexpected_keys"]:
        raise CheckpointError(without_place(Path(folder), sorted(info["unexpected_keys"])))
    whole: nn.Module = loaded
    return whole
