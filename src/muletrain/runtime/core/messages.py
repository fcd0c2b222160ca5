"""Every message of the step protocol, as strict models: what does not validate is refused before anything looks at it.

Messages on streams are *frames* (a header of one of these models, perhaps tensors); questions with answers are *calls*.
``lineage`` is hash(R_{t-1}) of the step record chain (DESIGN "Lineage, not consensus"); under delayed updates
hash(R_{t-2}).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from muletrain.errors import Malformed
from muletrain.network.base import Channel, Frame
from muletrain.optim.sketch import SIZE as SKETCH
from muletrain.policy.lineages import MEMORY, Chain
from muletrain.runtime.core.branches import BRANCH
from muletrain.runtime.core.sizes import packed_size

Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
Natural = Annotated[int, Field(ge=0, lt=2**48)]
Rate = Annotated[int, Field(ge=0, lt=2**63)]
Id = Annotated[str, Field(min_length=1, max_length=128)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.-]+$")]
"""Shown on other people's terminals."""
Address = Annotated[str, Field(max_length=256)]
Text = Annotated[str, Field(max_length=4096)]
Seconds = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
MAX_MICROBATCHES = 1 << 16
MAX_ERRORS = 16
"""Of a message that are described."""
MAX_RUN = 8
"""Blocks of a copy in one call."""
Indices = Annotated[tuple[Natural, ...], Field(max_length=MAX_MICROBATCHES), FailFast()]
Past = Annotated[tuple[Digest, ...], Field(max_length=MEMORY), FailFast()]
SketchBytes = Annotated[bytes, Field(min_length=4 * SKETCH, max_length=4 * SKETCH)]

M = TypeVar("M", bound="Message")


class Message(BaseModel):
    """Base of all headers. ``KIND`` names the frame; ``CHANNEL`` the stream it takes; ``TENSORS`` how many it
    carries."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)
    KIND: ClassVar[str]
    CHANNEL: ClassVar[Channel] = Channel.CONTROL
    TENSORS: ClassVar[int] = 0

    def frame(self, tensors: list[Any] | None = None) -> Frame:
        return Frame(self.KIND, None, tensors, self)

    @classmethod
    def most(cls, microbatches: int = MAX_MICROBATCHES) -> int:
        """Most bytes that a packed message has, in a run whose steps have so many ``microbatches``. Raises TypeError
        for a field without a bound."""
        return packed_size(cls, MAX_MICROBATCHES, microbatches)

    @classmethod
    def parse(cls: type[M], frame: Frame) -> M:
        """Raises ProtocolError when the header or the number of tensors is not what this message has."""
        if len(frame.tensors) != cls.TENSORS:
            raise Malformed(f"{frame.kind}: {len(frame.tensors)} tensors instead of {cls.TENSORS}")
        if type(frame.message) is cls:  # it never left this process, and was checked when it was made
            return frame.message
        return cls.validated(frame.header)

    @classmethod
    def validated(cls: type[M], header: Any) -> M:
        try:
            return cls.model_validate(header)
        except ValidationError as e:
            if e.error_count() > MAX_ERRORS:  # to describe 60,000 takes a second
                raise Malformed(f"{cls.__name__}: {e.error_count()} fields that are wrong") from None
            first = e.errors()[0]
            where = ".".join(map(str, first["loc"]))[:100]  # a field's name may be anything
            raise Malformed(f"{cls.__name__}: {where!r}: {first['msg'][:200]}") from None

    def pack(self) -> bytes:
        """As the payload of a call."""
        packed: bytes = msgpack.packb(self.model_dump())
        return packed

    @classmethod
    def unpack(cls: type[M], payload: bytes) -> M:
        """Raises ProtocolError for anything but a message that validates, before anything is made of one that is too
        large."""
        if len(payload) > cls.most():
            raise Malformed(f"{cls.__name__}: {len(payload)} bytes; at most {cls.most()} are accepted")
        try:
            header = msgpack.unpackb(payload, use_list=True, strict_map_key=True, max_ext_len=0)
        except Exception as e:  # msgpack raises a dozen unrelated types on garbage
            raise Malformed(f"{cls.__name__}: not msgpack ({type(e).__name__})") from None
        return cls.validated(header)


class Member(Message):
    """One peer of the run. ``device``: its kind. ``flops``: what it is expected to compute [FLOP/s], 0 if unknown.
    ``since``: counts up with every stage it serves; a later one replaces an earlier."""

    KIND: ClassVar[str] = "member"
    id: Id
    name: Name
    stage: Natural
    trainer: bool
    addresses: Annotated[tuple[Address, ...], Field(max_length=64), FailFast()]
    device: Text = "cpu"
    flops: Rate = 0
    since: Natural = 0
    place: Annotated[str, Field(max_length=64)] = ""
    """Where it can write checkpoints (``CheckpointStore.name``); members with the same share it."""


class Request(Message):
    """Identity of one try at one microbatch: part of every pipeline message."""

    lineage: Digest
    step: Natural
    index: Natural
    attempt: Natural
    trainer: Id

    @property
    def key(self) -> tuple[int, int, int, str]:
        return (self.step, self.index, self.attempt, self.trainer)

    def identity(self) -> dict[str, Any]:
        """The fields every message about this try repeats."""
        return {
            "lineage": self.lineage,
            "step": self.step,
            "index": self.index,
            "attempt": self.attempt,
            "trainer": self.trainer,
        }


class Forward(Request):
    """Inputs and targets for one stage. ``accumulate``: the stages that should add this microbatch to their gradient.
    ``gradient``: the sender needs d loss / d inputs; where a microbatch is run again for a later stage alone, nobody
    does. ``unfinite``: a peer found already that it does not stay finite, so that inputs may not be, and outputs are
    passed on if they are not."""

    KIND: ClassVar[str] = "forward"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    TENSORS: ClassVar[int] = 2
    stage: Natural
    accumulate: Annotated[tuple[Natural, ...], Field(max_length=4096), FailFast()]
    gradient: bool
    deadline_s: Seconds
    unfinite: bool = False


class Backward(Request):
    """The gradient of a forward's output, back to its sender. ``busy_s``: the answering peer's own service time
    (decoding, forward, backward); ``away_s``: all the rest of the time it held the request (its queue, the later
    stages). What is left of the time until the answer came is the way there and back."""

    KIND: ClassVar[str] = "backward"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    TENSORS: ClassVar[int] = 1
    stage: Natural
    loss: float
    busy_s: Seconds
    away_s: Seconds


class Done(Request):
    """The microbatch went through this stage and all behind it, and back to where a gradient was needed: the answer to
    whoever needs none, as a trainer does."""

    KIND: ClassVar[str] = "done"
    stage: Natural
    loss: float
    busy_s: Seconds
    away_s: Seconds


class Busy(Request):
    """A forward was not admitted (queue full): the sender keeps it and tries elsewhere, or later."""

    KIND: ClassVar[str] = "busy"
    stage: Natural


class Lost(Request):
    """The sender of a forward learns that its receiver could not finish it (computation failed, next stage
    unreachable). ``unfinite``: because what it got, or made of it, is not finite."""

    KIND: ClassVar[str] = "lost"
    stage: Natural
    reason: Text
    unfinite: bool = False


class TrainerDone(Message):
    """A trainer's hint to all peers: these microbatches of the step are through, with these losses [nats/token]."""

    KIND: ClassVar[str] = "trainer_done"
    lineage: Digest
    step: Natural
    indices: Indices
    losses: Annotated[tuple[float, ...], Field(max_length=MAX_MICROBATCHES), FailFast()]


class Gap(Message):
    """A stage found these microbatches in none of its accumulators: trainers inject them again, for that stage alone.
    Every replica says so; ``attempt`` tells a repetition from a second loss. ``early``: a replica died in the middle of
    the step, and took these with it, or they did not come so far yet. ``turn``: times that it was said in vain, so that
    another trainer is to do it. ``without``: replicas that its sender does not count on, whatever they hold."""

    KIND: ClassVar[str] = "gap"
    lineage: Digest
    step: Natural
    stage: Natural
    attempt: Natural
    indices: Indices
    early: bool = False
    turn: Natural = 0
    without: Annotated[tuple[Id, ...], Field(max_length=64), FailFast()] = ()


class Seal(Message):
    """A member announces what its accumulator holds, a sketch of it (``optim.sketch``, seeded by the lineage), and the
    digest of the weights it was computed with. ``members``: the replicas it counts on, itself included. ``stop``: it
    asks for an orderly end after this step; ``leaves``: for its own. ``gave_up``: microbatches that it had sealed, whose
    gradient stood out; others compute them again. ``excused``: what others gave it stood out, too, and nobody else could
    be asked. ``accused``: replicas that it found to compute falsely (``runtime.step.audit``)."""

    KIND: ClassVar[str] = "seal"
    lineage: Digest
    step: Natural
    stage: Natural
    attempt: Natural
    indices: Indices
    members: Annotated[tuple[Id, ...], Field(min_length=1, max_length=4096), FailFast()]
    weights: Digest
    stop: bool
    leaves: bool
    sketch: SketchBytes
    gave_up: Indices = ()
    excused: bool = False
    accused: Annotated[tuple[Id, ...], Field(max_length=64), FailFast()] = ()


class Shard(Message):
    """A chunk of one member's accumulator, to the member that reduces it."""

    KIND: ClassVar[str] = "shard"
    CHANNEL: ClassVar[Channel] = Channel.AVERAGE
    TENSORS: ClassVar[int] = 1
    round: Digest
    step: Natural
    chunk: Natural


class Reduced(Message):
    """A chunk of the mean gradient, from the member that reduced it, with its squared norm as that member computed
    it."""

    KIND: ClassVar[str] = "reduced"
    CHANNEL: ClassVar[Channel] = Channel.AVERAGE
    TENSORS: ClassVar[int] = 1
    round: Digest
    step: Natural
    chunk: Natural
    square_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    finite: bool


class ShardFacts(BaseModel):
    """What the record needs to know of one reduced shard: the hash of its values (fp32, decoded), their squared norm (0
    where they are not finite)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    content: Digest
    square_norm: Annotated[float, Field(ge=0, le=1e100, allow_inf_nan=False)]
    """Of fp32 values it cannot be more, and sums of it stay finite."""
    finite: bool


class RoundEntry(Message):
    """``holder`` attests that it holds the whole mean gradient of this round. ``members`` are sorted, ``shards`` in
    their order. ``without``: members that the holder believes dead; everything but these two is the same from every
    holder."""

    KIND: ClassVar[str] = "round_entry"
    lineage: Digest
    step: Natural
    stage: Natural
    round: Digest
    members: Annotated[tuple[Id, ...], Field(min_length=1, max_length=4096), FailFast()]
    shards: Annotated[tuple[ShardFacts, ...], Field(min_length=1, max_length=4096), FailFast()]
    stop: bool
    leaves: Annotated[tuple[Id, ...], Field(max_length=4096), FailFast()] = ()
    """Members that want to go after this step, sorted."""
    expelled: Annotated[tuple[Id, ...], Field(max_length=64), FailFast()] = ()
    """Replicas that are no members any more, sorted: their gradients were not what others computed."""
    holder: Id
    without: Annotated[tuple[Id, ...], Field(max_length=4096), FailFast()] = ()


class Abstain(Message):
    """The sender leaves this step to the other replicas of its stage: it takes what they agree on, and is not waited
    for. What it announced in attempts before ``attempt`` is void."""

    KIND: ClassVar[str] = "abstain"
    lineage: Digest
    step: Natural
    attempt: Natural


class Away(Message):
    """The sender serves nobody until it says ``Back``: it takes a state."""

    KIND: ClassVar[str] = "away"


class AskEntries(Message):
    """Call: what do you attest to of this step? If you applied it: which record?"""

    KIND: ClassVar[str] = "ask_entries"
    lineage: Digest
    step: Natural


class Entries(Message):
    """The answerer is at ``step``. ``own``: what it holds itself; ``abstains``: see ``Abstain``. ``applied``: the
    rounds of the record that it applied, one of each stage; empty if it did not apply that step, or does not know any
    more. Nobody is believed about others' entries."""

    KIND: ClassVar[str] = "entries"
    step: Natural
    own: RoundEntry | None = None
    abstains: bool = False
    applied: Annotated[tuple[RoundEntry, ...], Field(max_length=4096), FailFast()] = ()
    record: Annotated[bytes, Field(max_length=32)] = b""
    """Its hash: under delayed updates frames of two histories may look alike for a step."""


class AskGradient(Message):
    """Call: the manifest of this round's mean gradient as it travels, to be taken as a copy of a state is. Of the
    current step, or of one that is kept; empty for any other."""

    KIND: ClassVar[str] = "ask_gradient"
    round: Digest


class AskHeld(Message):
    """Call: which of this step's microbatches are in your accumulator, or on their way into it? ``brief``: only whether
    you are there, and where; the answer names no microbatches."""

    KIND: ClassVar[str] = "ask_held"
    lineage: Digest
    step: Natural
    brief: bool = False


class Held(Message):
    """``current``: the answerer is at that lineage and step, or computes it ahead. It is at ``step``, to which
    ``lineage`` led it, and ``rival``: it did the step asked about in another lineage. ``running``: requests it still
    works on; ``answering``: of which the answer is on its way; ``through``: microbatches it knows to be through, with
    their ``losses`` [nats/token]; ``held_losses``: of those in ``held``, nan where not known. ``round``: what it
    averages now, or holds. ``moved``: bytes of tensors that it sent and received in its life, so that two answers tell
    whether it comes on."""

    KIND: ClassVar[str] = "held"
    current: bool
    step: Natural
    stage: Natural
    lineage: Annotated[bytes, Field(max_length=32)] = b""
    branch: Annotated[bytes, Field(min_length=BRANCH, max_length=BRANCH)] = bytes(BRANCH)
    """Of its lineage: steps of different branches have nothing to do with each other."""
    held: Indices = ()
    held_losses: Annotated[tuple[float, ...], Field(max_length=MAX_MICROBATCHES), FailFast()] = ()
    running: Indices = ()
    answering: Indices = ()
    through: Indices = ()
    losses: Annotated[tuple[float, ...], Field(max_length=MAX_MICROBATCHES), FailFast()] = ()
    rival: bool = False
    round: Annotated[bytes, Field(max_length=32)] = b""
    moved: Natural = 0
    late: bool = False
    """Its device is at something for unusually long."""

    def beyond(self, step: int) -> bool:
        """It has done ``step``, in our lineage."""
        return self.step > step and not self.rival

    def loss(self, index: int) -> float | None:
        """Of microbatch ``index`` [nats/token]; None if the answerer does not hold it, or does not know its loss."""
        known = [loss for i, loss in zip(self.held, self.held_losses, strict=False) if i == index]
        return known[0] if known and not math.isnan(known[0]) else None


class AskSeal(Message):
    """Call to a replica: what did you announce last? The answer is a Seal, or empty."""

    KIND: ClassVar[str] = "ask_seal"
    lineage: Digest
    step: Natural


class MemberView(BaseModel):
    """Whom ``member`` counts on in its stage, itself included."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    member: Id
    attempt: Natural
    members: Annotated[tuple[Id, ...], Field(min_length=1, max_length=4096), FailFast()]


class AskViews(Message):
    """Call to a peer of another stage, where replicas that do not reach each other meet: here is my view of my stage,
    whose do you know?"""

    KIND: ClassVar[str] = "ask_views"
    lineage: Digest
    step: Natural
    view: MemberView


class Views(Message):
    KIND: ClassVar[str] = "views"
    views: Annotated[tuple[MemberView, ...], Field(max_length=4096), FailFast()]


class Back(Message):
    """A peer that had fallen behind is at this step again: count on it."""

    KIND: ClassVar[str] = "back"
    lineage: Digest
    step: Natural


class Doubted(Message):
    """``peer`` does not answer its sender: whoever gets this asks it, too, before they need it. Nobody is believed dead
    on hearsay."""

    KIND: ClassVar[str] = "doubted"
    lineage: Digest
    step: Natural
    peer: Id


class AskSnapshot(Message):
    """Call to a peer of ``stage``: make a copy of the stage's state as it is before the current step, or offer one that
    is on its way to others, if it is not of a step before ``after``."""

    KIND: ClassVar[str] = "ask_snapshot"
    stage: Natural
    after: Natural = 0


class Snapshot(Message):
    """Weights and moments before ``step``. ``digest``: BLAKE3 of the copy's manifest. ``over``: no step follows.
    ``past``: lineages of the steps before, as many as are remembered."""

    KIND: ClassVar[str] = "snapshot"
    lineage: Digest
    step: Natural
    digest: Digest
    over: bool
    past: Past = ()

    @property
    def chain(self) -> Chain:
        return Chain(self.step, (*self.past, self.lineage), self.over)


class History(Message):
    """Call to a peer of another lineage, and its answer: how we came here. ``lineages`` end with that of ``step``."""

    KIND: ClassVar[str] = "history"
    step: Natural
    lineages: Annotated[tuple[Digest, ...], Field(min_length=1, max_length=MEMORY), FailFast()]
    over: bool

    @classmethod
    def of(cls, chain: Chain) -> History:
        return cls(step=chain.step, lineages=chain.lineages, over=chain.over)

    @property
    def chain(self) -> Chain:
        return Chain(self.step, self.lineages, self.over)


class AskStay(Message):
    """Call: are you of the history with that lineage at that step, and, if it is to be a ``promise``, will you stay in
    it for now?"""

    KIND: ClassVar[str] = "ask_stay"
    lineage: Digest
    step: Natural
    promise: bool


class Stay(Message):
    KIND: ClassVar[str] = "stay"
    stays: bool
    stage: Natural
    trainer: bool


class AskManifest(Message):
    """Call: the manifest of that digest, whole."""

    KIND: ClassVar[str] = "ask_manifest"
    digest: Digest


class AskBlocks(Message):
    """Call: send these blocks of the copy with that digest, as frames. The answer is empty."""

    KIND: ClassVar[str] = "ask_blocks"
    digest: Digest
    blocks: Annotated[tuple[Natural, ...], Field(max_length=MAX_RUN), FailFast()]


class Block(Message):
    """A block of a copy that its receiver asked for."""

    KIND: ClassVar[str] = "block"
    CHANNEL: ClassVar[Channel] = Channel.BULK
    TENSORS: ClassVar[int] = 1
    digest: Digest
    block: Natural


class Report(Message):
    """What a peer on another machine counted, to the coordinator: an event as JSON, so that the run folder of 'start'
    has it."""

    KIND: ClassVar[str] = "report"
    event: Annotated[str, Field(max_length=1 << 16)]


class Introduce(Message):
    """Call from a peer that serves ``member``'s stage from now on, to everyone it knows: count it among the members."""

    KIND: ClassVar[str] = "introduce"
    member: Member


class Acquaintances(Message):
    """The answer: everyone the answerer knows, itself included."""

    KIND: ClassVar[str] = "acquaintances"
    members: Annotated[tuple[Member, ...], Field(max_length=4096), FailFast()]


class WhoAreYou(Message):
    """Call to a peer that speaks to us and that we do not know; the answer is a Member."""

    KIND: ClassVar[str] = "who_are_you"


class StopRun(Message):
    """Call: end the run in order, after the current step, with a checkpoint."""

    KIND: ClassVar[str] = "stop_run"


class Finished(Message):
    """Call: the last checkpoint is complete (or given up): the member may go, after it has told the others."""

    KIND: ClassVar[str] = "finished"
    written: bool
