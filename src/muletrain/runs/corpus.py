"""A peer's own data: the corpus of a trainer, and the peer's part in sharing the run's tokens."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.config.cache import cache_folder
from muletrain.config.model_sections import DataConfig
from muletrain.config.trusted import trusted
from muletrain.data.chat import is_resolved
from muletrain.data.tokens import TokenCache
from muletrain.errors import AdmissionError, DataError
from muletrain.runtime.core.disk import Disk
from muletrain.runtime.transfer.tokens import WANTED, Sharing, Store, share
from muletrain.units import format_memory

if TYPE_CHECKING:
    from muletrain.data.samples import Data
    from muletrain.runs.assemble import RunFacts
    from muletrain.runs.host import Host
    from muletrain.runs.join.messages import Welcome


async def owners_sharing(facts: RunFacts, cache: TokenCache) -> Sharing:
    """The ``Sharing`` of a peer that has the data. Reads all data once. Raises DataError."""
    disk, wanted = Disk(), facts.config.fleet.trainers or WANTED
    try:
        shared, copy = await asyncio.to_thread(share, *cache.train_file, cache.heldout_file, disk)
    except OSError as e:
        raise DataError(f"data.share: {cache.folder}: {e.strerror}; build the cache again") from e
    return Sharing(
        shared,
        bytes.fromhex(cache.digest),
        cache.tokenizer_json,
        facts.spec.vocab,
        facts.source_of,
        wanted=min(WANTED, wanted),
        source=facts.source(cache),
        copy=copy,
        disk=disk,
    )


async def joiners_sharing(
    host: Host, facts: RunFacts, welcome: Welcome, tokenizer: bytes, cache: Data | None
) -> Sharing | None:
    """The ``Sharing`` of a joiner; None if the run shares no tokens, or this machine takes none."""
    shared, limit = welcome.tokens, int(host.spec.tokens_gib * 2**30)
    if shared is None or not facts.config.data.share:
        return None
    if isinstance(cache, TokenCache):
        own = await owners_sharing(facts, cache)
        return own if own.shared == shared else None
    if shared.size > limit:
        host.log.note(
            f"the run shares its tokens, {format_memory(shared.size)}; this machine keeps at most {format_memory(limit)} "
            f"(--tokens)",
            "info",
        )
        return None
    wanted = min(WANTED, facts.config.fleet.trainers or WANTED)
    store = Store(cache_folder(DataConfig()) / "shared", limit)
    return Sharing(shared, welcome.data, tokenizer, facts.spec.vocab, facts.source_of, store, wanted)


def own_data(host: Host, facts: RunFacts, tokenizer: bytes, digest: str) -> Data | None:
    """The corpus or the samples, if this peer has the data, and so can train at once. Raises AdmissionError for data
    that differ from the run's."""
    where, data = host.spec.data, facts.config.data
    if data.factory is not None:
        return _own_samples(facts, digest) if data.factory in trusted() else None
    if where == "none":
        return None
    if data.counts and not is_resolved(data.chat_template):  # a path of the founder's, which is not read here
        raise AdmissionError("--data: the run's configuration lacks the text of its chat template; join without it")
    if where != "config" and data.validation is not None:  # a path of the founder's, which is not read here
        raise AdmissionError(
            "--data: the run has held-out text of its own (data.validation), which --data does not name; join without it"
        )
    if where != "config":
        with tempfile.TemporaryDirectory(prefix="mule-tokenizer-") as folder:
            file = Path(folder) / "tokenizer.json"
            file.write_bytes(tokenizer)
            own = {"path": where, "tokenizer": str(file), "cache": None}  # ours, not the founder's paths
            data = data.model_copy(update=own)
            cache = TokenCache.build(data, facts.spec.vocab, context=facts.spec.context)
    else:
        cache = TokenCache.build(data, facts.spec.vocab, context=facts.spec.context)
    if cache.digest != digest:
        raise AdmissionError(
            f"--data: {data.path}: this corpus has digest {cache.digest[:12]}, the run's has {digest[:12]}; give the same "
            f"files, or join without --data (only trainers need it)"
        )
    return cache


def _own_samples(facts: RunFacts, digest: str) -> Data:
    found = facts.data()
    if found.digest != digest:
        raise AdmissionError(
            f"data.factory: the samples of '{facts.config.data.factory}' have digest {found.digest[:12]} here, the run's "
            f"have {digest[:12]}; install the same package and data, or join without --factory {facts.config.data.factory}"
        )
    return found
