"""Replicas give their stage's state to newcomers and to peers that fell behind.

Donors copy their state between two steps and serve the copy while training continues. Replicas of a lineage are
identical, and so are their copies: a donor whose copy has another digest than most is not used.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

from muletrain.errors import CheckpointError, MuletrainError, NetworkError, ProtocolError, Refused
from muletrain.events import TransferFailed
from muletrain.policy.recent import Debts
from muletrain.runtime.core.blocks import HEADERS, StateImage
from muletrain.runtime.core.branches import branch_of
from muletrain.runtime.core.times import GONE_S, PAUSE_MAX_S, PAUSE_S, pause_s
from muletrain.runtime.transfer.messages import AskSnapshot, Snapshot

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.membership import Membership
    from muletrain.runtime.microbatch.position import Position

STATES = "states"
"""The name of the copies of states (``core.blocks.Blocks.offers``)."""
MAX_COPIES = 2
"""Copies kept at once: the newest copy, and a copy that a taker is still downloading."""
COPYING, COPYING_S = 0.1, 20.0
"""Share of our time spent on making copies for one taker, and most such seconds at once."""
SETTLE_TRIES = 100
"""Checks whether an update has been applied."""
ROUNDS = 20
"""Rounds in which a taker asks all donors before giving up."""


class OfferedState(StateImage):
    """A copy that this peer serves."""

    offer: Snapshot

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__(state)
        self.takers: set[PeerId] = set()
        """Peers that the copy was offered to, the only peers to get the copy."""


class PastGradients(Protocol):
    """The gradients that bring a taker from an old state to the present (``step.gradient_log``)."""

    def follow(self, peer: PeerId, step: int) -> None:
        """``peer`` takes the state before ``step``, and will need the gradients from ``step`` on."""
        ...

    def reaches(self, step: int) -> bool:
        """Are ``step`` and all later steps kept?"""
        ...


class Snapshots:
    """Owns the copies of our state that this peer serves, and decides who gets each copy."""

    def __init__(self, ctx: Context, position: Position, log: PastGradients, membership: Membership) -> None:
        self._ctx, self._position, self._log, self._membership = ctx, position, log, membership
        self._kept: dict[bytes, OfferedState] = {}
        self._making = asyncio.Lock()
        self._copying = Debts(COPYING)
        """Seconds spent on making copies, by taker."""
        AskSnapshot.serve(ctx.net, self._on_ask)
        ctx.blocks.offers(STATES, self._given)

    async def _on_ask(self, sender: PeerId, ask: AskSnapshot) -> Snapshot:
        """Offer a copy of our state. Raises MuletrainError for a taker of another stage, or a taker that is no
        member."""
        own = self._ctx.roster.own
        if ask.stage != own.stage or self._ctx.tasks.closed:
            raise MuletrainError(f"this peer does not serve stage {ask.stage} (any more)")
        if self._ctx.roster.expelled(sender):  # the sender may not know
            raise MuletrainError("the peer that asks was expelled: it computed false gradients")
        if not await self._membership.serves(sender, own.stage):
            raise MuletrainError(f"the state of stage {own.stage} is for members that serve it")
        async with self._making:
            offer = self._offered() or self._on_its_way(ask.after) or await self._make_for(sender)
            self._log.follow(sender, offer.step)
            if (kept := self._kept.get(offer.digest)) is not None:
                kept.takers.add(sender)
            return offer

    async def _make_for(self, taker: PeerId) -> Snapshot:
        """Make a new copy. Raises MuletrainError when memory has no room for a copy, or ``taker`` asks too often."""
        begin = self._ctx.clock.now()
        if self._ctx.blocks.sends(STATES) - self._kept.keys():
            raise MuletrainError("a copy that was replaced is still on its way to somebody; ask again")
        if self._copying.owed(taker, begin) > COPYING_S:
            raise MuletrainError("this peer was given many copies already; ask again")
        for digest, kept in list(self._kept.items()):  # the run has gone on, and ``taker`` will take the new copy
            kept.takers.discard(taker)
            if not kept.takers:
                del self._kept[digest]
        offer = await self._make()
        self._copying.add(taker, self._ctx.clock.now() - begin, begin)
        return offer

    def _on_its_way(self, after: int) -> Snapshot | None:
        """If all slots for copies are busy, the newest copy from which the log leads to the present."""
        now = self._ctx.clock.now()
        if len(self._kept) < MAX_COPIES or any(now - k.asked > PAUSE_MAX_S for k in self._kept.values()):
            return None
        offers = [k.offer for k in self._kept.values() if k.offer.step >= after]
        leading = [o for o in offers if self._position.chain.at(o.step) == o.lineage and self._log.reaches(o.step)]
        return max(leading, key=lambda o: o.step, default=None)

    @property
    def copies(self) -> int:
        """How many copies are kept."""
        return len(self._kept)

    def _offered(self) -> Snapshot | None:
        """The offer of the present state, if a copy is kept."""
        for kept in self._kept.values():
            if (kept.offer.step, kept.offer.lineage) == (self._position.step, self._position.applied):
                kept.asked = self._ctx.clock.now()
                return kept.offer
        return None

    async def _make(self) -> Snapshot:
        position, ctx = self._position, self._ctx
        for _ in range(SETTLE_TRIES):
            if position.away:  # catching up takes long, and another donor may be faster
                break
            label, over = (position.step, position.applied), position.life.finished
            if position.settled:
                state = await ctx.compute.state()
                if position.settled and label == (position.step, position.applied):
                    past, copy = position.chain.lineages[:-1], OfferedState(state)
                    await copy.name(ctx.compute.offload)
                    copy.offer = Snapshot(step=label[0], lineage=label[1], digest=copy.digest, over=over, past=past)
                    self._keep(copy)
                    return copy.offer
            await ctx.clock.sleep(PAUSE_S)  # an update is being applied
        raise MuletrainError("no settled state here now: this peer is catching up, too")

    def _keep(self, copy: OfferedState) -> None:
        if not self._kept:
            self._ctx.spawn(self._ctx.blocks.drop_unasked(self._kept), "copies")
        while len(self._kept) >= MAX_COPIES:
            del self._kept[min(self._kept, key=lambda d: self._kept[d].asked)]
        self._kept[copy.digest], copy.asked = copy, self._ctx.clock.now()

    async def _given(self, taker: PeerId, digest: bytes) -> StateImage | None:
        """See ``core.blocks.Reader``."""
        kept = self._kept.get(digest)
        if kept is None or taker not in kept.takers or self._ctx.tasks.closed:
            return None
        self._log.follow(taker, kept.offer.step)
        return kept


class Receiver:
    """Takes states from donors."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.taker = ctx.downloader()
        self._refusal = ""

    async def fetch(
        self,
        acceptable: Callable[[Snapshot], bool],
        *,
        after: int = 0,
        rounds: int = ROUNDS,
        confirm: Callable[[Snapshot], Awaitable[None]] | None = None,
    ) -> Snapshot:
        """Load an ``acceptable`` state of a replica, if possible of step ``after`` or later. ``confirm`` is awaited
        just before our own state is overwritten. Raises MuletrainError when no replica gives a state, and errors of
        ``confirm``."""
        ctx, stage = self._ctx, self._ctx.roster.own.stage
        for round_ in range(rounds):
            for live in (True, False):  # peers that are down are asked only if no live peer has a state
                donors = [d for d in ctx.roster.replicas() if ctx.roster.is_alive(d) == live]
                snapshot, good = _best(await self._offers(donors, acceptable, after))
                if snapshot is not None:
                    break
            if snapshot is not None:
                try:
                    limit = 20 * ctx.compute.n_params + HEADERS  # weights of two steps, two moments, the loss scale
                    state = await self.taker.take(snapshot.digest, good, limit)
                    if confirm is not None:
                        await confirm(snapshot)
                    await ctx.compute.load_state(state)
                except (NetworkError, CheckpointError) as e:
                    ctx.emit(TransferFailed(what=f"the state of stage {stage}", reason=str(e)))
                    for donor in good if isinstance(e, ProtocolError) else ():  # all offered an impossible copy
                        ctx.refused(donor, str(e))
                else:
                    return snapshot
            await ctx.clock.sleep(pause_s(round_))
        raise MuletrainError(f"no replica of stage {stage} gives this peer the stage's state{self._refusal}")

    async def _offers(
        self, donors: list[PeerId], acceptable: Callable[[Snapshot], bool], after: int = 0
    ) -> list[tuple[PeerId, Snapshot]]:
        ask = AskSnapshot(stage=self._ctx.roster.own.stage, after=after)
        offers = await asyncio.gather(*(self._offered(d, ask) for d in donors))
        return [o for o in offers if o is not None and acceptable(o[1])]

    async def _offered(self, donor: PeerId, ask: AskSnapshot) -> tuple[PeerId, Snapshot] | None:
        try:
            return donor, await ask.ask(self._ctx.net, donor, timeout_s=GONE_S)
        except NetworkError as e:
            self._ctx.emit(TransferFailed(what="a state", reason=str(e), source=self._ctx.roster.name(donor)))
            self._refusal = f"; one said: {e}" if isinstance(e, Refused) else self._refusal
            return None

    async def has_donor(self, acceptable: Callable[[Snapshot], bool], among: list[PeerId] | None = None) -> bool:
        """Does a replica offer an ``acceptable`` state? ``among``: the replicas to ask; None: live ones."""
        roster = self._ctx.roster
        living = [p for p in roster.replicas() if roster.is_alive(p)]
        return bool(await self._offers(living if among is None else among, acceptable))


def _best(offers: list[tuple[PeerId, Snapshot]]) -> tuple[Snapshot | None, list[PeerId]]:
    """The copy to take, and its donors. A state comes first if two donors have the state in their histories, since a
    single donor could make up a later branch or step, and if no rival copy of the state has as many donors. Then come
    the latest branch, the most donors, the newest copy, and the lowest donor's. So a newcomer may take an older state
    than the newest, at the cost of another transfer."""
    by_copy: dict[tuple[int, bytes, bytes], list[tuple[PeerId, Snapshot]]] = defaultdict(list)
    for donor, snapshot in sorted(offers, key=lambda o: o[0]):
        by_copy[snapshot.step, snapshot.lineage, snapshot.digest].append((donor, snapshot))
    if not by_copy:
        return None, []

    def order(copy: tuple[int, bytes, bytes]) -> tuple[bool, bytes, int, int]:
        step, lineage, _ = copy
        rival = max((len(by_copy[k]) for k in by_copy if k[:2] == copy[:2] and k != copy), default=0)
        known = sum(offer.chain.at(step) == lineage for _, offer in offers) > 1
        return known and len(by_copy[copy]) > rival, branch_of(lineage), len(by_copy[copy]), step

    best = by_copy[max(by_copy, key=order)]
    return best[0][1], [donor for donor, _ in best]
