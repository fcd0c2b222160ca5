"""Parameters and costs of a traced chain without the graph, for planning. Tracing takes seconds to minutes, so the
outline is kept in the user's cache (``config.cache``).

For planning alone, one block of each kind is traced, and equal blocks share an outline. Such an outline has no digest,
so machines never agree on it.

An entry belongs to a configuration, a length, and the software that traces: versions, and the text of this package. A
process that traces compares the result with the entry, so computed blocks always equal the agreed blocks.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from muletrain.config.cache import keep, kept
from muletrain.config.section import Section
from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

KIND = "traced"
"""The cache's folder."""
ADAPTER = "adapter"
APART = "muletrain_apart"
"""The entry of an architecture that ``adapter.described`` gives."""


class PartOutline(Section):
    """One part of the chain. Costs are per token."""

    code: str = Field(description="digest of its function's code and of the kinds of tables that it takes")
    weights: tuple[str, ...] = Field(description="its parameters by name, in the order of its function")
    linear: tuple[int, ...] = Field(
        default=(),
        description="beside an adapter, which of weights are matrices of linear layers, also of GPT-2's Conv1D",
    )
    params: int = Field(ge=0, description="parameters that no earlier part has")
    linear_flops: float = Field(description="forward FLOPs that do not depend on the length of the sequence")
    token_flops: float = Field(description="forward FLOPs for each token of the sequence")
    kept_bytes: float = Field(
        ge=0,
        description="what autograd keeps from forward to backward in the precision of the graph, at the context's length",
    )
    by_token: bool = Field(default=False, description="is each token computed by itself, without tables and dropout?")

    def flops(self, tokens: int) -> float:
        """Forward FLOPs per token in a sequence of ``tokens``."""
        return self.linear_flops + self.token_flops * tokens


class Outline(Section):
    """A chain that was traced in fp32."""

    digest: str | None = Field(
        description="of names and shapes of parameters, and of the code of each part; none if not all blocks were traced"
    )
    width: int = Field(gt=0, description="numbers that go from one block to the next for each token")
    shapes: dict[str, tuple[int, ...]] = Field(description="shape of each parameter; tied ones once")
    frozen: dict[str, str] = Field(default={}, description="type of each parameter that is not trained")
    parts: tuple[PartOutline, ...] = Field(min_length=3, description="before the blocks, the blocks, after them")
    tables: dict[int, int] = Field(default={}, description="by microbatch [sequences], the tables' size [bytes]")
    kept_16: tuple[float, ...] = Field(
        default=(), description="kept_bytes of each part in 16 bits; empty: not known yet"
    )

    @property
    def kinds(self) -> list[object]:
        """Common properties of equal parts, for each part."""
        return [(part.code, *(self.shapes[name] for name in part.weights)) for part in self.parts]


told: dict[tuple[str, int], str] = {}
"""Digests that this process read from the cache, and perhaps agreed on with other machines. The entries may change
meanwhile."""


def known(architecture: str, context: int, *, whole: bool = False) -> Outline | None:
    """The outline of a model of ``transformers`` in the cache. ``whole``: only an outline with a digest."""
    found = kept(KIND, about(architecture, context), Outline)
    if found is None or (whole and found.digest is None):
        return None
    if found.digest is not None:
        told.setdefault((architecture, context), found.digest)
    return found


def agreed(found: Outline, architecture: str, context: int) -> Outline:
    """Keep the outline of the whole traced chain. Raises ConfigError if the cache has, or this process read, another
    chain; the next process finds this chain there."""
    key = about(architecture, context)
    entry = kept(KIND, key, Outline)
    if entry is None or entry.digest != found.digest:
        keep(KIND, key, found)
    before = None if entry is None else entry.digest
    earlier = told.get((architecture, context), before or found.digest)
    if earlier != found.digest:
        raise ConfigError(
            f"the installed torch or transformers makes other blocks ({str(found.digest)[:16]}) than before "
            f"({str(earlier)[:16]}) under the same versions, so its files were changed; begin again"
        )
    return entry if entry is not None and before == earlier else found


def keep_short(found: Outline, architecture: str, context: int) -> None:
    """Keep an outline without a digest, for planning."""
    keep(KIND, about(architecture, context), found)


def alike(layers: Iterable[nn.Module], config: Mapping[str, object]) -> list[int]:
    """For each layer, the first equal layer: the same modules, shapes of parameters and settings, also in lists of
    ``config`` with an entry for each layer. A layer's number does not count. Values that cannot be compared count as
    different."""
    found = [dict(_settings(layer)) for layer in layers]
    for name, value in config.items():
        if isinstance(value, list) and len(value) == len(found):
            for settings, own in zip(found, value, strict=True):
                settings[name] = own
    order = [*range(len(found))]
    numbers = {key for key in found[0] if [settings.get(key) for settings in found] == order}
    kinds = [{key: value for key, value in settings.items() if key not in numbers} for settings in found]
    return [kinds.index(kind) for kind in kinds]


def _settings(layer: nn.Module) -> Iterator[tuple[str, object]]:
    for path, module in layer.named_modules():
        yield path, type(module)
        yield f"{path}()", [(name, tuple(t.shape), t.dtype) for name, t in module.state_dict().items()]
        for name, value in vars(module).items():
            if isinstance(value, functools.partial):
                yield f"{path}.{name}", (value.func, value.args, value.keywords)
            elif not name.startswith("_"):
                plain = isinstance(value, bool | int | float | str | tuple | list | dict | None)
                yield f"{path}.{name}", value if plain else id(value)


def lengthened(short: Outline, path: str, first: Sequence[int], shapes: dict[str, tuple[int, ...]]) -> Outline | None:
    """The outline of a model with block k like block ``first[k]`` of ``short``, without a digest; None: the parameters
    would differ from ``shapes``. ``path``: of the list of blocks."""
    before, *blocks, after = short.parts
    parts, counted = [before], set[str]()
    for number, kind in enumerate(first):
        old, new = f"{path}.{kind}.", f"{path}.{number}."
        weights = tuple(f"{new}{w.removeprefix(old)}" if w.startswith(old) else w for w in blocks[kind].weights)
        parts.append(blocks[kind].model_copy(update={"weights": weights}))
    for index, part in enumerate(parts := [*parts, after]):
        fresh = [name for name in part.weights if name not in counted]
        counted.update(fresh)
        if any(name not in shapes for name in fresh):
            return None
        parts[index] = part.model_copy(update={"params": sum(math.prod(shapes[name]) for name in fresh)})
    found = short.model_copy(update={"digest": None, "shapes": shapes, "parts": tuple(parts)})
    like = all(found.kinds[1 + k] == found.kinds[1 + kind] for k, kind in enumerate(first))
    return found if like and counted == shapes.keys() else None


def extend(
    architecture: str, context: int, *, tables: Mapping[int, int] | None = None, kept_16: tuple[float, ...] = ()
) -> None:
    """Add further slow results to the entry."""
    key = about(architecture, context)
    if (latest := kept(KIND, key, Outline)) is not None:
        update = {"tables": {**latest.tables, **(tables or {})}, "kept_16": kept_16 or latest.kept_16}
        keep(KIND, key, latest.model_copy(update=update))


def about(architecture: str, context: int) -> dict[str, object]:
    """Key of an entry of the cache."""
    software = {name: version(name) for name in ("torch", "transformers")}
    software |= {"python": sys.version, "muletrain": _own_text()}
    return {"architecture": architecture, "context": context, **software}


@functools.cache
def _own_text() -> str:
    """Digest of this package's files."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
