"""Checkpoints: one R_t for all stages, gathered by the collecting peer while training goes on.

Parts first, the manifest that names them by content last; the folder gets its name only when it is complete, so that a
checkpoint that exists can be used. Trouble (a full disk, a lost part) ends that checkpoint, never the training. Hashing and the disk
may take seconds: they have a thread of their own (``Context.aside``), in which jobs run in the order in which they were given.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from muletrain.errors import MuletrainError, NetworkError, ProtocolError
from muletrain.events import CheckpointFailed, CheckpointWritten
from muletrain.swarm.messages import Part
from muletrain.wire.codec import RAW, Encoded, decode_raw
from muletrain.wire.statefile import cut, state_buffers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.swarm.context import Context

PIECE = 1 << 20
"""Bytes in one Part frame."""
MAX_PART = 1 << 42
MAX_OPEN = 8
"""Checkpoints being gathered at once."""


async def send_part(ctx: Context, step: int, lineage: bytes, state: dict[str, Tensor]) -> None:
    """Stream this stage's state (after step ``step``) to the collector. Reports failure instead of raising."""
    stage, collector = ctx.roster.own.stage, ctx.roster.genesis.collector
    try:
        buffers = state_buffers(state)
        size, digest, offset = sum(map(len, buffers)), await ctx.aside(_sha256, buffers), 0
        for piece in cut(buffers, PIECE):
            part = Part(step=step, lineage=lineage, stage=stage, offset=offset, size=size, digest=digest)
            length = sum(map(len, piece))
            await ctx.send(collector, part, [Encoded(RAW, (length,), piece)])
            offset += length
    except NetworkError as e:
        ctx.emit(CheckpointFailed(step=step + 1, reason=f"stage {stage} could not send its part: {e}"))


@dataclass
class _Incoming:
    """One stage's part on its way into a file."""

    path: Path
    sender: PeerId
    size: int
    digest: bytes
    received: int = 0
    whole: bool = False
    _hash: Any = field(default_factory=hashlib.sha256)

    def write(self, offset: int, data: memoryview) -> None:
        with self.path.open("ab" if offset else "wb") as file:
            file.write(data)
        self._hash.update(data)

    def finish(self) -> bool:
        """On the disk. Is it what was promised?"""
        with self.path.open("rb+") as file:
            os.fsync(file.fileno())
        return bool(self._hash.digest() == self.digest)


@dataclass
class _Open:
    """A checkpoint being gathered: each stage's part as far as it came."""

    folder: Path
    lineage: bytes
    begin: float
    parts: dict[int, _Incoming] = field(default_factory=dict)

    def make(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)


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

    async def on_part(self, sender: PeerId, message: Part, tensor: Encoded) -> None:
        """Returns when the piece is written, so that the sender sends no faster than the disk takes. Raises ProtocolError for pieces
        out of order, beyond their size, or of a stage that is not the sender's."""
        data = decode_raw(tensor)
        self._check(sender, message, len(data))
        if message.step in self._ended:
            return
        try:
            await self._store(sender, message, data)
        except OSError as e:
            reason = f"{e.strerror or e}: {self._folder} (free some space; training goes on)"
            await self._end(message.step, None, reason)

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
            await self._end(step, None, str(e))
            return None

    def _check(self, sender: PeerId, message: Part, length: int) -> None:
        plan = self._ctx.plan
        if message.stage != self._ctx.roster.member(sender).stage or message.step >= plan.steps:
            raise ProtocolError(f"checkpoint part of stage {message.stage}, step {message.step}: not this peer's")
        if not 0 < length <= PIECE or not message.offset + length <= message.size <= MAX_PART:
            raise ProtocolError(
                f"checkpoint part of {message.size} bytes: {length} at {message.offset} are no piece of it"
            )
        opened = self._open.get(message.step)
        if opened is not None and message.lineage != opened.lineage:
            raise ProtocolError(f"checkpoint {message.step}: a part of another lineage")
        if opened is None and message.step not in self._ended and len(self._open) >= MAX_OPEN:
            raise ProtocolError(f"checkpoint {message.step}: {MAX_OPEN} others are not complete yet")

    async def _store(self, sender: PeerId, message: Part, data: memoryview) -> None:
        checkpoint, step, stage = self._open.get(message.step), message.step, message.stage
        if checkpoint is None:
            folder = self._folder / f".step-{step + 1:08d}.partial"
            checkpoint = self._open[step] = _Open(folder, message.lineage, self._ctx.clock.now())
            await self._ctx.aside(checkpoint.make)
        part = checkpoint.parts.get(stage)
        if part is not None and (part.whole or (message.offset and part.sender != sender)):
            return  # a second replica sends it too
        if message.offset == 0:  # perhaps again, after a break
            path = checkpoint.folder / f"stage-{stage}.safetensors"
            part = checkpoint.parts[stage] = _Incoming(path, sender, message.size, message.digest)
        promised = (message.offset, message.size, message.digest)
        if part is None or promised != (part.received, part.size, part.digest):
            raise ProtocolError(f"checkpoint {step}, stage {stage}: piece at {message.offset} out of order")
        part.received += len(data)
        await self._ctx.aside(part.write, message.offset, data)
        if part.received == part.size and await self._whole(checkpoint, stage, part) and step in self._open:
            await self._complete(step, checkpoint)

    async def _whole(self, checkpoint: _Open, stage: int, part: _Incoming) -> bool:
        """The last piece of ``part`` was written. True if no stage's part is missing any more."""
        genuine = await self._ctx.aside(part.finish)
        if checkpoint.parts.get(stage) is not part:
            return False  # begun again meanwhile
        if not genuine:
            del checkpoint.parts[stage]
            raise ProtocolError(f"{part.path.name}: content does not match its digest")
        part.whole = True
        return len(checkpoint.parts) == self._ctx.plan.stages and all(p.whole for p in checkpoint.parts.values())

    async def _complete(self, step: int, checkpoint: _Open) -> None:
        final = self._folder / f"step-{step + 1:08d}"
        await self._ctx.aside(self._publish, step, checkpoint, final)
        seconds, size = self._ctx.clock.now() - checkpoint.begin, sum(p.size for p in checkpoint.parts.values())
        self._ctx.emit(CheckpointWritten(step=step + 1, path=str(final), bytes=size, seconds=seconds))
        for overtaken in [s for s in self._open if s < step]:
            lacking = sorted(set(range(self._ctx.plan.stages)) - self._open[overtaken].parts.keys())
            missing = f"no part of stages {lacking} came" if lacking else "its parts did not come whole"
            await self._end(overtaken, None, f"{missing} before a later checkpoint was complete")
        await self._end(step, final, "")

    def _publish(self, step: int, checkpoint: _Open, final: Path) -> None:
        """Make it durable, then give it its name, then remove what is older than the newest ``keep``."""
        for name, content in self._files.items():
            _write_durably(checkpoint.folder / name, content)
        parts = [{"file": p.path.name, "sha256": p.digest.hex()} for _, p in sorted(checkpoint.parts.items())]
        files = [{"file": n, "sha256": hashlib.sha256(c).hexdigest()} for n, c in self._files.items()]
        manifest = {
            **self._manifest,
            "step": step + 1,
            "lineage": checkpoint.lineage.hex(),
            "parts": parts,
            "files": files,
        }
        _write_durably(checkpoint.folder / "manifest.json", json.dumps(manifest, indent=1).encode())
        shutil.rmtree(final, ignore_errors=True)
        _sync_folder(checkpoint.folder)
        os.replace(checkpoint.folder, final)
        _sync_folder(self._folder)
        # those of later steps are what a resumed run passed over: they must not push this one out
        known = sorted(f for f in self._folder.glob("step-*") if f.name <= final.name)
        for old in known[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    async def _end(self, step: int, path: Path | None, reason: str) -> None:
        if step in self._ended:
            return
        self._ended[step] = path
        checkpoint = self._open.pop(step, None)
        if path is None:
            if checkpoint is not None:  # first, so that there is room to tell of it
                await self._ctx.aside(shutil.rmtree, checkpoint.folder, True)
            self._ctx.emit(CheckpointFailed(step=step + 1, reason=reason))
        self._changed.set()


def _sha256(buffers: Iterable[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


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
