"""The ``Network`` seam: calls, frames and a directory, between peers named by their id (base58 of an Ed25519 key).

- *Calls* are request/response control messages (up to 1 MiB).
- *Frames* are one-way messages over persistent ordered streams, one per (sender, receiver, channel): tensors, and the
  small notices of the step protocol, for which a call's round trip and CPU would dominate a short step.
- The *directory* gives hints (who is there, since when): never decisions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from muletrain.wire.codec import Encoded

PeerId = str


class Channel(StrEnum):
    """Streams that do not block each other, the most urgent first: small notices, which are not paced; activations and
    their gradients; averaging; state and checkpoints."""

    CONTROL = "control"
    PIPE = "pipe"
    AVERAGE = "average"
    BULK = "bulk"


class Header(Protocol):
    """What a frame's header is made from."""

    def model_dump(self) -> dict[str, Any]: ...


class Frame:
    """One message on a stream: a kind, a msgpack-able header (validated by the actor that handles ``kind``), tensors or
    raw blobs."""

    __slots__ = ("_header", "kind", "message", "nbytes", "tensors")

    def __init__(
        self,
        kind: str,
        header: dict[str, Any] | None,
        tensors: list[Encoded] | None = None,
        message: Header | None = None,
    ) -> None:
        """``header`` None: that of ``message``, made when it is asked for."""
        self.kind, self._header, self.message = kind, header, message
        self.tensors = tensors if tensors is not None else []
        self.nbytes: int | None = None
        """As it travels, where somebody has looked (``wire.frame.frame_size``)."""

    @property
    def header(self) -> dict[str, Any]:
        if self._header is None:
            assert self.message is not None  # one of the two is there
            self._header = self.message.model_dump()
        return self._header


CallHandler = Callable[[PeerId, bytes], Awaitable[bytes]]
FrameHandler = Callable[[PeerId, Frame], Awaitable[None]]
RefusalHandler = Callable[[PeerId, str], None]
LossHandler = Callable[[PeerId], None]


class Bounds(Protocol):
    """What a receiver of frames takes: asked before it reads a header, and again before it reads any tensor."""

    def header(self, kind: str) -> int:
        """Most bytes of a header of ``kind``. Raises Malformed for a kind that no peer sends."""
        ...

    async def expect(self, sender: PeerId, frame: Frame) -> None:
        """``frame`` has its header, and codecs and shapes of its tensors, but not their bytes. Raises ProtocolError
        where the receiver does not expect it from ``sender`` now, Malformed where no correct peer sends it at any
        time."""
        ...


class Network(Protocol):
    """What protocol actors see of the world outside the process."""

    peer_id: PeerId

    async def call(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Raises PeerUnreachable, DeadlineExceeded, or Refused (the handler raised a MuletrainError; its message is
        carried)."""
        ...

    def serve(self, method: str, handler: CallHandler, *, free: bool = False) -> None:
        """Answer calls to ``method``. A MuletrainError raised by the handler reaches the caller as Refused. Of answers
        each member has so many bytes a second (``network.quota``), unless they are ``free``, for the handler bounds
        what each member has."""
        ...

    async def send(
        self, peer: PeerId, frame: Frame, *, channel: Channel = Channel.PIPE, timeout_s: float = 60.0
    ) -> int:
        """Send in order on the stream to ``peer``; returns bytes put on the stream (0 when ``peer`` is ourselves: then
        the handler runs without a wire). Returns once all of it was handed over: what is paced waits for its turn, and
        for room on the link (``network.pacing``). Raises PeerUnreachable, and DeadlineExceeded when ``peer`` takes
        nothing for ``timeout_s``."""
        ...

    def receive(self, handler: FrameHandler, kinds: Collection[str] = (), bounds: Bounds | None = None) -> None:
        """Every frame of every stream goes to ``handler``, or those of ``kinds`` only; awaiting it holds that stream
        back (back-pressure). Without a handler for their kind, nor one for all, frames wait. What ``bounds`` refuses is
        not read, and its stream is closed; None: whatever a frame may carry is taken."""
        ...

    def on_refusal(self, handler: RefusalHandler) -> None:
        """Told (remote id or address, reason) whenever something wrong arrived and was refused."""
        ...

    def on_lost(self, handler: LossHandler) -> None:
        """Told of a peer that ended a stream with us: it may be gone, or only begin another."""
        ...

    def heard_s(self, peer: PeerId) -> float:
        """When anything last came from ``peer`` (a part of a frame, a receipt, a call, an answer), by the running
        loop's clock; -inf: nothing did."""
        ...

    def queued_s(self, peer: PeerId) -> float:
        """How much later than on free links an answer of ``peer`` comes now [s]: what waits on the way to it and back,
        as far as it is known here."""
        ...

    def give_up(self, peer: PeerId) -> None:
        """What waits for room on the link to ``peer`` fails with PeerUnreachable: it is believed dead."""
        ...

    def moved(self) -> int:
        """Bytes of paced channels that came, or were acknowledged, so far."""
        ...

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        """Store ``value`` in the directory under (key, our id) for ``ttl_s`` seconds."""
        ...

    async def lookup(self, key: str) -> dict[PeerId, bytes]:
        """What members announced under ``key`` and has not expired."""
        ...

    def carried(self) -> dict[PeerId, int]:
        """Bytes carried for others since the last question, by receiver: members lead to those that cannot be reached
        directly."""
        ...

    def addresses(self) -> list[str]:
        """Multiaddresses (ending in /p2p/ID) others can dial."""
        ...

    async def connect(self, addresses: list[str], *, timeout_s: float) -> PeerId:
        """Dial a peer by address and be admitted. Raises PeerUnreachable or AdmissionError."""
        ...

    async def close(self) -> None:
        """Close streams, daemon and directory; idempotent."""
        ...
