"""A stage as a chain of blocks, cut into sub-models.

A block is an ``nn.Module`` without storage, called with (activations, dropout masks), whose parameters have the names
of the whole model. The native decoder's chain is the embedding, each layer, and the head.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from muletrain.errors import CapacityError
from muletrain.model.make import make_block

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from muletrain.model.chain import Model
    from muletrain.model.dropout import Masks
    from muletrain.model.module import StageModule
    from muletrain.optim.flat import FlatLayout
    from muletrain.planning.partition import Cut


def chain_cut(spec: Model, cut: Cut, stage: int) -> tuple[Cut, range]:
    """The whole model cut into blocks, and the range of ``stage``. Layers that share weights are one block."""
    runs = cut if spec.share_layers else tuple((layer, layer + 1) for layer in range(spec.layers))
    blocks = ((0, 0), *runs, (spec.layers, spec.layers))
    first, end = (stage, stage + 1) if spec.share_layers else cut[stage]
    return blocks, range(0 if stage == 0 else first + 1, end + 2 if stage == len(cut) - 1 else end + 1)


def chain_of(spec: Model, cut: Cut, stage: int) -> list[StageModule]:
    """The blocks of ``stage``, in order. Raises CapacityError for weights that two blocks share."""
    runs, own = chain_cut(spec, cut, stage)
    blocks = [make_block(spec, index, runs) for index in own]
    names = Counter(name for block in blocks for name in block.shapes())
    if tied := [name for name, times in names.items() if times > 1]:
        raise CapacityError(
            f"{tied[0]} is used by two blocks (tied weights), so stage {stage} cannot pass through a device that is smaller than it: take "
            f"model.untie=true, more memory, or more stages"
        )
    return blocks


@dataclass(frozen=True)
class SubModel:
    """Consecutive blocks that are on the device together. S: their parameters."""

    number: int
    blocks: tuple[StageModule, ...]
    layout: FlatLayout
    """The blocks' parameters, [S], in the order of the stage's flat buffer."""
    trainable: FlatLayout
    """The trained parameters, which come first."""
    segments: tuple[tuple[int, int], ...]
    """Places in the stage's flat buffer: ranges in order, S numbers together."""

    @property
    def size(self) -> int:
        """S."""
        return self.layout.size

    @property
    def width(self) -> int:
        """Numbers of the input for each token, if that are activations."""
        return self.blocks[0].input_width

    def bind(self, weights: Tensor, exact: Mapping[str, Tensor]) -> list[Tensor]:
        """Compute with ``weights``, [S], and with ``exact`` in the place of some. Returns the trained parameters, in
        the order of ``layout``."""
        views = {**self.layout.views(weights), **exact}
        found: dict[str, Tensor] = {}
        for block in self.blocks:
            found.update(block.bind(views).named_parameters())
        return [found[name] for name in self.trainable.names]

    def unbind(self) -> None:
        """Let go of the weights."""
        for block in self.blocks:
            for name, parameter in list(block.named_parameters()):
                module, _, leaf = name.rpartition(".")
                setattr(block.get_submodule(module), leaf, nn.Parameter(parameter.detach().to("meta")))

    def __call__(self, x: Tensor, masks: Masks | None) -> Tensor:
        for block in self.blocks:
            x = block(x, masks)
        return x

    def loss(self, x: Tensor, targets: Tensor, masks: Masks | None, scale: float) -> Tensor:
        """Of the last sub-model of the last stage. See ``StageModule.loss``."""
        for block in self.blocks[:-1]:
            x = block(x, masks)
        return self.blocks[-1].loss(x, targets, masks, scale)

    def pieces(self, size: int, *, trained: bool = False) -> Iterator[tuple[int, int, int]]:
        """The segments in pieces of at most ``size`` numbers: (begin, end) in the stage's buffer, and begin in [S].
        ``trained``: of trained parameters only."""
        at, most = 0, self.trainable.size if trained else self.size
        for begin, end in self.segments:
            for a in range(begin, min(end, begin + most - at), size):
                b = min(a + size, end, a + most - at)
                yield a, b, at
                at += b - a


def sub_models(chain: Sequence[StageModule], runs: Cut, layout: FlatLayout) -> list[SubModel]:
    """Cut ``chain`` into ``runs``. ``layout``: the stage's."""
    return [_sub_model(n, tuple(chain[a:b]), layout) for n, (a, b) in enumerate(runs)]


def _sub_model(number: int, blocks: tuple[StageModule, ...], whole: FlatLayout) -> SubModel:
    where = dict(zip(whole.names, whole.ranges(), strict=True))
    layout = whole.only({name for block in blocks for name, _ in block.named_parameters()})
    segments: list[tuple[int, int]] = []
    for begin, end in (where[name] for name in layout.names):
        if segments and segments[-1][1] == begin:
            begin = segments.pop()[0]
        segments.append((begin, end))
    return SubModel(number, blocks, layout, layout.trainable(), tuple(segments))
