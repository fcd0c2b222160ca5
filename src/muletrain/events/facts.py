"""Events of a run that programs read, too."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Literal

from muletrain.events.event import Event, Number
from muletrain.units import format_bytes, format_count, format_duration, plural

TrafficClass = Literal["activation", "gradient", "averaging", "state", "control", "relayed"]
TRAFFIC_CLASSES: tuple[TrafficClass, ...] = ("activation", "gradient", "averaging", "state", "control", "relayed")
"""Classes of traffic; 'relayed': carried by a peer between two other peers."""
ANSWERED = re.compile("answered a probe|it trains in|it is still at|its history")
"""Reasons of a suspicion that came from the peer itself."""


class RunStarted(Event):
    """A process began to take part in the run."""

    run_id: str
    config_digest: str
    versions: dict[str, str]
    steps: int
    stages: int
    peers: int
    microbatches: int
    """Number per step."""
    tokens_per_step: int
    first_step: int = 0
    """Steps done before, in a resumed run."""
    params: int = 0
    """Size of the whole model [parameters]."""
    members: dict[str, str] = field(default_factory=dict)
    """Names of the peers that begin, by id."""

    def sentence(self) -> str:
        stages = plural(self.stages, "stage")
        model = f"{format_count(self.params)} parameters in {stages}" if self.params else stages
        return f"run {self.run_id}: {plural(self.steps, 'step')}, {model}, {plural(self.peers, 'peer')}"


class PeerJoined(Event):
    """A peer began to serve a stage."""

    peer_id: str
    name: str
    stage: int
    device: str
    precision: str
    trainer: bool
    params: int
    """Size of its stage [parameters]."""
    threads: int
    chip: str = ""
    """Product name of the device."""
    swapped: int = 0
    """Parts of the stage that take turns on the device; 0: the stage stays there."""
    by_block: bool = False
    """Backward computes one block again at a time: it is slower, and takes less memory."""
    memory: int = 0
    """Memory that the stage needs on the device, as estimated [bytes]; 0: unknown."""

    def sentence(self) -> str:
        turns = f" in {self.swapped} parts that take turns" if self.swapped else ""
        about = f"{self.device}, {self.precision}, {format_count(self.params)} parameters{turns}"
        about += ", computes blocks again to save memory" if self.by_block else ""
        builds = "; as a trainer, it also builds microbatches from the data" if self.trainer else ""
        return f"{self.name} serves stage {self.stage} ({about}){builds}"


class ClientBegan(Event):
    """A client began to compute for a stage."""

    peer_id: str
    name: str
    stage: int
    device: str
    precision: str
    params: int
    """Size of its stage [parameters]."""
    threads: int
    chip: str = ""
    """Product name of the device."""
    swapped: int = 0
    """Parts of the stage that take turns on the device; 0: the stage stays there."""

    def sentence(self) -> str:
        turns = f" in {self.swapped} parts that take turns" if self.swapped else ""
        about = f"{self.device}, {self.precision}, {format_count(self.params)} parameters{turns}"
        return f"{self.name} computes for stage {self.stage} ({about})"


class ClientFinished(Event):
    """A client's process ended in order."""

    seconds: Number
    reason: str

    def sentence(self) -> str:
        return f"{self.peer} ended after {format_duration(self.seconds)}: {self.reason}"


class Waiting(Event):
    """The run waits for these conditions, e.g. ['stage 1 has no peer']."""

    missing: list[str]

    def sentence(self) -> str:
        return f"waiting: {'; '.join(self.missing)}" if self.missing else "nothing is missing any more"


class ProbeProgress(Event):
    """Machines and links are being measured: ``done`` of ``total`` rounds, and the next one."""

    TEXT = "{what}"
    done: int
    total: int
    what: str


class FleetMeasured(Event):
    """The fleet file of the measured machines was written."""

    path: str
    peers: list[str]
    """Names of the measured peers."""
    lacking: list[str]
    """A sentence for each thing that could not be measured."""

    def sentence(self) -> str:
        return f"measured {plural(len(self.peers), 'peer')}: {self.path}"


class ProbeFailed(Event):
    """Measuring failed."""

    TEXT = "the fleet was not measured: {reason}"
    WARNING = True
    reason: str


class Admitted(Event):
    """This process admitted a peer, which has this ``name`` in the run."""

    peer_id: str
    name: str = ""


class JoinRefused(Event):
    """A peer asked for admission and was refused. ``name``: the requested name, if known."""

    WARNING = True
    remote: str
    reason: str
    name: str = ""

    def sentence(self) -> str:
        who = f"{self.name} ({self.remote})" if self.name else self.remote
        return f"{who} was not admitted: {self.reason}"


class FrameRefused(Event):
    """A message arrived that no correct peer of this run would send."""

    TEXT = "refused a message from {remote}: {reason}"
    WARNING = True
    remote: str
    reason: str


class StepApplied(Event):
    """One peer applied a step. The seconds are of the peer's compute slot, and add up to the step's wall time."""

    step: int
    stage: int
    lineage: str
    """Hash of the step record (hex)."""
    skipped: bool
    """Whether the gradient was not finite, so that the weights stayed."""
    microbatches: int
    """Number accumulated by this peer."""
    recomputed: int
    """Number computed again without accumulating."""
    forward_s: Number
    backward_s: Number
    averaging_s: Number
    apply_s: Number
    wait_s: Number
    """Idle time."""
    sent: dict[str, dict[TrafficClass, int]]
    """Bytes sent since the previous StepApplied, by receiving peer and class."""
    not_finite: str = ""
    """Name of the stage's first parameter with a gradient that was not finite; '': all gradients were finite."""
    memory: int = 0
    """Memory that the peer's process has after the step, of its device [bytes]; 0: unknown."""


SMOOTHING = 0.9
"""Weight of the past in a shown loss or speed: about the last ten steps."""


class StepDone(Event):
    """The fleet finished a step; one peer writes this."""

    step: int
    loss: Number
    """Mean cross-entropy [nats/token]."""
    grad_norm: Number
    """Global norm before clipping; NaN if the gradient was not finite, so that the update was skipped."""
    lr: Number
    tokens: int
    duration_s: Number
    lineage: str


PoolCount = Literal["parts", "late", "redone"]


class PoolWorked(Event):
    """A server applied a step, for which clients had computed parts of microbatches since the last one."""

    step: int
    stage: int
    own: int
    """Parts that the server computed itself."""
    clients: dict[str, dict[PoolCount, int]]
    """By name, the 256 with the most parts: 'parts' that counted, how often the client was 'late', and lost parts
    'redone'."""


class SwapWorked(Event):
    """A peer applied a step with a swapped stage. Counts are since the last one."""

    step: int
    stage: int
    loads: int
    """Parts of the stage that were loaded."""
    loaded_bytes: int
    rounds: int
    """Times that the stage was passed through, forward, backward, or both."""
    microbatches: int
    """Number that passed in ``rounds``."""
    load_s: Number
    """Time that loading took, mostly beside the computation."""
    load_wait_s: Number
    """Time in which computing waited for weights, or for gradients to leave."""


class MicrobatchTaken(Event):
    """A peer admitted a microbatch (with ``fleet.trace``)."""

    step: int
    index: int
    stage: int


class MicrobatchServed(Event):
    """A peer finished the backward of a microbatch (with ``fleet.trace``)."""

    step: int
    index: int
    stage: int
    busy_s: Number
    """This peer's compute time for the microbatch."""


class SlotWorked(Event):
    """A slot of a peer finished work at ``t`` (with ``fleet.trace``): one of ``timeline.SLOTS``."""

    slot: str
    what: str
    """'forward', 'backward', 'apply', ..., or the kind of the frame."""
    step: int
    seconds: Number
    index: int = -1
    """The microbatch; -1: the work belongs to the whole step."""


class MicrobatchRerouted(Event):
    """A microbatch was sent to another peer of ``stage`` after the first choice failed."""

    step: int
    index: int
    stage: int
    reason: str


class PeerDown(Event):
    """A peer gets no more work until a new announcement."""

    WARNING = True
    peer_id: str
    reason: str
    name: str = ""

    def sentence(self) -> str:
        silent = "" if ANSWERED.match(self.reason) else "does not answer and "
        return f"{self.peer_id} {silent}gets no work: {self.reason}"


class MemberAdmitted(Event):
    """A peer that joins a running run, or moves to another stage, introduced itself."""

    peer_id: str
    name: str
    stage: int


class PeerLeft(Event):
    """A peer left in order after ``step``."""

    TEXT = "{name} left in order after step {step}"
    peer_id: str
    name: str
    step: int


class LineageLeft(Event):
    """A partition healed, and this peer switched from one side's history to the other, with a replica's state."""

    forked_at: int
    """First step that differs between the two sides."""
    step: int
    """Steps done on this side."""
    lineage: str
    """Hash of this side's last record (hex)."""
    to_step: int
    to_lineage: str

    def sentence(self) -> str:
        apart = plural(self.step - self.forked_at + 1, "step")
        return (
            f"{self.peer}: a partition since step {self.forked_at} healed; this peer drops {apart} of its own side, "
            f"and takes the other side's state after step {self.to_step}"
        )


class PeerExpelled(Event):
    """The members expelled a peer, because two other peers computed a different gradient for ``step``."""

    TEXT = "{name} was expelled after step {step}: its results differ from those of its replicas"
    WARNING = True
    peer_id: str
    name: str
    step: int


class MemberRemoved(Event):
    """The run's owner removed a peer for good."""

    TEXT = "{name} was removed by the run's owner"
    peer_id: str
    name: str


class PeerBanned(Event):
    """This process ignores a peer for a while, because of repeated malformed messages."""

    WARNING = True
    peer_id: str
    seconds: Number

    def sentence(self) -> str:
        return f"{self.peer_id} is banned for {format_duration(self.seconds)}: it keeps sending malformed messages"


class CheckpointWritten(Event):
    """A complete checkpoint is on disk."""

    step: int
    path: str
    bytes: int
    seconds: Number

    def sentence(self) -> str:
        cost = f"{format_bytes(self.bytes)}, {format_duration(self.seconds)}"
        return f"checkpoint of step {self.step}: {self.path} ({cost})"


class CheckpointFailed(Event):
    """A checkpoint could not be written; training continues."""

    TEXT = "the checkpoint of step {step} failed: {reason}"
    WARNING = True
    step: int
    reason: str


class SteppedBack(Event):
    """Stages lost all peers, so all processes restart from the newest complete checkpoint. Some steps are done again;
    the final weights are unchanged."""

    WARNING = True
    step: int
    """Steps that this process had done; 0: it was joining."""
    to: int
    """Steps in the checkpoint; 0: the beginning."""
    lost: list[int]
    moves: list[str]
    """A sentence for each peer that moves to another stage."""
    lineage: str

    def sentence(self) -> str:
        stages = f"stage{'s' if len(self.lost) > 1 else ''} {', '.join(map(str, self.lost))}"
        where = f"the checkpoint of step {self.to}" if self.to else "the beginning"
        origin = f"from step {self.step} " if self.step > self.to else ""
        moves = f"; {', '.join(self.moves)}" if self.moves else ""
        return f"{stages} lost all peers: the run steps back {origin}to {where}{moves}"


class Evaluated(Event):
    """The model was evaluated on so many ``tokens`` of held-out text."""

    step: int
    loss: Number
    """Mean cross-entropy [nats/token], or the loss of a user's module; then there is no perplexity."""
    perplexity: Number | None
    tokens: int
    unigram: Number | None = None
    bigram: Number | None = None
    """Losses of a unigram model on the same text, and of an interpolated bigram model; None: too little text."""
    before: Number | None = None
    """Loss of the weights of ``model.from`` on the same text; None: the run began with different weights, or
    unknown."""

    def sentence(self) -> str:
        before = "" if self.before is None else f" (before training {self.before:.3f})"
        more = "" if self.perplexity is None else f", perplexity {self.perplexity:.1f}"
        return f"step {self.step}: validation loss {self.loss:.3f}{before}{more}"


class Validated(Event):
    """The held-out loss was measured during training, after ``step`` updates; fields as in ``Evaluated``."""

    step: int
    loss: Number
    perplexity: Number | None
    tokens: int

    def sentence(self) -> str:
        when = f"step {self.step}" if self.step else "before the first step"
        more, what = "", "samples or tokens"
        if self.perplexity is not None:
            more, what = f", perplexity {self.perplexity:,.1f}", "tokens"
        return f"{when}: held-out loss {self.loss:.3f}{more} ({self.tokens:,} {what})"


class Sampled(Event):
    """The model wrote ``texts`` after ``step`` updates."""

    step: int
    texts: list[str]


class FaultInjected(Event):
    """``--chaos`` injected a fault into a local fleet."""

    what: str
    """'kill', 'freeze', 'corrupt', 'partition' or 'join'."""
    who: list[str]
    """Names of the affected peers."""
    for_s: Number
    """Duration; 0 for faults without one."""
    planned: str
    """Text of the plan."""
    step: int
    """Steps done before the fault."""

    def sentence(self) -> str:
        return f"chaos: {self.planned} hits {', '.join(self.who)} after step {self.step}"


class RunFinished(Event):
    """A process ended in order."""

    steps: int
    seconds: Number
    reason: str
    skipped: int = 0
    """Updates that the peer skipped because the gradient was not finite."""


class RunPrepared(Event):
    """A command has prepared a run, before the first step: model, data, method and place."""

    data: str
    """Path of the text, or factory of the samples."""
    documents: dict[str, int]
    """Of a text: fields of ``data.tokens.TokenStats`` that count documents and changes."""
    changes: list[str]
    """Omissions and changes in the text, a line each, with the count."""
    unit: str
    """Unit of ``train``, ``heldout`` and ``taken``: 'tokens' or 'samples'."""
    train: int
    heldout: int
    steps: int
    first_step: int
    """Steps done before, in a resumed run."""
    taken: int
    """Tokens or samples of all steps."""
    epochs: Number
    """Average number of times that the steps take each one."""
    model: str
    start: str
    """Where the first weights come from."""
    params: int
    """Parameters of the model, each counted once."""
    trained_params: int
    batch: int
    """Sequences or samples of a step."""
    microbatch: int
    context: int
    """Longest sequence [tokens]; 0: samples have none."""
    optimizer: str
    lr: Number
    """Peak learning rate."""
    warmup: int
    """Steps until the peak."""
    schedule: str
    final_lr: Number
    """Learning rate at the end, as a share of the peak."""
    precision: str
    """'auto': each peer measures the fastest choice on the device."""
    strategy: str
    stages: int
    peers: int
    """Peers that the run waits for; 0: as many as come."""
    devices: list[str]
    """The device of each process of the machine that prepared the run."""
    date: str = ""
    """The date that the chat template prints; empty: it prints none."""
    command: str = "run"
    """The command: 'run' or 'start'."""
    seconds: Number = 0.0
    """Time that the command took for that."""
    adapter: str = ""
    """Of a run that trains one: rank and adapted layers."""
    examples: list[list[str]] = field(default_factory=list)
    """Of a new run on conversations, the first ones, as ``data.shown.examples`` gives them."""
