"""Admission of newcomers, the same at every member and before every step.

Before step 0 the founder admits guests to a waiting room (``rendezvous.Rendezvous``). Later any member admits newcomers
to the roster (``LiveMembers``): a newcomer gets the state from replicas of the stage, and sends an introduction to all
members (``runtime.members.membership``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from muletrain import __version__
from muletrain.clock import loop_time_s
from muletrain.errors import AdmissionError, CapacityError, ProtocolError
from muletrain.events import Admitted, JoinRefused, Note
from muletrain.policy.recent import Debts, Recent
from muletrain.runs.join.messages import (
    NOT_AWAITED,
    PIECE,
    Admitter,
    AskAdmitter,
    AskBegun,
    AskPiece,
    Begun,
    Declined,
    JoinRequest,
    Ready,
    Welcome,
)
from muletrain.runtime.members.messages import Member

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from muletrain.events import Event
    from muletrain.network.base import Network, PeerId
    from muletrain.runs.join.seating import Seating
    from muletrain.runtime.members.roster import Roster
    from muletrain.runtime.transfer.messages import Shared


PREPARE_S = 900.0
"""Seconds without progress after which a newcomer that builds its stage loses the place. One that stopped, or cannot be
reached, loses its place before the beginning at the next check."""
REQUESTS, REQUESTS_PER_S = 20, 0.2
"""Requests for a stage that one machine may send at once, and per second after that: each request is an event on the
disk."""


@dataclass(frozen=True)
class RunInfo:
    """The facts about the run for a newcomer. ``config``: the configuration as JSON; ``data``: the corpus' digest;
    ``tokenizer``: the tokenizer's JSON; ``tokens``: see ``Welcome``."""

    config: str
    data: bytes
    tokenizer: bytes
    tokens: Shared | None = None


class Participants(Protocol):
    """The peers that are in the run so far."""

    def consider(self, request: JoinRequest) -> list[list[str]]:
        """Note a newcomer, and return the device kinds of the peers of each stage. Raises AdmissionError when no peer
        can be admitted now."""
        ...

    def add(self, peer: PeerId, request: JoinRequest, welcome: Welcome) -> Welcome:
        """Add a newcomer to ``welcome.stage``. Returns the completed welcome, with the newcomer's name."""
        ...

    def machines(self) -> list[int]:
        """Return how many servers and clients wait for the beginning, by stage."""
        ...

    def remove(self, peer: PeerId) -> bool:
        """Remove a newcomer that declined. Returns False if ``peer`` is unknown."""
        ...

    def begun(self, peer: PeerId, ready: Ready | None) -> Begun:
        """Tell ``peer``, which may be ``ready``, whether the run has begun. Raises AdmissionError for a peer that is
        ready without a stage."""
        ...


@dataclass(frozen=True)
class Admission:
    """Admits newcomers for one member: chooses a stage or refuses, and sends configuration, tokenizer and genesis."""

    net: Network
    emit: Callable[[Event], None]
    info: RunInfo
    seating: Seating
    participants: Participants
    _asked: Debts = field(default_factory=lambda: Debts(REQUESTS_PER_S))

    def open(self) -> None:
        """Answer newcomers from now on, in place of any earlier ``Admission`` on this network."""
        serve_admitter(self.net, self.net.peer_id)
        JoinRequest.serve(self.net, self._on_request)
        self.net.serve(AskPiece.KIND, self.on_piece)
        self.net.serve(Declined.KIND, self._on_declined)
        AskBegun.serve(self.net, self._on_begun)

    def admit(self, peer: PeerId, request: JoinRequest) -> Welcome:
        """Choose a stage for ``peer`` and add ``peer`` there. Raises AdmissionError or CapacityError."""
        if request.version != __version__:
            raise AdmissionError(
                f"this run is muletrain {__version__}, the newcomer {request.version}: install "
                f"the same version, or the same commit, there"
            )
        if self.seating.is_client(request):
            return self._admit_client(peer, request)
        kinds, info = self.participants.consider(request), self.info
        stage = self.seating.choose(request, kinds)
        if mixed := set(kinds[stage]) - {request.device}:
            message = (
                f"stage {stage} runs on {', '.join(sorted(mixed))}, and now on {request.device}: if their arithmetic "
                f"differs in the last bit, one of them leaves, unless optimizer.state_device = 'cpu'"
            )
            self.emit(Note(level="warning", message=message))
        size = len(info.tokenizer)
        welcome = Welcome(config=info.config, stage=stage, data=info.data, tokenizer_size=size, tokens=info.tokens)
        return self.participants.add(peer, request, welcome)

    def _admit_client(self, peer: PeerId, request: JoinRequest) -> Welcome:
        """Admit a client, which takes no peer's place, and needs no tokenizer. Raises AdmissionError or
        CapacityError."""
        stage = self.seating.choose_for_client(request, self.participants.machines())
        welcome = Welcome(config=self.info.config, stage=stage, data=self.info.data, tokenizer_size=0, client=True)
        return self.participants.add(peer, request, welcome.model_copy(update={"name": request.name}))

    async def _on_request(self, sender: PeerId, request: JoinRequest) -> Welcome:
        if self._asked.add(sender, 1.0, loop_time_s()) > REQUESTS:
            raise AdmissionError("this machine asked to join too often; wait a minute")
        try:
            welcome = self.admit(sender, request)
        except (AdmissionError, CapacityError) as e:
            self.emit(JoinRefused(remote=sender, reason=str(e), name=request.name))
            raise
        self.emit(Admitted(peer_id=sender, name=welcome.name))
        return welcome

    async def on_piece(self, sender: PeerId, payload: bytes) -> bytes:
        """Answer with a piece of the tokenizer. Raises ProtocolError for other pieces, which only the founder has."""
        ask = AskPiece.unpack(payload)
        if ask.part:
            raise ProtocolError("a part of the checkpoint is for a guest that prepares its stage")
        return self.info.tokenizer[ask.offset : ask.offset + PIECE]

    async def _on_declined(self, sender: PeerId, payload: bytes) -> bytes:
        declined = Declined.unpack(payload)
        if self.participants.remove(sender):
            self.emit(JoinRefused(remote=sender, reason=declined.reason))
        return b""

    async def _on_begun(self, sender: PeerId, ask: AskBegun) -> Begun:
        return self.participants.begun(sender, ask.ready)


class _Coming(NamedTuple):
    """A newcomer that prepares ``stage``, and has not introduced itself yet."""

    stage: int
    device: str
    since_s: float


class LiveMembers:
    """The members of a run that has begun, by one member's roster. A newcomer enters the roster by its introduction; until
    then, for ``PREPARE_S`` at most, it counts as a peer of its stage, so that machines that come together get different
    stages."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._coming: Recent[_Coming] = Recent()

    def consider(self, request: JoinRequest) -> list[list[str]]:
        roster, late_s = self._roster, loop_time_s() - PREPARE_S
        for peer in [p for p, c in self._coming.items() if roster.is_alive(p) or c.since_s < late_s]:
            del self._coming[peer]
        serving = [(m.stage, m.device) for m in roster.members() if roster.is_alive(m.id)]
        serving += [(c.stage, c.device) for c in self._coming.values()]
        return [[device for stage, device in serving if stage == s] for s in range(roster.genesis.stages)]

    def add(self, peer: PeerId, request: JoinRequest, welcome: Welcome) -> Welcome:
        """A newcomer may take the name of a dead peer, and so, in a planned pipeline, the place: a machine that joins
        again keeps its name."""
        if welcome.client:
            return welcome.model_copy(update={"running": True})
        taken = {m.name for m in self._roster.members() if self._roster.is_alive(m.id)}
        self._coming[peer] = _Coming(welcome.stage, request.device, loop_time_s())
        return welcome.model_copy(update={"running": True, "name": unique_name(request.name, taken)})

    def machines(self) -> list[int]:
        return [0] * self._roster.genesis.stages  # only servers know clients, and clients ask servers

    def remove(self, peer: PeerId) -> bool:
        return self._coming.pop(peer, None) is not None

    def begun(self, peer: PeerId, ready: Ready | None) -> Begun:
        if ready is not None and all(m.id != peer for m in self._roster.genesis.members):
            raise AdmissionError(NOT_AWAITED)
        return Begun(genesis=self._roster.genesis, members=self._roster.contacts())


def member_of(peer: PeerId, request: JoinRequest, welcome: Welcome, ready: Ready) -> Member:
    """Describe a newcomer as a member of the run."""
    return Member(
        id=peer,
        name=welcome.name,
        stage=welcome.stage,
        trainer=ready.trainer,
        device=request.device,
        flops=request.flops,
        place=ready.place,
    )


def unique_name(name: str, taken: Collection[str]) -> str:
    """Return ``name``, with a number appended if another peer has that name."""
    names = (name, *(f"{name[:100]}-{k}" for k in range(2, len(taken) + 3)))
    return next(n for n in names if n not in taken)


def serve_admitter(net: Network, admitter: PeerId) -> None:
    """Tell newcomers that ``admitter`` admits them."""

    async def answer(sender: PeerId, ask: AskAdmitter) -> Admitter:
        return Admitter(id=admitter)

    AskAdmitter.serve(net, answer)
