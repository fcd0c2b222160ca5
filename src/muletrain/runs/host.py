"""The resources of a peer, as founder or newcomer: spec, log, ticket, machine, links and compute."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch

import muletrain
from muletrain.compute.scaling import SKIPPED
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.fleet_file import FleetPeer, Link, load_fleet
from muletrain.config.schema import Precision, RunConfig
from muletrain.errors import ConfigError
from muletrain.events import BlocksCompiled
from muletrain.network.shaped import ShapedNetwork
from muletrain.policy.recent import Recent
from muletrain.runs.assemble import build_compute
from muletrain.runs.base import check_quantising, own_folders, store_of
from muletrain.runs.join.client import members_in
from muletrain.runs.join.limits import check_stage
from muletrain.runs.join.messages import JoinRequest
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.measure.machine import Machine
from muletrain.runs.measure.probing import BlockFound, Prober, block_of, identity_of
from muletrain.runs.worker_files import TICKET_FILE, write_secret
from muletrain.runtime.checkpoint.store import CheckpointStore, Folder, open_place
from muletrain.runtime.core.blocks import Blocks
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.transfer.base import BaseExchange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from muletrain.clock import Clock
    from muletrain.compute.base import Compute
    from muletrain.config.fleet_file import Fleet
    from muletrain.events import EventLog
    from muletrain.network.base import Network, PeerId
    from muletrain.runs.assemble import RunFacts
    from muletrain.runs.join.rendezvous import Rendezvous
    from muletrain.runs.measure.fleet_survey import Survey
    from muletrain.runs.spec import WorkerSpec
    from muletrain.runtime.members.roster import Genesis, Roster

MOST_GIVERS = 16
"""Peers of a stage that are asked for the weights beside an adapter."""


class Host:
    """Holds the resources of one process. ``rendezvous``: the founder's; ``known``: names of peers by id, received by a
    newcomer before the run begins, and by a server from clients; ``survey``: the founder's, until the run begins;
    ``roster``: None until then; ``compute``: the compute in use; ``blocks``: the process' end of the transport, if it
    gives and takes before it is a peer."""

    def __init__(self, spec: WorkerSpec, log: EventLog, clock: Clock) -> None:
        self.spec, self.log, self.clock = spec, log, clock
        self.ticket = Ticket.parse(spec.ticket)
        self.rendezvous: Rendezvous | None = None
        self.known: Recent[str] = Recent()
        self.survey: Survey | None = None
        self.roster: Roster | None = None
        self.compute: Compute | None = None
        self.shaped: ShapedNetwork | None = None
        self.genesis: Genesis | None = None
        """Of a run that had begun when this machine joined, until ``roster`` is known."""
        self.blocks: Blocks | None = None
        self._base: BaseExchange | None = None
        """Of a run with an adapter."""

    def open_base(self, facts: RunFacts, network: Network) -> None:
        """From now on, give and take the weights beside an adapter, if the run's model has any. Raises ConfigError for a
        configuration without their digests, and if this machine cannot quantise them as the run does."""
        if self._base is not None:  # this machine joins again
            return
        config, own = facts.config, self.spec.role == "found" or self.spec.data == "config"
        named = [Path(config.model.from_)] if own and config.model.from_ is not None else []
        store = store_of(config, facts.spec, [*named, *own_folders(config, self.spec.model)])
        if store is not None:
            check_quantising(config)
            tasks = Tasks()
            self.blocks = Blocks(self.links(facts, network), self.clock, tasks)
            self._base = BaseExchange(self.blocks, tasks, store, self.log.note, self._heard)

    def _heard(self, taker: PeerId) -> None:
        if self.rendezvous is not None:
            self.rendezvous.goes_on(taker)

    async def base(self, facts: RunFacts, stage: int) -> Mapping[str, Tensor] | None:
        """The weights of ``Model.base`` in ``stage``; None: the model has none. Raises MuletrainError if they are not to be
        had."""
        if self._base is None:
            return None
        return await self._base.weights(facts.spec.parts_of(facts.cut, stage), lambda: self._givers(stage))

    def base_s(self, facts: RunFacts, stage: int) -> float:
        """About how many seconds ``base`` takes, if weights have to come from other peers; else 0."""
        return 0.0 if self._base is None else self._base.takes_s(facts.spec.parts_of(facts.cut, stage))

    def _givers(self, stage: int) -> list[PeerId]:
        """Peers that may have the base of ``stage``: its own, the run's founder, those of the ticket, and those that a
        client has heard of: the others may have left."""
        genesis = self.genesis if self.roster is None else self.roster.genesis
        first = () if self.roster is None else self.roster.stage(stage)
        if genesis is not None:
            first = first or tuple(m.id for m in genesis.members if m.stage == stage)
            first = (*first[:MOST_GIVERS], genesis.coordinator)
        heard = [*self.known][-MOST_GIVERS:] if self.spec.client else []
        return [*first, *members_in(self.ticket.addresses), *heard]

    def names(self) -> dict[PeerId, str]:
        """Names of the peers in the run, as far as this peer knows, by id."""
        if self.roster is not None:
            return {m.id: m.name for m in self.roster.members()}
        return self.known if self.rendezvous is None else self.rendezvous.names()

    def clients(self) -> dict[PeerId, str]:
        """Names of the clients that this peer had as a server, by id."""
        roster = self.roster
        return {} if roster is None else {p: name for p, name in self.known.items() if not roster.knows(p)}

    def hand_out(self, ticket: Ticket) -> None:
        """Write the ticket into the folder in which commands on this machine look."""
        self.ticket = ticket
        if (self.spec.role == "found" and not self.spec.alone) or self.spec.keeps_ticket:
            write_secret(Path(self.spec.folder) / TICKET_FILE, str(ticket))

    async def probe_machine(self, config: RunConfig | None) -> Machine:
        """Measure this machine. ``config``: the run's, if known."""
        spec = self.spec
        precision = config.compute.precision if config is not None else Precision(spec.precision or "auto")
        return await asyncio.to_thread(
            Machine.probe, spec.device, precision, spec.memory_gib, spec.sharing, spec.host_memory
        )

    def introduction(self, machine: Machine) -> JoinRequest:
        return JoinRequest(
            version=muletrain.__version__,
            name=self.spec.name,
            stage=self.spec.stage,
            device=machine.kind,
            flops=machine.flops,
            memory=machine.offer.device,
            host_memory=machine.offer.host,
            client=self.spec.client,
        )

    async def build_client(self, facts: RunFacts, stage: int, machine: Machine) -> Compute:
        """Build a client's compute for ``stage``, with weights that servers replace. Raises CapacityError."""
        check_stage(facts, stage, machine.offer, client=True)
        folder, index = Path(self.spec.swap_folder or self.spec.folder), self.spec.fleet_index
        base = await self.base(facts, stage)
        compute = await asyncio.to_thread(
            build_compute, facts.drawn(), stage, machine, index, updates=False, folder=folder, base=base
        )
        self._tell_compiling(compute)
        return compute

    async def build(self, facts: RunFacts, stage: int, machine: Machine, part: Path | None) -> Compute:
        """Build the compute of ``stage``, with the state in the checkpoint ``part``, if given. Raises CapacityError if
        the stage does not fit, even if another member assigned the stage."""
        check_stage(facts, stage, machine.offer)
        folder = Path(self.spec.swap_folder or self.spec.folder)
        index, base = self.spec.fleet_index, await self.base(facts, stage)
        compute = await asyncio.to_thread(build_compute, facts, stage, machine, index, part, folder=folder, base=base)
        self._tell_compiling(compute)
        if part is not None:
            state = await compute.offload(safetensors.torch.load_file, part)
            state.pop(SKIPPED, None)  # a resumed run may have other settings, and restarts the count
            await compute.load_state(state)
        return compute

    def _tell_compiling(self, compute: Compute) -> None:
        """Report how long ``compute`` took to compile, if it did."""
        if isinstance(compute, TorchCompute) and (found := compute.compiling) is not None:
            self.log.emit(BlocksCompiled(stage=compute.stage, seconds=found.seconds, error=found.error))

    def prober(self, facts: RunFacts, network: Network, founder: PeerId, machine: Machine) -> Prober:
        """Make the ``Prober`` that measures at the request of ``founder``."""
        spec = self.spec
        emulated = "" if facts.config.fleet.profile is None or spec.fleet_index is None else spec.name
        identity = identity_of(self.ticket.run_id, emulated)

        def block() -> BlockFound:
            return block_of(facts.spec, facts.config.train.microbatch, machine, Path(spec.folder), identity)

        prober = Prober(network, self.links(facts, network), founder, self.clock, self.known.update, block)
        prober.open()
        return prober

    async def close(self) -> None:
        """End what runs beside the peer."""
        if self._base is not None:
            await self._base.tasks.close()

    def close_compute(self) -> None:
        if self.compute is not None:
            self.compute.close()
            self.compute = None  # frees the memory for the next compute

    def links(self, facts: RunFacts, network: Network) -> Network:
        """``network``, shaped by the fleet profile, if any (peer i of the profile is the i-th name of the local
        fleet)."""
        index, profile, spec = self.spec.fleet_index, facts.config.fleet.profile, self.spec
        if self.shaped is not None:
            return self.shaped
        if profile is not None and index is not None:
            fleet = load_fleet(profile, peers=facts.config.fleet.local_peers)

            def link(peer: PeerId) -> Link:
                return fleet.link(index, _machine_of(self._called(peer), facts.config, fleet))

            self.shaped = ShapedNetwork(network, link, fleet.peers()[index])
        elif spec.faults:
            self.shaped = self._as_wide(network, math.inf)
        return self.shaped or network

    def _called(self, peer: PeerId) -> str:
        """The name of a peer or client; of an unknown peer the id."""
        if self.roster is not None and self.roster.knows(peer):
            return self.roster.name(peer)
        return self.known.get(peer) or self.names().get(peer, peer)

    def limited(self, network: Network) -> Network:
        """``network``, no wider than this machine's owner allows."""
        rate = self.spec.bandwidth_bytes_per_s
        return network if rate is None else self._as_wide(network, rate)

    def _as_wide(self, network: Network, bytes_per_s: float) -> ShapedNetwork:
        own = FleetPeer(up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s)
        return ShapedNetwork(network, lambda peer: Link(0.0, math.inf), own)


def _machine_of(name: str, config: RunConfig, fleet: Fleet) -> int:
    """The machine of the fleet profile that this peer emulates; a newcomer gets some machine's links."""
    number = name.removeprefix("client-")
    if config.hub.clients and number != name and number.isdecimal():  # clients come after the local fleet's peers
        return (config.fleet.local_peers + int(number)) % len(fleet.peers())
    return fleet.number(name)


def place_of(config: RunConfig, spec: WorkerSpec, note: Callable[..., None]) -> CheckpointStore:
    """The place for this peer's checkpoints: the run's shared place only if the owner of this machine named the same
    place, because opening a place uses this machine's disk or credentials. Raises ConfigError if the owner named a
    different place, or the founder cannot use the place."""
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
