"""Membership of a fleet that is played as rates: serving peers, and peers on the way to a stage."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.policy.assignment import Load
from muletrain.sim.setting import mortal, seated

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from muletrain.sim.fleet.rates import Counts, Rates


@dataclass(eq=False)
class Moving:
    """A peer on the way to ``target``; until the step ends, the peer still serves ``source``."""

    kind: int
    source: int | None
    target: int


class Membership:
    """Peers of each kind, by present or next stage."""

    def __init__(self, rates: Rates, serving: Sequence[Counts] | None = None) -> None:
        """``serving``: at the start; default: machines are seated as newcomers. Raises CapacityError."""
        self.setting = rates.setting
        self.serving: list[Counts] = seated(self.setting) if serving is None else list(serving)
        self.present = [sum(counts) for counts in zip(*self.serving, strict=True)]
        """Peers of each kind, serving or on the way."""
        self.promised = [0] * len(self.setting.cut)
        """Peers that fetch the state of each stage."""
        self.moving: list[Moving] = []
        self.mortal = mortal(self.setting)
        """Kinds whose machines may leave."""
        self._service_s = rates.service_s

    @property
    def may_leave(self) -> int:
        """Machines of mortal kinds."""
        return sum(self.present[k] for k in self.mortal)

    def add(self, stage: int, kind: int, peers: int) -> None:
        counts = list(self.serving[stage])
        counts[kind] += peers
        self.serving[stage] = tuple(counts)

    def drawn(self, draw: random.Random) -> tuple[int, int | Moving] | None:
        """Draw one of the machines that may leave, all with the same chance. Returns the machine's kind, and its stage
        or its move; None: no machine may leave."""
        number = self.may_leave
        if not number:
            return None
        chosen = draw.randrange(number)
        kind = next(k for k in self.mortal if (chosen := chosen - self.present[k]) < 0)
        fetching = [m for m in self.moving if m.kind == kind and m.source is None]
        at = draw.randrange(sum(n[kind] for n in self.serving) + len(fetching))
        for stage, counts in enumerate(self.serving):
            if (at := at - counts[kind]) < 0:
                return kind, stage
        return kind, fetching[at]

    def fetches(self, moving: Moving) -> None:
        """The peer has left its stage and fetches the state of its target."""
        moving.source = None
        if moving not in self.moving:
            self.moving.append(moving)
        self.promised[moving.target] += 1

    def stops(self, moving: Moving) -> None:
        """The peer fetches nothing any more."""
        self.moving.remove(moving)
        self.promised[moving.target] -= 1

    def does(self, stage: int) -> float:
        """Microbatches/s that a stage's peers compute together."""
        return sum(n / s for n, s in zip(self.serving[stage], self._service_s[stage], strict=True))

    def share(self, stage: int, kind: int) -> float:
        """One peer's part of a stage's work, by kind."""
        return 1 / self._service_s[stage][kind] / self.does(stage)

    def loads(self) -> dict[str, Load]:
        """The loads that peers would announce, equal peers together. Requests wait longest where peers do little."""
        leaving = Counter((m.source, m.kind) for m in self.moving if m.source is not None)
        coming = Counter((m.target, m.kind) for m in self.moving)
        loads = {}
        for s, counts in enumerate(self.serving):
            does = self.does(s)
            queue = 1 / does / max(1, sum(counts)) if does else 0.0
            for k, n in enumerate(counts):
                if (staying := n - leaving[s, k]) > 0:
                    per_s, fits = {s: 1 / self._service_s[s][k]}, self.setting.kinds[k].fits
                    loads[f"{s:04}.{k:03}"] = Load(s, queue, per_s, targets=fits, alike=staying)
        for (s, k), n in sorted(coming.items()):
            loads[f"{s:04}.{k:03}.coming"] = Load(s, 0.0, {}, targets=frozenset(), alike=n)
        return loads

    def each(self) -> dict[str, Load]:
        """The load of each serving peer alone, with the other stages that fit the machine."""
        return {
            f"{s:04}.{k:03}.{i:06}": Load(s, targets=self.setting.kinds[k].fits - {s})
            for s, counts in enumerate(self.serving)
            for k, n in enumerate(counts)
            for i in range(n)
        }


def kind_of(peer: str) -> int:
    """The kind in a name that ``Membership.loads`` and ``Membership.each`` give."""
    return int(peer.split(".")[1])
