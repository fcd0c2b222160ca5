"""Messages between a newcomer and the admitting member.

Before step 0 only the founder admits: any member names the founder (``join.admitter``). Later every member admits
newcomers. A newcomer asks for a stage (``join.request``), loads the tokenizer and, in a resumed run, the stage's part
of the checkpoint, in pieces. Then the newcomer asks for the genesis (``join.begun``). Before step 0 the newcomer repeats
that, ready, until the founder's ``join.begin``. A client (strategy ``hub``) needs no tokenizer, and asks until the run
has begun.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from muletrain.compute.estimate import Offer
from muletrain.runtime.core.messages import Call, Digest, Header, Id, Message, Name, Natural, Rate, Text
from muletrain.runtime.members.messages import Member  # noqa: TC001  (a field of Begun)
from muletrain.runtime.members.roster import CONTACTS, Genesis
from muletrain.runtime.transfer.messages import Shared  # noqa: TC001  (a field of Welcome)

PIECE = 512 * 1024
"""Bytes in one answer with a piece of the tokenizer or of a checkpoint; a call carries at most 1 MiB."""
CALL_S = 30.0
"""Seconds that a call of this protocol may take."""
AGAIN = "join again in some seconds"
NOT_AWAITED = f"the run did not wait for this machine, which took long to get ready; {AGAIN}"
"""Ends a temporary refusal: the newcomer tries again (``patience``)."""
ASK_EVERY_S = 1.0
"""Seconds between two questions of a client, whom nobody tells that the run begins, or that a stage has servers."""
READY_EVERY_S = 10.0
"""Seconds between two ``Ready`` of a guest, and between two checks by the founder that guests live."""


class Admitter(Header):
    """Names the peer that admits newcomers."""

    id: Id


class AskAdmitter(Call[Admitter]):
    """Asks any member who admits newcomers. The founder also asks guests, to check that the guests live."""

    KIND: ClassVar[str] = "join.admitter"


class Welcome(Header):
    """The run, and the newcomer's stage. ``config`` is the run's configuration as JSON."""

    config: Annotated[str, Field(max_length=1 << 19)]
    stage: Natural
    data: Digest
    tokenizer_size: Annotated[int, Field(ge=0, le=1 << 28)]
    part_size: Natural = 0
    """Bytes of the stage's safetensors file in a resumed run; 0: nothing to load."""
    part_digest: Digest = bytes(32)
    """SHA-256 of that file."""
    running: bool = False
    """The run has begun: the stage's replicas give the state."""
    name: Annotated[str, Field(max_length=128, pattern=r"^[\w.-]*$")] = ""
    """The newcomer's name in the run (``Name``), once given."""
    tokens: Shared | None = None
    """The tokens that the run shares (``data.share``)."""
    client: bool = False
    """The newcomer is a client, and no member. ``stage``: a proposal, if the run has not begun."""


class JoinRequest(Call[Welcome]):
    """Asks for a stage. ``stage``: the wanted stage, if any. ``device``: the device's kind; ``flops``: see ``Machine``.
    ``memory``: device bytes that this peer may use; ``host_memory``: bytes beside a GPU (``Offer``). ``client``:
    prefers to be a client, if the run has clients."""

    KIND: ClassVar[str] = "join.request"
    version: Text
    name: Name
    stage: Natural | None
    device: Text
    flops: Rate
    memory: Natural
    host_memory: Natural | None
    client: bool = False

    @property
    def offer(self) -> Offer:
        return Offer(self.memory, self.host_memory)


class AskPiece(Message):
    """Asks for the piece at ``offset`` of the tokenizer or, in a resumed run, of the checkpoint ``part`` of the sender's
    stage."""

    KIND: ClassVar[str] = "join.piece"
    offset: Natural
    part: bool = False


class Declined(Message):
    """Gives the stage back. ``reason``: for the people at the admitting peer."""

    KIND: ClassVar[str] = "join.declined"
    reason: Text


class Ready(Header):
    """The sender has built its stage. ``trainer``: the sender has the run's data. ``place``: the sender's place for
    checkpoints."""

    trainer: bool
    place: Annotated[str, Field(max_length=64)]


class Begun(Header):
    """The genesis of a run that has begun, and live ``members`` for a newcomer to begin with: the founding ones may all be
    gone. Until then, in words, the conditions that the run waits for."""

    genesis: Genesis | None = None
    members: Annotated[tuple[Member, ...], Field(max_length=CONTACTS)] = ()
    missing: Annotated[tuple[Text, ...], Field(max_length=4096)] = ()


class AskBegun(Call[Begun]):
    """Asks the admitter whether the run has begun. A guest that is ``ready`` says so."""

    KIND: ClassVar[str] = "join.begun"
    ready: Ready | None = None


class Begin(Message):
    """The founder begins the run."""

    KIND: ClassVar[str] = "join.begin"
    genesis: Genesis
