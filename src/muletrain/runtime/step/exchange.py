"""Statements about one step: a peer takes in notices and rows, asks for rows since a notice may be lost, and answers such
questions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from muletrain.errors import NetworkError, ProtocolError
from muletrain.policy import speakers
from muletrain.runtime.core.times import AGAIN_S, GONE_S, LAG_S, pause_s
from muletrain.runtime.core.waiting import MAX_SILENCE
from muletrain.runtime.members.messages import Suspected
from muletrain.runtime.members.row import Statements
from muletrain.runtime.microbatch.position import Behind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from muletrain.network.base import PeerId
    from muletrain.runtime.members.row import Row, Sync
    from muletrain.runtime.step.record import Certificate, StepRecord
    from muletrain.runtime.step.state import Lasting, StepState

MAX_ASKED = 8
"""Peers asked at once: live replicas (in a larger stage more, so that all were asked before a wait is given up), peers
that confirm that the run is beyond this step, and peers asked for the record after the first that knew it."""


class Exchange:
    """The exchange of one step, with its open questions; each step has a new exchange."""

    def __init__(self, lasting: Lasting, state: StepState) -> None:
        self._ctx, self._position, self._log = lasting.ctx, lasting.position, lasting.log
        self._waits, self._met_rival, self._lessons = lasting.waits, lasting.met_rival, lasting.lessons
        self._state, self._work = state, state.work
        self._overtaken = False
        self._doubted: set[PeerId] = set()
        """Replicas that we ask other peers about."""
        self._sure_s = 0.0
        """When the replicas lost since then no longer vote, whatever other peers say."""
        self._questioned: set[tuple[PeerId, int]] = set()
        """Replicas asked for the seal of a round that they attest to, with the attempt of the last seal that we
        knew."""
        self._known: dict[PeerId, int] = {}
        """Version of each peer's statements that we have."""
        self._said: defaultdict[bytes, set[PeerId]] = defaultdict(set)
        """Whom we told, as a speaker, about a round or a record."""
        self._spoke: tuple[Certificate | None, StepRecord | None, int] | None = None
        """Our last certificate and record, and the roster's version."""
        self._applied: dict[PeerId, bytes] = {}
        """Hash of the record that each peer applied, as it says: by the record or, at the next step, by its lineage."""
        self._at_work: dict[PeerId, frozenset[int]] = {}
        """Microbatches in flight at each peer, or given out by it, as it said last."""
        self._late: dict[PeerId, float] = {}
        """When we first heard that a peer was still at an earlier step."""
        self._most: dict[PeerId, int] = {}
        """Most microbatches that each peer reported as accumulated in this step."""

    # What arrives -----------------------------------------------------------------------------------------------------

    def known(self, peer: PeerId) -> int:
        """See ``FailureDetector``."""
        return self._known.get(peer, 0)

    def hear(self, peer: PeerId, row: Row) -> None:
        """Take in the statements in the row of ``peer``, unless known, or made at a stage that ``peer`` has not yet
        introduced itself at."""
        roster = self._ctx.roster
        if not roster.knows(peer) or roster.member(peer).stage != row.stage:
            return
        if row.step == self._state.step + 1 and row.lineage:
            self._applied[peer] = row.lineage
            self._state.builder.follow(peer, row.lineage)
        if row.version in (0, self.known(peer)):
            return
        if row.said is not None and row.said.record:
            self._applied[peer] = row.said.record
        try:
            if row.said is not None:
                if row.said.entries and not row.said.record:
                    raise ProtocolError("a speaker's word, unasked")
                self._take_in(peer, row.said)
            self._known[peer] = row.version
        except ProtocolError as e:
            self._ctx.refused(peer, str(e))
        self._ctx.news.touched()

    def on_statements(self, sender: PeerId, said: Statements) -> None:
        """Take in what ``sender`` tells unasked. Raises ProtocolError."""
        if said.entries and 2 * self._state.size <= speakers.DIRECT:  # no peer counts so many more than we do
            raise ProtocolError("a speaker in a run where everyone tells everyone")
        if said.record and (said.stage != self._ctx.roster.own.stage or said.entry is not None):
            raise ProtocolError("a record from a speaker of another stage, or with an attestation")
        if said.entries and sender not in self._state.speakers(said.stage, sender):
            return  # two liars of a large stage would speak for it; who knows other replicas than we do is asked later
        self._take_in(sender, said)

    def _take_in(self, sender: PeerId, said: Statements) -> None:
        """Raises ProtocolError."""
        state, ctx = self._state, self._ctx
        news = state.take_in(sender, said)
        if said.seal is not None:
            self._log.arrived(sender)
            if news and state.attested is not None:  # no further attempt is needed: every replica can take our gradient
                self.tell((sender,), entry=state.attested)
        if said.stage == ctx.roster.own.stage and (said.seal or said.entry):
            self._question(sender)
        given_up = () if said.entry is None else said.entry.without
        for member in given_up:  # a round counts only if such members are down
            ctx.detector.look_after(member, state.lineage, state.step)
        ctx.news.touched()
        if not self._work.all_completed and (said.seal or said.entry or said.entries):
            self.on_later(sender, applied=False)

    # What we state ----------------------------------------------------------------------------------------------------

    def state(self, peers: tuple[PeerId, ...], **changed: Any) -> None:
        """Tell ``peers`` what this peer states anew, as fields of ``Statements``."""
        self._state.changed()
        self.tell(peers, **changed)

    def tell(self, peers: tuple[PeerId, ...], **said: Any) -> None:
        """Tell ``peers`` what is not new, or stands in the row in other words."""
        at, stage = self._state, self._ctx.roster.own.stage
        statements = Statements(lineage=at.lineage, step=at.step, stage=stage, **said)
        self._ctx.spawn(self._ctx.tell(peers, statements), "statements")  # a frozen peer must not hold us up

    def abstain(self) -> None:
        """Our replicas go on without us: tell all peers that the round counts without our word."""
        if (attempt := self._state.abstain()) is not None:
            self._ctx.news.touched()
            self.state(self._state.audience(), abstains=attempt)

    def speak(self) -> None:
        """If this peer is a speaker of a large run, tell the speakers of the other stages which round of its stage
        counts, and its replicas the record; each once, unless there are other speakers, or another round counts."""
        state, roster, own = self._state, self._ctx.roster, self._ctx.roster.own.stage
        if state.size <= speakers.DIRECT:
            return
        certificate, record = state.builder.certificate(own), state.builder.record()
        if self._spoke == (spoke := (certificate, record, roster.version)):
            return
        self._spoke = spoke
        if self._ctx.net.peer_id not in state.speakers(own):
            return
        if certificate is not None:
            others = {p for s in range(self._ctx.plan.stages) if s != own for p in state.speakers(s)}
            new = self._unaware(certificate.entry.round, others)
            self.tell(new, entries=(certificate.entry,), product=certificate.product)
        if record is not None:
            new = self._unaware(record.hash, {*roster.replicas()})
            self.tell(new, entries=record.stages, product=record.product, record=record.hash)

    def _unaware(self, about: bytes, peers: set[PeerId]) -> tuple[PeerId, ...]:
        """The ``peers`` that we had not told about a round or a record, and tell now."""
        new, self._said[about] = tuple(sorted(peers - self._said[about])), self._said[about] | peers
        return new

    def make_sure(self) -> None:
        """Find out whether other peers hear the replicas that we lost: these replicas vote then, and this peer alone
        makes no record (indirect probes: SWIM, Das et al. 2002, section 3.1). A partition may take hundreds, which have
        their turn a few at a time."""
        for peer in self._ctx.roster.doubted():
            if peer not in self._doubted and len(self._doubted) < MAX_ASKED:
                if not self._doubted:
                    self._sure_s = self._ctx.clock.now() + GONE_S
                self._doubted.add(peer)
                self._ctx.spawn(self._make_sure(peer), f"make sure of {peer[-6:]}")

    async def _make_sure(self, peer: PeerId) -> None:
        """Ask until no other peer hears ``peer``, or ``peer`` is back, or the step is over. Ends within ``GONE_S``: answers may
        be lies."""
        roster, clock, state = self._ctx.roster, self._ctx.clock, self._state
        for tries in itertools.count():
            asked = roster.spread(MAX_ASKED, tries)
            heard = await asyncio.gather(*(self._is_heard(peer, by) for by in asked))
            if clock.now() >= self._sure_s:
                roster.sure(roster.doubted())
            elif not any(heard):
                roster.sure((peer,))
            if not state.current or peer not in roster.doubted():
                break
            await clock.sleep(pause_s(tries, AGAIN_S))
        self._doubted.discard(peer)
        self._ctx.news.touched()

    async def _is_heard(self, peer: PeerId, by: PeerId) -> bool:
        ask = Suspected(lineage=self._state.lineage, step=self._state.step, peer=peer)
        limit_s = self._ctx.detector.deadline.seconds()
        with contextlib.suppress(NetworkError):
            return bool(await self._ctx.net.call(by, Suspected.KIND, ask.pack(), timeout_s=limit_s))
        return False

    def _recorded(self) -> bool:
        return self._state.builder.record() is not None

    def _reached(self, *, applied: bool) -> bool:
        """Do we have the step's record, or (unless ``applied``) all its microbatches?"""
        return self._recorded() if applied else self._work.all_completed

    def on_later(self, sender: PeerId, *, applied: bool) -> None:
        """A frame of ``sender`` shows that all microbatches of this step are through at ``sender``, or that ``sender`` has
        ``applied`` the step. Usually this happens soon here, too; if not, a notice was lost."""
        if not (self._overtaken or self._position.away or self._reached(applied=applied)):
            self._overtaken = True
            self._ctx.spawn(self._find_out_later(sender, applied=applied), "overtaken")

    async def _find_out_later(self, sender: PeerId, *, applied: bool) -> None:
        await self._ctx.clock.sleep(LAG_S)
        self._overtaken = False
        if self._state.current and not self._reached(applied=applied):
            await self.find_out(sender)

    def _question(self, holder: PeerId) -> None:
        """Find out whether ``holder`` sealed the attested round, unless we know."""
        seal = self._state.seals.get(holder)
        asked = holder, seal.attempt if seal is not None else -1
        if asked not in self._questioned and self._state.doubtful(holder):
            self._questioned.add(asked)
            self._ctx.spawn(self._ask_why(holder), "ask for a seal")

    async def _ask_why(self, holder: PeerId) -> None:
        """Ask ``holder`` for its seal, which may have been lost. A holder announces nothing more, except a holder that
        took the round from another peer."""
        state = self._state
        if await self._sync(holder) is not None and state.current and holder in state.seals:
            if any(round_.holders.keys() == {holder} for round_ in state.doubtful(holder)):
                self._ctx.refused(holder, "round entry: its members are not what its holder sealed")
            self._ctx.news.touched()

    # What we ask ------------------------------------------------------------------------------------------------------

    async def find_out(self, sender: PeerId) -> None:
        """Ask ``sender`` for all awaited results."""
        if self._position.away:
            return
        try:
            await self.ask(sender)
        except Behind as e:
            if self._state.current:
                self._position.interrupt(e)
        self._ctx.news.touched()

    async def _sync(self, peer: PeerId) -> Row | None:
        return await self._ctx.detector.probe(peer, self._state.lineage, self._state.step, record=True)

    async def ask(self, peer: PeerId) -> Row | None:
        """Ask ``peer`` about this step; None: no answer. A peer that stays at an earlier step is left out. Raises
        Behind if ``peer`` is at a later step."""
        ctx, state = self._ctx, self._state
        row = await self._sync(peer)
        if row is None:
            return None
        moved, round_ = self._lessons.moved.get(peer, (0, b""))
        # averaging over slow links takes long, and so does a microbatch on a slow device; a peer whose device is late soon
        # leaves the step to the others
        if row.moved > moved or row.round != round_ or row.late or row.in_flight:
            self._waits.came_on()
        accumulated = len({*row.accumulated} & {*range(ctx.plan.microbatches)})  # the report may be false
        self._at_work[peer] = frozenset({*row.in_flight, *row.given}) if row.current else frozenset()
        if row.current and accumulated > self._most.get(peer, 0):
            self._most[peer] = accumulated
            self._waits.grew()
        self._lessons.moved[peer] = row.moved, row.round
        if row.rival:
            self._met_rival(peer)
            ctx.detector.mark_down(peer, "it trains in another lineage", declines=True)
            return row
        if row.step > state.step:
            self._position.others_at = max(self._position.others_at, row.step)
            went_on = await self.went_on(peer)
            if not went_on or (state.gradient is not None and self._recorded()):
                return row  # only notices of other peers were missing
            raise Behind(f"step {state.step + 1}: {ctx.roster.name(peer)} is at step {row.step + 1}")
        if row.current and self._work.complete(row.completed, row.losses):
            ctx.news.touched()
        if not row.current or (row.step < state.step and self._work.all_completed):
            self._leave_out(peer, row)  # the peer is of no use before it reaches this step
        elif row.step == state.step and peer in self._late:
            self._lessons.late.measured(ctx.clock.now() - self._late.pop(peer))
            self._lessons.left_out.pop(peer, None)
        return row

    def _leave_out(self, peer: PeerId, row: Row) -> None:
        """Mark ``peer`` down after a long time at an earlier step. Its device may be at a microbatch that another peer
        has done since, and applies the step after that."""
        now, lessons = self._ctx.clock.now(), self._lessons
        busy_s = 0.0 if peer in lessons.left_out else self._ctx.compute.jobs.longest_s()
        if now - self._late.setdefault(peer, now) >= max(lessons.late.seconds(), busy_s):
            self._late[peer] = now  # else every answer would mark the peer down again
            lessons.left_out[peer] = None
            self._ctx.detector.mark_down(peer, f"it is still at step {row.step}", reached=True)

    async def ask_everyone(self) -> list[Row]:
        """Ask all peers; in a large run (some of) our replicas and one peer of each other stage, other ones the next time.
        Peers that are down are asked, too, since a healed link does not announce itself, but are not waited for. Returns the
        answers of live peers."""
        roster, lessons = self._ctx.roster, self._lessons
        lessons.asked_round += 1
        for peer in self._ctx.detector.worth_a_try(p for p in roster.everyone() if not roster.is_alive(p)):
            self._ctx.spawn(self.find_out(peer), "ask after the dead")
        if self._state.size <= speakers.DIRECT:
            return await self.ask_each(roster.spread(speakers.DIRECT, lessons.asked_round))
        replicas = tuple(filter(roster.is_alive, roster.replicas()))
        count = max(MAX_ASKED, math.ceil(len(replicas) / (MAX_SILENCE - 1)))
        some = roster.spread(count, lessons.asked_round, replicas)
        return await self.ask_each((*some, *roster.one_of_each(lessons.asked_round)))

    async def ask_replicas(self, *, live: bool = False) -> list[Row]:
        """Ask all replicas (only the ``live`` ones), since a notice may be lost. Returns the answers."""
        return await self.ask_each(p for p in self._ctx.roster.replicas() if not live or self._ctx.roster.is_alive(p))

    async def ask_each(self, peers: Iterable[PeerId]) -> list[Row]:
        """Ask ``peers`` at once. Returns the answers. Raises Behind."""
        answers = await asyncio.gather(*map(self.ask, dict.fromkeys(peers)))
        return [row for row in answers if row is not None]

    async def went_on(self, first: PeerId) -> bool:
        """Has the run gone beyond this step, as ``first`` says? A single member cannot lure us away, unless it is alone at
        its stage: more peers must be beyond the step, by one record, than at the step or beyond it by another record, or
        its record must be known now. Between two records of as many peers each, this peer may have to choose
        (``RecordBuilder``). Once a whole stage is beyond the step, by one record, nobody can finish the step."""
        here, lead, second, gone, roster = 0, 0, 0, Counter[bytes](), self._ctx.roster
        waits = {first, *roster.stage(roster.member(first).stage)[:MAX_ASKED]}  # not known to be beyond it
        for peer in dict.fromkeys((first, *sorted(waits), *roster.spread(MAX_ASKED))):
            row = await self._sync(peer)
            if self._recorded():
                return True
            if row is not None:
                here += row.step == self._state.step
                # replicas that lost each other have two records
                gone[self._applied.get(peer, b"")] += row.step > self._state.step
                waits -= {peer} if row.step > self._state.step else set()
            most, second = (*sorted((n for record, n in gone.items() if record), reverse=True), 0, 0)[:2]
            if (lead := most + gone[b""] - max(here, second)) > 1:  # who is further on no longer keeps the record
                break
        return lead > 0 or not (waits or second)

    async def learn_record(self, peers: Iterable[PeerId]) -> None:
        """Ask ``peers`` for this step's record, until enough answers agree."""
        asked, here, builder = 0, False, self._state.builder
        for peer in peers:
            if self._recorded() or asked > MAX_ASKED:
                break
            row = await self._sync(peer)
            here |= row is not None and row.step == self._state.step
            asked += builder.claimed > 0
        builder.trust(not here)
        record, own = builder.record(), self._ctx.roster.own.stage
        if record is not None and builder.told(record.stages[own]) is None:  # only replicas know its shards
            await asyncio.gather(*map(self._sync, self._ctx.roster.replicas()))

    def at_work(self) -> tuple[PeerId, ...]:
        """The peers that had microbatches in flight that this step lacks, or that gave them out, when asked last."""
        return tuple(p for p, indices in self._at_work.items() if indices - self._work.losses.keys())

    # What we answer ---------------------------------------------------------------------------------------------------

    def statements(self, sender: PeerId, ask: Sync) -> dict[str, Any]:
        """Our statements about this step or a kept earlier step, as fields of ``Row``; none if ``sender`` knows
        them."""
        state, own = self._state, self._ctx.roster.own.stage
        if (ask.step, ask.lineage) == (state.step, state.lineage):
            said: dict[str, Any] = {"entry": state.attested, "tied": state.tied, "abstains": state.abstained}
            if ask.stage == own:
                said["seal"] = state.announced
            version = state.version
        elif ask.record and (applied := self._log.applied(sender, ask.step, ask.lineage)) is not None:
            entry, record = applied
            entry = entry.model_copy(update={"holder": self._ctx.net.peer_id, "without": ()})
            said = {"entry": entry, "entries": record.stages, "product": record.product, "record": record.hash}
            version = int.from_bytes(record.hash[-6:])
        else:
            return {}
        if version in (0, ask.known):
            return {"version": version}
        return {"version": version, "said": Statements(lineage=ask.lineage, step=ask.step, stage=own, **said)}
