"""Gradients that stand out are left out of their step, and computed again by another replica (DESIGN, invariant 5).

Seals carry sketches of the accumulators. A member whose sketch stands out (``policy.outliers``) empties its
accumulator; what it held becomes a gap like any other, which the stage's other replicas fill, and the second result
counts. The stage's sum before and after, less what did not change, says whether the two results differ: that is an
offence of the member. Whoever has found ``MAX_OFFENCES`` of a member says so in its seals, and a member that most of
its replicas accuse is expelled.

``Audit`` is made anew for each step. Which sets are left out is a pure function of the seals of one attempt: all
members that know the same decide the same.
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

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from muletrain.network.base import PeerId
    from muletrain.optim.sketch import Sketch
    from muletrain.policy.cover import Cover
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.step.company import Standing
    from muletrain.runtime.step.messages import Seal
    from muletrain.runtime.step.reruns import Reruns
    from muletrain.runtime.step.state import StepState

MAX_OFFENCES, OFFENCE_STEPS = 2, 1000
"""Steps, of the last so many, in which others computed otherwise what a member had, after which they accuse it. One can
be bad luck: a flipped bit, or what it was given."""
MAX_EXPELLED = 64
"""Members that a seal accuses, or a round expels, at most."""
HEARD_S = 0.5
"""Seconds that a peer which finds itself expelled waits before it ends: its replicas judge by its seal, too, and word
of its end must not overtake that."""


@dataclass(frozen=True)
class _LeftOut:
    """``members`` stood out, with ``claim`` as the sum of their sketches; ``rest`` is that of the other members."""

    members: tuple[PeerId, ...]
    claim: Sketch
    rest: Sketch


def computes_falsely(step: int) -> Expelled:
    """What ends a peer whose gradients up to ``step`` were false."""
    return Expelled(
        f"step {step}: this peer does not compute what its replicas compute, so it leaves. Its memory or its accelerator may be faulty: "
        f"test them before it joins again"
    )


class Audit:
    """Of one step."""

    def __init__(self, ctx: Context, state: StepState, reruns: Reruns, standing: Standing) -> None:
        self._ctx, self._state, self._reruns, self._standing = ctx, state, reruns, standing
        self._ledger, self.me = state.work.ledger, ctx.net.peer_id
        self._left_out: _LeftOut | None = None
        """Those whose microbatches are being computed again."""
        self._ever_left_out: set[PeerId] = set()
        self._reconsidered = False
        """This peer emptied its accumulator once because others' activations had made it not finite."""

    async def sketch(self) -> bytes:
        """The sketch of this peer's accumulator."""
        compute = self._ctx.compute
        return packed(await compute.offload(sketch, await compute.gradient(self._state.step), self._state.lineage))

    def accused(self) -> tuple[PeerId, ...]:
        """The members of whom this peer has found ``MAX_OFFENCES``."""
        return tuple(sorted(filter(self.is_faulty, self._ctx.roster.replicas())))[:MAX_EXPELLED]

    def is_faulty(self, member: PeerId) -> bool:
        """Did this peer find ``MAX_OFFENCES`` of ``member``?"""
        steps = self._standing.offences.get(member, ())
        return sum(step > self._state.step - OFFENCE_STEPS for step in steps) >= MAX_OFFENCES

    async def reconsider(self) -> None:
        """Empty an accumulator that others' activations made not finite: they may have had a bad moment. Once a step,
        and not where it is itself a second result."""
        again = {i for s in self._state.seals.values() for i in s.gave_up}
        if self._reconsidered or not self._ledger.excused or again & self._ledger.accumulated:
            return
        if not np.isfinite(unpacked(await self.sketch())).all():
            self._reconsidered = True
            self._ctx.emit(InputsNotFinite(step=self._state.step))
            self._reruns.drop()

    def cover(self, seals: Mapping[PeerId, Seal]) -> tuple[dict[PeerId, frozenset[int]], Cover]:
        """What each accumulator brings to the step, and the cover that follows: without the sets of members that gave
        theirs up, stand out, or are expelled."""
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
        alone = out >= seals.keys()  # then they stand for what they computed again themselves
        counts = {m for m, s in seals.items() if m not in out or (alone and s.gave_up)}
        sealed = {m: frozenset(s.indices) if m in counts else frozenset[int]() for m, s in seals.items()}
        return sealed, resolve(sealed, self._ctx.plan.microbatches)

    def _leave_out(self, seals: Mapping[PeerId, Seal], suspects: list[PeerId], counting: list[PeerId]) -> None:
        rest = [m for m in counting if m not in suspects]
        self._left_out = _LeftOut(tuple(suspects), _total(seals, suspects), _total(seals, rest))
        self._ever_left_out.update(suspects)
        for member in suspects:
            who = "it" if len(seals) == 1 else "another replica"
            self._ctx.emit(GradientStandsOut(step=self._state.step, name=self._ctx.roster.name(member), who=who))

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
        """The second result for what was left out is there. Sketches are linear, and the stage's sum is that of all
        microbatches, whoever computed them: so it is what the sum now has beyond ``rest``."""
        before, self._left_out = self._left_out, None
        if before is None:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            second = _total(seals, counting) - before.rest
        if alike(before.claim, second):
            return
        for member in before.members:
            self._ctx.emit(ResultsDiffer(step=self._state.step, name=self._ctx.roster.name(member)))
            if member in seals and seals[member].gave_up and not seals[member].excused:
                steps = self._standing.offences.get(member, ())
                self._standing.offences[member] = (*steps, self._state.step)[-MAX_OFFENCES:]

    def expelled(self, seals: Mapping[PeerId, Seal]) -> tuple[PeerId, ...]:
        return most_accuse(seals, spared=self._ctx.roster.genesis.coordinator)

    async def leave_if_faulty(self, expelled: Iterable[PeerId]) -> None:
        """Raises Expelled if this peer is, or if others computed otherwise what it had in ``MAX_OFFENCES`` steps and
        its stage has others."""
        if self.me in expelled or (self.is_faulty(self.me) and self._ctx.roster.needs_us() is None):
            await self._ctx.clock.sleep(HEARD_S)
            raise computes_falsely(self._state.step)


def standing_out(seals: Mapping[PeerId, Seal], again: Collection[int]) -> list[PeerId]:
    """Members whose accumulators are to be computed again: those that stand out, except where they hold microbatches
    that are computed ``again`` already. The second result counts."""
    sums = {m: Sum(len(s.indices), unpacked(s.sketch)) for m, s in seals.items()}
    return [m for m in outlying(sums) if not {*seals[m].indices} & {*again}]


def most_accuse(seals: Mapping[PeerId, Seal], spared: PeerId) -> tuple[PeerId, ...]:
    """The members that most of the others, and at least two, accuse; never ``spared``."""
    accusers = Counter(accused for m, s in seals.items() for accused in {*s.accused} - {m})
    out = sorted(m for m in seals if accusers[m] > max(1, (len(seals) - 1) // 2) and m != spared)
    return tuple(out[:MAX_EXPELLED])


def _again(seals: Mapping[PeerId, Seal]) -> set[int]:
    return {i for s in seals.values() for i in s.gave_up}


def _total(seals: Mapping[PeerId, Seal], members: Iterable[PeerId]) -> Sketch:
    with np.errstate(invalid="ignore", over="ignore"):
        return sum((unpacked(seals[m].sketch) for m in members), np.zeros(()))


def finite(seals: Mapping[PeerId, Seal]) -> bool:
    """Are all accumulators?"""
    return all(bool(np.isfinite(unpacked(s.sketch)).all()) for s in seals.values())
