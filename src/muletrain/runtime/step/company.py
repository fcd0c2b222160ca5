"""Whom a replica counts on in a step: whose accumulators would be in a round with its own (``policy.views``)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError
from muletrain.events import ReplicaApart, WeightsDiffer
from muletrain.policy.recent import Recent
from muletrain.policy.views import View, company, yields
from muletrain.runtime.microbatch.position import Behind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from muletrain.network.base import PeerId
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.step.messages import Seal
    from muletrain.runtime.step.state import StepState

SPEAKS_S = 3.0
"""Seconds within which something must have come from a replica that we do not reach, if it is to count as one that goes
on."""
MAX_UNTRUE = 2
"""Times that what a replica says is untrue, before it is left out of the step: that it holds microbatches, which it may
have lost meanwhile, or that it is at the step of the round that it sealed."""
MAX_LOST = 2
"""Times that a replica is lost while it is counted on, before it is left out of the step: some links carry messages one
way only."""
APART, APART_MAX = 16, 1024
"""Steps for which a replica of which no chunk comes is left out, the first time and at most; doubles."""
MAX_WITHOUT = 64
"""Replicas that a ``Gap`` names."""


class LeftOut(Exception):
    """Replicas that do not count on us go on, and we do not (``policy.views``)."""


@dataclass
class Standing:
    """What earlier steps say of replicas, and of this peer."""

    apart: Recent[tuple[int, int]] = field(default_factory=Recent)
    """Replicas that we average nothing with, since nothing comes from them: until which step, and for how many."""
    differed: int | None = None
    """The last step at which our weights were not the others'."""
    offences: Recent[tuple[int, ...]] = field(default_factory=Recent)
    """The last steps in which others computed otherwise what a member, or this peer, had (``audit``)."""


class Company:
    """Of one step, and made anew for each."""

    def __init__(self, ctx: Context, state: StepState, standing: Standing) -> None:
        self._ctx, self._state, self._standing = ctx, state, standing
        self._lost: Counter[PeerId] = Counter()
        self._untrue: Counter[PeerId] = Counter()
        self._silent: Counter[PeerId] = Counter()
        """What replicas did not send us of rounds that failed (``Averager.silent``)."""
        self._differing: set[PeerId] = set()
        """Replicas with other weights than most have."""

    def members(self) -> tuple[PeerId, ...]:
        """Whose accumulators would be in a round of ours, as far as we know now."""
        state, roster = self._state, self._ctx.roster

        def counts(peer: PeerId) -> bool:
            return self.averages(peer) and not state.is_committed(peer) and not state.stands_aside(peer)

        return company(self._ctx.net.peer_id, filter(counts, roster.stage(roster.own.stage)), self.views())

    def without(self, left_out: Collection[PeerId] = ()) -> tuple[PeerId, ...]:
        """Replicas whose accumulators would not be in a round of ours, and those ``left_out`` of it: the living first,
        as messages have room for few."""
        with_us, roster = {*self.members()} - {*left_out}, self._ctx.roster
        others = [p for p in roster.replicas() if p not in with_us]
        return tuple(sorted(others, key=lambda p: not roster.is_alive(p))[:MAX_WITHOUT])

    def averages(self, peer: PeerId) -> bool:
        trusted = self._lost[peer] < MAX_LOST and self._untrue[peer] < MAX_UNTRUE
        return trusted and not self.is_apart(peer) and peer not in self._differing

    def is_apart(self, peer: PeerId) -> bool:
        return self._state.step < self._standing.apart.get(peer, (0, 0))[0]

    def differs(self, peer: PeerId) -> bool:
        return peer in self._differing

    def views(self) -> dict[PeerId, View]:
        """Whom the replicas that we hear count on, even if they do not hear us."""
        roster, detector, aside = self._ctx.roster, self._ctx.detector, self._state.stands_aside

        def heard(member: PeerId) -> bool:
            speaks = detector.silent_s(member) < SPEAKS_S
            return roster.is_alive(member) or (speaks and not roster.declines(member))

        # one that stands aside goes on with nobody, whatever it announced before
        known = {m: View(s.attempt, s.members) for m, s in self._state.seals.items() if heard(m) and not aside(m)}
        return {m: v for m, v in known.items() if m not in self._differing}

    def yields(self, own: tuple[PeerId, ...], *, after: int = -1) -> bool:
        """Does this peer, in company ``own``, leave the step to others that go on without it? ``after``: by views of
        later attempts."""
        views = {m: v for m, v in self.views().items() if v.attempt > after}
        return yields(self._ctx.net.peer_id, own, views)

    def check(self) -> None:
        """Raises LeftOut where others go on without us, as far as we know, and what ``compare`` raises: they may have
        other weights."""
        announced = self._state.announced
        if announced is not None and self.yields(announced.members):
            self.compare({**self._state.seals, self._ctx.net.peer_id: announced})
            raise LeftOut

    # Whom to count on less --------------------------------------------------------------------------------------------

    def lost(self, members: Iterable[PeerId]) -> None:
        """They were marked down while we counted on them."""
        self._lost.update(members)

    def untrue(self, members: Iterable[PeerId]) -> None:
        """What they said of themselves was not so."""
        self._untrue.update(members)

    def silent(self, owing: Mapping[PeerId, int]) -> None:
        """A round failed. Replicas that live, but sent us nothing of it, are soon not counted on, in later steps
        neither: what they owe us may not pass their link, however well questions do. Those that may lack what another
        owes them have twice the rounds."""
        for peer, owes in owing.items():
            self._silent[peer] += owes
            if self._silent[peer] >= 2 * MAX_LOST and self.averages(peer):
                apart, step = self._standing.apart, self._state.step
                steps = min(APART_MAX, 2 * apart.get(peer, (0, APART // 2))[1])
                apart[peer] = step + steps, steps
                name = self._ctx.roster.name(peer)
                self._ctx.emit(ReplicaApart(step=step, name=name, steps=steps))

    def compare(self, seals: dict[PeerId, Seal]) -> None:
        """Replicas begin a step with the same weights; devices that differ in the last bit, or a donor that lied, break
        that (DESIGN "Replicas"). Then the weights that most have count, of as many the lowest id's; what the others
        accumulated does not.

        Raises Behind on those, and MuletrainError on who was among them at the step before, too."""
        ctx, step, me, votes = (
            self._ctx,
            self._state.step,
            self._ctx.net.peer_id,
            Counter(s.weights for s in seals.values()),
        )
        right = seals[min(seals, key=lambda m: (-votes[seals[m].weights], m))].weights
        differing = {m for m, s in seals.items() if s.weights != right}
        if me in differing and self._standing.differed == step - 1:
            raise MuletrainError(
                f"step {step}: this peer's weights differ from its replicas' step after step, so it leaves. Replicas must agree "
                f"to the last bit: use devices of one kind in a stage, or optimizer.state_device = 'cpu' for the run"
            )
        if me in differing:
            self._standing.differed = step
            raise Behind(f"step {step}: the weights here are not those of the other replicas", weights_hold=False)
        for member in sorted(differing):
            ctx.emit(WeightsDiffer(step=step, name=ctx.roster.name(member)))
        self._differing |= differing
