"""A peer comes to the run's step: as a newcomer, from a checkpoint, after falling behind, or from another history of
the run."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError
from muletrain.events import StateKept, StateMissed
from muletrain.policy.fork_choice import Chain, forked_at, gives_way
from muletrain.runtime.checkpoint.store import Key
from muletrain.runtime.core.branches import branch_of
from muletrain.runtime.core.lifecycle import State
from muletrain.runtime.core.times import GONE_S, pause_s
from muletrain.runtime.peer.messages import Presence
from muletrain.runtime.recovery.rollback import JOIN_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.runtime.checkpoint.checkpointing import Checkpointing
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.membership import Membership
    from muletrain.runtime.microbatch.microbatches import Microbatches
    from muletrain.runtime.microbatch.position import Behind, Position
    from muletrain.runtime.recovery.forks import Forks
    from muletrain.runtime.recovery.messages import StepBack
    from muletrain.runtime.step.runner import StepRunner
    from muletrain.runtime.transfer.donor import Receiver
    from muletrain.runtime.transfer.messages import Snapshot

TRIES = 12
"""Most tries of a step that other peers have left, before a peer gives up."""
MAX_ASKED = 8
"""Peers of any stage to ask for the run's progress."""
MAX_PURSUITS = 10
"""Most states that a peer takes one after the other, each too old on arrival, before giving up."""


class Arrival:
    """Brings one peer to the run's step. The run may have ended there (``Lifecycle.finished``)."""

    def __init__(
        self,
        ctx: Context,
        position: Position,
        runner: StepRunner,
        membership: Membership,
        receiver: Receiver,
        checkpointing: Checkpointing,
        forks: Forks,
        microbatches: Microbatches,
    ) -> None:
        self._ctx, self._position, self._life, self._runner = ctx, position, position.life, runner
        self._membership, self._receiver, self._forks = membership, receiver, forks
        self._checkpointing, self._book = checkpointing, checkpointing.book
        self._microbatches = microbatches
        self._pursuits = self._stays = 0

    def caught_up(self) -> None:
        """A step went through with this peer."""
        self._pursuits = self._stays = 0
        self._book.back_s = math.inf

    async def join(self) -> None:
        """Come as a newcomer, with a replica's state."""
        await self._membership.introduce()
        await self._take_state(lambda offer: True)

    async def begin_anew(self, back: StepBack) -> None:
        """Begin at the run's checkpoint or, if our part of the checkpoint is gone, with a replica's later state. If nobody
        gives either, wait without a state, for the run may go back to another checkpoint (``Rollback``). Ends within
        ``Plan.adopt_after_s`` and ``JOIN_S``. Raises MuletrainError."""
        ctx, branch = self._ctx, branch_of(back.lineage)
        begun = ctx.clock.now()
        self._book.back_s = min(self._book.back_s, begun)
        ctx.spawn(self._membership.introduce(), "introduce")

        def acceptable(offer: Snapshot) -> bool:
            return branch_of(offer.lineage) >= branch

        digest = back.parts[ctx.roster.own.stage] if back.parts else b""
        self._book.missed.discard(digest)
        for attempt in itertools.count() if back.parts else ():
            try:
                await ctx.compute.load_state(await self._checkpointing.parts.base(back.key, digest))
                break
            except MuletrainError as e:  # the part's holders may be beginning anew, too
                took_s = ctx.clock.now() - begun
                hopeless = took_s > ctx.plan.adopt_after_s + JOIN_S
                if hopeless or (attempt % 2 and await self._receiver.has_donor(acceptable)):
                    ctx.emit(StateMissed(reason=str(e)))
                    return await self._take_state(acceptable)
                if attempt and took_s > GONE_S and digest not in self._book.missed:
                    ctx.emit(StateMissed(reason=str(e)))
                    self._book.missed.add(digest)
                    self._say(away=True)
            await ctx.clock.sleep(pause_s(attempt))
        await self._runner.rejoin(Chain(back.step, (back.lineage,)))
        self._life.to(State.TRAINING)
        self.say_back()
        if back.step == ctx.plan.steps:
            self._life.to(State.FINISHED)
            await self._checkpointing.due(Key(back.step, back.lineage), last=True)

    async def catch_up(self, why: Behind) -> None:
        """Take the state of a replica that has gone on or, if our weights are wrong, of a replica at our step. If our
        weights are right, no replica has later weights and most peers are near, take part in the step again: our
        weights may be our stage's last. Raises MuletrainError if no replica has the needed state."""
        if why.weights_hold and self._stays < TRIES and await self._may_stay():
            return await self._stay(why)
        self._ctx.emit(StateMissed(reason=str(why)))
        self._life.to(State.RECOVERING)
        await self._let_go()
        await self._membership.introduce()
        own = self._position.chain
        if why.weights_hold:
            await self._take_state(_later(own), own.step + 1)
        else:
            await self._take_state(lambda offer: offer.step >= own.step, own.step)

    async def _may_stay(self) -> bool:
        """Has no replica a later state, and can the step still be done? No peer keeps weights of more than one step
        back, so our state is of no use once most peers are further on: then our stage's only replica that went on with
        these peers is lost."""
        ctx, lineage, step = self._ctx, self._position.lineage, self._position.step
        answers = await ctx.detector.ask_all(ctx.roster.replicas(), lineage, step)
        if any(progress.beyond(step) for progress in answers.values()):
            return False
        answers |= await ctx.detector.ask_all(ctx.roster.spread(MAX_ASKED), lineage, step)
        far = sum(progress.step > step + 1 for progress in answers.values())
        return far <= sum(step <= progress.step <= step + 1 for progress in answers.values())

    async def _stay(self, why: Behind) -> None:
        self._ctx.emit(StateKept(reason=str(why)))
        await self._let_go()
        await self._ctx.clock.sleep(pause_s(self._stays))
        self._stays += 1
        await self._runner.rejoin(self._position.chain)
        self.say_back()

    async def go_over(self, renamed: Chain | None) -> None:
        """Take the state of the surviving lineage, or only its name (``renamed``). If the state is unavailable,
        continue in our own lineage."""
        await self._let_go()
        if renamed is not None:  # our weights equal the other lineage's weights at our own step
            own = self._position.chain
            await self._runner.rejoin(renamed)
            self._forks.left(own, renamed)
        else:
            await self._membership.introduce()
            snapshot = await self._forks.go_over()
            if snapshot is not None:
                return await self._take_up(snapshot)
            await self._runner.rejoin(self._position.chain)
        self.say_back()

    async def _let_go(self) -> None:
        """Cancel this step's trainers and requests, and tell all peers."""
        self._say(away=True)
        self._microbatches.end(self._position.step + 1)
        await self._runner.let_go()
        self._microbatches.server.abandon()

    async def _take_state(self, acceptable: Callable[[Snapshot], bool], after: int = 0) -> None:
        """Take a state of a step not before ``after``, if possible. Updates agreed on meanwhile are then applied step
        by step (``StepRunner.replay``)."""
        self._pursuits += 1
        if self._pursuits > MAX_PURSUITS:
            stage = self._ctx.roster.own.stage
            raise MuletrainError(
                f"{MAX_PURSUITS} states of stage {stage} were too old when they arrived: the link of this peer, or of its replicas, is "
                f"too slow for the stage's gradients; join with more bandwidth, or cut the model into more stages"
            )
        await self._take_up(await self._receiver.fetch(acceptable, after=after))

    async def _take_up(self, snapshot: Snapshot) -> None:
        """Continue with the loaded state."""
        await self._runner.rejoin(snapshot.chain)
        if snapshot.over:
            return self._life.to(State.FINISHED)
        self._life.to(State.TRAINING)
        self._ctx.meter.begin(self._ctx.clock.now())
        self.say_back()

    def say_back(self) -> None:
        """Tell all peers to count on this peer again."""
        self._say(away=False)

    def _say(self, *, away: bool) -> None:
        presence = Presence(lineage=self._position.lineage, step=self._position.step, away=away)
        self._ctx.spawn(self._ctx.tell(self._ctx.roster.everyone(), presence), "presence")


def _later(own: Chain) -> Callable[[Snapshot], bool]:
    """Accepts states of later steps, in the lineage of ``own`` or in a surviving lineage."""

    def acceptable(offer: Snapshot) -> bool:
        chain = offer.chain
        ours, theirs = branch_of(own.lineages[-1]), branch_of(offer.lineage)
        if ours != theirs:
            return theirs > ours
        return offer.step > own.step and (forked_at(own, chain) is None or gives_way(own, chain, stalled=False))

    return acceptable
