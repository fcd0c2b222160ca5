"""A client's process (strategy ``hub``), from admission to end: the client waits until the run has begun, chooses a
stage, and computes parts of microbatches for one server at a time (``runtime.pool.client``)."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from muletrain.compute.probe import chip
from muletrain.errors import AdmissionError, NetworkError
from muletrain.events import ClientBegan, ClientFinished
from muletrain.runs.join.messages import ASK_EVERY_S
from muletrain.runs.join.removal import AskMembers
from muletrain.runs.worker_files import LEFT
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.pool.client import Client, Roaming
from muletrain.runtime.pool.servers import Costs, NoServer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from muletrain.network.base import Network, PeerId
    from muletrain.runs.assemble import RunFacts
    from muletrain.runs.host import Host
    from muletrain.runs.join.client import JoinClient
    from muletrain.runs.join.messages import Welcome
    from muletrain.runs.measure.machine import Machine

CALL_S = 10.0
PATIENCE_S = 120.0
"""Seconds within which some server must answer once the run has begun."""


@dataclass(frozen=True)
class Help:
    """The context of a client in a run that has begun. ``stage``: the first to work for; None: the client chooses."""

    facts: RunFacts
    network: Network
    machine: Machine
    admitter: PeerId
    stage: int | None


async def admitted(
    host: Host,
    network: Network,
    talk: JoinClient,
    welcome: Welcome,
    facts: RunFacts,
    machine: Machine,
    tell: Callable[[tuple[str, ...]], None],
) -> Help:
    """Wait until the run has begun. ``tell`` gets the missing conditions now and then. Raises AdmissionError if the run
    that begins has a different configuration, and NetworkError when the founder goes away meanwhile."""
    if not welcome.running and (await talk.begin(None, tell)).config != facts.config_digest:
        raise AdmissionError("the run began with another configuration than was sent; join again")
    stage = host.spec.stage if welcome.running else welcome.stage
    return Help(facts, network, machine, talk.admitter, stage)


class Helping:
    """Works as a client until the run ends, or ``stop``."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._client: Client | None = None
        self.begun = False
        """Has the run that this client works for begun?"""
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Leave in order."""
        self._stopped.set()
        if self._client is not None:
            self._client.stop()

    async def run(self, help: Help) -> None:
        """Compute for the run. Raises MuletrainError if this is not possible; that no server is left is no error."""
        self.begun = True
        host, begin, tasks = self._host, self._host.clock.now(), Tasks()
        try:
            reason = await self._run(help, tasks)
        except NoServer as e:
            reason = f"{e}: the run has ended, or this machine is cut off from it"
        finally:
            await tasks.close()
            host.close_compute()
        host.log.emit(ClientFinished(seconds=host.clock.now() - begin, reason=reason))

    async def _run(self, help: Help, tasks: Tasks) -> str:
        """Returns the reason for the end. Raises NoServer, and MuletrainError."""
        facts, host = help.facts, self._host
        fits = [s for s, need in enumerate(facts.client_needs()) if need.fits(help.machine.offer)]
        servers, make = partial(self.servers, help), partial(self.client, help, tasks)
        costs, limit = Costs.of(facts.plan(), facts.moved_by_clients()), host.spec.bandwidth_bytes_per_s
        await Roaming(
            servers,
            make,
            help.network,
            host.clock,
            costs,
            fits,
            help.stage,
            random.Random(host.spec.name),
            byte_s=0.0 if limit is None else 1 / limit,
            stays=host.spec.stage is not None,
        ).run()
        return LEFT if self._stopped.is_set() else "the run has ended"

    async def client(self, help: Help, tasks: Tasks, stage: int, servers: Mapping[int, Sequence[PeerId]]) -> Client:
        """Make the client of a ``stage``. Raises MuletrainError."""
        host, facts, machine = self._host, help.facts, help.machine
        plan, links = facts.plan(), host.links(facts, help.network)
        host.close_compute()
        host.compute = compute = await host.build_client(facts, stage, machine)
        self._client = client = Client(
            links,
            host.clock,
            tasks,
            compute,
            plan,
            facts.config_digest,
            host.spec.name,
            tuple(servers.get(stage) or (p for found in servers.values() for p in found)),
            others=[p for found in servers.values() for p in found],
            blocks=host.blocks,
            over=self._client is not None and self._client.over,  # heard while the compute was made
        )
        host.log.emit(
            ClientBegan(
                peer_id=help.network.peer_id,
                name=host.spec.name,
                stage=stage,
                device=str(machine.device),
                precision=machine.precision.value,
                params=compute.n_params,
                threads=host.spec.threads,
                chip=chip(machine.device),
                swapped=compute.parts if compute.parts > 1 else 0,
            )
        )
        if self._stopped.is_set():
            client.stop()
        return client

    async def servers(self, help: Help) -> dict[int, tuple[PeerId, ...]]:
        """Ask for the servers of each stage. Raises NoServer."""
        host, network = self._host, help.network
        ask, until = [help.admitter], host.clock.now() + PATIENCE_S
        problem = "no server is known"
        while host.clock.now() < until:
            for peer in ask:
                try:
                    answer = await AskMembers().ask(network, peer, timeout_s=CALL_S)
                except NetworkError as e:
                    problem = str(e)
                    continue
                host.known.update({m.id: m.name for m in answer.members})
                found: dict[int, list[PeerId]] = {}
                for m in answer.members:
                    if m.stage is not None:
                        found.setdefault(m.stage, []).append(m.id)
                if found:
                    return {s: tuple(sorted(peers)) for s, peers in sorted(found.items())}
            ask = [help.admitter, *(p for p in host.known if p != help.admitter)]
            await host.clock.sleep(ASK_EVERY_S)
        raise NoServer(problem)
