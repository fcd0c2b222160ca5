"""Counts the frames of a virtual fleet, what clients bring back, by client, and the time of averaging."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from muletrain.policy.pool import Pool
from muletrain.runtime.pool.client import Client
from muletrain.runtime.pool.messages import Result
from muletrain.runtime.pool.weights import WeightsDownload
from muletrain.runtime.pool.work import PartWork
from muletrain.sim.fleet.links import FleetLinks
from muletrain.sim.fleet.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from muletrain.events import StepApplied
    from muletrain.wire.frame import Frame


class Counts:
    """``frames`` and ``nbytes``: by kind; ``work``: forward passes of a sequence in the results of a client that counted,
    checks of others included; ``parts``: all that it brought back."""

    def __init__(self) -> None:
        self.frames, self.nbytes = Counter[str](), Counter[str]()
        self.work, self.parts = Counter[str](), Counter[str]()


@contextmanager
def counted() -> Iterator[Counts]:
    """Count in all worlds meanwhile."""
    counts, weight, done = Counts(), FleetLinks.weight, Pool.done

    def weighed(links: FleetLinks, sender: str, frame: Frame) -> int:
        nbytes = weight(links, sender, frame)
        counts.frames[frame.kind] += 1
        counts.nbytes[frame.kind] += nbytes
        counts.parts[sender] += isinstance(frame.message, Result)
        return nbytes

    def noted(pool: Pool, worker: str, number: int, now: float) -> bool:
        part = pool.part(worker, number)
        if (counted := done(pool, worker, number, now)) and part is not None:
            counts.work[worker or "servers"] += part.cost
        return counted

    FleetLinks.weight, Pool.done = weighed, noted  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        FleetLinks.weight, Pool.done = weight, done  # type: ignore[method-assign]


@contextmanager
def joining() -> Iterator[list[tuple[float, float]]]:
    """Collect of each client that came: seconds from its first question until it asked for the weights, and from these to
    its first part; together all but the time of the weights."""
    found, run, begin = list[tuple[float, float]](), Client.run, WeightsDownload.begin
    fetch, compute = WeightsDownload.fetch, PartWork.compute
    begun, asked, came, clients = dict[int, float](), dict[int, float](), dict[int, float](), dict[int, Client]()

    async def began(client: Client) -> None:
        clients[id(client._weights)] = clients[id(client._work)] = client
        begun[id(client)] = client._clock.now()
        await run(client)

    def asks(weights: WeightsDownload, *args: Any) -> Any:
        client = clients[id(weights)]
        asked.setdefault(id(client), client._clock.now())
        return begin(weights, *args)

    async def fetched(weights: WeightsDownload, *args: Any) -> Any:
        client, values = clients[id(weights)], await fetch(weights, *args)
        came.setdefault(id(client), client._clock.now())
        return values

    async def computes(work: PartWork, *args: Any) -> Any:
        client = clients[id(work)]
        if (first := begun.pop(id(client), None)) is not None:
            found.append((asked[id(client)] - first, client._clock.now() - came[id(client)]))
        return await compute(work, *args)

    Client.run, WeightsDownload.begin = began, asks  # type: ignore[method-assign]
    WeightsDownload.fetch, PartWork.compute = fetched, computes  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Client.run, WeightsDownload.begin = run, begin  # type: ignore[method-assign]
        WeightsDownload.fetch, PartWork.compute = fetch, compute  # type: ignore[method-assign]


@contextmanager
def averaging() -> Iterator[list[tuple[float, float]]]:
    """Collect of each step and peer that holds parameters: seconds of averaging and updating, and of the step."""
    found: list[tuple[float, float]] = []
    applied = Tally.applied

    def noted(tally: Tally, kind: int, event: StepApplied, sent: Any) -> None:
        ending_s = event.averaging_s + event.apply_s
        found.append((ending_s, ending_s + event.forward_s + event.backward_s + event.wait_s))
        applied(tally, kind, event, sent)

    Tally.applied = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Tally.applied = applied  # type: ignore[method-assign]
