"""Measuring a machine and its links, before the run begins: a member's part. The founder's is ``survey.py``.

Calls, founder to member: ``probe.block`` (how fast are you?), ``probe.link`` (how far is that member from you?). Nobody
else is obeyed, and nobody after the run has begun; each call sends a bounded number of bytes for a bounded time.

A link is measured on the run's own stream of pipeline traffic, encryption, routers and relays included: frames go there
(``probe.echo``), small ones come back (``probe.echoed``), and one clock sees them go and come. So nobody has to believe
the other's clock, and nobody sends more than it is sent. Round trips are those of single bytes. For bandwidth, pieces
are sent one after the other: how fast their echoes come back is how fast they arrived. The first half of them does not
count: TCP begins slowly. Ever more are sent until that takes long enough, on far links longer.
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

from muletrain.compute.block import block_times
from muletrain.compute.probe import chip
from muletrain.errors import AdmissionError, Malformed, NetworkError
from muletrain.network.base import Channel, Frame
from muletrain.runtime.core.messages import Digest, Id, Message, Name, Natural, Text
from muletrain.wire.codec import RAW, encode_raw

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.clock import Clock
    from muletrain.model.spec import ModelSpec
    from muletrain.network.base import Network, PeerId
    from muletrain.runs.measure.machine import Machine

TRIPS = 9
"""Round trips, of which the first opens the stream and does not count."""
PIECES = 16
FIRST, MOST = 1 << 15, 1 << 25
"""Bytes of the first and of the largest of all volleys of so many pieces: what a link costs is less than twice the
largest."""
FAR = 6
"""Round trips that a volley must take, at least: in each TCP about doubles what is under way."""
ENOUGH = 0.6
"""Of the time that a volley should take."""
LIMIT_S = 20.0
"""Of one direction of one link."""
REPLY_S = 10.0

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class AskBlock(Message):
    """``names``: of everybody who is measured."""

    KIND: ClassVar[str] = "probe.block"
    names: Annotated[tuple[tuple[Id, Name], ...], Field(max_length=4096)]


class BlockFound(Message):
    """Seconds of one microbatch of so many sequences in one block. ``machine``: the same for all peers of a machine.
    ``disk``: free bytes in the run folder."""

    forward_s: Annotated[Positive, Field(lt=1e4)]
    backward_s: Annotated[Positive, Field(lt=1e4)]
    sequences: Annotated[int, Field(ge=1, le=1 << 20)]
    chip: Text
    machine: Digest
    disk: Natural


class AskLink(Message):
    """``seconds``: how long volleys should take."""

    KIND: ClassVar[str] = "probe.link"
    to: Id
    seconds: Annotated[float, Field(ge=0.05, le=2.0)]


class LinkFound(Message):
    """Median round trip, and what arrives there of what is sent from here [bytes/s]."""

    rtt_s: Annotated[Positive, Field(lt=1e3)]
    bytes_per_s: Annotated[Positive, Field(lt=1e13)]


class Echo(Message):
    """With one tensor: bytes that mean nothing."""

    KIND: ClassVar[str] = "probe.echo"
    TENSORS: ClassVar[int] = 1
    number: Natural


class Echoed(Message):
    KIND: ClassVar[str] = "probe.echoed"
    number: Natural


class Prober:
    """Answers the founder, and everyone's echoes."""

    def __init__(
        self,
        net: Network,
        links: Network,
        founder: PeerId,
        clock: Clock,
        learn: Callable[[dict[PeerId, str]], None],
        block: Callable[[], BlockFound],
    ) -> None:
        """``net``: for calls; ``links``: what training will send its frames on. ``learn`` is told names; ``block``
        measures, for seconds, in a thread."""
        self._net, self._links, self._founder, self._clock = net, links, founder, clock
        self._learn, self._block = learn, block
        self._busy, self._begun = asyncio.Lock(), False
        self._noise = os.urandom(MOST // PIECES)  # what could be compressed would seem fast
        self._expected: dict[int, tuple[PeerId, asyncio.Future[float]]] = {}

    def open(self) -> None:
        self._net.serve(AskBlock.KIND, self._on_block)
        self._net.serve(AskLink.KIND, self._on_link)
        self._links.receive(self._on_frame, (Echo.KIND, Echoed.KIND), self)

    def close(self) -> None:
        """The run begins: what is still on its way means nothing any more."""
        self._begun, self._noise = True, b""

    # What is taken (``network.base.Bounds``)

    def header(self, kind: str) -> int:
        return 256 + (Echo if kind == Echo.KIND else Echoed).most()

    async def expect(self, sender: PeerId, frame: Frame) -> None:
        if frame.kind == Echoed.KIND:
            Echoed.parse(frame)
            return
        Echo.parse(frame)
        if frame.tensors[0].codec != RAW or math.prod(frame.tensors[0].shape) > MOST // PIECES:
            raise Malformed("a piece larger than any")

    def _check(self, sender: PeerId) -> None:
        if sender != self._founder:
            raise AdmissionError("only the run's first peer has others measure")
        if self._begun:
            raise AdmissionError("the run has begun: measuring would hold it up")

    async def _on_block(self, sender: PeerId, payload: bytes) -> bytes:
        self._check(sender)
        self._learn(dict(AskBlock.unpack(payload).names))
        async with self._busy:
            return (await asyncio.to_thread(self._block)).pack()

    async def _on_link(self, sender: PeerId, payload: bytes) -> bytes:
        self._check(sender)
        ask = AskLink.unpack(payload)
        async with self._busy:
            self._check(sender)
            return (await self._measured(ask.to, ask.seconds)).pack()

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
        """When each echo was there, from the beginning on [s], and how many bytes were sent for it. Raises
        NetworkError; DeadlineExceeded after ``end``."""
        waits: list[asyncio.Future[float]] = []
        numbers = [secrets.randbits(47) for _ in range(pieces)]  # nobody answers what it has not got
        for number in numbers:
            waits.append(asyncio.get_running_loop().create_future())
            self._expected[number] = to, waits[-1]

        async def there_and_back() -> list[tuple[float, int]]:
            piece = encode_raw(memoryview(self._noise)[:size])
            frames = (Echo(number=number).frame([piece]) for number in numbers)
            # all at once, and not paced: a window that grows, and a sender that is woken late, would leave the link
            # idle
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
        if frame.kind == Echo.KIND:
            echo = Echo.parse(frame)
            if not self._begun:
                with suppress(NetworkError):
                    await self._links.send(sender, Echoed(number=echo.number).frame(), timeout_s=REPLY_S)
            return
        peer, wait = self._expected.pop(Echoed.parse(frame).number, ("", None))
        if wait is not None and peer == sender and not wait.done():
            wait.set_result(self._clock.now())


def seconds_per_byte(volley: list[tuple[float, int]]) -> float:
    """Of (time, bytes) as they came, the first of which counts as a beginning only.

    A busy machine sees some late, and then several at once; nothing is seen early. So the line that is nowhere above
    the times, and as near to them all as can be, is the one of the link (as Moon et al. 1999 take clock skew from
    delays): the edge of the lower convex hull over the mean, which is the pair around it that is lowest there; not of
    neighbours, which may have been seen at once."""
    times = [seen for seen, _ in volley]
    total = list(itertools.accumulate(nbytes for _, nbytes in volley))
    middle = sum(total) / len(total)
    before, after = ([k for k, n in enumerate(total) if (n < middle) == early] for early in (True, False))

    def slope(a: int, b: int) -> float:
        return (times[b] - times[a]) / (total[b] - total[a])

    apart = (e for e in itertools.product(before, after) if 3 * (e[1] - e[0]) >= len(total))
    edge = min(apart, key=lambda e: times[e[0]] + slope(*e) * (middle - total[e[0]]))
    return slope(*edge)


def block_of(spec: ModelSpec, sequences: int, machine: Machine, folder: Path, identity: bytes) -> BlockFound:
    """This machine's. Raises CapacityError."""
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
    """The same for the processes of one machine and one network namespace, and no word about it to others.
    ``emulated``: a name, where each process stands for a machine of its own."""
    try:
        system = [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"), os.readlink("/proc/self/ns/net")]
    except OSError:  # macOS
        system = [str(uuid.getnode())]
    parts = [run_id, emulated, platform.node(), *system]
    return hashlib.sha256("|".join(parts).encode()).digest()
