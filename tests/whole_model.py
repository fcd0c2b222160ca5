"""The whole model in one piece: the single-process reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.config.model_sections import ModelConfig
from muletrain.model.hf import export_hf
from muletrain.model.spec import ModelSpec
from muletrain.model.stage import Stage, initial_weight

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from muletrain.planning.partition import Cut


def build_full(spec: ModelSpec, seed: int, cut: Cut | None = None) -> Stage:
    """In fp32 on the CPU, with the weights that any cut starts from. ``cut`` (default: one stage) matters to shared
    layers only."""
    stage = Stage(spec, None, cut or ((0, spec.layers),))
    return stage.bind({name: initial_weight(spec, name, shape, seed) for name, shape in stage.shapes().items()})


def hugging_face_folder(folder: Path) -> dict[str, Tensor]:
    """A folder with a small model whose weights no seed of a run draws; its weights."""
    spec = ModelSpec.from_config(ModelConfig(width=64, heads=2, context=32))
    weights = {name: p.detach() for name, p in build_full(spec, seed=77).named_parameters()}
    export_hf(weights, spec, None, folder)
    return weights
