"""Find the machines of a fleet to plan for: every subset that could be the fastest.

Machines of one entry of the file are alike, so a subset is a number of each. All subsets of a small fleet are examined;
of a large fleet, plausible subsets, and then their neighbours. Most subsets are discarded unpredicted by an upper
bound: a machine adds at most its computing speed, limited by its links and its memory.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from typing import TYPE_CHECKING

from muletrain.planning.cost import service_s
from muletrain.sim.machine import flops_of
from muletrain.sim.setting import run_cost, stage_needs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from muletrain.sim.plan.question import Question

EVERY = 64
"""Largest number of subsets that are all examined; six machines have no more."""
Counts = tuple[int, ...]
"""Machines of each entry of the file."""


@dataclass(frozen=True)
class Reach:
    """Upper bounds of a machine's contribution. ``per_s``: sequences/s through the whole model, without waiting;
    ``share``: the largest part of the model's work that fits as one of several stages; ``up``, ``down``: bytes/s."""

    per_s: float
    share: float
    up: float
    down: float


class Bounds:
    """Tokens/s that no strategy exceeds on some machines of a fleet."""

    def __init__(self, question: Question) -> None:
        self._question = question
        run, spec = question.with_microbatch(1), question.spec
        cost = run_cost(run, spec, spec.cut(1))
        (whole,) = cost.stages
        self._batch, self._tokens = question.run.train.batch, spec.context
        self._averaged, self._delayed = whole.averaged_bytes, run.optimizer.delayed
        several = run_cost(run, spec, spec.cut(2)) if spec.most_stages > 1 else None
        self._boundary = min(several.forward_bytes[1], several.backward_bytes[1]) if several else math.inf
        (need,) = stage_needs(run, spec, spec.cut(1), alone=True)
        self.reaches = []
        for n, peer in enumerate(question.firsts):
            per_s = math.inf if question.paced else 1 / sum(service_s(whole, flops_of(n, peer)[0], recompute=False))
            offer = question.offer(question.fleet.machines[n].name)
            share = 1.0 if need.fits(offer) else self._room(n)
            self.reaches.append(Reach(per_s, share, peer.up_bytes_per_s, peer.down_bytes_per_s))

    def _room(self, n: int) -> float:
        """The largest part of the model's work that machine ``n`` has room for."""
        question, spec = self._question, self._question.spec
        run, layers = question.with_microbatch(1), spec.layers
        offer, most = question.offer(question.fleet.machines[n].name), 0.0
        for stage in (0, 1) if spec.most_stages > 1 else ():
            low, high = 0, layers - 1  # the most layers that fit as the first or the last of two stages
            while low < high:
                some = (low + high + 1) // 2
                cut = spec.cut(2, [some, layers - some] if stage == 0 else [layers - some, some])
                if stage_needs(run, spec, cut)[stage].fits(offer):
                    low = some
                else:
                    high = some - 1
            some = low + 1  # a middle stage has neither embedding nor head, so one more layer may fit
            most = max(most, some / layers if stage == 0 else self._work(min(layers - 1, some)))
        return min(1.0, most)

    def _work(self, layers: int) -> float:
        """The part of the work in the last ``layers`` and the head."""
        spec = self._question.spec
        cut = spec.cut(2, [spec.layers - layers, layers])
        first, last = (spec.stage_flops(cut, s) for s in (0, 1))
        return last / (first + last)

    def of(self, counts: Counts, *, pooled: bool = False) -> float:
        """Most tokens/s of the machines ``counts``. ``pooled``: as a hub, whose clients need less memory."""
        there = [
            (n, replace(reach, share=1.0) if pooled else reach)
            for n, reach in zip(counts, self.reaches, strict=True)
            if n
        ]
        whole = sum(n * r.per_s for n, r in there)
        if sum(counts) < 2:
            return whole * self._tokens
        return max(self._one_stage(there, whole), self._several(there, whole)) * self._tokens

    def _one_stage(self, there: Sequence[tuple[int, Reach]], whole: float) -> float:
        """Sequences/s if each machine has the whole model: the slowest link carries a gradient at the end of each
        step."""
        ends_s = self._averaged / min(min(r.up, r.down) for _, r in there)
        computes_s = self._batch / whole
        step_s = max(computes_s, ends_s) if self._delayed else computes_s + ends_s
        return self._batch / step_s if step_s else math.inf

    def _several(self, there: Sequence[tuple[int, Reach]], whole: float) -> float:
        """Sequences/s in several stages: each machine computes at most ``share`` of the model and passes on the
        results."""
        reached, before = whole, math.inf
        while reached < before * (1 - 1e-6):
            before = reached
            reached = sum(n * min(r.per_s, r.share * min(before, min(r.up, r.down) / self._boundary)) for n, r in there)
        return reached


@dataclass(frozen=True)
class Subsets:
    """The subsets of a question's machines."""

    question: Question

    @cached_property
    def whole(self) -> Counts:
        return tuple(m.count for m in self.question.fleet.machines)

    @cached_property
    def bounds(self) -> Bounds:
        return Bounds(self.question)

    def of(self, counts: Counts) -> Question:
        """The question about a subset."""
        return self.question.of_first(self._named(counts))

    def _named(self, counts: Counts) -> Mapping[str, int]:
        return {m.name: n for m, n in zip(self.question.fleet.machines, counts, strict=True)}

    def pooled(self, counts: Counts) -> bool:
        """Can the subset be a hub, with reliable machines as servers and unreliable machines as clients?"""
        return len({peer.reliable for n, peer in zip(counts, self.question.firsts, strict=True) if n}) > 1

    def first(self) -> list[Counts]:
        """Subsets to examine first: all of a small fleet, else the plausible subsets."""
        small = math.prod(n + 1 for n in self.whole) <= EVERY + 1
        every = product(*(range(n + 1) for n in self.whole)) if small else self._usual()
        return [counts for counts in dict.fromkeys(every) if any(counts) and counts != self.whole]

    def _usual(self) -> Iterator[Counts]:
        """Each entry, halved down to one machine; all without one entry, or one region, and each region; the reliable
        machines; and growing numbers of the fastest and of the best linked machines."""
        entries, whole = range(len(self.whole)), self.whole
        peers, reaches = self.question.firsts, self.bounds.reaches

        def only(chosen: Sequence[int]) -> Counts:
            return tuple(whole[n] if n in chosen else 0 for n in entries)

        for n in entries:
            yield from (tuple(size if k == n else 0 for k in entries) for size in _halves(whole[n]))
            yield only([k for k in entries if k != n])
        for region in dict.fromkeys(p.region for p in peers):
            yield only([n for n in entries if peers[n].region == region])
            yield only([n for n in entries if peers[n].region != region])
        yield only([n for n in entries if peers[n].reliable])
        for order in (
            sorted(entries, key=lambda n: -reaches[n].per_s),
            sorted(entries, key=lambda n: (-min(reaches[n].up, reaches[n].down), -reaches[n].per_s)),
        ):
            yield from (only(order[: n + 1]) for n in range(len(order)))
            fastest = [n for n in order for _ in range(whole[n])]
            for size in _halves(len(fastest)):
                taken = Counter(fastest[:size])
                yield tuple(taken[n] for n in entries)

    def near(self, counts: Counts) -> Iterator[Counts]:
        """One machine of an entry more or fewer, or all machines of an entry, or none."""
        for n, (here, most) in enumerate(zip(counts, self.whole, strict=True)):
            for other in {max(0, here - 1), min(most, here + 1), most, 0} - {here}:
                if any(found := (*counts[:n], other, *islice(counts, n + 1, None))):
                    yield found


def _halves(count: int) -> list[int]:
    """``count``, halved again and again down to 1."""
    return [count >> n for n in range(count.bit_length())]
