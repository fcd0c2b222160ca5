"""All states of one step, within bounds: what each peer knows, who is alive, which links work; and what may happen next.

What the model leaves out, and why that is sound or where it is not, is in proofs/README.md.
"""

from __future__ import annotations

from functools import cached_property, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

from proofs.model import rules
from proofs.model.rules import Action, Proposal, Reducing, Round, Row, Rows, Run, members

if TYPE_CHECKING:
    from collections.abc import Iterator


NOTHING = Reducing()


BLANK = Row((-1, 0), 0, 0)
"""The row of a peer of which nothing is known."""


class Local(NamedTuple):
    """A peer: every row as it knows them, its own included. ``stale``: it stood still, and has not synced since."""

    rows: Rows
    reducing: Reducing = NOTHING
    stale: bool = False


class State(NamedTuple):
    """``locals``: of each peer, numbers of the ``Space``. Peers and directed links are bitmaps. ``budget``: faults that may still
    happen, by kind. ``apart``: (q, p) while ``p`` could not hear of ``q``, and until it knows ``q``'s newest row after that."""

    locals: tuple[int, ...]
    dead: int
    asleep: int
    cuts: int
    budget: tuple[int, ...]
    apart: int


Label = tuple[Any, ...]
"""What happens: kind, peer, and what, for each event."""


class Topology(NamedTuple):
    """Who is ``up``; and by peer, as bitmaps: whose messages it hears (``heard``), with whom it exchanges messages
    (``linked``), the same through others, itself included (``side``)."""

    up: tuple[int, ...]
    heard: tuple[int, ...]
    linked: tuple[int, ...]
    side: tuple[int, ...]


KINDS = ("death", "cut", "one way", "sleep", "restart", "lost chunk")
"""Faults. ``lost chunk``: a reduction fails at one member though all are there."""


class Bounds(NamedTuple):
    """What is explored. ``accumulated``: the sets of stage 0's replicas at the beginning, as bitmaps, ``sealed`` or not.
    ``witnesses``: peers of stage 1, which have their gradient. ``faults``: number of each of KINDS. ``max_ballot``: a
    state that waits for a later ballot counts as stuck. ``off``: rules that do not hold."""

    accumulated: tuple[int, ...]
    microbatches: int = 0
    """0: those of ``accumulated``."""
    sealed: bool = True
    witnesses: int = 1
    faults: dict[str, int] = {}  # noqa: RUF012
    max_ballot: int = 3
    off: frozenset[str] = frozenset()
    piecemeal: bool = False
    """Rows also arrive one by one, in any order, not only with all that their carrier knows."""
    late_detection: bool = True
    """Peers notice that another one is gone only after all news has arrived, not at any time."""


class Space:
    """States and successors within ``bounds``."""

    def __init__(self, bounds: Bounds) -> None:
        replicas = len(bounds.accumulated)
        stage_of = (0,) * replicas + (1,) * bounds.witnesses
        self.bounds, self.n, self.faults = bounds, len(stage_of), True
        self.run = Run(
            stage_of, bounds.microbatches or max(s.bit_length() for s in bounds.accumulated), rules.ALL - bounds.off
        )
        self._numbers: dict[Local, int] = {}
        self._locals: list[Local] = []
        self._delivered: dict[tuple[int, int, int, int, int | None], int] = {}
        self._toward = [sum(self._link(q, p) for q in range(self.n)) for p in range(self.n)]
        self._topologies: dict[tuple[int, int], Topology] = {}
        self._decided: dict[tuple[int, int, bool], Action] = {}

    # What a state says -------------------------------------------------------------------------------------------------

    def number(self, local: Local) -> int:
        if (found := self._numbers.get(local)) is None:
            found = self._numbers[local] = len(self._locals)
            self._locals.append(local)
        return found

    def local(self, state: State, p: int) -> Local:
        return self._locals[state.locals[p]]

    def own(self, state: State, p: int) -> Row:
        return self._locals[state.locals[p]].rows[p]

    @cached_property
    def initial(self) -> State:
        b, everyone = self.bounds, (1 << self.n) - 1
        rows = [
            Row((0, 0), everyone & ~(1 << p), s, seal=(0, s) if b.sealed else None) for p, s in enumerate(b.accumulated)
        ]
        alone = Round(0, (), 0)  # stage 1 has its gradient
        witness = [Row((0, 0), everyone & ~(1 << p), 0, holds=(alone,), vote=alone) for p in range(len(rows), self.n)]
        number = self.number(Local((*rows, *witness)))
        return State((number,) * self.n, 0, 0, 0, tuple(b.faults.get(kind, 0) for kind in KINDS), 0)

    def _link(self, a: int, b: int) -> int:
        """The bit of the link from ``a`` to ``b``."""
        return 1 << (a * self.n + b)

    def _up(self, state: State, p: int) -> bool:
        return not (state.dead | state.asleep) >> p & 1

    def topology(self, state: State) -> Topology:
        key = state.dead | state.asleep, state.cuts
        if (found := self._topologies.get(key)) is None:
            found = self._topologies[key] = self._topology(*key)
        return found

    def _topology(self, down: int, cuts: int) -> Topology:
        up = [p for p in range(self.n) if not down >> p & 1]
        heard = [0] * self.n
        for p in up:
            heard[p] = sum(1 << q for q in up if q != p and not cuts & self._link(q, p))
        linked = [sum(1 << q for q in members(heard[p]) if heard[q] >> p & 1) for p in range(self.n)]
        side = [1 << p for p in range(self.n)]
        for _ in up:
            side = [reduce(or_, (side[q] for q in members(linked[p])), side[p]) for p in range(self.n)]
        return Topology(tuple(up), tuple(heard), tuple(linked), tuple(side))

    # What peers do -----------------------------------------------------------------------------------------------------

    def deliver(self, p: int, q: int, of_p: int, of_q: int, only: int | None = None) -> int:
        """``p`` hears all rows that ``q`` knows, or the row of one peer ``only``."""
        key = (p, q, of_p, of_q, only)
        if (found := self._delivered.get(key)) is None:
            mine, theirs = self._locals[of_p], self._locals[of_q]
            rows = [
                a if o == p or only not in (None, o) or a.version >= b.version else b
                for o, (a, b) in enumerate(zip(mine.rows, theirs.rows, strict=True))
            ]
            if mine.rows[p].applied is not None:
                rows = list(mine.rows)
            elif not rows[p].hears >> q & 1:
                rows[p] = changed(rows[p], hears=rows[p].hears | 1 << q)
            found = self._delivered[key] = self.number(mine._replace(rows=tuple(rows)))
        return found

    def news(self, state: State) -> list[tuple[int, int, int]]:
        """(p, q, number): ``p`` would know more after ``q``'s rows arrive."""
        found, topology = [], self.topology(state)
        for p in topology.up:
            mine = state.locals[p]
            for q in members(topology.heard[p]):
                if mine != state.locals[q] and (number := self.deliver(p, q, mine, state.locals[q])) != mine:
                    found.append((p, q, number))
        return found

    def decision(self, state: State, p: int, *, patient: bool) -> Action:
        local = self.local(state, p)
        if local.stale and "look first" in self.run.rules:
            return rules.WAIT
        key = (p, state.locals[p], patient)
        if (found := self._decided.get(key)) is None:
            found = self._decided[key] = rules.decide(self.run, local.rows, p, local.reducing, patient=patient)
        return found

    def possible(self, state: State, p: int, action: Action) -> bool:
        """Can ``p`` do now what it decided? A gradient needs a holder; a ballot stays within the bound."""
        if action.kind == "take":
            return self._holder(state, p, action.what)
        if action.kind == "apply":
            own_stage = self.run.stage_of[p]
            return self._holder(state, p, action.what[own_stage])
        if action.kind == "propose":
            return bool(action.what.round.ballot <= self.bounds.max_ballot)
        return action.kind != "wait"

    def _holder(self, state: State, p: int, round_: Round) -> bool:
        return any(round_ in self.own(state, q).holds for q in members(self.topology(state).side[p]))

    def can_finish(self, state: State, p: int) -> bool:
        """Do all chunks of ``p``'s reduction arrive?"""
        round_ = self.local(state, p).reducing.now
        if round_ is None:
            return False
        linked = self.topology(state).linked[p]
        for other, *_ in round_.members:
            if other != p and not (linked >> other & 1 and self._takes_part(state, other, round_)):
                return False
        return True

    def cannot_finish(self, state: State, p: int) -> bool:
        """Does a chunk of ``p``'s reduction never arrive, as its sender is gone, or has given up?"""
        round_ = self.local(state, p).reducing.now
        if round_ is None:
            return False
        linked = self.topology(state).linked[p]
        for other, *_ in round_.members:
            left = (
                not self._takes_part(state, other, round_) and self.local(state, other).reducing.last >= round_.ballot
            )
            if other != p and (left or not linked >> other & 1):
                return True
        return False

    def _takes_part(self, state: State, p: int, round_: Round) -> bool:
        return self.local(state, p).reducing.now == round_ or round_ in self.own(state, p).holds

    # What may happen ---------------------------------------------------------------------------------------------------

    def successors(self, state: State) -> Iterator[tuple[Label, State]]:
        """What may happen next, in words, and the state after it. Raises Broken."""
        for label, p, after in self._happens(state):
            yield self._acted(label, p, after)
        if self.faults:
            yield from self._faults(state)

    def _acted(self, label: Label, p: int, state: State) -> tuple[Label, State]:
        """``p`` does at once what it decides. (To act later is to hear later.)"""
        while self._up(state, p) and self.possible(state, p, action := self.decision(state, p, patient=False)):
            done, state = self._done(state, p, action)
            label = (*label, *done)
        return label, state

    def _happens(self, state: State) -> Iterator[tuple[Label, int, State]]:
        news = self.news(state)
        at_once = dict.fromkeys(p for p, *_ in news)
        for p, q, number in news:
            yield ("hears", p, q), p, self._settled(self._with(state, p, number))
            for only in range(self.n) if self.bounds.piecemeal else ():
                part = self.deliver(p, q, state.locals[p], state.locals[q], only)
                if part not in (number, state.locals[p]):
                    yield ("hears a row", p, only), p, self._settled(self._with(state, p, part))
        for p in at_once:
            if sum(x == p for x, *_ in news) > 1:
                number = state.locals[p]
                for q in (q for x, q, _ in news if x == p):
                    number = self.deliver(p, q, number, state.locals[q])
                yield ("hears all", p, None), p, self._settled(self._with(state, p, number))
        acts = [
            (p, a) for p in self._awake(state) if self.possible(state, p, a := self.decision(state, p, patient=False))
        ]
        for p, action in acts:
            label, after = self._done(state, p, action)
            yield label, p, after
        reducing = [p for p in self._awake(state) if self.local(state, p).reducing.now is not None]
        doomed = [p for p in reducing if self.cannot_finish(state, p)]
        for p in doomed:
            yield ("fails", p, None), p, self._reduces(state, p, None)
        quiet = not news and not acts and not doomed and not any(self.local(state, p).stale for p in self._awake(state))
        for p in reducing:
            if self.can_finish(state, p):
                yield ("finishes", p, None), p, self._held(state, p, self.local(state, p).reducing.now)
            elif quiet:
                yield ("fails", p, None), p, self._reduces(state, p, None)
        yield from self._detected(state, news, quiet=quiet)
        if quiet:
            yield from self._patient(state)

    def _awake(self, state: State) -> tuple[int, ...]:
        return self.topology(state).up

    def _detected(
        self, state: State, news: list[tuple[int, int, int]], *, quiet: bool
    ) -> Iterator[tuple[Label, int, State]]:
        """Peers notice who is gone, or back; and a peer that stood still has synced."""
        for p in self._awake(state):
            row, true = self.own(state, p), self.topology(state).heard[p]
            looks = quiet or not self.bounds.late_detection or self.local(state, p).stale
            for q in members(row.hears & ~true if looks else 0):
                yield ("misses", p, q), p, self._change(state, p, hears=row.hears & ~(1 << q))
            for q in members(true & ~row.hears if looks else 0):
                yield ("hears again", p, q), p, self._change(state, p, hears=row.hears | 1 << q)
            if self.local(state, p).stale and row.hears == true and not any(x == p for x, *_ in news):
                number = self.number(self.local(state, p)._replace(stale=False))
                yield ("synced", p, None), p, self._with(state, p, number)

    def _patient(self, state: State) -> Iterator[tuple[Label, int, State]]:
        """One usual round has passed since the last news, and no action but this is left."""
        moving = sum(1 << p for p in self._awake(state) if self.can_finish(state, p))
        wanting = {
            p: a for p in self._awake(state) if self.possible(state, p, a := self.decision(state, p, patient=True))
        }
        proposing = [p for p, a in wanting.items() if a.kind == "propose"]
        for p, action in wanting.items():
            seen = rules.reached(self.run, self.local(state, p).rows, p)
            watching = [p] if isinstance(action.what, Proposal) and action.what.round.ballot == 1 else members(seen)
            stale = not all(self._sees(state, q) for q in watching if self._up(state, q))
            if action.kind == "propose" and (moving & seen or stale or self._before(state, p, proposing)):
                continue
            label, after = self._done(state, p, action)
            yield ("patience", p, None, *label), p, after

    def _sees(self, state: State, p: int) -> bool:
        """Is ``p``'s watch right?"""
        return self.own(state, p).hears == self.topology(state).heard[p]

    def _before(self, state: State, p: int, proposing: list[int]) -> bool:
        """Does a member of ``p``'s company propose, before ``p``'s patience ends?"""
        peers = rules.company(self.run, self.local(state, p).rows, p)
        return any(q < p and peers >> q & 1 for q in proposing)

    def _done(self, state: State, p: int, action: Action) -> tuple[Label, State]:
        row, what, label = self.own(state, p), action.what, (action.kind, p, action.what)
        if action.kind == "accumulate":
            if self.local(state, p).reducing.now is not None:
                raise Broken(f"{self.name(p)} adds to an accumulator that it reduces")
            before = row.accumulated
            if row.seal is None:
                return label, self._change(state, p, accumulated=before | 1 << what)
            proposal = rules.current(self.run, self.local(state, p).rows, p)
            named = None if proposal is None else rules.names(proposal.round, p)
            if proposal is not None and named == (p, row.version[0], *row.seal) and not proposal.round.chosen >> p & 1:
                before = 0  # its set overlaps another one
            number = row.seal[0] + (named is not None)
            after = before | 1 << what
            return label, self._change(
                state, p, accumulated=after, seal=(number, row.seal[1] if named is None else after)
            )
        if action.kind == "seal":
            return label, self._change(state, p, seal=(0, row.accumulated))
        if action.kind == "propose":
            return label, self._change(state, p, proposal=what)
        if action.kind == "reduce":
            self._check_sets(p, row, what)
            return label, self._reduces(state, p, what)
        if action.kind == "take":
            return label, self._held(state, p, what)
        if action.kind == "ask" and not self._holder(state, p, what[self.run.stage_of[p]]):
            return ("loses", p, what), self._change(state, p, trains=False)
        mine = what[self.run.stage_of[p]]
        self._check_record(state, p, what)
        holds = row.holds if mine in row.holds else (*row.holds, mine)
        return label, self._change(state, p, applied=what, holds=holds)

    def _held(self, state: State, p: int, round_: Any) -> State:
        row = self.own(state, p)
        state = self._reduces(state, p, None)
        vote = round_ if row.vote is None or "one vote" not in self.run.rules else row.vote
        return self._change(state, p, holds=tuple(sorted({*row.holds, round_})), vote=vote)

    def _faults(self, state: State) -> Iterator[tuple[Label, State]]:
        if all(not b for b in state.budget) and not state.asleep and not state.cuts and not state.dead:
            return
        for kind, left in zip(KINDS, state.budget, strict=True):
            spent = state._replace(budget=tuple(b - (k == kind) for k, b in zip(KINDS, state.budget, strict=True)))
            if left:
                yield from getattr(self, "_" + kind.replace(" ", "_"))(spent)
        for p in members(state.asleep):
            number = self.number(self.local(state, p)._replace(stale=True))
            awake = self._settled(self._with(state._replace(asleep=state.asleep & ~(1 << p)), p, number))
            yield ("wakes", p, None), awake
            if "look first" not in self.run.rules and self.possible(
                awake, p, action := self.decision(awake, p, patient=True)
            ):
                label, after = self._done(awake, p, action)
                yield ("wakes", p, None, "patience", p, None, *label), after
        for a in range(self.n):
            for b in range(self.n):
                both = self._link(a, b) | self._link(b, a)
                if state.cuts & self._link(a, b) and (a < b or state.cuts & both != both):
                    after = state._replace(cuts=state.cuts & ~both)
                    yield ("heals", a, b), self._settled(after)

    def _death(self, state: State) -> Iterator[tuple[Label, State]]:
        for p in range(self.n):
            if not state.dead >> p & 1:
                rows = tuple(
                    BLANK._replace(version=(self.own(state, p).version[0], 0)) if q == p else BLANK
                    for q in range(self.n)
                )
                after = self._with(state, p, self.number(Local(rows)))
                yield (
                    ("dies", p, None),
                    self._settled(after._replace(dead=state.dead | 1 << p, asleep=state.asleep & ~(1 << p))),
                )

    def _sleep(self, state: State) -> Iterator[tuple[Label, State]]:
        for p in self._awake(state):
            yield ("freezes", p, None), self._settled(state._replace(asleep=state.asleep | 1 << p))

    def _cut(self, state: State) -> Iterator[tuple[Label, State]]:
        for a in range(self.n):
            for b in range(a + 1, self.n):
                both = self._link(a, b) | self._link(b, a)
                if not state.cuts & both and not state.dead & (1 << a | 1 << b):
                    yield ("cut", a, b), self._settled(state._replace(cuts=state.cuts | both))

    def _one_way(self, state: State) -> Iterator[tuple[Label, State]]:
        for a in range(self.n):
            for b in range(self.n):
                if a != b and not state.cuts & (self._link(a, b) | self._link(b, a)):
                    after = state._replace(cuts=state.cuts | self._link(a, b))
                    yield ("one way", a, b), self._settled(after)

    def _restart(self, state: State) -> Iterator[tuple[Label, State]]:
        """A dead peer begins again, and knows nothing but its number."""
        for p in members(state.dead & (1 << len(self.bounds.accumulated)) - 1):
            row = Row((self.own(state, p).version[0] + 1, 0), 0, 0, trains=False)
            rows = [row if q == p else BLANK for q in range(self.n)]
            after = self._with(
                state._replace(dead=state.dead & ~(1 << p)), p, self.number(Local(tuple(rows), stale=True))
            )
            yield ("restarts", p, None), self._settled(after)

    def _lost_chunk(self, state: State) -> Iterator[tuple[Label, State]]:
        for p in self._awake(state):
            if self.can_finish(state, p):
                yield ("loses a chunk", p, None), self._reduces(state, p, None)

    # States ------------------------------------------------------------------------------------------------------------

    def _with(self, state: State, p: int, number: int) -> State:
        local = self._locals[number]
        if local.rows[p].applied is not None:  # its other knowledge changes nothing: who hears it takes the record
            rows = tuple(row if q == p else BLANK for q, row in enumerate(local.rows))
            number = self.number(Local(rows))
        return state._replace(locals=(*state.locals[:p], number, *state.locals[p + 1 :]))

    def _change(self, state: State, p: int, **fields: Any) -> State:
        local = self.local(state, p)
        row = changed(local.rows[p], **fields)
        return self._settled(
            self._with(state, p, self.number(local._replace(rows=(*local.rows[:p], row, *local.rows[p + 1 :]))))
        )

    def _reduces(self, state: State, p: int, round_: Round | None) -> State:
        local = self.local(state, p)
        last = local.reducing.last if round_ is None else max(local.reducing.last, round_.ballot)
        return self._with(state, p, self.number(local._replace(reducing=Reducing(round_, last))))

    def _settled(self, state: State) -> State:
        """``state`` with the pairs that are ``apart`` now."""
        apart = state.apart
        if not apart and not state.asleep and not state.cuts and not state.dead:
            return state
        sides = self.topology(state).side
        for p in range(self.n):
            local, all_ = self.local(state, p), self._toward[p]
            if local.rows[p].applied is not None or state.dead >> p & 1:
                apart &= ~all_
                continue
            if state.asleep >> p & 1:  # no excuse: it can tell that it stood still
                continue
            for q in range(self.n):
                bit = self._link(q, p)
                if not sides[p] >> q & 1:
                    apart |= bit
                elif apart & bit and local.rows[q] == self.own(state, q) and not local.stale:
                    apart &= ~bit
        return state if apart == state.apart else state._replace(apart=apart)

    # Promises ----------------------------------------------------------------------------------------------------------

    def _check_sets(self, p: int, row: Row, round_: Round) -> None:
        """Each microbatch is in the gradient once, and ``p`` gives the set that the round names."""
        sets = [s for q, *_, s in round_.members if round_.chosen >> q & 1]
        if sum(sets) != self.run.full or reduce(or_, sets) != self.run.full:
            raise Broken(f"{self.text(round_)} has a microbatch twice, or lacks one")
        if (p, row.accumulated) not in {(q, s) for q, *_, s in round_.members}:
            raise Broken(f"{self.name(p)} reduces {members(row.accumulated)} in {self.text(round_)}")

    def _check_record(self, state: State, p: int, record: tuple[Round, ...]) -> None:
        """No peer makes another record than a peer applied that it can hear of."""
        applied = {q: self.own(state, q).applied for q in range(self.n) if not state.dead >> q & 1}
        if record in applied.values():
            return
        for q, other in applied.items():
            if other is not None and not state.apart & self._link(q, p):
                raise Broken(
                    f"{self.name(p)} makes the record {self.text(record)}, and {self.name(q)} applied {self.text(other)}"
                )

    def stuck(self, state: State) -> str | None:
        """The promise that a state breaks in which nothing but faults can happen: a side with a replica of each stage
        applies a record."""
        for p in self._awake(state):
            side = members(self.topology(state).side[p])
            training = {self.run.stage_of[q] for q in side if self.own(state, q).trains}
            if (
                self.own(state, p).applied is None
                and len(training) == 1 + max(self.run.stage_of)
                and self.own(state, p).trains
            ):
                return f"{self.name(p)} waits for ever" + (
                    ", as ballots rise without end" if self._risen(state) else ""
                )
        return None

    def _risen(self, state: State) -> bool:
        """Did a proposal reach the highest ballot explored?"""
        rows = [self.own(state, p) for p in range(self.n)]
        return any(r.proposal is not None and r.proposal.round.ballot >= self.bounds.max_ballot for r in rows)

    def name(self, p: int) -> str:
        replicas = len(self.bounds.accumulated)
        return "ABCDE"[p] if p < replicas else "XYZ"[p - replicas]

    def text(self, what: Any) -> str:
        """A microbatch, peer, round, proposal or record in words."""
        if what is None:
            return ""
        if isinstance(what, int):
            return str(what)
        if isinstance(what, Proposal):
            return self.text(what.round) + (f" that needs {members(what.needs)}" if what.needs else "")
        if not isinstance(what, Round):
            return self.text(what[0])
        parts = (
            f"{self.name(p)}{members(s)}" + ("" if what.chosen >> p & 1 else " dropped") for p, _, _, s in what.members
        )
        return f"({what.ballot}: {', '.join(parts)})"

    def words(self, label: Label) -> str:
        """What happened, in words."""
        parts = []
        for kind, p, what in zip(label[::3], label[1::3], label[2::3], strict=True):
            of_peer = kind in ("hears", "hears a row", "hears again", "misses", "cut", "one way", "heals")
            parts.append(f"{self.name(p)} {kind} {self.name(what) if of_peer else self.text(what)}".rstrip())
        return "; ".join(parts)


class Broken(Exception):
    """A promise is broken."""


def changed(row: Row, **fields: Any) -> Row:
    return row._replace(version=(row.version[0], row.version[1] + 1), **fields)
