"""Messages between a server and its clients.

A client enlists with one server of its stage (``hub.enlist``). It takes the weights, with the digest that the server
names, from all servers of the stage (``hub.get_weights``, ``hub.weights``), and says that it is ready (``hub.ready``).
The server sends it parts; each comes back with ``hub.result``, and the server answers whether it counts (``hub.counted``).
Only then does the client add the part's gradient to its accumulator. Before its server seals the step, it asks for the
accumulator (``hub.hand_over``) and gets its contents and its numbers (``hub.contents``, ``hub.accumulated``).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import FailFast, Field

from muletrain.network.base import Channel
from muletrain.policy.pool import Part, Pass
from muletrain.runtime.core.messages import Digest, Id, Message, Name, Natural, Seconds

MAX_PARTS = 1 << 16
"""Parts in one accumulator."""
MAX_SERVERS = 1024
MAX_ROOM = 64
"""Parts that a client takes at once."""
Speed = Annotated[float, Field(ge=0, lt=1e18, allow_inf_nan=False)]


class Enlist(Message):
    """A client asks a server for work. ``config``: digest of the run's configuration as the client knows it."""

    KIND: ClassVar[str] = "hub.enlist"
    name: Name
    config: Digest
    stage: Natural


class Enlisted(Message):
    """The answer. ``weights``: digest of the current ones; ``servers``: all of the stage; ``speed``: of all clients of
    this server [forward passes of a sequence per second]."""

    KIND: ClassVar[str] = "hub.enlisted"
    weights: Digest
    servers: Annotated[tuple[Id, ...], Field(max_length=MAX_SERVERS), FailFast()]
    speed: Speed


class GetState(Message):
    """Asks a server for its state, as ``Enlisted``, without enlisting."""

    KIND: ClassVar[str] = "hub.get_state"


class StillThere(Message):
    """A client shows its server that it lives. The answer is ``Enlisted``."""

    KIND: ClassVar[str] = "hub.still_there"


class Begun(Message):
    """The server has new weights."""

    KIND: ClassVar[str] = "hub.begun"
    weights: Digest


class Ended(Message):
    """The run has ended, or this server leaves it."""

    KIND: ClassVar[str] = "hub.ended"
    over: bool


class GetWeights(Message):
    """Asks for chunks ``first``, ``first + every``, ... of the weights with this digest."""

    KIND: ClassVar[str] = "hub.get_weights"
    weights: Digest
    first: Natural
    every: Annotated[int, Field(ge=1, lt=2**31)]


class WeightsChunk(Message):
    """One chunk, fp32."""

    KIND: ClassVar[str] = "hub.weights"
    CHANNEL: ClassVar[Channel] = Channel.AVERAGE
    TENSORS: ClassVar[int] = 1
    weights: Digest
    chunk: Natural


class Ready(Message):
    """The client has these weights. ``speed``: forward passes of a sequence per second, as far as it knows; ``room``:
    parts that it takes at once."""

    KIND: ClassVar[str] = "hub.ready"
    weights: Digest
    speed: Speed
    room: Annotated[int, Field(ge=1, le=MAX_ROOM)]


class Gone(Message):
    """The client leaves."""

    KIND: ClassVar[str] = "hub.gone"


class OfPart(Message):
    """Base of what is said about one part. ``generation``: the server's accumulators begin anew with each; what a client
    has of an earlier one is of no use."""

    generation: Natural
    what: Pass
    step: Natural
    index: Natural
    first: Natural
    rows: Annotated[int, Field(ge=1, lt=2**31)]

    @property
    def part(self) -> Part:
        return Part(self.what, self.step, self.index, self.first, self.rows)


class GiveInputs(OfPart):
    """Inputs of a forward. ``whole``: sequences of the whole microbatch."""

    KIND: ClassVar[str] = "hub.inputs"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    TENSORS: ClassVar[int] = 1
    whole: Natural


class GiveGradient(OfPart):
    """The gradient of the outputs of a forward that this client computed."""

    KIND: ClassVar[str] = "hub.gradient"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    TENSORS: ClassVar[int] = 1
    whole: Natural
    accumulate: bool


class GiveBoth(OfPart):
    """Inputs, and targets (pass 'loss', or 'again' on the last stage) or the gradient of the outputs (backward of a
    forward that another client computed, or 'again')."""

    KIND: ClassVar[str] = "hub.both"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    TENSORS: ClassVar[int] = 2
    whole: Natural
    accumulate: bool


class Output(OfPart):
    """What a part's computation gave: outputs or the gradient of inputs. ``loss``: its share of the microbatch's
    [nats/token]."""

    KIND: ClassVar[str] = "hub.result"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    TENSORS: ClassVar[int] = 1
    loss: float = 0.0
    busy_s: Seconds


class Finished(OfPart):
    """A part is computed, and gives nothing but its parameters' gradient."""

    KIND: ClassVar[str] = "hub.finished"
    loss: float = 0.0
    busy_s: Seconds


class Unable(OfPart):
    """The client does not compute this part: it was withdrawn, or failed."""

    KIND: ClassVar[str] = "hub.unable"
    failed: bool = True


class Counted(OfPart):
    """Whether a result counts: then the client adds the part's gradient to its accumulator."""

    KIND: ClassVar[str] = "hub.counted"
    counts: bool


class Withdraw(OfPart):
    """This part is no longer wanted."""

    KIND: ClassVar[str] = "hub.withdraw"


PartList = Annotated[tuple[tuple[Natural, Natural], ...], Field(max_length=MAX_PARTS), FailFast()]
"""Parts as (microbatch, first sequence)."""


class HandOver(Message):
    """Asks for the accumulator of ``step``, with these ``parts``; ``number`` tells the answers apart. All of them
    count, even if a ``hub.counted`` is still on its way."""

    KIND: ClassVar[str] = "hub.hand_over"
    generation: Natural
    step: Natural
    number: Natural
    parts: PartList


class Contents(Message):
    """The parts in an accumulator that follows."""

    KIND: ClassVar[str] = "hub.contents"
    CHANNEL: ClassVar[Channel] = Channel.AVERAGE
    step: Natural
    number: Natural
    parts: PartList


class Accumulated(Message):
    """One chunk of an accumulator."""

    KIND: ClassVar[str] = "hub.accumulated"
    CHANNEL: ClassVar[Channel] = Channel.AVERAGE
    TENSORS: ClassVar[int] = 1
    step: Natural
    number: Natural
    chunk: Natural


FROM_CLIENT: dict[str, type[Message]] = {
    m.KIND: m for m in (GetWeights, Ready, Gone, Output, Finished, Unable, Contents, Accumulated)
}
FROM_SERVER: dict[str, type[Message]] = {
    m.KIND: m for m in (Begun, Ended, WeightsChunk, GiveInputs, GiveGradient, GiveBoth, Counted, Withdraw, HandOver)
}
