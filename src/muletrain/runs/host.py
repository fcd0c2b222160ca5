"""What a peer has on its machine, as founder or newcomer: its spec, log and ticket, the machine's resources, links and
compute."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch

import muletrain
from muletrain.compute.scaling import SKIPPED
from muletrain.config.fleet_file import FleetPeer, Link, load_fleet
from muletrain.config.schema import Precision, RunConfig
from muletrain.errors import ConfigError
from muletrain.network.shaped import ShapedNetwork
from muletrain.policy.recent import Recent
from muletrain.runs.assemble import build_compute
from muletrain.runs.join.limits import check_stage
from muletrain.runs.join.messages import JoinRequest
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.measure.machine import Machine
from muletrain.runs.measure.probing import BlockFound, Prober, block_of, identity_of
from muletrain.runs.worker_files import TICKET_FILE, write_secret
from muletrain.runtime.checkpoint.store import CheckpointStore, Folder, open_place

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.clock import Clock
    from muletrain.compute.base import Compute
    from muletrain.config.fleet_file import Fleet
    from muletrain.events import EventLog
    from muletrain.network.base import Network, PeerId
    from muletrain.runs.assemble import RunFacts
    from muletrain.runs.join.rendezvous import Rendezvous
    from muletrain.runs.measure.fleet_survey import Survey
    from muletrain.runs.spec import WorkerSpec
    from muletrain.runtime.members.roster import Roster


class Host:
    """Holds what one process has. ``rendezvous``: the founder's; ``known``: names of other peers by id, which a newcomer
    hears before the run begins, and a server from its clients; ``survey``: what a founder can measure the fleet with until
    then; ``roster``: None until then; ``compute``: the one in use."""

    def __init__(self, spec: WorkerSpec, log: EventLog, clock: Clock) -> None:
        self.spec, self.log, self.clock = spec, log, clock
        self.ticket = Ticket.parse(spec.ticket)
        self.rendezvous: Rendezvous | None = None
        self.known: Recent[str] = Recent()
        self.survey: Survey | None = None
        self.roster: Roster | None = None
        self.compute: Compute | None = None
        self.shaped: ShapedNetwork | None = None

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
        """Write the ticket into the folder where commands on this machine look for it."""
        self.ticket = ticket
        if (self.spec.role == "found" and not self.spec.alone) or self.spec.keeps_ticket:
            write_secret(Path(self.spec.folder) / TICKET_FILE, str(ticket))

    async def probe_machine(self, config: RunConfig | None) -> Machine:
        """Measure this machine. ``config``: the run's, if it is known yet."""
        spec = self.spec
        precision = config.compute.precision if config is not None else Precision(spec.precision or "auto")
        return await asyncio.to_thread(
            Machine.probe, spec.device, precision, spec.memory_gib, spec.sharing, spec.host_memory
        )

    def introduction(self, network: Network, machine: Machine) -> JoinRequest:
        return JoinRequest(
            version=muletrain.__version__,
            name=self.spec.name,
            stage=self.spec.stage,
            device=machine.kind,
            flops=machine.flops,
            memory=machine.offer.device,
            host_memory=machine.offer.host,
            addresses=tuple(network.addresses()),
            client=self.spec.client,
        )

    async def build_client(self, facts: RunFacts, stage: int, machine: Machine) -> Compute:
        """Build what computes parts of ``stage`` for its servers, with weights that these replace. Raises
        CapacityError."""
        check_stage(facts, stage, machine.offer, client=True)
        index = self.spec.fleet_index
        return await asyncio.to_thread(build_compute, facts.drawn(), stage, machine, index, updates=False)

    async def build(self, facts: RunFacts, stage: int, machine: Machine, part: Path | None) -> Compute:
        """Build the compute of ``stage``, with the state in the checkpoint ``part`` if there is one. Raises
        CapacityError if the stage does not fit, no matter who assigned it."""
        check_stage(facts, stage, machine.offer)
        folder = Path(self.spec.swap_folder or self.spec.folder)
        index = self.spec.fleet_index
        compute = await asyncio.to_thread(build_compute, facts, stage, machine, index, part, folder=folder)
        if part is not None:
            state = await compute.offload(safetensors.torch.load_file, part)
            state.pop(SKIPPED, None)  # a resumed run may have other settings, and counts anew
            await compute.load_state(state)
        return compute

    def prober(self, facts: RunFacts, network: Network, founder: PeerId, machine: Machine) -> Prober:
        """Make the ``Prober`` that measures when ``founder`` asks for it."""
        spec = self.spec
        emulated = "" if facts.config.fleet.profile is None or spec.fleet_index is None else spec.name
        identity = identity_of(self.ticket.run_id, emulated)

        def block() -> BlockFound:
            return block_of(facts.spec, facts.config.train.microbatch, machine, Path(spec.folder), identity)

        prober = Prober(network, self.links(facts, network), founder, self.clock, self.known.update, block)
        prober.open()
        return prober

    def close_compute(self) -> None:
        if self.compute is not None:
            self.compute.close()
            self.compute = None  # so that a next one finds the memory that it held free

    def links(self, facts: RunFacts, network: Network) -> Network:
        """``network``, shaped as the fleet profile says if there is one (peer i of the profile is the i-th name of the
        local fleet)."""
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
        """The name of a peer or client; of an unknown one its id."""
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
    if config.hub.clients and number != name and number.isdecimal():  # they come after the local fleet's peers
        return (config.fleet.local_peers + int(number)) % len(fleet.peers())
    return fleet.number(name)


def place_of(config: RunConfig, spec: WorkerSpec, note: Callable[..., None]) -> CheckpointStore:
    """Where this peer writes checkpoints: the run's shared place only if the owner of this machine named it, too,
    because opening it uses this machine's disk or credentials. Raises ConfigError if the owner named another place, or
    the founder cannot use it."""
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
