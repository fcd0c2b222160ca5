"""Protocol fidelity: production peers with all their messages, on a virtual clock.

Only compute and tensor sizes are simulated: computing takes the cost model's time, tensors are tiny, and links take the
time of real tensors. Wiring, admission, windows, sealing, averaging, records, joining and moving are production code.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections import defaultdict
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from muletrain.compute.paced import PacedCompute
from muletrain.compute.threads import InlineExecutor
from muletrain.errors import Expelled, MuletrainError
from muletrain.events import StepApplied, StepDone, SteppedBack
from muletrain.network.memory import MemoryHub
from muletrain.network.roads import Road
from muletrain.planning.devices import find_device
from muletrain.runtime.checkpoint.checkpointing import Book
from muletrain.runtime.checkpoint.store import Folder
from muletrain.runtime.core.disk import Disk
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Genesis, Roster
from muletrain.runtime.peer.peer import Peer
from muletrain.runtime.peer.reporting import PeerHost
from muletrain.runtime.peer.service import Service
from muletrain.runtime.pool.client import Client, Roaming
from muletrain.runtime.pool.servers import Costs
from muletrain.sim.fleet.accounts import always
from muletrain.sim.fleet.flow import Churn
from muletrain.sim.fleet.hollow import HollowCompute, HollowTokens, hollow_plan
from muletrain.sim.fleet.links import FleetLinks
from muletrain.sim.fleet.tally import Tally
from muletrain.sim.host import VirtualHost
from muletrain.sim.loop import run_virtually, seldom_collected
from muletrain.sim.setting import fetch_s, mortal, seat, seated
from muletrain.sim.steps.endings import exchange_s
from muletrain.strategies.swarm import SWARM

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from muletrain.config.schema import RunConfig
    from muletrain.events import Event
    from muletrain.network.memory import MemoryNetwork
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.recovery.messages import StepBack
    from muletrain.sim.fleet.accounts import GoesOn, Outcome
    from muletrain.sim.fleet.flow import Weather
    from muletrain.sim.fleet.planned import Planned
    from muletrain.sim.setting import Kind, Setting


class _Machine(PeerHost):
    """A machine of one kind of the fleet."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def fits(self, stage: int) -> bool:
        return stage in self._kind.fits


class Actors(VirtualHost):
    """The peers of one setting, played once for ``horizon_s``."""

    def __init__(
        self,
        setting: Setting,
        config: RunConfig,
        weather: Weather,
        horizon_s: float,
        *,
        trainers: int,
        seed: int,
        watch: Callable[[Event], None] | None = None,
        planned: Planned | None = None,
    ) -> None:
        """``watch`` receives every event. ``planned``: default: machines are seated as newcomers."""
        self._watch, self._strategy = watch, SWARM if planned is None else planned.strategy
        self._setting, self._config, self._weather = setting, config, weather.on(setting.exposed)
        self._tally = Tally(setting)
        self._draw, self._horizon_s = random.Random(f"actors/{seed}"), horizon_s
        self.mortal = mortal(setting)
        self._rosters: dict[str, Roster] = {}
        """Rosters of the present peers."""
        self._clients: dict[str, int] = {}
        """Stages of the present clients."""
        self._kind_of: dict[str, int] = {}
        self._served: dict[str, int] = {}
        """Present or last stage of each peer and client, departed ones included."""
        super().__init__(
            MemoryHub(FleetLinks(setting, self._kind_of, self._served, self._clients), hands_over=True), []
        )
        stage_of = (
            {
                self._name(k): s
                for s, counts in enumerate(seated(setting))
                for k, n in enumerate(counts)
                for _ in range(n)
            }
            if planned is None
            else planned.stages
        )
        self._kind_of.update({} if planned is None else planned.kinds)
        rank = self._rank if planned is None else lambda p: (self._rank(p)[0], [*stage_of].index(p))  # as a founder
        self._first_clients = {} if planned is None else planned.clients
        self._training = set(sorted(stage_of, key=rank)[:trainers])
        members = tuple(self._member(name, stage) for name, stage in stage_of.items())
        self.genesis = Genesis(
            run_id="fleet",
            config=bytes(32),
            data=bytes(32),
            stages=len(setting.cut),
            members=members,
            coordinator=min(stage_of, key=rank),
            first_step=0,
        )

    def _name(self, kind: int) -> str:
        name = f"{self._setting.kinds[kind].name}-{len(self._kind_of)}"
        self._kind_of[name] = kind
        return name

    def _rank(self, name: str) -> tuple[bool, int, int]:
        """Choose as trainers machines that stay, if there are any, spread over the kinds."""
        kind = self._kind_of[name]
        before = sum(other == kind for other in list(self._kind_of.values())[: list(self._kind_of).index(name)])
        return not self._setting.kinds[kind].reliable, before, kind

    def _member(self, name: str, stage: int) -> Member:
        trains = name in self._training or not any(kind.reliable for kind in self._setting.kinds)
        device = find_device(self._setting.kinds[self._kind_of[name]].device)
        return Member(
            id=name,
            name=name,
            stage=stage,
            trainer=trains,
            flops=int(device.flops) if device else 0,
            place=Folder(Path(), keep=1, name="shared").name,
        )

    def play(self, goes_on: GoesOn = always) -> Outcome:
        """Play to the end. Raises MuletrainError if the software fails."""
        problems, self._over, self._whole = self._problems, asyncio.Event(), True

        def look_up() -> None:
            if not goes_on(self.clock.now(), self._tally.steps):
                self._whole = False
                self._over.set()

        with tempfile.TemporaryDirectory(prefix="mule-fleet-") as folder:
            self._folder = Path(folder)
            with seldom_collected():
                end_s = run_virtually(self._run(), math.inf, problems, look_up)
        if problems:
            raise MuletrainError(f"the virtual fleet broke: {problems[0]}")
        return self._tally.outcome(end_s, partial=not self._whole)

    async def _run(self) -> float:
        """Virtual time of the end [s]."""
        for member in self.genesis.members:
            self._begin(member.id, Roster(self.genesis, member.id), joining=False)
        for name, stage in self._first_clients.items():
            self._help(name, stage)
        self._changed()
        loop = asyncio.get_running_loop()
        self._churn = Churn(self._weather, loop, self._draw, self)
        self._churn.begin()
        loop.call_later(self._horizon_s, self._over.set)
        await self._over.wait()
        end_s = self.clock.now()
        self._changed()
        for name, task in self.tasks.items():
            self.thaw(name)  # a frozen machine would not hear of the end
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        return end_s

    # Churn ------------------------------------------------------------------------------------------------------------

    @property
    def may_leave(self) -> int:
        return len(self._those_that_may_go())

    def _those_that_may_go(self) -> list[str]:
        return [name for name in (*self._rosters, *self._clients) if self._kind_of[name] in self.mortal]

    def lose(self) -> int | None:
        """Kill a random peer or client as SIGKILL does; return its kind."""
        able = self._those_that_may_go()
        if not able or self._over.is_set():
            return None
        name = self._draw.choice(able)
        self.kill(name)
        self._remove(name)
        self._changed()
        self._tally.happened("left")
        return self._kind_of[name]

    def come(self, kind: int) -> None:
        if self.clock.now() >= self._horizon_s:
            return
        name = self._name(kind)
        if self._strategy.pooled:
            self._help(name)
        else:
            (stage,) = seat(self._setting, [kind], self._serving())
            contacts = next((r.contacts() for r in self._rosters.values()), ())
            self._begin(name, Roster(self.genesis, self._member(name, stage), contacts), joining=True)
        self._tally.happened("joined")
        self._changed()
        self._churn.redraw()

    def _serving(self, clients: Mapping[str, int] = MappingProxyType({})) -> list[list[int]]:
        """Members, and ``clients``, by stage and kind."""
        serving = [[0] * len(self._setting.kinds) for _ in self._setting.cut]
        for name, stage in (*((name, r.own.stage) for name, r in self._rosters.items()), *clients.items()):
            serving[stage][self._kind_of[name]] += 1
        return serving

    def _changed(self) -> None:
        self._tally.present(self.clock.now(), self._serving(self._clients))

    # Peers ------------------------------------------------------------------------------------------------------------

    def _begin(self, name: str, roster: Roster, *, joining: bool) -> None:
        self._rosters[name] = roster
        self._served[name] = roster.own.stage
        self.begin(name, self._peer(name, self.arrive(name), roster, joining=joining))

    def arrive(self, name: str) -> MemoryNetwork:
        own = self._setting.kinds[self._kind_of[name]]
        self.hub.roads.lay(name, Road(own.up_bytes_per_s, own.down_bytes_per_s, own.queue_s))
        return super().arrive(name)

    async def _peer(self, name: str, network: MemoryNetwork, roster: Roster, *, joining: bool) -> None:
        k = self._kind_of[name]
        kind, place = self._setting.kinds[k], Folder(self._folder, keep=1, name="shared")
        place.disk = Disk(InlineExecutor())
        book = Book(place)

        async def make(joins: bool, back: StepBack | None) -> Peer:
            stage = roster.own.stage
            if joins:
                if self._served.get(name, stage) != stage:
                    self._tally.happened("moved")
                self._served[name] = stage
                self._changed()
                await self.clock.sleep(fetch_s(self._setting, k, stage, self._serving()[stage]))
            ending_s = self._setting.ending_s(stage, (k,)) + exchange_s(self._setting, self._serving(), stage)
            delayed, pooled = self.plan.delayed, self.plan.strategy.pooled
            hollow = HollowCompute(stage, self.plan.stages, self.clock, ending_s, delayed=delayed, pooled=pooled)
            compute = PacedCompute(hollow, self.clock, kind.forward_s[stage], kind.backward_s[stage])
            note, tasks, draw = partial(self.note, name), Tasks(InlineExecutor()), random.Random(name)
            ctx = Context.at_stage(network, self.clock, compute, roster, self.plan, note, tasks, draw)
            source = HollowTokens(self.plan.sequences)
            return Peer(ctx, host=_Machine(kind), source=source, book=book, joining=joins, back=back)

        await self.live(name, network, Service(make, joining=joining).run())

    def gave_up(self, name: str, error: MuletrainError) -> None:
        there = self._remove(name)
        if isinstance(error, Expelled):
            self._tally.happened("expelled")
        elif there:  # a killed peer was removed before
            self._tally.gave_up(self.clock.now(), name, str(error))

    def _remove(self, name: str) -> bool:
        """Returns whether the machine was present."""
        return (self._rosters.pop(name, None), self._clients.pop(name, None)) != (None, None)

    # Clients of a hub -------------------------------------------------------------------------------------------------

    def _help(self, name: str, stage: int | None = None) -> None:
        """Start a client, which chooses its stage unless ``stage`` is planned."""
        if stage is not None:
            self._clients[name] = self._served[name] = stage
        self.begin(name, self._client(name, stage, self.arrive(name)))

    async def _client(self, name: str, stage: int | None, network: MemoryNetwork) -> None:
        kind, tasks = self._setting.kinds[self._kind_of[name]], Tasks(InlineExecutor())
        moved = [s.weight_bytes + s.averaged_bytes for s in self._setting.cost.stages]
        costs = Costs.of(self.plan, moved)

        async def servers() -> dict[int, list[str]]:
            found = defaultdict[int, list[str]](list)
            for server, roster in sorted(self._rosters.items()):
                found[roster.own.stage].append(server)
            return found

        async def make(stage: int, servers: Mapping[int, Sequence[str]]) -> Client:
            if self._clients.get(name, stage) != stage:
                self._tally.happened("moved")
            self._clients[name] = self._served[name] = stage
            self._changed()
            hollow = HollowCompute(stage, self.plan.stages, self.clock, 0.0, delayed=self.plan.delayed)
            compute = PacedCompute(hollow, self.clock, kind.forward_s[stage], kind.backward_s[stage])
            there = tuple(servers.get(stage, ()))
            return Client(network, self.clock, tasks, compute, self.plan, self.genesis.config, name, there)

        roaming = Roaming(servers, make, network, self.clock, costs, kind.fits, stage, random.Random(name))
        await self.live(name, network, roaming.run(), tasks)

    @cached_property
    def plan(self) -> Plan:
        return hollow_plan(self._setting, self._config, self._strategy, trace=self._watch is not None)

    def note(self, name: str, event: Event) -> None:
        now, kind = self.clock.now(), self._kind_of[name]
        if self._watch is not None:
            self._watch(replace(event, t=now, peer=name))
        if isinstance(event, StepDone):
            self._tally.done(now, event.step)
        elif isinstance(event, SteppedBack):
            self._tally.step_back(event.step, event.to)
        elif isinstance(event, StepApplied):
            self._tally.applied(kind, event, [(self._kind_of[p], classes) for p, classes in event.sent.items()])
