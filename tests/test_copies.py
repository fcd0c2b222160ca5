"""Copies of a state that a donor keeps for those that take it: turns, slow links, an end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from muletrain.errors import Refused
from muletrain.policy.fork_choice import Chain
from muletrain.runtime.core import blocks
from muletrain.runtime.core.blocks import AskBlocks, StateImage
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.messages import Member
from muletrain.runtime.transfer import donor as snapshot
from muletrain.runtime.transfer.messages import AskSnapshot, Snapshot
from tests.donors import Stage, State, run, small_blocks

_small = pytest.fixture(autouse=True)(small_blocks)


def test_a_copy_that_somebody_is_taking_is_not_broken_off_for_another_taker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcomers that come one step after the other would have each other begin anew without end."""

    async def scenario() -> None:
        monkeypatch.setattr(snapshot, "MAX_COPIES", 2)
        stage = Stage("a")
        donor = stage.at["a"]

        async def asked(step: int, after: int = 0) -> int:
            """By another taker each time."""
            taker = f"t{step}"
            stage.contexts["a"].roster.admit(Member(id=taker, name=taker, stage=0, trainer=False))
            donor.step, donor.chain = step, Chain(step, (bytes(32),) * 4)
            stage.states["a"] = stage.contexts["a"].compute = State(step)  # other weights after each step
            ask = AskSnapshot(stage=0, after=after).pack()
            return Snapshot.unpack(await stage.hub.join(taker).call("a", AskSnapshot.KIND, ask, timeout_s=5)).step

        stage.logs["a"].reaches = lambda step: step >= 3
        assert [await asked(3), await asked(4), await asked(5)] == [3, 4, 4]
        assert await asked(6, after=5) == 6, "an earlier one is of no use"
        monkeypatch.setattr(snapshot, "PAUSE_MAX_S", 0.0)
        assert await asked(7) == 7, "nobody takes those that there are"

    run(scenario)


def test_each_of_many_takers_gets_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than one donor serves at once used to be sent away until they gave up."""

    async def scenario() -> None:
        stage = Stage("a")
        sent: list[str] = []
        held_up = asyncio.Event()

        async def send(self: StateImage, ctx: Any, taker: str, block: int) -> None:
            await held_up.wait()
            sent.append(taker)

        monkeypatch.setattr(StateImage, "send", send)
        takers = [f"t{k}" for k in range(20)]
        for taker in takers:
            network = stage.hub.join(taker)
            stage.contexts["a"].roster.admit(Member(id=taker, name=taker, stage=0, trainer=False))
            offer = Snapshot.unpack(await network.call("a", AskSnapshot.KIND, AskSnapshot(stage=0).pack(), timeout_s=5))
            for k in range(blocks.MAX_RUNS):
                for _ in range(2):  # what is being sent is not sent twice
                    ask = AskBlocks(digest=offer.digest, blocks=(k,)).pack()
                    await network.call("a", AskBlocks.KIND, ask, timeout_s=5)
            ask = AskBlocks(digest=offer.digest, blocks=(0, blocks.MAX_RUNS)).pack()
            with pytest.raises(Refused, match="enough to send"):
                await network.call("a", AskBlocks.KIND, ask, timeout_s=5)
        held_up.set()
        await asyncio.sleep(0.05)
        assert Counter(sent) == dict.fromkeys(takers, blocks.MAX_RUNS)
        await network.call("a", AskBlocks.KIND, ask, timeout_s=5)

    run(scenario)


def test_a_copy_that_is_still_being_sent_is_kept_however_slow_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of blocks may take longer than a copy is kept after the last question for it."""

    async def scenario() -> None:
        monkeypatch.setattr(blocks, "GONE_S", 0.2)
        whole = Context.send

        async def slowly(self: Context, *args: Any, **how: Any) -> None:
            await asyncio.sleep(0.06)
            await whole(self, *args, **how)

        monkeypatch.setattr(Context, "send", slowly)
        stage, begin = Stage("a"), time.monotonic()
        await stage.receiver.fetch(lambda offer: True, rounds=1)
        assert time.monotonic() - begin > 2 * blocks.GONE_S
        stage.check()

    run(scenario)


def test_copies_are_dropped_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(blocks, "GONE_S", 0.1)
        stage = Stage("a")
        await stage.receiver.fetch(lambda offer: True)
        named = [t.get_name() for t in asyncio.all_tasks()]
        assert named.count("copies") == 1
        await asyncio.sleep(0.4)
        assert "copies" not in [t.get_name() for t in asyncio.all_tasks()], "the copy went, and whoever looked after it"

    run(scenario)
