"""A stage as a chain of blocks, cut into sub-models.

A block is an ``nn.Module`` without storage, called with (activations, dropout masks), whose parameters have the names
of the whole model. The native decoder's chain is the embedding, each layer, and the head; or pieces of these
(``model.pieces``), if a block is too large for the device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from muletrain.compute.swap.backing import WINDOW
from muletrain.errors import CapacityError
from muletrain.model.make import make_block
from muletrain.model.piece_modules import HeadPiece, piece_module
from muletrain.model.pieces import WHOLE, decoder_of, pieces_of
from muletrain.optim.flat import FlatLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from muletrain.model.chain import Model
    from muletrain.model.dropout import Masks
    from muletrain.model.module import StageModule
    from muletrain.model.pieces import Inside
    from muletrain.planning.partition import Cut


def chain_cut(spec: Model, cut: Cut, stage: int) -> tuple[Cut, range]:
    """The whole model cut into blocks, and the range of ``stage``. Layers that share weights are one block."""
    runs = cut if spec.share_layers else tuple((layer, layer + 1) for layer in range(spec.layers))
    blocks = ((0, 0), *runs, (spec.layers, spec.layers))
    first, end = (stage, stage + 1) if spec.share_layers else cut[stage]
    return blocks, range(0 if stage == 0 else first + 1, end + 2 if stage == len(cut) - 1 else end + 1)


def chain_of(spec: Model, cut: Cut, stage: int, inside: Inside = WHOLE) -> list[StageModule]:
    """The blocks of ``stage``, or their pieces, in order. Raises CapacityError for weights that two blocks share."""
    runs, own = chain_cut(spec, cut, stage)
    blocks = [make_block(spec, index, runs) for index in own]
    names = Counter(name for block in blocks for name in block.shapes())
    if tied := [name for name, times in names.items() if times > 1]:
        raise CapacityError(
            f"{tied[0]} is used by two blocks (tied weights), so stage {stage} cannot pass through a device that is smaller than it: take "
            f"model.untie=true, more memory, or more stages"
        )
    if inside == WHOLE or (decoder := decoder_of(spec.placed(cut))) is None:
        return blocks
    found: list[StageModule] = []
    for index, block in zip(own, blocks, strict=True):
        found += [piece_module(piece) for piece in pieces_of(decoder, index, inside)] or [block]
    return found


class Window(NamedTuple):
    """A part of a sub-model's weights, and of the stage's flat buffer [P]: ``rows`` of ``length`` numbers, of which
    each begins ``stride`` numbers after the one before."""

    begin: int
    """The first number in [P]."""
    length: int
    rows: int = 1
    stride: int = 0
    at: int = 0
    """The first number in the sub-model's [S], where rows follow each other."""

    @property
    def end(self) -> int:
        """After the last number in [P]."""
        return self.begin + (self.rows - 1) * self.stride + self.length

    @property
    def size(self) -> int:
        return self.rows * self.length

    def of(self, flat: Tensor) -> Tensor:
        """These numbers of ``flat`` [P]: a view, [length] or [rows, length]."""
        if self.rows == 1:
            return flat[self.begin : self.end]
        return flat.as_strided((self.rows, self.length), (self.stride, 1), flat.storage_offset() + self.begin)

    def own(self, flat: Tensor) -> Tensor:
        """These numbers of ``flat`` [S]: a view of the same shape."""
        part = flat[self.at : self.at + self.size]
        return part if self.rows == 1 else part.view(self.rows, self.length)


@dataclass(frozen=True)
class SubModel:
    """Consecutive blocks that are on the device together. S: their parameters."""

    number: int
    blocks: tuple[StageModule, ...]
    keys: tuple[dict[str, str], ...]
    """Of each block, the names in ``layout`` of the parameters: slices of one matrix have one name in their modules."""
    layout: FlatLayout
    """The blocks' parameters, [S], in the order of the stage's flat buffer."""
    trainable: FlatLayout
    """The trained parameters, which come first."""
    segments: tuple[Window, ...]
    """Places in the stage's flat buffer, in the order of ``layout``, S numbers together."""

    @property
    def size(self) -> int:
        """S."""
        return self.layout.size

    @property
    def width(self) -> int:
        """Numbers of the input for each token, if that are activations."""
        return self.blocks[0].input_width

    @property
    def base(self) -> set[str]:
        """Names of the parameters of ``Model.base``."""
        return {name for block in self.blocks for name in block.base_shapes()}

    def bind(self, weights: Tensor, beside: Mapping[str, Tensor]) -> list[Tensor]:
        """Compute with ``weights``, [S], and with ``beside``: ``base``, and tensors in the place of some. Returns the
        trained parameters, in the order of ``layout``."""
        views = {**self.layout.views(weights), **beside}
        found: dict[str, Tensor] = {}
        for block, keys in zip(self.blocks, self.keys, strict=True):
            base = {name: beside[name] for name in block.base_shapes()}
            bound = block.bind({name: views[key] for name, key in keys.items()} | base, weights.dtype)
            found.update((keys[name], parameter) for name, parameter in bound.named_parameters())
        return [found[name] for name in self.trainable.names]

    def unbind(self) -> None:
        """Let go of the weights."""
        for block in self.blocks:
            for name, parameter in list(block.named_parameters()):
                module, _, leaf = name.rpartition(".")
                setattr(block.get_submodule(module), leaf, nn.Parameter(parameter.detach().to("meta")))

    def __call__(
        self, x: Tensor, masks: Masks | None, targets: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        return self._through(self.blocks, x, masks, targets, positions)

    def loss(
        self, x: Tensor, targets: Tensor, masks: Masks | None, scale: float, positions: Tensor | None = None
    ) -> Tensor:
        """Of the last sub-model of the last stage. See ``StageModule.loss``."""
        x = self._through(self.blocks[:-1], x, masks, targets, positions)
        return self.blocks[-1].loss(x, targets, masks, scale, positions)

    def _through(
        self,
        blocks: Sequence[StageModule],
        x: Tensor,
        masks: Masks | None,
        targets: Tensor | None,
        positions: Tensor | None,
    ) -> Tensor:
        for block in blocks:
            if isinstance(block, HeadPiece):
                assert targets is not None  # at the last stage
                x = block.score(x, targets)
            else:
                x = block(x, masks, positions=positions)
        return x

    def pieces(self, size: int, *, trained: bool = False) -> Iterator[Window]:
        """The segments in windows of at most ``size`` numbers, or of one row. Rows that are apart pass through staging
        buffers of ``WINDOW`` numbers. ``trained``: of trained parameters only."""
        at, most = 0, self.trainable.size if trained else self.size
        for begin, length, rows, stride, _ in self.segments:
            if rows == 1:
                end = min(begin + length, begin + most - at)
                for a in range(begin, end, size):
                    yield (found := Window(a, min(size, end - a), at=at))
                    at += found.size
            elif at < most:
                each = max(1, min(size, WINDOW) // length)
                for row in range(0, rows, each):
                    yield (found := Window(begin + row * stride, length, min(each, rows - row), stride, at))
                    at += found.size


def sub_models(chain: Sequence[StageModule], runs: Cut, layout: FlatLayout) -> list[SubModel]:
    """Cut ``chain`` into ``runs``. ``layout``: the stage's."""
    return [_sub_model(n, tuple(chain[a:b]), layout) for n, (a, b) in enumerate(runs)]


def _sub_model(number: int, blocks: tuple[StageModule, ...], whole: FlatLayout) -> SubModel:
    where = dict(zip(whole.names, whole.ranges(), strict=True))
    found: list[tuple[str, tuple[int, ...], Window]] = []
    keys: list[dict[str, str]] = []
    for block in blocks:
        shapes, slices = block.shapes(), block.slices
        keys.append({name: f"{name}[{slices[name][1]}]" if name in slices else name for name in shapes})
        for name, key in keys[-1].items():
            found.append((key, shapes[name], _place(where[name], shapes[name], slices.get(name))))
    found.sort(key=lambda each: each[2].begin)
    decayed, learned = (
        sum(window.size for _, _, window in found if window.end <= run) for run in (whole.decayed, whole.learned)
    )
    names, sizes = tuple(key for key, _, _ in found), tuple(shape for _, shape, _ in found)
    layout = FlatLayout(names, sizes, sum(window.size for _, _, window in found), decayed, learned)
    segments: list[Window] = []
    for _, _, window in found:
        if segments and window.rows == segments[-1].rows == 1 and segments[-1].end == window.begin:
            window = Window(segments[-1].begin, segments.pop().length + window.length)
        segments.append(window)
    return SubModel(number, blocks, tuple(keys), layout, layout.trainable(), tuple(segments))


def _place(where: tuple[int, int], shape: tuple[int, ...], cut: tuple[int, int, int] | None) -> Window:
    """The place of a parameter of this shape, which is a slice of the matrix at ``where`` if that is ``cut``."""
    begin, end = where
    if cut is None:
        return Window(begin, end - begin)
    dimension, first, total = cut
    if dimension == 0 or shape[1] == total:  # rows follow each other
        return Window(begin + first * shape[1], shape[0] * shape[1])
    return Window(begin + first, shape[1], shape[0], total)
