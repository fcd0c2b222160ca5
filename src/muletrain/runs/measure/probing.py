"""Measures a machine and its links before the run begins: a member's part. ``fleet_survey.py`` is the founder's part.

The founder calls ``probe.block`` (the member's speed) and ``probe.link`` (the link between two members). Members refuse
calls from other peers, and calls after the run has begun. Each call sends a bounded amount for a bounded time.

A link is measured on the run's stream of pipeline traffic, with encryption, routers and relays: frames go out
(``probe.echo``), small frames return, and one clock times both, so that no clock has to be trusted.
Round trips are measured with single bytes. For bandwidth, pieces are sent back to back; the echoes return at the rate
at which the pieces arrive. The first half is ignored, because TCP starts slowly. Volleys grow until a volley takes long
enough, which is longer on far links.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import os
import platform
import secrets
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from muletrain.compute.probe import chip
from muletrain.compute.profile import block_times
from muletrain.errors import AdmissionError, Malformed, NetworkError
from muletrain.network.base import Channel
from muletrain.runtime.core.messages import Call, Digest, Header, Id, Message, Name, Natural, Text
from muletrain.wire.codec import RAW, encode_raw

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.clock import Clock
    from muletrain.model.chain import Model
    from muletrain.network.base import Network, PeerId
    from muletrain.runs.measure.machine import Machine
    from muletrain.wire.frame import Frame

TRIPS = 9
"""Number of round trips; the first opens the stream and is ignored."""
PIECES = 16
"""Pieces of a volley."""
FIRST, MOST = 1 << 15, 1 << 25
"""Bytes of the first and of the largest volley; all volleys on a link take less than twice the largest."""
FAR = 6
"""Least duration of a volley, in round trips: in each, TCP about doubles the data in flight."""
ENOUGH = 0.6
"""Share of the target time that a volley must take to count."""
LIMIT_S = 20.0
"""Longest measurement of one direction of a link [s]."""
REPLY_S = 10.0
"""Longest send of an echo [s]."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class BlockFound(Header):
    """Times of one microbatch of ``sequences`` in one block. ``machine``: equal for all peers of a machine.
    ``disk``: free bytes in the run folder."""

    forward_s: Annotated[Positive, Field(lt=1e4)]
    backward_s: Annotated[Positive, Field(lt=1e4)]
    sequences: Annotated[int, Field(ge=1, le=1 << 20)]
    chip: Text
    machine: Digest
    disk: Natural


class AskBlock(Call[BlockFound]):
    """Asks for the speed of a block. ``names``: of all peers that are measured."""

    KIND: ClassVar[str] = "probe.block"
    names: Annotated[tuple[tuple[Id, Name], ...], Field(max_length=4096)]


class LinkFound(Header):
    """Median round trip, and bandwidth, towards another member."""

    rtt_s: Annotated[Positive, Field(lt=1e3)]
    bytes_per_s: Annotated[Positive, Field(lt=1e13)]


class AskLink(Call[LinkFound]):
    """Asks for the link to another member. ``seconds``: target time of a volley."""

    KIND: ClassVar[str] = "probe.link"
    to: Id
    seconds: Annotated[float, Field(ge=0.05, le=2.0)]


class Echo(Message):
    """A piece of random bytes as a tensor, or the answer to a piece, without a tensor and with the piece's number."""

    KIND: ClassVar[str] = "probe.echo"
    MORE: ClassVar[int] = 1
    number: Natural


class Prober:
    """Answers the founder's calls, and the echoes of all members."""

    def __init__(
        self,
        net: Network,
        links: Network,
        founder: PeerId,
        clock: Clock,
        learn: Callable[[dict[PeerId, str]], None],
        block: Callable[[], BlockFound],
    ) -> None:
        """``net``: for calls; ``links``: the network of training frames. ``learn`` takes names; ``block`` measures for
        seconds, in a thread."""
        self._net, self._links, self._founder, self._clock = net, links, founder, clock
        self._learn, self._block = learn, block
        self._busy, self._begun = asyncio.Lock(), False
        self._noise = os.urandom(MOST // PIECES)  # random, because compressible data would seem fast
        self._expected: dict[int, tuple[PeerId, asyncio.Future[float]]] = {}

    def open(self) -> None:
        """Answer from now on."""
        AskBlock.serve(self._net, self._on_block)
        AskLink.serve(self._net, self._on_link)
        self._links.receive(self._on_frame, (Echo.KIND,), self)

    def close(self) -> None:
        """Stop, because the run begins; late frames are ignored."""
        self._begun, self._noise = True, b""

    # Accepted frames (``network.base.Bounds``)

    def header(self, kind: str) -> int:
        return 256 + Echo.most()

    async def expect(self, sender: PeerId, frame: Frame) -> None:
        Echo.parse(frame)
        if any(piece.codec != RAW or math.prod(piece.shape) > MOST // PIECES for piece in frame.tensors):
            raise Malformed("the piece is too large")

    def _check(self, sender: PeerId) -> None:
        if sender != self._founder:
            raise AdmissionError("only the run's first peer may ask for measurements")
        if self._begun:
            raise AdmissionError("the run has begun; measuring would slow it down")

    async def _on_block(self, sender: PeerId, ask: AskBlock) -> BlockFound:
        self._check(sender)
        self._learn(dict(ask.names))
        async with self._busy:
            return await asyncio.to_thread(self._block)

    async def _on_link(self, sender: PeerId, ask: AskLink) -> LinkFound:
        self._check(sender)
        async with self._busy:
            self._check(sender)
            return await self._measured(ask.to, ask.seconds)

    async def _measured(self, to: PeerId, seconds: float) -> LinkFound:
        """Raises NetworkError."""
        clock = self._clock
        end = clock.now() + LIMIT_S
        trips = [(await self._volley(to, 1, 1, end))[0][0] for _ in range(TRIPS)]
        rtt_s = max(1e-6, median(trips[1:]))
        wanted_s, size = max(seconds, FAR * rtt_s), FIRST
        while True:
            volley = await self._volley(to, PIECES, size // PIECES, end)
            rate = 1 / max(1e-12, seconds_per_byte(volley[PIECES // 2 - 1 :]))
            if size / rate >= ENOUGH * wanted_s or size == MOST or clock.now() + 4 * wanted_s > end:
                return LinkFound(rtt_s=rtt_s, bytes_per_s=rate)
            size = min(MOST, max(2 * size, min(8 * size, int(rate * wanted_s))))

    async def _volley(self, to: PeerId, pieces: int, size: int, end: float) -> list[tuple[float, int]]:
        """For each piece, the time of the echo since the start [s], and the size [bytes]. Raises NetworkError;
        DeadlineExceeded after ``end``."""
        waits: list[asyncio.Future[float]] = []
        numbers = [secrets.randbits(47) for _ in range(pieces)]  # random, so that only received pieces can be answered
        for number in numbers:
            waits.append(asyncio.get_running_loop().create_future())
            self._expected[number] = to, waits[-1]

        async def there_and_back() -> list[tuple[float, int]]:
            piece = encode_raw(memoryview(self._noise)[:size])
            frames = (Echo(number=number).frame([piece]) for number in numbers)
            # all at once and unpaced: a growing window, or a sender that wakes late, would leave the link idle
            sends = (self._links.send(to, f, channel=Channel.CONTROL, timeout_s=LIMIT_S) for f in frames)
            sent = await asyncio.gather(*sends)
            return [(await wait - begin, nbytes) for wait, nbytes in zip(waits, sent, strict=True)]

        begin = self._clock.now()
        try:
            return await self._clock.deadline(there_and_back(), max(0.1, end - begin), f"echoes of {to[-6:]}")
        finally:
            for number in numbers:
                self._expected.pop(number, None)

    async def _on_frame(self, sender: PeerId, frame: Frame) -> None:
        number = Echo.parse(frame).number
        if frame.tensors:
            if not self._begun:
                with suppress(NetworkError):
                    await self._links.send(sender, Echo(number=number).frame(), timeout_s=REPLY_S)
            return
        peer, wait = self._expected.pop(number, ("", None))
        if wait is not None and peer == sender and not wait.done():
            wait.set_result(self._clock.now())


def seconds_per_byte(volley: list[tuple[float, int]]) -> float:
    """The inverse rate of (time, bytes) arrivals; the first arrival only marks the start.

    A busy machine sees arrivals late and several at once, but never early. So the link's line is the highest line that
    is nowhere above the times (Moon et al. 1999 estimate clock skew from delays in this way): the edge of the lower
    convex hull at the mean, spanned by the pair of arrivals that is lowest there. Neighbours are excluded, because two
    neighbours may have been seen at once."""
    times = [seen for seen, _ in volley]
    total = list(itertools.accumulate(nbytes for _, nbytes in volley))
    middle = sum(total) / len(total)
    before, after = ([k for k, n in enumerate(total) if (n < middle) == early] for early in (True, False))

    def slope(a: int, b: int) -> float:
        return (times[b] - times[a]) / (total[b] - total[a])

    apart = (e for e in itertools.product(before, after) if 3 * (e[1] - e[0]) >= len(total))
    edge = min(apart, key=lambda e: times[e[0]] + slope(*e) * (middle - total[e[0]]))
    return slope(*edge)


def block_of(spec: Model, sequences: int, machine: Machine, folder: Path, identity: bytes) -> BlockFound:
    """Measure a block on this machine. Raises CapacityError."""
    times = block_times(spec, sequences, machine.device, machine.precision)
    return BlockFound(
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        sequences=times.sequences,
        chip=chip(machine.device),
        machine=identity,
        disk=shutil.disk_usage(folder).free,
    )


def identity_of(run_id: str, emulated: str = "") -> bytes:
    """A hash that is equal for processes of one machine and one network namespace, and reveals nothing. ``emulated``: a
    name, if each process emulates a separate machine."""
    try:
        system = [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"), os.readlink("/proc/self/ns/net")]
    except OSError:  # macOS
        system = [str(uuid.getnode())]
    parts = [run_id, emulated, platform.node(), *system]
    return hashlib.sha256("|".join(parts).encode()).digest()
