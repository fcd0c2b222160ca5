"""Predict the time of a hub's step with our servers and clients (``runtime.pool``).

A server and its clients are a *crew*: for the rest of the run a crew is one peer of its stage, as fast as its machines
together, so the step's microbatches are played as microbatches of strategy ``swarm`` (``sim.steps``) with a crew for
each peer. Three costs exist only in a hub: clients take the weights before they compute, every part goes to a client
and back, and servers collect the clients' accumulators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from muletrain.config.fleet_file import Link
from muletrain.planning.splits import parted
from muletrain.policy.pool import SLOWEST
from muletrain.sim.fleet.rates import TRAINERS, Rates
from muletrain.sim.plan.question import Bytes
from muletrain.sim.steps.endings import stage_ended_s
from muletrain.sim.steps.steps import Cast, play
from muletrain.sim.steps.wires import FREE
from muletrain.strategies.swarm import SWARM

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from muletrain.config.plan_file import Split
    from muletrain.sim.setting import Kind, Setting
    from muletrain.sim.steps.steps import Took

BUBBLE = "waiting for the first and the last microbatches of a step (less with a larger batch or fewer stages)"
"""Limit of a step whose machines wait at the start and at the end."""
ROOM = 2
"""Parts that a client takes at once (``runtime.pool.client``)."""
QUEUED = 8
"""Longest queue at a saturated link [messages], roughly: microbatches under way are limited (trainers' windows)."""
HALVED = 12
"""Halvings until the clients' rate is known."""


class StageMachines(NamedTuple):
    """Kinds of the servers and of the clients of one stage."""

    servers: tuple[int, ...]
    clients: tuple[int, ...]


class Crew(NamedTuple):
    """Kinds of a server and of its clients."""

    stage: int
    server: int
    clients: tuple[int, ...]


@dataclass(frozen=True)
class HubStep:
    """A step of the hub with ``stages`` in a setting. ``trainers``: servers that build microbatches. ``delayed``:
    accumulators are collected and averaged during the next step (delayed parameter updates)."""

    setting: Setting
    stages: tuple[StageMachines, ...]
    trainers: int = TRAINERS
    delayed: bool = False

    @cached_property
    def crews(self) -> tuple[Crew, ...]:
        """Crews; each client, fastest first, joins the slowest group of clients."""
        found = []
        for s, (servers, clients) in enumerate(self.stages):
            crews: list[list[int]] = [[] for _ in servers]
            for k in sorted(clients, key=lambda k: self.setting.kinds[k].service_s(s)):
                min(crews, key=lambda crew: sum(1 / self.setting.kinds[c].service_s(s) for c in crew)).append(k)
            found += [Crew(s, server, tuple(crew)) for server, crew in zip(servers, crews, strict=True)]
        return tuple(found)

    # Parts of a step --------------------------------------------------------------------------------------------------

    def servers_of(self, stage: int) -> list[int]:
        """Number of servers, by kind."""
        return [self.stages[stage].servers.count(k) for k in range(len(self.setting.kinds))]

    @cached_property
    def roughly_s(self) -> float:
        """Estimate of a step by rates [s]."""
        of_crews = self._of_crews(linked=True)
        serving = [tuple(int(crew.stage == s) for crew in self.crews) for s in range(len(self.stages))]
        step_s = (
            of_crews.cost.microbatches
            / Rates(of_crews, trainers=self.trainers, delayed=self.delayed).of(serving).throughput
        )
        gathered_s = max(self._gathered_s(s) for s in range(len(self.stages)))
        return self._waited_s + (max(step_s, gathered_s) if self.delayed else step_s + gathered_s)

    @cached_property
    def split(self) -> Split:
        """The parts of the step, played."""
        computed_s = self._computed_s(range(len(self.stages)), linked=False)
        free_s = max(computed_s, self._played(linked=False).computing_s)
        linked = self._played(linked=True)
        linked_s = max(free_s, linked.computing_s)
        ended_s = linked.step_s - linked.computing_s + max(self._gathered_s(s) for s in range(len(self.stages)))
        step_s = linked_s + ended_s
        if self.delayed:
            step_s = max(linked_s, ended_s, self._played(linked=True, delayed=True).step_s)
        return parted(computed_s, free_s, linked_s, self._waited_s + step_s)

    def _computed_s(self, stages: Sequence[int], *, linked: bool = True) -> float:
        return max(self.setting.cost.microbatches / sum(map(sum, self._rates_at(s, linked=linked))) for s in stages)

    @property
    def _waited_s(self) -> float:
        """Additional time of the slowest stage because clients first take the weights [s]; with delayed updates,
        clients take the weights during the previous step, right after the servers' update."""
        later_s, computed_s = [], self._computed_s(range(len(self.stages)))
        for s in range(len(self.stages)):
            rates = self._rates_at(s)
            servers, clients = (sum(rate[i] for rate in rates) for i in (0, 1))
            alone_s = self.setting.cost.microbatches / servers if servers else math.inf
            beside_s = max(0.0, computed_s - self._gathered_s(s) - self._averaged_s(s)) if self.delayed else 0.0
            wait_s = min(max(0.0, self._weights_s(s) - beside_s), alone_s)
            later_s.append(self._computed_s([s]) + clients * wait_s / (servers + clients))
        return max(later_s) - computed_s

    # Crews ------------------------------------------------------------------------------------------------------------

    def _rates_at(self, stage: int, *, linked: bool = True) -> list[tuple[float, float]]:
        return [self._rates(crew, linked=linked) for crew in self.crews if crew.stage == stage]

    def _rates(self, crew: Crew, *, linked: bool = True) -> tuple[float, float]:
        """Microbatches/s of a server, and of its clients together. A client computes one part during the transfer of
        the next, and waits if the transfer takes longer; transfers take no time unless ``linked``."""
        if (crew, linked) in self._known:
            return self._known[crew, linked]
        s, kinds = crew.stage, self.setting.kinds
        server, clients = 1 / kinds[crew.server].service_s(s), [1 / kinds[k].service_s(s) for k in crew.clients]
        if server < SLOWEST * sum(clients) / max(1, len(clients)):
            server = 0.0
        low = high = sum(clients)
        if linked and clients:
            part_s, ways_s = 1 / (server + high), [self._way_s(crew, k) for k in crew.clients]

            def slowed(by_clients: float) -> float:
                """The clients' rate while their parts wait as if it were ``by_clients``."""
                queued_s = self._queued_s(crew, server + by_clients)
                ways = zip(clients, ways_s, strict=True)
                return sum(rate / max(1.0, (1 + (way_s + queued_s) / part_s) / ROOM) for rate, way_s in ways)

            low = slowed(high)
            for _ in range(HALVED if low < high else 0):  # the faster, the longer they wait
                rate = (low + high) / 2
                low, high = (rate, high) if slowed(rate) >= rate else (low, rate)
        self._known[crew, linked] = server, high
        return server, high

    @cached_property
    def _known(self) -> dict[tuple[Crew, bool], tuple[float, float]]:
        return {}

    def _way_s(self, crew: Crew, client: int) -> float:
        """Seconds on free links of one client's parts of a microbatch."""
        s, kinds, links = crew.stage, self.setting.kinds, self.setting.links
        share = 1 / (len(crew.clients) + 1)
        out, back = self.inner_bytes(s)
        there, home = links[crew.server][client], links[client][crew.server]
        sent_s = out * share / min(there.bandwidth_bytes_per_s, kinds[client].down_bytes_per_s)
        back_s = back * share / min(home.bandwidth_bytes_per_s, kinds[client].up_bytes_per_s)
        return self._passes(s) * (there.delay_s + home.delay_s) + sent_s + back_s

    def _queued_s(self, crew: Crew, rate: float) -> float:
        """Seconds that a client's parts of a microbatch wait at the server's own links, there and back, behind other
        parts and the messages between stages, while the crew computes microbatches at ``rate``: M/G/1 queues with the
        mean waiting time of Pollaczek and Khinchine."""
        s, own, cost, last = crew.stage, self.setting.kinds[crew.server], self.setting.cost, len(self.stages) - 1
        before, behind = s > 0, s < last
        onward = cost.forward_bytes[s + 1] if behind else 0.0, cost.backward_bytes[s] if before else 0.0
        coming = cost.forward_bytes[s] if before else 0.0, cost.backward_bytes[s + 1] if behind else 0.0
        count = self._passes(s) * len(crew.clients)
        out, back = (nbytes / self._passes(s) / (1 + len(crew.clients)) for nbytes in self.inner_bytes(s))
        waits_s = 0.0
        for part, between, link in ((out, onward, own.up_bytes_per_s), (back, coming, own.down_bytes_per_s)):
            busy = rate * (count * part + sum(between)) / link
            squares = rate * (count * part**2 + sum(nbytes**2 for nbytes in between)) / link**2
            waits_s += squares / (2 * max(1 / QUEUED, 1 - busy))
        return self._passes(s) * waits_s

    def _passes(self, s: int) -> int:
        """Passes of a microbatch through stage ``s`` that travel to clients."""
        return 1 if s == len(self.stages) - 1 else 2

    def inner_bytes(self, s: int) -> tuple[float, float]:
        """Bytes of a client-computed microbatch from servers to clients, and back."""
        cost, last = self.setting.cost, len(self.stages) - 1
        inputs = cost.backward_bytes[s] if s else cost.ids_bytes
        outputs = cost.ids_bytes if s == last else cost.backward_bytes[s + 1]
        return inputs + outputs, (cost.backward_bytes[s] if s else 0) + (0 if s == last else outputs)

    def _played(self, *, linked: bool, delayed: bool = False) -> Took:
        """A step of crews."""
        peers = tuple((crew.stage, n) for n, crew in enumerate(self.crews))
        trainers = range(min(self.trainers, len(self.crews)))
        return play(self._of_crews(linked=linked), Cast(peers, tuple(trainers), SWARM), delayed=delayed)

    def _of_crews(self, *, linked: bool) -> Setting:
        """The setting with a kind for each crew."""
        kinds = [self._as_kind(crew, linked=linked) for crew in self.crews]
        links = [[self._link(a, b, linked=linked) for b in self.crews] for a in self.crews]
        return replace(self.setting, kinds=tuple(kinds), links=tuple(map(tuple, links)))

    def _as_kind(self, crew: Crew, *, linked: bool) -> Kind:
        """Returns a crew as one machine, limited by the server's links for the crew's own parts and for the traffic
        with other stages."""
        own, s, cost = self.setting.kinds[crew.server], crew.stage, self.setting.cost
        server, clients = self._rates(crew, linked=linked)
        rate, last = server + clients, s == len(self.stages) - 1
        if linked:
            out, back = (nbytes * clients / rate for nbytes in self.inner_bytes(s))
            up = out + cost.backward_bytes[s] + (0 if last else cost.forward_bytes[s + 1])
            down = back + cost.forward_bytes[s] + (0 if last else cost.backward_bytes[s + 1])
            rate = min(rate, own.up_bytes_per_s / up if up else rate, own.down_bytes_per_s / down)
        faster = own.service_s(s) * rate
        times_s = (tuple(seconds / faster for seconds in each) for each in (own.forward_s, own.backward_s))
        if not linked:
            own = replace(own, up_bytes_per_s=math.inf, down_bytes_per_s=math.inf)
        return replace(own, forward_s=next(times_s), backward_s=next(times_s))

    def _link(self, a: Crew, b: Crew, *, linked: bool) -> Link:
        """The link between two crews. A pass through a crew takes longer than its share of the crew's time: parts
        travel, and a microbatch with fewer sequences than the crew has workers occupies only some of the workers."""
        path = self.setting.links[a.server][b.server] if linked else FREE
        if a.stage == b.stage or not b.clients:
            return path
        server, clients = self._rates(b, linked=linked)
        thin = max(1.0, (1 + len(b.clients)) / self.setting.cost.sequences)
        way_s = 0.0
        if linked:
            way_s = max(self._way_s(b, k) for k in b.clients) + self._queued_s(b, server + clients)
        return Link(
            path.delay_s + ((thin - 1) / (server + clients) + way_s) / self._passes(b.stage), path.bandwidth_bytes_per_s
        )

    # Weights and gradients ----------------------------------------------------------------------------------------------

    def _weights_s(self, s: int) -> float:
        """Seconds until the clients have the weights."""
        return self._moved_s(s, self.setting.cost.stages[s].weight_bytes, to_clients=True)

    def _gathered_s(self, s: int) -> float:
        """Seconds until the servers have the clients' accumulators."""
        return self._moved_s(s, self.setting.cost.stages[s].averaged_bytes, to_clients=False)

    def _moved_s(self, s: int, nbytes: float, *, to_clients: bool) -> float:
        kinds, links, (servers, clients) = self.setting.kinds, self.setting.links, self.stages[s]
        if not clients:
            return 0.0

        def rate(k: int, others: tuple[int, ...], *, up: bool) -> float:
            """Bytes/s from ``k`` to all others together, or from them to ``k``, by its own link and by the paths."""
            paths = sum((links[k][o] if up else links[o][k]).bandwidth_bytes_per_s for o in others)
            return min(kinds[k].up_bytes_per_s if up else kinds[k].down_bytes_per_s, paths)

        server_s = len(clients) * nbytes / sum(rate(k, clients, up=to_clients) for k in servers)
        client_s = max(nbytes / rate(k, servers, up=not to_clients) for k in clients)
        return max(server_s, client_s) + 2 * max(links[a][b].delay_s for a in servers for b in clients)

    def _averaged_s(self, s: int) -> float:
        """Seconds until the servers have averaged, agreed and updated."""
        return stage_ended_s(self.setting, s, self.servers_of(s))

    # In words -----------------------------------------------------------------------------------------------------------

    def limit(self) -> str:
        """Name the largest part of the step."""
        split, every, kinds = self.split, range(len(self.stages)), self.setting.kinds
        most_s = max(split.compute_s, split.pipeline_s, split.data_parallel_s, split.bubble_s)

        def of(stage: int) -> str:
            return f" (stage {stage})" if len(self.stages) > 1 else ""

        if most_s == split.compute_s:
            slowest = max(every, key=lambda s: self._computed_s([s]))
            who = dict.fromkeys(kinds[k].name for machines in self.stages[slowest] for k in machines)
            return f"computing on {', '.join(who)}{of(slowest)}"
        if most_s == split.pipeline_s:
            return "links between servers, and to their clients"
        if most_s == split.bubble_s:
            return BUBBLE
        ways = (
            (self._weights_s, "sending the weights to clients"),
            (self._gathered_s, "collecting what clients accumulated"),
            (self._averaged_s, "averaging and agreement between servers"),
        )
        _, told, slowest = max((seconds(s), told, s) for seconds, told in ways for s in every)
        return f"{told}{of(slowest)}"


def sent(step: HubStep) -> Bytes:
    """Bytes of a step by sender's and receiver's kind."""
    cost, found = step.setting.cost, Bytes()
    for s, (here, there) in enumerate(pairwise(step.stages)):
        for a, b, share in _pairs(here.servers, there.servers):
            found[a, b, "activations"] += cost.microbatches * share * cost.forward_bytes[s + 1]
            found[b, a, "gradients"] += cost.microbatches * share * cost.backward_bytes[s + 1]
    for s, here in enumerate(step.stages):
        out, back = step.inner_bytes(s)
        share = len(here.clients) / (len(here.servers) + len(here.clients))
        for a, b, part in _pairs(here.servers, here.clients):
            found[a, b, "activations"] += cost.microbatches * share * part * out
            found[b, a, "gradients"] += cost.microbatches * share * part * back
            found[a, b, "averaging"] += cost.stages[s].weight_bytes / len(here.servers)
            found[b, a, "averaging"] += cost.stages[s].averaged_bytes / len(here.servers)
    found.ending(cost, [step.servers_of(s) for s in range(len(step.stages))])
    return found


def _pairs(senders: Sequence[int], receivers: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """Kinds of a sender and a receiver, and their share of evenly spread work."""
    for a in senders:
        for b in receivers:
            yield a, b, 1 / (len(senders) * len(receivers))
