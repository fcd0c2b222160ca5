"""All actors of one peer share a context: the seams, the facts of the run, the roster and the counters."""

from __future__ import annotations

import asyncio
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from muletrain.errors import NetworkError
from muletrain.events import FrameRefused, SlotWorked
from muletrain.runtime.core.blocks import Blocks, Downloader
from muletrain.runtime.core.meter import DeviceHung, Meter
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.core.times import GONE_S
from muletrain.runtime.core.waiting import News
from muletrain.runtime.members.detector import FailureDetector
from muletrain.runtime.pool.desk import PartsDesk
from muletrain.runtime.pool.server import PooledCompute

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine, Iterable

    from muletrain.clock import Clock
    from muletrain.compute.base import Compute
    from muletrain.events import Event, TrafficClass
    from muletrain.network.base import Channel, Network, PeerId
    from muletrain.policy.chaos import Phase
    from muletrain.runtime.core.messages import Message
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.members.roster import Roster
    from muletrain.wire.frame import Frame

R = TypeVar("R")
NAMED = 8
"""Most awaited peers that are named."""
TRAFFIC: dict[str, TrafficClass] = {
    "forward": "activation",
    "backward": "gradient",
    "shard": "averaging",
    "reduced": "averaging",
    "block": "state",
}
"""Class of traffic of a frame kind, for byte counts; all other kinds are control."""


@dataclass
class Context:
    """The shared context of one peer's actors."""

    net: Network
    clock: Clock
    compute: Compute
    roster: Roster
    plan: Plan
    emit: Callable[[Event], None]
    tasks: Tasks = field(default_factory=Tasks)
    news: News = field(default_factory=News)
    """Wakes waits after events on which waits may depend."""
    reached: Callable[[Phase, int], None] = lambda phase, step: None
    """This peer is at a phase of a step, counted from 0: a fault of ``--chaos`` may hit the peer now."""
    meter: Meter = field(default_factory=Meter)
    helpers: Callable[[], int] | None = None
    """Counts the clients that compute for this peer, if the strategy has clients."""
    of_process: InitVar[Blocks | None] = None
    """The process' end of the transport; None: this peer's own."""

    @classmethod
    def at_stage(
        cls,
        net: Network,
        clock: Clock,
        compute: Compute,
        roster: Roster,
        plan: Plan,
        emit: Callable[[Event], None],
        tasks: Tasks,
        draw: random.Random,
        of_pool: Callable[[Event], None] | None = None,
        of_process: Blocks | None = None,
    ) -> Context:
        """Returns the context of a peer that serves the stage in ``compute``. If the strategy has clients, clients
        compute the passes: ``draw`` chooses the results to check, and the pool's events go to ``of_pool``
        (``emit``)."""
        if not plan.strategy.pooled:
            return cls(net, clock, compute, roster, plan, emit, tasks, of_process=of_process)
        config, of_pool = roster.genesis.config, of_pool or emit
        blocks = of_process or Blocks(net, clock, tasks)
        pooled = PooledCompute(PartsDesk(compute, blocks, tasks, plan, roster.stage, config, of_pool, draw))
        helpers = pooled.clients.__len__
        return cls(net, clock, pooled, roster, plan, emit, tasks, helpers=helpers, of_process=blocks)

    def __post_init__(self, of_process: Blocks | None) -> None:
        self.detector, self.news.queue_s = FailureDetector(self), self.queue_s
        self.blocks = of_process or Blocks(self.net, self.clock, self.tasks)
        self.blocks.send = self.send

    def downloader(self) -> Downloader:
        """Returns a taker of copies, which hears at once of donors that are down."""
        awaiting, name = self.detector.awaiting, self.roster.name
        return Downloader(self.blocks, self.compute.offload, awaiting, self.refused, name)

    def spawn(self, work: Coroutine[Any, Any, R], name: str) -> asyncio.Task[R]:
        """Run ``work`` in the background (``Tasks.spawn``)."""
        return self.tasks.spawn(work, name)

    async def send(
        self,
        peer: PeerId,
        message: Message,
        tensors: list[Any] | None = None,
        *,
        frame: Frame | None = None,
        channel: Channel | None = None,
    ) -> None:
        """Send and count a frame. ``frame``: the message's frame, if already made; ``channel``: in place of the
        message's own. Raises PeerUnreachable or DeadlineExceeded. Ends within ``watchdog.hung_s`` and ``GONE_S``."""
        if not self.meter.works.is_set():  # until the device is back, or the watchdog ends the peer
            await self.meter.works.wait()
        begin = self.clock.now()
        frame = frame or message.frame(tensors)
        limit_s = 2 * GONE_S  # other channels go first for long while 1 GB is averaged over a slow link
        sent = await self.net.send(peer, frame, channel=channel or message.CHANNEL, timeout_s=limit_s)
        if sent:
            traffic = TRAFFIC.get(message.KIND, "control") if frame.tensors else "control"
            self.meter.stats.sent[peer][traffic] += sent
        if tensors and (step := getattr(message, "step", None)) is not None:
            self.worked("send", message.KIND, begin, step, getattr(message, "index", -1))

    def worked(self, slot: str, what: str, begin: float, step: int, index: int = -1) -> None:
        """Note for timelines that a slot of this peer was busy since ``begin``."""
        if self.plan.trace:
            self.emit(SlotWorked(slot=slot, what=what, step=step, index=index, seconds=self.clock.now() - begin))

    async def tell(self, peers: tuple[PeerId, ...], message: Message) -> None:
        """Send a notice to several peers at once. An unreachable peer is marked down; the remaining peers still get the
        notice."""
        peers = self.detector.worth_a_try(peers)
        frame = message.frame()
        results = await asyncio.gather(*(self.send(p, message, frame=frame) for p in peers), return_exceptions=True)
        for peer, result in zip(peers, results, strict=True):
            if isinstance(result, NetworkError):
                self.detector.mark_down(peer, result.why)
            elif isinstance(result, BaseException):
                raise result

    def queue_s(self) -> float:
        """Returns the seconds that a peer's full queue takes on a device like ours, forward and backward of each
        microbatch; 0 before any measurement."""
        return 2 * self.plan.capacity * self.compute.jobs.microbatch_s()

    def refused(self, peer: PeerId, reason: str) -> None:
        """Report that ``peer`` sent something invalid."""
        self.emit(FrameRefused(remote=peer, reason=reason))

    def who_is_there(self, awaited: Iterable[PeerId] = ()) -> str:
        """Describes the ``awaited`` peers and the reachable stages, for errors. Raises DeviceHung if an operation of this
        peer's own device explains the wait."""
        if self.meter.late:
            raise DeviceHung(self.meter.late)
        lost = [s for s in range(self.plan.stages) if not self.roster.stage(s)]
        gone = f"no peer of stages {lost} can be reached" if lost else "every stage can be reached"
        if names := ", ".join(self.roster.name(p) for p in [*awaited][:NAMED]):
            gone = f"awaited: {names}; {gone}"
        return gone if self.roster.trainers() else f"{gone}, and no trainer can be reached"
