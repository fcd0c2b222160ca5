"""``TracedModel``: a causal language model of ``transformers``, or a user's module, as a chain of blocks."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from muletrain.config.model_sections import ModelConfig
from muletrain.errors import ConfigError
from muletrain.model.chain import LOSS_BYTES, TOKENS, Compression, TensorType, TiedParameter
from muletrain.model.traced.making import (
    Described,
    computing,
    digest_of,
    kept_in_16_bits,
    made,
    outlined,
    shapes_of,
    tables_bytes_of,
)
from muletrain.model.traced.outline import ADAPTER, APART

if TYPE_CHECKING:
    from collections.abc import Collection, Set

    import torch
    from torch import Tensor, fx

    from muletrain.model.module import StageModule
    from muletrain.model.traced.cutting import Part, Parts
    from muletrain.model.traced.making import Made
    from muletrain.model.traced.outline import Outline, PartOutline
    from muletrain.model.traced.stage import Tables
    from muletrain.planning.partition import Cut


SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number of ``AdapterConfig.base``."""
CODES = {"int8": 1 + 4 / 64, "nf4": 1 / 2 + 4 / 64}
"""Bytes of a number by ``AdapterConfig.quantise``, with the fp32 scale that 64 numbers share (``held.BLOCK``)."""


@dataclass(frozen=True)
class TracedModel(Described):
    """The model that ``architecture`` describes, traced on the first use of the graph."""

    architecture: str
    context: int
    compression: Compression | None = None
    share_layers = False

    def __post_init__(self) -> None:
        try:
            fits = isinstance(self.config["vocab_size"], int)
        except (TypeError, ValueError, KeyError):
            fits = False
        if not fits:
            raise ConfigError(
                "model.from: config.json names no vocab_size, so it describes no model of text alone; take one that predicts "
                "the next token"
            )
        if self.factory is not None:
            self._check_factory()
        if self.context < 2 and self.inputs.shape is None:
            raise ConfigError("model.context: a traced model needs sequences of at least 2 tokens")

    def _check_factory(self) -> None:
        about = self.config
        try:
            known = {name: about[name] for name in ("factory", "arguments")}
            ModelConfig.model_validate(known, strict=True)
            fits = self.inputs.shape is None or self.context == 1
        except (KeyError, TypeError, ValueError) as e:
            raise ConfigError(f"model.architecture: it describes no factory's module ({e})") from e
        if not fits:
            raise ConfigError("model.context: samples that are no text have none; leave it out")

    @classmethod
    def by_factory(cls, config: ModelConfig, inputs: TensorType = TOKENS, targets: TensorType = TOKENS) -> TracedModel:
        """The chain of ``config.factory`` for a kind of samples."""
        about = {"factory": config.factory, "arguments": config.arguments, "vocab_size": config.vocab}
        about |= {"inputs": str(inputs), "targets": str(targets)}
        return cls(json.dumps(about, sort_keys=True), config.context if inputs.shape is None else 1)

    @classmethod
    def from_config(cls, config: ModelConfig) -> TracedModel:
        """The chain of a resolved configuration, built with this machine's software. Raises ConfigError if the chain
        differs from the run's."""
        assert config.architecture is not None
        model = cls(config.architecture, config.context, Compression.from_config(config))
        if config.attention == "conversation":
            model = model.with_apart()
        if config.chain is not None and config.chain.partition(" ")[0] != model.chain_name.partition(" ")[0]:
            raise ConfigError(
                f"model.chain: the run's blocks are {config.chain}, and this machine makes {model.chain_name}: install the "
                f"same versions, or numbers would differ"
            )
        return model

    def with_apart(self) -> TracedModel:
        """The same model with conversations of one row ``apart``."""
        return dataclasses.replace(self, architecture=json.dumps({**self.config, APART: True}, sort_keys=True))

    @classmethod
    def from_json(cls, text: str) -> TracedModel:
        """The inverse of ``to_json``. Raises ConfigError when fields are missing or unknown."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "compression": Compression.of(fields.get("compression"))})
        except (TypeError, ValueError) as e:
            raise ConfigError(f"not a traced model: {e}") from e

    @property
    def chain_name(self) -> str:
        """Digest of everything that decides the chain's numbers (names and shapes of parameters, each part's code, and
        the buffers of a user's module), and the versions used."""
        if self.factory is None:
            maker = f"transformers {version('transformers')}"
        else:
            from muletrain.model.traced.factory import version_of

            maker = version_of(self.factory)
        return f"{digest_of(self._plain)[:16]} ({maker}, torch {version('torch')})"

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @functools.cached_property
    def _plain(self) -> TracedModel:
        """The model without compression, which is traced."""
        return self if self.compression is None else dataclasses.replace(self, compression=None)

    @property
    def factory(self) -> str | None:
        """The maker of the module; None: ``transformers``."""
        name: str | None = self.config.get("factory")
        return name

    @property
    def apart(self) -> bool:  # type: ignore[override]
        return APART in self.config

    @property
    def own_loss(self) -> bool:
        return self.factory is not None

    @functools.cached_property
    def inputs(self) -> TensorType:
        return TensorType.parse(self.config["inputs"]) if self.own_loss else TOKENS

    @functools.cached_property
    def targets(self) -> TensorType:
        return TensorType.parse(self.config["targets"]) if self.own_loss else TOKENS

    @property
    def vocab(self) -> int:  # type: ignore[override]
        return int(self.config["vocab_size"])

    @property
    def layers(self) -> int:  # type: ignore[override]
        return len(self.outline.parts) - 2

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.outline.width

    @property
    def outline(self) -> Outline:
        """Parameters and costs of the chain, known without the graph."""
        return outlined(self._plain)

    @property
    def _made(self) -> Made:
        return made(self._plain, "float32")

    @property
    def _chain(self) -> Parts:
        return self._made.parts

    @property
    def frozen(self) -> dict[str, str]:
        return self.outline.frozen

    @property
    def base(self) -> Set[str]:
        return self.frozen.keys() if ADAPTER in self.config else frozenset()

    def in_fp32(self, dtype: str) -> set[str]:
        """Names of the parameters that stay in fp32 in files of ``dtype``, a name of ``finite.NAMES``. These are the
        parameters that are not trained. A class of ``transformers`` may name more. Raises ConfigError."""
        from muletrain.model.traced.architecture import in_fp32

        patterns = () if self.own_loss else in_fp32(self.config, dtype)
        kept = {name for name in self.shapes if any(f".{pattern}." in f".{name}." for pattern in patterns)}
        return kept | self.frozen.keys()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter; tied parameters once."""
        return dict(shapes_of(self._plain))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The part before the first block, the blocks, the part after the last block."""
        return self._chain.parts

    @property
    def table_function(self) -> fx.GraphModule:
        """(constants, sequences, tokens, device) -> tables"""
        return self._chain.tables

    @property
    def tables(self) -> tuple[str, ...]:
        return self._chain.table_names

    @property
    def constants(self) -> dict[str, Tensor]:
        """Inputs of ``table_function``, in order."""
        return {name: self._made.constants[name] for name in self._chain.constants}

    @property
    def causal_masks(self) -> set[str]:
        """Tables that are causal masks in every sequence of at most ``context`` tokens."""
        return self._made.tables.causal(self.context)

    # Stages -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def tied(self) -> dict[str, TiedParameter]:
        users: dict[str, list[int]] = {}
        for part, found in enumerate(self.outline.parts):
            for name in found.weights:
                users.setdefault(name, []).append(part)
        return {
            name: TiedParameter(tuple(parts), math.prod(self.shapes[name]))
            for name, parts in users.items()
            if len(parts) > 1
        }

    def stage(self, index: int | None, cut: Cut) -> StageModule:
        """Stage ``index``, or (None) the whole model, without storage."""
        self.check_cut(cut if index is not None else ((0, self.layers),))
        run = range(self.layers + 2) if index is None else self.parts_of(cut, index)
        return self._module((run.start, run.stop))

    def block(self, index: int) -> StageModule:
        """Part ``index`` of the chain, without storage."""
        return self._module((index, index + 1))

    def _module(self, run: tuple[int, int]) -> StageModule:
        from muletrain.model.traced.stage import TracedStage

        return TracedStage(self, self._tables_in, run, self.shapes)

    def _tables_in(self, dtype: torch.dtype) -> Tables:
        return computing(self._plain, str(dtype).removeprefix("torch."))

    # Costs --------------------------------------------------------------------------------------------------------

    def _cost(self, part: int) -> PartOutline:
        return self.outline.parts[part]

    def _kept(self, part: int, size: int) -> float:
        """A precision of 16 bits has a separate graph: some values stay in fp32."""
        if size == 4:
            return self.outline.parts[part].kept_bytes
        return kept_in_16_bits(self._plain)[part]

    @property
    def largest_tensor(self) -> int:
        return max(math.prod(shape) for name, shape in self.shapes.items() if name not in self.base)

    def stage_params(self, cut: Cut, stage: int) -> int:
        return super().stage_params(cut, stage) - self._numbers(self.parts_of(cut, stage), self.base, first=True)

    def frozen_params(self, cut: Cut, stage: int) -> int:
        return 0 if self.base else self._numbers(self.parts_of(cut, stage), self.frozen)

    def base_in(self, part: int) -> list[str]:
        return sorted(self.base & {*self.outline.parts[part].weights}) if self.base else []

    def base_params(self, parts: range) -> int:
        return self._numbers(parts, self.base)

    def largest_base(self, cut: Cut, stage: int) -> int:
        return self._largest(self.parts_of(cut, stage), self.base)

    @functools.cached_property
    def quantised(self) -> dict[str, str]:
        """The matrices of linear layers in blocks: neither the embedding nor the output matrix."""
        kind = self.config.get(ADAPTER, {}).get("quantise")
        linear = {part.weights[n] for part in self.outline.parts[1:-1] for n in part.linear}
        return {} if kind is None else dict.fromkeys(sorted(linear & self.base), kind)

    def base_bytes(self, cut: Cut, stage: int) -> int:
        parts, coded = self.parts_of(cut, stage), self.quantised
        each = CODES[next(iter(coded.values()))] if coded else 0
        rest = self._numbers(parts, self.base - coded.keys()) if self.base else 0
        return int(each * self._numbers(parts, coded)) + self.base_size * rest

    def recast_bytes(self, parts: range, size: int) -> int:
        return size * self._largest(parts, self.quantised if size == self.base_size else self.base)

    def _largest(self, parts: range, among: Collection[str]) -> int:
        """Numbers of the largest parameter ``among`` which the ``parts`` use."""
        names = {name for part in parts for name in self.outline.parts[part].weights}
        return max((math.prod(self.shapes[name]) for name in names.intersection(among)), default=0)

    @property
    def base_size(self) -> int:
        return SIZES[self.config[ADAPTER]["base"]] if self.base else 0

    def part_params(self, part: int) -> int:
        return self._cost(part).params - self._numbers(range(part, part + 1), self.base, first=True)

    def learned_params(self, part: int) -> int:
        return self._cost(part).params - self._numbers(range(part, part + 1), self.frozen, first=True)

    def _numbers(self, parts: range, among: Collection[str], *, first: bool = False) -> int:
        """Numbers of the parameters ``among`` which the ``parts`` use. ``first``: no earlier part of the chain does."""
        names = {name for part in parts for name in self.outline.parts[part].weights}
        names = {name for name in names if not first or name not in self.tied or self.tied[name].parts[0] in parts}
        return sum(math.prod(self.shapes[name]) for name in names.intersection(among))

    def params_of(self, layer: int) -> int:
        return self._cost(1 + layer).params

    @property
    def embedding_params(self) -> int:
        return self._cost(0).params

    @property
    def head_params(self) -> int:
        return self._cost(-1).params

    def flops_of(self, layer: int, tokens: int | None = None) -> float:
        return self._cost(1 + layer).flops(tokens or self.context)

    @property
    def embedding_flops(self) -> float:
        """A lookup computes nothing, and the backward scatters. About one addition per feature, for the cut's sake."""
        return self._cost(0).flops(self.context) + float(self.width)

    @property
    def head_flops(self) -> float:
        return self._cost(-1).flops(self.context) + (1.0 if self.own_loss else 5.0 * self.vocab)

    def kept_bytes(self, layer: int, size: int) -> float:
        return self._kept(1 + layer, size)

    def embedding_kept_bytes(self, size: int) -> float:
        return self._kept(0, size)

    def head_kept_bytes(self, size: int) -> float:
        return self._kept(-1, size) + (0 if self.own_loss else LOSS_BYTES * self.vocab)

    @property
    def loss_tokens(self) -> int:
        """A head that may mix tokens computes all tokens at once."""
        return super().loss_tokens if self._cost(-1).by_token and not self.own_loss else sys.maxsize

    def tables_bytes(self, sequences: int) -> int:
        return tables_bytes_of(self._plain, sequences)
