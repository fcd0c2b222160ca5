"""The rules by which peers agree on a step: pure functions of the rows that a peer knows.

A row is what a peer says of itself; only its owner writes it, and a higher version replaces a lower one. ``decide``
returns what a peer does now. It knows no clock: ``patient`` says that one usual round has passed since the last news.
"""

from __future__ import annotations

from collections import defaultdict
from functools import reduce
from itertools import combinations
from operator import or_
from typing import Any, NamedTuple

RULES = {
    "reach": "voters are the replicas that the judge reaches over rows of peers that hear each other",
    "all stages": "peers of other stages carry rows and gradients, so they make replicas reachable, too",
    "majority": "a round counts at once only with the votes of more than half of the voters",
    "patience": "with fewer votes, a round counts after one usual round without news",
    "all voted": "with fewer votes, a round counts only if all voters have voted (not: half of them)",
    "held by most": "with fewer votes, a round counts only once more than half of the voters hold it",
    "preferred": "of several rounds, most votes count, then the lower ballot, then the lower id",
    "applied first": "a peer that learns of an applied record takes that record",
    "one vote": "a vote never changes",
    "adopt": "a replica that reaches a holder takes that round, and proposes no other",
    "named seals": "a member reduces only a round that names its own present seal",
    "seal closes": "a sealed accumulator takes in nothing that no proposal needs",
    "mutual": "members of a round hear each other",
    "look first": "a peer that stood still syncs before it does anything, and its patience begins anew",
    "lost gradient": "a stage without a holder of its round in an applied record is lost: the run rolls back",
}
"""Each rule of the model, by the name that switches it off."""
ALL = frozenset(RULES)

Sealed = tuple[int, int, int, int]
"""Peer, incarnation, seal number, and set of microbatches as a bitmap."""


class Round(NamedTuple):
    """A reduction of one stage's gradient. All fields are its id. ``chosen``: bitmap of the members whose sets count."""

    ballot: int
    members: tuple[Sealed, ...]
    chosen: int


class Proposal(NamedTuple):
    """A ballot above 0: ``round`` names the seals that it is computed from; ``needs``: microbatches missing from it."""

    round: Round
    needs: int


class Row(NamedTuple):
    """What a peer says of itself. Sets of peers and of microbatches are bitmaps."""

    version: tuple[int, int]
    """Incarnation, and changes since it began."""
    hears: int
    accumulated: int
    trains: bool = True
    seal: tuple[int, int] | None = None
    """Number and set."""
    proposal: Proposal | None = None
    holds: tuple[Round, ...] = ()
    vote: Round | None = None
    applied: tuple[Round, ...] | None = None
    """The applied record: a round of each stage."""


class Run(NamedTuple):
    """Facts that all peers share. ``stage_of``: by peer. ``microbatches``: of the step. ``rules``: all, but in tests of
    the rules."""

    stage_of: tuple[int, ...]
    microbatches: int
    rules: frozenset[str] = ALL

    @property
    def full(self) -> int:
        return (1 << self.microbatches) - 1

    def replicas(self, stage: int) -> list[int]:
        return [p for p, s in enumerate(self.stage_of) if s == stage]


class Action(NamedTuple):
    """``kind``: wait, accumulate, seal, propose, reduce, take, apply or ask. ``what``: a microbatch, proposal, round or
    record. To ask is to request the gradient from all in reach, although no known row shows a holder: without one, the
    stage is lost."""

    kind: str
    what: Any = None


WAIT = Action("wait")
Rows = tuple[Row, ...]


def reached(run: Run, rows: Rows, me: int) -> int:
    """Returns the peers that ``me`` reaches, as a bitmap: ``me``, peers that it hears, peers that these hear, and so on.

    Rows of dead peers are not asked: nobody alive hears their owners."""
    found, todo = 1 << me, [me]
    while todo:
        new = rows[todo.pop()].hears & ~found
        found |= new
        todo += [p for p in members(new) if "all stages" in run.rules or run.stage_of[p] == run.stage_of[me]]
    return found


def members(bitmap: int) -> list[int]:
    return [p for p in range(bitmap.bit_length()) if bitmap >> p & 1]


def voters(run: Run, rows: Rows, me: int, stage: int) -> list[int]:
    """The replicas of ``stage`` that vote."""
    live, replicas = reached(run, rows, me), run.replicas(stage)
    if "reach" not in run.rules:  # a frozen row of a dead peer is asked, too
        live |= reduce(or_, (rows[p].hears for p in replicas), 0)
    return [p for p in replicas if live >> p & 1 and rows[p].trains]


def preferred(run: Run, found: dict[Round, int], own: Row) -> Round:
    """Most votes, then the lower ballot, then the lower id: the same answer for all who know the same rows."""
    if "preferred" not in run.rules and own.vote in found:
        return own.vote
    return min(found, key=lambda r: (-found[r], r))


class Tally(NamedTuple):
    """The votes of a stage's ``voters``: the ``best`` round; has it a ``majority``; have ``all_voted``?"""

    voters: list[int]
    best: Round | None
    majority: bool
    all_voted: bool


def tally(run: Run, rows: Rows, me: int, stage: int) -> Tally:
    """The votes in ``stage``, as ``me`` judges them."""
    those = voters(run, rows, me, stage)
    found: dict[Round, int] = defaultdict(int)
    for p in those:
        if (vote := rows[p].vote) is not None:
            found[vote] += 1
    if not found:
        return Tally(those, None, False, False)
    best = preferred(run, found, rows[me])
    majority = 2 * found[best] > len(those) or "majority" not in run.rules
    all_voted = sum(found.values()) == len(those) or ("all voted" not in run.rules and 2 * found[best] >= len(those))
    return Tally(those, best, majority, all_voted)


def counting(run: Run, rows: Rows, me: int, stage: int, *, patient: bool) -> Round | None:
    """The round of ``stage`` that counts."""
    those, best, majority, all_voted = tally(run, rows, me, stage)
    if best is None or majority:
        return best
    held = 2 * sum(best in rows[p].holds for p in those) > len(those)
    held = held or not {"held by most", "all voted"} <= run.rules
    return best if all_voted and held and (patient or "patience" not in run.rules) else None


def record(run: Run, rows: Rows, me: int, *, patient: bool) -> tuple[Round, ...] | None:
    """The record that ``me`` applies: one that a peer in reach applied, else the rounds of all stages that count."""
    live = reached(run, rows, me)
    applied = [row.applied for p, row in enumerate(rows) if live >> p & 1 and row.applied]
    if applied and "applied first" in run.rules:
        return min(applied)
    rounds = [counting(run, rows, me, stage, patient=patient) for stage in range(max(run.stage_of) + 1)]
    return tuple(r for r in rounds if r is not None) if None not in rounds else None


def cover(sealed: tuple[Sealed, ...]) -> tuple[int, int]:
    """Returns the members whose disjoint sets cover most microbatches, as a bitmap, and these microbatches. Of equal
    choices, most members, then the lower ones. (``policy.cover`` does this for many members.)"""
    options = []
    for size in range(1, len(sealed) + 1):
        for some in combinations(sealed, size):
            union = reduce(or_, (s[-1] for s in some))
            if union.bit_count() == sum(s[-1].bit_count() for s in some):
                options.append((-union.bit_count(), -size, sum(1 << s[0] for s in some), union))
    return min(options)[2:]


def company(run: Run, rows: Rows, me: int) -> int:
    """The replicas of ``me``'s stage that go on together, as a bitmap: the largest set of training replicas in reach
    that all hear each other, then the one with the lowest members."""
    live = reached(run, rows, me)
    able = [p for p in run.replicas(run.stage_of[me]) if live >> p & 1 and rows[p].trains]
    if "mutual" not in run.rules:
        return sum(1 << p for p in able if p == me or rows[me].hears >> p & 1)
    for size in range(len(able), 0, -1):
        for some in combinations(able, size):
            if all(rows[a].hears >> b & 1 and rows[b].hears >> a & 1 for a, b in combinations(some, 2)):
                return sum(1 << p for p in some)
    return 1 << me


def named(rows: Rows, peers: int) -> tuple[Sealed, ...] | None:
    """The present seals of ``peers``; None while one has none."""
    found = []
    for p in members(peers):
        if (seal := rows[p].seal) is None:
            return None
        found.append((p, rows[p].version[0], *seal))
    return tuple(found)


def first_round(run: Run, rows: Rows, me: int) -> Round | None:
    """The round of ballot 0, which nobody proposes: all replicas that ``me`` hears, which all hear the same replicas."""
    own = rows[me]
    stage = sum(1 << p for p in run.replicas(run.stage_of[me]) if own.hears >> p & 1 and rows[p].trains) | 1 << me
    everyone = sum(1 << p for p in run.replicas(run.stage_of[me]))
    if any((rows[p].hears | 1 << p) & everyone != (own.hears | 1 << me) & everyone for p in members(stage)):
        return None
    sealed = named(rows, stage)
    if sealed is None:
        return None
    chosen, covered = cover(sealed)
    return Round(0, sealed, chosen) if covered == run.full else None


def current(run: Run, rows: Rows, me: int) -> Proposal | None:
    """The highest proposal in reach. Of one ballot, that of the lower peer."""
    live = reached(run, rows, me)
    same = [p for p in run.replicas(run.stage_of[me]) if live >> p & 1]
    found = [(-proposal.round.ballot, p) for p in same if (proposal := rows[p].proposal) is not None]
    return rows[min(found)[1]].proposal if found else None


def names(round_: Round, peer: int) -> Sealed | None:
    """The seal of ``peer`` that the round names."""
    return next((s for s in round_.members if s[0] == peer), None)


def proposed(run: Run, rows: Rows, ballot: int, peers: int) -> Proposal | None:
    """The proposal of ``ballot`` for ``peers``; None while one has no seal."""
    sealed = named(rows, peers)
    if sealed is None:
        return None
    chosen, covered = cover(sealed)
    return Proposal(Round(ballot, sealed, chosen), run.full & ~covered)


class Reducing(NamedTuple):
    """A peer's part in reductions, which no row shows. ``now``: the round; ``last``: the highest ballot joined so far."""

    now: Round | None = None
    last: int = -1


def decide(run: Run, rows: Rows, me: int, reducing: Reducing, *, patient: bool) -> Action:
    """What ``me`` does now. ``rows``: by peer, as ``me`` knows them."""
    own = rows[me]
    if own.applied is not None:
        return WAIT
    if (found := record(run, rows, me, patient=patient)) is not None:
        live, mine = reached(run, rows, me), found[run.stage_of[me]]
        if any(mine in rows[p].holds for p in members(live)) or "lost gradient" not in run.rules:
            return Action("apply", found)
        return Action("ask", found) if patient and own.trains else WAIT
    if not own.trains or reducing.now is not None:  # a member that reduces finishes or fails first
        return WAIT
    if (round_ := _wanted(run, rows, me, patient=patient)) is not None:
        return Action("take", round_)
    if own.vote is not None and "adopt" in run.rules:
        return WAIT
    proposal = current(run, rows, me)
    if own.vote is None:
        if (microbatch := _missing(run, rows, me, proposal)) is not None:
            return Action("accumulate", microbatch)
        if own.seal is None:
            return Action("seal") if accumulated(run, rows, me) == run.full else WAIT
    if proposal is not None and proposal == own.proposal and proposal.needs:  # until its members have accumulated that
        better = proposed(run, rows, proposal.round.ballot, sum(1 << p for p, *_ in proposal.round.members))
        if better is not None and better != proposal:
            return Action("propose", better)
    target = first_round(run, rows, me) if proposal is None else (None if proposal.needs else proposal.round)
    if target is not None and _may_join(run, own, me, reducing, target):
        return Action("reduce", target)
    return _propose(run, rows, me) if patient else WAIT


def _wanted(run: Run, rows: Rows, me: int, *, patient: bool) -> Round | None:
    """The round that ``me`` takes from a holder, and votes for if that is its first."""
    own, held = rows[me], defaultdict[Round, int](int)
    for p in members(reached(run, rows, me)):
        if rows[p].trains and run.stage_of[p] == run.stage_of[me]:
            for r in rows[p].holds:
                held[r] += rows[p].vote == r
    best = preferred(run, held, own) if held else None
    if own.vote is None:
        return best if "adopt" in run.rules else None
    if "one vote" not in run.rules:
        return best if best != own.vote else None
    tied = tally(run, rows, me, run.stage_of[me])
    lacks = tied.best if tied.best not in own.holds else None  # it counts once most hold it
    return lacks if tied.all_voted and (patient or "patience" not in run.rules) else None


def accumulated(run: Run, rows: Rows, me: int) -> int:
    """The microbatches that the replicas in reach have, as a bitmap."""
    live = reached(run, rows, me)
    return reduce(or_, (rows[p].accumulated for p in run.replicas(run.stage_of[me]) if live >> p & 1))


def _may_join(run: Run, own: Row, me: int, reducing: Reducing, target: Round) -> bool:
    """May ``me`` reduce ``target``?"""
    if target.ballot <= reducing.last:
        return False
    sealed = names(target, me)
    if sealed is None or own.seal is None or target == reducing.now or target in own.holds:
        return False
    return sealed == (me, own.version[0], *own.seal) or "named seals" not in run.rules


def _missing(run: Run, rows: Rows, me: int, proposal: Proposal | None) -> int | None:
    """The next microbatch that ``me`` adds: before its seal, one of the step that no replica in reach has; after it,
    one that a proposal needs."""
    seal = rows[me].seal
    if seal is None or "seal closes" not in run.rules:
        lacking = members(run.full & ~accumulated(run, rows, me))
        if lacking or seal is None:
            return lacking[0] if lacking else None
    if seal is None or proposal is None or names(proposal.round, me) != (me, rows[me].version[0], *seal):
        return None
    sealed = proposal.round.members
    return next((m for m in members(proposal.needs) if sealed[m % len(sealed)][0] == me), None)


def _propose(run: Run, rows: Rows, me: int) -> Action:
    """A new ballot, if ``me`` is of the company that goes on."""
    peers = company(run, rows, me)
    made = [rows[p].proposal for p in members(reached(run, rows, me))]
    ballot = 1 + max(proposal.round.ballot if proposal else 0 for proposal in made)
    new = proposed(run, rows, ballot, peers) if peers >> me & 1 else None
    return WAIT if new is None else Action("propose", new)
