"""Pieces of the native decoder's blocks as torch modules, with the parameter names of the whole model.

See ``pieces`` for the arithmetic. Shapes: B sequences, T tokens, D width, v rows of the vocabulary in a slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from muletrain.model.compression import Borders
from muletrain.model.dropout import dropout
from muletrain.model.module import StageModule
from muletrain.model.spec import EMBEDDING, HEAD
from muletrain.model.stage import Attention, FeedForward, Linear, RMSNorm, seen_by

if TYPE_CHECKING:
    from collections.abc import Mapping

    from muletrain.model.dropout import Masks
    from muletrain.model.pieces import Piece


class PieceModule(StageModule):
    """One ``piece`` of a block, without storage until ``bind``."""

    def __init__(self, piece: Piece) -> None:
        spec = piece.spec
        opens, closes = piece.part == 0 and piece.opens, piece.part == spec.layers + 1 and piece.closes
        super().__init__(spec, max(0, piece.layer), first=opens, last=closes)
        self.piece, self.model = piece, nn.Module()

    @property
    def input_width(self) -> int:
        return self.piece.enters

    @property
    def dtype(self) -> torch.dtype:
        """The weights'."""
        return next(self.parameters()).dtype

    @property
    def only_matrix(self) -> Tensor:
        """The rows of an embedding or of an output matrix."""
        return next(parameter for parameter in self.parameters() if parameter.dim() == 2)

    def _rows(self, name: str) -> dict[str, tuple[int, int, int]]:
        return {name: (0, self.piece.span()[0], self.spec.vocab)}


def _embedding(piece: Piece) -> nn.Embedding:
    return nn.Embedding(piece.size, piece.spec.width, _weight=torch.empty(piece.size, piece.spec.width))


class EmbeddingPiece(PieceModule):
    """Looks up the tokens of some rows: tokens int64 [B, T], or tokens and the sum so far, fp32 [B, T, 1 + D], to the
    same with these tokens' features added."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)
        with torch.device("meta"):
            self.model.embed_tokens = _embedding(piece)

    @property
    def slices(self) -> Mapping[str, tuple[int, int, int]]:
        return self._rows(EMBEDDING)

    def forward(
        self,
        inputs: Tensor,
        masks: Masks | None = None,
        caches: Mapping[int, Any] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        ids = inputs if self.piece.opens else inputs[..., 0].detach().long()
        begin, end = self.piece.span()
        own = (ids >= begin) & (ids < end)
        found = F.embedding((ids - begin).clamp(0, end - begin - 1), self.only_matrix) * own[..., None]
        found = dropout(found, masks, 0, self.piece.spec.dropout)
        if not self.piece.opens:
            found = inputs[..., 1:] + found
        if self.piece.closes:
            return found.to(self.dtype)
        return torch.cat((ids[..., None].float(), found.float()), dim=-1)


class LayerPiece(PieceModule):
    """Adds the second term of a layer's half, or a slice of that term: x [B, T, D], or h and y [B, T, 2 D] in fp32, to
    h and y, or to the half's output [B, T, D]. In 16 bits, y is summed in fp32."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)
        spec, block = piece.spec, nn.Module()
        with torch.device("meta"):
            if piece.kind == "attention":
                self._norm = "input_layernorm"
                block.self_attn = Attention(spec, piece.size)
            else:
                self._norm = "post_attention_layernorm"
                block.mlp = FeedForward(spec, piece.size)
            if piece.opens:
                block.add_module(self._norm, RMSNorm(spec.width, spec.norm_eps))
            self.model.layers = nn.ModuleDict({str(piece.layer): block})
            first, last = piece.kind == "attention" and piece.opens, piece.kind == "feed-forward" and piece.closes
            self.compression = Borders(spec, piece.layer, piece.layer + 1, up=first, down=last)

    @property
    def slices(self) -> Mapping[str, tuple[int, int, int]]:
        spec, (begin, _) = self.piece.spec, self.piece.span()
        where = f"model.layers.{self.piece.layer}"
        if self.piece.kind == "feed-forward":
            rows = {f"{where}.mlp.{name}_proj.weight": (0, begin, spec.ffn) for name in ("gate", "up")}
            return {**rows, f"{where}.mlp.down_proj.weight": (1, begin, spec.ffn)}
        keys, query = begin * spec.head_width, begin * spec.head_width * (spec.heads // spec.kv_heads)
        rows = {f"{where}.self_attn.{name}_proj.weight": (0, keys, spec.kv_width) for name in ("k", "v")}
        rows[f"{where}.self_attn.q_proj.weight"] = (0, query, spec.width)
        return {**rows, f"{where}.self_attn.o_proj.weight": (1, query, spec.width)}

    def forward(
        self,
        inputs: Tensor,
        masks: Masks | None = None,
        caches: Mapping[int, Any] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        piece, spec, dtype = self.piece, self.piece.spec, self.dtype
        block = self.model.get_submodule(f"layers.{piece.layer}")
        if piece.opens:
            y = self.compression.enter(inputs.to(dtype), piece.layer)
            h = block.get_submodule(self._norm)(y)
        else:
            h, y = torch.split(inputs, spec.width, dim=-1)
            h = h.to(dtype)
        if piece.kind == "attention":
            term = block.get_submodule("self_attn")(h, seen_by(spec, h, positions))
        else:
            term = block.get_submodule("mlp")(h)
        site = 2 * piece.layer + (1 if piece.kind == "attention" else 2)
        term = dropout(term, masks, site, spec.dropout)
        y = y + term if piece.opens and piece.closes else y.float() + term
        if not piece.closes:
            return torch.cat((h.float(), y), dim=-1)
        return self.compression.leave(y.to(dtype), piece.layer)


class HeadPiece(PieceModule):
    """The logits of some rows of the output matrix: x [B, T, D], or h, the log-sum-exp of earlier slices' logits and the
    target's logit, fp32 [B, T, D + 2], to the same with these logits."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)
        spec = piece.spec
        with torch.device("meta"):
            if piece.opens:
                self.model.norm = RMSNorm(spec.width, spec.norm_eps)
            if spec.tie:
                self.model.embed_tokens = _embedding(piece)
            else:
                self.lm_head = Linear(spec.width, piece.size, bias=False)

    @property
    def slices(self) -> Mapping[str, tuple[int, int, int]]:
        return self._rows(EMBEDDING if self.piece.spec.tie else HEAD)

    def forward(
        self,
        inputs: Tensor,
        masks: Masks | None = None,
        caches: Mapping[int, Any] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        raise NotImplementedError  # no slice has all logits

    def score(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """``forward`` of a slice before the last one, with the ``targets`` int64 [B, T]."""
        h, total, own = self._scored(inputs, targets.to(inputs.device))
        return torch.cat((h.float(), total[..., None], own[..., None]), dim=-1)

    def loss(
        self,
        inputs: Tensor,
        targets: Tensor,
        masks: Masks | None = None,
        scale: float = 1.0,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The mean cross-entropy, of the last slice. See ``StageModule.loss``."""
        targets = targets.to(inputs.device)
        _, total, own = self._scored(inputs, targets)
        counted = targets != self.spec.vocab
        return ((total - own) * counted).sum() / counted.sum().clamp(min=1)

    def _scored(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h [B, T, D], and log-sum-exp and the target's logit so far, fp32 [B, T]."""
        width, count = self.piece.spec.width, self.piece.loss_tokens
        if self.piece.opens:
            h = self.model.get_submodule("norm")(inputs.to(self.dtype))
        else:
            h, before, found = torch.split(inputs, [width, 1, 1], dim=-1)
            h = h.to(self.dtype)
        flat, wanted = h.flatten(0, 1), targets.flatten()
        chunks = zip(torch.split(flat, count), torch.split(wanted, count), strict=True)
        if len(wanted) <= count:
            made = [self._logits(*chunk) for chunk in chunks]
        else:  # backward computes the logits of one chunk again at a time
            made = [checkpoint(self._logits, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
        total, own = (torch.cat(parts).view(targets.shape) for parts in zip(*made, strict=True))
        if not self.piece.opens:
            total, own = torch.logaddexp(before[..., 0], total), found[..., 0] + own
        return h, total, own

    def _logits(self, h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """[N, D] and int64 [N], to the log-sum-exp of the slice's logits and the targets' logits, 0 elsewhere: fp32
        [N]."""
        begin, end = self.piece.span()
        logits = F.linear(h, self.only_matrix).float()
        own = (targets >= begin) & (targets < end)
        found = logits.gather(1, (targets - begin).clamp(0, end - begin - 1)[:, None])[:, 0]
        return logits.logsumexp(1), found * own


def piece_module(piece: Piece) -> PieceModule:
    """The module of ``piece``, without storage."""
    kinds = {"embedding": EmbeddingPiece, "head": HeadPiece}
    return kinds.get(piece.kind, LayerPiece)(piece)
