"""The weights beside an adapter go from peer to peer: a taker gets a part from several givers, and checks each block."""

from __future__ import annotations

import asyncio
import math
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.compute.threads import InlineExecutor
from muletrain.config.cache import MOST, cache_folder, keep
from muletrain.config.model_sections import DataConfig
from muletrain.errors import CapacityError, CheckpointError, PeerUnreachable, Refused
from muletrain.locks import lock
from muletrain.network.memory import MemoryHub
from muletrain.runs import base as runs_base
from muletrain.runs.base import KIND
from muletrain.runs.spec import WorkerSpec
from muletrain.runtime.core import blocks
from muletrain.runtime.core.blocks import BLOCK, AskBlocks, Block, Blocks, Manifest, StateImage
from muletrain.runtime.core.disk import SPARE_BYTES, Disk
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.transfer import base
from muletrain.runtime.transfer.base import BYTES_PER_S, BaseExchange, BaseStore
from muletrain.runtime.transfer.tokens import FileCopy, make_room
from muletrain.sim.loop import run_virtually

from .runners import TICKET, host_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path

    from torch import Tensor

    from muletrain.network.memory import MemoryNetwork

SIZES = {"a": (3000, 400), "b": (1500, 700), "norm": (401,)}
PARTS: tuple[list[str], ...] = ([], ["a", "b"], ["norm"])


class Chain:
    """The parts of a model that a store asks for."""

    shapes, base_size, quantised = SIZES, 2, dict[str, str]()

    @staticmethod
    def base_in(part: int) -> list[str]:
        return PARTS[part]

    @staticmethod
    def base_params(parts: range) -> int:
        return sum(math.prod(SIZES[name]) for part in parts for name in PARTS[part])


def weights(seed: int = 0) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draws).bfloat16() for name, shape in SIZES.items()}


def digests(of: dict[str, Tensor]) -> tuple[bytes, ...]:
    found = []
    for names in PARTS:
        (copy := StateImage({name: of[name] for name in names})).named(copy.hashes())
        found.append(copy.digest)
    return tuple(found)


RIGHT = weights()
DIGESTS = digests(RIGHT)


def store(cache: Path, of: dict[str, Tensor] | None = None) -> BaseStore:
    readers = [] if of is None else [("a folder", lambda: of.__getitem__)]
    return BaseStore(Chain(), DIGESTS, readers, cache, Disk(InlineExecutor()))  # type: ignore[arg-type]


class World:
    """Givers, and takers with a cache each, in virtual time."""

    def __init__(self, folder: Path) -> None:
        self.hub, self.folder, self.tasks, self.said = MemoryHub(), folder, Tasks(InlineExecutor()), list[str]()

    def net(self, name: str) -> MemoryNetwork:
        return self.hub.join(name)

    def giver(self, name: str, of: dict[str, Tensor] | None = None, **fields: Any) -> BaseExchange:
        made = store(self.folder / name, RIGHT if of is None else of)
        for field, value in fields.items():
            setattr(made, field, value)
        return BaseExchange(Blocks(self.net(name), LoopClock(), self.tasks), self.tasks, made)

    def taker(self, name: str = "taker", cache: str = "taker") -> BaseExchange:
        own = Blocks(self.net(name), LoopClock(), self.tasks)
        return BaseExchange(own, self.tasks, store(self.folder / cache), self.said.append)


def in_world(folder: Path, scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    problems: list[str] = []

    async def run() -> None:
        world = World(folder)
        try:
            await scenario(world)
        finally:
            await world.tasks.close()

    run_virtually(run(), 3600.0, problems)
    assert not problems


async def all_of(taker: BaseExchange, givers: Sequence[str]) -> dict[str, Tensor]:
    return await taker.weights(range(3), lambda: givers)


def check(found: dict[str, Tensor]) -> None:
    assert {n: w.dtype for n, w in found.items()} == dict.fromkeys(SIZES, torch.bfloat16)
    assert all(torch.equal(found[name].view(torch.int16), RIGHT[name].view(torch.int16)) for name in SIZES)


def test_a_part_comes_from_several_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    send = Blocks._give

    async def counting(self: Blocks, *args: Any) -> None:
        sent.append(self.net.peer_id)
        await send(self, *args)

    monkeypatch.setattr(Blocks, "_give", counting)

    async def scenario(world: World) -> None:
        for name in ("one", "two"):
            world.giver(name)
        check(await all_of(world.taker(), ["nobody", "one", "two"]))
        assert set(sent) == {"one", "two"}, "four blocks, of which each sends some"
        assert len(world.said) == 1, "a remark for all parts"
        again = world.taker("another process", "taker")
        check(await all_of(again, []))

    in_world(tmp_path, scenario)


def test_what_came_is_kept_when_all_givers_go_and_is_checked_later(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.giver("one")
        taker, came = world.taker(), []

        async def on_frame(sender: str, frame: Any) -> None:
            came.append(Block.parse(frame).block)
            await right(sender, frame)
            if len(came) == 2:
                world.hub.kill("one")

        right = taker.blocks._on_frame
        taker.blocks.net.receive(on_frame, (Block.KIND,), taker.blocks)
        with pytest.raises(PeerUnreachable, match=r"no peer gives the weights .* \(join --model FOLDER\)"):
            await all_of(taker, ["one"])
        world.giver("two")
        later = world.taker("later", "taker")
        check(await all_of(later, ["two"]))
        blocks = -(-(2 * (3000 * 400 + 1500 * 700)) // BLOCK)
        left = [note for note in world.said if "not here" in note]
        assert blocks == 5, "of which two came before"
        assert left[-1].startswith("2.29 MiB"), f"a remark of each process: {left}"
        (file,) = (p for p in (world.folder / "taker").glob("*.base") if p.stat().st_size > BLOCK)
        content = bytearray(file.read_bytes())
        content[BLOCK + 7] ^= 1
        file.write_bytes(content)
        assert store(world.folder / "taker").part(1) is None, "a damaged file is not used"
        check(await all_of(world.taker("last", "taker"), ["two"]))

    in_world(tmp_path, scenario)


def test_wrong_blocks_and_manifests_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lying(copy: StateImage, begin: int, end: int) -> list[memoryview]:
        return [memoryview(bytes(end - begin))]

    async def scenario(world: World) -> None:
        liar, other = world.giver("liar"), world.giver("another model", weights(1))
        asked: list[bytes] = []

        async def answer(sender: str, payload: bytes) -> bytes:
            asked.append(payload)
            return await liar.blocks._on_ask(sender, payload)

        liar.blocks.net.serve(AskBlocks.KIND, answer)
        monkeypatch.setattr(FileCopy, "content", lying)
        with pytest.raises(PeerUnreachable):
            await all_of(world.taker(), ["another model", "liar"])
        assert len([p for p in asked if AskBlocks.unpack(p).blocks]) <= 2, "who sends a wrong block is not asked again"
        assert other.store.image(DIGESTS[1]) is None
        monkeypatch.undo()
        world.giver("right")
        check(await all_of(world.taker("second", "taker"), ["another model", "right"]))

    in_world(tmp_path, scenario)


def test_a_giver_bounds_what_it_sends(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        giver = world.giver("one")
        net = world.net("greedy")

        async def ask(*blocks: int, digest: bytes = DIGESTS[1]) -> bytes:
            return await net.call("one", AskBlocks.KIND, AskBlocks(digest=digest, blocks=blocks).pack(), timeout_s=10.0)

        with pytest.raises(Refused, match="not kept for you"):
            await ask(digest=bytes(32))
        with pytest.raises(Refused, match="blocks that the copy does not have"):
            await ask(99)
        for _ in range(blocks.TIMES * 8 // 4):
            await ask(0, 1, 2, 3)
            await asyncio.sleep(1.0)
        with pytest.raises(Refused, match="has sent that copy to this peer 4 times"):
            await ask(0, 1, 2, 3)
        giver.blocks._turns = {("base", f"taker-{k}"): LoopClock().now() for k in range(base.TAKERS)}
        with pytest.raises(Refused, match="to others now"):
            await ask(0)
        assert await ask(), "manifests are for all"

    in_world(tmp_path, scenario)


def test_a_folder_with_other_weights_is_not_used_and_a_full_disk_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = store(tmp_path, weights(1))
    assert other.part(1) is None

    def broken() -> Callable[[str], Tensor]:
        raise CheckpointError("no such tensor")

    other.readers = [("a folder", broken)]
    assert other.part(2) is None
    assert other.problems[1:] == ["a folder is not used: no such tensor"]

    async def scenario(world: World) -> None:
        world.giver("one")
        (world.folder / "taker").mkdir()
        old = world.folder / "taker" / "0123.base"
        old.write_bytes(bytes(10))
        free = SPARE_BYTES + 10 * BLOCK

        def usage(folder: str) -> Any:
            used = 9 * BLOCK * old.exists()
            return type("Usage", (), {"free": free - used})

        monkeypatch.setattr("muletrain.runtime.core.disk.shutil.disk_usage", usage)
        check(await all_of(world.taker(), ["one"]))
        assert not old.exists(), "a part of another base made room"
        free = SPARE_BYTES
        with pytest.raises(CapacityError, match=r"join --model"):
            await all_of(world.taker("second", "second"), ["one"])

    in_world(tmp_path, scenario)


def test_many_takers_at_once_wait_for_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most, heard = [0], set[str]()
    give = Blocks._give

    async def slow(self: Blocks, *args: Any) -> None:
        most[0] = max(most[0], len({taker for _, taker, _ in self._runs}))
        await asyncio.sleep(base.CEILING_S / 4)
        await give(self, *args)

    monkeypatch.setattr(Blocks, "_give", slow)
    monkeypatch.setattr(base, "GONE_S", base.CEILING_S)
    monkeypatch.setattr(base, "TAKERS", 1)

    async def aside(fn: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0.1)  # as in a thread: all ask meanwhile
        return fn(*args)

    async def scenario(world: World) -> None:
        giver = world.giver("one")
        monkeypatch.setattr(world.tasks, "aside", aside)
        giver._heard = heard.add
        takers = [world.taker(f"taker-{k}", f"taker-{k}") for k in range(4)]
        for found in await asyncio.gather(*(all_of(taker, ["one"]) for taker in takers)):
            check(found)
        assert most == [1]
        assert len(heard) == 4

    in_world(tmp_path, scenario)


def test_a_taker_waits_while_another_process_takes_the_part(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.giver("one")
        held = store(world.folder / "taker", RIGHT)
        image = held.image(DIGESTS[1])
        assert image is not None
        file = held.open(1, Manifest.unpack(image.manifest))
        assert file is not None
        content = b"".join(image.views(0, image.size))
        os.pwrite(file, content, 0)
        assert store(world.folder / "taker").part(1) is None, "who writes it may not be done"

        async def write() -> None:
            for second in range(int(2 * base.CEILING_S)):
                os.utime(file, (second, second))
                await asyncio.sleep(1.0)
            os.close(file)

        writes = asyncio.create_task(write())
        check(await all_of(world.taker(), ["one"]))
        assert writes.done()

        stopped = store(world.folder / "second", RIGHT).open(1, Manifest.unpack(image.manifest))
        with pytest.raises(PeerUnreachable):  # a process that does not go on
            await all_of(world.taker("second", "second"), ["one"])
        assert stopped is not None
        os.close(stopped)

    in_world(tmp_path, scenario)


def test_a_part_that_is_not_here_is_read_once(tmp_path: Path) -> None:
    read: list[str] = []
    other = weights(1)

    def load(name: str) -> Tensor:
        read.append(name)
        return other[name]

    held = BaseStore(Chain(), DIGESTS, [("a folder", lambda: load)], tmp_path)  # type: ignore[arg-type]
    for _ in range(3):
        assert held.image(DIGESTS[2]) is None
    assert read == ["norm"]
    assert held.problems == ["a folder is not used: its weights are not those that the run began with"]


def test_a_client_asks_also_the_servers_that_it_has_heard_of(tmp_path: Path) -> None:
    spec = WorkerSpec(role="join", name="n", folder=str(tmp_path), ticket=TICKET, client=True)
    host = host_of(spec)
    host.known.update({"server": "peer-1"})
    assert host._givers(0) == ["server"], "the others may have left"


def test_parts_that_others_asked_for_leave_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "TAKERS", 1)
    held = store(tmp_path, RIGHT)
    assert held.part(1) is not None
    for digest in 2 * DIGESTS:
        image = held.image(digest)
        assert image is not None
        assert image.digest == digest
        assert held._images.keys() == {1, DIGESTS.index(digest)}


def test_a_taker_names_its_useless_folder_before_it_takes_the_weights(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.giver("one")
        taker = world.taker()
        taker.store.readers = [("a folder", lambda: weights(1).__getitem__)]
        check(await all_of(taker, ["one"]))
        assert [note.partition(",")[0] for note in world.said] == [
            "a folder is not used: its weights are not those that the run began with",
            "4.29 MiB of the model's weights are not here: they come from other peers",
        ]

    in_world(tmp_path, scenario)


def test_who_has_nobody_to_ask_fails_at_once(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(PeerUnreachable):
            await all_of(world.taker(), ["taker"])
        assert LoopClock().now() < 1.0

    in_world(tmp_path, scenario)


def test_parts_that_are_being_written_make_no_room(tmp_path: Path) -> None:
    written, old = tmp_path / "1.base", tmp_path / "2.base"
    for path in (written, old):
        path.touch()

    def full() -> None:
        raise CapacityError("full")

    with written.open("rb") as file:
        lock(file.fileno())
        with pytest.raises(CapacityError, match="full"):
            make_room([written, old, tmp_path / "gone.base"], full)
    assert written.exists()
    assert not old.exists()


def test_other_entries_of_the_cache_remove_no_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parts = [cache_folder(DataConfig()) / KIND / f"{k}.base" for k in range(2 * MOST)]
    parts[0].parent.mkdir(parents=True)
    for part in parts:
        part.touch()
    keep(runs_base.DIGESTS, {}, runs_base.Digests(digests=()))
    assert all(part.exists() for part in parts)


def test_how_long_missing_weights_take_is_known_before_they_come(tmp_path: Path) -> None:
    """A peer that moves counts it; of what came, it knows the rate."""

    async def scenario(world: World) -> None:
        world.giver("a")
        taker, size = world.taker(), sum(map(taker_size, range(3)))
        assert taker.takes_s(range(3)) == pytest.approx(size / BYTES_PER_S)
        assert taker.takes_s(range(1, 2)) < taker.takes_s(range(3))
        await taker.weights(range(2), lambda: ["a"])
        assert taker.takes_s(range(2)) == 0.0
        assert taker.takes_s(range(3)) == pytest.approx(taker_size(2) / taker._bytes_per_s)
        assert world.taker("other").takes_s(range(2)) == 0.0, "the cache has them"

    taker_size = store(tmp_path / "none").size
    in_world(tmp_path, scenario)
    assert store(tmp_path / "none", RIGHT).has(0), "a folder is there"
