"""Makes chains and stages: native and traced."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from muletrain.errors import ConfigError
from muletrain.model.hf import expand_shared
from muletrain.model.spec import ModelSpec
from muletrain.model.stage import Stage
from muletrain.model.traced.architecture import Whole, build
from muletrain.model.traced.chain import TracedModel
from muletrain.optim.tied import Tied

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from muletrain.config.model_sections import ModelConfig
    from muletrain.model.chain import Model
    from muletrain.model.module import StageModule
    from muletrain.planning.partition import Cut


def make_model(config: ModelConfig) -> Model:
    """The model that ``config`` describes. Raises ConfigError for an unknown preset, for sizes that do not fit together,
    and for a model that cannot be traced."""
    if config.architecture is not None:
        return TracedModel.from_config(config)
    return ModelSpec.from_config(config)


def make_stage(model: Model, index: int | None, cut: Cut) -> StageModule:
    """Stage ``index`` of ``model``, or (None) the whole model, without storage."""
    model = model.placed(cut)
    if isinstance(model, TracedModel):
        return model.stage(index, cut)
    assert isinstance(model, ModelSpec)
    return Stage(model, index, cut)


def tied_between(model: Model, cut: Cut) -> Tied | None:
    """The trained parameters that two stages share, if any."""
    users = {name: {*stages} for name, stages in model.users(cut).items()}
    names = sorted(name for name, stages in users.items() if len(stages) > 1)
    if not names:
        return None
    a, b = sorted(users[names[0]])  # the only two: ``check_cut``
    layouts = [make_stage(model, stage, cut).layout() for stage in (a, b)]
    where = [dict(zip(layout.names, layout.ranges(), strict=True)) for layout in layouts]
    trained = [
        {name for name in names if each[name][1] <= its.trained} for each, its in zip(where, layouts, strict=True)
    ]
    names = sorted(trained[0] & trained[1])  # both copies of a frozen parameter stay as they are
    if not names:
        return None
    first, second = (tuple(each[name] for name in names) for each in where)
    return Tied((a, b), (first, second), (layouts[0].trained, layouts[1].trained))


def make_block(model: Model, index: int, blocks: Cut) -> StageModule:
    """Block ``index`` of the whole chain, without storage. ``blocks``: the part before the first layer, runs of layers,
    the part after the last layer."""
    if isinstance(model, TracedModel):
        return model.block(index)
    assert isinstance(model, ModelSpec)
    return Stage(model, index, blocks)


def load_model(model: Model, state: Mapping[str, Tensor]) -> StageModule:
    """The whole model with the weights ``state`` (all stages' tensors by name; shared layers once)."""
    if isinstance(model, ModelSpec):
        one_each = tuple((layer, layer + 1) for layer in range(model.layers))
        return Stage(model, None, one_each).bind(expand_shared(state, model))
    assert isinstance(model, TracedModel)
    as_traced = model.own_loss or model.borders
    whole = make_stage(model, None, model.cut(1)) if as_traced else Whole(model, build(model.config))
    return whole.bind(state)


def model_from_json(text: str) -> Model:
    """The inverse of ``Model.to_json``. Raises ConfigError when fields are missing or unknown."""
    try:
        traced = "architecture" in json.loads(text)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"not a model: {e}") from e
    return TracedModel.from_json(text) if traced else ModelSpec.from_json(text)
