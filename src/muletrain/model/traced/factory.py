"""Builds a user's own module by an importable factory: without storage for tracing, or whole for the first weights.

The name of a factory may come from another machine. A factory is imported only if this machine's user named the factory
(``config.trusted``); arguments are numbers, booleans and strings.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from muletrain.config.trusted import imported
from muletrain.errors import ConfigError
from muletrain.model.module import StageModule
from muletrain.model.traced.export import first_line, first_names, operator_of, path_of, where

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from muletrain.model.chain import Model
    from muletrain.model.dropout import Masks
    from muletrain.model.traced.cutting import Parts
    from muletrain.model.traced.export import Traced
    from muletrain.model.traced.stage import Tables

aten = torch.ops.aten

_TAKEN = {"spec", "is_first", "is_last"}
"""Attributes of a stage, which a user's module cannot have as parameters."""
_MOVES = {
    "view",
    "reshape",
    "flatten",
    "transpose",
    "unsqueeze",
    "squeeze",
    "slice",
    "contiguous",
    "to",
    "_to_copy",
    "clone",
}
"""Operators that do not change integers."""


class Loss(nn.Module):
    """Inputs and targets -> the mean loss of a user's module, a scalar."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(inputs, targets)
        if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
            found = type(loss).__name__
            if isinstance(loss, Tensor):  # sizes that depend on the microbatch are symbols
                found = f"{loss.dtype} [{', '.join(str(n) if isinstance(n, int) else 'B' for n in loss.shape)}]"
            raise ConfigError(
                f"forward(inputs, targets) returns {found}, not a loss; return the mean over the samples, as a scalar"
            )
        return loss


def build(about: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Tensor]]:
    """The module in training mode, on the meta device, and the values of buffers by name. ``about``: 'factory' and
    'arguments'. Raises ConfigError for a module that cannot be built or trained."""
    with _without_storage():
        module = _called(about, seed=0)  # random buffers are the same on every machine
    _check(module)
    module = module.to(dtype).train()
    buffers = {name: buffer.detach().cpu() for name, buffer in module.named_buffers(remove_duplicate=False)}
    return module.to("meta"), buffers


def first_weights(about: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """The factory's fp32 weights, by name, with torch's generator at ``seed``; the whole module is held on the CPU
    meanwhile. Raises ConfigError."""
    module = _called(about, seed)
    return {name: parameter.detach().cpu().float().contiguous() for name, parameter in module.named_parameters()}


def state_dict(about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Argument of the module's ``load_state_dict``: ``weights`` (by each tensor's first name) under all names, and the
    persistent buffers."""
    with _without_storage():
        module = _called(about, seed=0)
    first = first_names(module)
    found = {name: weights.get(first.get(name, name), value) for name, value in module.state_dict().items()}
    return {name: value.detach().clone().contiguous() for name, value in found.items()}


def check_vocabulary(traced: Traced, vocab: int) -> None:
    """Raises ConfigError if an embedding or a loss of the module takes fewer integers than ``vocab`` admits."""
    for node in traced.graph.nodes:
        given: Any = node.args
        if node.target is aten.embedding.default:
            numbers, count, takes = given[1], given[0].meta["val"].shape[0], "looks up {} rows"
        elif node.target is aten.cross_entropy_loss.default:
            scores = given[0].meta["val"]
            numbers, count, takes = given[1], scores.shape[min(1, scores.dim() - 1)], "compares {} classes"
            if len(given) > 4 and given[4] >= count:  # an ignored number
                continue
        else:
            continue
        while operator_of(numbers) in _MOVES:
            numbers = numbers.args[0]
        if numbers in (traced.inputs, traced.targets) and count < vocab:
            raise ConfigError(
                f"{path_of(node)} {takes.format(count)}, and model.vocab = {vocab}, which covers inputs and targets alike: make it "
                f"{vocab} in the module, or set model.vocab = {count} if no integer among them is larger than {count - 1}"
            )


def check_positions(parts: Parts, tables: Tables, context: int) -> None:
    """Raises ConfigError if a module looks up positions beyond a table's end, in sequences of ``context``."""
    for node in (n for part in parts.parts for n in part.nodes if n.target is aten.embedding.default):
        given: Any = node.args
        count, name = given[0].meta["val"].shape[0], given[1].name
        if name in parts.table_names:
            last = int(tables.of(1, context, torch.device("cpu"))[name].max())
            if last >= count:
                raise ConfigError(
                    f"model.factory: {path_of(node)} looks up {count} rows, and in {context} tokens positions go to {last}; set "
                    f"model.context = {count}, or give the module more"
                )


def trained(about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    """The user's module with ``weights`` (by each tensor's first name), on the CPU, for evaluation. Raises ConfigError."""
    with _without_storage():
        module = _called(about, seed=0)
    module.load_state_dict(state_dict(about, weights), assign=True)
    return module.eval()


class Writes(StageModule):
    """A user's module that is called with tokens int64 [B, T] alone, for logits [B, T, V], to continue a text. Raises
    ConfigError for another output."""

    def __init__(self, spec: Model, about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        super().__init__(spec, first=True, last=True)
        self._name = about["factory"]
        self.module = trained(about, weights)
        self.eval()

    def forward(
        self,
        inputs: Tensor,
        masks: Masks | None = None,
        caches: Mapping[int, Any] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        remedy = "give 'targets' the default None, and return logits [B, T, vocab] then"
        try:
            found = self.module(inputs)
        except (Exception, SystemExit) as e:  # any error of the user's code
            raise ConfigError(
                f"model.factory: to write text, forward(inputs) of '{self._name}' is called without targets, and raises "
                f"{type(e).__name__}{where(e)}: {first_line(e)}; {remedy}"
            ) from e
        logits = found[0] if isinstance(found, tuple) else found
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            what = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ConfigError(
                f"model.factory: to write text, forward(inputs) of '{self._name}' is called without targets, and returns "
                f"{what}; {remedy}"
            )
        return logits


def version_of(name: str) -> str:
    """The package of an imported factory, and the version."""
    package = name.partition(":")[0].partition(".")[0]
    known: object = getattr(sys.modules.get(package), "__version__", None)
    try:
        known = known or version(packages_distributions().get(package, [package])[0])
    except PackageNotFoundError:
        known = "without a version"
    return f"{package} {known}"


def fingerprint(name: str, buffer: Tensor) -> str:
    """Contents of a buffer, in a few digits: independent of a processor's rounding."""
    values = buffer.double().flatten()
    weights = values.new_tensor(range(1, len(values) + 1))
    sums = ((values.abs() * weights).sum(), ((values + 1).abs() * weights).sum())
    return f"{name} {buffer.dtype} {list(buffer.shape)} {' '.join(f'{float(x):.3e}' for x in sums)}"


def _called(about: Mapping[str, Any], seed: int) -> nn.Module:
    name = about["factory"]
    make = imported("model.factory", name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module = make(**about["arguments"])
        except ConfigError as e:
            raise ConfigError(f"model.factory: {e}") from e
        except (Exception, SystemExit) as e:  # any error of the user's code
            raise ConfigError(
                f"model.factory: '{name}' raises {type(e).__name__}{where(e)}: {first_line(e)}; call it with "
                f"model.arguments = {about['arguments']} yourself to see why"
            ) from e
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.factory: '{name}' returns {type(module).__name__}; it must return an nn.Module")
    return module


def _check(module: nn.Module) -> None:
    """Raises ConfigError for a module that a plain training loop would train differently."""
    for name, parameter in module.named_parameters():
        head = name.partition(".")[0]
        if not parameter.is_floating_point():
            raise ConfigError(
                f"model.factory: the parameter {name} is {parameter.dtype}, which cannot be trained; make it a buffer "
                f"(register_buffer)"
            )
        if hasattr(StageModule, head) or head in _TAKEN or head.startswith("_"):
            raise ConfigError(
                f"model.factory: the parameter {name} begins with a name that muletrain uses; rename {head}"
            )
    for path, part in module.named_modules():
        if plain := next((name for name, value in vars(part).items() if isinstance(value, Tensor)), None):
            raise ConfigError(
                f"model.factory: {path or 'the module'}.{plain} is a tensor that is neither parameter nor buffer, so it "
                f"would stay on one device; use register_buffer"
            )


@contextmanager
def _without_storage() -> Iterator[None]:
    """Parameters lose their storage on registration, so that a model larger than memory can be built."""

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":  # in place, since possibly shared (tied weights)
            hollow = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, hollow)  # type: ignore[no-untyped-call]

    handle = register_module_parameter_registration_hook(emptied)
    try:
        yield
    finally:
        handle.remove()
