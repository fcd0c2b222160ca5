"""These rules decide which peer serves which stage: here are the view of the members that every rule gets, and two
rules: the stage of a newcomer, and the peers that fill stages without any peer. The third rule, for moves during the
run, is in ``policy.rebalance``.

All are pure functions of the view, so peers that see the same decide the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NOWHERE = -1
"""Stage of a newcomer."""


@dataclass(frozen=True)
class Load:
    """Facts about one peer. Each rule looks at some fields; defaults mean unknown."""

    stage: int
    """The served stage; ``NOWHERE``: none yet."""
    queue: float = 0.0
    """Waiting requests: the paper's measure of load."""
    speeds: Mapping[int, float] = field(default_factory=dict)
    """Measured microbatches/s (forward and backward), by stage; perhaps also of earlier stages."""
    bytes_per_s: float = math.inf
    """Rate of copying another stage's state."""
    targets: frozenset[int] | None = None
    """Stages that the peer could serve instead, by memory; empty for a peer that must stay; None: all."""
    alike: int = 1
    """Peers that this entry stands for, in simulations of large fleets: a move names the first, and means any one."""
    name: str = ""
    """Name in a plan."""
    device: str | None = None
    """Kind of device, since arithmetic differs in the last bit between kinds; None: unknown."""
    quarters: Sequence[int] = ()
    """Quarters of a newcomer's memory that each stage takes."""
    parts: frozenset[int] = frozenset()
    """Stages with a checkpoint part that the peer can read."""
    prepares_s: Sequence[float] = ()
    """Seconds, by stage, for which the peer goes on where it is while weights beside that stage's state come; (): none."""

    def may_move_to(self, stage: int) -> bool:
        return self.targets is None or stage in self.targets

    def prepares(self, stage: int) -> float:
        return self.prepares_s[stage] if stage < len(self.prepares_s) else 0.0


@dataclass(frozen=True)
class View:
    """Everything that a rule may look at. ``work``: cost of a microbatch at each stage, any unit; ``state_bytes``:
    copied by a newcomer."""

    loads: Mapping[str, Load]
    """Load of each peer, by id. Newcomers are placed one after the other, in this order."""
    work: Sequence[float]
    state_bytes: Sequence[float] = ()
    stopped: bool = False
    """The run rolls back because of stages without peers. Empty stages must be filled; moving peers costs nothing
    now."""
    rule: Literal["off", "paper", "throughput"] = "throughput"
    """How peers move while the run goes on and no peer was lost (``fleet.rebalance``)."""
    horizon_s: float = math.inf
    """Seconds within which such a move must pay for itself."""

    @property
    def stages(self) -> int:
        return len(self.work)

    @property
    def newcomers(self) -> list[str]:
        return [peer for peer, load in self.loads.items() if load.stage == NOWHERE]

    def served(self) -> list[list[str]]:
        """Returns the peers by stage, sorted. Announcements for a stage that the run does not have are left out."""
        found: list[list[str]] = [[] for _ in self.work]
        for peer in sorted(self.loads):
            if 0 <= self.loads[peer].stage < self.stages:
                found[self.loads[peer].stage].append(peer)
        return found


@dataclass(frozen=True)
class Move:
    """``peer`` leaves ``source`` and serves ``target``."""

    peer: str
    source: int
    target: int
    measured: bool = False
    """Based on measured speeds, which vary on a busy machine: must be confirmed by a second view
    (``rebalance.Confirmed``)."""
    why: str = ""
    """Why ``target`` needs a peer, in words; empty: highest load."""


def placed(view: View) -> tuple[Move, ...]:
    """Places each newcomer at the most loaded possible stage. Stages without a different kind of device come first,
    then unserved stages, largest share of the newcomer's memory first, but stages that the newcomer would have to swap
    last; the lowest stage among equals. A newcomer that can serve no stage is left out."""
    served, devices = [0] * view.stages, [set[str]() for _ in view.work]
    for load in view.loads.values():
        if 0 <= load.stage < view.stages:
            served[load.stage] += load.alike
            devices[load.stage] |= set() if load.device is None else {load.device}
    moves = []
    for peer in view.newcomers:
        own = view.loads[peer]
        able = [s for s in range(view.stages) if own.may_move_to(s)]
        unmixed = [s for s in able if own.device is None or devices[s] <= {own.device}]
        if able:
            target = max(unmixed or able, key=lambda s: _urgency(s, served, view.work, own.quarters))
            served[target] += 1
            devices[target] |= set() if own.device is None else {own.device}
            moves.append(Move(peer, NOWHERE, target))
    return tuple(moves)


def _urgency(
    stage: int, served: Sequence[int], work: Sequence[float], quarters: Sequence[int]
) -> tuple[float, int, int]:
    if served[stage]:
        return work[stage] / served[stage], 0, -stage
    share = quarters[stage] if quarters else 0
    return math.inf, share if share < 4 else -share, -stage  # four quarters are all memory: the stage is swapped


def filled(view: View) -> tuple[Move, ...]:
    """Returns the moves after which each stage has a peer, as far as peers are available.

    Stages with the most work come first. A peer comes from the stage with most peers per work left, and is never the
    last one there. A peer that already has a part of the lost stage is preferred, then the first by id.
    """
    serving = view.served()
    lost = sorted((s for s, peers in enumerate(serving) if not peers), key=lambda s: (-view.work[s], s))
    moves = []
    for stage in lost:
        able = [
            (-len(peers) / max(view.work[source], 1e-12), stage not in view.loads[p].parts, p, source)
            for source, peers in enumerate(serving)
            if len(peers) > 1
            for p in peers
            if view.loads[p].may_move_to(stage)
        ]
        if able:
            *_, peer, source = min(able)
            serving[source].remove(peer)
            moves.append(Move(peer, source, stage))
    return tuple(moves)
