"""When a silent peer is suspected: its own answers and the queues on the way decide."""

from __future__ import annotations

import asyncio

from muletrain.config.schema import Codec
from muletrain.network.memory import MemoryHub
from muletrain.runtime.members.detector import BURST_S, QUEUES
from muletrain.runtime.members.messages import GetProgress, Progress
from tests.test_averaging import members
from tests.virtual import virtually


def test_where_answers_meet_queues_a_suspicion_allows_for_one_that_we_cannot_measure() -> None:
    """Fleet 135 of the grid: flows that begin together queue 0.4 s in a peer's uplink, while ours is idle."""

    async def scenario() -> None:
        group, waits_s = members(MemoryHub(), Codec.FP32), [0.002]
        detector = group["a"][0].detector

        async def answer(sender: str, payload: bytes) -> bytes:
            await asyncio.sleep(waits_s[0])
            return Progress(current=True, step=0, stage=0).pack()

        group["b"][0].net.serve(GetProgress.KIND, answer)
        for _ in range(10):
            await detector.measure("b", bytes(32), 0)
        idle_s = detector.suspicion_s("b")
        waits_s[0] = 0.06
        for _ in range(12):
            await detector.measure("b", bytes(32), 0)
        assert idle_s < 0.5, "a death is noticed as soon as before"
        assert detector.suspicion_s("b") >= idle_s + QUEUES * BURST_S

    virtually(scenario())
