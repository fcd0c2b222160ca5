"""Builds a causal language model of ``transformers`` from a configuration: on the meta device, to be traced, or whole
with given weights, to evaluate and to write text.

The configuration may come from another machine. The configuration selects an architecture of the installed
``transformers``, and sets the sizes; no entry is imported, evaluated or downloaded.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from muletrain.errors import ConfigError
from muletrain.model import chain
from muletrain.model.loss import Head
from muletrain.model.module import StageModule
from muletrain.model.traced.adapter import put_in
from muletrain.model.traced.export import INSIDE, first_line, first_names
from muletrain.model.traced.outline import ADAPTER, APART

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from muletrain.model.chain import Model
    from muletrain.model.dropout import Masks

MOST_LAYERS = 1024
"""More are refused: a configuration from another machine must not keep this machine busy."""
MOST_BUFFER_BYTES = 1 << 30
"""Largest tables of one module: every machine makes the tables with the model."""
_FOREIGN = ("auto_map", "custom_pipelines", "factory", "quantization_config", "kernel_config")
"""Entries that make ``transformers`` run foreign code, or change the meaning of weights."""
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_local_experts", "num_experts")
_CACHES = ("cache", "past_key_values")
"""Names of the cache of keys and values in versions of ``transformers``."""


class Whole(StageModule):
    """A whole causal language model, computed by the model's class, for tracing and for writing text."""

    def __init__(self, spec: Model, model: nn.Module) -> None:
        super().__init__(spec, first=True, last=True)
        self.model = model

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name.removeprefix(INSIDE): shape for name, shape in super().shapes().items()}

    def bind(self, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> StageModule:
        """See ``StageModule.bind``; afterwards without dropout."""
        for name, table in buffers_of(self.model).items():
            path, _, leaf = name.rpartition(".")
            self.model.get_submodule(path)._buffers[leaf] = table
        first = first_names(self.model)
        own = {
            name: nn.Parameter(weights[name].to(parameter.dtype), parameter.requires_grad)
            for name, parameter in self.model.named_parameters()
        }
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        self.model.load_state_dict({name: own[first[name]] for name in names}, strict=False, assign=True)
        return self.eval()

    def caches(self) -> Mapping[int, Any]:
        return {0: _Written()}

    @functools.cached_property
    def loss_tokens(self) -> int:
        """As many as in training, if the model's class computes the logits of each token by itself."""
        return max(1, chain.LOSS_CHUNK // (chain.LOSS_BYTES * self.spec.vocab)) if self._by_token() else sys.maxsize

    def _by_token(self) -> bool:
        """Are a few logits the same in chunks? No property of a class of ``transformers`` tells."""
        tokens = torch.arange(2 * min(8, self.spec.context), device=next(self.parameters()).device)
        tokens = tokens.remainder(self.spec.vocab).reshape(2, -1)
        with torch.no_grad(), suppress(Exception):  # of any class of transformers
            whole, head = self(tokens).flatten(0, 1), self.before_head(tokens, None)
            pieces = torch.split(head.values[0].flatten(0, 1), 3)
            parts = torch.cat([head.logits([piece[None]])[0] for piece in pieces])
            return torch.allclose(parts, whole, rtol=1e-4, atol=1e-4)
        return False

    def before_head(self, inputs: Tensor, masks: Masks | None, positions: Tensor | None = None) -> Head:
        """See ``StageModule``. The model's class computes its head from the outputs of its inner model, which are
        computed once, and handed to it in pieces."""
        model: Any = self.model
        base = model.base_model
        plain, found = base.forward, list[Any]()

        def first(*args: Any, **kwargs: Any) -> Any:
            out = plain(*args, **kwargs)
            found.extend((out, out.last_hidden_state))
            out["last_hidden_state"] = out.last_hidden_state[:, :1]  # one token's logits, which nobody reads
            return out

        with _answering(base, first):
            model(input_ids=inputs, use_cache=False, **_at(positions, inputs))
        out, values = found

        def logits(pieces: Sequence[Tensor]) -> Tensor:
            (out["last_hidden_state"],) = pieces
            with _answering(base, lambda *_, **__: out):
                computed: Tensor = model(input_ids=inputs, use_cache=False).logits
            return computed

        outer = [child for child in model.children() if child is not base]
        return Head(logits, [values], [p for child in outer for p in child.parameters() if p.requires_grad])

    def forward(
        self,
        inputs: Tensor,
        masks: Masks | None = None,
        caches: Mapping[int, Any] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        if caches is not None:
            written: Tensor = caches[0].goes_on(self.model, inputs)
            return written
        logits: Tensor = self.model(input_ids=inputs, use_cache=False, **_at(positions, inputs)).logits
        return logits


def _at(positions: Tensor | None, inputs: Tensor) -> dict[str, Tensor]:
    return {} if positions is None else {"position_ids": positions.to(inputs.device)}


class Apart(Whole):
    """The same, for tracing: conversations of one row are apart."""

    def forward(self, inputs: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        logits: Tensor = self.model(input_ids=inputs, position_ids=positions, use_cache=False).logits
        return logits


@contextmanager
def _answering(base: nn.Module, answer: Callable[..., Any]) -> Iterator[None]:
    """Within the context, calls of ``base`` are calls of ``answer``."""
    before = base.__dict__.get("forward")
    base.forward = answer
    try:
        yield
    finally:
        if before is None:
            del base.forward
        else:
            base.forward = before


class _Written:
    """The text so far, with the keys and values, if ``transformers`` keeps any."""

    def __init__(self) -> None:
        self._tokens: Tensor | None = None
        self._kept: dict[str, Any] = {}

    def goes_on(self, model: nn.Module, fresh: Tensor) -> Tensor:
        """Logits of the computed tokens, which end with ``fresh`` int64 [1, T]."""
        self._tokens = fresh if self._tokens is None else torch.cat((self._tokens, fresh), dim=1)
        stateful = getattr(model, "_is_stateful", False)  # may keep more than keys and values, some in the module
        before = _frequencies(model)
        out = model(input_ids=fresh if self._kept else self._tokens, use_cache=not stateful, **self._kept)
        if self._kept and not all(map(torch.equal, before, _frequencies(model))):  # the keys have old rotations
            out = model(input_ids=self._tokens, use_cache=True)
        names = [] if stateful else [name for name in _CACHES if name in out.keys()]  # noqa: SIM118 # warns of older names
        self._kept = {name: out[name] for name in names}
        logits: Tensor = out.logits
        return logits


def _frequencies(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for module in turning(model) for buffer in module.buffers()]


def checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without the entries that describe files and software. Raises ConfigError for refused entries."""
    for name in _FOREIGN:
        if config.get(name):
            what = "remote code" if name in _FOREIGN[:3] else name
            raise ConfigError(
                f"model.from: config.json has {name} ({what}), and muletrain builds models with the code of the "
                f"installed transformers alone; take a model without it"
            )
    for name in _COUNTS:
        count = config.get(name)
        if isinstance(count, int) and count > MOST_LAYERS:
            raise ConfigError(f"model.from: {name} = {count}; at most {MOST_LAYERS} are taken")
    dropped = (
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "attn_implementation",
        "experts_implementation",
    )
    return {k: _decoded(v) for k, v in config.items() if not k.startswith("_") and k not in dropped}


def _decoded(value: Any) -> Any:
    """Infinity and NaN in the notation of ``transformers``, since JSON lacks both."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {k: _decoded(v) for k, v in value.items()}
    return [_decoded(v) for v in value] if isinstance(value, list) else value


def in_fp32(config: Mapping[str, Any], dtype: str) -> set[str]:
    """Parts of names of parameters that stay in fp32 where a model is in ``dtype``, a name of ``finite.NAMES``. Raises
    as ``build``."""
    own: Any = build(config)
    always, beside_fp16 = own._keep_in_fp32_modules_strict or (), own._keep_in_fp32_modules or ()
    return {*always, *(beside_fp16 if dtype == "fp16" else ())}


def build(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model on the meta device, in training mode. Raises ConfigError for an architecture that the installed
    ``transformers`` does not have, or that is no causal language model."""
    config = checked(config)
    adapter, _ = config.pop(ADAPTER, None), config.pop(APART, None)
    with quiet():
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM
        from transformers import __version__ as version

        kind = config.get("model_type")
        try:
            hf = CONFIG_MAPPING[kind].from_dict(dict(config))
        except Exception as e:  # transformers raises any exception
            raise ConfigError(
                f"model.from: transformers {version} cannot build a {kind!r} model from config.json ({' '.join(str(e).split())}); correct "
                f"what it says, or install a version that can"
            ) from e
        if type(hf) not in AutoModelForCausalLM._model_mapping:
            raise ConfigError(
                f"model.from: a {kind!r} model is no causal language model, and only these are read from a folder; take one, or "
                f"build yours by model.factory = 'mypackage.models:build'"
            )
        hf.use_cache = False
        try:
            with torch.device("meta"):
                model: nn.Module = _built(AutoModelForCausalLM, hf, dtype)
        except Exception as e:
            raise ConfigError(
                f"model.from: config.json does not describe a {kind!r} model: {type(e).__name__}: {first_line(e)}; correct what it "
                f"says"
            ) from e
    model = _all_parameters(model)
    return (model if adapter is None else put_in(model, adapter)).train()


def _all_parameters(model: nn.Module) -> nn.Module:
    """``model`` with each persistent buffer as an untrained parameter, to be loaded, carried and exported like a
    parameter. The remaining buffers follow from the configuration."""
    for module in model.modules():
        for name in [name for name in module._buffers if name not in module._non_persistent_buffers_set]:
            if (buffer := module._buffers.pop(name)) is not None:
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    return model


def _built(auto: Any, hf: Any, dtype: torch.dtype) -> Any:
    try:
        return auto.from_config(hf, attn_implementation="sdpa", dtype=dtype)
    except ValueError:  # no implementation with scaled_dot_product_attention
        return auto.from_config(hf, attn_implementation="eager", dtype=dtype)


@functools.lru_cache(maxsize=4)
def transposed(architecture: str) -> frozenset[str]:
    """Layers with an adapter whose weights are [in, out], as GPT-2's are. ``architecture``: as in ``ModelConfig``."""
    modules = build(json.loads(architecture)).named_modules()
    return frozenset(path for path, module in modules if getattr(module, "fan_in_fan_out", False))


def turning(model: nn.Module) -> list[nn.Module]:
    """The modules with rotary frequencies that depend on the length of the text (``dynamic``, ``longrope``)."""
    return [module for module in model.modules() if _turns(module)]


def _turns(module: nn.Module) -> list[str | None]:
    """The kinds of layers with such frequencies; None: all layers."""
    kinds: Any = getattr(module, "rope_type", None)
    each = kinds if isinstance(kinds, dict) else {None: kinds}
    return [
        layer for layer, kind in each.items() if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")
    ]


def at_one_length(model: nn.Module) -> nn.Module:
    """``model`` with the buffers' rotary frequencies at every length of the text, for tracing."""
    for module in turning(model):
        plain = type(module).forward.__wrapped__  # type: ignore[attr-defined] # below ``dynamic_rope_update``
        module.forward = plain.__get__(module)
    return model


def buffers_of(model: nn.Module, length: int | None = None) -> dict[str, Tensor]:
    """The values of the model's buffers by name, on the CPU: tables that follow from the configuration, and from the
    ``length`` of the text [tokens], if given. Raises ConfigError for a buffer that the architecture does not
    compute."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        own = dict(module.named_buffers(recurse=False))
        if not own:
            continue
        if (size := sum(b.numel() * b.element_size() for b in own.values())) > MOST_BUFFER_BYTES:
            raise ConfigError(f"model.from: {path} has {size} bytes of tables; at most {MOST_BUFFER_BYTES} are made")
        for name, buffer in own.items():
            fill = float("nan") if buffer.is_floating_point() else 0
            module._buffers[name] = torch.full(buffer.shape, fill, dtype=buffer.dtype)
        with quiet(), torch.no_grad():
            model._init_weights(module)  # type: ignore[operator]
            if length is not None:
                for layer in _turns(module):  # the last position decides
                    given = () if layer is None else (layer,)
                    type(module).forward(module, torch.zeros(1), torch.tensor([[length - 1]]), *given)
        for name in own:
            value = module._buffers[name]
            assert value is not None
            full = f"{path}.{name}" if path else name
            if value.is_floating_point() and bool(value.isnan().any()):
                raise ConfigError(
                    f"model.from: {type(model).__name__} neither computes nor stores the buffer {full}; take another model"
                )
            found[full] = value
        for name, buffer in own.items():
            module._buffers[name] = buffer
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the remarks and progress bars of ``transformers``."""
    from transformers.utils import logging as theirs

    logger, bars = logging.getLogger("transformers"), theirs.is_progress_bar_enabled()
    before = logger.level
    logger.setLevel(logging.ERROR)
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(before)
        if bars:
            theirs.enable_progress_bar()
