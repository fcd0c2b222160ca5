"""State transfer between replicas: for a peer that fell behind (DESIGN "Joining, moving, leaving").

A donor copies its state between two steps and serves the copy in pieces, while it trains on; the taker checks the whole against its
digest before it loads anything.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import safetensors.torch
from blake3 import blake3

from muletrain.errors import CheckpointError, MuletrainError, NetworkError, ProtocolError
from muletrain.events import Note
from muletrain.swarm.messages import AskPiece, AskSnapshot, Snapshot

if TYPE_CHECKING:
    from muletrain.network.base import PeerId
    from muletrain.swarm.context import Context
    from muletrain.swarm.stepper import Stepper

PIECE = 512 * 1024
"""Bytes in one answer; calls carry at most 1 MiB."""
AHEAD = 4
"""Pieces asked for at once."""
CALL_S = 60.0
"""For a piece: a bound for a dead donor, not for a slow link."""
MAX_SNAPSHOT = 1 << 40
SETTLE_S, SETTLE_TRIES = 0.02, 500
ROUNDS = 20
"""Times all donors are asked before we give up; a pause between them doubles."""
PAUSE_S, PAUSE_MAX_S = 0.2, 10.0


class Snapshots:
    """The donor's side. One copy at a time: the newest that was asked for."""

    def __init__(self, ctx: Context, stepper: Stepper) -> None:
        self._ctx, self._stepper = ctx, stepper
        self._latest: tuple[Snapshot, bytes] | None = None
        self._making = asyncio.Lock()

    async def on_ask(self, sender: PeerId, payload: bytes) -> bytes:
        """Raises ProtocolError for a peer of another stage."""
        AskSnapshot.unpack(payload)
        own = self._ctx.roster.own
        if self._ctx.roster.member(sender).stage != own.stage:
            raise ProtocolError(f"stage {own.stage} has no state for a peer of another stage")
        async with self._making:
            known = self._latest[0] if self._latest is not None else None
            if known is None or (known.step, known.lineage) != (self._stepper.step, self._stepper.lineage):
                self._latest = await self._make()
            assert self._latest is not None  # _make returned
            return self._latest[0].pack()

    async def _make(self) -> tuple[Snapshot, bytes]:
        for _ in range(SETTLE_TRIES):
            stepper, compute = self._stepper, self._ctx.compute
            label = (stepper.step, stepper.lineage)
            if stepper.settled:
                state = await compute.state()
                if stepper.settled and label == (stepper.step, stepper.lineage):
                    data: bytes = await compute.offload(safetensors.torch.save, state)
                    digest = await compute.offload(_digest, data)
                    over = stepper.over
                    return Snapshot(step=label[0], lineage=label[1], size=len(data), digest=digest, over=over), data
            await self._ctx.clock.sleep(SETTLE_S)  # an update is being applied
        raise ProtocolError("no settled state here now: this peer is catching up, too")

    async def on_piece(self, sender: PeerId, payload: bytes) -> bytes:
        ask = AskPiece.unpack(payload)
        if self._latest is None or self._latest[0].digest != ask.digest:
            raise ProtocolError("this snapshot is not kept any more; ask for another")
        return self._latest[1][ask.offset : ask.offset + PIECE]


async def fetch_snapshot(ctx: Context, own_step: int) -> Snapshot:
    """Load the state of a replica that is beyond ``own_step``. Raises MuletrainError when none gives one."""
    stage = ctx.roster.own.stage
    donors = [p for p in ctx.roster.everyone() if ctx.roster.member(p).stage == stage]
    for round_ in range(ROUNDS):
        for donor in donors:
            try:
                answer = await ctx.net.call(donor, AskSnapshot.KIND, AskSnapshot().pack(), timeout_s=CALL_S)
                snapshot = Snapshot.unpack(answer)
                if snapshot.step <= own_step or snapshot.size > MAX_SNAPSHOT:
                    continue
                data = await _fetch(ctx, donor, snapshot)
                await ctx.compute.load_state(await ctx.compute.offload(safetensors.torch.load, data))
            except (NetworkError, ProtocolError, CheckpointError, safetensors.SafetensorError) as e:
                ctx.emit(Note(level="warning", message=f"no state from {ctx.roster.member(donor).name}: {e}"))
            else:
                return snapshot
        await ctx.clock.sleep(min(PAUSE_MAX_S, PAUSE_S * 2.0**round_))
    raise MuletrainError(f"this peer fell behind, and no replica of stage {stage} gives it the state it missed")


async def _fetch(ctx: Context, donor: PeerId, snapshot: Snapshot) -> bytes:
    data = bytearray()

    async def piece(offset: int) -> bytes:
        ask = AskPiece(digest=snapshot.digest, offset=offset).pack()
        answer = await ctx.net.call(donor, AskPiece.KIND, ask, timeout_s=CALL_S)
        if len(answer) != min(PIECE, snapshot.size - offset):
            raise ProtocolError("the snapshot's pieces do not add up to its size")
        return answer

    for begin in range(0, snapshot.size, AHEAD * PIECE):
        offsets = range(begin, min(snapshot.size, begin + AHEAD * PIECE), PIECE)
        for answer in await asyncio.gather(*map(piece, offsets)):
            data += answer
    if await ctx.compute.offload(_digest, data) != snapshot.digest:
        raise ProtocolError("the snapshot's content is not what was promised")
    return bytes(data)


def _digest(data: bytes | bytearray) -> bytes:
    return blake3(data).digest()
