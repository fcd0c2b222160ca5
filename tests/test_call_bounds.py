"""What one member can make another send and ask of others: calls are paced, and answered for one at a time."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgpack
import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.errors import MuletrainError, Refused
from muletrain.network import answers
from muletrain.network.answers import Quota
from muletrain.network.delivery import Delivery
from muletrain.network.memory import MemoryHub, MemoryNetwork
from muletrain.network.relay import DIALS, PIPES_EACH, Relay
from muletrain.runtime.checkpoint.store import Key
from muletrain.runtime.core import blocks
from muletrain.runtime.core.blocks import AskBlocks
from muletrain.runtime.core.lifecycle import Lifecycle
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.row import Row, Sync
from muletrain.runtime.microbatch.messages import Gap
from muletrain.runtime.recovery.forks import AskStay, History
from muletrain.runtime.recovery.messages import AskStanding, StepBack
from muletrain.runtime.transfer import donor as snapshot
from muletrain.runtime.transfer.messages import AskSnapshot

from .targets import GENESIS, MEMBERS, Target, ended, ready, run, until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from muletrain.network.delivery import Delivery
    from muletrain.runtime.microbatch.microbatches import Microbatches


pytestmark = pytest.mark.timeout(300)


async def repeat(times: int, what: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    for _ in range(times):
        await what()


# Every kind ---------------------------------------------------------------------------------------------------------------


def microbatches(target: Target) -> Microbatches:
    return target.peer._microbatches


# What is drawn by calls -----------------------------------------------------------------------------------------------------


def test_answers_to_one_member_are_paced_beyond_a_first_amount_and_others_are_not_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(answers, "BURST", 1 << 20)
        monkeypatch.setattr(answers, "PER_S", 1 << 20)
        hub = MemoryHub()
        a, b, c = (hub.join(n) for n in "abc")

        async def answer(sender: str, payload: bytes) -> bytes:
            return bytes(1 << 18)

        a.serve("ask", answer)
        a.serve("gradient", answer, free=True)
        begin = time.monotonic()
        for _ in range(4):
            await b.call("a", "ask", b"", timeout_s=9)
        assert time.monotonic() - begin < 0.3
        await b.call("a", "ask", b"", timeout_s=9)
        assert time.monotonic() - begin > 0.2
        between = time.monotonic()
        await c.call("a", "ask", b"", timeout_s=9)
        await b.call("a", "gradient", b"", timeout_s=9)
        assert time.monotonic() - between < 0.2

    run(scenario)


def test_one_member_has_a_bounded_number_of_calls_answered_at_once() -> None:
    async def scenario() -> None:
        limited, done = Quota(), asyncio.Event()

        async def slow(sender: str, payload: bytes) -> bytes:
            await done.wait()
            return b""

        calls = [asyncio.create_task(limited.answer("a", slow, b"", free=False)) for _ in range(answers.AT_ONCE)]
        await asyncio.sleep(0)
        with pytest.raises(MuletrainError, match="calls of yours"):
            await limited.answer("a", slow, b"", free=False)
        other = asyncio.create_task(limited.answer("b", slow, b"", free=False))
        done.set()
        await asyncio.gather(*calls, other)
        again = [limited.answer("a", slow, b"", free=False) for _ in range(answers.AT_ONCE)]
        assert await asyncio.gather(*again) == [b""] * answers.AT_ONCE, "none of the first ones counts any more"

    run(scenario)


class Donor:
    """Offers copies, and sends them to takers that do not read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stuck = asyncio.Event()

        async def send(ctx: Context, *args: Any, **more: Any) -> None:
            await self.stuck.wait()

        monkeypatch.setattr(Context, "send", send)
        self.hub, self.takers = MemoryHub(), dict[str, MemoryNetwork]()
        self.net, self.n, self.now = self.hub.join("a"), 0, 0.0

        async def state() -> dict[str, torch.Tensor]:
            self.n += 1
            self.now += 3.0  # a large state
            return {"w": torch.full((1000,), float(self.n))}

        async def offload(fn: Any, *args: Any) -> Any:
            return fn(*args)

        own = SimpleNamespace(stage=0)
        chain = SimpleNamespace(lineages=(b"",), at=lambda _: b"")
        self.position: Any = SimpleNamespace(
            step=0, applied=bytes(32), away=False, settled=True, life=Lifecycle(), chain=chain
        )
        log: Any = SimpleNamespace(follow=lambda *_: None, copy=lambda *_: None, reaches=lambda _: False)
        clock: Any = SimpleNamespace(now=lambda: self.now, sleep=asyncio.sleep, deadline=LoopClock().deadline)
        compute: Any = SimpleNamespace(state=state, offload=offload)
        roster: Any = SimpleNamespace(own=own, expelled=lambda _: False)
        ctx = Context(self.net, clock, compute, roster, cast("Any", None), lambda _: None)

        async def serves(peer: str, stage: int) -> bool:
            return True

        membership: Any = SimpleNamespace(serves=serves)
        self.ctx, self.snapshots = ctx, snapshot.Snapshots(ctx, self.position, log, membership)

    async def offer(self, taker: str) -> bytes:
        self.position.step += 1
        ask = AskSnapshot(stage=0, after=self.position.step).pack()
        return snapshot.Snapshot.unpack(await self.call(taker, AskSnapshot.KIND, ask)).digest

    async def ask(self, taker: str, digest: bytes, blocks: Iterable[int]) -> None:
        await self.call(taker, AskBlocks.KIND, AskBlocks(digest=digest, blocks=tuple(blocks)).pack())

    async def call(self, taker: str, kind: str, payload: bytes) -> bytes:
        if taker not in self.takers:
            self.takers[taker] = self.hub.join(taker)
        return await self.takers[taker].call("a", kind, payload, timeout_s=9)


def test_one_taker_has_a_bounded_number_of_blocks_at_once_and_each_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(blocks, "BLOCK", 100)  # 40 blocks
        donor = Donor(monkeypatch)
        digest = await donor.offer("t")
        donor.position.step -= 1
        assert await donor.offer("other") == digest
        more: bytes = msgpack.packb({"digest": digest, "blocks": [0] * (blocks.RUN + 1)})
        with pytest.raises(Refused):
            await donor.call("t", AskBlocks.KIND, more)
        for k in range(0, blocks.MAX_RUNS * blocks.RUN, blocks.RUN):
            await donor.ask("t", digest, range(k, k + blocks.RUN))
        await donor.ask("t", digest, range(blocks.RUN))  # they are on their way
        with pytest.raises(MuletrainError, match="enough to send"):
            await donor.ask("t", digest, range(blocks.MAX_RUNS * blocks.RUN, 40))
        await donor.ask("other", digest, [0])
        donor.stuck.set()
        with pytest.raises(MuletrainError, match="4 times"):
            await repeat(100, lambda: donor.ask("t", digest, range(blocks.RUN)))
        await donor.ctx.tasks.close()

    run(scenario)


def test_takers_that_do_not_read_keep_no_more_copies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        donor, made = Donor(monkeypatch), 0
        for k in range(12):
            donor.now += 11.0  # nobody has asked for the others for a while
            try:
                await donor.ask(f"liar-{k}", await donor.offer(f"liar-{k}"), [0])
                made += 1
            except MuletrainError:
                continue
        assert made <= snapshot.MAX_COPIES + 1
        donor.stuck.set()
        await asyncio.sleep(0.01)
        await donor.offer("honest")
        await donor.ctx.tasks.close()

    run(scenario)


def test_a_taker_that_asks_again_has_one_copy_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a break, or a state that came too late, the earlier copy is of no use to it. Another taker may need it."""

    async def scenario() -> None:
        donor = Donor(monkeypatch)
        await donor.offer("t")
        await donor.offer("t")
        assert donor.snapshots.copies == 1
        donor.position.step -= 1
        await donor.offer("other")
        await donor.offer("t")
        assert donor.snapshots.copies == 2
        await donor.ctx.tasks.close()

    run(scenario)


def test_one_taker_has_copies_made_for_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        donor = Donor(monkeypatch)
        with pytest.raises(MuletrainError, match="many copies"):
            await repeat(20, lambda: donor.offer("liar"))
        assert 3.0 * donor.n <= snapshot.COPYING_S + 8.0
        await donor.offer("honest")
        donor.now += 120.0
        await donor.offer("liar")
        await donor.ctx.tasks.close()

    run(scenario)


# What one message has a peer ask of others ----------------------------------------------------------------------------------


def test_a_history_or_an_order_told_again_and_again_has_all_peers_asked_now_and_then(tmp_path: Path) -> None:
    async def scenario() -> None:
        target, asked = Target(1, tmp_path), list[str]()

        async def count(sender: str, payload: bytes) -> bytes:
            asked.append(sender)
            raise MuletrainError("no")

        for net in target.others.values():
            for kind in (AskStay.KIND, AskStanding.KIND):
                net.serve(kind, count)
        await ready(target)
        here = Key(target.peer.position.step, target.peer.position.applied)
        for k in range(50):
            tale = History(step=1, lineages=(bytes(32), bytes([k]) * 32), over=True).pack()
            await target.others["last"].call(target.name, History.KIND, tale, timeout_s=9)
            order = StepBack(count=k + 1, step=here.step, base=here.lineage, parts=(), moves=(), lost=()).pack()
            await target.others["last"].call(target.name, StepBack.KIND, order, timeout_s=9)
        await asyncio.sleep(0.2)
        assert len(asked) <= 4 * len(MEMBERS)
        await ended(target)

    run(scenario)


def test_looking_for_many_microbatches_asks_each_peer_twice_at_most(tmp_path: Path) -> None:
    async def scenario() -> None:
        target, asked = Target(0, tmp_path, answers=False), 0
        await ready(target)
        survey = microbatches(target).survey

        async def held(sender: str, payload: bytes) -> bytes:
            nonlocal asked
            asked += not Sync.unpack(payload).brief
            await asyncio.sleep(0.05)
            return Row(current=True, step=0, stage=1, accumulated=(1, 2), accumulated_losses=(5.0, float("nan"))).pack()

        for net in target.others.values():
            net.serve(Sync.KIND, held)
        work = [survey.still_missing(GENESIS.lineage, 0, index, (0, 1), lambda: 30.0) for index in range(4)]
        answers = await asyncio.gather(*work)
        assert asked <= 2 * len(target.others)
        assert [missing for missing, _ in answers[1:]] == [(0,), (0,), (0, 1)]
        assert [loss for _, loss in answers[1:]] == [5.0, None, None]
        del answers
        gc.collect()
        kept = [o for o in gc.get_objects() if type(o) is Row and o.accumulated == (1, 2)]
        assert not kept, "no answer is kept"
        await ended(target)

    run(scenario)


def test_what_a_replica_holds_that_its_stage_goes_on_without_is_run_again(tmp_path: Path) -> None:
    """Else one that hangs, or lies, would hold up its stage until the others give up. Its own stage must say so, and
    most of it."""

    async def scenario() -> None:
        target = Target(0, tmp_path, answers=False)
        trainers = microbatches(target)._trainers
        await until(lambda: bool(trainers))
        trainer, ignored = trainers[0], trainers[0]._ignored
        gap: dict[str, Any] = {"lineage": GENESIS.lineage, "step": 0, "stage": 1, "indices": ()}
        assert not ignored("last")
        trainer.on_gap("second", Gap(**gap, without=("last",)))
        assert not ignored("last"), "the word of another stage is not enough"
        trainer.on_gap("third", Gap(**gap, without=("last",)))
        assert ignored("last")
        assert trainer._left_out((0, 1)) == ("last",)
        assert not ignored("third")
        trainer.on_gap("last", Gap(**gap, without=("third",)))
        assert trainer._left_out((0, 1)) == ("third",), "who leave each other out yield to the first, and so do we"
        trainer.on_gap("third", Gap(**gap, without=("last",), turn=1))
        assert trainer._left_out((0, 1)) == ("last",), "a first that gets nowhere loses its turn"
        trainer.on_gap("last", Gap(**gap))
        trainer.on_gap("third", Gap(**gap))
        assert not ignored("last"), "what was said last counts"
        await ended(target)

    run(scenario)


def test_a_relay_gives_one_member_half_of_its_pipes_and_dials_for_it_now_and_then() -> None:
    async def scenario() -> None:
        dialled = 0

        async def dial(*_: Any) -> None:
            nonlocal dialled
            dialled += 1
            raise OSError("nobody there")

        async def connected() -> dict[str, list[str]]:
            return {}

        gate = SimpleNamespace(admitted=lambda _: pytest.fail("looked for a way"))
        p2p: Any = SimpleNamespace(dial=dial, connected=connected, gate=gate)
        relay = Relay(p2p, ("", 0), [], Delivery(), private=False, carries=True, told=lambda *_: None)
        peer = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"
        for _ in range(int(3 * DIALS)):
            assert not await relay._reaches(peer, "relay", ["/ip4/10.0.0.1/tcp/22/p2p/" + peer])
        assert DIALS <= dialled <= DIALS + 2
        relay._streams["a"] = PIPES_EACH + 1
        await relay._lend("a", "b", [], cast("Any", None))

    run(scenario)
