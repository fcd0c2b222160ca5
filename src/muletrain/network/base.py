"""The ``Network`` seam: calls, frames and a directory, between peers, named by id (base58 of an Ed25519 key).

- *Calls* are request/response control messages (up to 1 MiB).
- *Frames* are one-way messages over persistent ordered streams, one per (sender, receiver, channel). Frames carry
  tensors and the small notices of the step protocol: in a short step a call's round trip and CPU would dominate.
- The *directory* gives hints (which peers are there, since when), never decisions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from enum import StrEnum
from typing import Protocol

from muletrain.wire.frame import Frame

PeerId = str


class Channel(StrEnum):
    """Streams that do not block each other, the most urgent first: small notices, which are not paced; activations and
    activation gradients; averaging; states and checkpoints."""

    CONTROL = "control"
    PIPE = "pipe"
    AVERAGE = "average"
    BULK = "bulk"


CallHandler = Callable[[PeerId, bytes], Awaitable[bytes]]
FrameHandler = Callable[[PeerId, Frame], Awaitable[None]]
RefusalHandler = Callable[[PeerId, str], None]
LossHandler = Callable[[PeerId, Channel], None]


class Bounds(Protocol):
    """Limits the frames that a receiver takes: asked before reading a header, and again before reading any tensor."""

    def header(self, kind: str) -> int:
        """The most bytes of a header of ``kind``. Raises Malformed for a kind that no peer sends."""
        ...

    async def expect(self, sender: PeerId, frame: Frame) -> None:
        """Check ``frame``, which has header, codecs and shapes of tensors, but no tensor bytes. Raises ProtocolError if
        ``sender`` should not send such a frame now, Malformed if no correct peer ever does."""
        ...


class Network(Protocol):
    """The world outside the process, as protocol actors see it."""

    peer_id: PeerId

    async def call(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Ask ``peer`` and return the answer. Raises PeerUnreachable, DeadlineExceeded, or Refused with the message of
        the MuletrainError that the handler raised."""
        ...

    def serve(self, method: str, handler: CallHandler, *, free: bool = False) -> None:
        """Answer calls to ``method``. A MuletrainError raised by the handler reaches the caller as Refused. Each member
        gets a quota of answers (``network.answers.Quota``); ``free``: no quota, because the handler bounds the
        answers."""
        ...

    async def send(
        self, peer: PeerId, frame: Frame, *, channel: Channel = Channel.PIPE, timeout_s: float = 60.0
    ) -> int:
        """Send ``frame`` in order on the stream to ``peer``. Returns the bytes put on the stream (0 to ourselves: there
        is no wire), once all were handed over: a paced frame waits for earlier frames and for room on the link
        (``network.pacing``). Raises PeerUnreachable, and DeadlineExceeded when ``peer`` takes nothing for
        ``timeout_s``."""
        ...

    def receive(self, handler: FrameHandler, kinds: Collection[str] = (), bounds: Bounds | None = None) -> None:
        """Hand frames of ``kinds`` to ``handler``; without ``kinds``, all without a specific handler. While a handler
        runs, the stream waits (back-pressure); frames without a handler wait, too. A frame that ``bounds`` or the
        handler refuses ends the stream; ``bounds`` None: any frame is read."""
        ...

    def on_refusal(self, handler: RefusalHandler) -> None:
        """Tell ``handler`` (remote id or address, reason) when something wrong arrived and was refused."""
        ...

    def on_lost(self, handler: LossHandler, whose: str = "members") -> None:
        """Tell ``handler`` (peer, channel) of each stream with a peer that ended, also if this side closed it after a
        wrong frame. The peer may be gone, or only begin another stream; frames under way are lost. ``handler`` takes
        the place of an earlier one for the same peers (``whose``)."""
        ...

    def heard_s(self, peer: PeerId) -> float:
        """When anything last came from ``peer`` (a part of a frame, a receipt, a call, an answer), by the running
        loop's clock; -inf: never."""
        ...

    def queued_s(self, peer: PeerId) -> float:
        """By how much queues delay an answer of ``peer`` now [s], as far as this peer knows."""
        ...

    def give_up(self, peer: PeerId) -> None:
        """Fail every wait for room on the link to ``peer``, which is believed dead, with PeerUnreachable."""
        ...

    def moved(self) -> int:
        """Bytes of paced channels that came or were acknowledged so far."""
        ...

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        """Store ``value`` in the directory under (key, our id) for ``ttl_s`` seconds."""
        ...

    async def lookup(self, key: str) -> dict[PeerId, bytes]:
        """The values under ``key`` that have not expired, by the member that announced each."""
        ...

    def carried(self) -> dict[PeerId, int]:
        """Bytes relayed for other peers since the last query, by receiver."""
        ...

    def addresses(self) -> list[str]:
        """Multiaddresses (ending in /p2p/ID) for incoming connections."""
        ...

    async def connect(self, addresses: list[str], *, timeout_s: float) -> PeerId:
        """Dial a peer by address and be admitted. Raises PeerUnreachable or AdmissionError."""
        ...

    async def close(self) -> None:
        """Close streams, daemon and directory; idempotent."""
        ...
