"""Gradients that stand out are left out of their step and computed again by another replica (CONTRIBUTING, "How a step
goes", 3).

Seals carry sketches of the accumulators. A member whose sketch stands out (``policy.outliers``) empties its
accumulator. Its microbatches become a gap like any other: the stage's other replicas fill the gap, and the second
result counts. Comparing the stage's sums shows whether the two results differ, which is an offence of the member. A
replica that has found ``MAX_OFFENCES`` of a member accuses the member in its seals, and a member that most replicas
accuse is expelled.

The left-out sets are a pure function of the seals of one attempt: members with the same seals decide the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from muletrain.errors import Expelled
from muletrain.events import GradientStandsOut, InputsNotFinite, ResultsDiffer
from muletrain.optim.sketch import packed, sketch, unpacked
from muletrain.policy.cover import resolve
from muletrain.policy.outliers import Sum, alike, outlying
from muletrain.runtime.core.times import LOOK_S

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from muletrain.network.base import PeerId
    from muletrain.optim.sketch import Sketch
    from muletrain.policy.cover import Cover
    from muletrain.runtime.members.row import Seal
    from muletrain.runtime.step.reruns import Reruns
    from muletrain.runtime.step.state import Lasting, StepState

MAX_OFFENCES, OFFENCE_STEPS = 2, 1000
"""Offences within the last ``OFFENCE_STEPS`` steps, after which a replica accuses a member. A single offence can be bad
luck: a flipped bit, or wrong inputs."""
MAX_EXPELLED = 64
"""Members that one seal can accuse, or one round can expel."""


@dataclass(frozen=True)
class _LeftOut:
    """``members`` stood out. ``claim``: the sum of the members' sketches; ``rest``: the sum of all other sketches."""

    members: tuple[PeerId, ...]
    claim: Sketch
    rest: Sketch


def computes_falsely(step: int) -> Expelled:
    """The error that ends a peer with false gradients up to ``step``."""
    return Expelled(
        f"step {step + 1}: this peer does not compute what its replicas compute, so it leaves. Its memory or its accelerator "
        f"may be faulty: test them before it joins again"
    )


class Audit:
    """The audit of one step; each step has a new one."""

    def __init__(self, lasting: Lasting, state: StepState, reruns: Reruns) -> None:
        self._ctx, self._lessons, self._state, self._reruns = lasting.ctx, lasting.lessons, state, reruns
        self._ledger, self.me = state.work.ledger, lasting.ctx.net.peer_id
        self._left_out: _LeftOut | None = None
        """The members whose microbatches are being computed again."""
        self._ever_left_out: set[PeerId] = set()
        self._reconsidered = False
        """This peer emptied its accumulator, which activations of other peers had made non-finite."""

    async def sketch(self) -> bytes:
        """The sketch of this peer's accumulator."""
        compute = self._ctx.compute
        return packed(await compute.offload(sketch, await compute.gradient(self._state.step), self._state.lineage))

    def accused(self) -> tuple[PeerId, ...]:
        """The members that this peer accuses."""
        return tuple(sorted(filter(self.is_faulty, self._ctx.roster.replicas())))[:MAX_EXPELLED]

    def is_faulty(self, member: PeerId) -> bool:
        """Did this peer find ``MAX_OFFENCES`` offences of ``member``?"""
        steps = self._lessons.offences.get(member, ())
        return sum(step > self._state.step - OFFENCE_STEPS for step in steps) >= MAX_OFFENCES

    async def reconsider(self) -> None:
        """Empty an accumulator that activations of other peers made non-finite, perhaps by a single fault; once a step,
        and not if the accumulator holds a second result."""
        if self._reconsidered or not self._ledger.excused or _again(self._state.seals) & self._ledger.accumulated:
            return
        if not np.isfinite(unpacked(await self.sketch())).all():
            self._reconsidered = True
            self._ctx.emit(InputsNotFinite(step=self._state.step + 1))
            self._reruns.drop()

    def cover(self, seals: Mapping[PeerId, Seal]) -> tuple[dict[PeerId, frozenset[int]], Cover]:
        """The microbatches that each accumulator contributes, and the resulting cover. Sets that were given up, stand
        out, or belong to expelled members are left out."""
        out = {m for m, s in seals.items() if s.gave_up or m in self._ever_left_out}
        out |= {*self.expelled(seals)}
        sealed, cover = self._cover(seals, out)
        if not cover.gaps and not cover.dropped:
            counting = [m for m in seals if sealed[m]]
            self._compare(seals, counting)
            if suspects := standing_out({m: seals[m] for m in counting}, _again(seals)):
                self._leave_out(seals, suspects, counting)
                out |= {*suspects}
                sealed, cover = self._cover(seals, out)
        self._obey(seals, out)
        return sealed, cover

    def _cover(self, seals: Mapping[PeerId, Seal], out: set[PeerId]) -> tuple[dict[PeerId, frozenset[int]], Cover]:
        alone = out >= seals.keys()  # then their own second results count
        counts = {m for m, s in seals.items() if m not in out or (alone and s.gave_up)}
        sealed = {m: frozenset(s.indices) if m in counts else frozenset[int]() for m, s in seals.items()}
        return sealed, resolve(sealed, self._ctx.plan.microbatches)

    def _leave_out(self, seals: Mapping[PeerId, Seal], suspects: list[PeerId], counting: list[PeerId]) -> None:
        rest = [m for m in counting if m not in suspects]
        self._left_out = _LeftOut(tuple(suspects), _total(seals, suspects), _total(seals, rest))
        self._ever_left_out.update(suspects)
        for member in suspects:
            who = "it" if len(seals) == 1 else "another replica"
            self._ctx.emit(GradientStandsOut(step=self._state.step + 1, name=self._ctx.roster.name(member), who=who))

    def _obey(self, seals: Mapping[PeerId, Seal], out: set[PeerId]) -> None:
        """If this peer's accumulator is left out, empty it, and accept nothing while another replica can."""
        if self.me not in out:
            return
        alone = out >= seals.keys()
        if not self._state.gave_up or (self._ledger.accumulated and not alone):
            if not self._state.gave_up:
                self._state.gave_up, self._state.excused = seals[self.me].indices, self._ledger.excused
            self._reruns.drop()
            self._ledger.seal()
        self._ledger.barred = not alone

    def _compare(self, seals: Mapping[PeerId, Seal], counting: list[PeerId]) -> None:
        """Compare the first and second result of the microbatches that were left out. Sketches are linear, so the second
        result is the stage's sum now, less ``rest``."""
        before, self._left_out = self._left_out, None
        if before is None:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            second = _total(seals, counting) - before.rest
        if alike(before.claim, second):
            return
        for member in before.members:
            self._ctx.emit(ResultsDiffer(step=self._state.step + 1, name=self._ctx.roster.name(member)))
            if member in seals and seals[member].gave_up and not seals[member].excused:
                steps = self._lessons.offences.get(member, ())
                self._lessons.offences[member] = (*steps, self._state.step)[-MAX_OFFENCES:]

    def expelled(self, seals: Mapping[PeerId, Seal]) -> tuple[PeerId, ...]:
        """The members that ``seals`` expel."""
        return most_accuse(seals, spared=self._ctx.roster.genesis.coordinator)

    async def leave_if_faulty(self, expelled: Iterable[PeerId]) -> None:
        """Raises Expelled if this peer is ``expelled``, or is faulty and its stage has other replicas."""
        if self.me in expelled or (self.is_faulty(self.me) and self._ctx.roster.needs_us() is None):
            await self._ctx.clock.sleep(LOOK_S)  # replicas need this peer's seal before news of the end
            raise computes_falsely(self._state.step)


def standing_out(seals: Mapping[PeerId, Seal], again: Collection[int]) -> list[PeerId]:
    """The members that stand out, except holders of microbatches that are computed ``again`` already: a second result
    counts."""
    sums = {m: Sum(len(s.indices), unpacked(s.sketch)) for m, s in seals.items()}
    return [m for m in outlying(sums) if not {*seals[m].indices} & {*again}]


def most_accuse(seals: Mapping[PeerId, Seal], spared: PeerId) -> tuple[PeerId, ...]:
    """The members that most other members, and at least two, accuse; never ``spared``."""
    accusers = Counter(accused for m, s in seals.items() for accused in {*s.accused} - {m})
    out = sorted(m for m in seals if accusers[m] > max(1, (len(seals) - 1) // 2) and m != spared)
    return tuple(out[:MAX_EXPELLED])


def _again(seals: Mapping[PeerId, Seal]) -> set[int]:
    return {i for s in seals.values() for i in s.gave_up}


def _total(seals: Mapping[PeerId, Seal], members: Iterable[PeerId]) -> Sketch:
    with np.errstate(invalid="ignore", over="ignore"):
        return sum((unpacked(seals[m].sketch) for m in members), np.zeros(()))


def finite(seals: Mapping[PeerId, Seal]) -> bool:
    """Are all accumulators finite?"""
    return all(bool(np.isfinite(unpacked(s.sketch)).all()) for s in seals.values())
