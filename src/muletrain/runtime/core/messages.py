"""The base of all messages of the step protocol. Messages are strict models: an invalid message is refused before any
further processing.

Messages on streams are *frames*: a header of a message model, perhaps with tensors. Questions with answers are *calls*.
``lineage`` is hash(R_{t-1}) of the chain of step records (CONTRIBUTING, "How a step goes", 4); under delayed updates
``lineage`` is hash(R_{t-2}).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from muletrain.config.schema import MAX_MICROBATCHES
from muletrain.errors import Malformed
from muletrain.network.base import Channel
from muletrain.policy.fork_choice import MEMORY
from muletrain.runtime.core.sizes import packed_size
from muletrain.wire.frame import Frame

Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
Natural = Annotated[int, Field(ge=0, lt=2**48)]
Rate = Annotated[int, Field(ge=0, lt=2**63)]
Id = Annotated[str, Field(min_length=1, max_length=128)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.-]+$")]
"""Shown on other people's terminals, so limited to letters, digits, '.', '_' and '-'."""
Address = Annotated[str, Field(max_length=256)]
Text = Annotated[str, Field(max_length=4096)]
Seconds = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
MAX_ERRORS = 16
"""Most errors of a message for which the first error is described; more errors are only counted."""
Indices = Annotated[tuple[Natural, ...], Field(max_length=MAX_MICROBATCHES), FailFast()]
Past = Annotated[tuple[Digest, ...], Field(max_length=MEMORY), FailFast()]

M = TypeVar("M", bound="Message")


class Message(BaseModel):
    """Base of all headers. ``KIND``: the frame or call; ``CHANNEL``: the stream of a frame; ``TENSORS``: number of
    tensors, of which up to ``MORE`` may be added."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)
    KIND: ClassVar[str]
    CHANNEL: ClassVar[Channel] = Channel.CONTROL
    TENSORS: ClassVar[int] = 0
    MORE: ClassVar[int] = 0

    def frame(self, tensors: list[Any] | None = None) -> Frame:
        return Frame(self.KIND, None, tensors, self)

    @classmethod
    def most(cls, microbatches: int = MAX_MICROBATCHES) -> int:
        """Returns the most bytes of a packed message in a run with ``microbatches`` microbatches a step. Raises
        TypeError for a field without a bound."""
        return packed_size(cls, MAX_MICROBATCHES, microbatches)

    @classmethod
    def parse(cls: type[M], frame: Frame) -> M:
        """Returns the message of ``frame``. Raises ProtocolError for an invalid header or a wrong number of tensors."""
        if not cls.TENSORS <= len(frame.tensors) <= cls.TENSORS + cls.MORE:
            raise Malformed(f"{frame.kind}: {len(frame.tensors)} tensors instead of {cls.TENSORS}")
        if type(frame.message) is cls:  # the message never left this process, and was validated at its creation
            return frame.message
        return cls.validated(frame.header)

    @classmethod
    def validated(cls: type[M], header: Any) -> M:
        try:
            return cls.model_validate(header)
        except ValidationError as e:
            if e.error_count() > MAX_ERRORS:  # describing 60,000 errors takes a second
                raise Malformed(f"{cls.__name__}: {e.error_count()} fields are invalid") from None
            first = e.errors()[0]
            where = ".".join(map(str, first["loc"]))[:100]  # a field's name may be anything
            raise Malformed(f"{cls.__name__}: {where!r}: {first['msg'][:200]}") from None

    def pack(self) -> bytes:
        """Returns the payload of a call, without the fields that have their defaults."""
        packed: bytes = msgpack.packb(self.model_dump(exclude_defaults=True))
        return packed

    @classmethod
    def unpack(cls: type[M], payload: bytes) -> M:
        """Returns the message of a call. Raises ProtocolError for a payload that is too large, before reading, and for
        an invalid payload."""
        if len(payload) > cls.most():
            raise Malformed(f"{cls.__name__}: {len(payload)} bytes; at most {cls.most()} are accepted")
        try:
            header = msgpack.unpackb(payload, use_list=True, strict_map_key=True, max_ext_len=0)
        except Exception as e:  # msgpack raises a dozen unrelated types on garbage
            raise Malformed(f"{cls.__name__}: not msgpack ({type(e).__name__})") from None
        return cls.validated(header)


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
        return {
            "lineage": self.lineage,
            "step": self.step,
            "index": self.index,
            "attempt": self.attempt,
            "trainer": self.trainer,
        }
