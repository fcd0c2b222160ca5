"""What may happen in a virtual world: the fleet, its work, and the faults that a seed draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from muletrain.config.fleet_sections import QUEUE_S

FORWARD_S, BACKWARD_S = 0.05, 0.1
"""Service times of a peer of speed 1."""
TOLERANCE = 1e-5
"""Norm of the difference over norm, per tensor, within which a world and the single process agree."""
STALL_S = 1.0
FOR_EVER_S = 1e9
"""Two machines that cannot connect to each other."""
SIDES = ("partition", "blackhole")
"""Faults that leave two sides."""
CALM = "calm"
"""A kind of worlds in which nothing fails, and nothing may be lost."""
SUSPENDED = "suspended"
"""How a machine freezes whose clock stands still, as a laptop's does while its lid is closed."""


@dataclass(frozen=True)
class Fault:
    """At ``at_s``: 'kill', 'freeze', 'cut' (one from everyone else, or two from each other), 'slow' or 'damage' (the
    next frame of) ``who``, for ``for_s``; a 'partition' between ``who`` and all others, or a 'blackhole', of which
    nobody is told; 'join': a newcomer, whose name says its stage; or ``who`` wants to 'leave' in order, or to 'move' to
    the next stage (or to stage ``to``). Who freezes may be ``SUSPENDED``. A fault with ``on`` waits, from
    ``at_s`` on, for the ``nth`` frame of that kind that the first of ``who`` would send, and begins before that frame
    leaves: the peer dies instead, the frame is damaged, or finds its link cut.
    'corrupt': ``who`` computes wrongly (``how``: see ``proofs.faulty``). 'hang': no operation of its device ends,
    while its event loop answers. 'one way': the first of ``who`` does not reach the second, which reaches it. 'small':
    between the two only frames of up to ``limit`` bytes pass. 'lie': ``who`` lies to the others (``how``: see
    ``proofs.lying``). 'kick': all others refuse ``who`` from now on. 'stop': it asks for the run's orderly end.
    'disk': the disk that ``who`` writes checkpoints to is 'slow', 'hangs', or is 'full' (``how``). 'directory': it
    answers nobody. A 'join' may come under the name ``how`` of another."""

    at_s: float
    kind: str
    who: tuple[str, ...]
    for_s: float = 0.0
    on: str = ""
    nth: int = 1
    how: str = ""
    to: int | None = None
    limit: int = 0

    def __str__(self) -> str:
        lasting = f" for {self.for_s:.1f} s" if self.for_s else ""
        exactly = f" at {self.on} {self.nth}" if self.on else ""
        how = f" ({self.how})" if self.how else "" if self.to is None else f" to stage {self.to}"
        return f"{self.kind}{how} {', '.join(self.who)}{lasting}{exactly}"


@dataclass(frozen=True)
class Scenario:
    """A run to be: ``stages[k]`` replicas of stage k, the first ``trainers`` peers train, ``delay_s`` the longest
    one-way delay."""

    seed: int
    stages: tuple[int, ...]
    trainers: int
    steps: int
    microbatches: int
    delay_s: float
    faults: tuple[Fault, ...]
    rebalance: Literal["off", "paper", "throughput"] = "off"
    rebalance_s: float = 60.0
    capacity: int = 8
    """Requests a peer holds at once."""
    overrides: tuple[str, ...] = ()
    """Other settings of the run."""
    sequences: int = 1
    """Sequences of a microbatch."""
    clients: tuple[str, ...] = ()
    """Clients of a hub, by name (client-1a); empty: none, and no hub."""
    swapped: tuple[str, ...] = ()
    """Peers whose device is smaller than their stage."""
    narrow: tuple[tuple[str, float], ...] = ()
    """Peers, and the bytes/s that their links carry each way; those of all others are wide."""
    queue_s: float = QUEUE_S
    """Data that wait in front of each direction of a narrow link, at most."""
    longer: float = 1.0
    """Large tensors, or slow devices: a step takes so many times as long."""
    slower: float = 1.0
    """A microbatch takes a device so many times as long."""
    weight: float = 1.0
    """Bytes that each byte of a tensor counts for on narrow links."""
    relays: bool = False
    """Members carry for those that are cut off from each other."""
    checkpoint_every: int = 0
    """Steps; 0: only at the end."""
    adopt_after_s: float = 30.0
    """``Plan.adopt_after_s``."""
    apart: bool = False
    """Peers write checkpoints to places of their own."""
    tolerance: float = TOLERANCE
    """Norm of the difference over norm, per tensor, that the weights may have from those of a single process."""
    skew: float = 0.0
    """How much faster or slower than the others' a peer's clock may run: by a factor of e^skew; they show any time."""
    stalls: float = 0.0
    """Share of frames that are held up for up to ``STALL_S``, while what goes by other streams overtakes them."""
    trace: bool = False
    """Peers tell what their slots do, too."""
    share: bool = False
    """Those that do not train at first, and newcomers, have no data: the trainers share theirs (``data.share``)."""
    same_bits: bool = True
    """All peers' devices round alike."""
    kinds: tuple[str, ...] = ()
    """What was drawn beside the base (``draws.KINDS``)."""
    without_data: tuple[str, ...] = ()
    """Newcomers that cannot train."""
    time_limit_s: float | None = None
    """``train.time_limit``."""
    keep: int = 1
    """``checkpoint.keep``."""
    disk_s: float = 0.0
    """Time that a call to a disk takes, on the average."""
    log_bytes: int = 1 << 28
    """Bytes of past gradients that each peer keeps (``runtime.peer.peer``)."""
    short: bool = False
    """Peers remember little (``proofs.play``): what long runs reach, this one does, too."""
    resume_s: float | None = None
    """Then all machines lose power; the run is begun again from what was written."""
    speakers: bool = False
    """Few peers speak for their stage, as in runs of more than ``policy.speakers.DIRECT`` peers."""
    given_weights: bool = False
    """The first weights are not drawn, as with ``model.from``."""

    @property
    def step_s(self) -> float:
        """About the time of a step without faults [s]."""
        return self.longer * self.microbatches * (FORWARD_S + BACKWARD_S) / min(self.stages)

    @property
    def bound_s(self) -> float:
        """Time that the next step may take once no fault goes on: half a minute, and two usual steps [s]."""
        return 30.0 + 2 * self.step_s

    @property
    def members(self) -> list[tuple[str, int]]:
        """(id, stage), stage by stage."""
        return [(f"peer-{s}{chr(97 + k)}", s) for s, replicas in enumerate(self.stages) for k in range(replicas)]

    @property
    def whole_sides(self) -> list[set[str]]:
        """Of a partition: those with a member of each stage, and a trainer."""
        members, stages = {p for p, _ in self.members}, set(range(len(self.stages)))
        trainers = {p for p, _ in self.members[: self.trainers]}
        faults = [f for f in self.faults if f.kind in SIDES]
        if len(faults) > 1:  # a side may be parted itself
            return []
        sides = [side for f in faults for side in (set(f.who) & members, members - set(f.who))]
        return [side for side in sides if {stage_of(p) for p in side} == stages and side & trainers]

    @property
    def joining(self) -> list[str]:
        return [p for f in self.faults if f.kind == "join" for p in f.who]

    @property
    def names(self) -> list[str]:
        """Everyone that is ever there."""
        return [*(p for p, _ in self.members), *self.clients, *self.joining]

    @property
    def alone(self) -> bool:
        """``Plan.alone``."""
        return len(self.names) == 1


def planned(stages: tuple[int, ...], schedule: str | None, *, shared: bool = False) -> tuple[str, ...]:
    """Settings of a run with so many replicas: as many pipelines as the smallest stage has, the rest are spares; or
    (``shared``) as the largest has, and those of the others serve several. None: nothing is planned."""
    if schedule is None:
        return ()
    pipelines = max(stages) if shared else min(stages)
    names = [[f"peer-{s}{chr(97 + p % replicas)}" for p in range(pipelines)] for s, replicas in enumerate(stages)]
    return f"pipeline.seats={names}", f'pipeline.schedule="{schedule}"'


def stage_of(name: str) -> int:
    """Names of virtual peers say which stage they begin with: peer-1b."""
    return int(name.split("-")[1][0])
