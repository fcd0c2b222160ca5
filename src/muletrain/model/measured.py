"""A chain with measured (``muletrain profile``) instead of counted costs. Imports no torch."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Self

from muletrain.errors import ConfigError
from muletrain.model.chain import Model

if TYPE_CHECKING:
    from muletrain.config.profile_file import Profile
    from muletrain.model.chain import Compression


def _of_inner(name: str) -> Any:
    return property(lambda self: getattr(self.inner, name))


class MeasuredModel(Model):
    """Stands for ``inner`` in a plan, with measured times instead of counted FLOPs. A plan divides FLOPs by a device's
    speed, so each block gets the measured seconds times ``speed_of(inner, profile)`` [FLOP]. For another sequence
    length, the seconds are scaled like the counted FLOPs."""

    def __init__(self, inner: Model, profile: Profile) -> None:
        """Raises ConfigError if the parts of profile and model differ."""
        blocks, tokens = profile.by_part(), profile.sequences * profile.context
        if len(blocks) != inner.layers + 2 or profile.context != inner.context:
            raise ConfigError(
                f"the profile of {profile.title} has {len(blocks) - 2} blocks and sequences of {profile.context} tokens, but "
                f"the model has {inner.layers} and {inner.context}; measure this model"
            )
        self.inner = inner
        speed = speed_of(inner, profile)
        self._flops = [block.both_s * speed / (3 * tokens) for block in blocks]

    layers = _of_inner("layers")
    width = _of_inner("width")
    vocab = _of_inner("vocab")
    context = _of_inner("context")
    share_layers = _of_inner("share_layers")
    own_loss = _of_inner("own_loss")
    inputs = _of_inner("inputs")
    targets = _of_inner("targets")
    to_json = _of_inner("to_json")
    largest_tensor = _of_inner("largest_tensor")
    params_of = _of_inner("params_of")
    embedding_params = _of_inner("embedding_params")
    head_params = _of_inner("head_params")
    kept_bytes = _of_inner("kept_bytes")
    embedding_kept_bytes = _of_inner("embedding_kept_bytes")
    head_kept_bytes = _of_inner("head_kept_bytes")
    loss_tokens = _of_inner("loss_tokens")
    tables_bytes = _of_inner("tables_bytes")
    tied = _of_inner("tied")
    frozen = _of_inner("frozen")
    base = _of_inner("base")
    part_params = _of_inner("part_params")
    learned_params = _of_inner("learned_params")
    base_params = _of_inner("base_params")
    largest_base = _of_inner("largest_base")
    base_in = _of_inner("base_in")
    base_size = _of_inner("base_size")
    base_bytes = _of_inner("base_bytes")
    quantised = _of_inner("quantised")
    recast_bytes = _of_inner("recast_bytes")
    frozen_params = _of_inner("frozen_params")
    stage_params = _of_inner("stage_params")
    compression = _of_inner("compression")

    def compressed(self, compression: Compression | None) -> Self:
        found = copy.copy(self)
        found.inner = self.inner.compressed(compression)
        return found

    def frozen_flops(self, part: int) -> float:
        return 0.0  # what was measured has no such gradients

    def flops_of(self, layer: int, tokens: int | None = None) -> float:
        counted = self.inner.flops_of(layer)
        return self._flops[1 + layer] * (self.inner.flops_of(layer, tokens) / counted if counted else 1.0)

    @property
    def embedding_flops(self) -> float:
        return self._flops[0]

    @property
    def head_flops(self) -> float:
        return self._flops[-1]


def speed_of(model: Model, profile: Profile) -> float:
    """The speed at which the device did the counted work of ``model`` [FLOP/s]; a backward counts as two forwards."""
    counted = model.stage_flops(((0, model.layers),), 0)
    return 3 * counted * profile.sequences * profile.context / profile.total_s
