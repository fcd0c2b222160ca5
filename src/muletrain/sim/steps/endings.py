"""Ends of steps, in a play without messages (``steps``) and as rates. A play follows ``runtime.step``: trainers' last
words, seals, shards, means, announcements of means, the exchange between two stages that share parameters; then a peer
applies the step."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from muletrain.planning.cost import all_reduce_s, averages_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from muletrain.planning.cost import RunCost
    from muletrain.sim.setting import Setting
    from muletrain.sim.steps.wires import Wires


ENDING_DELAYS = 4
"""Sequential messages at the end of a step: a trainer's last word, seals, shards, means."""
TIED_HOPS = 5
"""Sequential messages of a gradient exchange between two stages: for the offers, for the numbers, and word of the
product."""


class End:
    """Progress of one step's end, by peer."""

    def __init__(self, peers: int) -> None:
        self.words, self.seals, self.parts, self.means, self.tied = ([0] * peers for _ in range(5))
        self.held: list[set[int]] = [set() for _ in range(peers)]
        """Stages with a peer that has the whole mean, as known to each peer."""
        self.told = set[tuple[int, int]]()
        """(stage, kind) whose first peer has announced its mean."""
        self.asked, self.multiplied = set[int](), set[int]()
        """Peers that asked for the other stage's part of the shared gradient, and kinds with a peer that has this
        part."""
        self.settled, self.agreed, self.applied = set[int](), set[int](), set[int]()
        """Peers that heard the product of both parts; that have everything to apply the step; that applied the step."""
        self.begun_s = math.inf
        self.through_s = self.over_s = 0.0
        """Times at which the first trainer began, the last trainer had all answers, and the last peer had applied the
        step [s]."""


class Endings:
    """Ends of all steps. ``stages``: stage of each peer, in the order of shard reduction."""

    def __init__(
        self,
        wires: Wires,
        cost: RunCost,
        stages: Sequence[int],
        trainers: int,
        opened: Callable[[int, int], None],
        *,
        delayed: bool,
    ) -> None:
        """``opened`` is called with a peer and the next step that the peer computes."""
        self._wires, self._cost, self._stages, self._trainers = wires, cost, stages, trainers
        self._opened, self._delayed = opened, delayed
        self._here = [[p for p, s in enumerate(stages) if s == stage] for stage in range(len(cost.stages))]
        self.of = defaultdict[int, End](lambda: End(len(stages)))

    def begin(self, step: int) -> None:
        """A trainer begins."""
        self.of[step].begun_s = min(self._wires.now_s, self.of[step].begun_s)

    def through(self, trainer: int, step: int) -> None:
        """``trainer`` has all answers and tells every peer."""
        self.of[step].through_s = self._wires.now_s
        for p in range(len(self._stages)):
            self._wires.tell(trainer, p, partial(self._hear_through, p, step))

    def _replicas(self, p: int) -> list[int]:
        return self._here[self._stages[p]]

    def _hear_through(self, p: int, step: int) -> None:
        self.of[step].words[p] += 1
        self._perhaps_seal(p, step)

    def _perhaps_seal(self, p: int, step: int) -> None:
        """Seal when all trainers are through and the previous step is applied."""
        if self.of[step].words[p] < self._trainers or (step and p not in self.of[step - 1].applied):
            return
        if self._delayed:
            self._opened(p, step + 1)
        for other in self._replicas(p):
            self._wires.tell(p, other, partial(self._hear_seal, other, step))

    def _hear_seal(self, p: int, step: int) -> None:
        end = self.of[step]
        end.seals[p] += 1
        if end.seals[p] == len(self._replicas(p)):
            self._to_all(p, partial(self._sum, step=step))

    def _to_all(self, p: int, then: Callable[[int], None]) -> None:
        """Send a shard to each replica, itself included, in the order of ``runtime.averaging.averager``."""
        here = self._replicas(p)
        k = here.index(p)
        shard = self._cost.stages[self._stages[p]].averaged_bytes / len(here)
        for other in here[k:] + here[:k]:
            up, down = self._wires.ends(p).up_bytes_per_s, self._wires.ends(other).down_bytes_per_s
            nbytes = shard / averages_at(len(here), up, down, delayed=self._delayed)
            self._wires.send(p, other, nbytes, partial(then, other), bulk=True)

    def _sum(self, p: int, step: int) -> None:
        """Another part of the shard that ``p`` reduces has arrived."""
        end = self.of[step]
        end.parts[p] += 1
        if end.parts[p] == len(self._replicas(p)):
            self._to_all(p, partial(self._take_mean, step=step))

    def _take_mean(self, p: int, step: int) -> None:
        end = self.of[step]
        end.means[p] += 1
        if end.means[p] == len(self._replicas(p)):
            stage, alike = self._stages[p], (self._stages[p], self._wires.kinds[p])
            self._hear_held(p, stage, step)
            if alike not in end.told:  # a later announcement from an equally linked peer brings nothing new
                end.told.add(alike)
                for other in range(len(self._stages)):
                    self._wires.tell(p, other, partial(self._hear_held, other, stage, step))

    def _hear_held(self, p: int, stage: int, step: int) -> None:
        """A peer has the whole mean of ``stage``. A record needs the means of all stages; a peer also needs its own to
        apply it."""
        self.of[step].held[p].add(stage)
        self._perhaps_exchange(p, step)
        self._perhaps_agree(p, step)

    def _perhaps_exchange(self, p: int, step: int) -> None:
        """Once both stages that share parameters have means, ask the other stage's peers for offers, and then for
        parts, one after another, because the givers have other takers, too."""
        end = self.of[step]
        if p in end.asked or self._stages[p] not in self._cost.tied or not end.held[p].issuperset(self._cost.tied):
            return
        end.asked.add(p)
        first = self._giver(p, 0)
        asks = partial(self._wires.tell, p, first, partial(self._give, p, step))
        self._wires.tell(p, first, partial(self._wires.tell, first, p, asks))

    def _others(self, p: int) -> list[int]:
        """The peers of the stage that shares parameters with the stage of ``p``."""
        return self._here[sum(self._cost.tied) - self._stages[p]]

    def _giver(self, p: int, taken: int) -> int:
        """The giver of the next part. Each taker begins with a different giver."""
        return self._others(p)[(self._replicas(p).index(p) + taken) % len(self._others(p))]

    def _give(self, p: int, step: int) -> None:
        nbytes = self._cost.stages[self._stages[p]].tied_bytes / len(self._others(p))
        giver = self._giver(p, self.of[step].tied[p])
        self._wires.send(giver, p, nbytes, partial(self._take_tied, p, step), bulk=True)

    def _take_tied(self, p: int, step: int) -> None:
        end = self.of[step]
        end.tied[p] += 1
        if end.tied[p] < len(self._others(p)):
            self._give(p, step)
            return
        if self._wires.kinds[p] not in end.multiplied:  # as with ``told``
            end.multiplied.add(self._wires.kinds[p])
            for other in range(len(self._stages)):
                self._wires.tell(p, other, partial(self._hear_product, other, step))
        self._perhaps_agree(p, step)

    def _hear_product(self, p: int, step: int) -> None:
        self.of[step].settled.add(p)
        self._perhaps_agree(p, step)

    def _perhaps_agree(self, p: int, step: int) -> None:
        end, own, tied = self.of[step], self._stages[p], self._cost.tied
        if p in end.agreed or len(end.held[p]) < len(self._here) or end.means[p] < len(self._replicas(p)):
            return
        if tied and (p not in end.settled or (own in tied and end.tied[p] < len(self._others(p)))):
            return
        end.agreed.add(p)
        self._wires.after(self._wires.ending_s(p, own), partial(self._apply, p, step))

    def _apply(self, p: int, step: int) -> None:
        end = self.of[step]
        end.applied.add(p)
        end.over_s = self._wires.now_s
        if self._delayed:
            self._perhaps_seal(p, step + 1)
        else:
            self._opened(p, step + 1)


def ending_bytes(cost: RunCost, serving: Sequence[Sequence[int]]) -> Iterator[tuple[tuple[int, int], float]]:
    """Bytes sent at the end of a step, by sender's and receiver's kind: each replica sends two shards to each other
    replica; peers of two stages that share parameters take the other stage's shared gradient."""
    ways = [(here, here, 2 * stage.averaged_bytes) for stage, here in zip(cost.stages, serving, strict=True)]
    if cost.tied:
        one, other = (serving[s] for s in cost.tied)
        ways += [(a, b, cost.stages[cost.tied[0]].tied_bytes) for a, b in ((one, other), (other, one))]
    for senders, receivers, nbytes in ways:
        for a, n in enumerate(senders):
            for b, m in enumerate(receivers):
                if n and (takers := m - (a == b and senders is receivers)):
                    yield (a, b), nbytes * n * takers / sum(senders)


def stage_ended_s(setting: Setting, stage: int, here: Sequence[int], *, delayed: bool = False) -> float:
    """Seconds from the last microbatch to the applied step of one stage alone. Messages take the stage's longest delay. A
    peer sends its shard's mean when all parts have arrived, so fast links wait for slow links. ``here``: peers by
    kind."""
    ending_s = setting.ending_s(stage, [k for k, n in enumerate(here) if n])
    if sum(here) < 2:
        return ending_s
    slowest_s, other_s, delay_s = halves(setting, stage, here, delayed=delayed)
    averaging_s = max(slowest_s, other_s + delay_s) + slowest_s + delay_s
    hops = ENDING_DELAYS - 2 + (stage > 0)  # the next step begins at stage 0, when all stages' entries have arrived
    return averaging_s + hops * delay_s + ending_s


def halves(setting: Setting, stage: int, here: Sequence[int], *, delayed: bool) -> tuple[float, float, float]:
    """Seconds in which each of the two slowest replicas sends shards, or takes shards: half of averaging; and the
    longest delay. ``here``: peers by kind, two at least."""
    kinds, links, nbytes = setting.kinds, setting.links, setting.cost.stages[stage].averaged_bytes
    there, peers = [k for k, n in enumerate(here) if n], sum(here)
    delay_s, found = 0.0, []
    for a in there:
        paths = [links[a][b] for b in there if a != b or here[a] > 1]
        ends = kinds[a].up_bytes_per_s, kinds[a].down_bytes_per_s
        path = min([p.bandwidth_bytes_per_s for p in paths])
        carried = averages_at(peers, *ends, delayed=delayed)
        found += [all_reduce_s(nbytes, peers, min(ends), path) / carried / 2] * min(2, here[a])
        delay_s = max(delay_s, *[p.delay_s for p in paths])
    slowest_s, other_s = sorted(found)[-1:-3:-1]
    return slowest_s, other_s, delay_s


def ended_s(setting: Setting, serving: Sequence[Sequence[int]], ends_s: Sequence[float] = ()) -> float:
    """Seconds until all stages have ended a step. Two stages that share parameters exchange gradients after both have
    averaged. ``serving``: by stage and kind; ``ends_s``: ``stage_ended_s`` of each, if known."""
    tied, ends_s = setting.cost.tied, ends_s or [stage_ended_s(setting, s, here) for s, here in enumerate(serving)]
    return max([*ends_s, *(max(ends_s[s] for s in tied) + exchange_s(setting, serving, stage) for stage in tied)])


def exchange_s(setting: Setting, serving: Sequence[Sequence[int]], stage: int) -> float:
    """Seconds in which each peer of ``stage`` takes the shared gradient from all peers of the other stage together; 0
    if the stage shares no parameters."""
    tied, kinds, nbytes = setting.cost.tied, setting.kinds, setting.cost.stages[stage].tied_bytes
    if stage not in tied or not all(any(serving[s]) for s in tied):
        return 0.0
    takers, givers = serving[stage], serving[sum(tied) - stage]
    here, there = ([k for k, n in enumerate(counts) if n] for counts in (takers, givers))
    took_s = sum(takers) * nbytes / sum(givers[k] * kinds[k].up_bytes_per_s for k in there)
    for k in here:
        ways = sum(givers[g] * setting.links[g][k].bandwidth_bytes_per_s for g in there)
        took_s = max(took_s, nbytes / min(kinds[k].down_bytes_per_s, ways))
    return took_s + TIED_HOPS * max(setting.links[g][k].delay_s for g in there for k in here)
