"""The whole model in one piece: the single-process reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.model.stage import Stage, initial_weight

if TYPE_CHECKING:
    from muletrain.model.spec import ModelSpec
    from muletrain.planning.partition import Cut


def build_full(spec: ModelSpec, seed: int, cut: Cut | None = None) -> Stage:
    """In fp32 on the CPU, with the weights that any cut starts from. ``cut`` (default: one stage) matters to shared
    layers only."""
    stage = Stage(spec, None, cut or ((0, spec.layers),))
    return stage.bind({name: initial_weight(spec, name, shape, seed) for name, shape in stage.shapes().items()})
