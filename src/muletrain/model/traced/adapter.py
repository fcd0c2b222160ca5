"""Adapters of ``peft`` (LoRA, Hu et al. 2021, and DoRA, Liu et al. 2024) in models of ``transformers``: put in before the
model is traced, drawn from the run's seed, written to and read from peft's folders.

The base keeps its tensors under peft's names ('...q_proj.base_layer.weight') and is not trained.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import re
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import torch
from torch import Tensor, nn

from muletrain.config.model_sections import AdapterConfig
from muletrain.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME, _BASE, _OUTER = ".default.", ".base_layer.", "base_model.model."
"""The adapter's name and the base's in the names of the traced model; the prefix in peft's files."""
_LAYERS = re.compile(r"\.(base_layer\.)+")
"""The base's in names of a module with several adapters, each of which wraps the one before."""
_MAGNITUDE = ".lora_magnitude_vector."
"""In the names of DoRA's magnitudes, which peft's files call '...lora_magnitude_vector' alone."""
_OTHER = ("fan_in_fan_out", "modules_to_save", "layers_to_transform")
"""Settings of peft that change the numbers, and that no adapter here has: set in a folder, they are refused."""


def described(config: AdapterConfig, base: str) -> dict[str, Any]:
    """The part of an architecture that says which adapter the model has. ``base``: the type of most weights beside the
    adapter, 'fp32', 'bf16' or 'fp16'."""
    assert config.rank is not None
    return {
        "base": base,
        "rank": config.rank,
        "alpha": 2.0 * config.rank if config.alpha is None else config.alpha,
        "dropout": config.dropout,
        "targets": config.targets if isinstance(config.targets, str) else sorted(config.targets),
        "rslora": config.rslora,
        "dora": config.dora,
        **{name: found for name in ("ranks", "alphas") if (found := getattr(config, name))},
        **({} if config.quantise == "none" else {"quantise": config.quantise}),
    }


def is_adapter(name: str) -> bool:
    """Is this parameter the adapter's?"""
    return ".lora_" in name


def in_base(name: str) -> str:
    """The name of a base parameter in the model without adapter."""
    return _LAYERS.sub(".", name)


def put_in(model: nn.Module, adapter: Mapping[str, Any]) -> nn.Module:
    """``model`` with the adapter, which alone is trained. Raises ConfigError for an adapter that does not fit."""
    try:  # perhaps it comes from another machine
        asked = AdapterConfig.model_validate_json(json.dumps(adapter), strict=True)
    except (ValueError, TypeError) as e:
        raise ConfigError(f"model.architecture: it describes no adapter ({' '.join(str(e).split())[:200]})") from e
    if asked.rank is None or asked.from_ is not None or asked.alpha is None or asked.base == "auto":
        raise ConfigError("model.architecture: it describes no adapter, but a setting of one")
    adapter = described(asked, asked.base)
    made = _injected(model, adapter)[0]
    matrices = ((name, p) for name, p in made.named_parameters() if is_adapter(name) and p.dim() == 2)
    for name, parameter in matrices:
        if adapter["rank"] > (side := parameter.shape["lora_A" in name]):
            raise ConfigError(
                f"adapter.rank: {adapter['rank']}, but {name.partition('.lora_')[0]} has a side of {side}; take a smaller rank, or other "
                f"adapter.targets"
            )
    return made


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence peft and the packages that it imports: they warn of kernels that nothing here uses, of Conv1D, whose weights
    peft transposes, of patterns, and of their own calls."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _injected(model: nn.Module, adapter: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    """``model`` with the adapter, and peft's settings of it, in which peft names each target that it found."""
    try:
        with _quiet():
            from peft import LoraConfig, inject_adapter_in_model
    except ImportError as e:
        raise ConfigError(
            "adapter.rank: adapters need the package peft; install it with `pip install 'muletrain[adapters]'`"
        ) from e
    named, tensors = adapter["targets"], set[str]()
    if not isinstance(named, str):
        names = [f".{name}" for name, _ in model.named_parameters()]
        tensors = {target for target in named if any(name.endswith(f".{target}") for name in names)}
        named = [target for target in named if target not in tensors]
    settings = LoraConfig(
        r=adapter["rank"],
        lora_alpha=adapter["alpha"],
        lora_dropout=adapter["dropout"],
        target_modules=named,
        target_parameters=sorted(tensors) or None,
        rank_pattern=adapter.get("ranks", {}),
        alpha_pattern=adapter.get("alphas", {}),
        use_rslora=adapter["rslora"],
        use_dora=adapter.get("dora", False),
        task_type="CAUSAL_LM",
    )
    try:
        with _quiet():
            made: nn.Module = inject_adapter_in_model(settings, model)
    except (ValueError, TypeError) as e:
        remedy = "give the ends of names of linear layers, or of tensors of experts"
        if "ParamWrapper" in str(e):
            remedy = (
                "experts that are one tensor take neither dropout nor DoRA: set adapter.dropout=0 and adapter.dora=false, or name the "
                "other layers"
            )
        raise ConfigError(f"adapter.targets: {adapter['targets']!r}: {str(e).splitlines()[0]}; {remedy}") from e
    for layer in _layers(made):
        if hasattr(layer, "parameter_name"):
            layer._activate_lora = functools.partial(_added, layer)
    return made, settings


def _layers(model: nn.Module) -> dict[Any, str]:
    """The layers of peft and their paths; each of a tensor that holds several matrices wraps the module of the tensor."""
    from peft.tuners.lora import LoraLayer

    return {child: path for path, child in model.named_modules() if isinstance(child, LoraLayer)}


def _sum(layer: Any, weight: Tensor) -> Tensor:
    """A tensor with its adapter added. ``layer``: a ``ParamWrapper`` of peft."""
    if layer.num_experts == 1:
        total: Tensor = weight + layer.get_delta_weight("default")
        return total
    left, right, scale = layer.get_delta_factors("default")
    return torch.baddbmm(weight, left, right, alpha=scale)


@contextmanager
def _added(layer: Any, names: Collection[str]) -> Iterator[None]:
    """In place of ``ParamWrapper._activate_lora``, which registers a module in each forward pass (a parametrization), so that
    ``torch.export`` refuses to record it: while the module runs, its tensor is the sum."""
    module, name, weight = layer.get_base_layer(), layer.parameter_name, layer.get_param()
    total = _sum(layer, weight)
    delattr(module, name)
    setattr(module, name, total)
    try:
        yield
    finally:
        delattr(module, name)
        setattr(module, name, weight)


def first_weight(
    name: str, shape: tuple[int, ...], seed: int, base: Callable[[str], Tensor], transposed: Collection[str]
) -> Tensor:
    """fp32, as peft begins: A uniform within 1 / sqrt(fan in) (Kaiming, a = sqrt(5)), B zero, magnitudes the norms of the
    weights of each output. Keyed by (seed, name). ``base``: loads weights of the base; ``transposed``: see
    ``architecture.transposed``."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    if _MAGNITUDE in name:
        layer = name.partition(_MAGNITUDE)[0]
        norms: Tensor = torch.linalg.vector_norm(base(f"{layer}{_BASE}weight"), dim=0 if layer in transposed else 1)
        return norms
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    draws = np.random.Generator(np.random.Philox(key=key)).random(shape, dtype=np.float32)
    bound = 1 / math.sqrt(shape[1])
    return torch.from_numpy(draws).mul_(2 * bound).sub_(bound)


# Folders --------------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of ``AdapterConfig`` that a peft folder describes. Raises CheckpointError for another kind of
    adapter."""
    about = _described_in(folder, "adapter.from: ")
    kind, bias = about.get("peft_type"), about.get("bias", "none")
    other = [name for name in _OTHER if about.get(name)]
    if about.get("fan_in_fan_out") and other == ["fan_in_fan_out"]:
        other = []  # follows from the model
    if bias != "none":
        other.append(f"bias = '{bias}'")
    if kind != "LORA" or other:
        what = f"of the type {kind}" if kind != "LORA" else f"with {', '.join(other)}"
        raise CheckpointError(
            f"adapter.from: {folder} is an adapter {what}, and only LoRA and DoRA are trained further; merge it into its model "
            f"(merge_and_unload of peft), and train that"
        )
    targets, tensors = about.get("target_modules"), about.get("target_parameters") or ()
    try:
        if tensors and isinstance(targets, str):
            raise ValueError("target_modules is a regular expression beside target_parameters: name the modules")
        return {
            "rank": int(about["r"]),
            "alpha": float(about["lora_alpha"]),
            "targets": targets if isinstance(targets, str) else sorted({*(targets or ()), *tensors}),
            "ranks": dict(about.get("rank_pattern") or {}),
            "alphas": dict(about.get("alpha_pattern") or {}),
            "rslora": bool(about.get("use_rslora")),
            "dora": bool(about.get("use_dora")),
        }
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(
            f"adapter.from: {folder / CONFIG} has no valid r, lora_alpha and target_modules ({e!r}); save the adapter again"
        ) from e


def _described_in(folder: Path, field: str = "") -> dict[str, Any]:
    try:
        about = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{field}{folder} holds no adapter of peft ({CONFIG}): {e}") from e
    if not isinstance(about, dict):
        raise CheckpointError(f"{field}{folder / CONFIG} is no JSON object; save the adapter again")
    return about


def check_tensors(folder: Path, model: Any) -> None:
    """Raises CheckpointError if the adapter in a peft folder has other tensors than ``model``, a ``TracedModel``. No tensor
    is read."""
    wanted = {_stored(name): tuple(shape) for name, shape in model.shapes.items() if is_adapter(name)}
    try:
        with safetensors.safe_open(folder / WEIGHTS, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 # no mapping
    except Exception as e:  # of the Rust side
        raise CheckpointError(f"adapter.from: cannot read {folder / WEIGHTS}: {e}") from e
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            theirs, ours = (f"{of[name]}" if name in of else "none" for of in (found, wanted))
            raise CheckpointError(
                f"adapter.from: {folder / WEIGHTS} has {theirs} for {name.removeprefix(_OUTER)}, and the model {ours}; it is an "
                f"adapter of another model: give that as model.from"
            )


def base_of(folder: Path) -> str:
    """The folder or name of the model that an adapter in a peft folder belongs to. Raises CheckpointError."""
    found = _described_in(folder).get("base_model_name_or_path")
    if not isinstance(found, str):
        raise CheckpointError(
            f"{folder}: {CONFIG} names no base_model_name_or_path, the model that the adapter belongs to; add it"
        )
    return found


def with_weights(model: nn.Module, folder: Path) -> nn.Module:
    """``model`` with any adapter of peft added to its weights. Raises CheckpointError."""
    try:
        with _quiet():
            from peft import PeftModel

            found: nn.Module = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except Exception as e:  # ImportError, and whatever peft raises
        raise CheckpointError(
            f"{folder}: the adapter does not fit its model: {str(e).splitlines()[0] if str(e) else e!r}"
        ) from e
    return found


def reader(folder: Path) -> Callable[[str], Tensor]:
    """A loader of the adapter's fp32 weights in a peft folder, by the names of the traced model. Raises
    CheckpointError."""
    try:
        with safetensors.safe_open(folder / WEIGHTS, framework="pt") as file:
            found = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 # no mapping
    except Exception as e:  # of the Rust side
        raise CheckpointError(f"adapter.from: cannot read {folder / WEIGHTS}: {e}") from e

    def load(name: str) -> Tensor:
        stored = _stored(name)
        if stored not in found:
            raise CheckpointError(f"adapter.from: {folder / WEIGHTS} has no {stored}; is it an adapter of this model?")
        tensor: Tensor = found[stored]
        return tensor

    return load


def write_adapter(
    folder: Path, model: nn.Module, adapter: Mapping[str, Any], weights: Mapping[str, Tensor], base: str | None
) -> None:
    """Write an adapter as peft does. ``model``: without adapter, on the meta device; ``base``: its folder or name."""
    from safetensors.torch import save_file

    settings = _injected(model, adapter)[1]
    for name in ("target_modules", "target_parameters"):
        if isinstance(found := getattr(settings, name), set):
            setattr(settings, name, sorted(found))
    settings.base_model_name_or_path, settings.inference_mode = base, True
    settings.save_pretrained(str(folder))
    own = {_stored(name): tensor.contiguous() for name, tensor in weights.items() if is_adapter(name)}
    save_file(own, folder / WEIGHTS, metadata={"format": "pt"})


def _stored(name: str) -> str:
    return _OUTER + name.replace(f"{_MAGNITUDE}default.weight", _MAGNITUDE[:-1]).replace(_NAME, ".")


def merged(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the model without adapter that computes the same. ``model``: with the adapter, on the meta device."""
    found = {in_base(name): tensor for name, tensor in weights.items() if not is_adapter(name)}
    for layer, path in _layers(model).items():
        name = getattr(layer, "parameter_name", "weight")
        target = f"{in_base(f'{path}.')}{name}"
        own = {n: weights[f"{path}.{n}"] for n, _ in layer.named_parameters() if not n.startswith("base_layer.")}
        layer.load_state_dict(own, strict=False, assign=True)
        setattr(layer.get_base_layer(), name, nn.Parameter(found[target].clone(), requires_grad=False))
        layer.merge()
        found[target] = getattr(layer.get_base_layer(), name).detach()
    return found
