"""After the start any member takes newcomers in: it tells them of the run, and which stage they are needed at.

Calls, newcomer to any member: ``founder`` (whom to ask; answer: the member itself), ``join``, ``tokenizer`` (as in the
lobby), ``genesis``. The state comes from the stage's replicas, and the newcomer introduces itself to everyone
(``runtime.members.membership``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.errors import AdmissionError, CapacityError
from muletrain.events import Admitted, JoinRefused, Note
from muletrain.runs.join.lobby import (
    PIECE,
    AskGenesis,
    AskTokenizer,
    Begin,
    Declined,
    Founder,
    Join,
    Welcome,
    check_version,
)
from muletrain.runs.join.seating import choose_stage, mixing

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.compute.estimate import StageMemory
    from muletrain.events import Event
    from muletrain.network.base import Network, PeerId
    from muletrain.runtime.members.roster import Roster
    from muletrain.runtime.transfer.tokens import Shared
    from muletrain.strategies.base import Strategy


@dataclass(frozen=True)
class Papers:
    """What a newcomer is told of the run. ``config``: the configuration as JSON; ``data``: the corpus' digest;
    ``tokenizer``: its JSON; ``tokens``: see ``Welcome``."""

    config: str
    data: bytes
    tokenizer: bytes
    tokens: Shared | None = None


@dataclass
class Reception:
    """One member's. ``needs`` and ``stage_costs``: each stage's memory and compute cost."""

    net: Network
    emit: Callable[[Event], None]
    roster: Roster
    papers: Papers
    needs: list[StageMemory]
    stage_costs: list[float]
    strategy: Strategy

    def open(self) -> None:
        """From now on the lobby's calls are answered here."""
        self.net.serve(Founder.KIND, self._on_founder)
        self.net.serve(Join.KIND, self._on_join)
        self.net.serve(AskTokenizer.KIND, self._on_tokenizer)
        self.net.serve(AskGenesis.KIND, self._on_genesis)
        self.net.serve(Declined.KIND, self._on_declined)

    async def _on_founder(self, sender: PeerId, payload: bytes) -> bytes:
        return Founder(id=self.net.peer_id).pack()

    async def _on_join(self, sender: PeerId, payload: bytes) -> bytes:
        join = Join.unpack(payload)
        try:
            check_version(join)
            live = [m for m in self.roster.members() if self.roster.is_alive(m.id)]
            kinds = [[m.device for m in live if m.stage == s] for s in range(len(self.needs))]
            stage = choose_stage(join, self.strategy, self.needs, self.stage_costs, kinds)
        except (AdmissionError, CapacityError) as e:
            self.emit(JoinRefused(remote=sender, reason=str(e)))
            raise
        if mixed := set(kinds[stage]) - {join.device}:
            self.emit(Note(level="warning", message=mixing(stage, mixed, join.device)))
        self.emit(Admitted(peer_id=sender))
        return Welcome(
            config=self.papers.config,
            stage=stage,
            data=self.papers.data,
            tokenizer_size=len(self.papers.tokenizer),
            running=True,
            name=self._unique(join.name),
            tokens=self.papers.tokens,
        ).pack()

    def _unique(self, name: str) -> str:
        again = self.strategy.has_place(name)
        taken = {m.name for m in self.roster.members() if not again or self.roster.is_alive(m.id)}
        return next(n for n in (name, *(f"{name[:100]}-{k}" for k in range(len(taken) + 1))) if n not in taken)

    async def _on_tokenizer(self, sender: PeerId, payload: bytes) -> bytes:
        offset = AskTokenizer.unpack(payload).offset
        return self.papers.tokenizer[offset : offset + PIECE]

    async def _on_declined(self, sender: PeerId, payload: bytes) -> bytes:
        self.emit(JoinRefused(remote=sender, reason=Declined.unpack(payload).reason))
        return b""

    async def _on_genesis(self, sender: PeerId, payload: bytes) -> bytes:
        AskGenesis.unpack(payload)
        return Begin(genesis=self.roster.genesis).pack()
