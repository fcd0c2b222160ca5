"""Which replicas of a stage reduce what: they seal their accumulators and announce them until all that count on each other say so,
and their sets cover the step (DESIGN "How a step goes", 5)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from muletrain.errors import DeadlineExceeded, Expelled, MuletrainError, NetworkError, PeerUnreachable
from muletrain.events import Note
from muletrain.optim.sketch import packed, sketch, unpacked
from muletrain.policy.cover import Cover, resolve
from muletrain.policy.deadline import Deadline, backoff_s
from muletrain.policy.views import View, company, yields
from muletrain.runtime.core.messages import AskViews, Finding, Gap, GivenUp, MemberView, Seal, Views
from muletrain.runtime.core.waiting import MAX_SILENCE
from muletrain.runtime.step import trials
from muletrain.runtime.step.knowledge import Behind, Knowledge
from muletrain.runtime.step.record import round_id
from muletrain.runtime.step.rounds import Round

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from muletrain.network.base import PeerId

MEETING_POINTS = 2
"""Peers of other stages that are asked about replicas we do not reach; the first ones, so that those replicas ask the same."""
SPEAKS_S = 3.0
"""A replica that we do not reach goes on with the step if something came from it within this time."""
MAX_UNTRUE = 2
"""Times that what a replica says is untrue, before it is left out of the step: that it holds microbatches, which it may have lost
meanwhile, or that it is at the step of the round that it sealed."""
MAX_WITHOUT = 64
"""Replicas that a ``Gap`` names."""
MAX_LOST = 2
"""Times that a replica is lost while it is counted on, before it is left out of the step: some links carry messages one way only."""
APART, APART_MAX = 16, 1024
"""Steps for which a replica of which no chunk comes is left out, the first time and at most; doubles."""
AGAIN_S = 30.0
"""Before trainers are told of missing microbatches once more, at most: what they believed of who holds them may have changed."""
PAUSE_S, PAUSE_MAX_S = 0.05, 2.0
"""Before the next question; doubles."""
HEARD_S = 0.5
"""Before a peer that finds itself expelled goes: others judge by its seal, too, and word of its end must not overtake that."""
FILLED_MAX_S = 0.2
"""Between two questions to the replicas whether the gaps are filled: they all wait for that, and for nothing else."""


def expelled(step: int) -> Expelled:
    """What ends a peer whose gradients of ``step`` were false."""
    return Expelled(
        f"step {step}: this peer does not compute what its replicas compute, so it leaves. Its memory or its accelerator may be faulty: "
        f"test them before it joins again"
    )


class LeftOut(Exception):
    """Replicas that do not count on us go on, and we do not (``policy.views``)."""


class Sealing(Knowledge):
    """Agrees on rounds."""

    async def _agree(self, attempt: int) -> Round | None:
        """Announce what we hold and hear what the others hold. None when another attempt must follow: gaps had to be run again first, or
        members do not count on the same ones yet. Raises LeftOut."""
        stage = self._ctx.roster.own.stage
        seals = await self._announce(attempt)
        if seals is None:
            self.ledger.reopen(keep=True)
            return None
        self._believe_less(seals)
        sealed = trials.counted(seals)
        cover = resolve(sealed, self._ctx.plan.microbatches)
        if cover.gaps or cover.dropped:
            await self._refill(cover, attempt, seals)
            return None
        if (trial := trials.due(seals)) is not None:
            await self._compute_again(trial, attempt)
            return None
        expelled = await self._sentenced(trials.disagreements(seals))
        expelled = expelled if len(sealed) - len(expelled) > 1 else ()  # whom one alone would expel nobody else does
        sealed = {m: s for m, s in sealed.items() if m not in expelled}
        stop, leaves = any(s.stop for s in seals.values()), tuple(sorted(m for m in sealed if seals[m].leaves))
        ident = round_id(self.lineage, stage, self.step, attempt, sealed, cover.chosen, stop, leaves, expelled)
        return Round(
            id=ident, lineage=self.lineage, step=self.step, stage=stage, members=tuple(sorted(sealed)),
            contributors=tuple(m for m in cover.chosen if sealed.get(m)), microbatches=self._ctx.plan.microbatches,
            n_params=self._ctx.compute.n_params, stop=stop, leaves=leaves, expelled=expelled, finite=trials.finite(seals),
            chunk=self._ctx.plan.chunk,
        )  # fmt: skip

    def _next_attempt(self) -> int:
        """After ours, but not before what others try already. Whom we average nothing with is to know it from the first view on."""
        first = int(any(map(self._is_apart, self._ctx.roster.stage(self._ctx.roster.own.stage))))
        return max(first if self.announced is None else self.announced.attempt + 1, self._latest_attempt())

    async def _announce(self, attempt: int) -> dict[PeerId, Seal] | None:
        """Seal, and collect the seals of those we count on; None unless all of them count on the same ones."""
        ctx, me, stage = self._ctx, self._ctx.net.peer_id, self._ctx.roster.own.stage
        await self._nothing_running(self.work)
        await self._reconsider()
        if self.ledger.running:  # something came in meanwhile
            await self._nothing_running(self.work)
        held = self.ledger.seal()
        replicas, view = tuple(m for m in ctx.roster.stage(stage) if m != me), self._company()
        self.announced = seal = Seal(
            lineage=self.lineage, step=self.step, stage=stage, attempt=attempt, indices=tuple(sorted(held)), members=view,
            weights=self._weights, stop=self.stop_requested, leaves=self._leaves(), sketch=await self._sketch(),
            gave_up=self._gave_up, findings=self._findings,
        )  # fmt: skip
        ctx.reached("sealing", self.step)
        ctx.spawn(ctx.tell(replicas, seal), "seal")  # those we do not count on hear of it, too

        def missing() -> bool:
            return any(m not in self._seals or self._seals[m].attempt < attempt for m in view if m != me)

        def gone(member: PeerId) -> bool:
            return self._holds(member) or self._stands_aside(member)

        def lost() -> bool:
            return not all(map(ctx.roster.is_alive, view)) or any(m != me and gone(m) for m in view)

        def outdated() -> bool:
            return self._latest_attempt(view) > attempt

        def passed_over() -> bool:
            """Others have tried once more since, and still go on without us: who is missing may have left the step to them already."""
            return yields(me, view, {m: v for m, v in self._views().items() if v.attempt > attempt})

        await self._waits.until(
            lambda: lost() or outdated() or passed_over() or not missing(),  # who is missing may wait for those that went on
            self._seal_deadline, "the stage's replicas to seal", self._ask_replicas,
        )  # fmt: skip
        if yields(me, view, self._views()):
            raise LeftOut
        self._lost.update(m for m in view if not ctx.roster.is_alive(m))
        if lost() or outdated():  # sets of different attempts say nothing together
            return None
        seals = {m: seal if m == me else self._seals[m] for m in view}
        self._compare(seals)
        return seals if all(s.members == view and m not in self._differing for m, s in seals.items()) else None

    def _leaves(self) -> bool:
        """Whoever computes the next step already leaves after that one: what it accumulated would be lost."""
        computes = self.ahead is not None and not self.ahead.ledger.sealed
        return self.departure.announced() and not computes

    def _company(self) -> tuple[PeerId, ...]:
        """Whose accumulators would be in a round of ours, as far as we know now."""

        def counts(peer: PeerId) -> bool:
            return self._averages(peer) and not self._holds(peer) and not self._stands_aside(peer)

        roster = self._ctx.roster
        return company(self._ctx.net.peer_id, filter(counts, roster.stage(roster.own.stage)), self._views())

    def _without(self) -> tuple[PeerId, ...]:
        """Replicas whose accumulators would not be in a round of ours: the living first, as messages have room for few."""
        with_us, roster = self._company(), self._ctx.roster
        others = [p for p in roster.replicas() if p not in with_us]
        return tuple(sorted(others, key=lambda p: not roster.is_alive(p))[:MAX_WITHOUT])

    def _averages(self, peer: PeerId) -> bool:
        trusted = self._lost[peer] < MAX_LOST and self._untrue[peer] < MAX_UNTRUE
        return trusted and not self._is_apart(peer) and peer not in self._differing

    def _believe_less(self, seals: dict[PeerId, Seal]) -> None:
        """A replica that claims missing microbatches, and then seals without them, would have the stage look for them for ever."""
        self._untrue.update(m for m, claimed in self._claims.items() if m in seals and claimed - {*seals[m].indices})
        self._claims = {}

    def _holds(self, peer: PeerId) -> bool:
        """``peer`` attests to a round that it sealed, so that it takes part in no other. Where that is believed, we take it, and else go on
        without ``peer``."""
        self._look_at_rounds()
        return peer in self._committed

    def _is_apart(self, peer: PeerId) -> bool:
        return self.step < self._apart.get(peer, (0, 0))[0]

    def _part(self, silent: dict[PeerId, int]) -> None:
        """A round failed. Replicas that live, but sent us nothing of it, are soon not counted on, in later steps neither: what they owe us
        may not pass their link, however well questions do. Those that may lack what another owes them have twice the rounds."""
        for peer, owes in silent.items():
            self._silent[peer] += owes
            if self._silent[peer] >= 2 * MAX_LOST and self._averages(peer):
                steps = min(APART_MAX, 2 * self._apart.get(peer, (0, APART // 2))[1])
                self._apart[peer] = self.step + steps, steps
                name = self._ctx.roster.name(peer)
                message = (
                    f"step {self.step}: {name} answers, but sends no chunks: no averaging with it for {steps} steps"
                )
                self._ctx.emit(Note(level="warning", message=message))

    def _compare(self, seals: dict[PeerId, Seal]) -> None:
        """Replicas begin a step with the same weights; devices that differ in the last bit, or a donor that lied, break that (DESIGN
        "Replicas"). Then the weights that most have count, of as many the lowest id's; what the others accumulated does not.

        Raises Behind on those, and MuletrainError on who was among them at the step before, too."""
        me, votes = self._ctx.net.peer_id, Counter(s.weights for s in seals.values())
        right = seals[min(seals, key=lambda m: (-votes[seals[m].weights], m))].weights
        differing = {m for m, s in seals.items() if s.weights != right}
        if me in differing and self._differed == self.step - 1:
            raise MuletrainError(
                f"step {self.step}: this peer's weights differ from its replicas' step after step, so it leaves. Replicas must agree "
                f"to the last bit: use devices of one kind in a stage, or optimizer.state_device = 'cpu' for the run"
            )
        if me in differing:
            self._differed = self.step
            message = f"step {self.step}: the weights here are not those of the other replicas"
            raise Behind(message, weights_hold=False)
        for member in sorted(differing):
            name = self._ctx.roster.name(member)
            note = f"step {self.step}: {name} has other weights than the other replicas, and takes theirs"
            self._ctx.emit(Note(level="warning", message=note))
        self._differing |= differing

    def _views(self) -> dict[PeerId, View]:
        """Whom replicas count on: those that we hear say it themselves, even if they do not hear us; of the others we are told."""

        def heard(member: PeerId) -> bool:
            roster, speaks = self._ctx.roster, self._ctx.detector.silent_s(member) < SPEAKS_S
            return roster.is_alive(member) or (speaks and not roster.declines(member))

        aside = self._stands_aside  # it goes on with nobody, whatever it announced before
        known = {m: View(s.attempt, s.members) for m, s in self._seals.items() if heard(m) and not aside(m)}
        told = {m: v for m, v in self._hearsay.items() if not heard(m)}
        return {m: v for m, v in {**told, **known}.items() if m not in self._differing}

    async def _meet(self) -> None:
        """Replicas that we do not reach may be alive: peers of other stages tell us what they told them. Raises LeftOut."""
        ctx, roster, me = self._ctx, self._ctx.roster, self._ctx.net.peer_id
        if self.announced is None or all(roster.is_alive(p) for p in roster.replicas()):
            return
        view = MemberView(member=me, attempt=self.announced.attempt, members=self.announced.members)
        ask = AskViews(lineage=self.lineage, step=self.step, view=view).pack()
        heard: dict[PeerId, View] = {}
        for peer in [p for p in roster.others() if roster.member(p).stage != roster.own.stage][:MEETING_POINTS]:
            try:
                answer = await ctx.net.call(peer, AskViews.KIND, ask, timeout_s=ctx.detector.deadline.seconds(1))
                views = (v for v in Views.unpack(answer).views if v.member in roster.replicas())
                heard |= {v.member: View(v.attempt, v.members) for v in views}
            except (PeerUnreachable, DeadlineExceeded) as e:
                ctx.detector.mark_down(peer, str(e))
            except NetworkError:  # it is at another step: others will say so
                continue
        self._hearsay = heard
        if yields(me, self.announced.members, self._views()):
            raise LeftOut

    async def _look_on(self) -> None:
        """Others run our part again, and we take what they reduce (_HeldElsewhere, Behind), unless they are lost, too."""
        ctx, me = self._ctx, self._ctx.net.peer_id
        message = f"step {self.step}: replicas that do not reach this peer go on without it"
        ctx.emit(Note(level="warning", message=message))
        self._abstain()
        await self._nothing_running(self.work)
        self._drop()
        self.ledger.seal()  # nothing comes in before it is announced
        assert self.announced is not None  # what left us out
        own = self.announced.members

        async def ask() -> None:
            await self._ask_everyone()
            await self._ask_replicas()
            with contextlib.suppress(LeftOut):
                await self._meet()

        await self._waits.until(
            lambda: not yields(me, own, self._views()), Deadline(5.0, 5.0), "those that go on without this peer", ask
        )
        self.ledger.reopen(keep=False)

    async def _ask_progress(self) -> None:
        await asyncio.gather(super()._ask_progress(), self._mourn())

    async def _mourn(self) -> None:
        """What died with a replica is run again while the rest of the step goes on, not after it. Only for those that are gone for sure:
        one that is silent may come back with what it accumulated, and then a whole accumulator would have to go."""
        ctx, dead = self._ctx, self._dead_replicas()
        new, self._mourned = dead - self._mourned, dead
        if not any(await asyncio.gather(*(ctx.detector.is_gone(p, self.lineage, self.step) for p in sorted(new)))):
            return
        known = self.ledger.held | set(self._running(self.step))
        for held in (await ctx.detector.ask_all(ctx.roster.replicas(), self.lineage, self.step)).values():
            known |= {*held.held, *held.running} if held.current else set()
        gap = Gap(
            lineage=self.lineage, step=self.step, stage=ctx.roster.own.stage, attempt=0, early=True,
            indices=tuple(sorted(set(range(ctx.plan.microbatches)) - known)),
        )  # fmt: skip
        await ctx.tell(ctx.roster.trainers(), gap)

    async def _refill(self, cover: Cover, attempt: int, seals: dict[PeerId, Seal]) -> None:
        """Microbatches are in no accumulator, or twice: keep the chosen sets, run the gaps again for this stage alone."""
        ctx = self._ctx
        if all(seal.gave_up is not None for seal in seals.values()):
            self._stand_for_it()
        if ctx.net.peer_id in cover.chosen:
            self.ledger.reopen(keep=True)
        else:
            self._drop()
        gaps = frozenset(cover.gaps)
        message = f"step {self.step}: stage {ctx.roster.own.stage} runs {len(gaps)} microbatches again"
        ctx.emit(Note(level="warning", message=message))

        async def refilled() -> None:
            """Gaps are filled when no replica misses them; its own ledger is each one's truth. A replica that tries once more found them
            filled, or its company has changed: then we try again, too."""
            assert self.announced is not None  # of which these are the gaps
            for pause in itertools.count():
                union, with_us = set(self.ledger.held), self._company()
                claims: dict[PeerId, frozenset[int]] = {}
                for peer, held in (await ctx.detector.ask_all(ctx.roster.replicas(), self.lineage, self.step)).items():
                    if held.beyond(self.step) and await self._went_on(peer):
                        raise Behind(f"step {self.step}: {ctx.roster.name(peer)} is at step {held.step}")
                    claims[peer] = gaps & set(held.held) if held.current and peer in with_us else frozenset()
                    union |= claims[peer]
                if gaps <= union or self._latest_attempt(self.announced.members) > attempt:
                    self._claims = claims
                    return
                await self._pause(pause)

        await self._run_again(gaps, attempt, refilled)

    async def _pause(self, times: int) -> None:
        """Before we look once more whether microbatches were run again. Raises LeftOut: they may be in the hands of those that go on
        without us."""
        await self._meet()
        if self.announced is not None and yields(self._ctx.net.peer_id, self.announced.members, self._views()):
            raise LeftOut
        await self._ctx.clock.sleep(backoff_s(times, PAUSE_S, FILLED_MAX_S))

    async def _run_again(
        self, gaps: frozenset[int], attempt: int, done: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Have the trainers run ``gaps`` for this stage alone, until ``done`` returns."""
        ctx, limit, begin = self._ctx, self._step_deadline, self._ctx.clock.now()
        for turn in itertools.count():
            gap = Gap(
                lineage=self.lineage, step=self.step, stage=ctx.roster.own.stage, attempt=attempt, turn=turn,
                indices=tuple(sorted(gaps - self.ledger.held)),
                without=self._without(),
            )  # fmt: skip
            await ctx.tell(ctx.roster.trainers(), gap)
            limit_s = min(limit.seconds(turn), AGAIN_S)
            try:
                return await ctx.clock.deadline(self._waits.watched(done()), limit_s, "missing microbatches")
            except DeadlineExceeded:
                # a device that hangs holds them for up to 300 s before its peer is not counted on (``watchdog``)
                if turn + 1 >= MAX_SILENCE and ctx.clock.now() - begin > 2 * ctx.patience_s:
                    break
                await self._ask_everyone()
        raise MuletrainError(
            f"step {self.step}: {len(gaps)} missing microbatches were not run again; {ctx.who_is_there()}"
        )

    def _drop(self) -> None:
        """What we accumulated counts as done twice."""
        self._ctx.compute.clear(self.step)
        self.work.uncount()
        self._findings = ()  # what they speak of is gone with the rest
        self.ledger.reopen(keep=False)

    # Trials -----------------------------------------------------------------------------------------------------------

    async def _sketch(self) -> bytes:
        """Of the accumulator."""
        compute = self._ctx.compute
        return packed(await compute.offload(sketch, compute.gradient(self.step), self.lineage))

    async def _reconsider(self) -> None:
        """What is not finite here, since others gave us what is not, is worth another try: they may have had a bad moment."""
        if self._reconsidered or self._findings or not self.ledger.excused:  # a judge's finding stands
            return
        if not np.isfinite(unpacked(await self._sketch())).all():
            self._reconsidered = True
            message = (
                f"step {self.step}: what other stages gave this peer made its gradient not finite: it is computed again"
            )
            self._ctx.emit(Note(level="warning", message=message))
            self._drop()

    async def _compute_again(self, trial: trials.Trial, attempt: int) -> None:
        """``trial.judge`` runs what ``trial.member`` gives up; everyone else stays sealed, and waits for it."""
        ctx, me = self._ctx, self._ctx.net.peer_id
        member, judge = (ctx.roster.name(p) for p in (trial.member, trial.judge))
        message = f"step {self.step}: the gradient of {member} stands out from those of its replicas: {judge} computes it again"
        if trial.appeal:
            message = f"step {self.step}: {member} computed otherwise what another gave up: {judge} computes it, too, to decide"
        if judge == member:
            message = f"step {self.step}: the gradient of {member} is not finite, and no other peer serves its stage: it computes it again"
        ctx.emit(Note(level="warning", message=message))
        if me == trial.member:
            await self._give_up(barred=me != trial.judge)
        before, base = self.ledger.held, await self._sketch()
        if me == trial.judge:
            self.ledger.reopen(keep=True, only=trial.indices)

        async def computed() -> None:
            """The judge waits for its own ledger, until another replica holds some of it: the member may have lost the judge and computed
            it itself, or a replica came back that had it all along. Members of this attempt announced what they hold. The others wait
            for the judge."""
            assert self.announced is not None  # of which this is a trial
            sealed = {*self.announced.members} - {trial.member}
            for pause in itertools.count():
                if me == trial.judge and trial.indices <= self.ledger.held:
                    return
                others = tuple(sorted({*self._company(), trial.member} - sealed - {me}))
                asked = others if me == trial.judge else (trial.judge,)
                answers = await ctx.detector.ask_all(asked, self.lineage, self.step)
                for peer, held in answers.items():
                    if held.beyond(self.step) and await self._went_on(peer):
                        raise Behind(f"step {self.step}: {ctx.roster.name(peer)} is at step {held.step}")
                holding = {i for held in answers.values() if held.current for i in held.held}
                if me == trial.judge:
                    if trial.indices & holding:
                        return
                elif (
                    not any(held.current for held in answers.values())
                    or trial.indices <= holding
                    or self._latest_attempt() > attempt
                ):
                    return
                await self._pause(pause)

        await self._run_again(trial.indices, attempt, computed)
        if me == trial.judge:
            await self._nothing_running(self.work)
            self.ledger.seal()
            if self.ledger.held == before | trial.indices:
                with np.errstate(invalid="ignore", over="ignore"):
                    found = packed(unpacked(await self._sketch()) - unpacked(base))
                self._findings += (Finding(member=trial.member, sketch=found),)
            elif me == trial.member:
                # we judged ourselves, until a replica came back: now the others compute what we gave up
                self._empty(barred=True)

    async def _give_up(self, *, barred: bool) -> None:
        """What this peer announced; it stands by it."""
        assert self.announced is not None  # that is what stands out
        excused = self.ledger.excused
        self._empty(barred=barred)
        self._gave_up = GivenUp(indices=self.announced.indices, sketch=self.announced.sketch, excused=excused)

    def _empty(self, *, barred: bool) -> None:
        """Nothing that we accumulated counts; what we found of others does."""
        findings = self._findings
        self._drop()
        self._findings, self.ledger.barred = findings, barred
        self.ledger.seal()

    def _stand_for_it(self) -> None:
        """Nobody is there (any more) who did not give up: what this peer computes again itself counts."""
        self.ledger.barred = False
        if not any(f.member == self._ctx.net.peer_id for f in self._findings):
            self._gave_up = None

    async def _sentenced(self, disagreements: list[trials.Disagreement]) -> tuple[PeerId, ...]:
        """Who is expelled with this step; says what is known of the rest. Raises MuletrainError on who is expelled, or computed
        otherwise than its replicas step after step."""
        ctx, me = self._ctx, self._ctx.net.peer_id
        liars = set()
        for d in disagreements:
            member, judge = (ctx.roster.name(p) for p in (d.member, d.judge))
            if d.liar is not None and d.liar != ctx.roster.genesis.collector:
                liars.add(d.liar)
            what = f"step {self.step}: {member} and {judge} computed different gradients of the same microbatches"
            if d.liar is not None:
                what += f"; a third peer computed what {judge if d.liar == d.member else member} did"
            elif d.member == d.judge:
                what = f"step {self.step}: {member} computed a gradient twice, with different results; its hardware may be faulty"
            elif not d.decided:
                what += f"; no third peer serves the stage to decide who is right, and that of {judge}, which does not stand out, is taken"
            ctx.emit(Note(level="warning", message=what))
            wrong = d.liar == me if d.decided else d.member == me
            if wrong and (me in liars or (self._refuted == self.step - 1 and ctx.roster.needs_us() is None)):
                await ctx.clock.sleep(HEARD_S)
                raise expelled(self.step)
            self._refuted = self.step if wrong else self._refuted
        return tuple(sorted(liars))
