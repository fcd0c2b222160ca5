"""A store that is slow, or hangs: it costs checkpoints, never the training, the memory, or the end of the run."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from muletrain.compute.threads import InlineExecutor
from muletrain.events import CheckpointFailed, CheckpointWritten, LeavePutOff, PeerLeft, PeerMoved
from muletrain.runtime.checkpoint.checkpointing import Checkpointing, Parts
from muletrain.runtime.checkpoint.messages import CheckpointEnd
from muletrain.runtime.checkpoint.store import Folder, Key
from muletrain.sim.loop import run_virtually
from proofs import reference
from proofs.injection import Injection
from proofs.play import LIMIT_S
from proofs.scenario import FOR_EVER_S, Fault, Scenario
from proofs.verdict import LEFT, Outcome, readable
from proofs.witness import Witness
from proofs.world import World
from tests.checkpoint_stages import LINEAGE, Stages, held_up, names, play, state

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

pytestmark = pytest.mark.timeout(120)


def run(scenario: Scenario, folder: Path) -> Outcome:
    """As ``play``, in a folder that stays."""
    outcome, history = Outcome(scenario), reference.history(scenario)
    world = World(scenario, outcome, folder, Witness(scenario, history, outcome.violations.append))
    run_virtually(world.run(Injection(world).inject), LIMIT_S, outcome.violations)
    assert outcome.violations == [], "\n".join(readable(outcome))
    return outcome


def left_behind(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*.partial"))


class Hanging(InlineExecutor):
    """Once it writes a part, nothing comes of that, nor of what was given to it after."""

    def __init__(self) -> None:
        self._stuck: list[Any] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._stuck or any(getattr(a, "__name__", "") == "write_part" for a in (fn, *args)):
            self._stuck.append(args)
            return Future()
        return super().submit(fn, *args, **kwargs)


def test_a_store_that_hangs_keeps_one_copy_of_the_state_and_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every open checkpoint had a copy, and the end was waited for without bound."""
    gc.freeze()  # what other tests left need not be looked at each time
    copies: list[weakref.ref[Tensor]] = []
    most, right = 0, Checkpointing.write

    async def counted(self: Checkpointing, key: Key, copied: dict[str, Tensor]) -> None:
        nonlocal most
        gc.collect()
        copies.append(weakref.ref(next(iter(copied.values()))))
        most = max(most, sum(c() is not None for c in copies))
        await right(self, key, copied)

    monkeypatch.setattr(Checkpointing, "write", counted)
    monkeypatch.setattr("proofs.world.InlineExecutor", Hanging)
    outcome = run(Scenario(1, (2, 2), 2, 30, 4, 0.01, (), checkpoint_every=1), tmp_path)
    assert set(outcome.ends.values()) == {"finished"}
    assert most <= 2, "one in each stage's writer"
    assert outcome.virtual_s < 1000


def test_the_end_of_a_process_waits_for_no_disk() -> None:
    script = """
import asyncio, threading
from muletrain.runtime.core import disk
disk.PATIENCE_S = disk.LOOK_S = 0.1
async def main():
    place = disk.Disk()
    for _ in range(2):
        try:
            await place.call(threading.Event().wait)
        except OSError as e:
            print(e)
    assert place.hangs
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.count("may hang") == 2, done.stderr


def test_a_disk_that_comes_back_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from muletrain.runtime.core import disk

    monkeypatch.setattr(disk, "LOOK_S", 0.05)
    monkeypatch.setattr(disk, "PATIENCE_S", 0.5)

    async def scenario() -> None:
        stages = Stages(tmp_path / "run", sharing="one other")
        place = stages.places["one"]
        _, go_on = held_up(monkeypatch, place)
        assert not await stages.checkpoint(4)
        assert "may hang" in stages.of(CheckpointFailed)[0].reason
        assert "free some space" not in stages.of(CheckpointFailed)[0].reason
        one, key = stages.checkpoints["one"], Key(8, LINEAGE)
        assert not one.begins(key, last=False)
        assert await asyncio.wait_for(one.parts.readable_soon(), 1) == {}, "who asks is answered"
        go_on.set()
        await place.disk.call(lambda: None) if not place.disk.hangs else await asyncio.sleep(1.0)
        assert not place.disk.hangs
        assert one.begins(Key(12, LINEAGE), last=False)
        assert await stages.checkpoint(12)
        await stages.only(tmp_path / "run", "step-00000012")
        await stages.close()

    play(scenario)


def test_a_checkpoint_that_comes_due_while_another_is_written_is_left_out_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for its parts; the one before is completed, and so is the next."""

    async def scenario() -> None:
        peers = {"coordinator": 0, "one": 1, "two": 2}
        stages = Stages(tmp_path / "run", stages=peers, sharing="one")
        place = stages.places["one"]

        async def step(step: int) -> None:
            key = Key(step, LINEAGE)
            writers = [n for n, c in stages.checkpoints.items() if c.begins(key, last=False)]
            await asyncio.gather(*(stages.checkpoints[w].write(key, state(peers[w])) for w in writers))

        begun, go_on = held_up(monkeypatch, place)
        first = asyncio.create_task(step(4))
        await asyncio.to_thread(begun.wait, 20)
        await step(8)
        for name in peers:
            assert not await asyncio.wait_for(stages.checkpoints[name].ended(Key(8, LINEAGE)), 5)
        (failed,) = stages.of(CheckpointFailed)
        assert failed.step == 8
        assert "left out: checkpoint 4 is not complete yet" in failed.reason
        go_on.set()
        await first
        assert await asyncio.wait_for(stages.checkpoints["coordinator"].ended(Key(4, LINEAGE)), 20)
        await asyncio.gather(*(asyncio.wait_for(c.ended(Key(4, LINEAGE)), 5) for c in stages.checkpoints.values()))
        await step(12)
        assert await asyncio.wait_for(stages.checkpoints["coordinator"].ended(Key(12, LINEAGE)), 20)
        assert [e.step for e in stages.of(CheckpointWritten)] == [4, 12]
        await stages.only(tmp_path / "run", "step-00000004", "step-00000012")
        await stages.close()

    play(scenario)


def test_one_that_lacks_a_part_ends_when_its_writer_announces_the_next(tmp_path: Path) -> None:
    """Its writer died: peers that keep their parts of it would leave out all that come due meanwhile."""

    async def scenario() -> None:
        stages = Stages(tmp_path / "run", sharing="one other")
        await stages.write(4, "coordinator")
        await stages.write(8, "one")
        assert not await asyncio.wait_for(stages.checkpoints["coordinator"].ended(Key(4, LINEAGE)), 5)
        assert "no part of stages [1]" in stages.of(CheckpointFailed)[0].reason
        await stages.close()

    play(scenario)


def test_nobody_leaves_out_the_last_one(tmp_path: Path) -> None:
    """Nor says so in another's name."""

    async def scenario() -> None:
        stages = Stages(tmp_path / "run")
        coordinator, key = stages.checkpoints["coordinator"], Key(4, LINEAGE)
        assert coordinator.begins(key, last=True)
        end = CheckpointEnd(step=4, lineage=LINEAGE, reason="so it says", left_out=True)
        for liar in ("one", "other"):
            await coordinator.on_end(liar, end)
        assert await stages.checkpoint(4)
        await stages.close()

    play(scenario)


def test_the_last_checkpoint_waits_for_the_one_before(tmp_path: Path) -> None:
    """On a link so slow that the last but one is still on its way when the run ends."""
    narrow = (("peer-1a", 4e4),)
    scenario = Scenario(1, (1, 1), 2, 4, 4, 0.01, (), checkpoint_every=3, apart=True, narrow=narrow)
    outcome = run(scenario, tmp_path)
    assert outcome.of(CheckpointWritten, step=4)
    assert not left_behind(tmp_path)


@pytest.mark.parametrize("apart", [False, True])
def test_after_the_end_no_part_is_left(tmp_path: Path, apart: bool) -> None:
    faults = (Fault(0.5, "leave", ("peer-1b",)), Fault(1.0, "leave", ("peer-2b",)))
    scenario = Scenario(1, (2, 2, 2), 2, 8, 4, 0.01, faults, checkpoint_every=1, apart=apart)
    outcome = run(scenario, tmp_path)
    assert outcome.ends["peer-1b"] == LEFT
    assert not left_behind(tmp_path)


def test_a_part_that_is_written_once_more_after_the_end_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas that each took themselves for the writer."""

    async def scenario() -> None:
        stages = Stages(tmp_path / "run", sharing="one other")
        begun, go_on = held_up(monkeypatch, stages.places["other"])
        late = asyncio.create_task(stages.write(4, "other"))
        await asyncio.to_thread(begun.wait, 20)
        assert await stages.checkpoint(4)
        assert await asyncio.wait_for(stages.checkpoints["other"].ended(Key(4, LINEAGE)), 20)
        go_on.set()
        await late
        assert names(tmp_path / "run") == ["step-00000004"]
        await stages.close()

    play(scenario)


@pytest.mark.parametrize("kind", ["leave", "move"])
def test_a_writer_does_not_go_before_its_part_is_safe(
    tmp_path: Path, kind: Literal["leave", "move"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took it along, and the checkpoint was lost although everybody was orderly."""
    take = Parts.take

    async def slowly(*args: Any) -> dict[str, Tensor]:
        await asyncio.sleep(3.0)
        return await take(*args)

    monkeypatch.setattr(Parts, "take", slowly)
    faults = (Fault(2.7, kind, ("peer-1a",)),)
    scenario = Scenario(1, (2, 2), 3, 16, 4, 0.01, faults, checkpoint_every=4, apart=True)
    outcome = run(scenario, tmp_path)
    assert outcome.of(LeavePutOff, name="peer-1a"), "\n".join(readable(outcome))
    (written,) = outcome.of(CheckpointWritten, "peer-0a", step=4)
    assert written.t < outcome.of(PeerLeft if kind == "leave" else PeerMoved)[0].t


def test_folders_are_the_same_place_by_their_marker_not_by_their_path(tmp_path: Path) -> None:
    """Two machines with equal host names, and the same path on each."""
    here = Folder(tmp_path / "checkpoints", keep=1)
    same = Folder(tmp_path / "x" / ".." / "checkpoints", keep=1)
    (tmp_path / "x").mkdir()
    assert here.name == same.name
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    (tmp_path / "checkpoints").rename(tmp_path / "that of another machine")
    assert Folder(tmp_path / "checkpoints", keep=1).name != here.name
    assert Folder(tmp_path / "that of another machine", keep=1).name == here.name, "mounted elsewhere"
    with pytest.raises(FileNotFoundError):
        next(iter((tmp_path / "nowhere").iterdir()))


def test_peers_that_come_at_once_agree_on_the_marker(tmp_path: Path) -> None:
    places = [Folder(tmp_path / "checkpoints", keep=1) for _ in range(16)]
    threads = [threading.Thread(target=lambda p=p: p.name) for p in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({p.name for p in places}) == 1
    assert names(tmp_path / "checkpoints") == []


def test_a_folder_that_cannot_be_written_to_is_shared_with_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    one, other = (Folder(tmp_path / "file" / "checkpoints", keep=1) for _ in range(2))
    assert one.name != other.name
    assert one.name == one.name


def test_a_stage_is_adopted_though_a_peer_waits_for_its_disk(tmp_path: Path) -> None:
    """What it knows of checkpoints is told at once, so it can be counted on, and questions do not pile up."""
    faults = (
        Fault(0.0, "cut", ("peer-2b", "peer-1a"), for_s=FOR_EVER_S),
        Fault(1.50264415269619, "leave", ("peer-1b",)),
        Fault(2.4937183723920953, "disk", ("peer-2a",), for_s=FOR_EVER_S, how="slow"),
        Fault(2.9897849847922475, "stop", ("peer-0a",)),
        Fault(3.177217576895033, "kill", ("peer-1c",)),
        Fault(3.7544189936738244, "kill", ("peer-1a",)),
    )
    world = Scenario(9290, (1, 3, 2), 6, 4, 6, 0.1, faults, relays=True, checkpoint_every=1, apart=True, disk_s=0.01)
    run(world, tmp_path)
