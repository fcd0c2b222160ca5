"""What planning asks of a traced chain: its parameters and costs, without its graph. Tracing takes seconds to minutes, so
the outline is kept in the user's cache (``config.cache``).

An entry belongs to a configuration, a length, and the software that traces: versions, and the text of this package. A
process that traces compares what it finds with the entry, so blocks that are computed are never other ones than those
that were agreed on.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from muletrain.config.cache import keep, kept
from muletrain.config.section import Section
from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

KIND = "traced"
"""The cache's folder."""


class PartOutline(Section):
    """One part of the chain. Costs are per token."""

    code: str = Field(description="digest of its function's code and of the kinds of tables that it takes")
    weights: tuple[str, ...] = Field(description="its parameters by name, in the order of its function")
    params: int = Field(ge=0, description="parameters that no earlier part has")
    linear_flops: float = Field(description="forward FLOPs that do not depend on the length of the sequence")
    token_flops: float = Field(description="forward FLOPs for each token of the sequence")
    kept_bytes: float = Field(
        ge=0,
        description="what autograd keeps from forward to backward in the precision of the graph, at the context's length",
    )

    def flops(self, tokens: int) -> float:
        """Forward FLOPs per token in a sequence of ``tokens``."""
        return self.linear_flops + self.token_flops * tokens


class Outline(Section):
    """A chain that was traced in fp32."""

    digest: str = Field(description="of names and shapes of parameters, and of the code of each part")
    width: int = Field(gt=0, description="numbers that go from one block to the next for each token")
    shapes: dict[str, tuple[int, ...]] = Field(description="shape of each parameter; tied ones once")
    parts: tuple[PartOutline, ...] = Field(min_length=3, description="before the blocks, the blocks, after them")
    tables: dict[int, int] = Field(default={}, description="by microbatch [sequences], the tables' size [bytes]")
    kept_16: tuple[float, ...] = Field(
        default=(), description="kept_bytes of each part in 16 bits; empty: not known yet"
    )

    @property
    def kinds(self) -> list[object]:
        """What equal parts have in common, for each part."""
        return [(part.code, *(self.shapes[name] for name in part.weights)) for part in self.parts]


told: dict[tuple[str, int], str] = {}
"""Digests that the cache told this process, which may have agreed on them with others. The entries may change
meanwhile."""


def outline(architecture: str, context: int, trace: Callable[[], Outline]) -> Outline:
    """The outline of a model of ``transformers``: from the cache, or what ``trace`` finds."""
    found = kept(KIND, _about(architecture, context), Outline)
    if found is None:
        return trace()
    told.setdefault((architecture, context), found.digest)
    return found


def agreed(found: Outline, architecture: str, context: int) -> Outline:
    """Keep what tracing found. Raises ConfigError if the cache has, or told this process, another chain; the next process
    finds this chain there."""
    about = _about(architecture, context)
    entry = kept(KIND, about, Outline)
    if entry is None or entry.digest != found.digest:
        keep(KIND, about, found)
    earlier = told.get((architecture, context), found.digest if entry is None else entry.digest)
    if earlier != found.digest:
        raise ConfigError(
            f"the installed torch or transformers makes other blocks ({found.digest[:16]}) than before ({earlier[:16]}) "
            f"under the same versions, so its files were changed; begin again"
        )
    return entry if entry is not None and entry.digest == earlier else found


def extend(
    architecture: str, context: int, *, tables: Mapping[int, int] | None = None, kept_16: tuple[float, ...] = ()
) -> None:
    """Add to the entry what took time as well."""
    about = _about(architecture, context)
    if (latest := kept(KIND, about, Outline)) is not None:
        update = {"tables": {**latest.tables, **(tables or {})}, "kept_16": kept_16 or latest.kept_16}
        keep(KIND, about, latest.model_copy(update=update))


def _about(architecture: str, context: int) -> dict[str, object]:
    software = {name: version(name) for name in ("torch", "transformers")}
    software |= {"python": sys.version, "muletrain": _own_text()}
    return {"architecture": architecture, "context": context, **software}


@functools.cache
def _own_text() -> str:
    """Digest of this package's files."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
