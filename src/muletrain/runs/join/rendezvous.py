"""The waiting room before step 0: guests come to the founder and build their stages; then the run begins."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muletrain.clock import LoopClock
from muletrain.errors import AdmissionError, NetworkError
from muletrain.events import Note, Waiting
from muletrain.runs.join.admission import PREPARE_S, Admission, member_of, unique_name
from muletrain.runs.join.messages import (
    AGAIN,
    CALL_S,
    NOT_AWAITED,
    PIECE,
    READY_EVERY_S,
    AskAdmitter,
    AskPiece,
    Begin,
    Begun,
    JoinRequest,
    Ready,
    Welcome,
)
from muletrain.runtime.members.roster import Genesis

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from muletrain.compute.estimate import Offer
    from muletrain.events import Event
    from muletrain.network.base import Network, PeerId
    from muletrain.runs.checkpoint import Checkpoint
    from muletrain.runs.join.admission import RunInfo
    from muletrain.runs.join.seating import Seating
    from muletrain.runtime.core.messages import Message


@dataclass
class _Guest:
    """A peer that has a stage. ``ready`` is None while the guest builds; ``since``: time of arrival, or of the last
    piece taken."""

    request: JoinRequest
    welcome: Welcome
    ready: Ready | None = None
    since: float = field(default_factory=LoopClock().now)

    @property
    def trains(self) -> bool:
        return self.ready is not None and self.ready.trainer


@dataclass
class Rendezvous:
    """Owns the founder's guests, and admits them, until the run begins.

    ``config_digest``: of the run's configuration. ``expected``: peers to wait for, including the founder. ``trainers``:
    most guests that become trainers; None: all with the data. ``checkpoint``: the start of a resumed run.
    """

    net: Network
    emit: Callable[[Event], None]
    info: RunInfo
    seating: Seating
    run_id: str
    config_digest: bytes
    expected: int
    trainers: int | None
    checkpoint: Checkpoint | None = None
    _guests: dict[PeerId, _Guest] = field(default_factory=dict)
    _clients: dict[PeerId, int] = field(default_factory=dict)
    """Stages of clients, for which the run does not wait."""
    _largest: Offer | None = None
    """The largest offer so far, refused newcomers included."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _begun: Genesis | None = None

    def __post_init__(self) -> None:
        self._admission = Admission(self.net, self.emit, self.info, self.seating, self)

    def open(self) -> None:
        """Answer newcomers and guests from now on."""
        self._admission.open()
        self.net.serve(AskPiece.KIND, self._on_piece, free=True)

    def seat(self, peer: PeerId, request: JoinRequest) -> int:
        """Admit ``peer``, and return the stage. Raises AdmissionError or CapacityError."""
        return self._admission.admit(peer, request).stage

    def ready(self, peer: PeerId, ready: Ready) -> None:
        """``peer`` has built its stage. Raises AdmissionError for a peer without a stage."""
        if peer not in self._guests:
            raise AdmissionError(NOT_AWAITED)
        if self._guests[peer].ready != ready:  # waiting guests repeat ``Ready``
            self._guests[peer].ready = ready
            self._changed.set()

    def expect(self, peers: int) -> None:
        """Wait for ``peers`` at most: no more will come."""
        if peers < self.expected:
            self.expected = peers
            self._changed.set()

    def goes_on(self, peer: PeerId) -> None:
        """The guest ``peer`` still builds its stage: it asks for pieces, or has got another one."""
        if (guest := self._guests.get(peer)) is not None:
            guest.since = LoopClock().now()

    # Participants, for the admission ----------------------------------------------------------------------------------

    def consider(self, request: JoinRequest) -> list[list[str]]:
        if self._begun is not None:
            raise AdmissionError(f"the run begins at this very moment; {AGAIN}")
        if self._largest is None or self._largest.device < request.offer.device:
            self._largest = request.offer
        guests = self._guests.values()
        return [[g.request.device for g in guests if g.welcome.stage == s] for s in range(self.seating.stages)]

    def machines(self) -> list[int]:
        stages = [*self._clients.values(), *(guest.welcome.stage for guest in self._guests.values())]
        return [stages.count(s) for s in range(self.seating.stages)]

    def add(self, peer: PeerId, request: JoinRequest, welcome: Welcome) -> Welcome:
        if welcome.client:
            self._clients[peer] = welcome.stage
            return welcome
        name = unique_name(request.name, {g.welcome.name for p, g in self._guests.items() if p != peer})
        more: dict[str, object] = {"name": name}
        if self.checkpoint is not None:
            more["part_size"] = self.checkpoint.parts[welcome.stage].stat().st_size
            more["part_digest"] = self.checkpoint.digests[welcome.stage]
        before = self._guests.get(peer)
        self._guests[peer] = guest = _Guest(request, welcome.model_copy(update=more))
        if before is not None:  # it may come again and again
            guest.since = before.since
        self._changed.set()
        return guest.welcome

    def remove(self, peer: PeerId) -> bool:
        if self._begun is not None or self._guests.pop(peer, None) is None:
            return False
        self._changed.set()
        return True

    def begun(self, peer: PeerId, ready: Ready | None) -> Begun:
        if ready is not None:
            self.ready(peer, ready)
        return Begun(missing=tuple(self.missing())) if self._begun is None else Begun(genesis=self._begun)

    # What the run waits for -------------------------------------------------------------------------------------------

    def names(self) -> dict[PeerId, str]:
        """Names of all guests, by id."""
        return {p: g.welcome.name for p, g in self._guests.items()}

    def prepared(self) -> dict[PeerId, tuple[str, Offer]]:
        """Names and memory offers of the guests that are ready, by id."""
        return {p: (g.welcome.name, g.request.offer) for p, g in self._guests.items() if g.ready is not None}

    def missing(self) -> list[str]:
        """The missing conditions of the run, in words."""
        ready = [g for g in self._guests.values() if g.ready is not None]
        unserved = [s for s in range(self.seating.stages) if not any(g.welcome.stage == s for g in ready)]
        lacking = [f"stage {s} has no peer ({self._need(s)})" for s in unserved]
        building = [g.welcome.name for g in self._guests.values() if g.ready is None]  # members serve from step 0 on
        more = self.expected - len(ready)
        if building or more > len(unserved):
            counted = [f"{len(ready)} of {self.expected} peers ready"] if more > 0 else []
            lacking.append(", ".join([*counted, *([f"{', '.join(sorted(building))} preparing"] if building else [])]))
        if not building and not any(g.trains for g in ready):
            lacking.append("no peer has the data (join --data PATH)")
        return lacking

    def _need(self, stage: int) -> str:
        need, best = self.seating.needs[stage], self._largest
        too_small = "" if best is None or need.fits(best) else f"; the largest offer so far is {best}"
        return f"needs {need.need(best)}{too_small}"

    async def gather(self, settled: Callable[[], Awaitable[bool]] | None = None) -> Genesis:
        """Wait until the run can begin, then begin. ``settled`` is awaited when nothing is missing, and returns True if
        that took time, so that guests may have come or gone."""
        told: list[str] | None = None
        while True:
            if not (lacking := self.missing()):
                await self._sweep()  # a guest that left a moment ago must not become a member
                if not self.missing() and (settled is None or not await settled()):
                    return await self._begin()
                continue
            if lacking != told:
                self.emit(Waiting(missing=lacking))
                told = lacking
            self._changed.clear()
            try:
                async with asyncio.timeout(READY_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                await self._sweep()

    async def _sweep(self) -> None:
        """Free the places of guests that do not answer, or make no progress."""
        guests = [p for p in self._guests if p != self.net.peer_id]
        for peer in await self._unreached(guests, AskAdmitter()):
            self._guests.pop(peer, None)
        late = [p for p in guests if p in self._guests and self._guests[p].ready is None]
        for peer in late:
            if LoopClock().now() - self._guests[peer].since > PREPARE_S:
                name = self._guests.pop(peer).welcome.name
                message = f"{name} has not got its stage ready for {PREPARE_S / 60:.0f} min: the run does not wait for it any more"
                self.emit(Note(level="warning", message=message))

    async def _begin(self) -> Genesis:
        self._begun = genesis = self._make_genesis()
        others = [m.id for m in genesis.members if m.id != self.net.peer_id]
        for peer, error in (await self._unreached(others, Begin(genesis=genesis))).items():
            # the first step finds the guest dead
            message = f"{self._guests[peer].welcome.name} could not be told to begin: {error.why}"
            self.emit(Note(level="warning", message=message))
        return genesis

    async def _unreached(self, peers: list[PeerId], message: Message) -> dict[PeerId, NetworkError]:
        """Call all ``peers``, and return the errors of failed calls."""
        packed = message.pack()
        calls = (self.net.call(p, message.KIND, packed, timeout_s=CALL_S) for p in peers)
        failed = {}
        for peer, result in zip(peers, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(result, NetworkError):
                failed[peer] = result
            elif isinstance(result, BaseException):
                raise result
        return failed

    def _make_genesis(self) -> Genesis:
        ranked = sorted(self._guests, key=lambda p: (self._guests[p].welcome.stage, p != self.net.peer_id, p))
        able = [p for p in ranked if self._guests[p].trains]
        trainers = able[: self.trainers]
        if len(trainers) < len(able):
            message = f"{len(trainers)} of {len(able)} peers that have the data build microbatches (fleet.trainers)"
            self.emit(Note(level="info", message=message))
        members = (
            member_of(p, g.request, g.welcome, g.ready) for p in ranked if (g := self._guests[p]).ready is not None
        )
        return Genesis(
            run_id=self.run_id,
            config=self.config_digest,
            data=self.info.data,
            stages=self.seating.stages,
            members=tuple(m.model_copy(update={"trainer": m.id in trainers}) for m in members),
            coordinator=self.net.peer_id,
            first_step=0 if self.checkpoint is None else self.checkpoint.step,
        )

    async def _on_piece(self, sender: PeerId, payload: bytes) -> bytes:
        """Raises AdmissionError for a part of the checkpoint, except for a guest that prepares its stage."""
        ask, guest = AskPiece.unpack(payload), self._guests.get(sender)
        if not ask.part or self.checkpoint is None:
            return await self._admission.on_piece(sender, payload)
        if self._begun is not None or guest is None:
            raise AdmissionError(NOT_AWAITED)
        self.goes_on(sender)
        return await asyncio.to_thread(_read_piece, self.checkpoint.parts[guest.welcome.stage], ask.offset)


def _read_piece(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(PIECE)
