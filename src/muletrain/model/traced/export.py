"""Traces a module to one flat graph of operators, ready to be cut.

``torch.export`` records the module's operators on the meta device, with batch and length (of tokens) symbolic. Regions
that only switch gradients or autocasting off are inlined, checks of tensors' metadata are dropped, and devices become
an input: the graph runs anywhere.
"""

from __future__ import annotations

import io
import logging
import operator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode

from muletrain.errors import ConfigError
from muletrain.model.chain import TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from muletrain.model.chain import TensorType

aten = torch.ops.aten

TRACED_SHAPE = (3, 24)
"""Sequences and tokens for tracing; both are symbolic in the graph, and should differ from all sizes of a model."""
_CHECKS = {
    "_assert_tensor_metadata",
    "_assert_scalar",
    "_assert_async",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
}
_REGIONS = {"wrap_with_set_grad_enabled", "wrap_with_autocast"}
INSIDE = "model."
"""The traced module holds the model under this name, which parameters' names omit."""


@dataclass
class Traced:
    """One graph: placeholders for parameters, buffers, constants, the inputs, the targets (of a module with its own
    loss) or positions, and the device; the output is logits or loss."""

    graph: fx.Graph
    inputs: fx.Node
    targets: fx.Node | None
    positions: fx.Node | None
    device: fx.Node
    output: fx.Node
    parameters: dict[fx.Node, str] = field(default_factory=dict)
    """Placeholder -> name of the parameter; the first if a tensor has several names."""
    frozen: dict[str, torch.dtype] = field(default_factory=dict)
    """Parameters that are not trained, with the types that the graph computes with."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    constants: dict[fx.Node, str] = field(default_factory=dict)
    """Placeholder -> name of the buffer or constant."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """Constants found by tracing, without buffers."""
    sizes: tuple[Any, ...] = ()
    """Symbols of batch and, with tokens, length: the first dimensions of all values between blocks."""

    def size_of(self, node: fx.Node) -> int | None:
        """The index in ``sizes`` of the size that a node reads from inputs or targets; None: another node."""
        if node.target is not aten.sym_size.int or node.args[0] not in (self.inputs, self.targets, self.positions):
            return None
        if node.args[0] is self.positions:
            return int(node.args[1])  # type: ignore[arg-type]
        size = node.args[0].meta["val"].shape[node.args[1]]  # type: ignore[union-attr]
        return next((k for k, known in enumerate(self.sizes) if str(known) == str(size)), None)


def trace(
    module: nn.Module,
    context: int,
    given: Sequence[TensorType] = (TOKENS,),
    dtype: torch.dtype = torch.float32,
    *,
    own: bool = False,
    repeats: bool = True,
) -> Traced:
    """Trace ``module``, which lies on the meta device and maps the ``given`` inputs to logits [B, T, V] (tokens alone, or
    tokens and positions) or, ``own``, to a loss (inputs and targets; floats are in ``dtype``).

    ``repeats``: the module has many equal layers, so
    torch's findings about an operator are cached; with few layers, caching is slower. Raises ConfigError with the place
    and cause of a failure."""
    examples = tuple(
        torch.zeros(
            kind.batch(TRACED_SHAPE[0], min(TRACED_SHAPE[1], context)),
            dtype=dtype if kind.dtype == "float32" else torch.int64,
            device="meta",
        )
        for kind in given
    )
    long = Dim.DYNAMIC if context > 1 else None
    dynamic = tuple({0: Dim.DYNAMIC, 1: long} if kind.shape is None else {0: Dim.DYNAMIC} for kind in given)
    try:
        kept = torch._dynamo.config.patch(fake_tensor_cache_enabled=repeats)
        with torch.device("meta"), _Constants(), _silenced(), kept:
            program = torch.export.export(module, examples, dynamic_shapes=dynamic, strict=False)
    except ConfigError:
        raise
    except (Exception, SystemExit) as e:  # any error of the model's code, or of torch's tracer
        if first_line(e).startswith("Constraints violated"):
            _look_for_fixed_sizes(module, examples, dynamic, own=own)
        remedy = (
            f"it got inputs {given[0]} and targets {given[1]} (of data.factory, else of text), and shapes must not depend on data"
            if own
            else "change what config.json says of that part, or take another model"
        )
        raise ConfigError(f"the model cannot be traced{where(e)}: {first_line(e)}; {remedy}") from e
    if program.graph_signature.buffers_to_mutate:
        name = next(iter(program.graph_signature.buffers_to_mutate.values()))
        raise ConfigError(
            f"the model changes its buffer {name} while it computes, so a microbatch could not be computed "
            f"twice; take one without running statistics (GroupNorm or LayerNorm for BatchNorm)"
        )
    traced = _Flattening(program, module, 2 if given[0].shape is None else 1, own=own).run()
    longest = [program.range_constraints[size.node.expr].upper for size in traced.sizes[1:]]
    if longest and longest[0] < context:
        raise ConfigError(
            f"the model takes at most {longest[0]} tokens, and model.context = {context}; set that to {longest[0]} or less"
        )
    return traced


class _Constants(TorchFunctionMode):
    """Keeps the values of tensors that the module makes from numbers, despite the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = kwargs or {}
        if func is not torch.tensor or given.get("device") not in (None, "meta", torch.device("meta")):
            return func(*args, **given)
        return func(*args, **{**given, "device": "cpu"}).to("meta")


def _look_for_fixed_sizes(
    module: nn.Module, examples: tuple[Tensor, ...], dynamic: tuple[Any, ...], *, own: bool
) -> None:
    """Raises ConfigError for the line of the model's code that fixes the number of samples or of tokens."""
    try:
        with torch.device("meta"), _Constants(), _silenced():
            torch.export.export(_Watched(module), examples, dynamic_shapes=(dynamic,), strict=False)
    except _FixedError as e:
        remedy = "write that part for any number of them, without a loop over them (nn.LSTM has one)"
        remedy = remedy if own else "take another model"
        raise ConfigError(
            f"the model cannot be traced{where(e)}: {e.operator} makes the number of {e.what} a constant; {remedy}"
        ) from e


class _FixedError(Exception):
    def __init__(self, operator: str, what: str) -> None:
        super().__init__()
        self.operator, self.what = operator, what


class _Watched(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: Tensor) -> Any:
        with _Sizes(given[0].shape):
            return self.module(*given)


class _Sizes(TorchFunctionMode):
    """Raises _FixedError after the first function that makes one of the sizes of the inputs, symbols until then, a number."""

    def __init__(self, sizes: Sequence[Any]) -> None:
        super().__init__()
        self._open = [pair for pair in zip(sizes, ("samples", "tokens"), strict=False) if _is_open(pair[0])]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for size, what in self._open:
            if not _is_open(size):
                raise _FixedError(getattr(func, "__name__", str(func)), what)
        return found


def _is_open(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None


class _Flattening:
    """Copies an exported program's graph node by node."""

    def __init__(self, program: torch.export.ExportedProgram, module: nn.Module, lead: int, *, own: bool) -> None:
        self._program, self._graph, self._lead, self._own = program, fx.Graph(), lead, own
        self._first_names = first_names(module)
        self._frozen = {n.removeprefix(INSIDE) for n, p in module.named_parameters() if not p.requires_grad}

    def run(self) -> Traced:
        specs = {spec.arg.name: spec for spec in self._program.graph_signature.input_specs}
        env: dict[fx.Node, Any] = {}
        parameters, constants, shapes, values = {}, {}, {}, {}
        device = self._graph.placeholder("where")
        known: dict[str, fx.Node] = {}
        users: list[fx.Node] = []
        for node in self._program.graph.nodes:
            if node.op != "placeholder":
                continue
            spec, val = specs[node.name], node.meta["val"]
            if spec.kind is InputKind.USER_INPUT:
                users.append(self._placeholder(node))
                env[node] = users[-1]
                continue
            name = self._first_names.get(spec.target, spec.target).removeprefix(INSIDE)
            if name not in known:
                known[name] = self._placeholder(node)
                if spec.kind is InputKind.PARAMETER:
                    parameters[known[name]], shapes[name] = name, tuple(val.shape)
                else:
                    constants[known[name]] = name
                    if spec.kind is InputKind.CONSTANT_TENSOR:
                        values[name] = self._program.constants[spec.target]
                        if values[name].is_meta:
                            raise ConfigError(
                                f"{path_of(next(iter(node.users), node))} makes a constant tensor in a way that loses its numbers "
                                f"while it is traced; make it by torch.tensor, or take another model"
                            )
            env[node] = known[name]
        inputs, targets, positions = (
            users[0],
            *([*users[1:], None, None] if self._own else [None, *users[1:], None])[:2],
        )
        self._device = device
        (output,) = self._copy(self._program.graph_module, env, {})
        sizes = tuple(inputs.meta["val"].shape)[: self._lead]
        frozen = {name: node.meta["val"].dtype for node, name in parameters.items() if name in self._frozen}
        return Traced(
            self._graph,
            inputs,
            targets,
            positions,
            device,
            output,
            parameters,
            frozen,
            shapes,
            constants,
            values,
            sizes,
        )

    def _placeholder(self, node: fx.Node) -> fx.Node:
        copy = self._graph.placeholder(node.name)
        copy.meta = dict(node.meta)
        return copy

    def _copy(self, body: fx.GraphModule, env: dict[fx.Node, Any], stack: dict[str, Any]) -> tuple[Any, ...]:
        """Copy the nodes of ``body``, with placeholders from ``env``. Returns the outputs of ``body``. ``stack``: the
        modules around ``body``."""
        for node in body.graph.nodes:
            if node.op == "output":
                return tuple(fx.map_arg(node.args[0], lambda n: env[n]))
            if node.op in ("placeholder", "get_attr"):
                continue
            name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
            inner = node.meta.get("nn_module_stack") or stack
            if name in _CHECKS:
                continue
            if name in _REGIONS:
                env[node] = self._region(body, node, name, env, inner)
            elif node.target is operator.getitem and isinstance(env.get(node.args[0]), tuple):
                env[node] = env[node.args[0]][node.args[1]]
            else:
                env[node] = self._node(node, env, inner)
        raise AssertionError("a graph without output")

    def _region(
        self, body: fx.GraphModule, node: fx.Node, name: str, env: dict[fx.Node, Any], stack: dict[str, Any]
    ) -> tuple[Any, ...]:
        at = 1 if name == "wrap_with_set_grad_enabled" else 4
        if name == "wrap_with_autocast" and node.args[2]:
            raise ConfigError(
                f"{_path(stack)} switches autocast on; muletrain chooses the arithmetic (compute.precision)"
            )
        inner = getattr(body, str(node.args[at].target))  # type: ignore[union-attr]
        holders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        given = [env[n] for n in node.args[at + 1 :]]  # type: ignore[index]
        outputs = self._copy(inner, dict(zip(holders, given, strict=True)), stack)
        if name == "wrap_with_autocast" or node.args[0]:
            return outputs
        return tuple(self._detached(value) for value in outputs)

    def _detached(self, value: Any) -> Any:
        """Detach a tensor where the module switched gradients off."""
        if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), Tensor):
            return value
        copy = self._graph.call_function(aten.detach.default, (value,))
        copy.meta = dict(value.meta)
        return copy

    def _node(self, node: fx.Node, env: dict[fx.Node, Any], stack: dict[str, Any]) -> fx.Node:
        if node.op != "call_function" or not _known(node.target):
            raise ConfigError(
                f"{_path(stack)} calls {node.target}, which is no operator that can be cut; write that part of "
                f"the model without it"
            )
        target = self._functional(node, env, stack)
        given: Any = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        args, kwargs = fx.node.map_aggregate(given, lambda x: self._device if isinstance(x, torch.device) else x)
        copy = self._graph.call_function(target, args, kwargs)
        copy.meta = {**node.meta, "nn_module_stack": stack}
        if target is not node.target:
            env[node.args[0]] = copy  # type: ignore[index]
        return copy

    def _functional(self, node: fx.Node, env: dict[fx.Node, Any], stack: dict[str, Any]) -> Any:
        """The operator of ``node``; in a user's module, the variant that does not change inputs. Raises ConfigError for
        an operator that changes state beyond a microbatch, or, in a user's module, a tensor with views."""
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return target
        name, schema = target._schema.name.partition("::")[2], target._schema
        kept = name in ("batch_norm", "instance_norm") and node.args[3] is not None
        written = [k for k, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        if not written and not kept:
            return target
        changed: Any = node.args[3 if kept else written[0]]
        lasting: Any = env[changed]
        while _is_view(lasting):
            lasting = lasting.args[0]
        if lasting.op == "placeholder":
            raise ConfigError(
                f"{_path(stack)} changes {lasting.name} ({target}) while it computes, so a microbatch could not be "
                f"computed twice; take one without running statistics (GroupNorm or LayerNorm for BatchNorm)"
            )
        if not self._own:
            return target
        plain = None if kept or written != [0] else getattr(aten, name.removesuffix("_"), None)
        other = getattr(plain, target._overloadname, None)
        if other is None or _is_view(changed) or any(_is_view(user) for user in changed.users):
            raise ConfigError(
                f"{_path(stack)} writes into a tensor ({target}), and blocks must leave their inputs as they are; use the "
                f"form that returns a new one"
            )
        return other


@contextmanager
def _silenced() -> Iterator[None]:
    """Suppress the graph that torch prints when tracing fails: the error names the place."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


def path_of(node: fx.Node) -> str:
    """The dotted path of a node's module."""
    return _path(node.meta.get("nn_module_stack") or {})


def operator_of(node: fx.Node) -> str:
    """The name of the operator that a node calls, such as ``linear``."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", ""))


def _path(stack: dict[str, Any]) -> str:
    """The innermost of the modules around a node."""
    entries = list(stack.values())
    path = entries[-1][0] if entries and isinstance(entries[-1], tuple) else ""
    return f"{path}.".removeprefix(INSIDE).removesuffix(".") or "the model"


def _is_view(node: fx.Node) -> bool:
    """Does a node's result share the memory of an input?"""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _known(target: Any) -> bool:
    """Operators of torch, and arithmetic on sizes."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in ("aten", "transformers")  # transformers has operators for experts
    return getattr(target, "__module__", "") in ("_operator", "operator", "torch", "math")


def first_names(module: nn.Module) -> dict[str, str]:
    """Name -> the first name of the same tensor."""
    found: dict[int, str] = {}
    tensors: Iterable[tuple[str, Tensor]] = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: found.setdefault(id(tensor), name) for name, tensor in tensors}


def where(e: BaseException) -> str:
    """The place of the last traced line of the model's code, in words."""
    trace, found = e.__traceback__, ""
    while trace is not None:
        package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        file = trace.tb_frame.f_code.co_filename
        if package not in ("torch", "muletrain") and not file.startswith("<"):
            found = f" (in {trace.tb_frame.f_code.co_name}, {'/'.join(file.split('/')[-2:])}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found


def first_line(e: BaseException) -> str:
    """The first line of the error's message."""
    text = next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
    return text[:300]
