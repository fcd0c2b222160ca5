"""Events about trouble, and about members that come, go or change: most are read by people alone."""

from __future__ import annotations

from typing import Literal

from muletrain.events.event import Event, Number
from muletrain.units import plural

Level = Literal["info", "warning", "error"]


class Note(Event):
    """A sentence without a specific type, for people only."""

    level: Level
    message: str

    def sentence(self) -> str:
        return self.message

    def is_warning(self) -> bool:
        return self.level != "info"


class Notice(Event, abstract=True):
    """Base of warnings, unless the class says otherwise. ``step`` counts from 1, as in ``StepDone``."""

    WARNING = True


# Steps ----------------------------------------------------------------------------------------------------------------


class StepWaits(Notice):
    """A peer's step takes long. ``names``: awaited peers, and the number of ``more``; ``seconds``: so far; ``then``: what
    the peer does next."""

    step: int
    what: str
    names: list[str]
    more: int
    seconds: Number
    then: str

    def reason(self) -> str:
        """Without the step."""
        names = ", ".join([*self.names, *([f"{self.more} more"] if self.more else [])])
        whom = f" ({names})" if names else ""
        return f"has waited {self.seconds:.0f} s for {self.what}{whom}; {self.then}"

    def sentence(self) -> str:
        return f"step {self.step}: {self.peer or 'a peer'} {self.reason()}"


class MicrobatchesRerun(Notice):
    """A stage computes microbatches again that are in no accumulator."""

    step: int
    stage: int
    microbatches: int
    unusual: str = ""
    """Names of the members whose gradients stand out (``GradientStandsOut``), if that is the reason."""

    def sentence(self) -> str:
        again = plural(self.microbatches, "microbatch")
        if not self.unusual:
            return f"step {self.step}: stage {self.stage} computes {again} again"
        return (
            f"step {self.step}: the gradient of {self.unusual} is much longer or shorter than usual (unusual data, or a fault): "
            f"another peer of stage {self.stage} computes its {again} again, and compares"
        )


class ValidationLeftOut(Notice):
    """The held-out loss was to be measured, and was not. Training goes on."""

    TEXT = "the held-out loss after step {step} was not measured: {reason}"
    step: int
    reason: str


class SampleReplaced(Notice):
    """A sample of ``data.factory`` cannot be used, so that ``other`` takes its place. ``stops``: the run ends after the
    step."""

    sample: int
    other: int
    reason: str
    stops: bool

    def sentence(self) -> str:
        then = (
            "; the run ends after this step (data.on_error = 'skip' goes on)" if self.stops else "; others are counted"
        )
        return f"{self.reason}; sample {self.other} takes its place{then}"


class OrphansTaken(Notice):
    """A trainer took over microbatches of ``owners``, trainers that stopped."""

    step: int
    owners: str
    microbatches: int

    def sentence(self) -> str:
        return f"step {self.step}: this trainer takes over {plural(self.microbatches, 'microbatch')} of {self.owners}"


class AveragingFailed(Notice):
    """An attempt to average a step failed."""

    TEXT = "averaging of step {step} failed (attempt {attempt}): {reason}"
    step: int
    attempt: int
    reason: str


class LeftBehind(Notice):
    """The remaining replicas average a step without this peer, which fetches the result."""

    TEXT = "step {step}: the other replicas cannot reach this peer and average without it"
    step: int


class RoundGivenUp(Notice):
    """This peer's averaged gradient of a step will not count."""

    TEXT = "step {step}: most replicas average without this peer, so its result does not count"
    step: int


class ReplicaApart(Notice):
    """A replica answers calls, but large messages do not arrive, or this peer is held up."""

    step: int
    name: str
    why: str
    steps: int

    def sentence(self) -> str:
        pause = plural(self.steps, "step")
        return f"step {self.step}: {self.name} answers, but {self.why}; averaging without it for {pause}"


class WeightsDiffer(Notice):
    """A replica's weights differ from the majority's."""

    TEXT = "step {step}: the weights of {name} differ from the other replicas'; it copies theirs"
    step: int
    name: str


class GradientStandsOut(Notice):
    """A member's gradient is far longer or shorter than the rest, so ``who`` computes the gradient again as a check.
    Honest data do that at times, so only ``ResultsDiffer`` tells of a fault."""

    WARNING = False
    step: int
    name: str
    who: str


class ResultsDiffer(Notice):
    """A second peer got another result for a gradient that stood out."""

    TEXT = "step {step}: a second peer got another result for the microbatches of {name}, whose hardware may be faulty"
    step: int
    name: str


class InputsNotFinite(Notice):
    """Inputs from other stages made this peer's gradient not finite."""

    TEXT = "step {step}: inputs from other stages made the gradient not finite; it is computed again"
    step: int


class StepSkipped(Notice):
    """The gradient of a step is not finite, so the weights stay."""

    TEXT = "step {step}: the gradient is not finite; all peers skip the update, and the weights stay unchanged"
    step: int


# Coming, falling behind, leaving --------------------------------------------------------------------------------------


class StateMissed(Notice):
    """This peer fell behind, or has wrong weights."""

    TEXT = "{reason}: this peer copies a replica's state"
    reason: str


class StateKept(Notice):
    """The run has gone on without this peer, but no replica has a later state of the stage."""

    TEXT = "{reason}, but no replica has a later state of this stage: this peer tries the step again"
    reason: str


class GradientTaken(Notice):
    """This peer missed a step, and applied the step later."""

    TEXT = "{reason}: fetched it from a replica and applied it"
    WARNING = False
    reason: str


class TransferFailed(Notice):
    """``what`` (a state, a gradient, tokens, a part) could not be fetched from ``source`` ('': from several)."""

    TEXT = "{what} could not be fetched: {reason}"
    WARNING = False
    what: str
    reason: str
    source: str = ""


class PeerMoved(Notice):
    """A peer moves to another stage."""

    TEXT = "{name} moves from stage {stage} to stage {target}"
    WARNING = False
    name: str
    stage: int
    target: int


class MoveDecided(Notice):
    """This peer decided to move to stage ``target``."""

    TEXT = "stage {target} {reason}"
    WARNING = False
    target: int
    reason: str


class MoveRefused(Notice):
    """This peer has too little memory for the stage that it should move to, or lacks weights of that."""

    TEXT = "stage {stage} {reason}: this peer stays"
    stage: int
    reason: str = "needs more memory than this machine may use (--memory)"


class LeavePutOff(Notice):
    """A peer cannot leave yet."""

    TEXT = "{name} wants to leave, but {reason}; it stays until that changes"
    name: str
    reason: str


class LeaveCancelled(Notice):
    """The remaining peers of the stage died while this one left, so this peer stays."""

    TEXT = "no other peer of stage {stage} is alive; this one stays"
    stage: int


class DeviceLate(Notice):
    """The device does not return from a job."""

    TEXT = "{job}; the other peers continue without this one until its device responds"
    job: str


class DeviceBack(Notice):
    """The device returned from a late job."""

    TEXT = "the device works again"
    WARNING = False


class StageEmpty(Notice):
    """``stages`` lost all peers, and the run waits for a machine that joins or comes back."""

    stages: str
    lacks: str
    minutes: int

    def sentence(self) -> str:
        return f"{self.stages} lost all peers, {self.lacks}. The run waits for {plural(self.minutes, 'minute')}"


class NoTrainer(Notice):
    """The run lost its last trainer, and waits for another one."""

    minutes: int

    def sentence(self) -> str:
        return (
            "no trainer is left, because no peer has the data; join with a machine that has it ('muletrain join --data PATH'; "
            f"'--data pydoc' is the text of a run without data.path). The run writes a checkpoint, and waits for "
            f"{plural(self.minutes, 'minute')}"
        )


class LastTrainer(Notice):
    """Only one trainer is left."""

    TEXT = "{name} is the only trainer left; no other peer has the data"
    name: str


class TrainerAdded(Notice):
    """A peer that fetched the run's tokens became a trainer."""

    TEXT = "{name} has the run's tokens and now builds microbatches too"
    WARNING = False
    name: str


class SeatEmpty(Notice):
    """A planned pipeline lost the peer ``seat``. ``spares`` take the microbatches; '': there is no spare."""

    pipeline: int
    stage: int
    seat: str
    spares: str

    def sentence(self) -> str:
        lacks = f"pipeline {self.pipeline} lacks '{self.seat}' at stage {self.stage}"
        if self.spares:
            return f"{lacks}: {self.spares} (spare) takes its microbatches"
        return f"{lacks}, and there is no spare: the stage's other peers share its microbatches, as in strategy swarm"


class SeatFilled(Notice):
    """A planned peer took the seat again."""

    TEXT = "'{seat}' serves stage {stage} of pipeline {pipeline} again, as planned"
    WARNING = False
    pipeline: int
    stage: int
    seat: str


class ForkKept(Notice):
    """This peer cannot switch to the history that wins."""

    TEXT = "this peer keeps its side's history for now: {reason}"
    reason: str


class BlocksCompiled(Notice):
    """A peer's blocks were compiled before training, or could not be. ``error``: why not; empty: they were."""

    stage: int
    seconds: Number
    error: str = ""

    def sentence(self) -> str:
        if self.error:
            return f"blocks of stage {self.stage} are not compiled (compute.compile): {self.error}"
        return f"blocks of stage {self.stage} compiled in {self.seconds:.1f} s"

    def is_warning(self) -> bool:
        return bool(self.error)


class DirectoryFailed(Notice):
    """The directory, or a peer named there, did not answer."""

    TEXT = "{what}: {reason}"
    WARNING = False
    what: str
    reason: str


class PartNotKept(Notice):
    """This peer could not keep a copy of a checkpoint part."""

    TEXT = "this peer does not keep its copy of a checkpoint part: {reason}"
    WARNING = False
    reason: str


# Clients of a pool -----------------------------------------------------------------------------------------------------


class ClientEnlisted(Notice):
    """A client begins to work for this server."""

    TEXT = "client {name} works for stage {stage}"
    WARNING = False
    peer_id: str
    name: str
    stage: int


class ClientLost(Notice):
    """A client is gone. Gradients of the client's ``parts`` are computed again."""

    peer_id: str
    name: str
    reason: str
    parts: int

    def sentence(self) -> str:
        return f"client {self.name} is gone ({self.reason}); {plural(self.parts, 'part')} computed again"


class ClientLate(Notice):
    """A client takes unusually long; other clients may compute that client's parts."""

    TEXT = "client {name} is late: others may take what it has"
    peer_id: str
    name: str
