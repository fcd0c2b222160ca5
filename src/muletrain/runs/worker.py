"""The process of one peer: ``python -m muletrain.runs.worker`` with a ``WorkerSpec`` on standard input.

Afterwards the line ``stop`` on standard input asks for an orderly end (of the run; of a joiner on a machine of its own:
to leave it); ``cut NAME NAME`` drops all traffic with these peers, ``cut`` alone with none; ``corrupt`` damages the
next frame and gradient; ``move STAGE`` asks to serve another stage; ``at STEP PHASE EVENT`` is a fault to do to itself
there (``runs/chaos.py``). End of file means that whoever started us is gone, and the process leaves at once. Everything
it has to say goes into its event log.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch

import muletrain
from muletrain.clock import LoopClock
from muletrain.compute.probe import chip
from muletrain.config.fleet import Link, limited_peer, load_fleet
from muletrain.config.schema import DataConfig, Precision, RunConfig
from muletrain.data.tokens import TokenCache, cache_folder
from muletrain.errors import AdmissionError, CheckpointError, ConfigError, DataError, MuletrainError, no_room
from muletrain.events import (
    EventLog,
    FrameRefused,
    JoinRefused,
    MemberRemoved,
    PeerBanned,
    PeerJoined,
    ProbeFailed,
    RunFinished,
    RunStarted,
    Waiting,
)
from muletrain.network.identity import Key
from muletrain.network.libp2p import Libp2pNetwork
from muletrain.network.offences import BAN_S
from muletrain.network.shaped import ShapedNetwork
from muletrain.runs.assemble import RunFacts, build_compute, resolve_start, versions
from muletrain.runs.chaos import Points, damage_next, spoil_next
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.guard import Guard, where_it_hangs
from muletrain.runs.join.limits import check_stage, check_tokenizer, check_welcome, told_config
from muletrain.runs.join.lobby import Join, Lobby, Visitor, Welcome, find_founder
from muletrain.runs.join.reception import Papers, Reception
from muletrain.runs.join.removal import serve_members
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.measure.machine import Machine
from muletrain.runs.measure.probing import BlockFound, Prober, block_of, identity_of
from muletrain.runs.measure.survey import Survey
from muletrain.runs.measure.vicinity import serve_sight
from muletrain.runs.spec import WorkerSpec
from muletrain.runs.worker_files import EXIT_ERROR, EXIT_NO_CHECKPOINT, OWNER_FILE, SCRATCH, TICKET_FILE, write_secret
from muletrain.runtime.checkpoint.roles import Book
from muletrain.runtime.checkpoint.store import CheckpointStore, Folder, open_place
from muletrain.runtime.core.disk import Disk
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Roster
from muletrain.runtime.members.watchdog import DeviceHung
from muletrain.runtime.peer.peer import Peer
from muletrain.runtime.peer.service import Service
from muletrain.runtime.transfer.tokens import WANTED, Sharing, Store, share
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.compute.base import Compute
    from muletrain.network.base import Network, PeerId
    from muletrain.runtime.recovery.messages import StepBack
    from muletrain.runtime.step.record import StepRecord


PROTOCOL = f"muletrain {muletrain.__version__}"


class Worker:
    """Builds one peer from its spec and runs it to the end."""

    def __init__(self, spec: WorkerSpec, log: EventLog) -> None:
        self._spec = spec
        self._log = log
        self._clock = LoopClock()
        self._owner = Key.at(Path(spec.folder) / OWNER_FILE) if spec.role == "found" else None
        self._ticket = Ticket.parse(spec.ticket)
        self._peer: Peer | None = None
        self._compute_in_use: Compute | None = None
        self._network: Libp2pNetwork | None = None
        self._main: asyncio.Task[None] | None = None
        self._names: Callable[[], dict[PeerId, str]] = dict
        """Who is in the run, as far as this peer knows, by id."""
        self._removed = False
        self._stop = asyncio.Event()
        self._missing: list[str] = []
        self._steps = 0
        self._total = -1
        self._reason = "ended on request"
        self._code = 0
        self._shaped: ShapedNetwork | None = None
        self._roster: Roster | None = None
        self._points = Points(log)
        self._survey: Survey | None = None
        """The founder's, while the run waits for its beginning."""

    def stop(self) -> None:
        """End in order: after the current step, or at once if training has not begun. A joiner on a machine of its own
        leaves: the run is not its own to end."""
        self._stop.set()
        if self._peer is not None:
            self._end_in_order(self._peer)

    def _end_in_order(self, peer: Peer) -> None:
        if self._spec.keeps_ticket:
            peer.leave()
        else:
            peer.stop()

    def at(self) -> str:
        """What the device's threads are at, in words for an error; empty: nothing. In any thread."""
        compute = self._compute_in_use
        jobs = () if compute is None else compute.jobs.running()
        return f" while the device is at {', '.join(repr(job.what) for job in jobs)}" if jobs else ""

    def obey(self, line: str) -> None:
        """A line from whoever started us."""
        match line.split():
            case ["stop"]:
                self.stop()
            case ["cut", *names] if self._shaped is not None and self._roster is not None:
                self._shaped.set_partition(frozenset(m.id for m in self._roster.members() if m.name in names))
            case ["corrupt"] if self._network is not None:
                damage_next(self._network)
                if self._compute_in_use is not None:
                    spoil_next(self._compute_in_use)
            case ["probe"]:
                self._measure()
            case ["move", stage] if self._peer is not None and stage.isdecimal():
                self._peer.rebalancer.settled = False  # it has no say in this one
                self._peer.move(int(stage))
            case ["at", step, phase, *_] if self._network is not None:
                self._points.add(self._network, step, phase, line.split(maxsplit=3)[-1])
            case _:
                self._log.note(f"not obeyed: {line.strip()[:100]!r}", "warning")

    def _measure(self) -> None:
        """Whoever is here by now."""
        if self._survey is None:
            reason = "the run has begun, or gets ready: measure before ('muletrain start --probe')"
            self._log.emit(ProbeFailed(reason=reason))
        else:
            self._measuring = asyncio.create_task(self._survey.measure())

    async def run(self) -> int:
        """To the end; the process' exit code."""
        begin = self._clock.now()
        with tempfile.TemporaryDirectory(prefix="mule-") as sockets:
            self._main = main = asyncio.create_task(self._run(Path(sockets)))
            early = asyncio.create_task(self._stop.wait())
            await asyncio.wait({main, early}, return_when=asyncio.FIRST_COMPLETED)
            if not main.done() and self._peer is None:
                main.cancel()
            early.cancel()
            with suppress(asyncio.CancelledError):
                await main
        if self._removed:
            raise AdmissionError(
                "the run's owner removed this peer, or renewed the ticket while it was joining; ask the owner for the current one"
            )
        reason = "all steps done" if self._steps == self._total else self._reason
        self._log.emit(RunFinished(steps=self._steps, seconds=self._clock.now() - begin, reason=reason))
        return self._code

    async def _run(self, sockets: Path) -> None:
        spec = self._spec
        self._network = network = await Libp2pNetwork.create(
            run_id=self._ticket.run_id,
            secret=self._ticket.secret,
            owner=self._owner or self._ticket.owner,
            protocol=PROTOCOL,
            folder=sockets,
            listen=spec.listen,
            port=spec.port,
            announce=spec.announce,
            initial_peers=self._ticket.addresses,
            on_refusal=self._refused,
            on_renewal=self._renewed,
            on_ban=lambda peer: self._log.emit(PeerBanned(peer_id=peer, seconds=BAN_S)),
            on_relay=self._relayed,
            private=spec.private,
            carries=spec.bandwidth_bytes_per_s is None,
        )
        serve_members(network, lambda: self._names(), self._stages)
        serve_sight(network, carries=spec.bandwidth_bytes_per_s is None)
        links = self._limited(network)
        try:
            if spec.role == "found":
                await self._found(links)
            else:
                await self._join(links)
        finally:
            await network.close()

    def _stages(self) -> dict[PeerId, int]:
        """What each member serves that this peer believes alive; nothing before the run begins."""
        roster = self._roster
        return {} if roster is None else {m.id: m.stage for m in roster.members() if roster.is_alive(m.id)}

    def _refused(self, remote: str, reason: str) -> None:
        kind = JoinRefused if self._peer is None else FrameRefused
        self._log.emit(kind(remote=remote, reason=reason))

    def _relayed(self, peer: PeerId, relay: PeerId) -> None:
        names = self._names()
        who, whom = (names.get(p, p[-6:]) for p in (peer, relay))
        self._log.note(f"{who} cannot be reached directly: by way of {whom}", "info")

    def _renewed(self, gone: frozenset[PeerId]) -> None:
        """The owner removed somebody: perhaps us."""
        if self._network is None or self._main is None:
            return  # it was admitted a moment ago, by whom had not heard of it
        names, trust = self._names(), self._network.trust
        for peer in gone & names.keys():
            self._log.emit(MemberRemoved(peer_id=peer, name=names[peer]))
        if not trust.belongs:
            self._removed = True
            self._main.cancel()
        elif trust.secret is not None:
            self._hand_out(dataclasses.replace(self._ticket, secret=trust.secret))

    def _hand_out(self, ticket: Ticket) -> None:
        """Put the ticket where a face of this machine finds it."""
        self._ticket = ticket
        if self._spec.role == "found" or self._spec.keeps_ticket:
            write_secret(Path(self._spec.folder) / TICKET_FILE, str(ticket))

    # The founder ----------------------------------------------------------------------------------------------------

    async def _found(self, network: Network) -> None:
        spec = self._spec
        assert spec.config is not None
        facts = RunFacts.of(resolve_start(RunConfig.model_validate_json(spec.config)))
        config = facts.config
        cache = await asyncio.to_thread(TokenCache.build, config.data, facts.spec.vocab)
        checkpoint = Checkpoint.open(Path(spec.resume)) if spec.resume is not None else None
        if checkpoint is not None and checkpoint.manifest.get("data") != cache.digest:
            raise CheckpointError(
                f"{checkpoint.folder}: the corpus is not what the run was trained on; restore its files"
            )
        check_tokenizer(facts, len(cache.tokenizer_json))
        sharing = await self._owners_sharing(facts, cache) if config.data.share else None
        machine = await self._machine(config)
        lobby = Lobby(
            net=network,
            clock=self._clock,
            emit=self._log.emit,
            run_id=self._ticket.run_id,
            config_json=config.model_dump_json(by_alias=True),
            config_digest=facts.config_digest,
            data_digest=bytes.fromhex(cache.digest),
            tokenizer=cache.tokenizer_json,
            stages=config.fleet.stages,
            expected=config.fleet.peers or config.fleet.stages,
            trainers=config.fleet.trainers,
            needs=facts.needs(),
            stage_costs=facts.stage_costs(),
            strategy=facts.strategy,
            first_step=checkpoint.step if checkpoint else 0,
            parts=checkpoint.parts if checkpoint else [],
            part_digests=checkpoint.digests if checkpoint else [],
            tokens=None if sharing is None else sharing.shared,
        )
        lobby.open()
        self._names = lobby.names
        links = self._links(facts, network)
        prober = self._prober(facts, network, links, network.peer_id, machine, lambda names: None)
        survey = Survey(
            net=network,
            emit=self._log.emit,
            spec=facts.spec,
            sequences=config.train.microbatch,
            folder=Path(spec.folder),
            people=lobby.prepared,
            clock=self._clock,
        )
        lobby.settled = survey.settled
        self._hand_out(dataclasses.replace(self._ticket, addresses=tuple(network.addresses())))
        stage = lobby.seat(network.peer_id, self._introduction(network, machine))
        compute = await self._compute(
            facts, stage, machine, checkpoint.parts[stage] if checkpoint is not None else None
        )
        place = place_of(config, self._spec, self._log.note)
        lobby.ready(network.peer_id, trainer=True, place=place.name)
        if spec.probe:
            survey.before_training()
        self._survey = survey
        roster = Roster(await lobby.gather(), network.peer_id)
        self._survey = None
        prober.close()
        papers = Papers(lobby.config_json, lobby.data_digest, lobby.tokenizer, lobby.tokens)
        await self._train(facts, roster, network, compute, machine, cache, papers, place, sharing)

    # A newcomer -----------------------------------------------------------------------------------------------------

    async def _join(self, network: Network) -> None:
        visitor = Visitor(network, await find_founder(network, self._ticket.addresses), self._waiting)
        self._hand_out(self._ticket.passed_on(visitor.founder, network.addresses()))
        machine = await self._machine(None)
        welcome = await visitor.join(self._introduction(network, machine))
        try:
            facts = RunFacts.of(told_config(welcome.config))
            check_welcome(facts, welcome, machine.offer)
            tokenizer = await visitor.tokenizer(welcome)
        except MuletrainError as e:
            await visitor.decline(str(e))
            raise
        if self._spec.keeps_ticket:
            self._log.note(f"this peer gets stage {welcome.stage} of 0..{facts.config.fleet.stages - 1} ready")
        precision = facts.config.compute.precision
        if precision is not Precision.AUTO:  # the run's word; 'auto' is each machine's own measurement
            machine = dataclasses.replace(machine, precision=precision)
        try:
            cache = await asyncio.to_thread(self._own_data, facts, tokenizer, welcome.data.hex())
        except MuletrainError as e:  # ours is another corpus, or none
            await visitor.decline(str(e))
            raise
        if welcome.part_size:
            with tempfile.TemporaryDirectory(prefix="mule-part-") as folder:
                part = Path(folder) / "part.safetensors"
                await visitor.part(welcome, part)
                compute = await self._compute(facts, welcome.stage, machine, part)
        elif welcome.running:  # its weights come from replicas, whatever the run began with
            compute = await self._compute(facts.drawn(), welcome.stage, machine, None)
        elif facts.config.model.from_ is not None and self._spec.data != "config":
            raise AdmissionError(
                "the run starts from a folder of another machine, which 'muletrain start' would hand out; begin it so"
            )
        else:
            compute = await self._compute(facts, welcome.stage, machine, None)
        place = place_of(facts.config, self._spec, self._log.note)
        sharing = await self._sharing(facts, welcome, tokenizer, cache)
        if welcome.running:
            genesis = await visitor.genesis()
            roster = Roster(
                genesis,
                Member(
                    id=network.peer_id,
                    name=welcome.name,
                    stage=welcome.stage,
                    trainer=cache is not None,
                    addresses=tuple(network.addresses()),
                    device=machine.kind,
                    flops=machine.flops,
                    place=place.name,
                ),
            )
        else:
            links, known = self._links(facts, network), dict[str, str]()
            self._names = lambda: known
            prober = self._prober(facts, network, links, visitor.founder, machine, known.update)
            genesis = await visitor.begin(trainer=cache is not None, place=place.name)
            prober.close()
            roster = Roster(genesis, network.peer_id)
        begun = genesis.config, genesis.stages, roster.own.stage
        if begun != (facts.config_digest, len(facts.cut), welcome.stage):
            raise AdmissionError("the run began with another configuration or stage than was sent; start it again")
        papers = Papers(welcome.config, welcome.data, tokenizer, welcome.tokens)
        if genesis.data != welcome.data:
            raise AdmissionError("the run began with another corpus than was said; ask whoever began it")
        await self._train(
            facts, roster, network, compute, machine, cache, papers, place, sharing, joining=welcome.running
        )

    def _waiting(self, missing: tuple[str, ...]) -> None:
        """On a machine of its own a joiner says what the run waits for; otherwise the founder does so beside it."""
        if self._spec.keeps_ticket and missing and list(missing) != self._missing:
            self._missing = list(missing)
            self._log.emit(Waiting(missing=self._missing))

    async def _owners_sharing(self, facts: RunFacts, cache: TokenCache) -> Sharing:
        """Of a peer that has the data. Reads all of it once. Raises DataError."""
        disk, wanted = Disk(), facts.config.fleet.trainers or WANTED
        try:
            shared, copy = await asyncio.to_thread(share, *cache.train_file, cache.heldout_file, disk)
        except OSError as e:
            raise DataError(f"data.share: {cache.folder}: {e.strerror}; build the cache again") from e
        return Sharing(
            shared,
            bytes.fromhex(cache.digest),
            cache.tokenizer_json,
            facts.spec.vocab,
            facts.source_of,
            wanted=min(WANTED, wanted),
            source=facts.source(cache),
            copy=copy,
            disk=disk,
        )

    async def _sharing(
        self, facts: RunFacts, welcome: Welcome, tokenizer: bytes, cache: TokenCache | None
    ) -> Sharing | None:
        """A joiner's part in it, where the run shares its tokens."""
        shared, limit = welcome.tokens, int(self._spec.tokens_gib * 2**30)
        if shared is None or not facts.config.data.share:
            return None
        if cache is not None:
            own = await self._owners_sharing(facts, cache)
            return own if own.shared == shared else None
        if shared.size > limit:
            self._log.note(
                f"the run shares its tokens, {format_memory(shared.size)}; this machine keeps at most {format_memory(limit)} (--tokens)",
                "info",
            )
            return None
        wanted = min(WANTED, facts.config.fleet.trainers or WANTED)
        store = Store(cache_folder(DataConfig()) / "shared", limit)
        return Sharing(shared, welcome.data, tokenizer, facts.spec.vocab, facts.source_of, store, wanted)

    def _own_data(self, facts: RunFacts, tokenizer: bytes, digest: str) -> TokenCache | None:
        """The corpus, where this peer has it: only then can it be a trainer. Raises AdmissionError when it is another
        corpus."""
        where = self._spec.data
        if where == "none":
            return None
        data = facts.config.data
        if where != "config":
            with tempfile.TemporaryDirectory(prefix="mule-tokenizer-") as folder:
                file = Path(folder) / "tokenizer.json"
                file.write_bytes(tokenizer)
                own = {"path": where, "tokenizer": str(file), "cache": None}  # not where the founder says
                data = data.model_copy(update=own)
                cache = TokenCache.build(data, facts.spec.vocab)
        else:
            cache = TokenCache.build(data, facts.spec.vocab)
        if cache.digest != digest:
            raise AdmissionError(
                f"--data: {data.path}: this corpus has digest {cache.digest[:12]}, the run's has {digest[:12]}; give the same files, "
                f"or join without --data (only trainers need it)"
            )
        return cache

    # Both -----------------------------------------------------------------------------------------------------------

    def _prober(
        self,
        facts: RunFacts,
        network: Network,
        links: Network,
        founder: PeerId,
        machine: Machine,
        learn: Callable[[dict[PeerId, str]], None],
    ) -> Prober:
        """Measures when ``founder`` asks for it."""
        spec = self._spec
        emulated = "" if facts.config.fleet.profile is None or spec.fleet_index is None else spec.name
        identity = identity_of(self._ticket.run_id, emulated)

        def block() -> BlockFound:
            return block_of(facts.spec, facts.config.train.microbatch, machine, Path(spec.folder), identity)

        prober = Prober(network, links, founder, self._clock, learn, block)
        prober.open()
        return prober

    async def _machine(self, config: RunConfig | None) -> Machine:
        spec = self._spec
        precision = config.compute.precision if config is not None else Precision(spec.precision or "auto")
        return await asyncio.to_thread(
            Machine.probe, spec.device, precision, spec.memory_gib, spec.sharing, spec.host_memory
        )

    def _introduction(self, network: Network, machine: Machine) -> Join:
        return Join(
            version=muletrain.__version__,
            name=self._spec.name,
            stage=self._spec.stage,
            device=machine.kind,
            flops=machine.flops,
            memory=machine.offer.device,
            host_memory=machine.offer.host,
            addresses=tuple(network.addresses()),
        )

    async def _compute(self, facts: RunFacts, stage: int, machine: Machine, part: Path | None) -> Compute:
        """With the state in ``part``, if the run does not begin with what every peer can make. Raises CapacityError,
        whoever says that this peer serves ``stage``."""
        check_stage(facts, stage, machine.offer)
        compute = await asyncio.to_thread(build_compute, facts, stage, machine, self._spec.fleet_index, part)
        if part is not None:
            await compute.load_state(await compute.offload(safetensors.torch.load_file, part))
        return compute

    async def _train(
        self,
        facts: RunFacts,
        roster: Roster,
        network: Network,
        compute: Compute,
        machine: Machine,
        cache: TokenCache | None,
        papers: Papers,
        place: CheckpointStore,
        sharing: Sharing | None,
        *,
        joining: bool = False,
    ) -> None:
        genesis = roster.genesis
        book = Book(
            place,
            {**facts.manifest(genesis.run_id), "data": papers.data.hex(), "precision": machine.precision.value},
            {"tokenizer.json": papers.tokenizer},
        )
        Reception(network, self._log.emit, roster, papers, facts.needs(), facts.stage_costs(), facts.strategy).open()
        before = self._names()
        self._names = lambda: before | {m.id: m.name for m in roster.members()}
        self._steps = genesis.first_step
        self._report_start(facts, roster)
        limit, self._total = facts.config.train.time_limit, facts.config.train.steps
        begin = self._clock.now()
        self._roster = roster
        links = self._links(facts, network)
        ready: Compute | None = compute

        def on_step(record: StepRecord) -> bool:
            self._steps = record.step + 1
            if limit is not None and self._clock.now() - begin > limit:
                self._reason = f"the time limit of {limit:.0f} s (train.time_limit) is over"
                return True
            return False

        async def make(joins: bool, back: StepBack | None) -> Peer:
            """Our peer at the stage that the roster names; the first one's compute is ready."""
            nonlocal ready
            own, ready = ready, None
            if own is None:
                self._close_compute()
                own = await self._compute(facts.drawn(), roster.own.stage, machine, None)
            self._compute_in_use = own
            ctx = Context(
                net=links,
                clock=self._clock,
                compute=own,
                roster=roster,
                plan=facts.plan(),
                emit=self._log.emit,
                reached=lambda phase, step: self._points.reached(phase, step + 1),
            )
            source = facts.source(cache) if cache is not None else None if sharing is None else sharing.source
            peer = self._peer = Peer(
                ctx,
                source=source,
                sharing=sharing,
                book=book,
                on_step=on_step,
                on_report=self._log.emit,
                reports=self._spec.keeps_ticket,
                joining=joins,
                back=back,
                fits=lambda s: facts.needs()[s].fits(machine.offer),
                log_bytes=facts.needs()[roster.own.stage].spare(machine.offer),
            )
            peer.reporting.tell(_joined(roster.own, own, machine, self._spec.threads))
            if self._stop.is_set():
                self._end_in_order(peer)
            return peer

        try:
            written = await Service(make, joining=joining).run()
            if not written and not self._spec.keeps_ticket:
                self._code = EXIT_NO_CHECKPOINT
        finally:
            self._close_compute()
        if self._peer is not None and self._peer.left:
            self._reason = "left in order"

    def _close_compute(self) -> None:
        if self._compute_in_use is not None:
            self._compute_in_use.close()

    def _links(self, facts: RunFacts, network: Network) -> Network:
        """Links of the fleet profile, if there is one (peer i of the profile is the i-th name of the local fleet), or
        as wide as this machine's owner allows."""
        index, profile, spec = self._spec.fleet_index, facts.config.fleet.profile, self._spec
        if self._shaped is not None:
            return self._shaped
        if profile is not None and index is not None:
            fleet = load_fleet(profile, peers=facts.config.fleet.local_peers)

            def link(peer: PeerId) -> Link:
                name = self._names()[peer] if self._roster is None else self._roster.member(peer).name
                return fleet.link(index, fleet.number(name))  # a newcomer's links are another's

            self._shaped = ShapedNetwork(network, link, fleet.peers()[index])
        elif spec.faults:
            self._shaped = self._as_wide(network, math.inf)
        return self._shaped or network

    def _limited(self, network: Network) -> Network:
        """From the first byte of the lobby on, as wide as this machine's owner allows."""
        rate = self._spec.bandwidth_bytes_per_s
        return network if rate is None else self._as_wide(network, rate)

    def _as_wide(self, network: Network, bytes_per_s: float) -> ShapedNetwork:
        return ShapedNetwork(network, lambda peer: Link(0.0, math.inf), limited_peer(bytes_per_s))

    def _report_start(self, facts: RunFacts, roster: Roster) -> None:
        config = facts.config
        if self._spec.role == "found" or self._spec.keeps_ticket:
            self._log.emit(
                RunStarted(
                    run_id=roster.genesis.run_id,
                    config_digest=facts.config_digest.hex(),
                    versions=versions(),
                    steps=config.train.steps,
                    stages=config.fleet.stages,
                    peers=len(roster.genesis.members),
                    microbatches=config.microbatches,
                    tokens_per_step=config.train.batch * facts.spec.context,
                    first_step=roster.genesis.first_step,
                )
            )


def place_of(config: RunConfig, spec: WorkerSpec, note: Callable[..., None]) -> CheckpointStore:
    """Where this peer writes checkpoints: the run's shared place only if the owner of this machine named it, too,
    because opening it uses this machine's disk or credentials. Raises ConfigError where the owner's place is not the
    run's, or the founder cannot use it."""
    shared, keep = config.checkpoint.place, config.checkpoint.keep
    own = Folder(Path(spec.folder) / "checkpoints", keep)
    if spec.place is not None and spec.place != shared:
        raise ConfigError(f"--place: {spec.place} is not where the run's checkpoints go ({shared or 'the run folder'})")
    if shared is None:
        return own
    if spec.place is None:
        note(f"checkpoints go to {shared}; others write this peer's part (join with --place {shared} to write there)")
        return own
    try:
        return open_place(shared, keep)
    except ConfigError as e:
        if spec.role == "found":
            raise
        note(f"{e}; others write this peer's part there", "warning")
    return own


def _joined(member: Member, compute: Compute, machine: Machine, threads: int) -> PeerJoined:
    return PeerJoined(
        peer_id=member.id,
        name=member.name,
        stage=member.stage,
        device=str(machine.device),
        precision=machine.precision.value,
        trainer=member.trainer,
        params=compute.n_params,
        threads=threads,
        chip=chip(machine.device),
    )


async def _listen_to_parent(reader: asyncio.StreamReader, worker: Worker) -> None:
    """Lines on standard input; its end means that nobody looks after us any more."""
    while line := await reader.readline():
        worker.obey(line.decode(errors="replace"))
    _tidy_up()
    os._exit(EXIT_ERROR)  # the daemon goes with us; a killed parent leaves nobody to report to


def _tidy_up() -> None:
    """Whoever started us was killed, and can remove nothing any more."""
    if scratch := os.environ.get(SCRATCH):
        shutil.rmtree(scratch, ignore_errors=True)


async def _main() -> int:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    line = await reader.readline()
    if not line:
        _tidy_up()
        return EXIT_ERROR
    spec = WorkerSpec.model_validate_json(line)
    with EventLog(Path(spec.folder) / f"{spec.name}.jsonl", spec.name) as log:
        try:
            worker = Worker(spec, log)
            beating = asyncio.create_task(Guard(log, worker.at).beat())
            parent = asyncio.create_task(_listen_to_parent(reader, worker))
            code = await worker.run()
            parent.cancel()
            beating.cancel()
        except MuletrainError as e:
            log.note(str(e), "error")
            if isinstance(e, DeviceHung):
                where_it_hangs()
            return EXIT_ERROR
        except BaseException as e:
            full = no_room(e)
            log.note(full or f"{type(e).__name__}: {e} (a bug; {spec.name}.log has the traceback)", "error")
            if full is None:
                raise
            return EXIT_ERROR
    return code


def main() -> None:
    code = asyncio.run(_main())
    sys.stdout.flush()
    os._exit(code)  # torch's and the data loader's threads have nothing left to say


if __name__ == "__main__":
    main()
