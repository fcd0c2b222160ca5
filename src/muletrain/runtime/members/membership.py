"""Peers get to know each other during the run: a newcomer introduces itself to all peers, and a peer that missed the
introduction asks on the newcomer's first message. The network's gate decides who may connect; here only the roster
grows."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from muletrain.errors import DeadlineExceeded, NetworkError, ProtocolError
from muletrain.events import DirectoryFailed, MemberAdmitted
from muletrain.policy.deadline import Deadline
from muletrain.policy.recent import Seldom
from muletrain.runtime.core.times import AGAIN_S, GONE_S
from muletrain.runtime.members.messages import Acquaintances, Introduce, Member

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from muletrain.network.base import PeerId
    from muletrain.runtime.members.context import Context


class Membership:
    """Answers introductions, and introduces this peer."""

    def __init__(self, ctx: Context, comes: Callable[[], bool] = lambda: False) -> None:
        """``comes``: returns whether this peer has no state yet."""
        self._ctx, self._comes = ctx, comes
        self._asking: dict[PeerId, asyncio.Task[None]] = {}
        self._asks = Seldom(AGAIN_S)
        self._deadline = Deadline()
        """Time of an answer, for which a connection must be made first."""
        Introduce.serve(ctx.net, self._on_introduction)

    async def introduce(self) -> None:
        """Introduce this peer to all peers, including peers heard of on the way: of two newcomers, at least one hears
        of the other. An unreachable peer asks on our first message. Very late answers are not waited for. If a peer
        believes that we serve another stage, the introductions are repeated."""
        roster = self._ctx.roster
        for _ in range(2):
            own = roster.own
            told: set[PeerId] = set()
            while new := [p for p in roster.everyone() if p not in told]:
                told.update(new)
                await self._answers({self._ctx.spawn(self._introduce_to(p), "introduce to"): p for p in new})
            if roster.own == own:
                return

    async def _answers(self, calls: dict[asyncio.Task[Any], PeerId]) -> None:
        """Wait for the answers. A peer that takes much longer than the rest is not counted on until the peer answers.
        Ends within the deadline of an introduction."""
        clock = self._ctx.clock
        begin = clock.now()
        while calls and (rest_s := begin + self._deadline.seconds() - clock.now()) > 0:
            with contextlib.suppress(DeadlineExceeded):
                first = asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                await clock.deadline(first, rest_s, "the answers to an introduction")
            calls = {call: peer for call, peer in calls.items() if not call.done()}
        for peer in calls.values():
            self._ctx.detector.mark_down(peer, "it has not answered our introduction yet")

    async def tell(self, peers: Collection[PeerId]) -> set[PeerId]:
        """Tell ``peers`` of changes of this peer, while serving on. Returns the peers that the news did not reach."""
        living = [p for p in peers if self._ctx.roster.is_alive(p)]
        told = await asyncio.gather(*map(self._introduce_to, living))
        return {*peers} - {p for p, heard in zip(living, told, strict=True) if heard}

    async def _introduce_to(self, peer: PeerId) -> bool:
        """Returns True if ``peer`` heard us."""
        ctx = self._ctx
        begin = ctx.clock.now()
        try:
            answer = await Introduce(member=ctx.roster.own).ask(ctx.net, peer, timeout_s=GONE_S)
            self._deadline.measured(ctx.clock.now() - begin)
            for member in answer.members:
                if member.id == peer:
                    ctx.roster.admit(member)
                elif not ctx.roster.expelled(member.id):  # the answerer may not know yet
                    ctx.roster.hear_of(member)
            (ctx.detector.stand_aside if answer.comes else ctx.detector.mark_back)(peer)
        except ProtocolError as e:
            ctx.refused(peer, str(e))
        except NetworkError as e:
            ctx.detector.mark_down(peer, e.why)
        else:
            return True
        return False

    async def acquaint(self, peer: PeerId, stage: int | None = None) -> None:
        """``peer`` speaks to us: ask for an introduction if ``peer`` is unknown, or not known to serve ``stage``, after
        an arrival or a move during our absence. Raises ProtocolError without an introduction, and if ``peer`` was
        expelled. Ends within the deadline of an introduction."""
        roster = self._ctx.roster
        if roster.expelled(peer):
            raise ProtocolError("this peer was expelled: it computed false gradients")
        if roster.knows(peer) and stage in (None, roster.member(peer).stage):
            return
        task = self._asking.get(peer)
        if task is None and self._asks.due(peer, self._ctx.clock.now()):
            task = self._asking[peer] = self._ctx.spawn(self._ask(peer), "acquaint")
            task.add_done_callback(lambda _: self._asking.pop(peer, None))
        if task is not None:
            await asyncio.wait({task})
        roster.member(peer)

    async def serves(self, peer: PeerId, stage: int) -> bool:
        """Does ``peer``, by its own word, serve ``stage``? Raises ProtocolError as ``acquaint`` does."""
        await self.acquaint(peer, stage)
        return self._ctx.roster.member(peer).stage == stage

    async def _ask(self, peer: PeerId) -> None:
        try:
            limit_s = self._deadline.seconds()  # the next step may wait for this answer
            for member in (await Introduce().ask(self._ctx.net, peer, timeout_s=limit_s)).members:
                self._admit(peer, member)
        except ProtocolError as e:
            self._ctx.refused(peer, str(e))
        except NetworkError as e:
            self._ctx.emit(
                DirectoryFailed(what=f"{peer[-6:]} speaks to this peer, but does not say who it is", reason=str(e))
            )

    def _admit(self, sender: PeerId, member: Member) -> None:
        if member.id != sender:
            raise ProtocolError("a peer introduced somebody else")
        if self._ctx.roster.admit(member):
            self._ctx.emit(MemberAdmitted(peer_id=member.id, name=member.name, stage=member.stage))

    async def _on_introduction(self, sender: PeerId, introduction: Introduce) -> Acquaintances:
        roster = self._ctx.roster
        if introduction.member is None:
            return Acquaintances(members=(roster.own,))
        self._admit(sender, introduction.member)
        return Acquaintances(members=roster.members(), comes=self._comes())
