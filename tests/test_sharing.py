"""The only data owner dies, and the run goes on: others have the tokens, and give out the microbatches that a single
process would."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.config.load import load_config
from muletrain.data.tokens import digest_of
from muletrain.errors import CapacityError, ConfigError, Refused
from muletrain.events import Event, NoTrainer, StepDone, TrainerAdded, TransferFailed
from muletrain.network.memory import MemoryNetwork
from muletrain.policy.deadline import Deadline
from muletrain.runs.fleet import LocalFleet
from muletrain.runtime.core import blocks as transfer
from muletrain.runtime.core.blocks import AskBlocks, Block
from muletrain.runtime.core.disk import SPARE_BYTES, Disk
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Roster
from muletrain.runtime.transfer import tokens as sharing
from muletrain.runtime.transfer.messages import Shared
from muletrain.runtime.transfer.tokens import FileCopy, Sharing, Store, copy_of, share
from muletrain.sim.loop import run_virtually
from proofs.play import play
from proofs.scenario import Fault, Scenario
from proofs.verdict import Outcome, readable

from .fleet_run import checkpoint_weights, run_fleet
from .reference import train_plainly
from .test_equivalence import facts_of, relative_difference
from .test_transfer import Stage

pytestmark = pytest.mark.timeout(400)
OWNER = "peer-0a"


def played(*faults: Fault, steps: int = 40, **more: Any) -> Outcome:
    return play(Scenario(5, (2, 2), 1, steps, 4, 0.01, faults, share=True, **more))


def whole(outcome: Outcome) -> Outcome:
    assert outcome.violations == [], "\n".join(readable(outcome))
    return outcome


@pytest.mark.parametrize("on", ["", *(pytest.param(on, marks=pytest.mark.slow) for on in ("forward", "entry")), "seal"])
def test_the_only_data_owner_dies_and_the_run_ends_with_the_same_numbers(on: str) -> None:
    outcome = whole(played(Fault(8.0, "kill", (OWNER,), on=on, nth=1 if on else 0)))
    taken = [e.t for e in outcome.of(TrainerAdded)]
    assert len(taken) == 3, "all that had no data; the third from one of the other two"
    assert min(taken) < 8.0 < max(taken)
    assert {name for name, end in outcome.ends.items() if end == "finished"} == {"peer-0b", "peer-1a", "peer-1b"}
    assert not outcome.of(NoTrainer)


@pytest.mark.slow
def test_under_delayed_updates_too() -> None:
    outcome = whole(played(Fault(8.0, "kill", (OWNER,)), overrides=("optimizer.delayed=true",)))
    assert len(outcome.of(TrainerAdded)) == 3


def test_newcomers_move_and_leave_and_have_the_tokens() -> None:
    faults = (Fault(1.0, "join", ("peer-1j0",)), Fault(8.0, "kill", (OWNER,)), Fault(12.0, "move", ("peer-1j0",)))
    whole(played(*faults, steps=60))


def test_as_many_as_are_wanted_take_them_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Sharing.__init__

    def two(self: Sharing, *args: Any, **options: Any) -> None:
        right(self, *args, **options)
        self.wanted = 2

    monkeypatch.setattr(Sharing, "__init__", two)
    outcome = whole(played(Fault(20.0, "kill", (OWNER,)), steps=60))
    assert 1 <= len([e for e in outcome.of(TrainerAdded) if e.t < 20.0]) <= 2, "two may have begun at the same moment"


def test_without_it_nobody_gives_or_takes_anything() -> None:
    outcome = play(Scenario(5, (2, 2), 1, 12, 4, 0.01, ()))
    assert outcome.violations == []
    assert not outcome.of(TrainerAdded)
    assert not outcome.of(TransferFailed)


@pytest.mark.slow
def test_a_fleet_of_processes_outlives_the_one_that_has_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of the founder, which alone has the corpus, once another has the tokens. Differences of rounding grow with
    the steps, of which there have to be enough, and with the learning rate: at 3e-3 two orders of summing differ by 6e-5
    in one process, at 1e-4 by 7e-8."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "joiners"))
    facts, cache = facts_of(tmp_path, "data.share=true", "train.steps=100", "optimizer.lr=1e-4")
    torch.set_num_threads(1)
    expected, _ = train_plainly(facts, facts.source(cache))
    took: list[str] = []
    at: list[int] = []

    def watch(fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, TrainerAdded):
            took.append(event.peer)
            if len(took) == 1:
                assert not at or max(at) < 95
                os.killpg(fleet.pid("peer-0"), signal.SIGKILL)
        if isinstance(event, StepDone):
            at.append(event.step)

    def each(name: str) -> dict[str, Any]:
        return {} if name == "peer-0" else {"data": "none"}

    run_fleet(facts.config, tmp_path / "run", watch=watch, lost=frozenset({"peer-0"}), each=each)
    assert took
    assert relative_difference(checkpoint_weights(tmp_path / "run"), expected) <= 1e-5


# One giver, one taker ---------------------------------------------------------------------------------------------------

TOKENS = np.random.default_rng(1).integers(0, 500, 30_000).astype("<u2")
TOKENIZER = b"{}"


class Pair:
    """Peer 'a' has the tokens, and 'b' perhaps; 't' takes them; 's' is no member."""

    def __init__(self, folder: Path, donors: str = "a", limit: int = 1 << 20, vocab: int = 500) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.stage, self.trained = Stage(donors, taker_trains=False), list[Any]()
        self.files = folder / "train.bin", folder / "heldout.bin"
        self.files[0].write_bytes(TOKENS.tobytes())
        self.files[1].write_bytes(b"held out")
        sides = [hashlib.sha256(side).digest() for side in (TOKENS.tobytes(), b"held out", TOKENIZER)]
        self.data, self.limit, self.vocab, self.folder = digest_of(sides), limit, vocab, folder
        self.shared, _ = share(self.files[0], 2, self.files[1], Disk())
        self.given: dict[str, Sharing] = {}
        for name in donors:
            given = self.given[name] = self.sharing()
            given.source, given.copy = object(), share(self.files[0], 2, self.files[1], Disk())[1]  # type: ignore[assignment]
            ctx = self.stage.contexts[name]
            given.offer(ctx)
        self.stranger = self.stage.hub.join("s")
        self.ctx = self.stage.contexts["t"]
        genesis = self.ctx.roster.genesis
        members = tuple(m.model_copy(update={"trainer": m.id != "t"}) for m in genesis.members)
        self.ctx.roster = Roster(genesis.model_copy(update={"members": members}), "t")
        self.taker = self.ctx.downloader()
        self.taker.deadline = Deadline(unmeasured_s=1.0, floor_s=1.0)
        self.came = list[int]()
        """Blocks that came, by number."""
        self.net.receive(self._block, (Block.KIND,))

    @property
    def net(self) -> MemoryNetwork:
        return self.stage.networks["t"]

    def sharing(self, shared: Shared | None = None) -> Sharing:
        return Sharing(
            shared or self.shared,
            self.data,
            TOKENIZER,
            self.vocab,
            lambda tokens: tokens,  # type: ignore[arg-type, return-value]
            Store(self.folder / "cache", self.limit),
        )

    async def _block(self, sender: str, frame: Any) -> None:
        self.came.append(Block.parse(frame).block)
        await self.ctx.blocks._on_frame(sender, frame)

    async def taken(self, own: Sharing) -> bool:
        return await own.take(self.ctx, self.taker)

    def notes(self) -> str:
        return "\n".join(e.sentence() for e in self.stage.said if isinstance(e, TransferFailed))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BLOCK", 1000)


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_the_tokens_come_whole_and_are_given_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        pair = Pair(tmp_path, "ab")
        own = pair.sharing()
        assert await pair.taken(own)
        assert np.array_equal(own.source, TOKENS)  # type: ignore[arg-type]
        assert own.copy is not None
        assert own.copy.digest == pair.shared.digest
        assert all(pair.net.counters.received[n, Block.KIND] for n in "ab"), "each sent some"
        own.close()

    run(scenario)


def test_they_are_for_members_and_for_few_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        pair = Pair(tmp_path)
        ask = AskBlocks(digest=pair.shared.digest)
        blocks = AskBlocks(digest=pair.shared.digest, blocks=(0,))
        for question in (ask, blocks):
            with pytest.raises(Refused, match="not a member"):
                await pair.stranger.call("a", question.KIND, question.pack(), timeout_s=5.0)
        for k in range(sharing.TAKERS + 1):
            net = pair.stage.hub.join(f"m{k}")
            member = Member(id=f"m{k}", name=f"m{k}", stage=0, trainer=False)
            pair.stage.contexts["a"].roster.admit(member)
            if k < sharing.TAKERS:
                await net.call("a", blocks.KIND, blocks.pack(), timeout_s=5.0)
                continue
            with pytest.raises(Refused, match="ask again later"):
                await net.call("a", blocks.KIND, blocks.pack(), timeout_s=5.0)

    run(scenario)


def test_what_came_before_a_break_need_not_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the process began anew meanwhile."""
    right = FileCopy.content

    async def scenario() -> None:
        pair, sent = Pair(tmp_path), list[int]()

        async def content(self: FileCopy, begin: int, end: int) -> list[memoryview]:
            if len(sent) == 20:
                pair.stage.hub.barriers.cut("a", "t")
            sent.append(begin)
            return await right(self, begin, end)

        monkeypatch.setattr(FileCopy, "content", content)
        first = pair.sharing()
        assert not await pair.taken(first)
        first.close()
        came = {1000 * k for k in pair.came}
        assert came
        pair.stage.hub.barriers.mend("a", "t")
        second = pair.sharing()
        again = len(sent)
        assert await pair.taken(second)
        assert not came & {*sent[again:]}
        second.close()

    run(scenario)


def test_a_founder_does_not_choose_how_large_the_blocks_in_our_memory_are(tmp_path: Path) -> None:
    async def scenario() -> None:
        pair = Pair(tmp_path)
        copy = copy_of(pair.files[0], Disk())
        copy.block = len(TOKENS) * 2  # all at once
        copy.named(copy.hashes())
        pair.given["a"].copy, pair.given["a"].shared = copy, pair.shared.model_copy(update={"digest": copy.digest})
        own = pair.sharing(pair.given["a"].shared)
        assert not await pair.taken(own)
        assert "a manifest with blocks of" in pair.notes()
        assert not pair.net.counters.received["a", Block.KIND]
        own.close()

    run(scenario)


@pytest.mark.parametrize("lie", ["heldout", "vocab", "size"])
def test_tokens_that_are_not_the_runs_are_not_used_or_kept(lie: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        pair = Pair(tmp_path, vocab=200 if lie == "vocab" else 500)
        told: dict[str, Any] = {"heldout": {"heldout": bytes(32)}, "size": {"size": pair.shared.size + 2}}.get(lie, {})
        own = pair.sharing(pair.shared.model_copy(update=told))
        assert not await pair.taken(own)
        assert own.source is None
        assert (
            "another number of tokens than there are" in pair.notes()
            if lie == "size"
            else "not the run's" in pair.notes()
        )
        kept = sum(p.stat().st_size for p in (tmp_path / "cache").iterdir())
        assert kept == 0
        own.close()

    run(scenario)


def test_a_joiners_bound_holds_and_the_oldest_that_nobody_uses_goes(tmp_path: Path) -> None:
    async def scenario() -> None:
        pair = Pair(tmp_path, limit=100_000)
        cache = tmp_path / "cache"
        cache.mkdir()
        for k, name in enumerate(("oldest", "older")):
            (cache / f"{name}.tokens").write_bytes(bytes(30_000))
            os.utime(cache / f"{name}.tokens", (k, k))
        own = pair.sharing()
        assert await pair.taken(own)
        assert sorted(p.name for p in cache.iterdir()) == sorted(["older.tokens", own.store.path(own.shared).name])  # type: ignore[union-attr]
        with pytest.raises(CapacityError, match="tokens of other running runs"):
            Store(cache, 80_000).open(Shared(digest=bytes(32), size=60_000, width=2, heldout=bytes(32)))
        assert pair.sharing().store.open(own.shared) is None, "another process has it"  # type: ignore[union-attr]
        own.close()
        small = Pair(tmp_path / "small", limit=59_999)
        assert not await small.taken(small.sharing())
        assert "the tokens need 58.6 KiB, but only 58.6 KiB may be used (join --tokens GIB)" in small.notes()
        assert not (tmp_path / "small" / "cache").exists()

    run(scenario)


def test_a_disk_that_is_full_is_said_and_nothing_else_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        pair = Pair(tmp_path)
        usage = shutil.disk_usage(tmp_path)
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda _: usage._replace(free=SPARE_BYTES + 100))
            assert not await pair.taken(pair.sharing())
        assert "join with --tokens 0" in pair.notes()
        own = pair.sharing()
        with monkeypatch.context() as full:
            full.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            assert not await pair.taken(own)
        assert "No space left on device" in pair.notes()
        assert await pair.taken(own), "there is room again"
        own.close()

    run(scenario)


def test_who_gets_nothing_asks_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    async def taken(*_: object) -> bool:
        nonlocal tries
        tries += 1
        return False

    async def tell(peers: set[str]) -> set[str]:
        return peers

    roster = SimpleNamespace(own=SimpleNamespace(trainer=False), trainers=list)
    ctx: Any = SimpleNamespace(clock=LoopClock(), roster=roster)
    membership: Any = SimpleNamespace(tell=tell)
    position: Any = SimpleNamespace(serves=True)
    nothing: Any = None
    sharing: Any = SimpleNamespace(source=None, store=object(), wanted=4, take=taken)

    async def ten_minutes() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(Sharing.run(sharing, ctx, ctx, membership, position, nothing), 600.0)

    run_virtually(ten_minutes(), 1000.0, [])
    assert 10 <= tries <= 13, "after 5, 10, 20 and 40 s, then once a minute"


def test_one_trainer_alone_shares_with_nobody() -> None:
    with pytest.raises(ConfigError, match=r"data.share: .*fleet.trainers = 1"):
        load_config(None, ["data.share=true", "fleet.trainers=1"])
