"""``TracedModel``: a causal language model of ``transformers`` as a chain of blocks."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from muletrain.errors import ConfigError
from muletrain.model.chain import Model

if TYPE_CHECKING:
    import torch
    from torch import Tensor, fx

    from muletrain.config.model_sections import ModelConfig
    from muletrain.model.module import StageModule
    from muletrain.model.traced.costs import Cost
    from muletrain.model.traced.cutting import Part, Parts
    from muletrain.model.traced.export import Traced
    from muletrain.planning.partition import Cut


@dataclass(frozen=True)
class TracedModel(Model):
    """The model that ``architecture`` describes, traced when something is asked that only its graph says."""

    architecture: str
    """The ``transformers`` configuration, as JSON with sorted keys."""
    context: int
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
        if self.context < 2:
            raise ConfigError("model.context: a traced model needs sequences of at least 2 tokens")

    @classmethod
    def from_config(cls, config: ModelConfig) -> TracedModel:
        """The chain of a resolved configuration, built with this machine's software. Raises ConfigError if it differs
        from the one that the run began with."""
        assert config.architecture is not None
        model = cls(config.architecture, config.context)
        if config.chain is not None and config.chain.partition(" ")[0] != model.chain_name.partition(" ")[0]:
            raise ConfigError(
                f"model.chain: the run's blocks are {config.chain}, and this machine makes {model.chain_name}: install the "
                f"same versions, or numbers would differ"
            )
        return model

    @classmethod
    def from_json(cls, text: str) -> TracedModel:
        """The inverse of ``to_json``. Raises ConfigError when fields are missing or unknown."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as e:
            raise ConfigError(f"not a traced model: {e}") from e

    @property
    def chain_name(self) -> str:
        """Digest of what decides the chain's numbers (names and shapes of its parameters, and each part's code), and the
        versions that made it."""
        versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch"))
        return f"{self._made.digest[:16]} ({versions})"

    def to_json(self) -> str:
        return json.dumps({"architecture": self.architecture, "context": self.context}, sort_keys=True)

    @property
    def config(self) -> dict[str, Any]:
        """The ``transformers`` configuration."""
        found: dict[str, Any] = json.loads(self.architecture)
        return found

    @property
    def vocab(self) -> int:  # type: ignore[override]
        return int(self.config["vocab_size"])

    @property
    def layers(self) -> int:  # type: ignore[override]
        return len(self._chain.parts) - 2

    @property
    def width(self) -> int:  # type: ignore[override]
        return self._made.width

    @property
    def _made(self) -> _Made:
        return made(self.architecture, self.context, "float32")

    @property
    def _chain(self) -> Parts:
        return self._made.parts

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter; tied ones once."""
        return dict(self._made.traced.shapes)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What comes before the first block, the blocks, what comes after the last one."""
        return self._chain.parts

    @property
    def costs(self) -> tuple[Cost, ...]:
        """Of each of ``parts``."""
        return self._made.costs

    @property
    def table_function(self) -> fx.GraphModule:
        """(constants, sequences, tokens, device) -> tables"""
        return self._chain.tables

    @property
    def tables(self) -> tuple[str, ...]:
        return self._chain.table_names

    @property
    def constants(self) -> dict[str, Tensor]:
        """What the tables follow from, in their function's order."""
        return {name: self._made.constants[name] for name in self._chain.constants}

    # Stages -------------------------------------------------------------------------------------------------------

    @property
    def most_stages(self) -> int:
        """One, if the same parameter is used in two parts (tied weights)."""
        used = [name for part in self._chain.parts for name in part.weights]
        return self.layers if len(used) == len(set(used)) else 1

    def check_cut(self, cut: Cut) -> None:
        """Raises ConfigError if stages would share a parameter."""
        owner: dict[str, int] = {}
        for stage in range(len(cut)):
            for part in self._chain.parts[slice(*self._run(stage, cut))]:
                for name in part.weights:
                    if owner.setdefault(name, stage) != stage:
                        raise ConfigError(
                            f"fleet.stages: {name} is used in stage {owner[name]} and again in stage {stage} (tied weights, "
                            f"'tie_word_embeddings'), and a parameter must lie in one stage: take fleet.stages=1, or "
                            f"model.untie=true, which trains an output matrix of its own that begins as a copy"
                        )

    def stage(self, index: int | None, cut: Cut) -> StageModule:
        """Stage ``index``, or (None) the whole model, without storage."""
        self.check_cut(cut if index is not None else ((0, self.layers),))
        return self._module((0, self.layers + 2) if index is None else self._run(index, cut))

    def block(self, index: int) -> StageModule:
        """Part ``index`` of the chain, without storage."""
        return self._module((index, index + 1))

    def middle_block(self) -> StageModule:
        """The first block, without what comes before it."""
        return self._module((1, 2))

    def _module(self, run: tuple[int, int]) -> StageModule:
        from muletrain.model.traced.stage import TracedStage

        return TracedStage(self, self._parts_in, run, self.shapes, self._made.constants)

    def _parts_in(self, dtype: torch.dtype) -> Parts:
        return made(self.architecture, self.context, str(dtype).removeprefix("torch.")).parts

    def _run(self, stage: int, cut: Cut) -> tuple[int, int]:
        """The stage's parts."""
        first, end = cut[stage]
        return (first + 1 if stage else 0), (end + 1 if stage < len(cut) - 1 else end + 2)

    # Costs --------------------------------------------------------------------------------------------------------

    def _cost(self, part: int) -> Cost:
        return self._made.costs[part]

    @property
    def largest_tensor(self) -> int:
        return max(math.prod(shape) for shape in self.shapes.values())

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
        """A lookup computes nothing; its backward scatters. About one addition per feature, for the cut's sake."""
        return self._cost(0).flops(self.context) + float(self.width)

    @property
    def head_flops(self) -> float:
        return self._cost(-1).flops(self.context) + 5.0 * self.vocab

    def kept_bytes(self, layer: int, size: int) -> float:
        return self._cost(1 + layer).kept_bytes * size / 4

    def head_kept_bytes(self, size: int) -> float:
        return self._cost(-1).kept_bytes * size / 4 + 2 * 4 * self.vocab


@dataclass(frozen=True)
class _Made:
    """What tracing found."""

    traced: Traced
    parts: Parts
    constants: dict[str, Tensor]
    costs: tuple[Cost, ...]
    width: int

    @functools.cached_property
    def digest(self) -> str:
        codes = [hashlib.sha256(part.code.encode()).hexdigest() for part in self.parts.parts]
        names = [[[name, self.traced.shapes[name]] for name in part.weights] for part in self.parts.parts]
        return hashlib.sha256(json.dumps([codes, names, self.parts.tables.code]).encode()).hexdigest()


@functools.lru_cache(maxsize=8)
def made(architecture: str, context: int, precision: str) -> _Made:
    """Build, trace and cut the model; ``precision``: 'float32', 'bfloat16' or 'float16'. Raises ConfigError."""
    import torch

    from muletrain.model.traced import architecture as hf
    from muletrain.model.traced.costs import cost
    from muletrain.model.traced.cutting import cut
    from muletrain.model.traced.export import trace
    from muletrain.model.traced.stage import numbers

    model = hf.build(json.loads(architecture), getattr(torch, precision))
    module = hf.Logits(model)
    traced = trace(module, context)
    parts = cut(traced, module)
    used = {name for part in parts.parts for name in part.weights}
    if unused := sorted(traced.shapes.keys() - used):
        raise ConfigError(
            f"model.from: {unused[0]} takes no part in predicting the next token ({len(unused)} such parameters), so it "
            f"could not be trained; take a model of text alone"
        )
    counted: set[str] = set()
    costs = tuple(cost(part, traced, context, counted) for part in parts.parts)
    width = max(sum(map(numbers, nodes)) for nodes in parts.passed)
    constants = {**hf.buffers_of(model), **traced.values}
    return _Made(traced, parts, constants, costs, width)
