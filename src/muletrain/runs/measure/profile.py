"""Profiles of models, kept in the cache: by model, device, precision, microbatch and versions."""

from __future__ import annotations

import hashlib
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from muletrain.compute.probe import chip
from muletrain.compute.profile import PASSES, alike, profiled
from muletrain.config.cache import keep, kept
from muletrain.config.load import load_config
from muletrain.config.model_sections import FACTORY, ModelConfig
from muletrain.config.profile_file import VERSION, Profile
from muletrain.errors import ConfigError
from muletrain.model.hf import spec_in
from muletrain.model.hf_hub import local_folder
from muletrain.model.make import make_model
from muletrain.model.native import is_native
from muletrain.model.presets import PRESETS
from muletrain.model.traced.chain import TracedModel
from muletrain.model.traced.folder import run_context, traced_in
from muletrain.runs.assemble import RunFacts, resolve_start

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.compute.profile import Conditions
    from muletrain.model.chain import Model


def configured_model(name: str, command: str, *, context: int | None, untie: bool = False) -> Model | None:
    """The model of the run's configuration in the file ``name``, without weights; None: no configuration. Raises
    MuletrainError, for a factory with advice for ``command``."""
    if re.fullmatch(FACTORY, name):
        raise ConfigError(
            f"{name}: of a factory, '{command}' needs its arguments and its data, too; write them into a configuration, as for "
            f"'muletrain run', and give that file: muletrain {command} FILE.toml"
        )
    if not name.endswith(".toml"):
        return None
    settings = ([] if context is None else [f"model.context={context}"]) + ["model.untie=true"] * untie
    return RunFacts.of(resolve_start(load_config(Path(name), settings), weights=False)).spec


def model_named(name: str, *, context: int | None, untie: bool) -> Model:
    """The model of a preset, of a folder, of the Hub's ``name`` or of a run's configuration, without weights. Raises
    MuletrainError."""
    if (model := configured_model(name, "profile", context=context, untie=untie)) is not None:
        return model
    if name in PRESETS:
        sizes = {"preset": name} if context is None else {"preset": name, "context": context}
        return make_model(ModelConfig.model_validate(sizes))
    folder = local_folder(name, weights=False)
    context = run_context(folder, context)
    if is_native(folder):
        return spec_in(folder, context=context, untie=untie)
    return traced_in(folder, context=context, untie=untie)


def digest_of(model: Model) -> str:
    """Digest of all facts that decide the costs of a model's blocks."""
    chain = model.chain_name if isinstance(model, TracedModel) else ""
    return hashlib.sha256(json.dumps([model.compressed(None).to_json(), chain]).encode()).hexdigest()[:32]


def measured_profile(
    model: Model, title: str, at: Conditions, tell: Callable[[str, float], None], *, again: bool = False
) -> Profile:
    """The profile of ``model``, from the cache unless ``again``, else measured and kept there. ``tell`` gets the
    current work, and the share that is done. Raises CapacityError for a block that does not fit."""
    about = {
        "version": VERSION,
        "model": digest_of(model),
        "device": chip(at.device),
        "precision": at.precision.value,
        "sequences": at.sequences,
        "context": model.context,
        "versions": _versions(at.device),
    }
    if not again and (found := kept("profiles", about, Profile)) is not None:
        return found.model_copy(update={"title": title})
    blocks, count = [], len(alike(model))
    tell("block 1", 0.0)
    for block in profiled(model, at):
        blocks.append(block)
        tell(f"block {min(count, len(blocks) + 1)} of {count}", len(blocks) / count)
    profile = Profile.model_validate(
        {**about, "title": title, "params": model.params, "passes": PASSES[0], "blocks": blocks}
    )
    keep("profiles", about, profile)
    return profile


def _versions(device: torch.device) -> dict[str, str]:
    found = {name: version(name) for name in ("muletrain", "torch", "transformers")}
    return found | {"threads": str(torch.get_num_threads())} if device.type == "cpu" else found
