"""Pacing of everything that one peer sends, below the links' capacity (``policy.congestion``).

A transport asks the ``Pacer`` before handing bytes over, and reports acknowledged bytes. On the way to one receiver a
higher channel goes first (``Channel``). Between receivers the channels' delay targets decide: traffic with a smaller
target yields wherever two flows share a link. Averaging and state go to few receivers at a time, in the order of the
requests, because otherwise all senders of a fleet meet in one downlink. Small frames (``Channel.CONTROL``) never wait.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muletrain.clock import loop_time_s
from muletrain.errors import DeadlineExceeded, PeerUnreachable
from muletrain.network.base import Channel
from muletrain.policy.congestion import INSTANT_S, Uplink, Window

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from muletrain.network.base import PeerId

TARGET_S = {Channel.PIPE: (0.06, 0.06), Channel.AVERAGE: (0.05, 0.02), Channel.BULK: (0.025, 0.005)}
"""Queue that a channel may cause [s]: alone, and beside traffic of a higher channel, whose messages wait in that queue.
The highest channel comes first. A call meets one queue on the way there and one on the way back."""
BESIDE_S = 1.0
"""Time after the last bytes for which traffic of a higher channel counts as present [s]."""
LANES = 8
"""Receivers that get averaging, or state, at the same time: we send to one while another acknowledges."""
STALL_S = 1.0
"""Time without an acknowledgement after which a receiver does not hold up the rest [s]."""
QUEUED_S, MOMENT_S, QUEUED_MAX_S = 2.0, 0.5, 5.0
"""How long a measured queue counts: on the measuring flow, and for other flows, which may share the uplink. A queue
counts at most the third, because a frozen or lying peer acknowledges late, too."""
DRAIN_S = 10.0
"""After sending for so long without a pause we stop until everything has arrived, because a queue that never empties
hides the base delay (BBR's ProbeRTT). We also stop before the first bytes to a receiver: a newcomer on a full link
would take the existing queue for the base delay, and push existing flows aside (LEDBAT's latecomers)."""


@dataclass(slots=True, eq=False)
class _Flow:
    """State of the traffic to one receiver. ``progress_s``: time of the last acknowledgement, or of the first bytes
    after an idle time."""

    window: Window = field(default_factory=Window)
    under_way: int = 0
    progress_s: float = 0.0
    target_s: float = 0.0
    excess: float = 0.0
    """Only in virtual worlds, whose pieces may exceed the window: by how many windows the last one exceeded;
    ``resume_s``: when the next may go."""
    resume_s: float = 0.0
    waiting: dict[Channel, asyncio.Future[None]] = field(default_factory=dict)
    """Senders that wait for room, at most one per channel."""

    def stalled(self, now_s: float) -> bool:
        return self.under_way > 0 and now_s - self.progress_s > STALL_S

    def first(self) -> Channel | None:
        """The highest channel that waits."""
        return next((channel for channel in TARGET_S if channel in self.waiting), None)


@dataclass(slots=True, eq=False)
class _Lanes:
    """Lanes of one channel. ``busy``: number of frames being sent to each receiver. ``waiting``: frames without a lane,
    in order."""

    busy: dict[PeerId, int] = field(default_factory=dict)
    waiting: deque[tuple[PeerId, asyncio.Future[None]]] = field(default_factory=deque)


class Pacer:
    """Paces one peer's sending. Times are from the running event loop's clock [s]."""

    def __init__(self) -> None:
        self._flows: dict[PeerId, _Flow] = {}
        self._lanes = {Channel.AVERAGE: _Lanes(), Channel.BULK: _Lanes()}
        self._sent_s: dict[Channel, float] = {}
        """When each channel sent last."""
        self._under_way = dict.fromkeys(Channel, 0)
        """Bytes of each channel to all receivers that are not acknowledged."""
        self._uplink = Uplink()
        self._held: dict[Channel, dict[_Flow, None]] = {channel: {} for channel in TARGET_S}
        """Flows with room in the flow's window, but not in the uplink's, in the order of finding out."""
        self.moved = 0
        """Bytes acknowledged so far, of all receivers."""
        self._empty_s = float("-inf")
        """When nothing was under way last."""
        self._draining: asyncio.TimerHandle | None = None
        self._first: _Flow | None = None
        """The flow for which we drain, and which goes first afterwards."""

    @asynccontextmanager
    async def lane(self, peer: PeerId, channel: Channel) -> AsyncIterator[None]:
        """Hold a lane to ``peer`` while a frame is sent; channels without lanes do not wait."""
        lanes = self._lanes.get(channel)
        if lanes is None:
            yield
            return
        if lanes.waiting or not self._free(lanes):
            await self._queue(lanes, peer)
        else:
            _enter(lanes, peer)
        try:
            yield
        finally:
            _leave(lanes, peer)
            self._admit(lanes)

    async def _queue(self, lanes: _Lanes, peer: PeerId) -> None:
        turn = peer, asyncio.get_running_loop().create_future()
        lanes.waiting.append(turn)
        try:
            while not turn[1].done():
                await asyncio.wait({turn[1]}, timeout=STALL_S)
                self._admit(lanes)  # a receiver may have stalled meanwhile
        except asyncio.CancelledError:
            if turn[1].done():  # the lane was ours already
                _leave(lanes, peer)
                self._admit(lanes)
            else:
                lanes.waiting.remove(turn)
            raise

    def _free(self, lanes: _Lanes) -> bool:
        now_s = loop_time_s()
        return sum(not self._flow(p).stalled(now_s) for p in lanes.busy) < LANES

    def _admit(self, lanes: _Lanes) -> None:
        while lanes.waiting and self._free(lanes):
            peer, turn = lanes.waiting.popleft()
            _enter(lanes, peer)
            turn.set_result(None)

    async def grant(self, peer: PeerId, channel: Channel, wanted: int, coarse: int = 0) -> int:
        """Wait for room, and return how many of ``wanted`` bytes to hand over now. The bytes count as under way until
        ``acknowledged`` or ``forget``. ``coarse``: in virtual worlds, the largest piece to hand over at once. There is
        no deadline here (see ``patient``). Raises PeerUnreachable after ``give_up``."""
        flow = self._flow(peer)
        if not flow.waiting and (nbytes := self._room(flow, channel, wanted, coarse)):
            return self._begin(flow, channel, nbytes)
        try:
            while not (flow.first() in (None, channel) and (nbytes := self._room(flow, channel, wanted, coarse))):
                if flow not in self._held[channel]:
                    self._release()  # another flow may use the room that we were woken for
                woken = flow.waiting[channel] = asyncio.get_running_loop().create_future()
                if flow.first() is not channel:  # a higher channel came after we were woken
                    _wake(flow)
                await woken
            return self._begin(flow, channel, nbytes)
        finally:
            flow.waiting.pop(channel, None)
            self._held[channel].pop(flow, None)
            _wake(flow)
            self._release()

    def window(self, peer: PeerId) -> Window:
        """The congestion window of the traffic to ``peer``."""
        return self._flow(peer).window

    def under_way(self, peer: PeerId) -> int:
        """Bytes handed over for ``peer`` and not acknowledged."""
        return self._flow(peer).under_way

    async def patient(
        self, peer: PeerId, writing: asyncio.Task[None], timeout_s: float, begun: Callable[[], bool]
    ) -> None:
        """Wait for ``writing``, which sends a frame to ``peer``. If the caller is cancelled, a frame that was ``begun``
        is still sent completely, so that the stream stays whole. Raises the errors of ``writing``, and DeadlineExceeded
        when ``peer`` acknowledges nothing for ``timeout_s``. Time spent on more urgent frames does not count."""
        since_s, flow = loop_time_s(), self._flow(peer)
        writing.add_done_callback(_retrieve)
        try:
            while not writing.done():
                left_s = timeout_s - (loop_time_s() - max(since_s, flow.progress_s) if flow.under_way else 0.0)
                if left_s <= 0:
                    writing.cancel()
                    raise DeadlineExceeded(f"nothing was taken for {timeout_s:.1f} s", f"sending to {peer[-6:]}")
                await asyncio.wait({writing}, timeout=left_s)
        except asyncio.CancelledError:
            if not begun():
                writing.cancel()
            raise
        if writing.cancelled():
            raise PeerUnreachable("the network is closed", f"sending to {peer[-6:]}")
        writing.result()

    def _room(self, flow: _Flow, channel: Channel, wanted: int, coarse: int) -> int:
        """Size of the piece that may go now [bytes]; 0: wait."""
        if self._drains(flow):
            return 0
        piece = min(wanted, max(flow.window.piece, min(coarse, flow.window.coarse)))
        if flow.under_way + piece > flow.window.size if flow.under_way else flow.resume_s - loop_time_s() > INSTANT_S:
            return 0  # event loops call early, by less than the clock's resolution
        # of lower channels nothing counts: weights on their way to ten clients would hold averaging up
        before = self._under_way[channel] + sum(self._under_way[higher] for higher in _above(channel))
        if before and before + piece > self._uplink.size(flow.window, TARGET_S[channel][0]):
            self._held[channel][flow] = None
            return 0
        return piece

    def _release(self) -> None:
        """Let the next flow that is held back by the uplink look for room."""
        for held in self._held.values():
            if held:
                flow = next(iter(held))
                del held[flow]
                _wake(flow)
                return

    def _begin(self, flow: _Flow, channel: Channel, nbytes: int) -> int:
        now_s = loop_time_s()
        if not flow.under_way:
            flow.progress_s = now_s
        flow.excess = nbytes / flow.window.size - 1.0
        if not any(self._under_way.values()):
            self._empty_s = now_s
        self._sent_s[channel] = now_s
        flow.target_s = TARGET_S[channel][self._beside(channel, now_s)]
        flow.under_way += nbytes
        self._under_way[channel] += nbytes
        return nbytes

    def _beside(self, channel: Channel, now_s: float) -> bool:
        """Was anything of a higher channel sent a moment ago?"""
        return any(now_s - self._sent_s.get(other, -math.inf) < BESIDE_S for other in _above(channel))

    def acknowledged(self, peer: PeerId, channel: Channel, nbytes: int, sent_s: float, received_s: float) -> None:
        """``peer`` got ``nbytes``, handed over at ``sent_s`` (our clock), at ``received_s`` (clock of ``peer``)."""
        flow, now_s = self._flow(peer), loop_time_s()
        flow.progress_s = now_s
        filled = bool(flow.waiting) or flow.under_way > flow.window.size / 2
        self.moved += nbytes
        self._uplink.acknowledged(nbytes, now_s, (flow.window for flow in self._flows.values()))
        flow.window.acknowledged(nbytes, sent_s, received_s, now_s, target_s=flow.target_s, filled=filled)
        if flow.excess > 0.0:
            flow.resume_s = now_s + min(STALL_S, flow.excess * (now_s - sent_s))
            asyncio.get_running_loop().call_at(flow.resume_s, _wake, flow)
        self.forget(peer, channel, nbytes)

    def forget(self, peer: PeerId, channel: Channel, nbytes: int) -> None:
        """``nbytes`` are not under way any more: arrived, or the stream ended."""
        flow = self._flow(peer)
        flow.under_way -= nbytes
        self._under_way[channel] -= nbytes
        if not any(self._under_way.values()) or (self._draining is not None and self._only_stalled()):
            self._drained()
        _wake(flow)
        self._release()

    def queued_s(self, peer: PeerId) -> float:
        """By how much queues delay an answer of ``peer`` now [s]: the larger of the recent delay of the flow to
        ``peer`` and the median of all flows' latest delays, since all flows share our uplink. The median, because one
        peer that acknowledges late does not excuse the rest."""
        now_s = loop_time_s()
        late_s = [flow.window.late_s for flow in self._flows.values() if now_s - flow.window.measured_s <= MOMENT_S]
        there_s = 0.0
        if (flow := self._flows.get(peer)) is not None and now_s - flow.window.measured_s <= QUEUED_S:
            there_s = flow.window.late_s
        return min(QUEUED_MAX_S, max(there_s, statistics.median_low(late_s) if late_s else 0.0))

    def give_up(self, peer: PeerId) -> None:
        """All senders that wait for room to ``peer`` fail with PeerUnreachable."""
        for waiting in self._flows[peer].waiting.values() if peer in self._flows else ():
            if not waiting.done():
                waiting.set_exception(PeerUnreachable(f"{peer[-6:]} is believed dead"))

    def _flow(self, peer: PeerId) -> _Flow:
        if peer not in self._flows:
            self._flows[peer] = _Flow()
        return self._flows[peer]

    def _drains(self, flow: _Flow) -> bool:
        """Must sending wait until everything under way has arrived? Starts such a drain when the base delay has to be
        measured."""
        if self._draining is None and any(self._under_way.values()):
            since_s, now_s = loop_time_s() - self._empty_s, loop_time_s()
            if since_s > DRAIN_S or (since_s > STALL_S and not flow.under_way and not flow.window.measured(now_s)):
                self._draining, self._first = asyncio.get_running_loop().call_later(STALL_S, self._drained), flow
        return self._draining is not None

    def _only_stalled(self) -> bool:
        now_s = loop_time_s()
        return all(not flow.under_way or flow.stalled(now_s) for flow in self._flows.values())

    def _drained(self) -> None:
        """Only stalled flows have bytes under way: end the drain."""
        self._empty_s = loop_time_s()
        if self._draining is not None and self._first is not None:
            self._draining.cancel()
            self._draining = None
            for flow in self._first, *self._flows.values():
                _wake(flow)


def _above(channel: Channel) -> Iterator[Channel]:
    """The channels that go first."""
    return itertools.takewhile(lambda other: other is not channel, TARGET_S)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _wake(flow: _Flow) -> None:
    """Let the highest waiting channel look for room."""
    if (channel := flow.first()) is not None:
        _set(flow.waiting[channel])


def _retrieve(writing: asyncio.Task[None]) -> None:
    """Retrieve the error, because the waiter may be gone (asyncio would warn)."""
    if not writing.cancelled():
        writing.exception()


def _enter(lanes: _Lanes, peer: PeerId) -> None:
    lanes.busy[peer] = lanes.busy.get(peer, 0) + 1


def _leave(lanes: _Lanes, peer: PeerId) -> None:
    lanes.busy[peer] -= 1
    if not lanes.busy[peer]:
        del lanes.busy[peer]
