"""A whole run in one process: production peers on an in-memory network and a virtual clock, with faults drawn from a
seed.

Everything from ``runtime`` down is what trains in production; tensors are real and tiny. What happens depends on the
seed (and the hash seed of the interpreter) alone, whatever was played before, so a failing seed is replayed exactly: to
the bit where arithmetic rounds alike, that is, with the same torch on the same kind of processor. Lineages are hashes
of gradients, and which of two histories stays may depend on them.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import safetensors.torch

from muletrain.compute.paced import PacedCompute
from muletrain.compute.threads import InlineExecutor
from muletrain.data.tokens import digest_of
from muletrain.events import (
    CheckpointWritten,
    FaultInjected,
    FrameRefused,
    LineageLeft,
    MicrobatchRerouted,
    Notice,
    PeerDown,
    PeerExpelled,
    PeerLeft,
    StepApplied,
    StepDone,
    SteppedBack,
    Validated,
)
from muletrain.network.memory import MemoryHub
from muletrain.network.roads import Road
from muletrain.runtime.checkpoint.checkpointing import Book
from muletrain.runtime.core.disk import Disk
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Genesis, Roster
from muletrain.runtime.peer.peer import Peer
from muletrain.runtime.peer.service import Service
from muletrain.runtime.pool.client import Client
from muletrain.runtime.transfer.tokens import Sharing, Store, share
from muletrain.sim.host import VirtualHost
from muletrain.sim.loop import MachineClock
from proofs import reference
from proofs.faulty import FaultyCompute
from proofs.hub_lies import SERVER_LIES, LyingClient, LyingServer
from proofs.links import Links
from proofs.lying import Liar
from proofs.scenario import BACKWARD_S, FORWARD_S, SUSPENDED, stage_of
from proofs.verdict import LEFT, Outcome
from proofs.virtual_disks import Disks
from proofs.witness import Watched

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from muletrain.clock import LoopClock
    from muletrain.errors import MuletrainError
    from muletrain.events import Event
    from muletrain.network.memory import MemoryNetwork
    from muletrain.runtime.checkpoint.store import Folder, Key
    from muletrain.runtime.recovery.messages import StepBack
    from proofs.scenario import Fault, Scenario
    from proofs.witness import Witness

PASSES = 20
"""Passes of the event loop in which cancelled tasks end."""
SHOWN = (
    Notice,
    LineageLeft,
    PeerExpelled,
    PeerLeft,
    PeerDown,
    MicrobatchRerouted,
    FrameRefused,
    StepApplied,
    SteppedBack,
    CheckpointWritten,
    Validated,
)


@dataclass(frozen=True)
class Start:
    """State of a run that begins again: its newest complete checkpoint, if any."""

    place: Folder
    base: Key | None

    @property
    def step(self) -> int:
        return 0 if self.base is None else self.base.step

    async def load(self, compute: FaultyCompute, stage: int) -> None:
        """Into the stage's device."""
        if self.base is not None:
            await compute.load_state(safetensors.torch.load(self.place.read_part(self.base, stage)))


class World(VirtualHost):
    """The peers of a scenario by name, and their surroundings."""

    def __init__(
        self, scenario: Scenario, outcome: Outcome, folder: Path, witness: Witness, start: Start | None = None
    ) -> None:
        """``start``: the run begins again from it."""
        self.scenario, self._outcome, self._folder, self._witness = scenario, outcome, folder, witness
        self._start = start
        self.links = Links(scenario)
        super().__init__(MemoryHub(self.links, relays=scenario.relays), outcome.violations)
        for name, rate in scenario.narrow:
            self.hub.roads.lay(name, Road(rate, rate, scenario.queue_s))
        self.networks: dict[str, MemoryNetwork] = {}
        self.liars: dict[str, Liar | LyingServer | LyingClient] = {}
        self.stages: dict[str, FaultyCompute] = {}
        self.computes: dict[str, PacedCompute] = {}
        self.peers: dict[str, Peer] = {}
        self.rosters: dict[str, Roster] = {}
        self.cut_off: list[str] = []
        """Who had not ended when the power failed."""
        self.disks = Disks(scenario, folder)
        self._facts = reference.facts_of(scenario)
        self._genesis = self._first_members()

    async def run(self, inject: Callable[[Fault], Coroutine[Any, Any, None]]) -> dict[str, dict[str, Tensor]]:
        """Run; return the state of every peer that reached the end. ``inject`` waits for a fault's time and carries
        it out."""
        self.networks.update({name: self.arrive(name) for name, _ in self.scenario.members})
        for name, _ in self.scenario.members:
            self.begin(name, self._peer(name))
        for name in self.scenario.clients:
            self.join(name, name)
        injecting = [asyncio.create_task(inject(f)) for f in self.scenario.faults]
        if self.scenario.resume_s is not None:
            injecting.append(asyncio.create_task(self._lose_power(self.scenario.resume_s)))
        while running := [t for t in self.tasks.values() if not t.done()]:  # newcomers, too
            await asyncio.wait(running)
        for task in injecting:
            task.cancel()
        self.disks.stop()
        await self._silence()
        self._outcome.virtual_s = self.clock.now()
        self._outcome.longest, self._outcome.stood_s = self._witness.ended(), self._witness.stood_s()
        return {name: t.result() for name, t in self.tasks.items() if not t.cancelled() and t.result() is not None}

    async def _lose_power(self, at_s: float) -> None:
        """All machines at once."""
        await self.clock.sleep(at_s)
        self.injected("all machines lose power", "power", self.networks, 0.0)
        self.cut_off = [name for name, task in self.tasks.items() if not task.done()]
        for name in self.networks:
            self.kill(name)

    async def _silence(self) -> None:
        """Stop everything of peers that are gone."""
        for _ in range(PASSES):
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            self._outcome.violations.append(f"a task is left over: {task.get_name()} {task.get_coro()}")

    def _own_clock(self, name: str) -> LoopClock:
        rng, skew = random.Random(f"clock/{self.scenario.seed}/{name}"), self.scenario.skew
        if not skew and not any(f.how == SUSPENDED and name in f.who for f in self.scenario.faults):
            return self.clock
        rate = math.exp(rng.uniform(-skew, skew))
        return MachineClock(name, rate, rng.uniform(0.0, 1e6) if skew else 0.0)

    def join(self, name: str, called: str) -> None:
        """A newcomer."""
        self.networks[name] = self.arrive(name)
        self.begin(name, self._client(name) if name.startswith("client") else self._peer(name, joins_as=called))

    def look_at(self, name: str) -> None:
        """While it works."""
        if name in self.peers:
            self._witness.load(name, self.peers[name].load(), self.peers[name].kept())

    def say(self, text: str) -> None:
        """Into the timeline."""
        self._outcome.timeline.append((self.clock.now(), text.replace(f"{self._folder}/", "")))

    def injected(self, text: str, kind: str, who: Iterable[str], for_s: float) -> None:
        """A fault begins."""
        now = self.clock.now()
        self.say(f"FAULT {text}")
        self._witness.disturbed(now, for_s)
        fault = FaultInjected(what=kind, who=[*who], for_s=for_s, planned=text, step=0, t=now, peer="faults")
        self._outcome.events.append(fault)

    def _first_members(self) -> Genesis:
        trainers = self.scenario.trainers
        members = tuple(
            self._member(name, name, stage, k < trainers) for k, (name, stage) in enumerate(self.scenario.members)
        )
        return Genesis(
            run_id="fuzz",
            config=bytes(32),
            data=bytes(32),
            stages=len(self.scenario.stages),
            members=members,
            coordinator=members[0].id,
            first_step=0 if self._start is None else self._start.step,
        )

    def _contacts(self) -> tuple[Member, ...]:
        """Those that any living member names to a newcomer."""
        return next((r.contacts() for name, r in self.rosters.items() if not self.tasks[name].done()), ())

    def _member(self, name: str, called: str, stage: int, trains: bool) -> Member:
        place = self.disks.place(name).name
        return Member(id=name, name=called, stage=stage, trainer=trains, place=place)

    def _corpus(self) -> tuple[Path, Path, bytes]:
        """The data owners' files of tokens, of the held-out part, and the genesis's entries about them."""
        tokens, heldout = self._folder / "train.bin", self._folder / "heldout.bin"
        tokens.write_bytes(content := reference.corpus(self._facts).tobytes())
        heldout.write_bytes(b"")
        return tokens, heldout, digest_of([hashlib.sha256(side).digest() for side in (content, b"", b"")])

    def _owns_data(self, name: str) -> bool:
        """Whether a newcomer has data: in a world that shares data only the trainer that replaces the last one."""
        first = dict(self.scenario.members[: self.scenario.trainers])
        return not self.scenario.share or name in first or name.endswith("t")

    def _sharing(self, name: str) -> Sharing | None:
        """Tokens of a peer in a world that shares them: its first trainers have them."""
        if not self.scenario.share:
            return None
        disk = Disk(InlineExecutor())
        tokens, heldout, data = self._corpus()
        shared, copy = share(tokens, 2, heldout, disk)

        def source_of(tokens: npt.NDArray[np.integer]) -> reference.Tokens:
            return reference.Corpus(self._facts, tokens)

        sharing = Sharing(shared, data, b"", self._facts.spec.vocab, source_of, disk=disk)
        if self._owns_data(name):
            sharing.source, sharing.copy = source_of(reference.corpus(self._facts)), copy
        else:
            sharing.store = Store(self._folder / f"tokens-{name}", 1 << 20)
        return sharing

    def _network(self, name: str) -> MemoryNetwork | Liar | LyingServer:
        network = self.networks[name]
        lies = [f.how for f in self.scenario.faults if f.kind == "lie" and f.who == (name,)]
        if not lies:
            return network
        if lies[0] in SERVER_LIES:
            server = self.liars[name] = LyingServer(network)
            return server
        rng, everyone = random.Random(f"lies/{self.scenario.seed}/{name}"), tuple(p for p, _ in self.scenario.members)
        liar = self.liars[name] = Liar(network, rng, self.scenario.microbatches, everyone)
        return liar

    async def _peer(self, name: str, *, joins_as: str = "") -> dict[str, Tensor] | None:
        """Live one peer's life; return its state if it reaches the end. ``joins_as``: its name if it joins."""
        network, clock = self._network(name), self._own_clock(name)
        place, joining = self.disks.place(name), bool(joins_as)
        sharing, limit_s = self._sharing(name), self.scenario.time_limit_s
        ends_s = math.inf if limit_s is None else clock.now() + limit_s
        trains = self._owns_data(name) and name not in self.scenario.without_data
        joins = self._member(name, joins_as, stage_of(name), trains) if joining else name
        roster = self.rosters[name] = Roster(self._genesis, joins, self._contacts() if joining else ())
        network.on_refusal(lambda remote, reason: self._note(name, FrameRefused(remote=remote, reason=reason)))
        book = Book(place)

        async def make(joins: bool, back: StepBack | None) -> Peer:
            swaps = name in self.scenario.swapped
            made = reference.swapped_compute if swaps else reference.stage_compute
            inner = made(self._facts, roster.own.stage, joins=joins)
            stage = self.stages[name] = FaultyCompute(inner)
            if self._start is not None and not joins:
                await self._start.load(stage, roster.own.stage)
            compute = self.computes[name] = self._paced(stage, clock)
            note, tasks, draw = partial(self._note, name), Tasks(InlineExecutor()), random.Random(name)
            ctx = Context.at_stage(network, clock, compute, roster, self._facts.plan, note, tasks, draw)
            source = reference.Tokens(self._facts) if sharing is None else sharing.source
            self.peers[name] = Peer(
                ctx,
                host=Watched(self._witness, name, inner, (self.clock, clock), ends_s),
                source=source,
                heldout=reference.heldout(self._facts) if trains else None,
                book=book,
                joining=joins,
                back=back,
                sharing=sharing,
                log_bytes=self.scenario.log_bytes,
            )
            return self.peers[name]

        async def serve() -> dict[str, Tensor]:
            with nullcontext() if sharing is None else closing(sharing):
                await Service(make, joining=joining).run()
                self.stages[name].recover()  # what is looked at from outside
                state: dict[str, Tensor] = await self.computes[name].state()
                return state

        if (state := await self.live(name, self.networks[name], serve())) is None:
            return None
        peer = self.peers[name]
        self._outcome.lineages[name], self._outcome.steps[name] = peer.position.applied, peer.position.step
        self._outcome.ends[name] = LEFT if peer.left else "finished"
        return None if peer.left else state

    async def _client(self, name: str) -> None:
        """Live one client's life."""
        network, clock, stage = self.networks[name], self._own_clock(name), stage_of(name)
        network.on_refusal(lambda remote, reason: self._note(name, FrameRefused(remote=remote, reason=reason)))
        self.stages[name] = FaultyCompute(reference.client_compute(self._facts, stage))
        compute = self.computes[name] = self._paced(self.stages[name], clock)
        servers = tuple(m.id for m in self._genesis.members if m.stage == stage)
        tasks = Tasks(InlineExecutor())
        lies = any(f.kind == "lie" and f.who == (name,) for f in self.scenario.faults)
        made = LyingClient if lies else Client
        client = made(network, clock, tasks, compute, self._facts.plan, self._genesis.config, name, servers)
        if isinstance(client, LyingClient):
            self.liars[name] = client
        await self.live(name, network, client.run(), tasks)
        self._outcome.ends.setdefault(name, LEFT)

    def gave_up(self, name: str, error: MuletrainError) -> None:
        self.say(f"{name} ends: {error}")
        self._outcome.ends[name] = str(error)
        self._outcome.errors[name] = error

    def _paced(self, stage: FaultyCompute, clock: LoopClock) -> PacedCompute:
        slower = self.scenario.slower
        return PacedCompute(stage, clock, slower * FORWARD_S, slower * BACKWARD_S)

    def _served(self) -> set[int]:
        """Stages whose state a present peer has. After some peers end and leave, a peer that fell behind may find
        nobody with its state."""
        over = any(steps == self.scenario.steps for steps in self._outcome.steps.values())
        there = (peer for p, peer in self.peers.items() if not self.tasks[p].done())
        return {peer.roster.own.stage for peer in there if not (over and peer.position.away)}

    def _note(self, name: str, event: Event) -> None:
        self._outcome.events.append(replace(event, t=self.clock.now(), peer=name))
        if isinstance(event, StepApplied):
            self._witness.reported(name, event)
        if isinstance(event, StepDone):
            self._witness.told(name, event)
        if isinstance(event, SteppedBack):
            self._witness.stepped_back(name, event, self._served())
        if isinstance(event, CheckpointWritten):
            self._witness.written(name, event.step, self.disks.folder(name), self.clock.now())
        if isinstance(event, SHOWN):
            fields = {
                k: v for k, v in event.__dict__.items() if k not in ("t", "peer", "sent", "lineage") and "_s" not in k
            }
            self.say(f"{name} {event.kind} {' '.join(f'{k}={v}' for k, v in fields.items())}")
