"""``muletrain run``: a local fleet from a configuration to a final report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.cli.actions.opening import How, names_data, opened, ready, save_config, tell_of
from muletrain.cli.actions.planned import check_many, clients_of, indices_of, names_of
from muletrain.cli.actions.session import Session
from muletrain.errors import ConfigError
from muletrain.events import EventTail
from muletrain.policy.chaos import Bounds, draw, parse
from muletrain.runs.alone import Alone
from muletrain.runs.chaos import Injector
from muletrain.runs.fleet import LocalFleet, threads_per_peer
from muletrain.runs.join.ticket import Ticket
from muletrain.runs.spec import WorkerSpec
from muletrain.timeline import check_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from muletrain.config.schema import RunConfig
    from muletrain.policy.chaos import Fault


def run_local(
    path: Path | None,
    overrides: Sequence[str],
    *,
    json: bool,
    resume: Path | None = None,
    chaos: str | None = None,
    seed: int | None = None,
    trace: Path | None = None,
    plan: Path | None = None,
    strategy: str | None = None,
) -> None:
    """Train with a local fleet and print the report. ``plan``: a plan file, of which ``strategy`` is used (default: the
    recommended one); without a plan, ``strategy`` is the run's. ``chaos``: faults to inject (``policy/chaos.py``).
    ``trace``: where to write a timeline. Raises MuletrainError before anything starts if the run is not possible."""
    if trace is not None:
        check_trace(trace)
        overrides = [*overrides, "fleet.trace=true"]
    if chaos is None and seed is not None:
        raise ConfigError("--seed draws the faults of --chaos; the seed of the run is --set train.seed=N")
    with opened(path, overrides, "run", resume, plan, strategy) as (folder, config):
        config = config.local()
        check_many(config)
        faults = _chaos_plan(chaos, seed or 0, config) if chaos is not None else ()
        how = How(resumed=resume is not None, means_data=names_data(path, overrides))
        try:
            _run_local(folder, config, how, json=json, plan=faults, seed=seed or 0)
        finally:
            if trace is not None:
                write_trace(trace, EventTail(folder).poll())


def _chaos_plan(chaos: str, seed: int, config: RunConfig) -> tuple[Fault, ...]:
    bounds = Bounds(tuple(names_of(config)), config.fleet.stages, config.train.steps, tuple(clients_of(config)))
    return draw(seed, bounds) if chaos.strip() == "random" else parse(chaos, bounds)


def _run_local(folder: Path, config: RunConfig, how: How, *, json: bool, plan: tuple[Fault, ...], seed: int) -> None:
    servers, clients = names_of(config), clients_of(config)
    names = servers + clients
    threads = threads_per_peer(config.compute.threads, len(names))
    alone = len(names) == 1 and not plan  # else a newcomer may join
    with Alone(folder, threads) if alone else LocalFleet(folder, threads) as fleet:
        fleet.spawn(names)  # the processes import while we tokenise
        room = _Room.of(config, servers, clients, alone=alone)
        prepared, given, checkpoint, first_step = ready(folder, config, how, room.check, reads=True)
        config = prepared.config
        session = Session(folder, fleet, json=json, clients=clients, begun=lambda: save_config(folder, given))
        session.chaos = Injector(plan, seed, fleet, folder, servers, clients) if plan else None
        try:
            with session.interruptible():
                with session.console:
                    tell_of(prepared, folder, first_step)
                    _begin(session, config, room.workers(config, folder, threads), checkpoint, alone=alone)
                    session.watch(first=servers[0], stages=config.fleet.stages)
                session.report()
        finally:
            session.close()
        session.exit()


@dataclass(frozen=True)
class _Room:
    """Resources for the processes of the fleet, measured before any process started."""

    servers: list[str]
    clients: list[str]
    devices: list[str]
    """The device of each."""
    host: int
    """Each one's share of the machine's memory [bytes]."""
    alone: bool

    @classmethod
    def of(cls, config: RunConfig, servers: list[str], clients: list[str], *, alone: bool) -> _Room:
        from muletrain.runs.measure.machine import dealt, free_memory_of_machine, own_devices

        processes = len(servers) + len(clients)
        devices = dealt(own_devices(config.compute.device), processes)
        return cls(servers, clients, devices, free_memory_of_machine(processes), alone)

    def check(self, config: RunConfig) -> None:
        """Raises CapacityError if a stage fits none of the processes."""
        from muletrain.runs.assemble import RunFacts
        from muletrain.runs.measure.machine import check_local

        needs = RunFacts.of(config, alone=self.alone).needs()
        check_local(needs, self.devices[: len(self.servers)], config.compute.memory, self.host)

    def workers(self, config: RunConfig, folder: Path, threads: int) -> list[WorkerSpec]:
        """The work of each process, without the ticket."""
        names = self.servers + self.clients
        return [
            WorkerSpec(
                role="join",
                client=name in self.clients,
                name=name,
                ticket="",
                folder=str(folder),
                threads=threads,
                data="config",
                place=config.checkpoint.place,
                device=device,
                sharing=self.devices.count(device),
                precision=config.compute.precision.value,
                memory_gib=config.compute.memory,
                swap_folder=config.swap.folder,
                host_memory=self.host,
                listen=config.network.listen,
                fleet_index=index,
            )
            for index, name, device in zip(indices_of(config), names, self.devices, strict=True)
        ]


def _begin(
    session: Session, config: RunConfig, workers: list[WorkerSpec], checkpoint: Path | None, *, alone: bool
) -> None:
    """Assign work to every process: the first founds the run, the rest join with a ticket."""
    founder = {
        "role": "found",
        "ticket": str(Ticket.new_run(session.folder)),
        "config": config.model_dump_json(by_alias=True),
        "port": config.network.port,
        "announce": config.network.announce,
        "resume": None if checkpoint is None else str(checkpoint),
        "alone": alone,
    }
    if session.chaos is not None:
        workers = [worker.model_copy(update={"faults": True}) for worker in workers]
    session.fleet.begin(workers[0].model_copy(update=founder))
    if alone:
        return
    ticket = str(session.wait_for_ticket(workers[0].name))
    for worker in workers[1:]:
        session.fleet.begin(worker.model_copy(update={"ticket": ticket}))
    if session.chaos is not None:
        newest = next(worker for worker in reversed(workers) if not worker.client)
        session.chaos.newcomer = newest.model_copy(update={"ticket": ticket})
