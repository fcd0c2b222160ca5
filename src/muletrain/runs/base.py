"""The weights beside an adapter (``Model.base``) for the processes of a run: their digests, and where a machine has them."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.config.cache import cache_folder, keep, kept
from muletrain.config.model_sections import DataConfig
from muletrain.config.section import Section
from muletrain.errors import CheckpointError, ConfigError
from muletrain.model.finite import finite
from muletrain.model.traced.folder import load_base
from muletrain.runtime.core.blocks import StateImage
from muletrain.runtime.transfer.base import BaseStore
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from muletrain.config.schema import RunConfig
    from muletrain.model.chain import Model
    from muletrain.model.traced.chain import TracedModel

KIND, DIGESTS = "bases", "base_digests"
"""Folders of the cache: parts of bases, and entries of ``Digests``, of which few are kept."""
LONG_BYTES = 2 << 30
"""Bytes whose reading takes seconds."""
_HUB = re.compile(r"(?:^|/)(models--[\w.-]+/snapshots/[0-9a-f]{40})$")
"""The end of a model's path in the cache of the Hub."""


class Digests(Section):
    """An entry of the cache: the digests of a folder's weights."""

    digests: tuple[str, ...]


def check_quantising(config: RunConfig) -> None:
    """Raises ConfigError if this machine cannot quantise the base, and ``config`` asks for it."""
    if config.adapter.quantise != "none":
        from muletrain.model.traced.held import library

        library()


def digests_of(folder: Path, model: TracedModel, kind: str, note: Callable[[str], None]) -> tuple[str, ...]:
    """The digest of the base's weights in ``folder``, of each part of the chain, as ``AdapterConfig.base`` ``kind`` holds
    them. All are read, unless files of these sizes and times were read before. Raises CheckpointError."""
    files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.glob("*.safetensors"))]
    about = {"folder": str(folder), "files": files, "model": model.to_json(), "kind": kind}
    if (entry := kept(DIGESTS, about, Digests)) is not None and len(entry.digests) == model.layers + 2:
        return entry.digests
    if (size := sum(size for _, size, _ in files)) > LONG_BYTES:
        note(f"{folder}: all weights are read once, {format_memory(size)}")
    load, found = finite(load_base(folder, model, kind), str(folder)), []
    for part in range(model.layers + 2):
        copy = StateImage({name: load(name) for name in model.base_in(part)})
        copy.named(copy.hashes())
        found.append(copy.digest.hex())
    keep(DIGESTS, about, Digests(digests=tuple(found)))
    return tuple(found)


def store_of(config: RunConfig, model: Model, folders: Sequence[Path]) -> BaseStore | None:
    """The base of ``model`` on this machine; None: the model has none. ``folders``: places to look for the model. Raises
    ConfigError for a configuration without digests."""
    if not model.base:
        return None
    digests = config.adapter.digests
    if digests is None or len(digests) != model.layers + 2:
        raise ConfigError(
            f"adapter.digests: {0 if digests is None else len(digests)} digests for a model of {model.layers + 2} parts; leave it out, "
            f"it is filled in"
        )

    def reader(folder: Path) -> Callable[[], Callable[[str], Tensor]]:
        return functools.cache(lambda: load_base(folder, model, config.adapter.base))  # type: ignore[arg-type]

    readers = [
        (str(folder), reader(folder)) for folder in dict.fromkeys(folders) if os.path.isfile(folder / "config.json")
    ]
    # os.path.isfile is False also where another user's folder may not be read
    return BaseStore(model, tuple(map(bytes.fromhex, digests)), readers, cache_folder(DataConfig()) / KIND)


def own_folders(config: RunConfig, given: str | None = None) -> list[Path]:
    """Folders in which a joiner may have the model: the ``given`` one, and its own copy of the Hub's. The path in
    ``model.from`` is another machine's."""
    found = [] if given is None else [Path(given).expanduser().resolve()]
    if (match := _HUB.search(config.model.from_ or "")) is not None:
        from huggingface_hub.constants import HF_HUB_CACHE

        found.append(Path(os.environ.get("HF_HUB_CACHE") or HF_HUB_CACHE) / match[1])
    return found


def weights_of(config: RunConfig, model: Model, folder: Path | None = None) -> dict[str, Tensor]:
    """All weights of the base, of a run of this machine; empty: the model has none. ``folder``: the new place of
    ``model.from``. Raises CheckpointError if they are not here, or others."""
    named = [Path(config.model.from_)] if config.model.from_ is not None else []
    store = store_of(config, model, [*([] if folder is None else [folder]), *named, *own_folders(config)])
    found: dict[str, Tensor] = {}
    for part in range(model.layers + 2 if store is not None else 0):
        assert store is not None
        if (tensors := store.part(part)) is None:
            said = "".join(f"; {why}" for why in store.problems)
            raise CheckpointError(
                f"the adapter belongs to {config.model.from_} (model.from), whose weights are not here, or not those that the run began "
                f"with{said}; bring the folder back, or name its new place by --source"
            )
        found |= tensors
    return found
