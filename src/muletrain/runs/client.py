"""A client's process (strategy ``hub``), from its admission to its end: it waits until the run has begun, chooses a stage,
and computes parts of microbatches for one server of it at a time (``runtime.pool.client``)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.compute.probe import chip
from muletrain.errors import AdmissionError, MuletrainError, NetworkError, Refused
from muletrain.events import ClientBegan, ClientFinished
from muletrain.runs.join.removal import Members
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.pool.client import Client, NoServer
from muletrain.runtime.pool.messages import Enlisted, GetState
from muletrain.strategies.hub import stage_to_help

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.network.base import Network, PeerId
    from muletrain.runs.assemble import RunFacts
    from muletrain.runs.host import Host
    from muletrain.runs.join.client import JoinClient
    from muletrain.runs.join.messages import Welcome
    from muletrain.runs.measure.machine import Machine

ASK_EVERY_S = 1.0
"""Seconds between two questions whether the run has begun, or who serves."""
ASKED = 4
"""Servers of each stage that are asked how fast their clients are."""
UNMEASURED = 1e-9
"""Speed of a client at least, so that one counts before it is measured."""
CALL_S = 10.0
PATIENCE_S = 120.0
"""Seconds within which some server must answer once the run has begun."""
LEFT = "left in order"


@dataclass(frozen=True)
class Help:
    """What a client needs to work for a run that has begun. ``stage``: the one that it works for; None: it chooses."""

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
    """Wait until the run has begun. ``tell`` hears now and then what it waits for. Raises AdmissionError if another run
    begins than was said, and NetworkError when the founder goes away meanwhile."""
    while not welcome.running:
        try:
            genesis = await talk.genesis()
        except Refused:
            tell(await talk.missing())
            await host.clock.sleep(ASK_EVERY_S)
            continue
        if genesis.config != facts.config_digest:
            raise AdmissionError("the run began with another configuration than was sent; join again")
        break
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
        """Returns why the work ended. Raises NoServer, and MuletrainError."""
        host, facts, machine = self._host, help.facts, help.machine
        plan, links = facts.plan(), host.links(facts, help.network)
        servers = await self._servers(help)
        stage = help.stage
        if stage is None:
            speeds = [await _speed(help.network, servers.get(s, ())) for s in range(plan.stages)]
            fits = [s for s, need in enumerate(facts.client_needs()) if need.fits(machine.offer)]
            stage = stage_to_help(plan.work, speeds, fits)
            assert stage is not None  # the admitter has checked our memory, and so have we
        host.compute = compute = await host.build_client(facts, stage, machine)
        self._client = client = Client(
            links,
            host.clock,
            tasks,
            compute,
            plan,
            facts.config_digest,
            host.spec.name,
            servers.get(stage) or tuple(p for found in servers.values() for p in found),
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
            )
        )
        if self._stopped.is_set():
            return LEFT
        await client.run()
        return LEFT if self._stopped.is_set() else "the run has ended"

    async def _servers(self, help: Help) -> dict[int, tuple[PeerId, ...]]:
        """Ask who serves which stage. Raises NoServer."""
        host, network = self._host, help.network
        ask, until = [help.admitter], host.clock.now() + PATIENCE_S
        problem = "no server is known"
        while host.clock.now() < until:
            for peer in ask:
                try:
                    answer = Members.unpack(await network.call(peer, Members.KIND, b"", timeout_s=CALL_S))
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


async def _speed(network: Network, servers: tuple[PeerId, ...]) -> float:
    """How fast the clients of a stage are together, from some of its ``servers``."""

    async def ask(server: PeerId) -> float | None:
        try:
            answer = await network.call(server, GetState.KIND, GetState().pack(), timeout_s=CALL_S)
        except MuletrainError:
            return None
        state = Enlisted.unpack(answer)
        return state.speed + UNMEASURED * state.clients

    found = [speed for speed in await asyncio.gather(*map(ask, servers[:ASKED])) if speed is not None]
    return sum(found) / len(found) * len(servers) if found else 0.0
