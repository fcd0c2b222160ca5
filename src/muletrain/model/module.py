"""A stage as a torch module: a run of a chain's blocks, with the parameter names of the whole model."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from muletrain.model.loss import chunked_loss
from muletrain.optim.flat import FlatLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from muletrain.model.chain import Model
    from muletrain.model.dropout import Masks
    from muletrain.model.loss import Head


class Fast(NamedTuple):
    """A block's computation that is compiled (``compute.compiled``)."""

    compute: Callable[..., Tensor]
    """Takes what ``StageModule.sample_block`` gives."""
    shape: tuple[int, ...]
    """The only shape of activations that it computes."""


class StageModule(nn.Module):
    """A new stage has no storage: ``bind`` sets the weights, which the owner may change in place. All stages' states
    together are the model's state."""

    def __init__(self, spec: Model, layer: int = 0, *, first: bool, last: bool) -> None:
        """``layer``: the first one."""
        super().__init__()
        self.spec = spec
        self._layer = layer
        self.is_first, self.is_last = first, last
        self.by_block = False
        """Autograd keeps only the inputs of each block, and backward computes one block again at a time."""
        self.fast: Fast | None = None
        """For blocks in training; None: they compute as they are."""

    @property
    def input_width(self) -> int:
        """Numbers of the input for each token, if that are activations."""
        return self.spec.passed if self._layer - 1 in self.spec.borders else self.spec.width

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter, in a fixed order."""
        return {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}

    def base_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the parameters of ``Model.base``, which ``shapes`` does not count."""
        return {}

    def held(self, name: str, weight: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The parameter ``name`` of ``base_shapes``, on ``device``, for a working precision of ``dtype``. ``weight``: on the
        CPU, as it travels."""
        return weight.to(device)

    @property
    def slices(self) -> Mapping[str, tuple[int, int, int]]:
        """Of matrices of which this is a part: by name, the dimension that is cut, the first index, and the whole matrix's
        length in that dimension."""
        return {}

    @property
    def frozen(self) -> Collection[str]:
        """Names of parameters that are not trained, possibly including other stages."""
        return ()

    def exact(self, dtype: torch.dtype) -> frozenset[str]:
        """Frozen parameters of this stage that are bound in fp32 while all other parameters are in ``dtype``."""
        return frozenset()

    def layout(self) -> FlatLayout:
        """The layout of the parameters in one flat buffer."""
        return FlatLayout.of(self.shapes(), self.frozen)

    def bind(self, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> StageModule:
        """Use ``weights`` (name -> tensor of the same shape, not copied) as the parameters, ``base_shapes`` included.
        Frozen parameters get no gradient. ``dtype``: the working precision; None: that of the weights. Returns the
        stage."""
        frozen = {*self.frozen, *self.base_shapes()}
        for name, shape in (self.shapes() | self.base_shapes()).items():
            if tuple(weights[name].shape) != shape:
                raise ValueError(f"{name}: shape {tuple(weights[name].shape)}, expected {shape}")
            module, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(module), leaf, nn.Parameter(weights[name], requires_grad=name not in frozen))
        return self

    def caches(self) -> Mapping[int, Any] | None:
        """Cache that ``forward`` fills during text generation, so that a token is computed once. None: no cache
        needed."""
        return None

    def loss(
        self,
        inputs: Tensor,
        targets: Tensor,
        masks: Masks | None = None,
        scale: float = 1.0,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The mean loss over the microbatch, a scalar in fp32: of the last stage, from the stage's input (see
        ``forward``). By default the cross-entropy [nats/token] of ``targets`` int64 [B, T]; targets of ``vocab`` do not
        count; 0 if none does. ``scale``: see ``chunked_loss``; ``positions``: see ``forward``."""
        ignored, tokens = self.spec.vocab, self.loss_tokens
        if targets.numel() > tokens:
            return chunked_loss(self.before_head(inputs, masks, positions), targets, ignored, tokens, scale)
        logits = self(inputs, masks, positions=positions).float()
        targets = targets.to(logits.device).flatten()
        total = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=ignored, reduction="sum")
        return total / (targets != ignored).sum().clamp(min=1)

    def _block(self, compute: Callable[..., Any], *given: Any) -> Any:
        """``compute(*given)``, of one block. Dropout needs no generator's state: masks follow from the microbatch."""
        if not (self.by_block and torch.is_grad_enabled()):
            return compute(*given)
        return checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False)

    def sample_block(
        self, sequences: int, device: torch.device
    ) -> tuple[Callable[..., Tensor], tuple[Any, ...]] | None:
        """The computation that all blocks share, and arguments for a microbatch: the first block, activations [B, T, D],
        and more. None: blocks of this model are not compiled."""
        return None

    @property
    def loss_tokens(self) -> int:
        """The largest number of tokens whose loss is computed at once."""
        return self.spec.loss_tokens

    def before_head(self, inputs: Tensor, masks: Masks | None, positions: Tensor | None = None) -> Head:
        """Compute everything before the head of the last stage, if ``loss_tokens`` is less than a microbatch."""
        raise NotImplementedError

    @abstractmethod
    def forward(
        self,
        inputs: Tensor,
        masks: Masks | None = None,
        caches: Mapping[int, Any] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Tokens int64 [B, T] (or as in ``Model.inputs``) in the first stage, else activations [B, T, D], to
        activations, or to logits [B, T, V] in the last.

        ``masks``: identity of the microbatch, None outside of training. ``caches``: see ``caches``. ``positions``: of each
        token in its conversation, int64 [B, T] on the CPU; tokens attend within these. None: a row is one text.
        """
