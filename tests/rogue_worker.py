"""A member that does its work, and sends garbage to everyone beside it: started in place of
``muletrain.runs.worker``."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from hivemind.p2p import PeerID

from muletrain.config.schema import Codec
from muletrain.errors import NetworkError
from muletrain.network.streams import FRAMES, HELLO
from muletrain.runs import worker
from muletrain.runtime.checkpoint.messages import PartReady
from muletrain.runtime.members.row import Sync
from muletrain.runtime.microbatch.messages import Forward
from muletrain.runtime.microbatch.microbatches import Microbatches
from muletrain.runtime.peer.messages import Report
from muletrain.wire.codec import encode, encode_ids
from muletrain.wire.frame import PREFIX, Frame, pack

if TYPE_CHECKING:
    from muletrain.runtime.microbatch.inflight import InFlightStep

HELLO_BYTES = b"".join(pack(Frame(HELLO, {"channel": "bulk"})))
ONCE_AT = 2


async def misbehave(ctx: Any, peer: str, step: int, lineage: bytes) -> None:
    request = {"lineage": lineage, "step": step, "index": 1, "attempt": 0, "trainer": ctx.net.peer_id}
    stage = ctx.roster.member(peer).stage
    tensors = [encode(torch.zeros(3, 3), Codec.FP32), encode_ids(torch.zeros(3, 3, dtype=torch.int64))]
    for wrong in (request, request | {"index": 1000}):  # refused while this step lasts, ignored after it
        await _frame(ctx, peer, Forward(**wrong, stage=stage, accumulate=(0, 1), gradient=True).frame(tensors))
    if step != ONCE_AT:
        return
    await _frame(ctx, peer, Frame("nonsense", {"a": 1}))
    part = PartReady(step=step, lineage=lineage, stage=99, size=8, digest=bytes(32))
    await _frame(ctx, peer, part.frame())
    await _frame(ctx, peer, Report(event='{"kind": "note"}').frame())
    await _stream(ctx, peer, b"this is not a frame of any kind")
    await _stream(ctx, peer, HELLO_BYTES + PREFIX.pack(b"MT", 1, 0, 100, 1 << 40))
    for payload in (b"\xc1", Sync(lineage=lineage, step=0).pack()[:-1]):
        with suppress(NetworkError):
            await ctx.net.call(peer, Sync.KIND, payload, timeout_s=10)


async def _frame(ctx: Any, peer: str, frame: Frame) -> None:
    await _stream(ctx, peer, HELLO_BYTES + b"".join(pack(frame)))


async def _stream(ctx: Any, peer: str, data: bytes) -> None:
    """On a stream of its own, beside those of this member's work, until the receiver closes it."""
    _, reader, writer = await ctx.net.p2p.call_binary_stream_handler(PeerID.from_base58(peer), FRAMES)
    writer.write(data)
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(1):
            await reader.read()
    writer.close()


def main() -> None:
    right = Microbatches.begin

    def begin(self: Microbatches, work: InFlightStep, *, retry: bool) -> None:
        right(self, work, retry=retry)
        if work.step >= ONCE_AT:
            for peer in self._ctx.roster.others():
                self._ctx.spawn(misbehave(self._ctx, peer, work.step, work.lineage), "garbage")

    Microbatches.begin = begin
    worker.main()


if __name__ == "__main__":
    main()
