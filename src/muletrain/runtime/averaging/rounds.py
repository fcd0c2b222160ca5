"""A round of averaging: its members, the owners' shards, and the attendance of members.

The arrival time of a chunk tells nothing about its sender: links may be slow, and members send to few receivers at a
time. So a member is judged by the arrival of any message, and by its own answers.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError
from muletrain.policy.deadline import CEILING_S, Usual
from muletrain.policy.shards import CHUNK, chunk_ranges, shard_ranges
from muletrain.runtime.core.times import AGAIN_S, ENDLESS, GONE_S, LOOK_S, PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Set

    from muletrain.network.base import PeerId
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.row import Row

AT_ONCE = 8
"""Most members asked at once."""
SILENT = 2
"""Looks without any sign of a member before a probe."""
USUAL = 2.0
"""Usual rounds after which a member that reports progress is overdue (1 GB takes many minutes on a slow link)."""


def usual_round() -> Usual:
    """Returns a new measure of round durations, from which a member's part counts as overdue."""
    return Usual(CEILING_S, floor_s=GONE_S, times=USUAL, longest_s=ENDLESS * PATIENCE_S)


class RoundFailed(MuletrainError):
    """This attempt failed. Accumulators are untouched, so another attempt can follow."""


@dataclass(frozen=True)
class Round:
    """One attempt at reducing a stage's gradient. ``contributors``: members with microbatches."""

    id: bytes
    lineage: bytes
    step: int
    stage: int
    members: tuple[PeerId, ...]
    owners: tuple[PeerId, ...]
    """Members that reduce one shard each, in the order of the shards."""
    contributors: tuple[PeerId, ...]
    microbatches: int
    n_trained: int
    stop: bool
    leaves: tuple[PeerId, ...] = ()
    expelled: tuple[PeerId, ...] = ()
    finite: bool = True
    """All accumulators were finite at the time of the seals."""
    chunk: int = CHUNK
    """Elements of a chunk."""

    def others(self, member: PeerId) -> tuple[PeerId, ...]:
        """The other members in the sending order of ``member``: each member begins with a different receiver."""
        k = self.members.index(member)
        return (*self.members[k + 1 :], *self.members[:k])

    def chunks(self, owner: PeerId) -> list[tuple[int, tuple[int, int]]]:
        """(chunk number, element range) of the shard that ``owner`` reduces, if any. Numbers are unique in the round."""
        return self._chunks.get(owner, [])

    @cached_property
    def _chunks(self) -> dict[PeerId, list[tuple[int, tuple[int, int]]]]:
        shards, numbers = shard_ranges(self.n_trained, len(self.owners)), itertools.count()
        return {
            owner: [(next(numbers), span) for span in chunk_ranges(a, b, self.chunk)]
            for owner, (a, b) in zip(self.owners, shards, strict=True)
        }


class Attendance:
    """Watches the other members of one round, as senders and as receivers of chunks."""

    def __init__(
        self,
        ctx: Context,
        round_: Round,
        owing: Callable[[], Mapping[PeerId, int]],
        taking: Callable[[], Set[PeerId]],
        holders: Callable[[], Collection[object]],
        overdue_s: float,
    ) -> None:
        """For ``owing``, ``taking`` and ``holders`` see ``Averager``. ``overdue_s``: seconds without a chunk after which a
        member that reports progress fails the round."""
        self._ctx, self._round, self._overdue_s = ctx, round_, overdue_s
        self._owing, self._taking, self._holders = owing, taking, holders
        self._begun = ctx.clock.now()
        self._came: dict[PeerId, float] = {}
        self._asked: dict[PeerId, float] = {}
        self.silent: dict[PeerId, int] = {}
        """Members with long overdue chunks; see ``Averager.owing``."""
        self.absent: set[PeerId] = set()
        """Members that were found at another step."""
        self._moved: dict[PeerId, tuple[int, float]] = {}
        """Bytes that each member reported as moved, and the time since then."""

    def came(self, member: PeerId) -> None:
        """A chunk of ``member`` arrived."""
        self._came[member] = self._ctx.clock.now()

    async def watch(self) -> None:
        """Raises RoundFailed if a live member takes no part in the round. Ends when cancelled, or with a member that is
        elsewhere for ``AGAIN_S``, makes no progress for ``GONE_S``, or takes ``USUAL`` usual rounds."""
        ctx, round_ = self._ctx, self._round
        while True:
            await ctx.clock.sleep(LOOK_S)
            owing, now = self._owing(), ctx.clock.now()
            self.silent = {m: w for m, w in owing.items() if now - self._came.get(m, self._begun) >= GONE_S / 2}
            due = [m for m in owing.keys() | self._taking() if self._is_due(m, now, owes=m in owing)]
            asked = sorted(due, key=lambda m: (self._asked.get(m, self._begun), m))[:AT_ONCE]
            self._asked.update(dict.fromkeys(asked, now))
            probes = (ctx.detector.probe(m, round_.lineage, round_.step, brief=True) for m in asked)
            for member, progress in zip(asked, await asyncio.gather(*probes), strict=True):
                if progress is None:  # perhaps marked down before we waited for its chunks
                    ctx.detector.give_up(member, "it answers no probe")
                elif member in owing:
                    self._judge(member, progress)

    def _is_due(self, member: PeerId, now: float, *, owes: bool) -> bool:
        asked = self._asked.get(member, self._begun)
        if self._ctx.detector.silent_s(member) >= SILENT * LOOK_S:
            return now - asked >= SILENT * LOOK_S
        return owes and now - max(asked, self._came.get(member, self._begun)) >= AGAIN_S

    def _judge(self, member: PeerId, progress: Row) -> None:
        now, who = self._ctx.clock.now(), f"averaging step {self._round.step + 1}: {self._ctx.roster.name(member)}"
        before, since = self._moved.get(member, (-1, now))
        self._moved[member] = progress.moved, now if progress.moved > before else since
        late_s, stuck_s = now - self._came.get(member, self._begun), now - self._moved[member][1]
        if (not progress.current or progress.round != self._round.id) and late_s > AGAIN_S:
            self.absent |= set() if progress.current else {member}
            raise RoundFailed(
                f"{who} is alive, but {'not in this round' if progress.current else f'at step {progress.step + 1}'}"
            )
        if stuck_s > AGAIN_S and self._holders():
            raise RoundFailed(f"{who} makes no progress, and a replica holds the whole gradient")
        if stuck_s > GONE_S or late_s > self._overdue_s:
            raise RoundFailed(f"{who} is alive, but has sent nothing for {late_s:.0f} s")
