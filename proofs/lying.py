"""A member that does its work and lies about it, within what docs/trust.md promises that a run bears."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from muletrain.errors import MuletrainError, NetworkError
from muletrain.policy.fork_choice import Chain
from muletrain.runtime.averaging.messages import Reduced, Shard
from muletrain.runtime.checkpoint.messages import PartReady
from muletrain.runtime.core.blocks import AskBlocks
from muletrain.runtime.members.messages import Acquaintances, Introduce, Member, Suspected
from muletrain.runtime.members.row import RoundEntry, Row, Seal, ShardFacts, StageEntry, Statements, Sync
from muletrain.runtime.microbatch.messages import Backward, Forward, Gap, Lost, Room, TrainerDone, Why
from muletrain.runtime.peer.messages import Presence
from muletrain.runtime.recovery.messages import AskStay, History, Stay
from muletrain.runtime.step.record import StepRecord
from muletrain.runtime.transfer.messages import AskSnapshot, Snapshot
from muletrain.wire.codec import encode_raw

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection

    from muletrain.network.base import CallHandler, FrameHandler, PeerId
    from muletrain.network.memory import MemoryNetwork
    from muletrain.runtime.core.messages import Message
    from muletrain.wire.codec import Encoded
    from muletrain.wire.frame import Frame

LIES = (
    "entries",
    "expels",
    "records",
    "views",
    "progress",
    "claims",
    "gaps",
    "copies",
    "parts",
    "chunks",
    "work",
    "done",
    "others",
    "down",
    "idle",
    "hurry",
    "fast",
    "forged",
    "seals",
    "history",
    "attests",
    "admits",
    "holds",
    "full",
    "alone",
    "keeps",
)
"""What it lies about: rounds that it attests to, whom they expel, the record that it applied, the replicas that it
counts on, the step that it is at, the microbatches that it holds, those that its stage misses, the state that it
gives to newcomers, parts of checkpoints, the gradient that it averages, and its work: it says that it is at
microbatches for ever. Then: that all microbatches of a step are through, whom newcomers should know, who does not
answer, that the microbatches that it should give out are under way, that it has sealed again, that it needed no time,
whose microbatches are whose, whether it seals (it never does), how it came to its step: by a longer history, alone;
whether it holds the gradient (it never tells; or only when it is asked, once it has applied the step), that it sends
its part of it, although none comes, that it has no room for any microbatch, as soon as it has said that it has,
that it goes on with the step alone (it computes nothing), and that it goes on with all others (it keeps the gradient to
itself)."""
SPEAKS = "speaks"
"""It lies as a speaker: which round of its stage counts, and what the record is."""


_UNSAID = {"seals": "seal", "attests": "entry", "admits": "entry", "alone": "entry"}
"""What it never states."""


class Liar:
    """``network`` as a peer's own program would use it to lie, while ``how`` says about what."""

    def __init__(
        self, network: MemoryNetwork, rng: random.Random, microbatches: int, everyone: Collection[PeerId]
    ) -> None:
        self.how = ""
        self._network, self._rng, self._microbatches, self._everyone = network, rng, microbatches, everyone
        self._sealed: Statements | None = None
        """Its own last seal."""
        self._kept = set[int]()
        """Microbatches whose answers it withheld."""
        self._moved = 0
        """Bytes that it says to have moved, and has not."""
        self._rounds: dict[int, bytes] = {}
        """The first round of each step."""
        self._past: dict[int, bytes] = {}
        """The lineages of its steps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    async def send(self, peer: PeerId, frame: Frame, **how: Any) -> int:
        for lie in self._frames(frame.message):
            await self._network.send(peer, lie.frame(), channel=lie.CHANNEL, timeout_s=how["timeout_s"])
        message: Any = frame.message
        withheld = self.how == "work" and isinstance(message, Backward | Lost)
        if withheld or (
            self.how == "idle" and isinstance(message, Forward) and message.trainer == self._network.peer_id
        ):
            self._kept.add(message.index)
            return 0
        if self.how == "fast" and isinstance(message, Backward):
            await asyncio.sleep(1.5)
        if isinstance(message, Statements) and message.seal is not None:
            self._past[message.step] = message.lineage
            if self.how == "history":
                await self._boast(peer)
            if self.how == "holds" and message.seal.attempt:
                return 0  # it makes no other attempt: the round goes on
            self._sealed = message
        if self.how in _UNSAID and isinstance(message, Statements) and getattr(message, _UNSAID[self.how]) is not None:
            return 0
        if self.how in ("holds", "keeps") and isinstance(message, Reduced):
            return 0
        if self.how == "keeps" and isinstance(message, Statements) and message.entry is not None:
            entry = message.entry.model_copy(update={"without": ()})
            frame = message.model_copy(update={"entry": entry}).frame()
        return await self._network.send(peer, self._instead(frame), **how)

    def receive(self, handler: FrameHandler, *kinds: Any, **how: Any) -> None:
        async def hear(sender: PeerId, frame: Frame) -> None:
            if self.how == "hurry" and isinstance(frame.message, Statements):
                await self._seal_ahead(frame.message)
            if self.how == "forged" and isinstance(frame.message, Forward) and sender != self._network.peer_id:
                await self._forge(frame.message, frame.tensors)
            if self.how == "full" and isinstance(forward := frame.message, Forward) and sender != self._network.peer_id:
                at: dict[str, Any] = {**forward.identity(), "stage": forward.stage}
                step = forward.step
                for lie in (Lost(**at, why=Why.FULL), Room(**at), Presence(lineage=forward.lineage, step=step)):
                    await self._network.send(sender, lie.frame(), channel=lie.CHANNEL, timeout_s=10.0)
                return
            if self.how == "alone" and isinstance(frame.message, Forward):
                return
            await handler(sender, frame)

        self._network.receive(hear, *kinds, **how)

    def _invented(self) -> Chain:
        """A history that parts from the others' at its step, and is longer."""
        step = max(self._past)
        known = (
            *(lineage for at, lineage in sorted(self._past.items()) if at < step),
            bytes(8) + self._rng.randbytes(24),
        )
        return Chain(step + 4, (*known, *(bytes([k]) * 32 for k in range(4))))

    async def _boast(self, peer: PeerId) -> None:
        with contextlib.suppress(NetworkError):
            await self._network.call(peer, History.KIND, History.of(self._invented()).pack(), timeout_s=10.0)

    async def _seal_ahead(self, heard: Statements) -> None:
        """Seal again, later than the seal that it ``heard``, as some of the members hear."""
        own, seal = self._sealed, heard.seal
        if own is None or own.seal is None or seal is None:
            return
        seal_ahead = own.seal.model_copy(update={"attempt": seal.attempt + self._rng.choice([1, 1, 3])})
        ahead = own.model_copy(update={"seal": seal_ahead})
        others = [m for m in seal.members if m != self._network.peer_id] if own.step == heard.step else []
        for peer in self._rng.sample(others, self._rng.randint(0, len(others))):
            with contextlib.suppress(NetworkError):
                await self._network.send(peer, ahead.frame(), channel=ahead.CHANNEL, timeout_s=10.0)

    async def _forge(self, message: Forward, tensors: list[Encoded]) -> None:
        """Give everyone what came, as if it were its own."""
        lie = message.model_copy(update={"attempt": message.attempt + 1000, "trainer": self._network.peer_id})
        swapped = tensors[::-1] if message.stage == 0 else tensors
        for peer in self._everyone:
            with contextlib.suppress(NetworkError):
                await self._network.send(peer, lie.frame(swapped), channel=lie.CHANNEL, timeout_s=10.0)

    def serve(self, method: str, handler: CallHandler, **how: Any) -> None:
        lies: dict[str, Callable[[bytes, bytes], bytes]] = {
            Sync.KIND: self._row,
            AskSnapshot.KIND: self._snapshot,
            AskBlocks.KIND: self._block,
            Introduce.KIND: self._others,
            History.KIND: self._history,
            AskStay.KIND: self._stays,
        }

        async def answer(sender: PeerId, payload: bytes) -> bytes:
            if self.how == "keeps" and method in (AskBlocks.KIND, AskSnapshot.KIND):
                raise MuletrainError("ask again later")
            told = await handler(sender, payload)
            return lies[method](payload, told) if self.how and method in lies else told

        self._network.serve(method, answer, **how)

    # Frames -----------------------------------------------------------------------------------------------------------

    def _frames(self, message: Any) -> list[Message]:
        """Told beside ``message``."""
        if self.how == "done" and isinstance(message, Forward | Backward):
            everything = tuple(range(self._microbatches))
            return [
                TrainerDone(
                    lineage=message.lineage, step=message.step, indices=everything, losses=(0.5,) * len(everything)
                )
            ]
        if not isinstance(message, Statements) or (seal := message.seal) is None:
            return []
        at: dict[str, Any] = {"lineage": message.lineage, "step": message.step}
        others = tuple(m for m in seal.members if m != self._network.peer_id)
        if self.how == "down":
            return [Suspected(**at, peer=m) for m in others]
        if self.how in ("entries", "expels"):
            entry = self._forged(message, message.stage, seal.members)
            return [Statements(**at, stage=message.stage, entry=entry)]
        if self.how == "gaps":
            turn = self._rng.randrange(5)
            return [Gap(**at, stage=message.stage, turn=turn, indices=tuple(range(4)), without=others[:64])]
        return []

    def _instead(self, frame: Frame) -> Frame:
        message = frame.message
        if self.how in ("views", "alone") and isinstance(message, Statements) and message.seal is not None:
            return message.model_copy(update={"seal": self._alone(message.seal)}).frame()
        if self.how == "chunks" and isinstance(message, Shard | Reduced):
            return message.frame([encode_raw(b"no gradient")])
        if self.how == "fast" and isinstance(message, Backward):
            return message.model_copy(update={"busy_s": 0.0, "away_s": 1e6}).frame(frame.tensors)
        if self.how == "parts" and isinstance(message, PartReady):
            return message.model_copy(update={"digest": self._rng.randbytes(32)}).frame(frame.tensors)
        if self.how == SPEAKS and isinstance(message, Statements) and message.entries:
            entries = tuple(e.model_copy(update={"square_norm": 1e12}) for e in message.entries)
            lie = {"entries": entries, "record": message.record and self._record(message, entries)}
            return message.model_copy(update=lie).frame(frame.tensors)
        return frame

    def _record(self, said: Statements, entries: tuple[StageEntry, ...]) -> bytes:
        """The hash of the record that would have ``entries``, without delayed updates."""
        return StepRecord(said.step, said.lineage, entries, said.product).hash

    def _alone(self, seal: Seal) -> Seal:
        """Without some of those it counts on, or without any."""
        me = self._network.peer_id
        if self.how == "alone":
            return seal.model_copy(update={"members": (me,), "attempt": max(1, seal.attempt)})
        return seal.model_copy(
            update={"members": tuple(m for m in seal.members if m == me or self._rng.random() < 0.5)}
        )

    def _forged(self, facts: Any, stage: int, members: tuple[PeerId, ...]) -> RoundEntry:
        """A round whose gradient is so long that a peer that believes it would shrink the update to nothing."""
        me = self._network.peer_id
        others = tuple(m for m in members if m != me)
        chosen = (me,) if self.how == "expels" or self._rng.random() < 0.5 else members
        shard = ShardFacts(content=self._rng.randbytes(32), square_norm=1e12, finite=True)
        return RoundEntry(
            lineage=facts.lineage,
            step=facts.step,
            stage=stage,
            round=bytes(32),
            members=chosen,
            shards=(shard,) * len(chosen),
            stop=False,
            holder=me,
            without=tuple(m for m in chosen if m != me),
            expelled=others[:64] if self.how == "expels" else (),
        )

    # Answers ----------------------------------------------------------------------------------------------------------

    def _row(self, payload: bytes, told: bytes) -> bytes:
        """It is beyond the step, or holds microbatches, or works on them; or has sealed or applied what nobody did."""
        row = Row.unpack(told)
        if self.how in ("work", "idle") and row.current:
            row = row.model_copy(update={"in_flight": tuple({*row.in_flight, *self._kept})})
        if self.how == "claims" and row.current:
            everything = tuple(range(max((*row.accumulated, *row.completed, 0)) + 1))
            row = row.model_copy(update={"accumulated": everything, "accumulated_losses": ()})
        if self.how == "holds":
            self._moved += 1 << 20
            first = self._rounds.setdefault(row.step, row.round) if row.round else row.round
            row = row.model_copy(update={"moved": row.moved + self._moved, "round": first})
        if self.how == "progress" and row.current:
            row = row.model_copy(update={"current": False, "step": row.step + 1})
        return self._stated(Sync.unpack(payload), row).pack()

    def _stated(self, ask: Sync, row: Row) -> Row:
        """With other statements."""
        said = row.said
        if said is None:
            return row
        other: dict[str, Any] = {}
        if self.how == "attests":  # it has also forgotten that it applied the step
            other = {"entry": None, "tied": None, "entries": (), "record": b""}
        if self.how in ("admits", "alone") and not said.record:
            other = {"entry": None}
        if self.how == "keeps" and said.entry is not None and not said.record:
            other = {"entry": said.entry.model_copy(update={"without": ()})}
        if self.how == "seals" or (self.how == "holds" and said.seal is not None and said.seal.attempt):
            other = {"seal": None}
        if self.how in ("views", "alone") and said.seal is not None:
            other |= {"seal": self._alone(said.seal)}
        if self.how == "records" and said.record:
            forged = tuple(e.model_copy(update={"square_norm": 1e12}) for e in said.entries)
            other = {"entries": forged, "record": self._rng.randbytes(32)}
            row = row.model_copy(update={"step": ask.step + 1})
        return row.model_copy(update={"said": said.model_copy(update=other)})

    def _history(self, payload: bytes, told: bytes) -> bytes:
        return History.of(self._invented()).pack() if self.how == "history" and self._past else told

    def _stays(self, payload: bytes, told: bytes) -> bytes:
        return Stay.unpack(told).model_copy(update={"stays": True}).pack() if self.how == "history" else told

    def _snapshot(self, payload: bytes, told: bytes) -> bytes:
        if self.how == "history" and self._past:
            chain = self._invented()
            lie = {"step": chain.step, "lineage": chain.lineages[-1], "past": chain.lineages[:-1]}
            return Snapshot.unpack(told).model_copy(update=lie).pack()
        if self.how != "copies" or self._rng.random() < 0.5:
            return told
        return Snapshot.unpack(told).model_copy(update={"digest": self._rng.randbytes(32)}).pack()

    def _others(self, payload: bytes, told: bytes) -> bytes:
        """Peers that nobody has seen."""
        if self.how != "others":
            return told
        fakes = tuple(Member(id=f"fake-{k}", name=f"fake-{k}", stage=k % 2, trainer=k % 3 == 0) for k in range(200))
        return Acquaintances(members=(*Acquaintances.unpack(told).members, *fakes)).pack()

    def _block(self, payload: bytes, told: bytes) -> bytes:
        """Of a manifest or of the copy itself."""
        if self.how != "copies" or not told or self._rng.random() < 0.5:
            return told
        at = self._rng.randrange(len(told))
        return told[:at] + bytes([told[at] ^ 1]) + told[at + 1 :]
