"""Play steps of a settled fleet microbatch by microbatch without messages: the prediction of ``muletrain plan``.

Production policies choose receivers (``policy.wiring``, ``strategies``), links are shared as in production (``wires``),
and steps end the same way (``endings``). No peer fails, joins, leaves or moves, so deadlines, probes and records are
left out, and a step takes milliseconds.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from muletrain.policy.wiring import Wiring, claimant
from muletrain.sim.steps.endings import Endings
from muletrain.sim.steps.wires import Wires
from muletrain.strategies.swarm import SWARM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muletrain.sim.setting import Setting
    from muletrain.sim.steps.endings import End
    from muletrain.strategies.base import Strategy

ENOUGH, DRAWN = 240, 960
"""Fewest microbatches to play, in whole steps: each trainer's number is drawn anew for each step. ``DRAWN``: for
strategies that also draw receivers, because a step waits for a slow machine with one microbatch more (fleet 104 of
benchmarks/plan: steps of 13 to 18 s)."""
RETRY_S = 0.05
"""Seconds after which a sender whose receivers are all full tries again (``runtime.microbatch.dispatcher``)."""
NOBODY = -1


@dataclass(frozen=True)
class Cast:
    """The peers of a play. ``peers``: (stage, kind); ``trainers``: indices of peers that build microbatches;
    ``names``: if a plan names the peers."""

    peers: tuple[tuple[int, int], ...]
    trainers: tuple[int, ...]
    strategy: Strategy
    names: tuple[str, ...] = ()


def cast(setting: Setting, serving: Sequence[Sequence[int]], trainers: int) -> Cast:
    """Cast strategy swarm. ``serving``: by stage and kind. Trainers are machines that stay, of as many kinds as
    possible, and in the first stage if the kind is there."""
    peers = tuple((s, k) for s, counts in enumerate(serving) for k, n in enumerate(counts) for _ in range(n))
    turns = defaultdict[int, int](int)
    ranked = []
    for p, (_, k) in enumerate(peers):
        ranked.append((not setting.kinds[k].reliable, turns[k], k, p))
        turns[k] += 1
    return Cast(peers, tuple(p for *_, p in sorted(ranked)[:trainers]), SWARM)


class Took(NamedTuple):
    """Means over a few steps [s]. ``computing_s``: until the last microbatch is done; the end of the step follows."""

    step_s: float
    computing_s: float


def steps_of(setting: Setting, strategy: Strategy) -> int:
    """Number of steps to play."""
    return max(1, math.ceil((ENOUGH if strategy.fixed else DRAWN) / setting.cost.microbatches))


def play(setting: Setting, who: Cast, *, delayed: bool = False) -> Took:
    """Play steps after senders have measured all receivers. ``delayed``: each step is averaged during the next step;
    the first step has no such overlap."""
    steps, first = steps_of(setting, who.strategy), 1 + delayed
    played = _Play(setting, who, delayed=delayed).run(first + steps)
    ends = played[first:]
    step_s = (ends[-1].over_s - played[first - 1].over_s) / steps
    if delayed:
        return Took(step_s, min(step_s, sum(end.through_s - end.begun_s for end in ends) / steps))
    return Took(step_s, max(0.0, step_s - sum(end.over_s - end.through_s for end in ends) / steps))


@dataclass(eq=False)
class _Request:
    """One microbatch at one stage, for ``sender``."""

    step: int
    index: int
    sender: int
    answer: Callable[[float, float], None]
    """Called when the answer arrives, with the receiver's compute and wait [s]."""
    admitted_s: float = 0.0


@dataclass(eq=False)
class _Peer:
    stage: int
    forward_s: float
    backward_s: float
    room: float
    """Most microbatches with a forward begun and a backward pending, minus the present ones (1F1B)."""
    backward_first: bool
    step: int = 0
    """The step that the peer computes."""
    held: int = 0
    """Microbatches at the peer or on the way there."""
    computing: bool = False
    waiting: tuple[deque[_Work], deque[_Work]] = field(default_factory=lambda: (deque(), deque()))
    """Work for the device: urgent, and not urgent."""
    blocked: deque[_Request] = field(default_factory=deque)
    """Requests that wait for room."""
    early: list[_Request] = field(default_factory=list)
    """Requests of a later step."""


_Work = tuple[float, "Callable[[], None]"]
"""Seconds of work, and the continuation."""


class _Play:
    def __init__(self, setting: Setting, who: Cast, *, delayed: bool) -> None:
        self._cost, self._who, self._last = setting.cost, who, len(setting.cut) - 1
        self._wires = Wires(setting, [k for _, k in who.peers], coupled=not who.strategy.fixed)
        stages = [s for s, _ in who.peers]
        self._endings = Endings(self._wires, setting.cost, stages, len(who.trainers), self._open, delayed=delayed)
        self._at = [[p for p, s in enumerate(stages) if s == stage] for stage in range(len(setting.cut))]
        names = who.names or tuple(map(str, range(len(stages))))
        self._there = [{names[p]: p for p in here} for here in self._at]
        orders = [who.strategy.order(s, name) for s, name in zip(stages, names, strict=True)]
        self._peers = [
            _Peer(
                s,
                setting.kinds[k].forward_s[s],
                setting.kinds[k].backward_s[s],
                order.most_between or math.inf,
                order.backward_first,
            )
            for (s, k), order in zip(who.peers, orders, strict=True)
        ]
        self._capacity = who.strategy.capacity(len(setting.cut))
        self._trainers = {f"trainer {t}": t for t in who.trainers}
        self._left: dict[tuple[int, int], int] = {}
        """Microbatches, by trainer and step."""
        self._windows = defaultdict[tuple[int, int, int], _Window](lambda: _Window(self._window()))
        """By trainer, step and lane."""
        self._wirings: dict[tuple[int, int], Wiring] = {}
        self._owed = defaultdict[tuple[int, int], dict[str, int]](lambda: defaultdict(int))
        """By sender and stage, then receiver."""

    def run(self, steps: int) -> list[End]:
        """Play ``steps``; return the end of each step."""
        for p in range(len(self._peers)):
            self._open(p, 0)
        last = self._endings.of[steps - 1]
        self._wires.run(lambda: len(last.applied) == len(self._peers))
        return [self._endings.of[step] for step in range(steps)]

    def _open(self, p: int, step: int) -> None:
        """A peer computes ``step`` from now on."""
        peer = self._peers[p]
        peer.step, early = step, peer.early
        peer.early = []
        for request in early:
            self._admit(p, request)
        if p in self._who.trainers:
            self._train(p, step)

    # Trainers ---------------------------------------------------------------------------------------------------------

    def _train(self, trainer: int, step: int) -> None:
        every = range(self._cost.microbatches)
        self._endings.begin(step)
        mine = [i for i in every if self._trainers[claimant(step, i, self._trainers)] == trainer]
        self._left[trainer, step] = len(mine)
        for index in mine:
            window = self._windows[trainer, step, self._who.strategy.lane(index)]
            through = partial(self._built, trainer, step, window)
            window.enter(partial(self._request, trainer, 0, step, index, through))
        if not mine:
            self._endings.through(trainer, step)

    def _window(self) -> int:
        return self._who.strategy.window(self._capacity, list(map(len, self._at)), len(self._who.trainers))

    def _built(self, trainer: int, step: int, window: _Window) -> None:
        window.leave()
        self._left[trainer, step] -= 1
        if not self._left[trainer, step]:
            self._endings.through(trainer, step)

    # Senders ----------------------------------------------------------------------------------------------------------

    def _request(self, sender: int, stage: int, step: int, index: int, then: Callable[[], None]) -> None:
        receiver = self._choose(sender, stage, step, index)
        if receiver == NOBODY:
            self._wires.after(RETRY_S, partial(self._request, sender, stage, step, index, then))
            return
        key, name, begun_s = (sender, stage), str(receiver), self._wires.now_s
        self._owed[key][name] += 1
        self._peers[receiver].held += 1

        def answer(busy_s: float, away_s: float) -> None:
            self._owed[key][name] -= 1
            if key in self._wirings:
                way_s = self._wires.now_s - begun_s - busy_s - away_s
                self._wirings[key].measured(name, max(busy_s, 1e-6), way_s, self._wires.now_s)
            then()

        request = _Request(step, index, sender, answer)
        self._wires.send(sender, receiver, self._cost.forward_bytes[stage], partial(self._admit, receiver, request))

    def _choose(self, sender: int, stage: int, step: int, index: int) -> int:
        """Choose as ``Dispatcher._choose`` (``runtime.microbatch``) does if no peer is down or suspected: a copy."""
        chosen = self._who.strategy.choose(stage, index, self._there[stage].keys())
        if len(chosen) == 1:
            return self._there[stage][chosen[0]]
        if (sender, stage) not in self._wirings:
            self._wirings[sender, stage] = self._wired(sender, stage)
        full = [str(p) for p in self._at[stage] if self._peers[p].held >= self._capacity]
        owed, now_s = self._owed[sender, stage], self._wires.now_s
        others = {str(p) for name, p in self._there[stage].items() if chosen and name not in chosen}
        found = self._wirings[sender, stage].choose(others, owed, full=full, step=step, now_s=now_s)
        return NOBODY if found is None else int(found)

    def _wired(self, sender: int, stage: int) -> Wiring:
        """A wiring in which each receiver was tried once, alone."""
        wiring, cost = Wiring(random.Random(f"steps/{sender}/{stage}")), self._cost
        takes_s = {p: max(self._peers[p].forward_s + self._peers[p].backward_s, 1e-6) for p in self._at[stage]}
        wiring.serve({str(p): seconds for p, seconds in takes_s.items()})
        for p, seconds in takes_s.items():
            way_s = self._wires.alone_s(sender, p, cost.forward_bytes[stage], cost.backward_bytes[stage])
            wiring.measured(str(p), seconds, way_s)
        return wiring

    # Receivers --------------------------------------------------------------------------------------------------------

    def _admit(self, p: int, request: _Request) -> None:
        peer = self._peers[p]
        if request.step > peer.step:
            peer.early.append(request)
            return
        request.admitted_s = self._wires.now_s
        if peer.stage == self._last:
            self._device(p, peer.forward_s + peer.backward_s, partial(self._answer, p, request), backward=False)
        elif peer.room:
            self._begin(p, request)
        else:
            peer.blocked.append(request)

    def _begin(self, p: int, request: _Request) -> None:
        """Run forward, the later stages and backward."""
        peer = self._peers[p]
        peer.room -= 1
        done = partial(self._done, p, request)
        backward = partial(self._device, p, peer.backward_s, done, backward=True)
        onward = partial(self._request, p, peer.stage + 1, request.step, request.index, backward)
        self._device(p, peer.forward_s, onward, backward=False)

    def _done(self, p: int, request: _Request) -> None:
        peer = self._peers[p]
        peer.room += 1
        if peer.blocked:
            self._begin(p, peer.blocked.popleft())
        self._answer(p, request)

    def _device(self, p: int, seconds: float, then: Callable[[], None], *, backward: bool) -> None:
        self._peers[p].waiting[backward != self._peers[p].backward_first].append((seconds, then))
        self._compute(p)

    def _compute(self, p: int) -> None:
        peer = self._peers[p]
        if peer.computing or not any(peer.waiting):
            return
        peer.computing = True
        seconds, then = (peer.waiting[0] or peer.waiting[1]).popleft()
        self._wires.after(seconds, partial(self._computed, p, then))

    def _computed(self, p: int, then: Callable[[], None]) -> None:
        self._peers[p].computing = False
        then()
        self._compute(p)

    def _answer(self, p: int, request: _Request) -> None:
        peer = self._peers[p]
        peer.held -= 1
        busy_s = peer.forward_s + peer.backward_s
        away_s = self._wires.now_s - request.admitted_s - busy_s
        nbytes = self._cost.backward_bytes[peer.stage]
        self._wires.send(p, request.sender, nbytes, partial(request.answer, busy_s, away_s))


class _Window:
    """Bounds the microbatches that a trainer has in flight."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._waiting: deque[Callable[[], None]] = deque()

    def enter(self, then: Callable[[], None]) -> None:
        if self._places:
            self._places -= 1
            then()
        else:
            self._waiting.append(then)

    def leave(self) -> None:
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._places += 1
