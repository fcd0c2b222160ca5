"""Injects the faults of a chaos plan (``policy/chaos.py``) into a local fleet: signals to processes, lines to workers.

Every injection is a ``FaultInjected`` event in the run folder, for comparison with detected faults. For a fault at an
exact point of a step, the target is told two steps before and injects the fault itself (``Points``): no other process
could hit that point.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import random
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError
from muletrain.events import (
    ClientBegan,
    EventLog,
    FaultInjected,
    PeerJoined,
    RunFinished,
    RunStarted,
    StepApplied,
    StepDone,
)
from muletrain.policy.chaos import PHASES, readable
from muletrain.runs.worker_files import LEFT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from muletrain.compute.base import Compute
    from muletrain.events import Event
    from muletrain.network.libp2p import Libp2pNetwork
    from muletrain.policy.chaos import Fault, Phase
    from muletrain.runs.fleet import LocalFleet
    from muletrain.runs.spec import WorkerSpec


AHEAD = 2
"""Steps between the choice of the victim and the exact point of its fault."""


@dataclass(frozen=True)
class _Lasting:
    """A fault in effect."""

    fault: Fault
    who: tuple[str, ...]
    until: float


class Injector:
    """Injects the faults of a plan. Pass every event to ``see``, and call ``tick`` often. A fault waits for a suitable
    target."""

    def __init__(
        self,
        plan: Sequence[Fault],
        seed: int,
        fleet: LocalFleet,
        folder: Path,
        names: Sequence[str],
        clients: Sequence[str] = (),
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``names``: the fleet's peers, in the order in which the sides of a partition count them; ``clients``: the
        fleet's clients, which compute for the peers and which no partition cuts off. ``seed`` decides which peer 'any'
        is."""
        self._waiting, self._founding = list(plan), frozenset(names)
        self._fleet, self._names, self._now = fleet, list(names), now
        self._rng = random.Random(f"targets/{seed}")
        self._log = EventLog(folder / "chaos.jsonl", "chaos")
        self._log.note(f"chaos plan: {readable(plan)}")
        self._peers: dict[str, PeerJoined] = {}
        self._clients = dict.fromkeys(clients, False)
        """Whether each client is at work."""
        self._coordinator = ""
        self._began: float | None = None
        self._over = False
        """Has a peer come to the run's end?"""
        self._step = 0
        self._lasting: list[_Lasting] = []
        self._away: set[str] = set()
        """Peers that were frozen, cut off or moved, and have finished no step since: perhaps behind."""
        self._moving: set[str] = set()
        """Peers that were asked to serve another stage, and are not there yet."""
        self._killed: set[str] = set()
        """Peers that we killed; a process may take a moment to end."""
        self._told: dict[str, Fault] = {}
        """Peers that will inject a fault into themselves at an exact point."""
        self.newcomer: WorkerSpec | None = None
        """The spec of a peer that joins later, except for the name."""

    def see(self, event: Event) -> None:
        match event:
            case PeerJoined():
                self._peers[event.name] = event
                self._moving.discard(event.name)
                if self._began is not None:
                    self._away.add(event.name)
            case ClientBegan() if event.name in self._clients:
                self._clients[event.name] = True
            case FaultInjected() if event.peer != "chaos":
                self._happened(event)
            case RunFinished() if event.reason != LEFT:
                self._over = True
            case RunStarted():
                self._began, self._coordinator, self._step = self._now(), event.peer, event.first_step
            case StepDone():
                self._step = max(self._step, event.step)
            case StepApplied() if not any(event.peer in lasting.who for lasting in self._lasting):
                self._away.discard(event.peer)
            case _:
                pass

    def tick(self) -> None:
        """Inject faults that are due, and end faults that are over."""
        running = self._running()
        for name in self._told.keys() - running:  # ended before the point
            self._waiting.append(self._told.pop(name))
        for lasting in list(self._lasting):
            if self._now() >= lasting.until:
                self._end(lasting)
            elif lasting.fault.kind == "freeze" and self._over and running <= set(lasting.who):
                self._log.note(f"chaos: the run ended while {lasting.who[0]} was frozen", "warning")
                self._fleet.signal(lasting.who[0], signal.SIGKILL)
                self._lasting.remove(lasting)
        if self._began is None or not running:
            return
        for fault in list(self._waiting):
            if self._is_due(fault, self._began) and (who := self._targets(fault)):
                self._waiting.remove(fault)
                self._inject(fault, who)

    def close(self) -> None:
        """Report faults that could not be injected."""
        if missed := [*self._waiting, *self._told.values()]:
            self._log.note(f"chaos: not injected, for want of time or of a target: {readable(missed)}", "warning")
        self._log.close()

    def _is_due(self, fault: Fault, began: float) -> bool:
        if fault.at_s is not None:
            return self._now() >= began + fault.at_s
        ahead = AHEAD if fault.phase is not None else 0
        return fault.step is not None and self._step >= fault.step - ahead

    def _running(self) -> set[str]:
        return set(self._fleet.alive()) - self._killed

    # Who ------------------------------------------------------------------------------------------------------------

    def _targets(self, fault: Fault) -> tuple[str, ...]:
        """The peers that ``fault`` hits; empty: no peer fits now."""
        if fault.kind == "join":
            return (f"peer-{len(self._names)}",)
        alive = self._running()
        running = [name for name in self._names if name in alive and name in self._peers]
        affected = {name for lasting in self._lasting for name in lasting.who} | self._told.keys()
        if fault.kind == "partition":
            return () if any(x.fault.kind == "partition" for x in self._lasting) else tuple(self._names)
        meant = [name for name in running if self._is_meant(name, fault.target) and name not in affected]
        helping = [n for n in self._helping(fault) if n in alive and n not in affected]
        if fault.kind == "move":
            free = [n for n in meant if n not in {self._coordinator, *self._away, *self._moving}]
            meant = [n for n in free if self._peers[n].stage != fault.stage and self._is_spared(n, running)]
        if fault.kind == "kill":
            spared = [name for name in meant if name != self._coordinator and self._is_spared(name, running)]
            meant = spared if spared or fault.target in ("any", "server", "newcomer", "trainer") else meant
        meant += helping
        return (self._rng.choice(meant),) if meant else ()

    def _helping(self, fault: Fault) -> list[str]:
        """Clients at work that ``fault`` may hit. Clients do no steps, so a fault at a point of a step hits no client.
        'any' corrupts no client: the client's server would be blamed."""
        if fault.kind not in ("kill", "freeze", "corrupt") or fault.phase is not None:
            return []
        targets = {"client"} if fault.kind == "corrupt" else {"any", "client"}
        return [name for name, at_work in self._clients.items() if at_work and fault.target in {*targets, name}]

    def _is_meant(self, name: str, target: str) -> bool:
        peer = self._peers[name]
        roles = {"trainer": peer.trainer, "newcomer": name not in self._founding, "server": True}
        return target in ("any", name, f"stage{peer.stage}") or roles.get(target, False)

    def _is_spared(self, name: str, running: list[str]) -> bool:
        """Does the stage of ``name`` have another peer that is up to date and stays?"""
        stage, unsure = self._peers[name].stage, {name, *self._away, *self._moving, *self._told}
        return any(other not in unsure and self._peers[other].stage == stage for other in running)

    # What -----------------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault, who: tuple[str, ...]) -> None:
        event = FaultInjected(what=fault.kind, who=list(who), for_s=fault.for_s, planned=str(fault), step=self._step)
        if fault.phase is not None:
            self._told[who[0]] = fault
            self._fleet.tell(who[0], f"at {fault.step} {fault.phase} {event.to_json()}")
            return
        self._log.emit(event)  # before anybody can notice the fault
        match fault.kind:
            case "kill":
                self._killed.add(who[0])
                self._fleet.signal(who[0], signal.SIGKILL)
            case "freeze":
                self._fleet.signal(who[0], signal.SIGSTOP)
            case "corrupt":
                self._fleet.tell(who[0], "corrupt")
            case "move":
                self._moving.add(who[0])
                self._fleet.tell(who[0], f"move {fault.stage}")
            case "partition":
                for side in self._sides(fault.sides):
                    for name in side:
                        self._fleet.tell(name, " ".join(["cut", *(n for n in self._names if n not in side)]))
            case "join":
                assert self.newcomer is not None  # the run has begun, so there is a ticket
                self._names.append(who[0])
                self._fleet.spawn([who[0]])
                self._fleet.begin(self.newcomer.model_copy(update={"name": who[0]}))
        self._lasts(fault, who)

    def _lasts(self, fault: Fault, who: tuple[str, ...]) -> None:
        if fault.for_s:
            self._lasting.append(_Lasting(fault, who, self._now() + fault.for_s))
            self._away.update(who)

    def _happened(self, event: FaultInjected) -> None:
        """Record a fault that a peer reports to have injected into itself."""
        if (fault := self._told.pop(event.peer, None)) is not None:
            self._lasts(fault, (event.peer,))
            if fault.kind == "kill":
                self._killed.add(event.peer)

    def _end(self, lasting: _Lasting) -> None:
        self._lasting.remove(lasting)
        for name in lasting.who:
            if lasting.fault.kind == "freeze":
                self._fleet.signal(name, signal.SIGCONT)
            else:
                self._fleet.tell(name, "cut")
        self._log.note(f"chaos: over: {lasting.fault.kind} {', '.join(lasting.who)}")

    def _sides(self, sizes: tuple[int, ...]) -> list[list[str]]:
        """Names on each side of a partition. Newcomers are on the last side."""
        ends = [sum(sizes[:k]) for k in range(len(sizes))] + [len(self._names)]
        return [self._names[a:b] for a, b in itertools.pairwise(ends)]


class Points:
    """Injects faults into this process, each at an exact point of a step."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._waiting: list[tuple[int, str, FaultInjected]] = []
        self._network: Libp2pNetwork | None = None

    def add(self, network: Libp2pNetwork, step: str, phase: str, event: str) -> None:
        """Add the fault in the injector's line. Raises MuletrainError for an unknown point."""
        if not step.isdecimal() or phase not in PHASES:
            raise MuletrainError(f"step {step!r}, {phase!r}: no such point")
        self._network = network
        self._waiting.append((int(step), phase, FaultInjected.from_json(event)))

    def reached(self, phase: Phase, step: int) -> None:
        """The peer is at ``phase`` of ``step``, counted from 0 (``Context.reached``)."""
        for waiting in [w for w in self._waiting if w[1] == phase and w[0] <= step + 1]:
            self._waiting.remove(waiting)
            event = dataclasses.replace(waiting[2], step=step)
            self._log.emit(event)  # the event must be on the disk before we die
            if event.what == "corrupt":
                assert self._network is not None
                self._network.damage_next()
            else:
                os.killpg(0, signal.SIGKILL if event.what == "kill" else signal.SIGSTOP)


def spoil_next(compute: Compute) -> None:
    """Make a gradient of ``compute`` not finite, as faulty memory would: the first one of a later step than the current
    one, which may be sealed already. Damage after the seal is no longer computed again; the update is then skipped. An
    all-zero gradient (no microbatches) is passed over, because a fault there would not matter."""
    right, current = compute.gradient, math.inf

    async def gradient(step: int) -> Tensor:
        nonlocal current
        current = min(current, step)
        accumulated = await right(step)
        if step > current and accumulated.any():
            compute.gradient = right  # type: ignore[method-assign]
            accumulated[:1] = math.nan
        return accumulated

    compute.gradient = gradient  # type: ignore[method-assign]
