"""Whose bytes go next, and how many: one peer's sending to all others, paced below what the links carry (``policy.congestion``).

Transports ask here before they hand bytes over, and say what was acknowledged. To one receiver a channel goes before those below it
(``Channel``); between receivers the channels' targets decide, for traffic with the smaller one yields wherever both share a link. Averaging
and state go to few receivers at a time, in the order in which their frames were asked for: else a fleet of senders meets in one download.
What is small (``Channel.CONTROL``) waits for nothing.
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

from muletrain.errors import DeadlineExceeded, PeerUnreachable
from muletrain.network.base import Channel
from muletrain.policy.congestion import Window

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from muletrain.network.base import PeerId

TARGET_S = {Channel.PIPE: (0.06, 0.06), Channel.AVERAGE: (0.05, 0.02), Channel.BULK: (0.025, 0.005)}
"""Queue that a channel's traffic may cause [s], the highest class first: alone, and while traffic of a higher class comes and goes, each
message of which waits for that queue. A call passes one there and one back."""
BESIDE_S = 1.0
"""After something of a higher class was sent, more is expected for so long."""
LANES = 8
"""Receivers that get averaging, or state, at a time: while one acknowledges, the other is sent to."""
STALL_S = 1.0
"""A receiver that acknowledges nothing for so long does not hold up the others."""
QUEUED_S, MOMENT_S, QUEUED_MAX_S = 2.0, 0.5, 5.0
"""A queue that was measured within that time may still be there; one that other flows met, within the second; no router queues more than
the third. A peer that froze, or lies, acknowledges late."""
DRAIN_S = 10.0
"""When something was on its way for so long without a pause, sending stops until all of it has arrived: the smallest delay of a queue
that never empties is too large (BBR's ProbeRTT). Sending stops, too, before something goes where no delay was measured yet: a flow that
comes to a full link would take the others' queue for none, and drive them off it (LEDBAT's latecomers)."""


@dataclass(slots=True, eq=False)
class _Flow:
    """Everything to one receiver. ``progress_s``: the last acknowledgement, or when the first bytes since then were handed over."""

    window: Window = field(default_factory=Window)
    under_way: int = 0
    progress_s: float = 0.0
    target_s: float = 0.0
    excess: float = 0.0
    """Windows that the piece under way is too large, and when the next one may go: only virtual worlds have such pieces."""
    resume_s: float = 0.0
    waiting: dict[Channel, asyncio.Future[None]] = field(default_factory=dict)
    """For room: at most one sender for each channel."""

    def stalled(self, now_s: float) -> bool:
        return self.under_way > 0 and now_s - self.progress_s > STALL_S

    def first(self) -> Channel | None:
        """The channel that goes next."""
        return next((channel for channel in TARGET_S if channel in self.waiting), None)


@dataclass(slots=True, eq=False)
class _Lanes:
    """Of one channel: receivers with the frames being sent to them, and frames that wait for a lane, in order."""

    busy: dict[PeerId, int] = field(default_factory=dict)
    waiting: deque[tuple[PeerId, asyncio.Future[None]]] = field(default_factory=deque)


class Pacer:
    """One peer's. Times are the running loop's [s]."""

    def __init__(self) -> None:
        self._flows: dict[PeerId, _Flow] = {}
        self._lanes = {Channel.AVERAGE: _Lanes(), Channel.BULK: _Lanes()}
        self._sent_s: dict[Channel, float] = {}
        """When something of each channel was, last."""
        self._under_way = 0
        self.moved = 0
        """Bytes acknowledged so far."""
        self._empty_s = float("-inf")
        """When nothing was on its way, last."""
        self._draining: asyncio.TimerHandle | None = None
        self._first: _Flow | None = None
        """Goes first after that."""

    @asynccontextmanager
    async def lane(self, peer: PeerId, channel: Channel) -> AsyncIterator[None]:
        """While a frame is sent to ``peer``: among few receivers at a time, where the channel has it so."""
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
        now_s = _now_s()
        return sum(not self._flow(p).stalled(now_s) for p in lanes.busy) < LANES

    def _admit(self, lanes: _Lanes) -> None:
        while lanes.waiting and self._free(lanes):
            peer, turn = lanes.waiting.popleft()
            _enter(lanes, peer)
            turn.set_result(None)

    async def grant(self, peer: PeerId, channel: Channel, wanted: int, coarse: int = 0) -> int:
        """How many of ``wanted`` bytes to hand over now; they count as on their way until ``acknowledged`` or ``forget``. ``coarse``:
        virtual worlds hand over so much at once where the window allows it. Waits as long as it takes (``patient``). Raises
        PeerUnreachable after ``give_up``."""
        flow = self._flow(peer)
        if not flow.waiting and (nbytes := self._room(flow, wanted, coarse)):
            return self._begin(flow, channel, nbytes)
        try:
            while not (flow.first() in (None, channel) and (nbytes := self._room(flow, wanted, coarse))):
                woken = flow.waiting[channel] = asyncio.get_running_loop().create_future()
                if flow.first() is not channel:  # it came after we were woken: our turn is its
                    _wake(flow)
                await woken
            return self._begin(flow, channel, nbytes)
        finally:
            flow.waiting.pop(channel, None)
            _wake(flow)

    def piece(self, peer: PeerId) -> int:
        """Bytes that real links get at once."""
        return self._flow(peer).window.piece

    async def patient(
        self, peer: PeerId, writing: asyncio.Task[None], timeout_s: float, begun: Callable[[], bool]
    ) -> None:
        """Wait for ``writing``, which sends a frame to ``peer``. A sender that gives up does not break the stream: a frame that was
        ``begun`` is sent to its end. Raises what ``writing`` raises, and DeadlineExceeded when ``peer`` acknowledges nothing for
        ``timeout_s``: for how long others go first does not count."""
        since_s, flow = _now_s(), self._flow(peer)
        writing.add_done_callback(_retrieve)
        try:
            while not writing.done():
                left_s = timeout_s - (_now_s() - max(since_s, flow.progress_s) if flow.under_way else 0.0)
                if left_s <= 0:
                    writing.cancel()
                    raise DeadlineExceeded(f"sending to {peer[-6:]}: nothing was taken for {timeout_s:.1f} s")
                await asyncio.wait({writing}, timeout=left_s)
        except asyncio.CancelledError:
            if not begun():
                writing.cancel()
            raise
        if writing.cancelled():
            raise PeerUnreachable(f"sending to {peer[-6:]}: the network is closed")
        writing.result()

    def _room(self, flow: _Flow, wanted: int, coarse: int) -> int:
        """Bytes that fit into the window now: a piece, or what is left; 0: wait."""
        if self._drains(flow):
            return 0
        piece = min(wanted, max(flow.window.piece, min(coarse, flow.window.coarse)))
        if flow.under_way:
            return piece if flow.under_way + piece <= flow.window.size else 0
        return piece if _now_s() >= flow.resume_s else 0

    def _begin(self, flow: _Flow, channel: Channel, nbytes: int) -> int:
        now_s = _now_s()
        if not flow.under_way:
            flow.progress_s = now_s
        flow.excess = nbytes / flow.window.size - 1.0
        if not self._under_way:
            self._empty_s = now_s
        self._sent_s[channel] = now_s
        flow.target_s = TARGET_S[channel][self._beside(channel, now_s)]
        flow.under_way += nbytes
        self._under_way += nbytes
        return nbytes

    def _beside(self, channel: Channel, now_s: float) -> bool:
        """Is something of a higher class sent these moments?"""
        higher = itertools.takewhile(lambda other: other is not channel, TARGET_S)
        return any(now_s - self._sent_s.get(other, -math.inf) < BESIDE_S for other in higher)

    def acknowledged(self, peer: PeerId, nbytes: int, sent_s: float, received_s: float) -> None:
        """``nbytes`` to ``peer``, handed over at ``sent_s``, arrived at ``received_s`` of its own clock."""
        flow, now_s = self._flow(peer), _now_s()
        flow.progress_s = now_s
        filled = bool(flow.waiting) or flow.under_way > flow.window.size / 2
        self.moved += nbytes
        flow.window.acknowledged(nbytes, sent_s, received_s, now_s, target_s=flow.target_s, filled=filled)
        if flow.excess > 0.0:
            flow.resume_s = now_s + min(STALL_S, flow.excess * (now_s - sent_s))
            asyncio.get_running_loop().call_at(flow.resume_s, _wake, flow)
        self.forget(peer, nbytes)

    def forget(self, peer: PeerId, nbytes: int) -> None:
        """So many bytes are not on their way any more: they arrived, or their stream has ended."""
        flow = self._flow(peer)
        flow.under_way -= nbytes
        self._under_way -= nbytes
        if not self._under_way or (self._draining is not None and self._only_stalled()):
            self._drained()
        _wake(flow)

    def queued_s(self, peer: PeerId) -> float:
        """How much later than on free links an answer of ``peer`` comes now: what waits on the way to it and back, as far as it was
        measured in the last seconds; or what the flows of these moments meet, which leave by the same uplink. Of those the median: one
        that acknowledges late does not excuse the rest."""
        now_s = _now_s()
        late_s = [flow.window.late_s for flow in self._flows.values() if now_s - flow.window.measured_s <= MOMENT_S]
        there_s = 0.0
        if (flow := self._flows.get(peer)) is not None and now_s - flow.window.measured_s <= QUEUED_S:
            there_s = flow.window.late_s
        return min(QUEUED_MAX_S, max(there_s, statistics.median_low(late_s) if late_s else 0.0))

    def give_up(self, peer: PeerId) -> None:
        """Every sender that waits for room on the way to ``peer`` gets PeerUnreachable."""
        for waiting in self._flows[peer].waiting.values() if peer in self._flows else ():
            if not waiting.done():
                waiting.set_exception(PeerUnreachable(f"{peer[-6:]} is believed dead"))

    def _flow(self, peer: PeerId) -> _Flow:
        if peer not in self._flows:
            self._flows[peer] = _Flow()
        return self._flows[peer]

    def _drains(self, flow: _Flow) -> bool:
        """Does sending wait until what is on its way has arrived? It begins to where the smallest delay should be measured."""
        if self._draining is None and self._under_way:
            since_s, now_s = _now_s() - self._empty_s, _now_s()
            if since_s > DRAIN_S or (since_s > STALL_S and not flow.under_way and not flow.window.measured(now_s)):
                self._draining, self._first = asyncio.get_running_loop().call_later(STALL_S, self._drained), flow
        return self._draining is not None

    def _only_stalled(self) -> bool:
        now_s = _now_s()
        return all(not flow.under_way or flow.stalled(now_s) for flow in self._flows.values())

    def _drained(self) -> None:
        """Nothing is on its way but what has stalled."""
        self._empty_s = _now_s()
        if self._draining is not None and self._first is not None:
            self._draining.cancel()
            self._draining = None
            for flow in self._first, *self._flows.values():
                _wake(flow)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _wake(flow: _Flow) -> None:
    """Whose turn it is to look for room."""
    if (channel := flow.first()) is not None:
        _set(flow.waiting[channel])


def _retrieve(writing: asyncio.Task[None]) -> None:
    """Its error, if it has one: who waited for it may have given up."""
    if not writing.cancelled():
        writing.exception()


def _enter(lanes: _Lanes, peer: PeerId) -> None:
    lanes.busy[peer] = lanes.busy.get(peer, 0) + 1


def _leave(lanes: _Lanes, peer: PeerId) -> None:
    lanes.busy[peer] -= 1
    if not lanes.busy[peer]:
        del lanes.busy[peer]
