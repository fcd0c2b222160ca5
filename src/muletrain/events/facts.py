"""What happens in a run, as typed events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from muletrain.events.event import Event, Number

TrafficClass = Literal["activation", "gradient", "averaging", "state", "control", "relayed"]
TRAFFIC_CLASSES: tuple[TrafficClass, ...] = ("activation", "gradient", "averaging", "state", "control", "relayed")
"""What a peer sends of its own, and what it carries between two others."""


@dataclass(frozen=True)
class RunStarted(Event):
    """A process began its part of the run."""

    run_id: str
    config_digest: str
    versions: dict[str, str]
    steps: int
    stages: int
    peers: int
    microbatches: int
    """Per step."""
    tokens_per_step: int
    first_step: int = 0
    """Steps done before, where a run goes on."""


@dataclass(frozen=True)
class PeerJoined(Event):
    """A peer serves a stage from now on."""

    peer_id: str
    name: str
    stage: int
    device: str
    precision: str
    trainer: bool
    params: int
    """Parameters of its stage."""
    threads: int
    chip: str = ""
    """What computes, by its maker's name."""


@dataclass(frozen=True)
class Waiting(Event):
    """The run cannot go on until these have come, e.g. ['a peer for stage 1']."""

    missing: list[str]


@dataclass(frozen=True)
class ProbeProgress(Event):
    """Machines and links are being measured: ``done`` of ``total`` rounds, and what comes next."""

    done: int
    total: int
    what: str


@dataclass(frozen=True)
class FleetMeasured(Event):
    """The fleet file of the machines that are here was written."""

    path: str
    peers: list[str]
    """By name."""
    lacking: list[str]
    """What could not be measured, in words."""


@dataclass(frozen=True)
class ProbeFailed(Event):
    """Nothing was measured."""

    reason: str


@dataclass(frozen=True)
class Admitted(Event):
    """This process let a peer in."""

    peer_id: str


@dataclass(frozen=True)
class JoinRefused(Event):
    """Somebody wanted in and was turned away."""

    remote: str
    reason: str


@dataclass(frozen=True)
class FrameRefused(Event):
    """Something arrived that no correct peer of this run would send."""

    remote: str
    reason: str


@dataclass(frozen=True)
class StepApplied(Event):
    """One peer applied a step. The seconds are those of its compute slot and add up to the step's wall time."""

    step: int
    stage: int
    lineage: str
    """Hash of the step record, hex."""
    skipped: bool
    """The gradient was not finite: weights stayed."""
    microbatches: int
    """Accumulated by this peer."""
    recomputed: int
    """Computed again without accumulating."""
    forward_s: Number
    backward_s: Number
    averaging_s: Number
    apply_s: Number
    wait_s: Number
    """Idle: nothing to compute."""
    sent: dict[str, dict[TrafficClass, int]]
    """Bytes put on the wire since the previous StepApplied, by receiving peer and class."""


@dataclass(frozen=True)
class StepDone(Event):
    """The whole fleet's step, written by one peer."""

    step: int
    loss: Number
    """Mean cross-entropy [nats/token]."""
    grad_norm: Number
    """Global, before clipping."""
    lr: Number
    tokens: int
    duration_s: Number
    lineage: str


@dataclass(frozen=True)
class MicrobatchTaken(Event):
    """A peer admitted a microbatch (with ``fleet.trace``)."""

    step: int
    index: int
    stage: int


@dataclass(frozen=True)
class MicrobatchServed(Event):
    """Its backward is through (with ``fleet.trace``)."""

    step: int
    index: int
    stage: int
    busy_s: Number
    """This peer's own work on it."""


@dataclass(frozen=True)
class SlotWorked(Event):
    """Until ``t``, one of a peer's slots worked (with ``fleet.trace``): 'receive', 'compute', 'send' or 'average'."""

    slot: str
    what: str
    """'forward', 'backward', 'apply', ..., or the kind of the frame that was sent."""
    step: int
    seconds: Number
    index: int = -1
    """The microbatch; -1: it is about the step."""


@dataclass(frozen=True)
class MicrobatchRerouted(Event):
    """A microbatch went to another peer of ``stage`` than the one first chosen."""

    step: int
    index: int
    stage: int
    reason: str


@dataclass(frozen=True)
class PeerSuspected(Event):
    """No more work is sent to a peer until it announces itself again."""

    peer_id: str
    reason: str


@dataclass(frozen=True)
class MemberAdmitted(Event):
    """A peer that joins the running run, or serves another stage from now on, introduced itself."""

    peer_id: str
    name: str
    stage: int


@dataclass(frozen=True)
class PeerLeft(Event):
    """A peer went in order, after ``step``: nobody counts on it any more."""

    peer_id: str
    name: str
    step: int


@dataclass(frozen=True)
class LineageLeft(Event):
    """A partition healed: this peer leaves the history of its side and goes on with the other one, from the state of
    its replicas."""

    forked_at: int
    """The first step that the two sides did differently, from 1."""
    step: int
    """Steps done on this side,"""
    lineage: str
    """and the hash of its last record, hex."""
    to_step: int
    to_lineage: str


@dataclass(frozen=True)
class PeerExpelled(Event):
    """A peer's gradient of ``step`` was not what two others of its stage computed: nobody counts on it any more."""

    peer_id: str
    name: str
    step: int


@dataclass(frozen=True)
class MemberRemoved(Event):
    """The run's owner removed a peer: nothing of it is accepted any more, and nothing is sent to it."""

    peer_id: str
    name: str


@dataclass(frozen=True)
class PeerBanned(Event):
    """This process leaves a peer out, which sent what no correct peer sends, again and again."""

    peer_id: str
    seconds: Number


@dataclass(frozen=True)
class CheckpointWritten(Event):
    """A complete checkpoint is on disk."""

    step: int
    path: str
    bytes: int
    seconds: Number


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """Training goes on without this checkpoint."""

    step: int
    reason: str


@dataclass(frozen=True)
class SteppedBack(Event):
    """Stages lost all their peers: this process begins anew at the newest complete checkpoint, as all do. Steps are
    lost, no numbers."""

    step: int
    """Steps that this process had done; 0: it was coming."""
    to: int
    """Steps in the checkpoint; 0: the beginning."""
    lost: list[int]
    moves: list[str]
    """Who serves another stage from now on."""
    lineage: str


@dataclass(frozen=True)
class Evaluated(Event):
    """The model on the held-out text."""

    step: int
    loss: Number
    """Mean cross-entropy [nats/token]."""
    perplexity: Number
    tokens: int
    """Held-out tokens it was measured on."""
    unigram: Number | None = None
    """Loss of counting tokens, on the same text; None: too little training text to count."""
    bigram: Number | None = None
    """... of counting pairs of them, interpolated with the unigram."""


@dataclass(frozen=True)
class FaultInjected(Event):
    """``--chaos`` did this to peers of a local fleet."""

    what: str
    """'kill', 'freeze', 'corrupt', 'partition' or 'join'."""
    who: list[str]
    """Names."""
    for_s: Number
    """How long it lasts; 0 where that means nothing."""
    planned: str
    """As the plan says it."""
    step: int
    """Steps done by then."""


@dataclass(frozen=True)
class RunFinished(Event):
    """A process ended in order."""

    steps: int
    seconds: Number
    reason: str
