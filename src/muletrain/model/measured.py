"""A chain whose costs were measured (``muletrain profile``) instead of counted. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.errors import ConfigError
from muletrain.model.chain import Model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from muletrain.config.profile_file import Profile
    from muletrain.model.chain import TensorType, TiedParameter


class MeasuredModel(Model):
    """Stands for ``inner`` in a plan, with measured times instead of counted FLOPs. A plan divides FLOPs by a device's
    speed, so each block gets the measured seconds times ``speed_of(inner, profile)`` [FLOP]. For another sequence length
    these are scaled as the counted FLOPs are."""

    def __init__(self, inner: Model, profile: Profile) -> None:
        """Raises ConfigError if the profile has other parts than the model."""
        blocks, tokens = profile.by_part(), profile.sequences * profile.context
        if len(blocks) != inner.layers + 2 or profile.context != inner.context:
            raise ConfigError(
                f"the profile of {profile.title} has {len(blocks) - 2} blocks and sequences of {profile.context} tokens, but "
                f"the model has {inner.layers} and {inner.context}; measure this model"
            )
        self.inner, self.layers, self.width, self.vocab = inner, inner.layers, inner.width, inner.vocab
        self.context, self.share_layers = inner.context, inner.share_layers
        speed = speed_of(inner, profile)
        self._flops = [block.both_s * speed / (3 * tokens) for block in blocks]

    @property
    def own_loss(self) -> bool:
        return self.inner.own_loss

    @property
    def inputs(self) -> TensorType:
        return self.inner.inputs

    @property
    def targets(self) -> TensorType:
        return self.inner.targets

    def to_json(self) -> str:
        return self.inner.to_json()

    @property
    def largest_tensor(self) -> int:
        return self.inner.largest_tensor

    def params_of(self, layer: int) -> int:
        return self.inner.params_of(layer)

    @property
    def embedding_params(self) -> int:
        return self.inner.embedding_params

    @property
    def head_params(self) -> int:
        return self.inner.head_params

    def flops_of(self, layer: int, tokens: int | None = None) -> float:
        counted = self.inner.flops_of(layer)
        return self._flops[1 + layer] * (self.inner.flops_of(layer, tokens) / counted if counted else 1.0)

    @property
    def embedding_flops(self) -> float:
        return self._flops[0]

    @property
    def head_flops(self) -> float:
        return self._flops[-1]

    def kept_bytes(self, layer: int, size: int) -> float:
        return self.inner.kept_bytes(layer, size)

    def embedding_kept_bytes(self, size: int) -> float:
        return self.inner.embedding_kept_bytes(size)

    def head_kept_bytes(self, size: int) -> float:
        return self.inner.head_kept_bytes(size)

    def tables_bytes(self, sequences: int) -> int:
        return self.inner.tables_bytes(sequences)

    @property
    def tied(self) -> Mapping[str, TiedParameter]:
        return self.inner.tied


def speed_of(model: Model, profile: Profile) -> float:
    """The speed at which the device did the counted work of ``model`` [FLOP/s]; a backward counts as two forwards."""
    counted = model.stage_flops(((0, model.layers),), 0)
    return 3 * counted * profile.sequences * profile.context / profile.total_s
