"""The lobby: before step 0, peers gather at the founder, get a stage and the tokenizer, and agree on the genesis.

Calls, newcomer to any member: ``founder`` (whom to ask). Newcomer to founder: ``join`` (who I am; answer: the run),
``tokenizer`` and ``part`` (of the checkpoint that the run goes on from; both in pieces), ``ready`` (my stage is built).
Founder to every member: ``begin`` (the genesis).
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from muletrain import __version__
from muletrain.compute.estimate import Offer
from muletrain.errors import AdmissionError, CapacityError, NetworkError, ProtocolError
from muletrain.events import Admitted, JoinRefused, Note, Waiting
from muletrain.runs.join.seating import choose_stage, mixing
from muletrain.runtime.core.messages import Address, Digest, Id, Message, Name, Natural, Rate, Text
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Genesis
from muletrain.runtime.transfer.tokens import Shared  # noqa: TC001  (a field of Welcome)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from muletrain.clock import Clock
    from muletrain.compute.estimate import StageMemory
    from muletrain.events import Event
    from muletrain.network.base import Network, PeerId
    from muletrain.strategies.base import Strategy

PIECE = 512 * 1024
"""Bytes of tokenizer or checkpoint in one answer; calls carry at most 1 MiB."""
AHEAD = 4
"""Pieces asked for at once."""
CALL_TIMEOUT_S = 30.0
POLL_S = 2.0


class Join(Message):
    """``stage``: the one wanted, if any. ``device``: its kind, and ``flops`` (``Machine``). ``memory``: bytes of it
    this peer may use, and ``host_memory`` beside it (``Offer``)."""

    KIND: ClassVar[str] = "lobby.join"
    version: Text
    name: Name
    stage: Natural | None
    device: Text
    flops: Rate
    memory: Natural
    host_memory: Natural | None
    addresses: Annotated[tuple[Address, ...], Field(max_length=64)]

    @property
    def offer(self) -> Offer:
        return Offer(self.memory, self.host_memory)


class Welcome(Message):
    """The run, and the stage that is yours. ``config`` is the run's configuration as JSON."""

    KIND: ClassVar[str] = "lobby.welcome"
    config: Annotated[str, Field(max_length=1 << 19)]
    stage: Natural
    data: Digest
    tokenizer_size: Annotated[int, Field(ge=0, le=1 << 28)]
    part_size: Natural = 0
    """Bytes of your stage's state, as safetensors, where the run goes on from a checkpoint; 0: it begins."""
    part_digest: Digest = bytes(32)
    """SHA-256."""
    running: bool = False
    """The run has begun: take the stage's state from its replicas."""
    name: Text = ""
    """What you are called in a run that has begun."""
    tokens: Shared | None = None
    """Where the run shares its tokens (``data.share``)."""


class AskTokenizer(Message):
    KIND: ClassVar[str] = "lobby.tokenizer"
    offset: Natural


class AskPart(Message):
    KIND: ClassVar[str] = "lobby.part"
    stage: Natural
    offset: Natural


class Ready(Message):
    """The stage is built. ``trainer``: this peer has the data (its digest fits). ``place``: where it can write
    checkpoints."""

    KIND: ClassVar[str] = "lobby.ready"
    trainer: bool
    place: Annotated[str, Field(max_length=64)]


class Declined(Message):
    """Call from a guest that does not come after all: why, for the people there."""

    KIND: ClassVar[str] = "lobby.declined"
    reason: Text


class Missing(Message):
    """What the run still waits for, in words (nothing: it has begun). Answers an empty question, and every
    ``Ready``."""

    KIND: ClassVar[str] = "lobby.missing"
    missing: Annotated[tuple[Text, ...], Field(max_length=4096)]


class Begin(Message):
    KIND: ClassVar[str] = "lobby.begin"
    genesis: Genesis


class AskGenesis(Message):
    """What did the run begin with? The answer is a Begin."""

    KIND: ClassVar[str] = "lobby.genesis"


class Founder(Message):
    """Whom to ask for a seat. The question is empty."""

    KIND: ClassVar[str] = "lobby.founder"
    id: Id


async def _nothing_to_settle() -> bool:
    return False


@dataclass
class _Guest:
    join: Join
    stage: int
    trainer: bool | None = None  # None: still building its stage
    place: str = ""


@dataclass
class Lobby:
    """The founder's side."""

    net: Network
    clock: Clock
    emit: Callable[[Event], None]
    run_id: str
    config_json: str
    config_digest: bytes
    data_digest: bytes
    tokenizer: bytes
    stages: int
    expected: int
    """Peers to wait for, the founder among them."""
    trainers: int | None
    """At most this many peers become trainers; None: all that have the data."""
    needs: list[StageMemory]
    """Memory each stage needs."""
    stage_costs: list[float]
    """Compute cost of each stage: the most loaded one gets the next peer."""
    strategy: Strategy
    first_step: int = 0
    parts: list[Path] = field(default_factory=list)
    """Each stage's state before ``first_step``, if that is not 0."""
    part_digests: list[bytes] = field(default_factory=list)
    tokens: Shared | None = None
    """Where the run shares them."""
    settled: Callable[[], Awaitable[bool]] = _nothing_to_settle
    """Awaited before the run begins; True: it took its time, in which others may have come and gone."""
    _guests: dict[PeerId, _Guest] = field(default_factory=dict)
    _largest: Offer | None = None
    """The largest offer of all who came, also of those we had no seat for."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _begun: bool = False

    def open(self) -> None:
        self.net.serve(Join.KIND, self._on_join)
        self.net.serve(AskTokenizer.KIND, self._on_tokenizer)
        self.net.serve(AskPart.KIND, self._on_part, free=True)
        self.net.serve(Ready.KIND, self._on_ready)
        self.net.serve(Declined.KIND, self._on_declined)
        self.net.serve(Missing.KIND, self._on_missing)
        _serve_founder(self.net, self.net.peer_id)

    def seat(self, peer: PeerId, join: Join) -> int:
        """Choose a stage for ``peer`` and remember it. Raises AdmissionError or CapacityError."""
        check_version(join)
        if self._begun:
            raise AdmissionError("the run begins at this very moment; join again in some seconds")
        stage = self._choose_stage(join)
        self._guests[peer] = _Guest(join, stage)
        self._changed.set()
        return stage

    def _choose_stage(self, join: Join) -> int:
        if self._largest is None or self._largest.device < join.offer.device:
            self._largest = join.offer
        kinds = [[g.join.device for g in self._guests.values() if g.stage == s] for s in range(self.stages)]
        stage = choose_stage(join, self.strategy, self.needs, self.stage_costs, kinds)
        if mixed := set(kinds[stage]) - {join.device}:
            self.emit(Note(level="warning", message=mixing(stage, mixed, join.device)))
        return stage

    def ready(self, peer: PeerId, trainer: bool, place: str) -> None:
        if peer not in self._guests:
            raise AdmissionError("'ready' from a peer that has not joined")
        if self._guests[peer].trainer != trainer:  # guests repeat themselves while they wait
            self._guests[peer].trainer, self._guests[peer].place = trainer, place
            self._changed.set()

    def names(self) -> dict[PeerId, str]:
        """Everyone with a seat."""
        return {p: g.join.name for p, g in self._guests.items()}

    @property
    def begun(self) -> bool:
        return self._begun

    def prepared(self) -> dict[PeerId, tuple[str, Offer]]:
        """Everyone that could begin: what it is called in the run, and the memory that it offers."""
        ready = (p for p, g in self._guests.items() if g.trainer is not None)
        return {p: (self._unique_name(p), self._guests[p].join.offer) for p in ready}

    def missing(self) -> list[str]:
        """What the run still waits for, in words."""
        ready = [g for g in self._guests.values() if g.trainer is not None]
        unserved = [s for s in range(self.stages) if not any(g.stage == s for g in ready)]
        lacking = [f"stage {s} has no peer ({self._need(s)})" for s in unserved]
        if (more := self.expected - len(ready)) > len(unserved):
            lacking.append(f"{more} more of {self.expected} peers")
        if building := len(self._guests) - len(
            ready
        ):  # without them the run would begin with members that do not serve yet
            lacking.append(f"{building} preparing")
        if not any(g.trainer for g in ready):
            lacking.append("a peer with the data (trainer)")
        return lacking

    def _need(self, stage: int) -> str:
        """What serving ``stage`` takes, and what came nearest to it."""
        need, best = self.needs[stage], self._largest
        too_small = "" if best is None or need.fits(best) else f"; the largest offer so far is {best}"
        return f"needs {need.need(best)}{too_small}"

    async def gather(self) -> Genesis:
        """Wait until every stage is served and all expected peers are ready; then let everyone begin."""
        told: list[str] | None = None
        while True:
            if not (lacking := self.missing()):
                await self._sweep()  # who left a moment ago must not be counted on
                if not self.missing() and not await self.settled():
                    break
                continue
            if lacking != told:
                self.emit(Waiting(missing=lacking))
                told = lacking
            self._changed.clear()
            try:
                async with asyncio.timeout(POLL_S * 5):
                    await self._changed.wait()
            except TimeoutError:
                await self._sweep()
        self._begun = True
        genesis = self._genesis()
        begin = Begin(genesis=genesis).pack()
        others = [m.id for m in genesis.members if m.id != self.net.peer_id]
        calls = (self.net.call(p, Begin.KIND, begin, timeout_s=CALL_TIMEOUT_S) for p in others)
        for peer, result in zip(others, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(result, NetworkError):  # it left at the last moment: the first step will find it dead
                self.emit(Note(level="warning", message=f"{peer[-6:]} could not be told to begin: {result}"))
            elif isinstance(result, BaseException):
                raise result
        return genesis

    async def _sweep(self) -> None:
        """Guests that went away before the start free their seats."""
        guests = [p for p in self._guests if p != self.net.peer_id]
        calls = (self.net.call(p, "lobby.ping", b"", timeout_s=CALL_TIMEOUT_S) for p in guests)
        for peer, result in zip(guests, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(result, NetworkError):
                self._guests.pop(peer, None)
            elif isinstance(result, BaseException):
                raise result

    def _genesis(self) -> Genesis:
        ranked = sorted(self._guests, key=lambda p: (self._guests[p].stage, p != self.net.peer_id, p))
        able = [p for p in ranked if self._guests[p].trainer]
        trainers = able[: self.trainers]
        if len(trainers) < len(able):
            message = f"{len(trainers)} of {len(able)} peers that have the data build microbatches (fleet.trainers)"
            self.emit(Note(level="info", message=message))
        members = tuple(
            Member(
                id=p,
                name=self._unique_name(p),
                stage=self._guests[p].stage,
                trainer=p in trainers,
                addresses=self._guests[p].join.addresses,
                device=self._guests[p].join.device,
                flops=self._guests[p].join.flops,
                place=self._guests[p].place,
            )
            for p in ranked
        )
        return Genesis(
            run_id=self.run_id,
            config=self.config_digest,
            data=self.data_digest,
            stages=self.stages,
            members=members,
            coordinator=self.net.peer_id,
            first_step=self.first_step,
        )

    def _unique_name(self, peer: PeerId) -> str:
        name = self._guests[peer].join.name
        same = sorted(p for p, g in self._guests.items() if g.join.name == name)
        return name if len(same) == 1 else f"{name}-{same.index(peer)}"

    async def _on_join(self, sender: PeerId, payload: bytes) -> bytes:
        try:
            stage = self.seat(sender, Join.unpack(payload))
        except (AdmissionError, CapacityError) as e:
            self.emit(JoinRefused(remote=sender, reason=str(e)))
            raise
        self.emit(Admitted(peer_id=sender))
        return Welcome(
            config=self.config_json,
            stage=stage,
            data=self.data_digest,
            tokenizer_size=len(self.tokenizer),
            part_size=self.parts[stage].stat().st_size if self.parts else 0,
            part_digest=self.part_digests[stage] if self.parts else bytes(32),
            tokens=self.tokens,
        ).pack()

    async def _on_tokenizer(self, sender: PeerId, payload: bytes) -> bytes:
        offset = AskTokenizer.unpack(payload).offset
        return self.tokenizer[offset : offset + PIECE]

    async def _on_part(self, sender: PeerId, payload: bytes) -> bytes:
        """Raises ProtocolError for any but a guest that gets its stage ready."""
        ask, guest = AskPart.unpack(payload), self._guests.get(sender)
        if self._begun or guest is None or ask.stage != guest.stage or ask.stage >= len(self.parts):
            raise ProtocolError(f"stage {ask.stage}'s part of the checkpoint is for those that get that stage ready")
        return await asyncio.to_thread(_read_at, self.parts[ask.stage], ask.offset)

    async def _on_ready(self, sender: PeerId, payload: bytes) -> bytes:
        ready = Ready.unpack(payload)
        self.ready(sender, ready.trainer, ready.place)
        return await self._on_missing(sender, b"")

    async def _on_missing(self, sender: PeerId, payload: bytes) -> bytes:
        return Missing(missing=() if self._begun else tuple(self.missing())).pack()

    async def _on_declined(self, sender: PeerId, payload: bytes) -> bytes:
        declined = Declined.unpack(payload)
        if not self._begun and self._guests.pop(sender, None) is not None:
            self._changed.set()
            self.emit(JoinRefused(remote=sender, reason=declined.reason))
        return b""


def check_version(join: Join) -> None:
    """Raises AdmissionError."""
    if join.version != __version__:
        raise AdmissionError(
            f"this run is muletrain {__version__}, the newcomer {join.version}: install muletrain=={__version__} there"
        )


def _read_at(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(PIECE)


async def find_founder(net: Network, addresses: tuple[str, ...]) -> PeerId:
    """Ask the members that a ticket names, until one says who founded the run. Raises AdmissionError when none does."""
    problems = []
    for member in dict.fromkeys(a.rsplit("/p2p/", 1)[-1] for a in addresses):
        try:
            answer = await net.call(member, Founder.KIND, b"", timeout_s=CALL_TIMEOUT_S)
        except NetworkError as e:
            problems.append(str(e))
        else:
            return Founder.unpack(answer).id
    raise AdmissionError(
        f"no member of the ticket knows who founded the run ({'; '.join(problems) or 'it names none'}); "
        f"ask for a ticket of 'muletrain start' itself"
    )


async def ask_missing(net: Network, addresses: tuple[str, ...]) -> tuple[str, ...]:
    """What a run that has not begun waits for; nothing once it has. Raises AdmissionError when no member can be
    asked."""
    founder = await find_founder(net, addresses)
    try:
        return Missing.unpack(await net.call(founder, Missing.KIND, b"", timeout_s=CALL_TIMEOUT_S)).missing
    except NetworkError:  # of a run that has begun, members answer for themselves
        return ()


def _serve_founder(net: Network, founder: PeerId) -> None:
    async def answer(sender: PeerId, payload: bytes) -> bytes:
        return Founder(id=founder).pack()

    net.serve(Founder.KIND, answer)


@dataclass
class Visitor:
    """The newcomer's side."""

    net: Network
    founder: PeerId
    tell: Callable[[tuple[str, ...]], None] = lambda missing: None
    """Told what the run waits for, now and then."""
    _genesis: asyncio.Future[Genesis] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        self.net.serve(Begin.KIND, self._on_begin)
        self.net.serve("lobby.ping", self._on_ping)
        _serve_founder(self.net, self.founder)

    async def join(self, join: Join) -> Welcome:
        """Get a seat. Raises Refused with the founder's reason, or another NetworkError."""
        answer = await self.net.call(self.founder, Join.KIND, join.pack(), timeout_s=CALL_TIMEOUT_S)
        return Welcome.unpack(answer)

    async def tokenizer(self, welcome: Welcome) -> bytes:
        """Raises ProtocolError for pieces that do not fit, or another NetworkError."""
        tokenizer = bytearray()
        while len(tokenizer) < welcome.tokenizer_size:
            ask = AskTokenizer(offset=len(tokenizer)).pack()
            piece = await self.net.call(self.founder, AskTokenizer.KIND, ask, timeout_s=CALL_TIMEOUT_S)
            if not piece or len(tokenizer) + len(piece) > welcome.tokenizer_size:
                raise ProtocolError("the tokenizer's pieces do not add up to its size")
            tokenizer += piece
        return bytes(tokenizer)

    async def decline(self, reason: str) -> None:
        """Give the seat back; whoever took us in is told why, if it can be."""
        with suppress(NetworkError):
            declined = Declined(reason=reason[:1000]).pack()
            await self.net.call(self.founder, Declined.KIND, declined, timeout_s=CALL_TIMEOUT_S)

    async def part(self, welcome: Welcome, into: Path) -> None:
        """Write our stage's part of the checkpoint to the file ``into``. Raises ProtocolError for other content than
        was promised."""
        digest, size = hashlib.sha256(), welcome.part_size

        async def piece(offset: int) -> bytes:
            ask = AskPart(stage=welcome.stage, offset=offset).pack()
            answer = await self.net.call(self.founder, AskPart.KIND, ask, timeout_s=CALL_TIMEOUT_S)
            if len(answer) != min(PIECE, size - offset):
                raise ProtocolError("the checkpoint's pieces do not add up to its size")
            return answer

        with into.open("wb") as file:
            for begin in range(0, size, AHEAD * PIECE):
                offsets = range(begin, min(size, begin + AHEAD * PIECE), PIECE)
                for data in await asyncio.gather(*map(piece, offsets)):
                    digest.update(data)
                    file.write(data)
        if digest.digest() != welcome.part_digest:
            raise ProtocolError("the checkpoint part that came is not the one that was promised; join again")

    async def genesis(self) -> Genesis:
        """Of a run that has begun."""
        answer = await self.net.call(self.founder, AskGenesis.KIND, AskGenesis().pack(), timeout_s=CALL_TIMEOUT_S)
        return Begin.unpack(answer).genesis

    async def begin(self, trainer: bool, place: str) -> Genesis:
        """Say that we are ready and wait for the start. Raises NetworkError when the founder goes away meanwhile."""
        ready = Ready(trainer=trainer, place=place).pack()
        while True:
            answer = await self.net.call(self.founder, Ready.KIND, ready, timeout_s=CALL_TIMEOUT_S)
            self.tell(Missing.unpack(answer).missing)
            done, _ = await asyncio.wait({self._genesis}, timeout=POLL_S * 5)
            if done:
                return self._genesis.result()

    async def _on_begin(self, sender: PeerId, payload: bytes) -> bytes:
        if sender != self.founder:
            raise ProtocolError("only the founder begins the run")
        begin = Begin.unpack(payload)
        if not self._genesis.done():
            self._genesis.set_result(begin.genesis)
        return b""

    async def _on_ping(self, sender: PeerId, payload: bytes) -> bytes:
        return b""
