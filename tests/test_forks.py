"""Partitions whose sides both go on end in one lineage."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muletrain.errors import NetworkError
from muletrain.events import LineageLeft, StateKept, StateMissed, StepApplied, SteppedBack
from muletrain.policy.fork_choice import LEAD, Chain, forked_at, gives_way
from muletrain.runtime.core.messages import Message
from muletrain.runtime.core.times import AGAIN_S
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.roster import Roster
from muletrain.runtime.members.row import Statements
from muletrain.runtime.microbatch.position import Behind, Position
from muletrain.runtime.peer.peer import Peer
from muletrain.runtime.recovery.forks import STAY, Forks
from muletrain.runtime.recovery.messages import AskStay, History
from muletrain.runtime.step.exchange import Exchange
from muletrain.runtime.transfer.donor import Receiver
from proofs.play import play
from proofs.scenario import FOR_EVER_S, Fault, Scenario, planned
from proofs.verdict import Outcome, readable

pytestmark = pytest.mark.timeout(400)


def chain(common: int, own: str, *, over: bool = False) -> Chain:
    """A history that shares its first ``common`` lineages with others."""
    lineages = [b"=%d" % k for k in range(common)] + [b"%c%d" % (ord(c), k) for k, c in enumerate(own)]
    return Chain(len(lineages) - 1, tuple(lineages), over)


def test_histories_fork_where_they_first_differ() -> None:
    assert forked_at(chain(3, "aa"), chain(3, "bbb")) == 3
    assert forked_at(chain(3, ""), chain(3, "bbb")) is None, "merely behind"
    assert forked_at(Chain(9, (b"x",)), chain(3, "bbb")) is None, "too far back to be remembered"


def test_the_longer_one_stays_then_the_lower_hash_at_the_fork() -> None:
    assert gives_way(chain(3, "a"), chain(3, "b" * (1 + LEAD)), stalled=False)
    assert not gives_way(chain(3, "a"), chain(3, "bb"), stalled=False)
    assert gives_way(chain(3, "bb"), chain(3, "a"), stalled=False)


def test_what_has_ended_stays_and_a_side_that_stands_still_goes() -> None:
    assert gives_way(chain(3, "a"), chain(3, "b", over=True), stalled=False)
    assert not gives_way(chain(3, "b", over=True), chain(3, "aaaaa"), stalled=True)
    assert gives_way(chain(3, "aaaaa"), chain(3, "b"), stalled=True)


@given(st.integers(0, 5), st.integers(1, 6), st.integers(1, 6))
def test_one_side_stays_and_one_goes(common: int, a: int, b: int) -> None:
    one, other = chain(common, "a" * a), chain(common, "b" * b)
    assert gives_way(one, other, stalled=False) != gives_way(other, one, stalled=False)
    assert not gives_way(one, one, stalled=True)


SLOW = (Fault(0.0, "slow", ("peer-0b",), 100.0), Fault(0.0, "slow", ("peer-1b",), 100.0))


def partitioned(at_s: float, for_s: float, *more: Fault, steps: int = 12, kind: str = "partition") -> Outcome:
    """Two stages of two replicas, one of each stage on either side; a trainer on either, too."""
    faults = (Fault(at_s, kind, ("peer-0a", "peer-1a"), for_s), *more)
    return play(Scenario(1, (2, 2), 2, steps, 4, 0.01, faults))


def went_over(outcome: Outcome) -> dict[str, float]:
    """Who left its side's history, and when [virtual s]."""
    return {e.peer: e.t for e in outcome.events if isinstance(e, LineageLeft)}


@pytest.mark.parametrize(("kind", "for_s"), [("partition", 3.0), ("blackhole", 9.0)])
def test_both_sides_go_on_and_end_in_one_lineage(kind: str, for_s: float) -> None:
    at_s = 1.5
    outcome = partitioned(at_s, for_s, kind=kind)
    assert outcome.violations == [], "\n".join(readable(outcome))
    apart = [e.t for e in outcome.events if isinstance(e, StepApplied) and e.step == 3 and e.peer.endswith("a")]
    assert max(apart) < at_s + for_s, "both went on"
    left = went_over(outcome)
    assert set(left) in ({"peer-0a", "peer-1a"}, {"peer-0b", "peer-1b"})
    assert max(left.values()) < at_s + for_s + 3.0
    assert len(set(outcome.lineages.values())) == 1
    assert set(outcome.ends.values()) == {"finished"}


def test_a_member_that_asks_for_promises_again_and_again_keeps_no_two_histories_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that has promised to stay goes over to nobody: both sides trained to the end."""
    right = Forks.__init__

    def lies(self: Forks, ctx: Context, position: Position, receiver: Receiver) -> None:
        right(self, ctx, position, receiver)

        async def ask(peer: str) -> None:
            with contextlib.suppress(NetworkError):
                answer = await ctx.net.call(peer, History.KIND, History.of(position.chain).pack(), timeout_s=5.0)
                chain = History.unpack(answer).chain
                question = AskStay(step=chain.step, lineage=chain.lineages[-1], promise=True)
                await question.ask(ctx.net, peer, timeout_s=5.0)

        async def ask_all() -> None:
            while True:
                await ctx.clock.sleep(0.5)
                for peer in ctx.roster.everyone():
                    ctx.spawn(ask(peer), "asks")

        if ctx.net.peer_id == "peer-1a":
            ctx.spawn(ask_all(), "lies")

    monkeypatch.setattr(Forks, "__init__", lies)
    outcome = partitioned(1.5, 3.0, steps=28)
    assert all("two lineages" in why for why in outcome.violations), "\n".join(readable(outcome))
    assert went_over(outcome).keys() == {"peer-0b", "peer-1b"}
    assert max(went_over(outcome).values()) < 1.5 + 3.0 + STAY * AGAIN_S
    assert len(set(outcome.lineages.values())) == 1


ALIKE = {
    "two stages": Scenario(
        86150,
        (2, 2),
        2,
        18,
        4,
        0.0,
        (Fault(0.1377339077295872, "partition", ("peer-0b", "peer-1a"), 1.8),),
        checkpoint_every=1,
    ),
    "planned pipelines": Scenario(  # they trained in two lineages until the run ended
        260335,
        (2, 2, 2),
        2,
        24,
        6,
        0.0,
        (Fault(0.9495567194304642, "partition", ("peer-0a", "peer-1a", "peer-2a"), 5.415441606821496),),
        overrides=(*planned((2, 2, 2), "gpipe"), "optimizer.name=lamb", "optimizer.lr=1e-3"),
    ),
}


@pytest.mark.parametrize("world", ALIKE.values(), ids=ALIKE)
def test_sides_that_end_their_steps_at_the_same_moments_end_in_one_lineage(world: Scenario) -> None:
    """They meet when both end a step, so that a history is judged that is longer by then, and ours is, too."""
    assert play(world).violations == []


def test_the_side_that_did_more_steps_stays() -> None:
    outcome = partitioned(1.5, 8.0, *SLOW, steps=16)
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert set(went_over(outcome)) == {"peer-0b", "peer-1b"}


def test_a_side_that_meets_one_that_has_finished_takes_its_result() -> None:
    """Who collects is frozen when the others are done, so that they wait for it."""
    outcome = partitioned(0.4, 12.0, *SLOW, Fault(4.0, "freeze", ("peer-0a",), 9.0), steps=6)
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert len(set(outcome.lineages.values())) == 1
    assert set(outcome.ends.values()) == {"finished"}


@pytest.mark.parametrize(("replicas", "liar"), [(3, "peer-0a"), (4, "peer-0d")])
def test_in_a_run_of_one_stage_one_member_alone_lures_nobody_into_a_longer_history(replicas: int, liar: str) -> None:
    """Others took its state, with other weights than a single process's."""
    lies = Fault(0.3, "lie", (liar,), FOR_EVER_S, how="history")
    outcome = play(Scenario(0, (replicas,), 2, 6, 4, 0.02, (lies,)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert went_over(outcome) == {}


def test_in_a_run_of_one_stage_one_peer_alone_gives_way_to_two_that_did_fewer_steps() -> None:
    slow = Fault(0.0, "slow", ("peer-0a",), 100.0)
    outcome = play(Scenario(16, (3,), 3, 24, 4, 0.01, (slow, Fault(1.0, "partition", ("peer-0b",), 6.0))))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert went_over(outcome).keys() == {"peer-0b"}
    assert len(set(outcome.lineages.values())) == 1


@pytest.mark.parametrize("kind", ["partition", "blackhole"])
def test_a_side_that_lacks_a_stage_steps_back_alone_and_joins_the_longer_history_again(kind: str) -> None:
    faults = (Fault(3.0, kind, ("peer-0a", "peer-0b"), 20.0),)
    outcome = play(Scenario(1, (3, 2), 3, 40, 4, 0.01, faults, checkpoint_every=1, adopt_after_s=4.0, apart=True))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert {e.peer for e in outcome.events if isinstance(e, SteppedBack)} == {"peer-0a", "peer-0b"}
    assert went_over(outcome).keys() == {"peer-0a", "peer-0b"}
    applied = [e.step for e in outcome.events if isinstance(e, StepApplied) and e.peer == "peer-0c"]
    assert len(applied) == len(set(applied)) == 40, "no step was lost"
    assert set(outcome.ends.values()) == {"finished"}


def test_a_peer_that_could_not_go_over_stands_by_what_it_attested_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It made its round again, with other bits under the same name, so that its side had two records of the step, and
    stood still until it gave up. Found by 'python -m proofs fuzz' (seed 438)."""
    said: dict[tuple[str, bytes], set[tuple[bytes, ...]]] = {}
    held = []
    positions: dict[str, Position] = {}
    tell, run = Context.tell, Peer.run

    async def known(self: Peer) -> bool:
        positions[self.roster.own.id] = self.position
        return await run(self)

    async def told(self: Context, peers: tuple[str, ...], message: Message) -> None:
        me = self.net.peer_id
        if isinstance(message, Statements) and (entry := message.entry) is not None:
            said.setdefault((me, entry.round), set()).add(tuple(s.content for s in entry.shards))
        await tell(self, peers, message)
        if isinstance(message, Statements) and message.entry is not None and message.step == 1 and me not in held:
            held.append(me)
            positions[me].interrupt(Behind("the others' history stays", rival=True))

    async def not_had(self: Forks) -> None:
        return None

    monkeypatch.setattr(Peer, "run", known)
    monkeypatch.setattr(Context, "tell", told)
    monkeypatch.setattr(Forks, "go_over", not_had)
    for delayed in ("false", "true"):
        held.clear()
        outcome = play(Scenario(1, (1, 1), 1, 3, 8, 0.1, (), overrides=(f"optimizer.delayed={delayed}",)))
        assert {len(contents) for contents in said.values()} == {1}
        assert outcome.violations == [], "\n".join(readable(outcome))
        assert sorted(held) == ["peer-0a", "peer-1a"]
        assert set(outcome.ends.values()) == {"finished"}
        assert outcome.virtual_s < 60.0


def replicas_apart(cut_s: float) -> Scenario:
    """Shortly before step 1 ends, both replicas of stage 1 lose sight of each other: each finishes it alone, and nobody of
    the other stages does."""
    return Scenario(
        300,
        (3, 2, 1),
        steps=2,
        trainers=2,
        microbatches=8,
        delay_s=0.1,
        faults=(
            Fault(0.882, "disk", ("peer-2a",), for_s=1e6, how="slow"),
            Fault(0.968, "kill", ("peer-0b",), on="reduced", nth=3),
            Fault(2.154, "join", ("peer-0j0",)),
            Fault(cut_s, "cut", ("peer-1a", "peer-1b"), for_s=18.46),
        ),
        clients=("client-0a", "client-2a", "client-2b", "client-2c", "client-2d"),
        sequences=2,
        skew=0.1,
        disk_s=0.01,
    )


def test_two_records_of_one_peer_each_are_no_sign_that_the_run_has_gone_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roster, "voters", Roster.stage)  # as if nobody else heard them
    outcome = play(replicas_apart(1.75))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert len(went_over(outcome)) == 1
    assert not [e for e in outcome.events if isinstance(e, StateMissed | StateKept)]


def test_a_stage_that_takes_itself_to_be_behind_keeps_its_state_if_nobody_has_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def lured(exchange: Exchange, first: str) -> bool:
        await exchange._sync(first)
        return True

    monkeypatch.setattr(Exchange, "went_on", lured)
    monkeypatch.setattr(Roster, "voters", Roster.stage)  # as if nobody else heard them
    kept = list[StateKept]()
    for cut_s in (1.65, 1.7, 1.75, 1.9):  # in some of these moments it takes itself to be behind
        outcome = play(replicas_apart(cut_s))
        assert outcome.violations == [], "\n".join(readable(outcome))
        kept += outcome.of(StateKept)
    assert kept


def test_who_hears_of_two_records_of_as_many_chooses_one() -> None:
    """The only replica of stage 1 took itself to be behind both halves of stage 0; after 105 s the run went back."""
    faults = (
        Fault(0.57, "cut", ("peer-0a", "peer-0b"), for_s=3.0, on="entry"),
        Fault(2.64, "damage", ("peer-1a",), for_s=8.0, on="seal", nth=2),
    )
    outcome = play(Scenario(13200, (2, 1), 2, 6, 6, 0.05, faults, queue_s=0.25))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert went_over(outcome)
    assert not outcome.of(SteppedBack)
    assert outcome.longest < 12.0


def test_who_was_cut_off_for_a_moment_follows_those_that_are_further_on() -> None:
    """One of the two others was a step ahead, and one two steps, without the record: as if there were two records."""
    outcome = play(Scenario(5, (2, 1), 1, 14, 6, 0.1, (Fault(4.4, "cut", ("peer-0b",), for_s=1.6),)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert len(outcome.of(StepApplied, "peer-0b")) > 10
