"""Checkpoints: gathered whole or not at all, whatever the disk does, while the event loop turns on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import fsspec
import pytest
import safetensors.torch
import torch
from torch import Tensor

from muletrain.clock import LoopClock
from muletrain.config.load import load_config
from muletrain.errors import CheckpointError, ConfigError, PeerUnreachable, ProtocolError
from muletrain.events import (
    CheckpointFailed,
    CheckpointWritten,
    Event,
    EventLog,
    Note,
    StepDone,
    TransferFailed,
    read_events,
)
from muletrain.network.base import Frame
from muletrain.network.memory import MemoryHub
from muletrain.runs.assemble import RunFacts
from muletrain.runs.checkpoint import Checkpoint, bring_home, bring_newest_home
from muletrain.runs.tensorboard import TensorBoardSink
from muletrain.runtime.checkpoint import coordinator as checkpointing
from muletrain.runtime.checkpoint.actors import Checkpointing
from muletrain.runtime.checkpoint.messages import CheckpointEnd, PartReady
from muletrain.runtime.checkpoint.part_exchange import PartExchange
from muletrain.runtime.checkpoint.progress import MAX_OPEN, REMEMBERED
from muletrain.runtime.checkpoint.roles import Book
from muletrain.runtime.checkpoint.store import MARKER, CheckpointStore, Folder, Key, PartFacts, PartsGone, open_place
from muletrain.runtime.core.lifecycle import Lifecycle, State
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.membership import Membership
from muletrain.runtime.members.messages import GetProgress, Progress
from muletrain.runtime.members.roster import Genesis, Member, Roster
from muletrain.runtime.peer.ending import Ending
from muletrain.runtime.peer.messages import Finished
from muletrain.runtime.transfer.donor import Receiver, Snapshots
from muletrain.runtime.transfer.messages import Block
from muletrain.wire.statefile import cut, state_buffers

pytestmark = pytest.mark.timeout(360)

FACTS = RunFacts.of(load_config(None, ["model.width=64", "model.heads=2", "train.steps=1000", "fleet.peers=3"]))
LINEAGE = bytes(32)
FILES = {"tokenizer.json": b"{}"}


def state(stage: int, elements: int = 1 << 19) -> dict[str, Tensor]:
    """2 MiB: a few pieces."""
    return {f"model/{stage}": torch.randn(elements), "loss_scale": torch.tensor([1.0, 2.0], dtype=torch.float64)}


class Offloads:
    """Nothing here computes; hashing has a thread."""

    n_params = 0

    async def offload(self, fn: Any, *args: Any) -> Any:
        return await asyncio.to_thread(fn, *args)


class Stages:
    """Peers of some stages in memory, each with a folder of its own, but those in ``sharing``, who share the
    first's."""

    def __init__(self, folder: Path, keep: int = 2, stages: dict[str, int] | None = None, sharing: str = "") -> None:
        self.stages = stages or {"coordinator": 0, "one": 1, "other": 1}
        self.hub, self.clock = MemoryHub(), LoopClock()
        first = next(iter(self.stages))
        self.folders = {
            n: folder if n == first or n in sharing.split() else folder.with_name(f"of-{n}") for n in self.stages
        }
        self.places = {n: Folder(f, keep) for n, f in self.folders.items()}
        self.genesis = Genesis(
            run_id="run",
            config=bytes(32),
            data=bytes(32),
            stages=1 + max(self.stages.values()),
            coordinator=first,
            first_step=0,
            members=tuple(
                Member(id=n, name=n, stage=s, trainer=True, addresses=(), place=self.places[n].name)
                for n, s in self.stages.items()
            ),
        )
        self.plan = dataclasses.replace(FACTS.plan(), stages=self.genesis.stages, state_bytes=())
        self.events: list[Event] = []
        self.refused: list[str] = []
        self.contexts: dict[str, Context] = {}
        self.books = {n: Book(place, FACTS.manifest("run") | {"data": "d"}, FILES) for n, place in self.places.items()}
        self.checkpoints = {name: self._peer(name) for name in self.stages}

    def _peer(self, name: str) -> Checkpointing:
        compute: Any = Offloads()
        nothing: Any = None  # nobody trains
        net = self.hub.join(name)
        ctx = Context(net, self.clock, compute, Roster(self.genesis, name), self.plan, self.events.append)
        membership, receiver = Membership(ctx), Receiver(ctx)
        snapshots = Snapshots(ctx, nothing, nothing, membership)
        own = Checkpointing(ctx, snapshots, receiver, membership, self.books[name])
        self.contexts[name] = ctx

        async def on_frame(sender: str, frame: Frame) -> None:
            match frame.kind:
                case PartReady.KIND:
                    own.coordinator.on_ready(sender, PartReady.parse(frame))
                case CheckpointEnd.KIND:
                    await own.coordinator.on_end(sender, CheckpointEnd.parse(frame))
                case Block.KIND:
                    receiver.taker.on_block(sender, Block.parse(frame), frame.tensors[0])

        async def alive(sender: str, payload: bytes) -> bytes:
            return Progress(current=True, step=0, stage=self.stages[name]).pack()

        net.serve(GetProgress.KIND, alive)
        net.on_refusal(lambda who, why: self.refused.append(why))
        net.receive(on_frame)
        return own

    async def write(self, step: int, *writers: str) -> None:
        states = {s: state(s) for s in set(self.stages.values())}
        await asyncio.gather(
            *(self.checkpoints[w].own_part.write(Key(step, LINEAGE), states[self.stages[w]]) for w in writers)
        )

    async def checkpoint(self, step: int, by: str = "coordinator") -> bool:
        await self.write(step, *(n for n, c in self.checkpoints.items() if c.roles.is_writer()))
        return await asyncio.wait_for(self.checkpoints[by].coordinator.ended(Key(step, LINEAGE)), 20.0)

    async def only(self, folder: Path, *expected: str) -> None:
        """Wait until all but those are gone: tidying up has a thread of its own."""
        for _ in range(1000):
            if names(folder) == list(expected):
                return
            await asyncio.sleep(0.02)
        assert names(folder) == list(expected)

    def kill(self, name: str) -> None:
        """Everyone has noticed."""
        self.hub.kill(name)
        del self.checkpoints[name]
        for ctx in self.contexts.values():
            ctx.roster.dead(name)

    def of(self, kind: type[Event]) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]

    async def close(self) -> None:
        for ctx in self.contexts.values():
            await ctx.tasks.close()


def names(folder: Path) -> list[str]:
    """But the marker."""
    return sorted(p.name for p in folder.iterdir() if p.name != MARKER)


def held_up(monkeypatch: pytest.MonkeyPatch, place: CheckpointStore) -> tuple[threading.Event, threading.Event]:
    """From now on ``place`` sets the first event when it is to write a part, and does so when the second is set."""
    begun, go_on, write_part = threading.Event(), threading.Event(), place.write_part

    def slow(*args: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        write_part(*args)

    monkeypatch.setattr(place, "write_part", slow)
    return begun, go_on


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 40)

    asyncio.run(bounded())


def test_a_state_is_a_safetensors_file_piece_by_piece() -> None:
    tensors = {"b": torch.randn(3, 5), "a": torch.randn(()), "z": torch.zeros(0, 4), "s": torch.ones(2).double()}
    buffers = state_buffers(tensors)
    whole = b"".join(buffers)
    read = safetensors.torch.load(whole)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[k], tensors[k]) and read[k].dtype == tensors[k].dtype for k in tensors)
    for size in (1, 7, 64, len(whole), len(whole) + 1):
        runs = [b"".join(run) for run in cut(buffers, size)]
        assert b"".join(runs) == whole
        assert {len(r) for r in runs[:-1]} <= {size}
        assert 0 < len(runs[-1]) <= size


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

    monkeypatch.setattr(checkpointing, "LOOK_S", 0.05)
    monkeypatch.setattr(checkpointing, "LOOK_MAX_S", 0.05)
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
    monkeypatch.setattr(checkpointing, "LOOK_S", 0.1)

    async def scenario() -> None:
        stages = Stages(tmp_path / "run", stages={"coordinator": 0, "second": 0, "one": 1, "two": 2}, sharing=sharing)
        await stages.write(4, "second", "two")
        stages.kill("coordinator")
        await stages.write(4, "one")
        assert await asyncio.wait_for(stages.checkpoints["second"].coordinator.ended(Key(4, LINEAGE)), 20)
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
    monkeypatch.setattr(checkpointing, "LOOK_S", 0.05)

    async def scenario() -> None:
        stages = Stages(tmp_path / "run")
        liar = stages.checkpoints["one"]
        key = Key(4, LINEAGE)
        opened = liar.coordinator.open(key)
        part = state(1)
        facts = opened.parts[1] = PartFacts(sum(map(len, state_buffers(part))), bytes(32))
        opened.own = part, facts
        await stages.write(4, "coordinator")
        await liar.coordinator.announce(opened, 1, facts)
        await asyncio.sleep(1.0)
        assert names(tmp_path / "run")[0].startswith(".step-00000004")
        await stages.close()
        assert any("not what was announced" in e.reason for e in stages.of(TransferFailed))

    play(scenario)


def test_who_announces_a_false_part_first_does_not_keep_the_checkpoint_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a type, too, that no checkpoint has."""
    monkeypatch.setattr(checkpointing, "LOOK_S", 0.05)

    async def scenario() -> None:
        stages = Stages(tmp_path / "run")
        liar, key = stages.checkpoints["other"], Key(4, LINEAGE)
        opened = liar.coordinator.open(key)
        facts = opened.parts[1] = PartFacts(8, bytes(32))
        opened.own = {"x": torch.zeros(8, dtype=torch.uint8)}, facts
        await liar.coordinator.announce(opened, 1, facts)
        await asyncio.sleep(0.2)
        liar.coordinator.end = liar.coordinator.announce = _nothing  # type: ignore[method-assign]  # it has said it
        assert await stages.checkpoint(4)
        Checkpoint.intact(tmp_path / "run" / "step-00000004")
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
            await own.coordinator.on_end("one", CheckpointEnd(step=4, lineage=LINEAGE))
            await own.coordinator.on_end("one", CheckpointEnd(step=4, lineage=LINEAGE, reason="so it says"))
            with pytest.raises(ProtocolError, match="cannot be"):
                await own.coordinator.on_end("coordinator", CheckpointEnd(step=1001, lineage=LINEAGE))
            assert own.checkpoints.ended(key) is None
        assert await stages.checkpoint(4)
        await stages.checkpoints["one"].coordinator.on_end(
            "coordinator", CheckpointEnd(step=8, lineage=LINEAGE, reason="no room")
        )
        assert stages.checkpoints["one"].checkpoints.ended(Key(8, LINEAGE)) == "no room"
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
    monkeypatch.setattr(checkpointing, "LOOK_S", 0.05)
    monkeypatch.setattr(checkpointing, "LIMIT_S", 0.3)
    take = PartExchange.take

    async def slowly(*args: Any) -> dict[str, Tensor]:
        await asyncio.sleep(1.5)
        return await take(*args)

    monkeypatch.setattr(PartExchange, "take", slowly)

    async def scenario() -> None:
        stages = Stages(tmp_path / "run")
        writer, key = stages.checkpoints["one"], Key(4, LINEAGE)
        assert await stages.checkpoint(4)
        assert await asyncio.wait_for(writer.coordinator.ended(key), 5)
        for k in range(REMEMBERED):  # it forgets that
            writer.checkpoints.end(Key(1000 + k, LINEAGE), "failed")
        assert writer.checkpoints.ended(key) is None
        await stages.write(4, "one")
        assert await asyncio.wait_for(writer.coordinator.ended(key), 5)
        await stages.close()

    play(scenario)


def test_a_copy_that_fails_is_no_news_once_the_checkpoint_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run its holders go."""
    take = PartExchange.take

    async def scenario() -> None:
        stages = Stages(tmp_path / "run", stages={"coordinator": 0, "a": 1, "b": 2})
        tried = asyncio.Event()

        async def vain(exchange: PartExchange, key: Key, *args: Any) -> dict[str, Tensor]:
            own = next(n for n, c in stages.checkpoints.items() if c.exchange is exchange)
            if own == "coordinator":
                return await take(exchange, key, *args)
            assert await stages.checkpoints[own].coordinator.ended(key)
            tried.set()
            raise PeerUnreachable("it has gone")

        monkeypatch.setattr(PartExchange, "take", vain)
        assert await stages.checkpoint(4)
        await tried.wait()
        await asyncio.sleep(0.1)
        assert not stages.of(TransferFailed)
        await stages.close()

    play(scenario)


def test_who_gives_up_on_a_checkpoint_leaves_it_to_the_collector_that_shares_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "LOOK_S", 0.05)

    async def scenario() -> None:
        stages = Stages(tmp_path / "run", sharing="other")
        key = Key(4, LINEAGE)
        await stages.write(4, "other")
        stages.checkpoints["other"].coordinator.end(key, "its parts did not come whole")
        await stages.write(4, "coordinator")
        assert await asyncio.wait_for(stages.checkpoints["coordinator"].coordinator.ended(key), 20)
        Checkpoint.intact(tmp_path / "run" / "step-00000004")
        await stages.close()

    play(scenario)


class Unfrozen(Folder):
    """A coordinator that froze right before its last step."""

    def go_on(self, key: Key) -> None:
        self._finish(key)


def test_a_checkpoint_is_complete_with_all_its_parts_or_not_at_all(tmp_path: Path) -> None:
    folder, store = Folder(tmp_path / "run", keep=2), open_place(f"memory://{tmp_path.name}", keep=2)
    key, about = Key(4, LINEAGE), FACTS.manifest("run") | {"data": "d"}
    buffers = state_buffers(state(0))
    parts = {0: PartFacts.of(buffers)}
    for place in (folder, store):
        with pytest.raises(PartsGone) as gone:
            place.publish(key, about, parts, FILES)
        assert gone.value.stages == {0}
        place.write_part(key, 0, buffers)
        place.publish(key, about, parts, FILES)
        place.abandon(key)  # too late
        assert place.complete() == {key: parts}
    # somebody froze before its last step, and others were there first
    folder.write_part(key, 0, buffers[:1])
    Unfrozen(tmp_path / "run", keep=2).go_on(key)
    assert names(tmp_path / "run") == ["step-00000004"]
    Checkpoint.intact(tmp_path / "run" / "step-00000004")


def test_a_checkpoint_never_goes_before_the_next_is_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two collectors publish the same checkpoint, or two histories one of the same step: with ``keep = 1`` there was a
    moment, or all time after, without any."""
    root, about = tmp_path / "run", FACTS.manifest("run") | {"data": "d"}
    buffers = state_buffers(state(0))
    parts = {0: PartFacts.of(buffers)}
    one, two = Folder(root, keep=1), Folder(root, keep=1)
    same, rival, later = Key(4, LINEAGE), Key(4, b"x" * 32), Key(8, LINEAGE)
    looks: list[bool] = []

    def complete_is_stale(self: Folder) -> dict[Key, dict[int, PartFacts]]:
        """``two`` looked just before ``one`` was done."""
        found = complete(self)
        if self is two and not looks:
            looks.append(True)
            one.write_part(same, 0, buffers)
            one.publish(same, about, parts, FILES)
        return found

    complete = Folder.complete
    monkeypatch.setattr(Folder, "complete", complete_is_stale)
    two.write_part(same, 0, buffers)
    with contextlib.suppress(FileNotFoundError, PartsGone):
        two.publish(same, about, parts, FILES)
    assert set(complete(one)) == {same}
    two.write_part(rival, 0, buffers)
    where = two.publish(rival, about, parts, FILES)
    assert set(complete(one)) == {same, rival}
    assert Checkpoint.intact(Path(where)).manifest["lineage"] == rival.lineage.hex()
    one.write_part(later, 0, buffers)
    one.publish(later, about, parts, FILES)
    assert names(root) == ["step-00000008"]


def test_a_part_that_cannot_be_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        stages = Stages(tmp_path / "run")
        own = stages.checkpoints["coordinator"]

        def ready(sender: str = "one", **changes: Any) -> None:
            fields = {"step": 4, "lineage": LINEAGE, "stage": 1, "size": 8, "digest": bytes(32)} | changes
            own.coordinator.on_ready(sender, PartReady(**fields))

        for wrong in ({"stage": 2}, {"step": 0}, {"step": 1001}, {"size": 0}, {"size": 1 << 43}):
            with pytest.raises(ProtocolError, match="cannot be"):
                ready(**wrong)
        plan, known = stages.plan, 1000
        stages.contexts["coordinator"].plan = dataclasses.replace(plan, state_bytes=(known, known))
        with pytest.raises(ProtocolError, match="cannot be"):  # whoever fetches it makes room for as much
            ready(size=2 * known + (1 << 20) + 1)
        stages.contexts["coordinator"].plan = plan
        ready("coordinator")
        assert not list(own.checkpoints), "a stage's own peers say first what its part is"
        ready("other", digest=b"y" * 32)
        for sender in ("other", "coordinator"):
            ready(sender, digest=b"x" * 32)
        assert [o.parts[1].digest for o in own.checkpoints] == [b"y" * 32], "the first counts until the writer speaks"
        ready()
        ready("other", digest=b"x" * 32)
        assert [o.parts[1].digest for o in own.checkpoints] == [bytes(32)]
        assert [o.holders[1] for o in own.checkpoints] == [{"one"}]
        for step in range(5, 4 + MAX_OPEN):
            ready(step=step)
        with pytest.raises(ProtocolError, match="others are not complete"):
            ready(step=500)
        assert await stages.checkpoint(12)
        assert [(e.step, e.reason) for e in stages.of(CheckpointFailed)] == [
            (s, "no part of stages [0] came before a later checkpoint was complete") for s in range(4, 12)
        ]
        await stages.close()

    play(scenario)


def test_a_store_behind_a_url_holds_the_same_checkpoints(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    place = open_place(url, keep=2)
    for step in (4, 8, 12):
        key, parts = Key(step, LINEAGE), {}
        for stage in (0, 1):
            buffers = state_buffers(state(stage))
            parts[stage] = PartFacts.of(buffers)
            place.write_part(key, stage, buffers)
            assert key not in place.complete()
        place.write_part(Key(step, b"x" * 32), 0, buffers)  # of another history
        where = place.publish(key, FACTS.manifest("run") | {"data": "d"}, parts, FILES)
    assert {k.step: p for k, p in place.complete().items()} == {8: ANY, 12: parts}
    assert place.read_part(key, 1) == b"".join(state_buffers(safetensors.torch.load(place.read_part(key, 1))))
    bring_home(where, tmp_path / "checkpoints" / "step-00000012")
    checkpoint = Checkpoint.open(tmp_path)
    assert [checkpoint.verify(p).name for p in checkpoint.manifest["parts"]] == [
        f"stage-{s}.safetensors" for s in (0, 1)
    ]
    bring_newest_home(url, tmp_path / "elsewhere")
    assert Checkpoint.open(tmp_path / "elsewhere").step == 12
    assert names(tmp_path / "elsewhere" / "checkpoints") == ["step-00000012"]
    damage(tmp_path / "elsewhere" / "checkpoints" / "step-00000012" / "stage-0.safetensors")
    bring_newest_home(url, tmp_path / "elsewhere")  # once more
    assert Checkpoint.intact(tmp_path / "elsewhere" / "checkpoints" / "step-00000012")
    fsspec.filesystem("memory").pipe_file(f"{where}/stage-1.safetensors", b"damaged")
    bring_newest_home(url, tmp_path / "third")
    found = Checkpoint.newest_intact(tmp_path / "third", lambda text: None)
    assert found is not None
    assert found.step == 8, "the newest that is whole"
    place.drop(100)
    assert set(place.complete()) == {Key(8, LINEAGE), Key(12, LINEAGE)}


def test_a_place_that_this_machine_cannot_use_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.place: nosuch://x: give a folder, or a URL of"):
        open_place("nosuch://x", keep=1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Mounts small file systems in memory."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a small file system")
    mounted: list[Path] = []

    def mount(name: str, size: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        tried = subprocess.run(command, capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"no mounting here: {tried.stderr}")
        mounted.append(folder)
        return folder

    try:
        yield mount
    finally:
        for folder in mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Takes all the room that is left; the file that has it, perhaps from before."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return ballast


def test_on_a_full_disk_a_checkpoint_fails_and_with_room_again_the_next_is_written(
    small_disk: Callable[[str, str], Path],
) -> None:
    disk = small_disk("disk", "7m")  # one checkpoint of two parts of 2 MiB fits, two don't

    async def scenario() -> None:
        stages = Stages(disk / "checkpoints", keep=1, sharing="one other")
        assert await stages.checkpoint(4)
        assert not await stages.checkpoint(8)
        failed = stages.of(CheckpointFailed)[0]
        assert failed.step == 8
        assert "No space left on device" in failed.reason
        assert "free some space" in failed.reason
        await stages.only(disk / "checkpoints", "step-00000004")  # no half of one is left
        assert not stages.refused
        shutil.rmtree(disk / "checkpoints" / "step-00000004")
        assert await stages.checkpoint(12)
        await stages.close()

    play(scenario)


def test_a_part_that_is_written_when_its_checkpoint_has_failed_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        stages = Stages(tmp_path / "run", sharing="one other")
        writer = next(n for n, c in stages.checkpoints.items() if c.roles.is_writer() and n != "coordinator")
        begun, go_on = held_up(monkeypatch, stages.places[writer])
        writing = asyncio.create_task(stages.write(4, "coordinator", writer))
        await asyncio.to_thread(begun.wait, 20)
        await stages.checkpoints["coordinator"].coordinator.fail(Key(4, LINEAGE), "the disk is full")
        assert not await asyncio.wait_for(stages.checkpoints[writer].coordinator.ended(Key(4, LINEAGE)), 20)
        await stages.only(tmp_path / "run")
        go_on.set()
        await writing
        assert not names(tmp_path / "run")
        await stages.close()

    play(scenario)


def test_events_wait_for_room_on_a_full_disk(small_disk: Callable[[str, str], Path]) -> None:
    disk = small_disk("disk", "256k")
    with EventLog(disk / "a.jsonl", "a") as log:
        log.note("first")
        ballast = fill(disk)
        for n in range(100):
            log.note(f"{n} {'x' * 100}")
        lost = read_messages(disk)
        assert len(lost) < 101
        ballast.unlink()
        log.note("last")
    messages = read_messages(disk)
    assert messages == ["first", *(f"{n} {'x' * 100}" for n in range(100)), "last"]
    assert log.dropped == 0


def test_tensorboard_files_stay_whole_on_a_full_disk(small_disk: Callable[[str, str], Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    disk = small_disk("disk", "64k")
    sink = TensorBoardSink(disk / "tensorboard")

    def steps(first: int, last: int) -> None:
        for n in range(first, last):
            sink(StepDone(step=n, loss=1.0, grad_norm=1.0, lr=1.0, tokens=1, duration_s=1.0, lineage="", t=float(n)))

    steps(1, 11)
    ballast = fill(disk)
    steps(11, 200)
    ballast.unlink()
    steps(200, 211)
    sink.close()
    read = {s.step for s in EventAccumulator(str(disk / "tensorboard")).Reload().Scalars("train/loss")}
    assert {*range(1, 11), *range(200, 211)} <= read
    assert len(read) < 210, "the disk was full"


def read_messages(disk: Path) -> list[str]:
    return [e.message for e in read_events(disk / "a.jsonl") if isinstance(e, Note)]


class Command:
    """A muletrain command with --json, in a folder; its events as they come."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "muletrain.cli.main", *arguments, "--json"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.events.append(json.loads(line))

    def of(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        return [e for e in list(self.events) if e["kind"] == kind and fields.items() <= e.items()]

    def until(self, condition: Callable[[], object], timeout_s: float = 180.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.events[-5:]
            assert self._process.poll() is None, self.end()
            time.sleep(0.05)

    def says(self, text: str) -> bool:
        return any(text in e["message"] for e in self.of("note"))

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Exit code and what was said on standard error."""
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            said = stderr.read()
        code = self._process.wait(60)
        self._reader.join(10)
        return code, said

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(10)


@pytest.mark.slow
def test_a_fleet_whose_disks_are_full_trains_on_and_says_so(small_disk: Callable[[str, str], Path]) -> None:
    ours, theirs = small_disk("ours", "32m"), small_disk("theirs", "1m")
    settings = ["model.width=64", "model.heads=2", "model.context=32", "fleet.peers=2", "checkpoint.every=3"]
    options = [part for s in (*settings, "train.steps=100000") for part in ("--set", s)]
    start = Command(ours, "start", "--listen", "127.0.0.1", *options)
    commands = [start]
    try:
        start.until(lambda: start.of("ticket"))
        join = Command(theirs, "join", start.of("ticket")[0]["ticket"], "--listen", "127.0.0.1")
        commands.append(join)
        join.until(lambda: list(theirs.glob("runs/*/ticket")))
        fill(theirs)
        start.until(lambda: start.of("checkpoint_written"))
        ballast = fill(ours)
        start.until(lambda: start.says("the disk is full"))
        said = -1
        for _ in range(20):  # a checkpoint that failed, or that is old, gives its room back
            ballast = fill(ours)
            time.sleep(3)  # several checkpoints are tried
            if said == (said := len(start.of("step_done"))):
                break
        else:
            raise AssertionError("something still reaches the console, so the test tests nothing")
        ballast.unlink()
        start.until(lambda: start.of("checkpoint_failed"))
        failed = start.of("checkpoint_failed")[0]
        assert "No space left on device" in failed["reason"]
        start.until(lambda: any(e["step"] > failed["step"] for e in start.of("checkpoint_written")))
        steps = [e["step"] for e in start.of("step_done")]
        assert steps == list(range(1, len(steps) + 1)), "no event is lost"
        fill(ours)
        start.interrupt()
        code, said = start.end()
        assert code == 2
        assert "the final checkpoint could not be written, and the newest is" in said
        assert join.end() == (0, "")
        assert join.says("the disk is full")
    finally:
        for command in commands:
            command.kill()


# Opening them again -----------------------------------------------------------------------------------------------------


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def without(*keys: str) -> Callable[[Path], None]:
    def remove(path: Path) -> None:
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in keys}))

    return remove


@pytest.mark.parametrize(
    ("file", "harm", "said"),
    [
        ("stage-0.safetensors", damage, "is damaged"),
        ("stage-1.safetensors", Path.unlink, "cannot be read"),
        ("stage-1.safetensors", tear, "is damaged"),
        ("tokenizer.json", damage, "is damaged"),
        ("tokenizer.json", Path.unlink, "cannot be read"),
        ("manifest.json", tear, "cannot be read"),
        ("manifest.json", Path.unlink, "no checkpoint here"),
        ("manifest.json", without("parts"), "parts"),
        ("manifest.json", without("files"), "files"),
        ("manifest.json", lambda path: path.write_text('{"format": 99}'), "this version reads"),
    ],
)
def test_a_harmed_checkpoint_is_passed_over(file: str, harm: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        stages = Stages(tmp_path / "checkpoints")
        assert await stages.checkpoint(4)
        assert await stages.checkpoint(8)

    play(scenario)
    torn = tmp_path / "checkpoints" / ".step-00000012.partial"
    torn.mkdir()
    harm(tmp_path / "checkpoints" / "step-00000008" / file)
    told: list[str] = []
    found = Checkpoint.newest_intact(tmp_path, told.append)
    assert found is not None
    assert found.step == 4
    assert not torn.exists()
    assert len(told) == 2
    assert "was being written" in told[0]
    assert "step-00000008 is passed over" in told[1]
    assert said in told[1]


def test_a_damaged_tokenizer_is_not_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        stages = Stages(tmp_path)
        assert await stages.checkpoint(4)

    play(scenario)
    damage(tmp_path / "step-00000004" / "tokenizer.json")
    with pytest.raises(CheckpointError, match="is damaged"):
        _ = Checkpoint.open(tmp_path).tokenizer_json
