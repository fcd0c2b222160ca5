"""Frozen weights that a device holds in another form than operators take: in another type, or as codes of
``bitsandbytes``, in 8 bits (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", sec. 2.1) or in 4 bits
(NF4: Dettmers et al. 2023, "QLoRA", sec. 3)."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
_VIEWS = {aten.t.default, aten.transpose.int, aten.permute.default, aten.detach.default, aten.alias.default}
BLOCK = 64
"""Numbers that share a scale, in fp32: as in QLoRA."""
_CHUNK = BLOCK << 12
"""Numbers that are quantised at once: ``bitsandbytes`` needs 16 bytes of scratch memory for each."""


class Held(Tensor):
    """A frozen weight whose numbers are made for each operator that takes them, and then freed. Autograd keeps this
    tensor, so backward makes the numbers again."""

    @staticmethod
    def __new__(cls: type[Held], make: Callable[[], Tensor], like: Tensor, device: torch.device) -> Held:
        """``make`` makes the numbers, on ``device``, in the shape, strides and type of ``like``, a tensor on the meta
        device."""
        found: Held = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        return found

    def __init__(self, make: Callable[[], Tensor], like: Tensor, device: torch.device) -> None:
        self.make, self._like = make, like

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _VIEWS:
            held, *rest = args
            return cls(lambda: func(held.make(), *rest), func(held._like, *rest), held.device)
        return func(*tree_map_only(cls, lambda held: held.make(), args), **(kwargs or {}))


def recast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``weight`` for operators that take ``dtype``."""
    if weight.dtype == dtype:
        return weight
    like = torch.empty_strided(weight.shape, weight.stride(), dtype=dtype, device="meta")
    return Held(lambda: weight.to(dtype), like, weight.device)


def quantised(weight: Tensor, kind: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``weight``, on the CPU, as codes and scales on ``device``, for operators that take ``dtype``. ``kind``:
    ``AdapterConfig.quantise``. A number is the value of a code times a scale. All machines make codes on the CPU, so that
    replicas on different devices have the same codes."""
    bnb = library()
    code = bnb.create_linear_map() if kind == "int8" else None  # evenly spaced, as whole numbers are
    made = [
        bnb.quantize_4bit(piece, blocksize=BLOCK, quant_type=kind)
        if code is None
        else bnb.quantize_blockwise(piece, code=code, blocksize=BLOCK)
        for piece in torch.split(weight.reshape(-1), _CHUNK)
    ]
    codes = torch.cat([each for each, _ in made]).to(device)
    state = bnb.QuantState(
        absmax=torch.cat([each.absmax for _, each in made]).to(device),
        shape=weight.shape,
        code=None if code is None else code.to(device),
        blocksize=BLOCK,
        quant_type=kind,
        dtype=dtype,
    )
    dequantise = bnb.dequantize_4bit if code is None else bnb.dequantize_blockwise
    like = torch.empty(weight.shape, dtype=dtype, device="meta")
    return Held(lambda: dequantise(codes, state).view(like.shape), like, device)


@functools.cache
def library() -> Any:
    """``bitsandbytes.functional``. Raises ConfigError where it is not installed."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels that are not used here
    try:
        import bitsandbytes.functional
    except Exception as e:  # it also looks for libraries of the GPU
        raise ConfigError(
            "adapter.quantise: quantised weights need the package bitsandbytes; install it with `pip install 'muletrain[quantized]'` "
            f"on each machine, or take adapter.quantise = 'none' ({' '.join(str(e).split())[:200]})"
        ) from e
    return bitsandbytes.functional
