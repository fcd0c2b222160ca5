"""Pieces of a block that is too large for a device (ATOM sec. III-C swaps single operators). Imports no torch.

A layer of the native decoder is two sums, x + attention(norm(x)) and x + feed-forward(norm(x)), and so two halves. Each
second term is a sum again, over heads and over hidden features, so a half is cut into slices of its matrices:

    y = x + sum_i dropout(W2[:, i] act(W1[i] h)),   h = norm(x)

where i is a range of hidden features. The first slice makes h, each slice adds to y, and (h, y) goes from slice to
slice, side by side. The mask of the dropout is the same for all slices. An embedding is cut by rows: each slice looks
up its own tokens, and (tokens, sum) goes on. A head is cut by rows of the output matrix: (h, log-sum-exp of the logits
so far, logit of the target) goes on.

Shapes: B sequences, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from muletrain.model.chain import LOSS_BYTES, LOSS_CHUNK
from muletrain.model.measured import MeasuredModel
from muletrain.model.spec import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.model.chain import Model

Kind = Literal["embedding", "attention", "feed-forward", "head"]
MOST_PIECES = 32
"""Slices of one kind in a block at most: what goes from one to the next costs as much as a small slice."""
EXACT_IDS = 1 << 24
"""Tokens go from slice to slice as fp32, which has the integers up to this one."""


class Inside(NamedTuple):
    """Into how many slices blocks are cut. ``attention`` and ``ffn`` 0: layers are whole."""

    embedding: int = 1
    attention: int = 0
    ffn: int = 0
    head: int = 1

    def finer(self, kind: str) -> Inside:
        """One more slice of this ``Kind``; of 'layer', the two halves of whole layers."""
        if kind == "layer":
            return self._replace(attention=1, ffn=1)
        name = "ffn" if kind == "feed-forward" else kind
        return self._replace(**{name: getattr(self, name) + 1})

    def __str__(self) -> str:
        counts = [
            (self.embedding, self.embedding > 1, "the embedding"),
            (self.attention, self.attention > 0, "attention"),
            (self.ffn, self.ffn > 0, "feed-forward"),
            (self.head, self.head > 1, "the head"),
        ]
        return ", ".join(f"{name} in {count}" for count, is_cut, name in counts if is_cut)


WHOLE = Inside()


@dataclass(frozen=True)
class Piece:
    """Slice ``index`` of ``count`` of one kind in part ``part`` of the chain (0: before the first layer)."""

    spec: ModelSpec
    part: int
    kind: Kind
    index: int
    count: int

    @property
    def layer(self) -> int:
        return self.part - 1

    @property
    def opens(self) -> bool:
        """Is this the first slice of its kind?"""
        return self.index == 0

    @property
    def closes(self) -> bool:
        """Is this the last slice of its kind?"""
        return self.index == self.count - 1

    def span(self) -> tuple[int, int]:
        """The range of rows of the vocabulary, of key/value heads, or of hidden features."""
        spec = self.spec
        total = {"attention": spec.kv_heads, "feed-forward": spec.ffn}.get(self.kind, spec.vocab)
        return total * self.index // self.count, total * (self.index + 1) // self.count

    @property
    def size(self) -> int:
        """The length of ``span``."""
        begin, end = self.span()
        return end - begin

    @property
    def enters(self) -> int:
        """Numbers of the input for each token."""
        if self.kind == "embedding":
            return 1 if self.opens else self.spec.width + 1
        if self.kind == "attention" and self.opens and self.layer - 1 in self.spec.borders:
            return self.spec.passed
        return self.spec.width if self.opens else self._between

    @property
    def passed(self) -> int:
        """Numbers of the output for each token."""
        if self.kind == "feed-forward" and self.closes and self.layer in self.spec.borders:
            return self.spec.passed
        return self.spec.width if self.closes else self._between

    @property
    def _between(self) -> int:
        """Numbers for each token between slices."""
        width = self.spec.width
        return {"embedding": width + 1, "head": width + 2}.get(self.kind, 2 * width)

    @property
    def params(self) -> int:
        spec, norm = self.spec, self.spec.width * (self.opens and self.kind != "embedding")
        if self.kind == "attention":
            query = self.size * (spec.heads // spec.kv_heads)
            return 2 * spec.width * spec.head_width * (query + self.size) + norm + self._up
        return (3 if self.kind == "feed-forward" else 1) * spec.width * self.size + norm + self._down

    @property
    def _up(self) -> int:
        """Parameters of the layers after a compressed border."""
        spec, here = self.spec, self.opens and self.layer - 1 in self.spec.borders
        return spec.compression.up_params(spec.width) if spec.compression is not None and here else 0

    @property
    def _down(self) -> int:
        """Parameters of the layers before a compressed border."""
        spec, here = self.spec, self.kind == "feed-forward" and self.closes and self.layer in self.spec.borders
        return spec.compression.down_params(spec.width) if spec.compression is not None and here else 0

    @property
    def share(self) -> float:
        """Of the block's FLOPs."""
        spec = self.spec
        if self.kind in ("embedding", "head"):
            return self.size / spec.vocab
        own = 2.0 * (self.params - self._up - self._down - spec.width * self.opens)
        if self.kind == "attention":
            own += 2.0 * spec.context * spec.width * self.size / spec.kv_heads
        return own / spec.layer_flops()

    @property
    def loss_tokens(self) -> int:
        """Tokens whose logits exist at once."""
        return max(1, LOSS_CHUNK // (LOSS_BYTES * self.size))

    def kept_bytes(self, tokens: int, size: int) -> float:
        """Bytes at the peak of forward and backward of ``tokens``, as ``Model.kept_bytes`` counts, with numbers of
        ``size`` bytes. A slice also holds h in the working precision, and y and the sum in fp32."""
        spec, width = self.spec, self.spec.width
        sliced = 0 if self.opens and self.closes else (size + 2 * 4) * width
        norm = (2 * 4 + size) * width if self.opens else 0
        mask = width if spec.dropout else 0
        if self.kind == "embedding":
            return tokens * (8 + mask + sliced)
        if self.kind == "head":
            chunk = min(tokens, self.loss_tokens)
            again = size * self.params if chunk < tokens else 0  # the gradient of one chunk beside the sum
            return chunk * (LOSS_BYTES + 4 + size) * self.size + tokens * (norm + size * width) + again
        if self.kind == "attention":
            query = self.size * (spec.heads // spec.kv_heads)
            return tokens * (norm + sliced + mask + 2 * size * spec.head_width * (query + self.size))
        return tokens * (norm + sliced + mask + 4 * size * self.size)


def decoder_of(model: Model) -> ModelSpec | None:
    """The native decoder whose blocks can be cut inside; None: this model's blocks are whole. Layers that share weights
    are one block, whose pieces would be needed more than once."""
    inner = model.inner if isinstance(model, MeasuredModel) else model
    return inner if isinstance(inner, ModelSpec) and not inner.share_layers else None


def pieces_of(spec: ModelSpec, part: int, inside: Inside) -> list[Piece]:
    """The pieces of part ``part`` of the chain, in order; empty: the block is whole."""
    if part == 0:
        kinds: Sequence[tuple[Kind, int]] = [("embedding", inside.embedding)] if inside.embedding > 1 else []
    elif part == spec.layers + 1:
        kinds = [("head", inside.head)] if inside.head > 1 else []
    else:
        kinds = [("attention", inside.attention), ("feed-forward", inside.ffn)]
    return [Piece(spec, part, kind, index, count) for kind, count in kinds for index in range(count)]


def most_pieces(spec: ModelSpec) -> Inside:
    """The finest cut."""
    rows = min(MOST_PIECES, spec.vocab) if spec.vocab <= EXACT_IDS else 1
    return Inside(rows, min(MOST_PIECES, spec.kv_heads), min(MOST_PIECES, spec.ffn), rows)
