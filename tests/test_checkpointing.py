"""Checkpoints are gathered whole or not at all, whoever dies, while the event loop turns on."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from muletrain.errors import PeerUnreachable, ProtocolError, Refused
from muletrain.events import (
    CheckpointWritten,
    TransferFailed,
)
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runtime.checkpoint import checkpointing
from muletrain.runtime.checkpoint.checkpointing import REMEMBERED, Parts
from muletrain.runtime.checkpoint.messages import CheckpointEnd
from muletrain.runtime.checkpoint.store import Key, PartFacts
from muletrain.runtime.core import blocks
from muletrain.runtime.core.blocks import AskBlocks
from muletrain.runtime.core.lifecycle import Lifecycle, State
from muletrain.runtime.members.context import Context
from muletrain.runtime.peer.ending import Ending
from muletrain.runtime.peer.messages import Finished
from muletrain.wire.statefile import StateBuffers
from tests.checkpoint_stages import LINEAGE, Stages, names, play, state

pytestmark = pytest.mark.timeout(360)


def test_checkpoints_are_written_and_the_oldest_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        stages = Stages(tmp_path / "run", keep=2)
        for step in (4, 8, 12):
            assert await stages.checkpoint(step)
        assert names(tmp_path / "run") == ["step-00000008", "step-00000012"]
        checkpoint = Checkpoint.open(tmp_path / "run" / "step-00000012")
        assert [checkpoint.verify(p).name for p in checkpoint.manifest["parts"]] == [
            "stage-0.safetensors",
            "stage-1.safetensors",
        ]
        assert checkpoint.tokenizer_json == b"{}"
        assert [e.step for e in stages.of(CheckpointWritten)] == [4, 8, 12]
        await stages.close()

    play(scenario)


@pytest.mark.alone
def test_neither_the_loop_nor_anyone_else_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_s, sync, digest = 0.7, os.fsync, PartFacts.of
    slow = iter([slow_s, slow_s])

    def slow_sync(descriptor: int) -> None:
        time.sleep(next(slow, 0.0))
        sync(descriptor)

    def slow_digest(buffers: Any) -> PartFacts:
        time.sleep(slow_s)
        return digest(buffers)

    monkeypatch.setattr(os, "fsync", slow_sync)
    monkeypatch.setattr(PartFacts, "of", slow_digest)

    async def scenario() -> None:
        stages = Stages(tmp_path / "run")
        writing = asyncio.create_task(stages.checkpoint(4))
        worst = 0.0
        while not writing.done():
            begin = time.perf_counter()
            await asyncio.sleep(0.005)
            worst = max(worst, time.perf_counter() - begin)
        assert await writing
        assert worst < slow_s / 2, f"the loop stood still for {worst:.2f} s"
        await stages.close()

    play(scenario)


def test_a_part_whose_hash_takes_longer_than_a_look_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer looks after its checkpoint meanwhile, and told others of a part that it could not describe yet."""
    digest = PartFacts.of

    def slow_digest(buffers: Any) -> PartFacts:
        time.sleep(1.0)
        return digest(buffers)

    monkeypatch.setattr(checkpointing, "pause_s", lambda tries: 0.05)
    monkeypatch.setattr(PartFacts, "of", slow_digest)

    async def scenario() -> None:
        stages = Stages(tmp_path / "run", sharing="one other")
        assert await stages.checkpoint(4)
        assert await stages.checkpoint(8)
        assert not any(ctx.tasks.failure.done() for ctx in stages.contexts.values())
        await stages.close()

    play(scenario)


@pytest.mark.parametrize("sharing", ["", "second"])
def test_when_the_collector_dies_another_collects(
    tmp_path: Path, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it had all parts; the next one shares its folder, or begins in its own."""

    async def scenario() -> None:
        stages = Stages(tmp_path / "run", stages={"coordinator": 0, "second": 0, "one": 1, "two": 2}, sharing=sharing)
        await stages.write(4, "second", "two")
        stages.kill("coordinator")
        await stages.write(4, "one")
        assert await asyncio.wait_for(stages.checkpoints["second"].ended(Key(4, LINEAGE)), 20)
        (written,) = stages.of(CheckpointWritten)
        assert Path(written.path).parent == stages.folders[sharing or "one"]
        checkpoint = Checkpoint.open(Path(written.path))
        assert len([checkpoint.verify(p) for p in checkpoint.manifest["parts"]]) == 3
        assert not stages.refused
        await stages.close()

    play(scenario)


def test_where_the_place_is_not_shared_two_peers_of_other_stages_keep_each_part_of_the_newest(tmp_path: Path) -> None:
    async def scenario() -> None:
        peers = {"coordinator": 0, "a": 0, "b": 1, "c": 1, "d": 2, "e": 2}
        stages = Stages(tmp_path / "run", stages=peers)
        for step in (4, 8):
            assert await stages.checkpoint(step)
        kept: dict[int, list[str]] = {0: [], 1: [], 2: []}
        deadline = time.monotonic() + 20

        def old() -> list[str]:
            return [
                n
                for n, c in stages.checkpoints.items()
                if n != "coordinator" and Key(4, LINEAGE) in stages.books[n].parts
            ]

        while (old() or any(len(k) < 2 for k in kept.values())) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            kept = {
                s: [
                    n
                    for n, c in stages.checkpoints.items()
                    if n != "coordinator" and s in stages.books[n].parts.get(Key(8, LINEAGE), {})
                ]
                for s in kept
            }
        for stage, names_ in kept.items():
            assert len(names_) == 2
            assert all(peers[n] != stage for n in names_)
        assert not old()
        own = [f for f in stages.folders.values() if f != tmp_path / "run"]
        while any(len(names(f)) > 1 for f in own):  # tidying up has a thread of its own
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert not stages.refused
        await stages.close()

    play(scenario)


def test_a_part_that_changes_on_its_way_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    async def scenario() -> None:
        stages = Stages(tmp_path / "run")
        liar = stages.checkpoints["one"]
        key = Key(4, LINEAGE)
        opened = liar.open(key)
        part = state(1)
        facts = opened.parts[1] = PartFacts(sum(map(len, StateBuffers(part))), bytes(32))
        opened.own = part, facts
        await stages.write(4, "coordinator")
        await liar.announce(opened, 1, facts)
        await asyncio.sleep(1.0)
        assert names(tmp_path / "run")[0].startswith(".step-00000004")
        await stages.close()
        assert any("not what was announced" in e.reason for e in stages.of(TransferFailed))

    play(scenario)


def test_who_announces_a_false_part_first_does_not_keep_the_checkpoint_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a type, too, that no checkpoint has."""

    async def scenario() -> None:
        stages = Stages(tmp_path / "run")
        liar, key = stages.checkpoints["other"], Key(4, LINEAGE)
        opened = liar.open(key)
        facts = opened.parts[1] = PartFacts(8, bytes(32))
        opened.own = {"x": torch.zeros(8, dtype=torch.uint8)}, facts
        await liar.announce(opened, 1, facts)
        await asyncio.sleep(0.2)
        liar.end = liar.announce = _nothing  # type: ignore[method-assign]  # it has said it
        assert await stages.checkpoint(4)
        Checkpoint.intact(tmp_path / "run" / "step-00000004")
        await stages.close()

    play(scenario)


@pytest.mark.parametrize("liar", ["one", "other"])
def test_a_holder_that_gives_another_part_than_was_announced_does_not_keep_the_right_one_away(
    liar: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        stages = Stages(tmp_path / "run")
        key, right = Key(4, LINEAGE), state(1)
        facts = PartFacts.of(StateBuffers(right))
        for name in ("one", "other"):
            opened = stages.checkpoints[name].open(key)
            opened.own = {**right, "model/1": -right["model/1"]} if name == liar else right, facts
        taken = await stages.checkpoints["coordinator"].parts.take(key, 1, facts, ["one", "other"])
        assert torch.equal(taken["model/1"], right["model/1"])
        await stages.close()

    play(scenario)


def test_of_parts_few_copies_are_kept_while_they_are_taken_and_none_when_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A taker that does not read would else have every part of every checkpoint in memory."""
    monkeypatch.setattr(checkpointing, "LOOK_S", 0.05)
    for module in (checkpointing, blocks):
        monkeypatch.setattr(module, "GONE_S", 1.0)
    stuck = asyncio.Event()

    async def send(*args: Any, **more: Any) -> None:
        await stuck.wait()

    async def scenario() -> None:
        monkeypatch.setattr(Context, "send", send)
        stages = Stages(tmp_path / "run")
        own, net = stages.checkpoints["one"], stages.contexts["other"].net
        names = {}
        for step in (4, 5, 6):
            part = state(1)
            own.open(Key(step, LINEAGE)).own = part, PartFacts.of(StateBuffers(part))
            names[step] = PartFacts.of(StateBuffers(part)).digest

        async def ask(step: int, *blocks: int) -> bytes:
            asked = AskBlocks(digest=names[step], blocks=blocks)
            return await net.call("one", asked.KIND, asked.pack(), timeout_s=9.0)

        for step in (4, 5):
            await ask(step, 0)
        with pytest.raises(Refused, match="enough copies to send"):
            await ask(6)
        stuck.set()
        assert await ask(6)
        assert {key.step for key, _ in own.parts._copies} == {5, 6}, "the oldest went"
        await asyncio.sleep(2.0)
        assert not own.parts._copies
        await stages.close()

    play(scenario)


async def _nothing(*_: Any, **__: Any) -> None:
    """Instead of something."""


def test_of_the_end_of_a_checkpoint_its_collector_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        stages = Stages(tmp_path / "run")
        key = Key(4, LINEAGE)
        for name in ("coordinator", "other"):
            own = stages.checkpoints[name]
            await own.on_end("one", CheckpointEnd(step=4, lineage=LINEAGE))
            await own.on_end("one", CheckpointEnd(step=4, lineage=LINEAGE, reason="so it says"))
            with pytest.raises(ProtocolError, match="cannot be"):
                await own.on_end("coordinator", CheckpointEnd(step=1001, lineage=LINEAGE))
            assert own.end_of(key) is None
        assert await stages.checkpoint(4)
        await stages.checkpoints["one"].on_end("coordinator", CheckpointEnd(step=8, lineage=LINEAGE, reason="no room"))
        assert stages.checkpoints["one"].end_of(Key(8, LINEAGE)) == "no room"
        await stages.close()

    play(scenario)


def test_that_the_run_has_ended_well_is_believed_of_the_collector_and_of_others_once_it_has_gone(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        stages = Stages(tmp_path / "run")

        async def find_out(sender: str) -> None:
            return None

        runner: Any = SimpleNamespace(exchange=SimpleNamespace(find_out=find_out))

        async def told(name: str, sender: str, life: Lifecycle) -> Ending:
            """The ending of ``name``, which hears of the end from ``sender``."""
            at: Any = SimpleNamespace(life=life, step=4, applied=LINEAGE)
            ending = Ending(stages.contexts[name], at, stages.checkpoints[name], runner)
            word, net = Finished(written=True).pack(), stages.contexts[sender].net
            await net.call(name, Finished.KIND, word, timeout_s=5)
            await asyncio.sleep(0.3)
            return ending

        late = Lifecycle(State.TRAINING)
        coordinator = await told("coordinator", "one", Lifecycle(State.FINISHED))
        early = await told("other", "coordinator", late)
        one = await told("other", "one", Lifecycle(State.FINISHED))
        assert not any(p.known for p in (coordinator, early, one))
        known = await told("one", "coordinator", Lifecycle(State.FINISHED))
        assert known.known
        late.to(State.FINISHED)
        stages.kill("coordinator")
        for left in (early, one):  # nobody is there who could know better
            assert await asyncio.wait_for(left.finish(), 10)
        assert not coordinator.known
        assert await asyncio.wait_for(known.finish(), 10), "it was written"
        await stages.close()

    play(scenario)


def test_a_part_may_take_its_time_while_the_collector_lives_and_word_of_the_end_is_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "CEILING_S", 0.3)
    take = Parts.take

    async def slowly(*args: Any) -> dict[str, Tensor]:
        await asyncio.sleep(1.5)
        return await take(*args)

    monkeypatch.setattr(Parts, "take", slowly)

    async def scenario() -> None:
        stages = Stages(tmp_path / "run")
        writer, key = stages.checkpoints["one"], Key(4, LINEAGE)
        assert await stages.checkpoint(4)
        assert await asyncio.wait_for(writer.ended(key), 5)
        for k in range(REMEMBERED):  # it forgets that
            writer.end(Key(1000 + k, LINEAGE), "failed")
        assert writer.end_of(key) is None
        await stages.write(4, "one")
        assert await asyncio.wait_for(writer.ended(key), 5)
        await stages.close()

    play(scenario)


def test_a_copy_that_fails_is_no_news_once_the_checkpoint_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run its holders go."""
    take = Parts.take

    async def scenario() -> None:
        stages = Stages(tmp_path / "run", stages={"coordinator": 0, "a": 1, "b": 2})
        tried = asyncio.Event()

        async def vain(exchange: Parts, key: Key, *args: Any) -> dict[str, Tensor]:
            own = next(n for n, c in stages.checkpoints.items() if c.parts is exchange)
            if own == "coordinator":
                return await take(exchange, key, *args)
            assert await stages.checkpoints[own].ended(key)
            tried.set()
            raise PeerUnreachable("it has gone")

        monkeypatch.setattr(Parts, "take", vain)
        assert await stages.checkpoint(4)
        await tried.wait()
        await asyncio.sleep(0.1)
        assert not stages.of(TransferFailed)
        await stages.close()

    play(scenario)


def test_who_gives_up_on_a_checkpoint_leaves_it_to_the_collector_that_shares_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def scenario() -> None:
        stages = Stages(tmp_path / "run", sharing="other")
        key = Key(4, LINEAGE)
        await stages.write(4, "other")
        stages.checkpoints["other"].end(key, "its parts did not come whole")
        await stages.write(4, "coordinator")
        assert await asyncio.wait_for(stages.checkpoints["coordinator"].ended(key), 20)
        Checkpoint.intact(tmp_path / "run" / "step-00000004")
        await stages.close()

    play(scenario)
