"""Find a hub by simulated annealing on the true objective (eq. 2 of HYBRID, see ``hub_task``): groups, order, roles,
clients and layers together.

A state is the ordered stages, each with frontal and backward servers and clients; the other machines are idle. The best
layers of a state are found at once (``Pace.of``). The slowest stage alone would not tell which stage could relieve it,
so the time with arbitrarily divisible layers is added as a guide. Chains begin with HYBRID's solution for each number
of stages; the best continue.
"""

from __future__ import annotations

import math
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean

from muletrain.errors import CapacityError
from muletrain.planning import hub_clustering
from muletrain.planning.hub_pace import Group, Pace
from muletrain.planning.hub_task import HubStage, HubTask, evaluate
from muletrain.planning.partition import Capacity, partition_chain

HOT, COLD = (0.03, 0.1), 2e-4
"""First temperatures (by chain, in turn) and the last one, as shares of the time."""
GUIDE = 1.0
"""Weight of the guide."""
ROUNDS = ((12, 50), (4, 150), (2, 500))
"""Chains of each round, and moves per device of each chain."""
LEAST = 4
"""Fewest chains of the first round; with fewer beginnings, several share one."""
MOVE_S, PAIR_S = 1.5e-4, 2e-7
"""Seconds of a move on a slow core, and per pair of devices of a stage; they limit the moves to the time limit."""
PROGRESS = 50
"""Moves between two checks of the clock."""

State = tuple[Group, ...]


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    stages: tuple[HubStage, ...]
    tried: int
    """Number of allocations that were tried."""
    complete: bool
    """True: all moves were made before the time limit."""


def search(task: HubTask, *, seed: int, stages: int | None, time_limit_s: float) -> Found:
    """Search; never slower by eq. 2 than ``hub_clustering.allocate`` with the same seed and number of stages. Raises
    CapacityError if no stages fit."""
    deadline = time.monotonic() + time_limit_s
    rng, pace = random.Random(seed), Pace(task)
    solutions = _heuristics(task, seed, stages)
    chains = [tuple(Group(s.frontal, s.backward, s.clients) for s in solution) for solution in solutions]
    chains += [] if chains else [_by_memory(task, stages)]
    chains *= -(-LEAST // len(chains)) if len(chains) < LEAST else 1
    tried, complete = len(chains), True
    chains.sort(key=lambda state: pace.of(state)[0])
    share = _affordable(task, chains[: ROUNDS[0][0]], time_limit_s)
    for count, moves in ROUNDS:
        chains = sorted(chains, key=lambda state: pace.of(state)[0])[:count]
        annealed = []
        for n, state in enumerate(chains):
            chain = Walk(task, pace, state, rng, fixed=stages is not None)
            complete = complete and chain.run(int(share * moves * len(task.flops)), HOT[n % len(HOT)], deadline)
            tried += chain.moves
            annealed.append(chain.best)
        chains = annealed
    solutions += [found for state in chains if (found := with_layers(task, pace, state))]
    best: list[HubStage] = min(solutions, key=lambda solution: evaluate(task, solution).step_s)
    return Found(tuple(best), tried, complete)


def _affordable(task: HubTask, chains: list[State], time_limit_s: float) -> float:
    """Share of the moves that fit into the time limit. It depends on no clock: the same seed and limit find the
    same."""
    pairs = fmean(max(len(group.servers) + len(group.clients) for group in state) ** 2 for state in chains)
    moves = len(task.flops) * sum(min(count, len(chains)) * moves for count, moves in ROUNDS)
    return min(1.0, time_limit_s / (moves * (MOVE_S + PAIR_S * pairs)))


def _heuristics(task: HubTask, seed: int, stages: int | None) -> list[list[HubStage]]:
    """The paper's solution, and those with other numbers of stages if allowed."""
    edges = hub_clustering.distances(task)
    found = []
    with suppress(CapacityError):
        found.append(hub_clustering.allocate(task, seed=seed, stages=stages))
    if stages is None:
        found += [hub_clustering.assemble(task, ordered, edges) for ordered in hub_clustering.orders(task, edges, seed)]
    return found


def _by_memory(task: HubTask, stages: int | None) -> State:
    """Where the paper's method finds no room: the fewest stages that fit, of one machine each, those with most
    memory."""
    servers = sorted((d for d, r in enumerate(task.reliable) if r), key=lambda d: (-task.memory_bytes[d], d))
    most = min(len(servers), len(task.chain.work))
    refused: CapacityError | None = None
    for count in (stages,) if stages else range(1, most + 1):
        try:
            partition_chain(task.chain, [Capacity(task.flops[d], task.memory_bytes[d]) for d in servers[:count]])
        except CapacityError as error:
            refused = error
        else:
            return tuple(Group((d,), (d,), ()) for d in servers[:count])
    raise refused or CapacityError("no stages fit")


def with_layers(task: HubTask, pace: Pace, state: State) -> list[HubStage] | None:
    """Add the best layers to a state, exactly. None: memory does not suffice."""
    overheads, speeds, _ = pace.stages(state)
    memory = [
        min(task.memory_bytes[d] for d in g.servers + g.clients) if task.memory_bytes else math.inf for g in state
    ]
    capacities = [Capacity(s, m, 1.0, o) for s, m, o in zip(speeds, memory, overheads, strict=True)]
    try:
        cut = partition_chain(task.chain, capacities).cut
    except CapacityError:
        return None
    return [HubStage(*group, layers) for group, layers in zip(state, cut, strict=True)]


class Walk:
    """One walk through the states."""

    def __init__(self, task: HubTask, pace: Pace, state: State, rng: random.Random, *, fixed: bool) -> None:
        self._pace, self._rng, self._reliable, self._fixed = pace, rng, task.reliable, fixed
        self._count, self._most = len(task.flops), min(sum(task.reliable), pace.layers)
        self.best, self.moves = state, 0

    def run(self, moves: int, hot: float, deadline: float) -> bool:
        """Walk from the best state; return whether there was time for all moves."""
        state, rng = self.best, self._rng
        best_s, smooth_s = self._pace.of(state)
        now = best_s + GUIDE * smooth_s
        for move in range(moves):
            if move % PROGRESS == 0 and time.monotonic() > deadline:
                return False
            self.moves += 1
            other = self.propose(state)
            if other is None:
                continue
            temperature = now * hot * (COLD / hot) ** (move / moves)
            limit = now + temperature * rng.expovariate(1.0)
            time_s, smooth_s = self._pace.of(other, limit / (1 + GUIDE))
            then = time_s + GUIDE * smooth_s
            if then <= limit:
                state, now = other, then
                if time_s < best_s:
                    best_s, self.best = time_s, state
        return True

    def propose(self, state: State) -> State | None:
        kind = self._rng.random()
        if kind < 0.45:
            return self._move(state)
        if kind < 0.8:
            return self._swap(state)
        if kind < 0.9 or self._fixed:
            return self._reorder(state)
        return self._merge(state) if self._rng.random() < 0.5 else self._split(state)

    def _move(self, state: State) -> State | None:
        """Move a device to another stage, place or role, or leave it out."""
        device, to = self._rng.randrange(self._count), self._rng.randrange(-1, len(state))
        left = [_without(group, device) for group in state]
        if to >= 0:
            left[to] = self._with(left[to], device)
        if not all(group.frontal for group in left):
            return None
        return tuple(left)

    def _with(self, group: Group, device: int) -> Group:
        front, back, clients = group
        if not self._reliable[device]:
            return Group(front, back, tuple(sorted((*clients, device))))
        if not front:
            return Group((device,), (device,), clients)
        in_front = self._rng.random() < 0.5
        if front == back:
            return Group((device,), back, clients) if in_front else Group(front, (device,), clients)
        side = front if in_front else back
        at = self._rng.randint(0, len(side))
        side = (*side[:at], device, *side[at:])
        return Group(side, back, clients) if in_front else Group(front, side, clients)

    def _swap(self, state: State) -> State | None:
        """Two devices change places."""
        a, b = self._rng.sample(range(self._count), 2) if self._count > 1 else (0, 0)
        if self._reliable[a] != self._reliable[b]:
            return None
        names = {a: b, b: a}

        def renamed(devices: tuple[int, ...]) -> tuple[int, ...]:
            return tuple([names.get(d, d) for d in devices]) if a in devices or b in devices else devices

        return tuple([Group(renamed(g.frontal), renamed(g.backward), tuple(sorted(renamed(g.clients)))) for g in state])

    def _reorder(self, state: State) -> State | None:
        """Reverse some consecutive stages, with or without roles, or move one."""
        if len(state) < 2:
            return None
        i, j = sorted(self._rng.sample(range(len(state)), 2))
        turn = self._rng.randrange(4)
        if turn == 0:
            return (*state[:i], *state[i + 1 : j + 1], state[i], *state[j + 1 :])
        if turn == 1:
            return (*state[:i], state[j], *state[i:j], *state[j + 1 :])
        row = state[i : j + 1][::-1]
        if turn == 2:
            row = tuple(Group(g.backward[::-1], g.frontal[::-1], g.clients) for g in row)
        return (*state[:i], *row, *state[j + 1 :])

    def _merge(self, state: State) -> State | None:
        """Two neighbouring stages become one."""
        if len(state) < 2:
            return None
        k = self._rng.randrange(len(state) - 1)
        a, b = state[k : k + 2]
        one = Group(a.servers, b.servers, tuple(sorted(a.clients + b.clients)))
        return (*state[:k], one, *state[k + 2 :])

    def _split(self, state: State) -> State | None:
        """A stage becomes two: its frontal servers, and its backward ones."""
        k = self._rng.randrange(len(state))
        group = state[k]
        if len(state) >= self._most or group.frontal == group.backward:
            return None
        stays = {c: self._rng.random() < 0.5 for c in group.clients}
        halves = [
            Group(*self._roles(servers), tuple(c for c in group.clients if stays[c] == first))
            for servers, first in ((group.frontal, True), (group.backward, False))
        ]
        return (*state[:k], *halves, *state[k + 1 :])

    def _roles(self, servers: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if len(servers) == 1:
            return servers, servers
        mixed = self._rng.sample(servers, len(servers))
        at = self._rng.randint(1, len(mixed) - 1)
        return tuple(mixed[:at]), tuple(mixed[at:])


def _without(group: Group, device: int) -> Group:
    """Remove a device. None are left if it was the only server; the last of several in a role is replaced by one of
    the other."""
    front, back, clients = group
    if device in clients:
        return Group(front, back, tuple(c for c in clients if c != device))
    if device not in front and device not in back:
        return group
    front, back = tuple(d for d in front if d != device), tuple(d for d in back if d != device)
    if not front and back:
        front, back = back[:1], back[1:] or back
    elif front and not back:
        front, back = front[:-1] or front, front[-1:]
    return Group(front, back, clients)
