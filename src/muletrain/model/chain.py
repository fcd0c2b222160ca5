"""A model as a chain of blocks, for planning, estimates, runs and exports. Imports no torch.

A cut separates blocks. The first stage also has the part before the first block (the embedding), the last stage the
part after the last block (the head). Two kinds of chain exist: ``spec.ModelSpec``, the native decoder, and
``traced.chain.TracedModel``, any causal language model of ``transformers``.

Units: parameters are counted in numbers, FLOPs per token of a forward pass (a backward pass costs twice that), one
multiply-add = 2 FLOPs.
"""

from __future__ import annotations

import itertools
import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from muletrain.errors import ConfigError
from muletrain.planning.partition import Cut, partition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from muletrain.config.model_sections import ModelConfig

MAX_SEARCH = 1 << 24
"""Stages x layers^2: the search for the best cut takes some 32 bytes per unit."""


LOSS_BYTES = 3 * 4
"""Bytes for each entry of the vocabulary at the peak of the loss's backward: log-probabilities, and the gradients of
log-probabilities and logits, in fp32."""
LOSS_CHUNK = 1 << 28
"""``LOSS_BYTES`` of the tokens whose loss is computed at once [bytes]. With a vocabulary of 128k these are 174 tokens,
which keep an H200 busy while the output matrix is read."""
MAX_SAMPLE = 1 << 28
"""Most numbers of one sample."""


@dataclass(frozen=True)
class TensorType:
    """Contents of each of the B samples of a microbatch."""

    dtype: Literal["int64", "float32"]
    shape: tuple[int, ...] | None = None
    """Shape of one sample; None: an integer for each of T tokens."""
    column: bool = False
    """Of targets that do not all count: one more integer follows the tokens (``compute.checks.weighed``)."""
    apart: bool = False
    """Of these: ``vocab + 1`` does not count either, and begins a conversation (``loss.positions_in``)."""

    def batch(self, sequences: int, tokens: int) -> tuple[int, ...]:
        """The shape of a microbatch."""
        return (sequences, *((tokens + self.column,) if self.shape is None else self.shape))

    def __str__(self) -> str:
        tokens = "T + 1" if self.column else "T"
        return f"{self.dtype}[{tokens if self.shape is None else ', '.join(map(str, self.shape))}]"

    @classmethod
    def parse(cls, text: str) -> TensorType:
        """The inverse of ``str``. Raises ConfigError."""
        match = re.fullmatch(r"(int64|float32)\[(T|[0-9, ]{0,64})\]", text)
        try:
            if match is None or match.groups() == ("float32", "T"):
                raise ValueError("not a type of tensors")
            shape = None if match[2] == "T" else tuple(int(n) for n in match[2].split(",") if n.strip())
            if len(shape or ()) > 6 or not 1 <= math.prod(shape or ()) <= MAX_SAMPLE:
                raise ValueError(f"a sample has 1 to {MAX_SAMPLE} numbers, in at most 6 dimensions")
        except ValueError as e:
            raise ConfigError(f"{text[:80]!r}: {e}; write it like float32[3, 32, 32], int64[] or int64[T]") from e
        return cls("int64" if match[1] == "int64" else "float32", shape)


TOKENS = TensorType("int64")


@dataclass(frozen=True)
class Compression:
    """Learned compression of what goes from stage to stage (SWARM, app. J.1): D numbers a token become C = D / factor.

    The last layer before a border is followed by a layer norm, and either a projection or the maximum over windows of
    ``factor`` features; the next stage begins with a layer norm and a matrix back to D. Norms have no biases.
    """

    kind: Literal["bottleneck", "maxout"]
    factor: int
    after: tuple[int, ...] | None = None
    """The layers whose output is compressed; None: the last layer of each stage but the last, for any cut."""

    @classmethod
    def from_config(cls, config: ModelConfig) -> Compression | None:
        """As configured, if at all."""
        if config.compression == "none":
            return None
        return cls(config.compression, config.compression_factor, config.compression_after)

    @classmethod
    def of(cls, fields: Any) -> Compression | None:
        """From JSON. Raises TypeError or ValueError."""
        if fields is None:
            return None
        after = fields["after"]
        return cls(**{**fields, "after": None if after is None else tuple(map(int, after))})

    def check(self, width: int, layers: int) -> None:
        """Raises ConfigError for a kind that does not exist, a width that the factor does not divide, and borders that are
        not in order."""
        if self.kind not in ("bottleneck", "maxout"):
            raise ConfigError(f"model.compression: {self.kind!r}; use 'bottleneck' or 'maxout'")
        if self.factor < 2 or width % self.factor:
            raise ConfigError(f"model.compression_factor: {self.factor} does not divide the model's width {width}")
        if any(not a < b for a, b in itertools.pairwise((-1, *(self.after or ()), layers - 1))):
            raise ConfigError(
                f"model.compression_after: {list(self.after or ())} are no borders of {layers} layers; leave it out"
            )

    def down_params(self, width: int) -> int:
        """Parameters before a border."""
        return width + (width * (width // self.factor) if self.kind == "bottleneck" else 0)

    def up_params(self, width: int) -> int:
        """Parameters after a border."""
        return (1 + width) * (width // self.factor)

    def kept_bytes(self, width: int, size: int) -> tuple[int, int]:
        """Bytes that autograd saves per token, before and after a border: inputs of norms and of what follows them."""
        return 2 * size * width + size * (width // self.factor), 2 * size * (width // self.factor)


class TiedParameter(NamedTuple):
    """A parameter that several parts of a chain use."""

    parts: tuple[int, ...]
    """0: the part before the first block, then the blocks, then the part after the last block."""
    size: int
    """Numbers."""


class Model(ABC):
    """A chain of ``layers`` blocks, numbered from 0, with a part before the first and a part after the last."""

    layers: int
    """Blocks that a cut can separate."""
    width: int
    """Numbers that one block passes to the next for each token."""
    vocab: int
    context: int
    """Longest sequence [tokens]."""
    share_layers: bool
    """Inside a stage one block is repeated."""
    compression: Compression | None = None
    """At the borders between stages."""
    apart: bool = False
    """In a row of several conversations, tokens attend within their own, which has positions from 0."""

    @property
    def passed(self) -> int:
        """Numbers that one stage passes to the next for each token."""
        return self.width if self.compression is None else self.width // self.compression.factor

    @property
    def borders(self) -> tuple[int, ...]:
        """The layers whose output is compressed, as far as known without a cut."""
        return () if self.compression is None else self.compression.after or ()

    def compressed(self, compression: Compression | None) -> Self:
        """The same model with this compression."""
        return replace(self, compression=compression)  # type: ignore[type-var]

    def placed(self, cut: Cut) -> Self:
        """The model with compression at the borders of ``cut``, unless it has borders already."""
        if self.compression is None or self.compression.after is not None:
            return self
        return self.compressed(replace(self.compression, after=_ends(cut)))

    def _sides(self, cut: Cut, stage: int) -> tuple[int, int]:
        """How many borders ``stage`` compresses at, and how many it decompresses at."""
        unplaced = self.compression is not None and self.compression.after is None
        borders, (first, end) = _ends(cut) if unplaced else self.borders, cut[stage]
        return sum(first <= b < end for b in borders), sum(first <= b + 1 < end for b in borders)

    @property
    def frozen(self) -> Mapping[str, str]:
        """The parameters that are not trained, with types ('float32', 'int64'). Runs hold all frozen parameters in
        fp32."""
        return {}

    @property
    def base(self) -> Set[str]:
        """Of ``frozen``, the weights beside an adapter. They are no part of a stage's state: each machine reads them itself
        (``runtime.transfer.base``), and holds them as their files do."""
        return frozenset()

    @property
    def own_loss(self) -> bool:
        """The last block computes a loss, not logits of the next token."""
        return False

    @property
    def inputs(self) -> TensorType:
        """Input of the first stage. Integers are below ``vocab``."""
        return TOKENS

    @property
    def targets(self) -> TensorType:
        """Targets of the loss. Integers are below ``vocab``."""
        return TOKENS

    @abstractmethod
    def to_json(self) -> str:
        """The complete description of the model (``make.model_from_json``)."""

    @property
    @abstractmethod
    def largest_tensor(self) -> int:
        """Numbers of the largest parameter tensor of a block."""

    @abstractmethod
    def params_of(self, layer: int) -> int:
        """Parameters of a block."""

    def part_params(self, part: int) -> int:
        """Parameters in the state of a part of the chain (``TiedParameter.parts``), each counted in the first part that has
        it."""
        ends = {0: self.embedding_params, self.layers + 1: self.head_params}
        return ends[part] if part in ends else self.params_of(part - 1)

    def learned_params(self, part: int) -> int:
        """The trained ones of ``part_params``."""
        return self.part_params(part)

    @property
    @abstractmethod
    def embedding_params(self) -> int:
        """Parameters of the part before the first block."""

    @property
    @abstractmethod
    def head_params(self) -> int:
        """Parameters of the part after the last block."""

    @abstractmethod
    def flops_of(self, layer: int, tokens: int | None = None) -> float:
        """Forward FLOPs per token of a block in a sequence of ``tokens`` (default: the context)."""

    @property
    @abstractmethod
    def embedding_flops(self) -> float:
        """Forward FLOPs per token of the part before the first block."""

    @property
    @abstractmethod
    def head_flops(self) -> float:
        """Forward FLOPs per token of the part after the last block, the loss included."""

    @abstractmethod
    def kept_bytes(self, layer: int, size: int) -> float:
        """Bytes that autograd saves for the backward of a block, per token. ``size``: bytes of a number in the working
        precision."""

    @abstractmethod
    def embedding_kept_bytes(self, size: int) -> float:
        """As ``kept_bytes``, for the part before the first block."""

    @abstractmethod
    def head_kept_bytes(self, size: int) -> float:
        """As ``kept_bytes``, for the part after the last block, including ``LOSS_BYTES``."""

    @property
    def loss_tokens(self) -> int:
        """The largest number of tokens whose loss is computed at once."""
        return max(1, LOSS_CHUNK // (LOSS_BYTES * self.vocab))

    def head_bytes(self, tokens: int, size: int) -> float:
        """Bytes at the peak of the loss of ``tokens``: of one chunk, and the gradients of the chunks' inputs."""
        chunk = min(tokens, self.loss_tokens)
        return chunk * self.head_kept_bytes(size) + (tokens * size * self.width if chunk < tokens else 0)

    def tables_bytes(self, sequences: int) -> int:
        """Bytes that all blocks share on the device besides weights, with microbatches of ``sequences``."""
        return 0

    @property
    def tied(self) -> Mapping[str, TiedParameter]:
        """By name, the parameters that several parts of the chain use (tied weights)."""
        return {}

    def users(self, cut: Cut) -> dict[str, tuple[int, ...]]:
        """By name of ``tied``, but for ``base``, the stage of each part that uses the parameter. Each stage has a copy, and
        the copies' gradients are added (``optim.tied``)."""
        stage_of = [0, *(stage for stage, (first, end) in enumerate(cut) for _ in range(first, end)), len(cut) - 1]
        tied = {name: found for name, found in self.tied.items() if name not in self.base}
        return {name: tuple(stage_of[part] for part in found.parts) for name, found in tied.items()}

    @property
    def most_stages(self) -> int:
        """The largest number of stages for a cut."""
        pairs = {found.parts for name, found in self.tied.items() if name not in self.base}
        if self.compression is not None and self.compression.after is not None:
            return len(self.compression.after) + 1
        return self.layers if not pairs or (len(pairs) == 1 and len(pairs.pop()) == 2) else 1

    def check_cut(self, cut: Cut) -> None:
        """Raises ConfigError if more than two stages would share parameters, and for a border without the compression
        that this model has at its borders."""
        if self.compression is not None:
            self.compression.check(self.width, self.layers)
            borders = _ends(cut) if self.compression.after is None else self.compression.after
            if extra := [end for _, end in cut[:-1] if end - 1 not in borders]:
                raise ConfigError(
                    f"fleet.stages: the model compresses after layers {', '.join(str(b + 1) for b in borders) or 'none'}, and stages can "
                    f"only meet there, not after layer {extra[0]}; take at most {len(borders) + 1} stages, or leave out fleet.layers"
                )
        sharing: set[int] = set()
        for name, stages in self.users(cut).items():
            sharing.update(stages if len({*stages}) > 1 else ())
            if len(sharing) > 2:
                raise ConfigError(
                    f"fleet.stages: {name} is used in stages {', '.join(map(str, sorted({*stages})))}, and at most two stages may "
                    f"share parameters (tied weights); take fewer stages, or model.untie=true, which trains an output "
                    f"matrix of its own that begins as a copy"
                )

    @property
    def layer_params(self) -> int:
        """Parameters of the largest block."""
        return max(self.params_of(layer) for layer in range(self.layers))

    def layer_flops(self, tokens: int | None = None) -> float:
        """Mean forward FLOPs per token of a block."""
        return sum(self.flops_of(layer, tokens) for layer in range(self.layers)) / self.layers

    @property
    def params(self) -> int:
        """Parameters of the whole model without sharing (as exported)."""
        return sum(map(self.params_of, range(self.layers))) + self.embedding_params + self.head_params

    def stage_params(self, cut: Cut, stage: int) -> int:
        """P: parameters in the state of ``stage``; shared layers count once."""
        first, end = cut[stage]
        total = sum(map(self.params_of, range(first, first + 1 if self.share_layers else end)))
        total += self.embedding_params * (stage == 0) + self.head_params * (stage == len(cut) - 1)
        return total + self.copied_params(cut, stage) + self.compression_params(cut, stage)

    def base_in(self, part: int) -> list[str]:
        """Names of ``base`` in a part of the chain, sorted."""
        return []

    def base_params(self, parts: range) -> int:
        """Parameters of ``base`` in ``parts`` of the chain (``TiedParameter.parts``)."""
        return 0

    @property
    def base_size(self) -> int:
        """Bytes of most numbers of ``base``."""
        return 0

    @property
    def quantised(self) -> Mapping[str, str]:
        """Of ``base``, the matrices that a device holds as codes, with the kind of code ('int8', 'nf4')."""
        return {}

    def base_bytes(self, cut: Cut, stage: int) -> int:
        """``base`` of ``stage``, as a device holds it."""
        return 0

    def frozen_flops(self, part: int) -> float:
        """The forward FLOPs per token of a part with weights of ``base``, of which backward computes no gradient."""
        return 2.0 * self.base_params(range(part, part + 1)) if part else 0.0  # the first part looks up

    def recast_bytes(self, parts: range, size: int) -> int:
        """The largest tensor of ``base`` in ``parts`` that is not held in the working precision of ``size`` bytes, in that:
        it is made for each operator."""
        return 0

    def largest_base(self, cut: Cut, stage: int) -> int:
        """Numbers of the largest tensor of ``base`` in ``stage``."""
        return 0

    def parts_of(self, cut: Cut, stage: int) -> range:
        """The parts of the chain in ``stage``."""
        first, end = cut[stage]
        return range(first + 1 if stage else 0, end + 1 if stage < len(cut) - 1 else end + 2)

    def compression_params(self, cut: Cut, stage: int) -> int:
        """Parameters of ``stage`` that compress and decompress."""
        if self.compression is None:
            return 0
        down, up = self._sides(cut, stage)
        return down * self.compression.down_params(self.width) + up * self.compression.up_params(self.width)

    def cut_params(self, cut: Cut) -> int:
        """Parameters of all stages, each counted once."""
        found = sum(self.stage_params(cut, s) - self.copied_params(cut, s) for s in range(len(cut)))
        return found + self.base_params(range(self.layers + 2))

    def trained_params(self, cut: Cut, stage: int) -> int:
        """G: the part of ``stage_params`` with a gradient, which is averaged; at least one number (``optim.flat``)."""
        return max(1, self.stage_params(cut, stage) - self.frozen_params(cut, stage))

    def frozen_params(self, cut: Cut, stage: int) -> int:
        """Parameters in the state of ``stage`` that are never changed."""
        return 0

    def copied_params(self, cut: Cut, stage: int) -> int:
        """Parameters in its state that ``stage`` shares with an earlier stage, and that the costs of the parts do not
        count."""
        shared = (name for name, stages in self.users(cut).items() if stage in stages and stage != stages[0])
        return sum(self.tied[name].size for name in shared)

    def shared_params(self, cut: Cut, stage: int) -> int:
        """Trained parameters of ``stage`` that another stage also has; gradients are exchanged at the end of a step."""
        users = {name: stages for name, stages in self.users(cut).items() if name not in self.frozen}
        return sum(self.tied[name].size for name, stages in users.items() if stage in stages and len({*stages}) > 1)

    def stage_flops(self, cut: Cut, stage: int, tokens: int | None = None) -> float:
        """Forward FLOPs per token of ``stage``."""
        first, end = cut[stage]
        total = sum(self.flops_of(layer, tokens) for layer in range(first, end))
        total += 2.0 * self.compression_params(cut, stage)
        return total + self.embedding_flops * (stage == 0) + self.head_flops * (stage == len(cut) - 1)

    def stage_kept_bytes(self, cut: Cut, stage: int, tokens: int, size: int) -> float:
        """Bytes that autograd saves for the backward of ``tokens`` in ``stage``."""
        first, end = cut[stage]
        each = sum(self.kept_bytes(layer, size) for layer in range(first, end)) + self.entry_kept_bytes(
            cut, stage, size
        )
        return tokens * each + (self.head_bytes(tokens, size) if stage == len(cut) - 1 else 0)

    def borders_bytes(self, cut: Cut, stage: int, size: int) -> float:
        """Bytes that autograd saves per token if backward computes blocks again: the blocks' inputs."""
        first, end = cut[stage]
        return size * self.width * (end - first + 1) + self.entry_kept_bytes(cut, stage, size)

    def entry_kept_bytes(self, cut: Cut, stage: int, size: int) -> float:
        """As ``borders_bytes``, for what the stage has besides layers and head: the embedding, and compression."""
        own = self.embedding_kept_bytes(size) if stage == 0 else 0
        if self.compression is None:
            return own
        kept = self.compression.kept_bytes(self.width, size)
        return own + sum(n * each for n, each in zip(self._sides(cut, stage), kept, strict=True))

    def cut(self, stages: int, sizes: Sequence[int] | None = None) -> Cut:
        """The most even cut into ``stages`` by compute cost, or the cut into stages of ``sizes`` layers. Raises
        ConfigError for more stages than layers, for ``sizes`` that do not add up, and for a model that cannot be
        cut."""
        if sizes is not None:
            if len(sizes) != stages or sum(sizes) != self.layers or min(sizes) < 1:
                raise ConfigError(
                    f"fleet.layers: {list(sizes)} for {stages} stages and {self.layers} layers; give one number a stage"
                )
            ends = list(itertools.accumulate(sizes))
            cut: Cut = tuple(zip([0, *ends[:-1]], ends, strict=True))
        else:
            cut = self._best_cut(stages)
        self.check_cut(cut)
        return cut

    def _best_cut(self, stages: int) -> Cut:
        if not 1 <= stages <= self.layers:
            raise ConfigError(
                f"fleet.stages: {stages} stages for model.layers = {self.layers}; a stage needs at least one layer"
            )
        if stages * self.layers**2 > MAX_SEARCH:  # a founder's configuration must not keep a joiner busy
            raise ConfigError(
                f"fleet.layers: {self.layers} layers in {stages} stages are too many to search for the best cut; say how many layers each "
                f"stage has"
            )
        costs = [self.flops_of(layer) for layer in range(self.layers)]
        ends = [*range(1, self.layers + 1)]
        if self.compression is not None and self.compression.after is not None:
            ends = [*(layer + 1 for layer in self.compression.after), self.layers]
        begins = [0, *ends[:-1]]
        if stages > len(ends):
            raise ConfigError(f"fleet.stages: {stages} stages, and the model's compression allows {len(ends)} at most")
        runs = [sum(costs[a:b]) for a, b in zip(begins, ends, strict=True)]
        found = partition(runs, stages, first_extra=self.embedding_flops, last_extra=self.head_flops)
        return tuple((begins[a], ends[b - 1]) for a, b in found)


def _ends(cut: Cut) -> tuple[int, ...]:
    """The last layer of each stage but the last."""
    return tuple(end - 1 for _, end in cut[:-1])
