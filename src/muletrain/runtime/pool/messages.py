"""Messages between a server and its clients.

A client enlists with one server of its stage (``hub.enlist``). It takes the weights, with the digest that the server
names, from all servers of the stage (``hub.get_weights``, ``hub.weights``), and says that it is ready (``hub.ready``).
The server gives it parts, each under a number; each comes back with ``hub.output`` or ``hub.finished``, and the server
answers whether it counts (``hub.counted``). Only then does the client add the part's gradient to its accumulator.
Before the server seals the step, it asks for the accumulator (``hub.ask_accumulator``) and gets its contents and its
values (``hub.contents``, ``hub.accumulator``).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import FailFast, Field

from muletrain.network.base import Channel
from muletrain.optim.sketch import SIZE as SKETCH
from muletrain.policy.passes import Part, Pass
from muletrain.runtime.core.messages import Digest, Id, Message, Name, Natural, Text

MAX_PARTS = 1 << 16
"""Parts in one accumulator."""
MAX_SERVERS = 1024
MAX_CHUNKS = 1 << 16
MAX_ROOM = 64
"""Parts that a client takes at once."""
Speed = Annotated[float, Field(ge=0, lt=1e18, allow_inf_nan=False)]
SketchBytes = Annotated[bytes, Field(min_length=4 * SKETCH, max_length=4 * SKETCH)]
Loss = Annotated[float, Field(allow_inf_nan=False)]
Numbers = Annotated[tuple[Natural, ...], Field(max_length=MAX_PARTS), FailFast()]


Steps = Annotated[tuple[Natural, ...], Field(max_length=2)]


class Enlist(Message):
    """A client asks a server for work. ``config``: digest of the run's configuration as the client knows it;
    ``enlistment``: numbers the client's enlistments."""

    KIND: ClassVar[str] = "hub.enlist"
    name: Name
    config: Digest
    stage: Natural
    enlistment: Natural


class Enlisted(Message):
    """The answer. ``weights``: digest of the newest ones, the ``version``-th of this server; ``steps``: which compute with
    them, under delayed updates; ``servers``: all of the stage; ``clients``: of this server; ``speed``: of all of them
    [forward passes of a sequence per second]; ``own``: of the server's device; ``helpers``: clients with nothing to do
    that could help it to end the step."""

    KIND: ClassVar[str] = "hub.enlisted"
    weights: Digest
    version: Natural
    steps: Steps = ()
    servers: Annotated[tuple[Id, ...], Field(max_length=MAX_SERVERS), FailFast()]
    clients: Natural
    speed: Speed
    own: Speed
    helpers: Natural = 0


class GetState(Message):
    """Asks a server for its state, as ``Enlisted``, without enlisting."""

    KIND: ClassVar[str] = "hub.get_state"


class StillThere(Message):
    """A client shows its server that it lives, and works for it under this ``enlistment``. ``missed``: something that it
    sent may not have come. The answer is ``Enlisted``."""

    KIND: ClassVar[str] = "hub.still_there"
    enlistment: Natural
    missed: bool


class AreYouThere(Message):
    """A server asks a client whether it is there, and works for it under this ``enlistment``. The answer is ``There``."""

    KIND: ClassVar[str] = "hub.are_you_there"
    enlistment: Natural


class There(Message):
    """The answer. ``parts``: numbers of the givings that the client computes; ``uncounted``: of those whose gradient it
    has, and does not know whether it counts."""

    KIND: ClassVar[str] = "hub.there"
    parts: Annotated[tuple[Natural, ...], Field(max_length=MAX_ROOM), FailFast()]
    uncounted: Annotated[tuple[Natural, ...], Field(max_length=MAX_ROOM), FailFast()]


class Begun(Message):
    """The server has new weights (see ``Enlisted``)."""

    KIND: ClassVar[str] = "hub.begun"
    weights: Digest
    version: Natural
    steps: Steps = ()


class Ended(Message):
    """The server does not count on the client's ``enlistment`` any more. ``over``: the run has ended."""

    KIND: ClassVar[str] = "hub.ended"
    enlistment: Natural
    over: bool


class GetWeights(Message):
    """Asks for chunks of the weights with this digest, instead of those asked for before."""

    KIND: ClassVar[str] = "hub.get_weights"
    weights: Digest
    chunks: Annotated[tuple[Natural, ...], Field(max_length=MAX_CHUNKS), FailFast()]


class WeightsChunk(Message):
    """One chunk, fp32. It goes after all parts: under delayed updates, parts would else wait for the next step's weights until
    they are late."""

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


class Give(Message):
    """Base of what gives a part. ``whole``: sequences of the whole microbatch. ``generation``: the step's accumulators
    begin anew with each."""

    CHANNEL: ClassVar[Channel] = Channel.PIPE
    number: Natural
    generation: Natural
    what: Pass
    step: Natural
    index: Natural
    first: Natural
    rows: Annotated[int, Field(ge=1, lt=2**31)]
    whole: Natural
    accumulate: bool

    @property
    def part(self) -> Part:
        return Part(self.what, self.step, self.index, self.first, self.rows)


class GiveInputs(Give):
    """Inputs of a forward."""

    KIND: ClassVar[str] = "hub.inputs"
    TENSORS: ClassVar[int] = 1


class GiveGradient(Give):
    """The gradient of the outputs of a forward that this client computed."""

    KIND: ClassVar[str] = "hub.gradient"
    TENSORS: ClassVar[int] = 1


class GiveBoth(Give):
    """Inputs, and targets (on the last stage) or the gradient of the outputs (elsewhere)."""

    KIND: ClassVar[str] = "hub.both"
    TENSORS: ClassVar[int] = 2


class Numbered(Message):
    """Base of what is said about one giving."""

    number: Natural


class Output(Numbered):
    """What a part's computation gave: outputs, or the gradient of inputs. ``loss``: the part's share of the
    microbatch's [nats/token]; ``sketch``: of its parameters' gradient, if that is accumulated (``optim.sketch``, from the
    digest of the weights)."""

    KIND: ClassVar[str] = "hub.output"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    TENSORS: ClassVar[int] = 1
    loss: Loss = 0.0
    sketch: SketchBytes | None = None


class Finished(Numbered):
    """A part is computed, and gives nothing but its parameters' gradient."""

    KIND: ClassVar[str] = "hub.finished"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    loss: Loss = 0.0
    sketch: SketchBytes | None = None


class Checked(Numbered):
    """A part is computed again for comparison: sketches of its outputs, of the gradient of its inputs, and of its
    parameters' gradient."""

    KIND: ClassVar[str] = "hub.checked"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    outputs: SketchBytes | None
    inputs: SketchBytes | None
    gradient: SketchBytes


class Unable(Numbered):
    """The client did not compute a part."""

    KIND: ClassVar[str] = "hub.unable"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    reason: Text


class Counted(Numbered):
    """Whether a result counts: then the client adds the part's gradient to its accumulator."""

    KIND: ClassVar[str] = "hub.counted"
    counts: bool


class Withdraw(Numbered):
    """A part is no longer wanted, or the forward that was kept of it."""

    KIND: ClassVar[str] = "hub.withdraw"


class AskAccumulator(Message):
    """Asks for the accumulator of ``step``, with the gradients of these ``givings``: they count, even if a
    ``hub.counted`` is still on its way. ``transfer`` numbers the questions."""

    KIND: ClassVar[str] = "hub.ask_accumulator"
    generation: Natural
    step: Natural
    transfer: Natural
    givings: Numbers


class Contents(Message):
    """The givings in an accumulator that follows."""

    KIND: ClassVar[str] = "hub.contents"
    CHANNEL: ClassVar[Channel] = Channel.AVERAGE
    transfer: Natural
    givings: Numbers


class AccumulatorChunk(Message):
    """One chunk of an accumulator, in the codec of gradients."""

    KIND: ClassVar[str] = "hub.accumulator"
    CHANNEL: ClassVar[Channel] = Channel.AVERAGE
    TENSORS: ClassVar[int] = 1
    transfer: Natural
    chunk: Natural


FROM_CLIENT: dict[str, type[Message]] = {
    m.KIND: m for m in (GetWeights, Ready, Gone, Output, Finished, Checked, Unable, Contents, AccumulatorChunk)
}
FROM_SERVER: dict[str, type[Message]] = {
    m.KIND: m
    for m in (Begun, Ended, WeightsChunk, GiveInputs, GiveGradient, GiveBoth, Counted, Withdraw, AskAccumulator)
}
