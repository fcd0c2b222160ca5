"""Reads the Hugging Face folder of a model that is traced: its configuration, and its weights under the names that the
traced parameters have."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from muletrain.errors import CheckpointError, ConfigError
from muletrain.model.hf import is_native, rope_of, spec_in
from muletrain.model.hf_files import Stored, read_json, stored
from muletrain.model.traced.chain import TracedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor, nn

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
"""What architectures call the longest sequence."""
USUAL_CONTEXT = 1024
"""Tokens of a sequence, at most, where the user names no ``model.context``."""


def import_traced(
    folder: Path, *, context: int | None = None, dropout: float | None = None, untie: bool = False
) -> TracedModel:
    """The chain of the model in ``folder``. ``context`` limits the sequence length; ``dropout`` replaces every dropout
    probability of its configuration. Raises CheckpointError for weights that are not the architecture's, and ConfigError
    for a model that cannot be built, traced or cut."""
    model = traced_in(folder, context=context, dropout=dropout, untie=untie)
    load_traced(folder, model)
    return model


def check_config(folder: Path, *, context: int | None = None, dropout: float | None = None, untie: bool = False) -> int:
    """The vocabulary of the model that ``config.json`` in ``folder`` describes. Raises ConfigError if it is neither native nor
    can be traced."""
    if is_native(folder):
        return spec_in(folder).vocab
    traced = traced_in(folder, context=run_context(folder, context), dropout=dropout, untie=untie)
    _ = traced.layers
    return traced.vocab


def run_context(folder: Path, context: int | None) -> int:
    """The sequence length of a run [tokens]: ``context``, or the longest that the model in ``folder`` declares, up to
    ``USUAL_CONTEXT``."""
    if context is not None:
        return context
    return min(USUAL_CONTEXT, (spec_in if is_native(folder) else traced_in)(folder).context)


def traced_in(
    folder: Path, *, context: int | None = None, dropout: float | None = None, untie: bool = False
) -> TracedModel:
    """The chain that ``config.json`` in ``folder`` describes, whatever its weights. See ``import_traced``."""
    from muletrain.model.traced.architecture import build, checked

    source = read_json(folder / "config.json")
    config = checked(source)
    if untie:
        config["tie_word_embeddings"] = False
    if dropout is not None:
        config |= {name: dropout for name, value in config.items() if _is_dropout(name, value)}
    longest = next((config[name] for name in _LENGTHS if isinstance(config.get(name), int)), None)
    if context is None and longest is None:
        build(config)  # refuses what is no text model, which has none
        raise ConfigError(f"model.context: {folder}/config.json names no longest sequence; set model.context=N")
    most = None if longest is None else int(longest * _stretched(config))
    if context is not None and most is not None and context > most:
        raise CheckpointError(f"{folder} was made for {most} tokens; set model.context = {most} or less, not {context}")
    return TracedModel(json.dumps(config, sort_keys=True), int(context or longest or 0))


def _stretched(config: dict[str, Any]) -> float:
    """How many times longer a text may be than ``config`` says: rotary embeddings of type 'dynamic' are made for that."""
    rope = rope_of(config)
    factor = rope.get("factor") if "dynamic" in (rope.get("rope_type"), rope.get("type")) else 1
    return factor if isinstance(factor, int | float) and factor > 1 else 1


def _is_dropout(name: str, value: object) -> bool:
    probability = isinstance(value, int | float) and not isinstance(value, bool)
    return probability and (name.endswith("pdrop") or "dropout" in name)


def load_traced(folder: Path, model: TracedModel) -> Callable[[str], Tensor]:
    """A loader of the fp32 weights in ``folder`` by name, one tensor at a time. Names and shapes are checked before it
    is returned. If an older version of ``transformers`` wrote the folder under other names, the whole model is read
    through ``transformers``. Raises CheckpointError."""
    tensors = stored(folder)
    where = _stored_names(folder, model, tensors)
    if where is None:
        return _converted(folder, model)
    for name, shape in model.shapes.items():
        tensors[where[name]].check(shape)
    return lambda name: tensors[where[name]].read()


def _stored_names(folder: Path, model: TracedModel, stored: Mapping[str, Stored]) -> dict[str, str] | None:
    """Name of each parameter -> its name in the files; None if some are not there under a name that we know."""
    missing = [name for name in model.shapes if name not in stored]
    names = {name: name for name in model.shapes}
    if not missing:
        return names
    first = _tied_to(json.dumps(read_json(folder / "config.json"), sort_keys=True))
    prefix = first.prefix + "."
    for name in missing:
        known = (
            first.names.get(name, name),
            name.removeprefix(prefix),
            first.names.get(name, name).removeprefix(prefix),
        )
        found = next((candidate for candidate in known if candidate in stored), None)
        if found is None:
            return None
        names[name] = found
    return names


class _Names:
    def __init__(self, names: dict[str, str], prefix: str) -> None:
        self.names = names
        """Each parameter's name -> the first name of the same tensor."""
        self.prefix = prefix
        """What the names of a model without its head begin with elsewhere."""


@functools.lru_cache(maxsize=4)
def _tied_to(config: str) -> _Names:
    from muletrain.model.traced.architecture import build
    from muletrain.model.traced.export import first_names

    built = build(json.loads(config))
    return _Names(first_names(built), str(getattr(built, "base_model_prefix", "")))


def _converted(folder: Path, model: TracedModel) -> Callable[[str], Tensor]:
    """Through ``transformers``, which knows the names that its older versions wrote."""
    state = _whole(str(folder), model.architecture)
    for name, shape in model.shapes.items():
        if name not in state or tuple(state[name].shape) != shape:
            what = "is missing" if name not in state else f"has shape {tuple(state[name].shape)}"
            raise CheckpointError(f"{folder}: {name} {what}; config.json describes {shape}")
    return lambda name: state[name].detach()


@functools.lru_cache(maxsize=1)
def _whole(folder: str, architecture: str) -> dict[str, Tensor]:
    return dict(whole_in(folder, architecture).named_parameters(remove_duplicate=False))


def whole_in(folder: str, architecture: str) -> nn.Module:
    """The model in ``folder`` with its weights in fp32, as ``transformers`` reads it. Raises CheckpointError."""
    import torch

    from muletrain.model.traced.architecture import quiet

    with quiet():
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        config: dict[str, Any] = json.loads(architecture)
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
        except Exception as e:  # transformers raises what it likes
            raise CheckpointError(f"{folder}: transformers cannot read the weights: {e}") from e
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            name = sorted(map(str, info[kind]))[0]
            raise CheckpointError(f"{folder} has no tensor {name} of the shape that config.json describes")
    whole: nn.Module = loaded
    return whole
