"""The base of all messages of the step protocol. Messages are strict models: an invalid message is refused before any
further processing.

Messages on streams are *frames*: a header of a message model, perhaps with tensors. Questions with answers are *calls*.
``lineage`` is hash(R_{t-1}) of the chain of step records (CONTRIBUTING, "How a step goes", 4); under delayed updates
``lineage`` is hash(R_{t-2}).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Self, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from muletrain.config.schema import MAX_MICROBATCHES
from muletrain.errors import Malformed
from muletrain.network.base import Channel
from muletrain.policy.fork_choice import MEMORY
from muletrain.runtime.core.sizes import packed_size
from muletrain.wire.frame import Frame

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from muletrain.network.base import Network, PeerId

Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
Natural = Annotated[int, Field(ge=0, lt=2**48)]
Rate = Annotated[int, Field(ge=0, lt=2**63)]
Id = Annotated[str, Field(min_length=1, max_length=128)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.-]+$")]
"""Shown on other people's terminals, so limited to letters, digits, '.', '_' and '-'."""
Text = Annotated[str, Field(max_length=4096)]
Seconds = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
MAX_ERRORS = 16
"""Most errors of a message for which the first error is described; more errors are only counted."""
Indices = Annotated[tuple[Natural, ...], Field(max_length=MAX_MICROBATCHES), FailFast()]
Past = Annotated[tuple[Digest, ...], Field(max_length=MEMORY), FailFast()]

H = TypeVar("H", bound="Header")
M = TypeVar("M", bound="Message")
A = TypeVar("A", bound="Header")


class Header(BaseModel):
    """Base of everything that peers send: a message, the answer to a call, or a part of these."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    @classmethod
    def most(cls, microbatches: int = MAX_MICROBATCHES) -> int:
        """Returns the most bytes of a packed header in a run with ``microbatches`` microbatches a step. Raises
        TypeError for a field without a bound."""
        return packed_size(cls, MAX_MICROBATCHES, microbatches)

    @classmethod
    def validated(cls: type[H], header: Any) -> H:
        try:
            return cls.model_validate(header)
        except ValidationError as e:
            if e.error_count() > MAX_ERRORS:  # describing 60,000 errors takes a second
                raise Malformed(f"{cls.__name__}: {e.error_count()} fields are invalid") from None
            first = e.errors()[0]
            where = ".".join(map(str, first["loc"]))[:100]  # a field's name may be anything
            raise Malformed(f"{cls.__name__}: {where!r}: {first['msg'][:200]}") from None

    def pack(self) -> bytes:
        """Returns the payload of a call or an answer, without the fields that have their defaults."""
        packed: bytes = msgpack.packb(self.model_dump(exclude_defaults=True))
        return packed

    @classmethod
    def unpack(cls: type[H], payload: bytes) -> H:
        """Returns the header of a call or an answer. Raises ProtocolError for a payload that is too large, before
        reading, and for an invalid payload."""
        if len(payload) > cls.most():
            raise Malformed(f"{cls.__name__}: {len(payload)} bytes; at most {cls.most()} are accepted")
        try:
            header = msgpack.unpackb(payload, use_list=True, strict_map_key=True, max_ext_len=0)
        except Exception as e:  # msgpack raises a dozen unrelated types on garbage
            raise Malformed(f"{cls.__name__}: not msgpack ({type(e).__name__})") from None
        return cls.validated(header)


class Message(Header):
    """Base of all frames and calls. ``KIND``: names the message; ``CHANNEL``: the stream of a frame; ``TENSORS``: number
    of tensors, of which up to ``MORE`` may be added; ``ANSWER``: header of a call's answer, if the answer has one."""

    KIND: ClassVar[str]
    CHANNEL: ClassVar[Channel] = Channel.CONTROL
    TENSORS: ClassVar[int] = 0
    MORE: ClassVar[int] = 0
    ANSWER: ClassVar[type[Header] | None] = None

    def frame(self, tensors: list[Any] | None = None) -> Frame:
        return Frame(self.KIND, None, tensors, self)

    @classmethod
    def parse(cls: type[M], frame: Frame) -> M:
        """Returns the message of ``frame``. Raises ProtocolError for an invalid header or a wrong number of tensors."""
        if not cls.TENSORS <= len(frame.tensors) <= cls.TENSORS + cls.MORE:
            raise Malformed(f"{frame.kind}: {len(frame.tensors)} tensors instead of {cls.TENSORS}")
        if type(frame.message) is cls:  # the message never left this process, and was validated at its creation
            return frame.message
        return cls.validated(frame.header)


class Call(Message, Generic[A]):
    """Base of calls that are always answered with an ``A``. The call names the answer, which needs no kind."""

    ANSWER: ClassVar[type[Any]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if arguments := cls.__pydantic_generic_metadata__["args"]:
            cls.ANSWER = arguments[0]

    async def ask(self, net: Network, peer: PeerId, *, timeout_s: float) -> A:
        """Returns the answer of ``peer``. Raises NetworkError."""
        answer: A = self.ANSWER.unpack(await net.call(peer, self.KIND, self.pack(), timeout_s=timeout_s))
        return answer

    @classmethod
    def serve(cls, net: Network, answer: Callable[[PeerId, Self], Awaitable[A]]) -> None:
        """Answer calls of this kind on ``net``, each by ``answer`` of the caller and the call."""

        async def answered(sender: PeerId, payload: bytes) -> bytes:
            return (await answer(sender, cls.unpack(payload))).pack()

        net.serve(cls.KIND, answered)


class Request(Message):
    """One attempt at one microbatch, named by every pipeline message."""

    lineage: Digest
    step: Natural
    index: Natural
    attempt: Natural
    trainer: Id

    @property
    def key(self) -> tuple[int, int, int, str]:
        return (self.step, self.index, self.attempt, self.trainer)

    def identity(self) -> dict[str, Any]:
        """Returns the fields that every message about this attempt repeats."""
        return {name: getattr(self, name) for name in Request.model_fields}
