"""The pool decides which worker computes which sequences of a microbatch (HYBRID sec. 3.2.1).

A server puts in passes of microbatches. Workers take *parts*: runs of sequences, as many as correspond to the worker's
share of all workers' speed. Each time that a worker takes a part is a *giving*, with a unique number. A part that a
worker does not bring back in time may also be given to more workers, and the first result counts. The pool is a state
machine without clock, network and tensors.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from muletrain.policy.passes import LAST, Given, Giving, Open, Part, Pass, Uncut
from muletrain.policy.recent import Recent
from muletrain.policy.worker import Worker, worth_their_accumulators

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

OWN = ""
"""The worker that is the server's own device."""
SLOWEST = 0.25
"""Share of the clients' mean speed that a server's own device must have to compute as well. A slower one would hold
microbatches up."""
SOONER = 0.5
"""Share of the time until a busy worker is done, within which another one takes a part that waits there."""
LEFT_S = 10.0
"""Seconds for which nobody took a part, after which also a slower device of the server takes the part."""


class Pool:
    """The parts and workers of one server."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._gone: Recent[Worker] = Recent()
        """Workers that were lost: their speeds are remembered."""
        self._uncut: dict[Pass, deque[Uncut]] = {Pass.FORWARD: deque(), Pass.LOSS: deque()}
        self._free: dict[Part, None] = {}
        """Parts that any worker may take, oldest first."""
        self._again: dict[Part, None] = {}
        """Free parts that nobody waits for before the step's end."""
        self._open: dict[Part, Open] = {}
        """All parts that were cut, and are wanted."""
        self._givings: dict[int, Giving] = {}
        self._numbers = self._newest = 0
        self._unwanted: list[tuple[str, int]] = []

    # Workers ----------------------------------------------------------------------------------------------------------

    def enlist(self, worker: str) -> None:
        """``worker`` comes, perhaps again, and takes nothing yet."""
        self._workers[worker] = self._gone.pop(worker) if worker in self._gone else Worker()

    def ready(self, worker: str, room: int, steps: Collection[int] = ()) -> None:
        """``worker`` takes up to ``room`` parts at once, from now on also of ``steps``; (): of any."""
        if (known := self._workers.get(worker)) is not None:
            known.make_ready(room, steps)

    def rest(self, now: float) -> None:
        """No worker but the server's own device takes anything until ready again."""
        for worker in self.workers():
            self._free_of(worker, now)
            self._workers[worker].rest()

    def lost(self, worker: str, now: float) -> None:
        """``worker`` is gone, and all assigned parts are free for the rest."""
        if worker in self._workers:
            self._free_of(worker, now)
            self._workers[worker].rest()
            self._gone[worker] = self._workers.pop(worker)

    def _free_of(self, worker: str, now: float) -> None:
        """Take everything back from ``worker``."""
        gone = self._workers[worker]
        parts = [*gone.reserved, *(self._givings[number].part for number in gone.out)]
        for number in gone.out:
            giving = self._givings.pop(number)
            if giving.part in self._open:
                self._open[giving.part].givings.discard(number)
        gone.out.clear()
        gone.reserved.clear()
        gone.late = False
        for part in parts:
            self._release(part, now)

    def workers(self) -> tuple[str, ...]:
        """Returns the workers beside the server's own device."""
        return tuple(name for name in self._workers if name != OWN)

    def speed(self) -> float:
        """Returns how many forward passes of a sequence the workers beside the server's own device do in a second."""
        return sum(w.speed for name, w in self._workers.items() if name != OWN and not w.late)

    def own_speed(self) -> float:
        """Returns the same of the server's own device; 0: unknown, or does not share passes."""
        return own.speed if self._shares(OWN, own := self._workers[OWN]) else 0.0

    def sharing_speed(self) -> float:
        """Returns the same of all that share passes now."""
        return sum(w.speed for name, w in self._workers.items() if self._shares(name, w))

    def helpers(self, handing_over_s: float) -> int:
        """See ``worth_their_accumulators``: for parts to be computed again."""
        work = [p.cost for p in (*self._free, *self._again) if p.what is Pass.AGAIN and self._open[p].only is None]
        speeds = [w.speed for name, w in self._workers.items() if self._shares(name, w) and w.speed]
        return worth_their_accumulators(work, speeds, handing_over_s)

    # Passes and parts -------------------------------------------------------------------------------------------------

    def put(self, what: Pass, step: int, index: int, rows: int, now: float) -> None:
        """Put in a pass of a whole microbatch: a forward, or a loss. Workers cut the pass when taking parts."""
        older, self._newest = [*self._again] if step > self._newest else [], step
        for part in older:
            self._release(part, now)
        self._uncut[what].append(Uncut(what, step, index, 0, rows, now))

    def put_part(
        self, part: Part, now: float, prefers: str | None = None, barred: Collection[str] = (), only: str | None = None
    ) -> None:
        """Put in one part. ``prefers``: the worker that has the forward; another takes the part only once that one is
        gone, or late. ``barred``: excluded workers; ``only``: the only allowed worker."""
        if part in self._open:
            wanted = self._open[part]
            wanted.barred = frozenset(barred)
            if wanted.only != only:
                wanted.only = only
                for known in self._workers.values():
                    if part in known.reserved:
                        known.reserved.remove(part)
                self._release(part, now)
            return
        self._open[part] = Open(barred=frozenset(barred), only=only)
        worker = self._workers.get(prefers) if prefers is not None else None
        if worker is None or worker.late or not (worker.ready and worker.has(part.step)):
            self._release(part, now)
        else:
            worker.reserved.append(part)

    def _release(self, part: Part, now: float) -> None:
        """Let any worker take ``part``, unless a worker that is not late has this part."""
        wanted = self._open.get(part)
        if wanted is None or any(not self._is_late(self._givings[n]) for n in wanted.givings):
            return
        wanted.since = min(wanted.since, now)
        # an older part would starve there; but a recomputation by ``only`` one may come from another
        last = part.step >= self._newest or (part.what is Pass.AGAIN and wanted.only is not None)
        self._again.pop(part, None)
        (self._again if part.what in LAST and last else self._free)[part] = None

    def drop(self, step: int, index: int | None = None, *, again: bool = False) -> None:
        """Forget the passes of a microbatch, or all of a step. ``again``: also the parts of that microbatch to be
        computed again, or checked."""

        def dropped(found: Uncut | Part) -> bool:
            if found.step != step or index not in (None, found.index):
                return False
            return index is None or again or found.what not in LAST

        for what, waiting in self._uncut.items():
            self._uncut[what] = deque(uncut for uncut in waiting if not dropped(uncut))
        for part in [p for p in self._open if dropped(p)]:
            self._close(part)

    def drop_again(self, step: int) -> None:
        """Forget a step's parts to be computed again, or checked."""
        self.drop_parts([p for p in self._open if p.what in LAST and p.step == step])

    def drop_parts(self, parts: Iterable[Part]) -> None:
        """Forget ``parts``."""
        for part in parts:
            if part in self._open:
                self._close(part)

    def _close(self, part: Part) -> None:
        """``part`` is no longer wanted. Workers that have the part keep a place occupied until bringing the part
        back."""
        self._free.pop(part, None)
        self._again.pop(part, None)
        self._unwanted += [(self._givings[n].worker, n) for n in sorted(self._open.pop(part).givings)]

    def unwanted(self) -> list[tuple[str, int]]:
        """Returns the givings that have become unwanted since the last call, and the workers."""
        found, self._unwanted = self._unwanted, []
        return found

    # Giving and coming back -------------------------------------------------------------------------------------------

    def take(self, worker: str, now: float) -> Given | None:
        """Gives ``worker`` the next part: one with the forward there, then one that nobody else has (any more), a share
        of the longest-waiting microbatch, and one that waits at a busy worker. While other workers have room, or are
        much faster, the server's own device takes only parts with the forward there, parts that a worker could not
        compute, and parts that nobody takes. Returns None without a suitable part or room."""
        taker = self._workers.get(worker)
        if taker is None or len(taker.out) >= taker.room or taker.late:
            return None
        part = self._of_its_own(taker) or self._first_of(self._free, worker, now)
        part = part or self._share(worker, now) or self._first_of(self._again, worker, now) or self._of_another(worker)
        if part is None:
            return None
        number = self._numbers = self._numbers + 1
        cost = part.cost + sum(self._givings[n].part.cost for n in taker.out)
        taker.out.add(number)
        self._givings[number] = Giving(worker, part, now, now + taker.due_s(cost, self._slowest()))
        self._open[part].givings.add(number)
        return Given(number, part)

    def _slowest(self) -> float:
        """Returns the speed of the slowest measured worker; 0: none is measured."""
        return min((w.speed for w in self._workers.values() if w.measured), default=0.0)

    def can_check(self, step: int, *by: str) -> bool:
        """Could a worker other than ``by`` soon recompute the parts of ``step`` that ``by`` computed?"""
        return any(
            w.ready and w.has(step) and not w.late and name not in by and (name != OWN or not self._holds_up(w))
            for name, w in self._workers.items()
        )

    def _others_take(self, step: int, barred: Collection[str] = (), uncut: Uncut | None = None) -> bool:
        """Is there a worker, not ``barred`` and beside the server's own device, that has room (for a part of ``uncut``),
        or is much faster?"""
        slow = self._holds_up(self._workers[OWN])
        return any(
            (w.ready and w.has(step))
            and not w.late
            and name not in (OWN, *barred)
            and (slow or (len(w.out) < w.room and (uncut is None or not self._has_part_of(uncut, w))))
            for name, w in self._workers.items()
        )

    def _holds_up(self, own: Worker) -> bool:
        """Is the server's own device much slower than the clients?"""
        speeds = [w.speed for w in self._workers.values() if w is not own and w.ready and not w.late]
        return bool(speeds and own.measured) and own.speed < SLOWEST * sum(speeds) / len(speeds)

    def _of_its_own(self, taker: Worker) -> Part | None:
        while taker.reserved:
            if (part := taker.reserved.popleft()) in self._open:
                return part
        return None

    def _of_another(self, worker: str) -> Part | None:
        """Returns the last part that waits at a busy worker, if ``worker`` is done much sooner, including the
        forward."""
        taker = self._workers[worker]
        if not taker.measured or (worker == OWN and self._holds_up(taker)):
            return None
        for other in sorted(self._workers.values(), key=self._busy_s, reverse=True):
            for part in reversed(other.reserved):
                wanted = self._open.get(part)
                if wanted is None or not taker.has(part.step) or wanted.only is not None or worker in wanted.barred:
                    continue
                if part.what.alone * part.rows / taker.speed >= SOONER * self._busy_s(other):
                    break
                other.reserved.remove(part)
                return part
        return None

    def _busy_s(self, worker: Worker) -> float:
        """Returns the seconds until ``worker`` has computed all waiting parts."""
        cost = sum(part.cost for part in (*worker.reserved, *(self._givings[n].part for n in worker.out)))
        return cost / worker.speed if worker.measured else 0.0

    def _first_of(self, free: dict[Part, None], worker: str, now: float) -> Part | None:
        for part in free:
            wanted = self._open[part]
            if (
                not self._workers[worker].has(part.step)
                or worker in wanted.barred
                or wanted.only not in (None, worker)
                or (worker in wanted.failed and (worker, part.what) != (OWN, Pass.AGAIN))
                or any(self._givings[n].worker == worker for n in wanted.givings)
            ):
                continue
            own_turn = wanted.only is not None or wanted.failed or now - wanted.since >= LEFT_S
            if worker != OWN or own_turn or not self._others_take(part.step, wanted.barred):
                del free[part]
                return part
        return None

    def _share(self, worker: str, now: float) -> Part | None:
        for waiting in self._uncut.values():
            for uncut in waiting:
                own_turn = (
                    worker != OWN or now - uncut.since >= LEFT_S or not self._others_take(uncut.step, uncut=uncut)
                )
                taker = self._workers[worker]
                if not (own_turn and taker.has(uncut.step)) or self._has_part_of(uncut, taker):
                    continue
                may_be_slow = worker == OWN and not self._workers[OWN].measured and len(self._workers) > 1
                share = 0.0 if may_be_slow else self._share_of(worker, uncut)
                left = uncut.end - uncut.next
                part = Part(uncut.what, uncut.step, uncut.index, uncut.next, min(left, max(1, round(left * share))))
                self._open[part] = Open()
                uncut.next += part.rows
                if uncut.next == uncut.end:
                    waiting.remove(uncut)
                return part
        return None

    def _has_part_of(self, uncut: Uncut, worker: Worker) -> bool:
        """Has ``worker`` a part of that pass? Then the rest is for other workers: a pass ends with the last part."""
        return any(self._givings[n].part[:3] == (uncut.what, uncut.step, uncut.index) for n in worker.out)

    def _share_of(self, worker: str, uncut: Uncut) -> float:
        """Returns the share of ``worker`` in the speed of all that share the rest of a pass; of equal ones if the speed
        of any is unknown."""

        def shares(name: str, w: Worker) -> bool:
            return self._shares(name, w) and w.has(uncut.step) and not self._has_part_of(uncut, w)

        speeds = {n: w.speed for n, w in self._workers.items() if n == worker or shares(n, w)}
        return speeds[worker] / sum(speeds.values()) if all(speeds.values()) else 1 / len(speeds)

    def _shares(self, name: str, worker: Worker) -> bool:
        """Does a worker get a share of each microbatch?"""
        if not worker.ready or worker.late:
            return False
        return name != OWN or (worker.measured and not self._holds_up(worker))

    def wants(self, part: Part) -> bool:
        """Is ``part`` to be computed?"""
        return part in self._open

    def has_any(self, worker: str) -> bool:
        """Has ``worker`` any part that did not come back?"""
        return worker in self._workers and bool(self._workers[worker].out)

    def busy(self, worker: str, step: int) -> bool:
        """Has ``worker`` parts of ``step`` that should come back soon?"""
        if (known := self._workers.get(worker)) is None or known.late:
            return False
        return any(part.step == step for part in (*known.reserved, *(self._givings[n].part for n in known.out)))

    def part(self, worker: str, number: int) -> Part | None:
        """Returns the part given to ``worker`` under ``number`` and not yet back."""
        giving = self._givings.get(number)
        return giving.part if giving is not None and giving.worker == worker else None

    def wants_back(self, worker: str, number: int) -> bool:
        """Is the result of the giving ``number`` wanted of ``worker``?"""
        part = self.part(worker, number)
        return part is not None and part in self._open and number in self._open[part].givings

    def done(self, worker: str, number: int, now: float) -> bool:
        """``worker`` brings a giving back. Returns False if not wanted (any more), or there is no such giving."""
        if (giving := self._back(worker, number)) is None:
            return False
        first = not self._workers[worker].measured
        self._workers[worker].came_back(giving.part, giving.since, now)
        self._close(giving.part)
        if first:
            self._hasten()
        return True

    def _hasten(self) -> None:
        """Another worker's speed is known: wait no longer for those that have brought nothing back yet."""
        slowest = self._slowest()
        for giving in self._givings.values():
            if not (taker := self._workers[giving.worker]).measured:
                cost = sum(self._givings[n].part.cost for n in taker.out)
                giving.due = min(giving.due, giving.since + taker.due_s(cost, slowest))

    def failed(self, worker: str, number: int, now: float) -> bool:
        """``worker`` does not compute a given part: others may, and the server's own device may try once more what has to
        be computed again. Returns True if ``worker`` had failed before."""
        if (giving := self._back(worker, number)) is None:
            return False
        failed = self._open[giving.part].failed
        before = worker in failed
        failed.add(worker)
        self._release(giving.part, now)
        return before

    def _back(self, worker: str, number: int) -> Giving | None:
        """Returns the giving, if wanted. An equal part that was put in later does not match."""
        if self.part(worker, number) is None:
            return None
        giving, known = self._givings.pop(number), self._workers[worker]
        known.out.discard(number)
        known.late = False
        wanted = self._open.get(giving.part)
        if wanted is None or number not in wanted.givings:
            return None
        wanted.givings.discard(number)
        return giving

    def expire(self, now: float) -> tuple[str, ...]:
        """Free the parts that late workers have, and should compute next. Returns the workers that became late, which
        get nothing more until a part comes back."""
        late = dict.fromkeys(g.worker for g in self._givings.values() if g.due <= now and not self._is_late(g))
        for name in late:
            self.doubt(name, now)
        return tuple(late)

    def doubt(self, worker: str, now: float) -> None:
        """Free the parts that ``worker`` has, and should compute next. ``worker`` gets nothing more until a part comes
        back, or until ``reconcile``."""
        if (known := self._workers.get(worker)) is None:
            return
        known.late = True
        for part in (*known.reserved, *(self._givings[number].part for number in known.out)):
            self._release(part, now)
        known.reserved.clear()

    def sent(self, number: int, now: float) -> None:
        """A giving is under way to the worker."""
        if number in self._givings:
            self._givings[number].sent_at = now

    def reconcile(self, worker: str, parts: Collection[int], asked_at: float, now: float) -> bool:
        """``worker`` is there, and computes the givings ``parts``. The rest that was sent before ``asked_at`` never
        arrived, or the results were lost. Returns whether there is a rest: of two workers that lose each result, one
        takes each part that the other one lost."""
        if (known := self._workers.get(worker)) is None:
            return False
        gone = [n for n in known.out.difference(parts) if self._givings[n].sent_at < asked_at]
        for number in sorted(gone):
            known.out.discard(number)
            self._unwanted.append((worker, number))
            giving = self._givings.pop(number)
            if giving.part in self._open:
                self._open[giving.part].givings.discard(number)
                self._release(giving.part, now)
        known.late = any(self._givings[number].due <= now for number in known.out)
        return bool(gone)

    def _is_late(self, giving: Giving) -> bool:
        return self._workers[giving.worker].late

    def next_due(self) -> float:
        """Returns when ``expire`` may have something to do; inf: never."""
        return min((g.due for g in self._givings.values() if not self._is_late(g)), default=math.inf)
