"""Messages between a server and its clients.

A client enlists with one server of its stage (``hub.enlist``), takes the weights with the server's digest from all
servers of the stage (``hub.get_weights``, ``hub.weights``), and reports ready (``hub.ready``). The server gives parts,
each under a number; each result comes back with ``hub.output`` or ``hub.finished``, and the server answers whether the
result counts (``hub.counted``). Only then does the client add the part's gradient to its accumulator. Before the server
seals the step, the server asks for the accumulator (``hub.ask_accumulator``) and gets contents and values
(``hub.contents``, ``hub.accumulator``).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import FailFast, Field

from muletrain.network.base import Channel
from muletrain.optim.sketch import SIZE as SKETCH
from muletrain.policy.passes import Part, Pass
from muletrain.runtime.core.messages import Digest, Id, Message, Name, Natural, Text

MAX_PARTS = 1 << 16
"""Most parts in one accumulator."""
MAX_SERVERS = 1024
MAX_CHUNKS = 1 << 16
MAX_ROOM = 64
"""Most parts that a client takes at once."""
Speed = Annotated[float, Field(ge=0, lt=1e18, allow_inf_nan=False)]
SketchBytes = Annotated[bytes, Field(min_length=4 * SKETCH, max_length=4 * SKETCH)]
Loss = Annotated[float, Field(allow_inf_nan=False)]
Numbers = Annotated[tuple[Natural, ...], Field(max_length=MAX_PARTS), FailFast()]


Steps = Annotated[tuple[Natural, ...], Field(max_length=2)]


class Enlist(Message):
    """A client asks a server for work. ``config``: digest of the run's configuration at the client; ``enlistment``:
    number of the client's enlistment."""

    KIND: ClassVar[str] = "hub.enlist"
    name: Name
    config: Digest
    stage: Natural
    enlistment: Natural


class Enlisted(Message):
    """The answer. ``weights``: digest of the newest weights, the ``version``-th of this server; ``steps``: that compute
    with them, under delayed updates; ``servers``: all of the stage; ``clients``: number here; ``speed``: of the clients
    together [forward passes of a sequence per second]; ``own``: of the server's device; ``helpers``: number of idle
    clients that could help the server to end the step."""

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
    """A client shows its server that it lives and works under ``enlistment``. ``missed``: a message may be lost. The
    answer is ``Enlisted``."""

    KIND: ClassVar[str] = "hub.still_there"
    enlistment: Natural
    missed: bool


class AreYouThere(Message):
    """A server asks a client whether the client is there and works under ``enlistment``. The answer is ``There``."""

    KIND: ClassVar[str] = "hub.are_you_there"
    enlistment: Natural


class There(Message):
    """The answer. ``parts``: numbers of the givings in computation; ``uncounted``: of givings whose gradient the client
    has, without knowing whether it counts."""

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
    """Asks for chunks of the weights with this digest, instead of an earlier request."""

    KIND: ClassVar[str] = "hub.get_weights"
    weights: Digest
    chunks: Annotated[tuple[Natural, ...], Field(max_length=MAX_CHUNKS), FailFast()]


class WeightsChunk(Message):
    """One chunk, fp32. Chunks go after all parts: under delayed updates, parts would else wait for the next step's
    weights until they are late."""

    KIND: ClassVar[str] = "hub.weights"
    CHANNEL: ClassVar[Channel] = Channel.AVERAGE
    TENSORS: ClassVar[int] = 1
    weights: Digest
    chunk: Natural


class Ready(Message):
    """The client has the weights. ``speed``: forward passes of a sequence per second, as far as known; ``room``: most
    parts at once."""

    KIND: ClassVar[str] = "hub.ready"
    weights: Digest
    speed: Speed
    room: Annotated[int, Field(ge=1, le=MAX_ROOM)]


class Gone(Message):
    """The client leaves."""

    KIND: ClassVar[str] = "hub.gone"


class Give(Message):
    """Base of messages that give a part. ``whole``: sequences of the whole microbatch. ``generation``: each begins the
    step's accumulators anew."""

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
    """Inputs of a forward, and positions if conversations are apart (``Compute.forward``)."""

    KIND: ClassVar[str] = "hub.inputs"
    TENSORS: ClassVar[int] = 1
    MORE: ClassVar[int] = 1


class GiveGradient(Give):
    """The gradient of the outputs of a forward that this client computed."""

    KIND: ClassVar[str] = "hub.gradient"
    TENSORS: ClassVar[int] = 1


class GiveBoth(Give):
    """Inputs, and targets (on the last stage) or the gradient of the outputs and positions, if any (elsewhere)."""

    KIND: ClassVar[str] = "hub.both"
    TENSORS: ClassVar[int] = 2
    MORE: ClassVar[int] = 1


class Numbered(Message):
    """Base of messages about one giving."""

    number: Natural


class Output(Numbered):
    """The result of a part: outputs, or the gradient of inputs. ``loss``: the part's share of the microbatch's loss
    [nats/token]; ``sketch``: of the parameters' gradient, if accumulated (``optim.sketch``, from the digest of the
    weights)."""

    KIND: ClassVar[str] = "hub.output"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    TENSORS: ClassVar[int] = 1
    loss: Loss = 0.0
    sketch: SketchBytes | None = None


class Finished(Numbered):
    """A part is computed, with no result except the parameters' gradient."""

    KIND: ClassVar[str] = "hub.finished"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    loss: Loss = 0.0
    sketch: SketchBytes | None = None


class Checked(Numbered):
    """A part is computed again for comparison: sketches of the outputs, of the inputs' gradient, and of the parameters'
    gradient."""

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
    """Tells whether a result counts: then the client adds the part's gradient to its accumulator."""

    KIND: ClassVar[str] = "hub.counted"
    counts: bool


class Withdraw(Numbered):
    """A part is no longer wanted, or the kept forward of a part."""

    KIND: ClassVar[str] = "hub.withdraw"


class AskAccumulator(Message):
    """Asks for the accumulator of ``step``, with the gradients of ``givings``, which count even if a ``hub.counted`` is
    still on its way. ``transfer``: number of the question."""

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
