"""Messages between clients and the servers of their stage.

Clients pull. Each client calls one server again and again (``hub.next``): the call lists what the client has, and is its
sign of life. The answer lists what should be otherwise: other weights, results that count, parts that
are not wanted any more, accumulators to hand over. Both are states, not events: a lost call or answer costs nothing but
another call, and the answer about one part is always the same.

Parts (``hub.part``) and results (``hub.result``) travel as frames. Weights and accumulators are copies of
``core.blocks``: the client asks all servers for blocks of the weights that its server named, and the server asks the
client for those of the accumulator that it wants.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from blake3 import blake3
from pydantic import FailFast, Field

from muletrain.network.base import Channel
from muletrain.optim.sketch import SIZE as SKETCH
from muletrain.policy.passes import Part, Pass
from muletrain.runtime.core.messages import Call, Digest, Header, Id, Message, Name, Natural, Text

MAX_PARTS = 1 << 15
"""Most parts in one accumulator."""
MAX_SERVERS = 1024
ROOM = 2
"""Parts that a client takes at once: one to compute, one in transfer."""
MAX_ROOM = 8
"""Most parts that a client has at once: others of its parts may be withdrawn meanwhile."""
MAX_KEPT = 64
"""Most forwards that a client keeps for their backwards; older ones are dropped, and computed again."""
Speed = Annotated[float, Field(ge=0, lt=1e18, allow_inf_nan=False)]
SketchBytes = Annotated[bytes, Field(min_length=4 * SKETCH, max_length=4 * SKETCH)]
Numbers = Annotated[tuple[Natural, ...], Field(max_length=MAX_PARTS), FailFast()]
Few = Annotated[tuple[Natural, ...], Field(max_length=2 * MAX_KEPT), FailFast()]
Steps = Annotated[tuple[Natural, ...], Field(max_length=2)]


class Wanted(Header):
    """A server wants the accumulator of ``step``, with the gradients of ``givings``, which count. ``transfer``: number
    of the hand-over."""

    generation: Natural
    step: Natural
    transfer: Natural
    givings: Numbers

    @property
    def copy_name(self) -> bytes:
        """The name of the copy that the client makes of the accumulator."""
        return blake3(self.pack()).digest()


class Answer(Header):
    """The answer to ``Next``. ``number``: of the answer in the session. ``weights``: digest of the newest weights, the
    ``version``-th of this server, from 1; ``steps``: that compute with them, under delayed updates; ``servers``: all of
    the stage, if they changed, and with new weights; ``clients``: number here; ``speed``: of the clients together [forward passes of a
    sequence per second]; ``own``: of the server's device; ``helpers``: number of idle clients that could help the server
    to end the step. Of what the client has: ``counts``: results that count; ``gone``: parts, results and forwards that
    are of no use. ``wanted``: the accumulator that the client hands over, until the server has it."""

    number: Natural = 0
    weights: Digest
    version: Natural
    steps: Steps = ()
    servers: Annotated[tuple[Id, ...], Field(max_length=MAX_SERVERS), FailFast()] = ()
    clients: Natural
    speed: Speed
    own: Speed
    helpers: Natural = 0
    counts: Few = ()
    gone: Few = ()
    wanted: Annotated[tuple[Wanted, ...], Field(max_length=1)] = ()


class Next(Call[Answer]):
    """Asks a server for the next parts. ``session``: drawn by the client each time that it begins at a server; 0: the
    client only asks for the server's state. ``heard``: number of the last answer that came. ``weights``: digest of
    the weights that the client computes with, for the steps that the server named; ``version``: the newest version
    that it knows; 0: the session begins. ``parts``: numbers of the givings that the client computes; ``uncounted``:
    of results that may count; ``forwards``: of kept forwards; ``handed``: number of the last hand-over that began.
    ``leaves``: the client works here no more."""

    KIND: ClassVar[str] = "hub.next"
    name: Name
    config: Digest
    stage: Natural
    session: Natural = 0
    heard: Natural = 0
    weights: Digest | None = None
    version: Natural = 0
    parts: Few = ()
    uncounted: Few = ()
    forwards: Few = ()
    handed: Natural = 0
    leaves: bool = False


class Ended(Message):
    """The run has ended."""

    KIND: ClassVar[str] = "hub.ended"


class Give(Message):
    """Gives a part. Tensors: the inputs, unless the client ``has_forward``; of a backward also the targets (on the last
    stage) or the gradient of the outputs; and positions, if conversations are apart (``Compute.forward``). ``whole``:
    sequences of the whole microbatch. ``generation``: each begins the step's accumulators anew. ``counts``, ``gone``: of
    earlier results, as in ``Answer``: a client needs to hear of them when its next part comes."""

    KIND: ClassVar[str] = "hub.part"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    TENSORS: ClassVar[int] = 1
    MORE: ClassVar[int] = 2
    number: Natural
    generation: Natural
    what: Pass
    step: Natural
    index: Natural
    first: Natural
    rows: Annotated[int, Field(ge=1, lt=2**31)]
    whole: Natural
    accumulate: bool
    has_forward: bool = False
    counts: Few = ()
    gone: Few = ()

    @property
    def part(self) -> Part:
        return Part(self.what, self.step, self.index, self.first, self.rows)


class Result(Message):
    """The result of the giving ``number``. The tensor, if any: outputs, or the gradient of inputs. ``loss``: the part's
    share of the microbatch's loss [nats/token]; ``sketch``: of the parameters' gradient (``optim.sketch``, from the
    digest of the weights). Of a part computed for comparison: sketches of ``outputs`` and of the ``inputs``' gradient.
    ``problem``: why the part was not computed; empty: it was."""

    KIND: ClassVar[str] = "hub.result"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    MORE: ClassVar[int] = 1
    number: Natural
    loss: float = 0.0
    sketch: SketchBytes | None = None
    outputs: SketchBytes | None = None
    inputs: SketchBytes | None = None
    problem: Text = ""


FROM_SERVER: dict[str, type[Message]] = {m.KIND: m for m in (Ended, Give)}
