"""The replicas that this peer counts on in a step, and forms rounds with (``policy.views``)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError
from muletrain.events import ReplicaApart, WeightsDiffer
from muletrain.policy.views import GroupView, counted_on, yields
from muletrain.runtime.microbatch.messages import MAX_WITHOUT
from muletrain.runtime.microbatch.position import Behind
from muletrain.runtime.step.state import APART

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from muletrain.network.base import PeerId
    from muletrain.policy.overdue import Overdue
    from muletrain.runtime.members.row import Seal
    from muletrain.runtime.step.state import Lasting, StepState

SPEAKS = 2
"""Deadlines of a probe without a sign of life, after which a replica that is down no longer counts as going on."""
MAX_OUTRAN = 4
"""Attempts of ours that a replica ends by later attempts, before being left out of the step: honest replicas take
turns."""
MAX_FAULTS = 2
"""Faults after which a replica is left out of the step: we counted on it as it was marked down (some links carry messages
one way only), or it made a false statement about itself. For missing chunks it has twice as many."""


class LeftOut(Exception):
    """Replicas go on with the step without us (``policy.views``)."""


class Company:
    """Owns the choice of replicas for one step; each step has a new company."""

    def __init__(self, lasting: Lasting, state: StepState) -> None:
        self._ctx, self._lessons, self._state = lasting.ctx, lasting.lessons, state
        self._faults: Counter[PeerId] = Counter()
        self._outran: Counter[PeerId] = Counter()
        """Our attempts that each replica ended by a later attempt."""
        self._differing: set[PeerId] = set()
        """Replicas whose weights differ from most."""

    def members(self) -> tuple[PeerId, ...]:
        """The members that a round of ours would have now, ourselves included. We count on replicas that stand aside,
        which then come back: if we left them out, each replica would name the members seen at that moment, and many
        replicas would never name the same members."""
        stage, committed = self._ctx.roster.stage(self._ctx.roster.own.stage), self._state.committed()
        able = [m for m in stage if m not in committed and self.may_average_with(m)]
        return counted_on(self._ctx.net.peer_id, able, self._known_views())

    def without(self, left_out: Collection[PeerId] = ()) -> tuple[PeerId, ...]:
        """Replicas that a round of ours would not have, or that are ``left_out``: live replicas first, since messages
        have room for few."""
        with_us, roster = {*self.members()} - {*left_out}, self._ctx.roster
        others = [p for p in roster.replicas() if p not in with_us]
        return tuple(sorted(others, key=lambda p: not roster.is_alive(p))[:MAX_WITHOUT])

    def may_average_with(self, peer: PeerId) -> bool:
        """Do we trust ``peer`` enough for averaging?"""
        faulty = self._faults[peer] >= MAX_FAULTS or peer in self._differing
        return not (faulty or self.is_apart(peer) or self._hurries(peer))

    def _hurries(self, peer: PeerId) -> bool:
        """Does ``peer`` end more of our attempts than any other replica, ``MAX_OUTRAN`` or more? A liar can drive honest
        replicas to later attempts, but then ends the most attempts itself."""
        most = max(self._outran, key=lambda m: (self._outran[m], m), default=None)
        return peer == most and self._outran[peer] >= MAX_OUTRAN

    def is_apart(self, peer: PeerId) -> bool:
        """Is ``peer`` left out because of earlier steps or rounds, with missing chunks or a stall?"""
        return peer in self._lessons.apart.at(self._state.step) or self._stalled(peer)

    def _stalled(self, peer: PeerId) -> bool:
        return peer in self._lessons.stalled.at(self._state.step)

    def differs(self, peer: PeerId) -> bool:
        """Does ``peer`` have other weights than most?"""
        return peer in self._differing

    def views(self) -> dict[PeerId, GroupView]:
        """The views of replicas that go on. A replica that stands aside goes on with no peer, despite earlier
        announcements."""
        return {m: v for m, v in self._known_views().items() if not self._state.stands_aside(m)}

    def _known_views(self) -> dict[PeerId, GroupView]:
        """The views of replicas that we hear, even if these replicas do not hear us."""
        roster, detector = self._ctx.roster, self._ctx.detector

        def heard(member: PeerId) -> bool:
            speaks = detector.silent_s(member) < SPEAKS * detector.deadline.seconds()
            return roster.is_alive(member) or (speaks and not roster.declines(member))

        known = {m: GroupView(s.attempt, s.members) for m, s in self._state.seals.items() if heard(m)}
        return {m: v for m, v in known.items() if m not in self._differing}

    def yields(self, own: tuple[PeerId, ...], *, after: int = -1) -> bool:
        """Must this peer, in company ``own``, leave the step to replicas that go on without it? ``after``: only views
        of later attempts count."""
        views = {m: v for m, v in self.views().items() if v.attempt > after and not self._stalled(m)}
        return yields(self._ctx.net.peer_id, own, views)

    def check(self) -> None:
        """Raises LeftOut if other replicas go on without us, and errors of ``compare``, because weights may differ."""
        announced = self._state.announced
        if announced is not None and self.yields(announced.members):
            self.compare({**self._state.seals, self._ctx.net.peer_id: announced})
            raise LeftOut

    # Whom to count on less --------------------------------------------------------------------------------------------

    def note(self, members: Iterable[PeerId]) -> None:
        """``members`` are at fault (``MAX_FAULTS``)."""
        self._faults.update(members)

    def note_outran(self, seal: Seal) -> None:
        """Members of our ``seal`` may have made a later attempt while we waited for that one."""
        known = self._state.seals
        self._outran.update(m for m in seal.members if m in known and known[m].attempt > seal.attempt)

    def note_stalled(self) -> None:
        """The replicas that go on without us get nowhere: stop waiting, in this step and some that follow. Reports may
        be lies."""
        me = self._ctx.net.peer_id
        for peer in [m for m, view in self.views().items() if me not in view.members]:
            self._leave_out(peer, self._lessons.stalled, "it goes on without this peer, and gets nowhere")

    def note_overdue(self, members: Iterable[PeerId]) -> None:
        """``members`` answer, but have not done their part for long: leave ``members`` out for many steps."""
        self.note_silent(dict.fromkeys(members, 2 * MAX_FAULTS))

    def note_silent(self, owing: Mapping[PeerId, int]) -> None:
        """A round failed because live replicas were ``owing`` us chunks. After a few such rounds, in this step or in
        earlier steps, such replicas are left out for many steps: their link may carry calls, but no chunks. Replicas
        that may themselves wait for a chunk get twice as many rounds."""
        silent, step = self._lessons.silent, self._state.step
        for peer, owes in owing.items():
            before, last = silent.get(peer, (0, 0))
            silent[peer] = owes + (before if step - last <= APART else 0), step
            if silent[peer][0] >= 2 * MAX_FAULTS and self.may_average_with(peer):
                del silent[peer]
                self._leave_out(peer, self._lessons.apart, "its chunks do not arrive")

    def _leave_out(self, peer: PeerId, pauses: Overdue, why: str) -> None:
        step, name = self._state.step, self._ctx.roster.name(peer)
        if steps := pauses.note(peer, step):
            self._ctx.emit(ReplicaApart(step=step + 1, name=name, why=why, steps=steps))

    def compare(self, seals: dict[PeerId, Seal]) -> None:
        """Compare the weights with which replicas began the step: differences come from devices that differ in the last
        bit, or from a lying donor. The weights of most replicas count (ties: the lowest id's); accumulators from
        different weights do not.

        Raises Behind if our weights do not count, and MuletrainError if our weights did not count at the previous step,
        either."""
        ctx, step, me = self._ctx, self._state.step, self._ctx.net.peer_id
        votes = Counter(s.weights for s in seals.values())
        right = seals[min(seals, key=lambda m: (-votes[seals[m].weights], m))].weights
        differing = {m for m, s in seals.items() if s.weights != right}
        if me in differing and self._lessons.differed == step - 1:
            raise MuletrainError(
                f"step {step + 1}: this peer's weights differ from its replicas' in every step, so it leaves. Replicas must agree "
                f"to the last bit: use devices of one kind in a stage, or optimizer.state_device = 'cpu' for the run"
            )
        if me in differing:
            self._lessons.differed = step
            raise Behind(f"step {step + 1}: the weights here are not those of the other replicas", weights_hold=False)
        for member in sorted(differing):
            ctx.emit(WeightsDiffer(step=step + 1, name=ctx.roster.name(member)))
        self._differing |= differing
