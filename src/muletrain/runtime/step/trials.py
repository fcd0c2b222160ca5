"""Gradients that stand out are computed again by another replica, and only disagreement has consequences (DESIGN, invariant 5).

Seals carry sketches of the accumulators. Whoever's stands out (``policy.outliers``) gives up its accumulator, keeping to what it had
announced; a *judge*, another replica if there is one, runs its microbatches again into its own, and says what came of them: its sketch
after, less its sketch before. Alike: nothing was wrong, and what was computed again counts. Not alike: a third replica computes
again what the judge has by now, so that whoever is alone with its result is the liar, and is expelled. Where there is no third,
what does not stand out is taken for this step, and nobody is judged.

Pure functions of the seals of one attempt: all members that know the same decide the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from muletrain.optim.sketch import unpacked
from muletrain.policy.outliers import Sum, alike, outlying

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from muletrain.network.base import PeerId
    from muletrain.optim.sketch import Sketch
    from muletrain.runtime.core.messages import Finding, GivenUp, Seal

MAX_TRIALS = 6
"""In one step: each takes an attempt at averaging, and these are bounded."""


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
    """Of two replicas about what ``member`` had given up; ``judge`` computed it again. ``liar``: who is alone with its result, if a third
    decided."""

    member: PeerId
    judge: PeerId
    decided: bool
    liar: PeerId | None


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
    """Who has the least to do of those that are not ``involved``; what is added to what is not finite cannot be told."""
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
    """(member, judge, whether they agree); what a third says of a judge decides the judge's disagreement, and is none of its own."""
    for judge, seal in sorted(seals.items()):
        for finding in seal.findings:
            claim = seals[finding.member].gave_up if finding.member in seals else None
            thirds = finding.member != judge and finding.member in seals and bool(seals[finding.member].findings)
            if claim is not None and not thirds:
                yield finding.member, judge, alike(unpacked(claim.sketch), unpacked(finding.sketch))


def _stands(member: PeerId, seals: Mapping[PeerId, Seal]) -> bool:
    """Does its accumulator count? Not if another computed it again, and holds it; if it did so itself, for want of others, it does."""
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
