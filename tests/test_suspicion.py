"""When a silent peer is suspected: its own answers and the queues on the way decide."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from muletrain.config.schema import Codec
from muletrain.events import Event, PeerDown
from muletrain.network.memory import MemoryHub
from muletrain.runtime.members.detector import BURST_S, QUEUES
from muletrain.runtime.members.roster import Member
from muletrain.runtime.members.row import Row, Sync
from tests.test_averaging import members
from tests.virtual import virtually


def test_where_answers_meet_queues_a_suspicion_allows_for_one_that_we_cannot_measure() -> None:
    """Fleet 135 of the grid: flows that begin together queue 0.4 s in a peer's uplink, while ours is idle."""

    async def scenario() -> None:
        group, waits_s = members(MemoryHub(), Codec.FP32), [0.002]
        detector = group["a"][0].detector

        async def answer(sender: str, payload: bytes) -> bytes:
            await asyncio.sleep(waits_s[0])
            return Row(current=True, step=0, stage=0).pack()

        group["b"][0].net.serve(Sync.KIND, answer)
        for _ in range(10):
            await detector.is_gone("b", bytes(32), 0)
        idle_s = detector.suspicion_s("b")
        waits_s[0] = 0.06
        for _ in range(12):
            await detector.is_gone("b", bytes(32), 0)
        assert idle_s < 0.5, "a death is noticed as soon as before"
        assert detector.suspicion_s("b") >= idle_s + QUEUES * BURST_S

    virtually(scenario())


@pytest.mark.parametrize(
    ("name", "told"), [("a", "this peer has taken over its name"), ("other", "open TCP port 1 here")]
)
def test_a_peer_that_comes_back_is_not_told_how_to_reach_its_own_predecessor(name: str, told: str) -> None:
    said = list[Event]()

    async def scenario() -> None:
        ctx, _ = members(MemoryHub(), Codec.FP32)["a"]
        ctx.roster.hear_of(Member(id="before", name=name, stage=0, trainer=False))
        ctx.roster.mark_alive("before")
        detector = ctx.detector
        detector._peer = dataclasses.replace(ctx, emit=said.append)
        detector.mark_down("before", "open TCP port 1 here")

    virtually(scenario())
    assert [event.reason for event in said if isinstance(event, PeerDown)] == [told]
