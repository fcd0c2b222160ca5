"""A stage that lost all its peers, and a coordinator that died: who takes over, from where, with the same numbers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from muletrain.errors import NetworkError, ProtocolError
from muletrain.events import CheckpointWritten, StageEmpty, StateKept, StepApplied, SteppedBack
from muletrain.policy.assignment import Load, View
from muletrain.policy.checkpoints import keepers, newest_complete
from muletrain.runs.view import RunView
from muletrain.runtime.checkpoint.store import Folder, Key, PartFacts
from muletrain.runtime.core.branches import COUNT, branch_of, branched, count_of, hashed
from muletrain.runtime.core.lifecycle import State
from muletrain.runtime.peer.messages import Finished, Presence
from muletrain.runtime.peer.service import Service
from muletrain.runtime.recovery.messages import AskStanding, StandsAt, StepBack
from muletrain.runtime.recovery.rollback import Rollback
from muletrain.strategies.swarm import SWARM
from proofs.hub_lies import LyingClient
from proofs.play import play
from proofs.scenario import FOR_EVER_S, SUSPENDED, Fault, Scenario
from proofs.verdict import readable
from tests import planted

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.network.base import Network
    from muletrain.runtime.peer.peer import Peer
    from muletrain.runtime.pool.messages import Give
    from muletrain.wire.codec import Encoded


pytestmark = pytest.mark.timeout(800)
OLD, NEW = (10, bytes(32)), (20, b"n" * 32)


def parts(*held: tuple[tuple[int, bytes], int]) -> dict[tuple[tuple[int, bytes], int], bytes]:
    return {part: bytes([part[1]]) * 32 for part in held}


def test_the_newest_checkpoint_of_which_all_parts_can_be_had_is_gone_back_to() -> None:
    both = {"a": parts((OLD, 0), (OLD, 1), (NEW, 0)), "b": parts((NEW, 1))}
    assert newest_complete(both, 2, limit=30) == (NEW, (bytes(32), b"\1" * 32))
    assert newest_complete(both, 2, limit=19) == (OLD, (bytes(32), b"\1" * 32)), "of a run that went further once"
    assert newest_complete({"a": both["a"]}, 2, limit=30) == (OLD, (bytes(32), b"\1" * 32))
    assert newest_complete({"b": both["b"]}, 2, limit=30) is None
    other = {"a": parts((NEW, 0)), "b": parts(((20, b"o" * 32), 1))}
    assert newest_complete(other, 2, limit=30) is None, "parts of two histories are no checkpoint"


def test_a_checkpoint_of_which_a_part_could_not_be_had_comes_last_and_one_that_two_can_read_first() -> None:
    both = {"a": parts((OLD, 0), (OLD, 1), (NEW, 0), (NEW, 1)), "b": parts((OLD, 0), (OLD, 1))}
    bad = {**both, "a": {**both["a"], (NEW, 1): b"!" * 32}}
    assert newest_complete(bad, 2, limit=30) == (NEW, (bytes(32), b"!" * 32))
    assert newest_complete(bad, 2, limit=30, missed={b"!" * 32}) == (OLD, (bytes(32), b"\1" * 32))
    assert newest_complete({"a": parts((NEW, 0))}, 1, limit=30, missed={bytes(32)}) == (NEW, (bytes(32),)), (
        "none better"
    )
    invented = {**both, "c": {((25, b"?" * 32), stage): b"?" * 32 for stage in range(2)}}
    assert newest_complete(invented, 2, limit=30, missed={b"!" * 32}) == (OLD, (bytes(32), b"\1" * 32))
    wrong = {"_": {(OLD, 0): b"!" * 32}, **both, "c": both["b"]}
    assert newest_complete(wrong, 2, limit=19) == (OLD, (bytes(32), b"\1" * 32)), "what most say"


def test_the_stage_with_most_to_spare_gives_a_peer_and_never_its_last() -> None:
    def adopters(peers: dict[str, Load], work: tuple[float, ...]) -> dict[str, int]:
        return {m.peer: m.target for m in SWARM.assign(View(peers, work, stopped=True))}

    peers = {"a": Load(0), "b": Load(0), "c": Load(0), "d": Load(2), "e": Load(2)}
    assert adopters(peers, (1.0, 1.0, 1.0)) == {"a": 1}
    assert adopters(peers, (4.0, 1.0, 1.0)) == {"d": 1}, "three for four times the work are fewer"
    peers["b"] = Load(0, parts=frozenset({1}))
    assert adopters(peers, (1.0, 1.0, 1.0)) == {"b": 1}, "it has the part already"
    small = {p: Load(own.stage, targets=frozenset()) for p, own in peers.items()} | {
        "e": Load(2, targets=frozenset({1}))
    }
    assert adopters(small, (1.0, 1.0, 1.0)) == {"e": 1}
    assert adopters({"a": Load(0), "d": Load(2)}, (1.0, 1.0, 1.0)) == {}
    two = {"a": Load(0), "b": Load(0), "c": Load(0)}
    assert adopters(two, (1.0, 1.0, 9.0)) == {"a": 2, "b": 1}, "the stage with most work first"
    assert adopters({"a": Load(0), "b": Load(0)}, (1.0, 1.0, 9.0)) == {"a": 2}
    assert adopters({"a": Load(0), "new": Load(1)}, (1.0, 1.0)) == {}


def test_two_keep_a_part_on_places_of_their_own() -> None:
    peers = {"a": (0, "run"), "b": (0, "b"), "c": (1, "c"), "d": (1, "d"), "e": (1, "c"), "f": (2, "f")}
    for stage in range(3):
        kept = keepers(peers, stage, "run")
        assert len(kept) == 2
        assert all(peers[p][0] != stage and peers[p][1] != "run" for p in kept)
        assert len({peers[p][1] for p in kept}) == 2
        without = {p: at for p, at in peers.items() if p != kept[0]}
        assert kept[1] in keepers(without, stage, "run"), "who keeps it already goes on"
    assert keepers({p: (s, "run") for p, (s, _) in peers.items()}, 0, "run") == ()


def test_whichever_stage_is_lost_a_copy_of_each_part_is_left() -> None:
    """Every fleet of two and three stages with up to three peers each, the coordinator first in one of them."""
    for sizes in itertools.product((1, 2, 3), repeat=3):
        for stages in (sizes[:2], sizes):
            for home in range(len(stages)):
                at = {f"{s}{n}": (s, f"{s}{n}") for s, size in enumerate(stages) for n in range(size)}
                for lost, stage in itertools.product(range(len(stages)), repeat=2):
                    kept = {f"{home}0", *keepers(at, stage, f"{home}0")}
                    assert any(at[p][0] != lost for p in kept), (stages, home, lost, stage)


def test_a_branch_is_part_of_every_lineage_on_it_and_a_step_back_is_what_its_lineage_says() -> None:
    at = {"count": 1, "step": OLD[0], "base": OLD[1], "lost": (1,)}
    order = StepBack(**at, parts=(bytes(32), bytes(32)), moves=(("a", 1),))
    order.check(2, 100, 0, from_seed=False)
    assert count_of(order.lineage) == 1
    assert branch_of(hashed(branch_of(order.lineage), b"record")) == branch_of(order.lineage) > bytes(8)
    assert branch_of(branched(2, b"x")) > branch_of(branched(1, b"y"))
    for other in ({"step": 11}, {"moves": (("b", 1),)}, {"lost": (0,)}, {"parts": ()}, {"count": 2}):
        assert order.model_copy(update=other).lineage != order.lineage
    for wrong in (order, StepBack(**at, parts=(), moves=(("a", 7),))):
        with pytest.raises(ProtocolError, match="stages or steps that the run does not have"):
            wrong.check(3, 100, 0, from_seed=True)
    beginning = StepBack(**{**at, "step": 0}, parts=(), moves=())
    beginning.check(2, 100, 0, from_seed=True)
    for wrong in (beginning, order.model_copy(update={"parts": ()}), order.model_copy(update={"step": 101})):
        with pytest.raises(ProtocolError, match="stages or steps that the run does not have"):
            wrong.check(2, 100, 0, from_seed=False)
    with pytest.raises(ProtocolError, match="rollback 2000 of a run that has had 5"):
        order.model_copy(update={"count": 2000}).check(2, 100, 5, from_seed=False)


def test_people_are_told_once() -> None:
    view = RunView()
    event = SteppedBack(step=40, to=20, lost=[1], moves=["peer-3 to stage 1"], lineage="ab")
    assert [view.fold(event), view.fold(event)] == [True, False]
    said = "stage 1 lost all peers: the run steps back from step 40 to the checkpoint of step 20; peer-3 to stage 1"
    assert view.headline(event) == said


# fmt: off
QUICK: dict[str, Any] = {"checkpoint_every": 1, "adopt_after_s": 5.0}
LOST = [
    Scenario(101, (2, 2), 2, 5, 6, 0.01, (Fault(1.6, "kill", ("peer-1a",)), Fault(1.7, "kill", ("peer-1b",))), **QUICK),
    Scenario(102, (3, 1, 2), 2, 4, 6, 0.01, (Fault(2.6, "kill", ("peer-1a",)),), apart=True, **QUICK),
    Scenario(103, (2, 1), 2, 3, 6, 0.01, (Fault(1.2, "kill", ("peer-1a",)),), adopt_after_s=5.0),  # from the beginning
    Scenario(104, (1, 1), 1, 3, 6, 0.01, (Fault(1.5, "kill", ("peer-1a",)), Fault(30.0, "join", ("peer-1j",))), **QUICK),
]
# fmt: on


@pytest.mark.parametrize("scenario", LOST, ids=["shared", "apart", "beginning", "newcomer"])
def test_a_run_whose_stage_lost_all_peers_steps_back_and_ends_with_the_same_numbers(scenario: Scenario) -> None:
    outcome = play(scenario)
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert set(outcome.ends.values()) == {"finished"}
    assert outcome.of(SteppedBack)
    assert bool(outcome.of(StageEmpty)) == (scenario.seed == 104)


def test_a_part_that_no_disk_gives_costs_a_checkpoint_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers ended, and each further rollback chose the same checkpoint: its manifest names the part."""
    right = Folder.read_part

    def read_part(self: Folder, key: Key, stage: int) -> bytes:
        if (key.step, stage) == (3, 0):
            raise OSError(errno.EIO, "Input/output error")
        return right(self, key, stage)

    monkeypatch.setattr(Folder, "read_part", read_part)
    outcome = play(Scenario(101, (2, 1, 2), 2, 8, 6, 0.01, (Fault(5.0, "kill", ("peer-1a",)),), keep=3, **QUICK))
    assert set(outcome.ends.values()) == {"finished"}
    assert {e.to for e in outcome.of(SteppedBack)} == {3, 2}


def test_a_run_that_goes_back_in_vain_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went back to the same checkpoint every 68 seconds, without end."""

    def read_part(self: Folder, key: Key, stage: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Folder, "read_part", read_part)
    lost = Fault(5.0, "kill", ("peer-1a",))
    outcome = play(Scenario(101, (2, 1, 2), 2, 8, 6, 0.01, (lost,), given_weights=True, **QUICK))
    assert len(outcome.of(SteppedBack, "peer-0a")) > 2
    assert outcome.of(StageEmpty, "peer-0a")[0].lacks.startswith("and no complete checkpoint")
    assert all("gives this peer the stage's state" in outcome.ends[p] for p in ("peer-0a", "peer-0b", "peer-2b"))
    assert outcome.virtual_s < 2400


@pytest.mark.parametrize("stages", [(1, 2), (2, 2), (1, 1, 2)])
def test_the_stage_of_the_coordinator_is_lost_and_the_checkpoint_is_not(stages: tuple[int, ...]) -> None:
    """Each peer has a place of its own, and the coordinator has whole checkpoints in its."""
    gone = tuple(Fault(3.0, "kill", (f"peer-0{peer}",)) for peer in "ab"[: stages[0]])
    scenario = Scenario(106, stages, sum(stages), 6, 6, 0.01, gone, apart=True, **QUICK)
    outcome = play(scenario)
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.of(SteppedBack)[0].to > 0
    assert set(outcome.ends.values()) == {"finished"}


def test_a_stage_that_was_only_away_joins_the_new_branch() -> None:
    frozen = Scenario(
        105, (2, 1), 2, 30, 6, 0.01, (Fault(2.0, "freeze", ("peer-1a",), 20.0),), checkpoint_every=1, adopt_after_s=5.0
    )
    outcome = play(frozen)
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.ends["peer-1a"] == "finished"
    assert outcome.of(SteppedBack, "peer-1a")


def test_nobody_goes_back_to_what_a_hanging_store_has() -> None:
    """All peers dropped their weights, and waited for parts that nobody could read. The peer that was cut off came back
    five seconds later. Found by 'python -m proofs fuzz --kind lie' (seed 14382)."""
    faults = (Fault(1.1, "blackhole", ("peer-1a",), 40.9), Fault(4.2, "disk", ("peer-1a",), FOR_EVER_S, how="hangs"))
    outcome = play(Scenario(14382, (1, 1, 2), 1, 2, 2, 0.0, faults, checkpoint_every=1, disk_s=0.01))
    assert not outcome.of(SteppedBack)
    assert {e.t for e in outcome.of(StepApplied, step=2)} == {42.0}
    assert next(e.lacks for e in outcome.of(StageEmpty, "peer-0a")).startswith("and no complete checkpoint")


@pytest.mark.parametrize(
    "world",
    [
        Scenario(
            0,
            (2, 3),
            2,
            2,
            1,
            0.0,
            (
                Fault(0.4, "freeze", ("peer-1c",), for_s=10.5, how=SUSPENDED),
                Fault(0.6, "freeze", ("peer-1b",), for_s=6.8, how=SUSPENDED),
                Fault(1.3, "freeze", ("peer-0b",), for_s=32.8, how=SUSPENDED),
                Fault(1.5, "join", ("peer-1n",)),
            ),
        ),
        Scenario(
            0,
            (3, 3, 2),
            8,
            2,
            2,
            0.0,
            (
                Fault(0.2, "freeze", ("peer-1b",), for_s=12.6, how=SUSPENDED),
                Fault(0.3, "freeze", ("peer-0c",), for_s=23.0, how=SUSPENDED),
                Fault(0.7, "freeze", ("peer-2b",), for_s=16.7, how=SUSPENDED),
            ),
        ),
    ],
)
def test_machines_that_wake_after_the_run_has_ended_at_two_steps_end_together(world: Scenario) -> None:
    """The only peer of a stage is at the next step, by a record whose gradient at the other stage ended with the run."""
    outcome = play(world)
    assert outcome.violations == [], "\n".join(readable(outcome))


def test_who_moves_to_a_stage_that_dies_does_not_make_it_count_as_served() -> None:
    """A newcomer took the answer to its introduction for a sign that the stage has a peer with the state: the run stood
    for 140 seconds, and the peer that had moved ended. Found by 'python -m proofs fuzz --kind "without data"' (seed
    3012)."""
    faults = (Fault(1.0, "move", ("peer-1a",)), Fault(1.9, "kill", ("peer-2a",)), Fault(2.5, "join", ("peer-1n",)))
    outcome = play(Scenario(3012, (1, 2, 1), 4, 5, 5, 0.1, faults, apart=True, **QUICK))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.of(SteppedBack, "peer-1a")
    assert outcome.stood_s < 10


def test_who_waited_for_a_trainer_almost_in_vain_gives_it_time() -> None:
    """The next look after the trainer came was the last. Found by 'python -m proofs fuzz --kind lie' (seed 14003)."""
    naps = (("peer-1b", 50.6, 980.5), ("peer-0b", 99.81311, 2806.18885), ("peer-1d", 143.4, 1777.83175))
    faults = tuple(Fault(at_s, "freeze", (who,), for_s, how=SUSPENDED) for who, at_s, for_s in naps)
    outcome = play(Scenario(14003, (2, 4), 2, 1, 2, 0.0, faults, longer=318.38629, slower=318.38629))
    assert outcome.violations == [], "\n".join(readable(outcome))


def test_a_replica_too_far_behind_to_be_of_use_soon_counts_as_without_a_state() -> None:
    """Nobody has the weights of its step any more, so to try that step again and again only delays the rollback. It tries
    once or twice, before all other peers have answered."""
    faults = (Fault(0.5, "cut", ("peer-0a",), 10.0), Fault(9.0, "kill", ("peer-0b",)))
    outcome = play(Scenario(1, (2, 1), 3, 11, 4, 0.05, faults, checkpoint_every=1))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.of(SteppedBack, "peer-0a")
    assert len(outcome.of(StateKept)) <= 2


def test_when_the_collector_dies_the_run_ends_with_a_checkpoint() -> None:
    for apart in (False, True):
        outcome = play(
            Scenario(106, (2, 1), 2, 3, 6, 0.01, (Fault(1.2, "kill", ("peer-0a",)),), checkpoint_every=1, apart=apart)
        )
        assert outcome.violations == [], "\n".join(readable(outcome))
        assert outcome.virtual_s < 60
        assert outcome.of(CheckpointWritten, step=3)
        assert not outcome.of(CheckpointWritten, "peer-0a", step=3)


@pytest.mark.parametrize("how", ["here", "near", "far", "stages"])
def test_parts_that_one_member_makes_up_do_not_end_a_run_whose_stage_was_lost(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody had the parts, and all ended; or no checkpoint seemed whole."""
    right = Rollback._on_standing

    async def lie(self: Rollback, sender: str, ask: AskStanding) -> StandsAt:
        stands = await right(self, sender, ask)
        if self._ctx.net.peer_id != "peer-2b":
            return stands
        if how == "stages":
            return stands.model_copy(
                update={"parts": (*stands.parts, *((s, at, 9, d) for s, at, _, d in stands.parts))}
            )
        step = {"here": 2, "near": 4, "far": 1 << 40}[how]
        parts = tuple((step, b"x" * 32, stage, bytes([stage]) * 32) for stage in range(3))
        return stands.model_copy(update={"parts": parts, "step": step})

    monkeypatch.setattr(Rollback, "_on_standing", lie)
    outcome = play(Scenario(101, (2, 1, 2), 2, 6, 6, 0.01, (Fault(2.6, "kill", ("peer-1a",)),), apart=True, **QUICK))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert {e.to for e in outcome.of(SteppedBack)} == ({2, 1} if how == "here" else {1})


@pytest.mark.parametrize("how", ["order", "early", "last", "branch"])
def test_a_rollback_that_one_member_makes_up_while_a_stage_is_away_does_not_end_the_run(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All obeyed, and had no state left that anyone could load. No rollback could follow one with the last number."""
    right, standing, branch = Rollback.watch, Rollback._on_standing, bytes(7) + b"\x09"
    parts = tuple(bytes([stage]) * 32 for stage in range(3))
    count, step = 256**COUNT - 1 if how == "last" else 1, 0 if how == "early" else 2
    order = StepBack(count=count, step=step, base=b"x" * 32, parts=parts, moves=(), lost=(1,))

    async def forge(self: Rollback) -> None:
        ctx = self._ctx
        while 1 not in self.without_peers():
            await ctx.clock.sleep(0.5)
        if how == "branch":
            return await ctx.tell(ctx.roster.everyone(), Presence(lineage=branch + b"x" * 24, step=2))
        await asyncio.gather(*(self._tell(p, order) for p in ctx.roster.everyone()))

    async def watch(self: Rollback) -> None:
        if self._ctx.net.peer_id == "peer-2b" and not forged:
            forged.append(self._ctx.spawn(forge(self), "lies"))
        await right(self)

    async def stands(self: Rollback, sender: str, ask: AskStanding) -> StandsAt:
        found = await standing(self, sender, ask)
        if (self._ctx.net.peer_id, how) != ("peer-2b", "branch"):
            return found
        its = self._ctx.roster.member(sender).stage
        return found.model_copy(update={"branch": branch, "stage": its, "state": State.TRAINING})

    forged = list[Any]()
    monkeypatch.setattr(Rollback, "watch", watch)
    monkeypatch.setattr(Rollback, "_on_standing", stands)
    cut = Fault(2.6, "cut", ("peer-1a",), 12.0)
    outcome = play(Scenario(101, (2, 1, 2), 2, 6, 6, 0.01, (cut,), apart=True, checkpoint_every=1))
    assert set(outcome.ends.values()) == {"finished"}
    back = {e.to for e in outcome.of(SteppedBack)}
    assert back == {"order": {2, 1}, "early": {0, 1}}.get(how, set())


def test_nobody_obeys_one_that_is_not_in_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of the hub has the ticket, and no more."""
    parts = tuple(bytes([stage]) * 32 for stage in range(2))
    order = StepBack(count=1, step=1, base=b"x" * 32, parts=parts, moves=(), lost=(1,))
    run = LyingClient._call
    told = list[str]()

    async def forge(net: Network) -> None:
        while True:
            await asyncio.sleep(0.5)
            for peer in ("peer-0a", "peer-0b"):
                with contextlib.suppress(NetworkError):
                    await net.call(peer, StepBack.KIND, order.pack(), timeout_s=5.0)
                    told.append(peer)

    async def lie(self: LyingClient, session: int) -> None:
        lies = self._tasks.spawn(forge(self._net), "lies")
        try:
            await run(self, session)
        finally:
            lies.cancel()

    monkeypatch.setattr(LyingClient, "_call", lie)
    faults = (Fault(0.0, "lie", ("client-0a",), FOR_EVER_S, how="nothing"), Fault(3.0, "cut", ("peer-1a",), 8.0))
    world = Scenario(1, (2, 1), 2, 6, 6, 0.01, faults, clients=("client-0a",), sequences=4, checkpoint_every=1)
    outcome = play(world)
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert told
    assert not outcome.of(SteppedBack)


def test_a_checkpoint_of_a_model_that_was_cut_otherwise_is_not_gone_back_to(monkeypatch: pytest.MonkeyPatch) -> None:
    right, four = Folder.complete, {stage: PartFacts(1, bytes([stage]) * 32) for stage in range(4)}
    monkeypatch.setattr(Folder, "complete", lambda self: {**right(self), Key(1, b"\xff" * 32): four})
    outcome = play(Scenario(101, (2, 1, 2), 2, 4, 6, 0.01, (Fault(1.6, "kill", ("peer-1a",)),), **QUICK))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert len(outcome.of(SteppedBack)) == 4, "once"


@pytest.mark.parametrize("liar", ["client-0a", "peer-1b"])
def test_who_says_early_that_the_run_has_ended_costs_it_no_checkpoint(
    liar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the collector died, all believed what they had heard in the first step, and deleted the parts."""
    right, said = Service.run, LyingClient._do

    async def lie(net: Network) -> None:
        await asyncio.sleep(0.5)
        for peer in ("peer-0b", "peer-1a"):
            with contextlib.suppress(NetworkError):
                await net.call(peer, Finished.KIND, Finished(written=True).pack(), timeout_s=5.0)

    async def run(self: Service) -> bool:
        make = self._make

        async def made(joining: bool, back: StepBack | None) -> Peer:
            peer = await make(joining, back)
            if peer.roster.own.id == liar:
                peer._ctx.spawn(lie(peer._ctx.net), "lies")
            return peer

        self._make = made
        return await right(self)

    async def do(self: LyingClient, message: Give, tensors: list[Encoded], session: int) -> None:
        if liar == "client-0a" and not heard:
            heard.append(True)
            await lie(self._net)
        await said(self, message, tensors, session)

    heard = list[bool]()
    monkeypatch.setattr(Service, "run", run)
    monkeypatch.setattr(LyingClient, "_do", do)
    faults = (Fault(0.0, "lie", ("client-0a",), FOR_EVER_S, how="nothing"), Fault(1.0, "kill", ("peer-0a",)))
    clients = tuple(f"client-{stage}{letter}" for stage in (0, 1) for letter in "ab")
    world = Scenario(1, (2, 2), 2, 6, 6, 0.01, faults, clients=clients, sequences=4, apart=True, disk_s=3.0)
    outcome = play(world)
    assert outcome.of(CheckpointWritten, step=6)
    assert outcome.virtual_s < 60


@pytest.mark.parametrize("plant", [planted.without_moments, planted.the_beginning_is_near_enough])
def test_a_planted_bug_in_stepping_back_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(play(scenario).violations for scenario in LOST)
