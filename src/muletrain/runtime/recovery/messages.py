"""Messages that roll a run back, and messages that compare two histories."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import FailFast, Field

from muletrain.errors import ProtocolError
from muletrain.policy.assignment import Load
from muletrain.policy.fork_choice import MEMORY, Chain
from muletrain.runtime.checkpoint.store import Key
from muletrain.runtime.core.branches import BRANCH, COUNT, branched
from muletrain.runtime.core.lifecycle import Lifecycle, State
from muletrain.runtime.core.messages import Call, Digest, Header, Id, Message, Natural

MAX_PARTS = 1 << 12
"""Most parts of checkpoints that a peer names."""
MAX_MISSED = 1 << 10
"""Most rollbacks that a peer may have missed: a lie must not use up the numbers that the run still needs."""


class StepBack(Message):
    """Call: go on from the checkpoint ``base`` of ``step`` steps, with ``moves`` of peers to stages, as rollback number
    ``count`` of the run. ``parts``: digests of the checkpoint's parts; none: from the beginning."""

    KIND: ClassVar[str] = "step_back"
    count: Annotated[int, Field(ge=1, lt=256**COUNT)]
    step: Natural
    base: Digest
    parts: Annotated[tuple[Digest, ...], Field(max_length=4096)]
    moves: Annotated[tuple[tuple[Id, Natural], ...], Field(max_length=4096)]
    lost: Annotated[tuple[Natural, ...], Field(max_length=4096)]

    @property
    def lineage(self) -> bytes:
        """The lineage of the next step, a hash of all this: the first of a new branch."""
        return branched(self.count, self.pack())

    @property
    def key(self) -> Key:
        return Key(self.step, self.base)

    def check(self, stages: int, steps: int, count: int, *, from_seed: bool) -> None:
        """Raises ProtocolError for an order that no correct peer gives, after ``count`` rollbacks. ``from_seed``: can the
        run go back to the beginning without a checkpoint?"""
        named, begins = {*dict(self.moves).values(), *self.lost}, from_seed and not (self.parts or self.step)
        if not named <= set(range(stages)) or not (begins or len(self.parts) == stages) or self.step > steps:
            raise ProtocolError("a rollback to stages or steps that the run does not have")
        if self.count > count + MAX_MISSED:
            raise ProtocolError(f"rollback {self.count} of a run that has had {count}")


class StandsAt(Header):
    """A peer's place in the run's history. ``targets``: other stages that the peer has room for; ``reaches``: stages of
    which the peer reaches a member. ``parts``: step, lineage, stage and digest of the parts of checkpoints in the peer's
    place; ``reads``: the place could be read lately; ``missed``: digests of the parts that the peer could get from
    nowhere. ``began``: the rollback that began the peer's branch, if known."""

    branch: Annotated[bytes, Field(min_length=BRANCH, max_length=BRANCH)]
    step: Natural
    stage: Natural
    state: State
    targets: Annotated[tuple[Natural, ...], Field(max_length=4096)]
    reaches: Annotated[tuple[Natural, ...], Field(max_length=4096)] = ()
    parts: Annotated[tuple[tuple[Natural, Digest, Natural, Digest], ...], Field(max_length=MAX_PARTS)]
    reads: bool = True
    missed: Annotated[tuple[Digest, ...], Field(max_length=4096)] = ()
    began: StepBack | None = None

    @property
    def has_state(self) -> bool:
        return Lifecycle(self.state).has_state

    def check(self, stages: int, steps: int) -> None:
        """Raises ProtocolError for a place that the run does not have."""
        named = {self.stage, *self.targets, *self.reaches, *(stage for *_, stage, _ in self.parts)}
        if not named <= set(range(stages)) or self.step > steps:
            raise ProtocolError("a place in stages or steps that the run does not have")

    def load(self) -> Load:
        return Load(self.stage, targets=frozenset(self.targets), parts=frozenset(stage for *_, stage, _ in self.parts))

    def readable(self) -> dict[tuple[tuple[int, bytes], int], bytes]:
        """Returns the digest of each part that the peer can read, by checkpoint and stage."""
        return {((step, lineage), stage): digest for step, lineage, stage, digest in self.parts if self.reads}


class AskStanding(Call[StandsAt]):
    """Where do you stand?"""

    KIND: ClassVar[str] = "ask_standing"


class History(Message):
    """Call to a peer of another lineage, and the answer: the sender's history. ``lineages`` end with the lineage of
    ``step``."""

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


class Stay(Header):
    """Does the peer stay, and train? ``stage``: the peer's."""

    stays: bool
    stage: Natural
    trainer: bool


class AskStay(Call[Stay]):
    """Does your history have ``lineage`` at ``step``, and, with ``promise``, will you stay there for now?"""

    KIND: ClassVar[str] = "ask_stay"
    lineage: Digest
    step: Natural
    promise: bool
