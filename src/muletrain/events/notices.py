"""What a person should read of a run, as typed events with a sentence each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from muletrain.events.event import Event

Level = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Note(Event):
    """A sentence without a type of its own: nothing but a person reads it."""

    level: Level
    message: str


class Notice(Event, abstract=True):
    """``TEXT`` is its sentence, with the names of its fields in braces."""

    TEXT: ClassVar[str]
    level: ClassVar[Level] = "warning"

    @property
    def message(self) -> str:
        return self.TEXT.format_map(vars(self))


# Steps ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicrobatchesRerun(Notice):
    """Microbatches that are in no accumulator of a stage are computed again."""

    step: int
    stage: int
    microbatches: int

    @property
    def message(self) -> str:
        what = "microbatch" if self.microbatches == 1 else "microbatches"
        return f"step {self.step}: stage {self.stage} runs {self.microbatches} {what} again"


@dataclass(frozen=True)
class OrphansTaken(Notice):
    """A trainer gives out the microbatches of ``owners``, trainers that do not."""

    TEXT = "step {step}: nobody works on microbatches of {owners}: this peer gives them out ({microbatches})"
    step: int
    owners: str
    microbatches: int


@dataclass(frozen=True)
class AveragingFailed(Notice):
    TEXT = "averaging step {step}, attempt {attempt}: {reason}"
    step: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class LeftBehind(Notice):
    """Other replicas average a step without this peer; it takes what they reduce."""

    TEXT = "step {step}: replicas that do not reach this peer go on without it"
    step: int


@dataclass(frozen=True)
class RoundGivenUp(Notice):
    """This peer holds a gradient of the step that will not count."""

    TEXT = "step {step}: most replicas average without this peer, so what it holds will not count"
    step: int


@dataclass(frozen=True)
class ReplicaApart(Notice):
    """A replica answers questions, but large messages from it do not come."""

    TEXT = "step {step}: {name} answers, but sends no chunks: no averaging with it for {steps} steps"
    step: int
    name: str
    steps: int


@dataclass(frozen=True)
class WeightsDiffer(Notice):
    """A replica does not have the weights that most have."""

    TEXT = "step {step}: {name} has other weights than the other replicas, and takes theirs"
    step: int
    name: str


@dataclass(frozen=True)
class GradientStandsOut(Notice):
    """A member's gradient is left out of the step, and ``who`` computes it again."""

    TEXT = "step {step}: the gradient of {name} stands out: {who} computes it again"
    step: int
    name: str
    who: str


@dataclass(frozen=True)
class ResultsDiffer(Notice):
    """The second result of a gradient that stood out is another one."""

    TEXT = "step {step}: another result came of the microbatches of {name}; its hardware may be faulty"
    step: int
    name: str


@dataclass(frozen=True)
class InputsNotFinite(Notice):
    """Another stage's activations or gradients made this peer's gradient not finite."""

    TEXT = "step {step}: what other stages gave this peer made its gradient not finite: it is computed again"
    step: int


@dataclass(frozen=True)
class StepSkipped(Notice):
    TEXT = "step {step}: the gradient is not finite, so everyone skips the step: the weights stay as they are"
    step: int


# Coming, falling behind, leaving --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateMissed(Notice):
    """This peer fell behind, or has wrong weights."""

    TEXT = "{reason}: this peer takes a replica's state"
    reason: str


@dataclass(frozen=True)
class GradientTaken(Notice):
    """This peer missed a step, and applied it after all."""

    TEXT = "{reason}: took it from a replica and applied it"
    level = "info"
    reason: str


@dataclass(frozen=True)
class TransferFailed(Notice):
    """``what`` (a state, a gradient, tokens, a part of a checkpoint) did not come from ``source`` ('' for several)."""

    TEXT = "{what} did not come: {reason}"
    level = "info"
    what: str
    reason: str
    source: str = ""


@dataclass(frozen=True)
class PeerMoved(Notice):
    TEXT = "{name} moves from stage {stage} to {target}"
    level = "info"
    name: str
    stage: int
    target: int


@dataclass(frozen=True)
class MoveDecided(Notice):
    """This peer is to go to stage ``target``."""

    TEXT = "stage {target} {reason}"
    level = "info"
    target: int
    reason: str


@dataclass(frozen=True)
class MoveRefused(Notice):
    TEXT = "stage {stage} needs more memory than this machine may use (--memory): this peer stays"
    stage: int


@dataclass(frozen=True)
class LeavePutOff(Notice):
    TEXT = "{name} wants to leave, but {reason}: it stays until that changes"
    name: str
    reason: str


@dataclass(frozen=True)
class LeaveCancelled(Notice):
    """The other peers of its stage died while this one left."""

    TEXT = "no other peer of stage {stage} came on: this one is back"
    stage: int


@dataclass(frozen=True)
class DeviceLate(Notice):
    TEXT = "{job}: the others go on without this peer until it returns"
    job: str


@dataclass(frozen=True)
class DeviceBack(Notice):
    TEXT = "the device works again"
    level = "info"


@dataclass(frozen=True)
class StageEmpty(Notice):
    """``stages`` lost all peers, and nothing but a machine that joins, or theirs if they come back, can help."""

    TEXT = "{stages} lost all peers, {lacks}. The run waits for {minutes} minutes"
    stages: str
    lacks: str
    minutes: int


@dataclass(frozen=True)
class NoTrainer(Notice):
    """No peer that builds microbatches is left."""

    TEXT = (
        "no trainer is left: no peer has the data. Let a machine join that has it ('muletrain join'). "
        "The run waits for {minutes} minutes, and writes a checkpoint meanwhile"
    )
    minutes: int


@dataclass(frozen=True)
class LastTrainer(Notice):
    TEXT = "{name} is the only trainer left: no other peer has the data, should it go"
    name: str


@dataclass(frozen=True)
class TrainerAdded(Notice):
    """A peer that took the run's tokens builds microbatches from now on."""

    TEXT = "{name} has the run's tokens, and builds microbatches, too"
    level = "info"
    name: str


@dataclass(frozen=True)
class SeatEmpty(Notice):
    """A planned pipeline lacks the peer ``seat``. ``spares`` take its microbatches; '': there is no spare."""

    pipeline: int
    stage: int
    seat: str
    spares: str

    @property
    def message(self) -> str:
        lacks = f"pipeline {self.pipeline} has no '{self.seat}' at stage {self.stage}"
        if self.spares:
            return f"{lacks}: {self.spares} (spare) takes its microbatches"
        return f"{lacks} and no spare: the stage's other peers share its microbatches, as strategy swarm has it"


@dataclass(frozen=True)
class SeatFilled(Notice):
    TEXT = "'{seat}' is at stage {stage}: pipeline {pipeline} is as planned there"
    level = "info"
    pipeline: int
    stage: int
    seat: str


@dataclass(frozen=True)
class ForkKept(Notice):
    """This peer cannot go over to the history that stays."""

    TEXT = "this peer stays with its side's history for now: {reason}"
    reason: str


@dataclass(frozen=True)
class DirectoryFailed(Notice):
    """The directory, or a peer that it named, did not answer, which delays what needs it."""

    TEXT = "{what}: {reason}"
    level = "info"
    what: str
    reason: str


@dataclass(frozen=True)
class PartNotKept(Notice):
    """A part of a checkpoint cannot be kept in this peer's own place."""

    TEXT = "a checkpoint's part is not kept here: {reason}"
    level = "info"
    reason: str
