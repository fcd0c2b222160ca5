"""Checkpoints: one R_t for all stages, gathered by the collecting peer while training goes on.

Parts first, the manifest that names them by content last; the folder gets its name only when it is complete, so that a
checkpoint that exists can be used. Trouble (a full disk, a lost part) ends that checkpoint, never the training.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import safetensors.torch

from muletrain.errors import MuletrainError, NetworkError, ProtocolError
from muletrain.events import CheckpointFailed, CheckpointWritten
from muletrain.swarm.messages import Part, PartFailed
from muletrain.wire.codec import decode_raw, encode_raw

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from muletrain.swarm.context import Context
    from muletrain.wire.codec import Encoded

PIECE = 1 << 20
"""Bytes in one Part frame."""
MAX_PART = 1 << 42


async def send_part(ctx: Context, step: int, lineage: bytes, state: dict[str, Tensor]) -> None:
    """Stream this stage's state (after step ``step``) to the collector. Reports failure instead of raising."""
    stage, collector = ctx.roster.own.stage, ctx.roster.genesis.collector
    try:
        data: bytes = await ctx.compute.offload(safetensors.torch.save, state)
        digest = await ctx.compute.offload(lambda: hashlib.sha256(data).digest())
        for offset in range(0, max(len(data), 1), PIECE):
            piece = encode_raw(memoryview(data)[offset : offset + PIECE])
            part = Part(step=step, lineage=lineage, stage=stage, offset=offset, size=len(data), digest=digest)
            await ctx.send(collector, part, [piece])
    except NetworkError as e:
        ctx.emit(CheckpointFailed(step=step, reason=f"stage {stage} could not send its part: {e}"))
    except (OSError, MemoryError) as e:
        failed = PartFailed(step=step, stage=stage, reason=f"stage {stage} could not write its part: {e}"[:1000])
        await ctx.tell((collector,), failed)


@dataclass
class _Open:
    """A checkpoint being gathered: bytes received and the digest so far of each stage's part."""

    folder: Path
    lineage: bytes
    begin: float
    received: dict[int, int]
    digests: dict[int, Any]
    complete: dict[int, bytes]
    size: int = 0


class Collector:
    """Gathers parts into ``folder/step-N``; keeps the newest ``keep``. ``manifest`` and ``files`` make it self-contained."""

    def __init__(
        self, ctx: Context, folder: Path, keep: int, manifest: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> None:
        self._ctx = ctx
        self._folder = folder
        self._keep = keep
        self._manifest = manifest
        self._files = files
        self._open: dict[int, _Open] = {}
        self._ended: dict[int, Path | None] = {}
        self._changed = asyncio.Event()

    def on_part(self, message: Part, tensor: Encoded) -> None:
        """Raises ProtocolError for pieces out of order, beyond their size, or of a stage the run does not have."""
        data = decode_raw(tensor)
        if message.stage >= self._ctx.plan.stages or message.size > MAX_PART or len(data) > PIECE:
            raise ProtocolError(f"checkpoint part of stage {message.stage}, {message.size} bytes: no such part")
        if message.step in self._ended or message.step >= self._ctx.plan.steps:
            return
        try:
            self._store(message, data)
        except OSError as e:
            self._end(message.step, None, f"{e.strerror or e}: {self._folder} (free some space; training goes on)")

    def on_failed(self, message: PartFailed) -> None:
        self._end(message.step, None, message.reason)

    async def wait(self, step: int, timeout_s: float) -> Path | None:
        """Until checkpoint ``step`` is written; None if it failed or ``timeout_s`` passed."""

        async def ended() -> Path | None:
            while step not in self._ended:
                self._changed.clear()
                await self._changed.wait()
            return self._ended[step]

        try:
            return await self._ctx.clock.deadline(ended(), timeout_s, f"checkpoint {step}")
        except MuletrainError as e:
            self._end(step, None, str(e))
            return None

    def _store(self, message: Part, data: memoryview) -> None:
        checkpoint = self._open.get(message.step) or self._begin(message)
        received = checkpoint.received.get(message.stage, 0)
        if message.offset == 0 and message.stage in checkpoint.complete:
            return  # a second replica sent it too
        if message.offset == 0 and received and message.lineage == checkpoint.lineage:  # sent again after a break
            (checkpoint.folder / f"stage-{message.stage}.safetensors").unlink()
            checkpoint.size -= received
            received = checkpoint.received[message.stage] = 0
            del checkpoint.digests[message.stage]
        if message.lineage != checkpoint.lineage or message.offset != received or received + len(data) > message.size:
            raise ProtocolError(
                f"checkpoint {message.step}, stage {message.stage}: piece at {message.offset} out of order"
            )
        digest = checkpoint.digests.setdefault(message.stage, hashlib.sha256())
        with open(checkpoint.folder / f"stage-{message.stage}.safetensors", "ab") as file:
            file.write(data)
            digest.update(data)
            checkpoint.received[message.stage] = received + len(data)
            checkpoint.size += len(data)
            if checkpoint.received[message.stage] < message.size:
                return
            file.flush()
            os.fsync(file.fileno())
        if digest.digest() != message.digest:
            raise ProtocolError(f"checkpoint {message.step}, stage {message.stage}: content does not match its digest")
        checkpoint.complete[message.stage] = message.digest
        if len(checkpoint.complete) == self._ctx.plan.stages:
            self._complete(message.step, checkpoint)

    def _begin(self, message: Part) -> _Open:
        folder = self._folder / f".step-{message.step + 1:08d}.partial"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        checkpoint = _Open(folder, message.lineage, self._ctx.clock.now(), {}, {}, {})
        self._open[message.step] = checkpoint
        return checkpoint

    def _complete(self, step: int, checkpoint: _Open) -> None:
        for name, content in self._files.items():
            _write_durably(checkpoint.folder / name, content)
        parts = [{"file": f"stage-{s}.safetensors", "sha256": d.hex()} for s, d in sorted(checkpoint.complete.items())]
        manifest = {**self._manifest, "step": step + 1, "lineage": checkpoint.lineage.hex(), "parts": parts}
        _write_durably(checkpoint.folder / "manifest.json", json.dumps(manifest, indent=1).encode())
        final = self._folder / f"step-{step + 1:08d}"
        shutil.rmtree(final, ignore_errors=True)
        _sync_folder(checkpoint.folder)
        os.replace(checkpoint.folder, final)
        _sync_folder(self._folder)
        seconds = self._ctx.clock.now() - checkpoint.begin
        self._ctx.emit(CheckpointWritten(step=step + 1, path=str(final), bytes=checkpoint.size, seconds=seconds))
        self._end(step, final, "")
        # those of later steps are what a resumed run passed over: they must not push this one out
        known = sorted(f for f in self._folder.glob("step-*") if f.name <= final.name)
        for old in known[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _end(self, step: int, path: Path | None, reason: str) -> None:
        if step in self._ended:
            return
        checkpoint = self._open.pop(step, None)
        if path is None:
            self._ctx.emit(CheckpointFailed(step=step + 1, reason=reason))
            if checkpoint is not None:
                shutil.rmtree(checkpoint.folder, ignore_errors=True)
        self._ended[step] = path
        self._changed.set()


def _write_durably(path: Path, content: bytes) -> None:
    """On the disk, not only on its way there: the name that says 'complete' must not survive a power cut that the content does not."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
