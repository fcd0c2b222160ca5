"""A traced chain as Python to read and compare: one function for each distinct part, as written by torch.fx."""

from __future__ import annotations

import re
from types import ModuleType, NoneType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

    from muletrain.model.traced.chain import TracedModel

_HEADER = '''"""The parts of {kind}, written by 'muletrain trace', as they compute in float32. A run never imports this file.

``weight_N`` are parameters, ``x_N`` the values of the part before (of the first part the inputs; the last input of Head
are the targets of a loss of its own), ``table_N`` the results of ``tables``, which follow from buffers and the shape of the
microbatch alone. ``masks`` draws dropouts, which are numbered from ``site`` on; None: no dropout.
"""

{imports}
'''


def class_names(model: TracedModel) -> list[str]:
    """The name of each part: equal parts share a name."""
    keys = [
        (id(part.function), *((model.shapes[name], name in model.frozen) for name in part.weights))
        for part in model.parts
    ]
    known: dict[object, str] = {}
    for number, key in enumerate(keys):
        if number in (0, len(model.parts) - 1):
            name = "Embedding" if number == 0 else "Head"
        else:
            name = f"Block{len([n for n in known.values() if n.startswith('Block')]) or ''}"
        known.setdefault(key, name)
    return [known[key] for key in keys]


def source_of(model: TracedModel) -> str:
    """The source of all distinct parts of ``model``, and of the tables."""
    names, imports, functions = class_names(model), dict[str, None](), list[str]()
    for name in dict.fromkeys(names):
        number = names.index(name)
        part, layers = model.parts[number], [k - 1 for k, n in enumerate(names) if n == name]
        where = {"Embedding": "before the first block", "Head": "after the last block"}.get(name, f"layers {layers}")
        says = [where, *(f"weight_{k}: {full} {list(model.shapes[full])}" for k, full in enumerate(part.weights))]
        functions.append(_function(name, says, part.function, imports))
    says = [f"{k}: {name}" for k, name in enumerate(model.constants)]
    functions.append(_function("tables", says and ["buffers, in order", *says], model.table_function, imports))
    kind = model.factory or f"a {model.config.get('model_type')} model"
    return _HEADER.format(kind=kind, imports="\n".join(imports)) + "\n".join(functions)


def _function(name: str, says: list[str], module: fx.GraphModule, imports: dict[str, None]) -> str:
    """The text of a function. Adds the function's imports to ``imports``."""
    code = module.graph.python_code("self")
    for known, value in code.globals.items():
        imports[_import(known, value)] = None
    text = re.sub(r"\bdef forward\(self(, )?", f"def {name}(", code.src.strip())
    return "\n".join(["", *(f"# {line}" for line in says), text, ""])


def _import(name: str, value: Any) -> str:
    if isinstance(value, float):  # inf and nan
        return f"from math import {name}"
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}".removesuffix(f" as {value.__name__}")
    if value is NoneType:
        return f"from types import {name}"
    return f"from {value.__module__} import {value.__name__} as {name}".replace(f"{name} as {name}", name)


def table_rows(model: TracedModel) -> Iterator[dict[str, Any]]:
    """A row for each part: function, modules, and costs."""
    for number, (name, part) in enumerate(zip(class_names(model), model.parts, strict=True)):
        last = len(model.parts) - 1
        where = "before" if number == 0 else "after" if number == last else str(number - 1)
        cost = model.outline.parts[number]
        yield {
            "part": where,
            "class": name,
            "parameters": cost.params,
            "flops_per_token": cost.flops(model.context),
            "kept_bytes_per_token": cost.kept_bytes,
            "operators": len(part.nodes),
            "lines": part.code.count("\n"),
        }
