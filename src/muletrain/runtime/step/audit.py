"""Gradients that stand out are computed again by another replica, and only disagreement has consequences (DESIGN,
invariant 5).

Seals carry sketches of the accumulators. Whoever's stands out (``policy.outliers``) gives up its accumulator, keeping
to what it had announced; a *judge*, another replica if there is one, runs its microbatches again into its own, and says
what came of them: its sketch after, less its sketch before. Alike: nothing was wrong, and what was computed again
counts. Not alike: a third replica computes again what the judge has by now, so that whoever is alone with its result is
the liar, and is expelled. Where there is no third, what does not stand out is taken for this step, and nobody is
judged.

What is due is a pure function of the seals of one attempt: all members that know the same decide the same. ``Audit``
does this peer's part.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from muletrain.errors import Expelled
from muletrain.events import Note
from muletrain.optim.sketch import packed, sketch, unpacked
from muletrain.policy.outliers import Sum, alike, outlying
from muletrain.runtime.core.messages import Finding, GivenUp

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from muletrain.network.base import PeerId
    from muletrain.optim.sketch import Sketch
    from muletrain.runtime.core.messages import Seal
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.step.company import Company, Standing
    from muletrain.runtime.step.reruns import Reruns
    from muletrain.runtime.step.state import StepState

MAX_TRIALS = 6
"""In one step: each takes an attempt at averaging, and these are bounded."""
HEARD_S = 0.5
"""Seconds that a peer which finds itself expelled waits before it goes: others judge by its seal, too, and word of its
end must not overtake that."""


@dataclass(frozen=True)
class Trial:
    """``judge`` is to compute again what ``member`` sealed."""

    member: PeerId
    judge: PeerId
    indices: frozenset[int]
    appeal: bool = False
    """``member`` was the judge of another, and disagreed."""


@dataclass(frozen=True)
class Disagreement:
    """Of two replicas about what ``member`` had given up; ``judge`` computed it again. ``liar``: who is alone with its
    result, if a third decided."""

    member: PeerId
    judge: PeerId
    decided: bool
    liar: PeerId | None


def expelled(step: int) -> Expelled:
    """What ends a peer whose gradients of ``step`` were false."""
    return Expelled(
        f"step {step}: this peer does not compute what its replicas compute, so it leaves. Its memory or its accelerator may be faulty: "
        f"test them before it joins again"
    )


class Audit:
    """Of one step, and made anew for each."""

    def __init__(self, ctx: Context, state: StepState, company: Company, reruns: Reruns, standing: Standing) -> None:
        self._ctx, self._state, self._company, self._reruns, self._standing = ctx, state, company, reruns, standing
        self._ledger = state.work.ledger
        self._reconsidered = False
        """We gave up once already what others had made not finite."""

    async def sketch(self) -> bytes:
        """Of the accumulator."""
        compute = self._ctx.compute
        return packed(await compute.offload(sketch, await compute.gradient(self._state.step), self._state.lineage))

    async def reconsider(self) -> None:
        """What is not finite here, since others gave us what is not, is worth another try: they may have had a bad
        moment."""
        if self._reconsidered or self._state.findings or not self._ledger.excused:  # a judge's finding stands
            return
        if not np.isfinite(unpacked(await self.sketch())).all():
            self._reconsidered = True
            self._warn("what other stages gave this peer made its gradient not finite: it is computed again")
            self._reruns.drop()

    def stand_for_it(self) -> None:
        """Nobody is there (any more) who did not give up: what this peer computes again itself counts."""
        self._ledger.barred = False
        if not any(f.member == self._ctx.net.peer_id for f in self._state.findings):
            self._state.gave_up = None

    async def hold(self, trial: Trial, attempt: int) -> None:
        """``trial.judge`` runs what ``trial.member`` gives up; everyone else stays sealed, and waits for it."""
        self._announce(trial)
        ctx, me = self._ctx, self._ctx.net.peer_id
        if me == trial.member:
            self._give_up(barred=me != trial.judge)
        before, base = self._ledger.held, await self.sketch()
        if me == trial.judge:
            self._ledger.reopen(keep=True, only=trial.indices)

        async def computed() -> None:
            """The judge waits for its own ledger, until another replica holds some of it: the member may have lost the
            judge and computed it itself, or a replica came back that had it all along. Members of this attempt
            announced what they hold. The others wait for the judge."""
            assert self._state.announced is not None  # of which this is a trial
            sealed = {*self._state.announced.members} - {trial.member}
            for pause in itertools.count():
                if me == trial.judge and trial.indices <= self._ledger.held:
                    return
                others = tuple(sorted({*self._company.members(), trial.member} - sealed - {me}))
                asked = others if me == trial.judge else (trial.judge,)
                answers = await ctx.detector.ask_all(asked, self._state.lineage, self._state.step)
                await self._reruns.follow(answers)
                there = [held for held in answers.values() if held.current]
                holding = {i for held in there for i in held.held}
                if me == trial.judge:
                    if trial.indices & holding:
                        return
                elif not there or trial.indices <= holding or self._state.latest_attempt() > attempt:
                    return
                await self._reruns.pause(pause)

        await self._reruns.run(trial.indices, attempt, computed)
        if me == trial.judge:
            await self._reruns.drained()
            self._ledger.seal()
            await self._find(trial, before, base)

    def _announce(self, trial: Trial) -> None:
        member, judge = (self._ctx.roster.name(p) for p in (trial.member, trial.judge))
        if judge == member:
            what = f"the gradient of {member} is not finite, and no other peer serves its stage: it computes it again"
        elif trial.appeal:
            what = f"{member} computed otherwise what another gave up: {judge} computes it, too, to decide"
        else:
            what = f"the gradient of {member} stands out from those of its replicas: {judge} computes it again"
        self._warn(what)

    async def _find(self, trial: Trial, before: frozenset[int], base: bytes) -> None:
        """As the judge: what came of the trial. ``before``, ``base``: what we held, and its sketch."""
        if self._ledger.held == before | trial.indices:
            with np.errstate(invalid="ignore", over="ignore"):
                found = packed(unpacked(await self.sketch()) - unpacked(base))
            self._state.findings += (Finding(member=trial.member, sketch=found),)
        elif self._ctx.net.peer_id == trial.member:
            # we judged ourselves, until a replica came back: now the others compute what we gave up
            self._empty(barred=True)

    def _give_up(self, *, barred: bool) -> None:
        """What this peer announced; it stands by it."""
        announced, excused = self._state.announced, self._ledger.excused
        assert announced is not None  # that is what stands out
        self._empty(barred=barred)
        self._state.gave_up = GivenUp(indices=announced.indices, sketch=announced.sketch, excused=excused)

    def _empty(self, *, barred: bool) -> None:
        """Nothing that we accumulated counts; what we found of others does."""
        findings = self._state.findings
        self._reruns.drop()
        self._state.findings, self._ledger.barred = findings, barred
        self._ledger.seal()

    async def sentence(self, disagreements: list[Disagreement]) -> tuple[PeerId, ...]:
        """Who is expelled with this step; says what is known of the rest. Raises MuletrainError on who is expelled, or
        computed otherwise than its replicas step after step."""
        ctx, me, step, standing = self._ctx, self._ctx.net.peer_id, self._state.step, self._standing
        liars = set()
        for d in disagreements:
            if d.liar is not None and d.liar != ctx.roster.genesis.collector:
                liars.add(d.liar)
            self._say(d)
            wrong = d.liar == me if d.decided else d.member == me
            if wrong and (me in liars or (standing.refuted == step - 1 and ctx.roster.needs_us() is None)):
                await ctx.clock.sleep(HEARD_S)
                raise expelled(step)
            standing.refuted = step if wrong else standing.refuted
        return tuple(sorted(liars))

    def _say(self, d: Disagreement) -> None:
        member, judge = (self._ctx.roster.name(p) for p in (d.member, d.judge))
        what = f"{member} and {judge} computed different gradients of the same microbatches"
        if d.liar is not None:
            what += f"; a third peer computed what {judge if d.liar == d.member else member} did"
        elif d.member == d.judge:
            what = f"{member} computed a gradient twice, with different results; its hardware may be faulty"
        elif not d.decided:
            what += f"; no third peer serves the stage to decide who is right, and that of {judge}, which does not stand out, is taken"
        self._warn(what)

    def _warn(self, what: str) -> None:
        self._ctx.emit(Note(level="warning", message=f"step {self._state.step}: {what}"))


def counted(seals: Mapping[PeerId, Seal]) -> dict[PeerId, frozenset[int]]:
    """What each one's accumulator brings to the step: nothing, where others computed it again."""
    return {m: frozenset(s.indices) if _stands(m, seals) else frozenset() for m, s in seals.items()}


def finite(seals: Mapping[PeerId, Seal]) -> bool:
    """Are all accumulators?"""
    return all(_finite(unpacked(s.sketch)) for s in seals.values())


def due(seals: Mapping[PeerId, Seal]) -> Trial | None:
    """What is to be computed again before these accumulators are reduced: one replica's at a time."""
    return _appeal(seals) or (
        _first_trial(seals) if sum(len(_asked_for(s, seals)) for s in seals.values()) < MAX_TRIALS else None
    )


def disagreements(seals: Mapping[PeerId, Seal]) -> list[Disagreement]:
    """That did not end in agreement."""
    return [_judged(m, j, seals) for m, j, same in _findings(seals) if not same]


def _first_trial(seals: Mapping[PeerId, Seal]) -> Trial | None:
    if any(same and not _finite(_of(seals[j], m)) for m, j, same in _findings(seals)):
        return None  # the step is not finite, as two have found: nothing else matters
    sums = {m: s for m in seals if _stands(m, seals) and (s := _own_sum(seals[m], seals)) is not None}
    suspects = [m for m in outlying(sums) if not _asked_for(seals[m], seals)]
    for member in suspects:
        judge = _judge(seals, suspects) or (member if len(seals) == 1 else None)
        if judge is not None:
            return Trial(member, judge, frozenset(seals[member].indices))
    return None


def _appeal(seals: Mapping[PeerId, Seal]) -> Trial | None:
    """A disagreement, and a third who can decide it."""
    for member, judge, same in _findings(seals):
        if same or member == judge or seals[judge].gave_up is not None or _given_up(seals[member]).excused:
            continue
        third = _judge(seals, [member, judge])
        if third is not None:
            return Trial(judge, third, frozenset(seals[judge].indices), appeal=True)
    return None


def _judge(seals: Mapping[PeerId, Seal], involved: list[PeerId]) -> PeerId | None:
    """Who has the least to do of those that are not ``involved``; what is added to what is not finite cannot be
    told."""
    able = [m for m in seals if m not in involved and _stands(m, seals) and _finite(unpacked(seals[m].sketch))]
    return min(able, key=lambda m: (len(seals[m].indices), m), default=None)


def _judged(member: PeerId, judge: PeerId, seals: Mapping[PeerId, Seal]) -> Disagreement:
    """The third's sketch is of what the judge held: its own microbatches and the member's."""
    given_up = seals[judge].gave_up
    if given_up is not None and given_up.excused:
        given_up = None
    third = next((m for m, s in seals.items() if m != judge and any(f.member == judge for f in s.findings)), None)
    if member == judge or given_up is None or third is None:
        return Disagreement(member, judge, decided=False, liar=None)
    found, claim = _of(seals[third], judge), _given_up(seals[member]).sketch
    with np.errstate(invalid="ignore", over="ignore"):
        if_judge_lied = unpacked(given_up.sketch) - _of(seals[judge], member) + unpacked(claim)
    if alike(found, unpacked(given_up.sketch)):
        return Disagreement(member, judge, decided=True, liar=member)
    return Disagreement(member, judge, decided=True, liar=judge if alike(found, if_judge_lied) else None)


def _findings(seals: Mapping[PeerId, Seal]) -> Iterator[tuple[PeerId, PeerId, bool]]:
    """(member, judge, whether they agree); what a third says of a judge decides the judge's disagreement, and is none
    of its own."""
    for judge, seal in sorted(seals.items()):
        for finding in seal.findings:
            claim = seals[finding.member].gave_up if finding.member in seals else None
            thirds = finding.member != judge and finding.member in seals and bool(seals[finding.member].findings)
            if claim is not None and not thirds:
                yield finding.member, judge, alike(unpacked(claim.sketch), unpacked(finding.sketch))


def _stands(member: PeerId, seals: Mapping[PeerId, Seal]) -> bool:
    """Does its accumulator count? Not if another computed it again, and holds it; if it did so itself, for want of
    others, it does."""
    if any(f.member == member for f in seals[member].findings):
        return True
    own = set(seals[member].indices)
    found = any(
        f.member == member and own <= set(s.indices) for m, s in seals.items() if m != member for f in s.findings
    )
    return seals[member].gave_up is None and not found


def _asked_for(seal: Seal, seals: Mapping[PeerId, Seal]) -> list[Finding]:
    """Findings on what was given up. Others protect nobody: they may be made up."""
    return [f for f in seal.findings if f.member in seals and seals[f.member].gave_up is not None]


def _own_sum(seal: Seal, seals: Mapping[PeerId, Seal]) -> Sum | None:
    """Without what it computed again for others."""
    theirs = _asked_for(seal, seals)
    count = len(seal.indices) - sum(len(_given_up(seals[f.member]).indices) for f in theirs)
    if count <= 0:
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        return Sum(count, unpacked(seal.sketch) - sum((unpacked(f.sketch) for f in theirs), np.zeros(())))


def _of(seal: Seal, member: PeerId) -> Sketch:
    return next(unpacked(f.sketch) for f in seal.findings if f.member == member)


def _given_up(seal: Seal) -> GivenUp:
    assert seal.gave_up is not None
    return seal.gave_up


def _finite(sketch: Sketch) -> bool:
    return bool(np.isfinite(sketch).all())
